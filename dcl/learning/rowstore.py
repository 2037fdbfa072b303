"""Rows of half-precision numbers on disk, found by key: what encoders made, kept between runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from dcl.errors import ConfigError

KEY_BYTES = 16


class Block(NamedTuple):
    """Where the rows of one key lie."""

    start: int
    """First row."""
    rows: int
    """How many, > 0."""


class RowStore:
    """Blocks of rows on disk, one a key; memory-mapped, append-only, shared by processes.

    `NAME.f16` holds the rows, `keys.bin` the 16-byte keys in the same order, each followed by its
    number of rows where blocks differ in it. Rows are written before their keys and under a lock,
    so a process that is killed at any byte loses at most what it was writing.

    Attributes:
        folder: Where the files are.
        width: Numbers in a row.

    Args:
        folder: Made if it is new.
        width: Numbers in a row; > 0.
        name: Of the file of rows.
        ragged: Whether blocks may have any number of rows; otherwise each has one.

    Raises:
        ConfigError: If the place cannot be written.
    """

    def __init__(
        self, folder: Path, width: int, *, name: str = "vectors", ragged: bool = False
    ) -> None:
        self.folder = folder
        self.width = width
        fields = [("key", f"S{KEY_BYTES}"), *([("rows", "<u4")] if ragged else [])]
        self._record = np.dtype(fields)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._keys = self._open("keys.bin")
            self._data = self._open(f"{name}.f16")
        except OSError as error:
            raise ConfigError(f"{folder}: expected a place to keep vectors: {error}") from None
        self._lock = FileLock(folder / "lock")
        self._blocks: dict[bytes, Block] = {}
        self._records = self._rows = 0
        self._map: NDArray[np.float16] = np.empty((0, width), dtype=np.float16)
        with self._lock:
            self._refresh()

    def __contains__(self, key: bytes) -> bool:
        """Whether the rows of a key are known to be there."""
        return key in self._blocks

    def __getitem__(self, key: bytes) -> NDArray[np.float16]:
        """The rows of a key, `(n, width)` float16; they are read from disk when they are used."""
        start, rows = self._blocks[key]
        if start + rows > len(self._map):  # the file has grown since
            shape = (self._rows, self.width)
            self._map = np.memmap(self._data, dtype=np.float16, mode="r", shape=shape)
        return self._map[start : start + rows]

    def append(self, keys: Sequence[bytes], blocks: Sequence[NDArray[np.floating]]) -> None:
        """Write blocks, after what other processes have written meanwhile.

        Args:
            keys: 16 bytes each.
            blocks: `(n, width)` each, n > 0; n = 1 unless the store is ragged.
        """
        records = np.zeros(len(keys), dtype=self._record)
        records["key"] = keys
        if "rows" in (self._record.names or ()):
            records["rows"] = [len(block) for block in blocks]
        with self._lock:
            self._refresh()
            with self._data.open("ab") as stream:
                stream.writelines(block.astype(np.float16).tobytes() for block in blocks)
            with self._keys.open("ab") as stream:
                stream.write(records.tobytes())
            self._refresh()

    def _refresh(self) -> None:
        """Learn what is on disk, and cut off what a killed process left half written."""
        size = self._record.itemsize
        with self._keys.open("rb") as stream:
            stream.seek(self._records * size)
            new = stream.read()
        records = np.frombuffer(new[: len(new) // size * size], dtype=self._record)
        ragged = "rows" in (self._record.names or ())
        counts = records["rows"].astype(np.int64) if ragged else np.ones(len(records), np.int64)
        ends = self._rows + np.cumsum(counts)
        there = self._data.stat().st_size // (2 * self.width)
        whole = int(np.searchsorted(ends, there, side="right"))
        for i in range(whole):
            key = new[i * size : i * size + KEY_BYTES]
            self._blocks.setdefault(key, Block(int(ends[i] - counts[i]), int(counts[i])))
        self._records += whole
        self._rows = int(ends[whole - 1]) if whole else self._rows
        os.truncate(self._keys, self._records * size)
        os.truncate(self._data, self._rows * self.width * 2)

    def _open(self, name: str) -> Path:
        """A file of the store, made if it is new."""
        file = self.folder / name
        file.touch()
        return file
