"""The ladder: what each model costs a turn and on disk, beside what it finds.

Costs are those of `benchmarks.turncost`, scores those of `benchmarks.evaluate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.evaluate import MODEL, EvaluateConfig, evaluate
from benchmarks.metrics import Interval
from benchmarks.runs import Part
from benchmarks.tables import markdown_lines, show_share
from benchmarks.turncost import measure, measure_run
from dcl.artifact import read_manifest
from dcl.errors import ConfigError
from dcl.files import whole
from dcl.runtime import load

FAULTS = {"pair_micro_f1": "pair µF1", "error_micro_f1": "error µF1", "agent_micro_f1": "agent µF1"}
"""Scores on runs with several faults, with their titles."""
STEPS = {"agent_accuracy": "agent", "step_accuracy": "step"}
"""Scores on runs with one fault and a labelled step, with their titles."""
FLOORS = ("tfidf", "most-talking", "first-code")
"""Floors that stand beside the models."""


@dataclass(frozen=True, kw_only=True)
class LadderConfig:
    """What to compare, and on what.

    Args:
        models: Folder of each model by its name, dearest first.
        faults: Logs of runs with several faults; test questions are scored.
        steps: Logs of runs with one fault and a labelled step.
        train: Logs that the word floor learns from.
        cache: Folder that keeps the fitted word floor; None keeps nothing.
        turns: Turns of the run whose last one is timed; > 1.
        tokens: Size of these turns, give or take a tenth.
        repeats: New turns that are timed; > 0.
        resamples: Resamples of the bootstrap; > 0.
    """

    models: Mapping[str, Path]
    faults: tuple[Path, ...]
    steps: tuple[Path, ...]
    train: tuple[Path, ...]
    cache: Path | None = None
    turns: int = 20
    tokens: int = 128
    repeats: int = 100
    resamples: int = 1000

    def __post_init__(self) -> None:
        """Refuse a ladder without a rung."""
        if not self.models:
            raise ConfigError("models: expected at least one, got none")


@dataclass(frozen=True, slots=True)
class Rung:
    """One model or floor.

    Args:
        name: Its name.
        turn_ms: Median time of a new turn, text in and findings out; None of a floor.
        encoder_ms: Median time of one encoder call on such a turn; None of a floor.
        bulk_ms: Median time of a whole run that is attributed at once, by its turns; None of a
            floor.
        megabytes: Size of its files; None of a floor.
        scores: Interval by score, a share.
    """

    name: str
    turn_ms: float | None
    encoder_ms: float | None
    bulk_ms: float | None
    megabytes: float | None
    scores: Mapping[str, Interval]


def climb(config: LadderConfig) -> Iterator[Rung]:
    """Measure the models, then the floors.

    Raises:
        ConfigError: If an option is wrong, or a log holds no labelled run.
        TraceError: If a log cannot be read.
        ArtifactError: If a model cannot be loaded.
    """
    found = {
        # Floors are the same beside every model.
        name: _score(config, folder, (MODEL, *FLOORS) if number == 0 else (MODEL,))
        for number, (name, folder) in enumerate(config.models.items())
    }
    size = {"tokens": config.tokens, "repeats": config.repeats}
    for name, folder in config.models.items():  # one after another: what else runs strikes all
        attributor = load(folder, threads=1)
        (cost,) = measure(attributor, config.steps, lengths=[config.turns], **size)
        bulk_ms = measure_run(attributor, config.steps, turns=config.turns, **size)
        yield Rung(name, cost.turn_ms, cost.encoder_ms, bulk_ms, _size(folder), found[name][MODEL])
    floors = found[next(iter(config.models))]
    for name in FLOORS:
        yield Rung(name, None, None, None, None, floors[name])


def _score(
    config: LadderConfig, folder: Path, wanted: tuple[str, ...]
) -> dict[str, dict[str, Interval]]:
    """Scores of predictors, the model of this folder among them, by name."""
    scores: dict[str, dict[str, Interval]] = {name: {} for name in wanted}
    parts: tuple[tuple[tuple[Path, ...], Part, bool, Mapping[str, str]], ...] = (
        (config.faults, "test", False, FAULTS),
        (config.steps, "all", True, STEPS),
    )
    for data, split, single, kept in parts:
        report = evaluate(
            EvaluateConfig(
                data=data,
                predictors=wanted,
                model=folder,
                split=split,
                train=config.train,
                single_fault=single,
                cache=config.cache,
                resamples=config.resamples,
            )
        )
        for row in report.tables["kept"]:
            found = {key: row.scores[key] for key in kept if key in row.scores}
            scores[row.predictor].update(found)
    return scores


def to_markdown(rungs: Sequence[Rung]) -> str:
    """A table for people, scores in percent with 95 % intervals."""
    head = [
        "",
        "new turn ms",
        "encoder ms",
        "ms a turn in bulk",
        "MB",
        *FAULTS.values(),
        *STEPS.values(),
    ]
    body = [
        [
            rung.name,
            *(
                "" if number is None else f"{number:.{digits}f}"
                for number, digits in (
                    (rung.turn_ms, 2),
                    (rung.encoder_ms, 2),
                    (rung.bulk_ms, 2),
                    (rung.megabytes, 1),
                )
            ),
            *(
                show_share(rung.scores[key]) if key in rung.scores else ""
                for key in (*FAULTS, *STEPS)
            ),
        ]
        for rung in rungs
    ]
    return "\n".join(markdown_lines(head, body)) + "\n"


def draw(rungs: Sequence[Rung], file: Path) -> None:
    """Draw scores over the time of a turn; floors are lines, areas are sizes on disk.

    Args:
        rungs: Models and floors.
        file: Where, in one step; its ending names the format.
    """
    figure = Figure(figsize=(10.0, 4.2), layout="constrained")
    panels = {"pair_micro_f1": "tfidf", **dict.fromkeys(STEPS, "first-code")}
    for axes, (score, floor) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        _draw_score(axes, rungs, score, floor)
    with whole(file) as part:
        figure.savefig(part, format=file.suffix.removeprefix("."))


def _draw_score(axes: Axes, rungs: Sequence[Rung], score: str, floor: str) -> None:
    """One score of all models over the time of a turn, and that of one floor."""
    for rung in rungs:
        if score not in rung.scores:
            continue
        value, low, high = (100 * number for number in rung.scores[score])
        if rung.turn_ms is not None and rung.megabytes is not None:
            bar = axes.errorbar(rung.turn_ms, value, [[value - low], [high - value]], capsize=2)
            colour = bar[0].get_color()
            axes.scatter(rung.turn_ms, value, s=12 * rung.megabytes, color=colour, alpha=0.6)
            axes.annotate(rung.name, (rung.turn_ms, value), (8, 6), textcoords="offset points")
        elif rung.name == floor:
            axes.axhline(value, linestyle="--", color="grey")
            axes.annotate(rung.name, (0.02, value), xycoords=("axes fraction", "data"), va="bottom")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("a new turn of 128 tokens, ms on one thread")
    axes.set_ylabel(f"{(FAULTS | STEPS)[score]}, %")


def _size(folder: Path) -> float:
    """Megabytes of the files of a model."""
    sizes: list[int] = [entry["bytes"] for entry in read_manifest(folder)["files"].values()]
    return sum(sizes) / 1e6
