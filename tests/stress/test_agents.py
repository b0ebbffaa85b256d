"""The oracle of `agents` on planted histories, and the client's HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrt.errors import PdrtError, Refused, TransferError
from stress.cascades.agents import cascade as agents
from stress.cascades.agents.client import digest
from stress.cascades.agents.oracle import judge
from stress.cascades.agents.wire import Answer, Broken, Events, code_of, post
from stress.cascades.agents.words import CODES, FIRST_PROMPTS, OTHER, Kind, code_index
from stress.cascades.history import Writer, read_all
from stress.cascades.piece import Outcome, Piece

BOUND_S = 10.0
SECOND = 1_000_000_000
NAME = "clients-2-1"  # the third process of clients, first life


def judged(
    folder: Path, *records: tuple[Kind, float, int], driver: tuple[tuple[Kind, float], ...] = ()
) -> Outcome:
    """Records of one request: kind, second, c."""
    client = Writer(folder / f"{NAME}.history")
    for kind, at_s, c in records:
        client.append(kind, 7, 10, 200, c, ns=int((100 + at_s) * SECOND))
    client.close()
    writer = Writer(folder / "driver.history")
    for kind, at_s in driver:
        writer.append(kind, a=2, b=1, ns=int((100 + at_s) * SECOND))
    writer.close()
    outcome = Outcome(cascade="agents", seed=1)
    judge(read_all(folder), BOUND_S, outcome)
    return outcome


ASKED, EXIT = (Kind.ASKED, 0.0, 1), (Kind.EXIT, 20.0, 0)
FAILED = (Kind.FAILED, 2.0, code_index("process_lost"))


def test_requests_that_end_as_they_may_are_no_violations(tmp_path):
    for number, (records, driver) in enumerate(
        [
            ((ASKED, (Kind.FIRST, 1.0, 0), (Kind.DONE, 2.0, 0), EXIT), ()),
            ((ASKED, (Kind.LEFT, 1.0, 0), EXIT), ()),
            ((ASKED, (Kind.ABORTED, 1.0, 1), (Kind.DONE, 1.1, 1), EXIT), ()),
            ((ASKED, (Kind.ABORTED, 1.0, 1), FAILED, EXIT), ()),
            ((ASKED, FAILED, EXIT), ((Kind.STRUCK, 1.0),)),
            ((ASKED, FAILED, EXIT), ((Kind.STRUCK, -2.0),)),
            ((ASKED, (Kind.FIRST, 1.0, 0)), ((Kind.KILLED, 3.0),)),
            ((ASKED,), ((Kind.KILLED, 3.0),)),
            ((EXIT,), ()),
        ]
    ):
        outcome = judged(tmp_path / str(number), *records, driver=driver)
        assert outcome.violations == [], records
        assert set(outcome.zeros) >= {"requests without an end", "first answers that differ"}
        assert all(outcome.counts[name] == 0 for name in outcome.zeros)
    assert outcome.counts["requests"] == 0


PLANTED = {
    "without an end": ((ASKED, EXIT), ()),
    "without an end ": ((ASKED, (Kind.FIRST, 1.0, 0), EXIT), ((Kind.KILLED, 30.0),)),
    "over the bound": ((ASKED, (Kind.DONE, BOUND_S + 1, 0), EXIT), ()),
    "over the bound ": ((ASKED, (Kind.HUNG, 1.0, 0), EXIT), ()),
    "without a typed error": ((ASKED, (Kind.FAILED, 2.0, OTHER), EXIT), ((Kind.STRUCK, 1.0),)),
    "without a cause": ((ASKED, FAILED, EXIT), ()),
    "without a cause ": ((ASKED, FAILED, EXIT), ((Kind.STRUCK, -9.0), (Kind.STRUCK, 9.0))),
    "that differ": ((ASKED, (Kind.DONE, 2.0, 0), (Kind.DIFFERS, 2.0, 0), EXIT), ()),
    "nobody killed it": ((ASKED, (Kind.DONE, 2.0, 0)), ()),
}


@pytest.mark.parametrize("words", PLANTED)
def test_a_planted_fault_is_found(tmp_path, words):
    records, driver = PLANTED[words]
    outcome = judged(tmp_path, *records, driver=driver)
    assert len([v for v in outcome.violations if words.strip() in v]) == 1, outcome.violations


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
