"""Whether stated certainty holds: coverage of step sets, and how right verdicts are that stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.fewshot import FewshotConfig, cross_adapt, observe_all, read_base
from benchmarks.metrics import Floats, Interval, bootstrap, ratio_of, share_right, state_truth
from benchmarks.runs import load_examples
from benchmarks.tables import markdown_lines, show_share
from dcl.attribution import Attribution, decode, rank_scores, span_scores
from dcl.calibration import PRECISION, fit_cuts, fit_trust
from dcl.errors import ConfigError
from dcl.fitting import split_folds
from dcl.trajectory import Example

COVERAGES = (0.8, 0.9)
ANSWERED = (1.0, 0.8, 0.6, 0.4, 0.2)
"""Shares of runs that are answered, surest first, in the table of risk against coverage."""
OWN, REFITTED = "the model", "half of the runs"
"""What sets and limits were fitted on: they are those of the attribution, or fitted anew on half of
the questions and measured on the other half, `repeats` times."""

Score = Callable[[NDArray[Any]], NDArray[Any]]
KINDS: dict[str, Score] = {"consecutive": span_scores, "likeliest": rank_scores}
"""Kinds of sets, and the score of a turn that their cuts are put on."""


class SetRow(NamedTuple):
    """Measured coverage and size of one kind of set; intervals over runs.

    Args:
        model: Whose posterior.
        fitted: `OWN` or `REFITTED`.
        kind: Out of `KINDS`.
        target: Coverage that was asked for, 0 to 1.
        coverage: Share of runs whose labelled step is in the set, 0 to 1.
        turns: Turns of a set.
        share: Turns of a set by turns of its run, 0 to 1.
    """

    model: str
    fitted: str
    kind: str
    target: float
    coverage: Interval
    turns: Interval
    share: Interval


class LimitRow(NamedTuple):
    """What passes a limit of trust; intervals over runs.

    Args:
        model: Whose.
        fitted: `OWN` or `REFITTED`.
        answered: Share of runs over the limit, 0 to 1.
        precision: Share of those whose first guess of an agent is right; NaN where none is over.
    """

    model: str
    fitted: str
    answered: Interval
    precision: Interval


class TrustRow(NamedTuple):
    """How right the surest first guesses of an agent are.

    Args:
        model: Whose.
        accuracy: At each share of `ANSWERED`, 0 to 1; intervals over runs.
    """

    model: str
    accuracy: tuple[Interval, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Reliability:
    """All that `measure` finds.

    Args:
        runs: Number of runs.
        sets: Rows of sets.
        trust: Rows of the surest guesses.
        limits: Rows of limits of trust.
    """

    runs: int
    sets: list[SetRow]
    trust: list[TrustRow]
    limits: list[LimitRow]


def measure(config: FewshotConfig) -> Reliability:
    """Sets and limits of the model as they are, and fitted anew on half of the questions.

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
    base = read_base(config.model)
    runs = observe_all(examples, config)
    found = {
        "as it is": [
            decode(e.trajectory, run.logits, base) for e, run in zip(examples, runs, strict=True)
        ],
        "dcl fit, 5 folds": cross_adapt(examples, runs, base, seed=config.seed),
    }
    halves = split_halves([run.group for run in runs], config)
    return Reliability(
        len(examples),
        [row for name, each in found.items() for row in measure_sets(name, examples, each, halves)],
        [measure_trust(name, examples, each) for name, each in found.items()],
        [
            row
            for name, each in found.items()
            for row in measure_limits(name, examples, each, halves)
        ],
    )


