from __future__ import annotations

from pathlib import Path

import pytest
from test_ladder import write_runs
from tiny import write_model

from benchmarks.cascade import SHARES, CascadeConfig, measure, to_markdown
from dcl.errors import ConfigError


def test_asks_more_the_more_is_settled(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs.jsonl", 60)
    models = [write_model(tmp_path / name) for name in ("cheap", "dear")]
    steps = measure(CascadeConfig(data=(runs,), cheap=models[0], dear=models[1], resamples=20))
    assert [step.valid for step in steps] == list(SHARES)
    asked = [step.test for step in steps]
    assert asked == sorted(asked)
    assert (asked[0], asked[-1]) == (0.0, 1.0)
    assert steps[0].run_ms < steps[-1].run_ms
    assert steps[0].scores["pair"].value == 1.0  # both know how `b` fails
    assert len(to_markdown(steps).splitlines()) == len(SHARES) + 2


def test_runs_of_both_splits_are_asked_for(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs.jsonl", 1)
    model = write_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="validation and of test questions"):
        measure(CascadeConfig(data=(runs,), cheap=model, dear=model))
