from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dcl.errors import TraceError
from dcl.formats import detect, magentic, read_examples
from dcl.trajectory import TurnKind

LOG = [
    {"content": "Find it.", "role": "human"},
    {"content": "Next speaker", "role": "Orchestrator (thought)"},
    {"content": "Run this.", "role": "Orchestrator (-> ComputerTerminal)"},
    {"content": "done", "role": "ComputerTerminal"},
]
EVENTS: list[dict[str, Any]] = [
    {"source": "user", "type": "TextMessage", "content": "Weather?"},
    {
        "source": "helper",
        "type": "ToolCallRequestEvent",
        "content": [{"id": "1", "name": "get_weather", "arguments": '{"city": "Rome"}'}],
    },
    {
        "source": "helper",
        "type": "ToolCallExecutionEvent",
        "content": [{"call_id": "1", "name": "get_weather", "content": "sun", "is_error": False}],
    },
    {"source": "helper", "type": "ModelClientStreamingChunkEvent", "content": "It"},
    {"source": "helper", "type": "ThoughtEvent", "content": "Easy."},
    {"source": "helper", "type": "HandoffMessage", "content": "To writer.", "target": "writer"},
    {"source": "writer", "type": "MultiModalMessage", "content": ["Sun.", {"data": "aGk="}]},
    {"source": "writer", "type": "StopMessage", "content": "TERMINATE"},
]


def test_reads_roles_as_speakers() -> None:
    assert detect(LOG) == "magentic"
    (example,) = magentic.parse(LOG, "logs/run7.json")
    run = example.trajectory
    assert (run.id, run.task, run.agents) == (
        "run7",
        "Find it.",
        ("human", "Orchestrator", "ComputerTerminal"),
    )
    assert run.turns[3].kind is TurnKind.TOOL_RESULT
    assert run.turns[2].source == "[2]"
    assert example.faults is None


def test_reads_agentchat_messages() -> None:
    document = {"messages": EVENTS, "stop_reason": "done"}
    assert detect(EVENTS) == detect(document) == "magentic"
    run = magentic.parse(document, "x.json")[0].trajectory
    assert [(turn.agent, turn.kind, turn.content) for turn in run.turns] == [
        ("user", TurnKind.MESSAGE, "Weather?"),
        ("helper", TurnKind.TOOL_CALL, 'get_weather({"city": "Rome"})'),
        ("get_weather", TurnKind.TOOL_RESULT, "sun"),
        ("helper", TurnKind.THOUGHT, "Easy."),
        ("helper", TurnKind.HANDOFF, "To writer."),
        ("writer", TurnKind.MESSAGE, "Sun.\n[image]"),
        ("writer", TurnKind.FINAL, "TERMINATE"),
    ]
    assert run.metadata["stop_reason"] == "done"
    assert run.metadata["turn_fields"] == {"4": {"target": "writer"}}
    assert run.turns[4].content == "To writer."


def test_fields_stay_with_the_first_turn_of_their_message() -> None:
    calls = [{"id": str(i), "name": "f", "arguments": "{}"} for i in range(2)]
    rows = [
        {"source": "a", "type": "UserInputRequestedEvent", "content": "", "lost": 1},
        {"source": "a", "type": "ToolCallRequestEvent", "content": calls, "cost": 2},
        {"source": "b", "type": "TextMessage", "content": "x", "cost": 3},
    ]
    run = magentic.parse(rows, "x.json")[0].trajectory
    assert [turn.agent for turn in run.turns] == ["a", "a", "b"]
    assert run.metadata["turn_fields"] == {"0": {"cost": 2}, "2": {"cost": 3}}


def test_names_the_path_of_what_is_wrong() -> None:
    with pytest.raises(TraceError, match=r"\[4\]\.content: expected a string, got nothing"):
        magentic.parse([*LOG, {"role": "WebSurfer"}], "x.json")
    with pytest.raises(TraceError, match=r"messages\[1\]: expected an object"):
        magentic.parse({"messages": [EVENTS[0], "x"]}, "x.json")


@pytest.mark.data
def test_reads_the_real_logs(data_dir: Path) -> None:
    examples = list(read_examples(data_dir / "traces" / "magentic_unlabelled"))
    assert len(examples) == 14
    assert all("Orchestrator" in example.trajectory.agents for example in examples)
    assert not any("(" in agent for example in examples for agent in example.trajectory.agents)
    assert all(example.trajectory.task for example in examples)
