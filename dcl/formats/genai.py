"""What a span says: messages and tool calls in its attributes and events.

Four generations of the GenAI conventions and OpenInference write the same things differently:
events `gen_ai.*.message` and `gen_ai.choice`; attributes `gen_ai.input.messages` and
`gen_ai.output.messages`, also on the event `gen_ai.client.inference.operation.details`;
flattened `gen_ai.prompt.0.content`; flattened `llm.input_messages.0.message.content`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcl.formats.messages import Piece, pieces, text_of
from dcl.formats.spans import Event, Span
from dcl.trajectory import DECODER, TurnKind

_INPUTS = ("gen_ai.input.messages", "llm.input_messages", "gen_ai.prompt")
_OUTPUTS = ("gen_ai.output.messages", "llm.output_messages", "gen_ai.completion", "gen_ai.output")
_VALUES_IN = ("input.value", "traceloop.entity.input")
_VALUES_OUT = ("output.value", "traceloop.entity.output")
_TOOL_NAME = ("gen_ai.tool.name", "tool.name", "tool_call.function.name", "traceloop.entity.name")
_TOOL_IN = (
    "gen_ai.tool.call.arguments",
    "gen_ai.tool.args",
    "tool_call.function.arguments",
    "input.value",
    "tool.parameters",
    "traceloop.entity.input",
)
_TOOL_OUT = ("gen_ai.tool.call.result", "gen_ai.output", *_VALUES_OUT)
_TOOL_ID = ("gen_ai.tool.call.id", "tool_call.id")
_MODEL_KEYS = ("gen_ai.request.model", "gen_ai.operation.name", "llm.model_name")
_CONTENT = (*_INPUTS, *_OUTPUTS, "gen_ai.system_instructions", *_VALUES_IN, *_VALUES_OUT)
_TOOLS = ("tool", "retriever")
_ASIDES = ("embedding", "reranker", "prompt", "guardrail", "evaluator")
_EVENT = re.compile(r"gen_ai\.(?:(system|user|assistant|tool)\.message|(choice))")
_MESSAGE_KEYS = ("role", "parts", "tool.name", "message")
_ROLE = re.compile(r'"role"\s*:\s*"(\w{1,20})"')
_BETWEEN = re.compile(r"[\s,]*")

Said = tuple[list[Piece], list[Piece]]
"""What a span was told, and what it answered."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a tool span says: its call, and its result as text or None."""

    name: str
    arguments: str
    call: str
    result: str | None


def kind_of_span(span: Span) -> str:
    """`agent`, `tool`, `model`, `aside` for work that says nothing, or an empty string."""
    operation = str(span.attributes.get("gen_ai.operation.name", "")).lower()
    kind = str(
        span.attributes.get("openinference.span.kind")
        or span.attributes.get("traceloop.span.kind")
        or ""
    ).lower()
    name = span.name.lower()
    if operation == "execute_tool" or kind in _TOOLS or name.startswith("execute_tool "):
        return "tool"
    if operation == "invoke_agent" or kind == "agent" or name.startswith("invoke_agent"):
        return "agent"
    if kind in _ASIDES:
        return "aside"
    return "model" if kind == "llm" or any(k in span.attributes for k in _MODEL_KEYS) else ""


def has_content(span: Span) -> bool:
    """Whether a span holds messages or values at all; they are not read."""
    if any(_EVENT.fullmatch(event.name) for event in span.events):
        return True
    return any(
        value and key != "gen_ai.output.type" and key.startswith(_CONTENT)
        for attributes in (span.attributes, *(event.attributes for event in span.events))
        for key, value in attributes.items()
    )


def said(span: Span) -> Said:
    """The messages of a span; its events count only where its attributes hold none."""
    told, answered = _from_attributes(span.attributes)
    if told or answered:
        return told, answered
    for event in span.events:
        match = _EVENT.fullmatch(event.name)
        if match is None:
            more_told, more_answered = _from_attributes(event.attributes)
            told += more_told
            answered += more_answered
        elif match[2]:
            answered += pieces(_event_row(event), "assistant")
        else:
            told += pieces(_event_row(event), match[1])
    return told, answered


def values(span: Span) -> Said:
    """The plain input and output of a span that holds no messages."""
    told = next((span.attributes[key] for key in _VALUES_IN if span.attributes.get(key)), None)
    answer = next((span.attributes[key] for key in _VALUES_OUT if span.attributes.get(key)), None)
    return _messages(told, "user"), _messages(answer, "assistant")


