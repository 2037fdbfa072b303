"""Lists of chat messages, as the OpenAI API takes and gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcl.errors import TraceError
from dcl.formats.conversation import read_conversation
from dcl.formats.messages import Piece, pieces
from dcl.trajectory import Example, Turn, TurnKind, expect_str

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
    tools: dict[str, str] = {}
    return read_conversation(
        document,
        place,
        lambda row, path: _turns(row, path, tools),
        known=_KEYS,
        asks=lambda turn: turn.role == "user",
        origin="chat",
    )


def _turns(row: Mapping[str, Any], place: str, tools: dict[str, str]) -> list[Turn]:
    """The turns of one message; `tools` names the tool of each call so far, for its result."""
    role = expect_str(row, "role", place)
    if not role.strip():
        raise TraceError(f"{place}.role", "expected a role, got an empty string")
    if not any(key in row for key in _CONTENT_KEYS):
        raise TraceError(f"{place}.content", "expected text or tool calls, got nothing")
    found = pieces(row)
    tools |= {p.call: p.tool for p in found if p.call and p.kind is TurnKind.TOOL_CALL}
    turns: list[Turn] = []
    # An empty reply is a symptom, so it stays as a turn without words.
    for piece in found or [Piece(role.strip().lower(), "", name=str(row.get("name") or ""))]:
        result = piece.kind is TurnKind.TOOL_RESULT
        agent = piece.speaker(tools.get(piece.call, "") if result else "assistant")
        if result and agent == "tool":
            agent = tools.get(piece.call) or agent
        turns.append(piece.turn(agent, place))
    return turns
