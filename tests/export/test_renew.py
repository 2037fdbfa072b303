from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcl.artifact import (
    ENCODER,
    TOKENIZER,
    hash_file,
    open_artifact,
    read_manifest,
    write_artifact,
)
from dcl.engines import EngineName
from dcl.errors import ArtifactError, ConfigError, ParityError
from dcl.runtime import load
from dcl.taxonomy import MODES
from dcl.trajectory import Example, Fault, Trajectory, Turn
from export import renew as module
from export.convert import find_split
from export.encoder import FP32
from export.renew import renew


def example(number: int) -> Example:
    words = ("plan", "check the sum", "the sum is wrong", "error", "done")
    rng = np.random.default_rng(number)
    turns = tuple(Turn(f"agent {i % 2}", words[rng.integers(len(words))]) for i in range(4))
    run = Trajectory(id=f"run-{number}", task=f"check {number}", turns=turns)
    return Example(trajectory=run, faults=(Fault(agent="agent 0", mode=MODES[0]),))


EXAMPLES = [example(number) for number in range(20)]


@pytest.fixture
def calls(
    write_encoder: Callable[[Path, int], Path], trained: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Sequence[str] | None]:
    """Replaces the export by graphs of random words; keeps the turns that fixed the scales."""
    seen: list[Sequence[str] | None] = []

    def export(source: str, out: Path, *, turns: Sequence[str] | None, **window: Any) -> Path:
        def write_files(folder: Path) -> None:
            for name in (ENCODER, FP32):
                (folder / name).write_bytes((trained / ENCODER).read_bytes())
            tokenizer = (trained / TOKENIZER).read_bytes()
            (folder / TOKENIZER).write_bytes(tokenizer + b" " * (source == "other"))

        seen.append(turns)
        engines: list[EngineName] = ["onnxruntime"]
        notes = {"engines": engines, "parity": {"fp32": {"source": source}}}
        artifact = open_artifact(trained)
        return write_artifact(out, write_files, window=artifact.window, notes=notes)

    monkeypatch.setattr(module, "export_encoder", export)
    return seen


@pytest.mark.parametrize("static", [False, True])
def test_only_the_encoder_changes(
    exported: Path,
    training_shares: dict[str, Any],
    tmp_path: Path,
    calls: list[Sequence[str] | None],
    static: bool,
) -> None:
    out = renew(exported, tmp_path / "out", source="tiny", examples=EXAMPLES, static=static)
    before, after = read_manifest(exported), read_manifest(out)
    assert after["engines"] == ["onnxruntime"]
    assert after["seed"] == 1
    assert after["parity"]["head"] == {"max_difference": 0.0}
    assert after["parity"]["encoder_fp32"] == {"source": "tiny"}
    found = after["parity"]["int8"]
    assert found["pair_f1_fp32"] == found["pair_f1_int8"] >= found["pair_f1_before"] - 0.5
    assert after["scores"] == {"valid": {"pair": found["pair_f1_int8"]}}
    assert after["trained_scores"] == before["scores"] == {"test": {"agent": 50.0}}
    again = renew(out, tmp_path / "again", source="tiny", examples=EXAMPLES, static=static)
    assert read_manifest(again)["trained_scores"] == before["scores"]
    assert {name for name in after["files"] if after["files"][name] != before["files"][name]} <= {
        ENCODER
    }
    assert json.loads((out / "config.json").read_text())["training"] == training_shares
    assert load(out, threads=1)(EXAMPLES[0].trajectory).is_finite


def test_scales_come_from_training_questions(
    exported: Path,
    training_shares: dict[str, Any],
    tmp_path: Path,
    calls: list[Sequence[str] | None],
) -> None:
    renew(exported, tmp_path / "out", source="tiny", examples=EXAMPLES, static=True)
    learned = [e.trajectory for e in EXAMPLES if find_split(e, training_shares) == "train"]
    assert sorted(calls[0] or ()) == sorted(turn.content for run in learned for turn in run.turns)


def test_a_score_that_falls_is_refused(
    exported: Path,
    tmp_path: Path,
    calls: list[Sequence[str] | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fall(*args: Any, **keys: Any) -> Any:
        raise ParityError("too low")

    monkeypatch.setattr(module, "check_pairs", fall)
    with pytest.raises(ParityError, match="too low"):
        renew(exported, tmp_path / "out", source="tiny", examples=EXAMPLES)
    assert not (tmp_path / "out").exists()


def test_another_tokenizer_is_refused(
    exported: Path, tmp_path: Path, calls: list[Sequence[str] | None]
) -> None:
    with pytest.raises(ConfigError, match=r"--source other: expected the tokenizer of .*; name"):
        renew(exported, tmp_path / "out", source="other", examples=EXAMPLES)
    assert not (tmp_path / "out").exists()


def test_places_and_models_that_do_not_fit_are_refused(exported: Path, trained: Path) -> None:
    digest = hash_file(exported / ENCODER)
    with pytest.raises(ConfigError, match="expected a new or empty folder"):
        renew(exported, exported, source="tiny", examples=EXAMPLES)
    with pytest.raises(ArtifactError, match="expected an exported model"):
        renew(trained, exported.parent / "out", source="tiny", examples=EXAMPLES)
    assert hash_file(exported / ENCODER) == digest
