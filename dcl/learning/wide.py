"""Fitting the wide half: a convex problem, solved before the network is trained.

Letters: `N` documents (one an agent of a trajectory), `V` rows of the lexical table, `M` modes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import minimize
from torch import Tensor

from dcl.lexical import Document, weigh_words

Floats = NDArray[np.float32]


def fit_idf(
    documents: Sequence[Document],
    rows: int,
    *,
    least: int = 3,
    most: int = 0,
    leading: int | None = None,
    weigh: bool = True,
) -> Floats:
    """Inverse document frequencies, with 0 for n-grams that are left out.

    Args:
        documents: Those to learn from.
        rows: Rows `V` of the lexical table.
        least: Documents in which an n-gram must stand, as it is too rare to learn from otherwise.
        most: n-grams that are kept, those in most documents; 0 for any number.
        leading: Number of first rows that may be kept, as those of single pieces; None for all.
        weigh: Whether rare n-grams weigh more; otherwise each that is kept weighs 1.

    Returns:
        `(V,)` float32, `1 + ln((1 + N) / (1 + df))` or 0; 1 or 0 where nothing is weighed.
    """
    frequency = np.zeros(rows, dtype=np.int64)
    for document in documents:
        frequency[np.unique(document.row)] += 1
    idf = np.ones(rows)
    if weigh:
        idf += np.log((1.0 + len(documents)) / (1.0 + frequency))
    if leading is not None:
        frequency[leading:] = 0
    idf[frequency < least] = 0.0
    if most:
        idf[np.argsort(-frequency, kind="stable")[most:]] = 0.0
    rounded: Floats = idf.astype(np.float32)
    return rounded


def stack_documents(documents: Sequence[Document], idf: Floats) -> sparse.csr_matrix:
    """tf-idf vectors of the agents of all bags.

    Args:
        documents: One an agent.
        idf: `(V,)` float32.

    Returns:
        `(N, V)` float32 of unit rows, in order.
    """
    data, row, column = [], [], []
    for n, document in enumerate(documents):
        weight = weigh_words(document, idf)
        kept = weight > 0
        data.append(weight[kept])
        row.append(np.full(len(data[-1]), n, dtype=np.int32))
        column.append(document.row[kept])
    entries = (np.concatenate(data), (np.concatenate(row), np.concatenate(column)))
    return sparse.csr_matrix(entries, shape=(len(documents), len(idf)), dtype=np.float32)


def fit_table(
    documents: sparse.csr_matrix,
    labels: Floats,
    *,
    strength: float,
    runs: NDArray[np.int64] | None = None,
    contrast: float = 0.0,
    iterations: int = 60,
) -> Floats:
    """Fit one logistic regression a mode.

    Args:
        documents: `(N, V)` tf-idf vectors.
        labels: `(N, M)`, 0 or 1.
        strength: Inverse weight of the squared norm; > 0. Larger fits closer.
        runs: `(N,)`, the same number for all agents of a run; None where every agent stands alone.
        contrast: Share of the mean of its run that is taken off each vector, 0 to 1, as
            `dcl.lexical.Lexicon` does, which gives an agent without a word nothing.
        iterations: Most L-BFGS steps.

    Returns:
        `(V, M)` float32 weights; the intercept is left out, as the network has one.

    Source:
        The primal problem of `liblinear`: squared norm / 2 + strength * sum of log losses.
    """
    used = np.unique(documents.indices)
    narrow = documents[:, used]
    forward, backward = _to_torch(narrow), _to_torch(narrow.T.tocsr())
    oppose = _oppose(np.arange(len(labels)) if runs is None else runs, contrast)
    target = torch.from_numpy(np.ascontiguousarray(labels, dtype=np.float32))
    shape = (len(used) + 1, labels.shape[1])
    start = np.zeros(shape)
    start[-1] = np.log((labels.mean(axis=0) + 1e-4) / (1 - labels.mean(axis=0) + 1e-4))

    def objective(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weights = torch.from_numpy(flat.reshape(shape).astype(np.float32))
        logits = oppose(forward @ weights[:-1]) + weights[-1]  # (N, M)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, target, reduction="none"
        ).sum(dtype=torch.float64)
        slope = strength * (torch.sigmoid(logits) - target)
        pull = backward @ oppose(slope)  # the map is its own transpose
        gradient = torch.cat([pull + weights[:-1], slope.sum(0, keepdim=True)])
        value = strength * float(loss) + 0.5 * float((weights[:-1] ** 2).sum(dtype=torch.float64))
        return value, gradient.double().numpy().ravel()

    solved = minimize(
        objective,
        start.ravel(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": iterations, "maxcor": 8, "ftol": 1e-6},
    )
    table = np.zeros((documents.shape[1], labels.shape[1]), dtype=np.float32)
    table[used] = solved.x.reshape(shape)[:-1]
    return table


def _oppose(runs: NDArray[np.int64], contrast: float) -> Callable[[Tensor], Tensor]:
    """What takes a share of the mean over the rows of a run off each of them; rows are `(N, M)`."""
    _, number = np.unique(runs, return_inverse=True)
    run = torch.from_numpy(number)
    share = (contrast / torch.bincount(run))[:, None]

    def oppose(rows: Tensor) -> Tensor:
        if not contrast:
            return rows
        total = torch.zeros(len(share), rows.shape[1]).index_add_(0, run, rows)
        return rows - (share * total)[run]

    return oppose


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
