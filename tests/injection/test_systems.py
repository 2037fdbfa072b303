from __future__ import annotations

import json

import pytest
from worlds import STORY, Parrot, story_task

from dcl.errors import ConfigError
from injection.checkers import check
from injection.scripted import Scripted
from injection.session import Run, System, run_system
from injection.systems import SYSTEMS, AgentVerse, Debate, Dylan, MacNet, Orchestrator, find_system
from injection.systems.requests import read_numbers, read_object, same_answers
from injection.tasks import own_tasks

ABLE = Scripted(1, skill=1.0, slip=0.0)


def run(system: System, model: object = ABLE, task: str = STORY) -> Run:
    return run_system(system, task, model)  # type: ignore[arg-type]


def test_a_debate_reads_only_the_round_before() -> None:
    done = run(Debate(agents=3, rounds=2))
    assert [call.agent for call in done.calls] == [f"Assistant{i}" for i in (1, 2, 3)] * 2 + [
        "Aggregator"
    ]
    assert all("=== Conversation ===" not in call.prompt for call in done.calls[:3])
    assert all(call.prompt.count("--- Assistant") == 3 for call in done.calls[3:])


def test_dylan_stops_when_more_than_two_thirds_agree() -> None:
    assert len(run(Dylan()).calls) == 4
    replies = [f"Answer: {i}" for i in range(4)] * 2 + ["Ranking: [3, 1]", "Answer: 7", "Answer: 7"]
    done = run(Dylan(), Parrot(*replies))
    assert [call.agent for call in done.calls[8:]] == ["Ranker", "Assistant1", "Assistant3"]
    assert done.answer == "Answer: 7"


@pytest.mark.parametrize("topology", ["chain", "star", "tree", "random"])
def test_macnet_is_a_directed_acyclic_graph_with_one_end(topology: str) -> None:
    edges = MacNet(topology, nodes=5).edges()  # type: ignore[arg-type]
    nodes = {node for edge in edges for node in edge}
    assert nodes == set(range(len(nodes)))
    assert all(source < target for source, target in edges)
    assert len([node for node in nodes if all(source != node for source, _ in edges)]) == 1
    assert len([node for node in nodes if all(target != node for _, target in edges)]) == 1
    done = run(MacNet(topology, nodes=5))  # type: ignore[arg-type]
    assert sum(call.agent.startswith("Edge") for call in done.calls) == len(edges)
    assert sum(call.agent.startswith("Node") for call in done.calls) == len(nodes)


def test_agentverse_goes_on_until_critics_and_evaluator_agree() -> None:
    assert [call.agent for call in run(AgentVerse()).calls] == [
        "RoleAssigner",
        "Solver",
        "Critic1",
        "Critic2",
        "Evaluator",
    ]
    replies = ["roles", "Answer: 1", "[Disagree] no", "[Agree]", "Answer: 2", "[Agree]", "[Agree]"]
    done = run(AgentVerse(turns=1), Parrot(*replies, "Correctness: 0"))
    assert done.answer == "Answer: 2"
    assert len(done.calls) == 8
    assert "[Disagree] no" in done.calls[4].prompt


def test_the_orchestrator_plans_anew_when_it_stalls() -> None:
    stuck = json.dumps({"is_request_satisfied": False, "is_progress_being_made": False})
    done = run(
        Orchestrator(rounds=3, stalls=1), Parrot("facts", "1. Coder: x", stuck, "done", stuck)
    )
    phases = [event.phase for event in done.events]
    assert phases[:6] == ["facts", "plan", "ledger", "work", "ledger", "facts"]
    assert phases[-1] == "final"


def test_the_manager_gets_the_report_of_the_searcher() -> None:
    task = next(t for t in own_tasks() if t.benchmark == "GAIA")
    done = run(SYSTEMS["manager"], task=task.question)
    assert check(task, done.answer).right
    assert [event.agent for event in done.events][:5] == [
        "Manager",
        "Searcher",
        "Tool",
        "Searcher",
        "Manager",
    ]


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_solves_with_able_agents(name: str) -> None:
    assert check(story_task(), run(SYSTEMS[name]).answer).right
    assert run(SYSTEMS[name]) == run(SYSTEMS[name])


def test_every_system_fails_with_agents_who_know_nothing() -> None:
    lost = Scripted(1, skill=0.0, slip=0.0)
    for name in ("llm_debate", "dylan", "macnet_chain", "agentverse"):
        assert not check(story_task(), run(SYSTEMS[name], lost).answer).right


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected one of llm_debate"):
        find_system("swarm")


def test_replies_are_read_leniently() -> None:
    assert read_object('text {"a": {"b": 1}} more {"c": 2} {broken') == {"c": 2}
    assert read_object("none") == {}
    assert read_numbers("Ranking: [2, 1], see [9]", "Ranking") == [2, 1]
    assert read_numbers("none", "Ranking") == []
    assert same_answers(["Answer: 1", "x", "Answer: 2.", "answer is 2"]) == [[2, 3], [0]]
