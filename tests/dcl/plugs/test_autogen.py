from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from spy import Said, Spy, names_on_the_page, run_example, without

pytest.importorskip("autogen_agentchat", reason="needs AutoGen: make test-autogen")

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.messages import MultiModalMessage, TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat, Swarm
from autogen_core import EVENT_LOGGER_NAME, FunctionCall, Image
from autogen_core.models import CreateResult, ModelFamily, ModelInfo, RequestUsage
from autogen_ext.models.replay import ReplayChatCompletionClient

import dcl.plugs.autogen as plug
from dcl.formats import read_trajectories
from dcl.plugs.autogen import MonitorHandler, watch
from dcl.plugs.recorder import Recorder

# The framework's own habits, which a test does not judge.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

TASK = "Add 2 and 2."
INFO = ModelInfo(
    vision=False, function_calling=True, json_output=False, structured_output=False,
    family=ModelFamily.UNKNOWN,
)  # fmt: skip


def call(name: str, id: str, thought: str | None = None, **arguments: Any) -> CreateResult:
    return CreateResult(
        content=[FunctionCall(id=id, name=name, arguments=json.dumps(arguments))],
        finish_reason="function_calls",
        usage=RequestUsage(prompt_tokens=0, completion_tokens=0),
        cached=False,
        thought=thought,
    )


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def scripted(*said: str | CreateResult) -> ReplayChatCompletionClient:
    return ReplayChatCompletionClient(list(said), model_info=INFO)


class Broken(ReplayChatCompletionClient):
    """A model that is down."""

    async def create(self, *told: Any, **settings: Any) -> CreateResult:
        raise RuntimeError("the model is down")


def team(a: int = 2, answer: str = "It is 5. DONE") -> Swarm:
    planner = AssistantAgent(
        "planner", scripted(call("transfer_to_solver", "c1", "I hand over.")), handoffs=["solver"]
    )
    solver = AssistantAgent(
        "solver", scripted(call("add", "c2", a=a, b=a), answer), tools=[add],
        reflect_on_tool_use=True,
    )  # fmt: skip
    return Swarm([planner, solver], termination_condition=TextMentionTermination("DONE"))


MOVED = "Transferred to solver, adopting the role of solver immediately."
TEAM: list[Said] = [
    ("user", "user", "message", TASK),
    ("planner", "ThoughtEvent", "thought", "I hand over."),
    ("planner", "ToolCallRequestEvent", "tool_call", "transfer_to_solver({})"),
    ("transfer_to_solver", "ToolCallExecutionEvent", "tool_result", MOVED),
    ("planner", "HandoffMessage", "handoff", MOVED),
    ("solver", "ToolCallRequestEvent", "tool_call", 'add({"a": 2, "b": 2})'),
    ("add", "ToolCallExecutionEvent", "tool_result", "4"),
    ("solver", "TextMessage", "message", "It is 5. DONE"),
]


async def run(spy: Spy, stream: Callable[[], AsyncIterator[Any]]) -> list[Any]:
    recorder = Recorder(spy)
    return [item async for item in watch(stream(), recorder)]


@pytest.fixture
def handler(spy: Spy) -> Iterator[MonitorHandler]:
    log, found = logging.getLogger(EVENT_LOGGER_NAME), MonitorHandler(spy)
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(found)
    yield found
    log.removeHandler(found)
    log.setLevel(level)
    found.close()


def test_a_stream_with_two_agents_and_a_tool(spy: Spy, tmp_path: Path) -> None:
    items = asyncio.run(run(spy, lambda: team().run_stream(task=TASK)))
    assert isinstance(items[-1], TaskResult)
    assert spy.said() == TEAM
    (final,) = spy.finals().values()
    assert (final.reason, final.outcome, final.missing) == ("ended", None, 0)
    log = tmp_path / "log.json"
    log.write_text(json.dumps([item.model_dump(mode="json") for item in items[:-1]]))
    (read,) = read_trajectories(log)
    turns = spy.taken[spy.only()]
    assert [(t.agent, t.role, t.kind, t.content) for t in read.turns] == [
        (t.agent, t.role, t.kind, t.content) for t in turns
    ]
    assert [t.source for t in turns[:2]] == [items[0].id, items[1].id]


def test_the_log_of_a_team_tells_the_same(spy: Spy, handler: MonitorHandler) -> None:
    result = asyncio.run(team().run(task=TASK))
    assert result.stop_reason is not None
    assert spy.said() == TEAM
    (final,) = spy.finals().values()
    assert (final.reason, final.outcome, final.missing) == ("ended", None, 0)


