"""Chat messages of every style -> pieces: one for each text, thought, tool call, tool result.

Reads the message objects of OpenAI, Anthropic, OpenTelemetry GenAI (`parts`), OpenLLMetry and
OpenInference. Nothing in here raises: what has no meaning is kept as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dcl.trajectory import DECODER, Turn, TurnKind

_SYSTEM_ROLES = ("system", "developer")
_TOOL_ROLES = ("tool", "function")
_TEXT_KEYS = ("text", "content", "input_text", "output_text", "refusal")
_CALL_TYPES = ("tool_call", "tool_use", "function_call", "server_tool_call", "server_tool_use")
_RESULT_TYPES = ("tool_call_response", "tool_result", "function_call_output")
_THOUGHT_TYPES = ("reasoning", "thinking")
_TEXT_TYPES = ("text", "input_text", "output_text", "refusal", "")

Mark = tuple[str, str]
"""What makes two pieces the same: group, and text without layout."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One thing that a message says or does.

    Args:
        role: Role in lower case.
        text: Text of the turn.
        kind: What it is.
        name: Name that the message gives for its speaker; empty if none.
        call: Id of the tool call; empty if none.
        tool: Name of the tool; empty if none.
    """

    role: str
    text: str
    kind: TurnKind = TurnKind.MESSAGE
    name: str = ""
    call: str = ""
    tool: str = ""

    def speaker(self, owner: str) -> str:
        """Who says it: `owner` stands for an assistant that the message does not name."""
        if self.kind is TurnKind.TOOL_RESULT:
            return self.name or self.tool or "tool"
        if self.role in _SYSTEM_ROLES:
            return self.name or "system"
        return self.name or ("user" if self.role in ("user", "human") else owner)

    @property
    def group(self) -> str:
        """What it can be a copy of; roles do not count, as one's answer is another's input."""
        if self.kind is TurnKind.TOOL_CALL:
            return "call"
        if self.kind is TurnKind.TOOL_RESULT:
            return "result"
        return "thought" if self.kind is TurnKind.THOUGHT else "text"

    @property
    def mark(self) -> Mark:
        """Group and text, the same for all layouts of the arguments."""
        text = self.text
        if self.kind is TurnKind.TOOL_CALL and text.endswith(")"):
            name, _, arguments = text[:-1].partition("(")
            with suppress(ValueError, RecursionError):
                text = f"{name}({json.dumps(DECODER.decode(arguments), sort_keys=True)})"
        return self.group, " ".join(text.split())

    def turn(self, agent: str, source: str) -> Turn:
        """The piece as a turn."""
        return Turn(agent=agent, content=self.text, role=self.role, kind=self.kind, source=source)


def pieces(message: object, default_role: str = "user") -> list[Piece]:
    """The pieces of one message, in reading order; a bare string is a text."""
    row = _unwrap(message)
    role = (text_of(row.get("role")) or default_role).strip().lower()
    name = text_of(row.get("name") or row.get("agent_name")).strip()
    call = text_of(row.get("tool_call_id") or row.get("id") if role in _TOOL_ROLES else "")
    found = [_thought(row, role, name)] if _has_thought(row) else []
    found += _content(row, role, name, call)
    calls = row.get("tool_calls")
    calls = list(calls) if isinstance(calls, list) else []
    if isinstance(row.get("function_call"), dict):
        calls.append(row["function_call"])
    found += [call_piece(entry, role, name) for entry in calls]
    if "tool.name" in row:
        found.append(
            Piece(
                role,
                call_text(row["tool.name"], row.get("tool.args")),
                TurnKind.TOOL_CALL,
                name,
                tool=text_of(row["tool.name"]).strip(),
            )
        )
    return found


def call_piece(entry: object, role: str = "assistant", name: str = "") -> Piece:
    """A tool call, in any nesting of its name and arguments."""
    call = _object(entry)
    call = _object(call.get("tool_call", call))
    function = _object(call.get("function", call))
    tool = text_of(function.get("name")).strip()
    arguments = next(
        (function[key] for key in ("arguments", "input", "args") if key in function), None
    )
    return Piece(
        role,
        call_text(tool, arguments),
        TurnKind.TOOL_CALL,
        name,
        call=text_of(call.get("id") or call.get("call_id")),
        tool=tool,
    )


def call_text(tool: object, arguments: object) -> str:
    """How a tool call reads: `name(arguments)`."""
    return f"{text_of(tool) or 'tool'}({text_of(arguments)})"


def text_of(value: object) -> str:
    """A value as text: strings as they are, nothing as an empty string, the rest as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _object(value: object) -> Mapping[str, Any]:
    """The value if it is an object, else one that holds it as its name."""
    return value if isinstance(value, Mapping) else {"name": text_of(value)}


