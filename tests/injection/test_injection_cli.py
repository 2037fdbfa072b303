from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dcl
from dcl.errors import ConfigError
from dcl.taxonomy import MODES, ErrorMode
from dcl.trajectory import Example, Fault, Trajectory, Turn
from injection.__main__ import app
from injection.config import load_config
from injection.logs import inject_logs
from injection.probes import probe_records
from injection.records import RECORDS

ROOT = Path(__file__).parents[2]
OFFLINE = ROOT / "configs" / "injection" / "offline.yaml"
runner = CliRunner()


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "injection").glob("*.yaml")), ids=str)
def test_every_published_configuration_is_one(file: Path) -> None:
    if file.stem == "frameworks":
        for package in ("autogen_agentchat", "smolagents", "langgraph", "agents"):
            pytest.importorskip(package)
    config = load_config(file, {"out": "elsewhere", "workers": 1})
    assert (config.out, config.workers) == ("elsewhere", 1)


def test_no_module_loads_torch() -> None:
    names = [
        file.stem for file in (ROOT / "injection").glob("*.py") if not file.stem.startswith("_")
    ]
    names = [f"injection.{name}" for name in names if name != "sandbox_child"]
    code = f"import sys, importlib; [importlib.import_module(n) for n in {names}]; "
    code += "print(sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    loaded = set(ast.literal_eval(done.stdout))
    assert "injection" in loaded
    assert not loaded & {"torch", "lightning", "transformers", "sentence_transformers"}


def test_a_wrong_configuration_is_refused(tmp_path: Path) -> None:
    for text in ("out: x\ncolour: red\n", "out: x\nsystems: [swarm]\n", "out: x\nworkers: 0\n"):
        file = tmp_path / "wrong.yaml"
        file.write_text(text)
        done = runner.invoke(app, ["run", "--config", str(file)])
        assert done.exit_code == 2
        assert done.stderr.startswith("error: ")
    with pytest.raises(ConfigError, match="expected a YAML file"):
        load_config(tmp_path / "absent.yaml", {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "out"
    arguments = ["run", "--config", str(OFFLINE), "--out", str(out), "--tasks-per-file", "2"]
    done = runner.invoke(app, [*arguments, "--workers", "1"])
    assert done.exit_code == 0, done.output
    assert "proved records of" in done.output
    return out


def test_the_offline_run_proves_every_mode(folder: Path) -> None:
    examples = list(dcl.read_examples(folder / RECORDS))
    faults = [fault for example in examples for fault in example.faults or ()]
    assert {fault.mode for fault in faults} == set(MODES)
    for example in examples:
        for fault in example.faults or ():
            assert fault.step is not None
            place = example.trajectory.turn_at(fault.step)
            assert place is not None
            assert example.trajectory.turns[place].agent == fault.agent
    splits: dict[str, set[str]] = {}
    for example in examples:
        split = example.trajectory.metadata["split"]
        assert splits.setdefault(example.trajectory.task, split) == split


def test_the_report_counts_and_probes(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    assert runner.invoke(app, ["report", str(folder), "--out", str(out)]).exit_code == 0
    text = out.read_text()
    for title in (
        "Outcomes of plans",
        "Mode, one fault",
        "System",
        "Third of the run",
        "Cost of a record",
    ):
        assert f"| {title}" in text
    for probe in ("position only", "length only", "marker words", "style of the turn"):
        assert f"| {probe} |" in text
    assert runner.invoke(app, ["report", str(tmp_path / "absent")]).exit_code == 2


def planted(i: int, *, where: int, text: str) -> Example:
    said = [f"turn {j} of run {i}" for j in range(6)]
    said[where] = text
    turns = tuple(Turn(f"Agent{j}", content) for j, content in enumerate(said))
    run = Trajectory(str(i), f"question {i}", turns)
    return Example(run, (Fault(f"Agent{where}", ErrorMode.FM_1_1, where),))


def test_probes_find_the_artifact_that_is_there_and_no_other() -> None:
    fixed = probe_records(planted(i, where=2, text=f"turn 2 of run {i}") for i in range(80))
    loud = {probe.name for probe in fixed.probes if probe.is_loud}
    assert "position only" in loud
    assert "length only" not in loud
    word = probe_records(planted(i, where=i * 7 % 6, text=f"incorrectly {i}") for i in range(80))
    assert "marker words" in {probe.name for probe in word.probes if probe.is_loud}
    assert ("incorrectly", 80) in word.markers
    long = probe_records(planted(i, where=i * 7 % 6, text="turn of run " * 9) for i in range(80))
    assert "length only" in {probe.name for probe in long.probes if probe.is_loud}
    assert probe_records([]).probes == ()


def test_logs_that_cannot_be_run_again_get_faults_that_are_marked_so(tmp_path: Path) -> None:
    logs = tmp_path / "logs.jsonl"
    rows = [
        Example(
            Trajectory(
                f"run-{i}",
                "How much is 12 * 7?",
                (
                    Turn("user", "How much is 12 * 7?", role="user", step=1),
                    Turn("Solver", "Step 1: 12 * 7 = 84\nCheck: 12 * 7 = 84\nAnswer: 84", step=2),
                    Turn("Critic", "I checked it.\n[Agree] It holds.", step=3),
                ),
                "success" if i % 2 else "failure",
            )
        )
        for i in range(30)
    ]
    logs.write_text("".join(json.dumps(row.to_dict()) + "\n" for row in rows))
    out = tmp_path / "faulty.jsonl"
    done = runner.invoke(app, ["offline", str(logs), "--out", str(out), "--per-run", "2"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("30 faulty copies of 15 runs")
    examples = list(dcl.read_examples(out))
    assert len({fault.mode for e in examples for fault in e.faults or ()}) == len(MODES)
    for example in examples:
        (fault,) = example.faults or ()
        assert example.clean is not None
        assert example.trajectory.metadata["verified"] is False
        assert example.trajectory.outcome is None
        changed = [
            a.agent
            for a, b in zip(example.trajectory.turns, example.clean.turns, strict=True)
            if a != b
        ]
        assert changed == [fault.agent]
        assert fault.agent != "user"
    first = out.read_bytes()
    assert inject_logs([logs], out).modes.total() == 30
    assert out.read_bytes() == first
    assert inject_logs([logs], out, every=True).runs == 30


@pytest.mark.data
def test_real_runs_that_succeeded_take_faults(data_dir: Path, tmp_path: Path) -> None:
    made = inject_logs([data_dir / "tau_airline.jsonl.xz"], tmp_path / "out.jsonl")
    assert made.runs == 84
    assert made.modes.total() >= 2 * 84 - 10
    assert len(made.modes) >= 12
    assert len(list(dcl.read_examples(tmp_path / "out.jsonl"))) == made.modes.total()


def test_repair_reports_before_and_after(tmp_path: Path) -> None:
    file = tmp_path / "lost.yaml"
    file.write_text("out: x\nsystems: [macnet_chain]\nscripted: {skill: 0.3}\n")
    done = runner.invoke(app, ["repair", "--config", str(file), "--tasks-per-file", "1"])
    assert done.exit_code == 0, done.output
    assert [line.split("  ")[0] for line in done.output.splitlines()] == [
        "before",
        "hint to the blamed agent",
        "same hint to a random agent",
    ]