def test_streams_side_by_side_are_kept_apart(spy: Spy) -> None:
    async def both() -> None:
        recorder = Recorder(spy)

        async def one(i: int) -> None:
            stream = team(i, f"It is {i}. DONE").run_stream(task=f"Add {i}.")
            async for _ in watch(stream, recorder, run_id=f"run {i}"):
                pass

        await asyncio.gather(*(one(i) for i in range(3)))

    asyncio.run(both())
    assert spy.finals().keys() == {"run 0", "run 1", "run 2"}
    for i in range(3):
        assert [text for *_, text in spy.said(f"run {i}")][::7] == [f"Add {i}.", f"It is {i}. DONE"]


def test_teams_side_by_side_and_twice_are_kept_apart(spy: Spy, handler: MonitorHandler) -> None:
    async def both() -> None:
        await asyncio.gather(*(team(i, f"It is {i}. DONE").run(task=f"Add {i}.") for i in (1, 2)))
        again = AssistantAgent("solver", scripted("DONE", "DONE too"))
        chat = RoundRobinGroupChat([again], termination_condition=TextMentionTermination("DONE"))
        await chat.run(task="First.")
        await chat.run(task="Second.")

    asyncio.run(both())
    assert sorted(spy.tasks.values()) == ["Add 1.", "Add 2.", "First.", "Second."]
    assert len(spy.finals()) == 4
    first, second = (run for run, task in spy.tasks.items() if task in ("First.", "Second."))
    assert first.rpartition("/")[0] == second.rpartition("/")[0]


@pytest.mark.parametrize("logged", [False, True])
def test_an_error_reaches_the_host_and_the_run_has_failed(
    spy: Spy, logged: bool, request: pytest.FixtureRequest
) -> None:
    if logged:
        request.getfixturevalue("handler")
    solver = AssistantAgent("solver", Broken(["x"], model_info=INFO))

    async def work() -> None:
        chat = RoundRobinGroupChat([solver], max_turns=1)
        if logged:
            await chat.run(task=TASK)
        else:
            await run(spy, lambda: chat.run_stream(task=TASK))

    with pytest.raises(RuntimeError, match="the model is down"):
        asyncio.run(work())
    (final,) = spy.finals().values()
    assert final.outcome == "failure"
    error = ("solver", "assistant", "message", "error: the model is down")
    assert (error in spy.said()) is logged


def test_a_stream_that_is_left_is_closed_and_its_run_ends(spy: Spy) -> None:
    closed = []

    async def stream() -> AsyncIterator[Any]:
        try:
            for text in ("one", "two"):
                yield TextMessage(content=text, source="solver")
        finally:
            closed.append(True)

    async def work() -> None:
        async with aclosing(watch(stream(), Recorder(spy))) as watched:
            async for _ in watched:
                break

    asyncio.run(work())
    assert closed == [True]
    assert [text for *_, text in spy.said()] == ["one"]
    assert len(spy.finals()) == 1


def test_an_agent_alone_with_chunks_of_its_stream(spy: Spy) -> None:
    solver = AssistantAgent("solver", scripted("It is 5."), model_client_stream=True)
    asyncio.run(run(spy, lambda: solver.run_stream(task=TASK)))
    assert [(agent, text) for agent, *_, text in spy.said()] == [
        ("user", TASK),
        ("solver", "It is 5."),
    ]
    spy.finals()


def test_pictures_become_markers(spy: Spy) -> None:
    import PIL.Image

    async def stream() -> AsyncIterator[Any]:
        picture = Image(PIL.Image.new("RGB", (2, 2)))
        yield MultiModalMessage(content=["Look:", picture], source="user")

    asyncio.run(run(spy, stream))
    assert spy.said() == [("user", "user", "message", "Look:\n[image]")]


def test_what_is_no_message_is_counted_passed_on_and_not_raised(
    spy: Spy, handler: MonitorHandler
) -> None:
    async def stream() -> AsyncIterator[Any]:
        yield 42
        yield TextMessage(content="one", source="solver")

    items = asyncio.run(run(spy, stream))
    assert items[0] == 42
    log = logging.getLogger(EVENT_LOGGER_NAME)
    log.info("plain text")
    log.info(object())
    (final,) = spy.finals().values()
    assert final.missing == 1
    assert spy.stats()["refused_malformed"] == 1
    spy._counts.clear()  # as this test expects it


def test_the_page_on_plugs_uses_what_is_there() -> None:
    assert names_on_the_page("dcl.plugs.autogen") <= set(dir(plug))


def test_without_the_framework_the_remedy_is_named() -> None:
    said = without("autogen_core", "dcl.plugs.autogen")
    assert "pip install 'dcl-attribution[autogen]'" in said


def test_the_example_runs() -> None:
    assert "final" in run_example("watch_autogen.py")
