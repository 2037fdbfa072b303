"""The lexical channel: word-piece uni- and bigrams of whole turns, and the wide half they feed.

The wide half is a linear model: every n-gram has one weight a mode, and a pair logit is the
tf-idf weighted sum over all turns of an agent. The sum splits over turns, so each turn's share is
exact evidence and not an approximation. What all agents of a run say speaks against none of them,
so a share of their mean is taken off each, in equal parts off its turns.

Letters: `N` n-grams of one agent, each once a turn; `T` turns of a bag; `V` rows of the lexical
table; `M` = 14 modes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

_BIGRAM_BITS = 18
BIGRAM_ROWS = 1 << _BIGRAM_BITS
"""Rows that the bigrams are hashed into."""

TurnLogits = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Turns of one agent, `(n,)`, and their wide logits, `(n, M)`."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Fibonacci hashing


@dataclass(frozen=True, eq=False)
class Document:
    """Counted n-grams of all turns of one agent.

    Args:
        turn: `(N,)` int64, 0-based turn of the bag that each entry stands in, ascending.
        row: `(N,)` int32, row of the n-gram in the lexical table; no row twice in a turn.
        count: `(N,)` float32, how often it stands in the turn, > 0.
    """

    turn: NDArray[np.int64]
    row: NDArray[np.int32]
    count: NDArray[np.float32]


Words = tuple[Document, ...]
"""Counted n-grams of a bag, one document an agent, in order of first appearance."""

TurnWords = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Rows of the n-grams of one turn, `(n,)` ascending, and how often each stands there, `(n,)`."""

NO_WORDS = Document(
    np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
)
"""The document of an agent who said nothing."""


def count_turn(ids: NDArray[np.int32], vocabulary: int) -> TurnWords:
    """Count the uni- and bigrams of one turn.

    Args:
        ids: Token ids without special tokens, `(n,)` int32, n >= 0.
        vocabulary: Number of token ids; unigrams take these rows, bigrams the rows above.
    """
    rows, counts = np.unique(_rows(ids, vocabulary), return_counts=True)
    return rows.astype(np.int32), counts.astype(np.float32)


class RunWords:
    """Counted n-grams of a run that grows; an agent who was silent keeps its document."""

    def __init__(self) -> None:
        self._documents: list[Document] = []
        self._fresh: list[list[Document]] = []  # of each agent, turns not yet in its document

    def add(self, turn: int, agent: int, words: TurnWords) -> None:
        """Add the next turn.

        Args:
            turn: Its 0-based position.
            agent: Position of its agent in order of first appearance.
            words: What stands in it.
        """
        if agent == len(self._documents):
            self._documents.append(NO_WORDS)
            self._fresh.append([])
        rows, counts = words
        self._fresh[agent].append(Document(np.full(len(rows), turn), rows, counts))

    @property
    def documents(self) -> Words:
        """One an agent; the same object as before where nothing was added."""
        for agent, fresh in enumerate(self._fresh):
            if fresh:
                self._documents[agent] = _join(self._documents[agent], *fresh)
                fresh.clear()
        return tuple(self._documents)


def weigh_words(document: Document, idf: NDArray[np.float32]) -> NDArray[np.float32]:
    """Weight of each entry in the tf-idf vector of its agent.

    The agent's vector has entries `(1 + ln tf) * idf` over all of its turns and unit length; an
    n-gram that stands in several turns of the agent shares its weight among them by count.

    Args:
        document: n-grams of the agent.
        idf: `(V,)` float32, one a row of the lexical table.

    Returns:
        `(N,)` float32, >= 0.
    """
    name = number_rows(document.row)
    term_count = np.bincount(name, weights=document.count).astype(np.float32)[name]
    weight = (1.0 + np.log(term_count)) * idf[document.row]
    share = document.count / term_count  # sums to 1 over the entries of one n-gram
    norm = np.sqrt(weight**2 @ share)
    weighed = weight * share / np.maximum(norm, np.float32(1e-12))
    return weighed.astype(np.float32, copy=False)


def number_rows(rows: NDArray[np.int32]) -> NDArray[np.int64]:
    """The same number for equal rows, from 0 on without a gap; a table of all rows would be large.

    Args:
        rows: `(N,)`; several ascending stretches are quicker than rows in any order.
    """
    order = np.argsort(rows, kind="stable")
    ascending = rows[order]
    names = np.empty(len(rows), dtype=np.int64)
    names[order] = np.cumsum(np.append(False, ascending[1:] != ascending[:-1])[: len(rows)])
    return names


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
        vocabulary: Number of token ids.
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


@dataclass(frozen=True, eq=False)
class Lexicon:
    """The wide half: idf and one row of mode weights for every n-gram.

    What it said of a document is kept as long as the document, so that in a run that grows only
    the agent who spoke is read again.

    Args:
        idf: `(V,)` float32, weight of each n-gram, its inverse document frequency by default; a
            document is one agent's turns.
        table: `(V, M)` float32, weight of the n-gram for each mode.
        contrast: Share of the mean over all agents of a run that is taken off the logits of each,
            0 to 1.
    """

    idf: NDArray[np.float32]
    table: NDArray[np.float32]
    contrast: float = 0.0
    _read: WeakKeyDictionary[Document, TurnLogits] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )

    def __call__(self, words: Words, turns: int) -> NDArray[np.float32]:
        """Wide logits split by turn.

        Args:
            words: n-grams of the bag.
            turns: Turns of the bag, `T`.

        Returns:
            `(T, M)` float32; summed over the turns of an agent they are its wide pair logits
            without the bias. What the contrast takes off an agent is the same in all of its turns
            that hold a word.
        """
        logits = np.zeros((turns, self.table.shape[1]), dtype=np.float32)
        read = [self._read_document(document) for document in words]
        for own, values in read:
            logits[own] = values
        if self.contrast and words:
            common = logits.sum(axis=0) * np.float32(self.contrast / len(words))  # (M,)
            for own, _ in read:
                logits[own] -= common / max(len(own), 1)
        return logits

    def _read_document(self, document: Document) -> TurnLogits:
        """What is kept of a document, or else is read now."""
        read = self._read.get(document)
        if read is None:
            read = self._read[document] = self._score(document)
        return read

    def _score(self, document: Document) -> TurnLogits:
        """Wide logits of the turns of one agent that hold a word."""
        if not len(document.turn):
            return document.turn, np.zeros((0, self.table.shape[1]), dtype=np.float32)
        weight = weigh_words(document, self.idf)
        mass = self.table.take(document.row, axis=0) * weight[:, None]  # (N, M)
        starts = np.flatnonzero(document.turn[1:] != document.turn[:-1]) + 1
        starts = np.concatenate([[0], starts])
        return document.turn[starts], np.add.reduceat(mass, starts, axis=0)


def _join(*documents: Document) -> Document:
    """Documents of one agent in a row."""
    return Document(
        turn=np.concatenate([document.turn for document in documents]),
        row=np.concatenate([document.row for document in documents]),
        count=np.concatenate([document.count for document in documents]),
    )


def _rows(ids: NDArray[np.int32], vocabulary: int) -> NDArray[np.int64]:
    """Table rows of all uni- and bigrams of one turn, with repeats."""
    wide = ids.astype(np.uint64)
    mixed = (wide[:-1] * np.uint64(vocabulary) + wide[1:]) * _MULTIPLIER
    hashed = (mixed >> np.uint64(64 - _BIGRAM_BITS)).astype(np.int64) + vocabulary
    return np.concatenate([ids.astype(np.int64), hashed])
