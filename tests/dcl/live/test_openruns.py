from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import any_text, light, make_run, runs, write_model

from dcl.attribution import Attributor
from dcl.errors import ConfigError, TraceError
from dcl.formats import otlp
from dcl.live.alarms import AlarmRules, Event
from dcl.live.openruns import Arrival, Bounds, OpenRuns
from dcl.live.thresholds import StepThresholds
from dcl.runtime import load
from dcl.taxonomy import MODES
from dcl.trajectory import Trajectory, Turn, TurnKind


@pytest.fixture(scope="module")
def attributor(tmp_path_factory: pytest.TempPathFactory) -> Attributor:
    return load(write_model(tmp_path_factory.mktemp("models") / "model"), threads=1)


Row = dict[str, Any]


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Broken:
    """A model that fails on a turn that says so."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.calls = 0

    def encoder(self, windows: Any) -> Any:
        return self.inner.encoder(windows)

    def __call__(self, bags: Any) -> Any:
        return self.inner(bags)

    def score(self, bag: Any, vectors: Any, task: Any) -> Any:
        self.calls += 1
        if len(vectors) > 2:
            raise RuntimeError("out of order")
        return self.inner.score(bag, vectors, task)


def feed(open_runs: OpenRuns, run: Trajectory, *, end: bool = True) -> list[Event]:
    arrivals = [Arrival(run.id, turn, run.task) for turn in run.turns]
    arrivals += [Arrival(run.id, None)] if end else []
    return [event for arrival in arrivals for event in open_runs.take(arrival)]


def test_the_last_word_is_that_of_the_whole_run(attributor: Attributor) -> None:
    run = make_run(("a", "the sum"), ("b", "is wrong"), ("a", "again"), id="r")
    *_, final = feed(OpenRuns(attributor), run)
    assert (final.kind, final.reason, final.turns) == ("final", "ended", 3)
    assert final.findings == attributor(run).findings()
    assert final.findings[0].fault.agent == "b"


@light
@given(said=st.lists(runs(most=5), min_size=1, max_size=4), data=st.data())
def test_runs_that_mix_do_not_disturb_each_other(
    attributor: Attributor, said: list[Trajectory], data: st.DataObject
) -> None:
    said = [Trajectory(f"run {i}", run.task, run.turns) for i, run in enumerate(said)]
    left: dict[str, Iterator[Turn]] = {run.id: iter(run.turns) for run in said}
    task = {run.id: run.task for run in said}
    open_runs, events = OpenRuns(attributor), []
    while left:
        run_id = data.draw(st.sampled_from(sorted(left)))
        turn = next(left[run_id], None)
        events += open_runs.take(Arrival(run_id, turn, task[run_id]))
        if turn is None:
            del left[run_id]
    finals = {event.run_id: event for event in events if event.kind == "final"}
    assert {run.id: attributor(run).findings() for run in said} == {
        run_id: final.findings for run_id, final in finals.items()
    }
    for run in said:
        numbers = [event.number for event in events if event.run_id == run.id]
        assert numbers == list(range(len(numbers)))
    assert (len(open_runs), open_runs.nbytes) == (0, 0)


def test_alarms_are_raised_while_the_run_goes_on(attributor: Attributor) -> None:
    run = make_run(("a", "the sum"), ("b", "wrong"), ("a", "again"), ("a", "again"))
    open_runs = OpenRuns(attributor, rules=AlarmRules(confirm=2))
    (raised, final) = feed(open_runs, run)
    assert (raised.kind, raised.turns, raised.number) == ("raised", 3, 0)
    (finding,) = raised.findings
    assert (finding.fault.agent, finding.fault.mode, finding.turn) == ("b", MODES[5], 1)
    assert (final.kind, final.number) == ("final", 1)
    assert open_runs.counts["raised"] == open_runs.counts["final"] == 1


def test_thresholds_depend_on_the_number_of_turns(attributor: Attributor) -> None:
    run = make_run(("b", "wrong"), ("a", "again"))
    never = StepThresholds(0.1, 20, (0.7, 1.1))
    raised, final = feed(OpenRuns(attributor, rules=AlarmRules(confirm=1), thresholds=never), run)
    assert (raised.kind, raised.threshold, raised.turns) == ("raised", 0.7, 1)
    assert (final.findings, final.threshold) == ((), 1.1)


def test_a_task_that_comes_late_counts_for_every_turn(attributor: Attributor) -> None:
    run = make_run(("a", "the sum 4"), ("b", "is wrong"), task="the sum 4")
    open_runs = OpenRuns(attributor)
    open_runs.take(Arrival(run.id, run.turns[0]))
    open_runs.take(Arrival(run.id, run.turns[1], run.task))
    latest = open_runs.attribution(run.id)
    assert latest is not None
    assert latest.to_dict() == attributor(run).to_dict()


def test_the_run_that_was_silent_longest_makes_room(attributor: Attributor) -> None:
    open_runs = OpenRuns(attributor, bounds=Bounds(runs=2))
    for run_id in ("1", "2", "1"):
        assert open_runs.take(Arrival(run_id, Turn("a", "x"))) == []
    (event,) = open_runs.take(Arrival("3", Turn("a", "x")))
    assert (event.run_id, event.kind, event.reason) == ("2", "final", "evicted")
    assert ("1" in open_runs, "2" in open_runs, "3" in open_runs) == (True, False, True)
    assert open_runs.counts["evicted"] == 1


def test_memory_of_all_runs_is_bounded(attributor: Attributor) -> None:
    bounds = Bounds(total_bytes=50_000, run_bytes=40_000)
    open_runs = OpenRuns(attributor, bounds=bounds)
    events = []
    for i in range(40):
        events += open_runs.take(Arrival(str(i), Turn("a", "x" * 5_000)))
        assert open_runs.nbytes <= 50_000
    assert 0 < len(open_runs) < 20
    assert len(events) == open_runs.counts["evicted"] == 40 - len(open_runs)


def test_a_run_that_is_full_loses_its_further_turns(attributor: Attributor) -> None:
    open_runs = OpenRuns(attributor, bounds=Bounds(turns=2))
    run = make_run(("a", "x"), ("b", "wrong"), ("a", "y"), ("b", "z"))
    *_, final = feed(open_runs, run)
    assert (final.turns, final.missing) == (2, 2)
    assert final.findings == attributor(Trajectory(run.id, run.task, run.turns[:2])).findings()
    assert open_runs.counts["lost_run_full"] == 2
    small = OpenRuns(attributor, bounds=Bounds(run_bytes=3_000))
    *_, final = feed(small, make_run(("a", "x"), ("b", "y" * 5_000)))
    assert (final.turns, final.missing) == (1, 1)


def test_turns_lost_on_the_way_are_told_with_the_run(attributor: Attributor) -> None:
    open_runs = OpenRuns(attributor)
    open_runs.take(Arrival("r", Turn("a", "x"), missing=2))
    (final,) = open_runs.take(Arrival("r", None, missing=1))
    assert final.missing == 3
    assert open_runs.counts["lost_before"] == 3


def test_silent_runs_are_closed(attributor: Attributor) -> None:
    clock = Clock()
    open_runs = OpenRuns(attributor, bounds=Bounds(idle_s=10), clock=clock)
    open_runs.take(Arrival("old", Turn("a", "x")))
    clock.now = 6
    open_runs.take(Arrival("new", Turn("a", "x")))
    assert open_runs.expire() == []
    clock.now = 11
    (event,) = open_runs.expire()
    assert (event.run_id, event.reason) == ("old", "idle")
    clock.now = 16
    assert [event.run_id for event in open_runs.expire()] == ["new"]


def test_the_end_of_an_unknown_run_says_nothing(attributor: Attributor) -> None:
    open_runs = OpenRuns(attributor)
    assert open_runs.take(Arrival("nobody", None)) == []
    assert open_runs.attribution("nobody") is None


def test_an_error_of_the_model_is_counted_and_the_run_goes_on(attributor: Attributor) -> None:
    scorer = Broken(attributor.scorer)
    open_runs = OpenRuns(Attributor(attributor.bagger, scorer, attributor.calibration))
    run = make_run(*[("a", "wrong")] * 9, id="r")
    *_, final = feed(open_runs, run)
    assert (final.kind, final.turns) == ("final", 2)
    assert open_runs.counts["errors"] == 3  # then the run is left alone
    assert scorer.calls == 5
    assert open_runs.last_error == "RuntimeError: out of order"
    assert feed(open_runs, make_run(("a", "x"), id="other"))[-1].turns == 1


def test_another_model_takes_over_with_all_turns(attributor: Attributor, tmp_path: Path) -> None:
    mild = load(write_model(tmp_path / "mild", weight=0.1), threads=1)
    run = make_run(("a", "the sum"), ("b", "is wrong"), ("a", "again"), id="r")
    open_runs = OpenRuns(attributor)
    feed(open_runs, Trajectory("r", run.task, run.turns[:2]), end=False)
    open_runs.use(mild)
    open_runs.take(Arrival("r", run.turns[2]))
    latest = open_runs.attribution("r")
    assert latest is not None
    assert latest.to_dict() == mild(run).to_dict()
    assert latest.to_dict() != attributor(run).to_dict()


def test_after_a_change_of_model_the_last_word_is_that_of_the_new_one(
    attributor: Attributor, tmp_path: Path
) -> None:
    mild = load(write_model(tmp_path / "mild", weight=0.1), threads=1)
    run = make_run(("b", "is wrong"), id="r")
    open_runs = OpenRuns(attributor)
    feed(open_runs, run, end=False)
    open_runs.use(mild)
    (final,) = open_runs.end("r")
    assert final.findings == mild(run).findings()


@light
@given(said=st.lists(runs(most=5), min_size=1, max_size=3), cut=st.integers(0, 5))
def test_saved_runs_go_on_as_if_nothing_had_happened(
    attributor: Attributor, said: list[Trajectory], cut: int
) -> None:
    said = [Trajectory(f"run {i}", run.task, run.turns) for i, run in enumerate(said)]
    whole, first, second = (OpenRuns(attributor) for _ in range(3))
    rest = []
    for run in said:
        expected = feed(whole, run)
        head = [Arrival(run.id, turn, run.task) for turn in run.turns[:cut]]
        told = [event for arrival in head for event in first.take(arrival)]
        rest.append((run, expected[len(told) :]))
    for row in json.loads(json.dumps(list(first.save()))):
        second.restore(row)
    assert len(second) == len(first)
    for run, expected in rest:
        tail = [*(Arrival(run.id, turn, run.task) for turn in run.turns[cut:])]
        got = [event for arrival in tail for event in second.take(arrival)]
        assert got + second.end(run.id) == expected


@light
@given(run_id=any_text.filter(bool), content=any_text, task=any_text, missing=st.integers(0, 9))
def test_an_arrival_reads_back_equal(run_id: str, content: str, task: str, missing: int) -> None:
    turn = Turn("a", content, role="user", kind=TurnKind.TOOL_CALL, step=4, source="s")
    for arrival in (Arrival(run_id, turn, task, missing), Arrival(run_id, None, task, missing)):
        assert Arrival.from_dict(json.loads(json.dumps(arrival.to_dict()))) == arrival


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ([], "expected an object"),
        ({"agent": "a", "content": "x"}, "run"),
        ({"run": "", "agent": "a", "content": "x"}, "run: expected a name"),
        ({"run": "r", "content": "x"}, "agent"),
        ({"run": "r", "agent": "a", "content": 3}, "content"),
        ({"run": "r", "end": False}, "agent"),
    ],
)
def test_an_arrival_is_checked(row: object, match: str) -> None:
    with pytest.raises(TraceError, match=match):
        Arrival.from_dict(row)


@pytest.mark.parametrize(
    "keys",
    [{"runs": 0}, {"turns": -1}, {"idle_s": float("nan")}, {"run_bytes": 9, "total_bytes": 8}],
)
def test_bounds_are_checked(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(keys))):
        Bounds(**keys)


def span(span_id: str, parent: str, start: int, agent: str, said: str, trace: str = "t1") -> Row:
    """One chat span with what the model said."""
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.agent.name": agent,
        "gen_ai.output.messages": json.dumps(
            [{"role": "assistant", "parts": [{"type": "text", "content": said}]}]
        ),
    }
    return {
        "traceId": trace * 16,
        "spanId": span_id * 16,
        "parentSpanId": parent * 16,
        "name": "chat",
        "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(start + 1),
        "attributes": [{"key": k, "value": {"stringValue": v}} for k, v in attributes.items()],
    }


def document(*spans: Row) -> Row:
    return {
        "resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": list(spans)}]}]
    }


def test_spans_in_any_order_are_the_whole_trace(attributor: Attributor) -> None:
    spans = [
        span("1", "", 1, "a", "the sum"),
        span("2", "1", 2, "b", "it is wrong"),
        span("3", "1", 3, "a", "again"),
    ]
    ((trace, whole),) = otlp.split(document(*spans))
    (example,) = otlp.parse(whole, "")
    expected = attributor(example.trajectory).to_dict()
    for order in permutations(spans):
        open_runs = OpenRuns(attributor)
        for each in order:
            open_runs.take(Arrival(trace, None, spans=document(each)))
        restored = OpenRuns(attributor)
        for row in json.loads(json.dumps(list(open_runs.save()))):
            restored.restore(row)
        for runs_now in (open_runs, restored):
            latest = runs_now.attribution(trace)
            assert latest is not None
            assert latest.to_dict() == expected


def test_spans_that_say_nothing_wait_for_others(attributor: Attributor) -> None:
    quiet = {**span("1", "", 1, "a", "x"), "attributes": []}
    open_runs = OpenRuns(attributor)
    assert open_runs.take(Arrival("t", None, spans=document(quiet))) == []
    assert open_runs.attribution("t") is None
    assert open_runs.counts["unreadable"] == 1
    open_runs.take(Arrival("t", None, spans=document(span("2", "1", 2, "b", "wrong"))))
    assert open_runs.attribution("t") is not None


def test_a_document_is_split_into_its_traces() -> None:
    one, two = span("1", "", 1, "a", "x", "t1"), span("2", "", 1, "b", "y", "t2")
    parts = dict(otlp.split(document(one, two)))
    assert parts == {"t1" * 16: document(one), "t2" * 16: document(two)}
    assert otlp.split([]) == []


def test_a_turn_that_comes_again_is_left_out_and_a_gap_is_missing(attributor: Attributor) -> None:
    run = make_run(("a", "the sum"), ("b", "is wrong"), ("a", "again"))
    open_runs = OpenRuns(attributor)
    for at in (0, 1, 1, 0, 2):
        open_runs.take(Arrival(run.id, run.turns[at], run.task, at=at))
    assert open_runs.counts["repeated"] == 2
    latest = open_runs.attribution(run.id)
    assert latest is not None
    assert latest.to_dict() == attributor(run).to_dict()
    open_runs.take(Arrival(run.id, run.turns[0], at=5))
    open_runs.take(Arrival(run.id, run.turns[0], at=6))
    assert open_runs.missing(run.id) == 2
