"""The reading of natural failures that ships with a model, learned from runs of many systems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dcl.attribution import SHOWN_COVERAGES, Attribution, Attributor, decode
from dcl.crossfit import compare, cross_fit, observe
from dcl.errors import ConfigError
from dcl.fitting import FOLDS, Fit, Observation, fit, leave_bystanders_out
from dcl.runtime import OnnxScorer
from dcl.trajectory import Example

MOST_OF_A_SYSTEM = 60
"""Runs of one system in one set that `learn_natural` looks at, sound ones among them, so that none
leads."""


@dataclass(frozen=True, slots=True)
class NaturalReport:
    """How the reading of natural failures fares on systems that it has not seen.

    Args:
        runs: Failed runs that it was fitted on.
        sound: Runs without a fault beside them, for agents and thresholds.
        systems: Systems that they come from.
        agent: Share of runs whose agent is guessed first, of systems that were held out, 0 to 1.
        step: The same for the step.
        before: Both without the reading.
        covered: Share of runs whose step is in the consecutive set for each of `SHOWN_COVERAGES`,
            of systems that were held out, each system counting alike, 0 to 1.
    """

    runs: int
    sound: int
    systems: int
    agent: float
    step: float
    before: tuple[float, float]
    covered: tuple[float, ...]


def learn_natural(
    attributor: Attributor, sets: Sequence[Iterable[Example]], *, seed: int = 0
) -> tuple[Fit, NaturalReport]:
    """Learn to read failures of systems of any kind from runs whose decisive step is known.

    All that is chosen is chosen on systems that were held out, as the systems of a user are.

    Args:
        attributor: The network as it is, with its calibration.
        sets: Sets of labelled runs, those without a fault as well; the system of a run is what its
            metadata calls `framework`, or else where its labels come from.
        seed: Of the choice of runs and of the folds.

    Returns:
        The fit on all of them, and how fits fare on systems that they did not see.

    Raises:
        ConfigError: If the model is not an exported one, if there are too few systems to hold some
            out, or if no step is labelled.
    """
    scorer = attributor.scorer
    if not isinstance(scorer, OnnxScorer):
        raise ConfigError("expected an exported model")
    examples = [e for one in sets for e in spread_systems(list(one), seed)]
    names = [_name_system(example) for example in examples]
    systems = {name: i for i, name in enumerate(dict.fromkeys(names))}
    if len(systems) < FOLDS:
        raise ConfigError(
            f"natural: expected labelled runs of at least {FOLDS} systems, named by "
            f"metadata.framework, got {len(systems)}"
        )
    runs = [
        observe(attributor, scorer, example, systems[name])
        for example, name in zip(examples, names, strict=True)
    ]
    if not any(leave_bystanders_out(run).targets.step.any() for run in runs):
        raise ConfigError("natural: expected runs whose faulty step is labelled, got none")
    base = attributor.calibration
    fitted = fit(runs, base, seed=seed, by_group=False)
    before = [decode(e.trajectory, r.logits, base) for e, r in zip(examples, runs, strict=True)]
    after = cross_fit(examples, runs, base, seed=seed, by_group=False)
    levels = {level.name: level for level in compare(examples, before, after)}
    agent, step = levels["agent"], levels["step"]
    return fitted, NaturalReport(
        runs=sum(bool(example.faults) for example in examples),
        sound=sum(not example.faults for example in examples),
        systems=len(systems),
        agent=agent.after[0],
        step=step.after[0],
        before=(agent.before[0], step.before[0]),
        covered=tuple(_measure_cover(runs, after, coverage) for coverage in SHOWN_COVERAGES),
    )


def spread_systems(examples: Sequence[Example], seed: int = 0) -> list[Example]:
    """The runs that `learn_natural` looks at: of each system `MOST_OF_A_SYSTEM` at random.

    Args:
        examples: One set of runs; those without labels are left out.
        seed: Of the choice.
    """
    taken: Counter[str] = Counter()
    chosen = []
    for i in np.random.default_rng(seed).permutation(len(examples)).tolist():
        system = _name_system(examples[i])
        if examples[i].faults is not None and taken[system] < MOST_OF_A_SYSTEM:
            taken[system] += 1
            chosen.append(examples[i])
    return chosen


def _measure_cover(
    runs: Sequence[Observation], found: Sequence[Attribution], coverage: float
) -> float:
    """Share of runs whose step is in the set of this coverage; groups count alike."""
    inside: dict[int, list[bool]] = {}
    for run, one in zip(runs, found, strict=True):
        if leave_bystanders_out(run).targets.step.any():
            hit = int(np.argmax(run.targets.step)) in one.step_set(coverage)
            inside.setdefault(run.group, []).append(hit)
    return round(float(np.mean([np.mean(hits) for hits in inside.values()])), 4)


def _name_system(example: Example) -> str:
    """The system that a run is of."""
    return str(example.trajectory.metadata.get("framework") or example.origin)
