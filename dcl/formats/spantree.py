"""The tree of one trace: which span comes when, and which agent it belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dcl.formats.genai import kind_of_span
from dcl.formats.messages import text_of
from dcl.formats.spans import Span
from dcl.trajectory import DECODER

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

    Every question takes the same time however deep the spans are nested.

    Args:
        spans: In file order.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self._position = {span.id: i for i, span in enumerate(spans)}
        self._parents: dict[str, Span | None] = {}
        self.downward = self._link()
        """The spans, parents before their children."""
        self.roots = [span for span in spans if self._parents[span.id] is None]
        self._starts: dict[str, tuple[int, int]] = {}  # time, depth
        self._names: dict[str, tuple[str, str]] = {}  # by agent, by framework
        for span in self.downward:
            above = self._parents[span.id]
            time, depth = (span.start, -1) if above is None else self._starts[above.id]
            agent, framework = ("", "") if above is None else self._names[above.id]
            self._starts[span.id] = max(span.start, time), depth + 1
            self._names[span.id] = _label(span) or agent, _framework(span) or framework
        self._extents = self._measure()
        agents = {_label(span) for span in spans} - {""}
        self._only_agent = agents.pop() if len(agents) == 1 else ""

    def above(self, span: Span) -> Span | None:
        """The parent; None for a root."""
        return self._parents[span.id]

    def extent(self, span: Span) -> tuple[int, int]:
        """Place of a span and of the last one below it, if all are counted depth first."""
        return self._extents[span.id]

    def start(self, span: Span) -> tuple[int, int, int]:
        """Sort key: time, depth, file order. No span starts before its parents do."""
        return *self._starts[span.id], self._position[span.id]

    def start_by_depth(self, span: Span) -> tuple[int, int]:
        """Sort key: depth, time."""
        time, depth = self._starts[span.id]
        return depth, time

    def owner(self, span: Span) -> str:
        """The agent at work in a span.

        From the surest sign to the weakest: the nearest span, itself included, that names its
        agent; the only agent of the trace, as parents are often missing; the caller; keys of
        frameworks; the service.
        """
        named, framework = self._names[span.id]
        return (
            named
            or self._only_agent
            or text_of(span.attributes.get("gen_ai.caller.name")).strip()
            or framework
            or _service(span)
            or "agent"
        )

    def _link(self) -> list[Span]:
        """Find the parents; gives the spans, parents before their children."""
        by_id = {span.id: span for span in self.spans}
        downward: list[Span] = []
        for span in self.spans:
            path: list[Span] = []
            node: Span | None = span
            while node is not None and node.id not in self._parents:
                path.append(node)
                above = self._parents[node.id] = by_id.get(node.parent)
                node = above
            if any(node is below for below in path):  # a loop
                self._parents[path[-1].id] = None
            downward += reversed(path)
        return downward

    def _measure(self) -> dict[str, tuple[int, int]]:
        """First and last place of each span and those below it, counted depth first."""
        sizes = Counter({span.id: 1 for span in self.spans})
        for span in reversed(self.downward):
            if (above := self._parents[span.id]) is not None:
                sizes[above.id] += sizes[span.id]
        extents: dict[str, tuple[int, int]] = {}
        free: Counter[str] = Counter()  # next place below each span; that of the roots is ""
        for span in self.downward:
            above = self._parents[span.id]
            holder = "" if above is None else above.id
            first = free[holder]
            extents[span.id] = first, first + sizes[span.id] - 1
            free[holder] += sizes[span.id]
            free[span.id] = first + 1
        return extents


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
        metadata = DECODER.decode(text_of(span.attributes.get("metadata")))
    except (ValueError, RecursionError):
        return ""
    return text_of(metadata.get("langgraph_node")).strip() if isinstance(metadata, dict) else ""


def _service(span: Span) -> str:
    """Name of the service; the default of the SDKs says nothing."""
    name = text_of(span.resource.get("service.name")).strip()
    return "" if name.startswith("unknown_service") else name
