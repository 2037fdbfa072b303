"""Whether stated certainty holds: coverage of step sets, and how right verdicts are that stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.fewshot import FewshotConfig, observe_all
from benchmarks.metrics import state_truth
from benchmarks.runs import load_examples
from dcl.adapting import cross_fit
from dcl.artifact import open_artifact
from dcl.attribution import Attribution, decode, rank_scores, span_scores
from dcl.calibration import PRECISION, fit_cuts, fit_trust
from dcl.errors import ConfigError
from dcl.fitting import split_folds
from dcl.trajectory import Example

COVERAGES = (0.8, 0.9)
ANSWERED = (1.0, 0.8, 0.6, 0.4, 0.2)
"""Shares of runs that are answered, surest first, in the table of risk against coverage."""

Score = Callable[[NDArray[Any]], NDArray[Any]]


class SetRow(NamedTuple):
    """Measured coverage and size of one kind of set; means over splits, shares 0 to 1.

    Args:
        model: Whose posterior.
        kind: `consecutive` or `likeliest`.
        target: Coverage that was asked for.
        coverage: Share of held-out runs whose labelled step is in the set.
        turns: Turns of a set.
        share: Turns of a set by turns of its run.
    """

    model: str
    kind: str
    target: float
    coverage: float
    turns: float
    share: float


class TrustRow(NamedTuple):
    """How right first guesses of an agent are.

    Args:
        model: Whose.
        accuracy: At each share of `ANSWERED`.
        answered: Share of held-out runs over the fitted limit of trust.
        precision: Share of those that are right; NaN where none is answered.
    """

    model: str
    accuracy: tuple[float, ...]
    answered: float
    precision: float


def measure(config: FewshotConfig) -> tuple[int, list[SetRow], list[TrustRow]]:
    """Fit sets and limits on one half of the questions, measure on the other, many times.

    Args:
        config: Data, model, number of splits (`repeats`) and seed; sizes are not read.

    Raises:
        ConfigError: If too few runs have a labelled step.
    """
    examples = [
        e for e in load_examples(config.data) if state_truth(e.faults or ()).step is not None
    ]
    examples = [e for e in examples if state_truth(e.faults or ()).agent]
    if len(examples) < 20:
        raise ConfigError(f"--data: expected 20 runs with a labelled step, got {len(examples)}")
    base = open_artifact(config.model).calibration
    runs = observe_all(examples, config)
    own = [decode(e.trajectory, run.logits, base) for e, run in zip(examples, runs, strict=True)]
    fitted = cross_fit(examples, runs, base, seed=config.seed)
    groups = [run.group for run in runs]
    sets: list[SetRow] = []
    trust: list[TrustRow] = []
    for name, found in (("as it is", own), ("dcl fit, 5 folds", fitted)):
        sets += measure_sets(name, examples, found, groups, config)
        trust.append(measure_trust(name, examples, found, groups, config))
    return len(examples), sets, trust


def measure_sets(
    name: str,
    examples: Sequence[Example],
    found: Sequence[Attribution],
    groups: Sequence[int],
    config: FewshotConfig,
) -> list[SetRow]:
    """Rows of both kinds of sets at all coverages."""
    turns = [_labelled_turn(example) for example in examples]
    rows = []
    kinds: tuple[tuple[str, Score], ...] = (
        ("consecutive", span_scores),
        ("likeliest", rank_scores),
    )
    for kind, score in kinds:
        true = np.array([score(one.step_probs)[t] for one, t in zip(found, turns, strict=True)])
        for target in COVERAGES:
            seen = []
            for fit_half, rest in _halves(groups, config):
                cuts = fit_cuts(true[fit_half].tolist())
                for i in rest:
                    chosen = _with_cuts(found[i], cuts).step_set(
                        target, consecutive=kind == "consecutive"
                    )
                    size = len(chosen)
                    seen.append((turns[i] in chosen, size, size / len(found[i].steps)))
            rows.append(SetRow(name, kind, target, *np.mean(seen, axis=0).tolist()))
    return rows


def measure_trust(
    name: str,
    examples: Sequence[Example],
    found: Sequence[Attribution],
    groups: Sequence[int],
    config: FewshotConfig,
) -> TrustRow:
    """Accuracy of the surest guesses, and what a fitted limit of trust keeps."""
    sure = np.array([float(one.agent_probs.max()) for one in found])
    right = np.array(
        [
            one.agents[int(np.argmax(one.agent_probs))] == state_truth(e.faults or ()).agent
            for one, e in zip(found, examples, strict=True)
        ]
    )
    ranked = right[np.argsort(-sure, kind="stable")]
    kept: list[np.bool_] = []
    count = 0
    for fit_half, rest in _halves(groups, config):
        limit = fit_trust(sure[fit_half].tolist(), right[fit_half].tolist(), precision=PRECISION)
        kept += list(right[rest][sure[rest] >= limit])
        count += len(rest)
    return TrustRow(
        name,
        tuple(float(ranked[: round(share * len(ranked))].mean()) for share in ANSWERED),
        len(kept) / count,
        float(np.mean(kept)) if kept else float("nan"),
    )


def to_markdown(count: int, sets: Sequence[SetRow], trust: Sequence[TrustRow]) -> str:
    """Both tables in percent."""
    lines = [f"{count} runs; fitted on half of the questions, measured on the other.", ""]
    lines += ["| posterior | set | target | coverage | turns | share of the run |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: |"]
    for row in sets:
        numbers = f"{row.coverage:.1%} | {row.turns:.2f} | {row.share:.1%}"
        lines.append(f"| {row.model} | {row.kind} | {row.target:.0%} | {numbers} |")
    heads = [f"surest {share:.0%}" for share in ANSWERED]
    lines += ["", "Agent accuracy of the surest runs; then of those over a limit fitted for "]
    lines[-1] += f"{PRECISION:.0%}, and how many these are:"
    lines += ["", f"| model | {' | '.join(heads)} | over the limit | runs |"]
    lines += ["| --- | " + "---: | " * (len(heads) + 2)]
    for one in trust:
        cells = [f"{value:.1%}" for value in (*one.accuracy, one.precision, one.answered)]
        lines.append(f"| {one.model} | {' | '.join(cells)} |")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _halves(groups: Sequence[int], config: FewshotConfig) -> list[tuple[list[int], list[int]]]:
    """Positions of both halves of every split, by question."""
    splits = []
    for i in range(config.repeats):
        side = split_folds(groups, 2, config.seed + i)
        splits.append((np.flatnonzero(side == 0).tolist(), np.flatnonzero(side == 1).tolist()))
    return splits


def _labelled_turn(example: Example) -> int:
    """Position of the one labelled turn."""
    (fault, *_) = example.faults or ()
    turn = None if fault.step is None else example.trajectory.turn_at(fault.step, fault.agent)
    if turn is None:
        raise ConfigError(f"{example.trajectory.id}: a label names a step that does not exist")
    return turn


def _with_cuts(found: Attribution, cuts: tuple[float, ...]) -> Attribution:
    """The same attribution under other cuts, for both kinds."""
    return replace(found, calibration=replace(found.calibration, ranked_cuts=cuts, span_cuts=cuts))
