from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.fewshot import FewshotConfig, compare_sizes, observe_all
from benchmarks.reliability import measure_trust
from benchmarks.runs import load_examples
from dcl.attribution import Attribution, Calibration, Logits, decode
from dcl.errors import ConfigError
from dcl.taxonomy import MODES
from dcl.trajectory import Example, Fault, Trajectory, Turn

M = len(MODES)


def write_runs(file: Path, count: int) -> Path:
    rows = []
    for i in range(count):
        said = (("planner", "Plan."), ("coder", f"I guess {i}."), ("boss", "Done."))
        run = Trajectory(
            f"r{i}", f"task {i} {i * i} {i * 7} {i + 90}", tuple(Turn(a, t) for a, t in said)
        )
        step = 1 if i % 4 else 0
        rows.append(Example(run, (Fault(run.turns[step].agent, MODES[3], step),)).to_dict())
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_few_runs_are_compared_with_floors_and_what_was_observed_is_kept(tmp_path: Path) -> None:
    data = write_runs(tmp_path / "runs.jsonl", 22)
    config = FewshotConfig(data=(data,), sizes=(12,), repeats=1, cache=tmp_path / "kept")
    count, rows = compare_sizes(config)
    assert count == 22
    names = [row.name for row in rows]
    assert names[-3:] == ["dcl, nothing fitted", "dcl fit, 12 runs", "dcl fit, 5 folds"]
    by_name = {row.name: row.scores for row in rows}
    assert by_name["first-speaker"]["agent_accuracy"].value == pytest.approx(6 / 22)
    assert by_name["dcl fit, 5 folds"]["step_accuracy"].value >= 0.5
    (kept,) = (tmp_path / "kept").iterdir()
    examples = load_examples([data])
    again = observe_all(examples, config)
    kept.unlink()
    fresh = observe_all(examples, config)
    for one, other in zip(again, fresh, strict=True):
        assert one.turns == pytest.approx(other.turns, abs=1e-5)
        assert one.group == other.group
    with pytest.raises(ConfigError, match="--size"):
        compare_sizes(FewshotConfig(data=(data,), sizes=(22,)))
    told = CliRunner().invoke(
        app, ["reliability", "--data", str(data), "--repeats", "2", "--cache", str(tmp_path / "k")]
    )
    assert told.exit_code == 0, told.output
    assert "| dcl fit, 5 folds | likeliest | 90% |" in told.output


def test_deletion_compares_what_is_shown_with_chance(tmp_path: Path) -> None:
    data = write_runs(tmp_path / "runs.jsonl", 2)
    told = CliRunner().invoke(app, ["deletion", "--data", str(data), "--repeats", "1"])
    assert told.exit_code == 0, told.output
    assert told.output.startswith("2 runs, best finding of each.")
    for kind in ("turn", "sentence", "words"):
        assert f"| {kind} | " in told.output


def test_the_surest_guesses_come_first() -> None:
    examples, found = [], []
    for i in range(20):
        turns = (Turn("a", "x"), Turn("b", "y"))
        run = Trajectory(str(i), "", turns)
        examples.append(Example(run, (Fault("a" if i < 10 else "b", None, 0),)))
        agent = np.array([4.0 - i / 5, -4.0], dtype=np.float32)  # sure of a where a is right
        pair = np.repeat(agent[:, None], M, axis=1)
        found.append(decode(run, Logits(agent, pair[0], pair, agent, pair), Calibration()))
    row = measure_trust("x", examples, found, range(20), FewshotConfig(data=(), repeats=4))
    assert row.accuracy == (0.5, 10 / 16, 10 / 12, 1.0, 1.0)
    assert row.answered < 1
    assert isinstance(found[0], Attribution)
