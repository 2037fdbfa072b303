"""The one place through which every call of every agent goes, and what it leaves behind.

A system never talks to a model itself. It asks a `Session`, and says who asks: the true agent of a
call is known, never guessed from words. Interceptors see each call before it is sent and each
reply before the system reads it; whatever is injected is injected there.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from dcl.trajectory import Outcome, Trajectory, Turn, TurnKind

TASK_MARK, TALK_MARK, TURN_MARK = "=== Task ===", "=== Conversation ===", "=== Your turn ==="
OUTSIDE = frozenset(
    {"user", "human", "system", "Tool", "Browser", "Files", "Computer_terminal", "ComputerTerminal"}
)
"""Names in a conversation that are no agents: words of a user or a framework, results of tools."""

_SPEAKER = re.compile(r"^--- (.+) ---$", re.MULTILINE)
_MARK = re.compile(rf"^(?=--- .+ ---$|(?:{TASK_MARK}|{TALK_MARK}|{TURN_MARK})$)", re.MULTILINE)


class Message(NamedTuple):
    """One message of a request."""

    role: str
    content: str


class Said(NamedTuple):
    """What an agent said, as another agent is shown it."""

    agent: str
    text: str


def others_in(history: Iterable[Said], agent: str) -> tuple[str, ...]:
    """Agents but one that spoke in a conversation, in the order in which they first did."""
    names = dict.fromkeys(said.agent for said in history)
    return tuple(name for name in names if name != agent and name not in OUTSIDE)


@dataclass(frozen=True, slots=True)
class Brief:
    """What an agent is shown when it is its turn.

    Every system writes its prompts in this form, so an attack on a prompt knows where the task
    ends and the conversation begins.

    Args:
        task: What the whole system was asked.
        history: What the agent gets to see of the others and of itself, in time order.
        request: What it should do now.
    """

    task: str
    history: tuple[Said, ...]
    request: str

    def render(self) -> str:
        """The text of the user message; lines of texts that look like marks are indented."""
        said = "\n".join(f"--- {said.agent} ---\n{_indent(said.text)}" for said in self.history)
        parts = [f"{TASK_MARK}\n{_indent(self.task)}"] if self.task else []
        parts += [f"{TALK_MARK}\n{said}"] if self.history else []
        return "\n\n".join([*parts, f"{TURN_MARK}\n{_indent(self.request)}"])

    @classmethod
    def parse(cls, prompt: str) -> Brief:
        """Read what `render` wrote; a prompt of another form is all request."""
        head, found, request = f"\n\n{prompt}".rpartition(f"\n\n{TURN_MARK}\n")
        task, _, talk = head.partition(f"\n\n{TALK_MARK}\n")
        if not found or (task and not task.startswith(f"\n\n{TASK_MARK}\n")):
            return cls("", (), prompt)
        names = list(_SPEAKER.finditer(talk))
        ends = [*(match.start() for match in names[1:]), len(talk) + 1][: len(names)]
        history = tuple(
            Said(match[1], talk[match.end() + 1 : end - 1])
            for match, end in zip(names, ends, strict=True)
        )
        return cls(task.removeprefix(f"\n\n{TASK_MARK}\n"), history, request)


def _indent(text: str) -> str:
    """A text in which no line can be taken for a mark of a prompt."""
    return _MARK.sub(" ", text)


@dataclass(frozen=True, slots=True)
class Call:
    """One request of one agent.

    Args:
        agent: Who asks.
        index: 0-based number among all calls of the run.
        nth: 0-based number among the calls of this agent.
        phase: What the agent is doing, in one word of the system.
        messages: System prompt and user prompt.
    """

    agent: str
    index: int
    nth: int
    phase: str
    messages: tuple[Message, ...]

    @property
    def prompt(self) -> str:
        """Text of the last user message."""
        return next((m.content for m in reversed(self.messages) if m.role == "user"), "")

    @property
    def digest(self) -> str:
        """16 hex digits that stand for the agent and all it was sent."""
        text = json.dumps([self.agent, self.messages])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def with_prompt(self, prompt: str) -> Call:
        """The same call with another last user message."""
        position = max(i for i, m in enumerate(self.messages) if m.role == "user")
        changed = (
            *self.messages[:position],
            Message("user", prompt),
            *self.messages[position + 1 :],
        )
        return replace(self, messages=changed)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model answered.

    Args:
        text: The answer.
        prompt_tokens: Tokens it read; >= 0.
        completion_tokens: Tokens it wrote; >= 0.
    """

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Model(Protocol):
    """Anything that answers calls: a scripted agent, an endpoint, a recording."""

    @property
    def name(self) -> str:
        """What records call it."""

    def __call__(self, call: Call, /) -> Reply:
        """Answer.

        Raises:
            ModelError: If there is no usable answer.
            BudgetError: If no more calls are allowed.
        """


