from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import light

from dcl.lexical import BIGRAM_ROWS, Lexicon, Words, count_words, weigh_words
from dcl.taxonomy import MODES

VOCABULARY = 6
V = VOCABULARY + BIGRAM_ROWS
bags = st.lists(
    st.tuples(st.lists(st.integers(0, VOCABULARY - 1), max_size=9), st.integers(0, 2)),
    min_size=1,
    max_size=6,
)
Bag = list[tuple[list[int], int]]


def count(bag: Bag) -> Words:
    return count_words([np.array(ids, dtype=np.int32) for ids, _ in bag], VOCABULARY)


def agents_of(bag: Bag) -> NDArray[np.int64]:
    return np.array([agent for _, agent in bag], dtype=np.int64)


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
    table = np.random.default_rng(1).standard_normal((V, len(MODES))).astype(np.float16)
    return Lexicon(idf=make_idf(), table=table)


IDF, LEXICON = make_idf(), make_lexicon()


@light
@given(bags)
def test_counting_follows_a_slow_loop(bag: Bag) -> None:
    words = count(bag)
    slow = [
        (t, row, n)
        for t, (ids, _) in enumerate(bag)
        for row, n in sorted(Counter(slow_rows(ids)).items())
    ]
    fast = zip(words.turn.tolist(), words.row.tolist(), words.count.tolist(), strict=True)
    assert list(fast) == slow
    assert words.turn.dtype == words.row.dtype == np.int64
    assert words.count.dtype == np.float32
    assert ((words.row >= 0) & (words.row < V)).all()


def test_the_rows_of_known_tokens_never_change() -> None:
    words = count_words([np.array([101, 7592, 2088], dtype=np.int32)], 30_522)
    assert words.row.tolist() == [101, 2088, 7592, 53566, 99433]


def test_the_largest_ids_stay_inside_the_table() -> None:
    top = np.array([30_521] * 5, dtype=np.int32)
    words = count_words([top], 30_522)
    assert words.row.max() < 30_522 + BIGRAM_ROWS
    assert words.count.tolist() == [5, 4]


@pytest.mark.parametrize("bag", [[([], 0)], [([], 0), ([], 1)], [([3], 0), ([], 0), ([], 1)]])
def test_empty_turns_have_no_words_and_no_logits(bag: Bag) -> None:
    words, agents = count(bag), agents_of(bag)
    assert len(words.turn) == sum(len(ids) for ids, _ in bag)
    logits = LEXICON(words, agents)
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
    words, agents = count(bag), agents_of(bag)
    weights = weigh_words(words, agents, IDF)
    assert weights.dtype == np.float32
    assert (weights >= 0).all()
    summed: dict[tuple[int, int], float] = Counter()  # type: ignore[assignment]
    for t, row, weight in zip(words.turn, words.row, weights, strict=True):
        summed[int(agents[t]), int(row)] += float(weight)
    for agent in set(agents.tolist()):
        for row, value in slow_tf_idf(bag, agent).items():
            assert summed[agent, row] == pytest.approx(value, abs=1e-5)


@light
@given(bags)
def test_an_n_gram_is_shared_among_turns_by_count(bag: Bag) -> None:
    words, agents = count(bag), agents_of(bag)
    weights = weigh_words(words, agents, IDF)
    rate: dict[tuple[int, int], set[float]] = {}
    for t, row, n, weight in zip(words.turn, words.row, words.count, weights, strict=True):
        rate.setdefault((int(agents[t]), int(row)), set()).add(round(float(weight / n), 5))
    assert all(max(rates) - min(rates) < 1e-4 for rates in rate.values())


@light
@given(bags)
def test_the_logits_of_turns_sum_to_those_of_the_agent(bag: Bag) -> None:
    words, agents = count(bag), agents_of(bag)
    logits = LEXICON(words, agents)
    for agent in set(agents.tolist()):
        whole = np.zeros(len(MODES))
        for row, value in slow_tf_idf(bag, agent).items():
            whole += value * LEXICON.table[row].astype(np.float64)
        assert logits[agents == agent].sum(axis=0) == pytest.approx(whole, abs=1e-4)


@light
@given(bags)
def test_a_turn_without_an_n_gram_gets_nothing_from_it(bag: Bag) -> None:
    words, agents = count(bag), agents_of(bag)
    logits, weights = LEXICON(words, agents), weigh_words(words, agents, IDF)
    for t in range(len(bag)):
        own = words.turn == t
        share = (LEXICON.table[words.row[own]].astype(np.float64) * weights[own, None]).sum(axis=0)
        assert logits[t] == pytest.approx(share, abs=1e-4)


def test_permuting_agents_changes_nothing() -> None:
    bag = [([0, 2, 3], 0), ([2, 3, 4], 1), ([5, 5], 2)]
    renamed = [(ids, (2, 0, 1)[agent]) for ids, agent in bag]
    plain = LEXICON(count(bag), agents_of(bag))
    assert plain == pytest.approx(LEXICON(count(renamed), agents_of(renamed)), abs=1e-6)
