"""Judge whatever writes GenAI spans; findings come back as `gen_ai.evaluation.result` events.

pip install 'dcl-attribution[otel]'
python examples/watch_opentelemetry.py
"""

from __future__ import annotations

import json
from typing import Any

from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import ConsoleLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider

from dcl.plugs.evaluations import Evaluations
from dcl.plugs.opentelemetry import MonitorSpanProcessor

# Instead of the console: the exporter of your backend.
logs = LoggerProvider()
logs.add_log_record_processor(SimpleLogRecordProcessor(ConsoleLogRecordExporter()))
spans = TracerProvider()
spans.add_span_processor(MonitorSpanProcessor(on_event=Evaluations(logs)))
tracer = spans.get_tracer("team")


def chat(told: str, answer: str) -> None:
    """What an instrumented client writes for a call of a model."""
    attributes: dict[str, Any] = {"gen_ai.operation.name": "chat"}
    for key, role, text in (("input", "user", told), ("output", "assistant", answer)):
        part = {"type": "text", "content": text}
        attributes[f"gen_ai.{key}.messages"] = json.dumps([{"role": role, "parts": [part]}])
    tracer.start_span("chat scripted", attributes=attributes).end()


def agent(name: str) -> Any:
    """What an instrumented framework writes around the work of an agent."""
    attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
    return tracer.start_as_current_span(f"invoke_agent {name}", attributes=attributes)


TASK = "Write parse_duration(text): '1h30m' gives 5400. All tests must pass."
TESTED = {
    "gen_ai.operation.name": "execute_tool",
    "gen_ai.tool.name": "run_tests",
    "gen_ai.tool.call.result": "1 failed: parse_duration('') did not raise ValueError",
}
with tracer.start_as_current_span("invoke_workflow team"):
    with agent("planner"):
        chat(TASK, "The coder writes parse_duration, then runs the tests.")
    with agent("coder"):
        tracer.start_span("execute_tool run_tests", attributes=TESTED).end()
        chat(TASK, "One test fails, but parse_duration stays as it is. I am done.")
spans.shutdown()  # waits for the last word, as at the end of every program
logs.shutdown()
