from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import write_encoder_folder

from dcl import artifact as artifact_module
from dcl.artifact import (
    CARD,
    CONFIG,
    FORMAT,
    MANIFEST,
    Window,
    hash_file,
    load_lexicon,
    open_artifact,
    open_encoder,
    read_manifest,
    save_lexicon,
    verify,
    write_artifact,
)
from dcl.attribution import Calibration
from dcl.errors import ArtifactError, ConfigError
from dcl.lexical import Lexicon
from dcl.shipped import find_model
from dcl.taxonomy import MODES

FILES = {"encoder.onnx", "tokenizer.json", "head.onnx", "lexicon.npz", CONFIG}
CALIBRATION = Calibration(pair_threshold=0.25, step_temperature=2.0)


def write_model(folder: Path, *, content: str = "weights") -> Path:
    """A model of tiny files."""

    def write_files(inside: Path) -> None:
        (inside / "encoder.onnx").write_text(content)
        for name in ("tokenizer.json", "head.onnx", "lexicon.npz"):
            (inside / name).write_bytes(b"")

    return write_artifact(
        folder,
        write_files,
        window=Window(head=3, tail=1),
        calibration=CALIBRATION,
        model={"width": 32},
        training={"seed": 1},
        notes={"scores": {"pair": 0.5}},
    )


