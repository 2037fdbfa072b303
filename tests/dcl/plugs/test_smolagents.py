from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from spy import Said, Spy, run_example, without

pytest.importorskip("smolagents", reason="needs smolagents")

from smolagents import ChatMessage, CodeAgent, Model, MultiStepAgent, ToolCallingAgent, tool
from smolagents.models import ChatMessageToolCall, ChatMessageToolCallFunction, MessageRole
from smolagents.utils import AgentGenerationError

from dcl.plugs.smolagents import MonitorStepCallback

TASK = "Add 2 and 2."


class Scripted(Model):
    """A model that says what a test tells it to."""

    def __init__(self, *script: str | ChatMessage | Exception) -> None:
        super().__init__(model_id="scripted")
        self.script = iter(script)

    def generate(self, messages: Any, *more: Any, **settings: Any) -> ChatMessage:
        """The next entry of the script."""
        entry = next(self.script)
        if isinstance(entry, Exception):
            raise entry
        if isinstance(entry, str):
            return ChatMessage(role=MessageRole.ASSISTANT, content=entry)
        return entry


def call(name: str, content: str | None = None, **arguments: Any) -> ChatMessage:
    return calls((name, arguments), content=content)


def calls(*named: tuple[str, dict[str, Any]], content: str | None = None) -> ChatMessage:
    found = [
        ChatMessageToolCall(
            id=f"c{i}", type="function", function=ChatMessageToolCallFunction(arguments, name)
        )
        for i, (name, arguments) in enumerate(named)
    ]
    return ChatMessage(role=MessageRole.ASSISTANT, content=content, tool_calls=found)


def answer(text: Any) -> ChatMessage:
    return call("final_answer", answer=text)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def agent(*script: Any, **options: Any) -> ToolCallingAgent:
    return ToolCallingAgent([add], Scripted(*script), verbosity_level=0, **options)


def solver(*script: Any) -> ToolCallingAgent:
    script = script or (call("add", "I add.", a=2, b=2), answer("5"))
    return agent(*script, name="solver", description="Solves.")


def team(*script: Any, callback: MonitorStepCallback) -> ToolCallingAgent:
    planner = ToolCallingAgent(
        [], Scripted(call("solver", "The solver knows.", task=TASK), answer("It is 5.")),
        name="planner", managed_agents=[solver(*script)], instructions="Be brief.",
        verbosity_level=0,
    )  # fmt: skip
    callback.attach(planner)
    return planner


def spoken(said: list[Said]) -> list[Said]:
    """The same, with what the framework adds to an order left out."""
    return [
        (agent, role, kind, TASK if kind == "handoff" and TASK in text else text)
        for agent, role, kind, text in said
    ]


TEAM: list[Said] = [
    ("user", "user", "message", TASK),
    ("system", "system", "system", "Be brief."),
    ("planner", "assistant", "handoff", TASK),
    ("solver", "assistant", "message", "I add."),
    ("solver", "assistant", "tool_call", 'add({"a": 2, "b": 2})'),
    ("add", "tool", "tool_result", "4"),
    ("solver", "assistant", "final", "5"),
    ("planner", "assistant", "message", "The solver knows."),
    ("planner", "assistant", "final", "It is 5."),
]


def test_two_agents_and_a_tool(spy: Spy) -> None:
    planner = team(callback=MonitorStepCallback(spy))
    assert planner.run(TASK) == "It is 5."
    assert spoken(spy.said()) == TEAM
    (final,) = spy.finals().values()
    assert (final.reason, final.outcome, final.missing) == ("ended", None, 0)


def test_streams_tell_the_same(spy: Spy) -> None:
    for _ in team(callback=MonitorStepCallback(spy)).run(TASK, stream=True):
        pass
    assert spoken(spy.said()) == TEAM
    assert len(spy.finals()) == 1


def test_code_is_a_call_and_its_log_a_result(spy: Spy) -> None:
    code = CodeAgent(
        [], Scripted(
            "Thought: ask\n<code>\nprint(solver(task='2 + 2'))\n</code>",
            "Thought: done\n<code>\nfinal_answer('It is 5.')\n</code>",
        ),
        managed_agents=[solver()], verbosity_level=0,
    )  # fmt: skip
    MonitorStepCallback(spy).attach(code)
    assert code.run(TASK) == "It is 5."
    said = [(agent, kind) for agent, _, kind, _ in spy.said()]
    assert said == [
        ("user", "message"), ("CodeAgent", "handoff"), ("solver", "message"),
        ("solver", "tool_call"), ("add", "tool_result"), ("solver", "final"),
        ("CodeAgent", "tool_call"), ("python_interpreter", "tool_result"),
        ("CodeAgent", "tool_call"), ("python_interpreter", "tool_result"),
        ("CodeAgent", "final"),
    ]  # fmt: skip
    spy.finals()


