"""The report of a run: a picture of its curves and a table of where its time went, both from `metrics.jsonl`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_megatron.observe.log import read

# one panel per entry: title and the metrics drawn in it; a panel whose metrics the run never reported is left out
PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward/mean", "reward/min", "reward/max")),
    ("KL to the reference", ("kl/ref",)),
    ("response length (tokens)", ("response/length_mean",)),
    ("actor loss", ("actor/loss",)),
    ("critic loss", ("critic/loss",)),
    ("entropy", ("actor/entropy",)),
)


def series(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, without the steps that have no value for it."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def plot(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], title: str = "") -> Path:
    """Draw the curves of reward, KL, length and losses into a PNG file and return its path.

    Raises ValueError when the rows hold none of the metrics of `PANELS`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(name, drawn) for name, names in PANELS if (drawn := [n for n in names if series(rows, n)[0]])]
    if not panels:
        known = ", ".join(name for _, names in PANELS for name in names)
        raise ValueError(f"nothing to draw in {len(rows)} steps: none of {known} is there")
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.9 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, (name, drawn) in zip(axes, panels, strict=False):
        for index, metric in enumerate(drawn):
            steps, points = series(rows, metric)
            label = metric.rsplit("/", 1)[-1]
            axis.plot(steps, points, marker="." if len(steps) < 40 else None, label=label,
                      linewidth=1.6 if index == 0 else 0.8, alpha=1.0 if index == 0 else 0.6)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        if len(drawn) > 1:
            axis.legend(fontsize=7)
    for axis in axes[len(panels):]:  # the empty cells of the last line
        axis.set_visible(False)
    if title:
        figure.suptitle(title, fontsize=11)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def time_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where the time went: seconds per phase over the run, per step, and each phase's share of the total.

    `timing/step` (the whole step) is the total when it is there, and what no phase accounts for is shown as "other".
    """
    totals: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("timing/") and value is not None:
                phase = name.removeprefix("timing/")
                totals[phase] = totals.get(phase, 0.0) + value
    whole = totals.pop("step", None)
    if whole is not None and whole > sum(totals.values()):
        totals["other"] = whole - sum(totals.values())
    total = sum(totals.values())
    if not rows or total == 0:
        return "no timings in this log"
    width = max(len("phase"), *(len(phase) for phase in totals))
    out = [f"{'phase':<{width}}  {'seconds':>10}  {'per step':>10}  {'share':>6}"]
    for phase, seconds in sorted(totals.items(), key=lambda item: -item[1]):
        out.append(f"{phase:<{width}}  {seconds:>10.2f}  {seconds / len(rows):>10.3f}  {seconds / total:>6.1%}")
    out.append(f"{'total':<{width}}  {total:>10.2f}  {total / len(rows):>10.3f}  {1:>6.1%}")
    return "\n".join(out)


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """First and last value of the metrics that are drawn, one line each."""
    out = []
    for _, names in PANELS:
        steps, points = series(rows, names[0])
        if steps:
            out.append(f"{names[0]:<24} {points[0]:>10.4f} (step {steps[0]}) -> {points[-1]:>10.4f} (step {steps[-1]})")
    return "\n".join(out)


def write(folder: str | os.PathLike[str], picture: str | os.PathLike[str] | None = None) -> str:
    """Read a run's log, draw `folder/report.png` (or `picture`) and return the text of the report."""
    rows = read(folder)
    base = Path(folder) if Path(folder).is_dir() else Path(folder).parent
    if not rows:
        return f"no finished step in {base}"
    parts = [f"{len(rows)} steps", summary(rows), time_table(rows)]
    if any(series(rows, name)[0] for _, names in PANELS for name in names):
        path = plot(rows, picture if picture is not None else base / "report.png", title=base.name)
        parts.append(f"curves: {path}")
    return "\n\n".join(part for part in parts if part)
