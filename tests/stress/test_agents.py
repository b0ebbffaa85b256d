"""The oracle of `agents` on planted histories, and the client's HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGSTOP

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrt.actors import boot
from pdrt.errors import PdrtError, Refused, TransferError
from stress.cascades.agents import cascade as agents
from stress.cascades.agents import client
from stress.cascades.agents.client import digest, rid_of
from stress.cascades.agents.oracle import judge
from stress.cascades.agents.wire import Answer, Broken, Events, code_of, post
from stress.cascades.agents.words import (
    CODES,
    ENGINE,
    FIRST_PROMPTS,
    OTHER,
    SUPERVISOR,
    Kind,
    code_index,
)
from stress.cascades.history import Writer, read_all
from stress.cascades.piece import Outcome, Piece
from stress.cascades.words import LISTENER, LISTENER_STANDBY, WORKER, WORKER_STANDBY

BOUND_S = 10.0
SECOND = 1_000_000_000
NAME = "clients-2-1"  # the third process of clients, first life


@dataclass(frozen=True)
class Did:
    """What the driver wrote down."""

    kind: Kind
    at_s: float
    row: int = 0
    number: int = SIGKILL  # of a signal
    took_s: float = 0.0


def struck(row: int, at_s: float = 1.0, number: int = SIGKILL) -> Did:
    return Did(Kind.STRUCK, at_s, row, number)


def back(row: int, at_s: float, took_s: float) -> Did:
    return Did(Kind.SERVES, at_s, row, took_s=took_s)


KILLED = Did(Kind.KILLED, 3.0)


def judged(
    folder: Path, *records: tuple[Kind, float, int], driver: tuple[Did, ...] = ()
) -> Outcome:
    """Records of one request: kind, second, c."""
    asker = Writer(folder / f"{NAME}.history")
    for kind, at_s, c in records:
        asker.append(kind, 7, 10, 200, c, ns=int((100 + at_s) * SECOND))
    asker.close()
    writer = Writer(folder / "driver.history")
    for did in driver:
        c = int(did.took_s * SECOND) or did.number
        a, b = (2, 1) if did.kind == Kind.KILLED else (0, 1234)
        writer.append(did.kind, did.row, a, b, c, int((100 + did.at_s) * SECOND))
    writer.close()
    outcome = Outcome(cascade="agents", seed=1)
    judge(read_all(folder), BOUND_S, outcome)
    return outcome


def failed(code: str) -> tuple[Kind, float, int]:
    return (Kind.FAILED, 2.0, code_index(code))


ASKED, EXIT = (Kind.ASKED, 0.0, 1), (Kind.EXIT, 20.0, 0)
FIRST, FAILED = (Kind.FIRST, 1.0, 0), failed("process_lost")
ABORT, ABORT_OF_NOTHING = (Kind.ABORTED, 1.0, 1), (Kind.ABORTED, 1.0, 0)
CUT = failed("broken")


def test_requests_that_end_as_they_may_are_no_violations(tmp_path):
    for number, (records, driver) in enumerate(
        [
            ((ASKED, FIRST, (Kind.DONE, 2.0, 0), EXIT), ()),
            ((ASKED, (Kind.LEFT, 1.0, 0), EXIT), ()),
            ((ASKED, ABORT, (Kind.DONE, 1.1, 1), EXIT), ()),
            ((ASKED, ABORT, failed("aborted"), EXIT), ()),
            ((ASKED, failed("aborted"), (Kind.ABORTED, 2.1, 1), EXIT), ()),
            ((ASKED, ABORT, failed("prefill_unavailable"), EXIT), ()),
            ((ASKED, FAILED, EXIT), (struck(WORKER),)),
            ((ASKED, FAILED, EXIT), (struck(WORKER, -2.0), back(WORKER, -1.5, 0.5))),
            ((ASKED, FAILED, EXIT), (struck(WORKER, -9.0), back(WORKER, 0.1, 9.1))),
            ((ASKED, FAILED, EXIT), (Did(Kind.RESTARTED, 2.5, WORKER),)),
            ((ASKED, FAILED, EXIT), (Did(Kind.RESTARTED, 2.5, LISTENER),)),
            ((ASKED, FAILED, EXIT), (struck(LISTENER), back(LISTENER, 2.1, 1.1))),
            ((ASKED, FAILED, EXIT), (struck(LISTENER),)),
            ((ASKED, CUT, EXIT), (struck(ENGINE),)),
            ((ASKED, FIRST, CUT, EXIT), (struck(ENGINE, 1.5),)),
            ((ASKED, failed("unreadable"), EXIT), (struck(SUPERVISOR),)),
            ((ASKED, FIRST), (KILLED,)),
            ((ASKED,), (KILLED,)),
            ((EXIT,), ()),
        ]
    ):
        outcome = judged(tmp_path / str(number), *records, driver=driver)
        assert outcome.violations == [], (records, driver)
        assert set(outcome.zeros) >= {"requests without an end", "first answers that differ"}
        assert all(outcome.counts[name] == 0 for name in outcome.zeros)
    assert outcome.counts["requests"] == 0


WORKER_DIES = (struck(WORKER),)
UNTYPED_ERROR, CAUSELESS = "without a typed error", "without a cause"
LISTENER_DIES_TWICE = (
    struck(LISTENER, -9.0, SIGSTOP),
    back(LISTENER, -4.0, 5.0),
    struck(LISTENER),
    back(LISTENER, 1.2, 0.2),
)
PLANTED = {
    "nobody sees its end": ("without an end", (ASKED, EXIT), ()),
    "it has no end, and its client was killed later": (
        "without an end",
        (ASKED, FIRST, EXIT),
        (Did(Kind.KILLED, 30.0),),
    ),
    "late": ("over the bound", (ASKED, (Kind.DONE, BOUND_S + 1, 0), EXIT), ()),
    "hung": ("over the bound", (ASKED, (Kind.HUNG, 1.0, 0), EXIT), ()),
    "differs": ("that differ", (ASKED, (Kind.DONE, 2.0, 0), (Kind.DIFFERS, 2.0, 0), EXIT), ()),
    "a client ends by itself": ("nobody killed it", (ASKED, (Kind.DONE, 2.0, 0)), ()),
    "a code of ours that no client may see": (
        UNTYPED_ERROR,
        (ASKED, (Kind.FAILED, 2.0, OTHER), EXIT),
        WORKER_DIES,
    ),
    "cut, and a worker died": (UNTYPED_ERROR, (ASKED, CUT, EXIT), WORKER_DIES),
    "no code, and a worker died": (UNTYPED_ERROR, (ASKED, failed("unreadable"), EXIT), WORKER_DIES),
    "cut, and aborted": (UNTYPED_ERROR, (ASKED, ABORT, CUT, EXIT), ()),
    "cut before the engine dies": (UNTYPED_ERROR, (ASKED, CUT, EXIT), (struck(ENGINE, 2.5),)),
    "asked and cut after it died": (UNTYPED_ERROR, (ASKED, CUT, EXIT), (struck(ENGINE, -0.5),)),
    "cut, and an engine stops": (
        UNTYPED_ERROR,
        (ASKED, CUT, EXIT),
        (struck(ENGINE, 1.0, SIGSTOP),),
    ),
    "nothing happened": (CAUSELESS, (ASKED, FAILED, EXIT), ()),
    "long ago and later": (
        CAUSELESS,
        (ASKED, FAILED, EXIT),
        (struck(WORKER, -9.0), back(WORKER, -8.5, 0.5), struck(WORKER, 9.0)),
    ),
    "a worker standby died": (CAUSELESS, (ASKED, FAILED, EXIT), (struck(WORKER_STANDBY),)),
    "a listener standby stopped": (
        CAUSELESS,
        (ASKED, FAILED, EXIT),
        (struck(LISTENER_STANDBY, 1.0, SIGSTOP),),
    ),
    "a listener was back at once": (
        CAUSELESS,
        (ASKED, FAILED, EXIT),
        (struck(LISTENER), back(LISTENER, 1.2, 0.2)),
    ),
    "a listener was back at once, and had been away": (
        CAUSELESS,
        (ASKED, FAILED, EXIT),
        LISTENER_DIES_TWICE,
    ),
    "its KV was on decode": (CAUSELESS, (ASKED, FIRST, FAILED, EXIT), (struck(WORKER, 1.5),)),
    "the abort found nothing": (
        CAUSELESS,
        (ASKED, ABORT_OF_NOTHING, failed("aborted"), EXIT),
        (),
    ),
    "one abort found nothing": (CAUSELESS, (ASKED, ABORT_OF_NOTHING, FAILED, EXIT), ()),
    "aborted, and lost": (CAUSELESS, (ASKED, ABORT, FAILED, EXIT), ()),
    "aborted by nobody": (CAUSELESS, (ASKED, failed("aborted"), EXIT), WORKER_DIES),
    "ends early for nobody": (
        CAUSELESS,
        (ASKED, ABORT_OF_NOTHING, (Kind.DONE, 2.0, 1), EXIT),
        WORKER_DIES,
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(tmp_path, name):
    words, records, driver = PLANTED[name]
    outcome = judged(tmp_path, *records, driver=driver)
    assert len([v for v in outcome.violations if words in v]) == 1, outcome.violations


def test_rows_are_those_of_pdrt():
    """The oracle writes them down a second time."""
    assert (SUPERVISOR, ENGINE) == (boot.SUPERVISOR_ROW, boot.FIRST_ENGINE_ROW)


def test_no_id_of_a_request_begins_with_another():
    """An abort names what it ends by how its id begins."""
    assert len({len(rid_of(n)) for n in (1, 1 << 24 | 256, 1 << 40 | 1 << 24 | 5, 29 << 40)}) == 1


class _Slow:
    """An engine whose answer to an abort comes after the request's own."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def post(self, *_asked: object) -> tuple[int, bytes]:
        self.over.set()
        for _turn in range(20):  # turns of the loop: the request's end is seen before
            await asyncio.sleep(0)
        return 200, b'{"aborted":1}'


