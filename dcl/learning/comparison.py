"""What a cell of a sweep scored, and tables that compare cells over seeds.

Letters: `N` items, `M` = 14 modes, `R` resamples.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dcl.attribution import Calibration, Logits, sigmoid
from dcl.files import whole
from dcl.learning.data import Item, collate
from dcl.learning.inference import score_items
from dcl.learning.model import M, Model
from dcl.learning.training import held_out, judge
from dcl.splits import Split
from dcl.targets import Targets

Floats = NDArray[np.float64]
Record = Mapping[str, Any]

LEVELS = ("pair", "agent", "mode")
_BINS = 10
_RESAMPLES = 2000


def measure(model: Model, items: Mapping[Split, Sequence[Item]], work: Path) -> dict[str, Any]:
    """All that tables and plots need to know of a trained model, as plain JSON.

    Args:
        model: The model.
        items: Items of all splits.
        work: Folder with the training log of its first member.

    Returns:
        `scores` by split, level and metric in points; `counts` of hits, false alarms and misses of
        each item by split and level; `confusion` and `reliability` by split; `curve` by epoch;
        `latency_ms` of the network for one bag; `parameters`.
    """
    calibration, _ = judge(model, items)
    found: dict[str, Any] = {"scores": {}, "counts": {}, "confusion": {}, "reliability": {}}
    found["items"] = {}
    usable = {split: members for split, members in held_out(items).items() if members}
    for split, members in usable.items():
        logits, targets = score_items(model, members), [item.targets for item in members]
        counts = {level: count(logits, targets, calibration, level) for level in LEVELS}
        found["counts"][split] = {level: table.tolist() for level, table in counts.items()}
        found["scores"][split] = {
            level: {"micro_f1": micro(table)} for level, table in counts.items()
        }
        for level in ("pair", "mode"):
            by_mode = count_modes(logits, targets, calibration, level)
            found["scores"][split][level]["macro_f1"] = macro(by_mode)
        found["confusion"][split] = confuse(logits, targets).tolist()
        found["reliability"][split] = bin_probs(logits, targets, calibration).tolist()
        groups = json.dumps([item.group for item in members])
        found["items"][split] = hashlib.sha256(groups.encode()).hexdigest()
    found["curve"] = read_curve(work / "member-0")
    found["latency_ms"] = time_bags(model, next(iter(usable.values())))
    found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    return found


def count(
    logits: Sequence[Logits], targets: Sequence[Targets], calibration: Calibration, level: str
) -> NDArray[np.int64]:
    """Hits, false alarms and misses of each item at the calibrated threshold: `(N, 3)`.

    Faults of agents who never speak are misses, as in `dcl.calibration.score_levels`.
    """
    rows = []
    for one, truth in zip(logits, targets, strict=True):
        declared, label = _declare(one, calibration, level), getattr(truth, level)
        lost = getattr(truth, f"lost_{level}s", 0)
        hits = float((declared * label).sum())
        rows.append([hits, declared.sum() - hits, label.sum() - hits + lost])
    return np.array(rows).astype(np.int64)


def count_modes(
    logits: Sequence[Logits], targets: Sequence[Targets], calibration: Calibration, level: str
) -> NDArray[np.int64]:
    """Hits, false alarms and misses of each mode, pairs or whole items: `(M, 3)`.

    Pairs of agents who never speak are left out: no threshold could declare them.
    """
    table = np.zeros((M, 3))
    for one, truth in zip(logits, targets, strict=True):
        declared = _declare(one, calibration, level).reshape(-1, M)
        label = getattr(truth, level).reshape(-1, M)
        hits = (declared * label).sum(axis=0)
        table += np.stack([hits, declared.sum(axis=0) - hits, label.sum(axis=0) - hits], axis=1)
    return table.astype(np.int64)


def confuse(logits: Sequence[Logits], targets: Sequence[Targets]) -> NDArray[np.int64]:
    """How often a faulty agent of each mode (row) has each mode as its likeliest: `(M, M)`."""
    table = np.zeros((M, M), dtype=np.int64)
    for one, truth in zip(logits, targets, strict=True):
        for agent, mode in np.argwhere(truth.pair > 0):
            table[mode, int(one.pair[agent].argmax())] += 1
    return table


def bin_probs(
    logits: Sequence[Logits], targets: Sequence[Targets], calibration: Calibration
) -> Floats:
    """Pair probabilities in ten bins: number, mean probability, share that is right; `(10, 3)`."""
    score = np.concatenate([one.pair.ravel() for one in logits])
    scaled = (score / calibration.pair_temperature).astype(np.float32)
    prob = sigmoid(scaled).astype(np.float64)
    label = np.concatenate([truth.pair.ravel() for truth in targets])
    place = np.minimum((prob * _BINS).astype(np.int64), _BINS - 1)
    number = np.bincount(place, minlength=_BINS)
    sums = [np.bincount(place, weights=w, minlength=_BINS) for w in (prob, label)]
    return np.stack([number, *(s / np.maximum(number, 1) for s in sums)], axis=1)


def micro(counts: NDArray[Any]) -> float:
    """Micro-F1 in points from hits, false alarms and misses: `(..., 3)`, summed over all rows."""
    hits, wrong, missed = counts.reshape(-1, 3).sum(axis=0)
    return float(200 * hits / max(2 * hits + wrong + missed, 1))


def macro(counts: NDArray[Any]) -> float:
    """Mean F1 by mode in points, over the modes that were declared or true at all: `(M, 3)`.

    At the level of pairs this is not the macro-F1 of `benchmarks`, whose classes are pairs of an
    agent's name and a mode.
    """
    scores = [micro(row) for row in counts if row.sum()]
    return float(np.mean(scores)) if scores else 0.0


def read_curve(member: Path) -> list[dict[str, float]]:
    """What the trainer logged for each epoch, by name; a resumed run logs to a file of its own."""
    epochs: dict[int, dict[str, float]] = {}
    files = sorted(member.glob("logs/version_*/metrics.csv"), key=lambda f: f.stat().st_mtime_ns)
    for file in files:
        with file.open(newline="") as stream:
            for row in csv.DictReader(stream):
                values = {k: float(v) for k, v in row.items() if v and ("/" in k or k == "epoch")}
                if len(values) > 1:
                    epochs.setdefault(int(values["epoch"]), {}).update(values)
    return [epochs[epoch] for epoch in sorted(epochs)]


@torch.no_grad()
def time_bags(model: Model, items: Sequence[Item], *, most: int = 100) -> float:
    """Median time of the network for one bag, in milliseconds, without encoder and wide half."""
    batches = [collate([item]) for item in items[:most]]
    times = []
    for batch in batches:
        start = time.perf_counter()
        model(*batch.bags, names=batch.names)
        times.append(time.perf_counter() - start)
    return 1000 * float(np.median(times))


class Line(NamedTuple):
    """One cell of a table: a cell's metric over its seeds."""

    cell: str
    """Name of the cell."""
    against: str
    """Name of the cell that it is compared with; its own where there is none."""
    mean: float
    """Mean over seeds."""
    deviation: float
    """Sample standard deviation over seeds; 0 for one."""
    seeds: int
    """How many."""
    low: float
    """Lower end of the 95 % interval of the difference to that cell; NaN for itself."""
    high: float
    """Its upper end."""
    p: float
    """Two-sided p of the difference; NaN for itself."""


