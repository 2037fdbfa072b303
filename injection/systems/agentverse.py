"""AgentVerse: recruit, solve, criticise until all agree, evaluate, and start over if it is wrong.

Source: Chen et al., AgentVerse (arXiv 2308.10848): expert recruitment, vertical decision-making
with a solver and critics, evaluation with feedback to the next turn. Sizes as in Aegis.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from injection.session import Brief, Said, Session
from injection.systems.requests import REVIEW, REVISE, SOLVE

_RECRUIT = (
    "Say which {count} experts should work on the task, one a line, numbered, with what each does."
)
_EVALUATE = (
    "Judge the latest solution. Give reasons, then a line `Correctness: 1` or `Correctness: 0`, "
    "then a line `Advice: ...` for the next attempt."
)


@dataclass(frozen=True, slots=True)
class AgentVerse:
    """A role assigner, a solver, critics and an evaluator.

    Args:
        critics: Critics; > 0.
        turns: Most turns from recruitment to evaluation; > 0.
        rounds: Most rounds of criticism in a turn; > 0.
    """

    critics: int = 2
    turns: int = 2
    rounds: int = 2
    name: str = "agentverse"

    def __call__(self, session: Session, task: str) -> str:
        """Solve a task."""
        advice: tuple[Said, ...] = ()
        solution = ""
        for _ in range(self.turns):
            request = _RECRUIT.format(count=self.critics + 1)
            experts = session.ask(
                "RoleAssigner", Brief(task, advice, request), role="role assigner", phase="recruit"
            )
            solution = self._discuss(session, task, (Said("RoleAssigner", experts), *advice))
            verdict = session.ask(
                "Evaluator",
                Brief(task, (Said("Solver", solution),), _EVALUATE),
                role="evaluator",
                phase="evaluate",
            )
            if re.search(r"correctness:\W*1", verdict, re.IGNORECASE):
                break
            advice = (Said("Solver", solution), Said("Evaluator", verdict))
        return solution

    def _discuss(self, session: Session, task: str, history: tuple[Said, ...]) -> str:
        """A solution that all critics agree with, or the last one."""
        request = SOLVE if len(history) == 1 else REVISE
        solution = session.ask(
            "Solver", Brief(task, history, request), role="solver", phase="solve"
        )
        for _ in range(self.rounds):
            reviews: list[Said] = []
            for i in range(self.critics):
                seen = (Said("Solver", solution), *reviews)
                name = f"Critic{i + 1}"
                review = session.ask(
                    name, Brief(task, seen, REVIEW), role="critic", phase="critique"
                )
                reviews.append(Said(name, review))
            if all("[agree]" in review.text.casefold() for review in reviews):
                break
            solution = session.ask(
                "Solver",
                Brief(task, (*history, Said("Solver", solution), *reviews), REVISE),
                role="solver",
                phase="solve",
            )
        return solution
