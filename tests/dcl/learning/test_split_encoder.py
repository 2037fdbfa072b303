from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_bert import BERT_WIDTH, VOCABULARY, write_transformer
from torch import Tensor

from dcl.errors import ConfigError
from dcl.learning.split_encoder import SplitEncoder
from dcl.learning.turn_encoder import (
    TurnEncoder,
    find_layers,
    find_source,
    keep_layers,
    load_source,
)

KINDS = ("bert", "distilbert", "mpnet", "modernbert")


def load(folder: Path) -> TurnEncoder:
    return load_source(find_source(str(folder)), longest=18)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_transformer(tmp_path_factory.mktemp("models") / "bert", layers=3)


def draw(B: int, L: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, L + 1, (B,), generator=rng)
    lengths[0] = L
    mask = (torch.arange(L) < lengths[:, None]).long()
    return torch.randint(4, VOCABULARY, (B, L), generator=rng) * mask, mask


@pytest.mark.parametrize("kind", KINDS)
def test_the_halves_make_what_the_whole_makes(tmp_path: Path, kind: str) -> None:
    turns = load(write_transformer(tmp_path / kind, kind, layers=4))
    ids, mask = draw(5, 16)
    whole = turns(ids, mask)
    for top in (1, 2, 3):
        split = SplitEncoder(turns, top)
        assert split.first == 4 - top
        states = split.lower(ids, mask)
        assert states.shape == (5, 16, BERT_WIDTH)
        assert torch.allclose(split(states, mask), whole, atol=1e-5)
        assert torch.allclose(split(ids, mask), whole, atol=1e-6)
        half = split(states.half(), mask)
        assert half.dtype == torch.float32
        assert torch.allclose(half, whole, atol=5e-3)
    assert torch.allclose(turns(ids, mask), whole, atol=1e-6)  # no hook is left


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [(0, 1), (0, 3)])
def test_what_is_left_of_a_transformer_is_those_layers_alone(
    tmp_path: Path, kind: str, kept: tuple[int, ...]
) -> None:
    folder = write_transformer(tmp_path / kind, kind, layers=4)
    whole, turns = load(folder), load(folder)
    keep_layers(turns, kept)
    for layer, own in zip(find_layers(turns), [find_layers(whole)[i] for i in kept], strict=True):
        torch.testing.assert_close(layer.state_dict(), own.state_dict())
    ids, mask = draw(3, 12)
    vectors = turns(ids, mask)
    for i in {*range(4)} - {*kept}:  # the others hand on what they get
        find_layers(whole)[i].forward = hand_on
        if kind == "mpnet":  # whose layers return tuples
            find_layers(whole)[i].forward = lambda *args, **_: (hand_on(*args), None)
    assert torch.allclose(whole(ids, mask), vectors, atol=1e-6)
    turns.whole.save(str(tmp_path / "saved"), create_model_card=False)
    (tmp_path / "saved" / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert torch.allclose(load(tmp_path / "saved")(ids, mask), vectors, atol=1e-6)
    assert SplitEncoder(turns, 1).first == len(kept) - 1


def hand_on(states: Tensor, *_: object, **__: object) -> Tensor:
    """A layer that does nothing."""
    return states


def test_a_failure_in_the_middle_leaves_no_hook(folder: Path) -> None:
    turns = load(folder)
    split = SplitEncoder(turns, 1)
    ids, mask = draw(3, 8)
    whole = turns(ids, mask)
    with pytest.raises(RuntimeError):
        split(split.lower(ids, mask)[..., :-1], mask)
    assert torch.equal(turns(ids, mask), whole)


def test_gradients_reach_the_upper_layers_and_nothing_else(folder: Path) -> None:
    split = SplitEncoder(load(folder), 2)
    ids, mask = draw(4, 12)
    target = torch.nn.functional.normalize(torch.randn(BERT_WIDTH), dim=0)
    grads = []
    for states in (ids, split.lower(ids, mask)):
        split.zero_grad()
        (split(states, mask) @ target).sum().backward()
        grads.append([p.grad.clone() for p in split.parameters() if p.grad is not None])
    upper = [p for layer in find_layers(split.encoder)[1:] for p in layer.parameters()]
    assert {id(p) for p in split.parameters() if p.requires_grad} == {id(p) for p in upper}
    assert len(grads[0]) == len(upper)
    for one, two in zip(*grads, strict=True):
        assert torch.allclose(one, two, atol=1e-5)


def test_only_the_upper_layers_ever_drop_anything(folder: Path) -> None:
    split = SplitEncoder(load(folder), 1, dropout=True).train()
    modes = {name: part.training for name, part in split.named_modules() if part.training}
    assert modes
    assert all(".layer.2" in name for name in modes)
    assert not any(part.training for part in SplitEncoder(load(folder), 1).train().modules())
    assert not any(part.training for part in split.eval().modules())


def test_half_precision_stays_near(folder: Path) -> None:
    turns = load(folder)
    ids, mask = draw(4, 12)
    whole = turns(ids, mask)
    split = SplitEncoder(turns, 2)
    states = split.lower(ids, mask)
    split.bf16 = True
    vectors = split(states, mask)
    assert torch.equal(split.lower(ids, mask), states)
    assert not torch.equal(vectors, whole)
    assert vectors.dtype == torch.float32
    assert ((vectors * whole).sum(dim=1) > 0.99).all()


def test_more_layers_than_there_are_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="layers: expected at most 3, got 4"):
        SplitEncoder(load(folder), 4)


def test_a_transformer_that_cannot_be_cut_is_refused_unless_all_of_it_is_trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = load(folder)
    bottom = find_layers(turns)[0]
    forward = bottom.forward

    def count(*args: object, **kwargs: object) -> object:
        turns.m.config.calls = 1  # later layers lean on what this one leaves behind
        return forward(*args, **kwargs)

    def lean(layer: object, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        shift = turns.m.config.__dict__.pop("calls")
        return (args[0] + shift, *args[1:])

    monkeypatch.setattr(bottom, "forward", count)
    find_layers(turns)[2].register_forward_pre_hook(lean)
    with pytest.raises(ConfigError, match=r"cannot be run apart: .*; train all of its layers: 3"):
        SplitEncoder(turns, 1)
    assert SplitEncoder(turns, 3).first == 0
