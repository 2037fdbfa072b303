from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
from spy import ROOT, Spy, attributor

from dcl.attribution import Attributor, Finding
from dcl.live.alarms import Event
from dcl.live.monitor import Monitor
from dcl.plugs.recorder import Recorder, lacks, log_event
from dcl.taxonomy import ErrorMode
from dcl.trajectory import Fault, Turn

FINDINGS = (Finding(Fault("a", ErrorMode.FM_2_5, 1), 1, 0.7), Finding(Fault("b"), 2, 0.6))


class Stuck:
    """A model that does not answer until a test lets it."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()  # for the turn that warms it up

    def load(self) -> Attributor:
        inner = attributor()
        return Attributor(inner.bagger, self, inner.calibration)

    def __call__(self, bags: Any) -> Any:
        return attributor().scorer(bags)

    def encoder(self, windows: Any) -> Any:
        self.open.wait()
        scorer: Any = attributor().scorer
        return scorer.encoder(windows)

    def score(self, *args: Any) -> Any:
        scorer: Any = attributor().scorer
        return scorer.score(*args)


def ingest(recorder: Recorder, run_id: str = "r", *texts: str) -> None:
    for text in texts or ("a turn",):
        recorder.run(run_id).add(Turn("solver", text))


def test_events_go_to_the_callback_in_order_and_what_it_raises_is_logged(
    spy: Spy, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Event] = []
    done = threading.Event()

    def hear(event: Event) -> None:
        heard.append(event)
        if event.run_id == "2":
            done.set()
        raise RuntimeError("the callback is broken")

    recorder = Recorder(spy, hear)
    for run_id in ("1", "2"):
        ingest(recorder, run_id)
        recorder.end(run_id, "failure")
    assert done.wait(60)
    spy.close()
    recorder.close()
    assert [(e.run_id, e.kind, e.outcome) for e in heard] == [
        ("1", "final", "failure"),
        ("2", "final", "failure"),
    ]
    assert "the callback is broken" in caplog.text


def test_without_a_callback_the_events_are_left_to_the_owner_of_the_monitor(spy: Spy) -> None:
    recorder = Recorder(spy)
    ingest(recorder)
    recorder.end("r")
    recorder.flush()
    recorder.close()  # the monitor is not its own
    assert [event.kind for event in spy.events(wait=False)] == ["final"]
    assert spy.ingest("r", Turn("a", "x"))


def test_what_cannot_be_read_is_counted_and_its_run_says_so(spy: Spy) -> None:
    recorder = Recorder(spy)
    for run_id in ("r", ""):
        with recorder.guard(run_id):
            raise KeyError("content")
    ingest(recorder)
    recorder.end("r")
    assert spy.finals()["r"].missing == 1
    assert spy.stats()["refused_malformed"] == 2
    assert spy.last_error == "KeyError: 'content'"
    spy._counts.clear()  # as this test expects it


def test_a_guard_lets_through_what_is_no_error(spy: Spy) -> None:
    with pytest.raises(KeyboardInterrupt), Recorder(spy).guard("r"):
        raise KeyboardInterrupt


def test_nobody_waits_for_the_model() -> None:
    model = Stuck()
    with Monitor(model.load) as monitor:
        model.open.clear()
        recorder = Recorder(monitor)
        ingest(recorder, "r", *map(str, range(100)))
        recorder.end("r")  # all of it comes back, although the model has not
        assert monitor.stats()["waiting"] == 101
        assert not recorder.flush(0.01)
        model.open.set()
        assert recorder.flush()
        (final,) = (event for event in monitor.events(wait=False) if event.kind == "final")
        assert final.turns == 100


def test_the_oldest_transcripts_give_way(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcl.plugs.recorder._OPEN", 2)
    recorder = Recorder(spy)
    first = recorder.run("1")
    assert recorder.run("1") is first
    assert recorder.run("2") is not recorder.run("3")
    assert recorder.run("1") is not first


def test_findings_are_warnings_and_the_rest_is_information(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "dcl.plugs")
    log_event(Event("r", 0, "raised", 3, FINDINGS, None, 0))
    log_event(Event("r", 1, "cleared", 3, FINDINGS[:1], None, 0))
    log_event(Event("r", 2, "final", 3, (), None, 0, "ended"))
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "run r raised: a FM-2.5 at turn 1 (70%); b failed at turn 2 (60%)"),
        ("INFO", "run r cleared: a FM-2.5 at turn 1 (70%)"),
        ("INFO", "run r final: nothing found"),
    ]


def test_a_missing_framework_is_named_with_its_remedy() -> None:
    error = lacks("dcl.plugs.x", "x", ImportError("No module named 'x'"))
    assert str(error) == (
        "dcl.plugs.x: expected its framework to be installed, got: No module named 'x'; "
        "try: pip install 'dcl-attribution[x]'"
    )


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_monitor_of_its_own_says_its_last_words_at_the_end_of_the_program() -> None:
    code = (
        "from dcl.plugs.recorder import Recorder\n"
        "from dcl.trajectory import Turn\n"
        "recorder = Recorder(on_event=lambda e: print(e.kind, e.run_id, e.reason, flush=True))\n"
        "recorder.run('r').add(Turn('a', 'x'))\n"
        "recorder.run('s').add(Turn('a', 'x'))\n"
        "recorder.end('r')\n"
    )
    assert run(code) == "final r ended\nfinal s closed\n"


def test_the_package_of_plugs_loads_no_framework() -> None:
    code = (
        "import sys, dcl.plugs, dcl.plugs.recorder\n"
        "frameworks = {'opentelemetry', 'langchain_core', 'agents', 'autogen_core', 'crewai',"
        " 'smolagents', 'openai', 'pydantic'}\n"
        "print(sorted(frameworks & set(sys.modules)))\n"
    )
    assert run(code) == "[]\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_records_on_its_own() -> None:
    code = (
        "import os, sys\n"
        "from dcl.plugs.recorder import Recorder\n"
        "from dcl.trajectory import Turn\n"
        "recorder = Recorder(on_event=lambda e: print(e.kind, e.run_id, flush=True))\n"
        "with recorder.lock:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        recorder.run('child').add(Turn('a', 'x'))\n"
        "        recorder.end('child')\n"
        "        recorder.close()\n"
        "        os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "recorder.run('parent').add(Turn('a', 'x'))\n"
        "recorder.end('parent')\n"
    )
    assert run(code.replace("-W error", "")) == "final child\nfinal parent\n"
