"""The monitor under load: thousands of runs, a slow reader, malformed turns, a reload.

One thread plays the host and offers turns as fast as the monitor takes them. Every turn that was
offered must be judged or counted as lost, nothing may be raised into the host, memory must stay
flat, and the last word on a run must be that of offline attribution of the turns that were taken.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from dcl.attribution import Attributor, Finding
from dcl.errors import ConfigError
from dcl.formats import read_trajectories
from dcl.live.monitor import Judgement, Monitor, QueueBounds
from dcl.live.openruns import Arrival
from dcl.trajectory import Trajectory, Turn

_MALFORMED: tuple[Any, ...] = (
    None, 3, "text", [], {}, {"agent": "a"}, {"agent": "", "content": "x"},
    {"agent": "a", "content": 3}, {"agent": "a", "content": "x", "kind": "?"}, object(),
)  # fmt: skip
_SETTLED = 0.2  # share of the time after which memory should be flat


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakConfig:
    """What to put the monitor through.

    Args:
        minutes: How long to offer turns.
        runs: Runs that are open at the same time.
        data: Logs whose runs are played, each under many names.
        queue: Turns that may wait.
        compare: Finished runs to attribute offline afterwards.
        malformed: Share of offers that are malformed.
        reader_s: Seconds that the slow reader rests after each event.
        seed: Of the order of turns.
    """

    minutes: float = 30.0
    runs: int = 2000
    data: tuple[Path, ...] = (Path("examples/parse_duration.json"),)
    queue: int = 1000
    compare: int = 500
    malformed: float = 0.01
    reader_s: float = 0.2
    seed: int = 0


@dataclass(slots=True)
class SoakReport:
    """What happened.

    Args:
        seconds: From the first offer to the last judgement.
        offered: Turns that were well-formed.
        malformed: Offers that were not.
        ends: Runs that were ended by the host.
        raised: Exceptions that reached the host.
        stats: Counts of the monitor at the end.
        unaccounted: Offers that were neither judged nor counted as lost; 0 is right.
        compared: Runs that were attributed offline.
        differing: Of these, runs with other findings; 0 is right.
        events_read: Events that the slow reader got.
        ingest_us: Microseconds that `ingest` took: median, 99th percentile, maximum.
        memory_mb: Resident memory after the warm-up, at its highest afterwards, and at the end.
        turns_per_s: Turns judged a second.
    """

    seconds: float = 0.0
    offered: int = 0
    malformed: int = 0
    ends: int = 0
    raised: list[str] = field(default_factory=list)
    stats: dict[str, int] = field(default_factory=dict)
    unaccounted: int = 0
    compared: int = 0
    differing: int = 0
    events_read: int = 0
    ingest_us: tuple[float, float, float] = (0.0, 0.0, 0.0)
    memory_mb: tuple[float, float, float] = (0.0, 0.0, 0.0)
    turns_per_s: float = 0.0

    @property
    def is_sound(self) -> bool:
        """Whether nothing was raised, lost without being counted, or judged otherwise."""
        counts = self.stats.get("errors", 0) + self.stats.get("worker_errors", 0)
        return not (self.raised or self.unaccounted or self.differing or counts)


@dataclass(slots=True)
class _Play:
    """One run that is being played, and the turns of it that were taken."""

    name: str
    log: Trajectory
    at: int = 0
    taken: list[Turn] = field(default_factory=list)


class _Host:
    """Plays the system that is watched."""

    def __init__(self, config: SoakConfig, monitor: Monitor, logs: Sequence[Trajectory]) -> None:
        self.report = SoakReport()
        self.finished: list[tuple[_Play, Future[Judgement]]] = []
        self._config = config
        self._monitor = monitor
        self._random = random.Random(config.seed)
        self._logs = cycle(logs)
        self._named = 0
        self._refused_ends = 0
        self._open = [self._next_play() for _ in range(config.runs)]
        for play in self._open:  # as if all had been going on for a while
            play.at = self._random.randrange(len(play.log.turns))
        self._took: list[float] = []

    def offer(self) -> bool:
        """Offer one turn of a random run, or something malformed; whether it was taken."""
        place = self._random.randrange(len(self._open))
        play = self._open[place]
        if self._random.random() < self._config.malformed:
            self.report.malformed += 1
            self._ingest("malformed", self._random.choice(_MALFORMED), "")
            return True
        turn = play.log.turns[play.at]
        self.report.offered += 1
        play.at += 1
        taken = self._ingest(play.name, turn, play.log.task)
        if taken:
            play.taken.append(turn)
        if play.at == len(play.log.turns):
            self._end(play)
            self._open[place] = self._next_play()
        return taken

    def finish(self, seconds: float) -> SoakReport:
        """The report, once the monitor has judged all."""
        took = np.array(self._took or [0.0]) * 1e6
        middle, high = np.percentile(took, [50, 99])
        report = self.report
        report.seconds = seconds
        report.ingest_us = (float(middle), float(high), float(took.max()))
        report.stats = stats = self._monitor.stats()
        report.turns_per_s = stats.get("turns", 0) / seconds
        ours = report.offered + report.malformed + report.ends + self._refused_ends
        refused = (stats.get(f"refused_{why}", 0) for why in ("full", "malformed", "closed"))
        report.unaccounted = abs(ours - stats.get("taken", 0) - sum(refused))
        done = stats.get("turns", 0) + stats.get("lost_run_full", 0) + report.ends
        report.unaccounted += abs(stats.get("taken", 0) - done)
        return report

    def _ingest(self, name: str, turn: Any, task: str) -> bool:
        """Ingest as a host would, with a watch on the time and on what is raised."""
        start = time.perf_counter()
        try:
            return self._monitor.ingest(name, turn, task=task)
        except Exception as error:  # this is what must never happen
            self.report.raised.append(f"{type(error).__name__}: {error}")
            return False
        finally:
            if len(self._took) < 1_000_000:
                self._took.append(time.perf_counter() - start)

    def _end(self, play: _Play) -> None:
        """End a run; some are kept, to be compared."""
        while (futures := self._monitor.submit([Arrival(play.name, None)])) is None:
            time.sleep(0.01)
            self._refused_ends += 1
        self.report.ends += 1
        if play.taken and len(self.finished) < self._config.compare:
            self.finished.append((play, futures[0]))

    def _next_play(self) -> _Play:
        """Another run, under a name of its own."""
        self._named += 1
        return _Play(f"run {self._named}", next(self._logs))


def soak(
    config: SoakConfig,
    load: Callable[[], Attributor],
    *,
    offers: int | None = None,
) -> SoakReport:
    """Put the monitor through it.

    Args:
        config: What to do.
        load: Gives the model.
        offers: Stop after so many offers instead of `config.minutes`.

    Raises:
        ConfigError: If there are no logs.
    """
    logs = [run for path in config.data for run in islice(read_trajectories(path), 2000)]
    if not logs:
        raise ConfigError("--data: expected logs with runs, found none")
    monitor = Monitor(load, queue=QueueBounds(turns=config.queue, events=config.queue))
    host = _Host(config, monitor, logs)
    reader = threading.Thread(target=_read_slowly, args=(monitor, config.reader_s, host.report))
    reader.start()
    memory: list[tuple[float, float]] = []
    start = time.perf_counter()
    try:
        for share in _shares(config, offers, start):
            if not host.offer():
                time.sleep(0.05)  # as fast as the monitor takes them, and a little faster
            if not memory or share - memory[-1][0] > 0.01:
                memory.append((share, resident_mb()))
            if share > 0.5 and not monitor.stats().get("reloads"):
                monitor.reload(load)
        monitor.flush()
        report = host.finish(time.perf_counter() - start)
        report.memory_mb = _settle([*memory, (1.0, resident_mb())])
        _compare(host, load(), report)
    finally:
        monitor.close()
        reader.join()
    return report


def _shares(config: SoakConfig, offers: int | None, start: float) -> Iterator[float]:
    """How much is done, 0 to 1, before each offer."""
    done = 0
    while True:
        gone = (time.perf_counter() - start) / (config.minutes * 60)
        share = gone if offers is None else done / offers
        if share >= 1:
            return
        yield share
        done += 1


def _read_slowly(monitor: Monitor, rest_s: float, report: SoakReport) -> None:
    """A reader that cannot keep up."""
    for _ in monitor.events():
        report.events_read += 1
        if not monitor.is_drained:
            time.sleep(rest_s)


def _compare(host: _Host, attributor: Attributor, report: SoakReport) -> None:
    """Attribute finished runs offline and look for differences."""
    runs = [Trajectory(play.name, play.log.task, tuple(play.taken)) for play, _ in host.finished]
    offline = attributor.batch(runs)
    for (_, future), attribution in zip(host.finished, offline, strict=True):
        online: tuple[Finding, ...] = future.result().events[-1].findings
        report.compared += 1
        report.differing += online != attribution.findings()


def _settle(memory: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Memory after the warm-up, at its highest afterwards, and at the end."""
    settled = [used for share, used in memory if share >= _SETTLED]
    return settled[0], max(settled), settled[-1]


