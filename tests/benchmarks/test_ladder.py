from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import make_run, write_model
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.ladder import FLOORS, LadderConfig, Rung, climb, draw, to_markdown
from benchmarks.metrics import Interval
from dcl.errors import ArtifactError
from dcl.taxonomy import MODES
from dcl.trajectory import Example, Fault


def write_runs(file: Path, count: int, *, step: int | None = None) -> Path:
    """`b` says `wrong` and failed in mode 5."""
    lines = []
    for i in range(count):
        run = make_run(
            ("a", f"the sum is {i}"), ("b", f"skip {i} wrong"), task=f"question {i}", id=f"r{i}"
        )
        lines.append(json.dumps(Example(run, (Fault("b", MODES[5], step),)).to_dict()))
    file.write_text("\n".join(lines))
    return file


@pytest.fixture
def config(tmp_path: Path) -> LadderConfig:
    faults = write_runs(tmp_path / "faults.jsonl", 60)
    return LadderConfig(
        models={"base": write_model(tmp_path / "base"), "mild": write_model(tmp_path / "mild")},
        faults=(faults,),
        steps=(write_runs(tmp_path / "steps.jsonl", 12, step=1),),
        train=(faults,),
        turns=3,
        tokens=4,
        repeats=2,
        resamples=20,
    )


def test_every_model_is_a_rung_and_the_floors_come_last(config: LadderConfig) -> None:
    rungs = list(climb(config))
    assert [rung.name for rung in rungs] == ["base", "mild", *FLOORS]
    base, mild = rungs[:2]
    assert base.scores["pair_micro_f1"].value == 1.0
    assert base.scores["agent_accuracy"].value == 1.0
    assert base.scores == mild.scores
    assert base.turn_ms is not None
    assert base.turn_ms > 0
    assert base.bulk_ms is not None
    assert base.bulk_ms > 0
    assert base.megabytes == pytest.approx(
        sum(f.stat().st_size for f in config.models["base"].iterdir() if f.suffix != ".json") / 1e6,
        abs=0.01,
    )
    for floor in rungs[2:]:
        assert floor.turn_ms is floor.megabytes is None
        assert set(base.scores) == set(floor.scores)


def test_the_table_and_the_plot(tmp_path: Path) -> None:
    shares = {"pair_micro_f1": Interval(0.5, 0.4, 0.6), "step_accuracy": Interval(0.2, 0.1, 0.3)}
    rungs = [
        Rung("base", 40.0, 33.0, 35.0, 38.4, shares),
        Rung("tfidf", None, None, None, None, shares),
    ]
    table = to_markdown(rungs).splitlines()
    assert table[0].startswith("|  | new turn ms | encoder ms | ms a turn in bulk | MB | pair")
    assert table[2].startswith("| base | 40.00 | 33.00 | 35.00 | 38.4 | 50.0 [40.0, 60.0] |")
    assert table[3].startswith("| tfidf |  |  |  |  | 50.0 [40.0, 60.0] |")
    draw(rungs, tmp_path / "ladder.svg")
    assert "base" in (tmp_path / "ladder.svg").read_text()
    assert {file.name for file in tmp_path.iterdir()} == {"ladder.svg"}


def test_a_model_that_is_not_there_is_named(config: LadderConfig, tmp_path: Path) -> None:
    log = str(config.faults[0])
    arguments = ["--faults", log, "--steps", log, "--train", log, "--model", f"small={tmp_path}/no"]
    told = CliRunner().invoke(app, ["ladder", *arguments])
    assert told.exit_code == ArtifactError.exit_code
    assert "expected base, lite or a model folder, found none" in told.output
