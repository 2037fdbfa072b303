"""How much each agent mattered, and how much of a wrong answer came through it.

Source: DyLAN (arXiv 2310.02170): messages of predecessors are rated 1 to 5 and normalised, the
agents of the last round that hold the final answer share a credit of one, and credit flows back
along the ratings. The same recursion seeded with a wrong answer is a blame score. Where no ratings
were given, uniform weights or the observable reuse of content take their place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dcl.trajectory import Trajectory
from injection.anatomy import same_value, stated_answer
from injection.manipulator import Injection
from injection.plans import Plan
from injection.proof import Prover
from injection.session import Brief, Run, Said
from injection.systems.requests import read_numbers
from injection.systems.single import Single

Floats = NDArray[np.float64]

Effect = Literal["unchanged", "amplified", "composed", "emergent"]

_WORD = re.compile(r"\w+(?:[.,]\d+)*")


@dataclass(frozen=True, slots=True)
class Importance:
    """Scores of one run.

    Args:
        agents: Names in order of first appearance.
        scores: `(A,)`, one an agent, >= 0.
        turns: `(T,)`, one a turn, >= 0.
    """

    agents: tuple[str, ...]
    scores: Floats
    turns: Floats

    def select(self, k: int) -> tuple[str, ...]:
        """Names of the `k` agents that matter most, most important first."""
        order = np.argsort(-self.scores, kind="stable")[:k]
        return tuple(self.agents[i] for i in order)


def importance_of(run: Run) -> Importance:
    """Importance by what each call was shown and, where given, how it rated that.

    Args:
        run: A run; on a failed one, the same numbers are blame.
    """
    agents = [event.agent for event in run.events]
    texts = [event.content for event in run.events]
    return _score(agents, texts, weigh_ratings(run), run.answer)


def importance_by_reuse(trajectory: Trajectory, answer: str = "") -> Importance:
    """Importance of any log by which later turns reuse which earlier words and numbers.

    Args:
        trajectory: A log.
        answer: Its final answer; empty takes what the last turn states.
    """
    agents = [turn.agent for turn in trajectory.turns]
    texts = [turn.content for turn in trajectory.turns]
    return _score(agents, texts, weigh_reuse(trajectory), answer or texts[-1])


def weigh_ratings(run: Run) -> Floats:
    """Edge weights `(T, T)` from source to target; what flows into a turn sums to 1 or is 0.

    A source is a turn that the prompt of the target shows. Ratings count as min(r, 5) / 5; where
    they are missing, do not fit in number, or are all 0, sources weigh the same.
    """
    T = len(run.events)
    weights = np.zeros((T, T))
    first: dict[tuple[Said, ...], int] = {}  # calls that are shown the same are of one round
    for call in run.calls:
        target = run.event_of(call.index)
        history = Brief.parse(call.prompt).history
        before = first.setdefault(history, target)
        shown = [_find_event(run, said, before) for said in history]
        rated = read_numbers(run.events[target].content, "Ratings")
        values = np.array(
            [min(r, 5) / 5 for r in rated] if len(rated) == len(shown) else np.ones(len(shown))
        )
        if values.sum() == 0:
            values = np.ones(len(shown))
        for source, value in zip(shown, values, strict=True):
            if source is not None:
                weights[source, target] += value
    return normalise(weights)


def weigh_reuse(trajectory: Trajectory) -> Floats:
    """Edge weights `(T, T)` by the words and numbers that a turn takes over from earlier ones.

    Words of the task count for nobody; a word counts for the last turn that had it.
    """
    known = set(_WORD.findall(trajectory.task.casefold()))
    words = [set(_WORD.findall(turn.content.casefold())) - known for turn in trajectory.turns]
    weights = np.zeros((len(words), len(words)))
    last: dict[str, int] = {}
    for target, present in enumerate(words):
        for word in present & last.keys():
            weights[last[word], target] += 1.0
        last.update(dict.fromkeys(present, target))
    return normalise(weights)


def normalise(weights: Floats) -> Floats:
    """Weights whose columns sum to 1, but for columns of zeros."""
    total = weights.sum(axis=0, keepdims=True)
    return np.asarray(np.divide(weights, total, out=np.zeros_like(weights), where=total > 0))


def flow_back(weights: Floats, seeds: Floats) -> Floats:
    """Credit of each turn: its own seed and what flows back from the turns that it fed.

    `I_j = seed_j + sum_i w_ji I_i`, from the last turn to the first.

    Args:
        weights: `(T, T)`, from source to later target.
        seeds: `(T,)`.
    """
    credit = seeds.astype(float).copy()
    for source in range(len(credit) - 2, -1, -1):
        credit[source] += weights[source, source + 1 :] @ credit[source + 1 :]
    return credit


def _score(agents: Sequence[str], texts: Sequence[str], weights: Floats, answer: str) -> Importance:
    """Seeds on the last turns that hold the answer, and the flow back from them."""
    goal = stated_answer(answer) or answer.strip()
    ends = [t for t in range(len(texts)) if not weights[t].any()]
    holders = [t for t in ends if same_value(stated_answer(texts[t]), goal)] or [len(texts) - 1]
    seeds = np.zeros(len(texts))
    seeds[holders] = 1 / len(holders)
    turns = flow_back(weights, seeds)
    names = tuple(dict.fromkeys(agents))
    scores = np.array(
        [sum(turns[t] for t, agent in enumerate(agents) if agent == name) for name in names]
    )
    return Importance(names, scores, turns)


def _find_event(run: Run, said: Said, before: int) -> int | None:
    """The latest earlier event that a prompt shows, whole or in part; None if there is none."""
    spoken = [i for i in reversed(range(before)) if run.events[i].agent == said.agent]
    whole = (i for i in spoken if run.events[i].content.strip() == said.text.strip())
    part = (i for i in spoken if said.text.strip() in run.events[i].content)
    return next(chain(whole, part), None)


def mas_effect(prover: Prover, plan: Plan) -> Effect:
    """Whether a failure needs several agents.

    `composed`: no fault breaks the run alone, only several together do. `emergent`: the same
    fault leaves a single agent right. `amplified`: it makes a single agent wrong, too, and in the
    system at least one agent beside the attacked one states the wrong answer. `unchanged`: it does
    so to the attacked agents only.

    Args:
        prover: The system on the task.
        plan: A plan that was proved.
    """
    alone = [Plan(plan.system, plan.task, (fault,), plan.seed) for fault in plan.injections]
    if len(alone) > 1:
        others = [tuple(j for j in range(len(alone)) if j != i) for i in range(len(alone))]
        broken = [not prover.attack(plan, without=rest).verdict.right for rest in others]
        if not any(broken):
            return "composed"
        fault = plan.injections[broken.index(True)]
    else:
        fault = plan.injections[0]
    agent = Single().agent
    single = Prover(Single(), prover.task, prover.model, prover.manipulator, prover.judge)
    same = Plan("single", plan.task, (Injection(agent, fault.mode, fault.strategy),), plan.seed)
    if single.attack(same, without=(1,)).verdict.right:
        return "emergent"
    failed = prover.attack(plan)
    attacked = {injection.agent for injection in plan.injections}
    wrong = stated_answer(failed.run.answer)
    spread = {
        event.agent
        for event in failed.run.events
        if wrong and same_value(stated_answer(event.content), wrong)
    }
    return "amplified" if spread - attacked else "unchanged"
