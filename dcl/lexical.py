"""The lexical channel: word-piece uni- and bigrams of whole turns, and the wide half they feed.

The wide half is a linear model: every n-gram has one weight a mode, and a pair logit is the
tf-idf weighted sum over all turns of an agent. The sum splits over turns, so each turn's share is
exact evidence and not an approximation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BIGRAM_BITS = 18
BIGRAM_ROWS = 1 << _BIGRAM_BITS
"""Rows that the bigrams are hashed into."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Fibonacci hashing


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """Counted n-grams of the turns of one bag, as sorted triples.

    Args:
        turn: `(N,)` int64, 0-based turn of each entry, ascending.
        row: `(N,)` int64, row of the n-gram in the lexical table.
        count: `(N,)` float32, how often it stands in the turn, > 0.
    """

    turn: NDArray[np.int64]
    row: NDArray[np.int64]
    count: NDArray[np.float32]


TurnWords = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Rows of the n-grams of one turn, `(n,)` ascending, and how often each stands there, `(n,)`."""


def count_turn(ids: NDArray[np.int32], vocabulary: int) -> TurnWords:
    """Count the uni- and bigrams of one turn.

    Args:
        ids: Token ids without special tokens, `(n,)` int32, n >= 0.
        vocabulary: Number of token ids; unigrams take these rows, bigrams the rows above.
    """
    rows, counts = np.unique(_rows(ids, vocabulary), return_counts=True)
    return rows.astype(np.int32), counts.astype(np.float32)


def join_words(turns: Sequence[TurnWords]) -> Words:
    """The counted n-grams of a bag from those of its turns, in order of turn, then row.

    Args:
        turns: At least one.
    """
    return Words(
        turn=np.repeat(np.arange(len(turns)), [len(rows) for rows, _ in turns]),
        row=np.concatenate([rows for rows, _ in turns]).astype(np.int64),
        count=np.concatenate([counts for _, counts in turns]),
    )


def count_words(turns: Sequence[NDArray[np.int32]], vocabulary: int) -> Words:
    """Count the uni- and bigrams of each turn of a bag.

    Args:
        turns: Token ids of each turn as `count_turn` takes them.
        vocabulary: Number of token ids.
    """
    return join_words([count_turn(ids, vocabulary) for ids in turns])


def weigh_words(
    words: Words, agent_index: NDArray[np.int64], idf: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Weight of each entry in the tf-idf vector of its agent.

    The agent's vector has entries `(1 + ln tf) * idf` over all of its turns and unit length; an
    n-gram that stands in several turns of the agent shares its weight among them by count.

    Args:
        words: n-grams of the bag.
        agent_index: `(T,)` int64, agent of each turn.
        idf: `(V,)` float32, one a row of the lexical table.

    Returns:
        `(N,)` float32, >= 0.
    """
    agent = agent_index[words.turn]
    key = agent * len(idf) + words.row
    unique, inverse = np.unique(key, return_inverse=True)
    term_count = np.bincount(inverse, weights=words.count, minlength=len(unique))
    weight = (1.0 + np.log(term_count)) * idf[unique % len(idf)]
    owner = unique // len(idf)
    norm = np.sqrt(np.bincount(owner, weights=weight**2))
    weight /= np.maximum(norm[owner], 1e-12)
    share: NDArray[np.float32] = (weight[inverse] * words.count / term_count[inverse]).astype(
        np.float32
    )
    return share


def split_over_tokens(
    ids: NDArray[np.int32],
    vocabulary: int,
    rows: NDArray[np.int64],
    mass: NDArray[np.float32],
) -> NDArray[np.float64]:
    """What the n-grams of one turn carry, split over its tokens without rest.

    Every occurrence of an n-gram has the same share; that of a bigram goes half to each token.

    Args:
        ids: `(n,)` int32, the whole turn.
        vocabulary: As in `count_words`.
        rows: Rows of the n-grams of the turn, ascending.
        mass: What each of them carries.

    Returns:
        `(n,)` float64 with the sum of `mass`.
    """
    occurring = np.searchsorted(rows, _rows(ids, vocabulary))
    each = mass[occurring] / np.bincount(occurring, minlength=len(rows))[occurring]
    shares = each[: len(ids)].astype(np.float64)
    bigrams = each[len(ids) :] / 2
    shares[:-1] += bigrams
    shares[1:] += bigrams
    return shares


@dataclass(frozen=True, slots=True, eq=False)
class Lexicon:
    """The wide half: idf and one row of mode weights for every n-gram.

    Args:
        idf: `(V,)` float32, inverse document frequency; a document is one agent's turns.
        table: `(V, M)` float16, weight of the n-gram for each mode.
    """

    idf: NDArray[np.float32]
    table: NDArray[np.float16]

    def __call__(self, words: Words, agent_index: NDArray[np.int64]) -> NDArray[np.float32]:
        """Wide logits split by turn.

        Args:
            words: n-grams of the bag.
            agent_index: `(T,)` int64, agent of each turn.

        Returns:
            `(T, M)` float32; summed over the turns of an agent they are its wide pair logits
            without the bias.
        """
        weight = weigh_words(words, agent_index, self.idf)
        mass = self.table[words.row].astype(np.float32) * weight[:, None]  # (N, M)
        logits = np.zeros((len(agent_index), self.table.shape[1]), dtype=np.float32)
        starts = np.flatnonzero(np.diff(words.turn, prepend=-1))
        if len(starts):
            logits[words.turn[starts]] = np.add.reduceat(mass, starts, axis=0)
        return logits


def _rows(ids: NDArray[np.int32], vocabulary: int) -> NDArray[np.int64]:
    """Table rows of all uni- and bigrams of one turn, with repeats."""
    wide = ids.astype(np.uint64)
    mixed = (wide[:-1] * np.uint64(vocabulary) + wide[1:]) * _MULTIPLIER
    hashed = (mixed >> np.uint64(64 - _BIGRAM_BITS)).astype(np.int64) + vocabulary
    return np.concatenate([ids.astype(np.int64), hashed])
