"""The faults, put to SGLang's unmodified NIXL components: bootstrap server, manager, sender and
receiver, in one process for each engine."""

from __future__ import annotations

import contextlib
import itertools
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from pdrt.cli.cluster import free_ports
from pdrt.protocol.states import KVPoll
from stress.bench.figures import summarise
from stress.stock.findings import Found, Play, Trial, ms, until
from stress.stock.puppets import Puppet, started

MODULE = "stress.stock.sglang_puppet"
#: A page is 256 KiB; a room has 2 of them, or all 1,000.
SHAPE = {"layers": 2, "item_bytes": 65536, "pages": 2, "chunks": 1, "pages_count": 1000}
TERMINAL = [KVPoll.Failed, KVPoll.Success]
BEFORE, SENT, PATTERN = 0x00, 0xAA, 0x55
ROOM_S = 30.0
TRIES = 5
READ_S = 2.0  # by then a frame that was sent has been read
ROOMS = itertools.count(1_000_000)


@dataclass(frozen=True)
class Pair:
    prefill: Puppet
    decodes: list[Puppet]
    port: int  # of the bootstrap server

    def bootstrap_health(self) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as got:
                return str(got.status)
        except OSError as error:
            return f"no answer ({error})"

    def ready(self, room: int, decode: int, count: int) -> None:
        """Both halves are open and prefill knows where the KV must land."""
        self.prefill.do("open", room=room)
        self.decodes[decode].do("open", room=room, first=0, count=count)
        self.reach(self.prefill, room, KVPoll.WaitingForInput)

    def reach(self, puppet: Puppet, room: int, state: KVPoll) -> None:
        answer = puppet.do("watch", rooms=[room], states=[state, KVPoll.Failed], limit_s=ROOM_S)
        if answer[str(room)] != [state, answer[str(room)][1]]:
            raise RuntimeError(f"{puppet.name}: room {room} is {answer[str(room)]}, not {state}")

    def play(self, rooms: int, decode: int) -> list[float]:
        """Small rooms to one decode, one after the other: seconds of each."""
        first = next(ROOMS)
        for _ in range(rooms):
            next(ROOMS)
        for puppet in (self.prefill, self.decodes[decode]):
            puppet.tell("play", rooms=rooms, first=first)
        seconds = [float(s) for s in self.decodes[decode].hear(120.0)]
        self.prefill.hear(120.0)
        return seconds


@contextlib.contextmanager
def _start(trial: Trial, decodes: int, environment: tuple[str, ...] = ()) -> Iterator[Pair]:
    assert trial.python is not None
    port = free_ports(1)[0]

    def make(role: str, name: str) -> Puppet:
        told = {"role": role, "port": port, "shape": SHAPE, "environment": environment}
        name = f"sglang-{name}-{port}"
        return Puppet(name, trial.folder, trial.python or Path(), MODULE, **told)

    prefill = make("prefill", "prefill")
    others = [make("decode", f"decode{index}") for index in range(decodes)]
    with started(prefill, *others):
        yield Pair(prefill, others, port)


def _pair(trial: Trial) -> Pair:
    """The same one for all faults that do not need another."""
    return trial.kept.get("pair", lambda: _start(trial, 1))


def _state(answer: dict[str, Any], room: int) -> tuple[KVPoll, float | None]:
    state, at = answer[str(room)]
    return KVPoll(state), at


def frame(trial: Trial) -> Found:
    pair = _pair(trial)
    before_s = summarise(pair.play(trial.count(20), 0)).median
    port = pair.prefill.do("facts")["port"]
    with zmq.Context() as context, context.socket(zmq.PUSH) as door:
        door.connect(f"tcp://127.0.0.1:{port}")
        door.send_multipart([b"GARBAGE"])
        time.sleep(READ_S)
        alive = [n for n in pair.prefill.do("facts")["threads"] if "bootstrap_thread" in n]
        room = next(ROOMS)
        pair.prefill.do("open", room=room)
        pair.decodes[0].do("open", room=room, first=0, count=2)
        wait = {"rooms": [room], "states": [KVPoll.WaitingForInput, *TERMINAL]}
        answer = pair.prefill.do("watch", within_s=600, limit_s=trial.watch_s, **wait)
    state, at = _state(answer, room)
    health = pair.bootstrap_health()
    went_on = at is not None and state is not KVPoll.Failed
    return Found(
        "the next room goes on"
        if went_on
        else f"its bootstrap thread {'lives' if alive else 'is dead'}; the next room is "
        f"{state.name} after {trial.watch_s:g} s (its own limit is 300 s); "
        f"the bootstrap server's /health says {health}",
        "One ZMQ message of one part, `GARBAGE`, is pushed to the prefill manager's port (the "
        "`rank_port` that `GET /route` of the bootstrap server names). Then a room is opened on "
        "both sides and prefill's sender is polled. Default time-outs.",
        {
            "rooms before the frame, median ms": 1e3 * before_s,
            "bootstrap thread alive afterwards": bool(alive),
            "state of the next room": state.name,
            "watched s": trial.watch_s,
            "bootstrap server /health": health,
        },
    )


