"""Fitting the wide half: a convex problem, solved before the network is trained.

Letters: `N` documents (one an agent of a trajectory), `V` rows of the lexical table, `M` modes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import minimize

from dcl.lexical import Words, weigh_words

Floats = NDArray[np.float32]
TaggedWords = tuple[Words, NDArray[np.int64]]
"""n-grams of a bag, and the agent index of its turns."""


def fit_idf(bags: Iterable[TaggedWords], rows: int, *, least: int = 3) -> Floats:
    """Inverse document frequencies, with 0 for n-grams too rare to learn from.

    Args:
        bags: Training bags.
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


def stack_documents(bags: Iterable[TaggedWords], idf: Floats) -> sparse.csr_matrix:
    """tf-idf vectors of all agents of all bags.

    Args:
        bags: Bags, `A` agents each.
        idf: `(V,)` float32.

    Returns:
        `(N, V)` float32 of unit rows, in order of bag, then agent.
    """
    data, row, column, start = [], [], [], 0
    for words, agent_index in bags:
        weight = weigh_words(words, agent_index, idf)
        kept = weight > 0
        data.append(weight[kept])
        row.append((agent_index[words.turn[kept]] + start).astype(np.int32))
        column.append(words.row[kept].astype(np.int32))
        start += int(agent_index.max()) + 1
    entries = (np.concatenate(data), (np.concatenate(row), np.concatenate(column)))
    return sparse.csr_matrix(entries, shape=(start, len(idf)), dtype=np.float32)


def fit_table(
    documents: sparse.csr_matrix,
    labels: Floats,
    *,
    strength: float,
    iterations: int = 60,
) -> NDArray[np.float16]:
    """Fit one logistic regression a mode.

    Args:
        documents: `(N, V)` tf-idf vectors.
        labels: `(N, M)`, 0 or 1.
        strength: Inverse weight of the squared norm; > 0. Larger fits closer.
        iterations: Most L-BFGS steps.

    Returns:
        `(V, M)` float16 weights; the intercept is left out, as the network has one.

    Source:
        The primal problem of `liblinear`: squared norm / 2 + strength * sum of log losses.
    """
    used = np.unique(documents.indices)
    narrow = documents[:, used]
    forward, backward = _to_torch(narrow), _to_torch(narrow.T.tocsr())
    target = torch.from_numpy(np.ascontiguousarray(labels, dtype=np.float32))
    shape = (len(used) + 1, labels.shape[1])
    start = np.zeros(shape)
    start[-1] = np.log((labels.mean(axis=0) + 1e-4) / (1 - labels.mean(axis=0) + 1e-4))

    def objective(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weights = torch.from_numpy(flat.reshape(shape).astype(np.float32))
        logits = forward @ weights[:-1] + weights[-1]  # (N, M)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, target, reduction="none"
        ).sum(dtype=torch.float64)
        slope = strength * (torch.sigmoid(logits) - target)
        gradient = torch.cat([backward @ slope + weights[:-1], slope.sum(0, keepdim=True)])
        value = strength * float(loss) + 0.5 * float((weights[:-1] ** 2).sum(dtype=torch.float64))
        return value, gradient.double().numpy().ravel()

    solved = minimize(
        objective,
        start.ravel(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": iterations, "maxcor": 8, "ftol": 1e-6},
    )
    table = np.zeros((documents.shape[1], labels.shape[1]), dtype=np.float16)
    table[used] = solved.x.reshape(shape)[:-1]
    return table


def document_rows(bags: Sequence[TaggedWords], chosen: Sequence[bool]) -> NDArray[np.bool_]:
    """Which rows of `stack_documents` belong to the chosen bags; `(N,)` bool."""
    agents = [int(agent_index.max()) + 1 for _, agent_index in bags]
    return np.repeat(np.asarray(chosen, dtype=bool), agents)


def _to_torch(matrix: sparse.csr_matrix) -> torch.Tensor:
    """The same matrix for torch, whose product runs on all threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse (CSR|invariant)", UserWarning)  # beta notice
        return torch.sparse_csr_tensor(
            torch.from_numpy(matrix.indptr),
            torch.from_numpy(matrix.indices),
            torch.from_numpy(matrix.data),
            size=matrix.shape,
        )
