from __future__ import annotations

import asyncio
import operator
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict

import pytest
from spy import Said, Spy, run_example, without

pytest.importorskip("langchain", reason="needs langchain and langgraph")

from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from dcl.plugs.langchain import MonitorCallbackHandler

TASK = "Add 2 and 2."


class Scripted(GenericFakeChatModel):
    """A chat model that says what a test tells it to."""

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        """The same: its calls are in the script."""
        return self


def scripted(*said: AIMessage | str | Exception) -> Scripted:
    def script() -> Iterator[AIMessage]:
        for message in said:
            if isinstance(message, Exception):
                raise message
            yield AIMessage(message) if isinstance(message, str) else message

    return Scripted(messages=script())


def calls(name: str, id: str = "c1", **args: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": args, "id": id}])


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def broken(a: int) -> int:
    """Break."""
    raise ValueError("no such number")


@tool
def transfer_to_solver() -> Command[str]:
    """Hand over to the solver."""
    answer = ToolMessage("moved", tool_call_id="c1")
    return Command(goto="solver", graph=Command.PARENT, update={"messages": [answer]})


def config(spy: Spy, **more: Any) -> Any:
    return {"callbacks": [MonitorCallbackHandler(spy)], **more}


def ask(text: str = TASK) -> Any:
    return {"messages": [("user", text)]}


def team(*answers: AIMessage | str) -> Any:
    """A planner that hands over to a solver with a tool; both are prebuilt agents."""
    planner = create_agent(
        scripted(calls("transfer_to_solver")), [transfer_to_solver],
        name="planner", system_prompt="You plan.",
    )  # fmt: skip
    script = answers or (calls("add", "c2", a=2, b=2), "It is 5.")
    solver = create_agent(scripted(*script), [add, broken], name="solver")
    graph = StateGraph(MessagesState)
    graph.add_node("planner", planner)
    graph.add_node("solver", solver)
    graph.add_edge(START, "planner")
    return graph.compile()


TEAM: list[Said] = [
    ("user", "user", "message", TASK),
    ("system", "system", "system", "You plan."),
    ("planner", "assistant", "tool_call", "transfer_to_solver({})"),
    ("transfer_to_solver", "tool", "tool_result", "moved"),
    ("planner", "assistant", "handoff", "transfer to solver"),
    ("solver", "assistant", "tool_call", 'add({"a": 2, "b": 2})'),
    ("add", "tool", "tool_result", "4"),
    ("solver", "assistant", "message", "It is 5."),
]


def test_two_agents_and_a_tool(spy: Spy) -> None:
    team().invoke(ask(), config(spy))
    assert spy.said() == TEAM
    (final,) = spy.finals().values()
    assert (final.reason, final.outcome, final.missing) == ("ended", None, 0)
    assert spy.tasks[spy.only()] == TASK
    assert all(turn.source for turn in spy.taken[spy.only()])


def test_asyncio_tells_the_same_in_the_same_order(spy: Spy) -> None:
    asyncio.run(team().ainvoke(ask(), config(spy)))
    assert spy.said() == TEAM
    assert len(spy.finals()) == 1


@pytest.mark.parametrize("mode", ["values", "updates", "tasks"])
def test_streams_tell_the_same(spy: Spy, mode: Any) -> None:
    for _ in team().stream(ask(), config(spy), stream_mode=mode):
        pass
    assert spy.said() == TEAM
    assert len(spy.finals()) == 1


def test_words_that_are_streamed_piece_by_piece_are_one_turn(spy: Spy) -> None:
    model = scripted("Add them to each other.", "It is 5.")

    def planner(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    def solver(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_sequence([planner, solver])
    graph.add_edge(START, "planner")
    chunks = list(graph.compile().stream(ask(), config(spy), stream_mode="messages"))
    assert len(chunks) > 6
    assert spy.said() == [
        ("user", "user", "message", TASK),
        ("planner", "assistant", "message", "Add them to each other."),
        ("solver", "assistant", "message", "It is 5."),
    ]
    spy.finals()


def test_a_stream_that_is_left_ends_its_run(spy: Spy) -> None:
    for _ in team().stream(ask(), config(spy)):
        break
    (final,) = spy.finals().values()
    assert final.outcome is None


def test_runs_side_by_side_are_kept_apart(spy: Spy) -> None:
    handler = MonitorCallbackHandler(spy)

    def work(i: int) -> None:
        graph = team(calls("add", "c2", a=i, b=i), f"It is {i}.")
        graph.invoke(ask(f"Add {i}."), {"callbacks": [handler]})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    finals = spy.finals()
    assert len(finals) == 4
    for i in range(4):
        (run_id,) = (run for run, task in spy.tasks.items() if task == f"Add {i}.")
        said = spy.said(run_id)
        assert [text for *_, text in said[-3:]] == [
            f'add({{"a": {i}, "b": {i}}})', str(2 * i), f"It is {i}.",
        ]  # fmt: skip
        assert len(said) == len(TEAM)


def test_nodes_are_agents_also_without_a_model(spy: Spy) -> None:
    model = scripted("Add them.", "5")

    def planner(state: MessagesState) -> Any:
        return {"messages": [model.invoke([SystemMessage("Plan."), *state["messages"]])]}

    def solver(state: MessagesState) -> Any:
        answer = model.invoke(state["messages"])
        return {"messages": [HumanMessage(answer.content, name="solver")]}  # as many graphs do

    def reviewer(state: MessagesState) -> Any:
        return {"messages": [*state["messages"], AIMessage("Looks right.")]}

    graph = StateGraph(MessagesState)
    graph.add_sequence([planner, solver, reviewer])
    graph.add_edge(START, "planner")
    graph.compile().invoke(ask(), config(spy))
    assert spy.said() == [
        ("user", "user", "message", TASK),
        ("system", "system", "system", "Plan."),
        ("planner", "assistant", "message", "Add them."),
        ("solver", "assistant", "message", "5"),
        ("reviewer", "assistant", "message", "Looks right."),
    ]
    spy.finals()


class Draft(TypedDict):
    question: str
    parts: Annotated[list[str], operator.add]
    text: str


def test_branches_and_states_without_messages(spy: Spy) -> None:
    def left(state: Draft) -> Any:
        return {"parts": ["l"], "text": "from the left"}

    def right(state: Draft) -> Any:
        return Command(goto="join", update={"parts": ["r"]})

    def join(state: Draft) -> Any:
        return {"text": " and ".join(state["parts"])}

    graph = StateGraph(Draft)
    for node in (left, right, join):
        graph.add_node(node)
    graph.add_edge(START, "left")
    graph.add_edge(START, "right")
    graph.compile().invoke({"question": "Which?", "parts": [], "text": ""}, config(spy))
    said = spy.said()
    assert said[0] == ("user", "user", "message", "Which?")
    assert sorted(said[1:3]) == [
        ("left", "assistant", "message", "from the left"),
        ("right", "assistant", "handoff", "transfer to join"),
    ]
    assert said[3] == ("join", "assistant", "message", "l and r")
    spy.finals()


def test_an_error_reaches_the_host_and_the_run_has_failed(spy: Spy) -> None:
    def solver(state: MessagesState) -> Any:
        raise ValueError("out of numbers")

    graph = StateGraph(MessagesState)
    graph.add_node(solver)
    graph.add_edge(START, "solver")
    with pytest.raises(ValueError, match="out of numbers"):
        graph.compile().invoke(ask(), config(spy))
    assert spy.said()[1:] == [("solver", "assistant", "message", "error: out of numbers")]
    (final,) = spy.finals().values()
    assert final.outcome == "failure"


def test_a_tool_that_fails_is_told_once(spy: Spy) -> None:
    graph = team(calls("broken", "c2", a=1), "I could not.")
    with pytest.raises(ValueError, match="no such number"):
        graph.invoke(ask(), config(spy))
    assert spy.said()[5:] == [
        ("solver", "assistant", "tool_call", 'broken({"a": 1})'),
        ("broken", "tool", "tool_result", "error: no such number"),
    ]
    (final,) = spy.finals().values()
    assert final.outcome == "failure"


def test_a_graph_that_asks_a_person_goes_on_in_the_same_run(spy: Spy) -> None:
    def check(state: MessagesState) -> Any:
        return {"messages": [AIMessage("You said " + interrupt("Sure?"))]}

    graph = StateGraph(MessagesState)
    graph.add_node(check)
    graph.add_edge(START, "check")
    handler = MonitorCallbackHandler(spy)
    app = graph.compile(checkpointer=InMemorySaver())
    thread: Any = {"callbacks": [handler], "configurable": {"thread_id": "t"}}
    app.invoke(ask(), thread)
    assert not spy.finals()
    app.invoke(Command(resume="yes"), thread)
    assert spy.said() == [
        ("user", "user", "message", TASK),
        ("check", "assistant", "message", "Sure?"),
        ("user", "user", "message", "yes"),
        ("check", "assistant", "message", "You said yes"),
    ]
    assert len(spy.finals()) == 1


def test_what_a_thread_said_before_is_no_part_of_the_next_run(spy: Spy) -> None:
    model = scripted("Hello.", "Bye.")

    def greeter(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node(greeter)
    graph.add_edge(START, "greeter")
    app = graph.compile(checkpointer=InMemorySaver())
    thread = config(spy, configurable={"thread_id": "t"})
    app.invoke(ask("Hi."), thread)
    app.invoke(ask("I go."), thread)
    assert [[text for *_, text in spy.said(run)] for run in spy.taken] == [
        ["Hi.", "Hello."],
        ["I go.", "Bye."],
    ]
    assert len(spy.finals()) == 2


def test_chains_without_a_graph(spy: Spy) -> None:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Plan."), ("user", "old"), ("ai", "an example"), ("user", "{task}")]
    )
    chain = (prompt | scripted("Add them.")).with_config(run_name="planner")
    chain.invoke({"task": TASK}, config(spy))
    assert spy.said() == [
        ("user", "user", "message", TASK),
        ("system", "system", "system", "Plan."),
        ("user", "user", "message", "old"),
        ("planner", "assistant", "message", "Add them."),
    ]
    spy.finals()


class Shelf(BaseRetriever):
    """Finds the same for every question."""

    def _get_relevant_documents(self, query: str, **more: Any) -> list[Document]:
        if query == "nothing":
            raise LookupError("the shelf is empty")
        return [Document("2 and 2"), Document("are 4")]


def test_a_retriever_is_a_tool(spy: Spy) -> None:
    handler = MonitorCallbackHandler(spy)
    chain = (Shelf(name="shelf") | (lambda found: found[0].page_content)).with_config(
        run_name="reader"
    )
    assert chain.invoke(TASK, {"callbacks": [handler]}) == "2 and 2"
    with pytest.raises(LookupError):
        chain.invoke("nothing", {"callbacks": [handler]})
    first, second = spy.taken
    assert spy.said(first)[1:] == [
        ("reader", "assistant", "tool_call", f"shelf({TASK})"),
        ("shelf", "tool", "tool_result", "2 and 2\nare 4"),
    ]
    assert spy.said(second)[2:] == [
        ("shelf", "tool", "tool_result", "error: the shelf is empty"),
    ]
    assert {run: event.outcome for run, event in spy.finals().items()} == {
        first: None,
        second: "failure",
    }


def test_models_that_are_called_alone(spy: Spy) -> None:
    handler = MonitorCallbackHandler(spy)
    FakeListLLM(responses=["4"]).invoke(TASK, {"callbacks": [handler]})
    scripted("5").invoke(TASK, {"callbacks": [handler]})
    for run_id, answer in zip(spy.taken, "45", strict=True):
        assert spy.said(run_id) == [
            ("user", "user", "message", TASK),
            ("assistant", "assistant", "message", answer),
        ]
    assert len(spy.finals()) == 2


def test_a_model_that_breaks_down(spy: Spy) -> None:
    with pytest.raises(RuntimeError, match="down"):
        scripted(RuntimeError("the model is down")).invoke(TASK, config(spy))
    (final,) = spy.finals().values()
    assert final.outcome == "failure"


def test_blocks_of_content_are_read(spy: Spy) -> None:
    message = AIMessage(
        [
            {"type": "thinking", "thinking": "Hm."},
            {"type": "text", "text": "I add."},
            {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1, "b": 1}},
        ],
        tool_calls=[{"name": "add", "args": {"a": 1, "b": 1}, "id": "c1"}],
    )
    picture = HumanMessage(
        [{"type": "text", "text": TASK}, {"type": "image_url", "image_url": {"url": "data:"}}]
    )
    scripted(message).invoke([picture], config(spy))
    assert spy.said() == [
        ("user", "user", "message", f"{TASK}\n[image]"),
        ("assistant", "assistant", "thought", "Hm."),
        ("assistant", "assistant", "message", "I add."),
        ("assistant", "assistant", "tool_call", 'add({"a": 1, "b": 1})'),
    ]
    spy.finals()


def test_what_is_no_callback_of_the_framework_is_counted_and_not_raised(spy: Spy) -> None:
    from uuid import uuid4

    handler, run_id, odd = MonitorCallbackHandler(spy), uuid4(), object()
    handler.on_chain_start(None, odd, run_id=run_id)
    handler.on_chat_model_start(None, [[odd]], run_id=uuid4(), parent_run_id=run_id)  # type: ignore[list-item]
    handler.on_llm_end(odd, run_id=run_id)  # type: ignore[arg-type]
    handler.on_llm_end(odd, run_id=uuid4())  # type: ignore[arg-type]
    handler.on_tool_end(odd, run_id=uuid4())
    handler.on_chain_end(odd, run_id=uuid4())
    assert spy.stats()["refused_malformed"] == 2
    spy._counts.clear()  # as this test expects it


def test_without_the_framework_the_remedy_is_named() -> None:
    said = without("langchain_core", "dcl.plugs.langchain")
    assert "pip install 'dcl-attribution[langchain]'" in said


def test_the_example_runs() -> None:
    assert "final" in run_example("watch_langgraph.py")
