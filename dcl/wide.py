"""Fitting the wide half: a convex problem, solved before the network is trained.

Letters: `N` documents (one an agent of a trajectory), `V` rows of the lexical table, `M` modes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import minimize

from dcl.lexical import BIGRAM_ROWS, Lexicon, Words, weigh_words

Floats = NDArray[np.float32]


def fit_idf(bags: Sequence[tuple[Words, NDArray[np.int64]]], rows: int, least: int) -> Floats:
    """Inverse document frequencies, with 0 for n-grams too rare to learn from.

    Args:
        bags: n-grams and agent index of each training bag.
        rows: Rows `V` of the lexical table.
        least: Documents in which an n-gram must stand.

    Returns:
        `(V,)` float32, `1 + ln((1 + N) / (1 + df))` or 0.
    """
    frequency = np.zeros(rows, dtype=np.int64)
    documents = 0
    for words, agent_index in bags:
        keys = np.unique(agent_index[words.turn] * rows + words.row)
        frequency += np.bincount(keys % rows, minlength=rows)
        documents += int(agent_index.max()) + 1
    idf = 1.0 + np.log((1.0 + documents) / (1.0 + frequency))
    return np.where(frequency >= least, idf, 0.0).astype(np.float32)


def fit_lexicon(
    bags: Sequence[tuple[Words, NDArray[np.int64]]],
    targets: Sequence[Floats],
    *,
    vocabulary: int,
    strength: float,
    least: int = 3,
    iterations: int = 100,
) -> Lexicon:
    """Fit one logistic regression a mode on the tf-idf vectors of agents.

    Args:
        bags: n-grams and agent index of each training bag.
        targets: `(A, M)` 0 or 1 for each bag.
        vocabulary: Number of token ids; the bigram rows come on top.
        strength: Inverse weight of the squared norm; > 0. Larger fits closer.
        least: Documents in which an n-gram must stand.
        iterations: Most L-BFGS steps.

    Returns:
        The wide half. Its intercept is left out, as the network has one.

    Source:
        The `liblinear` form of the problem: squared norm / 2 + strength * sum of log losses.
    """
    rows = vocabulary + BIGRAM_ROWS
    idf = fit_idf(bags, rows, least)
    used = np.flatnonzero(idf)
    documents = _stack(bags, idf)[:, used]
    labels = np.concatenate(targets).astype(np.float32)  # (N, M)
    shape = (len(used) + 1, labels.shape[1])
    start = np.zeros(shape)
    start[-1] = np.log((labels.mean(axis=0) + 1e-4) / (1 - labels.mean(axis=0) + 1e-4))

    def objective(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weights = flat.reshape(shape).astype(np.float32)
        logits = documents @ weights[:-1] + weights[-1]  # (N, M)
        prob = 0.5 * (1 + np.tanh(0.5 * logits))
        loss = np.logaddexp(0, logits).sum() - (logits * labels).sum()
        slope = strength * (prob - labels)
        gradient = np.vstack([documents.T @ slope + weights[:-1], slope.sum(axis=0)])
        value = strength * float(loss) + 0.5 * float((weights[:-1] ** 2).sum())
        return value, gradient.ravel().astype(np.float64)

    solved = minimize(
        objective,
        start.ravel(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": iterations, "maxcor": 8, "ftol": 1e-6},
    )
    table = np.zeros((rows, labels.shape[1]), dtype=np.float16)
    table[used] = solved.x.reshape(shape)[:-1]
    return Lexicon(idf=idf, table=table)


def _stack(bags: Sequence[tuple[Words, NDArray[np.int64]]], idf: Floats) -> sparse.csr_matrix:
    """tf-idf vectors of all agents of all bags, `(N, V)`."""
    data, row, column, start = [], [], [], 0
    for words, agent_index in bags:
        weight = weigh_words(words, agent_index, idf)
        kept = weight > 0
        data.append(weight[kept])
        row.append((agent_index[words.turn] + start)[kept].astype(np.int32))
        column.append(words.row[kept].astype(np.int32))
        start += int(agent_index.max()) + 1
    entries = (np.concatenate(data), (np.concatenate(row), np.concatenate(column)))
    return sparse.csr_matrix(entries, shape=(start, len(idf)), dtype=np.float32)