def abort(trial: Trial) -> Found:
    pair = _pair(trial)
    pair.play(3, 0)
    room = next(ROOMS)
    pair.ready(room, 0, 2)
    aborted = pair.prefill.do("abort", room=room)
    answer = pair.decodes[0].do(
        "watch", within_s=600, rooms=[room], states=TERMINAL, limit_s=trial.watch_s
    )
    state, at = _state(answer, room)
    took_s = None if at is None else at - aborted
    return Found(
        f"decode is not told: its room is {state.name} after {trial.watch_s:g} s "
        "(its own limit is 300 s)"
        if took_s is None
        else f"decode's room is {state.name} after {until(took_s, trial.watch_s)}",
        "Both halves are open and prefill knows the destination; the sender's `abort()` is called "
        "and the receiver polled. Default time-outs.",
        {"decode knows after, s": took_s, "decode's state": state.name, "watched s": trial.watch_s},
    )


def stopped(trial: Trial) -> Found:
    pair = _pair(trial)
    room = next(ROOMS)
    pair.ready(room, 0, 1000)
    with pair.decodes[0].stopped() as go_on:
        pair.prefill.do("send", room=room, first=0, count=1000)
        answer = pair.prefill.do(
            "watch", within_s=600, rooms=[room], states=TERMINAL, limit_s=trial.watch_s
        )
        state, at = _state(answer, room)
        health = pair.bootstrap_health()
        go_on()
    after = pair.prefill.do("watch", rooms=[room], states=TERMINAL, limit_s=ROOM_S)
    later, _ = _state(after, room)
    return Found(
        f"prefill's room is {state.name} after {trial.watch_s:g} s (neither the components nor "
        f"its scheduler's source give it a limit); the bootstrap server's /health says {health}"
        if at is None
        else f"prefill's room is {state.name} within the watch",
        "A room of 1,000 pages (250 MiB) has its destination; decode's process is SIGSTOPped, the "
        "pages are sent, the sender is polled. Then decode goes on.",
        {
            "state at the end of the watch": state.name,
            "watched s": trial.watch_s,
            "bootstrap server /health": health,
            "state after SIGCONT": later.name,
        },
    )


def starved(trial: Trial) -> Found:
    queues = ("SGLANG_DISAGGREGATION_QUEUE_SIZE=1",)
    trial.kept.close()  # what is kept would only cost processor time
    with _start(trial, 2, queues) as pair:
        for decode in (0, 1):
            pair.play(3, decode)
        alone = summarise(pair.play(trial.count(50), 1))
        frozen, healthy = next(ROOMS), next(ROOMS)
        pair.ready(frozen, 0, 1000)
        with pair.decodes[0].stopped():
            pair.prefill.do("send", room=frozen, first=0, count=1000)
            pair.ready(healthy, 1, 2)
            begun = time.monotonic()
            pair.prefill.do("send", room=healthy, first=0, count=2)
            answer = pair.decodes[1].do(
                "watch", within_s=600, rooms=[healthy], states=TERMINAL, limit_s=trial.watch_s
            )
        state, at = _state(answer, healthy)
    took_s = None if at is None else at - begun
    ratio = (took_s or trial.watch_s) / alone.median
    least = "" if took_s else "at least "
    return Found(
        f"the healthy decode's room: {until(took_s, trial.watch_s)} ({state.name}); alone it takes "
        f"{ms(alone.median)}: {least}{ratio:.0f}x, where both share a transfer queue (of 4 by "
        "default, by port number)",
        "Two decodes at one prefill with `SGLANG_DISAGGREGATION_QUEUE_SIZE=1`, so that both are in "
        "the same queue for certain; by default a peer's port number chooses one of 4, and one "
        "peer in four is hit. One decode is SIGSTOPped, 1,000 pages are sent to it, then a room of "
        "2 pages to the other.",
        {
            "healthy rooms alone, median ms": 1e3 * alone.median,
            "healthy room beside the frozen decode, s": took_s,
            "watched s": trial.watch_s,
            "ratio": f"{least}{ratio:.0f}",
        },
    )


