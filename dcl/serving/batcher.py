"""Runs that come in at the same time, scored together off the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from dcl.attribution import Attribution, Attributor
from dcl.trajectory import Trajectory


class Batcher:
    """Collects runs while others are being scored. Lives in one event loop.

    Args:
        attributor: The model; may be exchanged at any time.
        batch: Runs that are scored together; > 0.
        waiting: Runs that may wait; > 0.
    """

    def __init__(self, attributor: Attributor, *, batch: int, waiting: int) -> None:
        self.attributor = attributor
        self._batch = batch
        self._limit = waiting
        self._queue: deque[tuple[Trajectory, asyncio.Future[Attribution]]] = deque()
        self._pool = ThreadPoolExecutor(1, "dcl-batch")
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Number of runs that wait."""
        return len(self._queue)

    def submit(self, runs: Sequence[Trajectory]) -> list[asyncio.Future[Attribution]] | None:
        """Take runs, all or none.

        Args:
            runs: To be scored.

        Returns:
            The attribution of each, when it is there; None if too many wait.
        """
        if len(self._queue) + len(runs) > self._limit:
            return None
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in runs]
        self._queue.extend(zip(runs, futures, strict=True))
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._work())
        return futures

    def close(self) -> None:
        """Wait for what is being scored; give up the rest."""
        self._pool.shutdown(cancel_futures=True)

    async def _work(self) -> None:
        """Score what waits, a batch at a time."""
        loop = asyncio.get_running_loop()
        while self._queue:
            taken = [self._queue.popleft() for _ in range(min(self._batch, len(self._queue)))]
            taken = [(run, future) for run, future in taken if not future.done()]
            results = await loop.run_in_executor(self._pool, self._score, [run for run, _ in taken])
            for (_, future), result in zip(taken, results, strict=True):
                if future.done():  # nobody waits any more
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _score(self, runs: Sequence[Trajectory]) -> list[Attribution | Exception]:
        """Score runs together; if that fails, each by itself, so that one cannot spoil others."""
        try:
            return list(self.attributor.batch(runs, batch_size=max(len(runs), 1)))
        except Exception:
            return [self._score_one(run) for run in runs]

    def _score_one(self, run: Trajectory) -> Attribution | Exception:
        """Score one run."""
        try:
            return self.attributor(run)
        except Exception as error:
            return error
