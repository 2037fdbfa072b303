"""AutoGen (`autogen-agentchat`): group chats, Magentic-One, and agents as tools.

The seam is `autogen_core.models.ChatCompletionClient`. Every client that an agent or a team holds
is replaced by a `Seat` of that agent; the client of a team speaks for the manager of its chat.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import ChatAgent, TaskResult, Team
from autogen_agentchat.conditions import (
    SourceMatchTermination,
    TextMentionTermination,
)
from autogen_agentchat.messages import BaseChatMessage, StopMessage
from autogen_agentchat.teams import (
    BaseGroupChat,
    MagenticOneGroupChat,
    RoundRobinGroupChat,
    SelectorGroupChat,
)
from autogen_core import CancellationToken, FunctionCall
from autogen_core.models import (
    AssistantMessage,
    ChatCompletionClient,
    CreateResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    ModelFamily,
    ModelInfo,
    RequestUsage,
    SystemMessage,
    UserMessage,
)
from autogen_core.tools import BaseTool, ToolSchema, Workbench
from autogen_core.tools import Tool as AutoGenTool
from pydantic import BaseModel

from dcl.errors import ConfigError
from injection.anatomy import find_objects
from injection.frameworks.stage import TOOL, Heard, Spoken, Stage, Tool, refuse_namesakes
from injection.session import Session

for _name in ("autogen_core", "autogen_agentchat"):
    # Errors come out of a run as they are; without this, each is printed with its trace as well.
    logging.getLogger(_name).addHandler(logging.NullHandler())

_LEDGER = ("is_request_satisfied", "is_in_loop", "is_progress_being_made", "next_speaker")
_UNREADABLE = (
    "ValueError: Failed to parse ledger",
    "ValueError: Invalid next speaker",
    *(f"KeyError: '{key}'" for key in (*_LEDGER, "answer")),
)
"""How Magentic-One ends a run over a ledger that it cannot read, after ten tries."""
_FINAL = (
    "Give the final result of the task. End with a line `Answer: ...`; if the task asks for a "
    "function, give it whole in one fenced block instead."
)


class Seat(ChatCompletionClient):
    """The client of one agent; speaks on a stage.

    Args:
        stage: The run; None for a client that is replaced before anybody calls it.
        agent: Whose client it is.
        names: All agents of the run.
        manager: Who gives this agent its orders; empty if nobody does.
        closing: How the request for the final answer begins; empty if there is none.
    """

    component_type = "model"

    def __init__(
        self,
        stage: Stage | None = None,
        agent: str = "",
        names: frozenset[str] = frozenset(),
        manager: str = "",
        closing: str = "",
    ) -> None:
        self.stage, self.agent, self.names = stage, agent, names
        self.manager, self.closing = manager, closing

    async def create(
        self,
        messages: Sequence[LLMMessage],
        *,
        tools: Sequence[AutoGenTool | ToolSchema] = [],
        tool_choice: Any = "auto",
        json_output: bool | type[BaseModel] | None = None,
        extra_create_args: Mapping[str, Any] = {},
        cancellation_token: CancellationToken | None = None,
    ) -> CreateResult:
        """Answer.

        Raises:
            DclError: As the stage raises it.
            RuntimeError: If the client belongs to no run.
        """
        if self.stage is None:
            raise RuntimeError("this client stands in for a model and takes part in no run")
        persona = "\n\n".join(m.content for m in messages if isinstance(m, SystemMessage))
        others = [m for m in messages if not isinstance(m, SystemMessage)]
        heard = [item for i, m in enumerate(others) for item in self._hear(m, i + 1 == len(others))]
        offered = [] if tool_choice == "none" else [_read_tool(tool) for tool in tools]
        phase = self._phase(others, bool(json_output))
        spoken = self.stage.speak(self.agent, persona, heard, offered, phase=phase)
        return _result(spoken, as_ledger=bool(json_output))

    async def create_stream(
        self, messages: Sequence[LLMMessage], **options: Any
    ) -> AsyncGenerator[str | CreateResult, None]:
        """The same in one piece."""
        yield await self.create(messages, **options)

    async def close(self) -> None:
        """Nothing is open."""

    def actual_usage(self) -> RequestUsage:
        """Nothing; the session counts."""
        return RequestUsage(0, 0)

    def total_usage(self) -> RequestUsage:
        """Nothing; the session counts."""
        return RequestUsage(0, 0)

    def count_tokens(self, messages: Sequence[LLMMessage], **options: Any) -> int:
        """Four characters a token."""
        return sum(len(str(message.content)) for message in messages) // 4

    def remaining_tokens(self, messages: Sequence[LLMMessage], **options: Any) -> int:
        """More than any run here needs; contexts are not cut."""
        return 1_000_000

    @property
    def capabilities(self) -> Any:
        """What the model can do, in the older form."""
        return self.model_info

    @property
    def model_info(self) -> ModelInfo:
        """What the model can do."""
        return ModelInfo(
            vision=False,
            function_calling=True,
            json_output=True,
            family=ModelFamily.UNKNOWN,
            structured_output=False,
        )

    def _hear(self, message: LLMMessage, is_last: bool) -> Iterator[Heard]:
        """One message; what a manager says last is the request."""
        if isinstance(message, UserMessage):
            order = is_last and message.source == self.manager
            known = message.source in self.names and message.source != self.agent
            yield Heard(message.source if known and not order else "", _text(message.content))
        elif isinstance(message, AssistantMessage):
            yield Heard(self.agent, self._own_words(message))
        elif isinstance(message, FunctionExecutionResultMessage):
            for result in message.content:
                name = result.name if result.name in self.names else TOOL
                yield Heard(name, result.content, result.call_id)

    def _own_words(self, message: AssistantMessage) -> str:
        """What the agent said before."""
        if isinstance(message.content, str) or self.stage is None:
            return str(message.content)
        calls = {call.name: json.loads(call.arguments or "{}") for call in message.content}
        return self.stage.recall(message.content[0].id, message.thought or "", calls)

    def _phase(self, messages: Sequence[LLMMessage], as_json: bool) -> str:
        """What Magentic-One's orchestrator is doing; nothing for everybody else."""
        if not self.closing:
            return ""
        if as_json:
            return "ledger"
        sources = [getattr(message, "source", "") for message in messages[-3:]]
        kinds = [type(message) for message in messages[-3:]]
        if str(messages[-1].content).strip().startswith(self.closing):
            return "final"
        planning = [UserMessage, AssistantMessage, UserMessage]
        return "plan" if kinds == planning and set(sources) == {self.agent} else "facts"


