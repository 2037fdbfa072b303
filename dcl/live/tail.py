"""Lines of a file that grows, as they are finished: through rotation, truncation and restarts."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

_CHUNK = 1 << 20
_LONGEST = 64 << 20  # bytes of a line; a longer one is cut there and cannot be read
_HEAD = 64  # bytes at the start by which a file is known again


class Line(NamedTuple):
    """One line without its end, and where it starts."""

    place: str
    content: bytes


class Tail:
    """Follows a file by its name.

    A file that is moved away is read to its end before the new one of the name is opened. A file
    that was cut short or written anew is read from its start. A last line without an end waits for
    it, or for the next file.

    Args:
        path: The file; need not be there yet.
        position: What `position` was when reading stopped; None starts at the start.
        follow: Go on at the end of the file; otherwise reading is finished there.
    """

    def __init__(
        self, path: Path, position: Mapping[str, Any] | None = None, *, follow: bool = True
    ) -> None:
        self.is_finished = False
        self._path = path
        self._follow = follow
        self._file: BinaryIO | None = None
        self._start()
        if position is not None:
            self._resume(position)

    @property
    def position(self) -> dict[str, Any] | None:
        """Where the lines that were given end, as JSON; None if no file was there."""
        if self._file is None:
            return None
        state = os.fstat(self._file.fileno())
        return {
            "device": state.st_dev,
            "inode": state.st_ino,
            "offset": self._offset,
            "head": self._head.hex(),
        }

    def read(self, wait_s: float) -> list[Line]:
        """The lines that were finished since; does not wait.

        Args:
            wait_s: Not used.

        Raises:
            OSError: If the file cannot be read.
        """
        if self._file is None and not self._open():
            if not self._follow:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path))
            return []
        assert self._file is not None
        self._look_for_a_cut(self._file)
        chunk = self._file.read(_CHUNK)
        if chunk:
            return self._split(chunk)
        moved = self._is_moved(self._file)
        # Whoever wrote to the old file may have done so until just now.
        last = self._file.read(_CHUNK) if moved else b""
        if last:
            return self._split(last)
        if self._rest and (moved or not self._follow):
            return [self._unfinished()]
        if moved and self._follow:
            self.close()
        self.is_finished = not self._follow
        return []

    def close(self) -> None:
        """Close the file; the next `read` opens the one that has its name."""
        if self._file is not None:
            self._file.close()
        self._file = None
        self._start()

    def _start(self) -> None:
        """Nothing was read of this file."""
        self._offset, self._rest, self._head = 0, b"", b""

    def _open(self, path: Path | None = None) -> bool:
        """Open a file at its start; false if there is none."""
        try:
            self._file = open(path or self._path, "rb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            return False
        self._start()
        return True

    def _split(self, chunk: bytes) -> list[Line]:
        """Whole lines; the rest waits."""
        lines = []
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _LONGEST:
            whole, self._rest = [*whole, self._rest], b""
        for content in whole:
            lines.append(Line(f"{self._path}: byte {self._offset}", content))
            self._offset += len(content) + 1
            if len(self._head) < _HEAD:
                self._head = (self._head + content + b"\n")[:_HEAD]
        return lines

    def _unfinished(self) -> Line:
        """The last line of a file that will not go on."""
        line = Line(f"{self._path}: byte {self._offset}", self._rest)
        self._offset, self._rest = self._offset + len(self._rest), b""
        return line

    def _look_for_a_cut(self, file: BinaryIO) -> None:
        """Start again if the file was cut, or written anew, behind what was read."""
        size = os.fstat(file.fileno()).st_size
        head = os.pread(file.fileno(), len(self._head), 0)
        if size < self._offset + len(self._rest) or head != self._head:
            file.seek(0)
            self._start()

    def _is_moved(self, file: BinaryIO) -> bool:
        """Whether another file has the name now."""
        state = os.fstat(file.fileno())
        try:
            now = os.stat(self._path)
        except FileNotFoundError:
            return False
        return (state.st_dev, state.st_ino) != (now.st_dev, now.st_ino)

    def _resume(self, position: Mapping[str, Any]) -> None:
        """Go on where another process stopped, in the file of that time if it can be found."""
        offset, head = int(position["offset"]), bytes.fromhex(position["head"])
        folder = self._path.parent
        names = [self._path, *(sorted(folder.iterdir()) if folder.is_dir() else ())]
        for path in names:
            try:
                state = os.stat(path)
            except OSError:
                continue
            known = (state.st_dev, state.st_ino) == (position["device"], position["inode"])
            if known and state.st_size >= offset and self._open(path):
                assert self._file is not None
                if os.pread(self._file.fileno(), len(head), 0) == head:
                    self._file.seek(offset)
                    self._offset, self._head = offset, head
                    return
                self.close()


class StreamTail:
    """The same for a pipe or standard input.

    Args:
        stream: Read to its end.
        name: How to call it.
    """

    position = None

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self.is_finished = False
        self._stream = stream
        self._name = name
        self._number = 0
        self._rest = b""

    def read(self, wait_s: float) -> list[Line]:
        """The lines that were finished since; waits for the next bytes.

        Args:
            wait_s: Seconds to wait, where the platform can wait for a stream; else until some come.

        Raises:
            OSError: If the stream cannot be read.
        """
        if not _is_ready(self._stream, wait_s):
            return []
        read: Callable[[int], bytes] = getattr(self._stream, "read1", self._stream.read)
        chunk = read(_CHUNK)
        self.is_finished = not chunk
        *whole, self._rest = (self._rest + (chunk or (b"\n" if self._rest else b""))).split(b"\n")
        first = self._number + 1
        self._number += len(whole)
        return [Line(f"{self._name}:{i}", content) for i, content in enumerate(whole, first)]

    def close(self) -> None:
        """Nothing: the stream belongs to the caller."""


def _is_ready(stream: BinaryIO, wait_s: float) -> bool:
    """Whether a stream has bytes or has ended; true where that cannot be asked."""
    try:
        return bool(select.select([stream], [], [], wait_s)[0])
    except (OSError, ValueError, AttributeError):  # no file behind it, or Windows
        return True
