"""Work on a Ray cluster: the one that `RAY_ADDRESS` names, or one on this machine for a while.

Ray moves calls and results. Files stay where they are: every machine of a cluster has to see the
same folders under the same names, and to have the same version of dcl. Both are checked before a
worker does anything.

What a worker refuses is handed back as a value and raised here, so it is the same error with the
same words as on one machine. Everything else that goes wrong there comes as an error of Ray.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from dcl import __version__
from dcl.errors import ConfigError, DclError, needing

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

_BLOCK = 256 << 10  # bytes of rows that travel together; a smaller block is a fairer share of work
_READERS = 4  # files that are read side by side


@dataclass(frozen=True, slots=True)
class Site:
    """Where the program stands that hands work out.

    Args:
        folder: Its working folder, which relative names start from.
        version: Its version of dcl.
    """

    folder: str = field(default_factory=os.getcwd)
    version: str = __version__

    def enter(self) -> None:
        """Stand there too.

        Raises:
            ConfigError: If this machine has another version, or no such folder.
        """
        machine = socket.gethostname()
        if self.version != __version__:
            raise ConfigError(
                f"{machine}: expected dcl {self.version}, as where the command was started, got "
                f"{__version__}; install the same version on every machine of the cluster"
            )
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise ConfigError(
                f"{machine}: expected the folder {self.folder}, got: {error.strerror}; every "
                "machine of the cluster has to see the same files under the same names"
            ) from None


@dataclass(frozen=True, slots=True)
class _Refusal:
    """An error that a worker hands back."""

    error: DclError


class Cluster:
    """A cluster that this process is connected to; `connect` gives one.

    Args:
        ray: The module.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def slots(self, cores: int = 1) -> int:
        """How many workers the machines have room for, at least 1.

        Args:
            cores: Of each worker; > 0.

        Raises:
            ConfigError: If no machine has so many.
        """
        machines = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        slots = sum(int(machine.get("CPU", 0)) // cores for machine in machines)
        if not slots:
            raise ConfigError(f"expected a machine with {cores} cores in the cluster, found none")
        return slots

    def map(self, work: Callable[..., R], *arguments: Iterable[Any], workers: int) -> list[R]:
        """Call a function once for each set of arguments, with one core for each call.

        A call whose machine fails is made again elsewhere, so it has to bear being repeated.

        Args:
            work: Importable by name on every machine.
            arguments: One iterable for each argument, as for the built-in `map`.
            workers: Calls that are under way at the same time; > 0.

        Returns:
            Results in the order of the arguments.

        Raises:
            DclError: What a call raised; calls that are under way are stopped.
        """
        call = self._ray.remote(num_cpus=1, max_retries=3)(_visit).options(
            name=getattr(work, "__name__", "work")
        )
        site = Site()
        results: dict[int, R] = {}
        running: dict[Any, int] = {}
        try:
            for i, values in enumerate(zip(*arguments, strict=False)):  # one may be endless
                if len(running) >= workers:
                    self._collect(running, results)
                running[call.remote(site, work, values)] = i
            while running:
                self._collect(running, results)
        finally:
            for reference in running:
                self._ray.cancel(reference, force=True)
        return [results[i] for i in range(len(results))]

    def stream(
        self,
        sources: Iterable[S],
        read: Callable[[S], Iterator[R]],
        start: Callable[[], Callable[[Sequence[R]], list[T]]],
        *,
        batch_size: int,
        cores: int = 1,
    ) -> Iterator[T]:
        """Read sources, and work on what is in them, with bounded memory and in order.

        Args:
            sources: What to read, in order.
            read: Gives the rows of a source; several sources are read side by side.
            start: Called once by each worker, before its first batch; gives what is called with
                each batch and returns one result a row.
            batch_size: Most rows of a batch; > 0.
            cores: Of each worker; > 0.

        Returns:
            One result a row, in the order of sources and of rows in them.

        Raises:
            DclError: What a worker raised, after the results of all rows before it.
        """
        rows = [{"source": pickle.dumps(source)} for source in sources]
        if not rows:
            return
        site = Site()
        data = self._ray.data
        items = data.from_items(rows, override_num_blocks=min(len(rows), 64 * _READERS))
        items.context.execution_options.preserve_order = True
        items.context.enable_progress_bars = False
        items.context.target_max_block_size = _BLOCK
        slots = self.slots(cores)
        results = items.flat_map(
            partial(_read, site, read),
            num_cpus=0,  # so that it never waits for a worker that waits for it
            compute=data.TaskPoolStrategy(size=min(len(rows), _READERS)),
        ).map_batches(
            _Worker,
            fn_constructor_args=(site, start),
            batch_size=batch_size,
            num_cpus=cores,
            # All at once, but none is demanded: Ray warns where one source has work for one alone.
            compute=data.ActorPoolStrategy(min_size=1, max_size=slots, initial_size=slots),
        )
        for row in results.iter_rows():
            result = pickle.loads(row["result"])
            if isinstance(result, _Refusal):
                raise result.error
            yield result

    def _collect(self, running: dict[Any, int], results: dict[int, R]) -> None:
        """Take the result of a call that is done.

        Raises:
            DclError: If the call raised it.
        """
        (done,), _ = self._ray.wait(list(running), num_returns=1)
        result = self._ray.get(done)
        if isinstance(result, _Refusal):
            raise result.error
        results[running.pop(done)] = result


def _visit(site: Site, work: Callable[..., R], values: tuple[Any, ...]) -> R | _Refusal:
    """One call, on the machine of a worker."""
    try:
        site.enter()
        return work(*values)
    except DclError as error:
        return _Refusal(error)


def _read(
    site: Site, read: Callable[[Any], Iterator[Any]], row: dict[str, bytes]
) -> Iterator[dict[str, bytes]]:
    """The rows of one source."""
    try:
        site.enter()
        for item in read(pickle.loads(row["source"])):
            yield {"row": pickle.dumps(item)}
    except DclError as error:
        yield {"row": pickle.dumps(_Refusal(error))}


class _Worker(Generic[R, T]):
    """Works on batches; starts with the first, as an error before it would not come back as one."""

    def __init__(self, site: Site, start: Callable[[], Callable[[Sequence[R]], list[T]]]) -> None:
        self._site = site
        self._start = start
        self._work: Callable[[Sequence[R]], list[T]] | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        """One result a row."""
        rows = [pickle.loads(row) for row in batch["row"]]
        good = [row for row in rows if not isinstance(row, _Refusal)]
        try:
            if self._work is None:
                self._site.enter()
                self._work = self._start()
            results = iter(self._work(good))
        except DclError as error:
            return {"result": [pickle.dumps(_Refusal(error))] * len(rows)}
        found = (row if isinstance(row, _Refusal) else next(results) for row in rows)
        return {"result": [pickle.dumps(result) for result in found]}


@contextmanager
def connect(*, echo: bool = False) -> Iterator[Cluster]:
    """Join the cluster of `RAY_ADDRESS`, or start one on this machine and end it again.

    A process that is connected to Ray already stays so.

    Args:
        echo: Show on stderr what workers print.

    Raises:
        ConfigError: If Ray is not installed, the cluster cannot be joined, or it fails.
    """
    ray = import_ray()
    joins = not ray.is_initialized()
    if joins:
        _join(ray, echo)
    try:
        yield Cluster(ray)
    except ray.exceptions.RayTaskError:
        raise  # work that broke: a mistake of ours, with its traceback
    except ray.exceptions.RayError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the cluster failed, start the command again: {reason}") from None
    finally:
        if joins:
            ray.shutdown()


def _join(ray: Any, echo: bool) -> None:
    """Connect this process.

    Raises:
        ConfigError: If there is no such cluster, or it is of another version.
    """
    address = os.environ.get("RAY_ADDRESS")
    stop = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address or "local",
            log_to_driver=echo,
            logging_level=logging.ERROR,
            **({} if address else {"include_dashboard": False}),
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        place = f"RAY_ADDRESS={address}" if address else "Ray"
        reason = " ".join(str(error).split())
        raise ConfigError(f"{place}: expected a cluster to join, got: {reason}") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, stop)  # Ray put a handler of its own there


def import_ray() -> Any:
    """The module `ray` with `ray.data`, quiet, and without reports of its use to its makers.

    Raises:
        ConfigError: If it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # else it writes to stderr from C++
    with needing("ray", "Ray"):
        import ray
        import ray.data
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return ray