def _text(content: str | list[Any]) -> str:
    """Words of a message; pictures are named."""
    if isinstance(content, str):
        return content
    return "\n".join(part if isinstance(part, str) else "[image]" for part in content)


def _read_tool(tool: AutoGenTool | ToolSchema) -> Tool:
    """A tool as the stage describes it."""
    schema = tool if isinstance(tool, dict) else tool.schema
    parameters = schema.get("parameters")
    names = parameters.get("required", parameters["properties"]) if parameters else ()
    return Tool(schema["name"], schema.get("description", ""), tuple(names))


def _result(spoken: Spoken, *, as_ledger: bool) -> CreateResult:
    """A reply in AutoGen's terms."""
    usage = RequestUsage(0, len(spoken.text) // 4)
    if spoken.tool:
        call = FunctionCall(spoken.id, json.dumps(dict(spoken.arguments)), spoken.tool)
        return CreateResult(
            finish_reason="function_calls",
            content=[call],
            usage=usage,
            cached=False,
            thought=spoken.lead or None,
        )
    text = _as_ledger(spoken.lead) if as_ledger else spoken.lead
    return CreateResult(finish_reason="stop", content=text, usage=usage, cached=False)


def _as_ledger(text: str) -> str:
    """A ledger in the shape that Magentic-One reads: an object with a reason for each value.

    Models that are asked for it often give bare values; nothing is filled in that they left out.
    """
    found = find_objects(text)
    if not found:
        return text
    value = dict(found[-1][2])
    if "instruction" in value:
        value["instruction_or_question"] = value.pop("instruction")
    keys = (*_LEDGER, "instruction_or_question")
    bare = {k: v for k, v in value.items() if k in keys and not isinstance(v, dict)}
    return json.dumps(value | {k: {"reason": "", "answer": v} for k, v in bare.items()})


@dataclass(frozen=True, slots=True)
class AutoGen:
    """A team of AutoGen as a system.

    Args:
        build: Builds the team, with whatever clients; called anew for every run.
        name: Name in records.
        phases: What each agent does, for scripted agents.
        speaker: Whose last message is the answer; empty for the last message of all.
    """

    build: Callable[[], BaseGroupChat]
    name: str = "autogen"
    phases: Mapping[str, str] = field(default_factory=dict)
    speaker: str = ""

    def __call__(self, session: Session, task: str) -> str:
        """Run the team on a task.

        Raises:
            ConfigError: If the team holds no client.
        """
        stage = Stage(session, task, self.phases)
        team = self.build()
        take_seats(team, stage)
        return stage.perform(
            lambda: self._answer(asyncio.run(team.run(task=task))),
            _is_unreadable,
        )

    def _answer(self, result: TaskResult) -> str:
        """The answer in what the team said."""
        said = [
            message
            for message in result.messages
            if isinstance(message, BaseChatMessage)
            and not isinstance(message, StopMessage)
            and message.source in (self.speaker or message.source,)
        ]
        return said[-1].to_text() if said else ""


def _is_unreadable(error: Exception) -> bool:
    """Whether a run ended over an unreadable ledger; later in a run it comes as text."""
    plain = isinstance(error, (KeyError, ValueError))
    return (f"{type(error).__name__}: {error}" if plain else str(error)).startswith(_UNREADABLE)


def take_seats(team: BaseGroupChat, stage: Stage) -> None:
    """Replace every client in a team, and in the teams and agents inside it.

    Args:
        team: The team; changed.
        stage: Its run.

    Raises:
        ConfigError: If there is no client to replace, or two who speak have one name.
    """
    owners = list(_owners(team, "", set()))
    names = frozenset(name for _, name, _ in owners)
    seated: dict[int, str] = {}
    for owner, name, manager in owners:
        for key, value in list(vars(owner).items()):
            if isinstance(value, ChatCompletionClient):
                closing = str(getattr(owner, "_final_answer_prompt", ""))
                begin = closing.partition("{task}")[0].strip()
                setattr(owner, key, Seat(stage, name, names, manager, begin))
                seated[id(owner)] = name
    refuse_namesakes(seated.values())
    if not seated:
        raise ConfigError(f"{type(team).__name__}: expected agents with a model client, got none")


def _owners(part: object, manager: str, seen: set[int]) -> Iterator[tuple[object, str, str]]:
    """Teams and agents with the name they speak under and the name of who runs their chat."""
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, BaseGroupChat):
        manager = part._group_chat_manager_name
        yield part, manager, ""
    elif isinstance(part, ChatAgent):
        yield part, part.name, manager
    inside = vars(part).values() if isinstance(part, (Team, ChatAgent, BaseTool, Workbench)) else ()
    for value in inside:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, (Team, ChatAgent, BaseTool, Workbench)):
                yield from _owners(item, manager, seen)


