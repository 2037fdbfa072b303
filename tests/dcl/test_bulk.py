from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import fake_model
import pytest
from typer.testing import CliRunner, Result

from dcl import bulk, cli
from dcl.bag import MOST_TURNS
from dcl.bulk import Logs, Mark
from dcl.errors import ConfigError, TraceError
from dcl.intake import Tally, list_files
from dcl.results import Results

FAKE = [sys.executable, str(Path(__file__).with_name("fake_model.py"))]
BAD, GOOD = "it stays as it is", "fine"
LONG = json.dumps({"id": "long", "turns": [{"agent": "a", "content": "x"}] * (MOST_TURNS + 1)})

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process, with the fake model."""
    monkeypatch.setattr(cli, "load_model", fake_model.load)

    def call(*args: str | Path, stdin: bytes = b"") -> Result:
        return CliRunner().invoke(cli.app, [str(arg) for arg in args], input=stdin)

    return call


def row_of(name: str, *said: str) -> str:
    return fake_model.make_run(name, *said).to_json()


def write_lines(file: Path, *rows: str) -> Path:
    file.write_text("".join(row + "\n" for row in rows))
    return file


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Two files of 150 runs with four records among them that are none, and a file of nothing."""
    folder = tmp_path / "logs"
    folder.mkdir()
    for name in ("1", "2"):
        rows = [row_of(f"{name}-{i}", GOOD, BAD if i % 7 == 0 else GOOD) for i in range(150)]
        rows[3:3] = ['{"id": ', LONG]
        rows[100:100] = ["[]"]
        write_lines(folder / f"{name}.jsonl", *rows, "half a li")
    (folder / "3.json").write_text("")
    return folder


def command(logs: Path, out: Path, *more: str) -> list[str]:
    args = ["attribute", str(logs), "--out", str(out), "--resume", "--fail-on", "0.5", *more]
    return [*FAKE, *args]


@pytest.fixture
def expected(logs: Path, tmp_path: Path) -> bytes:
    """What the same command writes without `--resume` and without a disturbance."""
    out = tmp_path / "expected.jsonl"
    args = ["attribute", str(logs), "--out", str(out), "--output", "jsonl"]
    subprocess.run([*FAKE, *args], check=False, capture_output=True, timeout=120)
    lines = out.read_bytes()
    assert lines.count(b"\n") == 300
    return lines


def finish(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def test_an_undisturbed_run_writes_what_it_writes_without_resume(
    logs: Path, tmp_path: Path, expected: bytes
) -> None:
    done = finish(command(logs, tmp_path / "out.jsonl"))
    assert (tmp_path / "out.jsonl").read_bytes() == expected
    assert done.returncode == 3
    assert done.stderr.count("error: ") == 9
    assert done.stderr.splitlines()[-1] == "--fail-on: 44 of 300 traces"
    again = finish(command(logs, tmp_path / "out.jsonl"))
    assert (tmp_path / "out.jsonl").read_bytes() == expected
    assert again.returncode == 3
    assert again.stderr.splitlines()[0].endswith("going on after 300 traces, the last 2-149")
    assert again.stderr.splitlines()[-1] == done.stderr.splitlines()[-1]


def kill_often(words: list[str], out: Path, times: int, seed: int) -> None:
    """Start, wait until something was written and a little longer, kill."""
    rng = random.Random(seed)
    for _ in range(times):
        size = out.stat().st_size if out.exists() else -1
        child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while child.poll() is None and not (out.exists() and out.stat().st_size > size):
            time.sleep(0.001)
        time.sleep(rng.random() / 50)
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=60)


def test_killed_again_and_again_it_writes_the_same_bytes(
    logs: Path, tmp_path: Path, expected: bytes
) -> None:
    out = tmp_path / "out.jsonl"
    words = command(logs, out)
    kill_often(words, out, 5, seed=1)
    done = finish(words)
    assert out.read_bytes() == expected
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == "--fail-on: 44 of 300 traces"


