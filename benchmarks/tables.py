"""A report as a Markdown page or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.evaluate import Report, Row
from benchmarks.metrics import Interval

_TITLES = {
    "kept": "Names as published",
    "permuted": "Names permuted within each run",
    "replaced": "Names never seen",
}
_FAULTS = {
    "pair_micro_f1": "pair µF1",
    "pair_macro_f1": "pair MF1 (name, mode)",
    "error_micro_f1": "error µF1",
    "error_macro_f1": "error MF1",
    "agent_micro_f1": "agent µF1",
    "agent_macro_f1": "agent MF1",
}
_STEPS = {
    "agent_accuracy": "agent",
    "step_accuracy": "step",
    "joint": "both",
    "top3": "step top-3",
    "mrr": "step MRR",
    "within1": "step ±1",
    "within3": "step ±3",
}
_GAPS = {"pair_micro_f1": "pair µF1", "error_micro_f1": "error µF1", "agent_micro_f1": "agent µF1"}


def to_markdown(report: Report) -> str:
    """The report as a page: what it is of, then the tables, in percent with 95 % intervals."""
    data = report.data
    guess = "one fault known, best guess" if report.single_fault else "faults over thresholds"
    lines = [
        f"Runs: {data['n']}, split {data['split']} by question, of {', '.join(data['paths'])}",
        f"Data sha256: {data['sha256'][:16]}. Decoding: {guess}; read as "
        f"{'injected' if report.injected else 'natural'} faults. In brackets: 95 % intervals, "
        "bootstrap over runs.",
    ]
    if data["train"]:
        lines.append(f"Floors learned from {', '.join(data['train'])}.")
    for names, rows in report.tables.items():
        lines += ["", f"### {_TITLES[names]}"]
        for columns in (_FAULTS, _STEPS):
            lines += _table(rows, columns)
        lines += _gap_table(rows)
    if not any("error_micro_f1" in r.scores for rows in report.tables.values() for r in rows):
        lines += ["", "Not scored: pairs and modes, as no label names a mode (--modes adds them)."]
    lines += ["", *(f"Not run: {name} ({why})." for name, why in report.skipped.items())]
    return "\n".join(lines).rstrip() + "\n"


def to_json(report: Report) -> dict[str, Any]:
    """The whole report as plain JSON; scores are shares, intervals `[low, high]`."""
    return {
        "data": report.data,
        "single_fault": report.single_fault,
        "injected": report.injected,
        "tables": {
            names: [
                {
                    "predictor": row.predictor,
                    "scores": _plain(row.scores),
                    "frameworks": row.frameworks,
                    "modes": row.modes,
                    "model_minus_this": _plain(row.gaps),
                }
                for row in rows
            ]
            for names, rows in report.tables.items()
        },
        "skipped": report.skipped,
    }


def _plain(scores: dict[str, Interval]) -> dict[str, dict[str, Any]]:
    """Intervals as JSON."""
    return {
        name: {"value": one.value, "interval": [one.low, one.high]} for name, one in scores.items()
    }


def _table(rows: Sequence[Row], columns: dict[str, str]) -> list[str]:
    """One Markdown table of the columns that these runs have; nothing if they have none."""
    there = {key: title for key, title in columns.items() if any(key in r.scores for r in rows)}
    if not there:
        return []
    body = [
        [
            row.predictor,
            *(show_share(row.scores[key]) if key in row.scores else "" for key in there),
        ]
        for row in rows
    ]
    return ["", *markdown_lines(["predictor", *there.values()], body)]


def _gap_table(rows: Sequence[Row]) -> list[str]:
    """What the model has over each floor; nothing if the model was not run."""
    with_gaps = [row for row in rows if row.gaps]
    if not with_gaps:
        return []
    keys = {k: v for k, v in {**_GAPS, **_STEPS}.items() if k in with_gaps[0].gaps}
    body = [[row.predictor, *(show_share(row.gaps[key]) for key in keys)] for row in with_gaps]
    return [
        "",
        "The model minus each floor, paired:",
        "",
        *markdown_lines(["floor", *keys.values()], body),
    ]


def markdown_lines(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table.

    Args:
        head: Titles of the columns.
        body: Rows, as wide as the head.
    """
    rule = ["---", *("---:" for _ in head[1:])]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *body)]


def show_share(score: Interval) -> str:
    """A share in percent with its interval.

    Args:
        score: Shares, 0 to 1.
    """
    value, low, high = (f"{100 * number:.1f}" for number in score)
    return f"{value} [{low}, {high}]"
