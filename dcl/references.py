"""Which earlier turns a turn refers to, and the way back from where a failure shows.

Letters: `T` turns, `N` n-grams, each once a turn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dcl.bag import MOST_TURNS, Bag
from dcl.features import FEATURES
from dcl.lexical import number_rows

Floats = NDArray[np.float64]

MOST_HOPS = 100
"""Hops that `mark_path` goes back, more than any run has that a reading is learned from."""

_REPLY, _NEXT = 0.25, 0.1  # what being the answered, or the last, turn adds to common words
_SYMPTOMS = {"cue_error": 1.0, "cue_contrast": 0.5, "is_tool_result": 0.25, "is_last": 0.5}
"""Features that mark a symptom, and their weights."""
_PLACES = [FEATURES.index(name) for name in _SYMPTOMS]
_WEIGHTS = np.array([*_SYMPTOMS.values()], dtype=np.float32)


class References:
    """How strongly each turn refers to each earlier one: rare words in common, answers, order.

    Args:
        bag: Of the run.
    """

    def __init__(self, bag: Bag) -> None:
        count = len(bag.agent_index)
        turn = np.concatenate([document.turn for document in bag.words])  # (N,)
        order = np.argsort(turn, kind="stable")
        turn = turn[order]
        name = number_rows(np.concatenate([document.row for document in bag.words])[order])  # (N,)
        spread = np.bincount(name)  # turns that an n-gram stands in
        rarity = np.log((1 + count) / (1 + spread[name])) + 1e-6
        total = np.bincount(turn, weights=rarity, minlength=count)
        self._total = np.maximum(total, 1e-9)  # (T,)
        shared = np.flatnonzero(spread[name] > 1)  # the others join no two turns
        self._turn, self._name, self._rarity = turn[shared], name[shared], rarity[shared]
        self._start = np.searchsorted(self._turn, np.arange(count + 1))  # (T + 1,)
        self._stands = np.zeros(len(spread), dtype=bool)  # in the turn that is looked at
        self._reply_to = bag.reply_to

    def __call__(self, turn: int) -> Floats:
        """Strengths of the references of one turn, one for each earlier turn; `(turn,)`, >= 0.

        Args:
            turn: 0-based position.
        """
        before, end = self._start[turn : turn + 2]
        own = self._name[before:end]
        self._stands[own] = True
        common = np.flatnonzero(self._stands[self._name[:before]])
        self._stands[own] = False
        mass = np.bincount(self._turn[common], weights=self._rarity[common], minlength=turn)
        strength: Floats = mass / self._total[turn]
        if self._reply_to[turn] >= 0:
            strength[self._reply_to[turn]] += _REPLY
        strength[-1:] += _NEXT
        return strength

    def walk(self, symptom: int, source: int = 0, *, most: int = MOST_TURNS) -> list[int]:
        """Turns from one back to an earlier one, each the strongest reference of the one before.

        Args:
            symptom: 0-based position of the turn to start at.
            source: Where to end, at most `symptom`; no earlier turn is visited.
            most: Hops after which to end anyway; > 0.

        Source:
            SOAP and MASPrism (arXiv 2605.07509) for the walk from symptom to source along one
            predecessor.
        """
        way = [symptom]
        while way[-1] > source and len(way) <= most:
            way.append(source + find_latest(self(way[-1])[source:]))
        return way


def find_symptom(bag: Bag, source: int = 0) -> int:
    """The turn from `source` on where the failure shows most: errors, objections, the end.

    Of turns that show it alike, the latest.

    Args:
        bag: Of the run.
        source: 0-based position of the blamed turn.
    """
    return source + find_latest(score_symptoms(bag)[source:])


def score_symptoms(bag: Bag) -> Floats:
    """How much each turn shows of a failure, `(T,)`, 0 or more."""
    score: Floats = (bag.features[:, _PLACES] * _WEIGHTS).sum(axis=1)
    return score


def find_latest(values: Floats) -> int:
    """Position of the largest value, of equal ones the last."""
    return len(values) - 1 - int(np.argmax(values[::-1]))


def mark_path(bag: Bag) -> Floats:
    """The turns that the way back from the symptom of a run leads over.

    The symptom is one of the turns of agents that act: a prompt that speaks of errors shows none.

    Args:
        bag: Of the run.

    Returns:
        `(T,)`: 1 for the first `MOST_HOPS` turns of the way, 0 for all others and for the symptom.
    """
    acting = bag.acting[bag.agent_index]
    marks = np.zeros(len(acting))
    if acting.any():
        symptom = int(np.flatnonzero(acting)[find_latest(score_symptoms(bag)[acting])])
        marks[References(bag).walk(symptom, most=MOST_HOPS)[1:]] = 1
    return marks * acting
