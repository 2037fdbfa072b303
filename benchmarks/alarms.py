"""Does a run fail at all? Alarms on runs that went well, at a stated share of failures found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.metrics import Interval, auroc, false_alarm_rate
from benchmarks.runs import Part
from dcl.errors import ConfigError
from dcl.formats import read_examples
from dcl.splits import group_of, split_of
from dcl.trajectory import Example, Trajectory

Suspicion = Callable[[Trajectory], float]
"""A run to a number that is higher the more likely it failed."""

PROBES: Mapping[str, Suspicion] = {
    "turns": lambda run: float(len(run.turns)),
    "characters": lambda run: float(sum(len(turn.content) for turn in run.turns)),
}
"""What sees only how long a run is; a model must do better than these."""


@dataclass(frozen=True, slots=True)
class AlarmRow:
    """How well one score tells failed runs from sound ones.

    Args:
        name: Of the score.
        auroc: Chance that a failed run scores higher than a sound one, 0 to 1.
        alarms: Share of sound runs that alarm where the stated share of failed ones does, 0 to 1.
    """

    name: str
    auroc: Interval
    alarms: Interval


def load_runs(paths: Sequence[Path], split: Part) -> tuple[list[Trajectory], NDArray[np.bool_]]:
    """Runs that are known to have failed or to have gone well.

    A run went well if it is labelled with no fault, or succeeded; it failed if it is labelled with
    a fault, or is known to have failed.

    Args:
        paths: Files and folders.
        split: Part of the questions.

    Returns:
        The runs, and whether each failed.

    Raises:
        ConfigError: If there are not both kinds of run.
    """
    known = [
        (example.trajectory, has_failed(example))
        for path in paths
        for example in read_examples(path)
        if split in ("all", split_of(group_of(example)))
    ]
    labels = np.array([failed for _, failed in known if failed is not None], dtype=bool)
    if labels.all() or not labels.any():
        raise ConfigError(
            f"--data: expected runs that failed and runs that went well, got {labels.sum()} and "
            f"{(~labels).sum()}"
        )
    return [run for run, failed in known if failed is not None], labels


def has_failed(example: Example) -> bool | None:
    """Whether a run failed; None where nobody knows."""
    if example.faults is not None:
        return bool(example.faults)
    outcome = example.trajectory.outcome
    return None if outcome is None else outcome == "failure"


def rate_alarms(
    scores: Mapping[str, Sequence[float]],
    failed: NDArray[np.bool_],
    *,
    detection: float = 0.8,
    resamples: int = 1000,
    seed: int = 0,
) -> list[AlarmRow]:
    """Rate several scores on the same runs.

    Args:
        scores: By name, one number a run.
        failed: `(n,)`, whether each run failed; both kinds must occur.
        detection: Share of failed runs that must alarm, above 0 and up to 1.
        resamples: Of the bootstrap over runs.
        seed: Of the resampling.
    """
    rng = np.random.default_rng(seed)
    at = (np.flatnonzero(failed), np.flatnonzero(~failed))
    # Each kind is drawn for itself: a resample without sound runs would say nothing.
    draws = [np.concatenate([rng.choice(rows, len(rows)) for rows in at]) for _ in range(resamples)]
    rates: tuple[Callable[..., float], ...] = (
        auroc,
        partial(false_alarm_rate, detection=detection),
    )
    return [
        AlarmRow(name, *(_resample(rate, np.asarray(values), failed, draws) for rate in rates))
        for name, values in scores.items()
    ]


def _resample(
    rate: Callable[..., float],
    scores: NDArray[np.float64],
    failed: NDArray[np.bool_],
    draws: Sequence[NDArray[np.intp]],
) -> Interval:
    """A rate with its 95 % interval over the drawn runs."""
    values = [rate(scores[drawn], failed[drawn]) for drawn in draws]
    low, high = np.quantile(values, [0.025, 0.975])
    return Interval(rate(scores, failed), float(low), float(high))
