"""Batches of bags as token windows: what training needs where it trains the turn encoder itself.

Letters: `B` bags, `T` turns, `N` different windows of a batch, `L` tokens, `E` width of a vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dcl.features import DEVIATION_FEATURES, describe_vectors
from dcl.learning.activations import Read, group_lengths, pad_states
from dcl.learning.data import Batch, Item, LengthSampler, collate, key_of
from dcl.learning.model import BagTensors


class Places(NamedTuple):
    """Which vector belongs to which turn; -1 where a turn is padding."""

    turns: Tensor
    """`(B, T)` int64, positions among the vectors."""
    task: Tensor
    """`(B,)` int64, position of the task's vector."""


class TokenBatch(NamedTuple):
    """A padded batch whose turn vectors are still to be made."""

    batch: Batch
    """Inputs and targets; its vectors are those of the untrained encoder."""
    groups: tuple[tuple[Tensor, Tensor], ...]
    """States and mask, as `SplitEncoder` takes them, of all different windows; by length."""
    places: Places
    """Of the bags."""
    twin_places: Places | None = None
    """Of the clean runs."""


def collate_tokens(items: Sequence[Item], read: Read, most: int) -> list[TokenBatch]:
    """A batch in parts that fit into memory one after the other.

    Args:
        items: With their windows.
        read: Gives what the upper half of the encoder starts from.
        most: Tokens of a part; a bag with more is a part of its own.

    Returns:
        Parts of one or more bags, in order.
    """
    parts: list[list[Item]] = []
    tokens = most
    for item in items:
        own = count_tokens(item)
        if tokens + own > most:
            parts.append([])
            tokens = 0
        parts[-1].append(item)
        tokens += own
    return [_collate_part(part, read) for part in parts]


def count_tokens(item: Item) -> int:
    """Tokens of all different windows of an item and of its twin."""
    members = [item] if item.twin is None else [item, item.twin]
    different = {key_of(window): len(window) for one in members for window in one.windows}
    return sum(different.values())


def _collate_part(items: Sequence[Item], read: Read) -> TokenBatch:
    """One part: every different window once, whichever bags it is in."""
    twins = [item.twin for item in items if item.twin is not None]
    windows = {key_of(w): w for item in (*items, *twins) for w in item.windows}
    unique = list(windows.values())
    groups: list[tuple[Tensor, Tensor]] = []
    position: dict[bytes, int] = {}
    keys = list(windows)
    for rows in group_lengths([len(window) for window in unique]):
        groups.append(pad_states([read(unique[row]) for row in rows]))
        position |= {keys[row]: len(position) + i for i, row in enumerate(rows)}
    return TokenBatch(
        batch=collate(items),
        groups=tuple(groups),
        places=_place(items, position),
        twin_places=_place(twins, position) if twins else None,
    )


def _place(items: Sequence[Item], position: dict[bytes, int]) -> Places:
    """Positions of the vectors of each bag."""
    longest = max(len(item.agent_index) for item in items)
    turns = torch.full((len(items), longest), -1, dtype=torch.int64)
    task = torch.empty(len(items), dtype=torch.int64)
    for b, item in enumerate(items):
        *own, last = (position[key_of(window)] for window in item.windows)
        turns[b, : len(own)] = torch.tensor(own)
        task[b] = last
    return Places(turns, task)


def put_vectors(bags: BagTensors, vectors: Tensor, places: Places) -> BagTensors:
    """The bags with new turn vectors, and the deviation that belongs to them.

    Deviation is computed from the values of the vectors: what the network reads is what it will
    read of the finished encoder, but no gradient flows through it.

    Args:
        bags: A padded batch.
        vectors: `(N, E)` float32, unit norm.
        places: Where they belong.
    """
    real = (places.turns >= 0)[..., None]  # (B, T, 1)
    turns = vectors[places.turns.clamp(min=0)] * real  # (B, T, E)
    task = vectors[places.task]  # (B, E)
    values, tasks = (part.detach().float().cpu().numpy() for part in (turns, task))
    agents = bags.member.argmax(dim=1).cpu().numpy()  # (B, T)
    counts = real.sum(dim=(1, 2)).tolist()
    deviation = np.zeros((*agents.shape, len(DEVIATION_FEATURES)), dtype=np.float32)
    for b, count in enumerate(counts):
        deviation[b, :count] = describe_vectors(values[b, :count], tasks[b], agents[b, :count])
    own = torch.from_numpy(deviation).to(bags.features.device)
    features = torch.cat([bags.features[..., : -len(DEVIATION_FEATURES)], own], dim=-1)
    return bags._replace(vectors=turns, task=task, features=features)


class TokenBatches:
    """Batches of an epoch, each in parts; a resumed run goes on with the batch it had come to.

    Attributes:
        batch_sampler: Decides what is in a batch; the trainer tells it the epoch.

    Args:
        items: With their windows.
        read: Gives what the upper half of the encoder starts from.
        batch_size: Bags in a batch; > 0.
        most: Tokens of a part.
        seed: Of the order.
    """

    def __init__(
        self, items: Sequence[Item], read: Read, *, batch_size: int, most: int, seed: int
    ) -> None:
        self.batch_sampler = LengthSampler([count_tokens(item) for item in items], batch_size, seed)
        self._items = items
        self._read = read
        self._most = most
        self._start = self._given = 0

    def __iter__(self) -> Iterator[list[TokenBatch]]:
        """Parts of each batch."""
        order = list(self.batch_sampler)
        start, self._start = self._start, 0
        for i in range(start, len(order)):
            self._given = i + 1
            yield collate_tokens([self._items[row] for row in order[i]], self._read, self._most)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.batch_sampler)

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch has come."""
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next epoch where this state was taken; at the start if that was the end."""
        self._start = state["given"] % len(self)
