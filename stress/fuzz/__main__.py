"""Hostile frames at full speed against a running pair of trees that serves rooms all the while.

    python -m stress.fuzz [--frames 1000000] [--seed N] [--seconds S] [--quick] [--json FILE]

Shot at: prefill's and decode's control ports, the doors within each tree, the attach sockets and
the supervisors' HTTP ports.  With noise, cut and damaged frames, wrong greetings, several frames
for one, frames that are too large, connections that break off or are reset, and messages that are
right by their type and hostile by what they say (stress/fuzz/hostile.py: what may be named there).

At the end: no process died or was restarted, none holds more descriptors or memory than bounded
memories explain, each malformed frame is counted by its kind, every room that nobody named exactly
has succeeded with the right bytes, and those that were named have ended.  (A Success that was
forged is told by the aux row: corrupt_aux among the victims' ends.)  Exits with 1 if not.

Accounting is exact for connections that ended politely: what a plain socket has written, its other
end has read.  Of those that were reset, or hung up on, frames may be lost; they are counted apart
("lost at most").  A frame that is counted VALUE was taken in and made a handler raise: dropped, as
it should be, and wrong all the same, for nothing is meant to get so far.

The trees use shm: whoever forges NIXL's metadata can end a worker (docs/security.md).
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter as Multiset
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdrt.config import Timeouts, environment_with
from stress.bench.trees import ROOT, SMALL, Tree, pair
from stress.fuzz.gun import Answering, Door, Told
from stress.fuzz.oracle import State, descriptors_are_back, faults, unaccounted
from stress.fuzz.rooms import Rooms

FRAMES, QUICK_FRAMES = 1_000_000, 50_000
GUNS = 2
GUN_S = 1800.0
CALM_S = 30.0  # in which descriptors are given back: peers that fell silent are lost after 3 s
# A host that is busy with the guns must not make an actor look hung.
TIMEOUTS = Timeouts(bootstrap_s=20.0, waiting_s=20.0, stall_s=20.0, quiet_s=15.0, hang_s=5.0)
#: Frames to each kind of door, relative to the others.  A volley at ZMQ's doors has many frames.
WEIGHTS = {"control": 100, "local": 25, "attach": 60, "http": 20}


def doors(tree: Tree) -> list[Door]:
    name, instance = tree.name, tree.facts["instance"]
    http_port = int(tree.facts["supervisor"].rpartition(":")[2])
    return [
        Door("control", name, "127.0.0.1", tree.control_port),
        Door("local", name, f"pdrt-{instance}-listener"),
        Door("local", name, f"pdrt-{instance}-worker0"),
        Door("attach", name, tree.attach.removeprefix("@")),
        Door("http", name, "127.0.0.1", http_port),
    ]


class Guns:
    """Processes that shoot."""

    def __init__(self, trees: Sequence[Tree], options: argparse.Namespace, folder: Path) -> None:
        address = f"@pdrt-fuzz-{secrets.token_hex(4)}"
        self.answering = Answering(address, options.seed)
        self._thread = threading.Thread(target=self.answering.serve, daemon=True)
        self._thread.start()
        targets = [door for tree in trees for door in doors(tree)]
        until_s = time.monotonic() + options.seconds if options.seconds else 0.0
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._popens = []
        for number in range(GUNS):
            told = Told(
                seed=options.seed * GUNS + number,
                frames=options.frames // GUNS,
                until_s=until_s,
                doors=targets,
                weights=[WEIGHTS[door.kind] for door in targets],
                supervisors={tree.name: tree.facts["supervisor"] for tree in trees},
                digest=SMALL.layout.digest,
                boot_id=boot_id,
                answering=address,
            )
            command = [sys.executable, "-c", "from stress.fuzz.gun import main; main()"]
            with (folder / f"gun{number}.err").open("wb") as errors:
                self._popens.append(
                    subprocess.Popen(
                        [*command, msgspec.json.encode(told).decode()],
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        cwd=ROOT,
                        env=environment_with({}),
                    )
                )
        self._folder = folder

    def wait(self) -> list[dict[str, Any]]:
        """What each has fired.  Raises RuntimeError with the words of one that broke."""
        fired = []
        for number, popen in enumerate(self._popens):
            output, _ = popen.communicate(timeout=GUN_S)
            if popen.returncode:
                words = (self._folder / f"gun{number}.err").read_text()[-2000:]
                raise RuntimeError(f"gun {number} broke:\n{words}")
            fired.append(json.loads(output))
        return fired

    def stop(self) -> None:
        for popen in self._popens:
            popen.kill()
            popen.wait()
            if popen.stdout is not None:
                popen.stdout.close()
        self.answering.stop()
        self._thread.join()


def merged(fired: list[dict[str, Any]], what: str) -> dict[str, Multiset[str]]:
    """By tree."""
    found: dict[str, Multiset[str]] = {}
    for gun in fired:
        for tree, kinds in gun[what].items():
            found.setdefault(tree, Multiset()).update(kinds)
    return found


def added(fired: list[dict[str, Any]], what: str) -> Multiset[str]:
    found: Multiset[str] = Multiset()
    for gun in fired:
        found.update(gun[what])
    return found


def fuzz(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run; the record has all that was seen, `wrong` first of all."""
    with pair(folder, SMALL, transport="shm", timeouts=TIMEOUTS) as trees:
        rooms = Rooms(*trees, SMALL, options.seed)
        rooms.start()
        try:
            rooms.busy.wait()
            for tree in trees:
                tree.settle(1.0)
            before = {tree.name: State.of(tree) for tree in trees}
            begun_s = time.monotonic()
            guns = Guns(trees, options, folder)
            try:
                fired = guns.wait()
            finally:
                guns.stop()
            took_s = time.monotonic() - begun_s
        finally:
            seen = rooms.stop()
        calm_s = time.monotonic() + CALM_S
        while time.monotonic() < calm_s:
            if all(descriptors_are_back(before[tree.name], tree) for tree in trees):
                break
            time.sleep(0.5)
        after = {tree.name: State.of(tree) for tree in trees}
        unready = [tree.name for tree in trees if not tree.is_ready()]
    sent, lost = merged(fired, "frames"), merged(fired, "lost_at_most")
    wrong = [line for gun in fired for line in gun["wrong"]] + seen.wrong
    wrong += [f"{name} is not ready" for name in unready]
    if not seen.succeeded:
        wrong.append("no room was served")
    for name, was in before.items():
        none: Multiset[str] = Multiset()
        wrong += faults(name, was, after[name])
        wrong += unaccounted(name, was, after[name], sent.get(name, none), lost.get(name, none))
    frames = sum(sum(kinds.values()) for kinds in sent.values())
    return {
        "wrong": wrong,
        "seed": options.seed,
        "frames": frames,
        "seconds": round(took_s, 1),
        "frames_a_second": round(frames / took_s),
        "rooms": {"succeeded": seen.succeeded, "slowest_s": round(seen.slowest_s, 3)},
        "victims": dict(seen.victims),
        "sent": {name: dict(kinds) for name, kinds in sent.items()},
        "lost_at_most": {name: dict(kinds) for name, kinds in lost.items()},
        "counted": {name: _growth(was, after[name]) for name, was in before.items()},
        "gun_seconds": dict(added(fired, "seconds")),
        "volleys": dict(added(fired, "volleys")),
        "answers": dict(added(fired, "answers")),
        "answered_nonsense": guns.answering.answered,
        "memory": {
            name: {
                child: {
                    "descriptors": [was.fds[child], after[name].fds.get(child, 0)],
                    "mib": [rss[child] >> 20 for rss in (was.rss_bytes, after[name].rss_bytes)],
                }
                for child in was.fds
                if child in after[name].rss_bytes
            }
            for name, was in before.items()
        },
    }


