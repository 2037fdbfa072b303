"""OpenTelemetry: a span processor that feeds a monitor; `dcl.plugs.evaluations` writes back.

Spans are read as `dcl.formats.otlp` reads exported ones, in all spellings of the GenAI conventions,
OpenLLMetry and OpenInference; the last word on a trace is that of `dcl attribute` on its export.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcl.formats.genai import has_content, kind_of_span
from dcl.formats.spans import read_spans
from dcl.live.monitor import Monitor
from dcl.live.openruns import Arrival
from dcl.plugs.evaluations import EVENT, SCOPE, Evaluations
from dcl.plugs.recorder import OnEvent, Recorder, lacks, log_event, logger

try:
    from opentelemetry import trace as api
    from opentelemetry._logs import LogRecord
    from opentelemetry.context import Context
    from opentelemetry.sdk._logs import LogRecordProcessor
    from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
    from opentelemetry.trace import StatusCode
except ImportError as error:
    raise lacks(__name__, "otel", error) from error

_PREFIXES = (
    "gen_ai.", "llm.", "openinference.", "traceloop.", "input.", "output.", "tool", "agent.",
)  # fmt: skip
_NAMES = ("invoke_agent", "execute_tool")
_TRACES = 10_000  # traces that are open at once; the oldest gives way
_WAITING = 1_000  # rows of a trace that a full queue has refused; the oldest gives way

Row = dict[str, Any]


@dataclass(slots=True)
class _Open:
    """A trace that goes on in this process."""

    spans: dict[int, Span] = field(default_factory=dict)  # those that have not ended
    sent: set[int] = field(default_factory=set)  # those that were sent as they stood
    waiting: list[Row] = field(default_factory=list)  # what goes with the next span that speaks
    events: defaultdict[int, list[Row]] = field(default_factory=lambda: defaultdict(list))
    has_spoken: bool = False
    has_failed: bool = False


class MonitorSpanProcessor(SpanProcessor):
    """Feeds spans of agents, models and tools to a monitor as they end.

    A run is a trace and has its id. Spans around that have not ended yet are sent along as they
    stand, so that turns have the names of their agents at once. The run ends with the last open
    span of the trace in this process. Traces without agents, models and tools are left alone.

    Args:
        monitor: See `dcl.plugs.recorder.Recorder`.
        on_event: See there; None writes findings with `Evaluations` and logs all events.

    Raises:
        ArtifactError: If no monitor is given, and the model that ships cannot be loaded.
    """

    def __init__(self, monitor: Monitor | None = None, *, on_event: OnEvent | None = None) -> None:
        if monitor is None and on_event is None:
            on_event = Evaluations(then=log_event)
        self.recorder = Recorder(monitor, on_event)
        self._traces: OrderedDict[int, _Open] = OrderedDict()
        self._has_warned = False

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Remember a span, as those below may need its name."""
        with self.recorder.guard(), self.recorder.lock:
            context = span.get_span_context()
            if not _is_own(span):
                trace = self._traces.setdefault(context.trace_id, _Open())
                trace.spans[context.span_id] = span
                if len(self._traces) > _TRACES:
                    self._traces.popitem(last=False)

    def on_end(self, span: ReadableSpan) -> None:
        """Send a span that says something."""
        context = span.get_span_context()
        if context is None or _is_own(span):
            return
        run_id = api.format_trace_id(context.trace_id)
        with self.recorder.guard(run_id), self.recorder.lock:
            trace = self._traces.get(context.trace_id)
            if trace is None:
                return
            trace.spans.pop(context.span_id, None)
            is_root = span.parent is None or span.parent.is_remote
            trace.has_failed |= is_root and span.status.status_code is StatusCode.ERROR
            try:
                self._take(run_id, trace, span, context.span_id)
            finally:
                if not trace.spans:
                    self._end(context.trace_id, run_id, trace)

    def shutdown(self) -> None:
        """The program ends: judge what waits."""
        self.recorder.close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Wait until all that was sent is judged.

        Args:
            timeout_millis: How long at most.

        Returns:
            Whether all is judged.
        """
        return self.recorder.flush(timeout_millis / 1000)

    def add_event(self, trace_id: int, span_id: int, row: Row) -> None:
        """Take an event that was logged beside an open span.

        Args:
            trace_id: The trace.
            span_id: The span.
            row: Name and attributes of the event.
        """
        with self.recorder.guard(), self.recorder.lock:
            trace = self._traces.get(trace_id)
            if trace is not None and span_id in trace.spans:
                trace.events[span_id].append(row)

    def _take(self, run_id: str, trace: _Open, span: ReadableSpan, span_id: int) -> None:
        """Send a span with those around it, if it says anything."""
        logged = trace.events.pop(span_id, [])
        row = _row(span, logged) if logged or _may_speak(span) else None
        if row is not None and self._speaks(row):
            trace.waiting += [_row(above, is_open=True) for above in _around(trace, span)]
            trace.waiting.append(row)
            trace.has_spoken = True
            self._send(run_id, trace)
        elif span_id in trace.sent:  # it was sent as it stood
            trace.waiting.append(row or _row(span))
        del trace.waiting[:-_WAITING]

    def _speaks(self, row: Row) -> bool:
        """Whether a span holds anything that becomes a turn."""
        (span,) = read_spans(row)
        kind = kind_of_span(span)
        if kind == "tool" or (kind != "aside" and has_content(span)):
            return True
        if kind == "model" and not span.error and not self._has_warned:
            self._has_warned = True
            logger.warning("spans of models hold no messages: is the capture of content off?")
        return bool(span.error) and kind in ("agent", "model")

    def _send(self, run_id: str, trace: _Open) -> None:
        """Give what waits to the monitor; what a full queue refuses waits on."""
        arrival = Arrival(run_id, None, spans={"spans": trace.waiting})
        if self.recorder.monitor.submit([arrival]) is not None:
            trace.waiting = []

    def _end(self, trace_id: int, run_id: str, trace: _Open) -> None:
        """The last open span has ended."""
        del self._traces[trace_id]
        if trace.has_spoken:
            if trace.waiting:
                self._send(run_id, trace)
            self.recorder.end(run_id, "failure" if trace.has_failed else None)


class MonitorLogProcessor(LogRecordProcessor):
    """Gives the log events in which some instrumentations record content to their spans.

    Args:
        spans: Takes them.
    """

    def __init__(self, spans: MonitorSpanProcessor) -> None:
        self._spans = spans

    def on_emit(self, log_record: Any) -> None:
        """Take one log record; those of others are left alone.

        Args:
            log_record: Holds the record as `log_record`.
        """
        record: LogRecord = log_record.log_record
        attributes = record.attributes or {}
        name = str(record.event_name or attributes.get("event.name") or "")
        if name.startswith("gen_ai.") and name != EVENT and record.trace_id and record.span_id:
            row = {"name": name, "attributes": _plain(attributes)}
            if record.body is not None:
                row["attributes"]["body"] = json.dumps(_plain(record.body), default=str)
            self._spans.add_event(record.trace_id, record.span_id, row)

    def shutdown(self) -> None:
        """Nothing to do: the span processor judges what waits."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing to do.

        Args:
            timeout_millis: Not used.
        """
        return True


def _is_own(span: ReadableSpan) -> bool:
    """Whether this module wrote the span."""
    scope = span.instrumentation_scope
    return scope is not None and scope.name == SCOPE


def _may_speak(span: ReadableSpan) -> bool:
    """Whether a closer look is worth the time: most spans of a program are of other things."""
    return (
        any(key.startswith(_PREFIXES) for key in span.attributes or ())
        or span.name.startswith(_NAMES)
        or any(event.name.startswith("gen_ai.") for event in span.events)
    )


def _around(trace: _Open, span: ReadableSpan) -> list[Span]:
    """The open spans around one that are not known yet; they are from then on."""
    found: list[Span] = []
    parent = span.parent
    while parent is not None and parent.span_id not in trace.sent:
        above = trace.spans.get(parent.span_id)
        if above is None:
            break
        trace.sent.add(parent.span_id)
        found.append(above)
        parent = above.parent
    return found


def _row(span: ReadableSpan, logged: Sequence[Row] = (), *, is_open: bool = False) -> Row:
    """A span as JSON; one that is still open has no end, and no status."""
    context = span.get_span_context()
    row: Row = {
        "traceId": api.format_trace_id(context.trace_id) if context else "",
        "spanId": api.format_span_id(context.span_id) if context else "",
        "parentSpanId": "" if span.parent is None else api.format_span_id(span.parent.span_id),
        "name": span.name,
        "startTimeUnixNano": span.start_time or 0,
        "endTimeUnixNano": 0 if is_open else span.end_time or 0,
        "attributes": _plain(span.attributes or {}),
        "events": [{"name": e.name, "attributes": _plain(e.attributes or {})} for e in span.events],
    }
    row["events"] += logged
    if service := span.resource.attributes.get("service.name"):
        row["resource"] = {"attributes": {"service.name": str(service)}}
    if not is_open and span.status.status_code is StatusCode.ERROR:
        row["status"] = {"code": 2, "message": span.status.description or ""}
    return row


def _plain(value: Any) -> Any:
    """An attribute value as JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value.decode(errors="replace") if isinstance(value, bytes) else value
