"""Scores of predictions against what is known, with bootstrap intervals over traces.

Letters: `n` traces, `C` classes of a level, `R` resamples. All scores are shares, 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dcl.taxonomy import MODES, ErrorMode
from dcl.trajectory import Fault

Floats = NDArray[np.float64]
Level = Literal["pair", "error", "agent"]
Statistic = Callable[[Floats], Floats]
"""From `(R, n)` weights of the traces to `(R,)` values of a score."""

LEVELS: tuple[Level, ...] = ("pair", "error", "agent")

RANKED = ("agent_accuracy", "step_accuracy", "joint", "top3", "mrr", "within1", "within3")
"""Names of the columns of `rank_hits`."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Who failed, how and where: what a predictor declares, and what is known, in one form.

    Args:
        faults: Declared pairs of agent and mode.
        agents: Agents declared at their own level; None means those of the pairs.
        modes: Modes declared at their own level; None means those of the pairs.
        step: The step that shows the failure, as the source log counts; None if not said.
        agent: The one agent to blame most; None if not said.
        ranked_steps: Steps from the most to the least suspect; empty means only `step`.
        shown: The step that is shown beside `agent`, one that it takes; None means `step`.
    """

    faults: frozenset[tuple[str, ErrorMode]] = frozenset()
    agents: frozenset[str] | None = None
    modes: frozenset[ErrorMode] | None = None
    step: int | None = None
    agent: str | None = None
    ranked_steps: tuple[int, ...] = ()
    shown: int | None = None

    def labels(self, level: Level) -> frozenset[Hashable]:
        """What is declared at a level: pairs, modes (level `error`) or agents."""
        if level == "pair":
            return frozenset(self.faults)
        if level == "agent":
            return frozenset(
                (agent for agent, _ in self.faults) if self.agents is None else self.agents
            )
        return frozenset((mode for _, mode in self.faults) if self.modes is None else self.modes)

    @property
    def ranking(self) -> tuple[int, ...]:
        """Steps from the most to the least suspect, each once."""
        alone = () if self.step is None else (self.step,)
        return tuple(dict.fromkeys(self.ranked_steps or alone))


def state_truth(faults: Iterable[Fault]) -> Prediction:
    """What is known of a trace; agent and step are set where exactly one agent is known.

    Args:
        faults: Labels; those that name an agent who never speaks stay and can only be missed.
    """
    known = tuple(faults)
    agents = frozenset(fault.agent for fault in known)
    steps = {fault.step for fault in known}
    return Prediction(
        faults=frozenset((f.agent, f.mode) for f in known if f.mode is not None),
        agents=agents,
        step=steps.pop() if len(steps) == 1 else None,
        agent=next(iter(agents)) if len(agents) == 1 else None,
    )


class Score(NamedTuple):
    """Precision, recall and F1, each `(R,)`, 0 to 1."""

    precision: Floats
    recall: Floats
    f1: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Hits and mistakes of each trace and class at one level.

    Args:
        classes: All classes that are true or declared anywhere; `C` of them.
        fixed: Whether the class set of macro scores is all of `classes`. If not, it is those that
            are true in at least one trace of the (resampled) set.
        hit: `(n, C)` 0 or 1, true and declared.
        wrong: `(n, C)` 0 or 1, declared and not true.
        missed: `(n, C)` 0 or 1, true and not declared.
    """

    classes: tuple[Hashable, ...]
    fixed: bool
    hit: Floats
    wrong: Floats
    missed: Floats

    def micro(self, weights: ArrayLike | None = None) -> Score:
        """Scores over all decisions pooled.

        Args:
            weights: `(R, n)` how often each trace counts; None counts each once, `R` = 1.

        Returns:
            Scores, each `(R,)`.
        """
        w = self._weights(weights)
        return _score(
            w @ self.hit.sum(axis=1), w @ self.wrong.sum(axis=1), w @ self.missed.sum(axis=1)
        )

    def macro(self, weights: ArrayLike | None = None, *, fixed: bool | None = None) -> Score:
        """Unweighted means of the scores of the classes.

        A class of the set with no hit has F1 0, also if it is neither true nor declared (the
        zero-support rule); a set without classes scores 0.

        Args:
            weights: `(R, n)` how often each trace counts; None counts each once, `R` = 1.
            fixed: Replaces the class-set rule of the level.

        Returns:
            Scores, each `(R,)`.
        """
        w = self._weights(weights)
        hit, missed = w @ self.hit, w @ self.missed  # (R, C)
        fixed = self.fixed if fixed is None else fixed
        counted = np.ones_like(hit) if fixed else (hit + missed > 0).astype(np.float64)
        number = np.maximum(counted.sum(axis=1), 1.0)
        each = _score(hit, w @ self.wrong, missed)
        return Score(*((value * counted).sum(axis=1) / number for value in each))

    def _weights(self, weights: ArrayLike | None) -> Floats:
        """Weights as `(R, n)`."""
        return np.ones((1, len(self.hit))) if weights is None else np.asarray(weights, np.float64)


