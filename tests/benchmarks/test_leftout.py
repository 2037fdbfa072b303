"""Networks on a framework that they never saw, beside floors: finished cells in, a table out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_evaluate import make_record
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.leftout import compare
from dcl.errors import ConfigError

WITHOUT = ("dylan", "macnet")


def write_cell(sweep: Path, data: Path, name: str, seed: int, hits: list[int]) -> None:
    """A cell as `dcl sweep` writes it, as far as it is read: one false alarm in each run."""
    table = [[hit, 1, 0] for hit in hits]
    micro = 200 * sum(hits) / (2 * sum(hits) + len(hits))
    record: dict[str, Any] = {
        "seed": seed,
        "config": {"data": {"train": [str(data)], "left_out": [name]}},
        "scores": {"left_out": {"pair": {"micro_f1": micro}}},
        "counts": {"left_out": {level: table for level in ("pair", "agent", "mode")}},
    }
    (sweep / "cells").mkdir(parents=True, exist_ok=True)
    (sweep / "cells" / f"left_out={name}-seed{seed}-0.json").write_text(json.dumps(record))


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["left-out", *map(str, arguments), "--resamples", "20"])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """60 runs, every third of them of macnet."""
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(make_record(i)) + "\n" for i in range(60)))
    return file


@pytest.fixture
def sweep(tmp_path: Path, data: Path) -> Path:
    folder = tmp_path / "sweep"
    for name, number in zip(WITHOUT, (40, 20), strict=True):
        write_cell(folder, data, name, 1, [1] * number)
        write_cell(folder, data, name, 2, [0] * number)
    return folder


def test_floors_and_networks_are_scored_on_the_framework_left_out(
    sweep: Path, tmp_path: Path
) -> None:
    dylan, macnet, both = compare(sweep, tmp_path / "cache", resamples=20)
    assert [one.name for one in (dylan, macnet, both)] == [*WITHOUT, "all"]
    assert (dylan.runs, macnet.runs, both.runs) == (40, 20, 60)
    assert (dylan.seeds, both.seeds) == (2, 2)
    assert set(dylan.scores) == {"dcl", "name-prior", "tfidf", "everyone", "every-mode"}
    # Half a hit and a false alarm a run over both seeds, 2 / 3 in the first and 0 in the other.
    assert dylan.scores["dcl"]["pair"].value == pytest.approx(0.5)
    assert dylan.spread == pytest.approx((2 / 3) / 2**0.5)
    # Worker1 fails in every run and says how, so words tell it in the other framework too.
    for entry in (dylan, macnet):
        words = entry.scores["tfidf"]["pair"].value
        assert words > 0.5
        assert entry.gap["pair"].value == pytest.approx(0.5 - words)
    floors = list((tmp_path / "cache").iterdir())
    assert len(floors) == 2


def test_the_table_has_every_predictor_of_every_framework(sweep: Path) -> None:
    result = run(sweep)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("| tfidf |") == 3
    assert "| dylan | 40 | dcl, seeds: 2 | 50.0 [" in result.stdout


def test_other_runs_than_those_of_the_cells_are_refused(sweep: Path, data: Path) -> None:
    with data.open("a") as stream:
        stream.write(json.dumps(make_record(61)) + "\n")
    with pytest.raises(ConfigError, match="that its cells were scored on"):
        compare(sweep, resamples=5)


def test_a_folder_without_such_cells_is_told(tmp_path: Path) -> None:
    assert "expected finished cells" in run(tmp_path).stderr
