from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.alarms import PROBES, has_failed, load_runs, rate_alarms
from benchmarks.metrics import auroc, false_alarm_rate
from dcl.errors import ConfigError
from dcl.trajectory import Example, Fault, Outcome, Trajectory, Turn


def make_run(name: str, *, outcome: Outcome | None = None, turns: int = 1) -> Trajectory:
    said = tuple(Turn("a", "x" * (i + 1)) for i in range(turns))
    return Trajectory(name, name, said, outcome=outcome)


def write_runs(file: Path, examples: list[Example]) -> Path:
    file.write_text("".join(json.dumps(example.to_dict()) + "\n" for example in examples))
    return file


def test_labels_decide_and_outcomes_fill_in() -> None:
    run = make_run("r", outcome="failure")
    assert has_failed(Example(run, ())) is False
    assert has_failed(Example(run, (Fault("a"),))) is True
    assert has_failed(Example(run)) is True
    assert has_failed(Example(make_run("r", outcome="success"))) is False
    assert has_failed(Example(make_run("r"))) is None


def test_runs_of_both_kinds_are_needed(tmp_path: Path) -> None:
    examples = [Example(make_run(str(i), outcome="success")) for i in range(3)]
    file = write_runs(tmp_path / "a.jsonl", [*examples, Example(make_run("unknown"))])
    with pytest.raises(ConfigError, match="got 0 and 3"):
        load_runs([file], "all")
    both = write_runs(tmp_path / "b.jsonl", [*examples, Example(make_run("f", outcome="failure"))])
    runs, failed = load_runs([both], "all")
    assert [run.id for run in runs] == ["0", "1", "2", "f"]
    assert failed.tolist() == [False, False, False, True]


def test_rates_are_those_of_the_metrics_and_lie_in_their_intervals() -> None:
    rng = np.random.default_rng(3)
    failed = np.arange(40) % 4 > 0
    scores = rng.standard_normal(40) + failed
    (row,) = rate_alarms({"x": scores.tolist()}, failed, detection=0.7, resamples=200)
    assert row.auroc.value == auroc(scores, failed)
    assert row.alarms.value == false_alarm_rate(scores, failed, detection=0.7)
    for rate in (row.auroc, row.alarms):
        assert rate.low <= rate.value <= rate.high
    again = rate_alarms({"x": scores.tolist()}, failed, detection=0.7, resamples=200)
    assert again == [row]


def test_the_command_prints_the_model_beside_the_probes(tmp_path: Path) -> None:
    outcomes: list[Outcome] = ["success", "failure"] * 3
    file = write_runs(
        tmp_path / "runs.jsonl",
        [Example(make_run(str(i), outcome=o, turns=1 + i)) for i, o in enumerate(outcomes)],
    )
    done = CliRunner().invoke(app, ["alarms", "--data", str(file), "--resamples", "20"])
    assert done.exit_code == 0, done.output
    assert "Runs: 3 failed, 3 went well." in done.output
    for name in ("dcl", *PROBES):
        assert f"| {name} |" in done.output
