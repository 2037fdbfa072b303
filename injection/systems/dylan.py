"""DyLAN: agents answer in rounds, rate whom they read, are ranked, and stop when enough agree.

Source: Liu et al., Dynamic LLM-Agent Network (arXiv 2310.02170): full edges between rounds,
ratings from 1 to 5, a listwise ranker that keeps two from the third round on, and an early stop
when an answer has more than two thirds of the active agents. `injection.importance` turns the
ratings into importance scores.
"""

from __future__ import annotations

from dataclasses import dataclass

from injection.session import Brief, Said, Session
from injection.systems.requests import REVISE, SOLVE, read_numbers, same_answers

_RATE = (
    " Then add one line `Ratings: [..]` that rates each reply above from 1 (of no use) to 5 (right "
    "and helpful), in order."
)
_RANK = (
    "Above are the replies of the last round. Name the {keep} best by their number, best first, in "
    "one line `Ranking: [..]`, with a reason before it."
)
_PERSONAS = ("Mathematician", "Programmer", "Researcher", "Reviewer", "Economist", "Physicist")


@dataclass(frozen=True, slots=True)
class Dylan:
    """A dynamic network of agents.

    Args:
        agents: Agents in the first round; > 0.
        rounds: Most rounds; > 0.
        keep: Agents that are left after a ranking; > 0.
        rank_from: First round, counted from 1, before which a ranking takes place.
    """

    agents: int = 4
    rounds: int = 3
    keep: int = 2
    rank_from: int = 3
    name: str = "dylan"

    def __call__(self, session: Session, task: str) -> str:
        """Solve a task."""
        active = [f"Assistant{i + 1}" for i in range(self.agents)]
        roles = dict(zip(active, _PERSONAS * self.agents, strict=False))
        said: tuple[Said, ...] = ()
        for number in range(1, self.rounds + 1):
            if number >= self.rank_from and len(active) > self.keep + 1:
                active = self._rank(session, task, said)
            request = REVISE + _RATE if said else SOLVE
            said = tuple(
                Said(
                    name,
                    session.ask(name, Brief(task, said, request), role=roles[name], phase="solve"),
                )
                for name in active
            )
            groups = same_answers([one.text for one in said])
            if groups and len(groups[0]) > 2 * len(active) // 3:
                break
        return said[groups[0][0] if groups else 0].text

    def _rank(self, session: Session, task: str, said: tuple[Said, ...]) -> list[str]:
        """Names of the best replies; the first ones where the ranker names none."""
        brief = Brief(task, said, _RANK.format(keep=self.keep))
        reply = session.ask("Ranker", brief, role="ranker", phase="rank")
        numbers = [n for n in read_numbers(reply, "Ranking") if 1 <= n <= len(said)]
        chosen = list(dict.fromkeys([*numbers, *range(1, len(said) + 1)]))[: self.keep]
        return [said[n - 1].agent for n in sorted(chosen)]
