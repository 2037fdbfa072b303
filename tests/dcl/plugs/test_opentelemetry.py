from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from spy import Spy, attributor, run_example, without

pytest.importorskip("opentelemetry.sdk", reason="needs the OpenTelemetry SDK")

from opentelemetry._logs import LogRecord
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Status, StatusCode

from dcl.attribution import Finding
from dcl.formats import read_trajectories
from dcl.live.alarms import Event
from dcl.live.monitor import Monitor, QueueBounds
from dcl.plugs.evaluations import Evaluations
from dcl.plugs.opentelemetry import MonitorLogProcessor, MonitorSpanProcessor
from dcl.taxonomy import ErrorMode
from dcl.trajectory import Fault, Trajectory

TASK = "Add 2 and 2."


class Program:
    """A program with traces and logs, whose exporters keep everything."""

    def __init__(self, monitor: Monitor | None) -> None:
        self.tracers, self.loggers = TracerProvider(), LoggerProvider()
        self.spans = InMemorySpanExporter()
        self.logs = InMemoryLogRecordExporter()  # type: ignore[no-untyped-call]
        self.tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        self.loggers.add_log_record_processor(SimpleLogRecordProcessor(self.logs))
        self.tracer = self.tracers.get_tracer("program")
        if monitor is not None:
            self.processor = MonitorSpanProcessor(monitor)
            self.tracers.add_span_processor(self.processor)

    def span(self, name: str, **attributes: Any) -> Any:
        named = {key.replace("__", "."): value for key, value in attributes.items()}
        return self.tracer.start_as_current_span(name, attributes=named)

    def agent(self, name: str) -> Any:
        named = {"gen_ai__operation__name": "invoke_agent", "gen_ai__agent__name": name}
        return self.span(f"invoke_agent {name}", **named)

    def chat(self, told: list[tuple[str, str]], answer: str) -> None:
        messages = {
            "gen_ai__input__messages": json.dumps([message(*each) for each in told]),
            "gen_ai__output__messages": json.dumps([message("assistant", answer)]),
        }
        with self.span("chat m", gen_ai__operation__name="chat", **messages):
            pass

    def offline(self, folder: Path) -> list[Trajectory]:
        """The traces as `dcl attribute` reads what the SDK exports."""
        file = folder / "spans.jsonl"
        rows = [span.to_json(indent=None) for span in self.spans.get_finished_spans()]
        file.write_text("\n".join(rows))
        return list(read_trajectories(file))


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


@pytest.fixture
def program(spy: Spy) -> Iterator[Program]:
    found = Program(spy)
    yield found
    found.tracers.shutdown()


def team(program: Program, text: str = "It is 5.") -> None:
    """Two agents and a tool, inside of spans of other things."""
    tool = {"gen_ai__operation__name": "execute_tool", "gen_ai__tool__name": "add"}
    tool |= {"gen_ai__tool__call__arguments": '{"a": 2}', "gen_ai__tool__call__result": "4"}
    with program.span("POST /ask"):
        with program.agent("planner"), program.span("http"):
            program.chat([("user", TASK)], "The solver adds.")
        with program.agent("solver"):
            with program.span("execute_tool add", **tool), program.span("SELECT 4"):
                pass
            program.chat([("user", TASK), ("assistant", "The solver adds.")], text)


def test_the_last_word_is_that_on_the_export(spy: Spy, program: Program, tmp_path: Path) -> None:
    team(program)
    ((run_id, final),) = spy.finals().items()
    (run,) = program.offline(tmp_path)
    assert run_id == run.id
    assert run.agents == ("user", "planner", "solver", "add")
    assert [turn.content for turn in run.turns] == [
        TASK, "The solver adds.", 'add({"a": 2})', "4", "It is 5.",
    ]  # fmt: skip
    assert final.findings == attributor()(run).findings()
    assert final.findings
    assert final.sources == tuple(run.turns[f.turn].source for f in final.findings)
    assert (final.reason, final.outcome, final.turns) == ("ended", None, 5)


def test_agents_have_their_names_before_their_spans_end(spy: Spy, program: Program) -> None:
    with program.agent("planner"), program.span("http"):
        program.chat([("user", TASK)], "The solver adds.")
        (run_id,) = spy.spans
        look = spy.look(run_id)
        assert look is not None
        attribution = look.result().attribution
        assert attribution is not None
        assert attribution.agents == ("user", "planner")


