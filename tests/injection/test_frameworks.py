"""Teams of real frameworks, on scripted agents and on an endpoint; each needs its package."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_server import serve
from worlds import STORY, Parrot, story_task, task_named

import dcl
from dcl.errors import ConfigError
from dcl.taxonomy import ErrorMode
from injection.checkers import check
from injection.endpoint import Endpoint, EndpointConfig
from injection.errors import ModelError
from injection.frameworks import TEAMS, load_team
from injection.frameworks.stage import Heard, Stage, Tool, read_reply, refuse_namesakes
from injection.manipulator import STRATEGIES, Injection, Rules, Strategy
from injection.plans import Plan, PlanConfig, make_plans
from injection.proof import Proof, Prover
from injection.records import make_record
from injection.run import RunConfig, collect
from injection.scripted import Scripted
from injection.session import Call, Reply, Session, System, run_system
from injection.systems import find_system
from injection.systems.requests import read_object

# CrewAI warns of fields of its own whenever it makes an agent.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:crewai")

PACKAGES = {
    "autogen_round_robin": "autogen_agentchat",
    "autogen_selector": "autogen_agentchat",
    "magentic_one": "autogen_agentchat",
    "smolagents": "smolagents",
    "langgraph_supervisor": "langgraph",
    "openai_agents": "agents",
    "crewai_sequential": "crewai",
}
AGENTS = {
    "autogen_round_robin": {"Solver", "Critic"},
    "autogen_selector": {"SelectorGroupChatManager", "Solver", "Critic", "Writer"},
    "magentic_one": {"MagenticOneOrchestrator", "Calculator"},
    "smolagents": {"manager", "searcher"},
    "langgraph_supervisor": {"Supervisor", "Calculator"},
    "openai_agents": {"Triage", "Mathematician", "Reviewer"},
    "crewai_sequential": {"Solver", "Reviewer", "Writer"},
}
ABLE = Scripted(1, skill=1.0, slip=0.0)


@pytest.fixture(params=TEAMS)
def team(request: pytest.FixtureRequest) -> System:
    """Each team whose framework is installed."""
    pytest.importorskip(PACKAGES[request.param], reason=f"{request.param} needs its framework")
    return find_system(request.param)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Frameworks that keep files keep them here, and nobody asks anything."""
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path / "crewai"))


def test_every_team_has_a_package_and_agents() -> None:
    assert set(TEAMS) == set(PACKAGES) == set(AGENTS)


def test_a_team_solves_and_every_call_has_its_true_agent(team: System) -> None:
    run = run_system(team, STORY, ABLE)
    assert check(story_task(), run.answer).right
    assert {call.agent for call in run.calls} == AGENTS[team.name]
    assert [event.agent for event in run.events if event.call is not None] == [
        call.agent for call in run.calls
    ]
    assert run_system(team, STORY, ABLE) == run


@pytest.mark.parametrize("id", ["own-1", "own/1", "math-0", "1000"])
def test_a_team_solves_other_kinds_of_tasks(team: System, id: str) -> None:
    task = task_named(id)
    assert check(task, run_system(team, task.question, ABLE).answer).right


def first_proof(prover: Prover, strategy: Strategy) -> Proof:
    """The first plan with one fault of a strategy that is proved."""
    config = PlanConfig(per_task=56, max_faults=1, benign=0, every_share=0.5)
    name = prover.system.name
    plans = make_plans(config, name, "GSM8K/story", prover.clean.run, group=0, seed=1)
    for plan in plans:
        if plan.injections[0].strategy == strategy:
            proof = prover.prove(plan)
            if proof.outcome == "proved":
                return proof
    raise AssertionError(f"{name}: no plan with {strategy} breaks the run")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_fault_is_proved_by_replay_and_labels_its_agent(
    team: System, strategy: Strategy, tmp_path: Path
) -> None:
    prover = Prover(team, story_task(), ABLE, Rules())
    proof = first_proof(prover, strategy)
    (injection,) = proof.plan.injections
    assert proof.faulty is not None
    assert not proof.faulty.verdict.right
    assert prover.attack(proof.plan) == proof.faulty  # the replay is exact
    assert prover.attack(proof.plan, without=[0]).run == prover.clean.run
    assert all(firing.before != firing.after for firing in proof.faulty.firings[0])
    record = make_record(proof, prover.clean, prover.task, model="scripted", manipulator="rules")
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps(record) + "\n")
    (example,) = dcl.read_examples(file)
    (fault,) = example.faults or ()
    assert fault.agent == injection.agent
    place = example.trajectory.turn_at(fault.step or 0)
    assert place is not None
    assert example.trajectory.turns[place].agent == fault.agent
    assert record["metadata"]["framework"] == team.name


