"""The same model with the same encoder, exported anew: with fresh fusions, or in static int8."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from dcl.artifact import (
    CARD,
    CONFIG,
    ENCODER,
    HEAD,
    TOKENIZER,
    hash_file,
    read_manifest,
    write_artifact,
)
from dcl.errors import ConfigError
from dcl.runtime import Encoder
from dcl.trajectory import Example
from export.convert import Graphs, check_pairs, choose_examples, find_split, open_exported
from export.encoder import FP32, MAKERS, export_encoder
from export.qdq import draw_turns


def renew(
    model: Path,
    out: Path,
    *,
    source: str,
    layers: Sequence[int] = (),
    examples: Iterable[Example],
    static: bool = False,
    points: float = 0.5,
) -> Path:
    """Give an exported model its encoder anew; all is written and checked, or nothing.

    Scales of static int8 come from turns of training questions; on validation questions the new
    encoder is held against the one that the model has, before and after quantising. The manifest
    then has the pairs that the new encoder finds as `scores`; what training measured, with the
    encoder that it had, stays as `trained_scores`.

    Args:
        model: Folder of an exported model.
        out: Folder to write; an older model there is replaced.
        source: Where its encoder comes from, as `export.encoder.export_encoder` takes it.
        layers: Positions of its layers, likewise.
        examples: Labelled runs.
        static: Write static int8, which runs on every engine that is installed.
        points: Most points of pair micro-F1 that the new encoder may cost, on every engine.

    Returns:
        `out`, which `dcl.runtime.load` opens.

    Raises:
        ArtifactError: If `model` is missing, damaged, or not exported.
        ConfigError: If the source is of another kind or no encoder of this model, or runs of one
            kind of question are missing.
        ParityError: If a gate fails; nothing is written.
    """
    artifact = open_exported(model, out)
    training = json.loads((model / CONFIG).read_bytes())["training"]
    examples = list(examples)
    chosen = choose_examples(examples, training)
    learned = (e.trajectory for e in examples if find_split(e, training) == "train")
    with tempfile.TemporaryDirectory() as scratch:
        encoder = export_encoder(
            source,
            Path(scratch) / "encoder",
            layers=layers,
            head=artifact.window.head,
            tail=artifact.window.tail,
            turns=draw_turns(learned) if static else None,
            keep_fp32=True,
        )
        _check_kin(model, encoder, source)
        manifest = read_manifest(encoder)
        graphs = {
            "before": Graphs(model / ENCODER, model / HEAD),
            "fp32": Graphs(encoder / FP32, model / HEAD),
            "int8": Graphs(encoder / ENCODER, model / HEAD),
        }
        if "openvino" in manifest["engines"]:
            graphs["openvino"] = Graphs(encoder / ENCODER, model / HEAD, "openvino")
        scores = check_pairs(artifact, graphs, chosen, points=points)

        def write_files(folder: Path) -> None:
            for name in (*artifact.manifest["files"], CARD):
                if name != CONFIG and (model / name).is_file():
                    shutil.copy((encoder if name == ENCODER else model) / name, folder / name)

        parity = {
            **artifact.notes.get("parity", {}),
            **{f"encoder_{name}": found for name, found in manifest["parity"].items()},
            "int8": scores,
        }
        return write_artifact(
            out,
            write_files,
            window=artifact.window,
            calibration=artifact.calibration,
            natural=artifact.natural,
            model=artifact.model,
            training=training,
            notes={
                **artifact.notes,
                **{name: manifest[name] for name in MAKERS if name in manifest},
                "engines": manifest["engines"],
                "scores": {"valid": {"pair": scores["pair_f1_int8"]}},
                "trained_scores": artifact.notes.get("trained_scores")
                or artifact.notes.get("scores", {}),
                "parity": parity,
            },
        )


def _check_kin(model: Path, encoder: Path, source: str) -> None:
    """Check that an encoder reads the tokens of a model and gives vectors of its width.

    Raises:
        ConfigError: If it does not.
    """
    if hash_file(model / TOKENIZER) != hash_file(encoder / TOKENIZER):
        raise ConfigError(
            f"--source {source}: expected the tokenizer of {model}, got another; name the source "
            "that its encoder was made from"
        )
    expected, got = (Encoder(folder / ENCODER).width for folder in (model, encoder))
    if expected != got:
        raise ConfigError(
            f"--source {source}: expected vectors of {expected} numbers as in {model}, got {got}; "
            "name the source that its encoder was made from"
        )