def test_what_an_abort_found_is_noted_though_the_request_ends_first(tmp_path, monkeypatch):
    told = client.Told(
        router_port=1,
        engine_ports=(1, 1),
        model="",
        seed=1,
        first=0,
        clients=1,
        life=1,
        history="",
        stop_file="",
        hang_s=10.0,
        references=(0,) * len(FIRST_PROMPTS),
    )
    slow = _Slow()

    async def talk(*_: object) -> tuple[int, str]:
        await slow.over.wait()
        return 503, "aborted"

    monkeypatch.setattr(client, "post", slow.post)
    monkeypatch.setattr(client, "LEAVES", 0.0)
    monkeypatch.setattr(client, "ABORTS", 1.0)
    monkeypatch.setattr(client, "MEDDLES_S", 0.0)
    writer = Writer(tmp_path / f"{NAME}.history")
    one = client.Client(told, 10, writer)
    monkeypatch.setattr(one, "_talk", talk)
    assert asyncio.run(one._turn(0)) is False
    writer.close()
    kinds = set(read_all(tmp_path)[NAME]["kind"].tolist())
    assert kinds == {Kind.ASKED, Kind.ABORTED, Kind.FAILED}


class Looked:
    """Both trees, as they are at each look."""

    def __init__(self, *looks: str) -> None:
        self._looks = list(looks)

    def in_flight(self) -> str:
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]


