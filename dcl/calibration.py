"""Temperatures and thresholds from validation logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dcl.attribution import Calibration, Logits, sigmoid
from dcl.targets import Targets

Floats = NDArray[np.float32]


def fit_calibration(
    logits: Sequence[Logits],
    targets: Sequence[Targets],
    *,
    steps: Sequence[tuple[Floats, Floats]] = (),
) -> Calibration:
    """Choose temperatures for likelihood and thresholds for micro-F1.

    Args:
        logits: One a validation bag.
        targets: Labels of each bag, with known modes. Those that no turn can show count as misses
            when thresholds are chosen.
        steps: Step logits and target, `(T,)` each, of the bags whose step is labelled.

    Returns:
        The calibration.
    """
    fitted: dict[str, float] = {}
    for level, (score, label, missed) in _levels(logits, targets).items():
        fitted[f"{level}_temperature"] = fit_temperature(score, label)
        cut, _ = best_threshold(score, label, missed=missed)
        fitted[f"{level}_threshold"] = float(
            sigmoid(np.array(cut / fitted[f"{level}_temperature"], dtype=np.float32))
        )
    if steps:
        fitted["step_temperature"] = _fit_step_temperature(steps)
    return Calibration(**fitted)


def score_levels(
    logits: Sequence[Logits],
    targets: Sequence[Targets],
    calibration: Calibration,
) -> dict[str, float]:
    """Micro-F1 of each level at its calibrated threshold, in points of 0 to 100.

    Args:
        logits: One a bag.
        targets: Labels of each bag, with known modes; those that no turn can show count as misses.
        calibration: Temperatures and thresholds, fitted on other bags.

    Returns:
        `agent`, `mode` and `pair` to F1. Agents and modes count by their own thresholds.
    """
    scores = {}
    for level, (score, label, missed) in _levels(logits, targets).items():
        prob = sigmoid(score / getattr(calibration, f"{level}_temperature"))
        declared = prob >= getattr(calibration, f"{level}_threshold")
        total = max(float(declared.sum() + label.sum() + missed), 1.0)
        scores[level] = round(200 * float((declared * label).sum()) / total, 2)
    return scores


def fit_temperature(logits: Floats, labels: Floats) -> float:
    """Temperature with the least binary cross-entropy, 0.2 to 5.

    Args:
        logits: `(N,)`.
        labels: `(N,)`, 0 or 1.

    Source:
        Guo et al. 2017, "On Calibration of Modern Neural Networks", §4.2, for the binary case.
    """
    grid = np.geomspace(0.2, 5.0, 81)
    losses = [float(np.mean(np.logaddexp(0, logits / t) - labels * logits / t)) for t in grid]
    return float(grid[int(np.argmin(losses))])


def best_threshold(scores: Floats, labels: Floats, *, missed: int = 0) -> tuple[float, float]:
    """Score from which on to declare for the best micro-F1, and that F1.

    Args:
        scores: `(N,)`, any real numbers.
        labels: `(N,)`, 0 or 1.
        missed: Positives outside the arrays that can never be declared.

    Returns:
        Threshold, halfway between two scores, and F1, 0 to 1.
    """
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    hits = np.cumsum(labels[order])
    f1 = 2 * hits / (np.arange(1, len(order) + 1) + labels.sum() + missed)
    reachable = np.append(ranked[:-1] > ranked[1:], True)  # equal scores are declared together
    best = int(np.argmax(np.where(reachable, f1, -1.0)))
    above = float(ranked[best])
    below = float(ranked[best + 1]) if best + 1 < len(order) else above - 1.0
    return (above + below) / 2, float(f1[best])


def _levels(
    logits: Sequence[Logits], targets: Sequence[Targets]
) -> dict[str, tuple[Floats, Floats, int]]:
    """Logits and labels of every level, all bags in one row, and the labels out of reach."""
    return {
        level: (
            np.concatenate([getattr(one, level).ravel() for one in logits]),
            np.concatenate([getattr(one, level).ravel() for one in targets]),
            sum(getattr(one, lost) for one in targets) if lost else 0,
        )
        for level, lost in (("agent", "lost_agents"), ("mode", ""), ("pair", "lost_pairs"))
    }


def _fit_step_temperature(known: Sequence[tuple[Floats, Floats]]) -> float:
    """Temperature with the least listwise cross-entropy, 0.2 to 5."""

    def loss(temperature: float) -> float:
        total = 0.0
        for logits, target in known:
            scaled = logits / temperature
            total -= float((target * (scaled - np.logaddexp.reduce(scaled))).sum())
        return total

    return float(min(np.geomspace(0.2, 5.0, 81), key=loss))
