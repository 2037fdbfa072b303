"""What a split encoder starts from: token ids, or the kept hidden states of its lower half.

Letters: `N` turns, `L` tokens, `E` width of a vector.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dcl.errors import ConfigError
from dcl.learning.data import find_missing, key_of
from dcl.learning.rowstore import RowStore
from dcl.learning.split_encoder import SplitEncoder

Window = NDArray[np.int32]
"""Token ids of one turn as the encoder reads it, `(L,)`."""
Read = Callable[[Window], NDArray[Any]]
"""Gives what the upper half starts from: ids `(L,)` int32, or hidden states `(L, E)` float16."""

TOKENS_AT_ONCE = 4096
"""Padded tokens that are encoded together: more give no speed and leave the cache of a CPU."""


class ActivationCache:
    """Hidden states at the cut of an encoder, on disk, keyed by weights, layer and content.

    Args:
        root: Folder of all caches; one below it for each encoder and cut.
        encoder: Fills what is missing.
        digest: sha256 of the encoder's weights.

    Raises:
        ConfigError: If the place cannot be written.
    """

    ROWS_AT_ONCE = 512

    def __init__(self, root: Path, encoder: SplitEncoder, digest: str) -> None:
        self.folder = root / f"{digest[:16]}-{encoder.first}"
        self._encoder = encoder
        self._store = RowStore(self.folder, encoder.width, name="states", ragged=True)

    def __call__(self, window: Window) -> NDArray[np.float16]:
        """Hidden states of a turn that `fill` was given, `(L, E)`; read when they are used."""
        return self._store[key_of(window)]

    def fill(
        self, windows: Sequence[Window], progress: Callable[[int], object] = lambda done: None
    ) -> None:
        """Run the lower half on what is not there yet, and keep it.

        Args:
            windows: Token ids of each turn.
            progress: Called with the number of windows done since the last call.

        Raises:
            ConfigError: If the disk or the half-precision numbers have no room for it.
        """
        missing = find_missing(self._store, windows)
        self._check_room(sum(map(len, missing.values())))
        progress(len(windows) - len(missing))
        fresh = list(missing.items())
        for start in range(0, len(fresh), self.ROWS_AT_ONCE):
            chunk = fresh[start : start + self.ROWS_AT_ONCE]
            for rows in group_lengths([len(window) for _, window in chunk]):
                part = [chunk[i] for i in rows]
                self._store.append([key for key, _ in part], self._run([w for _, w in part]))
            progress(len(chunk))

    def _run(self, windows: Sequence[Window]) -> list[NDArray[np.float16]]:
        """Hidden states of some turns."""
        ids, mask = (part.to(self._encoder.device) for part in pad_states(windows))
        states = self._encoder.lower(ids, mask).to(torch.float16).cpu().numpy()
        blocks = [block[: len(window)] for block, window in zip(states, windows, strict=True)]
        if not all(np.isfinite(block).all() for block in blocks):
            raise ConfigError(
                "activations: hidden states are too large for half precision; set it to null"
            )
        return blocks

    def _check_room(self, tokens: int) -> None:
        """Refuse to fill a disk."""
        wanted = tokens * self._encoder.width * 2
        free = shutil.disk_usage(self.folder).free
        if wanted > free:
            raise ConfigError(
                f"{self.folder}: expected {wanted / 1e9:.1f} GB of free disk, got "
                f"{free / 1e9:.1f}; set activations to another place, or to null"
            )


class TorchEncoder:
    """Turn vectors by torch; what `dcl.runtime.Encoder` is for the exported graph.

    Attributes:
        width: Size of a turn vector.

    Args:
        encoder: The encoder, as it is at the time of a call.
        read: Gives what it starts from.
    """

    def __init__(self, encoder: SplitEncoder, read: Read) -> None:
        self.width = encoder.width
        self._encoder = encoder
        self._read = read

    @torch.no_grad()
    def __call__(self, windows: Sequence[Window]) -> NDArray[np.float32]:
        """Encode turns.

        Args:
            windows: Token ids of each turn.

        Returns:
            `(N, E)` float32, unit norm, in the same order.
        """
        self._encoder.eval()
        vectors = np.empty((len(windows), self.width), dtype=np.float32)
        for rows in group_lengths([len(window) for window in windows]):
            group = pad_states([self._read(windows[i]) for i in rows])
            states, mask = (part.to(self._encoder.device) for part in group)
            vectors[rows] = self._encoder(states, mask).cpu().numpy()
        return vectors


def group_lengths(
    lengths: Sequence[int], *, tokens: int = TOKENS_AT_ONCE
) -> Iterator[NDArray[np.int64]]:
    """Groups of turns of similar length, so that little is padded.

    Args:
        lengths: Tokens of each turn.
        tokens: Most padded tokens of a group; a longer turn has its own.

    Returns:
        Positions of the turns of each group; shortest first.
    """
    order = np.argsort(lengths, kind="stable")
    start = 0
    for i in range(1, len(order) + 1):
        if i == len(order) or (i + 1 - start) * lengths[order[i]] > tokens:
            yield order[start:i]
            start = i


def pad_states(blocks: Sequence[NDArray[Any]]) -> tuple[Tensor, Tensor]:
    """Ids or hidden states padded to the longest.

    Args:
        blocks: `(L,)` integers, or `(L, E)` floats; L may differ.

    Returns:
        `(N, L)` int64 or `(N, L, E)` float16, and the mask `(N, L)` int64.
    """
    shape = (len(blocks), max(map(len, blocks)))
    mask = torch.zeros(shape, dtype=torch.int64)
    kind = torch.int64 if blocks[0].ndim == 1 else torch.float16
    states = torch.zeros((*shape, *blocks[0].shape[1:]), dtype=kind)
    for row, block in enumerate(blocks):
        mask[row, : len(block)] = 1
        states.numpy()[row, : len(block)] = block
    return states, mask
