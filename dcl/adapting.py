"""A network and labelled runs of other systems in, another reading of logs out, with a report.

`adapt` is `dcl fit`: a few runs of one system. `learn_natural` makes the reading of natural
failures that ships with a model, from runs of many systems whose decisive step is proved.

The report compares the adapted model with the original on questions that the fit did not see. A
part that is not better there is taken out again; if nothing is left, the original is kept.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcl.adapter import IDENTITY, save_adapter
from dcl.artifact import (
    ADAPTER,
    CARD,
    CONFIG,
    INDEX,
    Artifact,
    open_artifact,
    write_artifact,
)
from dcl.attribution import SHOWN_COVERAGES, Attribution, Attributor, Calibration, decode
from dcl.calibration import recalibrate
from dcl.errors import ConfigError
from dcl.fitting import (
    FOLDS,
    PARTS,
    THRESHOLDS,
    Fit,
    Observation,
    fit,
    leave_bystanders_out,
    split_folds,
)
from dcl.nearest import build_index, save_index
from dcl.runtime import OnnxScorer, load
from dcl.splits import group_of
from dcl.targets import make_targets
from dcl.trajectory import Example, Trajectory

Floats = NDArray[np.float64]

FEWEST = 10
"""Labelled runs below which nothing is fitted."""
LEVELS = ("agent", "step", "pair", "agents over the threshold")
"""What is compared: first guesses, and all agents that are declared."""

MOST_OF_A_SYSTEM = 60
"""Runs of one system in one set that `learn_natural` looks at, sound ones among them, so that none
leads."""

_ALIKE = 0.7  # share of common words from which on two questions count as one
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Level:
    """How one level fares on questions that the fit did not see.

    Args:
        name: Out of `LEVELS`: whether the first guess is right, or micro-F1 of declared agents.
        runs: Runs that are labelled at this level.
        before: Score of the original model, 0 to 1, with its 95 % interval.
        after: Score of the adapted one.
        gain: After minus before, paired over runs.
    """

    name: str
    runs: int
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    gain: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class FitReport:
    """What a fit did.

    Args:
        runs: Labelled runs.
        questions: Groups of runs that ask the same.
        levels: Cross-validated scores before and after.
        parts: What was changed, names out of `dcl.fitting.PARTS`; empty where the original stays.
        refused: Parts that were not better on unseen questions.
        clean: Successful runs that thresholds were moved by.
        flagged: Share of them that were flagged before.
        thresholds: Agent and pair threshold at the end.
    """

    runs: int
    questions: int
    levels: tuple[Level, ...]
    parts: tuple[str, ...]
    refused: tuple[str, ...]
    clean: int
    flagged: float | None
    thresholds: tuple[float, float]


def adapt(
    model: Path | None,
    labelled: Iterable[Example],
    out: Path,
    *,
    clean: Iterable[Trajectory] = (),
    share: float = 0.1,
    seed: int = 0,
) -> FitReport:
    """Adapt a model to the system that some runs come from, and write it.

    Args:
        model: Exported model folder; None means the one that ships.
        labelled: Runs with labels: agents, steps, modes, whatever is known; may be empty.
        out: Where the adapted model goes.
        clean: Runs that succeeded; thresholds are moved so that few of them are flagged.
        share: Of runs that succeed, at most this share is flagged, between 0 and 1.
        seed: Of the folds.

    Raises:
        ConfigError: If there are too few runs, the model is adapted already, or `out` is taken.
        ArtifactError: If the model is damaged or not exported.
    """
    artifact = open_artifact(model)
    attributor = load(model)
    known = [example for example in labelled if example.faults is not None]
    sound = list(clean)
    if not known and not sound:
        raise ConfigError("expected labelled runs, or successful ones under --clean, found none")
    if known and ADAPTER in artifact.manifest["files"]:
        raise ConfigError(
            f"{artifact.path}: this model is adapted already; fit the original one again with all "
            "labelled runs"
        )
    if known and len(known) < FEWEST:
        raise ConfigError(
            f"expected at least {FEWEST} labelled runs to learn from, got {len(known)}"
        )
    base = attributor.calibration
    fitted = Fit(IDENTITY, base, (), frozenset())
    levels: tuple[Level, ...] = ()
    refused: tuple[str, ...] = ()
    groups: list[int] = []
    if known:
        scorer = attributor.scorer
        if not isinstance(scorer, OnnxScorer):
            raise ConfigError("expected an exported model")
        groups = group_questions(known)
        runs = [
            observe(attributor, scorer, example, group)
            for example, group in zip(known, groups, strict=True)
        ]
        fitted, levels, refused = choose_parts(known, runs, base, seed=seed)
        if fitted.adapts:
            scorer.adapters += (fitted.adapter,)
        attributor = Attributor(attributor.bagger, scorer, fitted.calibration)
    calibration, flagged = fitted.calibration, None
    if sound:
        attributed = list(attributor.batch(sound))
        flagged = float(np.mean([bool(one.findings()) for one in attributed]))
        calibration = recalibrate(calibration, attributed, share=share)
    moved = any(getattr(calibration, name) != getattr(base, name) for name in THRESHOLDS)
    changed = fitted.parts | ({"thresholds"} if moved else set())
    report = FitReport(
        runs=len(known),
        questions=len(set(groups)),
        levels=levels,
        parts=tuple(part for part in PARTS if part in changed),
        refused=tuple(part for part in refused if part not in changed),
        clean=len(sound),
        flagged=flagged,
        thresholds=(calibration.agent_threshold, calibration.pair_threshold),
    )
    write_adapted(artifact, out, fitted, calibration, attributor, known, report)
    return report


def observe(
    attributor: Attributor, scorer: OnnxScorer, example: Example, group: int
) -> Observation:
    """What a fit sees of one labelled run.

    Args:
        attributor: Gives the bag.
        scorer: Its scorer.
        example: The run.
        group: Its question, or its system.
    """
    bag = attributor.bagger(example.trajectory)
    *turns, task = scorer.encoder([*bag.windows, bag.task])
    logits, columns = scorer.observe(bag, np.stack(turns), task)
    targets = make_targets(example, sigma=0.0)
    return Observation(group, logits, columns, bag.agent_index, bag.acting, targets)


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

    Raises:
        ConfigError: If there are too few systems to hold some out.
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


def _name_system(example: Example) -> str:
    """The system that a run is of."""
    return str(example.trajectory.metadata.get("framework") or example.origin)


def choose_parts(
    examples: Sequence[Example], runs: Sequence[Observation], base: Calibration, *, seed: int
) -> tuple[Fit, tuple[Level, ...], tuple[str, ...]]:
    """Fit, and keep only what is better on questions that were not seen.

    Args:
        examples: Labelled runs.
        runs: What the fit sees of them, in the same order.
        base: Calibration of the original model.
        seed: Of the folds.

    Returns:
        The fit on all runs, the cross-validated scores, and the parts that were refused.
    """
    before = [decode(e.trajectory, r.logits, base) for e, r in zip(examples, runs, strict=True)]
    allowed = frozenset(PARTS)
    while True:
        after = cross_fit(examples, runs, base, seed=seed, parts=allowed)
        levels = compare(examples, before, after)
        refused = _find_worse({level.name: level.gain[0] for level in levels}, allowed)
        if not refused:
            break
        allowed -= refused  # and judge again what is left
    fitted = fit(runs, base, parts=allowed, seed=seed)
    if not fitted.parts:
        fitted = Fit(IDENTITY, base, (), frozenset())
        levels = compare(examples, before, before)
    return fitted, levels, tuple(part for part in PARTS if part not in fitted.parts)


def _find_worse(gain: Mapping[str, float], allowed: frozenset[str]) -> frozenset[str]:
    """Parts that are allowed and not better.

    Each is judged by the level that it serves, and whatever moves what is declared by that as well:
    where it is worse, thresholds go first, then modes, then agents; without these it is as it was.
    """
    declared, agent = gain.get(LEVELS[-1], 0.0), gain.get("agent", 0.0)
    spoilt = declared < 0 and "thresholds" not in allowed
    worse = {
        "turns": gain.get("step", agent) <= 0,
        "agents": max(agent, declared) <= 0 or (spoilt and "modes" not in allowed),
        "modes": gain.get("pair", 0.0) <= 0 or spoilt,
        "thresholds": declared <= 0,
    }
    return frozenset(part for part in allowed if worse[part])


def cross_fit(
    examples: Sequence[Example],
    runs: Sequence[Observation],
    base: Calibration,
    *,
    seed: int,
    parts: frozenset[str] = frozenset(PARTS),
    folds: int = FOLDS,
    by_group: bool = True,
) -> list[Attribution]:
    """Attributions of all runs, each by a fit that saw no run of its question.

    Everything is chosen anew within each fold, so nothing of a run enters its own attribution.

    Args:
        examples: Labelled runs.
        runs: What the fit sees of them.
        base: Calibration of the original model.
        seed: Of the folds.
        parts: What may be changed.
        folds: Number of folds.
        by_group: As `dcl.fitting.fit` takes it.
    """
    place = split_folds([run.group for run in runs], folds, seed + 1)
    found: dict[int, Attribution] = {}
    for fold in np.unique(place):
        seen = [run for run, f in zip(runs, place, strict=True) if f != fold]
        fitted = fit(seen, base, parts=parts, seed=seed, by_group=by_group)
        for i in np.flatnonzero(place == fold).tolist():
            found[i] = attribute_adapted(examples[i].trajectory, runs[i], fitted)
    return [found[i] for i in range(len(runs))]


def attribute_adapted(trajectory: Trajectory, run: Observation, fitted: Fit) -> Attribution:
    """The attribution that an adapted model gives to a run that was observed."""
    logits = fitted.adapter(run.logits, run.turns, run.agent_index, run.acting)
    return decode(trajectory, logits, fitted.calibration)


def compare(
    examples: Sequence[Example], before: Sequence[Attribution], after: Sequence[Attribution]
) -> tuple[Level, ...]:
    """Scores of two models on the same runs, at every level that is labelled.

    Args:
        examples: Labelled runs.
        before: Attributions of the first model.
        after: Of the second.
    """
    levels = []
    for name in LEVELS:
        counts = [
            (_count(name, example, one), _count(name, example, two))
            for example, one, two in zip(examples, before, after, strict=True)
        ]
        # Runs that are not labelled at this level have nothing to count.
        table = np.array([(*one, *two) for one, two in counts if max(one[1], two[1]) > 0])
        if len(table):
            levels.append(Level(name, len(table), *_intervals(table)))
    return tuple(levels)


def group_questions(examples: Sequence[Example]) -> list[int]:
    """A number for every run; runs whose questions are the same, or nearly, share one.

    Where that would leave too few groups to hold some out, as with one prompt for all runs, only
    equal questions are put together, and if these are too few as well, no runs are.

    Args:
        examples: The runs.
    """
    exact = [group_of(example) for example in examples]
    words = [frozenset(example.trajectory.task.lower().split()) for example in examples]
    numbers: list[int] = []
    for i, (group, own) in enumerate(zip(exact, words, strict=True)):
        like = (
            numbers[j]
            for j in range(i)
            if exact[j] == group or len(own & words[j]) > _ALIKE * len(own | words[j])
        )
        numbers.append(next(like, i))
    same = [exact.index(group) for group in exact]
    for candidate in (numbers, same):
        if len(set(candidate)) >= FOLDS:
            return candidate
    return list(range(len(examples)))


def write_adapted(
    artifact: Artifact,
    out: Path,
    fitted: Fit,
    calibration: Calibration,
    attributor: Attributor,
    known: Sequence[Example],
    report: FitReport,
) -> None:
    """Write the adapted model folder: the files of the original and what was learned.

    Args:
        artifact: The original.
        out: Where to.
        fitted: What was learned.
        calibration: Final temperatures and thresholds.
        attributor: The adapted model, to find evidence with.
        known: Labelled runs; the turns that show their faults are kept as vectors.
        report: Kept in the manifest.
    """
    config = json.loads((artifact.path / CONFIG).read_text())

    def write_files(folder: Path) -> None:
        for name in artifact.manifest["files"]:
            if name != CONFIG:
                shutil.copyfile(artifact.path / name, folder / name)
        if (artifact.path / CARD).is_file():
            shutil.copyfile(artifact.path / CARD, folder / CARD)
        if fitted.adapts:
            save_adapter(fitted.adapter, folder / ADAPTER)
        if known:
            save_index(build_index(attributor, known), folder / INDEX)

    notes = {k: v for k, v in artifact.notes.items() if k != "fit"}
    write_artifact(
        out,
        write_files,
        window=artifact.window,
        calibration=artifact.calibration,
        natural=calibration,
        model=artifact.model,
        training=config["training"],
        notes={**notes, "fit": asdict(report)},
    )


def _count(name: str, example: Example, found: Attribution) -> tuple[float, float]:
    """Hits and what they are out of; 0 out of 0 where this level is not labelled."""
    faults = example.faults or ()
    agents = {fault.agent for fault in faults}
    if name == "agents over the threshold":
        declared = {finding.fault.agent for finding in found.findings()}
        return 2.0 * len(agents & declared), float(len(agents) + len(declared))
    if name == "agent":
        guess: Any = found.agents[int(np.argmax(found.agent_probs))]
        true: set[Any] = agents
    elif name == "step":
        guess = found.steps[int(np.argmax(found.step_probs))]
        true = {fault.step for fault in faults if fault.step is not None}
    else:
        (best,) = found.faults(top_k=1)
        guess = best.agent, best.mode
        true = {(fault.agent, fault.mode) for fault in faults if fault.mode is not None}
    return (float(guess in true), 1.0) if true else (0.0, 0.0)


def _intervals(table: Floats) -> list[tuple[float, float, float]]:
    """Before, after and gain with 95 % intervals, bootstrap over runs.

    Args:
        table: `(n, 4)`: hits and total before, hits and total after.
    """
    n = len(table)
    draws = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=_RESAMPLES)
    sums = np.concatenate([np.ones((1, n)), draws]) @ table  # (1 + R, 4)
    before = sums[:, 0] / np.maximum(sums[:, 1], 1e-9)
    after = sums[:, 2] / np.maximum(sums[:, 3], 1e-9)
    found = []
    for values in (before, after, after - before):
        low, high = np.quantile(values[1:], [0.025, 0.975])
        found.append((round(float(values[0]), 4), round(float(low), 4), round(float(high), 4)))
    return found