def test_what_is_rewritten_is_what_the_framework_goes_on_with(team: System) -> None:
    clean = run_system(team, STORY, ABLE)
    call = (
        next(
            c for c in clean.calls[:-1] if "Answer" in clean.events[clean.event_of(c.index)].content
        )
        if team.name != "openai_agents"
        else clean.calls[1]
    )
    fault = Injection(call.agent, ErrorMode.FM_2_6, "response_corruption", call.nth)
    attempt = Prover(team, story_task(), ABLE, Rules()).attack(Plan(team.name, "t", (fault,), 1))
    ((firing,),) = attempt.firings
    wrong = read_object(firing.after).get("argument") or firing.after
    later = [c.prompt for c in attempt.run.calls[firing.call + 1 :]]
    assert any(str(wrong) in prompt for prompt in later)


class Failing:
    """Computes, but for one call that fails."""

    name = "failing"

    def __init__(self, at: int) -> None:
        self.at = at
        self.calls = 0

    def __call__(self, call: Call) -> Reply:
        self.calls += 1
        if call.index == self.at:
            raise ModelError("no reply")
        return ABLE(call)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_failed_call_comes_out_whatever_the_framework_does_with_errors(
    team: System, at: int
) -> None:
    last = len(run_system(team, STORY, ABLE).calls) - 1
    model = Failing(min(at, last))
    with pytest.raises(ModelError, match="no reply"):
        run_system(team, STORY, model)
    assert model.calls == min(at, last) + 1  # nobody is asked again after that


@pytest.mark.parametrize(
    "text",
    [
        'Whatever {you} [say], I {"x": 1} do not care.',
        '{"tool": "swim", "argument": "now"}',
        '{"tool": "final_answer", "argument": "Answer: 7"}',
        '{"is_request_satisfied": false, "next_speaker": "Nobody", "instruction": "Go on."}',
    ],
)
def test_a_team_survives_a_model_that_follows_no_format(team: System, text: str) -> None:
    run = run_system(team, STORY, Parrot(text))
    assert run.calls
    assert run == run_system(team, STORY, Parrot(text))


def test_a_run_that_the_framework_gives_up_on_has_no_answer_and_says_so() -> None:
    pytest.importorskip("autogen_agentchat")
    run = run_system(find_system("magentic_one"), STORY, Parrot("no ledger"))
    assert run.answer == ""
    assert run.events[-1].agent == "system"
    assert "KeyError" in run.events[-1].content or "ValueError" in run.events[-1].content


def test_scripted_agents_say_which_phases_they_play(team: System) -> None:
    class Nameless(Session):
        def ask(self, agent: str, *arguments: Any, **options: Any) -> str:
            return super().ask(agent, *arguments, **(options | {"phase": "dance"}))

    with pytest.raises(ConfigError, match="expected a phase that scripted agents play"):
        team(Nameless(ABLE), STORY)


def test_a_team_runs_on_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("autogen_agentchat")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none-of-your-business")
    with serve(text="Answer: 211") as server:
        model = Endpoint(EndpointConfig(base_url=server.url, model="tiny", timeout=30.0))
        prover = Prover(find_system("autogen_round_robin"), story_task(), model, Rules())
        last = [c for c in prover.clean.run.calls if c.agent == "Solver"][-1]
        fault = Injection("Solver", ErrorMode.FM_2_6, "response_corruption", last.nth)
        proof = prover.prove(Plan("autogen_round_robin", "t", (fault,), 1))
    assert proof.outcome == "proved"
    sent = server.requests[-1]["messages"]
    assert [message["role"] for message in sent] == ["system", "user"]
    assert "--- Solver ---" in sent[1]["content"]


def test_a_team_is_named_in_a_configuration(tmp_path: Path) -> None:
    pytest.importorskip("langgraph")
    config = RunConfig(
        out=str(tmp_path / "out"),
        systems=("langgraph_supervisor",),
        tasks_per_file=1,
        plans=PlanConfig(per_task=3),
        workers=1,
    )
    plans, _ = collect(config)
    records = list(dcl.read_examples(tmp_path / "out" / "records.jsonl"))
    assert len(records) == plans["proved"] + plans["benign"]
    assert {r.trajectory.metadata["framework"] for r in records} == {"langgraph_supervisor"}


