"""What `dcl fit` does: a few labelled runs of one system to an adapter and its calibration.

The network stays as it is. Turns are ranked by a conditional logit (a softmax over the turns of a
run) on its outputs and on the features of turns, once for each set of columns, and the scores are
averaged; agents follow by a logistic regression with three numbers; modes by one shift each. How
strong a penalty and how much of the network to keep is chosen by cross-validation over questions,
and a part that does not earn its place there is left out. Bystanders cannot fail and are left out
of all of it, as `dcl.attribution.decode` leaves them out. numpy is enough.

Letters: `n` runs, `N` turns of all runs, `A` agents of all runs, `F` columns, `M` = 14 modes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from dcl.adapter import COLUMN_SETS, IDENTITY, Adapter, agent_log_odds, select, standardise
from dcl.attribution import Calibration, Logits
from dcl.calibration import fit_calibration
from dcl.targets import Targets
from dcl.taxonomy import MODES

Floats = NDArray[np.float64]

STRENGTHS = (200.0, 50.0, 12.0, 3.0)
"""Weights of the squared norm that are tried, from strong to weak."""
TRUSTS = (0.0, 1.0)
"""Shares of the network's step logits that are tried."""
HEEDS = (1.0, 0.5, 0.25, 0.0)
"""Shares of the network's mode logits that are tried."""
AGENT_SHARE = 0.3
"""Weight of the agent beside the step where both are labelled."""
PARTS = ("turns", "agents", "modes", "thresholds")
"""What a fit can change: three parts of the adapter, and from where on something is declared."""
THRESHOLDS = ("agent_threshold", "mode_threshold", "pair_threshold")
"""Fields of a calibration that say from where on something is declared."""
FOLDS = 5

_ROUNDS = 25  # of Newton's method; it ends before
_SMALL = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """One labelled run as a fit sees it.

    Args:
        group: Question, or system; runs of one group are never on both sides of a fold.
        logits: Of the model as it is before the fit: of the network, or of the reading of natural
            failures over it.
        turns: `(T, len(COLUMNS))`.
        agent_index: `(T,)` int64, agent of each turn.
        acting: `(A,)` bool, false for bystanders.
        targets: Labels, steps not softened.
    """

    group: int
    logits: Logits
    turns: Floats
    agent_index: NDArray[np.int64]
    acting: NDArray[np.bool_]
    targets: Targets


@dataclass(frozen=True, slots=True)
class Choice:
    """How one set of columns scores turns.

    Args:
        columns: Name in `dcl.adapter.COLUMN_SETS`.
        strength: Weight of the squared norm.
        trust: Share of the network's step logits that stays.
    """

    columns: str
    strength: float
    trust: float


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """An adapter with the calibration that goes with it.

    Args:
        adapter: Applied to the logits of the model as it was.
        calibration: Of the adapted logits. Each run counts with logits whose weights are from
            folds without its group; all groups together chose penalties and what pays.
        choices: How each set of columns scores turns; empty where the network's own order stays.
        parts: Names out of `PARTS` that are changed.
    """

    adapter: Adapter
    calibration: Calibration
    choices: tuple[Choice, ...]
    parts: frozenset[str]

    @property
    def adapts(self) -> bool:
        """Whether the adapter changes anything."""
        return bool(self.parts - {"thresholds"})


