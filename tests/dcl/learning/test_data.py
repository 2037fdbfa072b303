from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny import WIDTH, bagger, make_run, write_encoder

from dcl.artifact import ENCODER, hash_file
from dcl.errors import ConfigError
from dcl.features import DEVIATION_FEATURES, FEATURES, describe_vectors
from dcl.learning.data import (
    AttributionData,
    Item,
    LengthSampler,
    M,
    VectorCache,
    collate,
    make_item,
)
from dcl.runtime import Encoder
from dcl.taxonomy import ErrorMode
from dcl.trajectory import Example, Fault

WINDOWS = [np.array([2, *range(4, 4 + i), 3], dtype=np.int32) for i in range(7)]


class CountingEncoder(Encoder):
    """Counts what it encodes, and dies after `lives` windows."""

    def __init__(self, file: Path, *, lives: int = 10**9) -> None:
        super().__init__(file, remember=0)
        self.encoded = 0
        self.lives = lives

    def _encode(self, window: NDArray[np.int32]) -> Any:
        if self.encoded == self.lives:
            raise KeyboardInterrupt
        self.encoded += 1
        return super()._encode(window)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / ENCODER)


def open_cache(root: Path, graph: Path, *, lives: int = 10**9) -> tuple[VectorCache, Any]:
    encoder = CountingEncoder(graph, lives=lives)
    return VectorCache(root, encoder, hash_file(graph)), encoder


def expected(graph: Path, windows: list[NDArray[np.int32]]) -> NDArray[np.float16]:
    return Encoder(graph)(windows).astype(np.float16)


def test_vectors_keep_the_order_and_are_encoded_once(tmp_path: Path, graph: Path) -> None:
    cache, encoder = open_cache(tmp_path, graph)
    twice = [WINDOWS[i] for i in (3, 0, 3, 6, 0)]
    got = cache(twice)
    assert got.dtype == np.float16
    assert np.array_equal(got, expected(graph, twice))
    assert encoder.encoded == 3
    assert np.array_equal(cache(WINDOWS), expected(graph, WINDOWS))
    assert encoder.encoded == len(WINDOWS)


def test_a_second_run_encodes_nothing(tmp_path: Path, graph: Path) -> None:
    open_cache(tmp_path, graph)[0](WINDOWS)
    cache, encoder = open_cache(tmp_path, graph)
    assert np.array_equal(cache(WINDOWS[::-1]), expected(graph, WINDOWS[::-1]))
    assert encoder.encoded == 0


def test_no_windows_are_no_rows(tmp_path: Path, graph: Path) -> None:
    cache, _ = open_cache(tmp_path, graph)
    assert cache([]).shape == (0, WIDTH)
    cache(WINDOWS)
    assert cache([]).shape == (0, WIDTH)


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("keys.bin", 0),
        ("keys.bin", 16 * 3),
        ("keys.bin", 16 * 3 + 5),
        ("vectors.f16", 0),
        ("vectors.f16", 2 * WIDTH * 2),
        ("vectors.f16", 2 * WIDTH * 2 + 1),
    ],
)
def test_a_torn_tail_is_cut_and_encoded_again(
    tmp_path: Path, graph: Path, name: str, keep: int
) -> None:
    first, _ = open_cache(tmp_path, graph)
    first(WINDOWS)
    file = first.folder / name
    file.write_bytes(file.read_bytes()[:keep])
    rows = keep // (16 if name == "keys.bin" else 2 * WIDTH)
    cache, encoder = open_cache(tmp_path, graph)
    assert (cache.folder / "keys.bin").stat().st_size == 16 * rows
    assert (cache.folder / "vectors.f16").stat().st_size == 2 * WIDTH * rows
    assert np.array_equal(cache(WINDOWS), expected(graph, WINDOWS))
    assert encoder.encoded == len(WINDOWS) - rows
    again, encoder = open_cache(tmp_path, graph)
    assert np.array_equal(again(WINDOWS), expected(graph, WINDOWS))
    assert encoder.encoded == 0


def test_a_run_that_is_killed_loses_the_last_chunk_only(
    tmp_path: Path, graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VectorCache, "ROWS_AT_ONCE", 2)
    cache, _ = open_cache(tmp_path, graph, lives=5)
    with pytest.raises(KeyboardInterrupt):
        cache(WINDOWS)
    cache, encoder = open_cache(tmp_path, graph)
    assert np.array_equal(cache(WINDOWS), expected(graph, WINDOWS))
    assert encoder.encoded == len(WINDOWS) - 4


def test_progress_counts_every_window(tmp_path: Path, graph: Path) -> None:
    cache, _ = open_cache(tmp_path, graph)
    cache(WINDOWS[:2])
    done: list[int] = []
    cache.fill(WINDOWS, done.append)
    assert done == [2, 5]


