"""Plays random schedules in a simulated world, and checks every law at every change.

usage: python -m stress.simulate [--seeds N] [--first S] [--minutes M] [--jobs J] [--json FILE]
       python -m stress.simulate --seed N      one seed; if it fails, shrunk
       python -m stress.simulate --mutants     can it fail?  each mutant of pdrt must be caught

The world (`tests/actors/world.py`) is a prefill tree, one or two decode trees and the network
between them: pdrt's own actors, engines' rooms and status tables, in one thread and in virtual
time.  A seed decides everything: what breaks and when, who has the next turn, what is lost, late
or repeated.  So whatever fails is played again by its seed.

Exits with 1 if a law was broken, with 2 if nothing was played, and with 128 and the signal's number
if a signal stopped it: then fewer were played than asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from pdrt.protocol.states import Reason, Role
from tests.actors import schedule
from tests.actors.mutants import MUTANTS, mutated
from tests.actors.tally import MOVING, STEPS, Tally

CHUNK = 25  # seeds that a process is given at once
SHRINK_TRIES_MAX = 300
FAILURES_MAX = 20  # then it is no use to go on
MUTANT_SEEDS_MAX = 1000
NOTHING_PLAYED = 2  # exit code, as of an order that cannot be understood
STOPPED = 128  # and the signal's number: exit code, as a shell has it

#: What no world can show: these are given by an engine, of what only it can see.
BEYOND = frozenset({Reason.CORRUPT_AUX})


@dataclass(frozen=True)
class Failure:
    seed: int
    line: str
    setting: str
    acts: tuple[str, ...]  # shrunk

    @property
    def command(self) -> str:
        return f"python -m stress.simulate --seed {self.seed}"

    def __str__(self) -> str:
        acts = "".join(f"\n    {act}" for act in self.acts)
        return f"seed {self.seed}: {self.line}\n  {self.command}\n  {self.setting}{acts}"


@dataclass
class Report:
    """What came of many seeds."""

    jobs: int
    first: int
    took_s: float = 0.0
    tally: Tally = field(default_factory=Tally)
    failures: list[Failure] = field(default_factory=list)
    ordered: int | None = None  # seeds; None: as many as there was time for
    signal: int = 0  # that stopped it

    @property
    def exit_code(self) -> int:
        """A fault counts even if not all was played; and what was not played proves nothing."""
        if self.failures:
            return 1
        if self.signal:
            return STOPPED + self.signal
        return 0 if self.tally.seeds else NOTHING_PLAYED

    def add(self, tally: Tally, failures: Sequence[Failure]) -> None:
        self.tally += tally
        self.failures += failures
        for failed in failures:
            print(failed, file=sys.stderr, flush=True)  # the end may be far away

    def figures(self) -> dict[str, Any]:
        """As JSON has them."""
        tally, took_s = self.tally, max(self.took_s, 1e-9)
        verdicts = {
            role.name.lower(): {
                reason.name if reason else "SUCCESS": tally.verdicts[role, reason]
                for reason in Reason
                if tally.verdicts[role, reason]
            }
            for role in Role
        }
        return {
            "first_seed": self.first,
            "seeds": tally.seeds,
            "seeds_ordered": self.ordered,
            "stopped_by": signal.Signals(self.signal).name if self.signal else "",
            "jobs": self.jobs,
            "took_s": round(self.took_s, 1),
            "schedules_per_s": round(tally.seeds / took_s, 1),
            "schedules_per_cpu_s": round(tally.seeds / max(tally.cpu_s, 1e-9), 1),
            "virtual_hours": round(tally.virtual_ms / 3.6e6, 2),
            "rooms": {role.name.lower(): tally.rooms[role] for role in Role},
            "rooms_per_seed": round(sum(tally.rooms.values()) / max(1, tally.seeds), 1),
            "turns": tally.turns,
            "frames": tally.frames,
            "verdicts": verdicts,
            "faults": {verb: tally.acts[verb] for verb in sorted(schedule.FAULTS)},
            "moves_seen": sum(step in tally.steps for step in MOVING),
            "moves": len(MOVING),
            "steps_seen": sum(step in tally.steps for step in STEPS),
            "steps": len(STEPS),
            "steps_never_tried": [_step(step) for step in STEPS if step not in tally.steps],
            "reasons_never_seen": [r.name for r in Reason if r not in tally.reasons],
            "failures": [dataclasses.asdict(f) | {"command": f.command} for f in self.failures],
            "failing_share_at_most": round(3 / max(1, tally.seeds), 6),  # by 95 %, if none failed
        }


def _step(step: tuple[Any, ...]) -> str:
    role, state, event = step
    return f"{role.name.lower()} {state.name} {event.name}"


def text(report: Report) -> str:
    """For people."""
    found = report.figures()
    rooms, verdicts = found["rooms"], found["verdicts"]
    lines = [
        f"{found['seeds']:,} schedules in {found['took_s']} s: {found['schedules_per_s']} a second "
        f"over {report.jobs} processes, {found['schedules_per_cpu_s']} a second of CPU; "
        f"{found['virtual_hours']} virtual hours",
        f"{rooms['prefill']:,} halves of rooms on prefill, {rooms['decode']:,} on decode, "
        f"{found['rooms_per_seed']} a schedule; {found['turns']:,} turns of processes, "
        f"{found['frames']:,} frames",
        "",
        f"{'verdict':20} {'prefill':>10} {'decode':>10}",
    ]
    names = sorted(
        {*verdicts["prefill"], *verdicts["decode"]},
        key=lambda name: -sum(verdicts[role].get(name, 0) for role in verdicts),
    )
    lines += [
        f"{name:20} {verdicts['prefill'].get(name, 0):10,} {verdicts['decode'].get(name, 0):10,}"
        for name in names
    ]
    lines += ["", "faults: " + ", ".join(f"{v} {n:,}" for v, n in found["faults"].items() if n)]
    lines += [
        f"moves of the state machine seen: {found['moves_seen']} of {found['moves']}; "
        f"events in a state: {found['steps_seen']} of {found['steps']}",
        "never tried: " + (", ".join(found["steps_never_tried"]) or "none"),
        "reasons never given: " + (", ".join(found["reasons_never_seen"]) or "none"),
        "",
    ]
    if report.failures:
        lines += [f"{len(report.failures)} FAILED", *map(str, report.failures)]
    elif found["seeds"]:
        share = found["failing_share_at_most"]
        lines.append(f"no law was broken; by 95 % at most a share of {share:g} of schedules does")
    if found["stopped_by"]:
        of = f" of {report.ordered:,}" if report.ordered is not None else ""
        lines.append(f"STOPPED by {found['stopped_by']}: {found['seeds']:,}{of} were played")
    elif not found["seeds"]:
        lines.append("NOTHING was played")
    return "\n".join(lines)


# --- playing -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What goes wrong in a world is no news."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def play(first: int, seeds_count: int) -> tuple[Tally, list[Failure]]:
    """Some seeds, one after the other, in this process."""
    tally, begun_s = Tally(), time.process_time()
    with _silence():
        played = [play_one(seed, tally) for seed in range(first, first + seeds_count)]
    tally.cpu_s = time.process_time() - begun_s
    return tally, [failed for failed in played if failed is not None]


def play_one(seed: int, tally: Tally) -> Failure | None:
    where = schedule.setting(seed)
    acts = schedule.schedule(where)
    if schedule.failure(where, acts, tally) is None:
        return None
    fewer = schedule.shrink(where, acts, SHRINK_TRIES_MAX)
    line = schedule.failure(where, fewer) or "did not fail again"
    return Failure(seed, line, str(where), tuple(map(str, fewer)))


def _leave_interrupts() -> None:
    """To the process that started us."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _interrupt(number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt(number)


