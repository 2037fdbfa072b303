"""The logs that a command is given: every record in order, counted, with the bad ones reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from dcl.errors import TraceError
from dcl.formats import scan
from dcl.formats.source import STDIN, files
from dcl.process import complain
from dcl.trajectory import Example

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Item(Generic[T]):
    """One record of the input, or why it cannot be used.

    Args:
        entry: File that it stands in, by its place in the input, from 0.
        number: Its place among the records of that file, from 1.
        source: Name of the file; `<stdin>` is standard input.
        found: What was made of it.
    """

    entry: int
    number: int
    source: str
    found: T | TraceError


@dataclass(slots=True)
class Tally:
    """What a command has seen so far.

    Args:
        traces: Runs that were read.
        unreadable: Files, lines or records that were not.
        failed: Runs over `--fail-on`.
    """

    traces: int = 0
    unreadable: int = 0
    failed: int = 0

    @contextmanager
    def refusing(self, source: str) -> Iterator[None]:
        """Report a run that was read but breaks a rule inside, and count it as unreadable.

        Args:
            source: File that it stands in.
        """
        try:
            yield
        except TraceError as error:
            self.traces -= 1
            self.unreadable += 1
            complain(f"error: {source}: {error}")


def list_files(paths: Iterable[str]) -> tuple[str | TraceError, ...]:
    """Names of the files below some paths, in order, with an error for each that is not read.

    Args:
        paths: Files, folders, and `-` for standard input.
    """
    return tuple(file for path in paths for file in files(path))


def read_items(entry: int, file: str | TraceError, format: str) -> Iterator[Item[Example]]:
    """Every record of one file; at least one item, as a file without any is an error.

    Args:
        entry: Place of the file in the input, from 0.
        file: As `list_files` gives it.
        format: One of `dcl.formats.FORMATS`, or `auto`.
    """
    source = STDIN if file == "-" else str(file)
    records: Iterable[Example | TraceError] = (
        [file] if isinstance(file, TraceError) else scan(file, format=format)
    )
    number = 0
    for found in records:
        number += 1
        yield Item(entry, number, source, found)
    if not number:
        yield Item(entry, 1, source, TraceError(str(file), "expected a trace, found none"))


def sift(
    items: Iterable[Item[T]], tally: Tally, report: Callable[[str], None] | None = None
) -> Iterator[tuple[Item[T], T]]:
    """The items that can be used, each with what was found; the others are reported.

    Args:
        items: Taken one at a time.
        tally: Counts both kinds; it is up to date with the item that was given last.
        report: Takes a line for each that cannot be used; None prints it to stderr.
    """
    report = report or complain
    for item in items:
        if isinstance(item.found, TraceError):
            tally.unreadable += 1
            report(f"error: {item.found}")
        else:
            tally.traces += 1
            yield item, item.found


def read(
    paths: Sequence[str],
    format: str,
    tally: Tally,
    report: Callable[[str], None] | None = None,
) -> Iterator[tuple[str, Example]]:
    """Every run with the file it stands in; what cannot be read is reported and counted.

    Args:
        paths: Files, folders, and `-` for standard input.
        format: One of `dcl.formats.FORMATS`, or `auto`.
        tally: Counts them.
        report: As in `sift`.
    """
    for entry, file in enumerate(list_files(paths)):
        for item, example in sift(read_items(entry, file, format), tally, report):
            yield item.source, example
