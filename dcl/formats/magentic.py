"""Plain message logs: Magentic-One roles, and the message lists of AutoGen AgentChat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcl.errors import TraceError
from dcl.formats.conversation import read_conversation
from dcl.formats.messages import call_piece, text_of
from dcl.formats.roles import kind_of, read_row
from dcl.trajectory import Example, Turn, TurnKind, expect_str

_CHAT_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ROW_KEYS = ("role", "name", "content")
_EVENT_KEYS = ("source", "type", "content")
# Streaming chunks repeat the message that follows; a request for input says nothing.
_SKIPPED = ("ModelClientStreamingChunkEvent", "UserInputRequestedEvent")
_EVENT_KINDS = {
    "ThoughtEvent": TurnKind.THOUGHT,
    "HandoffMessage": TurnKind.HANDOFF,
    "SelectSpeakerEvent": TurnKind.HANDOFF,
    "SelectorEvent": TurnKind.THOUGHT,
    "StopMessage": TurnKind.FINAL,
    "ToolCallSummaryMessage": TurnKind.TOOL_RESULT,
    "CodeExecutionEvent": TurnKind.TOOL_RESULT,
    "MemoryQueryEvent": TurnKind.TOOL_RESULT,
}


def matches(document: object) -> bool:
    """Whether a document lists messages of named speakers: by `source`, or by a free role."""
    rows = document.get("messages") if isinstance(document, dict) else document
    return (
        isinstance(rows, list)
        and bool(rows)
        and any(isinstance(row, dict) and (_is_event(row) or _is_spoken(row)) for row in rows)
    )


def parse(document: object, place: str) -> list[Example]:
    """Read one log.

    Args:
        document: The list, or an object that holds it as `messages`.
        place: Where it stands; gives the id if the document has none.

    Raises:
        TraceError: If a row has no speaker or no content; the message names its path.
    """
    return read_conversation(
        document,
        place,
        _turns,
        known=(*_ROW_KEYS, *_EVENT_KEYS),
        asks=lambda turn: turn.agent.lower() in ("user", "human"),
        origin="magentic",
    )


def _is_event(row: Mapping[str, Any]) -> bool:
    """Whether a row is an AgentChat message."""
    return isinstance(row.get("source"), str) and "content" in row and "role" not in row


def _is_spoken(row: Mapping[str, Any]) -> bool:
    """Whether the role of a row is the name of a speaker."""
    role = row.get("role")
    return isinstance(role, str) and "content" in row and role.lower() not in _CHAT_ROLES


def _turns(row: Mapping[str, Any], place: str) -> list[Turn]:
    """The turns of one row: as many as there are tool calls or results in an event."""
    if "source" not in row:
        return [read_row(row, place)]
    return read_message(row, place, source=place)


def read_message(row: Mapping[str, Any], place: str, *, source: str) -> list[Turn]:
    """The turns of one AgentChat message.

    Args:
        row: The message as JSON.
        place: Path of it, for the error.
        source: Where it stands in its log.

    Returns:
        As many as there are tool calls or results in it; none for a chunk of a stream.

    Raises:
        TraceError: If it has no speaker or no content.
    """
    agent = expect_str(row, "source", place)
    dot = f"{place}." if place else ""
    if not agent.strip():
        raise TraceError(f"{dot}source", "expected a name, got an empty string")
    kind = expect_str(row, "type", place, default="")
    if kind in _SKIPPED:
        return []
    content = row.get("content", row.get("result"))
    if content is None:
        raise TraceError(f"{dot}content", "expected text or a list, got nothing")
    # Whoever asks without a name of their own is the source `user`, and is never blamed.
    role = agent if agent == "user" else kind
    return [
        Turn(agent=speaker, content=text, role=role, kind=turn_kind, source=source)
        for speaker, text, turn_kind in _said(agent, kind, content)
    ]


def _said(agent: str, kind: str, content: object) -> list[tuple[str, str, TurnKind]]:
    """Speaker, text and kind of each turn in an event."""
    entries = content if isinstance(content, list) else [content]
    if kind == "ToolCallRequestEvent":
        return [(agent, call_piece(entry).text, TurnKind.TOOL_CALL) for entry in entries]
    if kind == "ToolCallExecutionEvent":
        return [(_tool(entry), _output(entry), TurnKind.TOOL_RESULT) for entry in entries]
    text = "\n".join(_output(entry) for entry in entries)
    return [(agent, text, _EVENT_KINDS.get(kind) or kind_of(agent, text))]


def _tool(entry: object) -> str:
    """Name of the tool that answers."""
    name = entry.get("name") if isinstance(entry, dict) else None
    return name if isinstance(name, str) and name.strip() else "tool"


def _output(entry: object) -> str:
    """Text of a result, a memory or a part of a message; a picture becomes a marker."""
    if not isinstance(entry, dict):
        return text_of(entry)
    found = next((entry[key] for key in ("content", "output", "text") if key in entry), None)
    return text_of(found) if found is not None else "[image]" if "data" in entry else text_of(entry)
