"""LLM-Debate: every agent answers, reads the others, answers again; an aggregator decides.

Source: Du et al., Improving Factuality and Reasoning in Language Models through Multiagent Debate
(arXiv 2305.14325); the aggregator and the sizes as in Aegis (arXiv 2509.14295).
"""

from __future__ import annotations

from dataclasses import dataclass

from injection.session import Brief, Said, Session
from injection.systems.requests import REVISE, SOLVE

_DECIDE = (
    "Above are the final replies of all agents. Decide on one solution and end with a line "
    "`Answer: ...`; if the task asks for a function, give it whole in one fenced block instead."
)


@dataclass(frozen=True, slots=True)
class Debate:
    """A debate.

    Args:
        agents: Debaters; > 0.
        rounds: Rounds; > 0. In the first nobody reads anybody.
    """

    agents: int = 3
    rounds: int = 2
    name: str = "llm_debate"

    def __call__(self, session: Session, task: str) -> str:
        """Solve a task."""
        names = [f"Assistant{i + 1}" for i in range(self.agents)]
        said: tuple[Said, ...] = ()
        for number in range(self.rounds):
            request = REVISE if number else SOLVE
            said = tuple(
                Said(
                    name,
                    session.ask(name, Brief(task, said, request), role="assistant", phase="solve"),
                )
                for name in names
            )
        brief = Brief(task, said, _DECIDE)
        return session.ask("Aggregator", brief, role="aggregator", phase="decide")