def fit(
    runs: Sequence[Observation],
    base: Calibration,
    *,
    parts: frozenset[str] = frozenset(PARTS),
    seed: int = 0,
    by_group: bool = True,
) -> Fit:
    """Learn from labelled runs.

    Without `thresholds` those of the base stay; where agents and modes do not change either, so do
    their temperatures, and all that is declared is what the base declares.

    Args:
        runs: Labelled runs; of at least two groups for anything to be learned.
        base: Calibration of the model, kept where nothing is labelled.
        parts: What may be changed, names out of `PARTS`.
        seed: Of the folds.
        by_group: Let sets of steps hold for a run of a new group, as `fit_cuts` says; otherwise for
            one more run, whichever groups there are.
    """
    runs = [leave_bystanders_out(run) for run in runs]
    folds = split_folds([run.group for run in runs], FOLDS, seed)
    if folds.max(initial=0) < 1:
        return Fit(IDENTITY, base, (), frozenset())
    choices, scores = _fit_order(runs, folds, parts)
    turns = average([fit_turns(runs, choice) for choice in choices]) if choices else IDENTITY
    agents = _Weights(IDENTITY.agent, {})
    modes, heed = _Weights(IDENTITY.modes, {}), IDENTITY.heed
    if "agents" in parts:
        agents = _fit_agents(runs, scores, folds)
    if "modes" in parts:
        modes, heed = _fit_modes(runs, folds)
    adapter = replace(turns, agent=agents.whole, modes=modes.whole, heed=heed)
    kept = {"turns"} if choices else set()
    kept |= {"agents"} if not np.array_equal(agents.whole, IDENTITY.agent) else set()
    kept |= {"modes"} if modes.whole.any() or heed != IDENTITY.heed else set()
    held_out = [
        _apply(run, score, agents.without(fold), modes.without(fold), heed)
        for run, score, fold in zip(runs, scores, folds.tolist(), strict=True)
    ]
    stepped = [i for i, run in enumerate(runs) if run.targets.step.any()]
    calibration = fit_calibration(
        held_out,
        [run.targets for run in runs],
        steps=[(held_out[i].step, runs[i].targets.step) for i in stepped],
        groups=[runs[i].group for i in stepped] if by_group else (),
        levels="thresholds" in parts or bool(kept & {"agents", "modes"}),
        base=base,
    )
    old = {name: getattr(base, name) for name in THRESHOLDS}
    if "thresholds" not in parts:
        calibration = replace(calibration, **old)
    elif old != {name: getattr(calibration, name) for name in THRESHOLDS}:
        kept |= {"thresholds"}
    return Fit(adapter, calibration, choices, frozenset(kept))


def leave_bystanders_out(run: Observation) -> Observation:
    """The same run with those agents and turns alone that can be blamed.

    Labels of bystanders count as out of reach, and a step that one of them takes as none.

    Args:
        run: Its arrays are not changed.
    """
    if run.acting.all():
        return run
    acting, spoken = run.acting, run.acting[run.agent_index]
    logits, targets = run.logits, run.targets
    step = targets.step[spoken]
    return replace(
        run,
        logits=replace(
            logits,
            agent=logits.agent[acting],
            pair=logits.pair[acting],
            step=logits.step[spoken],
            attention=logits.attention[spoken],
        ),
        turns=run.turns[spoken],
        agent_index=(np.cumsum(acting) - 1)[run.agent_index[spoken]],
        acting=acting[acting],
        targets=replace(
            targets,
            agent=targets.agent[acting],
            pair=targets.pair[acting],
            step=step / max(float(step.sum()), _SMALL),
            lost_agents=targets.lost_agents + int(targets.agent[~acting].sum()),
            lost_pairs=targets.lost_pairs + int(targets.pair[~acting].sum()),
        ),
    )


def fit_turns(runs: Sequence[Observation], choice: Choice, start: Floats | None = None) -> Adapter:
    """Fit the turn scores of an adapter by penalised maximum likelihood.

    A labelled step counts by its log-probability among the turns of the run, a labelled agent by
    that of all of its turns together.

    Args:
        runs: Labelled runs; those without a fault are passed over.
        choice: Columns, strength and trust.
        start: `(F,)` weights to start from; None starts from 0.

    Source:
        McFadden 1974, "Conditional logit analysis of qualitative choice behavior"; Newton's method
        with the covariance of the columns as curvature.
    """
    names = COLUMN_SETS[choice.columns]
    used = [run for run in runs if run.targets.agent.any()]
    stacked = np.concatenate([select(run.turns, names) for run in used])
    mean, scale = stacked.mean(axis=0), stacked.std(axis=0) + 1e-3
    problem = _Problem(used, standardise(stacked, mean, scale), choice)
    weights = problem.solve(np.zeros(len(names)) if start is None else start)
    return replace(
        IDENTITY, columns=names, mean=mean, scale=scale, weights=weights, trust=choice.trust
    )


