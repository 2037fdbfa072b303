"""What a model is on disk: a folder whose manifest vouches for every file that is run.

    config.json       label order, encoder window, network shape, calibration, training config
    tokenizer.json    word pieces, read by `tokenizers`
    encoder.onnx      token ids -> one unit vector a turn
    head.onnx         turn vectors and channels -> logits       (after export)
    model.safetensors the same network for torch                (before export)
    lexicon.npz       idf and mode weights of the wide half
    natural.json      the reading of failures that nobody injected  (after export)
    adapter.json      what `dcl fit` learned of one system      (after a fit)
    index.npz         vectors of labelled turns, to show like ones  (after a fit)
    manifest.json     sha256 and size of each file, versions, data digests, scores
    MODEL_CARD.md     for people; the one file that the manifest leaves out

Nothing in it is executable and nothing is a pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from dcl.attribution import Calibration
from dcl.errors import ArtifactError, ConfigError
from dcl.features import FEATURES
from dcl.files import whole
from dcl.lexical import Lexicon
from dcl.shipped import SHIPPED, find_model
from dcl.taxonomy import MODES

FORMAT = 1
"""Version of this layout; a reader refuses any other."""

CONFIG, MANIFEST, TOKENIZER, LEXICON = (
    "config.json",
    "manifest.json",
    "tokenizer.json",
    "lexicon.npz",
)
ENCODER, HEAD, WEIGHTS, CARD = "encoder.onnx", "head.onnx", "model.safetensors", "MODEL_CARD.md"
NATURAL, ADAPTER, INDEX = "natural.json", "adapter.json", "index.npz"

_ENCODER_FILES = (CONFIG, TOKENIZER, ENCODER)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class Window:
    """What the encoder reads of a turn.

    Args:
        head: Tokens from its start; > 0.
        tail: Tokens from its end; >= 0.

    Raises:
        ConfigError: If one is no whole number, or too small.
    """

    head: int
    tail: int

    def __post_init__(self) -> None:
        """Refuse what no turn can be cut by."""
        for name, least in (("head", 1), ("tail", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(
                    f"window.{name}: expected a whole number from {least} on, got {value!r}"
                )


@dataclass(frozen=True, slots=True)
class Artifact:
    """A verified model folder.

    Args:
        path: The folder.
        window: Encoder window.
        calibration: Temperatures and thresholds of the network itself.
        natural: Those of the reading of natural failures; None where there is none.
        model: Shape of the network, as `dcl.learning.model.ModelConfig` takes it.
        manifest: Content of `manifest.json`.
    """

    path: Path
    window: Window
    calibration: Calibration
    natural: Calibration | None
    model: Mapping[str, Any]
    manifest: Mapping[str, Any]

    @property
    def notes(self) -> dict[str, Any]:
        """What its maker noted in the manifest, as `write_artifact` takes it."""
        return {k: v for k, v in self.manifest.items() if k not in ("format", "files")}


@dataclass(frozen=True, slots=True)
class EncoderSource:
    """A folder with a turn encoder and its tokenizer: a whole model, or an encoder alone.

    Args:
        path: The folder.
        window: Encoder window.
    """

    path: Path
    window: Window


def open_artifact(path: Path | None = None) -> Artifact:
    """Open a model folder after checking every file against the manifest.

    Args:
        path: The folder; None means `base`, which ships.

    Raises:
        ArtifactError: If a file is missing, damaged, or the layout is of another version.
    """
    folder = find_model("base") if path is None else path
    manifest, config = _open(folder, whole=True)
    with _config_errors(folder):
        order = {"labels": [mode.value for mode in MODES], "features": list(FEATURES)}
        for key, expected in order.items():
            if config[key] != expected:
                raise ArtifactError(
                    f"{folder / CONFIG}: {key}: expected {len(expected)} names in the order of "
                    f"this version, got others; this model needs another version of dcl"
                )
        return Artifact(
            path=folder,
            window=Window(**config["window"]),
            calibration=read_calibration(config["calibration"]),
            natural=read_calibration(config["natural"]) if config.get("natural") else None,
            model=dict(**config["model"]),
            manifest=manifest,
        )


def open_encoder(path: Path | None = None) -> EncoderSource:
    """Open the encoder of a model folder, or a folder that holds an encoder alone.

    Args:
        path: The folder; None means `base`, which ships.

    Raises:
        ArtifactError: If a file is missing or damaged.
    """
    folder = find_model("base") if path is None else path
    _, config = _open(folder, whole=False)
    with _config_errors(folder):
        return EncoderSource(path=folder, window=Window(**config["window"]))


def read_calibration(row: Mapping[str, Any]) -> Calibration:
    """A calibration as JSON holds it; keys that an older model lacks keep their defaults."""
    cuts = {key: tuple(row[key]) for key in ("ranked_cuts", "span_cuts") if key in row}
    return Calibration(**{**row, **cuts})


def save_lexicon(lexicon: Lexicon, file: Path) -> None:
    """Write the wide half as plain arrays, weights in half precision, in one step."""
    with whole(file) as part, part.open("wb") as stream:
        table = lexicon.table.astype(np.float16)
        np.savez_compressed(stream, idf=lexicon.idf, table=table, contrast=lexicon.contrast)


def load_lexicon(file: Path) -> Lexicon:
    """The wide half.

    Raises:
        ArtifactError: If it is damaged or its tables do not have the expected shape and type.
    """
    try:
        # numpy leaves a file that it opened itself open where the archive is damaged.
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as tables:
            idf, table = tables["idf"], tables["table"]
            contrast = float(tables["contrast"]) if "contrast" in tables else 0.0
    except Exception as error:  # a damaged archive raises almost anything
        raise ArtifactError(f"{file}: expected the tables of the wide half: {error}") from None
    if idf.ndim != 1 or table.shape != (len(idf), len(MODES)):
        raise ArtifactError(
            f"{file}: expected idf (V,) and table (V, {len(MODES)}), "
            f"got {idf.shape} and {table.shape}; export the model again"
        )
    if idf.dtype.kind != "f" or table.dtype.kind != "f":
        raise ArtifactError(
            f"{file}: expected tables of floats, got {idf.dtype} and {table.dtype}; "
            "export the model again"
        )
    if not 0 <= contrast <= 1:
        raise ArtifactError(
            f"{file}: expected a contrast from 0 to 1, got {contrast}; export the model again"
        )
    # Single precision in memory: reading rows of half precision takes ten times as long.
    return Lexicon(idf.astype(np.float32), table.astype(np.float32), contrast)


def read_manifest(folder: Path) -> Mapping[str, Any]:
    """The manifest of a model folder.

    Raises:
        ArtifactError: If there is none, or it is of another version.
    """
    if not os.path.isdir(folder):  # unlike `Path.is_dir`, also False for a name that is too long
        known = ", ".join(SHIPPED)
        raise ArtifactError(
            f"{folder}: expected {known} or a model folder, found none; check --model"
        )
    manifest = _read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise ArtifactError(
            f"{folder / MANIFEST}: expected format {FORMAT}, got {manifest.get('format')!r}; "
            "this model needs another version of dcl"
        )
    listed = manifest.get("files")
    if not isinstance(listed, dict) or not all(_is_entry(*entry) for entry in listed.items()):
        raise ArtifactError(
            f"{folder / MANIFEST}: files: expected sha256 and bytes of each file by its name; "
            "fetch or export the model again"
        )
    return manifest


def check_listed(folder: Path, manifest: Mapping[str, Any], *, whole: bool = True) -> None:
    """Check that a manifest vouches for every file that is run.

    Args:
        folder: The model folder, for the message.
        manifest: Its manifest.
        whole: False if an encoder alone will do.

    Raises:
        ArtifactError: If the manifest leaves one out.
    """
    listed = manifest["files"].keys()
    left_out = [name for name in (*_ENCODER_FILES, *[LEXICON] * whole) if name not in listed]
    if whole and not listed & {HEAD, WEIGHTS}:
        left_out.append(f"{HEAD} or {WEIGHTS}")
    if left_out:
        raise ArtifactError(
            f"{folder / MANIFEST}: expected an entry for {left_out[0]}; "
            "fetch or export the model again"
        )


def verify(folder: Path, manifest: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with each file of a model folder; empty text means nothing.

    Args:
        folder: The model folder.
        manifest: Its manifest.

    Returns:
        File name to problem.
    """
    problems = {}
    for name, expected in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            problems[name] = f"{name}: listed in the manifest but missing"
        elif file.stat().st_size != expected["bytes"]:
            size = file.stat().st_size
            problems[name] = f"{name}: expected {expected['bytes']} bytes, got {size}"
        elif (digest := hash_file(file)) != expected["sha256"]:
            problems[name] = (
                f"{name}: expected sha256 {expected['sha256'][:12]}…, got {digest[:12]}…"
            )
        else:
            problems[name] = ""
    return problems