def _number_of(interrupt: KeyboardInterrupt) -> int:
    """Of the signal; Python's own handler, of SIGINT, does not say."""
    return int(interrupt.args[0]) if interrupt.args else signal.SIGINT


def _chunks(first: int, seeds_count: int | None) -> Iterator[tuple[int, int]]:
    for at in count(0, CHUNK):
        left = CHUNK if seeds_count is None else min(CHUNK, seeds_count - at)
        if left <= 0:
            return
        yield first + at, left


def play_all(
    first: int, seeds_count: int | None, *, jobs: int, limit_s: float | None = None
) -> Report:
    """Over several processes, until all were played (None: without end) or the time is over."""
    report = Report(jobs, first, ordered=seeds_count)
    begun = time.monotonic()
    chunks = _chunks(first, seeds_count)
    context = multiprocessing.get_context("spawn")
    going: set[Future[tuple[Tally, list[Failure]]]] = set()
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_leave_interrupts) as pool:
        try:
            while True:
                spent = limit_s is not None and time.monotonic() - begun > limit_s
                while len(going) < 2 * jobs and not spent and len(report.failures) < FAILURES_MAX:
                    chunk = next(chunks, None)
                    if chunk is None:
                        break
                    going.add(pool.submit(play, *chunk))
                if not going:
                    break
                done, going = wait(going, return_when=FIRST_COMPLETED)
                for future in done:
                    report.add(*future.result())
        except KeyboardInterrupt as interrupt:
            report.signal = _number_of(interrupt)
            print("interrupted: what is begun is played to its end", file=sys.stderr)
            pool.shutdown(cancel_futures=True)
            for future in going:
                if not future.cancelled():
                    report.add(*future.result())
    report.took_s = time.monotonic() - begun
    report.failures.sort(key=lambda failed: failed.seed)
    return report


