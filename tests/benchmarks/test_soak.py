from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tiny import make_run, write_model

from benchmarks.soak import SoakConfig, soak, to_text
from dcl.errors import ConfigError
from dcl.runtime import load


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "log.jsonl"
    runs = [
        make_run(("a", "the sum"), ("b", "is wrong"), ("a", "again"), ("b", "again"), id="1"),
        make_run(("b", "wrong"), ("a", "skip"), id="2"),
        make_run(("a", "the sum"), ("a", "is"), ("b", "is"), id="3"),
    ]
    file.write_text("".join(run.to_json() + "\n" for run in runs))
    return file


def test_a_short_soak_is_sound(tmp_path: Path, log: Path) -> None:
    model = write_model(tmp_path / "model")
    config = SoakConfig(runs=20, data=(log,), queue=20, compare=100, malformed=0.05, reader_s=0.01)
    report = soak(config, partial(load, model, threads=1), offers=600)
    assert report.is_sound, to_text(report)
    assert report.offered + report.malformed == 600
    assert report.stats["refused_malformed"] == report.malformed > 0
    assert report.stats["reloads"] == 1
    assert report.compared > 0
    assert report.differing == 0
    assert "sound: yes" in to_text(report)


def test_a_soak_needs_runs() -> None:
    with pytest.raises(ConfigError, match="expected logs with runs"):
        soak(SoakConfig(data=()), load)
