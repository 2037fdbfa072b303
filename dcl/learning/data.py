"""Examples to tensors: splits by question, cached turn vectors, padded batches.

Letters: `B` bags, `T` turns, `A` agents, `M` = 14 modes, `E` width of a turn vector.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from lightning import LightningDataModule
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Sampler

from dcl.bag import Bag
from dcl.features import describe_vectors
from dcl.learning.model import BagTensors
from dcl.learning.rowstore import RowStore
from dcl.lexical import Words
from dcl.splits import group_of
from dcl.targets import Targets, make_targets
from dcl.taxonomy import MODES
from dcl.trajectory import Example

Floats = NDArray[np.float32]

M = len(MODES)


class TurnVectors(Protocol):
    """What makes turn vectors: the exported encoder, or one that torch runs."""

    width: int
    """Size of a turn vector."""

    def __call__(self, windows: Sequence[NDArray[np.int32]]) -> Floats:
        """Vectors of turns, `(N, E)` float32 of unit norm, in order."""


class VectorCache:
    """Turn vectors on disk, keyed by encoder and content.

    Args:
        root: Folder of all caches; one below it a encoder.
        encoder: Fills what is missing.
        encoder_hash: sha256 of the encoder's graph or weights.

    Raises:
        ConfigError: If the place cannot be written.
    """

    ROWS_AT_ONCE = 512

    def __init__(self, root: Path, encoder: TurnVectors, encoder_hash: str) -> None:
        self.folder = root / encoder_hash[:16]
        self._encoder = encoder
        self._store = RowStore(self.folder, encoder.width)

    def __call__(self, windows: Sequence[NDArray[np.int32]]) -> NDArray[np.float16]:
        """Vectors of turns, encoding and keeping those that are not there yet.

        Args:
            windows: Token ids of each turn, each `(L,)` int32.

        Returns:
            `(N, E)` float16, unit norm.
        """
        self.fill(windows)
        if not len(windows):
            return np.empty((0, self._encoder.width), dtype=np.float16)
        return np.concatenate([self._store[key_of(window)] for window in windows])

    def fill(
        self,
        windows: Sequence[NDArray[np.int32]],
        progress: Callable[[int], object] = lambda done: None,
    ) -> None:
        """Encode and keep what is not there yet; many runs at once leave no thread waiting.

        Args:
            windows: Token ids of each turn, each `(L,)` int32.
            progress: Called with the number of windows done since the last call.
        """
        missing = find_missing(self._store, windows)
        progress(len(windows) - len(missing))
        fresh = list(missing.items())
        for start in range(0, len(fresh), self.ROWS_AT_ONCE):
            chunk = fresh[start : start + self.ROWS_AT_ONCE]
            vectors = self._encoder([window for _, window in chunk])
            self._store.append([key for key, _ in chunk], np.split(vectors, len(chunk)))
            progress(len(chunk))


def find_missing(
    store: RowStore, windows: Sequence[NDArray[np.int32]]
) -> dict[bytes, NDArray[np.int32]]:
    """Windows that a store lacks, each once, by key.

    Args:
        store: Keyed by `key_of`.
        windows: Token ids of each turn, each `(L,)` int32.
    """
    keyed = ((key_of(window), window) for window in windows)
    return {key: window for key, window in keyed if key not in store}


def key_of(window: NDArray[np.int32]) -> bytes:
    """Digest of what an encoder reads of one turn, 16 bytes."""
    return hashlib.blake2b(window.astype("<i4").tobytes(), digest_size=16).digest()


@dataclass(slots=True, eq=False)
class Item:
    """One example as arrays, ready to be padded.

    Args:
        group: Question it belongs to.
        words: Counted n-grams.
        agent_index: `(T,)` int64.
        reply_to: `(T,)` int64.
        vectors: `(T, E)` float16.
        task: `(E,)` float16.
        features: `(T, F)` float32.
        wide: `(T, M)` float32, filled in when the wide half is fitted.
        targets: Its labels.
        extra: Whether it comes from a set beside the main one, which teaches the step head alone
            and is neither selected nor calibrated on.
        agents: Names, `A` of them; they reach a closed agent bank and nothing else.
        names: `(A,)` int64, positions in a closed agent bank, filled in where there is one.
        twin: The run without the fault, where it is known and asked for.
        windows: Token ids of the turns and, last, of the task, where the encoder is trained.
    """

    group: str
    words: Words
    agent_index: NDArray[np.int64]
    reply_to: NDArray[np.int64]
    vectors: NDArray[np.float16]
    task: NDArray[np.float16]
    features: Floats
    wide: Floats
    targets: Targets
    extra: bool = False
    agents: tuple[str, ...] = ()
    names: NDArray[np.int64] | None = None
    twin: Item | None = None
    windows: tuple[NDArray[np.int32], ...] = ()


def make_item(
    example: Example,
    bag: Bag,
    cache: VectorCache,
    *,
    sigma: float,
    extra: bool = False,
    clean: Bag | None = None,
    keep_windows: bool = False,
) -> Item:
    """Encode one bag and add the labels.

    Args:
        example: A labelled example.
        bag: Its bag.
        cache: Turn vectors.
        sigma: Width of the softened step target in turns.
        extra: Whether it is not of the main set.
        clean: Bag of `example.clean`, to keep as the item's twin.
        keep_windows: Whether the encoder will be trained, and needs them.

    Returns:
        The item; `wide` is still 0.
    """
    twin = None
    if clean is not None and example.clean is not None:
        without_fault = replace(example, trajectory=example.clean, faults=(), clean=None)
        twin = make_item(without_fault, clean, cache, sigma=sigma, keep_windows=keep_windows)
    windows = (*bag.windows, bag.task)
    vectors = cache(windows)
    exact = vectors.astype(np.float32)
    deviation = describe_vectors(exact[:-1], exact[-1], bag.agent_index)
    return Item(
        group=group_of(example),
        words=bag.words,
        agent_index=bag.agent_index,
        reply_to=bag.reply_to,
        vectors=vectors[:-1],
        task=vectors[-1],
        features=np.concatenate([bag.features, deviation], axis=1),
        wide=np.zeros((len(bag.windows), M), dtype=np.float32),
        targets=make_targets(example, sigma),
        extra=extra,
        agents=bag.agents,
        twin=twin,
        windows=windows if keep_windows else (),
    )


class Batch(NamedTuple):
    """A padded batch with its targets."""

    bags: BagTensors
    """Inputs of the network."""
    pair: torch.Tensor
    """`(B, A, M)` float32, 0 or 1."""
    mode: torch.Tensor
    """`(B, M)` float32, 0 or 1."""
    known: torch.Tensor
    """`(B,)` bool, whether the modes of the bag are labelled."""
    agent: torch.Tensor
    """`(B, A)` float32, 0 or 1."""
    step: torch.Tensor
    """`(B, T)` float32, softened target."""
    extra: torch.Tensor
    """`(B,)` bool, whether the bag teaches the step head and nothing else."""
    names: torch.Tensor | None = None
    """`(B, A)` int64, positions in a closed agent bank; None without one."""
    twins: BagTensors | None = None
    """Bags of the clean runs, where there are any."""
    twin: torch.Tensor | None = None
    """`(B, A, 2)` int64, bag in `twins` and agent in it that each agent has its name from; or -1.
    """


def collate(items: Sequence[Item]) -> Batch:
    """Pad items to the longest; a padded turn belongs to no agent."""
    bags = pad(items)
    B, A, T = bags.member.shape
    pair, agent, step = torch.zeros(B, A, M), torch.zeros(B, A), torch.zeros(B, T)
    names = torch.zeros(B, A, dtype=torch.int64)
    for b, item in enumerate(items):
        count, agents = len(item.agent_index), len(item.targets.agent)
        pair[b, :agents] = torch.from_numpy(item.targets.pair)
        agent[b, :agents] = torch.from_numpy(item.targets.agent)
        step[b, :count] = torch.from_numpy(item.targets.step)
        if item.names is not None:
            names[b, :agents] = torch.from_numpy(item.names)
    twins = [item.twin for item in items if item.twin is not None]
    return Batch(
        bags=bags,
        pair=pair,
        mode=torch.from_numpy(np.stack([item.targets.mode for item in items])),
        known=torch.tensor([item.targets.known for item in items]),
        agent=agent,
        step=step,
        extra=torch.tensor([item.extra for item in items]),
        names=None if all(item.names is None for item in items) else names,
        twins=pad(twins) if twins else None,
        twin=match_twins(items, A) if twins else None,
    )


def match_twins(items: Sequence[Item], agents: int) -> torch.Tensor:
    """Where the clean run of each item has the agent of the same name.

    Args:
        items: Items of a batch, with or without a twin.
        agents: Agents that the batch is padded to, `A`.

    Returns:
        `(B, A, 2)` int64, position of the twin among all twins and of the agent in it; or -1.
    """
    matched = torch.full((len(items), agents, 2), -1, dtype=torch.int64)
    count = 0
    for b, item in enumerate(items):
        if item.twin is not None:
            for a, name in enumerate(item.agents):
                if name in item.twin.agents:
                    matched[b, a] = torch.tensor([count, item.twin.agents.index(name)])
            count += 1
    return matched


def pad(items: Sequence[Item]) -> BagTensors:
    """Inputs of the network for items padded to the longest."""
    B = len(items)
    T = max(len(item.agent_index) for item in items)
    A = max(len(item.targets.agent) for item in items)
    E, width = items[0].vectors.shape[1], items[0].features.shape[1]
    vectors, features = torch.zeros(B, T, E), torch.zeros(B, T, width)
    wide, member = torch.zeros(B, T, M), torch.zeros(B, A, T)
    reply_to = torch.full((B, T), -1, dtype=torch.int64)
    for b, item in enumerate(items):
        count = len(item.agent_index)
        vectors[b, :count] = torch.from_numpy(item.vectors.astype(np.float32))
        features[b, :count] = torch.from_numpy(item.features)
        wide[b, :count] = torch.from_numpy(item.wide)
        reply_to[b, :count] = torch.from_numpy(item.reply_to)
        member[b, torch.from_numpy(item.agent_index), torch.arange(count)] = 1.0
    task = torch.from_numpy(np.stack([item.task for item in items]).astype(np.float32))
    return BagTensors(vectors, task, features, wide, reply_to, member)


class LengthSampler(Sampler[list[int]]):
    """Batches of bags of similar length in random order, a new order each epoch.

    The order depends on seed and epoch alone, so a resumed run sees what the whole run would have.

    Args:
        lengths: Turns of each bag.
        batch_size: Bags in a batch; > 0.
        seed: Of the shuffling.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths = np.array(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0

    @property
    def sampler(self) -> LengthSampler:
        """Itself: of a batch sampler the trainer asks the sampler inside for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the order; the trainer calls this."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Positions of each batch.

        The order is made when the first is asked for, as a trainer that resumes makes its iterator
        before it sets the epoch.
        """
        rng = np.random.default_rng((self.seed, self.epoch))
        noisy = self.lengths * rng.uniform(0.8, 1.25, len(self.lengths))
        order = np.argsort(noisy)
        batches = [
            order[i : i + self.batch_size].tolist() for i in range(0, len(order), self.batch_size)
        ]
        rng.shuffle(batches)
        yield from batches

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.lengths) // self.batch_size)


class AttributionData(LightningDataModule):
    """Training and validation items as batches.

    Args:
        train: Items to learn from.
        valid: Items to select on; other questions.
        batch_size: Bags in a batch; > 0.
        seed: Of the order.
    """

    def __init__(
        self, train: Sequence[Item], valid: Sequence[Item], *, batch_size: int, seed: int
    ) -> None:
        super().__init__()
        self.train = train
        self.valid = valid
        self.batch_size = batch_size
        self.seed = seed

    def train_dataloader(self) -> DataLoader[Batch]:
        """Batches of similar length in random order."""
        lengths = [len(item.agent_index) for item in self.train]
        sampler = LengthSampler(lengths, self.batch_size, self.seed)
        return DataLoader(self.train, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Batch]:
        """Batches in the order of the items."""
        return DataLoader(self.valid, batch_size=self.batch_size, collate_fn=collate)  # type: ignore[arg-type]