def catch(name: str, first: int, seeds_max: int) -> tuple[int, str] | None:
    """How many seeds it takes to see that a mutant breaks a law, and what is seen; None if none
    of so many does."""
    with mutated(MUTANTS[name]):
        for seed in range(first, first + seeds_max):
            where = schedule.setting(seed)
            line = schedule.failure(where, schedule.schedule(where))
            if line is not None:
                return seed - first + 1, line
    return None


# --- the command ---------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m stress.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, help="how many; 10,000 unless --minutes is given")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--minutes", type=float, help="begin no more after so long")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--seed", type=int, help="play this one alone")
    parser.add_argument("--mutants", action="store_true", help="break pdrt on purpose")
    options = parser.parse_args(arguments)
    for name in ("seeds", "minutes", "jobs"):
        given = getattr(options, name)
        if given is not None and not given > 0:
            parser.error(f"--{name} {given}: nothing would be played")
    if options.seeds is None and options.minutes is None:
        options.seeds = 10_000
    return options


def check_mutants(first: int) -> bool:
    """Prints a line for each; true if all were caught."""
    survivors = 0
    for name in MUTANTS:
        with _silence():
            caught = catch(name, first, MUTANT_SEEDS_MAX)
        survivors += caught is None
        words = "NOT CAUGHT" if caught is None else f"{caught[0]:4} seeds: {caught[1][:100]}"
        print(f"{name:32} {words}", flush=True)
    return not survivors


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.mutants:
        return 0 if check_mutants(options.first) else 1
    if options.seed is not None:
        began = time.monotonic()
        report = Report(1, options.seed, ordered=1)
        report.add(*play(options.seed, 1))
        report.took_s = time.monotonic() - began
        print(schedule.setting(options.seed))
    else:
        limit_s = options.minutes * 60 if options.minutes is not None else None
        report = play_all(options.first, options.seeds, jobs=options.jobs, limit_s=limit_s)
    print(text(report))
    if options.json is not None:
        options.json.write_text(json.dumps(report.figures(), indent=1) + "\n", encoding="utf-8")
    return report.exit_code


def command(arguments: Sequence[str] | None = None) -> int:
    """`main`, that a signal may stop at any moment."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the second: a shell's background ignores it
        signal.signal(number, _interrupt)
    try:
        return main(arguments)
    except KeyboardInterrupt as interrupt:
        print("interrupted: nothing is said of what was played", file=sys.stderr)
        return STOPPED + _number_of(interrupt)


if __name__ == "__main__":
    sys.exit(command())
