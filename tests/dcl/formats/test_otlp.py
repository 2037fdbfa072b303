from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dcl.errors import TraceError
from dcl.formats import detect, otlp, read_examples, scan, spantree
from dcl.formats.spans import Span, read_spans
from dcl.formats.spantree import own_name
from dcl.trajectory import Example, TurnKind

Attributes = dict[str, Any]


def typed(value: Any) -> dict[str, Any]:
    """A value as OTLP writes it."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [typed(entry) for entry in value]}}
    if isinstance(value, dict):
        pairs = [{"key": key, "value": typed(entry)} for key, entry in value.items()]
        return {"kvlistValue": {"values": pairs}}
    return {"stringValue": value}


def pairs(attributes: Attributes) -> list[dict[str, Any]]:
    return [{"key": key, "value": typed(value)} for key, value in attributes.items()]


def span(
    number: int, parent: int | None, name: str, attributes: Attributes, **more: Any
) -> dict[str, Any]:
    """A span whose number is its id and its start."""
    start = more.pop("start", number)
    return {
        "traceId": more.pop("trace", "ab" * 16),
        "spanId": f"{number:016x}",
        "parentSpanId": "" if parent is None else f"{parent:016x}",
        "name": name,
        "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(more.pop("end", start + 1)),
        "attributes": pairs(attributes),
        "events": [
            {"name": event, "attributes": pairs(fields)} for event, fields in more.pop("events", [])
        ],
        **more,
    }


def export(*spans: dict[str, Any], service: str = "unknown_service") -> dict[str, Any]:
    resource = {"attributes": pairs({"service.name": service})}
    scope = {"scope": {"name": "test"}, "spans": list(spans)}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


def text(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": content}], **more}


def read(*documents: Any) -> list[tuple[str, str, str]]:
    batch = otlp.Batch("x.json")
    for document in documents:
        assert detect(document) == "otlp"
        batch.add(document)
    (example,) = batch.examples()
    assert isinstance(example, Example)
    return [(turn.agent, turn.kind.value, turn.content) for turn in example.trajectory.turns]


CALL = {"type": "tool_call", "id": "c1", "name": "clock", "arguments": {"zone": "Rome"}}
ANSWER = {"type": "tool_call_response", "id": "c1", "response": "12:00"}
ASKED = text("user", "What time is it?")
CALLED = {"role": "assistant", "parts": [{"type": "reasoning", "content": "A clock."}, CALL]}
ANSWERED = {"role": "tool", "parts": [ANSWER]}
EXPECTED = [
    ("system", "system", "Be exact."),
    ("user", "message", "What time is it?"),
    ("timer", "thought", "A clock."),
    ("timer", "tool_call", 'clock({"zone": "Rome"})'),
    ("clock", "tool_result", "12:00"),
    ("timer", "message", "Noon."),
]
AGENT = span(1, None, "invoke_agent timer", {"gen_ai.operation.name": "invoke_agent"}, end=99)
NESTED = [
    AGENT,
    span(
        2,
        1,
        "chat gpt",
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.system_instructions": [{"type": "text", "content": "Be exact."}],
            "gen_ai.input.messages": [ASKED],
            "gen_ai.output.messages": [CALLED],
        },
    ),
    span(
        3,
        1,
        "execute_tool clock",
        {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": "clock",
            "gen_ai.tool.call.id": "c1",
            "gen_ai.tool.call.arguments": '{"zone":"Rome"}',
            "gen_ai.tool.call.result": "12:00",
        },
    ),
    span(
        4,
        1,
        "chat gpt",
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.input.messages": json.dumps([ASKED, CALLED, ANSWERED]),
            "gen_ai.output.messages": json.dumps([text("assistant", "Noon.")]),
        },
    ),
]
FLAT = [
    span(
        1,
        None,
        "openai.chat",
        {
            "traceloop.entity.name": "timer",
            "gen_ai.prompt.0.role": "system",
            "gen_ai.prompt.0.content": "Be exact.",
            "gen_ai.prompt.1.role": "user",
            "gen_ai.prompt.1.content": "What time is it?",
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.reasoning": "A clock.",
            "gen_ai.completion.0.tool_calls.0.id": "c1",
            "gen_ai.completion.0.tool_calls.0.name": "clock",
            "gen_ai.completion.0.tool_calls.0.arguments": '{"zone": "Rome"}',
        },
    ),
    span(
        2,
        None,
        "openai.chat",
        {
            "traceloop.entity.name": "timer",
            "gen_ai.prompt.0.role": "system",
            "gen_ai.prompt.0.content": "Be exact.",
            "gen_ai.prompt.1.role": "user",
            "gen_ai.prompt.1.content": "What time is it?",
            "gen_ai.prompt.2.role": "assistant",
            "gen_ai.prompt.2.tool_calls.0.id": "c1",
            "gen_ai.prompt.2.tool_calls.0.name": "clock",
            "gen_ai.prompt.2.tool_calls.0.arguments": '{"zone": "Rome"}',
            "gen_ai.prompt.10.role": "tool",
            "gen_ai.prompt.10.tool_call_id": "c1",
            "gen_ai.prompt.10.content": "12:00",
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.content": "Noon.",
        },
    ),
]
EVENTS = [
    span(
        1,
        None,
        "chat",
        {"gen_ai.agent.name": "timer"},
        events=[
            ("gen_ai.system.message", {"content": "Be exact."}),
            ("gen_ai.user.message", {"content": "What time is it?"}),
            (
                "gen_ai.choice",
                {
                    "index": 0,
                    "finish_reason": "tool_calls",
                    "message": {
                        "role": "assistant",
                        "reasoning_content": "A clock.",
                        "tool_calls": [
                            {
                                "id": "c1",
                                "type": "function",
                                "function": {"name": "clock", "arguments": '{"zone": "Rome"}'},
                            }
                        ],
                    },
                },
            ),
        ],
    ),
    span(
        2,
        None,
        "chat",
        {"gen_ai.agent.name": "timer"},
        events=[
            ("gen_ai.user.message", {"content": "What time is it?"}),
            ("gen_ai.tool.message", {"id": "c1", "content": "12:00"}),
            ("gen_ai.choice", {"index": 0, "message": json.dumps({"content": "Noon."})}),
        ],
    ),
]
DETAILS = [
    AGENT,
    *(
        {
            **row,
            "attributes": [],
            "events": [
                {
                    "name": "gen_ai.client.inference.operation.details",
                    "attributes": row["attributes"],
                }
            ],
        }
        for row in (NESTED[1], NESTED[3])
    ),
]
MESSAGES = "llm.{}_messages.{}.message.{}"
PHOENIX = [
    span(1, None, "timer", {"openinference.span.kind": "AGENT", "input.value": "x"}, end=99),
    span(
        2,
        1,
        "ChatOpenAI",
        {
            "openinference.span.kind": "LLM",
            "input.value": "{}",
            MESSAGES.format("input", 0, "role"): "system",
            MESSAGES.format("input", 0, "content"): "Be exact.",
            MESSAGES.format("input", 1, "role"): "user",
            MESSAGES.format("input", 1, "contents.0.message_content.type"): "text",
            MESSAGES.format("input", 1, "contents.0.message_content.text"): "What time is it?",
            MESSAGES.format("output", 0, "role"): "assistant",
            MESSAGES.format("output", 0, "reasoning"): "A clock.",
            MESSAGES.format("output", 0, "tool_calls.0.tool_call.id"): "c1",
            MESSAGES.format("output", 0, "tool_calls.0.tool_call.function.name"): "clock",
            MESSAGES.format("output", 0, "tool_calls.0.tool_call.function.arguments"): (
                '{"zone": "Rome"}'
            ),
        },
    ),
    span(
        3,
        1,
        "clock",
        {
            "openinference.span.kind": "TOOL",
            "tool.name": "clock",
            "input.value": '{"zone": "Rome"}',
            "output.value": "12:00",
        },
    ),
    span(
        4,
        1,
        "ChatOpenAI",
        {
            "openinference.span.kind": "LLM",
            MESSAGES.format("input", 0, "role"): "user",
            MESSAGES.format("input", 0, "content"): "What time is it?",
            MESSAGES.format("output", 0, "role"): "assistant",
            MESSAGES.format("output", 0, "content"): "Noon.",
        },
    ),
]


@pytest.mark.parametrize(
    "spans",
    [NESTED, FLAT, EVENTS, DETAILS, PHOENIX],
    ids=["attributes", "flattened", "events", "details", "openinference"],
)
def test_every_generation_tells_the_same(spans: list[dict[str, Any]]) -> None:
    assert read(export(*spans)) == EXPECTED
    assert read(export(*reversed(spans))) == EXPECTED


def test_a_trace_may_be_spread_over_lines(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    other = span(9, None, "chat", {"gen_ai.output.messages": "Hi."}, trace="cd" * 16)
    lines = [export(row) for row in (*NESTED[1:], other, NESTED[0], NESTED[1])]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"resourceSpans": 1}\n{"a"\n')
    items = list(scan(path))
    errors = [str(item) for item in items if isinstance(item, TraceError)]
    assert errors[0] == f"{path}:7: resourceSpans: expected a list, got a number"
    assert errors[1].startswith(f"{path}:8: expected JSON")
    examples = [item for item in items if isinstance(item, Example)]
    assert [example.trajectory.id for example in examples] == ["ab" * 16, "cd" * 16]
    turns = examples[0].trajectory.turns
    assert [(turn.agent, turn.kind.value, turn.content) for turn in turns] == EXPECTED
    assert examples[0].trajectory.task == "What time is it?"
    assert turns[-1].source == "0000000000000004"


def test_log_records_are_events_of_their_span() -> None:
    bare = [{**row, "events": []} for row in EVENTS]
    records = [
        {
            "spanId": row["spanId"],
            "eventName": event["name"],
            "body": {"kvlistValue": {"values": event["attributes"]}},
        }
        for row in EVENTS
        for event in row["events"]
    ]
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}
    assert read(export(*bare), logs) == EXPECTED


def said(words: str = "Yes.", **attributes: Any) -> Attributes:
    return {"gen_ai.operation.name": "chat", "gen_ai.output.messages": words, **attributes}


@pytest.mark.parametrize(
    ("rows", "service", "agent"),
    [
        ([span(1, None, "chat", said(**{"gen_ai.agent.name": "own"}))], "s", "own"),
        ([AGENT, span(2, 1, "chat", said())], "s", "timer"),
        ([AGENT, span(3, 2, "chat", said()), span(2, 1, "step", {})], "s", "timer"),
        ([AGENT, span(3, 77, "chat", said())], "s", "timer"),
        ([span(1, None, "chat", said(**{"gen_ai.caller.name": "boss"}))], "s", "boss"),
        ([span(1, None, "node", {"graph.node.id": "n"}), span(2, 1, "x", said())], "s", "n"),
        ([span(1, None, "x", said(metadata='{"langgraph_node": "lg"}'))], "s", "lg"),
        ([span(1, None, "chat", said())], "service", "service"),
        ([span(1, None, "chat", said())], "unknown_service", "agent"),
        ([span(1, 2, "chat", said()), span(2, 1, "loop", {})], "unknown_service", "agent"),
    ],
)
def test_climbs_the_ladder_of_names(rows: list[dict[str, Any]], service: str, agent: str) -> None:
    assert read(export(*rows, service=service)) == [(agent, "message", "Yes.")]


def test_a_message_names_its_speaker_unless_the_span_does() -> None:
    named = [text("assistant", "Yes.", name="msg")]
    assert read(export(span(1, None, "x", {"gen_ai.output.messages": named})))[0][0] == "msg"
    own = {"gen_ai.agent.name": "own", "gen_ai.output.messages": named}
    assert read(export(span(1, None, "x", own)))[0][0] == "own"


def test_nested_agents_speak_for_themselves_and_are_not_repeated() -> None:
    inner = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "inner"}
    outer = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "outer",
        "gen_ai.input.messages": [ASKED],
        "gen_ai.output.messages": [text("assistant", "All done.")],
    }
    rows = [
        span(4, 3, "chat", said("Part done.", **{"gen_ai.input.messages": [ASKED]})),
        span(3, 2, "invoke_agent inner", inner | {"gen_ai.output.messages": "Part done."}),
        span(
            5,
            1,
            "chat",
            said("All done.", **{"gen_ai.input.messages": [ASKED, text("user", "Part done.")]}),
        ),
        span(2, 1, "execute_tool ask_inner", {"gen_ai.tool.call.result": "Part done."}, end=5),
        span(1, None, "invoke_agent outer", outer, end=50),
    ]
    assert read(export(*rows)) == [
        ("user", "message", "What time is it?"),
        ("outer", "tool_call", "ask_inner()"),
        ("inner", "message", "Part done."),
        ("ask_inner", "tool_result", "Part done."),
        ("outer", "message", "All done."),
    ]


def test_repeated_words_are_kept_and_repeated_history_is_not() -> None:
    history: list[dict[str, Any]] = []
    rows = []
    for number in range(1, 4):
        history.append(text("user", "Again."))
        told = {"gen_ai.input.messages": list(history), "gen_ai.agent.name": "a"}
        rows.append(span(number, None, "chat", said("Done.", **told)))
        history.append(text("assistant", "Done."))
    assert read(export(*rows)) == [("user", "message", "Again."), ("a", "message", "Done.")] * 3


def test_equal_tool_calls_are_as_many_as_there_were() -> None:
    call = {"type": "tool_call", "name": "go", "arguments": "{}"}
    rows = []
    for number in range(0, 6, 2):
        output = [{"role": "assistant", "parts": [call]}]
        rows.append(span(number + 1, None, "chat", {"gen_ai.output.messages": output}))
        tool = {"gen_ai.tool.call.arguments": "{}", "gen_ai.tool.call.result": "ok"}
        rows.append(span(number + 2, None, "execute_tool go", tool))
    assert [turn[1:] for turn in read(export(*rows))] == [
        ("tool_call", "go({})"),
        ("tool_result", "ok"),
    ] * 3


def test_cut_json_keeps_its_text() -> None:
    told = json.dumps([ASKED, text("user", "x" * 50)])[:-20]
    rows = [span(1, None, "chat", said(**{"gen_ai.input.messages": told}))]
    turns = read(export(*rows, *[{**rows[0], "spanId": "ff"}]))
    assert turns[0] == ("user", "message", "What time is it?")
    assert turns[1][2].startswith('{"role": "user", "parts": [{"type": "text"')
    assert len(turns) == 4


def test_errors_are_told_once() -> None:
    failed = {"status": {"code": 2, "message": "rate limit"}}
    rows = [
        span(1, None, "invoke_agent a", {}, end=9, **failed),
        span(2, 1, "chat", said(**{"gen_ai.output.messages": "Hm."}), **failed),
        span(
            3,
            1,
            "execute_tool t",
            {},
            status={"code": 2},
            events=[("exception", {"exception.message": "boom"})],
        ),
    ]
    (example,) = otlp.parse(export(*rows), "x.json")
    assert [turn.content for turn in example.trajectory.turns] == [
        "Hm.\nerror: rate limit",
        "t()",
        "error: boom",
    ]
    assert example.trajectory.outcome == "failure"


def test_handoffs_are_told() -> None:
    rows = [span(1, None, "execute_tool move", {"gen_ai.transfer.target.name": "writer"})]
    assert read(export(*rows))[-1] == ("agent", "handoff", "transfer to writer")


def test_attributes_keep_their_types() -> None:
    attributes = {"n": 3, "b": True, "f": 0.5, "l": ["x", 1], "o": {"k": False}}
    row = export(span(1, None, "chat", said()))
    row["resourceSpans"][0]["resource"]["attributes"] = pairs(attributes)
    (example,) = otlp.parse(row, "x.json")
    assert example.trajectory.metadata["resource"] == attributes


def test_reads_rows_of_phoenix_and_of_sdks() -> None:
    phoenix = {
        "id": "U3Bhbg==",
        "name": "llm",
        "context": {"trace_id": "t1", "span_id": "s1"},
        "span_kind": "LLM",
        "parent_id": None,
        "start_time": "2026-01-01T00:00:00.123456789Z",
        "end_time": "2026-01-01T00:00:01Z",
        "status_code": "ERROR",
        "status_message": "late",
        "attributes": {
            "llm": {"output_messages": [{"message": {"role": "assistant", "content": "A"}}]}
        },
    }
    sdk = {
        "name": "chat",
        "context": {"trace_id": "0xab", "span_id": "0x02"},
        "parent_id": "0x01",
        "start_time": "2026-01-01T00:00:00Z",
        "attributes": said("B"),
    }
    assert read(phoenix) == [("agent", "message", "A\nerror: late")]
    assert read({"data": [phoenix], "next_cursor": None}) == read(phoenix) == read([phoenix])
    assert read(sdk) == [("agent", "message", "B")]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"resourceSpans": []}, "expected spans with messages, inputs or outputs, got 0 spans"),
        ({"spans": []}, "got 0 spans"),
        ({"resourceSpans": [1]}, r"resourceSpans\[0\]: expected an object, got a number"),
        (
            {"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "x"}]}]}]},
            r"resourceSpans\[0\]\.scopeSpans\[0\]\.spans\[0\]: expected a span with a span id",
        ),
        (export(span(1, None, "GET /", {"http.method": "GET"})), r"got 1 spans without \(GET /\)"),
    ],
)
def test_says_what_is_wrong(document: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        otlp.parse(document, "x.json")


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("AGNO", 7),
        ("GOOGLE", 8),
        ("LANGCHAIN", 8),
        ("LLAMA_INDEX", 13),
        ("OPENAI", 7),
        ("SMOLAGENTS", 8),
        ("TINYAGENT", 9),
    ],
)
def test_reads_the_real_exports(data_dir: Path, name: str, turns: int) -> None:
    (example,) = read_examples(data_dir / "traces" / f"any-agent_{name}_trace.json")
    run = example.trajectory
    assert len(run.turns) == turns
    assert run.agents[:3] == ("system", "user", "any_agent")
    assert "Find what year it is" in run.task
    assert "final_output" in run.metadata
    for before, after in pairwise(run.turns):
        assert after.kind is not TurnKind.TOOL_RESULT or before.kind is TurnKind.TOOL_CALL


@pytest.mark.data
def test_reads_a_real_file_that_follows_no_convention(data_dir: Path) -> None:
    for item in read_examples(data_dir / "traces" / "dazzaji_test-traces.json"):
        assert item.trajectory.agents == ("Agento-Module-1",)
        assert item.trajectory.turns[0].content.startswith("test_span\ntest_attribute: small value")


def test_attributes_of_the_conventions_are_no_text(tmp_path: Path) -> None:
    attributes = [{"key": "gen_ai.request.model", "value": {"stringValue": "small"}}]
    span = {"traceId": "a" * 32, "spanId": "b" * 16, "name": "chat", "attributes": attributes}
    path = tmp_path / "silent.json"
    path.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}))
    (item,) = scan(path)
    assert isinstance(item, TraceError)
    assert "was content capture switched off?" in str(item)


def test_a_trace_that_is_nested_too_deep_costs_only_itself() -> None:
    bad, good = "ba" * 16, "ab" * 16
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    spans = [span(1, None, "chat", {}, trace=bad), span(2, None, "chat", said(), trace=good)]
    spans[0]["attributes"] = [{"key": "output.value", "value": deep}]
    batch = otlp.Batch("x.json")
    batch.add(export(*spans))
    first, second = batch.examples()
    assert isinstance(first, TraceError)
    assert str(first) == f"trace {bad}: expected JSON of a usual depth, got deeper nesting"
    assert isinstance(second, Example)
    with pytest.raises(TraceError, match="deeper nesting"):
        otlp.parse(export(*spans), "x.json")


def test_numbers_inside_texts_are_finite_or_null() -> None:
    messages = '[{"role": "assistant", "parts": [{"type": "tool_call", "name": "f", "arguments": '
    messages += '{"a": 1e999, "b": NaN, "c": -Infinity, "d": 1.5}}]}]'
    rows = [span(1, None, "chat", {"gen_ai.output.messages": messages})]
    assert read(export(*rows)) == [
        ("agent", "tool_call", 'f({"a": null, "b": null, "c": null, "d": 1.5})')
    ]


def test_a_chain_of_thousands_of_spans_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Counter[str]()

    def count(span: Span) -> str:
        looked[span.id] += 1
        return own_name(span)

    monkeypatch.setattr(spantree, "own_name", count)
    failed = {"status": {"code": 2, "message": "boom"}}
    rows = [span(1, None, "invoke_agent a", {"gen_ai.agent.name": "a"}, **failed)]
    rows += [span(i, i - 1, "step", {"metadata": "{}"}, **failed) for i in range(2, 5000)]
    rows.append(span(5000, 4999, "chat", said(), end=9000, **failed))
    turns = read(export(*rows[::-1]))
    assert {agent for agent, kind, _ in turns if kind == "message"} == {"a"}
    assert sum("error: boom" in content for _, _, content in turns) == 1
    assert max(looked.values()) < 5


def test_spans_in_a_loop_are_cut_once() -> None:
    rows = [span(i, i % 3 + 1, "chat", said(), start=i) for i in (1, 2, 3)]
    tree = spantree.SpanTree(list(read_spans(export(*rows))))
    assert [span.start for span in tree.downward] == [3, 2, 1]
    assert [span.start for span in tree.roots] == [3]
    assert [tree.extent(span) for span in tree.downward] == [(0, 2), (1, 2), (2, 2)]
    assert [tree.start(span) for span in tree.downward] == [(3, 0, 2), (3, 1, 1), (3, 2, 0)]
