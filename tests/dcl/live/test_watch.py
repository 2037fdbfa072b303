from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from tiny import make_run, write_model
from typer.testing import CliRunner, Result

from dcl import cli
from dcl.errors import ConfigError
from dcl.runtime import load
from dcl.trajectory import Trajectory

RUNS = [
    make_run(("a", "the sum"), ("b", "is wrong"), ("b", "again"), ("a", "wrong"), id="1"),
    make_run(("b", "wrong"), ("a", "skip"), ("b", "is"), id="2"),
    make_run(("a", "the sum"), ("a", "is"), ("b", "is"), id="3"),
]

Row = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def run(model: Path) -> Callable[..., Result]:
    """`dcl watch` in this process."""

    def call(*args: str | Path, stdin: str = "") -> Result:
        words = ["watch", *(str(arg) for arg in args), "--model", str(model)]
        return CliRunner().invoke(cli.app, words, input=stdin)

    return call


def lines_of(runs: list[Trajectory]) -> Iterator[str]:
    """The turns of all runs in turn, then the ends."""
    for t in range(max(len(run.turns) for run in runs)):
        for run in runs:
            if t < len(run.turns):
                yield json.dumps({"run": run.id, "task": run.task, **run.turns[t].to_dict()})
    for run in runs:
        yield json.dumps({"run": run.id, "end": True})


def events_of(text: str) -> list[Row]:
    return [json.loads(line) for line in text.splitlines()]


def test_turns_of_a_file(run: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(lines_of(RUNS)))  # the last line has no end
    result = run(log, "--no-follow")
    assert (result.exit_code, result.stderr) == (0, "")
    finals = {e["run"]: e for e in events_of(result.stdout) if e["event"] == "final"}
    attributor = load(model, threads=1)
    for each in RUNS:
        assert finals[each.id]["faults"] == attributor(each).to_dict()["faults"]
        assert finals[each.id]["reason"] == "ended"


def test_a_log_is_read_as_natural_failures_unless_told_otherwise() -> None:
    spoken = "\n".join(lines_of(RUNS[:1]))
    for options in ([], ["--injected"]):
        result = CliRunner().invoke(cli.app, ["watch", "-", *options], input=spoken)
        (final,) = [e for e in events_of(result.stdout) if e["event"] == "final"]
        expected = load(injected=bool(options))(RUNS[0]).to_dict()
        assert final["faults"] == expected["faults"]


def test_thresholds_of_another_reading_are_refused(tmp_path: Path) -> None:
    good = tmp_path / "good.jsonl"
    good.write_text("".join(json.dumps(run.to_dict()) + "\n" for run in RUNS * 2))
    out = tmp_path / "thresholds.json"
    words = ["thresholds", str(good), "--rate", "0.4", "--out", str(out), "--injected"]
    assert CliRunner().invoke(cli.app, words).exit_code == 0
    words = ["watch", "-", "--thresholds", str(out)]
    assert CliRunner().invoke(cli.app, [*words, "--injected"], input="").exit_code == 0
    refused = CliRunner().invoke(cli.app, words, input="")
    assert refused.exit_code == ConfigError.exit_code
    assert "those of this model and reading" in refused.stderr


def test_turns_of_standard_input(run: Callable[..., Result]) -> None:
    *turns, _ = lines_of(RUNS[1:2])
    result = run("-", stdin="\n".join([*turns, ""]))
    events = events_of(result.stdout)
    assert [(e["event"], e.get("reason")) for e in events][-1] == ("final", "closed")
    assert events[0]["event"] == "raised"
    assert events[0]["faults"][0]["agent"] == "b"


def test_whole_runs_are_taken_too(run: Callable[..., Result]) -> None:
    result = run("-", stdin=RUNS[0].to_json() + "\n")
    assert events_of(result.stdout)[-1]["reason"] == "ended"


def test_lines_that_cannot_be_read_are_reported(run: Callable[..., Result]) -> None:
    good = next(lines_of(RUNS))
    bad = [
        "",
        "{",
        "[]",
        '{"run": "1"}',
        '{"turns": []}',
        "[" * 100_000,
        '{"run": "1", "agent": 3}',
    ]
    result = run("-", stdin="\n".join([*bad, good, ""]))
    assert result.exit_code == 3
    assert len(events_of(result.stdout)) == 1
    complaints = result.stderr.splitlines()
    assert [line.split(": ")[1] for line in complaints] == [f"<stdin>:{i}" for i in range(2, 8)]


def test_a_folder_or_a_missing_file_is_refused(run: Callable[..., Result], tmp_path: Path) -> None:
    assert "expected a file, got a folder" in run(tmp_path).stderr
    result = run(tmp_path / "none", "--no-follow")
    assert (result.exit_code, "No such file" in result.stderr) == (2, True)


def test_a_restart_reads_on(run: Callable[..., Result], tmp_path: Path) -> None:
    log, state = tmp_path / "log.jsonl", tmp_path / "state"
    lines = list(lines_of(RUNS))
    expected = events_of(run("-", stdin="\n".join([*lines, ""])).stdout)
    log.write_text("")
    got = []
    for line in lines:
        with log.open("a") as stream:
            stream.write(line + "\n")
        result = run(log, "--no-follow", "--state", state)
        assert result.exit_code == 0, result.stderr
        got += events_of(result.stdout)
    assert got == expected


