"""Attacks on one run: what is injected, who rewrites the text, and the proof that it happened.

Two strategies. `prompt_injection` rewrites what the agent is asked before it answers;
`response_corruption` rewrites what it answered before anybody reads it. An attack that cannot
change the text raises; nothing that did not happen is ever labelled.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, get_args

from dcl.taxonomy import ErrorMode
from injection.errors import AttackError
from injection.instructions import order_for
from injection.rules import Scene, corrupt, rephrase
from injection.session import Brief, Call, Reply, others_in

Strategy = Literal["prompt_injection", "response_corruption"]

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault to inject.

    Args:
        agent: Whose calls are attacked.
        mode: How it shall fail; None rewrites it without a fault, as a negative.
        strategy: Where the text is rewritten.
        nth: Which call of the agent, counted from 0; None attacks every call.
    """

    agent: str
    mode: ErrorMode | None
    strategy: Strategy
    nth: int | None = None

    def hits(self, call: Call) -> bool:
        """Whether a call is to be attacked."""
        return call.agent == self.agent and self.nth in (None, call.nth)

    def to_dict(self) -> dict[str, str | int | None]:
        """Plain JSON."""
        mode = self.mode.value if self.mode else None
        return {"agent": self.agent, "mode": mode, "strategy": self.strategy, "nth": self.nth}


class Manipulator(Protocol):
    """Rewrites texts; raises `AttackError` where it cannot."""

    @property
    def name(self) -> str:
        """What records call it."""

    def inject(self, prompt: str, mode: ErrorMode, scene: Scene) -> str:
        """A prompt that makes the agent fail in a mode."""

    def corrupt(self, reply: str, mode: ErrorMode, scene: Scene) -> str:
        """A reply that fails in a mode."""

    def rephrase(self, reply: str, scene: Scene) -> str:
        """A reply that says the same in other words."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The manipulator that needs no model."""

    name: str = "rules"

    def inject(self, prompt: str, mode: ErrorMode, scene: Scene) -> str:
        """An order added to the request; for lost history and ignored peers, the text goes too."""
        brief = Brief.parse(prompt)
        order = order_for(mode, scene.domain, scene.others, scene.rng)
        history = brief.history
        if mode is ErrorMode.FM_1_4:
            history = ()
        elif mode is ErrorMode.FM_2_5:
            history = tuple(said for said in history if said.agent not in scene.others)
            if history == brief.history:
                raise AttackError("FM-2.5: no other agent has said anything")
        if brief.request == prompt:
            return f"{prompt}\n{order}"
        return replace(brief, history=history, request=f"{brief.request} {order}").render()

    def corrupt(self, reply: str, mode: ErrorMode, scene: Scene) -> str:
        """The reply rewritten by the rules of the mode."""
        return corrupt(reply, mode, scene)

    def rephrase(self, reply: str, scene: Scene) -> str:
        """The reply with other words around the same content."""
        return rephrase(reply, scene)


@dataclass(frozen=True, slots=True)
class Firing:
    """One attack that happened.

    Args:
        call: Number of the attacked call in the run.
        before: Text before: the prompt for prompt injection, the reply for corruption.
        after: Text after; always another one.
    """

    call: int
    before: str
    after: str


@dataclass(slots=True)
class Attack:
    """Carries one injection out on a run.

    Args:
        injection: What is injected.
        manipulator: Rewrites the text.
        domain: Subject of the task.
        seed: Of the wording.
        strict: Whether an attack that cannot be made raises; in replays, where an earlier fault
            is taken out, the turn may have become another one, and the attack is left out.
    """

    injection: Injection
    manipulator: Manipulator
    domain: str
    seed: int
    strict: bool = True
    firings: list[Firing] = field(default_factory=list)

    def before(self, call: Call) -> Call:
        """The call with an injected prompt, if it is its turn."""
        mode = self.injection.mode
        if (
            mode is None
            or self.injection.strategy != "prompt_injection"
            or not self.injection.hits(call)
        ):
            return call
        try:
            prompt = self.manipulator.inject(call.prompt, mode, self._scene(call))
            self._keep(call, call.prompt, prompt)
        except AttackError:
            if self.strict:
                raise
            return call
        return call.with_prompt(prompt)

    def after(self, call: Call, reply: Reply) -> Reply:
        """The corrupted reply, if it is its turn."""
        if self.injection.strategy != "response_corruption" or not self.injection.hits(call):
            return reply
        try:
            text = self._rewrite(call, reply.text)
            self._keep(call, reply.text, text)
        except AttackError:
            if self.strict:
                raise
            return reply
        return replace(reply, text=text)

    def verify(self) -> Sequence[Firing]:
        """What happened.

        Raises:
            AttackError: If nothing did: the agent was never called that often.
        """
        if not self.firings:
            which = "any" if self.injection.nth is None else f"number {self.injection.nth}"
            raise AttackError(f"{self.injection.agent}: call {which} never took place")
        return self.firings

    def _rewrite(self, call: Call, text: str) -> str:
        """The reply as the manipulator makes it."""
        scene = self._scene(call)
        mode = self.injection.mode
        if mode is None:
            return self.manipulator.rephrase(text, scene)
        return self.manipulator.corrupt(text, mode, scene)

    def _keep(self, call: Call, before: str, after: str) -> None:
        """Note an attack.

        Raises:
            AttackError: If it did not change the text.
        """
        if not after.strip() or " ".join(before.split()) == " ".join(after.split()):
            raise AttackError(f"{call.agent}: the manipulator left the text as it was")
        self.firings.append(Firing(call.index, before, after))

    def _scene(self, call: Call) -> Scene:
        """Where the call takes place."""
        brief = Brief.parse(call.prompt)
        others = others_in(brief.history, call.agent)
        code = self.injection.mode.value if self.injection.mode else "benign"
        rng = random.Random(f"{self.seed}:{call.agent}:{call.nth}:{code}")
        return Scene(brief.task, brief.history, others, rng, call.agent, self.domain)