def _unwrap(message: object) -> Mapping[str, Any]:
    """The object with the role: some logs put it one level down."""
    if not isinstance(message, Mapping):
        return {"content": message}
    inner = message.get("message")
    if isinstance(inner, Mapping):
        return inner
    if isinstance(inner, str) and "content" not in message:
        return {**message, "content": inner}
    return message


def _has_thought(row: Mapping[str, Any]) -> bool:
    """Whether the message carries reasoning beside its content."""
    return bool(row.get("reasoning_content") or row.get("reasoning"))


def _thought(row: Mapping[str, Any], role: str, name: str) -> Piece:
    """The reasoning beside the content."""
    text = text_of(row.get("reasoning_content") or row.get("reasoning"))
    return Piece(role, text, TurnKind.THOUGHT, name)


def _content(row: Mapping[str, Any], role: str, name: str, call: str) -> list[Piece]:
    """The content: one text, or parts of which neighbouring texts are joined."""
    content = next(
        (row[key] for key in ("content", "parts", "contents", "refusal") if row.get(key)), None
    )
    kind = TurnKind.SYSTEM if role in _SYSTEM_ROLES else TurnKind.MESSAGE
    kind = TurnKind.TOOL_RESULT if role in _TOOL_ROLES else kind
    plain = Piece(role, "", kind, name, call=call)
    if not isinstance(content, list):
        text = text_of(content)
        return [_with_text(plain, text)] if text else []
    found: list[Piece] = []
    for part in _parts(content, plain):
        if found and found[-1].kind is kind is part.kind and part.call == found[-1].call:
            found[-1] = _with_text(part, f"{found[-1].text}\n{part.text}")
        else:
            found.append(part)
    return found


def _with_text(piece: Piece, text: str) -> Piece:
    """The piece with another text."""
    return Piece(piece.role, text, piece.kind, piece.name, piece.call, piece.tool)


def _parts(content: list[Any], plain: Piece) -> Iterator[Piece]:
    """Each part as a piece."""
    for part in content:
        if not isinstance(part, Mapping):
            yield _with_text(plain, text_of(part))
            continue
        inner = part.get("message_content")
        row = inner if isinstance(inner, Mapping) else part
        kind = text_of(row.get("type")).lower()
        if kind in _CALL_TYPES:
            yield call_piece(row, plain.role, plain.name)
        elif kind in _RESULT_TYPES:
            yield _result(row, plain)
        else:
            text = _text_part(row, kind)
            thought = kind in _THOUGHT_TYPES
            yield (
                Piece(plain.role, text, TurnKind.THOUGHT, plain.name)
                if thought
                else _with_text(plain, text)
            )


def _result(row: Mapping[str, Any], plain: Piece) -> Piece:
    """The answer of a tool; the schema says `response`, its examples `result`."""
    value = next(
        (row[key] for key in ("response", "result", "content", "output") if key in row), None
    )
    if isinstance(value, list):
        value = "\n".join(part.text for part in _parts(value, plain))
    call = next((row[key] for key in ("id", "tool_use_id", "call_id") if row.get(key)), "")
    tool = text_of(row.get("name")).strip()
    return Piece(plain.role, text_of(value), TurnKind.TOOL_RESULT, call=text_of(call), tool=tool)


def _text_part(row: Mapping[str, Any], kind: str) -> str:
    """The text of a part; anything that is none becomes a marker such as `[image]`."""
    if kind in _TEXT_TYPES or kind in _THOUGHT_TYPES:
        keys = (*_TEXT_KEYS, "thinking", "reasoning", "summary")
        return text_of(next((row[key] for key in keys if row.get(key)), ""))
    label = "image" if "image" in kind else text_of(row.get("modality")) or kind
    return f"[{label[:40]}]"