def edit(file: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file of a model and vouch for it in the manifest."""
    row = json.loads(file.read_text())
    change(row)
    file.write_text(json.dumps(row))
    manifest = file.parent / MANIFEST
    if file.name != MANIFEST:
        listed = json.loads(manifest.read_text())
        listed["files"][file.name] = {"sha256": hash_file(file), "bytes": file.stat().st_size}
        manifest.write_text(json.dumps(listed))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "deep" / "model")


def write_with_stray(folder: Path) -> Path:
    """A model with a file beside it that the manifest does not know."""
    write_model(folder)
    (folder / "notes.txt").write_text("years of work")
    return folder


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_what_is_written_opens(model: Path) -> None:
    got = open_artifact(model)
    assert got.path == model
    assert got.window == Window(head=3, tail=1)
    assert got.calibration == CALIBRATION
    assert got.model == {"width": 32}
    assert got.manifest["scores"] == {"pair": 0.5}
    assert got.manifest["format"] == FORMAT
    assert set(got.manifest["files"]) == FILES
    assert json.loads((model / CONFIG).read_text())["training"] == {"seed": 1}
    assert json.loads((model / CONFIG).read_text())["labels"] == [mode.value for mode in MODES]
    assert names(model.parent) == {"model"}
    assert not any(verify(model, got.manifest).values())


def test_an_encoder_alone_is_no_model(tmp_path: Path) -> None:
    folder = write_encoder_folder(tmp_path / "encoder")
    assert open_encoder(folder).window == Window(head=12, tail=4)
    with pytest.raises(ArtifactError, match=r"expected an entry for lexicon\.npz; fetch"):
        open_artifact(folder)


def test_a_model_is_also_an_encoder(model: Path) -> None:
    assert open_encoder(model).path == model


def test_the_models_that_ship_stand_beside_the_package() -> None:
    pretrained = Path(artifact_module.__file__).parent / "pretrained"
    assert find_model("base") == pretrained
    assert find_model("lite") == pretrained / "lite"
    files = [file for file in pretrained.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 45e6
    assert find_model("elsewhere/lite") == Path("elsewhere/lite")


def test_a_damaged_byte_is_found(model: Path) -> None:
    (model / "encoder.onnx").write_text("weighta")
    with pytest.raises(
        ArtifactError, match=r"encoder.onnx: expected sha256 .{12}…, got .{12}…; fetch"
    ):
        open_artifact(model)


def test_a_wrong_size_is_found(model: Path) -> None:
    (model / "encoder.onnx").write_text("weight")
    with pytest.raises(
        ArtifactError, match=r"encoder.onnx: expected 7 bytes, got 6; fetch or export"
    ):
        open_artifact(model)


def test_a_missing_file_is_found(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: listed in the manifest but missing"):
        open_encoder(model)


def test_verify_names_all_that_is_wrong(model: Path) -> None:
    (model / "encoder.onnx").write_text("weighta")
    (model / "tokenizer.json").unlink()
    problems = verify(model, read_manifest(model))
    assert {name for name, problem in problems.items() if problem} == {
        "encoder.onnx",
        "tokenizer.json",
    }


def test_the_card_may_be_edited(model: Path) -> None:
    (model / CARD).write_text("for people")
    open_artifact(model)


def test_another_version_is_refused(model: Path) -> None:
    edit(model / MANIFEST, lambda row: row.update(format=99))
    with pytest.raises(ArtifactError, match=r"expected format 1, got 99; this model needs anoth"):
        open_artifact(model)


@pytest.mark.parametrize(
    "files",
    [
        None,
        [],
        {"encoder.onnx": 3},
        {"encoder.onnx": {"bytes": 7}},
        {"encoder.onnx": {"sha256": "", "bytes": ""}},
        *({name: {"sha256": "", "bytes": 0}} for name in ("x" * 300, "a\0", "../a", "/a", "", ".")),
    ],
)
def test_a_manifest_that_vouches_for_nothing_is_refused(model: Path, files: object) -> None:
    edit(model / MANIFEST, lambda row: row.update(files=files))
    with pytest.raises(ArtifactError, match="files: expected sha256 and bytes of each file by"):
        open_artifact(model)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_manifest_must_vouch_for_what_is_run(model: Path, name: str) -> None:
    edit(model / MANIFEST, lambda row: row["files"].pop(name))
    with pytest.raises(ArtifactError, match=f"expected an entry for {name}"):
        open_artifact(model)


def test_weights_may_take_the_place_of_a_head(model: Path) -> None:
    (model / "head.onnx").rename(model / "model.safetensors")
    edit(
        model / MANIFEST,
        lambda row: row["files"].update({"model.safetensors": row["files"].pop("head.onnx")}),
    )
    open_artifact(model)


@pytest.mark.parametrize("key", ["head", "tail"])
@pytest.mark.parametrize("value", [-1, 1.0, True, "3", None, float("nan")])
def test_a_window_that_cuts_nothing_is_refused(model: Path, key: str, value: object) -> None:
    edit(model / CONFIG, lambda row: row["window"].update({key: value}))
    with pytest.raises(ArtifactError, match=rf"config\.json: window\.{key}: expected a whole num"):
        open_artifact(model)
    with pytest.raises(ArtifactError, match=rf"config\.json: window\.{key}: expected a whole num"):
        open_encoder(model)


def test_a_window_needs_a_head_but_no_tail() -> None:
    assert Window(head=1, tail=0).tail == 0
    with pytest.raises(
        ConfigError, match=r"window\.head: expected a whole number from 1 on, got 0"
    ):
        Window(head=0, tail=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *itertools.product(["pair_temperature"], [0, -1.0, None, "1", True, math.nan, math.inf]),
        *itertools.product(["agent_threshold"], [-0.1, 1.1, None, "0.5", False, math.nan, "x"]),
    ],
)
def test_a_calibration_that_gives_no_probabilities_is_refused(
    model: Path, key: str, value: object
) -> None:
    edit(model / CONFIG, lambda row: row["calibration"].update({key: value}))
    with pytest.raises(ArtifactError, match=rf"config\.json: .*{key}"):
        open_artifact(model)


@pytest.mark.parametrize("key", ["window", "calibration", "model"])
@pytest.mark.parametrize("value", [None, [], 3, "text"])
def test_a_part_that_is_no_object_is_refused(model: Path, key: str, value: object) -> None:
    edit(model / CONFIG, lambda row: row.update({key: value}))
    with pytest.raises(ArtifactError, match=r"config\.json: missing or unknown key"):
        open_artifact(model)


def test_other_features_are_refused(model: Path) -> None:
    edit(model / CONFIG, lambda row: row["features"].reverse())
    with pytest.raises(ArtifactError, match=r"features: expected .* names in the order"):
        open_artifact(model)


def test_other_labels_are_refused(model: Path) -> None:
    edit(model / CONFIG, lambda row: row["labels"].reverse())
    with pytest.raises(ArtifactError, match="labels: expected 14 names in the order"):
        open_artifact(model)


@pytest.mark.parametrize("key", ["labels", "window", "calibration", "model"])
def test_a_missing_key_is_named(model: Path, key: str) -> None:
    edit(model / CONFIG, lambda row: row.pop(key))
    with pytest.raises(ArtifactError, match=f"missing or unknown key: '{key}'"):
        open_artifact(model)


def test_an_unknown_key_is_named(model: Path) -> None:
    edit(model / CONFIG, lambda row: row["calibration"].update(surprise=1))
    with pytest.raises(ArtifactError, match=r"missing or unknown key: .*'surprise'"):
        open_artifact(model)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", "3"])
def test_a_manifest_that_is_no_object_is_refused(model: Path, text: str) -> None:
    (model / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(ArtifactError, match=r"manifest\.json: expected JSON|expected a JSON obj"):
        open_artifact(model)


def test_no_folder_and_no_manifest_are_told_apart(tmp_path: Path) -> None:
    expected = "expected base, lite or a model folder, found none"
    with pytest.raises(ArtifactError, match=expected):
        open_artifact(tmp_path / "nothing")
    with pytest.raises(ArtifactError, match=r"manifest\.json: expected a file of the model"):
        open_artifact(tmp_path)


def test_a_new_model_replaces_the_old_one_whole(model: Path) -> None:
    write_model(model, content="newer")
    assert (model / "encoder.onnx").read_text() == "newer"
    assert names(model) == {*FILES, MANIFEST}
    assert names(model.parent) == {"model"}
    open_artifact(model)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_model_and_nothing_else(
    model: Path, error: type[BaseException]
) -> None:
    def write_files(inside: Path) -> None:
        (inside / "half").write_text("x")
        raise error

    with pytest.raises(error):
        write_artifact(model, write_files, window=Window(1, 1), notes={})
    assert names(model.parent) == {"model"}
    assert open_artifact(model).calibration == CALIBRATION


def test_an_empty_folder_is_a_place_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    open_artifact(write_model(tmp_path / "model"))


def test_what_is_no_model_is_not_replaced(tmp_path: Path) -> None:
    thesis = tmp_path / "home" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    for place in (thesis, thesis.parent, write_with_stray(tmp_path / "other")):
        with pytest.raises(ConfigError, match="expected a new place, an empty folder or an older"):
            write_model(place)
    assert thesis.read_text() == "years of work"
    assert names(tmp_path) == {"home", "other"}


def test_a_place_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="expected a place to write the model"):
        write_model(tmp_path / "file" / "model")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="expected a place to write the model"):
        write_model(tmp_path / "model")


def test_a_written_model_is_readable_by_all(model: Path) -> None:
    assert model.stat().st_mode & 0o755 == 0o755


@pytest.fixture
def lexicon() -> Lexicon:
    rng = np.random.default_rng(0)
    return Lexicon(
        idf=rng.random(5).astype(np.float32),
        table=rng.standard_normal((5, len(MODES))).astype(np.float16).astype(np.float32),
        contrast=0.3,
    )


def test_a_lexicon_reads_back_equal(tmp_path: Path, lexicon: Lexicon) -> None:
    file = tmp_path / "lexicon.npz"
    save_lexicon(lexicon, file)
    got = load_lexicon(file)
    assert np.array_equal(got.idf, lexicon.idf)
    assert np.array_equal(got.table, lexicon.table)
    assert got.contrast == lexicon.contrast
    assert got.table.dtype == np.float32
    assert names(tmp_path) == {"lexicon.npz"}


def test_a_damaged_lexicon_is_refused(tmp_path: Path, lexicon: Lexicon) -> None:
    file = tmp_path / "lexicon.npz"
    save_lexicon(lexicon, file)
    whole = file.read_bytes()
    for cut in (0, 1, 30, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(ArtifactError, match=r"lexicon\.npz: expected the tables"):
            load_lexicon(file)


def test_any_byte_of_a_lexicon_may_be_damaged(tmp_path: Path, lexicon: Lexicon) -> None:
    file = tmp_path / "lexicon.npz"
    save_lexicon(lexicon, file)
    whole = file.read_bytes()
    refused = 0
    for place in range(0, len(whole), 7):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:  # bytes such as the time of writing do not matter
            load_lexicon(file)
        except ArtifactError:
            refused += 1
    assert refused > 20


def test_a_lexicon_that_is_missing_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="expected the tables of the wide half"):
        load_lexicon(tmp_path / "none.npz")
    file = tmp_path / "lexicon.npz"
    save_lexicon(Lexicon(np.ones(5, np.float32), np.ones((4, len(MODES)), np.float32)), file)
    with pytest.raises(ArtifactError, match=r"got \(5,\) and \(4, 14\); export the model again"):
        load_lexicon(file)


def test_a_lexicon_from_before_there_was_a_contrast_has_none(tmp_path: Path) -> None:
    file, floats = tmp_path / "lexicon.npz", np.ones((2, len(MODES)), np.float16)
    np.savez(file, idf=floats[:, 0], table=floats)
    assert load_lexicon(file).contrast == 0


@pytest.mark.parametrize("contrast", [-0.1, 1.1, np.nan])
def test_a_contrast_that_is_no_share_is_refused(tmp_path: Path, contrast: float) -> None:
    file, floats = tmp_path / "lexicon.npz", np.ones((2, len(MODES)), np.float16)
    np.savez(file, idf=floats[:, 0], table=floats, contrast=contrast)
    with pytest.raises(ArtifactError, match="expected a contrast from 0 to 1, got"):
        load_lexicon(file)


@pytest.mark.parametrize("kind", [np.int64, np.complex64, "U3", bool])
def test_a_lexicon_of_no_floats_is_refused(tmp_path: Path, kind: Any) -> None:
    file, floats = tmp_path / "lexicon.npz", np.ones((2, len(MODES)), np.float16)
    for idf, table in ((floats[:, 0].astype(kind), floats), (floats[:, 0], floats.astype(kind))):
        np.savez(file, idf=idf, table=table)
        with pytest.raises(ArtifactError, match="expected tables of floats, got"):
            load_lexicon(file)


def test_a_lexicon_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "lexicon.npz"
    np.savez(file, idf=np.array([{}], dtype=object), table=np.ones((1, len(MODES)), np.float16))
    with pytest.raises(ArtifactError, match="expected the tables of the wide half"):
        load_lexicon(file)
