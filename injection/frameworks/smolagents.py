"""smolagents: agents in ReAct loops that call tools and the agents they manage.

The seam is `smolagents.Model`. Every agent of a tree gets a `Seat` of its own. An agent that calls
tools says so in one JSON object; what an agent that writes code says is handed on as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smolagents import ChatMessage, LogLevel, Model, MultiStepAgent, ToolCallingAgent
from smolagents import Tool as SmolTool
from smolagents.models import (
    ChatMessageToolCall,
    ChatMessageToolCallFunction,
    MessageRole,
)

from injection.frameworks.stage import TOOL, Heard, Spoken, Stage, Tool, refuse_namesakes
from injection.session import Session
from injection.systems.manager import calculate, lookup

_CALLING, _OBSERVED, _NEW_TASK = "Calling tools:\n", "Observation:\n", "New task:\n"


class Seat(Model):
    """The model of one agent; speaks on a stage.

    Args:
        stage: The run; None for a model that is replaced before anybody calls it.
        agent: Whose model it is.
        names: All agents of the run.
    """

    def __init__(
        self, stage: Stage | None = None, agent: str = "", names: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(model_id="seat")
        self.stage, self.agent, self.names = stage, agent, names

    def generate(
        self,
        messages: list[ChatMessage],
        stop_sequences: list[str] | None = None,
        response_format: dict[str, str] | None = None,
        tools_to_call_from: list[SmolTool] | None = None,
        **options: Any,
    ) -> ChatMessage:
        """Answer.

        Raises:
            DclError: As the stage raises it.
            RuntimeError: If the model belongs to no run.
        """
        if self.stage is None:
            raise RuntimeError("this model stands in for another and takes part in no run")
        system = [_text(m) for m in messages if m.role == MessageRole.SYSTEM]
        tools = [_read_tool(tool) for tool in tools_to_call_from or ()]
        heard = list(self._hear(messages))
        return _message(self.stage.speak(self.agent, "\n\n".join(system), heard, tools))

    def _hear(self, messages: Sequence[ChatMessage]) -> Iterator[Heard]:
        """Messages with who said them: the result of a call is by the tool or agent it named."""
        own = ""
        called: tuple[str, str] | None = None
        for message in messages:
            text = _text(message)
            if message.role == MessageRole.USER:
                yield Heard("", text.removeprefix(_NEW_TASK))
            elif message.role == MessageRole.ASSISTANT:
                own, called = text, None
                yield Heard(self.agent, text)
            elif message.role == MessageRole.TOOL_CALL:
                called = _read_call(text)
            elif message.role == MessageRole.TOOL_RESPONSE:
                # A call that failed leaves no trace but its error, which is told by its place.
                name, id = called or (TOOL, f"{self.agent}\n{own}\n{text}")
                author = name if name in self.names else TOOL
                yield Heard(author, text.removeprefix(_OBSERVED), id)


def _text(message: ChatMessage) -> str:
    """Words of a message; pictures are named."""
    if isinstance(message.content, list):
        return "\n".join(str(part.get("text", "[image]")) for part in message.content)
    return message.content or ""


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and id of the call that a message reports; None if it cannot be read.

    The framework writes it as a Python literal.
    """
    try:
        (call, *_) = ast.literal_eval(text.removeprefix(_CALLING))
        return str(call["function"]["name"]), str(call["id"])
    except (ValueError, SyntaxError, KeyError, TypeError):
        return None


def _read_tool(tool: SmolTool | MultiStepAgent) -> Tool:
    """A tool, or an agent that is called like one."""
    names = [name for name, value in tool.inputs.items() if not value.get("nullable")]
    return Tool(tool.name, tool.description, tuple(names))


def _message(spoken: Spoken) -> ChatMessage:
    """A reply in the terms of smolagents."""
    calls = None
    if spoken.tool:
        function = ChatMessageToolCallFunction(name=spoken.tool, arguments=dict(spoken.arguments))
        calls = [ChatMessageToolCall(function=function, id=spoken.id, type="function")]
    return ChatMessage(role=MessageRole.ASSISTANT, content=spoken.text, tool_calls=calls)


@dataclass(frozen=True, slots=True)
class SmolAgents:
    """An agent of smolagents, with those it manages, as a system.

    Args:
        build: Builds the agent at the top, with whatever models; called anew for every run.
        name: Name in records.
        phases: What each agent does, for scripted agents.
        top: What the agent at the top is called if it has no name of its own.
    """

    build: Callable[[], MultiStepAgent]
    name: str = "smolagents"
    phases: Mapping[str, str] = field(default_factory=dict)
    top: str = "manager"

    def __call__(self, session: Session, task: str) -> str:
        """Run the agent on a task."""
        stage = Stage(session, task, self.phases)
        agent = self.build()
        members = list(_members(agent, self.top))
        refuse_namesakes(name for name, _ in members)
        names = frozenset(name for name, _ in members)
        for name, member in members:
            member.model = Seat(stage, name, names)
        return stage.perform(lambda: str(agent.run(task)), lambda error: False)


def _members(agent: MultiStepAgent, name: str) -> Iterator[tuple[str, MultiStepAgent]]:
    """An agent and all that it manages, by name."""
    yield agent.name or name, agent
    for managed in agent.managed_agents.values():
        yield from _members(managed, managed.name)


class _Lookup(SmolTool):
    """Rows of the table of towns."""

    name = "lookup"
    description = "Looks one thing up in the table of towns, or in the letters of a word."
    inputs = {"question": {"type": "string", "description": "What to look up."}}  # noqa: RUF012
    output_type = "string"

    def forward(self, question: str) -> str:
        """The entry."""
        return lookup(question, "")


class _Calculate(SmolTool):
    """One operation."""

    name = "calculate"
    description = "Works out one operation on two numbers."
    inputs = {"operation": {"type": "string", "description": "Such as 12 * 7."}}  # noqa: RUF012
    output_type = "string"

    def forward(self, operation: str) -> str:
        """Its value."""
        return calculate(operation, "")


def _managed() -> MultiStepAgent:
    """A manager and a searcher with two tools."""
    searcher = ToolCallingAgent(
        tools=[_Lookup(), _Calculate()],
        model=Seat(),
        name="searcher",
        description="Looks things up and computes. Give it one question.",
        max_steps=4,
        verbosity_level=LogLevel.OFF,
    )
    return ToolCallingAgent(
        tools=[],
        model=Seat(),
        managed_agents=[searcher],
        instructions="Give the final answer as `Answer: ...`, or as one fenced block of code.",
        max_steps=8,
        verbosity_level=LogLevel.OFF,
    )


MANAGED = SmolAgents(_managed, "smolagents", {"manager": "act", "searcher": "search"})