def test_thresholds_are_learned_and_used(
    run: Callable[..., Result], model: Path, tmp_path: Path
) -> None:
    logs, out = tmp_path / "good.jsonl", tmp_path / "thresholds.json"
    good = make_run(("b", "wrong"), ("a", "is"))
    failed = Trajectory("bad", "", good.turns, outcome="failure")
    logs.write_text("".join(row + "\n" for row in [good.to_json()] * 40 + [failed.to_json()]))
    words = ["thresholds", str(logs), "--rate", "0.1", "--out", str(out), "--model", str(model)]
    result = CliRunner().invoke(cli.app, words)
    assert (result.exit_code, result.stdout) == (0, "runs 40, rate 0.1, thresholds 2\n")
    events = events_of(run("-", "--thresholds", out, stdin=good.to_json() + "\n").stdout)
    assert [(e["event"], e["faults"]) for e in events] == [("final", [])]
    assert events[0]["threshold"] > 0.9
    result = CliRunner().invoke(cli.app, [*words[:3], "0.001", *words[4:]])
    assert (result.exit_code, "needs 2000 successful runs" in result.stderr) == (2, True)


class Watcher:
    """`dcl watch` in a process of its own."""

    def __init__(self, log: Path, state: Path, model: Path) -> None:
        words = ["-m", "dcl.cli", "watch", str(log), "--state", str(state), "--model", str(model)]
        self.process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def read(self, until: Callable[[Row], bool]) -> list[Row]:
        """Events up to one of a kind."""
        assert self.process.stdout is not None
        events = []
        for line in self.process.stdout:
            events.append(json.loads(line))
            if until(events[-1]):
                break
        return events

    def stop(self, number: int) -> tuple[int, list[Row]]:
        """Send a signal; give the exit code and the whole lines that were left."""
        self.process.send_signal(number)
        out, _ = self.process.communicate()
        *whole, _ = out.split(b"\n")
        return self.process.returncode, [json.loads(line) for line in whole]


@contextmanager
def watching(log: Path, state: Path, model: Path) -> Iterator[Watcher]:
    watcher = Watcher(log, state, model)
    try:
        yield watcher
    finally:
        watcher.process.kill()
        watcher.process.communicate()


def append(log: Path, lines: list[str]) -> None:
    with log.open("a") as stream:
        stream.write("".join(line + "\n" for line in lines))


def test_an_interrupt_ends_it_and_keeps_the_state(model: Path, tmp_path: Path) -> None:
    log, state = tmp_path / "log.jsonl", tmp_path / "state"
    lines = list(lines_of(RUNS))
    append(log, lines)
    with watching(log, state, model) as watcher:
        watcher.read(lambda event: event["event"] == "final" and event["run"] == "3")
        code, rest = watcher.stop(signal.SIGINT)
    assert (code, rest) == (130, [])


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 on this platform")
@pytest.mark.parametrize("seed", range(2))
def test_kill_at_random_moments_loses_no_turn(model: Path, tmp_path: Path, seed: int) -> None:
    """Every event of an undisturbed watcher comes, and none comes with another content."""
    rng = random.Random(seed)
    runs = [Trajectory(f"{i}-{r.id}", r.task, r.turns) for i in range(12) for r in RUNS]
    lines = list(lines_of(runs))
    undisturbed = CliRunner().invoke(
        cli.app, ["watch", "-", "--model", str(model)], input="\n".join([*lines, ""])
    )
    expected = {(e["run"], e["number"]): e for e in events_of(undisturbed.stdout)}
    log, state = tmp_path / "log.jsonl", tmp_path / "state"
    got: dict[tuple[str, int], Row] = {}

    def hear(events: list[Row]) -> None:
        for event in events:
            key = event["run"], event["number"]
            assert got.setdefault(key, event) == event

    cuts = sorted(rng.sample(range(1, len(lines)), 5))
    for start, stop in zip([0, *cuts], cuts, strict=False):
        append(log, lines[start:stop])
        with watching(log, state, model) as watcher:
            wait_for(watcher.process.stdout, rng)
            hear(watcher.stop(signal.SIGKILL)[1])
    append(log, lines[cuts[-1] :])
    last = runs[-1].id
    with watching(log, state, model) as watcher:
        hear(watcher.read(lambda event: event["run"] == last and event["event"] == "final"))
        hear(watcher.stop(signal.SIGKILL)[1])
    assert got == expected


def wait_for(stream: IO[bytes] | None, rng: random.Random) -> None:
    """Until there is output or some random time has gone by; which of the two does not matter."""
    assert stream is not None
    select.select([stream], [], [], rng.uniform(0.0, 1.5))


def test_a_state_that_another_process_uses_is_refused(model: Path, tmp_path: Path) -> None:
    log, state = tmp_path / "log.jsonl", tmp_path / "state"
    append(log, list(lines_of(RUNS)))
    with watching(log, state, model) as watcher:
        watcher.read(lambda event: True)
        words = ["watch", str(log), "--state", str(state), "--model", str(model)]
        result = CliRunner().invoke(cli.app, words)
        assert result.exit_code == 2
        assert "another process keeps its state there" in result.stderr
        os.kill(watcher.process.pid, signal.SIGTERM)
