"""The same model with its reading of natural failures learned anew, from other or more records."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from dcl.adapter import save_adapter
from dcl.artifact import CARD, CONFIG, ENCODER, HEAD, NATURAL, write_artifact
from dcl.errors import ConfigError
from dcl.natural import learn_natural
from dcl.trajectory import Example
from export.convert import Graphs, open_exported, open_network


def reread(
    model: Path, out: Path, natural: Sequence[Iterable[Example]], *, card: Path | None = None
) -> Path:
    """Learn the reading of natural failures of an exported model anew; the rest stays as it is.

    Args:
        model: Folder of an exported model.
        out: Folder to write; an older model there is replaced.
        natural: Sets of runs of many systems whose decisive step is proved.
        card: Markdown that becomes the model card; None leaves the model without one, as its own
            has figures of the old reading.

    Returns:
        `out`, which `dcl.runtime.load` opens.

    Raises:
        ArtifactError: If `model` is missing, damaged, or not exported.
        ConfigError: If it is adapted by `dcl fit`, `out` is taken, or there are too few systems.
    """
    artifact = open_exported(model, out)
    if "fit" in artifact.manifest:
        raise ConfigError(f"{model}: this model is adapted by `dcl fit`; name the original one")
    fitted, report = learn_natural(
        open_network(artifact, Graphs(model / ENCODER, model / HEAD)), natural
    )

    def write_files(folder: Path) -> None:
        for name in artifact.manifest["files"]:
            if name not in (CONFIG, NATURAL):
                shutil.copy(model / name, folder / name)
        if card is not None:
            shutil.copy(card, folder / CARD)
        save_adapter(fitted.adapter, folder / NATURAL)

    return write_artifact(
        out,
        write_files,
        window=artifact.window,
        calibration=artifact.calibration,
        natural=fitted.calibration,
        model=artifact.model,
        training=json.loads((model / CONFIG).read_bytes())["training"],
        notes={**artifact.notes, "natural": asdict(report)},
    )
