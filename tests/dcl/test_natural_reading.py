from __future__ import annotations

from dataclasses import replace

import pytest
from labelled import make_example

from dcl.errors import ConfigError
from dcl.natural import MOST_OF_A_SYSTEM, learn_natural
from dcl.runtime import load
from dcl.trajectory import Example


def of_system(example: Example, name: str) -> Example:
    return replace(example, trajectory=replace(example.trajectory, metadata={"framework": name}))


def test_natural_failures_are_read_by_what_other_systems_share() -> None:
    network = load(injected=True)
    examples = [of_system(make_example(i), f"system {i % 6}") for i in range(30)]
    fitted, report = learn_natural(network, [examples[:15], examples[15:]])
    assert (report.runs, report.systems) == (30, 6)
    assert report.agent == 1.0 > report.before[0]  # always the coder
    assert report.step >= report.before[1] > 0  # at the same place
    assert "turns" in fitted.parts


def test_one_system_does_not_lead_and_too_few_are_refused() -> None:
    network = load(injected=True)
    same = [of_system(make_example(0), "one")] * (MOST_OF_A_SYSTEM + 5)
    with pytest.raises(
        ConfigError, match=r"at least 5 systems, named by metadata\.framework, got 1"
    ):
        learn_natural(network, [same])
    others = [of_system(make_example(i), f"system {i}") for i in range(5)]
    sound = replace(same[0], faults=())
    _, report = learn_natural(network, [[*same, *[sound] * 40], others])
    assert report.runs + report.sound == MOST_OF_A_SYSTEM + 5
    assert report.sound > 0
