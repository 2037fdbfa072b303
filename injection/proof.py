"""Did the injected fault cause the failure? Found out by running it again without the fault.

Source: Aegis (arXiv 2509.14295) for what is kept: right without, wrong with. AgenTracer (arXiv
2509.03312) for the counterfactual: restore a call, run on, and see whether the failure is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from injection.checkers import Verdict, check
from injection.errors import AttackError
from injection.manipulator import Attack, Firing, Manipulator
from injection.plans import Plan
from injection.session import Call, Cost, Model, Reply, Run, System, run_system
from injection.tasks import Task

Outcome = Literal[
    "proved", "clean_wrong", "no_attack", "still_right", "resisted", "benign", "benign_broke"
]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run under attack.

    Args:
        run: The run.
        verdict: Whether its answer is right.
        firings: What each injection did, in their order; empty for one that did nothing.
    """

    run: Run
    verdict: Verdict
    firings: tuple[tuple[Firing, ...], ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """A run with some of the faults taken out.

    Args:
        removed: Positions of the faults that were taken out.
        right: Whether the answer was right then.
        answer: What the checker took for the answer.
        idle: Positions of faults that stayed in and could not act, as the turn became another one.
    """

    removed: tuple[int, ...]
    right: bool
    answer: str
    idle: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Plain JSON."""
        return {
            "removed": list(self.removed),
            "right": self.right,
            "answer": self.answer[:200],
            "idle": list(self.idle),
        }


@dataclass(frozen=True, slots=True)
class Proof:
    """What became of a plan.

    Args:
        plan: The plan.
        outcome: `proved` and `benign` give records, all else is only counted.
        reason: Why not, in words.
        faulty: The attacked run, where there is one.
        replays: Runs with faults taken out.
        minimal: The smallest sets of faults whose removal makes the run right, by position.
        cost: What all of it took.
    """

    plan: Plan
    outcome: Outcome
    reason: str = ""
    faulty: Attempt | None = None
    replays: tuple[Replay, ...] = ()
    minimal: tuple[tuple[int, ...], ...] = ()
    cost: Cost = field(default_factory=Cost)

    @property
    def decisive(self) -> frozenset[int]:
        """Faults in any smallest set: each of them is needed for the failure."""
        return frozenset(i for subset in self.minimal for i in subset)


@dataclass(slots=True)
class Prover:
    """Runs one system on one task, clean and under attack.

    Args:
        system: The system.
        task: The task.
        model: Answers its calls.
        manipulator: Rewrites texts.
        judge: Judges free text; None leaves it to the checkers.
    """

    system: System
    task: Task
    model: Model
    manipulator: Manipulator
    judge: Model | None = None
    _clean: Attempt | None = field(default=None, init=False)

    @property
    def clean(self) -> Attempt:
        """The run without any attack."""
        if self._clean is None:
            run = run_system(self.system, self.task.question, self.model)
            self._clean = Attempt(run, self._check(run), ())
        return self._clean

    def attack(self, plan: Plan, *, without: Sequence[int] = ()) -> Attempt:
        """Run a plan.

        Args:
            plan: The plan.
            without: Positions of injections that are left out; if any are, the others may miss.

        Raises:
            AttackError: If an attack of the whole plan did not happen.
        """
        attacks = [
            Attack(injection, self.manipulator, self.task.domain, plan.seed, strict=not without)
            for injection in plan.injections
        ]
        active = [attack for i, attack in enumerate(attacks) if i not in without]
        run = run_system(self.system, self.task.question, self.model, active)
        if not without:
            for attack in attacks:
                attack.verify()
        return Attempt(run, self._check(run), tuple(tuple(a.firings) for a in attacks))

    def prove(self, plan: Plan) -> Proof:
        """Run a plan and, if it makes the system fail, find the faults that are to blame."""
        if not self.clean.verdict.right:
            return Proof(plan, "clean_wrong")
        try:
            faulty = self.attack(plan)
        except AttackError as error:
            return Proof(plan, "no_attack", str(error))
        cost = faulty.run.cost
        if plan.is_benign:
            outcome: Outcome = "benign" if faulty.verdict.right else "benign_broke"
            return Proof(plan, outcome, faulty=faulty, cost=cost)
        if faulty.verdict.right:
            return Proof(plan, "still_right", faulty=faulty, cost=cost)
        replays: list[Replay] = []
        minimal: list[tuple[int, ...]] = []
        for size in range(1, len(plan.injections) + 1):
            for removed in combinations(range(len(plan.injections)), size):
                attempt = self.attack(plan, without=removed)
                cost += attempt.run.cost
                if size == 1 and _is_same(faulty, attempt, removed[0]):
                    reason = f"{plan.injections[removed[0]].agent} answered as without the attack"
                    return Proof(plan, "resisted", reason, cost=cost)
                replays.append(_describe(attempt, removed))
                minimal += [removed] if attempt.verdict.right else []
            if minimal:
                break
        return Proof(plan, "proved", "", faulty, tuple(replays), tuple(minimal), cost)

    def _check(self, run: Run) -> Verdict:
        """Whether a run gave the right answer."""
        return check(self.task, run.answer, judge=self.judge)


def _is_same(faulty: Attempt, restored: Attempt, which: int) -> bool:
    """Whether an agent said the same with and without the attack on it.

    Up to the first attacked call both runs are equal, so that call can be compared.
    """
    call = faulty.firings[which][0].call
    events = [attempt.run.events[attempt.run.event_of(call)] for attempt in (faulty, restored)]
    return " ".join(events[0].content.split()) == " ".join(events[1].content.split())


def _describe(attempt: Attempt, removed: tuple[int, ...]) -> Replay:
    """A replay as the record keeps it."""
    idle = tuple(i for i, fired in enumerate(attempt.firings) if i not in removed and not fired)
    return Replay(removed, attempt.verdict.right, attempt.verdict.found, idle)


@dataclass(slots=True)
class Correction:
    """Lets a better model answer some calls of a run.

    Args:
        model: Answers them.
        calls: Numbers of the calls; None takes every call of `agent`.
        agent: Whose calls, where `calls` is None.
    """

    model: Model
    calls: frozenset[int] | None = None
    agent: str = ""
    made: list[tuple[int, str, str]] = field(default_factory=list)

    def before(self, call: Call) -> Call:
        """The call as it is."""
        return call

    def after(self, call: Call, reply: Reply) -> Reply:
        """The better reply, where this call is to be corrected."""
        hit = call.agent == self.agent if self.calls is None else call.index in self.calls
        if not hit:
            return reply
        better = self.model(call)
        self.made.append((call.index, reply.text, better.text))
        return better


@dataclass(frozen=True, slots=True)
class Decisive:
    """The step that decided a failure.

    Args:
        call: Number of the call.
        agent: Who made it.
        step: Step number in the log, from 1.
        tried: Calls whose correction was run.
    """

    call: int
    agent: str
    step: int
    tried: int


def find_decisive_step(
    system: System,
    task: Task,
    model: Model,
    corrector: Model,
    *,
    judge: Model | None = None,
    search: Literal["scan", "bisect"] = "scan",
) -> Decisive | None:
    """The earliest step whose correction turns a natural failure into a success.

    `scan` corrects one call at a time, from the first on, and runs the rest again: this is the
    definition. `bisect` corrects the whole beginning up to a call and halves the range, which
    takes the logarithm of the runs; it assumes that correcting more of the beginning never hurts,
    and finds the call that completes the shortest sufficient beginning.

    Args:
        system: The system.
        task: The task.
        model: Its model.
        corrector: A better model, or one that knows the answer.
        judge: Judges free text; None leaves it to the checkers.
        search: How to look.

    Returns:
        The step; None if the run is right as it is, or no correction helps.

    Source: AgenTracer (arXiv 2509.03312), counterfactual replay; its published code lets a model
    propose one step at a time and does not scan.
    """
    failed = run_system(system, task.question, model)
    if check(task, failed.answer, judge=judge).right:
        return None
    tried = 0

    def helps(calls: frozenset[int]) -> bool:
        nonlocal tried
        tried += 1
        run = run_system(system, task.question, model, [Correction(corrector, calls)])
        return check(task, run.answer, judge=judge).right

    numbers = range(len(failed.calls))
    if search == "scan":
        found = next((n for n in numbers if helps(frozenset({n}))), None)
    else:
        low, high = 0, len(numbers) - 1
        found = high if helps(frozenset(numbers)) else None
        while found is not None and low < high:
            middle = (low + high) // 2
            if helps(frozenset(range(middle + 1))):
                high = middle
            else:
                low = middle + 1
            found = high
    if found is None:
        return None
    step = failed.event_of(found) + 1
    return Decisive(found, failed.calls[found].agent, step, tried)


def injection_steps(attempt: Attempt, position: int) -> list[int]:
    """Step numbers, from 1, of the turns that an injection struck."""
    return [attempt.run.event_of(firing.call) + 1 for firing in attempt.firings[position]]
