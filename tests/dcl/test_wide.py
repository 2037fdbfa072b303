from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from dcl.lexical import BIGRAM_ROWS, Lexicon, count_words, weigh_words
from dcl.wide import TaggedWords, document_rows, fit_idf, fit_table, stack_documents

VOCABULARY = 12
V = VOCABULARY + BIGRAM_ROWS


def make_bags(
    count: int, *, modes: int = 2, seed: int = 0
) -> tuple[list[TaggedWords], list[NDArray[np.float32]]]:
    """Bags of two agents; saying token m is failing in mode m, the rest is noise."""
    rng = np.random.default_rng(seed)
    bags, targets = [], []
    for _ in range(count):
        agents = np.array([0, 1, 0], dtype=np.int64)
        turns = [rng.integers(modes, VOCABULARY, 6).astype(np.int32) for _ in agents]
        target = (rng.random((2, modes)) < 0.4).astype(np.float32)
        for agent, mode in np.argwhere(target):
            turns[agent] = np.append(turns[agent], np.int32(mode))
        bags.append((count_words(turns, VOCABULARY), agents))
        targets.append(target)
    return bags, targets


def fit(
    bags: list[TaggedWords],
    targets: list[NDArray[np.float32]],
    *,
    strength: float = 4.0,
    least: int = 3,
    iterations: int = 60,
) -> Lexicon:
    """The wide half of these bags."""
    idf = fit_idf(bags, V, least=least)
    documents, labels = stack_documents(bags, idf), np.concatenate(targets)
    return Lexicon(idf, fit_table(documents, labels, strength=strength, iterations=iterations))


def test_document_frequencies_follow_a_slow_loop() -> None:
    bags, _ = make_bags(8)
    documents = [
        {int(row) for t, row in zip(words.turn, words.row, strict=True) if agents[t] == agent}
        for words, agents in bags
        for agent in (0, 1)
    ]
    frequency = Counter(row for document in documents for row in document)
    idf = fit_idf(bags, V, least=3)
    assert idf.dtype == np.float32
    for row, times in frequency.items():
        slow = 1 + math.log((1 + len(documents)) / (1 + times)) if times >= 3 else 0.0
        assert idf[row] == pytest.approx(slow, abs=1e-6)
    assert np.count_nonzero(idf) == sum(times >= 3 for times in frequency.values())


def test_a_rare_n_gram_counts_nothing() -> None:
    turns = [np.array([0, 1], dtype=np.int32), np.array([1, 1], dtype=np.int32)]
    words = count_words(turns, VOCABULARY)
    idf = fit_idf([(words, np.array([0, 1]))], V, least=2)
    assert idf[0] == 0
    assert idf[1] > 0
    alone = fit_idf([(words, np.array([0, 0]))], V, least=2)  # all turns of an agent are one
    assert not alone.any()


def test_documents_are_the_weighed_words_of_agents() -> None:
    bags, _ = make_bags(5)
    idf = fit_idf(bags, V, least=1)
    documents = stack_documents(bags, idf)
    assert documents.shape == (10, V)
    assert documents.multiply(documents).sum(axis=1) == pytest.approx(np.ones((10, 1)), abs=1e-5)
    for b, (words, agents) in enumerate(bags):
        dense = np.zeros((2, V), dtype=np.float32)
        np.add.at(dense, (agents[words.turn], words.row), weigh_words(words, agents, idf))
        assert np.allclose(documents[2 * b : 2 * b + 2].toarray(), dense, atol=1e-6)


def test_the_rows_of_chosen_bags() -> None:
    words = count_words([np.array([1], dtype=np.int32)] * 3, VOCABULARY)
    bags = [(words, np.array(index)) for index in ([0, 0, 0], [0, 1, 2], [0, 1, 0])]
    assert document_rows(bags, [True, False, True]).tolist() == [True, *[False] * 3, True, True]


def test_a_separable_problem_is_separated() -> None:
    bags, targets = make_bags(40)
    lexicon = fit(bags, targets, strength=100.0)
    assert lexicon.table.dtype == np.float16
    scores = [
        lexicon(words, agents)[agents == agent].sum(axis=0)
        for words, agents in bags
        for agent in (0, 1)
    ]
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
    assert not lexicon(*bags[0]).any()


@pytest.mark.parametrize("strength", [0.3, 4.0])
def test_weights_are_those_of_scikit_learn(strength: float) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    bags, targets = make_bags(60, seed=3)
    lexicon = fit(bags, targets, strength=strength, iterations=400)
    used = np.flatnonzero(lexicon.idf)
    documents = stack_documents(bags, lexicon.idf)[:, used].toarray().astype(np.float64)
    labels = np.concatenate(targets)
    for mode in range(2):
        peer = linear_model.LogisticRegression(C=strength, tol=1e-8, max_iter=5000)
        peer.fit(documents, labels[:, mode])
        assert np.allclose(lexicon.table[used, mode], peer.coef_[0], atol=1e-2, rtol=0)
