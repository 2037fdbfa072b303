from __future__ import annotations

from pathlib import Path

import pytest
from tiny import make_run, write_model

from benchmarks.turncost import TurnCost, measure, to_markdown
from dcl.attribution import Attributor
from dcl.errors import ConfigError
from dcl.runtime import load


@pytest.fixture
def attributor(tmp_path: Path) -> Attributor:
    return load(write_model(tmp_path / "model"), threads=1)


def test_a_turn_is_measured_at_every_length(attributor: Attributor, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(make_run(*[("a", f"the sum is {i} wrong again") for i in range(12)]).to_json())
    costs = list(measure(attributor, [log], lengths=[2, 5], tokens=6, repeats=2))
    assert [cost.turns for cost in costs] == [2, 5]
    assert all(cost.encoder_ms > 0 and cost.turn_ms > 0 for cost in costs)


def test_turns_of_the_size_are_needed(attributor: Attributor, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(make_run(("a", "the sum")).to_json())
    with pytest.raises(ConfigError, match="expected 10 turns of about 128 tokens, found 0"):
        list(measure(attributor, [log], lengths=[2]))


def test_the_table() -> None:
    assert to_markdown([TurnCost(20, 10.0, 12.5)]).splitlines()[-1] == "| 20 | 10.0 | 12.5 | 1.25 |"
