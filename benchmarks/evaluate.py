"""Data and predictors in, a report out: every floor beside the model on the same runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.metrics import (
    LEVELS,
    RANKED,
    Counts,
    Floats,
    Interval,
    Prediction,
    Statistic,
    bootstrap,
    count,
    mean_of,
    paired_bootstrap,
    rank_hits,
    state_truth,
)
from benchmarks.predictors import RULES, AttributorPredictor, NamePrior, Predictor
from benchmarks.runs import Names, Part, add_modes, digest_of, load_examples, rename
from dcl import calibration, splits, targets
from dcl.errors import ArtifactError, ConfigError
from dcl.splits import Split, group_of, split_of
from dcl.taxonomy import MODES
from dcl.trajectory import Example

MODEL = "dcl"
KEPT = {"tfidf": "tfidf.py", "length": "probes.py", "position": "probes.py"}
"""Floors whose fit is kept, and the module that fits it."""
LEARNED = ("name-prior", *KEPT)
"""Floors that need training runs."""
PREDICTORS = (MODEL, *LEARNED, *RULES)
"""Names of all predictors, in the order of the table."""
MEAN = "mean_f1"
"""Score that is the mean of the six F1 scores, where these runs allow all six."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What to evaluate, and on what.

    Args:
        data: Files and folders in any known format.
        predictors: Names out of `PREDICTORS`, or `all`.
        model: Folder of the model; None means the one that ships.
        split: Which questions to evaluate on.
        train: Files and folders to learn the floors from: their training questions for the fit,
            their validation questions for thresholds.
        names: What is done to the names of agents, one table each.
        single_fault: Whether one fault is known to exist; None means that it is where all runs
            come from Who&When.
        injected: Whether the model reads logs as those of faults that were injected by prompt; None
            means that it does where all runs come from AEGIS, and is refused where only some do.
        modes: File with the modes of Who&When runs by file number; None means that they have none.
        cache: Folder that keeps fitted floors, by the digest of their training data; None fits
            them every time.
        resamples: Resamples of the bootstrap, > 0.
        seed: Of names and resampling.
    """

    data: tuple[Path, ...]
    predictors: tuple[str, ...] = ("all",)
    model: Path | None = None
    split: Part = "all"
    train: tuple[Path, ...] = ()
    names: tuple[Names, ...] = ("kept",)
    single_fault: bool | None = None
    injected: bool | None = None
    modes: Path | None = None
    cache: Path | None = None
    resamples: int = 1000
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """All scores of one predictor on one set of runs.

    Args:
        predictor: Its name.
        scores: Interval by score, such as `pair_micro_f1` or `step_accuracy`.
        frameworks: The six F1 scores by framework, without intervals, and `n`.
        modes: Precision, recall and F1 of each mode and the runs that have it.
        gaps: Interval of the model's score minus this one's, where the model was run.
    """

    predictor: str
    scores: dict[str, Interval]
    frameworks: dict[str, dict[str, float]]
    modes: dict[str, dict[str, float]]
    gaps: dict[str, Interval] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """Tables of one evaluation.

    Args:
        data: Files, digest, number of runs, split: what the scores are of.
        single_fault: Whether predictors named their one best guess.
        injected: Whether the model read logs as those of injected faults.
        tables: Rows by what was done to names.
        skipped: Why each predictor that was asked for is not in the tables.
    """

    data: dict[str, Any]
    single_fault: bool
    injected: bool
    tables: dict[Names, list[Row]]
    skipped: dict[str, str]


def evaluate(config: EvaluateConfig) -> Report:
    """Run predictors over labelled runs and score them.

    Raises:
        ConfigError: If an option is wrong or no labelled run is left.
        TraceError: If a file cannot be read.
        ArtifactError: If the named model cannot be loaded.
    """
    wanted = choose_predictors(config)
    examples = load_examples(config.data, config.split)
    if config.modes is not None:
        examples = add_modes(examples, config.modes)
    if not examples:
        raise ConfigError(f"--data: expected labelled runs in split {config.split}, found none")
    single = config.single_fault
    if single is None:
        single = all(example.origin == "whowhen" for example in examples)
    injected = are_injected(examples) if config.injected is None else config.injected
    predictors, skipped = build_predictors(wanted, config, single=single, injected=injected)
    return Report(
        data={
            "paths": [str(path) for path in config.data],
            "sha256": digest_of(config.data),
            "n": len(examples),
            "split": config.split,
            "train": [str(path) for path in config.train],
        },
        single_fault=single,
        injected=injected,
        tables={
            names: score_all(
                predictors,
                rename(examples, names, config.seed),
                config,
                recurring=names != "replaced",
            )
            for names in config.names
        },
        skipped=skipped,
    )


def are_injected(examples: Sequence[Example]) -> bool:
    """Whether the faults of these runs were injected by prompt, as in AEGIS.

    Raises:
        ConfigError: If those of some were and those of others were not.
    """
    kinds = {example.origin == "aegis" for example in examples}
    if len(kinds) > 1:
        raise ConfigError(
            "--data: expected runs of AEGIS alone, or none of them, as injected and natural faults "
            "are read in different ways; got both: say how with --injected or --natural, or "
            "evaluate them apart"
        )
    return kinds == {True}


def choose_predictors(config: EvaluateConfig) -> tuple[str, ...]:
    """The predictors that are asked for, in the order of the table.

    Raises:
        ConfigError: If a name is not known.
    """
    if "all" in config.predictors:
        return PREDICTORS
    for name in config.predictors:
        if name not in PREDICTORS:
            known = ", ".join(("all", *PREDICTORS))
            raise ConfigError(f"--predictor: expected one of {known}, got {name!r}")
    return tuple(name for name in PREDICTORS if name in config.predictors)


def build_predictors(
    wanted: Sequence[str], config: EvaluateConfig, *, single: bool, injected: bool
) -> tuple[dict[str, Predictor], dict[str, str]]:
    """The predictors, learned floors fitted, and why some of `all` are left out.

    Raises:
        ConfigError: If a floor that learns is named but no training data are.
        ArtifactError: If the model is named, or its folder is, but it cannot be loaded.
    """
    lenient = "all" in config.predictors
    built: dict[str, Predictor] = {}
    skipped: dict[str, str] = {}
    learners = [name for name in wanted if name in LEARNED]
    if learners and not config.train:
        if not lenient:
            raise ConfigError(f"--train: expected runs to learn {learners[0]} from, got none")
        skipped |= {name: "needs --train" for name in learners}
        wanted = [name for name in wanted if name not in LEARNED]
    learned = learn_floors(wanted, config.train, single=single, cache=config.cache)
    for name in wanted:
        if name in learned:
            built[name] = learned[name]
        elif name == MODEL:
            try:
                built[name] = _load_model(config.model, single=single, injected=injected)
            except ArtifactError as error:
                if not lenient or config.model is not None:
                    raise
                skipped[name] = str(error)
        else:
            built[name] = RULES[name]
    return built, skipped


def learn_floors(
    wanted: Iterable[str], train: Sequence[Path], *, single: bool, cache: Path | None = None
) -> dict[str, Predictor]:
    """Fit the floors that learn: on training questions, with thresholds from validation ones.

    Args:
        wanted: Names; those that do not learn are passed over.
        train: Files and folders of labelled runs.
        single: Whether one fault is known to exist.
        cache: Folder that keeps fitted floors; None keeps nothing.
    """
    learners = [name for name in wanted if name in LEARNED]
    kept = {
        name: place_floor(name, cache, train)
        for name in learners
        if cache is not None and name in KEPT
    }
    runs: dict[Split, list[Example]] = {"train": [], "valid": [], "test": []}
    if not all(name in kept and kept[name].is_file() for name in learners):
        for example in load_examples(train):
            runs[split_of(group_of(example))].append(example)
    return {
        name: learn_floor(name, runs["train"], runs["valid"], kept.get(name), single=single)
        if name in KEPT
        else NamePrior(runs["train"], runs["valid"], single=single)
        for name in learners
    }


def place_floor(name: str, cache: Path, train: Sequence[Path], apart: Sequence[str] = ()) -> Path:
    """The file of a fitted floor; another one for other data or other code that fits it.

    Args:
        name: Out of `KEPT`.
        cache: Folder.
        train: Files and folders that it learns from.
        apart: What else decides which runs it learns from.
    """
    own = (Path(__file__).with_name(file) for file in (KEPT[name], "predictors.py"))
    sources = (*own, *(Path(str(module.__file__)) for module in (calibration, splits, targets)))
    recipe = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:8]
    names = [name, recipe, digest_of(train)[:16]]
    if apart:
        names.append(hashlib.sha256("\0".join(apart).encode()).hexdigest()[:16])
    return cache / f"{'-'.join(names)}.npz"


def learn_floor(
    name: str,
    train: Sequence[Example],
    valid: Sequence[Example],
    kept: Path | None,
    *,
    single: bool = False,
) -> Predictor:
    """A floor whose fit is kept; scikit-learn takes a second to load, so only where it is used.

    Args:
        name: Out of `KEPT`.
        train: Labelled examples to fit on.
        valid: Labelled examples, of other questions, to choose on.
        kept: Where it is kept; None keeps nothing.
        single: Whether one fault is known to exist.
    """
    from benchmarks.probes import LengthProbe, PositionProbe, Probe
    from benchmarks.tfidf import TfIdf

    kinds: dict[str, type[TfIdf | Probe]] = {
        "tfidf": TfIdf,
        "length": LengthProbe,
        "position": PositionProbe,
    }
    kind = kinds[name]
    if kept is not None and kept.is_file():
        return kind.load(kept, single=single)
    floor = kind.fit(train, valid, single=single)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        floor.save(kept)
    return floor


def _load_model(folder: Path | None, *, single: bool, injected: bool) -> Predictor:
    """The model behind the interface of the floors; tables with other names share its vectors."""
    from dcl.runtime import load

    attributor = load(folder, injected=injected, remember=1 << 17)
    return AttributorPredictor(attributor, single=single)


def score_all(
    predictors: Mapping[str, Predictor],
    examples: Sequence[Example],
    config: EvaluateConfig,
    *,
    recurring: bool = True,
) -> list[Row]:
    """One row a predictor, all on the same runs.

    Predictors get runs without metadata, which may hold the labels.

    Args:
        predictors: By name.
        examples: Labelled runs.
        config: For resampling.
        recurring: Whether names mean the same in several runs; see `statistics_of`.
    """
    truths = [state_truth(example.faults or ()) for example in examples]
    runs = [replace(example.trajectory, metadata={}) for example in examples]
    guesses = {name: [predict(run) for run in runs] for name, predict in predictors.items()}
    statistics = {
        name: statistics_of(truths, guesses[name], recurring=recurring) for name in predictors
    }
    rows = []
    for name in predictors:
        row = Row(
            name,
            scores={
                score: bootstrap(s, n, resamples=config.resamples, seed=config.seed)
                for score, (s, n) in statistics[name].items()
            },
            frameworks=_by_framework(examples, truths, guesses[name]),
            modes=_by_mode(count(truths, guesses[name], "error")),
        )
        if MODEL in predictors and name != MODEL:
            for score, (statistic, n) in statistics[name].items():
                row.gaps[score] = paired_bootstrap(
                    statistics[MODEL][score][0],
                    statistic,
                    n,
                    resamples=config.resamples,
                    seed=config.seed,
                )
        rows.append(row)
    return rows


def statistics_of(
    truths: Sequence[Prediction], guesses: Sequence[Prediction], *, recurring: bool = True
) -> dict[str, tuple[Statistic, int]]:
    """All scores that these truths allow, each with the number of runs it is over.

    Args:
        truths: What is known.
        guesses: What is declared, in the same order.
        recurring: Whether names mean the same in several runs; if not, means over classes that
            hold a name say nothing and are left out.
    """
    found: dict[str, tuple[Statistic, int]] = {}
    for level in LEVELS:
        if not any(truth.labels(level) for truth in truths):
            continue
        counts = count(truths, guesses, level)
        for part in ("f1", "precision", "recall"):
            found[f"{level}_micro_{part}"] = (_micro(counts, part), len(truths))
        if recurring or level == "error":
            found[f"{level}_macro_f1"] = (_macro(counts), len(truths))
        if level == "error":
            found["error_seen_macro_f1"] = (_macro(counts, fixed=False), len(truths))
    six = [found.get(f"{level}_{kind}_f1") for level in LEVELS for kind in ("micro", "macro")]
    if all(six):
        found[MEAN] = (_mean([one[0] for one in six if one]), len(truths))
    hits = rank_hits(truths, guesses)
    hits = hits[~np.isnan(hits).any(axis=1)]
    if len(hits):
        found |= {name: (mean_of(hits[:, i]), len(hits)) for i, name in enumerate(RANKED)}
    return found


def _micro(counts: Counts, part: str) -> Statistic:
    """Precision, recall or F1 over all decisions as a statistic."""
    return lambda w: getattr(counts.micro(w), part)


def _macro(counts: Counts, *, fixed: bool | None = None) -> Statistic:
    """Mean F1 of the classes as a statistic."""
    return lambda w: counts.macro(w, fixed=fixed).f1


def _mean(statistics: Sequence[Statistic]) -> Statistic:
    """The mean of several scores of the same runs as a statistic."""

    def mean(weights: Floats) -> Floats:
        total: Floats = np.mean([one(weights) for one in statistics], axis=0)
        return total

    return mean


def _by_framework(
    examples: Sequence[Example], truths: Sequence[Prediction], guesses: Sequence[Prediction]
) -> dict[str, dict[str, float]]:
    """The six F1 scores on the runs of each framework."""
    groups: dict[str, list[int]] = {}
    for i, example in enumerate(examples):
        name = example.trajectory.metadata.get("framework") or example.origin or "unknown"
        groups.setdefault(str(name), []).append(i)
    table = {}
    for name, rows in sorted(groups.items()):
        found: dict[str, float] = {"n": len(rows)}
        for level in LEVELS:
            counts = count([truths[i] for i in rows], [guesses[i] for i in rows], level)
            found[f"{level}_micro_f1"] = float(counts.micro().f1[0])
            found[f"{level}_macro_f1"] = float(counts.macro().f1[0])
        table[name] = found
    return table


def _by_mode(counts: Counts) -> dict[str, dict[str, float]]:
    """Scores of each mode at the error level."""
    table = {}
    for c, mode in enumerate(MODES):  # the first classes of this level
        one = Counts(
            (mode,),
            fixed=True,
            hit=counts.hit[:, [c]],
            wrong=counts.wrong[:, [c]],
            missed=counts.missed[:, [c]],
        )
        score = one.micro()
        table[mode.value] = {
            "n": float(one.hit.sum() + one.missed.sum()),
            "precision": float(score.precision[0]),
            "recall": float(score.recall[0]),
            "f1": float(score.f1[0]),
        }
    return table
