"""OpenTelemetry traces -> trajectories: one for each trace that says anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dcl.errors import TraceError
from dcl.formats.dialogue import Dialogue
from dcl.formats.jsontext import too_deep
from dcl.formats.labels import leftover
from dcl.formats.source import stem
from dcl.formats.spans import Event, Span, is_export, is_span, read_records, read_spans
from dcl.formats.spantree import SpanTree
from dcl.trajectory import Example, Trajectory, Turn, TurnKind

_DATA_KEYS = (
    "resourceSpans",
    "resource_spans",
    "resourceLogs",
    "resource_logs",
    "spans",
    "data",
    "next_cursor",
)


def matches(document: object) -> bool:
    """Whether a document is OTLP/JSON, a span export, or one span of such."""
    return is_export(document)


def parse(document: object, place: str) -> list[Example]:
    """Read the traces of one document.

    Args:
        document: The JSON value.
        place: Where it stands; gives the id of spans that name no trace.

    Raises:
        TraceError: If the spans are not nested as the format has it, none says anything, or one
            of the traces cannot be read.
    """
    batch = Batch(place)
    batch.add(document)
    found = []
    for item in batch.examples():
        if isinstance(item, TraceError):
            raise item
        found.append(item)
    return found


_CONVENTIONS = (
    "gen_ai.", "llm.", "openinference.", "input.", "output.", "traceloop.", "service.",
    "process.", "server.", "client.", "http.", "url.", "net.", "network.", "rpc.", "db.", "code.",
    "thread.", "error.", "exception.", "session.", "user.", "otel.", "graph.", "agent.", "tool.",
    "deployment.", "host.", "telemetry.",
)  # fmt: skip
"""First parts of attribute names that the semantic conventions define."""


_NESTED = ("resourceSpans", "resource_spans", "scopeSpans", "scope_spans", "spans", "data")


def split(document: object) -> list[tuple[str, dict[str, Any]]]:
    """The traces of a document: the id of each, and the document with its spans alone.

    Args:
        document: OTLP/JSON or another export of spans.

    Raises:
        TraceError: If the spans are not nested as the format has it.
    """
    whole = document if isinstance(document, dict) else {"spans": document}
    traces = dict.fromkeys(span.trace for span in read_spans(whole))
    return [(trace, _only(whole, trace)) for trace in traces]


def _only(node: Any, trace: str) -> Any:
    """A copy without the spans of other traces."""
    if isinstance(node, list):
        return [_only(entry, trace) for entry in node if not _is_of_another(entry, trace)]
    if not isinstance(node, dict):
        return node
    return {key: _only(value, trace) if key in _NESTED else value for key, value in node.items()}


def _is_of_another(node: object, trace: str) -> bool:
    """Whether it is a span, and not of this trace."""
    return is_span(node) and any(span.trace != trace for span in read_spans(node))


class Batch:
    """The documents of one file: a trace may be spread over many, children before parents."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._spans: dict[tuple[str, str], Span] = {}
        self._records: list[tuple[str, Event]] = []
        self._extras: dict[str, Any] = {}
        self._documents = 0

    def add(self, document: object) -> None:
        """Take the spans of one more document.

        A span that is there already is left out, unless it was still open.

        Raises:
            TraceError: If they are not nested as the format has it.
        """
        spans, records = list(read_spans(document)), list(read_records(document))
        self._documents += 1
        for span in spans:
            known = self._spans.get((span.trace, span.id))
            if known is None or (span.end and not known.end):
                self._spans[span.trace, span.id] = span
        self._records += records
        if isinstance(document, dict) and not (set(document) & {"context", "spanId", "span_id"}):
            self._extras |= leftover(document, _DATA_KEYS)

    def examples(self) -> list[Example | TraceError]:
        """One example for each trace in which anything was said, in order of appearance.

        Other traces, such as those of health checks, are normal in one file and are left out. In
        place of a trace that cannot be read there is an error.

        Raises:
            TraceError: If there are documents, but nothing was said in any of them.
        """
        if not self._documents:
            return []
        traces: dict[str, list[Span]] = {}
        for span in self._joined():
            traces.setdefault(span.trace, []).append(span)
        read = (self._example(trace, spans) for trace, spans in traces.items())
        found = [item for item in read if item is not None]
        if not found:
            names = ", ".join(dict.fromkeys(span.name for span in self._spans.values()))
            raise TraceError(
                "",
                f"expected spans with messages, inputs or outputs, got {len(self._spans)} spans "
                f"without ({names[:80]}); was content capture switched off?",
            )
        return found

    def _joined(self) -> Sequence[Span]:
        """The spans, with the log records that are their events."""
        events: dict[str, list[Event]] = {}
        for span_id, event in self._records:
            events.setdefault(span_id, []).append(event)
        return [
            replace(span, events=(*span.events, *events.get(span.id, ())))
            for span in self._spans.values()
        ]

    def _example(self, trace: str, spans: Sequence[Span]) -> Example | TraceError | None:
        """The trajectory of one trace; None if nothing was said in it."""
        try:
            tree = SpanTree(spans)
            turns = Dialogue(tree).turns() or _own_words(tree)
        except RecursionError:
            return too_deep(f"trace {trace}")
        if not turns:
            return None
        trajectory = Trajectory(
            id=trace or stem(self.place),
            task=_task(turns),
            turns=tuple(turns),
            outcome="failure" if any(span.error for span in tree.roots) else None,
            metadata=self._extras | _about(spans),
        )
        return Example(trajectory=trajectory, origin="otlp")


def _own_words(tree: SpanTree) -> list[Turn]:
    """Turns from the text that a program put into attributes of its own.

    The last resort, for traces in which no convention is followed. Attributes of the known
    conventions are no text: a trace that has only these was recorded without its content.
    """
    turns = []
    for span in sorted(tree.spans, key=tree.start):
        own = [
            f"{key}: {value}"
            for key, value in span.attributes.items()
            if isinstance(value, str) and value.strip() and not key.startswith(_CONVENTIONS)
        ]
        if own:
            text = "\n".join([span.name, *own])
            turns.append(Turn(agent=tree.owner(span), content=text, source=span.id))
    return turns


def _task(turns: Sequence[Turn]) -> str:
    """What the user asked first."""
    asked = (t.content for t in turns if t.role == "user" and t.kind is TurnKind.MESSAGE)
    return next(asked, "")


def _about(spans: Sequence[Span]) -> dict[str, Any]:
    """Resource and conversation of a trace, where it names them."""
    about: dict[str, Any] = {}
    resource = next((dict(span.resource) for span in spans if span.resource), None)
    if resource:
        about["resource"] = resource
    for key in ("gen_ai.conversation.id", "session.id"):
        for span in spans:
            if span.attributes.get(key):
                about.setdefault("conversation", span.attributes[key])
    return about
