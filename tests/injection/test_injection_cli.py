from __future__ import annotations

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dcl
from dcl.taxonomy import MODES, ErrorMode
from dcl.trajectory import Example, Fault, Trajectory, Turn
from injection.__main__ import app
from injection.config import load_config
from injection.logs import inject_logs
from injection.natural import NaturalConfig
from injection.probes import probe_records
from injection.records import LEDGER, RECORDS
from injection.run import RunConfig

ROOT = Path(__file__).parents[2]
OFFLINE = ROOT / "configs" / "injection" / "offline.yaml"
runner = CliRunner()


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "injection").glob("*.yaml")), ids=str)
def test_every_published_configuration_is_one(file: Path) -> None:
    if file.stem == "frameworks":
        for package in ("smolagents", "langgraph", "agents"):
            pytest.importorskip(package)
    kind = NaturalConfig if file.stem == "natural" else RunConfig
    config = load_config(file, {"out": "elsewhere", "workers": 1}, kind)
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
    file = tmp_path / "wrong.yaml"
    for text, problem in (
        ("colour: red", "'colour' is not accepted; `RunConfig` in injection/run.py says"),
        ("systems: [swarm]", "systems: expected one of llm_debate, .*, got 'swarm'"),
        ("workers: 0", "expected workers > 0"),
        ("workers: many", "workers.*many"),
        ("plans: {more_of: [FM-9.9]}", "plans.more_of: expected one of the 14 codes"),
        ("scripted: {skill: 3}", "scripted.skill: expected 0 to 1, got 3"),
        ("endpoint: {budget_tokens: -1}", "endpoint.budget_tokens: expected >= 0, got -1"),
        ("tasks: [absent.jsonl]", "absent.jsonl: expected a file of tasks, got: No such file"),
        (f"tasks: [{__file__}z]", "expected a file of tasks"),
        ("agents: endpoint", "endpoint.model: expected the name of a model"),
        ("systems: []", "systems: expected at least one, got none"),
        ("plans: null", "plans: expected a value, got nothing"),
        ("plans: {places: [1, 100000000]}", "plans.places: expected whole numbers from 0 to 100"),
        ("endpoint: {timeout: .nan}", "endpoint.timeout: expected above 0, got nan"),
        ("endpoint: {temperature: .inf}", "endpoint.temperature: expected >= 0, got inf"),
        (
            "endpoint: {base_url: 'me:sk-0123456789@host'}",
            r"expected an address .*, got '.*\[key\]",
        ),
        (
            "endpoint: {model: m, cache: /dev/null/x}\nagents: endpoint",
            "endpoint.cache: expected a",
        ),
    ):
        file.write_text(f"out: {tmp_path / 'out'}\n{text}\n")
        assert re.search(problem, complaint(2, "run", "--config", file)), text
    assert "required: out" in complaint(2, "run", "--config", _written(file, "workers: 1"))
    assert "found none" in complaint(2, "run", "--config", tmp_path / "absent.yaml")
    file.write_bytes(b"\xff\xfe\x00")
    assert "can't decode" in complaint(2, "run", "--config", file)
    assert "see " in complaint(2, "run")
    assert "bogus" in complaint(2, "bogus")


def complaint(code: int, *arguments: object) -> str:
    """What a command that must fail says: one line."""
    done = runner.invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    assert done.stderr.startswith("error: ")
    (line,) = done.stderr.splitlines()
    return line


def _written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def test_places_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    log = ROOT / "examples" / "parse_duration.json"
    blocked = _written(tmp_path / "blocked", "")
    folder = tmp_path / "folder"
    folder.mkdir()
    offline = ("offline", log, "--every", "--out")
    assert "expected a place to write" in complaint(2, *offline, blocked / "x.jsonl")
    assert "it is a folder" in complaint(2, *offline, folder)
    assert "--every takes others" in complaint(2, "offline", log, "--out", tmp_path / "new.jsonl")
    assert not list(tmp_path.glob("new*"))
    assert "absent" in complaint(3, "offline", tmp_path / "absent", "--out", tmp_path / "new")
    own = _written(tmp_path / "own.json", log.read_text())
    assert "got one of the logs" in complaint(2, "offline", own, "--every", "--out", own)
    assert own.read_text() == log.read_text()
    bad = _written(tmp_path / "bad.jsonl", '{"nonsense": 1}\n')
    complaint(3, "offline", log, bad, "--every", "--out", tmp_path / "new.jsonl")
    assert not list(tmp_path.glob("*new*"))  # no part of it is left
    assert "expected a folder" in complaint(2, "run", "--config", OFFLINE, "--out", blocked)
    _written(folder / RECORDS, "")
    assert "expected a file of `run`" in complaint(2, "report", folder)
    _written(folder / LEDGER, "")
    assert "cannot write there" in complaint(2, "report", folder, "--out", blocked / "x.md")
    for line in ('{"id": 1}', "[]", "{"):
        _written(folder / LEDGER, f"{line}\n")
        assert f"{LEDGER}:1: expected a JSON object" in complaint(2, "report", folder)
    _written(folder / LEDGER, '{"name": 1}\n')
    assert "choose another" in complaint(2, "run", "--config", OFFLINE, "--out", folder)


