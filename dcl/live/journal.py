"""A folder in which open runs outlive the process, even one that is killed.

What has come in is written to a journal before it is judged, and all of it is on the disk when
`Journal.append` comes back. From time to time a snapshot takes the place of the journal:

    snapshot.jsonl     a header, one line for each open run, and their number
    journal-N.jsonl    what has come in since; the header of the snapshot names N
    lock               held while a process uses the folder

A file under one of these names is whole, but for the last line of the journal, which is cut off
when it is not: nobody was told that it had been accepted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from dcl.errors import ConfigError
from dcl.files import claim, sync_folder, whole

SCHEMA = "dcl.state/1"
"""Value of the `schema` key in the header of a snapshot."""

_SNAPSHOT, _LOCK = "snapshot.jsonl", "lock"

Row = Mapping[str, Any]


class Journal:
    """The state folder of one process.

    Args:
        folder: Made if it is not there.

    Raises:
        ConfigError: If it cannot be used, or another process uses it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nbytes = 0
        self._number = 0
        self._file: FileIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileIO(folder / _LOCK, "a")
        except OSError as error:
            raise ConfigError(f"{folder}: cannot keep state there: {error.strerror}") from None
        try:
            claim(self._lock, f"{folder}: another process keeps its state there")
        except ConfigError:
            self._lock.close()
            raise

    def recover(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """What was there when the last process ended; call it once, before all else.

        Returns:
            The rows of the snapshot, and the rows that came in after it.

        Raises:
            ConfigError: If the snapshot is damaged or of another version.
        """
        header, *open_runs = self._snapshot()
        self._number = int(header["journal"])
        file = self._path(self._number)
        arrived, self.nbytes = _lines(file.read_bytes() if file.exists() else b"")
        self._file = FileIO(file, "r+" if file.exists() else "w+")
        self._cut()
        for old in (*self.folder.glob("journal-*.jsonl"), *self.folder.glob(f".{_SNAPSHOT}.*")):
            if old != file and old.is_file():
                old.unlink()
        return open_runs, arrived

    def append(self, rows: Iterable[Row], *, durable: bool = True) -> None:
        """Write rows at the end.

        Args:
            rows: JSON values.
            durable: Wait until they are on the disk.

        Raises:
            OSError: If they cannot be written.
        """
        data = b"".join(_line(row) for row in rows)
        file = self._journal()
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            if durable:
                os.fsync(file.fileno())
        except OSError:
            self._cut()  # half a line would hide what is written after it
            raise
        self.nbytes += len(data)

    def compact(self, rows: Iterable[Row]) -> None:
        """Put a snapshot in the place of the journal.

        Args:
            rows: All that is to be kept, JSON values; taken one at a time.

        Raises:
            OSError: If it cannot be written; rows are kept all the same.
        """
        following = self._path(self._number + 1)
        with whole(self.folder / _SNAPSHOT) as written:
            with open(written, "wb") as stream:
                stream.write(_line({"schema": SCHEMA, "journal": self._number + 1}))
                count = sum(1 for row in rows if stream.write(_line(row)))
                stream.write(_line({"rows": count}))
                stream.flush()
                os.fsync(stream.fileno())
            fresh = FileIO(following, "w+")
        old, before = self._journal(), self._path(self._number)
        # The snapshot names the new journal: from here on, whatever fails, rows belong there.
        self._file, self._number, self.nbytes = fresh, self._number + 1, 0
        old.close()
        sync_folder(self.folder)
        before.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the folder."""
        if self._file is not None:
            self._file.close()
        self._lock.close()

    def _journal(self) -> FileIO:
        """The open journal; recovered now if nobody did."""
        if self._file is None:
            self.recover()
        assert self._file is not None
        return self._file

    def _cut(self) -> None:
        """Drop what stands after the last whole line."""
        file = self._journal()
        file.truncate(self.nbytes)
        file.seek(self.nbytes)

    def _snapshot(self) -> list[dict[str, Any]]:
        """Header and rows of the snapshot; only a header if there is none."""
        file = self.folder / _SNAPSHOT
        if not file.exists():
            return [{"journal": 0}]
        rows, _ = _lines(file.read_bytes())
        if (
            len(rows) < 2
            or rows[0].get("schema") != SCHEMA
            or rows[-1].get("rows") != len(rows) - 2
        ):
            raise ConfigError(f"{file}: expected a whole snapshot of {SCHEMA}; remove the folder")
        return rows[:-1]

    def _path(self, number: int) -> Path:
        """The journal of this number."""
        return self.folder / f"journal-{number}.jsonl"


def _line(row: Row) -> bytes:
    """One line of JSON; lone surrogates become escapes."""
    return json.dumps(row, ensure_ascii=True).encode("ascii") + b"\n"


def _lines(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The rows of whole lines up to the first that is none, and where they end."""
    rows, end = [], 0
    for line in _split(content):
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
        end += len(line)
    return rows, end


def _split(content: bytes) -> Iterator[bytes]:
    """Lines that have an end."""
    start = 0
    while (stop := content.find(b"\n", start)) >= 0:
        yield content[start : stop + 1]
        start = stop + 1
