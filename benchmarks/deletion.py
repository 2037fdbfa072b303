"""Whether shown evidence is what the model used: take it away, and compare with taking at random.

What is taken at random has the same length, so a shorter log cannot explain the fall.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.metrics import Interval, bootstrap, mean_of
from benchmarks.runs import Part, load_examples
from dcl.attribution import Attributor, Finding
from dcl.bag import BagMaker
from dcl.errors import ConfigError
from dcl.explanation import WORD, probability, replace_turn, split_sentences, weigh_turn
from dcl.runtime import OnnxScorer, load
from dcl.trajectory import Trajectory

KINDS = ("turn", "sentence", "words")
"""What is taken: the turn of the finding; its sentence whose removal costs most, chosen by the same
measure and so only a check; the words with the largest exact shares, chosen by another one, where
the reading heeds what words say of modes."""

_WORDS = 8


@dataclass(frozen=True, kw_only=True)
class DeletionConfig:
    """What to delete from.

    Args:
        data: Files and folders of labelled runs; where all are of AEGIS, the model reads them as
            injected faults, otherwise as natural ones.
        model: Folder of the model; None means the one that ships.
        split: Which questions.
        limit: Runs at most, > 0.
        repeats: Random deletions of each kind in each run, > 0.
        seed: Of what is deleted at random.
    """

    data: tuple[Path, ...]
    model: Path | None = None
    split: Part = "all"
    limit: int = 100
    repeats: int = 3
    seed: int = 0


class DeletionRow(NamedTuple):
    """Falls of the probability of the best finding.

    Args:
        kind: Out of `KINDS`.
        shown: Mean fall without what was shown.
        at_random: Mean fall without as much at random.
        gap: The first minus the second, paired, with its interval over runs.
        wins: Share of runs where the first is larger.
    """

    kind: str
    shown: float
    at_random: float
    gap: Interval
    wins: float


def delete(config: DeletionConfig) -> tuple[int, list[DeletionRow]]:
    """Number of runs, and one row for each kind.

    Raises:
        ConfigError: If there is no run, or the model is not exported.
    """
    examples = load_examples(config.data, config.split)[: config.limit]
    if not examples:
        raise ConfigError(f"--data: expected labelled runs in split {config.split}, found none")
    injected = all(example.origin == "aegis" for example in examples)
    attributor = load(config.model, injected=injected)
    runs = [example.trajectory for example in examples]
    return len(runs), delete_from(attributor, runs, repeats=config.repeats, seed=config.seed)


def delete_from(
    attributor: Attributor, runs: Sequence[Trajectory], *, repeats: int = 3, seed: int = 0
) -> list[DeletionRow]:
    """One row for each kind of evidence that the reading uses.

    Args:
        attributor: Whose findings are tested.
        runs: At least one.
        repeats: Random deletions of each kind in each run, > 0.
        seed: Of what is deleted at random.
    """
    scorer = attributor.scorer
    kinds = KINDS if isinstance(scorer, OnnxScorer) and scorer.heed else KINDS[:2]
    rng = np.random.default_rng(seed)
    falls = np.array([_falls(attributor, run, kinds, rng, repeats) for run in runs])  # (n, K, 2)
    return [
        DeletionRow(
            kind,
            shown=float(falls[:, k, 0].mean()),
            at_random=float(falls[:, k, 1].mean()),
            gap=bootstrap(mean_of(falls[:, k, 0] - falls[:, k, 1]), len(falls)),
            wins=float((falls[:, k, 0] > falls[:, k, 1]).mean()),
        )
        for k, kind in enumerate(kinds)
    ]


def to_markdown(count: int, rows: Sequence[DeletionRow]) -> str:
    """The table; probabilities in points."""
    lines = [f"{count} runs, best finding of each.", ""]
    lines += ["| taken away | fall | fall at random | gap | larger in |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    for row in rows:
        gap = "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * x for x in row.gap))
        cells = f"{100 * row.shown:.1f} | {100 * row.at_random:.1f} | {gap} | {row.wins:.0%}"
        lines.append(f"| {row.kind} | {cells} |")
    return "\n".join(lines) + "\n"


def _falls(
    attributor: Attributor,
    run: Trajectory,
    kinds: Sequence[str],
    rng: np.random.Generator,
    repeats: int,
) -> list[tuple[float, float]]:
    """Fall without what is shown, and mean fall without as much at random, for each kind."""
    found = attributor(run)
    (finding,) = found.findings(top_k=1)
    before = probability(found, finding)
    falls = []
    for kind in kinds:
        if kind == "turn":
            shown, at_random = _delete_turn(run, finding, rng, repeats)
        elif kind == "sentence":
            shown, at_random = _delete_sentence(run, finding, rng, repeats)
        else:
            shown, at_random = _delete_words(attributor, run, finding, rng, repeats)
        left = [
            before - probability(one, finding) for one in attributor.batch([*shown, *at_random])
        ]
        falls.append((max(left[: len(shown)]), float(np.mean(left[len(shown) :]))))
    return falls


Runs = list[Trajectory]


def _delete_turn(
    run: Trajectory, finding: Finding, rng: np.random.Generator, repeats: int
) -> tuple[Runs, Runs]:
    """The run without the words of the turn, and without as many characters of other turns."""
    length = len(run.turns[finding.turn].content)
    others = []
    for _ in range(repeats):
        cut, rest = run, length
        for t in rng.permutation(len(run.turns)).tolist():
            if t == finding.turn or rest <= 0:
                continue
            content = run.turns[t].content
            cut = replace_turn(cut, t, content[rest:])
            rest -= len(content)
        others.append(cut)
    return [replace_turn(run, finding.turn, "")], others


def _delete_sentence(
    run: Trajectory, finding: Finding, rng: np.random.Generator, repeats: int
) -> tuple[Runs, Runs]:
    """The run without each sentence of the turn, and without a stretch of any other turn."""
    content = run.turns[finding.turn].content
    spans = split_sentences(content) or [(0, len(content))]
    shown = [replace_turn(run, finding.turn, content[:a] + content[b:]) for a, b in spans]
    size = int(np.mean([b - a for a, b in spans]))
    lengths = np.array([len(turn.content) for turn in run.turns], dtype=np.float64) + 1e-9
    at_random = []
    for _ in range(repeats):
        t = int(rng.choice(len(lengths), p=lengths / lengths.sum()))
        start = int(rng.integers(max(int(lengths[t]) - size, 0) + 1))
        text = run.turns[t].content
        at_random.append(replace_turn(run, t, text[:start] + text[start + size :]))
    return shown, at_random


def _delete_words(
    attributor: Attributor,
    run: Trajectory,
    finding: Finding,
    rng: np.random.Generator,
    repeats: int,
) -> tuple[Runs, Runs]:
    """The run without the heaviest words of the turn, and without as many occurrences of others."""
    scorer, bagger, mode = attributor.scorer, attributor.bagger, finding.fault.mode
    if not isinstance(scorer, OnnxScorer) or not isinstance(bagger, BagMaker) or mode is None:
        raise ConfigError("--model: expected an exported model")
    words = weigh_turn(bagger, scorer.lexicon, run, bagger(run), finding.turn, mode.index)
    heavy = {word.text for word in words[:_WORDS]}
    content = run.turns[finding.turn].content
    places = list(_occurrences(content))
    gone = {i for i, (word, _, _) in enumerate(places) if word in heavy}
    others = [rng.permutation(len(places))[: len(gone)].tolist() for _ in range(repeats)]
    chosen = [gone, *map(set, others)]
    runs = [replace_turn(run, finding.turn, _without(content, places, c)) for c in chosen]
    return runs[:1], runs[1:]


def _occurrences(text: str) -> Iterator[tuple[str, int, int]]:
    """Every word of a text with its first character and the one after its last."""
    for match in WORD.finditer(text):
        yield match.group().lower(), *match.span()


def _without(text: str, places: Sequence[tuple[str, int, int]], gone: set[int]) -> str:
    """The text without some occurrences."""
    kept, at = [], 0
    for i, (_, start, stop) in enumerate(places):
        if i in gone:
            kept.append(text[at:start])
            at = stop
    return "".join([*kept, text[at:]])
