"""Every log format -> `Example` and `Trajectory`; nothing else in the package knows formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from dcl.errors import ConfigError, FormatError, TraceError
from dcl.formats import aegis, chat, magentic, native, otlp, whowhen
from dcl.formats.jsontext import Document, too_deep
from dcl.formats.source import STDIN, documents, files
from dcl.trajectory import Example, Trajectory, name_type

__all__ = ["FORMATS", "detect", "read_examples", "read_trajectories", "scan"]

# Ordered from the most telling marks to the least: the first that fits is taken.
_MODULES: dict[str, ModuleType] = {
    "native": native,
    "aegis": aegis,
    "whowhen": whowhen,
    "otlp": otlp,
    "magentic": magentic,
    "chat": chat,
}

FORMATS: tuple[str, ...] = tuple(_MODULES)
"""Names of the known formats, in the order in which `detect` tries them."""

_AUTO = "auto"
_RECORDS = ("native", "aegis", "whowhen", "magentic", "chat")


def detect(document: object) -> str:
    """Name of the format of a JSON document, by its structure.

    Raises:
        FormatError: If no known format fits.
    """
    for name, module in _MODULES.items():
        if module.matches(document):
            return name
    known = ", ".join(FORMATS)
    raise FormatError("", f"expected a log in one of the formats {known}, got {_shape(document)}")


def scan(path: str | Path, *, format: str = _AUTO) -> Iterator[Example | TraceError]:
    """Every example below a path, and in its place an error for every one that cannot be read.

    Args:
        path: A file, a folder (its JSON files in natural order), or "-" for standard input;
            gzip and xz are unpacked.
        format: One of `FORMATS`, or "auto" to look at each document.

    Returns:
        Examples and errors in the order of files and of records in them, read one at a time.

    Raises:
        ConfigError: If there is no such format.
    """
    if format != _AUTO and format not in _MODULES:
        known = ", ".join((_AUTO, *FORMATS))
        raise ConfigError(f"format: expected one of {known}, got {format!r}")
    return _scan(path, format)


def read_examples(path: str | Path, *, format: str = _AUTO) -> Iterator[Example]:
    """Every example below a path, with its labels; see `scan` for the arguments.

    Returns:
        Examples in the order of files and of records in them, read one at a time.

    Raises:
        TraceError: At the first that cannot be read.
        FormatError: At the first in no known format, or not in the named one.
        ConfigError: If there is no such format.
    """
    return _strict(scan(path, format=format))


def read_trajectories(path: str | Path, *, format: str = _AUTO) -> Iterator[Trajectory]:
    """Every trajectory below a path, without labels; see `scan` for the arguments.

    Returns:
        Trajectories in the order of files and of records in them, read one at a time.

    Raises:
        TraceError: At the first that cannot be read.
        FormatError: At the first in no known format, or not in the named one.
        ConfigError: If there is no such format.
    """
    return (example.trajectory for example in read_examples(path, format=format))


def _strict(items: Iterator[Example | TraceError]) -> Iterator[Example]:
    """The examples; the first error is raised."""
    for item in items:
        if isinstance(item, TraceError):
            raise item
        yield item


def _scan(path: str | Path, format: str) -> Iterator[Example | TraceError]:
    """File by file."""
    for file in files(path):
        if isinstance(file, TraceError):
            yield file
        else:
            yield from _scan_file(file, format)


def _scan_file(file: str, format: str) -> Iterator[Example | TraceError]:
    """Document by document; spans wait for the end, as a trace may be spread over lines."""
    spans = otlp.Batch(STDIN if file == "-" else file)
    for item in documents(file):
        if isinstance(item, TraceError):
            yield item
            continue
        for place, record in _records(item):
            yield from _scan_record(record, place, format, spans)
    try:
        for found in spans.examples():
            yield _located(found, spans.place) if isinstance(found, TraceError) else found
    except TraceError as error:
        yield _located(error, spans.place)


def _scan_record(
    record: Any, place: str, format: str, spans: otlp.Batch
) -> Sequence[Example | TraceError]:
    """The examples of one record; none yet if it holds spans."""
    try:
        name = _pick(record, format)
        if name == "otlp":
            spans.add(record)
            return []
        examples: list[Example] = _MODULES[name].parse(record, place)
    except TraceError as error:
        return [_located(error, place)]
    except RecursionError:
        return [too_deep(place)]
    return examples


def _records(item: Document) -> Iterator[Document]:
    """The document, or its entries if it is a list of records."""
    place, value = item
    first = value[0] if isinstance(value, list) and value else None
    if any(_MODULES[name].matches(first) for name in _RECORDS):
        yield from ((f"{place}[{i}]", record) for i, record in enumerate(value))
    else:
        yield item


def _pick(record: Any, format: str) -> str:
    """The format to read a record in."""
    if format == _AUTO:
        return detect(record)
    if not _MODULES[format].matches(record):
        raise FormatError("", f"expected the format {format}, got {_shape(record)}")
    return format


def _located(error: TraceError, place: str) -> TraceError:
    """The same error with the file in front of the path inside it."""
    inner = f"{place}: {error.place}" if error.place else place
    return type(error)(inner, error.problem)


def _shape(document: object) -> str:
    """What a document looks like, in a few words."""
    if isinstance(document, dict):
        keys = ", ".join(key[:40] for key in list(document)[:6])
        more = ", ..." if len(document) > 6 else ""
        return f"an object with the keys {keys}{more}" if keys else "an empty object"
    if isinstance(document, list):
        return f"a list that starts with {name_type(document[0])}" if document else "an empty list"
    return name_type(document)
