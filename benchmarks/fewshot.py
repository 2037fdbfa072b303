"""What a few labelled runs of one system buy: `dcl fit` on draws of them, judged on all others.

A fit here is what the command does: it is cross-validated within the runs that it is given, and
what is not better there is taken out again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.metrics import (
    RANKED,
    Floats,
    Interval,
    Prediction,
    bootstrap,
    mean_of,
    rank_hits,
    state_truth,
)
from benchmarks.predictors import RULES, AttributorPredictor
from benchmarks.runs import digest_of, load_examples
from dcl.adapter import COLUMNS
from dcl.artifact import MANIFEST, hash_file, open_artifact
from dcl.attribution import Attribution, Calibration, Logits, decode
from dcl.crossfit import attribute_adapted, choose_parts, group_questions, observe
from dcl.errors import ConfigError
from dcl.files import whole
from dcl.fitting import FOLDS, Observation, split_folds
from dcl.runtime import OnnxScorer, load
from dcl.targets import make_targets
from dcl.trajectory import Example

SHOWN = ("agent_accuracy", "step_accuracy", "joint", "top3", "mrr")
"""Columns of the table, names out of `benchmarks.metrics.RANKED`."""
FLOORS = ("most-talking", "first-speaker", "last-speaker", "first-code", "step-1")
"""Rules that stand beside the fit; they learn nothing."""


@dataclass(frozen=True, kw_only=True)
class FewshotConfig:
    """What to fit on, and how often.

    Args:
        data: Files and folders of labelled runs of one system.
        model: Folder of the model; None means the one that ships.
        sizes: Runs that are drawn to fit on, one row of the table each.
        repeats: Draws of each size, and of the folds.
        cache: Folder that keeps what the network says of the runs; None keeps nothing.
        seed: Of the draws.
    """

    data: tuple[Path, ...]
    model: Path | None = None
    sizes: tuple[int, ...] = (15, 30, 60, 100)
    repeats: int = 10
    cache: Path | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FewshotRow:
    """Scores of one way to predict.

    Args:
        name: Rule, size of the draw, or folds.
        draws: Draws that the scores are means of.
        scores: By name out of `SHOWN`; intervals over runs.
        spread: Standard deviation of agent and step accuracy over draws.
    """

    name: str
    draws: int
    scores: dict[str, Interval]
    spread: tuple[float, float]


def compare_sizes(config: FewshotConfig) -> tuple[int, list[FewshotRow]]:
    """Number of runs, and rows for floors, the model as it is, each size, and 5 folds.

    Raises:
        ConfigError: If a size leaves nothing to judge on.
    """
    examples = [e for e in load_examples(config.data) if state_truth(e.faults or ()).agent]
    if not examples or max(config.sizes) >= len(examples):
        raise ConfigError(
            f"--size: expected less than the {len(examples)} labelled runs, got {config.sizes}"
        )
    base = read_base(config.model)
    runs = observe_all(examples, config)
    rows = [
        _row(name, [rank_hits(*_pairs(examples, [RULES[name](e.trajectory) for e in examples]))])
        for name in FLOORS
    ]
    own = [decode(e.trajectory, run.logits, base) for e, run in zip(examples, runs, strict=True)]
    rows.append(_row("dcl, nothing fitted", [judge(examples, own)]))
    for size in config.sizes:
        draws = [
            judge_draw(examples, runs, base, size, seed=config.seed + i)
            for i in range(config.repeats)
        ]
        rows.append(_row(f"dcl fit, {size} runs", draws))
    folds = [
        judge(examples, cross_adapt(examples, runs, base, seed=config.seed + i))
        for i in range(config.repeats)
    ]
    rows.append(_row("dcl fit, 5 folds", folds))
    return len(examples), rows


def judge(examples: Sequence[Example], found: Sequence[Attribution]) -> Floats:
    """Hits of each run, `(n, len(RANKED))`; one fault is known to exist."""
    waiting = iter(found)
    predict = AttributorPredictor(lambda run: next(waiting), single=True)
    guesses = [predict(example.trajectory) for example in examples]
    return rank_hits(*_pairs(examples, guesses))


def judge_draw(
    examples: Sequence[Example],
    runs: Sequence[Observation],
    base: Calibration,
    size: int,
    *,
    seed: int,
) -> Floats:
    """Hits on all runs whose question is not drawn; rows of NaN for the others.

    Whole questions are drawn until `size` runs are there.
    """
    order = np.random.default_rng(seed).permutation(sorted({run.group for run in runs}))
    rank = {int(group): place for place, group in enumerate(order)}
    drawn = sorted(range(len(runs)), key=lambda i: rank[runs[i].group])[:size]
    groups = {runs[i].group for i in drawn}
    rest = [i for i in range(len(runs)) if runs[i].group not in groups]
    hits = np.full((len(runs), len(RANKED)), np.nan)
    hits[rest] = judge(
        [examples[i] for i in rest], adapt_to(drawn, rest, examples, runs, base, seed=seed)
    )
    return hits


def cross_adapt(
    examples: Sequence[Example], runs: Sequence[Observation], base: Calibration, *, seed: int
) -> list[Attribution]:
    """Attributions of all runs, each after `dcl fit` on the folds that hold no run of its question.

    Args:
        examples: Labelled runs.
        runs: What the fit sees of them.
        base: Calibration of the model as it is.
        seed: Of the folds.
    """
    place = split_folds([run.group for run in runs], FOLDS, seed + 1)
    found: dict[int, Attribution] = {}
    for fold in np.unique(place):
        seen, rest = (np.flatnonzero(side).tolist() for side in (place != fold, place == fold))
        adapted = adapt_to(seen, rest, examples, runs, base, seed=seed)
        found |= zip(rest, adapted, strict=True)
    return [found[i] for i in range(len(runs))]


def adapt_to(
    seen: Sequence[int],
    rest: Sequence[int],
    examples: Sequence[Example],
    runs: Sequence[Observation],
    base: Calibration,
    *,
    seed: int,
) -> list[Attribution]:
    """Attributions of some runs after `dcl fit` on others.

    Args:
        seen: Positions of the runs to fit on.
        rest: Positions of those to attribute.
        examples: Labelled runs.
        runs: What the fit sees of them.
        base: Calibration of the model as it is.
        seed: Of the folds within the fit.
    """
    fitted, _, _ = choose_parts(
        [examples[i] for i in seen], [runs[i] for i in seen], base, seed=seed
    )
    return [attribute_adapted(examples[i].trajectory, runs[i], fitted) for i in rest]


def read_base(model: Path | None) -> Calibration:
    """Calibration of the reading that `observe_all` sees: that of natural failures if there is one.

    Args:
        model: Folder of the model; None means the one that ships.
    """
    artifact = open_artifact(model)
    return artifact.natural or artifact.calibration


def observe_all(examples: Sequence[Example], config: FewshotConfig) -> list[Observation]:
    """What the network says of each run: one pass, kept for the next time."""
    artifact = open_artifact(config.model)
    file = None
    if config.cache is not None:
        kept = (*COLUMNS, *(entry.name for entry in fields(Logits)))
        columns = hashlib.sha256(" ".join(kept).encode()).hexdigest()[:8]
        digest = digest_of(config.data)[:16] + hash_file(artifact.path / MANIFEST)[:16]
        file = config.cache / f"observed-{digest}-{columns}.npz"
    groups = group_questions(examples)
    if file is not None and file.is_file():
        return _read(file, examples, groups)
    attributor = load(config.model)
    scorer = attributor.scorer
    if not isinstance(scorer, OnnxScorer):
        raise ConfigError("--model: expected an exported model")
    runs = [
        observe(attributor, scorer, example, group)
        for example, group in zip(examples, groups, strict=True)
    ]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        _write(runs, file)
    return runs


def to_markdown(count: int, rows: Sequence[FewshotRow]) -> str:
    """The table in percent, with 95 % intervals over runs and deviations over draws."""
    head = ["", "draws", "agent", "step", "both", "step top-3", "step MRR", "sd agent / step"]
    lines = [f"{count} runs. Each score is on runs of questions that the fit did not see.", ""]
    lines += [f"| {' | '.join(head)} |", "| --- " + "| ---: " * (len(head) - 1) + "|"]
    for row in rows:
        cells = ["{:.1f} [{:.1f}, {:.1f}]".format(*(100 * x for x in row.scores[k])) for k in SHOWN]
        spread = "" if row.draws == 1 else "{:.1f} / {:.1f}".format(*(100 * x for x in row.spread))
        lines.append(f"| {' | '.join([row.name, str(row.draws), *cells, spread])} |")
    return "\n".join(lines) + "\n"


def _pairs(
    examples: Sequence[Example], guesses: Sequence[Prediction]
) -> tuple[list[Prediction], Sequence[Prediction]]:
    """Truths and guesses, as the metrics take them."""
    return [state_truth(example.faults or ()) for example in examples], guesses


def _row(name: str, draws: Sequence[Floats]) -> FewshotRow:
    """Means over draws: of each run first, then over runs, which the intervals resample."""
    stacked = np.stack(draws)  # (draws, n, len(RANKED))
    means = np.nanmean(stacked, axis=1)  # (draws, len(RANKED))
    judged = ~np.isnan(stacked[..., 0])
    per_run = np.where(np.isnan(stacked), 0.0, stacked).sum(axis=0)
    often = judged.sum(axis=0)
    per_run = per_run[often > 0] / often[often > 0, None]
    place = {key: RANKED.index(key) for key in SHOWN}
    return FewshotRow(
        name=name,
        draws=len(draws),
        scores={k: bootstrap(mean_of(per_run[:, i]), len(per_run)) for k, i in place.items()},
        spread=(
            float(means[:, place["agent_accuracy"]].std()),
            float(means[:, place["step_accuracy"]].std()),
        ),
    )


def _write(runs: Sequence[Observation], file: Path) -> None:
    """All arrays of all runs, under numbered names."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for i, run in enumerate(runs):
        arrays |= {f"{i}.{f.name}": getattr(run.logits, f.name) for f in fields(Logits)}
        arrays |= {f"{i}.turns": run.turns, f"{i}.agent_index": run.agent_index}
    with whole(file) as part, part.open("wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]


def _read(file: Path, examples: Sequence[Example], groups: Sequence[int]) -> list[Observation]:
    """What `_write` wrote, with labels and questions of today."""
    with np.load(file, allow_pickle=False) as kept:
        return [
            Observation(
                group=group,
                logits=Logits(**{f.name: kept[f"{i}.{f.name}"][()] for f in fields(Logits)}),
                turns=kept[f"{i}.turns"],
                agent_index=kept[f"{i}.agent_index"],
                acting=np.array(
                    [
                        name not in example.trajectory.bystanders
                        for name in example.trajectory.agents
                    ]
                ),
                targets=make_targets(example, sigma=0.0),
            )
            for i, (example, group) in enumerate(zip(examples, groups, strict=True))
        ]
