"""Floors that read neither words nor names: where an agent speaks, or how much it says.

What such a probe finds is in the layout of a data set, so a model has to be ahead of it.

Letters: `N` agents of all runs, `F` statistics, `P` pairs of two statistics, `A` agents of one run,
`M` = 14 modes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import astuple
from itertools import combinations
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression

from benchmarks.metrics import Prediction
from benchmarks.predictors import Beliefs, Cuts, fit_cuts
from dcl.files import whole
from dcl.targets import make_targets
from dcl.taxonomy import MODES
from dcl.trajectory import Example, Trajectory

Floats = NDArray[np.float64]
Sparse = Any
"""A `scipy.sparse` matrix in rows; scipy has no types to name it by."""

BINS = 12
"""Parts that the range of each statistic is cut into, with about as many training agents each."""
STRENGTHS = (0.03, 0.3)
"""Inverse weights of the squared norm that are tried, ascending."""


class Probe(ABC):
    """One logistic regression a mode on a few statistics of each agent.

    Every statistic is cut into bins, and every pair of two has one weight for each cell of the two
    bins, so that any shape over two statistics can be learned. Agents and modes follow from pairs
    by the noisy-or.

    Args:
        edges: `(F, BINS - 1)`, between the bins, ascending.
        table: `(P * BINS ** 2 + 1, M)`, weights and, last, the bias.
        cuts: Thresholds.
        single: Whether one fault is known to exist.
    """

    def __init__(self, edges: Floats, table: Floats, cuts: Cuts, *, single: bool = False) -> None:
        self.single = single
        self._edges, self._table, self._cuts = edges, table, cuts

    @staticmethod
    @abstractmethod
    def describe(trajectory: Trajectory) -> Floats:
        """Statistics of the agents of a run, `(A, F)`."""

    @staticmethod
    @abstractmethod
    def rank(trajectory: Trajectory, agent: str) -> list[int]:
        """Positions of the turns of an agent, from the most suspect to the least."""

    @classmethod
    def fit(
        cls, train: Sequence[Example], valid: Sequence[Example], *, single: bool = False
    ) -> Self:
        """Fit on some questions, choose strength and thresholds on others.

        Args:
            train: Labelled examples to fit on.
            valid: Labelled examples, of other questions, to choose on by micro-F1 of pairs.
            single: Whether one fault is known to exist.
        """
        stats = np.concatenate([cls.describe(example.trajectory) for example in train])
        edges = np.quantile(stats, np.arange(1, BINS) / BINS, axis=0).T
        targets = np.concatenate([make_targets(example, 0.0).pair for example in train])
        cells = _place(stats, edges)
        found = []
        for strength in STRENGTHS:
            table = _fit(cells, targets, strength)
            probe = cls(edges, table, Cuts(0.0, 0.0, 0.0, 0.0), single=single)
            cuts = fit_cuts([probe._believe(example.trajectory) for example in valid], valid)
            found.append(cls(edges, table, cuts, single=single))
        return max(found, key=lambda probe: probe._cuts.pair_f1)

    def save(self, file: Path) -> None:
        """Write the fitted probe as plain arrays, whole or not at all."""
        with whole(file) as part, part.open("wb") as stream:
            np.savez(stream, edges=self._edges, table=self._table, cuts=astuple(self._cuts))

    @classmethod
    def load(cls, file: Path, *, single: bool = False) -> Self:
        """Read what `save` wrote."""
        with np.load(file, allow_pickle=False) as kept:
            cuts = Cuts(*(float(cut) for cut in kept["cuts"]))
            return cls(kept["edges"], kept["table"], cuts, single=single)

    def __call__(self, trajectory: Trajectory) -> Prediction:
        """Predict one run; turns of the likeliest agent come first."""
        beliefs = self._believe(trajectory)
        order = [
            trajectory.steps[t]
            for a in np.argsort(-beliefs.agent, kind="stable").tolist()
            for t in self.rank(trajectory, trajectory.agents[a])
        ]
        return beliefs.declare(self._cuts, single=self.single, steps=order)

    def _believe(self, trajectory: Trajectory) -> Beliefs:
        """Scores of one run."""
        cells = _place(self.describe(trajectory), self._edges)
        logits = cells @ self._table[:-1] + self._table[-1]
        pair: Floats = 0.5 * (1.0 + np.tanh(0.5 * logits))
        agent, mode = (1.0 - np.prod(1.0 - pair, axis=axis) for axis in (1, 0))
        return Beliefs(trajectory.agents, agent=agent, mode=mode, pair=pair)


class PositionProbe(Probe):
    """Sees where an agent speaks first and last, and how many agents and turns there are."""

    @staticmethod
    def describe(trajectory: Trajectory) -> Floats:
        """First and last turn, counted and as a share of the run; agents; turns: `(A, 6)`."""
        turns, agents = len(trajectory.turns), trajectory.agents
        own = [PositionProbe.rank(trajectory, agent) for agent in agents]
        return np.array(
            [
                (at[0], at[-1], at[0] / turns, (at[-1] + 1) / turns, len(agents), turns)
                for at in own
            ],
            dtype=np.float64,
        )

    @staticmethod
    def rank(trajectory: Trajectory, agent: str) -> list[int]:
        """The turns of an agent in order."""
        return [t for t, turn in enumerate(trajectory.turns) if turn.agent == agent]


class LengthProbe(Probe):
    """Sees how many turns and characters are an agent's, and how many agents there are."""

    @staticmethod
    def describe(trajectory: Trajectory) -> Floats:
        """Turns and characters, counted and as a share of the run; agents: `(A, 5)`."""
        agents = trajectory.agents
        lengths = [
            [len(turn.content) for turn in trajectory.turns if turn.agent == agent]
            for agent in agents
        ]
        said = max(sum(map(sum, lengths)), 1)
        return np.array(
            [
                (len(own), len(own) / len(trajectory.turns), sum(own), sum(own) / said, len(agents))
                for own in lengths
            ],
            dtype=np.float64,
        )

    @staticmethod
    def rank(trajectory: Trajectory, agent: str) -> list[int]:
        """The turns of an agent, the longest first."""
        own = PositionProbe.rank(trajectory, agent)
        return sorted(own, key=lambda t: -len(trajectory.turns[t].content))


def _place(stats: Floats, edges: Floats) -> Sparse:
    """The cell of every pair of statistics as ones, `(N, P * BINS ** 2)`."""
    columns = zip(edges, stats.T, strict=True)
    bins = [np.searchsorted(row, values, side="right") for row, values in columns]
    pairs = [*combinations(bins, 2)]
    cells = np.stack([p * BINS**2 + a * BINS + b for p, (a, b) in enumerate(pairs)], axis=1)
    starts = np.arange(len(stats) + 1) * len(pairs)
    shape = (len(stats), len(pairs) * BINS**2)
    return csr_matrix((np.ones(cells.size), cells.ravel(), starts), shape=shape)


def _fit(cells: Sparse, targets: NDArray[np.float32], strength: float) -> Floats:
    """Weights of all modes, the bias last; a mode never seen stays improbable."""
    table = np.zeros((cells.shape[1] + 1, len(MODES)))
    for m in range(len(MODES)):
        if not 0 < targets[:, m].mean() < 1:
            table[-1, m] = 20.0 * (targets[:, m].mean() - 0.5)
            continue
        model = LogisticRegression(solver="liblinear", C=strength, random_state=0)
        model.fit(cells, targets[:, m])
        table[:-1, m], table[-1, m] = model.coef_[0], model.intercept_[0]
    return table