def count(truths: Sequence[Prediction], guesses: Sequence[Prediction], level: Level) -> Counts:
    """Compare sets of labels trace by trace: labels count once a trace, whole names only.

    The class set of macro scores is the fixed 14 modes at the level `error`, and the classes that
    occur in the truth at the other two.

    Args:
        truths: What is known, `n` of them.
        guesses: What is declared, in the same order.
        level: Pairs, modes or agents.

    Source:
        Aegis (arXiv 2509.14295), §6, for the levels and the two means. It leaves the class set
        open; the rule here is that of the community scorer (VerifyMAS, arXiv 2605.17467).
    """
    true = [truth.labels(level) for truth in truths]
    said = [guess.labels(level) for guess in guesses]
    first: Sequence[Hashable] = MODES if level == "error" else ()
    classes = tuple(dict.fromkeys([*first, *(c for labels in (*true, *said) for c in labels)]))
    column = {c: i for i, c in enumerate(classes)}
    t, s = (np.zeros((len(true), len(classes))) for _ in range(2))
    for table, rows in ((t, true), (s, said)):
        for i, labels in enumerate(rows):
            table[i, [column[c] for c in labels]] = 1.0
    return Counts(classes, level == "error", hit=t * s, wrong=(1 - t) * s, missed=t * (1 - s))


def rank_hits(truths: Sequence[Prediction], guesses: Sequence[Prediction]) -> Floats:
    """Scores of each trace where one agent and one step are known.

    Names are compared whole and steps as integers, so neither `Agent1` and `Agent12` nor the
    steps 1 and 12 can be taken for each other.

    Args:
        truths: What is known, `n` of them.
        guesses: What is declared, in the same order.

    Returns:
        `(n, 7)` in the order of `RANKED`: agent right, likeliest step right, agent and the step
        shown beside it both right, step among the first three, one over the rank of the step (0 if
        it is not ranked), step off by at most 1, and by at most 3. Traces whose truth has no single
        agent and step are rows of NaN.

    Source:
        Who&When (arXiv 2505.00212), §4, for agent and step accuracy and the tolerances.
    """
    rows = [_rank_hit(truth, guess) for truth, guess in zip(truths, guesses, strict=True)]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(RANKED))


def _rank_hit(truth: Prediction, guess: Prediction) -> tuple[float, ...]:
    """One row of `rank_hits`."""
    if truth.agent is None or truth.step is None:
        return (np.nan,) * len(RANKED)
    ranking = guess.ranking
    agent = guess.agent == truth.agent
    step = guess.step == truth.step
    rank = ranking.index(truth.step) + 1 if truth.step in ranking else None
    gap = np.inf if guess.step is None else abs(guess.step - truth.step)
    return (
        float(agent),
        float(step),
        float(agent and (step if guess.shown is None else guess.shown == truth.step)),
        float(rank is not None and rank <= 3),
        0.0 if rank is None else 1.0 / rank,
        float(gap <= 1),
        float(gap <= 3),
    )


class Interval(NamedTuple):
    """A value with the interval that resampling gives it."""

    value: float
    low: float
    high: float


