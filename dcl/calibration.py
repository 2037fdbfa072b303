"""Temperatures, thresholds, conformal sets of steps and the limit of trust, from held-out logits.

Conformal sets hold for a run of a group that is exchangeable with the groups they were fitted on:
a fresh question of the same system, or, where groups are systems, a fresh system. A bystander
cannot fail: `dcl.fitting` leaves them and their turns out before, as `dcl.attribution.decode` does;
training (`dcl.learning.training.judge`) calibrates a network on all agents and turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcl.attribution import (
    PERCENT,
    Attribution,
    Calibration,
    Logits,
    rank_scores,
    sigmoid,
    softmax,
    span_scores,
)
from dcl.errors import ConfigError
from dcl.targets import Targets

Floats = NDArray[np.float32]

PRECISION = 0.8
"""Share of right first guesses that is asked of a verdict by default; see `fit_trust`."""


def fit_calibration(
    logits: Sequence[Logits],
    targets: Sequence[Targets],
    *,
    steps: Sequence[tuple[Floats, Floats]] = (),
    groups: Sequence[int] = (),
    levels: bool = True,
    base: Calibration | None = None,
    precision: float = PRECISION,
) -> Calibration:
    """Choose temperatures for likelihood, thresholds for micro-F1, and conformal sets of steps.

    Args:
        logits: One a validation bag.
        targets: Labels of each bag. Those that no turn can show count as misses when thresholds
            are chosen; bags with unknown modes count for agents only.
        steps: Step logits and target, `(T,)` each, of the bags whose step is labelled.
        groups: Group of each of `steps`, as `fit_cuts` takes them.
        levels: Whether agents, modes and pairs get temperatures and thresholds of their own.
        base: What stays where nothing is labelled; None means the defaults.
        precision: Share of right first guesses that is asked of a verdict, 0 to 1.

    Returns:
        The calibration.
    """
    base = base or Calibration()
    fitted: dict[str, Any] = {}
    for level, (score, label, missed) in _levels(logits, targets).items() if levels else ():
        if label.sum() + missed == 0:
            continue  # without a fault any cut between sound runs would do
        fitted[f"{level}_temperature"] = fit_temperature(score, label)
        cut, _ = best_threshold(score, label, missed=missed)
        fitted[f"{level}_threshold"] = float(
            sigmoid(np.array(cut / fitted[f"{level}_temperature"], dtype=np.float32))
        )
    if steps:
        temperature = fitted["step_temperature"] = _fit_step_temperature(steps)
        probs = [softmax(logits / temperature, axis=0) for logits, _ in steps]
        turns = [int(np.argmax(target)) for _, target in steps]
        fitted["ranked_cuts"] = fit_cuts(
            [rank_scores(p)[t] for p, t in zip(probs, turns, strict=True)], groups
        )
        fitted["span_cuts"] = fit_cuts(
            [span_scores(p)[t] for p, t in zip(probs, turns, strict=True)], groups
        )
    faulty = [(o, t) for o, t in zip(logits, targets, strict=True) if t.agent.any()]
    if faulty:
        heat = fitted.get("agent_temperature", base.agent_temperature)
        fitted["trust_threshold"] = fit_trust(
            [float(sigmoid(one.agent / heat).max()) for one, _ in faulty],
            [bool(target.agent[np.argmax(one.agent)]) for one, target in faulty],
            precision=precision,
        )
        fitted["trust_precision"] = precision
    return replace(base, **fitted)


def fit_cuts(scores: Sequence[float], groups: Sequence[int] = ()) -> tuple[float, ...]:
    """The largest score that a turn of a conformal set may have, for each whole percent.

    All groups weigh the same, however many runs they have, and one more group, the new one, counts
    as if all of its scores were the largest. So the coverage is that of a run of a new group; with
    one run a group this is the rank `ceil((n + 1) coverage)` of split conformal prediction.

    Args:
        scores: Score of the turn that was labelled in each held-out run, 0 to 1, as `rank_scores`
            or `span_scores` gives it.
        groups: Group of each score, such as its question or its system; none means that each is
            its own.

    Returns:
        99 cuts, for a coverage of 1 to 99 %, each the least score that gives at least this
        coverage in any finite sample; 1, which lets every turn in, where there are too few groups.

    Source:
        Vovk et al. 2005 for the split form; Lee, Barber and Willett 2023, "Distribution-free
        inference with hierarchical data", for groups.
    """
    values = np.asarray(scores, dtype=np.float64)
    _, place, sizes = np.unique(
        np.asarray(groups if len(groups) else np.arange(len(values)), dtype=np.int64),
        return_inverse=True,
        return_counts=True,
    )
    order = np.argsort(values, kind="stable")
    mass = np.cumsum(1 / ((len(sizes) + 1) * sizes[place[order]]))
    ranks = np.searchsorted(mass, np.array(PERCENT) / 100 - 1e-9)
    return tuple(
        round(min(float(values[order[r]]) + 1e-6, 1.0), 6) if r < len(values) else 1.0
        for r in ranks
    )


def fit_trust(confidence: Sequence[float], right: Sequence[bool], *, precision: float) -> float:
    """Confidence from which on enough of the first guesses are right.

    One wrong guess more than was seen is counted at every threshold, so that a few lucky runs
    earn no trust.

    Args:
        confidence: Of the first guess of each held-out run, 0 to 1.
        right: Whether it was right.
        precision: Share that has to be right, 0 to 1.

    Returns:
        The lowest such confidence; 0 if all runs together are right often enough, 1 if no
        threshold is.
    """
    order = np.argsort(-np.asarray(confidence), kind="stable")
    ranked = np.asarray(confidence, dtype=np.float64)[order]
    hits = np.cumsum(np.asarray(right, dtype=np.float64)[order])
    share = hits / (np.arange(len(ranked)) + 2)
    whole = np.append(ranked[:-1] > ranked[1:], True)  # equal ones are trusted together
    good = np.flatnonzero(whole & (share >= precision))
    if not len(good):
        return 1.0
    return 0.0 if good[-1] == len(ranked) - 1 else float(ranked[good[-1]])


def recalibrate(
    calibration: Calibration, clean: Sequence[Attribution], *, share: float
) -> Calibration:
    """Move the thresholds of agents and pairs until few enough sound runs are flagged.

    Both move by the same distance in log-odds. No label is needed but that the runs succeeded.

    Args:
        calibration: Of the model.
        clean: Attributions of runs that succeeded, by this calibration.
        share: Of future sound runs, at most this share is flagged on average, above 0, below 1.

    Raises:
        ConfigError: If the share is out of range, or there are too few runs for it.

    Source:
        Split conformal prediction, as in `fit_cuts`.
    """
    if not 0 < share < 1:
        raise ConfigError(f"share: expected a number between 0 and 1, got {share}")
    rank = math.ceil((len(clean) + 1) * (1 - share) - 1e-9)
    if rank > len(clean):
        raise ConfigError(
            f"expected at least {math.ceil(1 / share - 1e-9) - 1} sound runs to flag at most "
            f"{share:g} of them, got {len(clean)}; give more runs or allow a larger share"
        )
    levels = ("agent", "pair")
    cuts = [_log_odds(getattr(calibration, f"{level}_threshold")) for level in levels]
    excesses = [
        max(
            _log_odds(float(getattr(one, f"{level}_probs").max())) - cut
            for level, cut in zip(levels, cuts, strict=True)
        )
        for one in clean
    ]
    excess = sorted(excesses)
    shift = excess[rank - 1]
    spared = [one for one, over in zip(clean, excesses, strict=True) if over <= shift]
    moved: dict[str, Any] = {}
    for level, cut in zip(levels, cuts, strict=True):
        # A threshold is reached by what equals it, and near 1 probabilities are far apart.
        most = max(float(getattr(one, f"{level}_probs").max()) for one in spared)
        above = float(np.nextafter(np.float32(most), np.float32(2)))
        moved[f"{level}_threshold"] = min(max(1 / (1 + math.exp(-(cut + shift))), above), 1.0)
    return replace(calibration, **moved)


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
    """Logits and labels of every level, all bags in one row, and the labels out of reach.

    Bags whose modes nobody labelled count at the level of agents alone; without any others, there
    are no other levels.
    """
    both = list(zip(logits, targets, strict=True))
    known = [(one, target) for one, target in both if target.known]
    levels = [("agent", "lost_agents", both)]
    levels += [("mode", "", known), ("pair", "lost_pairs", known)] if known else []
    return {
        level: (
            np.concatenate([getattr(one, level).ravel() for one, _ in bags]),
            np.concatenate([getattr(target, level).ravel() for _, target in bags]),
            sum(getattr(target, lost) for _, target in bags) if lost else 0,
        )
        for level, lost, bags in levels
    }


def _log_odds(prob: float) -> float:
    """Log-odds of a probability, finite at both ends."""
    prob = min(max(prob, 1e-7), 1 - 1e-7)
    return math.log(prob) - math.log1p(-prob)


def _fit_step_temperature(known: Sequence[tuple[Floats, Floats]]) -> float:
    """Temperature with the least listwise cross-entropy, 0.2 to 5."""

    def loss(temperature: float) -> float:
        total = 0.0
        for logits, target in known:
            scaled = logits / temperature
            total -= float((target * (scaled - np.logaddexp.reduce(scaled))).sum())
        return total

    return float(min(np.geomspace(0.2, 5.0, 81), key=loss))