def write_artifact(
    folder: Path,
    write_files: Callable[[Path], None],
    *,
    window: Window,
    calibration: Calibration | None = None,
    natural: Calibration | None = None,
    model: Mapping[str, Any] = MappingProxyType({}),
    training: Mapping[str, Any] = MappingProxyType({}),
    notes: Mapping[str, Any],
) -> Path:
    """Write a model folder in one step: it appears whole or not at all.

    Args:
        folder: Where; an older model there is replaced after the new one is complete.
        write_files: Called with an empty folder; writes the model's own files into it.
        window: Encoder window.
        calibration: Temperatures and thresholds; None for an encoder alone.
        natural: Those of the reading of natural failures; None where there is none.
        model: Shape of the network.
        training: Resolved training configuration.
        notes: Extra keys of the manifest, such as versions, data digests and scores.

    Returns:
        The folder.

    Raises:
        ConfigError: If the place cannot be written.
    """
    with new_folder(folder, may_replace=is_free) as temporary:
        write_files(temporary)
        config = {
            "labels": [mode.value for mode in MODES],
            "features": list(FEATURES),
            "window": asdict(window),
            "calibration": None if calibration is None else asdict(calibration),
            "natural": None if natural is None else asdict(natural),
            "model": dict(model),
            "training": dict(training),
        }
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        listed = {
            file.name: {"sha256": hash_file(file), "bytes": file.stat().st_size}
            for file in sorted(temporary.iterdir())
            if file.name != CARD
        }
        manifest = {"format": FORMAT, **notes, "files": listed}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return folder


