"""Temperatures and thresholds from validation logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dcl.attribution import Calibration, Logits, sigmoid

Floats = NDArray[np.float32]


def fit_calibration(
    logits: Sequence[Logits],
    pairs: Sequence[Floats],
    *,
    lost: int = 0,
    steps: Sequence[tuple[Floats, Floats]] = (),
) -> Calibration:
    """Choose temperatures for likelihood and thresholds for micro-F1.

    Args:
        logits: One a validation bag.
        pairs: `(A, M)` 0 or 1 for each bag.
        lost: Labels that no turn can show; they count as misses when thresholds are chosen.
        steps: Step logits and target, `(T,)` each, of the bags whose step is labelled.

    Returns:
        The calibration.
    """
    fitted: dict[str, float] = {}
    for level, (score, label) in _levels(logits, pairs).items():
        fitted[f"{level}_temperature"] = fit_temperature(score, label)
        missed = 0 if level == "mode" else lost
        cut, _ = best_threshold(score, label, missed=missed)
        fitted[f"{level}_threshold"] = float(
            sigmoid(np.array(cut / fitted[f"{level}_temperature"], dtype=np.float32))
        )
    if steps:
        fitted["step_temperature"] = _fit_step_temperature(steps)
    return Calibration(**fitted)


def score_levels(
    logits: Sequence[Logits],
    pairs: Sequence[Floats],
    calibration: Calibration,
    *,
    lost: int = 0,
) -> dict[str, float]:
    """Micro-F1 of each level at its calibrated threshold, in points of 0 to 100.

    Args:
        logits: One a bag.
        pairs: `(A, M)` 0 or 1 for each bag.
        calibration: Temperatures and thresholds, fitted on other bags.
        lost: Labels that no turn can show; they count as misses.

    Returns:
        `agent`, `mode` and `pair` to F1. Agents and modes count by their own thresholds.
    """
    scores = {}
    for level, (score, label) in _levels(logits, pairs).items():
        prob = sigmoid(score / getattr(calibration, f"{level}_temperature"))
        declared = prob >= getattr(calibration, f"{level}_threshold")
        missed = 0 if level == "mode" else lost
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


def _levels(logits: Sequence[Logits], pairs: Sequence[Floats]) -> dict[str, tuple[Floats, Floats]]:
    """Logits and labels of every level, all bags in one row."""
    scores = {
        "agent": [one.agent for one in logits],
        "mode": [one.mode for one in logits],
        "pair": [one.pair.ravel() for one in logits],
    }
    labels = {
        "agent": [pair.max(axis=1) for pair in pairs],
        "mode": [pair.max(axis=0) for pair in pairs],
        "pair": [pair.ravel() for pair in pairs],
    }
    return {
        level: (np.concatenate(scores[level]), np.concatenate(labels[level])) for level in scores
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
