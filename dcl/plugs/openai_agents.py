"""OpenAI Agents SDK: a tracing processor, given to `agents.add_trace_processor`.

A run is a trace, which the SDK makes around each `Runner.run` or which `agents.trace` opens. What
models and tools say is in the spans unless `trace_include_sensitive_data` is off.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcl.formats.messages import Piece, call_text, pieces, text_of
from dcl.live.monitor import Monitor
from dcl.plugs.recorder import OnEvent, Recorder, lacks
from dcl.plugs.transcript import Transcript
from dcl.trajectory import Turn, TurnKind

try:
    from agents.tracing import Span, Trace, TracingProcessor
except ImportError as error:
    raise lacks(__name__, "openai-agents", error) from error

_FLUSH_S = 30.0
_TRACES = 10_000  # traces that are open at once; the oldest gives way
_ASIDE = ("id", "type", "status", "output", "result", "results", "outputs", "name", "arguments")


@dataclass(slots=True)
class _Open:
    """A trace that goes on: the agent of each open span, and whether an agent of its own failed."""

    owners: dict[str, str]
    outer: set[str]  # agent spans that no other agent span is around
    is_asked: bool = False
    has_failed: bool = False
    error: str = ""  # the last one that was told; the spans around repeat it


class MonitorTracingProcessor(TracingProcessor):
    """Feeds what agents and tools say to a monitor.

    Agents have the names of their spans. What a session held before the run, and examples in a
    prompt, are no turns of it.

    Args:
        monitor: See `dcl.plugs.recorder.Recorder`.
        on_event: See there.

    Raises:
        ArtifactError: If no monitor is given, and the model that ships cannot be loaded.
    """

    def __init__(self, monitor: Monitor | None = None, *, on_event: OnEvent | None = None) -> None:
        self.recorder = Recorder(monitor, on_event)
        self._traces: OrderedDict[str, _Open] = OrderedDict()

    def on_trace_start(self, trace: Trace) -> None:
        """A run starts."""
        with self.recorder.guard(), self.recorder.lock:
            self._traces[trace.trace_id] = _Open({}, set())
            if len(self._traces) > _TRACES:
                self._traces.popitem(last=False)

    def on_trace_end(self, trace: Trace) -> None:
        """A run ends."""
        with self.recorder.guard(), self.recorder.lock:
            found = self._traces.pop(trace.trace_id, None)
            if found is not None:
                self.recorder.end(trace.trace_id, "failure" if found.has_failed else None)

    def on_span_start(self, span: Span[Any]) -> None:
        """An agent, a model call or a tool starts."""
        with self.recorder.guard(), self.recorder.lock:
            found = self._traces.get(span.trace_id)
            if found is None:
                return
            above = found.owners.get(span.parent_id or "", "")
            data = span.span_data
            own = data.name if data.type == "agent" else getattr(data, "agent_name", "")
            found.owners[span.span_id] = text_of(own) or above
            if data.type == "agent" and not above:
                found.outer.add(span.span_id)

    def on_span_end(self, span: Span[Any]) -> None:
        """An agent, a model call or a tool is done."""
        with self.recorder.guard(span.trace_id), self.recorder.lock:
            found = self._traces.get(span.trace_id)
            if found is None:
                return
            owner = found.owners.pop(span.span_id, "") or "assistant"
            self._read(found, self.recorder.run(span.trace_id), span, owner)

    def shutdown(self) -> None:
        """The program ends: judge what waits."""
        self.recorder.close()

    def force_flush(self) -> None:
        """Wait until all that was recorded is judged, for half a minute at most."""
        self.recorder.flush(_FLUSH_S)

    def _read(self, trace: _Open, transcript: Transcript, span: Span[Any], owner: str) -> None:
        """What a span says."""
        data, source = span.span_data, span.span_id
        if data.type in ("generation", "response"):
            told, answered = _model_call(data)
            if not trace.is_asked:
                trace.is_asked = True
                told = _request(transcript, told)
            transcript.hear(told, source)
            transcript.say(answered, owner, source)
        elif data.type == "function":
            self._use(transcript, span, owner)
        elif data.type == "handoff" and data.to_agent:
            transcript.hand_over(text_of(data.from_agent) or owner, text_of(data.to_agent), source)
        elif data.type == "guardrail" and data.triggered:
            turn = Turn(text_of(data.name), "tripwire triggered", "tool", TurnKind.TOOL_RESULT)
            transcript.add(turn)
        if span.error is not None and data.type in ("generation", "response", "agent"):
            message, detail = _error(span)
            if not trace.error or detail != trace.error:
                transcript.fail(owner, f"{message}: {detail}" if detail else message, source)
            trace.error = detail
            trace.has_failed |= span.span_id in trace.outer

    def _use(self, transcript: Transcript, span: Span[Any], owner: str) -> None:
        """The call and the result of a tool; both are known when it ends."""
        data, source = span.span_data, span.span_id
        call = transcript.call(owner, data.name, data.input, source=source)
        if span.error is not None and data.output is None:
            text = f"error: {' '.join(_error(span))}".strip()
        else:
            text = text_of(_plain(data.output))
        transcript.answer(data.name, text, call, source)


def _request(transcript: Transcript, told: list[Piece]) -> list[Piece]:
    """The prompt, and what the person asks: all that stands before that was said earlier."""
    asked = len(told)
    while asked and told[asked - 1].role == "user":
        asked -= 1
    transcript.pass_over(piece for piece in told[:asked] if piece.kind is not TurnKind.SYSTEM)
    prompts = [piece for piece in told[:asked] if piece.kind is TurnKind.SYSTEM]
    return [*told[asked:], *prompts]


def _model_call(data: Any) -> tuple[list[Piece], list[Piece]]:
    """What a model was told, and what it answered."""
    told, answered = data.input or (), ()
    prompt: list[Piece] = []
    if data.type == "generation":
        answered = data.output or ()
    elif data.response is not None:
        answered = data.response.output
        instructions = data.response.instructions
        if isinstance(instructions, str) and instructions:
            prompt = [Piece("system", instructions, TurnKind.SYSTEM)]
    told = [told] if isinstance(told, str) else told
    return [*prompt, *_pieces(told, "user")], list(_pieces(answered, "assistant"))


def _pieces(items: Sequence[Any], role: str) -> Iterator[Piece]:
    """Chat messages, or items of the Responses API, as pieces."""
    for item in items:
        row = _plain(item)
        if isinstance(row, Mapping) and "role" not in row and isinstance(row.get("output"), list):
            yield from _pieces(row["output"], role)  # a whole response, as streams give it
        elif isinstance(row, Mapping) and "role" not in row and row.get("type") != "message":
            yield from _item(row)
        else:
            yield from pieces(row, role)


def _item(row: Mapping[str, Any]) -> Iterator[Piece]:
    """An item that is no message: a call, its result, or reasoning."""
    kind, call = text_of(row.get("type")), text_of(row.get("call_id"))
    if kind == "reasoning":
        parts = [*(row.get("summary") or ()), *(row.get("content") or ())]
        text = "\n".join(text_of(part.get("text")) for part in parts)
        if text:
            yield Piece("assistant", text, TurnKind.THOUGHT)
    elif kind.endswith("_output"):
        yield Piece("tool", _text(row.get("output")), TurnKind.TOOL_RESULT, call=call)
    elif kind.endswith("_call"):
        name = text_of(row.get("name")) or kind.removesuffix("_call")
        arguments = row.get("arguments")
        if arguments is None:  # a tool that the provider hosts: each has fields of its own
            arguments = {k: v for k, v in row.items() if k not in _ASIDE and v is not None}
        text = call_text(name, arguments)
        yield Piece("assistant", text, TurnKind.TOOL_CALL, call=call, tool=name)
        if row.get("output") is not None:
            yield Piece("tool", _text(row["output"]), TurnKind.TOOL_RESULT, name, call)


def _text(output: Any) -> str:
    """A result as text; a picture becomes a marker."""
    if isinstance(output, list):
        return "\n".join(_text(part) for part in output)
    if isinstance(output, Mapping):
        return "[image]" if "image_url" in output else text_of(output.get("text", output))
    return text_of(output)


def _plain(value: Any) -> Any:
    """A model of the SDK as plain JSON; anything else as it is."""
    dump = getattr(value, "model_dump", None)
    return dump(exclude_none=True) if dump else value


def _error(span: Span[Any]) -> tuple[str, str]:
    """What went wrong in a span, in general and in detail."""
    found: Mapping[str, Any] = span.error or {}
    details = found.get("data") or {}
    detail = text_of(details.get("error")) if isinstance(details, Mapping) else ""
    return text_of(found.get("message")), detail
