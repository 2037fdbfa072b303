"""The monitor for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from dcl.live.alarms import Event
from dcl.live.monitor import Judgement, Monitor
from dcl.live.openruns import Arrival
from dcl.trajectory import Turn


class AsyncMonitor:
    """A monitor for asyncio: nothing here holds up the event loop.

    Args:
        monitor: Does the work; may be used from threads at the same time.
    """

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor

    def ingest(self, run_id: str, turn: Turn | Mapping[str, Any], *, task: str = "") -> bool:
        """As `Monitor.ingest`, which needs no waiting for.

        Args:
            run_id: Name of the run.
            turn: The turn, or its plain JSON.
            task: What the system was asked to do.

        Returns:
            Whether it will be judged.
        """
        return self.monitor.ingest(run_id, turn, task=task)

    async def judge(self, *arrivals: Arrival) -> list[Judgement] | None:
        """As `Monitor.submit`, and wait for what comes of it.

        Args:
            arrivals: Turns, spans, or ends of runs.

        Returns:
            What came of each; None if they were refused.

        Raises:
            OSError: If they could not be written to the state folder.
        """
        futures = self.monitor.submit(arrivals)
        if futures is None:
            return None
        return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))

    async def look(self, run_id: str) -> Judgement | None:
        """As `Monitor.look`, and wait for the answer.

        Args:
            run_id: Name of the run.

        Returns:
            No attribution if the run is not open; None if the queue is full.
        """
        future = self.monitor.look(run_id)
        if future is None:
            return None
        judgement: Judgement = await asyncio.wrap_future(future)
        return judgement

    async def events(self) -> AsyncIterator[Event]:
        """As `Monitor.events`, until the monitor is closed."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is gone, and so is whoever waited
                loop.call_soon_threadsafe(woken.set)

        with self.monitor.listen(wake):
            while True:
                woken.clear()
                is_last = self.monitor.is_drained
                for event in self.monitor.events(wait=False):
                    yield event
                if is_last:
                    return
                await woken.wait()

    async def flush(self) -> None:
        """As `Monitor.flush`."""
        await asyncio.to_thread(self.monitor.flush)

    async def close(self) -> None:
        """As `Monitor.close`."""
        await asyncio.to_thread(self.monitor.close)
