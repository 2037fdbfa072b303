from __future__ import annotations

import math

import numpy as np
import pytest
from tiny import make_run

from dcl.targets import make_targets, soften_steps
from dcl.taxonomy import ErrorMode
from dcl.trajectory import Example, Fault, Trajectory, Turn

RUN = Trajectory(
    "r",
    "the task",
    (Turn("a", "x", step=5), Turn("b", "y", step=5), Turn("a", "z", step=7)),
)


def test_targets_of_a_labelled_run() -> None:
    faults = (
        Fault("b", ErrorMode.FM_2_4, 5),
        Fault("a", ErrorMode.FM_1_1),
        Fault("b", ErrorMode.FM_3_3),
    )
    got = make_targets(Example(RUN, faults), 0.0)
    assert np.argwhere(got.pair).tolist() == [[0, 0], [1, 8], [1, 13]]
    assert got.agent.tolist() == [1, 1]
    assert np.flatnonzero(got.mode).tolist() == [0, 8, 13]
    assert got.step.tolist() == [0, 1, 0]  # of the two turns numbered 5, the one of b
    assert got.known
    assert (got.lost_agents, got.lost_pairs) == (0, 0)


def test_several_steps_share_the_target() -> None:
    faults = (Fault("a", ErrorMode.FM_1_1, 5), Fault("a", ErrorMode.FM_1_2, 7))
    assert make_targets(Example(RUN, faults), 0.0).step.tolist() == [0.5, 0, 0.5]
    soft = make_targets(Example(RUN, faults), 1.0).step
    assert soft.sum() == pytest.approx(1)
    assert soft[1] > 0


def test_agents_who_never_speak_are_lost_but_their_modes_occurred() -> None:
    faults = (
        Fault("Agent1", ErrorMode.FM_1_1, 5),
        Fault("Agent1", ErrorMode.FM_2_6),
        Fault("c", ErrorMode.FM_2_6),
        Fault("a", ErrorMode.FM_1_1),
    )
    run = make_run(("Agent12", "x"), ("a", "y"))
    got = make_targets(Example(run, faults), 0.0)
    assert (got.lost_agents, got.lost_pairs) == (2, 3)
    assert got.agent.tolist() == [0, 1]
    assert np.argwhere(got.pair).tolist() == [[1, 0]]
    assert np.flatnonzero(got.mode).tolist() == [0, 10]
    assert not got.step.any()


def test_a_step_that_no_turn_has_is_unknown() -> None:
    assert not make_targets(Example(RUN, (Fault("a", ErrorMode.FM_1_1, 1),)), 0.0).step.any()


def test_a_run_known_to_be_free_of_faults_is_all_zeros() -> None:
    got = make_targets(Example(RUN, ()), 1.0)
    assert not any(part.any() for part in (got.agent, got.mode, got.pair, got.step))
    assert got.known


def test_a_fault_without_a_mode_is_known_by_its_agent_alone() -> None:
    got = make_targets(Example(RUN, (Fault("b", None, 5),)), 0.0)
    assert not got.pair.any()
    assert got.agent.tolist() == [0, 1]
    assert got.step.tolist() == [0, 1, 0]
    assert not got.known


@pytest.mark.parametrize("sigma", [0.0, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("turns", [[0], [4], [2, 3], [1, 1, 4]])
def test_soften_steps_follows_its_formula(turns: list[int], sigma: float) -> None:
    T = 5
    slow = [0.0] * T
    for turn in turns:
        weight = [
            float(t == turn) if sigma == 0 else math.exp(-((t - turn) ** 2) / (2 * sigma**2))
            for t in range(T)
        ]
        for t in range(T):
            slow[t] += weight[t] / sum(weight) / len(turns)
    assert soften_steps(turns, T, sigma).tolist() == pytest.approx(slow, abs=1e-6)


def test_a_softened_target_is_highest_at_the_label() -> None:
    target = soften_steps([3], 8, 1.0)
    assert target.argmax() == 3
    assert target[2] == target[4] > target[1]
