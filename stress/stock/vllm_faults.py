"""The faults, put to vLLM's unmodified NixlConnector: its scheduler half and its worker half in one
process for each engine, stepped as an engine steps them.

It pulls: prefill finishes a request and holds its blocks, decode is told which and READs them.  So
some faults have another shape than with a pushing stack; each says which.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zmq

from pdrt.cli.cluster import free_ports
from stress.bench.figures import summarise
from stress.stock.findings import Found, NoSuchThing, Play, Trial, ms, until
from stress.stock.puppets import Puppet, started

MODULE = "stress.stock.vllm_puppet"
#: As much of a model as gives a KV layout: a block is 256 KiB in each of two layers.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
BLOCKS, LARGE, SMALL = 512, 480, 1  # a large request is 240 MiB
BEFORE, SENT, NEXT = 0x00, 0x2A, 0x3B
LEASE_S = 30  # its default
PULL_S, TRIES = 60.0, 5
READ_S = 2.0
#: A prefill, and a decode that may have met it; the other faults leave the last one a stranger.
ILL, KNOWN, STRANGER = 1, 1, 0
NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Engines:
    prefills: list[Puppet]
    decodes: list[Puppet]
    ports: list[int]  # of the prefills' side channels

    def offer(self, prefill: int, first: int, count: int) -> tuple[str, dict[str, Any]]:
        name = f"request-{next(NUMBERS)}"
        puppet = self.prefills[prefill]
        return name, puppet.do("offer", request=name, first=first, count=count)

    def room(self, prefill: int, decode: int, count: int = SMALL) -> tuple[str, float]:
        """Offered and pulled: how it ended, and after how many seconds."""
        name, params = self.offer(prefill, 0, count)
        begun = self.pull(decode, name, params, count)
        return self.ended(decode, name, begun, PULL_S)

    def pull(self, decode: int, name: str, params: dict[str, Any], count: int) -> float:
        """When decode was asked."""
        puppet = self.decodes[decode]
        return float(puppet.do("pull", request=name, params=params, first=0, count=count))

    def ended(self, decode: int, name: str, begun: float, limit_s: float) -> tuple[str, float]:
        how, at = self.decodes[decode].do(
            "watch", requests=[name], limit_s=limit_s, within_s=limit_s + 60
        )[name]
        return how, (at or begun + limit_s) - begun

    def rooms(self, prefill: int, decode: int, rooms: int) -> list[float]:
        offers = [self.offer(prefill, 0, SMALL) for _ in range(rooms)]
        puppet = self.decodes[decode]
        return list(puppet.do("pulls", offers=offers, first=0, count=SMALL, within_s=300))


@contextlib.contextmanager
def _engines(trial: Trial, prefills: int = 1, decodes: int = 1) -> Iterator[Engines]:
    """The same ones for all faults.  Those that a fault does not need are stopped, for each of
    them uses a core all the time."""
    all_there = trial.kept.get("engines", lambda: _start(trial, 2, 2))
    spare = [*all_there.prefills[prefills:], *all_there.decodes[decodes:]]
    with contextlib.ExitStack() as stack:
        for puppet in spare:
            stack.enter_context(puppet.stopped())
        yield all_there


@contextlib.contextmanager
def _start(trial: Trial, prefills: int, decodes: int) -> Iterator[Engines]:
    assert trial.python is not None
    model = trial.folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    ports = iter(free_ports(2 * (prefills + decodes)))
    made: dict[str, list[Puppet]] = {"prefill": [], "decode": []}
    channels = []
    for role, count in (("prefill", prefills), ("decode", decodes)):
        for index in range(count):
            port = next(ports)
            channels.append(port)
            puppet = Puppet(
                f"vllm-{role}{index}-{port}",
                trial.folder,
                trial.python,
                MODULE,
                role=role,
                port=port,
                gloo=next(ports),
                blocks=BLOCKS,
                model=str(model),
            )
            made[role].append(puppet)
    with started(*made["prefill"], *made["decode"]):
        yield Engines(made["prefill"], made["decode"], channels[:prefills])


def frame(trial: Trial) -> Found:
    with _engines(trial, prefills=2, decodes=2) as engines:
        before, before_s = engines.room(ILL, KNOWN)
        with zmq.Context() as context, context.socket(zmq.DEALER) as door:
            door.connect(f"tcp://127.0.0.1:{engines.ports[ILL]}")
            door.send_multipart([b"", b"GARBAGE"])
            time.sleep(READ_S)
        alive = "nixl_handshake_listener" in engines.prefills[ILL].do("facts")["threads"]
        known, known_s = engines.room(ILL, KNOWN)
        strange, strange_s = engines.room(ILL, STRANGER)
        again, again_s = engines.room(ILL, STRANGER)
    trial.kept.close()
    thread = "lives" if alive else "is dead"
    return Found(
        f"its handshake thread {thread}; a decode that had met this prefill: {known}; one that had "
        f"not: {strange} after {strange_s:.1f} s, asked again {again} after {again_s:.1f} s",
        "One message, an empty part and `GARBAGE`, is sent to the side channel "
        "(`VLLM_NIXL_SIDE_CHANNEL_PORT`) as a handshake request would be. Then a decode that had "
        "read from this prefill before, and one that had not, pull a request each. Components have "
        "no health endpoint.",
        {
            "a room before the frame": f"{before}, {ms(before_s)}",
            "handshake thread alive afterwards": alive,
            "known decode's next room": f"{known}, {ms(known_s)}",
            "new decode's first room": f"{strange}, {ms(strange_s)}",
            "new decode's second room": f"{again}, {ms(again_s)}",
        },
    )


def abort(trial: Trial) -> Found:
    raise NoSuchThing(
        "decode is first told of a request once prefill has finished it, so there is no room that "
        "prefill could abort under it"
    )


def _read_midway(engines: Engines, decode: int = 0) -> str:
    """A large request whose READ is under way."""
    name, params = engines.offer(0, 0, LARGE)
    puppet = engines.decodes[decode]
    puppet.do("fill", value=BEFORE, first=0, count=LARGE)
    engines.prefills[0].do("fill", value=SENT, first=0, count=LARGE)
    engines.pull(decode, name, params, LARGE)
    puppet.do("first_bytes", value=SENT, first=0, count=LARGE, limit_s=PULL_S)
    return name


def _freed_s(engines: Engines, watch_s: float) -> float | None:
    """Decode is stopped in the middle of a READ: when prefill frees the blocks."""
    name = _read_midway(engines)
    begun = time.monotonic()
    with engines.decodes[0].stopped():
        watch = {"requests": [name], "limit_s": watch_s}
        _, at = engines.prefills[0].do("watch", within_s=watch_s + 60, **watch)[name]
    engines.ended(0, name, begun, PULL_S)
    return None if at is None else at - begun


def stopped(trial: Trial) -> Found:
    with _engines(trial) as engines:
        engines.room(0, 0)
        prefill = engines.prefills[0]
        watch_s = max(trial.watch_s, LEASE_S + 10.0)
        for _ in range(TRIES):
            freed_s = _freed_s(engines, watch_s)
            if freed_s is None or freed_s > LEASE_S / 2:
                break  # else the READ was over before decode was stopped
        name, params = engines.offer(0, 0, SMALL)
        with prefill.stopped():
            begun = engines.pull(0, name, params, SMALL)
            how, after_s = engines.ended(0, name, begun, trial.watch_s)
        later, _ = engines.ended(0, name, begun, PULL_S)
    return Found(
        f"prefill frees the request's blocks after {until(freed_s, watch_s)} (its lease), whether "
        f"or not they are still read; prefill stopped instead: decode's request is {how} after "
        f"{after_s:.0f} s, with no limit of its own",
        "A request of 480 blocks (240 MiB) is pulled; at its first bytes decode's process is "
        "SIGSTOPped, and prefill is stepped until it reports the request as sent, which frees its "
        "blocks. Then the other way round: prefill is SIGSTOPped and decode pulls one block. "
        "Components have no health endpoint.",
        {
            "decode stopped: blocks freed after, s": freed_s,
            "prefill stopped: decode's request": how,
            "watched s": trial.watch_s,
            "prefill stopped: after SIGCONT": later,
        },
    )


def starved(trial: Trial) -> Found:
    with _engines(trial, prefills=2, decodes=2) as engines:
        _, first_s = engines.room(0, 0)  # the other decode has met nobody yet
        name, params = engines.offer(1, 0, SMALL)
        offered = engines.offer(0, 0, SMALL)
        with engines.prefills[1].stopped():
            engines.pull(1, name, params, SMALL)
            begun = engines.pull(1, *offered, SMALL)
            met, met_s = engines.ended(1, offered[0], begun, trial.watch_s)
        engines.decodes[1].do("watch", requests=[name], limit_s=PULL_S, within_s=120)
        rooms = trial.count(50)
        alone = summarise(engines.rooms(0, 1, rooms))
        name = _read_midway(engines)
        with engines.decodes[0].stopped():
            beside = summarise(engines.rooms(0, 1, rooms))
        engines.decodes[0].do("watch", requests=[name], limit_s=PULL_S, within_s=120)
    ratio = beside.median / alone.median
    return Found(
        f"a frozen decode: {ratio:.2f}x (median); a frozen prefill that decode has yet to meet: "
        f"the first room with a healthy one is {met} after {until(met_s, trial.watch_s)} instead "
        f"of {ms(first_s)}",
        "Two decodes at one prefill: one is SIGSTOPped in the middle of a READ, the other pulls "
        "rooms of one block. Then, since decode is the side that works here, two prefills at one "
        "decode that has met neither: one is SIGSTOPped, a request of it is pulled (its handshake "
        "has 5 s), then one of the other, whose handshake waits in the same thread.",
        {
            "rooms": rooms,
            "rooms alone, median ms": 1e3 * alone.median,
            "rooms beside a frozen decode, median ms": 1e3 * beside.median,
            "ratio of medians": ratio,
            "first room of a decode and a prefill, alone, s": first_s,
            "the same beside a frozen prefill, s": met_s,
            "that room": met,
        },
    )


def ghosts(trial: Trial) -> Found:
    rooms = trial.count(200)
    with _engines(trial) as engines:
        prefill, decode = engines.prefills[0], engines.decodes[0]
        offers = [engines.offer(0, 0, SMALL) for _ in range(rooms)]
        decode.do("pulls", offers=offers, first=0, count=SMALL, within_s=300)
        names = [name for name, _ in offers]
        prefill.do("watch", requests=names, limit_s=PULL_S, within_s=120)
        before = prefill.do("facts")
        decode.do("notify_again", params=[params for _, params in offers])
        time.sleep(READ_S)
        after = prefill.do("facts")
        prefill.do("fill", value=NEXT, first=0, count=SMALL)
        stale = [[f"{name}-again", params] for name, params in offers]
        decode.do("pulls", offers=stale, first=0, count=SMALL, within_s=300)
        wrong = decode.do("count_with", value=NEXT, first=0, count=SMALL)
    left = sum(after["kept"].values()) - sum(before["kept"].values())
    counted = after["after_expiry"] - before["after_expiry"]
    return Found(
        f"{left} entries left: each late word is refused and counted ({counted} of {rooms}); but a "
        f"request that names blocks which are no longer its own is served: {len(stale)} of {rooms} "
        f"reads succeed{', with the bytes of the next owner' if wrong else ''}",
        "Rooms are offered, pulled and released. Then decode notifies prefill of each once more, "
        "and what prefill's connector keeps is counted. Then the block is given other bytes, and "
        "the old `kv_transfer_params` are pulled again.",
        {
            "rooms": rooms,
            "entries left by late notifications": left,
            "counted as late by prefill": counted,
            "stale references read with success": len(stale),
            "with the next owner's bytes": bool(wrong),
        },
    )


def race(trial: Trial) -> Found:
    raise NoSuchThing(
        "no two writers: one thread, the worker's step, decides how a transfer ended; right by "
        "construction"
    )


def _outlives_lease(engines: Engines, trial: Trial) -> dict[str, Any]:
    """Decode is stopped in the middle of a READ until prefill's lease is over and its blocks have
    their next owner; then it goes on."""
    prefill, decode = engines.prefills[0], engines.decodes[0]
    name = _read_midway(engines)
    begun = time.monotonic()
    with decode.stopped() as go_on:
        limit_s = LEASE_S + 15.0
        how, at = prefill.do("watch", requests=[name], limit_s=limit_s, within_s=300)[name]
        if at is not None:
            prefill.do("fill", value=NEXT, first=0, count=LARGE)
        go_on()
        ended, _ = engines.ended(0, name, begun, PULL_S)
    wrong = decode.do("count_with", value=NEXT, first=0, count=LARGE)
    return {"prefill": how, "decode": ended, "wrong": wrong}


def _held_blocks(engines: Engines, trial: Trial) -> str:
    """Whether an aborted request's blocks are reported as free while its READ is under way."""
    name, params = engines.offer(0, 0, SMALL)
    with engines.prefills[0].stopped():
        begun = engines.pull(0, name, params, SMALL)
        how, _ = engines.ended(0, name, begun, min(10.0, trial.watch_s))
    engines.ended(0, name, begun, PULL_S)
    return how


