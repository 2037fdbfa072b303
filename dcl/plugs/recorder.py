"""What all plugs share: runs fed to a monitor, and what it says of them handed on."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError
from contextlib import contextmanager
from types import TracebackType

from dcl.errors import ConfigError
from dcl.live.alarms import Event
from dcl.live.monitor import Monitor
from dcl.live.openruns import Bounds
from dcl.plugs.transcript import Transcript
from dcl.trajectory import Outcome

OnEvent = Callable[[Event], None]
"""Takes what is said of a run."""

logger = logging.getLogger("dcl.plugs")

_EXIT_S = 10.0  # how long the end of the program may wait for what is not judged yet
_OPEN = Bounds().runs  # as many runs as a monitor keeps open


def log_event(event: Event) -> None:
    """Log what is said of a run to `dcl.plugs`: findings as warnings, the rest as information.

    Args:
        event: What is said.
    """
    said = [
        f"{f.fault.agent} {'failed' if f.fault.mode is None else f.fault.mode.value} "
        f"at turn {f.turn} ({f.prob:.0%})"
        for f in event.findings
    ]
    level = logging.WARNING if said and event.kind != "cleared" else logging.INFO
    logger.log(level, "run %s %s: %s", event.run_id, event.kind, "; ".join(said) or "nothing found")


def lacks(module: str, extra: str, error: ImportError) -> ConfigError:
    """The error for a plug whose framework is not there.

    Args:
        module: Name of the plug's module.
        extra: Extra of this package that brings the framework.
        error: What the import said.
    """
    return ConfigError(
        f"{module}: expected its framework to be installed, got: {error}; "
        f"try: pip install 'dcl-attribution[{extra}]'"
    )


class Recorder:
    """Feeds the runs of a framework to a monitor, whatever happens. Safe to share between threads.

    Args:
        monitor: Judges the turns. None makes one with the model that ships; it is closed with the
            recorder, at the latest when the program ends.
        on_event: Called with each event of the monitor, in a thread of its own; what it raises is
            logged. A monitor has one reader: give this to one of the plugs that share a monitor.
            None logs the events of a monitor that is made here, and leaves those of a monitor that
            is given to whoever reads `Monitor.events`.

    Raises:
        ArtifactError: If the model that ships cannot be loaded.
    """

    def __init__(self, monitor: Monitor | None = None, on_event: OnEvent | None = None) -> None:
        self._is_owner = monitor is None
        self.monitor = Monitor() if monitor is None else monitor
        self._on_event = log_event if monitor is None and on_event is None else on_event
        self._reset()
        self._start()
        _RECORDERS.add(self)
        if self._is_owner:
            atexit.register(self.close)

    def _reset(self) -> None:
        """Everything that a forked child must not share."""
        self.lock = threading.RLock()
        self._open: OrderedDict[str, Transcript] = OrderedDict()
        self._reader: threading.Thread | None = None

    def run(self, run_id: str) -> Transcript:
        """What is known of a run that is going on; an empty transcript if nothing is.

        Args:
            run_id: Name of the run.
        """
        self._start()
        with self.lock:
            found = self._open.get(run_id)
            if found is None:
                found = self._open[run_id] = Transcript(self.monitor, run_id)
                if len(self._open) > _OPEN:
                    self._open.popitem(last=False)
            self._open.move_to_end(run_id)
            return found

    def end(self, run_id: str, outcome: Outcome | None = None) -> None:
        """The framework says that a run has ended.

        Args:
            run_id: Name of the run.
            outcome: Whether it succeeded; None where the framework does not know.
        """
        self._start()
        with self.lock:
            self._open.pop(run_id, None)
        self.monitor.end(run_id, outcome=outcome)

    @contextmanager
    def guard(self, run_id: str = "") -> Iterator[None]:
        """Within the block, have an error counted by the monitor and not raised.

        Args:
            run_id: The run that misses a turn then; empty if that is not known.
        """
        try:
            yield
        except Exception as error:  # the framework is worth more than its turn
            self.monitor.refuse(run_id, error)
            logger.debug("run %s: a turn could not be read", run_id, exc_info=True)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was recorded is judged; events may still be on their way.

        Args:
            timeout: Seconds to wait at most; None waits as long as it takes.

        Returns:
            Whether all is judged.
        """
        mark = self.monitor.look("")  # answered after all that is before it
        try:
            return mark is not None and mark.result(timeout) is not None
        except TimeoutError:
            return False

    def close(self) -> None:
        """Judge what waits and hand on the last events.

        A monitor that was given stays open; close it first to have its last events handed on.
        """
        if self._is_owner:
            atexit.unregister(self.close)
            self.monitor.close(timeout=_EXIT_S)
        reader = self._reader
        if reader is not None and reader is not threading.current_thread():
            reader.join(_EXIT_S if self.monitor.is_drained else 0)

    def __enter__(self) -> Recorder:
        """The recorder itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def _start(self) -> None:
        """Start the reader of events; a forked child has none."""
        if self._on_event is None or self._reader is not None:
            return
        with self.lock:
            if self._reader is None:
                self._reader = threading.Thread(
                    target=_hand_on,
                    args=(self.monitor, self._on_event),
                    name="dcl-plug",
                    daemon=True,
                )
                self._reader.start()


def _hand_on(monitor: Monitor, on_event: OnEvent) -> None:
    """Give every event to a function until the monitor is closed."""
    for event in monitor.events():
        _tell(on_event, event)


def _tell(on_event: OnEvent, event: Event) -> None:
    """Give one event to a function; that it fails is logged, and the next one follows."""
    try:
        on_event(event)
    except Exception:
        logger.exception("run %s: on_event failed", event.run_id)


_RECORDERS: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _start_anew() -> None:
    """What a forked child does: no lock, thread or open run of the parent is used again."""
    for recorder in _RECORDERS:
        recorder._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
