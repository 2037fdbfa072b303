"""The tree of one trace: which span comes when, and which agent it belongs to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from dcl.formats.genai import kind_of_span
from dcl.formats.messages import text_of
from dcl.formats.spans import Span

_OWN_KEYS = ("gen_ai.agent.name", "agent.name")
_FRAMEWORK_KEYS = (
    "graph.node.id",
    "graph.node.name",
    "langgraph.node",
    "langgraph_node",
    "metadata.langgraph_node",
    "crewai.agent.role",
    "executor.id",
    "traceloop.entity.name",
)


class SpanTree:
    """Spans of one trace with their parents; broken links and loops are cut.

    Args:
        spans: In file order.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self._by_id = {span.id: span for span in spans}
        self._position = {span.id: i for i, span in enumerate(spans)}
        self.roots = [span for span in spans if span.parent not in self._by_id]
        self._paths = {span.id: tuple(self._climb(span)) for span in spans}
        agents = {_label(span) for span in spans} - {""}
        self._only_agent = agents.pop() if len(agents) == 1 else ""

    def ancestors(self, span: Span) -> tuple[Span, ...]:
        """The spans above, nearest first."""
        return self._paths[span.id]

    def start(self, span: Span) -> tuple[int, int, int]:
        """Sort key: time, depth, file order. No span starts before its parents do."""
        above = self.ancestors(span)
        time = max(entry.start for entry in (span, *above))
        return time, len(above), self._position[span.id]

    def start_by_depth(self, span: Span) -> tuple[int, int]:
        """Sort key: depth, time."""
        time, depth, _ = self.start(span)
        return depth, time

    def owner(self, span: Span) -> str:
        """The agent at work in a span.

        From the surest sign to the weakest: the nearest span, itself included, that names its
        agent; the only agent of the trace, as parents are often missing; the caller; keys of
        frameworks; the service.
        """
        line = (span, *self.ancestors(span))
        named = next(filter(None, (_label(entry) for entry in line)), "")
        return (
            named
            or self._only_agent
            or text_of(span.attributes.get("gen_ai.caller.name")).strip()
            or next(filter(None, (_framework(entry) for entry in line)), "")
            or _service(span)
            or "agent"
        )

    def _climb(self, span: Span) -> Iterator[Span]:
        """Parents up to a root, or to the first that was seen before."""
        seen = {span.id}
        parent = self._by_id.get(span.parent)
        while parent is not None and parent.id not in seen:
            yield parent
            seen.add(parent.id)
            parent = self._by_id.get(parent.parent)


def own_name(span: Span) -> str:
    """The name of its agent that a span gives itself; empty if none."""
    return next((n for key in _OWN_KEYS if (n := text_of(span.attributes.get(key)).strip())), "")


def _label(span: Span) -> str:
    """Name of the agent that a span names or, as the span of an agent, is called after."""
    own = own_name(span)
    if own or kind_of_span(span) != "agent":
        return own
    entity = text_of(span.attributes.get("traceloop.entity.name")).strip()
    return entity or span.name.removeprefix("invoke_agent").strip(" []") or span.name.strip()


def _framework(span: Span) -> str:
    """Name in the keys of a framework."""
    # The entity of a tool span is the tool.
    keys = _FRAMEWORK_KEYS[:-1] if kind_of_span(span) == "tool" else _FRAMEWORK_KEYS
    found = next((n for key in keys if (n := text_of(span.attributes.get(key)).strip())), "")
    if found:
        return found
    try:
        metadata = json.loads(text_of(span.attributes.get("metadata")))
    except (ValueError, RecursionError):
        return ""
    return text_of(metadata.get("langgraph_node")).strip() if isinstance(metadata, dict) else ""


def _service(span: Span) -> str:
    """Name of the service; the default of the SDKs says nothing."""
    name = text_of(span.resource.get("service.name")).strip()
    return "" if name.startswith("unknown_service") else name