def late(trial: Trial) -> Found:
    with _engines(trial) as engines:
        engines.room(0, 0)
        held = _held_blocks(engines, trial)
        for _ in range(TRIES):
            found = _outlives_lease(engines, trial)
            if found["prefill"] == "sent" and found["wrong"]:
                break
            if found["prefill"] == "open":
                break
    return Found(
        "decode's blocks are right: they are held until the READ has ended, however long; "
        f"prefill's are not: after the lease of {LEASE_S} s they have another owner while they are "
        f"read, and {found['wrong']} of {LARGE} blocks of a request that decode counts as "
        f"{found['decode']} are the next owner's",
        "Decode's connector reports a request only once its READ has ended (here: prefill is "
        "SIGSTOPped, a request is pulled and watched), and the engine's scheduler keeps an aborted "
        "request's blocks until then (read in its source, not run). Then a request of 480 "
        "blocks is pulled, decode is SIGSTOPped at the first bytes until prefill reports the "
        "request as sent (lease expired: a decode that runs renews it every 5 s), prefill's blocks "
        "are refilled, and decode goes on.",
        {
            "READ under way: decode's blocks": "held" if held == "open" else held,
            "lease over: prefill reports": found["prefill"],
            "then decode's request": found["decode"],
            "blocks with the next owner's bytes": found["wrong"],
            "of blocks": LARGE,
        },
    )


#: The first one needs decodes that have met nobody; the last one leaves nothing to play with.
PLAYS: dict[str, Play] = {
    "starved": starved,
    "abort": abort,
    "race": race,
    "ghosts": ghosts,
    "late": late,
    "stopped": stopped,
    "frame": frame,
}
