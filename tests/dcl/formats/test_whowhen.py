from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dcl.errors import FormatError, TraceError
from dcl.formats import detect, read_examples, scan, whowhen
from dcl.trajectory import Example, Fault, TurnKind

HAND_CRAFTED: dict[str, Any] = {
    "question": "Where?",
    "question_ID": "q1",
    "ground_truth": "there",
    "is_corrected": "False",
    "mistake_agent": "Orchestrator",
    "mistake_step": "2",
    "mistake_reason": "It gave up.",
    "history": [
        {"content": "Where?", "role": "human"},
        {"content": "A plan.", "role": "Orchestrator (thought)"},
        {"content": "Please look.", "role": "Orchestrator (-> WebSurfer)"},
        {"content": "I looked.", "role": "WebSurfer"},
        {"content": "Done.", "role": "Orchestrator (termination condition)"},
    ],
}
ALGORITHM_GENERATED: dict[str, Any] = {
    "question": "How many?",
    "question_ID": "q2",
    "is_correct": False,
    "level": 2,
    "mistake_agent": "Excel_Expert",
    "mistake_step": "0",
    "system_prompt": {"Excel_Expert": "You are one."},
    "history": [
        {"content": "print(1)", "role": "assistant", "name": "Excel_Expert"},
        {"content": "exitcode: 0", "role": "user", "name": "Computer_terminal"},
    ],
}


def test_splits_the_suffixes_of_roles() -> None:
    (example,) = whowhen.parse(HAND_CRAFTED, "5.json")
    turns = example.trajectory.turns
    assert example.trajectory.agents == ("human", "Orchestrator", "WebSurfer")
    assert [turn.kind for turn in turns] == [
        TurnKind.MESSAGE,
        TurnKind.THOUGHT,
        TurnKind.HANDOFF,
        TurnKind.MESSAGE,
        TurnKind.FINAL,
    ]
    assert turns[2].role == "Orchestrator (-> WebSurfer)"
    assert example.faults == (Fault("Orchestrator", step=2),)
    assert example.trajectory.outcome == "failure"
    assert example.trajectory.id == "q1"
    assert example.trajectory.metadata["file"] == "5"
    assert example.trajectory.metadata["mistake_reason"] == "It gave up."


def test_takes_the_name_before_the_role() -> None:
    (example,) = whowhen.parse(ALGORITHM_GENERATED, "5.json")
    turns = example.trajectory.turns
    assert [(turn.agent, turn.role, turn.step) for turn in turns] == [
        ("Excel_Expert", "assistant", 0),
        ("Computer_terminal", "user", 1),
    ]
    assert turns[1].kind is TurnKind.TOOL_RESULT
    assert example.faults == (Fault("Excel_Expert", step=0),)
    assert example.trajectory.metadata["system_prompt"] == {"Excel_Expert": "You are one."}


def test_a_bracket_that_is_no_suffix_belongs_to_the_name() -> None:
    row = HAND_CRAFTED | {"history": [{"content": "x", "role": "Bob (QA)"}]}
    assert whowhen.parse(row, "x")[0].trajectory.agents == ("Bob (QA)",)


def test_reads_runs_without_labels() -> None:
    row = {key: value for key, value in HAND_CRAFTED.items() if not key.startswith("mistake")}
    assert detect(row) == "whowhen"
    assert whowhen.parse(row, "x")[0].faults is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"history": {}}, "history: expected a list, got an object"),
        ({"history": []}, "history: expected at least one turn"),
        ({"history": ["x"]}, r"history\[0\]: expected an object, got a string"),
        ({"history": [{"content": "x"}]}, r"history\[0\]\.role: expected a string, got nothing"),
        ({"history": [{"role": "x"}]}, r"history\[0\]\.content: expected a string, got nothing"),
        ({"mistake_step": "ten"}, "mistake_step: expected a whole number, got 'ten'"),
    ],
)
def test_names_the_path_of_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        whowhen.parse(HAND_CRAFTED | change, "x.json")


@pytest.mark.data
def test_reads_both_real_halves(data_dir: Path) -> None:
    generated = list(read_examples(data_dir / "whowhen" / "algorithm-generated"))
    crafted = list(read_examples(data_dir / "whowhen" / "hand-crafted-sample"))
    assert (len(generated), len(crafted)) == (126, 8)
    assert [example.trajectory.metadata["file"] for example in generated[:3]] == ["1", "2", "3"]
    astray = []
    for example in (*generated, *crafted):
        run = example.trajectory
        assert example.faults is not None
        (fault,) = example.faults
        assert fault.agent in run.agents
        assert fault.step is not None
        position = run.turn_at(fault.step, fault.agent)
        if position is None or run.turns[position].agent != fault.agent:
            astray.append(run.metadata["file"])
    assert astray == ["14", "15", "59"]


@pytest.mark.data
def test_a_file_of_labels_alone_costs_one_error(data_dir: Path) -> None:
    items = list(scan(data_dir / "whowhen"))
    errors = [item for item in items if isinstance(item, TraceError)]
    assert sum(isinstance(item, Example) for item in items) == 134
    assert len(errors) == 1
    assert isinstance(errors[0], FormatError)
    assert "modes.json" in str(errors[0])
