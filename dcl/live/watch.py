"""The loop of `dcl watch`: lines in, events out, nothing forgotten in between."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from dcl.errors import TraceError
from dcl.formats import native, otlp
from dcl.live.alarms import Event
from dcl.live.durable import DurableRuns
from dcl.live.openruns import Arrival
from dcl.live.tail import Line
from dcl.report.record import dump

_POLL_S = 0.2


class Source(Protocol):
    """Where lines come from; see `dcl.live.tail`."""

    @property
    def position(self) -> object:
        """Where the lines that were given end."""

    @property
    def is_finished(self) -> bool:
        """Whether no line will ever come."""

    def read(self, wait_s: float, /) -> list[Line]:
        """The lines that were finished since."""


def watch(
    source: Source,
    runs: DurableRuns,
    out: TextIO,
    *,
    complain: Callable[[str], None],
    wait: Callable[[float], None] = time.sleep,
) -> int:
    """Judge the turns of a growing log, and write events as JSON lines, until the log ends.

    A turn is on the disk before it is judged, together with the place up to which the log was
    read, so a process that is killed at any moment goes on where it was. An event is written at
    least once.

    Args:
        source: The log.
        runs: The open runs, recovered.
        out: Takes the events; flushed after every turn that has any.
        complain: Is told of each line that cannot be read.
        wait: Sleeps.

    Returns:
        Lines that could not be read.

    Raises:
        OSError: If the log cannot be read, or the state or an event cannot be written.
    """
    unreadable = 0
    while True:
        lines = source.read(_POLL_S)
        arrivals: list[Arrival] = []
        for line in lines:
            found = read_line(line)
            if isinstance(found, TraceError):
                unreadable += 1
                complain(f"error: {found}")
            else:
                arrivals += found
        for events in runs.take(arrivals, position=source.position if lines else None):
            write(events, out)
        write(runs.expire(), out)
        if lines:
            runs.told()
        elif source.is_finished:
            return unreadable
        else:
            wait(_POLL_S)


def read_line(line: Line) -> list[Arrival] | TraceError:
    """What one line says: a turn, the end of a run, a native run, or spans of traces.

    Args:
        line: JSON; a blank line holds nothing.

    Returns:
        The turns, or what is wrong with the line.
    """
    if not line.content.strip():
        return []
    try:
        row = json.loads(line.content)
        if otlp.matches(row):
            return [Arrival(trace, None, spans=spans) for trace, spans in otlp.split(row) if trace]
        if not native.matches(row):
            return [Arrival.from_dict(row)]
        (example,) = native.parse(row, "")
    except TraceError as error:
        return TraceError(line.place, str(error))
    except (ValueError, RecursionError) as error:
        return TraceError(
            line.place,
            f"expected one JSON object a line: {error}; for a whole log in another form: "
            "dcl convert FILE --out - | dcl watch -",
        )
    run = example.trajectory
    turns = [Arrival(run.id, turn, run.task) for turn in run.turns]
    return [*turns, Arrival(run.id, None, outcome=run.outcome)]


def write(events: Sequence[Event], out: TextIO) -> None:
    """Write events as JSON lines and flush them.

    Args:
        events: May be none.
        out: Takes them.
    """
    if events:
        out.write("".join(dump(event.to_dict()) + "\n" for event in events))
        out.flush()
