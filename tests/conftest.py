"""Fixtures for all tests."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import dcl.runtime  # noqa: F401  before any test: it keeps the telemetry of onnxruntime off

# No test asserts a time: how fast examples are made and run depends on the machine.
settings.register_profile("dcl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dcl")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the real traces: `DCL_DATA`, else `shared/data` beside the checkout."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("DCL_DATA") or default)
    if not folder.is_dir():
        pytest.skip(f"no real traces at {folder}; set DCL_DATA")
    return folder


_HEAD = """
import sys
from dcl.cluster import import_ray
ray = import_ray()
ray.init("local", num_cpus=2, object_store_memory=100 << 20, include_dashboard=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Address of a Ray cluster on this machine with two workers, which runs until the end."""
    if find_spec("ray") is None:
        pytest.skip("needs Ray")
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    # A process of its own: Ray would leave children and open files in this one.
    command = [sys.executable, "-c", _HEAD]
    with pytest.MonkeyPatch.context() as patch:
        # Workers find the modules that tests share by the path of the process they come from.
        for folder in (Path(__file__).parent / "dcl", Path(__file__).parents[1]):
            patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.setenv("RAY_AUTH_MODE", "token")  # for all processes, before any of them loads Ray
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True) as head:
            assert head.stdin is not None
            assert head.stdout is not None
            address = head.stdout.readline().strip()
            assert address, "Ray did not start"
            yield address
            head.stdin.close()


# A runner in the background has these ignored, which the processes that tests start would inherit.
for _name in ("SIGINT", "SIGTERM", "SIGHUP"):
    _number = getattr(signal, _name, None)
    if _number is not None and signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _name == "SIGINT" else signal.SIG_DFL)
