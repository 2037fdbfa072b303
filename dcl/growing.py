"""Rows of one array that grows at its end, as the turns of a run come in."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_ROOM = 8  # rows that a new array has room for


class Growing:
    """An array to whose end rows are added in constant time on average.

    Args:
        dtype: Of its entries.
        shape: Of one row.
    """

    __slots__ = ("_count", "_room")

    def __init__(self, dtype: DTypeLike, *shape: int) -> None:
        self._room: NDArray[Any] = np.zeros((_ROOM, *shape), dtype=dtype)
        self._count = 0

    def __len__(self) -> int:
        """Number of rows."""
        return self._count

    def append(self, row: object) -> None:
        """Add a row.

        Args:
            row: Anything numpy can put there.
        """
        if self._count == len(self._room):
            self._room = np.concatenate([self._room, np.zeros_like(self._room)])
        self._room[self._count] = row
        self._count += 1

    @property
    def rows(self) -> NDArray[Any]:
        """All rows, shared: what is written into them stays; a row added later is not in it."""
        return self._room[: self._count]