@pytest.mark.parametrize(
    ("looks", "words"),
    [
        (("",), ""),
        (("rooms", "pages", ""), ""),
        (("pages",), "in flight 0.2 s after"),
        (("rooms", "", "", "pages"), "in flight again"),
    ],
)
def test_nothing_may_be_in_flight_and_it_must_stay_so(tmp_path, monkeypatch, looks, words):
    monkeypatch.setattr(agents, "ZERO_S", 0.2)
    monkeypatch.setattr(agents, "LOOK_CLOSELY_S", 0.01)
    monkeypatch.setattr(agents, "STEADY_QUICK_S", 0.1)
    piece = Piece(1, 1, 1.0, tmp_path, quick=True)
    crowd = agents.Crowd(piece, None, piece.history("driver"))  # type: ignore[arg-type]
    found = agents.watch_zero(piece, Looked(*looks), crowd, 0)  # type: ignore[arg-type]
    crowd.writer.close()
    assert len(found) == bool(words)
    assert words in " ".join(found)


def test_every_error_that_a_retry_may_help_is_known_and_no_fault_of_ours_is():
    """So that a new error is looked at before clients may see it."""

    def codes(kind: type[PdrtError]) -> set[str]:
        return {kind.code}.union(*(codes(each) for each in kind.__subclasses__()))

    may_not_be = {"bad_destination", "corrupt_aux", "layout_mismatch", "refused", "descriptors_max"}
    assert codes(TransferError) | codes(Refused) <= set(CODES) | may_not_be
    assert not set(CODES) & (may_not_be | {"internal_error", "illegal_move", "closed"})
    assert code_index("no_such_code") == OTHER


