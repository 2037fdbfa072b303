"""Bytes -> JSON documents: one document, many after one another, or one on each line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO, Any

from dcl.errors import TraceError
from dcl.trajectory import DECODER

Document = tuple[str, Any]
"""Place and JSON value."""

Line = tuple[int, bytes]
"""Number from 1, and what stands on it."""

_SPACE = re.compile(r"\s*")
_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x00\x00": "UTF-32"}


def too_deep(place: str) -> TraceError:
    """The error for JSON that is nested deeper than Python can follow.

    Args:
        place: Where it stands.
    """
    return TraceError(place, "expected JSON of a usual depth, got deeper nesting")


def split(stream: IO[bytes], place: str, *, by_line: bool) -> Iterator[Document | TraceError]:
    """Every JSON document in a stream of bytes, with its place.

    Lines are read one at a time where each is a document of its own, so that a bad one costs
    only itself and memory stays flat; anything else is read whole.

    Args:
        stream: Plain bytes.
        place: Name of the stream.
        by_line: Whether its name already says that each line is a document.

    Raises:
        TraceError: If the first bytes are of another encoding than UTF-8.
    """
    lines = _lines(stream, place)
    first = next(lines, None)
    if first is None:
        yield TraceError(place, "expected JSON, got an empty file")
    elif by_line:
        yield from _each_line(_chain(first, lines), place)
    elif _is_whole(first[1]):
        second = next(lines, None)
        if second is None:
            yield from _decode_all(first[1], place, 1, alone=True)
        else:
            yield from _each_line(_chain(first, _chain(second, lines)), place)
    else:
        rest = list(lines)
        if len(rest) > 1 and len(first[1].strip()) > 2 and _is_whole(rest[0][1]):
            # The first of many lines is damaged: still a file of lines.
            yield from _each_line(_chain(first, iter(rest)), place)
        else:
            yield from _whole(first, rest, place)


def _lines(stream: IO[bytes], place: str) -> Iterator[Line]:
    """Lines that are not blank, numbered from 1, without the byte order mark.

    Raises:
        TraceError: If the first bytes are of another encoding than UTF-8.
    """
    for number, line in enumerate(stream, start=1):
        if number == 1:
            encoding = _BOMS.get(line[:2]) or (line[1:2] == b"\x00" and "UTF-16")
            if encoding:
                raise TraceError(place, f"expected UTF-8, got {encoding}; convert the file first")
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield number, line


def _chain(first: Line, rest: Iterator[Line]) -> Iterator[Line]:
    """One line put back in front of the others."""
    yield first
    yield from rest


def _is_whole(line: bytes) -> bool:
    """Whether a line holds whole JSON objects or lists, and nothing that goes on below."""
    try:
        text = line.decode("utf-8", "surrogatepass").strip()
        value, end = DECODER.raw_decode(text)
    except RecursionError:
        return True  # a layout over lines puts no such depth on one
    except ValueError:
        return False
    return isinstance(value, (dict, list)) and text[end:].lstrip()[:1] in ("", "{", "[")


def _each_line(lines: Iterator[Line], place: str) -> Iterator[Document | TraceError]:
    """One document a line; a document laid out over lines may follow."""
    for number, line in lines:
        if line.strip() in (b"{", b"["):
            yield from _whole((number, line), list(lines), place)
        else:
            yield from _decode_all(line, place, number)


def _whole(first: Line, rest: list[Line], place: str) -> Iterator[Document | TraceError]:
    """The documents in all the lines together."""
    parts, last = [first[1]], first[0]
    for number, line in rest:
        # Blank lines were dropped; put them back so that error messages count as editors do.
        parts.append(b"\n" * (number - last - 1) + line)
        last = number
    yield from _decode_all(b"".join(parts), place, first[0], alone=first[0] == 1)


def _decode_all(
    data: bytes, place: str, line: int, *, alone: bool = False
) -> Iterator[Document | TraceError]:
    """Every value in the text, one after the other; the first error ends it."""
    start = 0
    try:
        text = data.rstrip().decode("utf-8", "surrogatepass")
        while (start := _skip(text, start)) < len(text):
            at = line + text.count("\n", 0, start)
            value, end = DECODER.raw_decode(text, start)
            yield (place if alone and start == _skip(text, 0) else f"{place}:{at}"), value
            start = end
    except UnicodeDecodeError as error:
        at = line + data.count(b"\n", 0, error.start)
        yield TraceError(f"{place}:{at}", "expected UTF-8, got other bytes; convert the file first")
    except json.JSONDecodeError as error:
        at = line + error.lineno - 1
        yield TraceError(
            f"{place}:{at}",
            f"expected JSON, got text that is none ({error.msg} at column {error.colno}); "
            "it may be cut off",
        )
    except ValueError as error:
        yield TraceError(f"{place}:{line}", f"expected JSON of a usual size, got more: {error}")
    except RecursionError:
        yield too_deep(f"{place}:{line}")


def _skip(text: str, start: int) -> int:
    """Position of the next character that is not white space."""
    match = _SPACE.match(text, start)
    return match.end() if match else start