def test_traces_of_other_things_cost_no_run(spy: Spy, program: Program) -> None:
    with program.span("GET /health", http__route="/health"), program.span("SELECT 1"):
        pass
    assert not spy.spans
    assert not spy.finals()


def test_traces_side_by_side_are_kept_apart(spy: Spy, program: Program, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: team(program, f"It is {i}."), range(8)))
    finals = spy.finals()
    runs = {run.id: run for run in program.offline(tmp_path)}
    assert finals.keys() == runs.keys()
    for run_id, run in runs.items():
        assert finals[run_id].findings == attributor()(run).findings()
        assert len(run.turns) == 5


def test_an_error_at_the_root_is_a_failure(spy: Spy, program: Program, tmp_path: Path) -> None:
    def work() -> None:
        with program.agent("solver"):
            program.chat([("user", TASK)], "5")
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        work()
    (final,) = spy.finals().values()
    assert final.outcome == "failure"
    (run,) = program.offline(tmp_path)
    assert run.turns[-1].content.endswith("error: ValueError: no")
    assert final.findings == attributor()(run).findings()


def test_events_of_spans_and_flattened_attributes_are_read(
    spy: Spy, program: Program, tmp_path: Path
) -> None:
    """The first generation of the conventions, and that of OpenLLMetry and of OpenInference."""
    with program.agent("planner"):
        with program.span("chat m", gen_ai__operation__name="chat") as span:
            span.add_event("gen_ai.user.message", {"content": TASK})
            span.add_event("gen_ai.choice", {"message": json.dumps({"content": "Add."})})
        flat = {"gen_ai__completion__0__role": "assistant", "gen_ai__completion__0__content": "4"}
        with program.span("openai.chat", gen_ai__system="openai", **flat):
            pass
        key = "llm__output_messages__0__message__"
        inference = {f"{key}role": "assistant", f"{key}content": "5"}
        with program.span("ChatOpenAI", openinference__span__kind="LLM", **inference):
            pass
    (run,) = program.offline(tmp_path)
    assert [turn.content for turn in run.turns] == [TASK, "Add.", "4", "5"]
    (final,) = spy.finals().values()
    assert final.findings == attributor()(run).findings()


def test_content_that_is_logged_beside_the_span_is_read(spy: Spy, program: Program) -> None:
    program.loggers.add_log_record_processor(MonitorLogProcessor(program.processor))
    logger = program.loggers.get_logger("instrumentation")
    with program.agent("planner"), program.span("chat m", gen_ai__operation__name="chat"):
        logger.emit(LogRecord(event_name="gen_ai.user.message", body={"content": TASK}))
        choice: Any = {"index": 0, "message": {"role": "assistant", "content": "It is 5."}}
        logger.emit(LogRecord(event_name="gen_ai.choice", body=choice))
        logger.emit(LogRecord(body="something else"))
    logger.emit(LogRecord(event_name="gen_ai.user.message", body={"content": "no span"}))
    (final,) = spy.finals().values()
    assert final.turns == 2
    assert {finding.fault.agent for finding in final.findings} == {"planner"}


def test_a_full_queue_loses_no_span(program: Program) -> None:
    hold, inner = threading.Event(), attributor()
    hold.set()

    class Slow:
        def __call__(self, bags: Any) -> Any:
            return inner.scorer(bags)

        def encoder(self, windows: Any) -> Any:
            hold.wait()
            scorer: Any = inner.scorer
            return scorer.encoder(windows)

        def score(self, *args: Any) -> Any:
            scorer: Any = inner.scorer
            return scorer.score(*args)

    def load() -> Any:
        return type(inner)(inner.bagger, Slow(), inner.calibration)

    with Monitor(load, queue=QueueBounds(turns=2)) as monitor:
        own = Program(monitor)
        hold.clear()
        with own.agent("solver"):
            for i in range(6):
                own.chat([("user", TASK)], f"It is {i}.")
            assert monitor.stats()["refused_full"] > 0
            hold.set()
            monitor.flush()
            own.chat([("user", TASK)], "It is 7.")
            monitor.flush()
        monitor.flush()
        (final,) = (event for event in monitor.events(wait=False) if event.kind == "final")
        assert final.turns == 8


