from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from tiny import make_run, write_model

from benchmarks.contenders import CONTENDERS, Embedder, Setup
from benchmarks.growth import GrowthConfig, grow
from benchmarks.growth import to_markdown as growth_to_markdown
from benchmarks.latency import (
    BASELINE,
    LatencyConfig,
    LatencyReport,
    Pool,
    Round,
    Row,
    compare,
    count_operations,
    to_markdown,
)
from benchmarks.peak import Peak
from benchmarks.worker import Worker, WorkerError, serve
from dcl.artifact import open_artifact
from dcl.errors import ConfigError
from dcl.runtime import load, load_bagger


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "log.jsonl"
    file.write_text(make_run(*[("a", f"the sum is {i} wrong again") for i in range(12)]).to_json())
    return file


def test_operations_of_an_encoder(tmp_path: Path) -> None:
    shape = {"hidden_size": 3, "intermediate_size": 5, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    weights = attention = 0
    for length in (4, 7):
        for _ in range(2):  # layers
            weights += 2 * length * (4 * 3 * 3 + 2 * 3 * 5)
            attention += 2 * 2 * length * length * 3  # scores, and their use
    assert count_operations(tmp_path, [4, 7]) == (weights, attention)


def test_ratios_and_shares_are_taken_round_by_round() -> None:
    base = Row(BASELINE, "1", 0.1, tokens_per_s=[100.0, 50.0, 80.0])
    ours = Row("dcl", "1", 0.1, tokens_per_s=[150.0, 100.0, 40.0])
    words = Row("tf-idf, linear", "1", 0.1)
    rounds = [Round(Peak(1.0, 2.0), tokens=10, work=1e8)] * 3
    compare([base, ours, words], rounds, cores=1)
    assert (base.ratio, ours.ratio, words.ratio) == (1.0, 1.5, None)
    assert ours.share == pytest.approx(100 * 1e8 / 10 / 2e9)  # the median round
    assert words.share is None


def test_without_the_baseline_there_is_no_ratio() -> None:
    row = Row("dcl", "1", 0.1, tokens_per_s=[100.0])
    compare([row], [Round(Peak(1.0, 2.0), tokens=10, work=1e8)], cores=1)
    assert row.ratio is None


def test_the_tables_say_who_was_left_out() -> None:
    row = Row("dcl", "1.0", 0.5, {32: [0.001, 0.003]}, {10: [0.02]}, 90.0, [1000.0], 1.25, 0.5)
    report = LatencyReport({"cores": 2}, [Round(Peak(90.0, 180.0), 10, 1e8)], [row], {"x": "gone"})
    text = to_markdown(report)
    assert "90 GFLOP/s fp32, 180 GOP/s int8" in text
    assert "| dcl 1.0 | vectors | 20.0 | 1000 | 1.25 | 50% | 0.50 | 90 |" in text
    assert "| dcl | 2.0 / 2.9 / 3.0 |" in text
    assert text.endswith("Not measured: x (gone).\n")


def test_no_turn_is_read_twice(model: Path, log: Path) -> None:
    pool = Pool(load_bagger(open_artifact(model)), [log], tokens=18)
    texts = [*pool.of_size(6, 20), *pool.any(20), *pool.any(20)]
    assert len({*texts}) == 60
    with pytest.raises(ConfigError, match="expected five turns of about 500 tokens, found 0"):
        pool.of_size(500, 1)


def test_unknown_contenders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contender: expected dcl"):
        LatencyConfig(data=(), work=tmp_path, contenders=("nobody",))


def test_a_contender_answers_line_by_line() -> None:
    read: list[str] = []
    requests = StringIO('{"turns": ["a", "b"]}\n{"run": ["c", "d"]}\n{}\n')
    answers = StringIO()
    serve(Embedder(read.extend), requests, answers)
    rows = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert [len(row["wall"]) for row in rows] == [2, 1, 0]
    assert all(row["mb"] > 0 and len(row["cpu"]) == len(row["wall"]) for row in rows)
    assert read == ["a", "b", "c", "d"]


def test_a_contender_is_a_process_of_its_own(model: Path, tmp_path: Path) -> None:
    setup = Setup(threads=1, tokens=18, model=str(model), source="", work=str(tmp_path))
    worker = Worker("dcl, findings", setup)
    try:
        assert worker.error == ""
        seconds, mb = worker.ask({"turns": ["the sum is wrong", "again"]})
        assert len(seconds) == 2
        assert mb > 0
    finally:
        worker.close()


def test_a_contender_that_fails_or_dies_says_so(model: Path, tmp_path: Path) -> None:
    setup = Setup(threads=1, tokens=18, model=str(model), source="", work=str(tmp_path))
    worker = Worker("dcl, findings", setup)
    try:
        with pytest.raises(WorkerError, match=r"AttributeError|TypeError"):
            worker.ask({"turns": [None]})
        assert len(worker.ask({"turns": ["again"]})[0]) == 1
        worker._process.kill()
        worker._process.wait()
        for _ in range(2):
            with pytest.raises(WorkerError, match="its process died"):
                worker.ask({"turns": ["again"]})
    finally:
        worker.close()


def test_a_contender_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    setup = Setup(threads=1, tokens=18, model=str(tmp_path), source="", work=str(tmp_path))
    worker = Worker("dcl, findings", setup)
    worker.close()
    assert worker.error.startswith("ArtifactError: ")


def test_every_contender_says_how_it_multiplies() -> None:
    assert CONTENDERS[BASELINE].arithmetic == "int8"
    assert {kind.arithmetic for kind in CONTENDERS.values()} <= {"fp32", "int8", ""}
    assert {kind.gives for kind in CONTENDERS.values()} == {"vectors", "verdict"}


def test_growth_is_measured(model: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.turncost.measure.__kwdefaults__", {"tokens": 6, "repeats": 1})
    config = GrowthConfig(
        data=(log,), lengths=(2, 4), open_runs=(1, 3), threads=(1, 2), runs=2, repeats=1
    )
    growth = grow(config, lambda threads: load(model, threads=threads))
    assert [cost.turns for cost in growth.turns] == [2, 4]
    assert list(growth.open_runs) == [1, 3]
    assert list(growth.threads) == [1, 2]
    assert growth_to_markdown(growth).count("| threads |") == 1