def long_rows(records: Sequence[Record]) -> Iterator[tuple[str, int, str, str, str, float]]:
    """Cell, seed, split, level, metric and value of everything that was measured."""
    for record in records:
        cell, seed = record["cell"], record["seed"]
        for split, levels in record["scores"].items():
            for level, metrics in levels.items():
                for metric, value in metrics.items():
                    yield cell, seed, split, level, metric, value
        for metric in ("seconds", "latency_ms", "parameters"):
            yield cell, seed, "", "", metric, record[metric]


def reference_of(cell: str, against: Sequence[str]) -> str:
    """The cell that one is compared with: the longest name that its own begins with, or the first.

    Args:
        cell: Name of the cell.
        against: Names of the cells that others are compared with, at least one.
    """
    begins = [name for name in against if name != cell and cell.startswith(name)]
    return max(begins, key=len, default=against[0])


def compare(
    records: Sequence[Record],
    against: Sequence[str],
    split: str,
    level: str,
    metric: str = "micro_f1",
) -> list[Line]:
    """Mean and deviation of each cell, and for micro-F1 its difference to another.

    Args:
        records: Finished cells.
        against: Cells that the others are compared with, as `reference_of` says.
        split: Where they are scored.
        level: pair, agent or mode.
        metric: micro_f1 or macro_f1.

    Returns:
        One line a cell that has this score, in order of first appearance. Cells that were scored on
        other items than the one they are compared with get no interval.
    """
    cells = dict.fromkeys(record["cell"] for record in records)
    lines = []
    for cell in cells:
        own = [r for r in records if r["cell"] == cell and level in r["scores"].get(split, {})]
        values = [
            r["scores"][split][level][metric] for r in own if metric in r["scores"][split][level]
        ]
        if not values:
            continue
        low = high = p = float("nan")
        reference = reference_of(cell, against)
        other = [r for r in records if r["cell"] == reference and split in r["items"]]
        same = {r["items"][split] for r in (*own, *other)} == {own[0]["items"][split]}
        if cell != reference and other and same and metric == "micro_f1":
            low, high, p = resample(pool(own, split, level), pool(other, split, level))
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        mean = float(np.mean(values))
        lines.append(Line(cell, reference, mean, deviation, len(values), low, high, p))
    return lines


