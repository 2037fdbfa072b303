"""Which faults are injected where: sampled at random, or by a design that balances what matters."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from dcl.errors import ConfigError
from dcl.taxonomy import MODES, ErrorMode
from injection.manipulator import STRATEGIES, Injection, Strategy
from injection.session import Call

Design = Literal["balanced", "sampled"]

_CELLS: tuple[tuple[ErrorMode, Strategy], ...] = tuple(product(MODES, STRATEGIES))
_THIRDS = 3


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How many faults are injected, and which."""

    design: Design = "balanced"
    """`balanced` goes through all modes, strategies, thirds of the run and numbers of faults in
    turn; `sampled` draws each at random."""
    per_task: int = 8
    """Plans for each task and system; > 0."""
    max_faults: int = 3
    """Most faults in a plan; > 0."""
    every_share: float = 0.25
    """Share of faults that strike at every call of their agent, 0 to 1."""
    benign: int = 1
    """Rewrites without a fault for each task and system; >= 0."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.per_task < 1 or self.max_faults < 1 or self.benign < 0:
            raise ConfigError("plans: expected per_task and max_faults > 0 and benign >= 0")
        if not 0 <= self.every_share <= 1:
            raise ConfigError(f"plans.every_share: expected 0 to 1, got {self.every_share}")


@dataclass(frozen=True, slots=True)
class Plan:
    """Faults to inject into one run.

    Args:
        system: Name of the system.
        task: Benchmark and id of the task.
        injections: At least one; each hits other calls.
        seed: Of the wording.
    """

    system: str
    task: str
    injections: tuple[Injection, ...]
    seed: int

    @property
    def id(self) -> str:
        """16 hex digits that stand for the plan; the same on every machine."""
        faults = [injection.to_dict() for injection in self.injections]
        text = json.dumps([self.system, self.task, faults, self.seed])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def is_benign(self) -> bool:
        """Whether nothing in it is a fault."""
        return all(injection.mode is None for injection in self.injections)


def make_plans(
    config: PlanConfig, system: str, task: str, calls: Sequence[Call], *, group: int, seed: int
) -> list[Plan]:
    """Plans for one system on one task.

    Args:
        config: How many and which.
        system: Name of the system.
        task: Name of the task.
        calls: Calls of the clean run; only what really takes place is attacked.
        group: Number of the (system, task) pair, so that a design goes on from pair to pair.
        seed: Of everything.

    Returns:
        Plans without repeats; the same for the same arguments.
    """
    rng = random.Random(f"{seed}:{system}:{task}")
    drawn = (_design if config.design == "balanced" else _sample)(config, calls, group, rng)
    plans = [Plan(system, task, injections, seed) for injections in drawn]
    for _ in range(config.benign):
        call = rng.choice(calls)
        plans.append(
            Plan(system, task, (Injection(call.agent, None, "response_corruption", call.nth),), seed)
        )
    return list({plan.id: plan for plan in plans}.values())


def _design(
    config: PlanConfig, calls: Sequence[Call], group: int, rng: random.Random
) -> Iterator[tuple[Injection, ...]]:
    """Every cell of mode and strategy in turn; then the next third of the run and length."""
    for number in range(group * config.per_task, (group + 1) * config.per_task):
        lap, cell = divmod(number, len(_CELLS))
        third = (lap + cell) % _THIRDS
        faults = 1 + (lap // _THIRDS + cell) % config.max_faults
        mode, strategy = _CELLS[cell]
        start, stop = (len(calls) * (third + i) // _THIRDS for i in range(2))
        first = rng.choice(calls[start:stop] or calls)
        yield _fill(config, first, mode, strategy, calls, faults, rng)


def _sample(
    config: PlanConfig, calls: Sequence[Call], group: int, rng: random.Random
) -> Iterator[tuple[Injection, ...]]:
    """Everything at random."""
    for _ in range(config.per_task):
        mode, strategy = rng.choice(_CELLS)
        faults = rng.randint(1, config.max_faults)
        yield _fill(config, rng.choice(calls), mode, strategy, calls, faults, rng)


def _fill(
    config: PlanConfig,
    first: Call,
    mode: ErrorMode,
    strategy: Strategy,
    calls: Sequence[Call],
    faults: int,
    rng: random.Random,
) -> tuple[Injection, ...]:
    """A plan around its first fault; others are drawn for other agents."""
    injections = [_aim(config, first, mode, strategy, rng)]
    while len(injections) < faults:
        taken = {injection.agent for injection in injections}
        free = [call for call in calls if call.agent not in taken]
        if not free:
            break
        other_mode, other_strategy = rng.choice(_CELLS)
        injections.append(_aim(config, rng.choice(free), other_mode, other_strategy, rng))
    return tuple(injections)


def _aim(
    config: PlanConfig, call: Call, mode: ErrorMode, strategy: Strategy, rng: random.Random
) -> Injection:
    """A fault in one call, or in every call of its agent."""
    every = rng.random() < config.every_share
    return Injection(call.agent, mode, strategy, None if every else call.nth)
