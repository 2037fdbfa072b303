"""Does a run fail at all? Alarms on runs that went well, at a stated share of failures found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.metrics import Interval, auroc, false_alarm_rate
from benchmarks.runs import Part
from benchmarks.tables import markdown_lines, show_share
from dcl.artifact import Artifact, hash_file, open_artifact
from dcl.errors import ConfigError
from dcl.formats import read_examples
from dcl.natural import spread_systems
from dcl.nearest import digest_run
from dcl.runtime import load
from dcl.splits import group_of, split_of
from dcl.trajectory import Example, Trajectory

Floats = NDArray[np.float64]
Suspicion = Callable[[Trajectory], float]
"""A run to a number that is higher the more likely it failed."""

PROBES: Mapping[str, Suspicion] = {
    "turns": lambda run: float(len(run.turns)),
    "characters": lambda run: float(sum(len(turn.content) for turn in run.turns)),
}
"""What sees only how long a run is; a model must do better than these."""


@dataclass(frozen=True, kw_only=True)
class AlarmsConfig:
    """Which runs, and what the model has seen of them.

    Args:
        data: Files and folders of runs that are known to have failed or to have gone well. Records
            that keep the clean run of a failed one are read as pairs.
        model: Folder of the model; None means the one that ships.
        split: Questions; `unseen` means validation and test questions of a file that the network
            was trained on, by the manifest, and all questions of any other.
        natural: What the reading of natural failures was learned from, as `python -m export` was
            given it; the runs that were drawn from these files are left out.
        detection: Share of failed runs that must alarm, above 0 and up to 1.
        resamples: Of the bootstrap, > 0.
        seed: Of the resampling.
    """

    data: tuple[Path, ...]
    model: Path | None = None
    split: Part | Literal["unseen"] = "unseen"
    natural: tuple[Path, ...] = ()
    detection: float = 0.8
    resamples: int = 1000
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RunSet:
    """Failed and sound runs of one source, to be told apart.

    Args:
        name: File, or system of the runs of a file that holds pairs.
        runs: `n` runs.
        failed: `(n,)`, whether each failed; both kinds occur.
        paired: Whether the runs are failed ones, each followed by its own clean run.
    """

    name: str
    runs: tuple[Trajectory, ...]
    failed: NDArray[np.bool_]
    paired: bool


@dataclass(frozen=True, slots=True)
class AlarmRow:
    """How well one score tells failed runs from sound ones.

    Args:
        name: Of the score.
        auroc: Chance that a failed run scores higher than a sound one, 0 to 1.
        alarms: Share of sound runs that alarm where the stated share of failed ones does, 0 to 1.
        ahead: Share of failed runs that score higher than their own clean run, 0 to 1, ties half;
            None where runs are not paired.
    """

    name: str
    auroc: Interval
    alarms: Interval
    ahead: Interval | None


def measure_alarms(config: AlarmsConfig) -> list[tuple[RunSet, list[AlarmRow]]]:
    """Rate the model and the probes on every set of runs.

    Raises:
        ConfigError: If a file does not hold both kinds of run.
    """
    sets = load_sets(config, open_artifact(config.model))
    attributor = load(config.model, remember=1 << 17)  # runs of a pair share most turns
    found = []
    for one in sets:
        scores = {
            "dcl": [float(each.agent_probs.max()) for each in attributor.batch(one.runs)],
            **{name: [probe(run) for run in one.runs] for name, probe in PROBES.items()},
        }
        found.append((one, rate_alarms(scores, one, config)))
    return found


def load_sets(config: AlarmsConfig, artifact: Artifact) -> list[RunSet]:
    """The runs of each file; pairs by system, and those of all systems together.

    A run went well if it is labelled with no fault, or succeeded; it failed if it is labelled with
    a fault, or is known to have failed. Of the failed runs of one clean run the first is taken.

    Args:
        config: Files, and which runs of them.
        artifact: The model, whose manifest names what the network was trained on.

    Raises:
        ConfigError: If a file does not hold both kinds of run.
    """
    seen = {
        digest_run(example.trajectory)
        for path in config.natural
        for example in spread_systems(list(read_examples(path)))
    }
    sets = []
    for path in config.data:
        parts = _parts_of(path, config, artifact)
        examples = [
            example
            for example in read_examples(path)
            if split_of(group_of(example)) in parts
            and seen.isdisjoint(map(digest_run, filter(None, (example.trajectory, example.clean))))
        ]
        pairs: dict[str, tuple[Trajectory, Trajectory]] = {}
        for example in examples:
            if example.faults and example.clean is not None:
                pairs.setdefault(example.clean.id, (example.trajectory, example.clean))
        if pairs:
            sets += _pair_sets([*pairs.values()])
        else:
            sets.append(_mixed_set(path, examples))
    return sets


def _parts_of(path: Path, config: AlarmsConfig, artifact: Artifact) -> tuple[str, ...]:
    """The splits of a file that are asked for."""
    if config.split not in ("unseen", "all"):
        return (config.split,)
    trained = path.is_file() and hash_file(path) in artifact.manifest.get("data", {}).values()
    unseen = config.split == "unseen" and trained
    return ("valid", "test") if unseen else ("train", "valid", "test")


def _pair_sets(pairs: Sequence[tuple[Trajectory, Trajectory]]) -> list[RunSet]:
    """A set for each system, and one for all."""
    systems: dict[str, list[Trajectory]] = {}
    for failed, clean in pairs:
        systems.setdefault(str(failed.metadata.get("framework")), []).extend((failed, clean))
    everything = [run for pair in pairs for run in pair]
    return [
        RunSet(name, tuple(runs), np.arange(len(runs)) % 2 == 0, paired=True)
        for name, runs in (*sorted(systems.items()), ("all systems", everything))
    ]


def _mixed_set(path: Path, examples: Iterable[Example]) -> RunSet:
    """The runs of a file of which it is known whether they failed."""
    known = [(example.trajectory, has_failed(example)) for example in examples]
    runs = tuple(run for run, failed in known if failed is not None)
    labels = np.array([failed for _, failed in known if failed is not None], dtype=bool)
    if labels.all() or not labels.any():
        raise ConfigError(
            f"--data: {path}: expected runs that failed and runs that went well, got "
            f"{labels.sum()} and {(~labels).sum()}"
        )
    return RunSet(path.name, runs, labels, paired=False)


def has_failed(example: Example) -> bool | None:
    """Whether a run failed; None where nobody knows."""
    if example.faults is not None:
        return bool(example.faults)
    outcome = example.trajectory.outcome
    return None if outcome is None else outcome == "failure"


def rate_alarms(
    scores: Mapping[str, Sequence[float]], runs: RunSet, config: AlarmsConfig
) -> list[AlarmRow]:
    """Rate several scores on the same runs.

    Args:
        scores: By name, one number a run.
        runs: What they are of.
        config: Share of failures to find, and of the bootstrap over runs, or over pairs.
    """
    rng = np.random.default_rng(config.seed)
    bad, good = np.flatnonzero(runs.failed), np.flatnonzero(~runs.failed)

    def draw() -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        # Each kind is drawn for itself: a resample without sound runs would say nothing.
        drawn = rng.integers(len(bad), size=len(bad))
        other = drawn if runs.paired else rng.integers(len(good), size=len(good))
        return bad[drawn], good[other]

    draws = [draw() for _ in range(config.resamples)]

    def rate(measure: Callable[[Floats, NDArray[np.bool_]], float], values: Floats) -> Interval:
        def look(at: tuple[NDArray[np.intp], NDArray[np.intp]]) -> float:
            rows = np.concatenate(at)
            return measure(values[rows], runs.failed[rows])

        low, high = np.quantile([look(at) for at in draws], [0.025, 0.975])
        return Interval(look((bad, good)), float(low), float(high))

    alarms = partial(false_alarm_rate, detection=config.detection)
    return [
        AlarmRow(
            name,
            auroc=rate(auroc, values),
            alarms=rate(alarms, values),
            ahead=rate(_stand_ahead, values) if runs.paired else None,
        )
        for name, each in scores.items()
        for values in [np.asarray(each, dtype=np.float64)]
    ]


def _stand_ahead(scores: Floats, failed: NDArray[np.bool_]) -> float:
    """Share of failed runs that score higher than the sound run at the same place, ties half."""
    gap = scores[failed] - scores[~failed]
    return float((gap > 0).mean() + (gap == 0).mean() / 2)


def to_markdown(found: Sequence[tuple[RunSet, list[AlarmRow]]], detection: float) -> str:
    """The table, in percent with 95 % intervals.

    Args:
        found: Rows of each set of runs.
        detection: Share of failed runs that alarm, 0 to 1.
    """
    head = ["runs", "failed", "sound", "score", "AUROC"]
    head += [f"alarms on sound runs at {detection:.0%} of failures found"]
    head += ["failed run ahead of its own clean run"]
    body = [
        [
            *(
                (runs.name, str(runs.failed.sum()), str((~runs.failed).sum()))
                if not i
                else [""] * 3
            ),
            row.name,
            show_share(row.auroc),
            show_share(row.alarms),
            "" if row.ahead is None else show_share(row.ahead),
        ]
        for runs, rows in found
        for i, row in enumerate(rows)
    ]
    return "\n".join(markdown_lines(head, body)) + "\n"