def test_first_prompts_are_told_apart():
    assert len(set(FIRST_PROMPTS)) == len({digest(prompt) for prompt in FIRST_PROMPTS})


STREAM = (
    b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n'
    b": still here\n\n"
    b'data: {"choices":[{"delta":{"content":"a \xc3\xa9"}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}\r\n\r\n'
    b"data: [DONE]\n\n"
)


@settings(max_examples=40)
@given(st.sets(st.integers(1, len(STREAM) - 1), max_size=12))
def test_events_are_the_same_however_they_are_cut(cuts):
    events = Events()
    places = [0, *sorted(cuts), len(STREAM)]
    for begin, end in itertools.pairwise(places):
        events.feed(STREAM[begin:end])
    assert (events.text, events.finish, events.done, events.error) == ("a éb", "stop", True, "")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"error":{"message":"m","code":"process_lost"}}', "process_lost"),
        ("{'error': {'message': 'm', 'code': 'peer_lost'}}", "peer_lost"),
        ("Bad gateway", "unreadable"),
        ("{'error': {'mess", "unreadable"),
    ],
)
def test_a_code_is_found_however_an_error_is_worded(text, code):
    assert code_of(text) == code
    events = Events()
    events.feed(f"data: {text}\n\n".encode())
    assert events.error == code or "{" not in text
    assert not events.done


def served(raw: bytes, use: Callable[[int], object]) -> None:
    """Runs `use(port)` against a server that reads a request, says `raw` and hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        assert json.loads(await reader.readexactly(length)) == {"a": 1}
        writer.write(raw)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def play() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            await use(server.sockets[0].getsockname()[1])  # type: ignore[misc]

    asyncio.run(play())


HEAD = b"HTTP/1.1 503 no\r\n"
WHOLE = {
    "chunked": HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n",
    "with a length": HEAD + b"content-length: 5\r\n\r\nabcde",
    "until it ends": HEAD + b"\r\nabcde",
}


@pytest.mark.parametrize("how", WHOLE)
def test_a_body_is_read_whole_however_it_is_sent(how):
    async def use(port: int) -> None:
        assert await post(port, "/x", {"a": 1}) == (503, b"abcde")

    served(WHOLE[how], use)


@pytest.mark.parametrize("how", ["chunked", "with a length"])
@pytest.mark.parametrize("cut", [1, 4, 12])
def test_an_answer_that_is_cut_is_broken(how, cut):
    async def use(port: int) -> None:
        with pytest.raises(Broken):
            await post(port, "/x", {"a": 1})

    served(WHOLE[how][:-cut] if cut < 12 else HEAD[:cut], use)


def test_nobody_there_is_broken_too():
    async def use(port: int) -> None:
        answer = await Answer.to(port, "/x", {"a": 1})
        assert await answer.head() == 503
        answer.leave()

    served(WHOLE["chunked"], use)
    with pytest.raises(Broken):
        asyncio.run(post(1, "/x", {}))