def tool_use(span: Span) -> ToolUse:
    """The call and the result of a tool span."""
    attributes = span.attributes
    name = next((attributes[key] for key in _TOOL_NAME if attributes.get(key)), None)
    result = next((attributes[key] for key in _TOOL_OUT if attributes.get(key) is not None), None)
    if result is None:
        heard = [p.text for p in said(span)[0] if p.kind is TurnKind.TOOL_RESULT]
        result = "\n".join(heard) if heard else None
    return ToolUse(
        name=text_of(name).strip() or span.name.removeprefix("execute_tool ").strip() or "tool",
        arguments=text_of(next((attributes[k] for k in _TOOL_IN if attributes.get(k)), None)),
        call=text_of(next((attributes[key] for key in _TOOL_ID if attributes.get(key)), None)),
        result=None if result is None else text_of(result),
    )


def _from_attributes(attributes: Mapping[str, Any]) -> Said:
    """Messages in attributes, in the first spelling that has any."""
    told: list[Piece] = []
    instructions = attributes.get("gen_ai.system_instructions")
    if instructions:
        told += pieces({"role": "system", "parts": _decode(instructions)}, "system")
    told += next(filter(None, (_under(attributes, key, "user") for key in _INPUTS)), [])
    answered = next(filter(None, (_under(attributes, key, "assistant") for key in _OUTPUTS)), [])
    return told, answered


def _under(attributes: Mapping[str, Any], key: str, role: str) -> list[Piece]:
    """Messages under one key: a value, JSON text, or names flattened with positions."""
    found = attributes.get(key)
    return _messages(_unflatten(attributes, f"{key}.") if found is None else found, role)


def _messages(value: object, role: str) -> list[Piece]:
    """Messages in a value; what is no message is a text of the given role."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        rows, rest = _salvage(value)
    else:
        rows, rest = _decode(value), ""
    inner = rows.get("messages") if isinstance(rows, Mapping) else None
    rows = inner if isinstance(inner, list) else rows
    entries = rows if isinstance(rows, list) else [rows]
    if not all(isinstance(e, Mapping) and any(k in e for k in _MESSAGE_KEYS) for e in entries):
        text = text_of(value)
        return [Piece(role, text)] if text else []
    found = [piece for entry in entries for piece in pieces(_opened(entry), role)]
    if rest:
        match = _ROLE.search(rest)
        found.append(Piece(match[1].lower() if match else role, rest))
    return found


def _opened(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with lists in place of their JSON text."""
    keys = ("content", "contents", "parts", "tool_calls", "message")
    opened = {key: _decode(message[key]) for key in keys if _is_json(message.get(key))}
    content = opened.get("content")
    if "content" in opened and not (
        isinstance(content, list) and all(isinstance(p, dict) and "type" in p for p in content)
    ):
        # Text that happens to be JSON is still what was said.
        del opened["content"]
    return {**message, **opened}


def _event_row(event: Event) -> Mapping[str, Any]:
    """An event's attributes and body as a message."""
    body = _decode(event.attributes.get("body", event.attributes.get("event.body")))
    return _opened({**event.attributes, **(body if isinstance(body, Mapping) else {})})


def _is_json(value: object) -> bool:
    """Whether a value looks like JSON text of a list or an object."""
    return isinstance(value, str) and value.lstrip()[:1] in ("[", "{")


def _decode(value: object) -> Any:
    """The value that a text holds as JSON; anything else as it is."""
    if not _is_json(value):
        return value
    try:
        return DECODER.decode(str(value))
    except (ValueError, RecursionError):
        return value


def _salvage(text: str) -> tuple[list[Any], str]:
    """The whole entries of a JSON list that may be cut off, and the rest as it stands."""
    position = text.index("[") + 1
    rows: list[Any] = []
    while True:
        match = _BETWEEN.match(text, position)
        position = match.end() if match else position
        if text[position : position + 1] in ("]", ""):
            return rows, ""
        try:
            row, position = DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            return rows, text[position:]
        rows.append(row)


def _unflatten(attributes: Mapping[str, Any], prefix: str) -> list[Any] | None:
    """The list that was flattened into names such as `prefix.0.role`; None if there is none."""
    root: dict[str, Any] = {}
    for key, value in attributes.items():
        if key.startswith(prefix):
            node = root
            *path, last = key[len(prefix) :].split(".")
            for name in path:
                child = node.setdefault(name, {})
                node = child if isinstance(child, dict) else {}
            node[last] = value
    listed = _listed(root)
    return listed if isinstance(listed, list) and listed else None


def _listed(node: Any) -> Any:
    """Objects whose names are all positions, as lists."""
    if not isinstance(node, dict):
        return node
    entries = {key: _listed(value) for key, value in node.items()}
    if entries and all(re.fullmatch(r"[0-9]{1,6}", key) for key in entries):
        return [entries[key] for key in sorted(entries, key=int)]
    return entries
