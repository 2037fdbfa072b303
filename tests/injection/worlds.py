"""Small things that several tests of `injection` need."""

from __future__ import annotations

import random

from injection.manipulator import Rules
from injection.proof import Prover
from injection.rules import Scene
from injection.scripted import Scripted
from injection.session import Call, Reply, Said, System
from injection.tasks import Task, own_tasks

STORY = (
    "Ivo has 15 shelves with 13 books each. He finds 40 more books. He sells 24 books. "
    "How many books are there now?"
)
WORK = (
    "Step 1: 15 * 13 = 195\nStep 2: 195 + 40 = 235\nStep 3: 235 - 24 = 221\n"
    "Check: 235 - 24 = 211, so step 3 is put right.\nAnswer: 211"
)
CODE = (
    "Here is the function.\n```python\ndef solve_1(xs):\n    kept = [x for x in xs if x % 2 == 0]\n"
    "    mapped = [x * x for x in kept]\n    return sum(mapped)\n```\nI tested it on the example."
)
REVIEW = "I checked the work of Solver: 235 - 24 = 211.\n[Agree] The result stands."
PLAN = "Plan:\n1. Calculator: 15 * 13\n2. Calculator: {0} + 40\n3. Calculator: {1} - 24"
PEER = Said("Assistant2", "Step 1: 15 * 13 = 195\nStep 2: 195 + 40 = 235\nAnswer: 235")


def story_task() -> Task:
    return Task("story", "GSM8K", "number", STORY, "211")


def scene(*history: Said, seed: int = 0, agent: str = "Assistant1", task: str = STORY) -> Scene:
    others = tuple(dict.fromkeys(said.agent for said in history if said.agent != agent))
    return Scene(task, history, others, random.Random(seed), agent, "math")


def task_named(id: str) -> Task:
    return next(task for task in own_tasks() if task.id == id)


def prover(system: System, task: Task, **luck: float) -> Prover:
    return Prover(system, task, Scripted(1, **luck), Rules())


class Parrot:
    """A model that gives fixed replies, in order, and notes what it was asked."""

    name = "parrot"

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.calls: list[Call] = []

    def __call__(self, call: Call) -> Reply:
        self.calls.append(call)
        text = self.replies[min(len(self.calls), len(self.replies)) - 1]
        return Reply(text, 7, 3)
