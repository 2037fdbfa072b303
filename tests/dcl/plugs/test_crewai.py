from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest
from loopback import call, endpoint
from spy import Said, Spy, names_on_the_page, run_example, without

if find_spec("crewai") is None:  # asked before the line below, which other tests must not feel
    pytest.skip("needs CrewAI: make test-crewai", allow_module_level=True)
os.environ["CREWAI_DISABLE_TELEMETRY"] = os.environ["OTEL_SDK_DISABLED"] = "true"

from crewai import LLM, Agent, BaseLLM, Crew, Process, Task
from crewai.events import crewai_event_bus
from crewai.flow.flow import Flow, listen, start
from crewai.tools import tool

import dcl.plugs.crewai as plug
from dcl.plugs.crewai import MonitorListener

# The framework's own habits, which a test does not judge.
pytestmark = pytest.mark.filterwarnings("ignore")

TASK = "Add 2 and 2."


class Scripted(BaseLLM):
    """A model that says what a test tells it to."""

    script: list[Any]

    def call(self, messages: Any, *more: Any, **settings: Any) -> str:
        """The next entry of the script."""
        entry = self.script.pop(0)
        if isinstance(entry, Exception):
            raise entry
        return str(entry)

    def supports_function_calling(self) -> bool:
        """Tools are called in words."""
        return False


@tool("add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool("broken")
def broken(a: int) -> int:
    """Break."""
    raise ValueError("no such number")


def final(text: str) -> str:
    return f"Thought: done\nFinal Answer: {text}"


def use(name: str, arguments: str) -> str:
    return f"Thought: I use it\nAction: {name}\nAction Input: {arguments}"


def agent(role: str, *script: Any, **options: Any) -> Agent:
    llm = Scripted(model="scripted", script=list(script))
    return Agent(role=role, goal="Be right.", backstory="You add.", llm=llm, **options)


def task(description: str, **options: Any) -> Task:
    return Task(description=description, expected_output="a number", **options)


def crew(a: int = 2) -> Crew:
    planner = agent("planner\n", final("Use the tool."))
    solver = agent(
        "solver", use("add", f'{{"a": {a}, "b": {a}}}'), final(f"It is {a}."), tools=[add]
    )
    tasks = [task(f"Plan {a}.", agent=planner), task(f"Add {a}.", agent=solver)]
    return Crew(agents=[planner, solver], tasks=tasks)


CREW: list[Said] = [
    ("user", "user", "message", "Plan 2."),
    ("planner", "assistant", "thought", "Thought: done"),
    ("planner", "assistant", "final", "Use the tool."),
    ("user", "user", "message", "Add 2."),
    ("solver", "assistant", "tool_call", 'add({"a": 2, "b": 2})'),
    ("add", "tool", "tool_result", "4"),
    ("solver", "assistant", "thought", "Thought: I use it"),
    ("solver", "assistant", "thought", "Thought: done"),
    ("solver", "assistant", "final", "It is 2."),
]


@pytest.fixture(autouse=True)
def listener(spy: Spy) -> Iterator[MonitorListener]:
    found = MonitorListener(spy)
    yield found
    found.close()


def spoken(spy: Spy, run_id: str | None = None) -> list[Said]:
    assert crewai_event_bus.flush()
    return spy.said(run_id)


def test_two_agents_and_a_tool(spy: Spy) -> None:
    assert crew().kickoff().raw == "It is 2."
    assert spoken(spy) == CREW
    (final,) = spy.finals().values()
    assert (final.reason, final.outcome, final.missing) == ("ended", None, 0)
    assert all(turn.source for turn in spy.taken[spy.only()])


def test_crews_side_by_side_are_kept_apart(spy: Spy) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda i: crew(i).kickoff(), range(3)))
    assert crewai_event_bus.flush()
    assert len(spy.finals()) == 3
    for i in range(3):
        (run_id,) = (run for run, asked in spy.tasks.items() if asked == f"Plan {i}.")
        said = spy.said(run_id)
        assert len(said) == len(CREW)
        assert said[-1][-1] == f"It is {i}."
        assert said[5][-1] == str(2 * i)


