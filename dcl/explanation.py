"""Why a finding was made, in a form that a person can check against the log.

Words have exact shares of the wide logit, which is a sum over them, and signs exact shares of the
step logit of a reading that sums up columns. Sentences are weighed by what their removal does to
the probability. The blame path leads from the turn that is blamed to the turn where the failure
shows.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dcl.adapter import COLUMNS
from dcl.attribution import Attribution, Attributor, Finding
from dcl.bag import Bag, BagMaker
from dcl.lexical import Lexicon, split_over_tokens, weigh_words
from dcl.nearest import Index, Neighbour
from dcl.references import References, find_symptom
from dcl.runtime import OnnxScorer
from dcl.trajectory import Trajectory, TurnKind

Verb = Literal["message", "state", "aggregation", "delegation"]

WORD = re.compile(r"\w+|[^\w\s]")
_END = re.compile(r"(?<=[^\d\s][.!?])\s+|\n+")  # the point of "2. next" ends nothing
_MOST_PIECES = 16  # of one turn that are taken out one by one
_LEAST = 1e-6  # nats that a sign adds; less is rounding
_ALSO = 0.7  # share of the strongest reference from which on another one counts too


@dataclass(frozen=True, slots=True)
class Word:
    """A word with its share of the wide logit, as `weigh_turn` gives it."""

    text: str
    weight: float


@dataclass(frozen=True, slots=True)
class Sign:
    """What sets a turn apart from the others of its run.

    Args:
        column: Name out of `dcl.adapter.COLUMNS`.
        high: Whether the turn has more of it than the mean of all turns that can be blamed.
        weight: What it adds to the step logit, in nats, over what it adds to these on average.
    """

    column: str
    high: bool
    weight: float


@dataclass(frozen=True, slots=True)
class Sentence:
    """A piece of a turn, and how far the probability falls without it, -1 to 1."""

    text: str
    fall: float


@dataclass(frozen=True, slots=True)
class Hop:
    """One turn of a blame path.

    Args:
        turn: 0-based position.
        step: Its number as the log counts.
        agent: Who speaks.
        verb: How the fault came here from the turn before; None for the first.
    """

    turn: int
    step: int
    agent: str
    verb: Verb | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What speaks for one finding.

    Args:
        finding: The finding.
        words: Words of its turn that weigh most, strongest first, for its mode or else the
            likeliest one of its agent; empty where the reading heeds none.
        signs: What sets its turn apart, strongest first; empty where the network reads alone.
        sentences: Sentences of its turn whose removal costs most, strongest first.
        neighbour: The labelled turn that is most like this one; None without an index.
        path: Turns from the blamed one to the one where the failure shows.
    """

    finding: Finding
    words: tuple[Word, ...]
    signs: tuple[Sign, ...]
    sentences: tuple[Sentence, ...]
    neighbour: Neighbour | None
    path: tuple[Hop, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, as `docs/output.md` describes it."""
        found = self.finding
        near = self.neighbour
        return {
            **found.fault.to_dict(),
            "turn": found.turn,
            "prob": round(found.prob, 6),
            "words": [{"word": w.text, "weight": round(w.weight, 6)} for w in self.words],
            "signs": [
                {"column": s.column, "high": s.high, "weight": round(s.weight, 6)}
                for s in self.signs
            ],
            "sentences": [{"text": s.text, "fall": round(s.fall, 6)} for s in self.sentences],
            "like": None
            if near is None
            else {
                "id": near.run,
                **near.fault.to_dict(),
                "text": near.text,
                "similarity": near.similarity,
            },
            "path": [
                {"turn": h.turn, "step": h.step, "agent": h.agent, "verb": h.verb}
                for h in self.path
            ],
        }


def explain(
    attributor: Attributor,
    trajectory: Trajectory,
    findings: Sequence[Finding],
    *,
    words: int = 8,
    sentences: int = 3,
    index: Index | None = None,
) -> tuple[Explanation, ...]:
    """Explain findings in one run.

    Args:
        attributor: The model that made them.
        trajectory: The run.
        findings: What to explain.
        words: Words to show of each turn where the model's reading heeds what words say of modes,
            and signs where it sums up columns; >= 0.
        sentences: Sentences to show; 0 saves the calls that weigh them.
        index: Labelled turns to show the nearest of; of a model with the same encoder.
    """
    bag = attributor.bagger(trajectory)
    heavy = _find_words(attributor, trajectory, bag, findings)
    signs = weigh_signs(attributor, bag, [finding.turn for finding in findings])
    return tuple(
        Explanation(
            finding=finding,
            words=heavy[i][:words],
            signs=signs[i][:words],
            sentences=weigh_sentences(attributor, trajectory, finding)[:sentences]
            if sentences
            else (),
            neighbour=None
            if index is None
            else index.find(
                _encode(attributor, bag, finding.turn), mode=finding.fault.mode, run=trajectory
            ),
            path=trace_blame(trajectory, bag, finding.turn),
        )
        for i, finding in enumerate(findings)
    )


def weigh_signs(
    attributor: Attributor, bag: Bag, turns: Sequence[int]
) -> tuple[tuple[Sign, ...], ...]:
    """What sets turns apart in the eyes of the adapters of a model, the largest share first.

    Args:
        attributor: The model; one without adapters gives none.
        bag: Of the run.
        turns: 0-based positions.

    Returns:
        For each, the columns that speak for it. With those that speak against it they sum to its
        step logit over the mean of all turns that can be blamed, but for what the adapters leave of
        the network's own.
    """
    scorer = attributor.scorer
    if not isinstance(scorer, OnnxScorer) or not scorer.adapters or not turns:
        return ((),) * len(turns)
    *vectors, task = scorer.encoder([*bag.windows, bag.task])
    _, columns = scorer.observe(bag, np.stack(vectors), task)
    shares = np.zeros_like(columns)
    for adapter in scorer.adapters:
        shares = adapter.trust * shares + adapter.weigh_columns(columns)
    acting = bag.acting[bag.agent_index]
    apart = shares - shares[acting].mean(axis=0)
    high = columns > columns[acting].mean(axis=0)
    return tuple(
        tuple(
            Sign(COLUMNS[i], bool(high[turn, i]), float(apart[turn, i]))
            for i in np.argsort(-apart[turn], kind="stable")
            if apart[turn, i] > _LEAST
        )
        for turn in turns
    )


def _find_words(
    attributor: Attributor, trajectory: Trajectory, bag: Bag, findings: Sequence[Finding]
) -> list[tuple[Word, ...]]:
    """Words of the turn of each finding that weigh most, marks left out."""
    scorer, bagger = attributor.scorer, attributor.bagger
    if not isinstance(scorer, OnnxScorer) or not isinstance(bagger, BagMaker) or not scorer.heed:
        return [()] * len(findings)
    likeliest: list[int] = []
    if any(finding.fault.mode is None for finding in findings):
        likeliest = attributor(trajectory).pair_probs.argmax(axis=1).tolist()
    found = []
    for finding in findings:
        mode = finding.fault.mode
        place = likeliest[bag.agent_index[finding.turn]] if mode is None else mode.index
        heavy = weigh_turn(bagger, scorer.lexicon, trajectory, bag, finding.turn, place)
        found.append(tuple(word for word in heavy if word.text[:1].isalnum()))
    return found


def weigh_turn(
    bagger: BagMaker, lexicon: Lexicon, trajectory: Trajectory, bag: Bag, turn: int, mode: int
) -> tuple[Word, ...]:
    """Share of every word of a turn in the wide logit of (its agent, mode), largest first.

    The shares of the words in all turns of the agent sum to that logit without its constant, and
    without what is taken off it for the words of the other agents.

    Args:
        bagger: Splits the turn into tokens.
        lexicon: Wide half.
        trajectory: The run.
        bag: Of the run.
        turn: 0-based position.
        mode: Position in `dcl.taxonomy.MODES`.
    """
    text = trajectory.turns[turn].content
    ids, places = bagger.locate(text)
    document = bag.words[bag.agent_index[turn]]
    own = document.turn == turn
    rows = document.row[own]
    weight = weigh_words(document, lexicon.idf)[own]
    own_part = 1 - lexicon.contrast / len(bag.words)  # the agent is one of those in the mean
    mass = lexicon.table[rows, mode].astype(np.float32) * (weight * np.float32(own_part))
    shares = split_over_tokens(ids, bagger.vocabulary, rows, mass)
    spans = [match.span() for match in WORD.finditer(text)]
    starts = [start for start, _ in spans]
    total: dict[str, float] = {}
    for (at, _), share in zip(places, shares, strict=True):
        word = bisect_right(starts, at) - 1
        name = text[slice(*spans[word])].lower() if word >= 0 else ""
        total[name] = total.get(name, 0.0) + float(share)
    return tuple(Word(text, share) for text, share in sorted(total.items(), key=lambda x: -x[1]))


def weigh_sentences(
    attributor: Attributor, trajectory: Trajectory, finding: Finding
) -> tuple[Sentence, ...]:
    """How far the probability of a finding falls without each sentence of its turn.

    Args:
        attributor: The model; it scores the run once for each sentence.
        trajectory: The run.
        finding: The finding.

    Returns:
        Sentences with the largest fall first; of a long turn, pieces of several.
    """
    content = trajectory.turns[finding.turn].content
    pieces = split_sentences(content)
    runs = [
        replace_turn(trajectory, finding.turn, content[:start] + content[stop:])
        for start, stop in pieces
    ]
    left = [probability(one, finding) for one in attributor.batch(runs)]
    before = probability(attributor(trajectory), finding)
    found = [
        Sentence(content[start:stop].strip(), before - after)
        for (start, stop), after in zip(pieces, left, strict=True)
    ]
    return tuple(sorted(found, key=lambda sentence: -sentence.fall))


def probability(found: Attribution, finding: Finding) -> float:
    """What another attribution of the same agents says of a finding, 0 to 1."""
    agent = found.agents.index(finding.fault.agent)
    if finding.fault.mode is None:
        return float(found.agent_probs[agent])
    return float(found.pair_probs[agent, finding.fault.mode.index])


def replace_turn(trajectory: Trajectory, turn: int, content: str) -> Trajectory:
    """The same run with other words in one turn."""
    turns = list(trajectory.turns)
    turns[turn] = replace(turns[turn], content=content)
    return replace(trajectory, turns=tuple(turns))


def split_sentences(text: str, most: int = _MOST_PIECES) -> list[tuple[int, int]]:
    """First character, and the one after the last, of each sentence or line of a text.

    Args:
        text: Any text.
        most: Neighbours are put together until there are no more pieces than this; > 0.
    """
    ends = [match.end() for match in _END.finditer(text)]
    spans = list(zip([0, *ends], [*ends, len(text)], strict=True))
    spans = [(start, stop) for start, stop in spans if text[start:stop].strip()]
    size = -(-len(spans) // most) or 1
    groups = [spans[i : i + size] for i in range(0, len(spans), size)]
    return [(group[0][0], group[-1][1]) for group in groups]


def trace_blame(trajectory: Trajectory, bag: Bag, source: int) -> tuple[Hop, ...]:
    """The way of a fault from the turn that is blamed to the turn where the failure shows.

    The walk starts at the symptom and goes back along the strongest reference: rare words in
    common, the turn that was answered, the turn before.

    Args:
        trajectory: The run.
        bag: Of the run.
        source: 0-based position of the blamed turn.

    Source:
        SOAP and MASPrism (arXiv 2605.07509) for the walk from symptom to source along one
        predecessor; the verbs are those of data between agents: sent, kept, merged, handed over.
    """
    references = References(bag)
    path = references.walk(find_symptom(bag, source), source)[::-1]
    verbs = [None, *(_name_verb(trajectory, references(t), s, t) for s, t in pairwise(path))]
    return tuple(
        Hop(t, trajectory.steps[t], trajectory.turns[t].agent, verb)
        for t, verb in zip(path, verbs, strict=True)
    )


def _name_verb(
    trajectory: Trajectory, strength: NDArray[np.float64], source: int, target: int
) -> Verb:
    """How something came from one turn to a later one."""
    earlier, later = trajectory.turns[source], trajectory.turns[target]
    tools = TurnKind.TOOL_RESULT in (earlier.kind, later.kind)
    if earlier.agent == later.agent or tools:
        return "state"
    named = re.search(rf"(?<!\w){re.escape(later.agent)}(?!\w)", earlier.content)
    if earlier.kind is TurnKind.HANDOFF or named:
        return "delegation"
    strong = np.flatnonzero(strength >= _ALSO * strength.max())
    others = {trajectory.turns[s].agent for s in strong} - {later.agent}
    return "aggregation" if len(others) > 1 else "message"


def _encode(attributor: Attributor, bag: Bag, turn: int) -> NDArray[np.float32]:
    """Vector of one turn, `(E,)`."""
    encoder: Any = getattr(attributor.scorer, "encoder", None)
    vector: NDArray[np.float32] = encoder([bag.windows[turn]])[0]
    return vector
