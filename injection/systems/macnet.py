"""MacNet: an artifact is refined along a directed acyclic graph.

Source: Qian et al., Scaling LLM-based Multi-Agent Collaboration (arXiv 2406.07155): an instructor
on each edge comments on the artifact of the node before it, the assistant on the node after it
revises; where several edges meet, their artifacts are merged. Only artifacts travel, not whole
conversations.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from injection.session import Brief, Said, Session
from injection.systems.requests import REVIEW, REVISE, SOLVE

Topology = Literal["chain", "star", "tree", "random"]


@dataclass(frozen=True, slots=True)
class MacNet:
    """A network of instructors on edges and assistants on nodes.

    Args:
        topology: Shape of the graph.
        nodes: Assistants; > 1. A last node is added where several ends have to be merged.
        seed: Of the random graph.
    """

    topology: Topology = "chain"
    nodes: int = 4
    seed: int = 2025

    @property
    def name(self) -> str:
        """Name in records."""
        return f"macnet_{self.topology}"

    def edges(self) -> list[tuple[int, int]]:
        """Edges from lower to higher nodes; exactly one node has none that leaves it."""
        n = self.nodes
        if self.topology == "chain":
            edges = [(i, i + 1) for i in range(n - 1)]
        elif self.topology == "star":
            edges = [(0, i) for i in range(1, n)]
        elif self.topology == "tree":
            edges = [((i - 1) // 2, i) for i in range(1, n)]
        else:
            rng = random.Random(self.seed)
            edges = [
                (i, j) for j in range(1, n) for i in range(j) if i == j - 1 or rng.random() < 0.5
            ]
        ends = [i for i in range(n) if all(source != i for source, _ in edges)]
        return edges + ([(end, n) for end in ends] if len(ends) > 1 else [])

    def __call__(self, session: Session, task: str) -> str:
        """Solve a task."""
        edges = self.edges()
        artifacts: dict[int, str] = {}
        for node in range(max(target for _, target in edges) + 1):
            sources = [source for source, target in edges if target == node]
            history: list[Said] = []
            for source in sources:
                work = Said(f"Node{source}", artifacts[source])
                critic = f"Edge{source}-{node}"
                review = session.ask(
                    critic, Brief(task, (work,), REVIEW), role="instructor", phase="critique"
                )
                history += [work, Said(critic, review)]
            request = REVISE if sources else SOLVE
            artifacts[node] = session.ask(
                f"Node{node}", Brief(task, tuple(history), request), role="assistant", phase="solve"
            )
        return artifacts[max(artifacts)]
