"""Blame by intervention: one agent at a time is helped, and the run is repeated.

Source: AgentGrad (arXiv 2609.08572): agents are tried in reverse order of execution, the first
whose correction turns the failure into a success is to blame, and its corrected output is a label.
With an attribution at hand, its order takes fewer runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcl.artifact import ENCODER, open_encoder
from dcl.attribution import Attribution
from dcl.runtime import Encoder, load_bagger
from injection.anatomy import dissect
from injection.checkers import check
from injection.proof import Correction
from injection.session import Call, Model, Reply, Run, System, run_system
from injection.tasks import Task

Embed = Callable[[Sequence[str]], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Change:
    """What an agent said, and what it says when it is helped.

    Args:
        agent: Who.
        said: As it was.
        better: As it should be.
    """

    agent: str
    said: str
    better: str


@dataclass(frozen=True, slots=True)
class Intervention:
    """Help for one agent, and what came of it.

    Args:
        agent: Who was helped.
        right: Whether the run was right then.
        changes: Its turns before and after.
    """

    agent: str
    right: bool
    changes: tuple[Change, ...]


@dataclass(slots=True)
class Hint:
    """Adds a hint to every request of one agent.

    Args:
        agent: Whose requests.
        text: The hint.
    """

    agent: str
    text: str

    def before(self, call: Call) -> Call:
        """The call with the hint, if it is the agent's."""
        return call.with_prompt(f"{call.prompt}\n{self.text}") if call.agent == self.agent else call

    def after(self, call: Call, reply: Reply) -> Reply:
        """The reply as it is."""
        return reply


def reverse_order(run: Run) -> tuple[str, ...]:
    """Agents by their last call, latest first."""
    return tuple(dict.fromkeys(call.agent for call in reversed(run.calls)))


def posterior_order(run: Run, attribution: Attribution) -> tuple[str, ...]:
    """Agents of a run by the probability that they failed, most probable first."""
    ranked = [attribution.agents[a] for a in np.argsort(-attribution.agent_probs, kind="stable")]
    return tuple(dict.fromkeys([*ranked, *reverse_order(run)]))


def intervene(
    system: System,
    task: Task,
    model: Model,
    helped: Model | str,
    *,
    order: Callable[[Run], Sequence[str]] = reverse_order,
    judge: Model | None = None,
) -> list[Intervention]:
    """Help one agent after another until one of them turns the failure into a success.

    Args:
        system: The system.
        task: The task.
        model: Its model.
        helped: A better model that answers for the helped agent, or a hint in words.
        order: In which order agents are helped, from the failed run.
        judge: Judges free text; None leaves it to the checkers.

    Returns:
        One entry for each agent that was tried; the last one is right if any is. Empty if the run
        is right without help.
    """
    failed = run_system(system, task.question, model)
    if check(task, failed.answer, judge=judge).right:
        return []
    agents = {call.agent for call in failed.calls}
    tried: list[Intervention] = []
    for agent in order(failed):
        if agent not in agents:
            continue
        if isinstance(helped, str):
            run = run_system(system, task.question, model, [Hint(agent, helped)])
            changes = _compare(failed, run, agent)
        else:
            correction = Correction(helped, agent=agent)
            run = run_system(system, task.question, model, [correction])
            changes = tuple(Change(agent, a, b) for _, a, b in correction.made if a != b)
        right = check(task, run.answer, judge=judge).right
        tried.append(Intervention(agent, right, changes))
        if tried[-1].right:
            break
    return tried


def _compare(failed: Run, helped: Run, agent: str) -> tuple[Change, ...]:
    """Turns of an agent in two runs, one by one."""
    said = [[e.content for e in run.events if e.agent == agent] for run in (failed, helped)]
    return tuple(Change(agent, a, b) for a, b in zip(*said, strict=False) if a != b)


@dataclass(frozen=True, slots=True)
class Kind:
    """One recurring kind of correction.

    Args:
        changes: Its corrections, the most central first.
        rule: What the agents should be told.
    """

    changes: tuple[Change, ...]
    rule: str


def dcl_encoder() -> Embed:
    """Vectors of texts by the turn encoder that ships with `dcl`."""
    source = open_encoder()
    bagger, encoder = load_bagger(source), Encoder(source.path / ENCODER)
    return lambda texts: encoder([bagger.window(ids) for ids in bagger.tokenize(list(texts))])


def cluster_corrections(
    changes: Sequence[Change], *, embed: Embed | None = None, likeness: float = 0.35
) -> list[Kind]:
    """Corrections grouped by how they change a turn, largest group first.

    Two belong together if the cosine of their differences, vector after minus vector before, is
    at least `likeness`, or if a chain of such pairs joins them.

    Args:
        changes: Corrections.
        embed: Texts to unit vectors `(N, D)` float32; None takes the encoder of `dcl`.
        likeness: Cosine, -1 to 1.
    """
    import faiss

    if not changes:
        return []
    embed = embed or dcl_encoder()
    texts = [text for change in changes for text in (change.said, change.better)]
    vectors = np.asarray(embed(texts), dtype=np.float32)
    deltas = np.ascontiguousarray(vectors[1::2] - vectors[::2])
    deltas /= np.maximum(np.linalg.norm(deltas, axis=1, keepdims=True), 1e-9)
    index = faiss.IndexFlatIP(deltas.shape[1])
    index.add(deltas)
    limits, _, near = index.range_search(deltas, likeness)
    labels = _join_chains([near[limits[i] : limits[i + 1]].tolist() for i in range(len(changes))])
    kinds = []
    for label in dict.fromkeys(labels):
        members = [i for i, other in enumerate(labels) if other == label]
        centre = deltas[members].mean(axis=0)
        members.sort(key=lambda i: -float(deltas[i] @ centre))
        group = tuple(changes[i] for i in members)
        kinds.append(Kind(group, suggest_rule(group)))
    return sorted(kinds, key=lambda kind: -len(kind.changes))


def _join_chains(near: Sequence[Sequence[int]]) -> list[int]:
    """A label for each item; items that are linked, directly or not, share it."""
    labels = [-1] * len(near)
    for start in range(len(near)):
        stack = [start] if labels[start] < 0 else []
        while stack:
            item = stack.pop()
            if labels[item] < 0:
                labels[item] = start
                stack += near[item]
    return labels


_RULES = {
    "check": "check every step against the task before you hand it in",
    "step": "write out every step of the work, down to the result",
    "answer": "state the result that your steps lead to, in the form the task asks for",
    "verdict": "work the result out before you judge it, and let the verdict follow from that",
    "code": "run the code through an example of the task before you hand it in",
    "prose": "say plainly what is known and what has to be done next",
}


def suggest_rule(changes: Sequence[Change]) -> str:
    """One rule for a kind of correction, by what the corrections add.

    Args:
        changes: Corrections of one kind; at least one.
    """
    added: dict[str, int] = {}
    for change in changes:
        known = {part.text.strip() for part in dissect(change.said)}
        for part in dissect(change.better):
            if part.text.strip() not in known:
                added[part.kind] = added.get(part.kind, 0) + 1
    order = ("verdict", "code", "check", "step", "answer", "prose")
    kind = max(order, key=lambda name: (added.get(name, 0), -order.index(name)))
    agents = ", ".join(dict.fromkeys(change.agent for change in changes))
    return f"{agents}: {_RULES[kind]}."