Halves = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Positions of the runs to fit on, and of those to measure on, for each split."""


def measure_sets(
    name: str, examples: Sequence[Example], found: Sequence[Attribution], halves: Halves
) -> list[SetRow]:
    """Rows of both kinds of sets at all coverages.

    Attributions without fitted sets have no rows of their own ones.

    Args:
        name: Whose attributions.
        examples: Runs with one labelled step.
        found: Attributions of the runs.
        halves: As `split_halves` gives them.
    """
    turns = [_labelled_turn(example) for example in examples]
    everything = range(len(found))
    rows = []
    for kind, score in KINDS.items():
        true = np.array([score(one.step_probs)[t] for one, t in zip(found, turns, strict=True)])
        for target in COVERAGES:
            if all(_cuts_of(one, kind) for one in found):
                own = [(i, found[i]) for i in everything]
                rows.append(_set_row(name, OWN, kind, target, own, turns))
            anew = []
            for fit_half, rest in halves:
                cuts = fit_cuts(true[list(fit_half)].tolist())
                anew += [(i, _with_cuts(found[i], cuts)) for i in rest]
            rows.append(_set_row(name, REFITTED, kind, target, anew, turns))
    return sorted(rows, key=lambda row: row.fitted != OWN)


def measure_trust(name: str, examples: Sequence[Example], found: Sequence[Attribution]) -> TrustRow:
    """Accuracy of the surest guesses.

    Args:
        name: Whose attributions.
        examples: Runs with one labelled agent.
        found: Attributions of the runs.
    """
    sure, right = _judge_agents(examples, found)
    return TrustRow(
        name,
        tuple(bootstrap(share_right(sure, right, share), len(found)) for share in ANSWERED),
    )


def measure_limits(
    name: str, examples: Sequence[Example], found: Sequence[Attribution], halves: Halves
) -> list[LimitRow]:
    """What passes the limit of trust that attributions carry, and one that is fitted anew.

    Attributions that all pass have no row of their own limit.

    Args:
        name: Whose attributions.
        examples: Runs with one labelled agent.
        found: Attributions of the runs.
        halves: As `split_halves` gives them.
    """
    sure, right = _judge_agents(examples, found)
    count = len(found)
    limits = np.array([one.calibration.trust_threshold for one in found])
    rows = []
    if limits.any():
        over = (sure >= limits).astype(np.float64)
        rows.append(_limit_row(name, OWN, over, right, np.ones(count)))
    over, often = np.zeros(count), np.zeros(count)
    for fit_half, rest in halves:
        known = list(fit_half)
        limit = fit_trust(sure[known].tolist(), (right[known] > 0).tolist(), precision=PRECISION)
        over[list(rest)] += sure[list(rest)] >= limit
        often[list(rest)] += 1
    rows.append(_limit_row(name, REFITTED, over, right, often))
    return rows


def split_halves(groups: Sequence[int], config: FewshotConfig) -> Halves:
    """Positions of both halves of every split, by question.

    Args:
        groups: Question of each run.
        config: Number of splits and seed.
    """
    splits = []
    for i in range(config.repeats):
        side = split_folds(groups, 2, config.seed + i)
        splits.append((np.flatnonzero(side == 0).tolist(), np.flatnonzero(side == 1).tolist()))
    return splits


def to_markdown(found: Reliability) -> str:
    """All tables, in percent with 95 % intervals."""
    lines = [
        f"{found.runs} runs; in brackets 95 % intervals over runs, sets and limits held as fitted.",
        "",
    ]
    lines += markdown_lines(
        ["posterior", "sets fitted on", "set", "target", "coverage", "turns", "share of the run"],
        [
            [
                *(row.model, row.fitted, row.kind, f"{row.target:.0%}"),
                show_share(row.coverage),
                "{:.2f} [{:.2f}, {:.2f}]".format(*row.turns),
                show_share(row.share),
            ]
            for row in found.sets
        ],
    )
    lines += ["", "Agent accuracy of the surest runs:", ""]
    lines += markdown_lines(
        ["model", *(f"surest {share:.0%}" for share in ANSWERED)],
        [[row.model, *map(show_share, row.accuracy)] for row in found.trust],
    )
    lines += ["", f"Limits of trust, asked for {PRECISION:.0%}:", ""]
    lines += markdown_lines(
        ["model", "limit fitted on", "runs over it", "right of these"],
        [
            [row.model, row.fitted, show_share(row.answered), show_share(row.precision)]
            for row in found.limits
        ],
    )
    return "\n".join(lines) + "\n"


def _set_row(
    name: str,
    fitted: str,
    kind: str,
    target: float,
    seen: Sequence[tuple[int, Attribution]],
    turns: Sequence[int],
) -> SetRow:
    """One row from attributions that carry cuts, each with the position of its run."""
    sums, often = np.zeros((3, len(turns))), np.zeros(len(turns))
    for i, one in seen:
        chosen = one.step_set(target, consecutive=kind == "consecutive")
        sums[:, i] += (turns[i] in chosen, len(chosen), len(chosen) / len(one.steps))
        often[i] += 1
    measured = (bootstrap(ratio_of(each, often), len(turns)) for each in sums)
    return SetRow(name, fitted, kind, target, *measured)


def _limit_row(name: str, fitted: str, over: Floats, right: Floats, often: Floats) -> LimitRow:
    """One row from how often each run passed, was right, and was measured, `(n,)` each."""
    answered = bootstrap(ratio_of(over, often), len(over))
    return LimitRow(name, fitted, answered, bootstrap(ratio_of(over * right, over), len(over)))


def _judge_agents(
    examples: Sequence[Example], found: Sequence[Attribution]
) -> tuple[Floats, Floats]:
    """Probability of the likeliest agent of each run, and whether it is right, `(n,)` each."""
    sure = np.array([float(one.agent_probs.max()) for one in found])
    right = [
        one.agents[int(np.argmax(one.agent_probs))] == state_truth(e.faults or ()).agent
        for one, e in zip(found, examples, strict=True)
    ]
    return sure, np.array(right, dtype=np.float64)


def _labelled_turn(example: Example) -> int:
    """Position of the one labelled turn."""
    (fault, *_) = example.faults or ()
    turn = None if fault.step is None else example.trajectory.turn_at(fault.step, fault.agent)
    if turn is None:
        raise ConfigError(f"{example.trajectory.id}: a label names a step that does not exist")
    return turn


def _cuts_of(found: Attribution, kind: str) -> tuple[float, ...]:
    """The cuts that an attribution carries for a kind of set; none where none were fitted."""
    own = found.calibration
    return own.span_cuts if kind == "consecutive" else own.ranked_cuts


def _with_cuts(found: Attribution, cuts: tuple[float, ...]) -> Attribution:
    """The same attribution under other cuts, for both kinds."""
    return replace(found, calibration=replace(found.calibration, ranked_cuts=cuts, span_cuts=cuts))