def average(adapters: Sequence[Adapter]) -> Adapter:
    """One adapter whose turn scores are the mean of those of several.

    Args:
        adapters: Fitted on the same runs, so that a column is scaled alike in all of them.
    """
    columns = tuple(dict.fromkeys(name for one in adapters for name in one.columns))
    at = {name: i for i, name in enumerate(columns)}
    mean, scale, weights = np.zeros(len(at)), np.ones(len(at)), np.zeros(len(at))
    for one in adapters:
        own = [at[name] for name in one.columns]
        mean[own], scale[own] = one.mean, one.scale
        weights[own] += one.weights / len(adapters)
    trust = sum(one.trust for one in adapters) / len(adapters)
    return replace(IDENTITY, columns=columns, mean=mean, scale=scale, weights=weights, trust=trust)


class _Problem:
    """The likelihood of all labels as a function of the weights, with its derivatives."""

    def __init__(self, runs: Sequence[Observation], columns: Floats, choice: Choice) -> None:
        sizes = [len(run.agent_index) for run in runs]
        agents = [len(run.targets.agent) for run in runs]
        self.columns = columns
        self.strength = choice.strength
        self.offset = choice.trust * np.concatenate([run.logits.step for run in runs])
        self.run = np.repeat(np.arange(len(runs)), sizes)  # (N,)
        self.first = np.concatenate([[0], np.cumsum(sizes)[:-1]])  # (n,)
        shift = np.concatenate([[0], np.cumsum(agents)[:-1]])
        self.agent = np.concatenate(
            [run.agent_index + at for run, at in zip(runs, shift, strict=True)]
        )  # (N,)
        known = np.array([run.targets.step.any() for run in runs])
        self.by_step = np.where(known, 1 - AGENT_SHARE, 0.0)[self.run]  # (N,)
        self.by_agent = np.where(known, AGENT_SHARE, 1.0)[self.run]
        self.step = np.concatenate([run.targets.step for run in runs])  # (N,)
        self.blame = np.concatenate([r.targets.agent / r.targets.agent.sum() for r in runs])  # (A,)

    def solve(self, weights: Floats) -> Floats:
        """The weights with the highest penalised likelihood."""
        value, gradient, probs = self.look(weights)
        for _ in range(_ROUNDS):
            expected = np.add.reduceat(self.columns * probs[:, None], self.first)  # (n, F)
            curvature = (self.columns * probs[:, None]).T @ self.columns - expected.T @ expected
            curvature[np.diag_indices_from(curvature)] += self.strength
            move, gain = np.linalg.solve(curvature, gradient), 0.0
            for _ in range(10):
                new = self.look(weights + move)
                if (gain := new[0] - value) > 0:
                    weights = weights + move
                    value, gradient, probs = new
                    break
                move = move / 2
            if gain < 1e-2:  # nats over all runs
                break
        return weights

    def look(self, weights: Floats) -> tuple[float, Floats, Floats]:
        """Penalised log-likelihood, its gradient `(F,)`, and the probabilities `(N,)`."""
        score = self.columns @ weights + self.offset
        score = np.exp(score - np.maximum.reduceat(score, self.first)[self.run])
        probs = score / np.add.reduceat(score, self.first)[self.run]
        mass = np.bincount(self.agent, weights=probs, minlength=len(self.blame))  # (A,)
        owed = (self.blame / np.maximum(mass, _SMALL))[self.agent] * probs  # (N,)
        pull = self.by_step * (self.step - probs) + self.by_agent * (owed - probs)
        value = (self.by_step * self.step * np.log(np.maximum(probs, _SMALL))).sum()
        share = np.zeros(len(self.blame))
        share[self.agent] = self.by_agent
        value += (share * self.blame * np.log(np.maximum(mass, _SMALL))).sum()
        value -= self.strength / 2 * (weights @ weights)
        return float(value), self.columns.T @ pull - self.strength * weights, probs


def split_folds(groups: Sequence[int], folds: int, seed: int) -> NDArray[np.int64]:
    """A fold for every run, all runs of a question in the same.

    Args:
        groups: Question of each run.
        folds: Number of folds; fewer where there are fewer questions.
        seed: Of the order of the questions.

    Returns:
        `(n,)` int64 from 0 on.
    """
    distinct, place = np.unique(np.asarray(groups, dtype=np.int64), return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(distinct))
    return np.asarray((order % folds)[place], dtype=np.int64)


