"""The live fuzzer's own arithmetic, and that it knows exactly what it has fired."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter as Multiset
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pdrt.protocol import codec
from pdrt.protocol.codec import Malformed
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import PEER_MESSAGES
from stress.fuzz.__main__ import line, main, parse
from stress.fuzz.decoders import MESSAGES
from stress.fuzz.gun import PARTS, TAKEN, Gun, Told, kind_of
from stress.fuzz.hostile import VICTIM, Frames, Known, Names, rng_of
from stress.fuzz.oracle import Child, State, faults, unaccounted
from stress.fuzz.wire import Connection, frame, multipart
from tests.mail.conftest import site  # noqa: F401  a fixture
from tests.mail.site import Site, counted

ROOMS = [
    {"room": 10**15 + 5, "slot": 0, "generation": 7},
    {"room": VICTIM + 5, "slot": 1, "generation": 9},
]
TARGET = Known("decode", "the-target", 1, ROOMS)


def names(seed: int = 0) -> Names:
    return Names(random.Random(seed), TARGET, bytes(16), "boot", "@nobody")


def test_what_is_fired_politely_is_counted_to_the_last_frame(site: Site) -> None:  # noqa: F811
    _, owner, counts, server = site.door()
    make = Frames(0, names(), from_peer=True)
    frames = [make() for _ in range(300)]
    fired = Multiset(kind_of(data, from_peer=True) for data in frames)
    fired[PARTS] += 2
    sender = Connection(server.getsockname())
    sender.shake(b"somebody")
    for data in frames:
        sender.send(frame(data))
        owner.receive(0)
    sender.send(multipart(frames[:3]) + multipart(frames[:100]))
    count = sum(fired.values())
    counted(owner, lambda: counts.of[Counter.FRAMES_IN] == count, "all frames")
    assert counts.malformed() == {Malformed[k]: n for k, n in fired.items() if k != TAKEN}
    assert len(fired) > 5, "too tame"
    sender.break_off()


@pytest.mark.parametrize("kinds", [PEER_MESSAGES, MESSAGES])
def test_hostile_messages_are_right_by_their_type_and_name_no_other_room_exactly(
    kinds: tuple[type[msgspec.Struct], ...],
) -> None:
    said = names()
    for _ in range(3000):
        message = said.any_of(kinds) if kinds is PEER_MESSAGES else said.stale()
        assert codec.decode(codec.seal(msgspec.msgpack.encode([message]))) == [message]
        assert getattr(message, "room", -1) != ROOMS[0]["room"]
        exact = "the-target", ROOMS[0]["slot"], ROOMS[0]["generation"]
        fields = ("instance", "slot", "generation")
        assert tuple(getattr(message, name, None) for name in fields) != exact
        assert getattr(message, "control", "") != "127.0.0.1:8998"


def test_a_local_door_hears_of_nothing_that_exists_though_its_frames_are_changed_at_random() -> (
    None
):
    """Its own processes are trusted: one that said such things of real rooms could end them."""
    heard = 0
    for seed in range(40):
        make = Frames(seed, names(seed), from_peer=False)
        for data in (make() for _ in range(300)):
            if kind_of(data, from_peer=False) == TAKEN:
                for message in codec.decode(data):
                    heard += 1
                    assert getattr(message, "generation", 0) % 2 == 0, "that of an open room"
                    agent = getattr(message, "agent", message)
                    assert getattr(agent, "rank", 1) != 0, "the rank that there is"
    assert heard > 1000, "too tame"


def test_a_gun_does_not_draw_the_numbers_of_the_rooms() -> None:
    """It once did, and so named a room exactly that had to succeed."""

    def drawn(rng: random.Random) -> set[tuple[int, int]]:
        words = [rng.getrandbits(32) for _ in range(20_000)]
        return set(itertools.pairwise(words))

    for seed in range(3):
        told = Told(seed, 1, 0.0, [], [], {}, b"", "", "")
        assert not drawn(Gun(told)._rng) & drawn(rng_of(seed, "rooms"))


STATE = State(
    children={"listener": Child(7, 1, 0)},
    fds={"listener": 30},
    rss_bytes={"listener": 50 << 20},
    malformed=Multiset({"EMPTY": 10}),
    counted={"FRAMES_IN": 100},
    callback_errors=0,
)


def test_growth_deaths_and_handlers_that_raise_are_faults() -> None:
    assert faults("t", STATE, STATE) == []
    worse = [
        replace(STATE, children={"listener": Child(8, 2, 1)}),
        replace(STATE, children={}),
        replace(STATE, fds={"listener": 300}),
        replace(STATE, rss_bytes={"listener": 5000 << 20}),
        replace(STATE, malformed=Multiset({"EMPTY": 10, "VALUE": 1})),
        replace(STATE, callback_errors=1),
    ]
    assert [len(faults("t", STATE, state)) for state in worse] == [1] * len(worse)


def test_frames_are_accounted_for_by_kind() -> None:
    def wrong(sent: dict[str, int], lost: dict[str, int], empty: int, frames: int) -> int:
        after = replace(
            STATE,
            malformed=Multiset({"EMPTY": 10 + empty}),
            counted={"FRAMES_IN": 100 + frames},
        )
        return len(unaccounted("t", STATE, after, Multiset(sent), Multiset(lost)))

    assert wrong({"EMPTY": 3, TAKEN: 2, "http": 50}, {}, 3, 5) == 0
    assert wrong({"EMPTY": 3, TAKEN: 2}, {}, 3, 500) == 0  # rooms are served, too
    assert wrong({"EMPTY": 3, TAKEN: 2}, {}, 2, 5) == 1
    assert wrong({"EMPTY": 3, TAKEN: 2}, {}, 4, 5) == 1
    assert wrong({"EMPTY": 3, TAKEN: 2}, {}, 3, 4) == 1
    assert wrong({"EMPTY": 3, TAKEN: 2}, {"EMPTY": 1}, 2, 4) == 0
    assert wrong({"EMPTY": 3, TAKEN: 2}, {"EMPTY": 1}, 1, 4) == 1


def test_a_record_has_one_line() -> None:
    record = {
        "wrong": ["a"],
        "frames": 1000,
        "seconds": 2.0,
        "frames_a_second": 500,
        "seed": 3,
        "rooms": {"succeeded": 4},
        "victims": {"Success": 1},
    }
    assert "1 things are wrong: 1,000 frames" in line(record)
    assert "fuzz: good" in line(record | {"wrong": []})
    assert parse(["--quick"]).frames < parse([]).frames == 1_000_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_run_against_real_trees(tmp_path: Path) -> None:
    record = tmp_path / "fuzz.json"
    assert main(["--frames", "20000", "--json", str(record)]) == 0
    assert json.loads(record.read_text())["wrong"] == []
