"""Open runs that a restart continues."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dcl.errors import ConfigError, TraceError
from dcl.live.alarms import Event
from dcl.live.journal import Journal
from dcl.live.openruns import Arrival, OpenRuns

_COMPACT = 16 << 20  # bytes of journal after which a snapshot is written


class DurableRuns:
    """Open runs with a journal: what comes in is on the disk before it is judged.

    After a restart the open runs are those of all that was taken, and every event that was not told
    is told. An event may be told twice, if the process ended between telling it and `told`; both
    carry the same number.

    Args:
        runs: The open runs, empty.
        journal: Where to write; None keeps nothing.
        compact_bytes: Size of the journal after which a snapshot takes its place.
    """

    def __init__(
        self, runs: OpenRuns, journal: Journal | None, *, compact_bytes: int = _COMPACT
    ) -> None:
        self.runs = runs
        self.position: Any = None
        self._journal = journal
        self._compact_bytes = compact_bytes

    @property
    def is_durable(self) -> bool:
        """Whether a restart continues the open runs."""
        return self._journal is not None

    def recover(self) -> list[Event]:
        """Bring back what the last process left; call it once, before all else.

        Returns:
            Events that it may not have told.

        Raises:
            ConfigError: If the folder is damaged.
        """
        if self._journal is None:
            return []
        saved, arrived = self._journal.recover()
        events: list[Event] = []
        try:
            for row in saved:
                if "position" in row:
                    self.position = row["position"]
                else:
                    self.runs.restore(row)
            for row in arrived:
                if "told" in row:
                    events.clear()
                else:
                    events += self._replay(row)
        except (TraceError, TypeError) as error:
            folder = self._journal.folder
            raise ConfigError(f"{folder}: expected a state of dcl: {error}") from None
        return events

    def take(self, arrivals: Sequence[Arrival], *, position: Any = None) -> Iterator[list[Event]]:
        """Keep arrivals, then judge them one by one.

        Args:
            arrivals: What came in.
            position: Where the source has been read up to, JSON; None leaves it as it was.

        Returns:
            The events of each arrival, as they are judged. All arrivals are on the disk before the
            first of them; take all of it.

        Raises:
            OSError: If they cannot be written; nothing was taken then.
        """
        if self._journal is not None and (arrivals or position is not None):
            row: dict[str, Any] = {"take": [arrival.to_dict() for arrival in arrivals]}
            if position is not None:
                row["position"] = position
            self._journal.append([row])
        self.position = self.position if position is None else position
        return (self.runs.take(arrival) for arrival in arrivals)

    def expire(self) -> list[Event]:
        """Close the runs that have been silent too long.

        Raises:
            OSError: If that cannot be written.
        """
        events = self.runs.expire()
        if self._journal is not None and events:
            closed = [event.run_id for event in events]
            self._journal.append([{"expired": closed}], durable=False)
        return events

    def told(self) -> None:
        """All events so far have been handed on; writes a snapshot if the journal is long.

        Raises:
            OSError: If that cannot be written.
        """
        if self._journal is None:
            return
        if self._journal.nbytes > self._compact_bytes:
            self.snapshot()
        else:
            self._journal.append([{"told": True}], durable=False)

    def snapshot(self) -> None:
        """Write all open runs; restarting is then quick.

        Raises:
            OSError: If they cannot be written.
        """
        if self._journal is not None:
            self._journal.compact(self._rows())

    def close(self) -> None:
        """Let go of the folder."""
        if self._journal is not None:
            self._journal.close()

    def _rows(self) -> Iterable[dict[str, Any]]:
        """What a snapshot holds."""
        if self.position is not None:
            yield {"position": self.position}
        yield from self.runs.save()

    def _replay(self, row: dict[str, Any]) -> Iterator[Event]:
        """Do again what a row of the journal says."""
        for run_id in row.get("expired", ()):
            yield from self.runs.end(str(run_id), "idle")
        for arrival in row.get("take", ()):
            yield from self.runs.take(Arrival.from_dict(arrival))
        self.position = row.get("position", self.position)