def test_hidden_content_is_said_once(
    spy: Spy, program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with program.agent("solver"), program.span("chat m", gen_ai__operation__name="chat"):
            pass
    assert [r.getMessage() for r in caplog.records if r.name == "dcl.plugs"] == [
        "spans of models hold no messages: is the capture of content off?"
    ]
    assert not spy.finals()


FINDINGS = (Finding(Fault("coder", ErrorMode.FM_2_5, 1), 1, 0.75), Finding(Fault("b"), 2, 0.5))


def final(run_id: str, source: str) -> Event:
    return Event(run_id, 0, "final", 3, FINDINGS, None, 1, "ended", (source, ""), "failure")


def test_findings_become_events_in_the_context_of_the_span() -> None:
    program = Program(None)
    then: list[Event] = []
    write = Evaluations(program.loggers, tracer_provider=program.tracers, then=then.append)
    said = final("ab" * 16, "cd" * 8)
    write(Event("ab" * 16, 0, "raised", 3, FINDINGS, None, 0))
    write(said)
    assert [event.kind for event in then] == ["raised", "final"]
    first, second = (entry.log_record for entry in program.logs.get_finished_logs())
    assert (first.event_name, first.trace_id, first.span_id) == (
        "gen_ai.evaluation.result", int("ab" * 16, 16), int("cd" * 8, 16),
    )  # fmt: skip
    assert dict(first.attributes or {}) == {
        "gen_ai.evaluation.name": "failure_attribution",
        "gen_ai.evaluation.score.value": 0.75,
        "gen_ai.evaluation.score.label": "FM-2.5",
        "gen_ai.evaluation.explanation": f"coder: {ErrorMode.FM_2_5.title}, turn 1",
        "gen_ai.agent.name": "coder",
        "dcl.run": "ab" * 16, "dcl.turn": 1, "dcl.turns": 3, "dcl.missing": 1,
        "dcl.outcome": "failure",
    }  # fmt: skip
    assert (second.span_id, (second.attributes or {})["gen_ai.evaluation.score.label"]) == (
        0, "failed",
    )  # fmt: skip
    below, _ = program.spans.get_finished_spans()
    assert below.parent is not None
    assert (below.name, below.parent.span_id) == (
        "evaluate failure_attribution", int("cd" * 8, 16),
    )  # fmt: skip
    assert [event.name for event in below.events] == ["gen_ai.evaluation.result"]


def test_findings_on_runs_that_are_no_traces_are_written_too() -> None:
    program = Program(None)
    Evaluations(program.loggers)(final("run 1", "step 1"))
    assert [entry.log_record.trace_id for entry in program.logs.get_finished_logs()] == [0, 0]


def test_evaluations_are_not_judged_themselves(spy: Spy, program: Program) -> None:
    Evaluations(program.loggers, tracer_provider=program.tracers)(final("ab" * 16, "cd" * 8))
    assert not spy.spans


def test_what_is_no_span_is_counted_and_not_raised(spy: Spy, program: Program) -> None:
    odd: Any = object()
    program.processor.on_start(odd)
    assert spy.stats()["refused_malformed"] == 1
    spy._counts.clear()  # as this test expects it


def test_values_that_are_no_json_are_read(spy: Spy, program: Program) -> None:
    odd = {"bytes": b"\xff", "list": (1, 2.5, True), "input.value": "Add.", "output.value": "5"}
    with program.agent("solver"):
        span = program.tracer.start_span("ask", attributes=odd)
        span.set_status(Status(StatusCode.ERROR))
        span.end()
    (final,) = spy.finals().values()
    assert final.turns == 2


def test_the_processor_of_a_program_without_logs_says_it_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracers = TracerProvider()
    tracers.add_span_processor(MonitorSpanProcessor())
    tracer = tracers.get_tracer("program")
    caplog.set_level(logging.INFO, "dcl.plugs")
    attributes: Any = {"gen_ai.agent.name": "solver", "output.value": "It is 5."}
    tracer.start_span("invoke_agent solver", attributes=attributes).end()
    tracers.shutdown()
    assert any(" final: " in record.getMessage() for record in caplog.records)


def test_without_the_framework_the_remedy_is_named() -> None:
    said = without("opentelemetry", "dcl.plugs.opentelemetry")
    assert "pip install 'dcl-attribution[otel]'" in said


def test_the_example_runs() -> None:
    assert "gen_ai.evaluation.result" in run_example("watch_opentelemetry.py")
