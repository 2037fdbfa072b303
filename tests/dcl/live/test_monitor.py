from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fake_model
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import any_text, light, make_run, runs, write_model

import dcl
from dcl.attribution import Attributor
from dcl.errors import ArtifactError, ConfigError
from dcl.live.aio import AsyncMonitor
from dcl.live.alarms import AlarmRules, Event
from dcl.live.monitor import Monitor, QueueBounds
from dcl.live.openruns import Arrival, Bounds
from dcl.runtime import load
from dcl.trajectory import Trajectory, Turn

Load = Callable[[], Attributor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Load:
    return partial(load, write_model(tmp_path_factory.mktemp("models") / "model"), threads=1)


class Gate:
    """A model that waits for a test to open it."""

    def __init__(self, model: Load) -> None:
        self.inner = model()
        self.open = threading.Event()
        self.open.set()  # for the turn that warms it up
        self.reached = threading.Event()

    def load(self) -> Attributor:
        return Attributor(self.inner.bagger, self, self.inner.calibration)

    def shut(self) -> None:
        self.open.clear()
        self.reached.clear()

    def __call__(self, bags: Any) -> Any:
        return self.inner.scorer(bags)

    def encoder(self, windows: Any) -> Any:
        scorer: Any = self.inner.scorer
        return scorer.encoder(windows)

    def score(self, *args: Any) -> Any:
        self.reached.set()
        self.open.wait()
        scorer: Any = self.inner.scorer
        return scorer.score(*args)


def drain(monitor: Monitor) -> list[Event]:
    monitor.flush()
    return list(monitor.events(wait=False))


RUN = make_run(("a", "the sum"), ("b", "is wrong"), ("a", "again"), ("a", "and again"), id="r")


def test_what_is_said_of_a_run_while_it_goes_on(model: Load) -> None:
    with Monitor(model) as monitor:
        for turn in RUN.turns:
            assert monitor.ingest(RUN.id, turn, task=RUN.task)
        (raised,) = drain(monitor)
        assert (raised.kind, raised.findings[0].fault.agent, raised.turns) == ("raised", "b", 3)
        assert monitor.end(RUN.id)
        (final,) = drain(monitor)
    assert final.findings == model()(RUN).findings()
    assert monitor.stats()["taken"] == 5
    assert list(monitor.events()) == []


def test_the_package_exports_it() -> None:
    assert dcl.Monitor is Monitor


@light
@given(said=st.lists(runs(most=4), min_size=1, max_size=3))
def test_findings_are_those_of_whole_runs(model: Load, said: list[Trajectory]) -> None:
    said = [Trajectory(f"run {i}", run.task, run.turns) for i, run in enumerate(said)]
    attributor = model()
    with Monitor(lambda: attributor) as monitor:
        for t in range(4):
            for run in said:
                if t < len(run.turns):
                    assert monitor.ingest(run.id, run.turns[t].to_dict(), task=run.task)
        for run in said:
            monitor.end(run.id)
    finals = {event.run_id: event.findings for event in monitor.events() if event.kind == "final"}
    assert finals == {run.id: attributor(run).findings() for run in said}


odd = st.one_of(any_text, st.none(), st.integers(), st.lists(st.none()))
keys = st.sampled_from(["agent", "content", "kind", "step", "x"])


@light
@given(run_id=odd, turn=st.one_of(odd, st.dictionaries(keys, odd)))
def test_nothing_that_is_ingested_raises(model: Load, run_id: Any, turn: Any) -> None:
    attributor = model()
    with Monitor(lambda: attributor) as monitor:
        taken = monitor.ingest(run_id, turn)
        assert monitor.ingest("r", Turn("a", "x"))
        monitor.flush()
        stats = monitor.stats()
        assert stats.get("refused_malformed", 0) == (not taken)
        assert stats["turns"] == 1 + taken
        assert not stats.get("worker_errors")


@pytest.mark.parametrize(
    "turn",
    [
        Turn("", "x"), Turn("a", None), Turn(3, "x"), Turn("a", "x", kind="message"),  # type: ignore[arg-type]
        Turn("a", "x", step="y"), {"agent": "a"}, object(),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_malformed_turn_is_refused_and_its_run_says_so(model: Load, turn: Any) -> None:
    with Monitor(model) as monitor:
        assert not monitor.ingest("r", turn)
        assert monitor.ingest("r", Turn("a", "x"))
        monitor.end("r")
        (final,) = drain(monitor)
        assert (final.turns, final.missing) == (1, 1)
        assert monitor.stats()["refused_malformed"] == 1


def test_a_full_queue_refuses_and_counts(model: Load) -> None:
    gate = Gate(model)
    with Monitor(gate.load, queue=QueueBounds(turns=3)) as monitor:
        gate.shut()
        monitor.ingest("r", Turn("a", "x"))
        gate.reached.wait()  # the worker holds the first turn
        assert [monitor.ingest("r", Turn("a", "x")) for _ in range(5)] == [True] * 3 + [False] * 2
        assert monitor.stats()["refused_full"] == 2
        assert monitor.stats()["waiting"] == 4
        gate.open.set()
        monitor.flush()
        assert monitor.ingest("r", Turn("a", "x"))
        monitor.end("r")
        (final,) = drain(monitor)
        assert (final.turns, final.missing) == (5, 2)


def test_the_bytes_that_wait_are_bounded(model: Load) -> None:
    gate = Gate(model)
    with Monitor(gate.load, queue=QueueBounds(bytes=1000)) as monitor:
        assert not monitor.ingest("r", Turn("a", "x" * 1001))
        gate.shut()
        monitor.ingest("r", Turn("a", "x"))
        gate.reached.wait()
        assert monitor.ingest("r", Turn("a", "x" * 600))
        assert not monitor.ingest("r", Turn("a", "x" * 600))
        assert monitor.stats()["waiting_bytes"] == 600
        gate.open.set()
        monitor.flush()
        assert monitor.stats()["waiting_bytes"] == 0


def test_a_slow_reader_loses_the_oldest_events_and_never_stops_the_work(model: Load) -> None:
    with Monitor(model, queue=QueueBounds(events=3)) as monitor:
        for i in range(8):
            monitor.ingest(str(i), Turn("a", "x"))
            monitor.end(str(i))
        assert [event.run_id for event in drain(monitor)] == ["5", "6", "7"]
        assert monitor.stats()["lost_events"] == 5


def test_closing_judges_all_that_waits_and_ends_the_runs(model: Load) -> None:
    gate = Gate(model)
    monitor = Monitor(gate.load)
    gate.shut()
    for i in range(9):
        monitor.ingest(str(i), Turn("a", "wrong"))
    assert not monitor.close(timeout=0)
    assert not monitor.ingest("late", Turn("a", "x"))
    gate.open.set()
    assert monitor.close()
    finals = list(monitor.events())
    assert [(event.run_id, event.reason) for event in finals] == [
        (str(i), "closed") for i in range(9)
    ]
    assert monitor.stats()["refused_closed"] == 1
    assert monitor.close()
    monitor.flush()


def test_a_reader_is_told_when_no_more_will_come(model: Load) -> None:
    monitor = Monitor(model)
    heard: list[Event] = []
    reader = threading.Thread(target=lambda: heard.extend(monitor.events()))
    reader.start()
    monitor.ingest("r", Turn("a", "x"))
    monitor.close()
    reader.join()
    assert [event.kind for event in heard] == ["final"]


def test_silent_runs_end(model: Load) -> None:
    now = [0.0]
    with Monitor(model, bounds=Bounds(idle_s=60), clock=lambda: now[0]) as monitor:
        monitor.ingest("r", Turn("a", "x"))
        assert drain(monitor) == []
        now[0] = 61.0
        assert [event.reason for event in drain(monitor)] == ["idle"]


def test_open_runs_are_bounded(model: Load) -> None:
    with Monitor(model, bounds=Bounds(runs=2)) as monitor:
        for run_id in "123":
            monitor.ingest(run_id, Turn("a", "x"))
        assert [event.reason for event in drain(monitor)] == ["evicted"]
        assert monitor.stats()["open_runs"] == 2


def test_another_model_takes_over_without_a_lost_turn(model: Load, tmp_path: Path) -> None:
    mild = partial(load, write_model(tmp_path / "mild", weight=0.1), threads=1)
    with Monitor(model) as monitor:
        for turn in RUN.turns[:2]:
            monitor.ingest(RUN.id, turn, task=RUN.task)
        monitor.flush()
        monitor.reload(mild)
        for turn in RUN.turns[2:]:
            monitor.ingest(RUN.id, turn, task=RUN.task)
        monitor.end(RUN.id)
        *_, final = drain(monitor)
        assert (final.turns, final.missing) == (4, 0)
        assert final.findings == mild()(RUN).findings()
        assert monitor.stats()["reloads"] == 1


def test_a_model_that_cannot_be_used_leaves_the_old_one(model: Load, tmp_path: Path) -> None:
    with Monitor(model) as monitor:
        with pytest.raises(ArtifactError):
            monitor.reload(partial(load, tmp_path / "none"))
        with pytest.raises(ConfigError, match="takes turns one by one"):
            monitor.reload(fake_model.load)
        monitor.ingest("r", Turn("b", "wrong"))
        monitor.end("r")
        assert drain(monitor)[-1].findings


def test_turns_from_many_threads_are_all_judged(model: Load) -> None:
    attributor = model()
    with Monitor(lambda: attributor) as monitor:

        def host(name: str) -> None:
            for turn in RUN.turns:
                assert monitor.ingest(name, turn, task=RUN.task)
            assert monitor.end(name)

        threads = [threading.Thread(target=host, args=(str(i),)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finals = {event.run_id: event.findings for event in monitor.events() if event.kind == "final"}
    expected = attributor(RUN).findings()
    assert finals == {str(i): expected for i in range(8)}


def test_a_restart_continues_the_open_runs(model: Load, tmp_path: Path) -> None:
    with Monitor(model, state=tmp_path / "state") as first:
        for turn in RUN.turns[:2]:
            first.ingest(RUN.id, turn, task=RUN.task)
    assert list(first.events()) == []
    with Monitor(model, state=tmp_path / "state") as second:
        assert second.stats()["open_runs"] == 1
        for turn in RUN.turns[2:]:
            second.ingest(RUN.id, turn, task=RUN.task)
        second.end(RUN.id)
        raised, final = drain(second)
    assert (raised.number, final.number, final.turns) == (0, 1, 4)
    assert final.findings == model()(RUN).findings()


def test_a_state_folder_in_use_is_refused(model: Load, tmp_path: Path) -> None:
    with Monitor(model, state=tmp_path), pytest.raises(ConfigError, match="another process"):
        Monitor(model, state=tmp_path)


def test_a_state_folder_that_fails_is_counted_and_turns_are_judged(
    model: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dcl.live.journal import Journal

    def fail(*args: Any, **keys: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "append", fail)
    with Monitor(model, state=tmp_path) as monitor:
        assert monitor.ingest("r", Turn("a", "x"))
        (future,) = monitor.submit([Arrival("r", Turn("a", "y"))]) or []
        with pytest.raises(OSError, match="No space"):
            future.result()
        monitor.flush()
        assert monitor.stats()["turns"] == 2
        assert monitor.stats()["state_errors"] >= 1
        assert "No space" in monitor.last_error


def test_whoever_submits_learns_what_came_of_it(model: Load) -> None:
    with Monitor(model, rules=AlarmRules(confirm=1)) as monitor:
        (future,) = monitor.submit([Arrival("r", Turn("b", "wrong"), "task")]) or []
        judgement = future.result()
        assert [event.kind for event in judgement.events] == ["raised"]
        assert judgement.attribution is not None
        assert judgement.attribution.faults()[0].agent == "b"
        (ended,) = monitor.submit([Arrival("r", None)]) or []
        assert (ended.result().attribution, len(ended.result().events)) == (None, 1)
    assert monitor.submit([Arrival("r", None)]) is None


def test_asyncio(model: Load) -> None:
    async def host() -> tuple[list[Event], list[str]]:
        monitor = AsyncMonitor(Monitor(model, rules=AlarmRules(confirm=1)))
        heard: list[Event] = []

        async def listen() -> None:
            heard.extend([event async for event in monitor.events()])

        listener = asyncio.create_task(listen())
        await asyncio.sleep(0)
        assert monitor.ingest("r", Turn("a", "the sum"))
        (judgement,) = await monitor.judge(Arrival("r", Turn("b", "wrong"))) or []
        await monitor.flush()
        await monitor.close()
        assert await monitor.judge(Arrival("r", Turn("b", "wrong"))) is None
        await listener
        return heard, [event.kind for event in judgement.events]

    heard, kinds = asyncio.run(host())
    assert kinds == ["raised"]
    assert [event.kind for event in heard] == ["raised", "final"]


def test_a_listener_that_is_cancelled_leaves_nothing_behind(model: Load) -> None:
    async def host() -> None:
        monitor = AsyncMonitor(Monitor(model))

        async def listen() -> None:
            async for _ in monitor.events():
                pass

        listener = asyncio.create_task(listen())
        await asyncio.sleep(0)
        listener.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listener
        await monitor.close()

    asyncio.run(host())


@pytest.fixture
def forked() -> Callable[[Callable[[], bool]], bool]:
    """Does something in a forked child; says whether it was true there."""

    def run(action: Callable[[], bool]) -> bool:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if action() else 1
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    return run


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_starts_empty_with_a_worker_of_its_own(
    model: Load, tmp_path: Path, forked: Callable[[Callable[[], bool]], bool]
) -> None:
    with Monitor(model, state=tmp_path) as monitor:
        monitor.ingest("parent", Turn("b", "wrong"))
        monitor.flush()

        def child() -> bool:
            empty = monitor.stats()["open_runs"] == 0
            monitor.ingest("child", Turn("b", "wrong"))
            monitor.end("child")
            (final,) = drain(monitor)
            expected = model()(make_run(("b", "wrong"), id="child", task=""))
            monitor.close()
            return empty and final.findings == expected.findings()

        assert forked(child)
        assert forked(lambda: monitor.close() and not list(monitor.events()))
        monitor.end("parent")
        assert [event.run_id for event in drain(monitor)] == ["parent"]


@pytest.mark.parametrize("name", ["turns", "bytes", "events"])
def test_bounds_of_the_queue_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        QueueBounds(**{name: 0})
