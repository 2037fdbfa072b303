"""Feedback: what an attribution found is handed back as a hint, and the task is tried again."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from dcl.attribution import Attribution, Attributor
from injection.checkers import check
from injection.errors import CheckError, ModelError
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
        lost: Tasks that are in none of these, as a model gave no usable reply.
    """

    before: Share
    after: Share
    control: Share
    lost: int = 0


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
    groups: Iterable[Group],
    model: Model,
    attributor: Attributor,
    *,
    judge: Model | None = None,
    seed: int = 1,
) -> Repair:
    """Run every group, attribute the failures, and try those again.

    Args:
        groups: Systems on tasks.
        model: What the agents run on.
        attributor: Says who failed.
        judge: Judges free text; None leaves it to the checkers.
        seed: Of the control.

    Raises:
        BudgetError: If the budget is used up.
    """
    rng = random.Random(seed)
    tried = [_try(group, model, attributor, judge, rng) for group in groups]
    known = [solved for solved in tried if solved is not None]
    before, after, control = (
        Share(sum(solved[i] for solved in known), len(known)) for i in range(3)
    )
    return Repair(before, after, control, len(tried) - len(known))


def _try(
    group: Group, model: Model, attributor: Attributor, judge: Model | None, rng: random.Random
) -> tuple[bool, bool, bool] | None:
    """Whether a task is solved as it is, with the hint, and with the hint to anybody.

    None if a model gave no usable reply.
    """
    system, task = find_system(group.system), group.task

    def run_with(*hints: Hint) -> tuple[Run, bool]:
        run = run_system(system, task.question, model, hints)
        return run, check(task, run.answer, judge=judge).right

    try:
        run, right = run_with()
        if right:
            return True, True, True
        agent, hint = write_hint(attributor(run.trajectory(group.name, task.question, "failure")))
        control = Hint(rng.choice(_agents(run)), hint)
        return False, run_with(Hint(agent, hint))[1], run_with(control)[1]
    except (ModelError, CheckError):
        return None


def _agents(run: Run) -> list[str]:
    """Agents of a run."""
    return list(dict.fromkeys(call.agent for call in run.calls))
