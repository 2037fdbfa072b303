"""Files, folders and standard input -> JSON documents, each with the place it came from."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from dcl.errors import TraceError
from dcl.formats.jsontext import Document, split

STDIN = "<stdin>"
_SUFFIXES = (".json", ".jsonl", ".ndjson")
_LINES = (".jsonl", ".ndjson")
_PACKED = (".gz", ".xz")
_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"


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
        elif os.path.exists(file) and not (os.path.isfile(file) or os.path.isdir(file)):
            # Opening a pipe that nobody writes to would wait for ever.
            yield TraceError(file, "pipes and devices in a folder are not read; name it to read it")
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
    """Every JSON document of one file, or the error in its place; "-" is standard input."""
    place = STDIN if file == "-" else file
    try:
        with _open(file) as packed, _unpack(packed) as stream:
            yield from split(stream, place, by_line=_bare(place).endswith(_LINES))
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        yield TraceError(place, f"expected a readable file, got: {reason}")
    except TraceError as error:
        yield error


def _below(folder: str) -> Iterator[str]:
    """Files under a folder whose suffix says that they may be logs.

    A folder below it that cannot be listed is given as if it were a file, so that reading it says
    why.
    """

    def report(error: OSError) -> None:
        closed.append(error.filename)

    closed: list[str] = []
    for parent, folders, names in os.walk(folder, onerror=report):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if _bare(name).endswith(_SUFFIXES):
                yield os.path.join(parent, name)
    yield from closed


def _bare(name: str) -> str:
    """The name in lower case, without a suffix of compression."""
    name = name.lower()
    return name[:-3] if name.endswith(_PACKED) else name


def _open(file: str) -> IO[bytes]:
    """The bytes as they lie."""
    if file == "-":
        # Not closed with the block: standard input belongs to the caller. Read below its buffer,
        # whose lock Python wants as it ends, even if a thread still waits for input.
        return io.BufferedReader(_Rest(b"", getattr(sys.stdin.buffer, "raw", sys.stdin.buffer)))
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
