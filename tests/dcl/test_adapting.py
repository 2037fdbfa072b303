from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from labelled import make_example
from typer.testing import CliRunner

from dcl.adapting import FEWEST, adapt
from dcl.artifact import ADAPTER, INDEX, read_manifest, verify
from dcl.cli import app
from dcl.errors import ConfigError
from dcl.nearest import load_index
from dcl.runtime import load
from dcl.shipped import find_model
from dcl.trajectory import Fault

EXAMPLES = [make_example(i) for i in range(FEWEST)]


def test_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 10 labelled runs"):
        adapt(None, EXAMPLES[:5], tmp_path / "out")
    with pytest.raises(ConfigError, match="expected labelled runs, or successful ones"):
        adapt(None, [replace(EXAMPLES[0], faults=None)], tmp_path / "out")
    with pytest.raises(ConfigError, match="at least 9 sound runs"):
        adapt(None, [], tmp_path / "out", clean=[EXAMPLES[0].trajectory], share=0.1)
    assert not (tmp_path / "out").exists()


def test_a_fit_writes_a_model_that_every_reader_loads(tmp_path: Path) -> None:
    out = tmp_path / "adapted"
    clean = [make_example(i).trajectory for i in range(50, 60)]
    report = adapt(None, EXAMPLES, out, clean=clean, share=0.2)
    assert report.runs == FEWEST
    assert report.clean == 10
    assert {level.name for level in report.levels} >= {"agent", "step"}
    manifest = read_manifest(out)
    assert not any(verify(out, manifest).values())
    assert (ADAPTER in manifest["files"]) == bool(set(report.parts) - {"thresholds"})
    assert manifest["fit"]["runs"] == FEWEST
    index = load_index(out / INDEX)
    assert len(index.rows) == FEWEST
    near = index.find(index.vectors[3].astype(np.float32))
    assert near is not None
    assert near.fault == Fault("coder", None, 1)
    assert "I guess" in near.text
    adapted = load(out)
    flagged = [bool(one.findings()) for one in adapted.batch(clean)]
    assert sum(flagged) <= 2
    assert "thresholds" in report.parts  # the successful runs moved them
    if ADAPTER in manifest["files"]:
        with pytest.raises(ConfigError, match="adapted already"):
            adapt(out, EXAMPLES, tmp_path / "again")


def test_the_command_says_what_it_did(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(example.to_dict()) + "\n" for example in EXAMPLES))
    told = CliRunner().invoke(app, ["fit", str(file), "--out", str(tmp_path / "out")])
    assert told.exit_code == 0, told.output
    assert f"{FEWEST} labelled runs, {FEWEST} questions" in told.output
    assert "agent, 10 runs: before" in told.output
    assert "changed: " in told.output or "the original is kept" in told.output
    line = (
        CliRunner()
        .invoke(
            app,
            [
                "explain",
                str(file),
                "--model",
                str(tmp_path / "out"),
                "--top-k",
                "1",
                "--output",
                "jsonl",
            ],
        )
        .output.splitlines()[0]
    )
    (finding,) = json.loads(line)["findings"]
    assert finding["like"]["id"] != json.loads(line)["id"]
    assert finding["path"][0]["turn"] == finding["turn"]


def test_failures_among_the_successful_runs_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(example.to_dict()) + "\n" for example in EXAMPLES))
    told = CliRunner().invoke(app, ["fit", "--clean", str(file), "--out", str(tmp_path / "out")])
    assert told.exit_code == 2
    assert f"{len(EXAMPLES)} runs are known to have failed" in told.output
    assert "found none" in told.output


def test_runs_without_any_fault_are_no_labels_to_learn_from(tmp_path: Path) -> None:
    sound = [replace(example, faults=()) for example in EXAMPLES]
    with pytest.raises(ConfigError, match="give successful runs under --clean"):
        adapt(None, sound, tmp_path / "out")


def test_the_shipped_model_holds_nothing_of_a_system() -> None:
    listed = read_manifest(find_model("base"))["files"]
    assert not {ADAPTER, INDEX} & listed.keys()