BUILDERS = {
    "autogen": """
        from autogen_agentchat.agents import AssistantAgent
        from autogen_agentchat.conditions import MaxMessageTermination
        from autogen_agentchat.teams import RoundRobinGroupChat
        from autogen_ext.models.openai import OpenAIChatCompletionClient

        def look_up(town: str) -> str:
            "Looks a town up."
            return "Ombra"

        def build():
            client = OpenAIChatCompletionClient(model="gpt-4o-mini", api_key="none")
            one = AssistantAgent("one", model_client=client, tools=[look_up])
            two = AssistantAgent("two", model_client=client)
            return RoundRobinGroupChat([one, two], termination_condition=MaxMessageTermination(3))
        """,
    "smolagents": """
        from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

        @tool
        def look_up(town: str) -> str:
            '''Looks a town up.

            Args:
                town: Its name.
            '''
            return "Ombra"

        def build():
            model = OpenAIModel(model_id="gpt-4o-mini", api_key="none")
            quiet = {"model": model, "max_steps": 3, "verbosity_level": LogLevel.OFF}
            two = ToolCallingAgent(tools=[], name="two", description="Thinks.", **quiet)
            return ToolCallingAgent(tools=[look_up], managed_agents=[two], name="one", **quiet)
        """,
    "openai_agents": """
        from agents import Agent, function_tool, handoff

        @function_tool
        def look_up(town: str) -> str:
            "Looks a town up."
            return "Ombra"

        def build():
            two = Agent(name="two", model="gpt-4o-mini")
            return Agent(name="one", model="gpt-4o-mini", tools=[look_up], handoffs=[handoff(two)])
        """,
    "langgraph": """
        import warnings
        from langgraph.graph import MessagesState, StateGraph
        from langgraph.prebuilt import create_react_agent

        def look_up(town: str) -> str:
            "Looks a town up."
            return "Ombra"

        def build(model):
            graph = StateGraph(MessagesState)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graph.add_node("one", create_react_agent(model, [look_up]))
            graph.add_node("two", lambda state: {"messages": [model.invoke(state["messages"])]})
            graph.add_edge("__start__", "one")
            graph.add_edge("one", "two")
            return graph.compile()
        """,
    "crewai": """
        from crewai import LLM, Agent, Crew, Task
        from crewai.tools import tool

        @tool("look_up")
        def look_up(town: str) -> str:
            "Looks a town up."
            return "Ombra"

        def build():
            llm = LLM(model="gpt-4o-mini", api_key="none")
            one = Agent(role="one", goal="g", backstory="b", llm=llm, tools=[look_up])
            two = Agent(role="two", goal="g", backstory="b", llm=llm)
            tasks = [Task(description="{task}", expected_output="x", agent=a) for a in (one, two)]
            return Crew(agents=[one, two], tasks=tasks)
        """,
}


@pytest.fixture(params=BUILDERS)
def own_team(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[System]:
    """A team that a user's code builds with clients of its own, named in a configuration."""
    package = {"autogen": "autogen_ext.models.openai", "openai_agents": "agents"}
    pytest.importorskip(package.get(request.param, request.param))
    (tmp_path / "my_team.py").write_text(textwrap.dedent(BUILDERS[request.param]))
    monkeypatch.syspath_prepend(tmp_path)
    yield find_system(f"{request.param}:my_team:build")
    sys.modules.pop("my_team", None)


def test_code_of_a_user_runs_unedited_and_its_tools_are_logged(own_team: System) -> None:
    use = 'I look it up.\n{"tool": "look_up", "argument": "Tarnow"}'
    run = run_system(own_team, "Which river flows through Tarnow?", Parrot(use, "Answer: Ombra"))
    told = [(event.agent, event.content) for event in run.events]
    assert told[0] == ("one", use)
    if not own_team.name.startswith("autogen"):  # whose agents hand the result on themselves
        assert told[1] == ("Tool", "Ombra")
        assert "--- Tool ---\nOmbra" in run.calls[1].prompt
    assert {call.agent for call in run.calls} <= {"one", "two"}
    assert "look_up(town)" in run.calls[0].prompt
    assert "Which river" in run.calls[0].prompt


def test_a_missing_framework_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "injection.frameworks.smolagents", raising=False)
    monkeypatch.setitem(sys.modules, "smolagents", None)
    with pytest.raises(ConfigError, match=r"smolagents.*pip install -e"):
        find_system("smolagents")


