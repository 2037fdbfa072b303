"""Span exports -> `Span`: OTLP/JSON, the JSON of the OpenTelemetry SDKs, rows of Phoenix."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from dcl.errors import TraceError
from dcl.formats.attributes import first, plain, read_attributes
from dcl.trajectory import expect_list, expect_object

_RESOURCES = ("resourceSpans", "resource_spans", "resourceLogs", "resource_logs")
_SCOPES = ("scopeSpans", "scope_spans", "instrumentationLibrarySpans", "scopeLogs", "scope_logs")
_RECORDS = ("spans", "logRecords", "log_records")
_LISTS = ("spans", "data")
_SPAN_IDS = ("spanId", "span_id")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened inside a span."""

    name: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """One unit of work; times in nanoseconds, 0 where unknown; no parent is an empty string."""

    id: str
    trace: str
    parent: str
    name: str
    start: int
    end: int
    attributes: Mapping[str, Any]
    events: tuple[Event, ...]
    error: str
    resource: Mapping[str, Any]


def is_export(document: object) -> bool:
    """Whether a document holds spans, or log records that belong to spans, in a known shape."""
    if isinstance(document, list):
        first = document[0] if document else None
        return isinstance(first, dict) and is_export(first)
    if not isinstance(document, dict):
        return False
    if any(key in document for key in _RESOURCES) or is_span(document):
        return True
    # An empty list of spans is an export without content, which deserves its own message.
    return any(
        isinstance(rows := document.get(key), list)
        and ((not rows and key == "spans") or (bool(rows) and is_span(rows[0])))
        for key in _LISTS
    )


def read_spans(document: object) -> Iterator[Span]:
    """The spans of a document, in file order.

    Raises:
        TraceError: If the nesting is not that of the format; the message names the path.
    """
    for row, resource, place in _rows(document, ""):
        if "logs" not in place.lower():
            yield _span(row, resource, place)


def read_records(document: object) -> Iterator[tuple[str, Event]]:
    """Log records that are events of a span, with the span's id.

    Raises:
        TraceError: If the nesting is not that of the format; the message names the path.
    """
    for row, _, place in _rows(document, ""):
        if "logs" in place.lower():
            attributes = read_attributes(row.get("attributes"), place)
            name = row.get("eventName") or row.get("event_name") or attributes.get("event.name")
            body = plain(row.get("body"))
            fields = body if isinstance(body, Mapping) else {"content": body} if body else {}
            yield _identity(first(row, *_SPAN_IDS), 16), Event(str(name), {**attributes, **fields})


Row = tuple[Mapping[str, Any], Mapping[str, Any], str]


def _rows(document: object, place: str) -> Iterator[Row]:
    """Spans and log records as they stand, each with its resource and its path."""
    if isinstance(document, list):
        for i, entry in enumerate(document):
            yield from _rows(entry, f"{place}[{i}]")
        return
    row = expect_object(document, place)
    dot = f"{place}." if place else ""
    if is_span(row):
        yield row, _resource(row, place), place
        return
    for key in _LISTS:
        if isinstance(row.get(key), list):
            for i, entry in enumerate(row[key]):
                at = f"{dot}{key}[{i}]"
                entry = expect_object(entry, at)
                yield entry, _resource(entry, at), at
    for key in _RESOURCES:
        if key in row:
            for i, group in enumerate(expect_list(row, key, place)):
                yield from _scoped(expect_object(group, f"{dot}{key}[{i}]"), f"{dot}{key}[{i}]")


def _scoped(group: Mapping[str, Any], place: str) -> Iterator[Row]:
    """The records of all scopes of one resource."""
    resource = _resource(group, place)
    for key in _SCOPES:
        for i, scope in enumerate(expect_list(group, key, place) if key in group else []):
            at = f"{place}.{key}[{i}]"
            scope = expect_object(scope, at)
            for name in _RECORDS:
                rows = expect_list(scope, name, at) if name in scope else []
                for j, row in enumerate(rows):
                    yield expect_object(row, f"{at}.{name}[{j}]"), resource, f"{at}.{name}[{j}]"


