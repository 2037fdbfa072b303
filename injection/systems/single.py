"""One agent alone: the control that says whether an effect needs several agents."""

from __future__ import annotations

from dataclasses import dataclass

from injection.session import Brief, Session
from injection.systems.requests import SOLVE


@dataclass(frozen=True, slots=True)
class Single:
    """One agent that answers once.

    Args:
        agent: Its name.
    """

    agent: str = "Assistant1"
    name: str = "single"

    def __call__(self, session: Session, task: str) -> str:
        """Solve a task."""
        return session.ask(self.agent, Brief(task, (), SOLVE), role="assistant", phase="solve")
