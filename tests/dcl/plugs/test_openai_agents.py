from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from loopback import Endpoint, call, endpoint
from spy import Said, Spy, run_example, without

pytest.importorskip("agents", reason="needs the OpenAI Agents SDK")

from agents import (
    Agent,
    MaxTurnsExceeded,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_trace_processors,
    trace,
)
from openai import AsyncOpenAI, BadRequestError

from dcl.plugs.openai_agents import MonitorTracingProcessor

TASK = "Add 2 and 2."
TEAM: list[Said] = [
    ("user", "user", "message", TASK),
    ("system", "system", "system", "You plan."),
    ("planner", "assistant", "tool_call", "transfer_to_solver({})"),
    ("planner", "assistant", "handoff", "transfer to solver"),
    ("system", "system", "system", "You solve."),
    ("transfer_to_solver", "tool", "tool_result", '{"assistant": "solver"}'),
    ("solver", "assistant", "tool_call", 'add({"a": 2, "b": 2})'),
    ("add", "tool", "tool_result", "4"),
    ("solver", "assistant", "message", "It is 5."),
]


@pytest.fixture
def server() -> Iterator[Endpoint]:
    with endpoint() as found:
        yield found


@pytest.fixture
def processor(spy: Spy) -> Iterator[MonitorTracingProcessor]:
    found = MonitorTracingProcessor(spy)
    set_trace_processors([found])
    yield found
    set_trace_processors([])


pytestmark = pytest.mark.usefixtures("processor")


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@function_tool
def broken(a: int) -> int:
    """Break."""
    raise ValueError("no such number")


def client(server: Endpoint) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0)


def chat(server: Endpoint) -> Model:
    return OpenAIChatCompletionsModel("m", client(server))


def solver(model: Model) -> Agent[Any]:
    return Agent("solver", instructions="You solve.", model=model, tools=[add, broken])


def team(model: Model) -> Agent[Any]:
    return Agent("planner", instructions="You plan.", model=model, handoffs=[solver(model)])


def script() -> list[Any]:
    return [call("transfer_to_solver", "c1"), call("add", "c2", a=2, b=2), {"content": "It is 5."}]


def item(name: str, id: str, arguments: str) -> dict[str, Any]:
    return {
        "type": "function_call", "id": f"fc_{id}", "call_id": id, "name": name,
        "arguments": arguments, "status": "completed",
    }  # fmt: skip


def message(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "type": "message", "id": "m1", "role": "assistant", "status": "completed",
        "content": content,
    }  # fmt: skip


def test_two_agents_and_a_tool(spy: Spy, server: Endpoint) -> None:
    server.answers = script()
    result = asyncio.run(Runner.run(team(chat(server)), TASK))
    assert result.final_output == "It is 5."
    assert spy.said() == TEAM
    (final,) = spy.finals().values()
    assert (final.reason, final.outcome, final.missing) == ("ended", None, 0)
    assert spy.only().startswith("trace_")
    assert all(turn.source.startswith("span_") for turn in spy.taken[spy.only()])


def test_streams_tell_the_same(spy: Spy, server: Endpoint) -> None:
    server.answers = script()

    async def run() -> None:
        async for _ in Runner.run_streamed(team(chat(server)), TASK).stream_events():
            pass

    asyncio.run(run())
    assert spy.said() == TEAM
    assert len(spy.finals()) == 1


def test_the_responses_api_with_a_thought_and_a_tool_of_the_provider(
    spy: Spy, server: Endpoint
) -> None:
    thought = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Hm"}]}
    search = {
        "type": "web_search_call", "id": "ws", "status": "completed",
        "action": {"type": "search", "query": "2 + 2"},
    }  # fmt: skip
    server.answers = [
        [item("transfer_to_solver", "c1", "{}")],
        [item("add", "c2", '{"a":2,"b":2}')],
        [thought, search, message("It is 5.")],
    ]
    asyncio.run(Runner.run(team(OpenAIResponsesModel("m", client(server))), TASK))
    said = spy.said()
    assert [entry for entry in said[:-3] if entry[2] != "tool_call"] == [
        entry for entry in TEAM[:-1] if entry[2] != "tool_call"
    ]
    assert said[-3:] == [
        ("solver", "assistant", "thought", "Hm"),
        ("solver", "assistant", "tool_call",
         'web_search({"action": {"type": "search", "query": "2 + 2"}})'),
        ("solver", "assistant", "message", "It is 5."),
    ]  # fmt: skip
    spy.finals()


