"""Plots of a sweep: ablation bars, learning curves, confusion, calibration, score over latency."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dcl.files import whole
from dcl.learning.comparison import LEVELS, Record, compare
from dcl.taxonomy import MODES


def draw_results(records: Sequence[Record], against: Sequence[str], out: Path) -> list[Path]:
    """Draw all plots of a sweep as PNG.

    Args:
        records: Finished cells.
        against: Cells that the others are compared with, as `reference_of` says; confusion and
            calibration are those of the first.
        out: Folder.

    Returns:
        The files.
    """
    split = "test" if all("test" in record["scores"] for record in records) else "valid"
    own = [record for record in records if record["cell"] == against[0]] or list(records)
    cells = dict.fromkeys(record["cell"] for record in records)
    tall = 1.5 + 0.35 * len(cells)
    plots: dict[str, tuple[tuple[float, float], Callable[[Axes], None]]] = {
        "ablation": ((9.0, tall), lambda axes: draw_bars(axes, records, against, split)),
        "curves": ((7.0, 4.5), lambda axes: draw_curves(axes, records)),
        "confusion": ((6.5, 5.5), lambda axes: draw_confusion(axes, own, split)),
        "calibration": ((4.5, 4.5), lambda axes: draw_reliability(axes, own, split)),
        "latency": ((6.0, 4.5), lambda axes: draw_latency(axes, records, against, split)),
    }
    files = []
    for name, (size, draw) in plots.items():
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        file = out / f"{name}.png"
        with whole(file) as part:
            figure.savefig(part, format="png", dpi=120)
        files.append(file)
    return files


def draw_bars(axes: Axes, records: Sequence[Record], against: Sequence[str], split: str) -> None:
    """Micro-F1 of each cell and level, with the interval of its difference to another cell."""
    for i, level in enumerate(LEVELS):
        lines = compare(records, against, split, level)
        means = {line.cell: line.mean for line in lines}
        place = np.arange(len(lines)) + (i - 1) * 0.27
        mean = np.array([line.mean for line in lines])
        # The interval is one of differences; a cell without one shows its deviation over seeds.
        spread = [
            (line.deviation, line.deviation)
            if np.isnan(line.p)
            else (
                max(line.mean - means[line.against] - line.low, 0.0),
                max(line.high - line.mean + means[line.against], 0.0),
            )
            for line in lines
        ]
        axes.barh(place, mean, height=0.25, xerr=np.array(spread).T, capsize=2, label=level)
        axes.set_yticks(range(len(lines)), [line.cell for line in lines])
    axes.invert_yaxis()
    axes.set_xlabel(f"micro-F1 on {split}, points")
    axes.legend()


def draw_curves(axes: Axes, records: Sequence[Record]) -> None:
    """Pair micro-F1 on validation after each epoch, mean over seeds."""
    for cell in dict.fromkeys(record["cell"] for record in records):
        curves: dict[float, list[float]] = {}
        for record in records:
            for row in record["curve"] if record["cell"] == cell else ():
                if "valid/pair_f1" in row:
                    curves.setdefault(row["epoch"] + 1, []).append(100 * row["valid/pair_f1"])
        axes.plot(list(curves), [float(np.mean(v)) for v in curves.values()], ".-", label=cell)
    axes.set_xlabel("epoch")
    axes.set_ylabel("pair micro-F1 on validation, points")
    axes.legend(fontsize="small")


def draw_confusion(axes: Axes, records: Sequence[Record], split: str) -> None:
    """Share of the faulty agents of each mode (row) with each likeliest mode (column)."""
    table = np.sum([record["confusion"][split] for record in records], axis=0)
    share = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(share, vmin=0, vmax=1, cmap="Blues")
    codes = [mode.value.removeprefix("FM-") for mode in MODES]
    axes.set_xticks(range(len(codes)), codes, rotation=90)
    axes.set_yticks(range(len(codes)), codes)
    axes.set_xlabel("likeliest mode")
    axes.set_ylabel("labelled mode")
    if axes.figure is not None:
        axes.figure.colorbar(image, ax=axes)


def draw_reliability(axes: Axes, records: Sequence[Record], split: str) -> None:
    """How often pairs of a probability are faults, against that probability."""
    tables = np.array([record["reliability"][split] for record in records])  # (seeds, bins, 3)
    number = tables[..., 0].sum(axis=0)
    prob, right = (
        (tables[..., 0] * tables[..., i]).sum(axis=0) / np.maximum(number, 1) for i in (1, 2)
    )
    axes.plot([0, 1], [0, 1], "--", color="grey", label="calibrated")
    axes.plot(prob[number > 0], right[number > 0], "o-", label=records[0]["cell"])
    axes.set_xlabel("pair probability")
    axes.set_ylabel(f"share that is a fault on {split}")
    axes.legend()


def draw_latency(axes: Axes, records: Sequence[Record], against: Sequence[str], split: str) -> None:
    """Pair micro-F1 of each cell over the time of its network for one bag."""
    for line in compare(records, against, split, "pair"):
        own: list[Mapping[str, Any]] = [r for r in records if r["cell"] == line.cell]
        time = float(np.median([record["latency_ms"] for record in own]))
        axes.errorbar(time, line.mean, yerr=line.deviation, fmt="o", capsize=2)
        axes.annotate(line.cell, (time, line.mean), fontsize="small")
    axes.set_xlabel("network, ms a bag, without the encoder")
    axes.set_ylabel(f"pair micro-F1 on {split}, points")
