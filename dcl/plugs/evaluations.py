"""Findings written back to OpenTelemetry, as the GenAI conventions have evaluations.

Source: https://github.com/open-telemetry/semantic-conventions-genai, event
`gen_ai.evaluation.result`, in development.
"""

from __future__ import annotations

import re
from time import time_ns

import dcl
from dcl.attribution import Finding
from dcl.live.alarms import Event
from dcl.plugs.recorder import OnEvent, lacks

try:
    from opentelemetry import trace as api
    from opentelemetry._logs import LoggerProvider, LogRecord, SeverityNumber, get_logger_provider
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanContext, TraceFlags, TracerProvider
    from opentelemetry.util.types import AnyValue
except ImportError as error:
    raise lacks(__name__, "otel", error) from error

EVENT = "gen_ai.evaluation.result"
SCHEMA = "https://opentelemetry.io/schemas/gen-ai/1.42.0"
SCOPE = "dcl"
"""Name of what writes; its own spans are not judged."""
NAME = "failure_attribution"
"""Value of `gen_ai.evaluation.name`."""


class Evaluations:
    """Writes the findings of a run that has ended as `gen_ai.evaluation.result` events.

    Each is a log record in the context of the span that is blamed. Give it as `on_event`; it
    serves every plug, but only runs of spans have a span to blame.

    Args:
        logger_provider: Where log records go; None takes the global one.
        tracer_provider: Where each finding goes as a span as well, below the one that is blamed and
            with the event in it, for backends that show no log records. None writes none.
        then: Called with every event after that.
    """

    def __init__(
        self,
        logger_provider: LoggerProvider | None = None,
        *,
        tracer_provider: TracerProvider | None = None,
        then: OnEvent | None = None,
    ) -> None:
        provider = logger_provider or get_logger_provider()
        self._logger = provider.get_logger(SCOPE, dcl.__version__, SCHEMA)
        self._tracer = None
        if tracer_provider is not None:
            self._tracer = tracer_provider.get_tracer(SCOPE, dcl.__version__, schema_url=SCHEMA)
        self._then = then

    def __call__(self, event: Event) -> None:
        """Write what an event says.

        Args:
            event: Of a monitor; only a final one is written, as nothing can be taken back.
        """
        if event.kind == "final":
            sources = event.sources or ("",) * len(event.findings)
            for finding, source in zip(event.findings, sources, strict=True):
                self._write(event, finding, _context(event.run_id, source))
        if self._then is not None:
            self._then(event)

    def _write(self, event: Event, finding: Finding, context: Context) -> None:
        """One finding."""
        mode = finding.fault.mode
        what = "Failed" if mode is None else mode.title
        attributes: dict[str, AnyValue] = {
            "gen_ai.evaluation.name": NAME,
            "gen_ai.evaluation.score.value": finding.prob,
            "gen_ai.evaluation.score.label": "failed" if mode is None else mode.value,
            "gen_ai.evaluation.explanation": f"{finding.fault.agent}: {what}, turn {finding.turn}",
            "gen_ai.agent.name": finding.fault.agent,
            "dcl.run": event.run_id,
            "dcl.turn": finding.turn,
            "dcl.turns": event.turns,
            "dcl.missing": event.missing,
        }
        if event.outcome is not None:
            attributes["dcl.outcome"] = event.outcome
        self._logger.emit(
            LogRecord(
                timestamp=time_ns(),
                context=context,
                severity_number=SeverityNumber.INFO,
                event_name=EVENT,
                attributes=attributes,
            )
        )
        if self._tracer is not None:
            span = self._tracer.start_span(f"evaluate {NAME}", context)
            span.add_event(EVENT, attributes)
            span.end()


def _context(run_id: str, source: str) -> Context:
    """The context of a span; an empty one if the run is no trace."""
    if not re.fullmatch("[0-9a-f]{32}", run_id) or not re.fullmatch("[0-9a-f]{16}", source):
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED)
    blamed = SpanContext(int(run_id, 16), int(source, 16), is_remote=True, trace_flags=flags)
    return api.set_span_in_context(api.NonRecordingSpan(blamed), Context())
