"""LangGraph: graphs whose nodes call chat models.

The seam is LangChain's `BaseChatModel`. A compiled graph keeps its models in closures, so the
function that builds it is given the one to use, as LangGraph code mostly is. The agent of a call is
the node it is made in, which LangGraph tells every model; for a prebuilt agent, which is a graph
itself, it is the node that holds that graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command
from pydantic import PrivateAttr

from dcl.errors import ConfigError
from injection.frameworks.stage import TOOL, Heard, Spoken, Stage, Tool
from injection.session import Session

Graph = CompiledStateGraph[Any, Any, Any, Any]


_PREBUILT = ("agent", "model")
"""The node that calls the model inside agents of `langgraph.prebuilt` and `langchain.agents`."""


class Seat(BaseChatModel):
    """The model of all nodes of a graph; speaks on a stage, under the name of the node."""

    _stage: Stage = PrivateAttr()

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    @property
    def _llm_type(self) -> str:
        """What LangChain calls it."""
        return "seat"

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: str | None = None, **options: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools that it may call."""
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools])

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **options: Any,
    ) -> ChatResult:
        """Answer.

        Raises:
            DclError: As the stage raises it.
            ConfigError: If the call is made outside any node.
        """
        agent = _node(run_manager.metadata if run_manager else {})
        persona = "\n\n".join(m.text for m in messages if isinstance(m, SystemMessage))
        heard = [item for m in messages for item in self._hear(m, agent)]
        tools = [_read_tool(tool["function"]) for tool in options.get("tools", ())]
        spoken = self._stage.speak(agent, persona, heard, tools)
        return ChatResult(generations=[ChatGeneration(message=_message(spoken, agent))])

    def _hear(self, message: BaseMessage, agent: str) -> Iterator[Heard]:
        """One message with who said it: by the id of the call, else by the name it carries."""
        spoke = {said.agent for said in self._stage.said.values()}
        named = message.name if message.name in spoke else ""
        if isinstance(message, AIMessage):
            known = self._stage.said.get(message.id or "")
            calls = {call["name"]: call["args"] for call in message.tool_calls}
            text = self._stage.recall(message.id or "", message.text, calls)
            yield Heard(known.agent if known else named or agent, text)
        elif isinstance(message, ToolMessage):
            yield Heard(named or TOOL, message.text, message.tool_call_id)
        elif isinstance(message, HumanMessage):
            yield Heard(named or "", message.text)


def _node(metadata: Mapping[str, Any]) -> str:
    """The node that a call is made in, from what LangGraph notes about it.

    The namespace lists the nodes from the outside in, each with an id of its task.

    Raises:
        ConfigError: If there is none.
    """
    place = metadata.get("langgraph_checkpoint_ns") or metadata.get("langgraph_node")
    if not place:
        raise ConfigError("a model was called outside any node; expected calls from nodes only")
    path = [part.partition(":")[0] for part in str(place).split("|")]
    return path[-2] if len(path) > 1 and path[-1] in _PREBUILT else path[-1]


def _read_tool(function: Mapping[str, Any]) -> Tool:
    """A tool as the stage describes it."""
    schema = function.get("parameters", {})
    names = schema.get("required", schema.get("properties", ()))
    return Tool(function["name"], function.get("description", ""), tuple(names))


def _message(spoken: Spoken, agent: str) -> AIMessage:
    """A reply in LangChain's terms."""
    calls = []
    if spoken.tool:
        call = {"name": spoken.tool, "args": dict(spoken.arguments), "id": spoken.id}
        calls = [{**call, "type": "tool_call"}]
    return AIMessage(spoken.lead, id=spoken.id, name=agent, tool_calls=calls)


def _ask(task: str) -> dict[str, Any]:
    """The usual input: one message of the user."""
    return {"messages": [HumanMessage(task)]}


def _last_message(state: Mapping[str, Any]) -> str:
    """The usual output: the last message."""
    return str(state["messages"][-1].text)


@dataclass(frozen=True, slots=True)
class LangGraph:
    """A graph as a system.

    Args:
        build: Builds the graph around a chat model; called anew for every run.
        name: Name in records.
        phases: What each node does, for scripted agents.
        ask: The input of the graph for a task.
        answer: The answer in its last state.
        limit: Most steps of the graph; > 0.
    """

    build: Callable[[BaseChatModel], Graph]
    name: str = "langgraph"
    phases: Mapping[str, str] = field(default_factory=dict)
    ask: Callable[[str], dict[str, Any]] = _ask
    answer: Callable[[Mapping[str, Any]], str] = _last_message
    limit: int = 50

    def __call__(self, session: Session, task: str) -> str:
        """Run the graph on a task; branches that could run at once run one after another."""
        stage = Stage(session, task, self.phases)
        graph = self.build(Seat(stage))
        return stage.perform(
            lambda: self.answer(
                graph.invoke(self.ask(task), {"recursion_limit": self.limit, "max_concurrency": 1})
            ),
            lambda error: isinstance(error, GraphRecursionError),
        )


class _State(MessagesState):
    """Messages, and the order to the worker who is next."""

    order: str


_WORKERS = {
    "Researcher": "Looks one thing up in the table.",
    "Calculator": "Works one step out.",
    "Coder": "Writes functions.",
}
_SUPERVISE = (
    "You give one step at a time to a worker. When all is there, reply without a tool and end with "
    "a line `Answer: ...`, or with the function in one fenced block."
)


def _supervised(model: BaseChatModel) -> Graph:
    """A supervisor that calls three workers like tools."""
    orders = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
    tools = [
        {"type": "function", "function": {"name": n, "description": d, "parameters": orders}}
        for n, d in _WORKERS.items()
    ]
    chief = model.bind_tools(tools)

    def supervise(state: _State) -> Command[Any]:
        reply = chief.invoke([SystemMessage(_SUPERVISE), *state["messages"]])
        if not reply.tool_calls:
            return Command(goto=END, update={"messages": [reply]})
        (call,) = reply.tool_calls
        if call["name"] in _WORKERS:
            order = str(call["args"].get("order", ""))
            return Command(goto=call["name"], update={"messages": [reply], "order": order})
        refusal = ToolMessage(f"There is no {call['name']}.", tool_call_id=str(call["id"]))
        return Command(goto="Supervisor", update={"messages": [reply, refusal]})

    def worker(name: str) -> Callable[[_State], Command[Any]]:
        def work(state: _State) -> Command[Any]:
            task, last = state["messages"][0], state["messages"][-1]
            reply = model.invoke(
                [SystemMessage(_WORKERS[name]), task, HumanMessage(state["order"])]
            )
            assert isinstance(last, AIMessage)
            result = ToolMessage(reply.text, name=name, tool_call_id=str(last.tool_calls[0]["id"]))
            return Command(goto="Supervisor", update={"messages": [result]})

        return work

    graph = StateGraph(_State)
    graph.add_node("Supervisor", supervise, destinations=(*_WORKERS, END))
    for name in _WORKERS:
        graph.add_node(name, worker(name), destinations=("Supervisor",))  # type: ignore[arg-type]
    graph.add_edge(START, "Supervisor")
    return graph.compile()


SUPERVISED = LangGraph(
    _supervised,
    "langgraph_supervisor",
    {"Supervisor": "delegate", **dict.fromkeys(_WORKERS, "work")},
)
