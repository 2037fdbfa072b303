from __future__ import annotations

from typing import Any

import pytest

from dcl.errors import TraceError
from dcl.formats import chat, detect
from dcl.trajectory import TurnKind

CALL = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": 1}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "image_url"}]},
    {"role": "assistant", "content": "I will.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "found"},
    {"role": "assistant", "name": "critic", "content": None},
]


def read(document: object) -> list[tuple[str, TurnKind, str]]:
    turns = chat.parse(document, "x.json")[0].trajectory.turns
    return [(turn.agent, turn.kind, turn.content) for turn in turns]


def test_reads_a_conversation() -> None:
    assert detect(CHAT) == detect({"messages": CHAT}) == "chat"
    assert read(CHAT) == [
        ("system", TurnKind.SYSTEM, "Be brief."),
        ("user", TurnKind.MESSAGE, "Look\n[image]"),
        ("assistant", TurnKind.MESSAGE, "I will."),
        ("assistant", TurnKind.TOOL_CALL, 'search({"q": 1})'),
        ("search", TurnKind.TOOL_RESULT, "found"),
        ("critic", TurnKind.MESSAGE, ""),
    ]


def test_keeps_id_task_and_unknown_fields() -> None:
    document = {"id": 7, "messages": [*CHAT, {"role": "user", "content": "x", "weight": 1}], "m": 2}
    run = chat.parse(document, "x.json")[0].trajectory
    assert (run.id, run.task) == ("7", "Look\n[image]")
    assert run.metadata == {"m": 2, "turn_fields": {"6": {"weight": 1}}}
    assert chat.parse(CHAT, "a/b.jsonl.gz:3")[0].trajectory.id == "b:3"


def test_names_tools_by_name_then_by_call_then_as_tool() -> None:
    rows = [
        {"role": "tool", "name": "clock", "content": "12"},
        {"role": "tool", "tool_call_id": "unheard", "content": "13"},
        {"role": "function", "content": "14"},
    ]
    assert [agent for agent, _, _ in read(rows)] == ["clock", "tool", "tool"]


def test_reads_parts_of_other_vendors() -> None:
    rows = [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm."},
                {"type": "text", "text": "One"},
                {"type": "text", "text": "two"},
                {"type": "tool_use", "id": "t1", "name": "run", "input": {"n": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "1"}]},
    ]
    assert read(rows) == [
        ("assistant", TurnKind.THOUGHT, "Hm."),
        ("assistant", TurnKind.MESSAGE, "One\ntwo"),
        ("assistant", TurnKind.TOOL_CALL, 'run({"n": 1})'),
        ("run", TurnKind.TOOL_RESULT, "1"),
    ]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"messages": []}, "messages: expected at least one message"),
        ({"messages": ["x"]}, r"messages\[0\]: expected an object, got a string"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\]\.role: expected a string, got nothing"),
        ([{"role": "user"}], r"\[0\]\.content: expected text or tool calls, got nothing"),
        ({"id": [], "messages": CHAT}, "id: expected a string, got a list"),
    ],
)
def test_names_the_path_of_what_is_wrong(document: object, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        chat.parse(document, "x.json")


def test_reads_two_thousand_turns_and_a_very_long_one() -> None:
    rows = [{"role": "user", "content": f"{i}"} for i in range(2000)]
    rows[7]["content"] = "x" * 88_000
    turns = read(rows)
    assert len(turns) == 2000
    assert len(turns[7][2]) == 88_000
