"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
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


# A runner in the background has these ignored, which the processes that tests start would inherit.
for _name in ("SIGINT", "SIGTERM", "SIGHUP"):
    _number = getattr(signal, _name, None)
    if _number is not None and signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _name == "SIGINT" else signal.SIG_DFL)
