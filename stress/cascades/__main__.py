"""Cascades: pdrt under kills, stops and aborts, with an oracle that reads the histories afterwards.

Without names every cascade is played.  A piece of a cascade is settled by its seed; a run is
resumed where it stopped if --pieces-in names the same folder again.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stress.bench.report import Machine
from stress.cascades import judgement, report
from stress.cascades.apart import CASCADES, Order, load, play
from stress.cascades.piece import QUICK, RELEASE, Outcome, Piece, Share
from stress.cascades.rig import salt_of


def orders(options: argparse.Namespace) -> Iterator[Order]:
    for name in options.names or CASCADES:
        share = share_of(name, options)
        for index in range(share.pieces):
            yield Order(name, options.seed + index, share.cycles, share.seconds, options.quick)


def share_of(name: str, options: argparse.Namespace) -> Share:
    module = load(name)
    share: Share = getattr(module, "QUICK", QUICK)
    if options.release:
        share = getattr(module, "RELEASE", RELEASE)
    given = options.cycles is not None or options.minutes is not None
    if given and not options.release:  # one piece, as long as was said
        seconds = 60 * options.minutes if options.minutes is not None else 1e9
        cycles = options.cycles if options.cycles is not None else 1_000_000_000
        share = Share(1, cycles, seconds)
    return share


def played(order: Order, folder: Path) -> Outcome:
    """From the folder if it was played already."""
    path = folder / f"{order.name}.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Outcome)
    outcome = play(order, folder)
    partial = path.with_suffix(".tmp")
    partial.write_bytes(msgspec.json.encode(outcome))
    partial.rename(path)
    return outcome


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "bin/stress", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = ", ".join(CASCADES)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"cascades to play: {names}")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="under three minutes; the default")
    size.add_argument("--release", action="store_true", help="10,000 cycles; takes hours")
    parser.add_argument("--seed", type=int, default=1, help="of the first piece; others follow it")
    parser.add_argument("--cycles", type=int, help="one piece of each cascade, of so many cycles")
    parser.add_argument("--minutes", type=float, help="one piece of each cascade, at most so long")
    parser.add_argument("--pieces-in", type=Path, metavar="DIR", help="a JSON a piece; resumes")
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="and FILE.json and FILE.png")
    parser.add_argument(
        "--again",
        type=Path,
        metavar="PIECE",
        help="play nothing: judge the histories in that folder, which a piece has left, again",
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(CASCADES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {names}")
    return options


def judged_again(place: Path) -> int:
    """0 if the oracle has nothing to say of it by now."""
    cascade, _, seed = place.name.rpartition("-")
    mix = getattr(load(cascade), "MIX", None) if cascade in CASCADES else None
    if mix is None or not seed.isdecimal() or not (place / "histories").is_dir():
        print(f"{place}: no folder of a piece whose histories are judged", file=sys.stderr)
        return 2
    piece = Piece(int(seed), 0, 0.0, place)
    outcome = judgement.judge(piece, cascade, salt_of(piece), mix)
    print(report.console([outcome]), flush=True)
    return int(bool(outcome.violations))


def main(arguments: Sequence[str]) -> int:
    """0 if no law was broken."""
    options = parse(arguments)
    if options.again:
        return judged_again(options.again)
    machine = Machine.now(["bin/stress", *arguments])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = options.pieces_in or Path(tempfile.mkdtemp(prefix="pdrt-stress-"))
    folder.mkdir(parents=True, exist_ok=True)
    merged: dict[str, Outcome] = {}
    for order in orders(options):
        begun = datetime.now(UTC)
        outcome = played(order, folder)
        print(f"{begun:%H:%M:%S} {report.line(order, outcome)}", flush=True)
        if order.cascade in merged:
            merged[order.cascade].add(outcome)
        else:
            merged[order.cascade] = outcome
    outcomes = list(merged.values())
    print(report.console(outcomes), flush=True)
    if options.report:
        report.write(options.report, machine, options.seed, outcomes)
    broken = any(outcome.violations for outcome in outcomes)
    if broken:
        print(f"histories and logs: {folder}", file=sys.stderr)
    elif not options.pieces_in:
        for path in folder.glob("*.json"):
            path.unlink()
        folder.rmdir()
    return int(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
