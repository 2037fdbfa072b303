"""The floor that reads words alone: tf-idf of each agent's turns and one linear model a mode.

Letters: `N` documents (one an agent of a run), `V` hashed n-grams, `A` agents, `M` = 14 modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import LogisticRegression

from benchmarks.metrics import Prediction
from benchmarks.predictors import Beliefs, Cuts, fit_cuts
from dcl.files import whole
from dcl.targets import make_targets
from dcl.taxonomy import MODES
from dcl.trajectory import Example, Trajectory

Floats = NDArray[np.float32]
Sparse = Any
"""A `scipy.sparse` matrix in rows; scipy has no types to name it by."""

WIDTH = 1 << 18
"""Columns that the n-grams are hashed into, `V`."""
STRENGTHS = (8.0, 32.0)
"""Inverse weights of the squared norm that are tried, ascending."""
RAREST = 3
"""Documents in which a hashed n-gram must stand to count."""

_HASHER = HashingVectorizer(
    ngram_range=(1, 2),
    alternate_sign=False,
    norm=None,
    n_features=WIDTH,
    dtype=np.float32,
    token_pattern=r"(?u)\b\w+\b",
)


class TfIdf:
    """One logistic regression a mode on the tf-idf vector of all turns of an agent.

    Pair scores are its probabilities; an agent's score is the noisy-or over modes and a mode's
    the noisy-or over agents. Steps are ranked by the score that a turn has by itself.

    Args:
        idf: `(V,)`, 0 for n-grams that do not count.
        table: `(V + 1, M)`, weights and, last, the bias.
        cuts: Thresholds.
        single: Whether one fault is known to exist.
    """

    def __init__(self, idf: Floats, table: Floats, cuts: Cuts, *, single: bool = False) -> None:
        self.single = single
        self._idf, self._table, self._cuts = idf, table, cuts

    @classmethod
    def fit(
        cls,
        train: Sequence[Example],
        valid: Sequence[Example],
        *,
        strengths: Sequence[float] = STRENGTHS,
        single: bool = False,
    ) -> TfIdf:
        """Fit on some questions, choose strength and thresholds on others.

        Args:
            train: Labelled examples to fit on.
            valid: Labelled examples, of other questions, to choose on by micro-F1 of pairs.
            strengths: Inverse weights of the squared norm to try, ascending; the search ends at
                the first that is no better.
            single: Whether one fault is known to exist.
        """
        counts = _count([text for e in train for text in _documents(e.trajectory)])
        idf = _fit_idf(counts)
        vectors = _weigh(counts, idf)
        targets = np.concatenate([make_targets(example, 0.0).pair for example in train])
        held_out = [_weigh(_count(_documents(e.trajectory)), idf) for e in valid]
        best: tuple[Floats, Cuts] | None = None
        for strength in strengths:
            table = _fit(vectors, targets, strength)
            beliefs = [
                _believe(example.trajectory, _probs(rows, table))
                for example, rows in zip(valid, held_out, strict=True)
            ]
            cuts = fit_cuts(beliefs, valid)
            if best is not None and cuts.pair_f1 <= best[1].pair_f1:
                break
            best = table, cuts
        if best is None:
            raise ValueError("expected at least one strength, got none")
        return cls(idf, *best, single=single)

    def save(self, file: Path) -> None:
        """Write the fitted floor as plain arrays, whole or not at all."""
        with whole(file) as part, part.open("wb") as stream:
            np.savez(stream, idf=self._idf, table=self._table, cuts=astuple(self._cuts))

    @classmethod
    def load(cls, file: Path, *, single: bool = False) -> TfIdf:
        """Read what `save` wrote."""
        with np.load(file, allow_pickle=False) as kept:
            cuts = Cuts(*(float(cut) for cut in kept["cuts"]))
            return cls(kept["idf"], kept["table"], cuts, single=single)

    def __call__(self, trajectory: Trajectory) -> Prediction:
        """Predict one run from its words."""
        probs = _probs(self._vectors(_documents(trajectory)), self._table)
        alone = _probs(self._vectors([turn.content for turn in trajectory.turns]), self._table)
        order = np.argsort(-_noisy_or(alone, axis=1), kind="stable")
        return _believe(trajectory, probs).declare(
            self._cuts, single=self.single, steps=[trajectory.steps[t] for t in order]
        )

    def _vectors(self, texts: Sequence[str]) -> Sparse:
        """Unit tf-idf vectors, `(N, V)`."""
        return _weigh(_count(texts), self._idf)


def _count(texts: Sequence[str]) -> Sparse:
    """Counted n-grams, `(N, V)`; lone surrogates become question marks."""
    return _HASHER.transform(text.encode("utf-8", "replace").decode("utf-8") for text in texts)


def _weigh(counts: Sparse, idf: Floats) -> Sparse:
    """Counts to unit tf-idf vectors with entries `(1 + ln tf) * idf`, in place."""
    counts.data = (1 + np.log(counts.data)) * idf[counts.indices]
    length = np.sqrt(np.asarray(counts.multiply(counts).sum(axis=1)).ravel())
    counts.data /= np.repeat(np.maximum(length, 1e-12), np.diff(counts.indptr))
    return counts


def _documents(trajectory: Trajectory) -> list[str]:
    """All that each agent says, `A` texts."""
    texts: dict[str, list[str]] = {agent: [] for agent in trajectory.agents}
    for turn in trajectory.turns:
        texts[turn.agent].append(turn.content)
    return ["\n".join(said) for said in texts.values()]


def _fit_idf(counts: Sparse) -> Floats:
    """`(V,)` inverse document frequencies, 0 for what is too rare to learn from."""
    frequency = np.bincount(counts.indices, minlength=WIDTH)
    idf = 1.0 + np.log((1.0 + counts.shape[0]) / (1.0 + frequency))
    return np.where(frequency >= RAREST, idf, 0.0).astype(np.float32)


def _fit(vectors: Sparse, targets: NDArray[np.float64], strength: float) -> Floats:
    """Weights of all modes, `(V + 1, M)`, the bias last; a mode never seen stays improbable."""
    table = np.zeros((WIDTH + 1, len(MODES)), dtype=np.float32)
    for m in range(len(MODES)):
        if not 0 < targets[:, m].mean() < 1:
            table[-1, m] = 20.0 * (targets[:, m].mean() - 0.5)
            continue
        model = LogisticRegression(
            solver="liblinear", dual=True, C=strength, tol=0.1, max_iter=1000, random_state=0
        ).fit(vectors, targets[:, m])
        table[:-1, m], table[-1, m] = model.coef_[0], model.intercept_[0]
    return table


def _probs(vectors: Sparse, table: Floats) -> NDArray[np.float64]:
    """Probability of each mode in each document, `(N, M)`."""
    logits = (vectors @ table[:-1] + table[-1]).astype(np.float64)
    probs: NDArray[np.float64] = 0.5 * (1.0 + np.tanh(0.5 * logits))
    return probs


def _believe(trajectory: Trajectory, probs: NDArray[np.float64]) -> Beliefs:
    """Scores of one run."""
    return Beliefs(
        trajectory.agents, _noisy_or(probs, axis=1), mode=_noisy_or(probs, axis=0), pair=probs
    )


def _noisy_or(probs: NDArray[np.float64], *, axis: int) -> NDArray[np.float64]:
    """Chance that at least one of independent events happens."""
    chance: NDArray[np.float64] = 1.0 - np.prod(1.0 - probs, axis=axis)
    return chance
