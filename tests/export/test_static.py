from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import make_run, write_encoder_folder

from dcl.artifact import ENCODER, TOKENIZER, open_encoder, read_manifest
from dcl.errors import ConfigError, ParityError
from dcl.learning.config import DataConfig, TrainConfig
from dcl.runtime import Encoder, load_bagger
from dcl.splits import split_of
from dcl.trajectory import Example, Fault
from export import static
from export.static import Lesson, StaticEncoder, count_tokens, export_static, learn_table, measure

RNG = np.random.default_rng(3)


def make_lesson(tokens: int = 40, width: int = 12, windows: int = 400) -> tuple[Lesson, np.ndarray]:
    """Windows whose vectors are sums of one row a token, and these rows."""
    rows = RNG.standard_normal((tokens, width)).astype(np.float32)
    drawn = [RNG.integers(0, tokens - 1, RNG.integers(2, 9)) for _ in range(windows)]
    counts = count_tokens([ids.astype(np.int32) for ids in drawn], tokens)
    vectors = counts @ rows
    return Lesson(counts, vectors / np.linalg.norm(vectors, axis=1, keepdims=True)), rows


def test_shares_of_tokens() -> None:
    counts = count_tokens([np.array(ids, dtype=np.int32) for ids in ([1, 2, 2, 3], [0])], 5)
    assert counts.toarray().tolist() == [[0, 0.25, 0.5, 0.25, 0], [1, 0, 0, 0, 0]]
    assert counts.dtype == np.float32


def test_a_teacher_that_is_a_table_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "RIDGE", 1e-3)
    lesson, rows = make_lesson()
    alone = RNG.standard_normal(rows.shape).astype(np.float32)  # of no help
    student = StaticEncoder(learn_table(lesson, alone, rows.shape[1]))
    assert measure(student, lesson) > 0.98
    narrow = StaticEncoder(learn_table(lesson, alone, 3))
    assert narrow.table.shape == (40, 3)
    assert measure(narrow, lesson) < measure(student, lesson)


def test_a_token_that_no_turn_holds_stays_what_the_teacher_makes_of_it() -> None:
    lesson, rows = make_lesson()
    alone = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    table = learn_table(lesson, alone, rows.shape[1])
    _, axes = np.linalg.eigh(lesson.vectors.T @ lesson.vectors)
    expected = alone[-1] @ axes[:, ::-1]
    cosine = table[-1] @ expected / np.linalg.norm(table[-1]) / np.linalg.norm(expected)
    assert cosine == pytest.approx(1.0, abs=1e-5)


def test_padding_changes_nothing() -> None:
    student = StaticEncoder(RNG.standard_normal((9, 4)).astype(np.float32))
    ids, mask = torch.tensor([[3, 4, 5]]), torch.ones(1, 3, dtype=torch.int64)
    padded = torch.tensor([[3, 4, 5, 8, 8]]), torch.tensor([[1, 1, 1, 0, 0]])
    assert torch.allclose(student(ids, mask), student(*padded))


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """Logs of many questions, and a teacher's folder as that of a training run."""
    log = tmp_path / "log.jsonl"
    words = ("the", "sum", "is", "wrong", "skip", "again", "7", "x")
    lines = []
    for number in range(60):
        said = [(agent, " ".join(RNG.choice(words, 6))) for agent in "abc"]
        run = make_run(*said, task=f"question {number}", id=f"r{number}")
        lines.append(json.dumps(Example(run, (Fault("a", None),)).to_dict()))
    log.write_text("\n".join(lines))
    write_encoder_folder(tmp_path / "teacher")
    return TrainConfig(
        data=DataConfig(train=(str(log),), valid_share=0.3, cache=str(tmp_path / "cache")),
        out="unused",
        threads=1,
    )


def test_a_student_is_an_encoder(config: TrainConfig, tmp_path: Path) -> None:
    out = export_static(config, tmp_path / "student", teacher=tmp_path / "teacher", width=4)
    source = open_encoder(out)
    assert source.window == open_encoder(tmp_path / "teacher").window
    encoder = Encoder(out / ENCODER)
    assert encoder.width == 4
    bagger = load_bagger(source)
    texts = ["the sum is wrong", "", "again " * 40, "é"]
    vectors = encoder([bagger.window(ids) for ids in bagger.tokenize(texts)])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(4), abs=1e-5)
    manifest = read_manifest(out)
    assert manifest["windows"]["train"] > manifest["windows"]["valid"] > 0
    assert manifest["parity"]["static"]["likeness_valid"] > 0.5
    assert (out / TOKENIZER).read_bytes() == (tmp_path / "teacher" / TOKENIZER).read_bytes()


def test_validation_questions_teach_nothing(config: TrainConfig, tmp_path: Path) -> None:
    source = open_encoder(tmp_path / "teacher")
    encoder = Encoder(source.path / ENCODER)
    train, valid = static.read_lessons(config, source, encoder)
    shares = [split_of(f"question {number}", valid=0.3, test=0.08) for number in range(60)]
    assert len(valid.vectors) < len(train.vectors)
    assert len(valid.vectors) <= 4 * shares.count("valid")


@pytest.mark.parametrize("width", [0, 9])
def test_a_width_out_of_range_is_refused(config: TrainConfig, tmp_path: Path, width: int) -> None:
    with pytest.raises(ConfigError, match="--width: expected 1 to 8"):
        export_static(config, tmp_path / "student", teacher=tmp_path / "teacher", width=width)


def test_a_split_without_an_example_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    nobody = replace(config, data=replace(config.data, valid_share=0.0))
    with pytest.raises(ConfigError, match="data: expected examples for valid, found none"):
        export_static(nobody, tmp_path / "student", teacher=tmp_path / "teacher", width=4)


def test_a_graph_that_differs_from_torch_is_not_written(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static, "TOLERANCE", -1.0)
    with pytest.raises(ParityError, match="nothing was written"):
        export_static(config, tmp_path / "student", teacher=tmp_path / "teacher", width=4)
    assert not (tmp_path / "student").exists()