def _resource(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Attributes of the process that wrote the spans."""
    resource = row.get("resource")
    if not isinstance(resource, Mapping):
        return {}
    return read_attributes(resource.get("attributes"), f"{place}.resource")


def is_span(row: object) -> bool:
    """Whether an object is one span: it has an id of its own or in its context."""
    if not isinstance(row, Mapping):
        return False
    context = row.get("context")
    return any(
        isinstance(holder, Mapping) and any(key in holder for key in _SPAN_IDS)
        for holder in (row, context)
    )


def _span(row: Mapping[str, Any], resource: Mapping[str, Any], place: str) -> Span:
    """One span."""
    context = row.get("context")
    context = context if isinstance(context, Mapping) else {}
    parent = row.get("parent")
    parent = parent if isinstance(parent, Mapping) else {"span_id": parent}
    attributes = read_attributes(row.get("attributes"), place)
    if row.get("span_kind"):
        attributes.setdefault("openinference.span.kind", row["span_kind"])
    identity = _identity(first(row, *_SPAN_IDS) or first(context, *_SPAN_IDS), 16)
    if not identity:
        raise TraceError(place, "expected a span with a span id, got none")
    events = tuple(_events(row.get("events"), place))
    return Span(
        id=identity,
        trace=_identity(
            first(row, "traceId", "trace_id") or first(context, "traceId", "trace_id"), 32
        ),
        parent=_identity(
            first(row, "parentSpanId", "parent_span_id", "parent_id") or first(parent, *_SPAN_IDS),
            16,
        ),
        name=str(row.get("name") or ""),
        start=_time(first(row, "startTimeUnixNano", "start_time_unix_nano", "start_time")),
        end=_time(first(row, "endTimeUnixNano", "end_time_unix_nano", "end_time")),
        attributes=attributes,
        events=events,
        error=_error(row, attributes, events),
        resource=resource,
    )


def _events(value: object, place: str) -> Iterator[Event]:
    """The events of a span."""
    for i, row in enumerate(value if isinstance(value, list) else []):
        at = f"{place}.events[{i}]"
        event = expect_object(row, at)
        yield Event(str(event.get("name") or ""), read_attributes(event.get("attributes"), at))


def _error(row: Mapping[str, Any], attributes: Mapping[str, Any], events: tuple[Event, ...]) -> str:
    """What went wrong in a span; empty if its status is not an error."""
    status = row.get("status")
    status = status if isinstance(status, Mapping) else {"code": status}
    code = first(status, "code", "status_code") or row.get("status_code")
    if str(code).upper().removeprefix("STATUS_CODE_") not in ("2", "ERROR"):
        return ""
    raised = next((e.attributes for e in events if e.name == "exception"), {})
    texts = (
        first(status, "message", "description"),
        row.get("status_message"),
        raised.get("exception.message"),
        attributes.get("exception.message"),
        raised.get("exception.type"),
        attributes.get("error.type"),
    )
    return next((str(text) for text in texts if text), "unknown error")


def _identity(value: object, width: int) -> str:
    """An id in hex, as OTLP has it: other exports give a number, or `0x` in front."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:0{width}x}"
    text = str(value or "").strip().removeprefix("0x")
    return "" if not text.strip("0") else text


def _time(value: object) -> int:
    """Nanoseconds since 1970, from a number, digits, or an ISO date; 0 if it is none."""
    if isinstance(value, int):
        return int(value)
    text = str(value or "").strip()
    if re.fullmatch(r"[0-9]{1,20}", text):
        return int(text)
    # Python 3.10 reads neither Z nor any other number of digits than three or six.
    text = re.sub(
        r"\.([0-9]{1,6})[0-9]*", lambda m: "." + m[1].ljust(6, "0"), text.replace("Z", "+00:00")
    )
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return 0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    gap = moment - _EPOCH
    return ((gap.days * 86_400 + gap.seconds) * 1_000_000 + gap.microseconds) * 1_000
