"""Files, folders and standard input -> JSON documents, each with the place it came from."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from dcl.errors import TraceError

Document = tuple[str, Any]
"""Place and JSON value."""

STDIN = "<stdin>"
_SUFFIXES = (".json", ".jsonl", ".ndjson")
_LINES = (".jsonl", ".ndjson")
_PACKED = (".gz", ".xz")
_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x00\x00": "UTF-32"}

# Not strict: logs hold raw control characters inside strings. NaN is no JSON value and would
# break round trips, so it reads as null.
_DECODER = json.JSONDecoder(strict=False, parse_constant=lambda _: None)


def files(path: str | Path) -> Iterator[str | TraceError]:
    """Names of the files to read: the file itself, or all JSON files below a folder.

    Names come in natural order (2.json before 10.json); hidden folders are not entered.
    """
    name = str(path)
    if name == "-" or not os.path.isdir(name):
        yield name
        return
    found = sorted(_below(name), key=natural)
    if not found:
        endings = ", ".join(_SUFFIXES)
        yield TraceError(name, f"expected files ending in {endings} (or .gz, .xz), found none")
    for file in found:
        if os.path.basename(file).startswith("."):
            yield TraceError(file, "hidden files in a folder are not read; name it to read it")
        else:
            yield file


def natural(name: str) -> tuple[list[str | int], str]:
    """Sort key that counts digits as numbers."""
    pieces = re.split(r"([0-9]{1,18})", name.casefold())
    return [int(piece) if i % 2 else piece for i, piece in enumerate(pieces)], name


def stem(place: str) -> str:
    """A short name for a place: the file without folder and suffixes, and the line, if any."""
    if place.startswith(STDIN):
        return "stdin" + place[len(STDIN) :]
    name = re.split(r"[/\\]", place)[-1]
    kept = re.sub(r"\.(json|jsonl|ndjson)(\.gz|\.xz)?(?=$|[:\[])", "", name, count=1)
    return kept or name or "log"


def documents(file: str) -> Iterator[Document | TraceError]:
    """Every JSON document of one file; "-" is standard input.

    Lines are read one at a time where each is a document of its own, so that a bad one costs
    only itself and memory stays flat; anything else is read whole.
    """
    place = STDIN if file == "-" else file
    try:
        with _open(file) as packed, _unpack(packed) as stream:
            yield from _documents(stream, place)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        yield TraceError(place, f"expected a readable file, got: {reason}")
    except TraceError as error:
        yield error


def _below(folder: str) -> Iterator[str]:
    """Files under a folder whose suffix says that they may be logs."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if _bare(name).endswith(_SUFFIXES):
                yield os.path.join(parent, name)


def _bare(name: str) -> str:
    """The name in lower case, without a suffix of compression."""
    name = name.lower()
    return name[:-3] if name.endswith(_PACKED) else name


def _open(file: str) -> IO[bytes]:
    """The bytes as they lie."""
    if file == "-":
        # Not closed with the block: standard input belongs to the caller.
        return io.BufferedReader(_Rest(b"", sys.stdin.buffer))
    return open(file, "rb")


class _Rest(io.RawIOBase):
    """A stream that gives back the bytes already taken from another, then goes on with it."""

    def __init__(self, head: bytes, stream: IO[bytes]) -> None:
        self._head = head
        self._stream = stream

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer from the head first."""
        size = len(buffer)
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
        else:
            data = getattr(self._stream, "read1", self._stream.read)(size)
        buffer[: len(data)] = data
        return len(data)


def _unpack(stream: IO[bytes]) -> IO[bytes]:
    """The plain bytes, by the first bytes: a suffix is missing on standard input, or wrong."""
    head = stream.read(6)
    whole = io.BufferedReader(_Rest(head, stream))
    if head.startswith(_GZIP):
        return io.BufferedReader(gzip.GzipFile(fileobj=whole))
    if head == _XZ:
        return io.BufferedReader(lzma.LZMAFile(whole))
    return whole


def _documents(stream: IO[bytes], place: str) -> Iterator[Document | TraceError]:
    """Tell a file of lines from a document that spans lines."""
    lines = _lines(stream, place)
    first = next(lines, None)
    if first is None:
        yield TraceError(place, "expected JSON, got an empty file")
    elif _bare(place).endswith(_LINES):
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


Line = tuple[int, bytes]


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
    """Whether a line starts with a whole JSON value."""
    try:
        _DECODER.raw_decode(line.decode("utf-8", "surrogatepass").lstrip())
    except (ValueError, RecursionError):
        return False
    return True


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
        text = data.decode("utf-8", "surrogatepass")
        while (start := _skip(text, start)) < len(text):
            at = line + text.count("\n", 0, start)
            value, end = _DECODER.raw_decode(text, start)
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
    except (ValueError, RecursionError) as error:
        yield TraceError(f"{place}:{line}", f"expected JSON of a usual size, got more: {error}")


def _skip(text: str, start: int) -> int:
    """Position of the next character that is not white space."""
    match = re.compile(r"\s*").match(text, start)
    return match.end() if match else start