def label_likelihood(run: Observation, step: Floats) -> float:
    """Log-likelihood of the labels of one run under step logits, as `fit_turns` weighs it.

    Args:
        run: With at least one faulty agent.
        step: `(T,)` logits.
    """
    log_probs = step - np.logaddexp.reduce(step)
    mass = np.bincount(run.agent_index, weights=np.exp(log_probs), minlength=len(run.targets.agent))
    blame = run.targets.agent / run.targets.agent.sum()
    agent = float(blame @ np.log(np.maximum(mass, _SMALL)))
    if not run.targets.step.any():
        return agent
    return (1 - AGENT_SHARE) * float(run.targets.step @ log_probs) + AGENT_SHARE * agent


def _fit_order(
    runs: Sequence[Observation], folds: NDArray[np.int64], parts: frozenset[str]
) -> tuple[tuple[Choice, ...], list[Floats]]:
    """The best choice for each set of columns, and held-out step logits of their mean.

    Without choices where the network's own order is as good.
    """
    own = [run.logits.step.astype(np.float64) for run in runs]
    labelled = [i for i, run in enumerate(runs) if run.targets.agent.any()]
    if "turns" not in parts or len({runs[i].group for i in labelled}) < FOLDS:
        return (), own

    def judge(scores: Sequence[Floats]) -> Floats:
        return np.array([label_likelihood(runs[i], scores[i]) for i in labelled])

    # The network's own order gets its best temperature for nothing.
    before = max((judge([step / heat for step in own]) for heat in (0.5, 1.0, 2.0)), key=np.sum)
    held_out = _cross_validate(runs, folds)
    totals = {choice: float(judge(scores).sum()) for choice, scores in held_out.items()}
    best = tuple(
        max((c for c in totals if c.columns == name), key=lambda c: totals[c])
        for name in COLUMN_SETS
    )
    mean = [np.mean([held_out[choice][i] for choice in best], axis=0) for i in range(len(runs))]
    return (best, mean) if _pays(judge(mean) - before) else ((), own)


def _cross_validate(
    runs: Sequence[Observation], folds: NDArray[np.int64]
) -> dict[Choice, list[Floats]]:
    """Held-out step logits of every run under every choice."""
    found: dict[Choice, list[Floats]] = {}
    for columns, trust in product(COLUMN_SETS, TRUSTS):
        for strength in STRENGTHS:
            found[Choice(columns, strength, trust)] = [np.zeros(0)] * len(runs)
        for fold in range(int(folds.max()) + 1):
            seen = [run for run, f in zip(runs, folds, strict=True) if f != fold]
            if not any(run.targets.agent.any() for run in seen):
                seen = list(runs)
            weights: Floats | None = None
            for strength in STRENGTHS:  # each starts where the stronger one ended
                choice = Choice(columns, strength, trust)
                adapter = fit_turns(seen, choice, weights)
                weights = adapter.weights
                for i in np.flatnonzero(folds == fold).tolist():
                    found[choice][i] = adapter.score_turns(runs[i].logits, runs[i].turns)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """Weights fitted on all runs, `(P,)`, and by fold those that were fitted without its runs."""

    whole: Floats
    by_fold: Mapping[int, Floats]

    def without(self, fold: int) -> Floats:
        """Weights that no run of this fold had a part in."""
        return self.by_fold.get(fold, self.whole)


def _fit_agents(
    runs: Sequence[Observation], scores: Sequence[Floats], folds: NDArray[np.int64]
) -> _Weights:
    """Constant and two weights of the agent logits; those of the identity where they do not pay."""
    rows = [
        np.column_stack(
            [
                np.ones(len(run.logits.agent)),
                run.logits.agent,
                agent_log_odds(score, run.agent_index, run.acting),
            ]
        )
        for run, score in zip(runs, scores, strict=True)
    ]
    labels = [run.targets.agent.astype(np.float64) for run in runs]
    return _fit_logistic(rows, labels, IDENTITY.agent, folds)[0]


def _fit_modes(runs: Sequence[Observation], folds: NDArray[np.int64]) -> tuple[_Weights, float]:
    """A shift for every mode that pays, 0 for the others, and how far the network is heeded."""
    known = [i for i, run in enumerate(runs) if run.targets.known and run.targets.mode.any()]
    if not known:
        return _Weights(IDENTITY.modes, {}), IDENTITY.heed
    tried = {heed: _fit_shifts([runs[i] for i in known], folds[known], heed) for heed in HEEDS}
    heed = min(tried, key=lambda heed: tried[heed][1])
    own = sum(
        _log_loss(run.logits.mode.astype(np.float64), run.targets.mode.astype(np.float64))
        for run in (runs[i] for i in known)
    )
    shifts, loss = tried[heed]
    return (shifts, heed) if loss < own else (_Weights(IDENTITY.modes, {}), IDENTITY.heed)


