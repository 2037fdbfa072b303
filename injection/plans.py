"""Which faults are injected where: sampled at random, or by a design that balances what matters."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from dcl.errors import ConfigError
from dcl.taxonomy import MODES, ErrorMode
from injection.anatomy import dissect
from injection.manipulator import STRATEGIES, Injection, Strategy
from injection.session import Brief, Call, Run, others_in

Design = Literal["balanced", "sampled"]

_CELLS: tuple[tuple[ErrorMode, Strategy], ...] = tuple(product(MODES, STRATEGIES))


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How many faults are injected, and which."""

    design: Design = "balanced"
    """`balanced` goes through modes, strategies, parts of the run and numbers of faults in turn;
    `sampled` draws each at random."""
    per_task: int = 8
    """Plans for each task and system; > 0."""
    max_faults: int = 3
    """Most faults in a plan; > 0."""
    more_of: tuple[str, ...] = ()
    """Codes of modes that rarely break a run; each gets a further place in the balanced design."""
    places: tuple[int, ...] = (1, 1, 1)
    """Plans for each part of a run, relative to one another, from its first to its last part, each
    0 to 100. Early faults are outvoted or corrected more often, so more of them must be tried for
    as many records."""
    every_share: float = 0.25
    """Share of faults that strike at every call of their agent, 0 to 1."""
    benign: int = 1
    """Rewrites without a fault for each task and system; >= 0."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.per_task < 1 or self.max_faults < 1 or self.benign < 0:
            raise ConfigError("plans: expected per_task and max_faults > 0 and benign >= 0")
        try:
            _ = [ErrorMode.parse(code) for code in self.more_of]
        except ValueError as error:
            raise ConfigError(f"plans.more_of: {error}") from None
        if not any(self.places) or not 0 <= min(self.places) <= max(self.places) <= 100:
            raise ConfigError(
                f"plans.places: expected whole numbers from 0 to 100, not all 0, got {self.places}"
            )
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
    config: PlanConfig, system: str, task: str, clean: Run, *, group: int, seed: int
) -> list[Plan]:
    """Plans for one system on one task.

    Args:
        config: How many and which.
        system: Name of the system.
        task: Name of the task.
        clean: The clean run; only what really takes place is attacked.
        group: Number of the (system, task) pair, so that a design goes on from pair to pair.
        seed: Of everything.

    Returns:
        Plans without repeats; the same for the same arguments.
    """
    rng = random.Random(f"{seed}:{system}:{task}")
    drawn = (_design if config.design == "balanced" else _sample)(config, clean, group, seed, rng)
    plans = [Plan(system, task, injections, seed) for injections in drawn]
    for _ in range(config.benign):
        call = rng.choice(clean.calls)
        fault = Injection(call.agent, None, "response_corruption", call.nth)
        plans.append(Plan(system, task, (fault,), seed))
    return list({plan.id: plan for plan in plans}.values())


def suitability(mode: ErrorMode, call: Call, reply: str) -> int:
    """How well a mode can show in a call: 0 not at all, 1 maybe, 2 surely.

    Args:
        mode: The mode.
        call: A call of the clean run.
        reply: What it gave.
    """
    history = Brief.parse(call.prompt).history
    if mode is ErrorMode.FM_2_5:
        return int(bool(others_in(history, call.agent)))
    if mode is ErrorMode.FM_2_1:
        return int(bool(history) or "Step 2" in reply)
    if mode is ErrorMode.FM_3_2:
        parts = dissect(reply)
        checked = {part.expression: part.value for part in parts if part.kind == "check"}
        corrects = any(
            part.kind == "step" and checked.get(part.expression, part.value) != part.value
            for part in parts
        )
        return 2 if corrects else int(any(part.kind == "check" for part in parts))
    return 1


def _design(
    config: PlanConfig, clean: Run, group: int, seed: int, rng: random.Random
) -> Iterator[tuple[Injection, ...]]:
    """Every cell of mode and strategy in turn; then the next part of the run and length.

    Each lap through the cells has an order of its own, so that no system sees some cells only.
    """
    more = tuple(product(map(ErrorMode.parse, config.more_of), STRATEGIES))
    cells = (*_CELLS, *more)
    places = [place for place, count in enumerate(config.places) for _ in range(count)]
    for number in range(group * config.per_task, (group + 1) * config.per_task):
        lap, place = divmod(number, len(cells))
        order = random.Random(f"{seed}:{lap}").sample(range(len(cells)), len(cells))
        cell = order[place]
        part = places[(lap + cell) % len(places)]
        faults = 1 + (lap // len(places) + cell) % config.max_faults
        mode, strategy = cells[cell]
        inside = _part(clean, part, len(config.places))
        first = _choose(inside, clean, mode, rng)
        yield _fill(config, first, mode, strategy, clean, faults, inside, rng)


def _part(clean: Run, part: int, parts: int) -> range:
    """Numbers of the calls in one of several equal parts of a run."""
    return range(*(len(clean.calls) * (part + i) // parts for i in range(2)))


def _choose(inside: range, clean: Run, mode: ErrorMode, rng: random.Random) -> Call:
    """A call in a part of the run, or anywhere else if the mode cannot show there."""
    fit = {
        call.index: suitability(mode, call, clean.events[clean.event_of(call.index)].content)
        for call in clean.calls
    }
    best = max(fit.values())
    fitting = [call for call in clean.calls if fit[call.index] == best]
    return rng.choice([call for call in fitting if call.index in inside] or fitting)


def _sample(
    config: PlanConfig, clean: Run, group: int, seed: int, rng: random.Random
) -> Iterator[tuple[Injection, ...]]:
    """Everything at random."""
    for _ in range(config.per_task):
        mode, strategy = rng.choice(_CELLS)
        faults = rng.randint(1, config.max_faults)
        first = rng.choice(clean.calls)
        yield _fill(config, first, mode, strategy, clean, faults, range(0), rng)


def _fill(
    config: PlanConfig,
    first: Call,
    mode: ErrorMode,
    strategy: Strategy,
    clean: Run,
    faults: int,
    inside: range,
    rng: random.Random,
) -> tuple[Injection, ...]:
    """A plan around its first fault; others are drawn for other agents, near by if possible.

    Faults in the same part of a run can break together what each alone would not.
    """
    injections = [_aim(config, first, mode, strategy, rng)]
    while len(injections) < faults:
        taken = {injection.agent for injection in injections}
        free = [call for call in clean.calls if call.agent not in taken]
        if not free:
            break
        near = [call for call in free if call.index in inside]
        other_mode, other_strategy = rng.choice(_CELLS)
        injections.append(_aim(config, rng.choice(near or free), other_mode, other_strategy, rng))
    return tuple(injections)


def _aim(
    config: PlanConfig, call: Call, mode: ErrorMode, strategy: Strategy, rng: random.Random
) -> Injection:
    """A fault in one call, or in every call of its agent."""
    every = rng.random() < config.every_share
    return Injection(call.agent, mode, strategy, None if every else call.nth)