@contextmanager
def new_folder(folder: Path, *, may_replace: Callable[[Path], bool]) -> Iterator[Path]:
    """A folder to write to that takes its place when all is written, or not at all.

    Args:
        folder: Its place; an older one there is replaced after the new one is complete.
        may_replace: Whether what is there is nothing, or an older one.

    Returns:
        A temporary folder beside it.

    Raises:
        ConfigError: If the place cannot be written.
    """
    try:
        if not may_replace(folder):
            raise ConfigError(
                f"{folder}: expected a new place, an empty folder or an older model to replace, "
                "found something else; choose another place"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(f"{folder}: expected a place to write the model: {error}") from None
    try:
        yield temporary
        temporary.chmod(0o755)
        if folder.exists():
            old = temporary.with_name(temporary.name + "-old")
            os.replace(folder, old)
            try:
                os.replace(temporary, folder)
            except OSError:
                os.replace(old, folder)
                raise
            shutil.rmtree(old)
        else:
            os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_free(folder: Path) -> bool:
    """Whether a model may be put here: nothing, an empty folder, or an older model and no more."""
    if not folder.exists():
        return True
    if not folder.is_dir():
        return False
    there = {file.name for file in folder.iterdir()}
    try:
        return not there or there <= {*read_manifest(folder)["files"], MANIFEST, CARD}
    except ArtifactError:
        return False


def hash_file(file: Path) -> str:
    """sha256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _config_errors(folder: Path) -> Iterator[None]:
    """Blame the configuration of a model for what it does not hold, or holds wrong."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"{folder / CONFIG}: missing or unknown key: {error}") from None
    except ConfigError as error:
        raise ArtifactError(
            f"{folder / CONFIG}: {error}; fetch or export the model again"
        ) from None


def _open(folder: Path, *, whole: bool) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Manifest and configuration of a folder whose files are all as the manifest says."""
    manifest = read_manifest(folder)
    check_listed(folder, manifest, whole=whole)
    broken = [problem for problem in verify(folder, manifest).values() if problem]
    if broken:
        raise ArtifactError(f"{folder}: {broken[0]}; fetch or export the model again")
    return manifest, _read_json(folder / CONFIG)


def _is_entry(name: str, value: object) -> bool:
    """Whether this is a plain name, and what a manifest says about one file."""
    return (
        _NAME.fullmatch(name) is not None
        and isinstance(value, dict)
        and isinstance(value.get("sha256"), str)
        and isinstance(value.get("bytes"), int)
    )


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file of a model folder."""
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise ArtifactError(f"{file}: expected a file of the model: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{file}: expected JSON, got damaged text: {error}") from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{file}: expected a JSON object")
    return value