def test_stopped_after_any_chunk_it_counts_and_writes_the_same(
    logs: Path, tmp_path: Path, expected: bytes, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Results.add
    words = command(logs, tmp_path / "out.jsonl")[len(FAKE) :]

    def dies(self: Results, *args: object) -> None:
        add(self, *args)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    lines = []
    with monkeypatch.context() as patch:
        patch.setattr(Results, "add", dies)
        while (result := run(*words)).exit_code == 130:
            lines.append((tmp_path / "out.jsonl").read_bytes().count(b"\n"))
    assert lines == [64, 128, 192, 256, 300]
    assert result.exit_code == 3
    assert result.stderr.splitlines()[-1] == "--fail-on: 44 of 300 traces"
    assert (tmp_path / "out.jsonl").read_bytes() == expected


def test_standard_input_can_be_given_again(
    logs: Path, tmp_path: Path, expected: bytes, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = (logs / "1.jsonl").read_bytes()
    args = ("attribute", "-", "--out", tmp_path / "out.jsonl", "--resume")
    monkeypatch.setattr(bulk, "_CHUNK", 10)
    write = bulk.write
    with monkeypatch.context() as patch:
        patch.setattr(bulk, "write", lambda reports, *rest: write(first(reports, 25), *rest))
        run(*args, stdin=stdin)
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 25
    assert run(*args, stdin=stdin).exit_code == 3
    got = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in got] == [f"1-{i}" for i in range(150)]


T = TypeVar("T")


def first(items: Iterator[T], count: int) -> Iterator[T]:
    return (item for _, item in zip(range(count), items, strict=False))


def test_a_log_that_has_changed_is_refused(logs: Path, tmp_path: Path, run: Run) -> None:
    words = command(logs, tmp_path / "out.jsonl")[len(FAKE) :]
    run(*words)
    before = (tmp_path / "out.jsonl").read_bytes()
    text = (logs / "2.jsonl").read_text()
    for changed in (text.replace("2-149", "2-x"), "", row_of("2-0", GOOD) + "\n"):
        (logs / "2.jsonl").write_text(changed)
        result = run(*words)
        assert result.exit_code == 2
        assert "expected the run '2-149' as record 153" in result.stderr
    (logs / "4.jsonl").write_text(text)
    result = run(*words)
    assert result.exit_code == 2
    assert "expected files '3, sha256" in result.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_a_log_that_has_grown_is_gone_on_with(logs: Path, tmp_path: Path, run: Run) -> None:
    words = command(logs / "1.jsonl", tmp_path / "out.jsonl")[len(FAKE) :]
    run(*words)
    with (logs / "1.jsonl").open("a") as stream:
        stream.write("\n" + row_of("new", BAD) + "\n")
    assert run(*words).stderr.splitlines()[-1] == "--fail-on: 23 of 151 traces"
    got = (tmp_path / "out.jsonl").read_text().splitlines()
    assert len(got) == 151
    assert json.loads(got[-1])["id"] == "new"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--resume",), "give --out FILE"),
        (("--resume", "--out", "-"), "give --out FILE"),
        (("--resume", "--out", "x.jsonl.gz"), "plain JSON lines only"),
        (("--resume", "--out", "x.jsonl", "--output", "json"), "plain JSON lines only"),
        (("--resume", "--out", "x.jsonl", "--output", "table"), "plain JSON lines only"),
        (("--engine", "spark"), "--engine"),
    ],
)
def test_wrong_usage_is_2_and_touches_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("attribute", "nowhere.json", *args)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_missing_model_is_4_and_can_be_put_right(logs: Path, tmp_path: Path, run: Run) -> None:
    words = command(logs, tmp_path / "out.jsonl")[len(FAKE) :]
    assert run(*words, "--model", tmp_path / "none").exit_code == 4
    assert not (tmp_path / "out.jsonl").exists()
    assert run(*words).exit_code == 3


def test_runs_that_are_done_are_left_out_wherever_it_stops(logs: Path) -> None:
    def handle(done: Mark) -> list[tuple[Mark, str]]:
        tally = Tally(done.traces, done.unreadable)
        items = Logs(list_files([str(logs)]), "auto", done).items()
        reports = bulk.attribute(fake_model.load(), items, tally)
        return [(mark, report.trajectory.id) for mark, report in reports]

    every = handle(Mark())
    assert every[-1][0] == Mark(1, 153, "2-149", 300, 7)
    for i in range(0, 300, 37):
        assert handle(every[i][0]) == every[i + 1 :]


def test_a_source_with_another_run_at_the_mark_is_refused(logs: Path) -> None:
    items = bulk.read_source((0, str(logs / "1.jsonl")), "auto", Mark(0, 3, "1-2", 3, 0))
    assert next(items).number == 4
    with pytest.raises(ConfigError, match=r"1\.jsonl: expected the run 'other' as record 3"):
        next(bulk.read_source((0, str(logs / "1.jsonl")), "auto", Mark(0, 3, "other", 3, 0)))


def test_errors_of_logs_survive_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(TraceError("a.json", "expected JSON")))
    assert (str(error), error.place) == ("a.json: expected JSON", "a.json")


def peak_of(action: Callable[[], None]) -> int:
    """Bytes that Python held at most while it ran."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_number_of_runs(tmp_path: Path) -> None:
    def write_log(count: int) -> Path:
        file = tmp_path / f"{count}.jsonl"
        with file.open("w") as stream:
            for i in range(count):  # as many records again are none
                stream.write(row_of(str(i), GOOD, BAD, "x" * 500) + "\n{'id'\n")
        return file

    def handle(file: Path) -> None:
        tally = Tally()
        logs = Logs(list_files([str(file)]), "auto")
        with Results(file.with_suffix(".out"), {}) as results:
            reports = bulk.attribute(fake_model.load(), logs.items(), tally)
            bulk.write(reports, results, tally)
        assert tally.traces == tally.unreadable == int(file.stem)

    few, many = write_log(200), write_log(2000)
    handle(write_log(100))  # imports, caches and compiled patterns are counted in neither
    small, large = (peak_of(lambda file=file: handle(file)) for file in (few, many))  # type: ignore[misc]
    assert large < 1.2 * small


def test_a_process_holds_no_more_for_ten_times_the_runs(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        log = write_lines(
            tmp_path / f"{count}.jsonl", *(row_of(str(i), GOOD, "x" * 2000) for i in range(count))
        )
        words = command(log, tmp_path / f"{count}.out")
        child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        return usage.ru_maxrss

    assert peak(5000) < 1.1 * peak(500)
