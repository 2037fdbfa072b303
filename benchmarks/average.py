"""The number that the Aegis paper ranks by: the mean of twelve F1 scores, six on each set."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.evaluate import MEAN
from benchmarks.metrics import Interval
from benchmarks.tables import markdown_lines, show_share
from dcl.errors import ConfigError

Means = Mapping[str, Interval]
"""Mean of the six scores on one set by predictor."""


def read_means(file: Path) -> dict[str, Interval]:
    """The mean of six of each predictor, with names as published.

    Args:
        file: What `evaluate --output json` wrote.

    Raises:
        ConfigError: If it is no such report, or of runs whose modes are not known.
    """
    try:
        rows: list[dict[str, Any]] = json.loads(file.read_bytes())["tables"]["kept"]
        found = {row["predictor"]: row["scores"][MEAN] for row in rows}
        return {
            name: Interval(*map(float, (one["value"], *one["interval"])))
            for name, one in found.items()
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{file}: expected a report of evaluate --output json on runs with modes: {error!r}"
        ) from None


def average(first: Interval, second: Interval) -> Interval:
    """The mean of two scores; the sets share no run, so their errors add as squares do.

    Args:
        first: On one set.
        second: On the other.

    Source:
        Aegis (arXiv 2509.14295), table 1, column "Avg."; its twelve scores weigh the same.
    """
    value = (first.value + second.value) / 2
    below = math.hypot(first.value - first.low, second.value - second.low) / 2
    above = math.hypot(first.high - first.value, second.high - second.value) / 2
    return Interval(value, value - below, value + above)


def to_markdown(first: Means, second: Means) -> str:
    """One row for each predictor that is in both reports, in percent with 95 % intervals.

    Raises:
        ConfigError: If there is none.
    """
    if not first.keys() & second.keys():
        raise ConfigError("expected reports with a predictor in common, got none")
    head = ["predictor", "six scores, first set", "six scores, second set", "all twelve"]
    body = [
        [name, *map(show_share, (first[name], second[name], average(first[name], second[name])))]
        for name in first
        if name in second
    ]
    return "\n".join(markdown_lines(head, body)) + "\n"