def resident_mb() -> float:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def to_text(report: SoakReport) -> str:
    """The report as lines for people."""
    stats = report.stats
    lost = {name: stats.get(name, 0) for name in
            ("refused_full", "refused_malformed", "lost_run_full", "lost_events")}  # fmt: skip
    lines = {
        "seconds": f"{report.seconds:.0f}",
        "offered": f"{report.offered} turns, {report.malformed} malformed, {report.ends} ends",
        "judged": f"{stats.get('turns', 0)} turns, {report.turns_per_s:.1f} a second",
        "open runs at the end": f"{stats.get('open_runs', 0)}",
        "lost and counted": ", ".join(f"{name} {count}" for name, count in lost.items()),
        "not counted": f"{report.unaccounted}",
        "raised into the host": f"{len(report.raised)}",
        "errors of model and worker": f"{stats.get('errors', 0)}, {stats.get('worker_errors', 0)}",
        "models loaded while running": f"{stats.get('reloads', 0)}",
        "ingest": "median {:.1f} us, p99 {:.1f} us, longest {:.0f} us".format(*report.ingest_us),
        "memory": "after warm-up {:.0f} MB, highest {:.0f} MB, at the end {:.0f} MB".format(
            *report.memory_mb
        ),
        "compared with offline": f"{report.compared} runs, {report.differing} differ",
        "sound": "yes" if report.is_sound else "NO",
    }
    return "".join(f"{name}: {value}\n" for name, value in lines.items())
