"""How a fit fares on runs that it did not see, and what of it is kept.

All scores are cross-fitted: nothing of a run enters its own attribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcl.adapter import IDENTITY
from dcl.attribution import Attribution, Attributor, Calibration, decode
from dcl.fitting import FOLDS, PARTS, Fit, Observation, fit, split_folds
from dcl.runtime import OnnxScorer
from dcl.splits import group_of
from dcl.targets import make_targets
from dcl.trajectory import Example, Trajectory

Floats = NDArray[np.float64]

LEVELS = ("agent", "step", "pair", "agents over the threshold")
"""What is compared: first guesses, and all agents that are declared."""

_ALIKE = 0.7  # share of common words from which on two questions count as one
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Level:
    """How one level fares on questions that the fit did not see.

    Args:
        name: Out of `LEVELS`: whether the first guess is right, or micro-F1 of declared agents.
        runs: Runs that are labelled at this level.
        before: Score of the original model, 0 to 1, with its 95 % interval.
        after: Score of the adapted one.
        gain: After minus before, paired over runs.
    """

    name: str
    runs: int
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    gain: tuple[float, float, float]


def observe(
    attributor: Attributor, scorer: OnnxScorer, example: Example, group: int
) -> Observation:
    """What a fit sees of one labelled run.

    Args:
        attributor: Gives the bag.
        scorer: Its scorer.
        example: The run.
        group: Its question, or its system.

    Returns:
        Logits, columns and targets of the run.
    """
    bag = attributor.bagger(example.trajectory)
    *turns, task = scorer.encoder([*bag.windows, bag.task])
    logits, columns = scorer.observe(bag, np.stack(turns), task)
    targets = make_targets(example, sigma=0.0)
    return Observation(group, logits, columns, bag.agent_index, bag.acting, targets)


def choose_parts(
    examples: Sequence[Example], runs: Sequence[Observation], base: Calibration, *, seed: int
) -> tuple[Fit, tuple[Level, ...], tuple[str, ...]]:
    """Fit, and keep only what is better on questions that were not seen.

    Args:
        examples: Labelled runs.
        runs: What the fit sees of them, in the same order.
        base: Calibration of the original model.
        seed: Of the folds.

    Returns:
        The fit on all runs, the cross-validated scores, and the parts that were refused.
    """
    before = [decode(e.trajectory, r.logits, base) for e, r in zip(examples, runs, strict=True)]
    allowed = frozenset(PARTS)
    while True:
        after = cross_fit(examples, runs, base, seed=seed, parts=allowed)
        levels = compare(examples, before, after)
        refused = _find_worse({level.name: level.gain[0] for level in levels}, allowed)
        if not refused:
            break
        allowed -= refused  # and judge again what is left
    fitted = fit(runs, base, parts=allowed, seed=seed)
    if not fitted.parts:
        fitted = Fit(IDENTITY, base, (), frozenset())
        levels = compare(examples, before, before)
    return fitted, levels, tuple(part for part in PARTS if part not in fitted.parts)


def cross_fit(
    examples: Sequence[Example],
    runs: Sequence[Observation],
    base: Calibration,
    *,
    seed: int,
    parts: frozenset[str] = frozenset(PARTS),
    folds: int = FOLDS,
    by_group: bool = True,
) -> list[Attribution]:
    """Attributions of all runs, each by a fit that saw no run of its question.

    Everything is chosen anew within each fold, so nothing of a run enters its own attribution.

    Args:
        examples: Labelled runs.
        runs: What the fit sees of them.
        base: Calibration of the original model.
        seed: Of the folds.
        parts: What may be changed.
        folds: Number of folds.
        by_group: As `dcl.fitting.fit` takes it.

    Returns:
        One a run, in the same order.
    """
    place = split_folds([run.group for run in runs], folds, seed + 1)
    found: dict[int, Attribution] = {}
    for fold in np.unique(place):
        seen = [run for run, f in zip(runs, place, strict=True) if f != fold]
        fitted = fit(seen, base, parts=parts, seed=seed, by_group=by_group)
        for i in np.flatnonzero(place == fold).tolist():
            found[i] = attribute_adapted(examples[i].trajectory, runs[i], fitted)
    return [found[i] for i in range(len(runs))]


def attribute_adapted(trajectory: Trajectory, run: Observation, fitted: Fit) -> Attribution:
    """The attribution that an adapted model gives to a run that was observed."""
    logits = fitted.adapter(run.logits, run.turns, run.agent_index, run.acting)
    return decode(trajectory, logits, fitted.calibration)


def compare(
    examples: Sequence[Example], before: Sequence[Attribution], after: Sequence[Attribution]
) -> tuple[Level, ...]:
    """Scores of two models on the same runs, at every level that is labelled.

    Args:
        examples: Labelled runs.
        before: Attributions of the first model.
        after: Of the second.

    Returns:
        In the order of `LEVELS`; a level that no run is labelled at is left out.
    """
    levels = []
    for name in LEVELS:
        counts = [
            (_count(name, example, one), _count(name, example, two))
            for example, one, two in zip(examples, before, after, strict=True)
        ]
        # Runs that are not labelled at this level have nothing to count.
        table = np.array([(*one, *two) for one, two in counts if max(one[1], two[1]) > 0])
        if len(table):
            levels.append(Level(name, len(table), *_intervals(table)))
    return tuple(levels)


def group_questions(examples: Sequence[Example]) -> list[int]:
    """A number for every run; runs whose questions are the same, or nearly, share one.

    Where that would leave too few groups to hold some out, as with one prompt for all runs, only
    equal questions are put together, and if these are too few as well, no runs are.

    Args:
        examples: The runs.

    Returns:
        One number a run, in the same order.
    """
    exact = [group_of(example) for example in examples]
    words = [frozenset(example.trajectory.task.lower().split()) for example in examples]
    numbers: list[int] = []
    for i, (group, own) in enumerate(zip(exact, words, strict=True)):
        like = (
            numbers[j]
            for j in range(i)
            if exact[j] == group or len(own & words[j]) > _ALIKE * len(own | words[j])
        )
        numbers.append(next(like, i))
    same = [exact.index(group) for group in exact]
    for candidate in (numbers, same):
        if len(set(candidate)) >= FOLDS:
            return candidate
    return list(range(len(examples)))


def _find_worse(gain: Mapping[str, float], allowed: frozenset[str]) -> frozenset[str]:
    """Parts that are allowed and not better.

    Each is judged by the level that it serves, and whatever moves what is declared by that as well:
    where it is worse, thresholds go first, then modes, then agents; without these it is as it was.
    """
    declared, agent = gain.get(LEVELS[-1], 0.0), gain.get("agent", 0.0)
    spoilt = declared < 0 and "thresholds" not in allowed
    worse = {
        "turns": gain.get("step", agent) <= 0,
        "agents": max(agent, declared) <= 0 or (spoilt and "modes" not in allowed),
        "modes": gain.get("pair", 0.0) <= 0 or spoilt,
        "thresholds": declared <= 0,
    }
    return frozenset(part for part in allowed if worse[part])


def _count(name: str, example: Example, found: Attribution) -> tuple[float, float]:
    """Hits and what they are out of; 0 out of 0 where this level is not labelled."""
    faults = example.faults or ()
    agents = {fault.agent for fault in faults}
    if name == "agents over the threshold":
        declared = {finding.fault.agent for finding in found.findings()}
        return 2.0 * len(agents & declared), float(len(agents) + len(declared))
    if name == "agent":
        guess: Any = found.agents[int(np.argmax(found.agent_probs))]
        true: set[Any] = agents
    elif name == "step":
        guess = found.steps[int(np.argmax(found.step_probs))]
        true = {fault.step for fault in faults if fault.step is not None}
    else:
        (best,) = found.faults(top_k=1)
        guess = best.agent, best.mode
        true = {(fault.agent, fault.mode) for fault in faults if fault.mode is not None}
    return (float(guess in true), 1.0) if true else (0.0, 0.0)


def _intervals(table: Floats) -> list[tuple[float, float, float]]:
    """Before, after and gain with 95 % intervals, bootstrap over runs.

    Args:
        table: `(n, 4)`: hits and total before, hits and total after.
    """
    n = len(table)
    draws = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=_RESAMPLES)
    sums = np.concatenate([np.ones((1, n)), draws]) @ table  # (1 + R, 4)
    before = sums[:, 0] / np.maximum(sums[:, 1], 1e-9)
    after = sums[:, 2] / np.maximum(sums[:, 3], 1e-9)
    found = []
    for values in (before, after, after - before):
        low, high = np.quantile(values[1:], [0.025, 0.975])
        found.append((round(float(values[0]), 4), round(float(low), 4), round(float(high), 4)))
    return found
