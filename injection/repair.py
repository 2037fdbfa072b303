"""Feedback: what an attribution found is handed back as a hint, and the task is tried again."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from dcl.attribution import Attribution, Attributor
from injection.checkers import check
from injection.intervene import Hint
from injection.run import Group
from injection.session import Model, Run, run_system
from injection.systems import find_system


@dataclass(frozen=True, slots=True)
class Share:
    """A share of successes with its 95 % interval (Wilson).

    Args:
        hits: Successes.
        total: Tries; > 0.
    """

    hits: int
    total: int

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper end, 0 to 1."""
        return wilson(self.hits, self.total)

    def __str__(self) -> str:
        """As in a report."""
        low, high = self.interval
        share = 100 * self.hits / max(self.total, 1)
        return f"{share:.1f} % [{100 * low:.1f}, {100 * high:.1f}] of {self.total}"


def wilson(hits: int, total: int) -> tuple[float, float]:
    """95 % interval of a share.

    Source: Wilson, Probable inference (JASA 1927).
    """
    if total == 0:
        return 0.0, 1.0
    z, p = 1.959964, hits / total
    middle = p + z * z / (2 * total)
    half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


@dataclass(frozen=True, slots=True)
class Repair:
    """Success of a system before and after feedback.

    Args:
        before: All tasks, as they are.
        after: All tasks; those that failed are tried again with the hint.
        control: The same with the hint given to an agent drawn at random.
    """

    before: Share
    after: Share
    control: Share


def write_hint(attribution: Attribution) -> tuple[str, str]:
    """Agent and hint of the most probable fault.

    Args:
        attribution: Of a failed run.
    """
    finding = attribution.findings(top_k=1)[0]
    mode = finding.fault.mode
    fault = f"{mode.title.lower()}: {mode.definition}" if mode else "it failed."
    return finding.fault.agent, (
        f"An earlier attempt failed. At step {finding.fault.step} this happened to you: {fault} "
        "Take another look at that this time."
    )


def repair(
    groups: Iterable[Group], model: Model, attributor: Attributor, *, seed: int = 1
) -> Repair:
    """Run every group, attribute the failures, and try those again.

    Args:
        groups: Systems on tasks.
        model: What the agents run on.
        attributor: Says who failed.
        seed: Of the control.
    """
    total = before = after = control = 0
    rng = random.Random(seed)
    for group in groups:
        total += 1
        system, task = find_system(group.system), group.task
        run = run_system(system, task.question, model)
        if check(task, run.answer).right:
            before += 1
            continue
        attribution = attributor(run.trajectory(group.name, task.question, "failure"))
        agent, hint = write_hint(attribution)
        after += _retry(group, model, agent, hint)
        control += _retry(group, model, rng.choice(_agents(run)), hint)
    return Repair(
        Share(before, total), Share(before + after, total), Share(before + control, total)
    )


def _retry(group: Group, model: Model, agent: str, hint: str) -> bool:
    """Whether the task is solved with a hint for one agent."""
    run = run_system(find_system(group.system), group.task.question, model, [Hint(agent, hint)])
    return check(group.task, run.answer).right


def _agents(run: Run) -> list[str]:
    """Agents of a run."""
    return list(dict.fromkeys(call.agent for call in run.calls))
