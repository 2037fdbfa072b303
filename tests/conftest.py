"""Fixtures for all tests."""

from __future__ import annotations

import os
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