def test_runs_side_by_side_are_kept_apart(spy: Spy) -> None:
    callback = MonitorStepCallback(spy)

    def work(i: int) -> None:
        one = agent(call("add", a=i, b=i), answer(f"It is {i}."), name=f"solver{i}")
        callback.attach(one)
        one.run(f"Add {i}.")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(spy.finals()) == 4
    for i in range(4):
        (run_id,) = (run for run, task in spy.tasks.items() if task == f"Add {i}.")
        assert [text for *_, text in spy.said(run_id)] == [
            f"Add {i}.", f'add({{"a": {i}, "b": {i}}})', str(2 * i), f"It is {i}.",
        ]  # fmt: skip


def test_managed_agents_that_work_side_by_side_are_in_one_run(spy: Spy) -> None:
    workers: list[MultiStepAgent] = [
        agent(call("add", a=i, b=i), answer(str(i)), name=f"w{i}", description="Works.")
        for i in range(2)
    ]
    both = calls(("w0", {"task": "zero"}), ("w1", {"task": "one"}))
    planner = ToolCallingAgent(
        [], Scripted(both, answer("done")), managed_agents=workers, verbosity_level=0
    )
    MonitorStepCallback(spy).attach(planner)
    planner.run(TASK)
    assert {agent for agent, *_ in spy.said()} == {"user", "ToolCallingAgent", "w0", "w1", "add"}
    assert len(spy.finals()) == 1


def test_each_call_of_run_is_a_run_and_a_managed_agent_may_work_alone(spy: Spy) -> None:
    callback = MonitorStepCallback(spy)
    planner = team(callback=callback)
    planner.run(TASK)
    worker = planner.managed_agents["solver"]
    worker.model = Scripted(answer("6"), answer("7"))
    worker.run("Alone.")
    worker.run("Again.", reset=False)
    assert list(spy.tasks.values()) == [TASK, "Alone.", "Again."]
    assert len(spy.finals()) == 3


def test_used_up_steps_are_a_failure(spy: Spy) -> None:
    one = agent(call("add", a=1, b=1), "I ran out.", max_steps=1)
    MonitorStepCallback(spy).attach(one)
    one.run(TASK)
    assert [text for *_, text in spy.said()[-2:]] == ["error: Reached max steps.", "I ran out."]
    (final,) = spy.finals().values()
    assert final.outcome == "failure"


def test_an_error_reaches_the_host_and_the_run_has_failed(spy: Spy) -> None:
    one = agent("no call at all", RuntimeError("the model is down"), name="solver")
    MonitorStepCallback(spy).attach(one)
    with pytest.raises(AgentGenerationError, match="the model is down"):
        one.run(TASK)
    said = [text for *_, text in spy.said()]
    assert said[1] == "no call at all"
    assert said[2].startswith("error: Error while parsing")
    assert "the model is down" in said[3]
    (final,) = spy.finals().values()
    assert final.outcome == "failure"


def test_a_refused_call_is_told_with_its_error(spy: Spy) -> None:
    one = agent(call("add", a=1, b="x"), answer("none"), name="solver")
    MonitorStepCallback(spy).attach(one)
    one.run(TASK)
    assert spy.said()[1] == ("solver", "assistant", "tool_call", 'add({"a": 1, "b": "x"})')
    assert spy.said()[2][:3] == ("add", "tool", "tool_result")
    spy.finals()


def test_plans_are_thoughts(spy: Spy) -> None:
    one = agent("First this, then that.", answer(5), planning_interval=3, name="solver")
    MonitorStepCallback(spy).attach(one)
    one.run(TASK)
    plan, final = spy.said()[1:]
    assert plan[:3] == ("solver", "assistant", "thought")
    assert "First this, then that." in plan[3]
    assert final == ("solver", "assistant", "final", "5")
    spy.finals()


def test_agents_may_be_attached_twice_and_are_not_kept_alive(spy: Spy) -> None:
    callback = MonitorStepCallback(spy)
    planner = team(callback=callback)
    callback.attach(planner)
    planner.run(TASK)
    assert spoken(spy.said()) == TEAM
    del planner
    assert len(spy.finals()) == 1


def test_what_is_no_step_is_counted_and_not_raised(spy: Spy) -> None:
    odd: Any = object()
    MonitorStepCallback(spy)(odd, odd)
    assert spy.stats()["refused_malformed"] == 1
    spy._counts.clear()  # as this test expects it


def test_without_the_framework_the_remedy_is_named() -> None:
    said = without("smolagents", "dcl.plugs.smolagents")
    assert "pip install 'dcl-attribution[smolagents]'" in said


def test_the_example_runs() -> None:
    assert "final" in run_example("watch_smolagents.py")
