"""The OpenAI Agents SDK (`openai-agents`): agents that hand a conversation over to one another.

The seam is `agents.Model`. Every agent that can be reached by handoffs, or as a tool, from the
first gets a `Seat` of its own. Whose words a message holds is known by its id, which the seat of
its author gave it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agents import (
    Agent,
    AgentOutputSchemaBase,
    FunctionTool,
    Handoff,
    MaxTurnsExceeded,
    Model,
    ModelBehaviorError,
    ModelResponse,
    RunConfig,
    Runner,
    Usage,
)
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputItem,
    ResponseOutputMessage,
    ResponseOutputText,
)

from dcl.errors import ConfigError
from injection.frameworks.stage import TOOL, Heard, Spoken, Stage, Tool, refuse_namesakes
from injection.session import Session


class Seat(Model):
    """The model of one agent; speaks on a stage.

    Args:
        stage: The run.
        agent: Whose model it is.
    """

    def __init__(self, stage: Stage, agent: str) -> None:
        self.stage, self.agent = stage, agent

    async def get_response(
        self,
        system_instructions: str | None,
        input: str | list[Any],
        model_settings: Any,
        tools: list[Any],
        output_schema: AgentOutputSchemaBase | None,
        handoffs: list[Handoff[Any, Any]],
        tracing: Any,
        **options: Any,
    ) -> ModelResponse:
        """Answer.

        Raises:
            DclError: As the stage raises it.
        """
        persona = system_instructions or ""
        if output_schema is not None and not output_schema.is_plain_text():
            schema = json.dumps(output_schema.json_schema())
            persona = f"{persona}\n\nReply with JSON of this schema: {schema}".strip()
        items = [{"role": "user", "content": input}] if isinstance(input, str) else input
        offered = [
            *(_read_tool(t.name, t.description, t.params_json_schema) for t in _functions(tools)),
            *(_read_tool(h.tool_name, h.tool_description, h.input_json_schema) for h in handoffs),
        ]
        spoken = self.stage.speak(self.agent, persona, list(self._hear(items)), offered)
        return ModelResponse(output=_output(spoken), usage=Usage(), response_id=None)

    def stream_response(self, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
        """Not offered.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{self.agent}: expected a run without streaming, got a streamed one")

    def _hear(self, items: Iterable[Mapping[str, Any]]) -> Iterator[Heard]:
        """Items of a conversation with who said them; words and calls of one reply are one."""
        heard = set()
        for item in items:
            id = str(item.get("call_id") or item.get("id") or "")
            if item.get("type") == "function_call_output":
                yield Heard(TOOL, _text(item.get("output")), id)
            elif item.get("type") == "function_call":
                calls = {str(item["name"]): json.loads(str(item["arguments"]) or "{}")}
                if id not in heard:
                    yield Heard(self._author(id), self.stage.recall(id, "", calls))
            elif item.get("role") == "assistant":
                heard.add(id)
                text = self.stage.recall(id, _text(item.get("content")), {})
                yield Heard(self._author(id), text)
            elif item.get("role"):
                yield Heard("", _text(item.get("content")))

    def _author(self, id: str) -> str:
        """Who gave a reply."""
        known = self.stage.said.get(id)
        return known.agent if known else self.agent


def _functions(tools: Iterable[Any]) -> Iterator[FunctionTool]:
    """The tools that are functions.

    Raises:
        ConfigError: If there are others, which only OpenAI's own servers can run.
    """
    for tool in tools:
        if not isinstance(tool, FunctionTool):
            raise ConfigError(f"{type(tool).__name__}: expected tools that are functions")
        yield tool


def _text(content: object) -> str:
    """Words of a message."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json.dumps(content)
    return "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)


def _read_tool(name: str, about: str, schema: Mapping[str, Any]) -> Tool:
    """A tool as the stage describes it."""
    return Tool(name, about, tuple(schema.get("required", schema.get("properties", ()))))


def _output(spoken: Spoken) -> list[ResponseOutputItem]:
    """A reply in the terms of the SDK."""
    output: list[ResponseOutputItem] = []
    if spoken.lead or not spoken.tool:
        text = ResponseOutputText(text=spoken.lead, type="output_text", annotations=[])
        output.append(
            ResponseOutputMessage(
                id=spoken.id, content=[text], role="assistant", status="completed", type="message"
            )
        )
    if spoken.tool:
        output.append(
            ResponseFunctionToolCall(
                name=spoken.tool,
                arguments=json.dumps(dict(spoken.arguments)),
                call_id=spoken.id,
                type="function_call",
            )
        )
    return output


@dataclass(frozen=True, slots=True)
class OpenAIAgents:
    """Agents of the SDK as a system.

    Args:
        build: Builds the agent that starts, with whatever models; called anew for every run.
        name: Name in records.
        phases: What each agent does, for scripted agents.
        limit: Most turns of a run; > 0.
    """

    build: Callable[[], Agent[Any]]
    name: str = "openai_agents"
    phases: Mapping[str, str] = field(default_factory=dict)
    limit: int = 12

    def __call__(self, session: Session, task: str) -> str:
        """Run the agents on a task. Traces are not sent anywhere."""
        stage = Stage(session, task, self.phases)
        first = self.build()
        agents = _reachable(first, [])
        refuse_namesakes(agent.name for agent in agents)
        for agent in agents:
            agent.model = Seat(stage, agent.name)
        config = RunConfig(tracing_disabled=True)
        return stage.perform(
            lambda: str(
                asyncio.run(
                    Runner.run(first, task, max_turns=self.limit, run_config=config)
                ).final_output
            ),
            lambda error: isinstance(error, (MaxTurnsExceeded, ModelBehaviorError)),
        )


def _reachable(agent: Agent[Any], seen: list[Agent[Any]]) -> list[Agent[Any]]:
    """An agent and all that the conversation can come to from it.

    Raises:
        ConfigError: If a handoff does not say to which agent it leads.
    """
    if any(agent is other for other in seen):
        return seen
    seen.append(agent)
    nexts = [getattr(tool, "_agent_instance", None) for tool in agent.tools]
    for handoff in agent.handoffs:
        target = (
            handoff._agent_ref and handoff._agent_ref() if isinstance(handoff, Handoff) else handoff
        )
        if not isinstance(target, Agent):
            raise ConfigError(
                f"{agent.name}: expected handoffs to agents, or made by `handoff(agent)`, got one "
                "that does not say where it leads"
            )
        nexts.append(target)
    for other in nexts:
        if isinstance(other, Agent):
            _reachable(other, seen)
    return seen


_SOLVE = "You solve the task step by step, end with `Answer: ...`, and hand over to the reviewer."


def _handoffs() -> Agent[Any]:
    """A triage agent, three specialists, and a reviewer who may send work back."""
    reviewer: Agent[Any] = Agent(
        name="Reviewer",
        instructions="You check the work. Send it back, or state the final `Answer: ...`.",
    )
    specialists: list[Agent[Any]] = [
        Agent(name=name, instructions=_SOLVE, handoffs=[reviewer])
        for name in ("Mathematician", "Researcher", "Programmer")
    ]
    reviewer.handoffs = list(specialists)
    return Agent(
        name="Triage",
        instructions="You hand the task over to the right specialist.",
        handoffs=list(specialists),
    )


HANDOFFS = OpenAIAgents(
    _handoffs,
    "openai_agents",
    {
        "Triage": "triage",
        "Reviewer": "close",
        **dict.fromkeys(("Mathematician", "Researcher", "Programmer"), "hand_in"),
    },
)