class Interceptor(Protocol):
    """Sees every call on its way out and every reply on its way in."""

    def before(self, call: Call) -> Call:
        """The call to send instead."""

    def after(self, call: Call, reply: Reply) -> Reply:
        """The reply to hand to the system instead."""


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the log of a run.

    Args:
        agent: Who speaks.
        role: The agent's role in the system.
        content: What the system read.
        phase: What the agent was doing.
        kind: What the entry is.
        call: Number of the call that gave it; None for what no model said.
        digest: Of the call as it was sent; empty for what no model said.
    """

    agent: str
    role: str
    content: str
    phase: str
    kind: TurnKind = TurnKind.MESSAGE
    call: int | None = None
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run took.

    Args:
        calls: Calls of models.
        prompt_tokens: Tokens read.
        completion_tokens: Tokens written.
    """

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Cost) -> Cost:
        """Both together."""
        return Cost(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a system left behind.

    Args:
        events: Its log, in time order.
        calls: Every call as the system made it, in order.
        answer: Its final output.
        cost: What it took.
    """

    events: tuple[Event, ...]
    calls: tuple[Call, ...]
    answer: str
    cost: Cost

    def event_of(self, call: int) -> int:
        """0-based position of the event that a call gave."""
        return next(i for i, event in enumerate(self.events) if event.call == call)

    def trajectory(self, id: str, task: str, outcome: Outcome) -> Trajectory:
        """The log as `dcl` reads it; steps count from 1."""
        turns = tuple(
            Turn(event.agent, event.content, event.role, event.kind, step)
            for step, event in enumerate(self.events, start=1)
        )
        return Trajectory(id, task, turns, outcome)


@dataclass(slots=True)
class Session:
    """One run in the making.

    Args:
        model: Answers the calls.
        interceptors: Applied in order to every call and every reply.
    """

    model: Model
    interceptors: Sequence[Interceptor] = ()
    _events: list[Event] = field(default_factory=list)
    _calls: list[Call] = field(default_factory=list)
    _made: Counter[str] = field(default_factory=Counter)
    _cost: Cost = field(default_factory=lambda: Cost())

    def ask(
        self,
        agent: str,
        brief: Brief,
        *,
        role: str,
        phase: str,
        persona: str = "",
        shown: Callable[[str], str] = str,
    ) -> str:
        """Let an agent speak.

        Args:
            agent: Who; the name that labels will carry.
            brief: What it is shown.
            role: Its role in the system, for the log.
            phase: What it is doing, in one word.
            persona: System prompt; the role if empty.
            shown: What the log and the system read in place of the reply, such as the screen after
                the act that it calls for.

        Returns:
            What it said, after every interceptor, as it is shown.
        """
        messages = (
            Message("system", persona or f"You are {agent}, the {role}."),
            Message("user", brief.render()),
        )
        call = Call(agent, len(self._calls), self._made[agent], phase, messages)
        self._made[agent] += 1
        self._calls.append(call)
        sent = call
        for interceptor in self.interceptors:
            sent = interceptor.before(sent)
        reply = self.model(sent)
        self._cost += Cost(1, reply.prompt_tokens, reply.completion_tokens)
        for interceptor in self.interceptors:
            reply = interceptor.after(sent, reply)
        text = shown(reply.text)
        self._events.append(Event(agent, role, text, phase, call=call.index, digest=sent.digest))
        return text

    def note(
        self,
        agent: str,
        content: str,
        *,
        role: str,
        phase: str,
        kind: TurnKind = TurnKind.TOOL_RESULT,
    ) -> None:
        """Log what no model said, such as the result of a tool."""
        self._events.append(Event(agent, role, content, phase, kind))

    def finish(self, answer: str) -> Run:
        """Close the run."""
        return Run(tuple(self._events), tuple(self._calls), answer, self._cost)


class System(Protocol):
    """A multi-agent system: asks a session until it has an answer."""

    @property
    def name(self) -> str:
        """Name in records; the `framework` of the AEGIS schema."""

    def __call__(self, session: Session, task: str, /) -> str:
        """Work on a task and return the final output."""


def run_system(
    system: System, task: str, model: Model, interceptors: Sequence[Interceptor] = ()
) -> Run:
    """Run a system once.

    Raises:
        ModelError: If the model fails; such a run is no failure of the system.
        AttackError: If an interceptor cannot do what it should.
    """
    session = Session(model, interceptors)
    return session.finish(system(session, task))
