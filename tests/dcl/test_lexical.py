from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import count_words, light

from dcl.lexical import (
    BIGRAM_ROWS,
    Lexicon,
    RunWords,
    Words,
    count_turn,
    number_rows,
    weigh_words,
)
from dcl.taxonomy import MODES

VOCABULARY = 6
V = VOCABULARY + BIGRAM_ROWS
Bag = list[tuple[list[int], int]]
bags: st.SearchStrategy[Bag] = st.lists(
    st.tuples(st.lists(st.integers(0, VOCABULARY - 1), max_size=9), st.integers(0, 2)),
    min_size=1,
    max_size=6,
).map(lambda bag: ranked(bag))


def ranked(bag: Bag) -> Bag:
    """The same with agents numbered in order of first appearance."""
    order = list(dict.fromkeys(agent for _, agent in bag))
    return [(ids, order.index(agent)) for ids, agent in bag]


def count(bag: Bag) -> Words:
    """Documents of a bag whose agents are numbered in order of first appearance."""
    return count_words([ids for ids, _ in bag], [agent for _, agent in bag], VOCABULARY)


def weights_of(bag: Bag) -> list[tuple[int, int, float, float]]:
    """Turn, row, count and weight of every entry."""
    return [
        entry
        for document in count(bag)
        for entry in zip(
            document.turn.tolist(),
            document.row.tolist(),
            document.count.tolist(),
            weigh_words(document, IDF).tolist(),
            strict=True,
        )
    ]


def slow_rows(ids: Sequence[int]) -> list[int]:
    """Unigrams, then bigrams by Fibonacci hashing, with whole numbers of any size."""
    pairs = [a * VOCABULARY + b for a, b in pairwise(ids)]
    hashed = [(pair * 0x9E3779B97F4A7C15) % 2**64 >> (64 - 18) for pair in pairs]
    return [*ids, *(VOCABULARY + row for row in hashed)]


def make_idf() -> NDArray[np.float32]:
    idf = np.random.default_rng(0).uniform(0.5, 3, V).astype(np.float32)
    idf[1] = 0.0  # too rare to count
    return idf


def make_lexicon() -> Lexicon:
    table = np.random.default_rng(1).standard_normal((V, len(MODES))).astype(np.float32)
    return Lexicon(idf=make_idf(), table=table)


IDF, LEXICON = make_idf(), make_lexicon()


@light
@given(bags)
def test_counting_follows_a_slow_loop(bag: Bag) -> None:
    words = count(bag)
    assert len(words) == len({agent for _, agent in bag})
    for a, document in enumerate(words):
        slow = [
            (t, row, n)
            for t, (ids, agent) in enumerate(bag)
            for row, n in sorted(Counter(slow_rows(ids)).items())
            if agent == a
        ]
        arrays = (document.turn, document.row, document.count)
        assert list(zip(*(array.tolist() for array in arrays), strict=True)) == slow
        assert [array.dtype for array in arrays] == [np.int64, np.int32, np.float32]
        assert ((document.row >= 0) & (document.row < V)).all()


def test_the_rows_of_known_tokens_never_change() -> None:
    (document,) = count_words([[101, 7592, 2088]], [0], 30_522)
    assert document.row.tolist() == [101, 2088, 7592, 53566, 99433]


def test_the_largest_ids_stay_inside_the_table() -> None:
    (document,) = count_words([[30_521] * 5], [0], 30_522)
    assert document.row.max() < 30_522 + BIGRAM_ROWS
    assert document.count.tolist() == [5, 4]


def test_an_agent_who_was_silent_keeps_its_document() -> None:
    run = RunWords()
    for t, agent in enumerate((0, 1)):
        run.add(t, agent, count_turn(np.array([t], dtype=np.int32), VOCABULARY))
    before = run.documents
    assert run.documents == before
    run.add(2, 1, count_turn(np.array([3, 4], dtype=np.int32), VOCABULARY))
    after = run.documents
    assert after[0] is before[0]
    assert after[1].turn.tolist() == [1, 2, 2, 2]
    assert before[1].turn.tolist() == [1]


@pytest.mark.parametrize("bag", [[([], 0)], [([], 0), ([], 1)], [([3], 0), ([], 0), ([], 1)]])
def test_empty_turns_have_no_words_and_no_logits(bag: Bag) -> None:
    words = count(bag)
    assert sum(len(document.turn) for document in words) == sum(len(ids) for ids, _ in bag)
    logits = LEXICON(words, len(bag))
    assert logits.shape == (len(bag), len(MODES))
    assert logits.dtype == np.float32
    for t, (ids, _) in enumerate(bag):
        assert bool(logits[t].any()) == bool(ids)