def _agent(name: str, job: str) -> AssistantAgent:
    """An agent of the teams below."""
    return AssistantAgent(name, model_client=Seat(), description=job, system_message=job)


_SOLVE = "You solve tasks step by step and end with a line `Answer: ...`, or one fenced block."
_CRITICISE = "You check the latest solution and write [Agree], or [Disagree] with what is wrong."
_WRITE = "You state the final result in a line `Answer: ...`, or the function in a fenced block."


def _round_robin() -> BaseGroupChat:
    """A solver and a critic in turn, until the critic agrees."""
    agents: list[ChatAgent | Team] = [_agent("Solver", _SOLVE), _agent("Critic", _CRITICISE)]
    stop = TextMentionTermination("[Agree]", sources=["Critic"])
    return RoundRobinGroupChat(agents, termination_condition=stop, max_turns=6)


def _selector() -> BaseGroupChat:
    """A chat in which a model picks who speaks."""
    agents: list[ChatAgent | Team] = [
        _agent("Solver", _SOLVE),
        _agent("Critic", _CRITICISE),
        _agent("Writer", _WRITE),
    ]
    stop = SourceMatchTermination(["Writer"])
    return SelectorGroupChat(agents, model_client=Seat(), termination_condition=stop, max_turns=9)


def _magentic() -> BaseGroupChat:
    """Magentic-One's orchestrator with three workers."""
    jobs = {
        "Researcher": "Looks rows of the table up.",
        "Calculator": "Works one step out.",
        "Coder": "Writes functions.",
    }
    agents: list[ChatAgent] = [_agent(name, job) for name, job in jobs.items()]
    return MagenticOneGroupChat(
        agents, model_client=Seat(), max_turns=10, final_answer_prompt=_FINAL
    )


ROUND_ROBIN = AutoGen(
    _round_robin, "autogen_round_robin", {"Solver": "solve", "Critic": "critique"}, "Solver"
)
SELECTOR = AutoGen(
    _selector,
    "autogen_selector",
    {
        "Solver": "solve",
        "Critic": "critique",
        "Writer": "decide",
        "SelectorGroupChatManager": "select",
    },
    "Writer",
)
MAGENTIC_ONE = AutoGen(
    _magentic, "magentic_one", dict.fromkeys(("Researcher", "Calculator", "Coder"), "work")
)
