from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from ray_work import count_up, label, refuse, start_double
from test_bulk import kill_often, row_of, write_lines
from tiny import write_model
from typer.testing import CliRunner, Result

from dcl import cli
from dcl.cluster import Cluster, Site, connect
from dcl.errors import ArtifactError, ConfigError

# Of settings of Ray's own, as it makes their defaults.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context")
DCL = [sys.executable, "-m", "dcl.cli"]


@pytest.fixture(scope="module")
def address(ray_cluster: str) -> Iterator[str]:
    """The cluster that every command of these tests joins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray_cluster)
        yield ray_cluster


@pytest.fixture(scope="module", autouse=True)
def joined(address: str) -> Iterator[Cluster]:
    """This process is connected for all of them, as joining takes seconds."""
    with connect() as cluster:
        yield cluster


@pytest.mark.slow
def test_calls_come_back_in_order_from_two_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with connect() as workers:
        found = workers.map(label, range(20), iter("abcdefghijklmnopqrst"), workers=2)
    assert [(number, text) for number, text, _, _ in found] == list(
        enumerate("abcdefghijklmnopqrst")
    )
    processes = {process for _, _, process, _ in found}
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert {folder for *_, folder in found} == {str(tmp_path)}


@pytest.mark.slow
def test_what_a_call_refuses_is_raised_as_it_was() -> None:
    with connect() as workers, pytest.raises(ArtifactError, match=r"^a model that is damaged$"):
        workers.map(refuse, range(50), workers=2)


@pytest.mark.slow
def test_nothing_to_do_is_no_work() -> None:
    with connect() as workers:
        assert workers.map(refuse, [], workers=2) == []
        assert list(workers.stream([], count_up, partial(start_double, 0), batch_size=4)) == []


@pytest.mark.slow
def test_a_stream_keeps_the_order_of_sources_and_rows() -> None:
    sources = [5, 0, 3000, 1, 700]
    with connect() as workers:
        found = list(workers.stream(sources, count_up, partial(start_double, 1), batch_size=16))
    assert [number for number, _ in found] == [2 * i + 1 for top in sources for i in range(top)]


@pytest.mark.slow
def test_a_stream_gives_what_came_before_an_error_and_raises_it() -> None:
    with connect() as workers:
        rows = workers.stream([3, -1, 2], count_up, partial(start_double, 0), batch_size=2)
        assert [next(rows)[0] for _ in range(3)] == [0, 2, 4]
        with pytest.raises(ConfigError, match=r"^a file that is gone$"):
            next(rows)


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why() -> None:
    with connect() as workers, pytest.raises(ArtifactError, match=r"^no model$"):
        list(workers.stream([3], count_up, partial(start_double, -1), batch_size=2))


@pytest.mark.slow
def test_a_worker_that_fits_on_no_machine_is_refused(joined: Cluster) -> None:
    assert joined.slots() == joined.slots(2) * 2 == 2
    with pytest.raises(ConfigError, match="expected a machine with 3 cores"):
        joined.slots(3)


def test_a_site_refuses_another_version_and_another_file_system(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected dcl 9\.9, .* install the same version"):
        Site(version="9.9").enter()
    with pytest.raises(ConfigError, match="every machine of the cluster has to see the same"):
        Site(folder=str(tmp_path / "gone")).enter()


def test_without_ray_the_command_to_install_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    log = write_lines(tmp_path / "log.jsonl", row_of("a", "fine"))
    result = attribute(log, "--engine", "ray", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert 'pip install "dcl-attribution[ray]"' in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [log]


def attribute(*args: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["attribute", *map(str, args)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long file, a short one, and one that is no log."""
    folder = tmp_path_factory.mktemp("logs")
    rows = [row_of(f"run-{i}", "the sum", "it is wrong " * (i % 9), "z" * 900) for i in range(400)]
    rows[200:200] = ['{"id": ', "[]"]
    write_lines(folder / "1.jsonl", *rows)
    write_lines(folder / "2.jsonl", row_of("last", "wrong"))
    (folder / "3.json").write_text("hello")
    return folder


@pytest.mark.slow
def test_a_cluster_writes_the_bytes_that_this_process_writes(
    logs: Path, model: Path, tmp_path: Path
) -> None:
    results = {}
    for engine in ("local", "ray"):
        for output in ("table", "jsonl"):
            out = tmp_path / f"{engine}.{output}"
            args = ("--model", model, "--engine", engine, "--output", output, "--out", out)
            done = attribute(logs, *args, "--fail-on", "0.6")
            results[engine, output] = (done.exit_code, done.stderr, out.read_bytes())
    assert results["ray", "jsonl"] == results["local", "jsonl"]
    assert results["ray", "table"] == results["local", "table"]
    code, said, lines = results["ray", "jsonl"]
    assert (code, lines.count(b"\n")) == (3, 401)
    assert said.count("error: ") == 3


@pytest.mark.slow
def test_a_cluster_names_a_model_that_is_missing(logs: Path, tmp_path: Path) -> None:
    result = attribute(logs, "--engine", "ray", "--model", tmp_path / "none")
    assert result.exit_code == 4
    assert str(tmp_path / "none") in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_cluster_reads_no_standard_input() -> None:
    result = attribute("-", "--engine", "ray")
    assert result.exit_code == 2
    assert "reads files only" in result.stderr


def words_of(logs: Path, model: Path, out: Path, engine: str) -> list[str]:
    args = ["attribute", str(logs), "--out", str(out), "--resume", "--engine", engine]
    return [*DCL, *args, "--model", str(model), "--fail-on", "0.6"]


@pytest.mark.slow
def test_killed_on_a_cluster_it_goes_on_there_or_here(
    logs: Path, model: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    subprocess.run(words_of(logs, model, whole, "local"), capture_output=True, timeout=120)
    kill_often(words_of(logs, model, out, "ray"), out, 2, seed=3)
    size = out.stat().st_size
    assert 0 < size < whole.stat().st_size or out.read_bytes() == whole.read_bytes()
    done = subprocess.run(words_of(logs, model, out, "ray"), capture_output=True, timeout=300)
    assert out.read_bytes() == whole.read_bytes()
    assert done.returncode == 3
    again = subprocess.run(words_of(logs, model, out, "local"), capture_output=True, timeout=120)
    assert again.returncode == 3
    assert out.read_bytes() == whole.read_bytes()
    assert again.stderr.splitlines()[-1] == done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_terminated_it_says_so(logs: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = words_of(logs, model, out, "ray")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not (out.exists() and out.stat().st_size):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode in (143, 3)  # 3 if it was done before
    assert stdout == b""
    assert b"Traceback" not in stderr


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_one_line(logs: Path, model: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "RAY_ADDRESS": "127.0.0.1:1",
        "RAY_gcs_rpc_server_connect_timeout_s": "1",
    }
    words = words_of(logs, model, tmp_path / "out.jsonl", "ray")
    done = subprocess.run(words, capture_output=True, timeout=300, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: RAY_ADDRESS=127.0.0.1:1: expected a cluster to join")
    assert done.stderr.count(b"\n") == 1
