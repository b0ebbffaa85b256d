"""What a run found, for people and programs: a line a piece, one JSON, one Markdown, one plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stress.bench.figures import digits, summarise
from stress.bench.report import Machine
from stress.cascades.apart import Order
from stress.cascades.oracle.power import ASKED, EXCUSED
from stress.cascades.piece import Outcome

TEXT = """# Cascades

Written by `bin/stress --report`; see `stress/cascades/`. Plot: [{plot}]({plot}).

Beside each zero stands the upper bound that it leaves for the rate, with 95 % confidence: 3/n after
n trials. Times are in seconds, p99 by nearest rank. Everything is judged afterwards, from
append-only histories of the processes, by an oracle that shares no code with pdrt.

The trees are not as shipped: restarts have practically no limit and no backoff, deadlines are 3 s,
and a room must be quiet after 2 s (`stress/cascades/trees.py`).
"""
POWER = "chance that an innocent room would be excused, by reason"


def line(order: Order, outcome: Outcome) -> str:
    """Of one piece."""
    wrong = f", {len(outcome.violations)} VIOLATIONS" if outcome.violations else ""
    rates = f"{outcome.cycles} cycles, {outcome.rooms} rooms in {outcome.took_s:.1f} s"
    return f"{order.name}: {rates}{wrong}"


def bound(trials: int) -> str:
    return f"{3 / trials:.2g}" if trials else "no trial"


def rows_of_zeros(outcome: Outcome) -> list[list[str]]:
    rows = []
    for name, of in sorted(outcome.zeros.items()):
        trials = outcome.counts.get(of, 0)
        found = outcome.counts.get(name, 0)
        rows.append([name, f"{found:,}", f"{trials:,} {of}", "" if found else bound(trials)])
    return rows


def rows_of_power(outcome: Outcome) -> list[list[str]]:
    """Of the reasons for which rooms failed."""
    asked = outcome.counts.get(ASKED, 0)
    failed = {name.rpartition(", ")[2] for name in outcome.counts if name.startswith("verdicts: ")}
    rows = []
    for name, excused in sorted(outcome.counts.items()):
        reason = name.removeprefix(EXCUSED)
        if asked and name != reason and reason in failed:
            rows.append([reason, f"{excused:,} of {asked:,}", f"{100 * excused / asked:.2g} %"])
    return rows


def rows_of_times(outcome: Outcome) -> list[list[str]]:
    rows = []
    for name, samples in sorted(outcome.times_s.items()):
        if samples:
            found = summarise(samples)
            values = (found.median, found.p99, found.max)
            rows.append([name, f"{found.n:,}", *(digits(value) for value in values)])
    return rows


def rows_of_counts(outcome: Outcome) -> list[list[str]]:
    counts = outcome.counts.items()
    shown = {k: v for k, v in counts if k not in outcome.zeros and not k.startswith(EXCUSED)}
    return [[name, f"{count:,}"] for name, count in sorted(shown.items())]


def console(outcomes: Sequence[Outcome]) -> str:
    lines = []
    for outcome in outcomes:
        rate = outcome.cycles / outcome.took_s if outcome.took_s else 0.0
        rooms = outcome.rooms / outcome.took_s if outcome.took_s else 0.0
        lines.append(
            f"\n{outcome.cascade}: {outcome.cycles:,} cycles ({rate:.2f}/s), "
            f"{outcome.rooms:,} rooms ({rooms:.0f}/s), {outcome.took_s:.0f} s"
        )
        for name, found, trials, most in rows_of_zeros(outcome):
            after = f", so below {most}" if most else ""
            lines.append(f"  {found} {name} of {trials}{after}")
        if power := rows_of_power(outcome):
            told = ", ".join(f"{reason} {chance}" for reason, _, chance in power)
            lines.append(f"  {POWER}: {told}")
        for name, n, *values in rows_of_times(outcome):
            lines.append(f"  {name}: n {n}, p50 {values[0]}, p99 {values[1]}, max {values[2]} s")
        lines += [f"  {name}: {value:.4g}" for name, value in sorted(outcome.peaks.items())]
        lines += [f"  VIOLATION {text}" for text in outcome.violations]
        lines += [f"  note: {note}" for note in outcome.notes]
    return "\n".join(lines)


def markdown(machine: Machine, seed: int, outcomes: Sequence[Outcome], plot: str) -> str:
    lines = [TEXT.format(plot=plot)]
    facts = {**machine.record(), "seed": seed}
    lines += _table(["", ""], [[name, str(value)] for name, value in facts.items()])
    cycles, rooms = sum(o.cycles for o in outcomes), sum(o.rooms for o in outcomes)
    broken = sum(len(o.violations) for o in outcomes)
    broken_words = "1 violation" if broken == 1 else f"{broken} violations"
    lines += ["", f"{cycles:,} cycles, {rooms:,} rooms, **{broken_words}**."]
    for outcome in outcomes:
        lines += ["", f"## {outcome.cascade}", ""]
        lines += [
            f"{outcome.cycles:,} cycles and {outcome.rooms:,} rooms in {outcome.took_s:.0f} s.", ""
        ]  # fmt: skip
        zeros = rows_of_zeros(outcome)
        lines += _table(["must be 0", "found", "of", "95 % bound"], zeros) if zeros else []
        if power := rows_of_power(outcome):
            lines += ["", *_table([POWER, "excused", "chance"], power)]
        if times := rows_of_times(outcome):
            lines += ["", *_table(["back after, s", "n", "p50", "p99", "max"], times)]
        if outcome.peaks:
            peaks = [[name, f"{value:.4g}"] for name, value in sorted(outcome.peaks.items())]
            lines += ["", *_table(["largest", ""], peaks)]
        lines += ["", "<details><summary>All counts</summary>", ""]
        lines += [*_table(["", "count"], rows_of_counts(outcome)), "", "</details>"]
        lines += ["", *(f"- **VIOLATION**: {text}" for text in outcome.violations)]
        lines += [f"- {note}" for note in outcome.notes]
    return "\n".join(lines).rstrip() + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def one(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [one(head), one(["---"] * len(head)), *map(one, rows)]


def draw(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Curves over time, and how long it took until roles served again."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [outcome for outcome in outcomes if outcome.series or outcome.times_s]
    figure, axes = pyplot.subplots(
        max(1, len(drawn)), 2, figsize=(17, 3.4 * max(1, len(drawn))), squeeze=False
    )
    for (left, right), outcome in zip(axes, drawn, strict=False):
        left.set_title(f"{outcome.cascade}: over time")
        for name, points in outcome.series.items():
            left.plot([at for at, _ in points], [value for _, value in points], label=name, lw=0.8)
        left.set_xlabel("s")
        left.set_yscale("symlog")
        right.set_title("back after")
        for name, samples in sorted(outcome.times_s.items()):
            if samples:
                ordered = sorted(samples)
                share = [(i + 1) / len(ordered) for i in range(len(ordered))]
                right.step(ordered, share, where="post", label=f"{name} ({len(ordered)})")
        right.set_xscale("log")
        right.set_xlabel("s")
        for axis in (left, right):
            if axis.get_legend_handles_labels()[1]:
                axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write(path: Path, machine: Machine, seed: int, outcomes: Sequence[Outcome]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    plot = path.with_suffix(".png")
    draw(plot, outcomes)
    path.write_text(markdown(machine, seed, outcomes, plot.name))
    results = [
        {name: value for name, value in msgspec.to_builtins(o).items() if name != "series"}
        | {"times_s": {name: _summary(samples) for name, samples in o.times_s.items()}}
        for o in outcomes
    ]
    record = {"machine": machine.record(), "seed": seed, "results": results}
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


def _summary(samples: list[float]) -> dict[str, float] | None:
    return msgspec.to_builtins(summarise(samples)) if samples else None
