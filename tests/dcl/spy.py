"""A monitor that remembers what it took and what it said, for tests of plugs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

from dcl.attribution import Attributor, Calibration
from dcl.live.alarms import Event
from dcl.live.monitor import Judgement, Monitor
from dcl.live.openruns import Arrival
from dcl.runtime import load
from dcl.trajectory import Trajectory, Turn

ROOT = Path(__file__).parents[2]

Said = tuple[str, str, str, str]
"""Agent, role, kind and text of a turn."""


@cache
def attributor() -> Attributor:
    """The model that ships, which declares whatever it deems possible: findings are never empty."""
    found = load(threads=1)
    return Attributor(
        found.bagger, found.scorer, Calibration(agent_threshold=0.01, pair_threshold=0.01)
    )


class Spy(Monitor):
    """A monitor with the model that ships."""

    def __init__(self) -> None:
        self.taken: defaultdict[str, list[Turn]] = defaultdict(list)
        self.tasks: dict[str, str] = {}
        self.spans: defaultdict[str, list[Any]] = defaultdict(list)
        super().__init__(attributor)

    def ingest(self, run_id: str, turn: Turn | Mapping[str, Any], *, task: str = "") -> bool:
        """Take one turn."""
        assert isinstance(turn, Turn)
        self.taken[run_id].append(turn)
        self.tasks[run_id] = task
        return super().ingest(run_id, turn, task=task)

    def submit(self, arrivals: Sequence[Arrival]) -> list[Future[Judgement]] | None:
        """Take spans."""
        for arrival in arrivals:
            self.spans[arrival.run_id].append(arrival.spans)
        return super().submit(arrivals)

    def said(self, run_id: str | None = None) -> list[Said]:
        """The turns of a run, or of the only one."""
        turns = self.taken[run_id or self.only()]
        return [(turn.agent, turn.role, turn.kind.value, turn.content) for turn in turns]

    def only(self) -> str:
        """Name of the only run."""
        (run_id,) = self.taken
        return run_id

    def finals(self) -> dict[str, Event]:
        """The last event of each run that has ended; each is what offline attribution finds."""
        self.flush()
        events = [event for event in self.events(wait=False) if event.kind == "final"]
        found = {event.run_id: event for event in events}
        assert len(found) == len(events), "a run ended twice"
        for run_id, turns in self.taken.items():
            if run_id in found:
                run = Trajectory(run_id, self.tasks[run_id], tuple(turns))
                event = found[run_id]
                assert event.findings == attributor()(run).findings()
                assert event.findings or run.bystanders == set(run.agents)
                assert event.sources == tuple(turns[f.turn].source for f in event.findings)
        return found

    def check(self) -> None:
        """Nothing went wrong and nothing was lost."""
        stats = self.stats()
        wrong = ("refused_malformed", "refused_full", "worker_errors", "errors", "unreadable")
        assert not any(stats.get(name) for name in wrong), (stats, self.last_error)


def without(framework: str, module: str) -> str:
    """What is raised when a plug is imported and its framework is not there."""
    code = (
        "import sys\n"
        f"sys.modules[{framework!r}] = None\n"
        "from dcl.errors import DclError\n"
        f"try:\n    import {module}\n"
        "except DclError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return done.stdout


def run_example(name: str) -> str:
    """What an example prints; it may not warn or write to stderr."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples" / name)],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def names_on_the_page(module: str) -> set[str]:
    """What `docs/plugs.md` imports from a plug; the tests of documentation cannot, for some."""
    text = (ROOT / "docs" / "plugs.md").read_text()
    found = {
        alias.name
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and node.module == module
        for alias in node.names
    }
    assert found, f"nothing on the page is of {module}"
    return found