def test_an_endpoint_that_is_not_there_is_named_at_once(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    text = f"out: {tmp_path / 'out'}\nagents: endpoint\nworkers: 1\n"
    text += f"endpoint: {{model: tiny, base_url: '{url}', retries: 0}}\n"
    file = _written(tmp_path / "run.yaml", text)
    for command in ("run", "repair"):
        line = complaint(2, command, "--config", file)
        assert f"endpoint.base_url: expected a server at {url}" in line


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
    for probe in (
        "position only",
        "role only",
        "length only",
        "marker words",
        "style of the turn",
    ):
        assert f"| {probe} |" in text
    assert runner.invoke(app, ["report", str(tmp_path / "absent")]).exit_code == 2


def planted(i: int, *, where: int, text: str) -> Example:
    said = [f"turn {j} of run {i}" for j in range(6)]
    said[where] = text
    turns = tuple(Turn(f"Agent{j}", content) for j, content in enumerate(said))
    run = Trajectory(str(i), f"question {i}", turns)
    return Example(run, (Fault(f"Agent{where}", ErrorMode.FM_1_1, where),))


def test_a_role_that_is_always_attacked_is_found() -> None:
    runs = []
    for i in range(80):
        at = i * 7 % 6
        turns = tuple(Turn(f"A{j}", f"turn {i}", "boss" if j == at else "hand") for j in range(6))
        run = Trajectory(str(i), f"question {i}", turns)
        runs.append(Example(run, (Fault(f"A{at}", ErrorMode.FM_1_1, at),)))
    assert {probe.name for probe in probe_records(runs).probes if probe.is_loud} == {"role only"}


def test_runs_in_which_every_turn_was_attacked_prove_nothing_about_probes() -> None:
    run = Trajectory("1", "question", (Turn("A", "alone"),))
    assert probe_records([Example(run, (Fault("A", ErrorMode.FM_1_1, 0),))] * 9).probes == ()


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


def test_natural_failures_have_a_report(tmp_path: Path) -> None:
    file = _written(tmp_path / "natural.yaml", "out: x\nsystems: [experts]\nseeds: 3\n")
    out = tmp_path / "out"
    with file.open("a") as stream:
        stream.write("tasks_per_file: 2\nworkers: 1\nscripted: {skill: 0.3, trust: 0.3}\n")
    done = runner.invoke(app, ["natural", "--config", str(file), "--out", str(out)])
    assert done.exit_code == 0, done.output
    located = len((out / RECORDS).read_text().splitlines())
    assert located
    report = runner.invoke(app, ["report", str(out)])
    assert report.exit_code == 0, report.output
    assert report.output.startswith(f"# {located} proved failures, 0 benign rewrites")
    assert f"| located | {located} |" in report.output
    assert "clean runs" not in report.output
    line = complaint(2, "run", "--config", OFFLINE, "--out", out)
    assert "expected the kind, " in line
    assert "choose another --out" in line


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_it_without_a_word_and_it_goes_on_later(workers: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "injection", "run", "--config", str(OFFLINE)]
    command += ["--out", str(out), "--workers", str(workers), "--tasks-per-file", "1"]
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a terminal signals the whole group
    )
    while child.poll() is None and not (out / LEDGER).is_file():
        time.sleep(0.01)
    time.sleep(0.5)
    os.killpg(child.pid, signal.SIGINT)
    said, _ = child.communicate(timeout=120)
    assert (child.returncode, said) == (130, b"")
    before = (out / LEDGER).read_text().splitlines()
    done = runner.invoke(app, [*command[3:8], "--workers", "1", "--tasks-per-file", "1"])
    assert done.exit_code == 0, done.output
    assert (out / LEDGER).read_text().splitlines()[: len(before)] == before