def test_a_function_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("langgraph")
    for name in ("langgraph:no_such_module:build", "langgraph:json:no_such_function"):
        with pytest.raises(ConfigError, match="systems: expected a"):
            find_system(name)
    assert load_team("swarm:json:loads") is None


def test_no_framework_is_loaded_before_it_is_used() -> None:
    code = "import injection.run, sys; print(*sorted(m.partition('.')[0] for m in sys.modules))"
    done = asyncio.run(_run_python(code))
    assert "injection" in done
    assert not {*PACKAGES.values(), "langchain_core", "autogen_core"} & set(done.split())


async def _run_python(code: str) -> str:
    """What a fresh interpreter prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return out.decode()


TOOLS = (Tool("look_up", "Looks up.", ("town",)), Tool("leave", "Ends.", ()))


@pytest.mark.parametrize(
    ("text", "lead", "tool", "arguments"),
    [
        ("Hello.", "Hello.", "", {}),
        ('Hm. {"tool": "look_up", "argument": "X"}', "Hm.", "look_up", {"town": "X"}),
        ('{"tool": "look_up", "argument": {"town": "X"}}', "", "look_up", {"town": "X"}),
        ('{"tool": "leave", "argument": ""}', "", "leave", {}),
        ('{"tool": "leave"} {"no": 1}', "", "leave", {}),
        ('A {"tool": "final_answer", "argument": "B"}', "B", "", {}),
        ('A {"tool": "unknown"}', "A", "unknown", {}),
        ('{"tool": 3}', '{"tool": 3}', "", {}),
    ],
)
def test_a_reply_is_read_as_words_and_a_call(
    text: str, lead: str, tool: str, arguments: dict[str, str]
) -> None:
    spoken = read_reply(text, TOOLS, "id")
    assert (spoken.text, spoken.lead, spoken.tool, spoken.arguments) == (
        text,
        lead,
        tool,
        arguments,
    )
    assert read_reply(text, (), "id").lead == text


def stage(*replies: str) -> tuple[Stage, Parrot]:
    model = Parrot(*replies)
    return Stage(Session(model), "The task."), model


def test_the_task_is_shown_only_to_those_whom_the_framework_shows_it() -> None:
    acting, model = stage("x")
    acting.speak("A", "Persona.", [Heard("", "The task."), Heard("B", "Hi.")])
    acting.speak("A", "", [Heard("", "A part of it."), Heard("B", "Hi.")])
    acting.speak("A", "", [Heard("", "First."), Heard("B", "Hi."), Heard("", "Then: The task.")])
    shown = [call.prompt for call in model.calls]
    assert shown[0] == (
        "=== Task ===\nThe task.\n\n=== Conversation ===\n--- B ---\nHi.\n\n"
        "=== Your turn ===\nIt is your turn, A."
    )
    assert shown[1] == "=== Conversation ===\n--- B ---\nHi.\n\n=== Your turn ===\nA part of it."
    assert shown[2].startswith(
        "=== Task ===\nThe task.\n\n=== Conversation ===\n--- user ---\nFirst."
    )
    assert shown[2].endswith("=== Your turn ===\nThen: The task.")
    assert model.calls[0].messages[0].content == "Persona."


def test_results_of_tools_are_logged_once() -> None:
    acting, _ = stage("x")
    heard = [Heard("Tool", "42", "call_0"), Heard("B", "done", "call_1")]
    acting.speak("A", "", heard)
    acting.speak("A", "", [*heard, Heard("Tool", "42", "call_2")])
    log = acting.session.finish("").events
    assert [(event.agent, event.content) for event in log] == [
        ("Tool", "42"),
        ("A", "x"),
        ("Tool", "42"),
        ("A", "x"),
    ]


def test_an_error_of_the_framework_itself_is_not_taken_for_an_answer() -> None:
    acting, _ = stage("x")

    def broken() -> str:
        raise LookupError("a bug")

    with pytest.raises(LookupError, match="a bug"):
        acting.perform(broken, lambda error: False)
    assert acting.perform(broken, lambda error: True) == ""
    assert acting.session.finish("").events[-1].content == "LookupError: a bug"


def test_two_agents_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="Bob: expected a name of its own"):
        refuse_namesakes(["Ann", "Bob", "Bob"])