def test_runs_side_by_side_are_kept_apart(spy: Spy) -> None:
    async def work(i: int) -> None:
        with endpoint() as server:
            server.answers = [call("add", "c1", a=i, b=i), {"content": f"It is {i}."}]
            await Runner.run(solver(chat(server)), f"Add {i}.")

    async def run() -> None:
        await asyncio.gather(*(work(i) for i in range(4)))

    asyncio.run(run())
    assert len(spy.finals()) == 4
    for i in range(4):
        (run_id,) = (run for run, task in spy.tasks.items() if task == f"Add {i}.")
        assert [text for *_, text in spy.said(run_id)] == [
            f"Add {i}.", "You solve.", f'add({{"a": {i}, "b": {i}}})', str(2 * i), f"It is {i}.",
        ]  # fmt: skip


def test_several_runs_in_one_trace_are_one_run(spy: Spy, server: Endpoint) -> None:
    async def run() -> None:
        with trace("both"):
            first = await Runner.run(solver(chat(server)), TASK)
            await Runner.run(solver(chat(server)), f"Check: {first.final_output}")

    server.answers = [{"content": "5"}, {"content": "Right."}]
    asyncio.run(run())
    assert [text for *_, text in spy.said()] == [TASK, "You solve.", "5", "Check: 5", "Right."]
    assert len(spy.finals()) == 1


def test_what_a_session_held_before_is_no_part_of_the_run(spy: Spy, server: Endpoint) -> None:
    async def run() -> None:
        session = SQLiteSession("s")
        await Runner.run(solver(chat(server)), "Hi.", session=session)
        await Runner.run(solver(chat(server)), TASK, session=session)

    server.answers = [{"content": "Hello."}, {"content": "5"}]
    asyncio.run(run())
    assert [[text for *_, text in spy.said(run)] for run in spy.taken] == [
        ["Hi.", "You solve.", "Hello."],
        [TASK, "You solve.", "5"],
    ]
    assert len(server.asked[1]["messages"]) == 4
    spy.finals()


def test_an_agent_as_a_tool_has_its_own_name(spy: Spy, server: Endpoint) -> None:
    model = chat(server)
    tool = solver(model).as_tool("ask_solver", "Asks the solver.")
    server.answers = [call("ask_solver", "c1", input="2 + 2?"), {"content": "5"}, {"content": "ok"}]
    asyncio.run(Runner.run(Agent("planner", model=model, tools=[tool]), TASK))
    assert [(agent, text) for agent, *_, text in spy.said()] == [
        ("user", TASK),
        ("planner", 'ask_solver({"input": "2 + 2?"})'),
        ("system", "You solve."),
        ("user", "2 + 2?"),
        ("solver", "5"),
        ("ask_solver", "5"),
        ("planner", "ok"),
    ]
    spy.finals()


def test_a_tool_that_fails_is_told_once(spy: Spy, server: Endpoint) -> None:
    server.answers = [call("broken", "c1", a=1), {"content": "I could not."}]
    asyncio.run(Runner.run(solver(chat(server)), TASK))
    agent, role, kind, text = spy.said()[3]
    assert (agent, role, kind) == ("broken", "tool", "tool_result")
    assert "error" in text
    assert len(spy.said()) == 5
    (final,) = spy.finals().values()
    assert final.outcome is None


def test_an_error_reaches_the_host_and_the_run_has_failed(spy: Spy, server: Endpoint) -> None:
    server.answers = [None]
    with pytest.raises(BadRequestError):
        asyncio.run(Runner.run(solver(chat(server)), TASK))
    errors = [text for *_, text in spy.said() if text.startswith("error: ")]
    assert len(errors) == 1
    (final,) = spy.finals().values()
    assert final.outcome == "failure"


def test_a_run_without_an_end_has_failed(spy: Spy, server: Endpoint) -> None:
    server.answers = [call("add", f"c{i}", a=i, b=i) for i in range(2)]
    with pytest.raises(MaxTurnsExceeded):
        asyncio.run(Runner.run(solver(chat(server)), TASK, max_turns=1))
    assert spy.said()[-1] == ("solver", "assistant", "message", "error: Max turns exceeded")
    (final,) = spy.finals().values()
    assert final.outcome == "failure"


class Odd:
    """A span that is none."""

    trace_id, span_id, parent_id, error, span_data = "t", "s", None, None, None


def test_what_is_no_span_is_counted_and_not_raised(
    spy: Spy, processor: MonitorTracingProcessor
) -> None:
    odd: Any = Odd()
    processor.on_span_start(odd)  # of a trace that nobody opened
    processor.on_span_end(odd)
    processor.on_trace_start(odd)
    processor.on_span_start(odd)
    processor.on_span_end(odd)
    processor.on_trace_end(odd)
    processor.on_trace_end(odd)
    processor.force_flush()
    assert spy.stats()["refused_malformed"] == 2
    spy._counts.clear()  # as this test expects it


def test_without_the_framework_the_remedy_is_named() -> None:
    said = without("agents", "dcl.plugs.openai_agents")
    assert "pip install 'dcl-attribution[openai-agents]'" in said


def test_the_example_runs() -> None:
    assert "final" in run_example("watch_openai_agents.py")