def _growth(before: State, after: State) -> dict[str, int]:
    counters = {name: after.counted[name] - count for name, count in before.counted.items()}
    kinds = {f"MALFORMED_{k}": n - before.malformed[k] for k, n in after.malformed.items()}
    return {name: count for name, count in (counters | kinds).items() if count}


def line(record: dict[str, Any]) -> str:
    verdict = "good" if not record["wrong"] else f"{len(record['wrong'])} things are wrong"
    return (
        f"fuzz: {verdict}: {record['frames']:,} frames in {record['seconds']:g} s "
        f"({record['frames_a_second']:,} a second), seed {record['seed']}; "
        f"{record['rooms']['succeeded']:,} rooms succeeded, "
        f"{sum(record['victims'].values()):,} victims ended"
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m stress.fuzz",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    how_many = f"{FRAMES:,}; quick: {QUICK_FRAMES:,}"
    parser.add_argument("--frames", type=int, default=0, help=how_many)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0, help="end earlier, after so long")
    parser.add_argument("--quick", action="store_true", help="a small run")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--logs", type=Path, help="an existing folder to keep the trees' logs in")
    options = parser.parse_args(arguments)
    options.frames = options.frames or (QUICK_FRAMES if options.quick else FRAMES)
    return options


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="pdrt-fuzz-") as temporary:
        folder = options.logs or Path(temporary)
        record = fuzz(options, folder)
        if record["wrong"]:
            for log in sorted(folder.glob("*.log")):
                odd = [t for t in log.read_text(errors="replace").splitlines() if " INFO " not in t]
                print(f"-- {log.name}", *odd[-60:], sep="\n", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    for wrong in record["wrong"]:
        print(wrong, file=sys.stderr)
    print(line(record), flush=True)
    return int(bool(record["wrong"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
