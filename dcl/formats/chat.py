"""Lists of chat messages, as the OpenAI API takes and gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcl.errors import TraceError
from dcl.formats.labels import leftover, read_id, turn_fields
from dcl.formats.messages import Piece, pieces
from dcl.formats.source import stem
from dcl.trajectory import (
    Example,
    Trajectory,
    Turn,
    TurnKind,
    expect_list,
    expect_object,
    expect_str,
)

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_KEYS = ("role", "name", "content", "tool_calls", "tool_call_id", "function_call")
_CONTENT_KEYS = ("content", "tool_calls", "function_call", "refusal", "reasoning_content", "parts")


def matches(document: object) -> bool:
    """Whether a document is a list of objects with a role, or holds one as `messages`."""
    if isinstance(document, dict):
        return isinstance(document.get("messages"), list)
    return (
        isinstance(document, list)
        and bool(document)
        and any(isinstance(row, dict) and row.get("role") in _ROLES for row in document)
    )


def parse(document: object, place: str) -> list[Example]:
    """Read one conversation; a tool call becomes a turn of its own.

    Args:
        document: The list, or an object that holds it.
        place: Where it stands; gives the id if the document has none.

    Raises:
        TraceError: If a message has no role or no content; the message names its path.
    """
    row: dict[str, Any] = (
        {"messages": document} if isinstance(document, list) else dict(expect_object(document, ""))
    )
    rows = expect_list(row, "messages", "")
    path = "" if isinstance(document, list) else "messages"
    turns = _turns(rows, path)
    if not turns:
        raise TraceError("messages", "expected at least one message with content, got none")
    first = next((turn.content for turn in turns if turn.role == "user"), "")
    trajectory = Trajectory(
        id=read_id(row, "id", stem(place)),
        task=expect_str(row, "task", "", default=first),
        turns=tuple(turns),
        metadata=leftover(row, ("id", "task", "messages")) | turn_fields(rows, _KEYS),
    )
    return [Example(trajectory=trajectory, origin="chat")]


def _turns(rows: Sequence[Any], path: str) -> list[Turn]:
    """The turns of all messages; results are named by the calls that they answer."""
    tools: dict[str, str] = {}
    turns: list[Turn] = []
    for i, row in enumerate(rows):
        place = f"{path}[{i}]"
        row = expect_object(row, place)
        role = expect_str(row, "role", place)
        if not role.strip():
            raise TraceError(f"{place}.role", "expected a role, got an empty string")
        if not any(key in row for key in _CONTENT_KEYS):
            raise TraceError(f"{place}.content", "expected text or tool calls, got nothing")
        found = pieces(row)
        tools |= {p.call: p.tool for p in found if p.call and p.kind is TurnKind.TOOL_CALL}
        # An empty reply is a symptom, so it stays as a turn without words.
        for piece in found or [Piece(role.strip().lower(), "", name=str(row.get("name") or ""))]:
            result = piece.kind is TurnKind.TOOL_RESULT
            agent = piece.speaker(tools.get(piece.call, "") if result else "assistant")
            if result and agent == "tool":
                agent = tools.get(piece.call) or agent
            turns.append(piece.turn(agent, place))
    return turns
