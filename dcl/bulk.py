"""Attribution of any number of runs: in order, in bounded memory, here or on a Ray cluster.

Runs are read one at a time, scored in batches, and given on as they are done. Each comes with a
`Mark`, from which a later process can go on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from dcl.errors import ArtifactError, ConfigError, TraceError
from dcl.intake import Item, Tally, read_items, sift
from dcl.report import Report
from dcl.report.record import dump, record
from dcl.trajectory import Example, Trajectory

if TYPE_CHECKING:
    from dcl.attribution import Attribution, Attributor
    from dcl.cluster import Cluster
    from dcl.results import Results

_BATCH = 16  # traces that are scored together; as many more are being read
_CHUNK = 64  # traces that are written together, and lost together when the process is killed

Source = tuple[int, "str | TraceError"]
"""Place of a file in the input, and its name as `dcl.intake.list_files` gives it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How far the input has been handled: up to and with one run.

    Args:
        entry: File that the run stands in, by its place in the input, from 0.
        number: Its place among the records of that file, from 1; 0 is before the first.
        run: Its id.
        traces: Runs that were read so far.
        unreadable: Files, lines or records so far that were not.
    """

    entry: int = 0
    number: int = 0
    run: str = ""
    traces: int = 0
    unreadable: int = 0


@dataclass(frozen=True, slots=True)
class Logs:
    """The input of a command, and what of it is done.

    Args:
        files: As `dcl.intake.list_files` gives them.
        format: One of `dcl.formats.FORMATS`, or `auto`.
        done: Everything up to here is left out.
    """

    files: Sequence[str | TraceError]
    format: str
    done: Mark = Mark()

    def sources(self) -> Iterator[Source]:
        """The files that are not done yet, each with its place."""
        return islice(enumerate(self.files), self.done.entry, None)

    def items(self) -> Iterator[Item[Example]]:
        """The records that are not done yet.

        Raises:
            ConfigError: If the last record that is done is not where it was.
        """
        for source in self.sources():
            yield from read_source(source, self.format, self.done)


def read_source(source: Source, format: str, done: Mark) -> Iterator[Item[Example]]:
    """The records of one file that are not done yet; runs that are too long are errors.

    Args:
        source: The file.
        format: One of `dcl.formats.FORMATS`, or `auto`.
        done: Records of this file up to here are left out.

    Raises:
        ConfigError: If the last record that is done is not where it was.
    """
    entry, file = source
    items = read_items(entry, file, format)
    if entry == done.entry and done.number:
        last = next(islice(items, done.number - 1, None), None)
        found = last.found.trajectory.id if last and isinstance(last.found, Example) else None
        if found != done.run:
            raise ConfigError(
                f"{file}: expected the run {done.run!r} as record {done.number}, where it was "
                f"when the results were written, got {found!r}; name another --out"
            )
    for item in items:
        yield _short_enough(item)


def attribute(
    attributor: Attributor, items: Iterable[Item[Example]], tally: Tally
) -> Iterator[tuple[Mark, Report]]:
    """Attribute run by run in this process, with a bounded number of them in memory.

    Args:
        attributor: The model.
        items: Taken as they are needed.
        tally: Counts them.

    Raises:
        ArtifactError: If the model gives a number that is none.
    """
    waiting: deque[tuple[Mark, str, Trajectory]] = deque()  # read, and not yet attributed

    def trajectories() -> Iterator[Trajectory]:
        for item, example in sift(items, tally):
            run = example.trajectory
            waiting.append((_mark(item, run, tally), item.source, run))
            yield run

    for attribution in attributor.batch(trajectories(), batch_size=_BATCH):
        mark, source, run = waiting.popleft()
        yield mark, _report(source, run, attribution)


def attribute_on(
    cluster: Cluster, load: Callable[[], Attributor], logs: Logs, tally: Tally, *, cores: int = 1
) -> Iterator[tuple[Mark, Report]]:
    """Attribute on a cluster, in the same order and with the same results as `attribute`.

    Files are read on the cluster too, several at a time.

    Args:
        cluster: Every machine of it sees the files and the model.
        load: Gives the model; called once by each worker.
        logs: The input.
        tally: Counts what comes back.
        cores: Of each worker; > 0.

    Raises:
        ArtifactError: If the model cannot be loaded, or gives a number that is none.
        ConfigError: If a machine does not see what this one does.
    """
    scored = cluster.stream(
        logs.sources(),
        partial(read_source, format=logs.format, done=logs.done),
        partial(_start, load),
        batch_size=_BATCH,
        cores=cores,
    )
    for item, report in sift(scored, tally):
        yield _mark(item, report.trajectory, tally), report


def write(reports: Iterable[tuple[Mark, Report]], results: Results, tally: Tally) -> None:
    """Write reports as JSON lines, so that a killed process loses none and repeats none.

    Args:
        reports: Taken as they are needed.
        results: Where to.
        tally: Its `failed` is kept beside the results.

    Raises:
        OSError: If they cannot be written.
    """
    rest = iter(reports)
    while chunk := list(islice(rest, _CHUNK)):
        lines = "".join(dump(record(report)) + "\n" for _, report in chunk)
        results.add(lines, chunk[-1][0], tally.failed)


def _start(
    load: Callable[[], Attributor],
) -> Callable[[Sequence[Item[Example]]], list[Item[Report]]]:
    """What a worker calls for each batch."""
    return partial(_score, load())


def _score(attributor: Attributor, items: Sequence[Item[Example]]) -> list[Item[Report]]:
    """A batch with reports in the place of runs; errors stay as they are."""
    runs = [item.found.trajectory for item in items if isinstance(item.found, Example)]
    attributions = attributor.batch(runs, batch_size=_BATCH)
    return [
        Item(
            item.entry,
            item.number,
            item.source,
            _report(item.source, item.found.trajectory, next(attributions))
            if isinstance(item.found, Example)
            else item.found,
        )
        for item in items
    ]


def _report(source: str, run: Trajectory, attribution: Attribution) -> Report:
    """A report of numbers.

    Raises:
        ArtifactError: If one is none.
    """
    probs = (attribution.agent_probs, attribution.pair_probs, attribution.mode_probs)
    if not all(math.isfinite(p.sum()) for p in (*probs, attribution.step_probs)):
        raise ArtifactError(
            f"the model gave no number (NaN) for the trace {run.id}: "
            "it is damaged; check it with dcl models verify"
        )
    return Report(source, run, attribution)


def _short_enough(item: Item[Example]) -> Item[Example]:
    """The same, but that a run that is too long to be attributed is an error."""
    from dcl.bag import check_length

    if isinstance(item.found, Example):
        try:
            check_length(item.found.trajectory)
        except TraceError as error:
            place = f"{item.source}: {error.place}"
            return replace(item, found=TraceError(place, error.problem))
    return item


def _mark(item: Item[Any], run: Trajectory, tally: Tally) -> Mark:
    """The place behind an item, right after it was counted."""
    return Mark(item.entry, item.number, run.id, tally.traces, tally.unreadable)
