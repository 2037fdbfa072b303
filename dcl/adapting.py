"""The model and labelled runs of one system in, a model of that system out, with a report.

The report compares the adapted model with the original on questions that the fit did not see. A
part that is not better there is taken out again; if nothing is left, the original is kept.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

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
from dcl.attribution import Attributor, Calibration
from dcl.calibration import recalibrate
from dcl.crossfit import Level, choose_parts, group_questions, observe
from dcl.errors import ConfigError
from dcl.fitting import PARTS, THRESHOLDS, Fit
from dcl.nearest import build_index, save_index
from dcl.runtime import OnnxScorer, load
from dcl.trajectory import Example, Trajectory

FEWEST = 10
"""Labelled runs below which nothing is fitted."""


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
    if known and not any(example.faults for example in known):
        raise ConfigError(
            f"expected runs with a labelled fault, got {len(known)} without; give successful runs "
            "under --clean"
        )
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
