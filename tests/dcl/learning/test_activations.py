from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_bert import BERT_WIDTH, write_transformer

from dcl.errors import ConfigError
from dcl.learning.activations import ActivationCache, TorchEncoder, group_lengths, pad_states
from dcl.learning.rowstore import RowStore
from dcl.learning.split_encoder import SplitEncoder
from dcl.learning.turn_encoder import find_source, load_source

WINDOWS = [np.array([2, *range(5, 5 + n), 3], dtype=np.int32) for n in (3, 0, 11, 7, 1, 14, 5)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> SplitEncoder:
    folder = write_transformer(tmp_path_factory.mktemp("models") / "bert", layers=3)
    return SplitEncoder(load_source(find_source(str(folder)), longest=18), 1)


def states_of(encoder: SplitEncoder, window: NDArray[np.int32]) -> NDArray[Any]:
    ids = torch.from_numpy(window[None].astype(np.int64))
    return encoder.lower(ids, torch.ones_like(ids))[0].numpy()


def test_states_are_kept_by_content_and_read_back(tmp_path: Path, encoder: SplitEncoder) -> None:
    done: list[int] = []
    cache = ActivationCache(tmp_path, encoder, "a" * 64)
    cache.fill([*WINDOWS, WINDOWS[2]], done.append)
    assert sum(done) == len(WINDOWS) + 1
    assert cache.folder == tmp_path / f"{'a' * 16}-2"
    for window in WINDOWS:
        got = cache(window)
        assert got.dtype == np.float16
        np.testing.assert_allclose(got, states_of(encoder, window), atol=5e-3)
    with pytest.raises(KeyError):
        cache(np.array([2, 9, 9, 3], dtype=np.int32))


def test_a_second_run_computes_nothing(
    tmp_path: Path, encoder: SplitEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ActivationCache(tmp_path, encoder, "a" * 64).fill(WINDOWS)
    again = ActivationCache(tmp_path, encoder, "a" * 64)
    monkeypatch.setattr(encoder, "lower", None)
    again.fill(WINDOWS[::-1])
    assert [len(again(window)) for window in WINDOWS] == [len(window) for window in WINDOWS]


@pytest.mark.parametrize("name", ["keys.bin", "states.f16"])
@pytest.mark.parametrize("cut", [1, 30, 1000])
def test_a_torn_tail_is_cut_and_filled_again(
    tmp_path: Path, encoder: SplitEncoder, name: str, cut: int
) -> None:
    file = ActivationCache(tmp_path, encoder, "a" * 64).folder / name
    ActivationCache(tmp_path, encoder, "a" * 64).fill(WINDOWS)
    file.write_bytes(file.read_bytes()[:-cut])
    cache = ActivationCache(tmp_path, encoder, "a" * 64)
    cache.fill(WINDOWS)
    for window in WINDOWS:
        np.testing.assert_allclose(cache(window), states_of(encoder, window), atol=5e-3)
    tokens = sum(map(len, WINDOWS))
    assert (cache.folder / "states.f16").stat().st_size == tokens * BERT_WIDTH * 2
    assert (cache.folder / "keys.bin").stat().st_size == len(WINDOWS) * 20


def test_two_processes_may_fill_one_store(tmp_path: Path) -> None:
    one, two = (RowStore(tmp_path, 4, ragged=True) for _ in range(2))
    one.append([b"a" * 16], [np.full((2, 4), 1.0)])
    two.append([b"b" * 16, b"c" * 16], [np.full((3, 4), 2.0), np.full((1, 4), 3.0)])
    one.append([b"d" * 16], [np.full((2, 4), 4.0)])
    for store in (one, RowStore(tmp_path, 4, ragged=True)):
        found = {key: store[key * 16] for key in (b"a", b"b", b"c", b"d")}
        assert {key: (len(rows), rows[0, 0]) for key, rows in found.items()} == {
            b"a": (2, 1.0),
            b"b": (3, 2.0),
            b"c": (1, 3.0),
            b"d": (2, 4.0),
        }
    assert b"d" * 16 not in two  # until it looks again


def test_keys_may_end_in_zeros(tmp_path: Path) -> None:
    key = b"x" * 10 + bytes(6)
    RowStore(tmp_path, 4).append([key], [np.ones((1, 4))])
    assert key in RowStore(tmp_path, 4)


def test_a_full_disk_is_refused_beforehand(
    tmp_path: Path, encoder: SplitEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 100})()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ConfigError, match=r"GB of free disk, got 0\.0; set activations to another"):
        ActivationCache(tmp_path, encoder, "a" * 64).fill(WINDOWS)


def test_states_beyond_half_precision_are_refused(
    tmp_path: Path, encoder: SplitEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = torch.full((len(WINDOWS), 16, BERT_WIDTH), 1e6)
    monkeypatch.setattr(encoder, "lower", lambda ids, mask: large[: len(ids), : ids.shape[1]])
    with pytest.raises(ConfigError, match="too large for half precision; set it to null"):
        ActivationCache(tmp_path, encoder, "a" * 64).fill(WINDOWS)


def test_vectors_come_in_order_from_ids_and_from_states(
    tmp_path: Path, encoder: SplitEncoder
) -> None:
    cache = ActivationCache(tmp_path, encoder, "a" * 64)
    cache.fill(WINDOWS)
    exact = TorchEncoder(encoder, lambda window: window)(WINDOWS)
    assert exact.shape == (len(WINDOWS), BERT_WIDTH)
    alone = [TorchEncoder(encoder, lambda window: window)([window])[0] for window in WINDOWS]
    np.testing.assert_allclose(exact, alone, atol=1e-5)
    np.testing.assert_allclose(TorchEncoder(encoder, cache)(WINDOWS), exact, atol=5e-3)


def test_groups_hold_every_turn_once_and_few_tokens() -> None:
    lengths = [5, 128, 3, 3, 90, 128, 7, 2000]
    groups = [rows.tolist() for rows in group_lengths(lengths, tokens=256)]
    assert sorted(row for rows in groups for row in rows) == list(range(len(lengths)))
    for rows in groups:
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= 256
    assert list(group_lengths([])) == []


def test_padding_is_zero_and_masked() -> None:
    states, mask = pad_states([np.arange(3), np.arange(1)])
    assert states.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    states, mask = pad_states([np.ones((2, 4), np.float16), np.ones((3, 4), np.float16)])
    assert states.dtype == torch.float16
    assert states.shape == (2, 3, 4)
    assert states.sum() == 20
