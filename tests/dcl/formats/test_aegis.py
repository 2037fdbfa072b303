from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from dcl.errors import TraceError
from dcl.formats import aegis, detect, scan
from dcl.taxonomy import ErrorMode
from dcl.trajectory import Example, Fault, TurnKind


def record(names: tuple[str, ...] = ("Assistant1", "Assistant4"), **more: Any) -> dict[str, Any]:
    return {
        "id": "a0",
        "metadata": {"framework": "dylan", "source": "aegis"},
        "input": {
            "query": "2 + 2?",
            "conversation_history": [
                {"step": i + 1, "agent_name": name, "content": f"turn {i}", "phase": None}
                for i, name in enumerate(names)
            ],
        },
        **more,
    }


def labelled(name: str, names: tuple[str, ...], mode: str | None = "FM-2.6") -> Fault:
    output = {"faulty_agents": [{"agent_name": name, "error_type": mode, "step": None}]}
    (example,) = aegis.parse(record(names, output=output), "x.json")
    assert example.faults is not None
    return example.faults[0]


def test_reads_turns_labels_and_metadata() -> None:
    row = record(output={"faulty_agents": [{"agent_name": "Assistant1", "error_type": "EM-1.1"}]})
    row["input"]["final_output"] = "4"
    row["input"]["conversation_history"][1] |= {"phase": "discussion", "agent_role": "solver"}
    row["ground_truth"] = {"correct_answer": "4"}
    (example,) = aegis.parse(row, "x.json")
    run = example.trajectory
    assert (run.id, run.task, run.steps, run.agents) == (
        "a0",
        "2 + 2?",
        (1, 2),
        ("Assistant1", "Assistant4"),
    )
    assert run.turns[1].role == "solver"
    assert run.metadata["turn_fields"] == {"1": {"phase": "discussion"}}
    assert run.metadata["final_output"] == "4"
    assert run.metadata["ground_truth"] == {"correct_answer": "4"}
    assert example.faults == (Fault("Assistant1", ErrorMode.FM_1_1),)
    assert example.origin == "aegis"


@pytest.mark.parametrize(
    ("label", "names", "expected"),
    [
        ("assistant4", ("Assistant1", "Assistant4"), "Assistant4"),
        ("Agent1", ("Agent12", "Agent2"), "Agent1"),
        ("Agent12", ("Agent1", "Agent12"), "Agent12"),
        ("solver", ("Solver", "SOLVER"), "solver"),
        ("Solver", ("Solver", "SOLVER"), "Solver"),
        ("ranker5", ("Ranker",), "ranker5"),
    ],
)
def test_matches_labels_by_whole_names(label: str, names: tuple[str, ...], expected: str) -> None:
    assert labelled(label, names).agent == expected


def test_takes_labels_without_a_mode() -> None:
    assert labelled("Assistant1", ("Assistant1",), None).mode is None


def test_reads_published_injected_agents() -> None:
    row = record(
        ground_truth={"injected_agents": [{"agent_name": "Assistant4", "error_type": "FM-3.1"}]}
    )
    (example,) = aegis.parse(row, "x.json")
    assert example.faults == (Fault("Assistant4", ErrorMode.FM_3_1),)


@pytest.mark.parametrize(
    ("metadata", "truth", "faults"),
    [
        ({"outcome": "success"}, {}, ()),
        ({"outcome": "failure"}, {}, None),
        ({}, {}, None),
        ({"final_label": 1, "step_labels": {"3": 1, "5": 0}}, {}, ()),
        ({"final_label": -1, "step_labels": {"3": 1}}, {}, None),
        ({"final_label": 1, "step_labels": {"3": -1}}, {}, None),
        ({}, {"is_normal_sample": True}, ()),
    ],
)
def test_an_empty_list_means_clean_only_if_the_record_says_so(
    metadata: dict[str, Any], truth: dict[str, Any], faults: object
) -> None:
    row = record(output={"faulty_agents": []}, ground_truth=truth)
    row["metadata"] |= metadata
    assert aegis.parse(row, "x.json")[0].faults == faults


def test_never_reads_is_injected() -> None:
    row = record()
    marked = copy.deepcopy(row)
    for i, turn in enumerate(marked["input"]["conversation_history"]):
        turn["is_injected"] = bool(i)
    assert aegis.parse(row, "x.json") == aegis.parse(marked, "x.json")


def test_types_turns_by_speaker_and_words() -> None:
    row = record(("System", "Agent", "Tool", "Agent"))
    turns = row["input"]["conversation_history"]
    turns[1]["content"] = 'search({"query": "x"})'
    turns[3]["content"] = "f(x) = {1} is a set (a small one)"
    kinds = [turn.kind for turn in aegis.parse(row, "x.json")[0].trajectory.turns]
    assert kinds == [TurnKind.SYSTEM, TurnKind.TOOL_CALL, TurnKind.TOOL_RESULT, TurnKind.MESSAGE]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((0, "agent_name"), None, r"conversation_history\[0\]\.agent_name: expected a string"),
        ((0, "agent_name"), " ", r"conversation_history\[0\]\.agent_name: expected a name"),
        ((1, "content"), None, r"conversation_history\[1\]\.content: expected a string"),
        ((1, "step"), "two", r"conversation_history\[1\]\.step: expected a whole number"),
    ],
)
def test_names_the_path_of_what_is_wrong(path: tuple[int, str], value: Any, message: str) -> None:
    row = record()
    row["input"]["conversation_history"][path[0]][path[1]] = value
    with pytest.raises(TraceError, match=message):
        aegis.parse(row, "x.json")


def test_refuses_unknown_modes_and_empty_histories() -> None:
    with pytest.raises(TraceError, match=r"output\.faulty_agents\[0\]\.error_type: expected one"):
        labelled("Assistant1", ("Assistant1",), "FM-9.9")
    with pytest.raises(TraceError, match="expected at least one turn"):
        aegis.parse(record(()), "x.json")


@pytest.mark.data
def test_reads_the_real_sets(data_dir: Path) -> None:
    counts = {"agentprocessbench_hotpotqa": 250, "agentrx_tau": 29, "tau_airline": 200}
    for name, count in counts.items():
        items = list(scan(data_dir / f"{name}.jsonl.xz"))
        assert len(items) == count
        examples = [item for item in items if isinstance(item, Example)]
        assert len(examples) == count
        clean = sum(example.faults == () for example in examples)
        assert clean == {"agentprocessbench_hotpotqa": 146, "tau_airline": 84}.get(name, 0)


@pytest.mark.data
def test_detects_the_first_aegis_record(data_dir: Path) -> None:
    item = next(scan(data_dir / "aegis" / "validation.jsonl.xz"))
    assert isinstance(item, Example)
    assert item.origin == "aegis"
    assert item.faults is not None
    assert detect(item.to_dict()) == "native"