def pool(records: Sequence[Record], split: str, level: str) -> Floats:
    """Mean over seeds of hits, false alarms and misses of each item: `(N, 3)`."""
    tables = np.array([record["counts"][split][level] for record in records], dtype=np.float64)
    mean: Floats = tables.mean(axis=0)
    return mean


def resample(one: Floats, two: Floats, *, seed: int = 0) -> tuple[float, float, float]:
    """Paired bootstrap of the difference in micro-F1 between two cells.

    Args:
        one: `(N, 3)` hits, false alarms and misses of each item.
        two: The same for the other cell, on the same items.
        seed: Of the resamples.

    Returns:
        Ends of the 95 % interval of `one - two` in points, and the two-sided p: twice the smaller
        share of resamples on one side of 0, at least 1 / resamples.

    Source:
        Efron and Tibshirani 1993, ch. 13, percentile interval, over items.
    """
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(len(one), np.full(len(one), 1 / len(one)), size=_RESAMPLES)  # (R, N)

    def score(table: Floats) -> Floats:
        hits, wrong, missed = (weights @ table).T
        f1: Floats = 200 * hits / np.maximum(2 * hits + wrong + missed, 1e-9)
        return f1

    difference = score(one) - score(two)
    low, high = np.percentile(difference, [2.5, 97.5])
    side = min(float((difference <= 0).mean()), float((difference >= 0).mean()))
    return float(low), float(high), min(1.0, max(2 * side, 1 / _RESAMPLES))


def write_results(records: Sequence[Record], against: Sequence[str], out: Path) -> list[Path]:
    """Write `results.csv` in long format, and `tables.md` and `tables.tex`.

    Args:
        records: Finished cells.
        against: Cells that the others are compared with, as `reference_of` says.
        out: Folder.

    Returns:
        The files.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("cell", "seed", "split", "level", "metric", "value"))
    writer.writerows(long_rows(records))
    texts = {
        "results.csv": stream.getvalue(),
        "tables.md": _tables(records, against, _markdown),
        "tables.tex": _tables(records, against, _latex),
    }
    for name, text in texts.items():
        with whole(out / name) as part:
            part.write_text(text, encoding="utf-8")
    return [out / name for name in texts]


def _tables(
    records: Sequence[Record],
    against: Sequence[str],
    write: Callable[[str, Sequence[Sequence[str]]], str],
) -> str:
    """A table for each split: one row a cell, one column a level and metric."""
    splits = dict.fromkeys(split for record in records for split in record["scores"])
    columns = {
        **{f"{level} micro-F1": (level, "micro_f1") for level in LEVELS},
        "pair macro-F1 by mode": ("pair", "macro_f1"),
        "mode macro-F1": ("mode", "macro_f1"),
    }
    parts = []
    for split in splits:
        lines = {
            title: {line.cell: line for line in compare(records, against, split, *column)}
            for title, column in columns.items()
        }
        cells = dict.fromkeys(cell for column in lines.values() for cell in column)
        rows = [
            [
                cell,
                "" if (other := reference_of(cell, against)) == cell else other,
                *(_show(column.get(cell)) for column in lines.values()),
            ]
            for cell in cells
        ]
        title = f"{split}: mean ± deviation over seeds; difference to `against` [95 %], p"
        parts.append(write(title, [["cell", "against", *columns], *rows]))
    return "\n".join(parts)


def _show(line: Line | None) -> str:
    """One entry of a table."""
    if line is None:
        return ""
    shown = f"{line.mean:.2f} ± {line.deviation:.2f}"
    if np.isnan(line.p):
        return shown
    return f"{shown} [{line.low:+.2f}, {line.high:+.2f}] {line.p:.3f}"


def _markdown(title: str, rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    header, *body = (f"| {' | '.join(row)} |" for row in rows)
    rule = f"| --- | --- |{' ---: |' * (len(rows[0]) - 2)}"
    return "\n".join([f"**{title}**", "", header, rule, *body, ""])


def _latex(title: str, rows: Sequence[Sequence[str]]) -> str:
    """A table in LaTeX."""
    marks = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "±": r"$\pm$"}

    def escape(text: str) -> str:
        return "".join(marks.get(letter, letter) for letter in text)

    header, *body = (f"{' & '.join(map(escape, row))} \\\\" for row in rows)
    return "\n".join(
        [
            f"% {title}",
            rf"\begin{{tabular}}{{ll{'r' * (len(rows[0]) - 2)}}}",
            r"\hline",
            header,
            r"\hline",
            *body,
            r"\hline",
            r"\end{tabular}",
            "",
        ]
    )


def _declare(logits: Logits, calibration: Calibration, level: str) -> NDArray[np.bool_]:
    """What is declared at a level, with the shape of its logits."""
    prob = sigmoid(getattr(logits, level) / getattr(calibration, f"{level}_temperature"))
    declared: NDArray[np.bool_] = prob >= getattr(calibration, f"{level}_threshold")
    return declared
