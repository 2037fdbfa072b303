from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from worlds import STORY, Parrot, prover, story_task

from dcl.taxonomy import ErrorMode
from dcl.trajectory import Trajectory, Turn
from injection.importance import (
    flow_back,
    importance_by_reuse,
    importance_of,
    mas_effect,
    normalise,
    weigh_ratings,
    weigh_reuse,
)
from injection.manipulator import Injection, Strategy
from injection.plans import Plan
from injection.scripted import Scripted
from injection.session import run_system
from injection.systems import Debate, Dylan, MacNet

CORRUPT: Strategy = "response_corruption"


def slow_flow(weights: NDArray[Any], seeds: NDArray[Any]) -> NDArray[Any]:
    """The recursion as it is written, without an order of its own."""

    def credit(source: int) -> float:
        later = range(source + 1, len(seeds))
        return float(seeds[source] + sum(weights[source, i] * credit(i) for i in later))

    return np.array([credit(j) for j in range(len(seeds))])


@given(st.integers(1, 6), st.integers(0, 99))
def test_credit_flows_back_as_the_formula_says(turns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = normalise(np.triu(rng.integers(0, 6, (turns, turns)), 1).astype(float))
    seeds = rng.random(turns)
    assert flow_back(weights, seeds) == pytest.approx(slow_flow(weights, seeds))


def test_ratings_weigh_what_an_agent_was_shown() -> None:
    replies = ["Answer: 1", "Answer: 2", "Answer: 2\nRatings: [1, 4]", "Answer: 3\nRatings: [0, 0]"]
    run = run_system(Dylan(agents=2, rounds=2), STORY, Parrot(*replies))
    weights = weigh_ratings(run)
    assert weights[:2, 2].tolist() == pytest.approx([0.2, 0.8])
    assert weights[:2, 3].tolist() == [0.5, 0.5]
    scores = importance_of(run)
    assert scores.turns.tolist() == pytest.approx([0.2, 0.8, 1.0, 0.0])
    assert scores.agents == ("Assistant1", "Assistant2")
    assert scores.scores.tolist() == pytest.approx([1.2, 0.8])
    assert scores.select(1) == ("Assistant1",)


def test_each_round_of_a_run_shares_a_credit_of_one() -> None:
    run = run_system(Debate(), STORY, Scripted(1, skill=1.0, slip=0.0))
    credit = importance_of(run).turns
    assert credit[6] == pytest.approx(1.0)
    assert credit[3:6].sum() == pytest.approx(1.0)
    assert credit[:3].sum() == pytest.approx(1.0)


def test_reuse_of_content_weighs_edges_of_any_log() -> None:
    turns = (Turn("A", "the key is 4711"), Turn("B", "green paint"), Turn("C", "so 4711 it is"))
    run = Trajectory("x", "the task", turns)
    weights = weigh_reuse(run)
    assert weights[0, 2] == 1.0
    assert weights[1].sum() == 0.0
    scores = importance_by_reuse(run)
    assert scores.agents == ("A", "B", "C")
    assert scores.scores[0] > scores.scores[1] == 0.0


def effect(system: object, *faults: Injection, **luck: float) -> str:
    prove = prover(system, story_task(), **({"skill": 1.0, "slip": 0.0, "care": 0.0} | luck))  # type: ignore[arg-type]
    plan = Plan("x", "t", faults, 1)
    assert prove.prove(plan).outcome == "proved"
    return mas_effect(prove, plan)


def test_effects_of_several_agents_are_told_apart() -> None:
    two = [Injection(f"Assistant{i}", ErrorMode.FM_3_1, CORRUPT, 1) for i in (1, 2)]
    assert effect(Debate(), *two) == "composed"
    assert effect(Debate(), Injection("Aggregator", ErrorMode.FM_3_1, CORRUPT, 0)) == "unchanged"


def test_an_error_that_others_take_over_is_amplified() -> None:
    found = []
    for seed in range(12):
        prove = prover(MacNet("chain"), story_task())
        prove.model = Scripted(seed, skill=0.4, slip=0.0, care=0.0)
        for node in range(3):
            fault = Injection(f"Node{node}", ErrorMode.FM_3_3, CORRUPT)
            plan = Plan("x", "t", (fault,), 1)
            if prove.prove(plan).outcome == "proved":
                found.append(mas_effect(prove, plan))
    assert found.count("amplified") >= 1, found
    assert set(found) <= {"amplified", "unchanged", "emergent"}


def test_what_needs_other_agents_is_emergent() -> None:
    fault = Injection("Aggregator", ErrorMode.FM_2_5, CORRUPT, 0)
    assert effect(Debate(), fault) == "emergent"
