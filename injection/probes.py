"""Can labels be guessed without understanding? Probes that see no content, or only single words.

Each probe names one turn of each faulty run and is right if that turn was attacked. It learns on
one half of the tasks and is scored on the other; runs in which every turn was attacked cannot be
missed and are left out. What beats chance clearly is an artifact of how the records were made, or
of what makes a system fail, and a model can learn it in place of the real thing. The role of the
speaker is the floor for all that sees the text: work that others build on is where a fault counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcl.splits import fold_of, group_of
from dcl.trajectory import Example
from injection.repair import wilson

Floats = NDArray[np.float64]

_MARK_SUPPORT, _MARK_PRECISION = 15, 0.9
_LOUD = 1.5


@dataclass(frozen=True, slots=True)
class Probe:
    """How often a probe finds the attacked turn.

    Args:
        name: What it looks at.
        hits: Runs in which it is right.
        total: Runs.
        chance: Share of runs in which a blind guess is right, 0 to 1.
    """

    name: str
    hits: int
    total: int
    chance: float

    @property
    def is_loud(self) -> bool:
        """Whether it beats chance by half at the lower end of its 95 % interval."""
        return self.total > 0 and wilson(self.hits, self.total)[0] > _LOUD * self.chance


@dataclass(frozen=True, slots=True)
class Probes:
    """All probes.

    Args:
        probes: Their results.
        markers: Words that nearly always stand in attacked turns, with how often they occur.
    """

    probes: tuple[Probe, ...]
    markers: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class _Case:
    """One faulty run: its turns, who spoke them, which of them were attacked, and its half."""

    texts: tuple[str, ...]
    roles: tuple[str, ...]
    attacked: frozenset[int]
    half: int


Score = Callable[[_Case], Floats]


def probe_records(examples: Iterable[Example]) -> Probes:
    """Run all probes over faulty runs with labelled steps; others are left out."""
    cases = [case for example in examples if (case := _read(example)) is not None]
    learn = [case for case in cases if case.half == 0]
    test = [case for case in cases if case.half == 1]
    if not learn or not test:
        return Probes((), ())
    fits: dict[str, Callable[[Sequence[_Case]], Score]] = {
        "position only": _fit_position,
        "role only": _fit_role,
        "length only": lambda part: _fit_style(part, _length),
        "marker words": _fit_words,
        "style of the turn": lambda part: _fit_style(part, _style),
    }
    chance = float(np.mean([len(case.attacked) / len(case.texts) for case in test]))
    probes = []
    for name, fit in fits.items():
        score = fit(learn)
        hits = sum(int(np.argmax(score(case))) in case.attacked for case in test)
        probes.append(Probe(name, hits, len(test), chance))
    return Probes(tuple(probes), _markers(cases))


def _read(example: Example) -> _Case | None:
    """A faulty run as a case; None if it has no attacked turn, or no other."""
    run = example.trajectory
    places = {
        run.turn_at(fault.step, fault.agent)
        for fault in example.faults or ()
        if fault.step is not None
    }
    attacked = frozenset(place for place in places if place is not None)
    if not attacked or len(attacked) == len(run.turns):
        return None
    texts = tuple(turn.content for turn in run.turns)
    roles = tuple(turn.role for turn in run.turns)
    return _Case(texts, roles, attacked, fold_of(group_of(example), 2))


def _fit_position(cases: Sequence[_Case]) -> Score:
    """How often each tenth of a run is attacked."""
    bins = np.ones(10)
    for case in cases:
        for place in case.attacked:
            bins[_tenth(place, len(case.texts))] += 1 / len(case.attacked)
    return lambda case: np.array([bins[_tenth(i, len(case.texts))] for i in range(len(case.texts))])


def _fit_role(cases: Sequence[_Case]) -> Score:
    """How often a turn of each role is attacked; of several turns of a role, the first counts."""
    hot: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for case in cases:
        total.update(case.roles)
        hot.update(case.roles[place] for place in case.attacked)
    return lambda case: np.array([(hot[role] + 1) / (total[role] + 2) for role in case.roles])


def _tenth(place: int, length: int) -> int:
    """Tenth of a run that a turn is in, 0 to 9."""
    return min(9, 10 * place // length)


def _length(text: str) -> list[float]:
    """Length alone."""
    return [float(np.log1p(len(text)))]


def _style(text: str) -> list[float]:
    """Shape without content: lengths, punctuation, digits, capitals."""
    size = max(len(text), 1)
    words = text.split()
    return [
        float(np.log1p(len(text))),
        float(text.count("\n")),
        float(np.mean([len(word) for word in words])) if words else 0.0,
        sum(c.isdigit() for c in text) / size,
        sum(c.isupper() for c in text) / size,
        *(text.count(mark) / size for mark in (".", ",", ":", "=", "?", "`")),
    ]


def _fit_style(cases: Sequence[_Case], describe: Callable[[str], list[float]]) -> Score:
    """Log-likelihood ratio of two diagonal Gaussians, on features centred within the run."""
    rows, marks = [], []
    for case in cases:
        rows.append(_centred(case, describe))
        marks += [i in case.attacked for i in range(len(case.texts))]
    features, attacked = np.concatenate(rows), np.array(marks)
    moments = [
        (features[mask].mean(axis=0), features[mask].var(axis=0) + 1e-4)
        for mask in (attacked, ~attacked)
    ]

    def score(case: _Case) -> Floats:
        x = _centred(case, describe)
        hot, cold = (-((x - m) ** 2 / v + np.log(v)).sum(axis=1) / 2 for m, v in moments)
        return np.asarray(hot - cold)

    return score


def _centred(case: _Case, describe: Callable[[str], list[float]]) -> Floats:
    """Features of the turns of a run, less their mean."""
    features = np.array([describe(text) for text in case.texts])
    return np.asarray(features - features.mean(axis=0))


def _words(text: str) -> set[str]:
    """Words without numbers."""
    return set(re.findall(r"[a-z]{2,}", text.casefold()))


def _fit_words(cases: Sequence[_Case]) -> Score:
    """Naive Bayes over single words."""
    seen: list[Counter[str]] = [Counter(), Counter()]
    turns = [0, 0]
    for case in cases:
        for i, text in enumerate(case.texts):
            hot = int(i in case.attacked)
            seen[hot].update(_words(text))
            turns[hot] += 1

    def score(case: _Case) -> Floats:
        return np.array(
            [
                sum(
                    np.log((seen[1][w] + 0.5) / (turns[1] + 1))
                    - np.log((seen[0][w] + 0.5) / (turns[0] + 1))
                    for w in _words(text)
                )
                for text in case.texts
            ]
        )

    return score


def _markers(cases: Sequence[_Case]) -> tuple[tuple[str, int], ...]:
    """Words that give an attacked turn away, most frequent first."""
    hot: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for case in cases:
        for i, text in enumerate(case.texts):
            words = _words(text)
            total.update(words)
            hot.update(words if i in case.attacked else ())
    loud = [
        (word, count)
        for word, count in total.most_common()
        if count >= _MARK_SUPPORT and hot[word] / count >= _MARK_PRECISION
    ]
    return tuple(loud[:20])