def test_each_encoder_has_its_own_folder(tmp_path: Path, graph: Path) -> None:
    one = VectorCache(tmp_path, Encoder(graph), "a" * 64)
    two = VectorCache(tmp_path, Encoder(graph), "b" * 64)
    one(WINDOWS)
    assert one.folder != two.folder
    assert (two.folder / "keys.bin").stat().st_size == 0


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path, graph: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="expected a place to keep vectors"):
        open_cache(tmp_path / "file", graph)


@pytest.fixture
def cache(tmp_path: Path, graph: Path) -> VectorCache:
    return open_cache(tmp_path, graph)[0]


def make_items(cache: VectorCache) -> list[Item]:
    runs = [
        make_run(("a", "the sum"), ("b", "is wrong"), ("a", "x"), task="one"),
        make_run(("a", "again"), task="two"),
        make_run(("c", "the"), ("b", "sum"), ("a", "is"), ("b", ""), ("c", "skip"), task="three"),
    ]
    return [
        make_item(Example(run, (Fault("a", ErrorMode.FM_1_3, 0),)), bagger()(run), cache, sigma=0.0)
        for run in runs
    ]


def test_an_item_holds_what_the_model_eats(cache: VectorCache, graph: Path) -> None:
    item = make_items(cache)[0]
    bag = bagger()(make_run(("a", "the sum"), ("b", "is wrong"), ("a", "x"), task="one"))
    vectors = expected(graph, [*bag.windows, bag.task])
    assert item.group == "one"
    assert np.array_equal(item.vectors, vectors[:-1])
    assert np.array_equal(item.task, vectors[-1])
    assert item.features.shape == (3, len(FEATURES))
    exact = vectors.astype(np.float32)
    assert np.array_equal(
        item.features[:, -len(DEVIATION_FEATURES) :],
        describe_vectors(exact[:-1], exact[-1], bag.agent_index),
    )
    assert not item.wide.any()
    assert [document.turn.tolist() for document in item.words] == [[0, 0, 0, 2], [1, 1, 1]]


def test_a_batch_is_padded_to_the_longest(cache: VectorCache) -> None:
    items = make_items(cache)
    items[1].wide[:] = 2.0
    batch = collate(items)
    B, A, T = 3, 3, 5
    bags = batch.bags
    assert bags.vectors.shape == (B, T, WIDTH)
    assert bags.task.shape == (B, WIDTH)
    assert bags.features.shape == (B, T, len(FEATURES))
    assert bags.wide.shape == (B, T, M)
    assert bags.reply_to.shape == batch.step.shape == (B, T)
    assert bags.member.shape == (B, A, T)
    assert batch.pair.shape == (B, A, M)
    assert batch.agent.shape == (B, A)
    assert batch.mode.shape == (B, M)
    assert batch.known.tolist() == [True] * 3
    assert bags.reply_to.dtype == torch.int64
    assert bags.reply_to[1].tolist() == [-1] * T
    assert bags.member[0].tolist() == [[1, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0] * 5]
    assert bags.member.sum(dim=1).sum(dim=1).tolist() == [3, 1, 5]
    assert bags.wide[1, 0].tolist() == [2.0] * M
    assert not bags.wide[1, 1:].any()
    for b, item in enumerate(items):
        assert np.array_equal(bags.features[b, : len(item.agent_index)].numpy(), item.features)
        assert not bags.vectors[b, len(item.agent_index) :].any()


def test_a_sampler_covers_every_item_once() -> None:
    sampler = LengthSampler(list(range(1, 24)), 4, seed=3)
    batches = list(sampler)
    assert len(batches) == len(sampler) == 6
    assert sorted(i for batch in batches for i in batch) == list(range(23))
    assert all(len(batch) <= 4 for batch in batches)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    lengths = list(range(1, 40))

    def order(seed: int, epoch: int) -> list[list[int]]:
        sampler = LengthSampler(lengths, 4, seed)
        sampler.set_epoch(epoch)
        np.random.default_rng().random()
        assert list(sampler) == list(sampler)
        return list(sampler)

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)


def test_a_batch_holds_bags_of_similar_length() -> None:
    lengths = [1, 100] * 8
    for batch in LengthSampler(lengths, 4, seed=0):
        assert len({lengths[i] for i in batch}) == 1


def test_loaders_give_padded_batches(cache: VectorCache) -> None:
    items = make_items(cache)
    data = AttributionData(items, items[::-1], batch_size=2, seed=0)
    assert sum(len(batch.known) for batch in data.train_dataloader()) == 3
    in_order = list(data.val_dataloader())
    assert [batch.bags.member.shape for batch in in_order] == [(2, 3, 5), (1, 2, 3)]