def test_a_manager_hands_over(spy: Spy) -> None:
    order = '{"task": "add them", "context": "2 and 2", "coworker": "solver"}'
    manager = Scripted(
        model="scripted", script=[use("delegate_work_to_coworker", order), final("It is 5.")]
    )
    solver = agent("solver", final("5"))
    Crew(
        agents=[solver], tasks=[task(TASK)], process=Process.hierarchical, manager_llm=manager
    ).kickoff()
    said = [entry for entry in spoken(spy) if entry[2] != "thought"]
    assert said == [
        ("user", "user", "message", TASK),
        ("Crew Manager", "assistant", "tool_call", f"delegate_work_to_coworker({order})"),
        ("Crew Manager", "assistant", "handoff", "transfer to solver"),
        ("solver", "assistant", "final", "5"),
        ("delegate_work_to_coworker", "tool", "tool_result", "5"),
        ("Crew Manager", "assistant", "final", "It is 5."),
    ]
    assert len(spy.finals()) == 1


def test_a_tool_that_fails_is_told_once_however_often_it_is_tried(spy: Spy) -> None:
    solver = agent("solver", use("broken", '{"a": 1}'), final("I could not."), tools=[broken])
    Crew(agents=[solver], tasks=[task(TASK, agent=solver)]).kickoff()
    said = [entry for entry in spoken(spy) if entry[2].startswith("tool")]
    assert said == [
        ("solver", "assistant", "tool_call", 'broken({"a": 1})'),
        ("broken", "tool", "tool_result", "error: no such number"),
    ]
    spy.finals()


def test_an_error_reaches_the_host_and_the_run_has_failed(spy: Spy) -> None:
    solver = agent("solver", *[RuntimeError("the model is down")] * 5, max_retry_limit=0)
    with pytest.raises(RuntimeError, match="the model is down"):
        Crew(agents=[solver], tasks=[task(TASK, agent=solver)]).kickoff()
    assert spoken(spy)[-1] == ("solver", "assistant", "message", "error: the model is down")
    (final,) = spy.finals().values()
    assert final.outcome == "failure"


def test_an_agent_without_a_crew_is_a_run(spy: Spy) -> None:
    agent("solver", final("7")).kickoff("What is 3 + 4?")
    assert [entry for entry in spoken(spy) if entry[2] != "thought"] == [
        ("user", "user", "message", "What is 3 + 4?"),
        ("solver", "assistant", "final", "7"),
    ]
    assert len(spy.finals()) == 1


class Both(Flow):
    """A crew, then an agent of its own."""

    @start()
    def first(self) -> str:
        """The crew."""
        return str(crew().kickoff().raw)

    @listen(first)
    def second(self, before: str) -> str:
        """The agent."""
        return str(agent("checker", final("Right.")).kickoff(f"Check: {before}").raw)


def test_a_flow_is_one_run(spy: Spy) -> None:
    Both().kickoff()
    said = spoken(spy)
    assert said[: len(CREW)] == CREW
    assert said[len(CREW)] == ("user", "user", "message", "Check: It is 2.")
    assert said[-1] == ("checker", "assistant", "final", "Right.")
    assert len(spy.finals()) == 1


def test_models_that_tell_what_they_wrote(spy: Spy) -> None:
    with endpoint() as server:
        server.answers = [call("add", "c1", a=2, b=2), {"content": "It is 5."}]
        llm = LLM(model="openai/gpt-4o", base_url=server.url, api_key="none")
        solver = Agent(role="solver", goal="Be right.", backstory="b", llm=llm, tools=[add])
        Crew(agents=[solver], tasks=[task(TASK, agent=solver)]).kickoff()
        said = spoken(spy)
    assert said[0] == ("user", "user", "message", TASK)
    assert said[1][:3] == ("system", "system", "system")
    assert said[2:] == [
        ("solver", "assistant", "tool_call", 'add({"a": 2, "b": 2})'),
        ("add", "tool", "tool_result", "4"),
        ("solver", "assistant", "message", "It is 5."),
    ]
    spy.finals()


def test_a_listener_that_is_closed_hears_nothing(spy: Spy, listener: MonitorListener) -> None:
    listener.close()
    crew().kickoff()
    assert crewai_event_bus.flush()
    assert not spy.taken


def test_the_page_on_plugs_uses_what_is_there() -> None:
    assert names_on_the_page("dcl.plugs.crewai") <= set(dir(plug))


def test_without_the_framework_the_remedy_is_named() -> None:
    said = without("crewai", "dcl.plugs.crewai")
    assert "pip install 'dcl-attribution[crewai]'" in said


def test_the_example_runs() -> None:
    assert "final" in run_example("watch_crewai.py")