def slow_tf_idf(bag: Bag, agent: int) -> dict[int, float]:
    """tf-idf vector of one agent, unit length, by the formula."""
    counts: Counter[int] = Counter()
    for ids, speaker in bag:
        if speaker == agent:
            counts.update(slow_rows(ids))
    raw = {row: (1 + math.log(n)) * float(IDF[row]) for row, n in counts.items()}
    norm = math.sqrt(sum(x * x for x in raw.values())) or 1.0
    return {row: x / norm for row, x in raw.items()}


@light
@given(bags)
def test_weighing_follows_a_slow_loop(bag: Bag) -> None:
    for agent, document in enumerate(count(bag)):
        weights = weigh_words(document, IDF)
        assert weights.dtype == np.float32
        assert (weights >= 0).all()
        summed: Counter[int] = Counter()
        for row, weight in zip(document.row.tolist(), weights.tolist(), strict=True):
            summed[row] += weight
        for row, value in slow_tf_idf(bag, agent).items():
            assert summed[row] == pytest.approx(value, abs=1e-5)


@light
@given(bags)
def test_an_n_gram_is_shared_among_turns_by_count(bag: Bag) -> None:
    rate: dict[tuple[int, int], set[float]] = {}
    for t, row, n, weight in weights_of(bag):
        rate.setdefault((bag[t][1], row), set()).add(round(weight / n, 5))
    assert all(max(rates) - min(rates) < 1e-4 for rates in rate.values())


@light
@given(bags)
def test_the_logits_of_turns_sum_to_those_of_the_agent(bag: Bag) -> None:
    logits = LEXICON(count(bag), len(bag))
    agents = np.array([agent for _, agent in bag])
    for agent in set(agents.tolist()):
        whole = np.zeros(len(MODES))
        for row, value in slow_tf_idf(bag, agent).items():
            whole += value * LEXICON.table[row].astype(np.float64)
        assert logits[agents == agent].sum(axis=0) == pytest.approx(whole, abs=1e-4)


@light
@given(bags, st.floats(0.01, 1))
def test_a_contrast_takes_a_share_of_the_mean_off_each_agent(bag: Bag, contrast: float) -> None:
    words, agents = count(bag), np.array([agent for _, agent in bag])
    plain = LEXICON(words, len(bag))
    apart = replace(LEXICON, contrast=contrast)(words, len(bag))
    common = contrast * plain.sum(axis=0) / len(words)
    for agent in set(agents.tolist()):
        own = agents == agent
        spoke = any(ids for ids, speaker in bag if speaker == agent)
        whole = plain[own].sum(axis=0) - common * spoke
        assert apart[own].sum(axis=0) == pytest.approx(whole, abs=1e-4)
        fallen = (plain - apart)[[t for t in np.flatnonzero(own) if bag[t][0]]]
        assert np.allclose(fallen, fallen[:1], atol=1e-5)


@light
@given(bags)
def test_a_turn_without_an_n_gram_gets_nothing_from_it(bag: Bag) -> None:
    logits = LEXICON(count(bag), len(bag))
    slow = np.zeros((len(bag), len(MODES)))
    for t, row, _, weight in weights_of(bag):
        slow[t] += LEXICON.table[row].astype(np.float64) * weight
    assert logits == pytest.approx(slow, abs=1e-4)


def test_permuting_agents_changes_nothing() -> None:
    bag = [([0, 2, 3], 0), ([2, 3, 4], 1), ([5, 5], 2)]
    words = count(bag)
    assert np.array_equal(LEXICON(words, 3), LEXICON(words[::-1], 3))


def test_a_document_is_read_once_and_forgotten_with_it() -> None:
    lexicon = make_lexicon()
    (document,) = count([([0, 2, 3], 0)])
    first = lexicon((document,), 1)
    assert list(lexicon._read) == [document]
    first[:] = 0.0  # what is given away is a copy
    assert lexicon((document,), 1).any()
    del document
    gc.collect()
    assert not lexicon._read


def test_a_document_of_another_length_of_run_has_the_same_logits() -> None:
    words = count([([0, 2, 3], 0)])
    assert np.array_equal(LEXICON(words, 3)[:1], LEXICON(words, 1))
    assert not LEXICON(words, 3)[1:].any()


@given(st.lists(st.integers(0, 9) | st.integers(0, V - 1), max_size=40))
def test_equal_rows_have_one_number_and_numbers_no_gap(rows: list[int]) -> None:
    numbers = number_rows(np.array(rows, dtype=np.int32)).tolist()
    assert len(set(zip(rows, numbers, strict=True))) == len(set(rows)) == len(set(numbers))
    assert set(numbers) == set(range(len(set(rows))))