def _fit_shifts(
    runs: Sequence[Observation], folds: NDArray[np.int64], heed: float
) -> tuple[_Weights, float]:
    """A shift for every mode that pays, and the held-out loss of all modes in nats."""
    fitted, total = [], 0.0
    for m in range(len(MODES)):
        rows = [np.array([[1.0, heed * run.logits.mode[m]]]) for run in runs]
        labels = [run.targets.mode[m : m + 1].astype(np.float64) for run in runs]
        weights, loss = _fit_logistic(rows, labels, np.array([0.0, 1.0]), folds, free=1)
        fitted.append(weights)
        total += loss
    shifts = _Weights(
        np.array([weights.whole[0] for weights in fitted]),
        {
            fold: np.array([weights.without(fold)[0] for weights in fitted])
            for fold in np.unique(folds).tolist()
        },
    )
    return shifts, total


def _fit_logistic(
    rows: Sequence[Floats],
    labels: Sequence[Floats],
    prior: Floats,
    folds: NDArray[np.int64],
    *,
    free: int | None = None,
) -> tuple[_Weights, float]:
    """Ridge logistic regression towards `prior`; the prior itself where held-out runs lose.

    Args:
        rows: Inputs of each run, `(a, P)`.
        labels: 0 or 1 of each row.
        prior: `(P,)` weights that are shrunk to.
        folds: `(n,)` fold of each run.
        free: Leading weights that may move; None means all.

    Returns:
        The weights, and the summed held-out loss of runs under them in nats.
    """
    before = np.array([_log_loss(x @ prior, y) for x, y in zip(rows, labels, strict=True)])
    after, by_fold = before.copy(), {}
    for fold in np.unique(folds).tolist():
        seen = np.flatnonzero(folds != fold).tolist()
        if not seen:
            continue
        weights = _solve_logistic([rows[i] for i in seen], [labels[i] for i in seen], prior, free)
        by_fold[fold] = weights
        for i in np.flatnonzero(folds == fold).tolist():
            after[i] = _log_loss(rows[i] @ weights, labels[i])
    if not _pays(before - after):
        return _Weights(prior, {}), float(before.sum())
    return _Weights(_solve_logistic(rows, labels, prior, free), by_fold), float(after.sum())


def _solve_logistic(
    rows: Sequence[Floats], labels: Sequence[Floats], prior: Floats, free: int | None
) -> Floats:
    """Newton's method; the weights start at the prior and are pulled to it."""
    x, y = np.concatenate(rows), np.concatenate(labels)
    weights, moving = prior.copy(), slice(0, free)
    for _ in range(_ROUNDS):
        probs = 0.5 * (1 + np.tanh(0.5 * (x @ weights)))
        part = x[:, moving]
        gradient = part.T @ (y - probs) - (weights - prior)[moving]
        curvature = (part * (probs * (1 - probs))[:, None]).T @ part + np.eye(part.shape[1])
        move = np.linalg.solve(curvature, gradient)
        weights[moving] += np.clip(move, -1.0, 1.0)
        if np.abs(move).max() < 1e-6:
            break
    return weights


def _log_loss(logits: Floats, labels: Floats) -> float:
    """Summed binary cross-entropy in nats."""
    return float((np.logaddexp(0, logits) - labels * logits).sum())


def _pays(gains: Floats) -> bool:
    """Whether the mean gain over runs is larger than its standard error."""
    spread = gains.std(ddof=1) / np.sqrt(len(gains)) if len(gains) > 1 else np.inf
    return bool(gains.mean() > spread)


def _apply(run: Observation, step: Floats, agent: Floats, modes: Floats, heed: float) -> Logits:
    """Logits of one run with given step logits and the rest of an adapter."""
    fixed = replace(run.logits, step=step.astype(np.float32))
    rest = replace(IDENTITY, agent=agent, modes=modes, heed=heed)
    return rest(fixed, run.turns, run.agent_index, run.acting)
