"""Every turn of a live system judged as it happens, without ever disturbing the system.

host threads  --ingest-->  bounded queue  -->  one worker: journal, encode, judge  -->  events
                 |                                                                        |
                 False: refused and counted                 bounded buffer, read by `events`
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from dcl.attribution import Attribution, Attributor
from dcl.errors import ConfigError, DclError
from dcl.live.alarms import AlarmRules, Event
from dcl.live.durable import DurableRuns
from dcl.live.incremental import OpenRun
from dcl.live.journal import Journal
from dcl.live.openruns import Arrival, Bounds, OpenRuns
from dcl.live.thresholds import StepThresholds
from dcl.runtime import load as load_model
from dcl.trajectory import Outcome, Turn, expect_object

_GROUP = 64  # arrivals that share one write to the disk
_TICK_S = 1.0  # how often an idle worker looks for silent runs


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBounds:
    """How much may wait.

    Args:
        turns: Turns that wait to be judged; one more is refused.
        bytes: Characters of the turns that wait; what would exceed them is refused.
        events: Events that wait to be read; the oldest gives way.

    Raises:
        ConfigError: If a bound is not positive.
    """

    turns: int = 10_000
    bytes: int = 64 << 20
    events: int = 10_000

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """What came of one arrival.

    Args:
        events: What is to be said now.
        attribution: The run as it stands; None if it has ended or could not be judged.
        missing: Turns of the run that are known to be lost.
    """

    events: tuple[Event, ...]
    attribution: Attribution | None
    missing: int


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """An arrival in the queue; or a question about a run, or a mark, which are answered last."""

    arrival: Arrival | None
    size: int
    then: Future[Judgement] | None
    run_id: str = ""


_NOTHING = Judgement((), None, 0)


class Monitor:
    """Judges turns in a thread of its own. Safe to share between threads.

    `ingest` puts a turn into a bounded queue and comes back at once; it never blocks and never
    raises. A turn that does not fit is refused, which is counted, and the run it belongs to says so
    from then on. What is said of the runs is read from `events`.

    After a fork the child's monitor is empty and loads a model of its own on first use; it keeps
    nothing in the parent's state folder.

    Args:
        load: Gives the model; called here, on `reload`, and after a fork.
        bounds: How much is kept of the open runs.
        queue: How much may wait.
        rules: When alarms are raised and cleared.
        thresholds: From which probability on a fault is declared; None takes those of the model.
        state: Folder in which open runs outlive the process; None keeps nothing.
        clock: Seconds that never go back.

    Raises:
        ArtifactError: If the model cannot be loaded.
        ConfigError: If the state folder cannot be used.
    """

    def __init__(
        self,
        load: Callable[[], Attributor] = load_model,
        *,
        bounds: Bounds | None = None,
        queue: QueueBounds | None = None,
        rules: AlarmRules | None = None,
        thresholds: StepThresholds | None = None,
        state: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._limits = queue or QueueBounds()
        self._max_runs = (bounds or Bounds()).runs
        self._make_runs: Callable[[Attributor], OpenRuns] = lambda attributor: OpenRuns(
            attributor, bounds=bounds, rules=rules, thresholds=thresholds, clock=clock
        )
        attributor = _ready(load)
        journal = None if state is None else Journal(state)
        self._reset(DurableRuns(self._make_runs(attributor), journal))
        try:
            self._tell(self._durable.recover())
        except DclError:
            self._durable.close()
            raise
        _MONITORS.add(self)

    def _reset(self, durable: DurableRuns | None) -> None:
        """Everything that a forked child must not share."""
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._spoke = threading.Condition(self._lock)
        self._queue: deque[_Waiting] = deque()
        self._queue_bytes = 0
        self._busy = 0
        self._events: deque[Event] = deque()
        self._missed: OrderedDict[str, int] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._listeners: list[Callable[[], None]] = []
        self._next: Attributor | None = None
        self._closing = False
        self._drained = False
        self._last_error = ""
        self._worker: threading.Thread | None = None
        self._runs = durable

    @property
    def _durable(self) -> DurableRuns:
        """The open runs; made on first use in a forked child."""
        if self._runs is None:
            self._runs = DurableRuns(self._make_runs(_ready(self._load)), None)
        return self._runs

    def ingest(self, run_id: str, turn: Turn | Mapping[str, Any], *, task: str = "") -> bool:
        """Take one turn; comes back at once whatever happens.

        Args:
            run_id: Name of the run.
            turn: The turn, or its plain JSON.
            task: What the system was asked to do; needed once a run, empty if there is none.

        Returns:
            Whether it will be judged. If not, `stats` says why.
        """
        arrival = self._check(run_id, turn, task)
        return arrival is not None and self._put([_Waiting(arrival, arrival.size, None)])

    def end(self, run_id: str, *, outcome: Outcome | None = None) -> bool:
        """Say that a run has ended; its last event follows.

        Args:
            run_id: Name of the run.
            outcome: Whether the run succeeded; None where nobody knows. The last event repeats it.

        Returns:
            Whether it was taken. If not, the run ends when it has been silent too long.
        """
        said = outcome if outcome in ("success", "failure") else None
        return self._put([_Waiting(Arrival(str(run_id), None, outcome=said), 0, None)])

    def refuse(self, run_id: str, error: Exception) -> None:
        """Count a turn that could not even be read; its run says from then on that one is missing.

        Args:
            run_id: Name of the run; empty if that is unknown too.
            error: What went wrong; `last_error` tells it.
        """
        with self._lock:
            self._counts["refused_malformed"] += 1
            self._last_error = f"{type(error).__name__}: {error}"
            if run_id:
                self._note_missing(run_id)

    def submit(self, arrivals: Sequence[Arrival]) -> list[Future[Judgement]] | None:
        """Take some arrivals, all or none, and give what comes of each.

        Args:
            arrivals: Turns, spans, or ends of runs.

        Returns:
            Each is done when its arrival is on the disk, if there is a state folder, and judged;
            it fails with `OSError` if it could not be written. None if they were refused.
        """
        waiting = [_Waiting(arrival, arrival.size, Future()) for arrival in arrivals]
        if not self._put(waiting):
            return None
        return [entry.then for entry in waiting if entry.then is not None]

    def look(self, run_id: str) -> Future[Judgement] | None:
        """A run as it stands once all that was taken so far is judged.

        Args:
            run_id: Name of the run.

        Returns:
            No attribution if the run is not open; None if the queue is full.
        """
        then: Future[Judgement] = Future()
        return then if self._put([_Waiting(None, 0, then, run_id)]) else None

    def events(self, *, wait: bool = True) -> Iterator[Event]:
        """What is said of the runs, each event once, to whoever asks first.

        Args:
            wait: Go on until the monitor is closed; otherwise stop when no event is there.
        """
        while True:
            with self._lock:
                while wait and not self._events and not self._drained:
                    self._spoke.wait()
                if not self._events:
                    return
                event = self._events.popleft()
            yield event

    @contextmanager
    def listen(self, wake: Callable[[], None]) -> Iterator[None]:
        """Within the block, have something called when there are events, or no more will come.

        Args:
            wake: Called in the thread of the worker; must be quick and must not raise.
        """
        with self._lock:
            self._listeners.append(wake)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(wake)

    @property
    def is_drained(self) -> bool:
        """Whether it is closed and all was judged; events may still wait to be read."""
        return self._drained

    def flush(self) -> None:
        """Wait until all that was taken so far is judged, and silent runs are closed."""
        mark: Future[Judgement] = Future()
        with self._lock:
            if self._closing:
                return
            self._queue.append(_Waiting(None, 0, mark))
            self._start()
            self._arrived.notify()
        mark.result()

    def reload(self, load: Callable[[], Attributor] | None = None) -> None:
        """Judge with another model from the next turn on; no turn is lost.

        The model is loaded in the calling thread, while the old one goes on. Open runs are read
        again when their next turn comes in.

        Args:
            load: Gives the model; None calls the one of the constructor again.

        Raises:
            DclError: If the model cannot be loaded or used; the old one stays.
        """
        fresh = _ready(load or self._load)
        with self._lock:
            self._load = load or self._load
            self._next = fresh
            self._counts["reloads"] += 1

    def stats(self) -> dict[str, int]:
        """What happened so far, and what there is now.

        Returns:
            `taken` turns and ends; `refused_full`, `refused_malformed`, `refused_closed` ones;
            `lost_events`; `waiting`, `waiting_bytes`, `waiting_events`; `open_runs` and
            `open_bytes`; `reloads`; `state_errors`; `worker_errors`, which are faults of this
            package; and the counts of `dcl.live.openruns.OpenRuns`. What is 0 may be absent.
        """
        with self._lock:
            runs = self._runs
            counts = dict(self._counts)
            now = {
                "waiting": len(self._queue) + self._busy,
                "waiting_bytes": self._queue_bytes,
                "waiting_events": len(self._events),
                "open_runs": 0 if runs is None else len(runs.runs),
                "open_bytes": 0 if runs is None else runs.runs.nbytes,
            }
            judged = {} if runs is None else dict(runs.runs.counts)
        return {**counts, **judged, **now}

    @property
    def last_error(self) -> str:
        """The last error of the model or the state folder, for people; empty if none."""
        judging = "" if self._runs is None else self._runs.runs.last_error
        return self._last_error or judging

    def close(self, *, timeout: float | None = None) -> bool:
        """Judge all that waits, then stop: graceful drain.

        With a state folder the open runs are saved there; without one each gets its last event.

        Args:
            timeout: Seconds to wait for that; None waits as long as it takes.

        Returns:
            Whether all was judged in time.
        """
        with self._lock:
            self._closing = True
            if self._runs is not None and not self._drained:
                self._start()
            self._drained = self._drained or self._worker is None
            self._arrived.notify_all()
            worker = self._worker
        if worker is not None:
            worker.join(timeout)
        return worker is None or not worker.is_alive()

    def __enter__(self) -> Monitor:
        """The monitor itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def _check(self, run_id: object, turn: object, task: object) -> Arrival | None:
        """The arrival; None, counted, if it is malformed."""
        try:
            row = {"run": run_id, "task": task}
            row |= turn.to_dict() if isinstance(turn, Turn) else expect_object(turn, "turn")
            return Arrival.from_dict(row)
        except Exception:  # a mapping of the host may raise anything
            with self._lock:
                self._counts["refused_malformed"] += 1
                self._note_missing(run_id)
            return None

    def _put(self, waiting: Sequence[_Waiting]) -> bool:
        """Queue arrivals, or refuse them."""
        size = sum(entry.size for entry in waiting)
        limits = self._limits
        with self._lock:
            full = (
                len(self._queue) + len(waiting) > limits.turns
                or self._queue_bytes + size > limits.bytes
            )
            if full or self._closing:
                reason = "refused_closed" if self._closing else "refused_full"
                self._counts[reason] += len(waiting)
                for entry in waiting:
                    if entry.then is None and entry.arrival and entry.arrival.turn is not None:
                        self._note_missing(entry.arrival.run_id)
                return False
            self._queue.extend(self._with_missing(entry) for entry in waiting)
            self._queue_bytes += size
            self._counts["taken"] += len(waiting)
            self._start()
            self._arrived.notify()
        return True

    def _with_missing(self, waiting: _Waiting) -> _Waiting:
        """The same, with the turns of its run that were lost before; the lock is held."""
        arrival = waiting.arrival
        if arrival is None or arrival.run_id not in self._missed:
            return waiting
        return replace(waiting, arrival=replace(arrival, missing=self._missed.pop(arrival.run_id)))

    def _note_missing(self, run_id: object) -> None:
        """Remember that a turn of this run was lost, for as many runs as may be open."""
        if isinstance(run_id, str):
            self._missed[run_id] = self._missed.get(run_id, 0) + 1
            if len(self._missed) > self._max_runs:
                self._missed.popitem(last=False)

    def _start(self) -> None:
        """Start the worker if there is none; the lock is held."""
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="dcl-monitor", daemon=True)
            self._worker.start()

    def _work(self) -> None:
        """The worker: judge what waits, close silent runs, drain at the end."""
        while True:
            with self._lock:
                if not self._queue and not self._closing:
                    self._arrived.wait(_TICK_S)
                group = [self._queue.popleft() for _ in range(min(_GROUP, len(self._queue)))]
                self._queue_bytes -= sum(waiting.size for waiting in group)
                self._busy = len(group)
                fresh, self._next = self._next, None
                done = self._closing and not group
            self._guard(self._step, group, fresh)
            if done:
                self._guard(self._drain)
            with self._lock:
                self._busy = 0
                self._drained = done
                if done:
                    self._wake()
                    return

    def _step(self, group: list[_Waiting], fresh: Attributor | None) -> None:
        """One round of the worker."""
        try:
            if fresh is not None:
                self._durable.runs.use(fresh)
            self._judge([waiting for waiting in group if waiting.arrival is not None])
            self._tell(self._durable.expire())
        except Exception as error:
            for waiting in group:
                if waiting.then is not None and waiting.arrival is not None:
                    with suppress(InvalidStateError):  # it was told before, or gave up
                        waiting.then.set_exception(error)
            raise
        finally:
            for waiting in group:
                if waiting.then is not None and waiting.arrival is None:
                    with suppress(InvalidStateError):
                        waiting.then.set_result(self._see(waiting.run_id))

    def _see(self, run_id: str) -> Judgement:
        """A run as it stands."""
        runs = None if self._runs is None else self._runs.runs
        if runs is None or run_id not in runs:
            return _NOTHING
        return Judgement((), runs.attribution(run_id), runs.missing(run_id))

    def _judge(self, group: list[_Waiting]) -> None:
        """Keep a group of arrivals, judge them, and tell whoever waits for one."""
        if not group:
            return
        durable = self._durable
        arrivals = [waiting.arrival for waiting in group if waiting.arrival is not None]
        failure: OSError | None = None
        try:
            results = durable.take(arrivals)
        except OSError as error:  # judged all the same: the host is worth more than the state
            self._note(error, "state_errors")
            results = (durable.runs.take(arrival) for arrival in arrivals)
            failure = error
        for waiting, arrival, events in zip(group, arrivals, results, strict=True):
            self._tell(events)
            if waiting.then is None or not waiting.then.set_running_or_notify_cancel():
                continue
            if failure is not None:
                waiting.then.set_exception(failure)
                continue
            waiting.then.set_result(replace(self._see(arrival.run_id), events=tuple(events)))
        durable.told()

    def _tell(self, events: list[Event]) -> None:
        """Put events where `events` finds them."""
        if not events:
            return
        with self._lock:
            self._events.extend(events)
            while len(self._events) > self._limits.events:
                self._events.popleft()
                self._counts["lost_events"] += 1
            self._wake()

    def _wake(self) -> None:
        """Tell whoever waits for events to look; the lock is held."""
        self._spoke.notify_all()
        for wake in self._listeners:
            wake()

    def _drain(self) -> None:
        """The last thing the worker does."""
        durable = self._durable
        if durable.is_durable:
            durable.snapshot()
        else:
            self._tell(list(durable.runs.end_all("closed")))
        durable.close()

    def _guard(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do something; that it fails is counted, and the worker goes on."""
        try:
            action(*arguments)
        except OSError as error:
            self._note(error, "state_errors")
        except Exception as error:
            self._note(error, "worker_errors")

    def _note(self, error: Exception, count: str) -> None:
        """Count an error."""
        with self._lock:
            self._counts[count] += 1
            self._last_error = f"{type(error).__name__}: {error}"


def _ready(load: Callable[[], Attributor]) -> Attributor:
    """A model that has judged a turn, so that the first real one is no slower than the rest."""
    attributor = load()
    run = OpenRun(attributor, "warm-up", "task")
    run.extend([Turn("agent", "a turn")])
    run.attribute()
    return attributor


_MONITORS: weakref.WeakSet[Monitor] = weakref.WeakSet()


def _start_anew() -> None:
    """What a forked child does: no lock, queue, thread or session of the parent is used again."""
    for monitor in _MONITORS:
        if monitor._runs is not None:
            monitor._runs.close()  # the lock on the folder stays with the parent
        monitor._reset(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
