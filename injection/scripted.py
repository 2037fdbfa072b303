"""Scripted agents: no weights, but they compute, read what others wrote, and err.

An agent sees only its prompt, like a language model does. Whether it can solve a task by itself,
and whether its first draft of a step holds a slip that its own check then finds, is drawn from the
seed, its name and the task. Agents who cannot solve a task follow whoever's steps hold; so errors
travel, get caught, or win a vote for the reasons they do in real systems. An agent that is ordered
to fail in one of the 14 modes follows the order; one that hears of a failed attempt starts afresh,
with new luck.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from dcl.errors import ConfigError
from injection.anatomy import compute, find_flaw
from injection.asides import pick_aside
from injection.discussion import DISCUSSION
from injection.english import solve
from injection.errands import ERRANDS
from injection.errors import AttackError
from injection.instructions import find_order
from injection.phases import PHASES, present_code
from injection.rules import Scene, corrupt
from injection.session import Brief, Call, Reply, others_in
from injection.surfing import SURFING

SCRIPTED = "scripted"
"""What records call the model."""

_SILENCE = 0.4
_HINT = "An earlier attempt failed."
_PHASES = {**PHASES, **ERRANDS, **DISCUSSION, **SURFING}


@dataclass(frozen=True, slots=True)
class Scripted:
    """The scripted model; the same call always gets the same reply.

    Args:
        seed: Of who can do what.
        skill: Share of (agent, task) pairs that can be solved without help, 0 to 1.
        slip: Share of solutions whose first draft holds a slip, 0 to 1.
        care: Share of (agent, task) pairs where work of others is checked before it is used.
        trust: Share of (agent, task) pairs where work that is there is taken over or approved
            rather than done again, so that early faults travel.
    """

    seed: int = 1
    skill: float = 0.6
    slip: float = 0.6
    care: float = 0.4
    trust: float = 0.0

    @property
    def name(self) -> str:
        """What records call it."""
        return SCRIPTED

    def __call__(self, call: Call) -> Reply:
        """Answer one call.

        Raises:
            ConfigError: If no scripted agent plays the phase of the call.
        """
        play = _PHASES.get(call.phase)
        if play is None:
            known = ", ".join(sorted(_PHASES))
            raise ConfigError(
                f"{call.agent}: expected a phase that scripted agents play ({known}), got "
                f"{call.phase!r}; run this system on an endpoint"
            )
        brief = Brief.parse(call.prompt)
        model = replace(self, seed=self.seed + 7919) if _HINT in call.prompt else self
        text = play(model, call.agent, brief)
        mode = find_order(brief.request)
        if mode is not None:
            others = others_in(brief.history, call.agent)
            scene = Scene(brief.task, brief.history, others, random.Random(call.digest), call.agent)
            with suppress(AttackError):  # an order that makes no sense here is not followed
                text = corrupt(text, mode, scene)
        text = _chat(text, random.Random(f"{self.seed}:{call.digest}"))
        return Reply(text, len(call.prompt) // 4, len(text) // 4)

    def draw(self, *key: object) -> float:
        """A number from 0 to 1 that the seed and a key decide."""
        text = json.dumps([self.seed, *key]).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64

    def is_able(self, agent: str, task: str) -> bool:
        """Whether an agent can solve a task without help."""
        return self.draw("able", agent, task) < self.skill

    def does_trust(self, agent: str, task: str) -> bool:
        """Whether an agent builds on work that is there without doing it again."""
        return self.draw("trusts", agent, task) < self.trust

    def find_flaw(self, agent: str, task: str, text: str) -> str:
        """What a reader finds wrong with work; nothing if it does not look."""
        careful = self.draw("careful", agent, task) < self.care
        return find_flaw(text) if careful else ""

    def work_out(self, agent: str, task: str) -> str:
        """Worked steps with a check and an answer; empty if the agent cannot solve the task."""
        solution = solve(task) if self.is_able(agent, task) else None
        if solution is None:
            return ""
        if solution.code:
            return present_code(agent, solution.code)
        return self.present(agent, solution.steps) + f"Answer: {solution.answer}"

    def present(self, agent: str, steps: Sequence[tuple[str, str]]) -> str:
        """Steps as text; a slip in the draft is found by the check right below it."""
        slips = [i for i, (e, v) in enumerate(steps) if compute(e) and v.isdecimal()]
        slip = slips[-1] if slips and self.draw("slip", agent, steps) < self.slip else -1
        lines = []
        for i, (expression, value) in enumerate(steps):
            draft = value
            if i == slip:
                off = 10 ** int(self.draw("off", agent, expression) * min(len(value), 3))
                draft = str(int(value) + off)
            lines.append(f"Step {i + 1}: {expression} = {draft}")
            if i == slip:
                lines.append(f"Check: {expression} = {value}, so step {i + 1} is put right.")
        if slip < 0 and steps:
            lines.append(f"Check: {steps[-1][0]} = {steps[-1][1]}, the last step holds.")
        return "\n".join(lines) + "\n"


def _chat(text: str, rng: random.Random) -> str:
    """A reply with a sentence that says nothing above or below it, as often as not."""
    if text.startswith("{") or rng.random() < _SILENCE:
        return text
    if text.endswith("}") or rng.random() < 0.5:
        return f"{pick_aside(rng)}\n{text}"
    return f"{text}\n{pick_aside(rng)}"
