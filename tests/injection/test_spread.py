from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from test_records import SMALL, in_order, small
from typer.testing import CliRunner

from injection.__main__ import app
from injection.endpoint import EndpointConfig
from injection.records import LEDGER
from injection.run import RunConfig, collect
from injection.spread import share_limits, spread_ray

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small collection of `test_records` as a file."""
    file = tmp_path_factory.mktemp("config") / "small.yaml"
    keys = {**SMALL, "systems": list(SMALL["systems"]), "plans": {"per_task": 3}}
    file.write_text(yaml.safe_dump({"out": "replaced", "workers": 2, **keys}))
    return file


def start(config: Path, out: Path, address: str) -> subprocess.Popen[bytes]:
    args = ["run", "--config", str(config), "--out", str(out), "--executor", "ray"]
    environment = {**os.environ, "RAY_ADDRESS": address}
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "injection", *args]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=quiet, stderr=quiet)


@pytest.mark.slow
def test_a_cluster_finds_the_records_that_one_machine_finds(
    config: Path, tmp_path: Path, ray_cluster: str
) -> None:
    collect(small(tmp_path / "local"))
    child = start(config, tmp_path / "ray", ray_cluster)
    ledger = tmp_path / "ray" / LEDGER
    while child.poll() is None and not (ledger.is_file() and ledger.stat().st_size > 2000):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=60)
    killed = ledger.read_bytes()
    assert start(config, tmp_path / "ray", ray_cluster).wait(timeout=300) == 0
    assert ledger.read_bytes().startswith(killed[: killed.rfind(b"\n") + 1])
    assert in_order(tmp_path / "ray") == in_order(tmp_path / "local")


def test_nothing_left_to_do_starts_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = RunConfig(out=str(tmp_path), systems=("macnet_chain",), tasks_per_file=1, workers=1)
    first = collect(config)
    assert collect(config, spread_ray) == first


def test_without_ray_the_command_to_install_it_is_named(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    args = ["run", "--config", str(config), "--out", str(tmp_path / "out"), "--executor"]
    done = CliRunner().invoke(app, [*args, "ray"])
    assert done.exit_code == 2
    assert 'pip install "dcl-attribution[ray]"' in done.stderr
    done = CliRunner().invoke(app, [*args, "spark"])
    assert done.exit_code == 2
    assert "expected local or ray, got 'spark'" in done.stderr


def test_limits_of_an_endpoint_are_shared_out() -> None:
    limits = EndpointConfig(budget_calls=100, budget_tokens=3, requests_per_minute=60)
    share = share_limits(RunConfig(out="x", workers=8, endpoint=limits)).endpoint
    assert (share.budget_calls, share.budget_tokens) == (12, 1)
    assert share.requests_per_minute == 7.5
    free = share_limits(RunConfig(out="x", workers=8)).endpoint
    assert free == EndpointConfig()
