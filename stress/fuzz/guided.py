"""A coverage-guided fuzzer on each decoder, if atheris is installed.

    python -m stress.fuzz.guided [--runs 200000] [NAME ...]

It is no dependency of pdrt: `pip install atheris` where there is a wheel of it for this Python.
What it instruments is Python; msgspec is C, so what it learns is which of our own branches an
input takes.  Without it the mutator's samples are played, as the tests do.  Exits with 1 at the
first input that makes a decoder raise what it may not; that is printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SEEDS = 300  # good and nearly good samples to start from
LENGTH_MAX = 4096


def play(name: str, runs: int) -> None:
    """In a process of its own: atheris ends it."""
    try:
        import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        _play_mutator(name, runs)
        return
    with atheris.instrument_imports(include=["pdrt"]):
        from stress.fuzz.decoders import DECODERS
    from pdrt.protocol.codec import seal

    decoder = next(d for d in DECODERS if d.name == name)

    def one(data: bytes) -> None:
        decoder.check(seal(data) if name.startswith("frame") else data)

    sample = decoder.samples(0)
    with tempfile.TemporaryDirectory(prefix="pdrt-corpus-") as corpus:
        for number in range(SEEDS):
            data = sample()[:LENGTH_MAX]
            Path(corpus, str(number)).write_bytes(data[5:] if name.startswith("frame") else data)
        flags = [f"-runs={runs}", f"-max_len={LENGTH_MAX}", "-print_final_stats=1"]
        atheris.Setup(["guided", *flags, corpus], one)
        atheris.Fuzz()


def _play_mutator(name: str, runs: int) -> None:
    from stress.fuzz.decoders import DECODERS

    decoder = next(d for d in DECODERS if d.name == name)
    sample = decoder.samples(0)
    for _ in range(runs):
        data = sample()
        try:
            decoder.check(data)
        except Exception:
            print(f"{name}: {data!r}", file=sys.stderr)
            raise
    print(f"{name}: {runs:,} samples of the mutator; atheris is not installed")


def main(arguments: Sequence[str]) -> int:
    from stress.fuzz.decoders import DECODERS

    names = [decoder.name for decoder in DECODERS if decoder.name != "aux-row"]  # of fixed length
    parser = argparse.ArgumentParser(
        "python -m stress.fuzz.guided",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--runs", type=int, default=200_000)
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    bad = []
    for name in options.names or names:
        process = multiprocessing.get_context("spawn").Process(
            target=play, args=(name, options.runs)
        )
        process.start()
        process.join()
        if process.exitcode:
            bad.append(name)
    print(f"guided: {'good' if not bad else 'BAD: ' + ', '.join(bad)}", flush=True)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
