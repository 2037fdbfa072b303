from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny import count_words

from dcl.learning.wide import fit_idf, fit_table, stack_documents
from dcl.lexical import BIGRAM_ROWS, Document, Lexicon, Words, weigh_words

VOCABULARY = 12
V = VOCABULARY + BIGRAM_ROWS


def make_bags(
    count: int, *, modes: int = 2, seed: int = 0
) -> tuple[list[Words], list[NDArray[np.float32]]]:
    """Bags of two agents; saying token m is failing in mode m, the rest is noise."""
    rng = np.random.default_rng(seed)
    bags, targets = [], []
    for _ in range(count):
        turns = [rng.integers(modes, VOCABULARY, 6).tolist() for _ in range(3)]
        target = (rng.random((2, modes)) < 0.4).astype(np.float32)
        for agent, mode in np.argwhere(target):
            turns[agent].append(int(mode))
        bags.append(count_words(turns, (0, 1, 0), VOCABULARY))
        targets.append(target)
    return bags, targets


def documents_of(bags: list[Words]) -> list[Document]:
    return [document for words in bags for document in words]


def fit(
    bags: list[Words],
    targets: list[NDArray[np.float32]],
    *,
    strength: float = 4.0,
    least: int = 3,
    iterations: int = 60,
    contrast: float = 0.0,
) -> Lexicon:
    """The wide half of these bags."""
    documents = documents_of(bags)
    idf = fit_idf(documents, V, least=least)
    stacked, labels = stack_documents(documents, idf), np.concatenate(targets)
    table = fit_table(
        stacked,
        labels,
        strength=strength,
        iterations=iterations,
        runs=number_runs(bags),
        contrast=contrast,
    )
    return Lexicon(idf, table, contrast)


def number_runs(bags: list[Words]) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(bags)), [len(words) for words in bags])


def test_document_frequencies_follow_a_slow_loop() -> None:
    bags, _ = make_bags(8)
    documents = documents_of(bags)
    frequency = Counter(row for document in documents for row in set(document.row.tolist()))
    idf = fit_idf(documents, V, least=3)
    assert idf.dtype == np.float32
    for row, times in frequency.items():
        slow = 1 + math.log((1 + len(documents)) / (1 + times)) if times >= 3 else 0.0
        assert idf[row] == pytest.approx(slow, abs=1e-6)
    assert np.count_nonzero(idf) == sum(times >= 3 for times in frequency.values())


def test_a_rare_n_gram_counts_nothing() -> None:
    turns = [[0, 1], [1, 1]]
    idf = fit_idf(count_words(turns, (0, 1), VOCABULARY), V, least=2)
    assert idf[0] == 0
    assert idf[1] > 0
    alone = fit_idf(count_words(turns, (0, 0), VOCABULARY), V, least=2)
    assert not alone.any()  # all turns of an agent are one document


def test_the_most_frequent_n_grams_are_kept() -> None:
    documents = count_words([[0, 1, 1], [1, 2], [1, 2], [0, 1]], (0, 1, 2, 3), VOCABULARY)
    every = fit_idf(documents, V, least=1)
    assert np.flatnonzero(fit_idf(documents, V, least=1, most=1)).tolist() == [1]
    few = fit_idf(documents, V, least=1, most=3)
    assert set(np.flatnonzero(few)) >= {1}
    assert np.count_nonzero(few) == 3
    assert np.array_equal(few[few > 0], every[few > 0])


def test_rows_after_the_leading_ones_are_left_out() -> None:
    documents = count_words([[0, 1, 1], [1, 2]], (0, 1), VOCABULARY)
    every = fit_idf(documents, V, least=1)
    single = fit_idf(documents, V, least=1, leading=VOCABULARY)
    assert every[VOCABULARY:].any()
    assert not single[VOCABULARY:].any()
    assert np.array_equal(single[:VOCABULARY], every[:VOCABULARY])
    assert np.flatnonzero(fit_idf(documents, V, least=1, leading=1)).tolist() == [0]


def test_n_grams_may_weigh_alike() -> None:
    documents = count_words([[0, 1, 1], [1, 2]], (0, 1), VOCABULARY)
    weighed, alike = fit_idf(documents, V, least=1), fit_idf(documents, V, least=1, weigh=False)
    assert np.array_equal(alike, (weighed > 0).astype(np.float32))


def test_documents_are_the_weighed_words_of_agents() -> None:
    bags, _ = make_bags(5)
    documents = documents_of(bags)
    idf = fit_idf(documents, V, least=1)
    stacked = stack_documents(documents, idf)
    assert stacked.shape == (10, V)
    assert stacked.multiply(stacked).sum(axis=1) == pytest.approx(np.ones((10, 1)), abs=1e-5)
    for n, document in enumerate(documents):
        dense = np.zeros(V, dtype=np.float32)
        np.add.at(dense, document.row, weigh_words(document, idf))
        assert np.allclose(stacked[n].toarray(), dense, atol=1e-6)


def test_a_separable_problem_is_separated() -> None:
    bags, targets = make_bags(40)
    lexicon = fit(bags, targets, strength=100.0)
    assert lexicon.table.dtype == np.float32
    agents = np.array([0, 1, 0])
    scores = [lexicon(words, 3)[agents == agent].sum(axis=0) for words in bags for agent in (0, 1)]
    score, label = np.array(scores), np.concatenate(targets)
    for mode in range(2):
        assert score[label[:, mode] == 1, mode].min() > score[label[:, mode] == 0, mode].max()


def test_weights_of_rare_n_grams_are_0() -> None:
    lexicon = fit(*make_bags(20), least=8)
    assert not lexicon.table[lexicon.idf == 0].any()
    assert lexicon.table[lexicon.idf > 0].any()


def test_without_any_frequent_n_gram_the_wide_half_says_nothing() -> None:
    bags, targets = make_bags(3)
    lexicon = fit(bags, targets, least=99)
    assert not lexicon.idf.any()
    assert not lexicon(bags[0], 3).any()


@pytest.mark.parametrize(("strength", "contrast"), [(0.3, 0.0), (4.0, 0.0), (4.0, 0.5), (4.0, 1.0)])
def test_weights_are_those_of_scikit_learn(strength: float, contrast: float) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    bags, targets = make_bags(60, seed=3)
    lexicon = fit(bags, targets, strength=strength, iterations=400, contrast=contrast)
    used = np.flatnonzero(lexicon.idf)
    stacked = stack_documents(documents_of(bags), lexicon.idf)
    documents = stacked[:, used].toarray().astype(np.float64)
    for run in range(len(bags)):
        own = number_runs(bags) == run
        documents[own] -= contrast * documents[own].mean(axis=0)
    labels = np.concatenate(targets)
    for mode in range(2):
        peer = linear_model.LogisticRegression(C=strength, tol=1e-8, max_iter=5000)
        peer.fit(documents, labels[:, mode])
        assert np.allclose(lexicon.table[used, mode], peer.coef_[0], atol=2e-2, rtol=0)
