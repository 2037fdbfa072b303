from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.alarms import (
    PROBES,
    AlarmsConfig,
    RunSet,
    has_failed,
    load_sets,
    rate_alarms,
)
from benchmarks.metrics import auroc, false_alarm_rate
from dcl.artifact import hash_file, open_artifact
from dcl.errors import ConfigError
from dcl.natural import MOST_OF_A_SYSTEM
from dcl.splits import split_of
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


def find_names(config: AlarmsConfig) -> list[str]:
    """Ids of the runs of the only set."""
    (one,) = load_sets(config, open_artifact())
    return [run.id for run in one.runs]


def test_runs_of_both_kinds_are_needed_in_each_file(tmp_path: Path) -> None:
    examples = [Example(make_run(str(i), outcome="success")) for i in range(3)]
    file = write_runs(tmp_path / "a.jsonl", [*examples, Example(make_run("unknown"))])
    with pytest.raises(ConfigError, match=r"a\.jsonl: .* got 0 and 3"):
        load_sets(AlarmsConfig(data=(file,)), open_artifact())
    both = write_runs(tmp_path / "b.jsonl", [*examples, Example(make_run("f", outcome="failure"))])
    (one,) = load_sets(AlarmsConfig(data=(both,)), open_artifact())
    assert one.name == "b.jsonl"
    assert [run.id for run in one.runs] == ["0", "1", "2", "f"]
    assert one.failed.tolist() == [False, False, False, True]


def test_only_a_file_that_the_network_was_trained_on_is_split(tmp_path: Path) -> None:
    outcomes: list[Outcome] = ["success", "failure"]
    file = write_runs(
        tmp_path / "runs.jsonl",
        [Example(make_run(f"{i}", outcome=outcomes[i % 2])) for i in range(300)],
    )
    names = [f"{i}" for i in range(300)]  # the id of a run is its question, too
    unseen = [name for name in names if split_of(name) != "train"]
    assert 0 < len(unseen) < 300
    artifact = open_artifact()
    trained = replace(artifact, manifest={**artifact.manifest, "data": {"x": hash_file(file)}})
    config = AlarmsConfig(data=(file,))
    assert find_names(config) == names
    (held_out,) = load_sets(config, trained)
    assert [run.id for run in held_out.runs] == unseen
    (everything,) = load_sets(replace(config, split="all"), trained)
    assert [run.id for run in everything.runs] == names
    (test,) = load_sets(replace(config, split="test"), artifact)
    assert [run.id for run in test.runs] == [n for n in names if split_of(n) == "test"]


def test_what_the_natural_reading_was_fitted_on_is_left_out(tmp_path: Path) -> None:
    failed = [
        Example(make_run(f"f{i}"), (Fault("a", None, 0),)) for i in range(MOST_OF_A_SYSTEM + 9)
    ]
    sound = [Example(make_run(f"s{i}"), ()) for i in range(5)]
    fitted = write_runs(tmp_path / "fitted.jsonl", failed)
    data = write_runs(tmp_path / "data.jsonl", [*failed, *sound])
    (one,) = load_sets(AlarmsConfig(data=(data,), natural=(fitted,)), open_artifact())
    assert (one.failed.sum(), (~one.failed).sum()) == (9, 5)


def test_failed_runs_are_paired_with_their_own_clean_run(tmp_path: Path) -> None:
    def pair(name: str, clean: str, system: str) -> Example:
        twin = make_run(clean, turns=2)
        failed = replace(make_run(name, turns=3), metadata={"framework": system})
        return Example(failed, (Fault("a", None, 0),), clean=twin)

    benign = Example(make_run("fine"), (), clean=make_run("c3"))
    rows = [pair("f0", "c0", "s"), pair("f1", "c1", "r"), pair("f2", "c0", "s"), benign]
    file = write_runs(tmp_path / "runs.jsonl", rows)
    sets = load_sets(AlarmsConfig(data=(file,)), open_artifact())
    assert [(one.name, [run.id for run in one.runs]) for one in sets] == [
        ("r", ["f1", "c1"]),
        ("s", ["f0", "c0"]),
        ("all systems", ["f0", "c0", "f1", "c1"]),
    ]
    assert all(one.paired for one in sets)
    assert sets[-1].failed.tolist() == [True, False, True, False]


def test_rates_are_those_of_the_metrics_and_lie_in_their_intervals() -> None:
    rng = np.random.default_rng(3)
    failed = np.arange(40) % 4 > 0
    scores = rng.standard_normal(40) + failed
    runs = RunSet("x", tuple(make_run(str(i)) for i in range(40)), failed, paired=False)
    config = AlarmsConfig(data=(), detection=0.7, resamples=200)
    (row,) = rate_alarms({"x": scores.tolist()}, runs, config)
    assert row.auroc.value == auroc(scores, failed)
    assert row.alarms.value == false_alarm_rate(scores, failed, detection=0.7)
    assert row.ahead is None
    for rate in (row.auroc, row.alarms):
        assert rate.low <= rate.value <= rate.high
    assert rate_alarms({"x": scores.tolist()}, runs, config) == [row]


def test_pairs_are_compared_within_themselves() -> None:
    failed = np.arange(8) % 2 == 0
    runs = RunSet("x", tuple(make_run(str(i)) for i in range(8)), failed, paired=True)
    scores = [0.2, 0.1, 0.5, 0.4, 0.9, 0.8, 0.3, 0.3]  # ahead in three pairs, level in one
    (row,) = rate_alarms({"x": scores}, runs, AlarmsConfig(data=(), resamples=100))
    assert row.ahead is not None
    assert row.ahead.value == 3.5 / 4
    assert row.auroc.value == auroc(scores, failed) < 0.7
    assert row.ahead.low >= 0.5  # pairs are drawn whole


def test_the_command_prints_the_model_beside_the_probes(tmp_path: Path) -> None:
    outcomes: list[Outcome] = ["success", "failure"] * 3
    file = write_runs(
        tmp_path / "runs.jsonl",
        [Example(make_run(str(i), outcome=o, turns=1 + i)) for i, o in enumerate(outcomes)],
    )
    done = CliRunner().invoke(app, ["alarms", "--data", str(file), "--resamples", "20"])
    assert done.exit_code == 0, done.output
    assert "| runs.jsonl | 3 | 3 | dcl |" in done.output
    for name in PROBES:
        assert f"|  |  |  | {name} |" in done.output
