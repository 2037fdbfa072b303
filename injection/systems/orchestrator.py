"""An orchestrator with workers: a task ledger outside, a progress ledger inside, and a stall count.

Source: Fourney et al., Magentic-One (arXiv 2411.04468): facts and plan make the task ledger; each
round the orchestrator fills in a progress ledger, names the next speaker and instructs it; when it
stalls more often than allowed, facts and plan are written anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from injection.session import Brief, Said, Session
from injection.systems.requests import read_object

_FACTS = "List the facts that are given and the facts that must be found out."
_PLAN = (
    "Workers: {workers}. Write a plan, one step a line, as `number. Worker: what to do`. Use "
    "{{0}}, {{1}} for results of earlier steps."
)
_LEDGER = (
    "Reply with a JSON object with the keys is_request_satisfied, is_in_loop, "
    "is_progress_being_made (true or false), next_speaker (one of {workers}) and instruction."
)
_FINAL = (
    "Give the final result of the task. End with a line `Answer: ...`; if the task asks for a "
    "function, give it whole in one fenced block instead."
)


@dataclass(frozen=True, slots=True)
class Orchestrator:
    """An orchestrator and its workers.

    Args:
        workers: Names of the workers.
        rounds: Most instructions; > 0.
        stalls: Rounds without progress before the plan is written anew; >= 0.
    """

    workers: tuple[str, ...] = ("Researcher", "Calculator", "Coder")
    rounds: int = 8
    stalls: int = 1
    name: str = "orchestrator"

    def __call__(self, session: Session, task: str) -> str:
        """Solve a task."""
        history = self._make_ledger(session, task, ())
        stalled = 0
        for _ in range(self.rounds):
            request = _LEDGER.format(workers=", ".join(self.workers))
            ledger = read_object(self._speak(session, task, history, request, "ledger"))
            if ledger.get("is_request_satisfied") is True:
                break
            stuck = (
                ledger.get("is_progress_being_made") is False or ledger.get("is_in_loop") is True
            )
            stalled = stalled + 1 if stuck else max(0, stalled - 1)
            if stalled > self.stalls:
                history, stalled = self._make_ledger(session, task, history), 0
                continue
            worker = ledger.get("next_speaker")
            worker = worker if worker in self.workers else self.workers[0]
            instruction = str(ledger.get("instruction") or "Go on with the next step of the plan.")
            brief = Brief(task, (), instruction)
            reply = session.ask(worker, brief, role="worker", phase="work")
            history = (*history, Said("Orchestrator", instruction), Said(worker, reply))
        return self._speak(session, task, history, _FINAL, "final")

    def _make_ledger(
        self, session: Session, task: str, history: tuple[Said, ...]
    ) -> tuple[Said, ...]:
        """The conversation so far with facts and a plan below it."""
        facts = self._speak(session, task, history, _FACTS, "facts")
        history = (*history, Said("Orchestrator", facts))
        request = _PLAN.format(workers=", ".join(self.workers))
        return (
            *history,
            Said("Orchestrator", self._speak(session, task, history, request, "plan")),
        )

    @staticmethod
    def _speak(
        session: Session, task: str, history: tuple[Said, ...], request: str, phase: str
    ) -> str:
        """One call of the orchestrator."""
        brief = Brief(task, history, request)
        return session.ask("Orchestrator", brief, role="orchestrator", phase=phase)