def ghosts(trial: Trial) -> Found:
    rooms = [next(ROOMS) for _ in range(trial.count(200))]
    pair = _pair(trial)
    pair.play(3, 0)
    before = pair.prefill.do("facts")
    for room in rooms:
        pair.prefill.do("open", room=room)
    pair.prefill.do("give_up", rooms=rooms)
    between = pair.prefill.do("facts")
    for room in rooms:
        pair.decodes[0].do("open", room=room, first=0, count=2)
    pair.decodes[0].do("give_up", rooms=rooms)
    pair.play(3, 0)  # what was sent before it has been read
    after = pair.prefill.do("facts")
    left = {k: after[k] - before[k] for k in ("request_status", "transfer_infos")}
    return Found(
        f"{left['request_status']} of {len(rooms)} rooms are back in the prefill manager's tables, "
        "and nothing in its source sweeps them",
        "Prefill opens the rooms, aborts and clears them, as after a bootstrap time-out. Then "
        "decode opens its halves, which sends their metadata, aborts and clears them, which sends "
        "ABORT. The prefill manager's `request_status` and `transfer_infos` are counted.",
        {
            "rooms": len(rooms),
            "entries once prefill had cleared them": between["request_status"]
            - before["request_status"],
            "request_status entries left": left["request_status"],
            "transfer_infos entries left": left["transfer_infos"],
        },
    )


def race(trial: Trial) -> Found:
    pair = _pair(trial)
    ends = pair.prefill.do("race", within_s=300, rooms=trial.count(60_000), limit_s=90.0)
    forced = KVPoll(pair.prefill.do("force")).name
    return Found(
        f"{ends['success']} of {ends['rooms']:,} rooms ended Success after Failed was written; "
        f"forced (Failed is written between the other writer's read and write): it ends {forced}",
        "Rooms in Transferring; for each, one thread writes Success and another Failed at the same "
        "moment through the manager's `update_status`, with `sys.setswitchinterval(1e-6)`. Failed "
        "is written whatever was there, so a room that ends Success had been Failed. Forced: "
        "`request_status` is a dict that holds one thread in `get()` while the other writes.",
        {
            "rooms": ends["rooms"],
            "ended Failed": ends["failed"],
            "ended Success": ends["success"],
            "forced: ended": forced,
        },
    )


def _late(pair: Pair, *, freeze: bool) -> dict[str, Any]:
    """Decode gives a room up midway; its pages get their next owner when its scheduler says so."""
    decode = pair.decodes[0]
    decode.do("fill", value=BEFORE)
    pair.prefill.do("fill", value=SENT)
    room = next(ROOMS)
    pair.ready(room, 0, 1000)
    decode.tell("first_bytes", value=SENT, limit_s=ROOM_S)
    pair.prefill.do("send", room=room, first=0, count=1000)
    decode.hear(ROOM_S)
    with pair.prefill.stopped() if freeze else contextlib.nullcontext(lambda: None) as go_on:
        decode.do("abort", room=room)
        outstanding = decode.do("count_other", value=SENT)
        released = decode.do("release", room=room, within_s=120)
        decode.do("fill", value=PATTERN)
        go_on()
        lost = decode.do("settle", value=PATTERN, limit_s=ROOM_S)
    pair.prefill.do("watch", rooms=[room], states=TERMINAL, limit_s=ROOM_S)
    for puppet in (pair.prefill, decode):
        puppet.do("clear", rooms=[room])
    return {"outstanding": outstanding, "lost": lost, **released}


def late(trial: Trial) -> Found:
    pair = _pair(trial)
    plays: dict[bool, dict[str, Any]] = {}
    for freeze in (False, True):
        for _ in range(TRIES):
            plays[freeze] = _late(pair, freeze=freeze)
            if plays[freeze]["outstanding"]:
                break
    fine, bad = plays[False], plays[True]
    return Found(
        f"prefill answers: {fine['lost']} of 1,000 pages overwritten; prefill is stopped: decode "
        f"uses the pages again after {bad['waited_s']:.0f} s, and {bad['lost']} of 1,000 are "
        "overwritten once it goes on",
        "A room of 1,000 pages; when decode sees the first bytes it aborts. The pages are refilled "
        "with a pattern when decode's scheduler would use them again (`resolve_deferred_releases`: "
        "every prefill rank has acknowledged, or 30 s have passed) and those without it are "
        "counted once nothing lands any more. Once with a prefill that lives, once with one that "
        "is SIGSTOPped at the abort and continued after the refill.",
        {
            "prefill lives: acknowledged": fine["acknowledged"],
            "prefill lives: still to land at the abort, pages": fine["outstanding"],
            "prefill lives: overwritten": fine["lost"],
            "prefill stopped: acknowledged": bad["acknowledged"],
            "prefill stopped: waited s": bad["waited_s"],
            "prefill stopped: still to land at the abort, pages": bad["outstanding"],
            "prefill stopped: overwritten": bad["lost"],
        },
    )


#: In the order in which they leave each other the least.
PLAYS: dict[str, Play] = {
    "race": race,
    "late": late,
    "abort": abort,
    "ghosts": ghosts,
    "stopped": stopped,
    "frame": frame,
    "starved": starved,
}
