"""Labels to arrays: what the network should have said about one run.

Letters: `T` turns, `A` agents, `M` = 14 modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcl.taxonomy import MODES
from dcl.trajectory import Example

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Labels of one run on the axes of its logits.

    Args:
        agent: `(A,)` float32, 0 or 1: did it fail?
        mode: `(M,)` float32, 0 or 1: did it occur, be it in an agent who never speaks?
        pair: `(A, M)` float32, 0 or 1: did this agent fail in this way?
        step: `(T,)` float32, softened; sums to 1, or is all 0 where the step is unknown.
        known: Whether modes are labelled; if not, only agents and steps count.
        lost_agents: Faulty agents who never speak; they can only be missed.
        lost_pairs: Pairs of such an agent with a mode.
    """

    agent: Floats
    mode: Floats
    pair: Floats
    step: Floats
    known: bool = True
    lost_agents: int = 0
    lost_pairs: int = 0


def make_targets(example: Example, sigma: float) -> Targets:
    """Labels of one example as arrays; without any fault, all of them are 0.

    Args:
        example: A labelled example.
        sigma: Width of the softened step target in turns.
    """
    trajectory = example.trajectory
    position = {agent: a for a, agent in enumerate(trajectory.agents)}
    agent = np.zeros(len(position), dtype=np.float32)
    mode = np.zeros(len(MODES), dtype=np.float32)
    pair = np.zeros((len(position), len(MODES)), dtype=np.float32)
    turns: list[int] = []
    faults = example.faults or ()
    for fault in faults:
        if fault.mode is not None:
            mode[fault.mode.index] = 1.0
        if fault.agent not in position:
            continue
        agent[position[fault.agent]] = 1.0
        if fault.mode is not None:
            pair[position[fault.agent], fault.mode.index] = 1.0
        if fault.step is not None:
            turn = trajectory.turn_at(fault.step, fault.agent)
            turns += [] if turn is None else [turn]
    silent = {fault for fault in faults if fault.agent not in position}
    return Targets(
        agent=agent,
        mode=mode,
        pair=pair,
        step=soften_steps(turns, len(trajectory.turns), sigma),
        known=all(fault.mode is not None for fault in faults),
        lost_agents=len({fault.agent for fault in silent}),
        lost_pairs=len({(fault.agent, fault.mode) for fault in silent}),
    )


def soften_steps(turns: Sequence[int], count: int, sigma: float) -> Floats:
    """Gaussian target around each labelled turn.

    Args:
        turns: 0-based labelled turns of one trajectory; may be empty.
        count: Number of turns `T`.
        sigma: Width in turns; 0 gives a one-hot target.

    Returns:
        `(T,)` float32, sums to 1, or to 0 where `turns` is empty.

    Source:
        AgenTracer (arXiv 2509.03312), eq. of r_step with sigma = 1, as a distribution.
    """
    if not turns:
        return np.zeros(count, dtype=np.float32)
    distance = np.arange(count)[None, :] - np.array(turns)[:, None]  # (N, T)
    weight = (
        (distance == 0).astype(np.float64)
        if sigma == 0
        else np.exp(-(distance**2) / (2 * sigma**2))
    )
    target: Floats = (weight / weight.sum(axis=1, keepdims=True)).mean(axis=0).astype(np.float32)
    return target