def bootstrap(
    statistic: Statistic, n: int, *, resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Percentile bootstrap over traces; resamples that the score is not defined for are left out.

    For a paired comparison of two predictors on the same traces let the statistic be the
    difference of two: both then see the same resamples.

    Args:
        statistic: From weights of the traces to the score.
        n: Number of traces; > 0.
        resamples: Number `R` of resamples.
        level: Share of the resamples inside the interval, 0 to 1.
        seed: Of the resampling; the same seed draws the same traces.

    Source:
        Efron 1979, "Bootstrap Methods: Another Look at the Jackknife"; a resample of `n` traces
        is a multinomial draw of their weights.
    """
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1.0 / n), size=resamples)
    values = statistic(draws.astype(np.float64))
    values = values[~np.isnan(values)]
    value = float(statistic(np.ones((1, n)))[0])
    if not len(values):
        return Interval(value, float("nan"), float("nan"))
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


def paired_bootstrap(
    first: Statistic, second: Statistic, n: int, *, resamples: int = 1000, seed: int = 0
) -> Interval:
    """Interval of the first score minus the second, both on the same resampled traces."""
    return bootstrap(lambda w: first(w) - second(w), n, resamples=resamples, seed=seed)


def mean_of(values: Floats) -> Statistic:
    """The weighted mean of one value a trace, `(n,)`, as a statistic."""
    return ratio_of(values, np.ones(len(values)))


def ratio_of(parts: Floats, wholes: Floats) -> Statistic:
    """The weighted sum of one value a trace by that of another, `(n,)` each, as a statistic.

    NaN where the second sum is 0.
    """

    def ratio(weights: Floats) -> Floats:
        total = weights @ wholes
        return np.divide(weights @ parts, total, out=np.full_like(total, np.nan), where=total > 0)

    return ratio


def share_right(confidence: Floats, right: Floats, share: float) -> Statistic:
    """How often the surest traces are right, as a statistic.

    Args:
        confidence: `(n,)`; of equal ones the first counts as surer.
        right: `(n,)`, 0 or 1.
        share: Of the traces, above 0 and up to 1; rounded to whole ones.
    """
    order = np.argsort(-confidence, kind="stable")
    taken = round(share * len(order))

    def mean(weights: Floats) -> Floats:
        ranked = weights[:, order]
        before = np.cumsum(ranked, axis=1) - ranked
        kept = np.clip(taken - before, 0, ranked)
        total: Floats = kept @ right[order] / taken
        return total

    return mean


def auroc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Chance that a failed run scores higher than one that did not fail; ties count half.

    Args:
        scores: `(n,)`, higher means more likely failed.
        labels: `(n,)`, 1 for failed and 0 for not; both must occur.

    Raises:
        ValueError: If only one kind of run is there.
    """
    positive, negative = _sides(scores, labels)
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, side="left")
    upto = np.searchsorted(ordered, positive, side="right")
    return float((below + upto).mean() / 2 / len(negative))


def false_alarm_rate(scores: ArrayLike, labels: ArrayLike, *, detection: float = 0.8) -> float:
    """Share of sound runs that alarm at the highest threshold that detects enough failed ones.

    Args:
        scores: `(n,)`, higher means more likely failed; a run alarms from the threshold on.
        labels: `(n,)`, 1 for failed and 0 for not; both must occur.
        detection: Least share of failed runs that must alarm, above 0 and up to 1.

    Raises:
        ValueError: If only one kind of run is there.
    """
    positive, negative = _sides(scores, labels)
    needed = max(int(np.ceil(detection * len(positive) - 1e-9)), 1)
    threshold = np.sort(positive)[::-1][needed - 1]
    return float((negative >= threshold).mean())


def _sides(scores: ArrayLike, labels: ArrayLike) -> tuple[Floats, Floats]:
    """Scores of failed and of sound runs."""
    values, failed = np.asarray(scores, np.float64), np.asarray(labels).astype(bool)
    if failed.all() or not failed.any():
        raise ValueError("expected failed and sound runs, got only one kind")
    return values[failed], values[~failed]


def _score(hit: Floats, wrong: Floats, missed: Floats) -> Score:
    """Precision, recall and F1 of counts of any shape; 0 where nothing was declared or true."""

    def ratio(part: Floats, whole: Floats) -> Floats:
        return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)

    return Score(
        ratio(hit, hit + wrong), ratio(hit, hit + missed), ratio(2 * hit, 2 * hit + wrong + missed)
    )
