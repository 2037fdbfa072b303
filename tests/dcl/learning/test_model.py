from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dcl.errors import ConfigError
from dcl.features import FEATURE_GROUPS, FEATURES
from dcl.learning.config import LossConfig
from dcl.learning.data import Batch
from dcl.learning.model import (
    RELATIONS,
    BagLogits,
    BagTensors,
    ContextLayer,
    M,
    ModelConfig,
    Network,
    measure_distance,
    relate,
)
from dcl.learning.module import compute_loss

E = 12
TINY = ModelConfig(
    vector_width=E, width=32, layers=2, prototype_width=16, prototypes=2, archetypes=3, rank=4
)
SWITCHES = [field.name for field in fields(ModelConfig) if field.name.startswith("use_")]


def make_model(config: ModelConfig = TINY, *, seed: int = 3) -> Network:
    """A network in which nothing is at its neutral start value."""
    torch.manual_seed(seed)
    model = Network(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def without(switch: str) -> ModelConfig:
    """The tiny network with one switch off."""
    off: dict[str, Any] = {switch: False}
    return replace(TINY, **off)


def make_bag(speakers: list[int], *, seed: int = 0) -> BagTensors:
    """One bag in which these agents speak in turn."""
    rng = torch.Generator().manual_seed(seed)
    T, A = len(speakers), max(speakers) + 1
    member = torch.zeros(1, A, T)
    member[0, speakers, torch.arange(T)] = 1.0
    return BagTensors(
        vectors=torch.nn.functional.normalize(torch.randn(1, T, E, generator=rng), dim=-1),
        task=torch.nn.functional.normalize(torch.randn(1, E, generator=rng), dim=-1),
        features=torch.randn(1, T, len(FEATURES), generator=rng),
        wide=torch.randn(1, T, M, generator=rng),
        reply_to=torch.tensor([[t - 1 for t in range(T)]]),
        member=member,
    )


def pad(bags: list[BagTensors], *, more: int = 0) -> BagTensors:
    """One batch out of single bags, as long as the longest and `more`."""
    T = max(bag.vectors.shape[1] for bag in bags) + more
    A = max(bag.member.shape[1] for bag in bags) + more

    def grow(x: Tensor, *shape: int, value: float = 0.0) -> Tensor:
        out = torch.full(shape, value, dtype=x.dtype)
        out[tuple(slice(n) for n in x.shape)] = x
        return out

    return BagTensors(
        vectors=torch.cat([grow(bag.vectors, 1, T, E) for bag in bags]),
        task=torch.cat([bag.task for bag in bags]),
        features=torch.cat([grow(bag.features, 1, T, len(FEATURES)) for bag in bags]),
        wide=torch.cat([grow(bag.wide, 1, T, M) for bag in bags]),
        reply_to=torch.cat([grow(bag.reply_to, 1, T, value=-1) for bag in bags]),
        member=torch.cat([grow(bag.member, 1, A, T) for bag in bags]),
    )


BAGS = [
    make_bag([0], seed=1),
    make_bag([0, 1, 0], seed=2),
    make_bag([0, 0, 0, 0], seed=3),
    make_bag([0, 1, 2, 1, 0, 2, 2], seed=4),
]


def agree(one: Tensor, two: Tensor) -> bool:
    return torch.allclose(one, two, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("more", [0, 3])
def test_padding_adds_nothing(more: int) -> None:
    model = make_model()
    together: BagLogits = model(*pad(BAGS, more=more))
    for b, bag in enumerate(BAGS):
        alone: BagLogits = model(*bag)
        A, T = bag.member.shape[1:]
        assert agree(together.agent[b, :A], alone.agent[0])
        assert agree(together.mode[b], alone.mode[0])
        assert agree(together.pair[b, :A], alone.pair[0])
        assert agree(together.step[b, :T], alone.step[0])
        assert agree(together.attention[b, :T], alone.attention[0])
        assert agree(together.evidence[b, :A], alone.evidence[0])
        assert all(part.isfinite().all() for part in together)


@torch.no_grad()
def test_what_stands_in_padded_turns_does_not_matter() -> None:
    model, batch = make_model(), pad(BAGS, more=2)
    noise = torch.randn(batch.vectors.shape, generator=torch.Generator().manual_seed(9))
    padded = (batch.member.sum(dim=1) == 0)[..., None]
    plain: BagLogits = model(*batch)
    noisy: BagLogits = model(*batch._replace(vectors=torch.where(padded, noise, batch.vectors)))
    for b, bag in enumerate(BAGS):
        A, T = bag.member.shape[1:]
        assert agree(plain.pair[b, :A], noisy.pair[b, :A])
        assert agree(plain.mode[b], noisy.mode[b])
        assert agree(plain.step[b, :T], noisy.step[b, :T])


@torch.no_grad()
def test_permuting_agents_permutes_their_logits_and_changes_nothing_else() -> None:
    model, bag = make_model(), BAGS[3]
    order = torch.tensor([2, 0, 1])
    plain: BagLogits = model(*bag)
    moved: BagLogits = model(*bag._replace(member=bag.member[:, order]))
    assert agree(moved.agent, plain.agent[:, order])
    assert agree(moved.pair, plain.pair[:, order])
    assert agree(moved.evidence, plain.evidence[:, order])
    for name in ("mode", "step", "attention"):
        assert agree(getattr(moved, name), getattr(plain, name))


@torch.no_grad()
def test_the_order_of_bags_does_not_matter() -> None:
    model, batch = make_model(), pad(BAGS)
    order = torch.tensor([3, 1, 0, 2])
    plain, moved = model(*batch), model(*(x[order] for x in batch))
    assert all(agree(x[order], y) for x, y in zip(plain, moved, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("bag", BAGS)
@pytest.mark.parametrize("what", ["vectors", "task", "features", "wide"])
def test_a_channel_of_zeros_gives_finite_logits(bag: BagTensors, what: str) -> None:
    blank = bag._replace(**{what: torch.zeros_like(getattr(bag, what))})
    assert all(part.isfinite().all() for part in make_model()(*blank))


@torch.no_grad()
def test_huge_features_and_wide_logits_give_finite_logits() -> None:
    bag = BAGS[3]
    wild = bag._replace(features=bag.features * 1e6, wide=bag.wide * 1e3)
    assert all(part.isfinite().all() for part in make_model()(*wild))


@torch.no_grad()
@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_changes_the_logits(switch: str) -> None:
    model, bag = make_model(), BAGS[3]
    on: BagLogits = model(*bag)
    model.config = without(switch)
    off: BagLogits = model(*bag)
    assert not agree(on.pair, off.pair)
    assert all(part.isfinite().all() for part in off)


@torch.no_grad()
@pytest.mark.parametrize(
    ("switch", "what"),
    [("use_text", "vectors"), ("use_features", "features"), ("use_wide", "wide")],
)
def test_a_switch_cuts_its_channel(switch: str, what: str) -> None:
    bag = BAGS[3]
    other = bag._replace(**{what: getattr(bag, what).flip(1) + 0.5})
    if what == "vectors":
        other = other._replace(task=-bag.task)
    model = make_model()
    assert not agree(model(*bag).pair, model(*other).pair)
    cut = make_model(without(switch))
    assert all(x.equal(y) for x, y in zip(cut(*bag), cut(*other), strict=True))


@torch.no_grad()
@pytest.mark.parametrize(
    ("switch", "parameters"),
    [
        ("use_mix", ["mix_strength", "score_agent.weight"]),
        ("use_bilinear", ["bilinear_agent.weight", "bilinear_error.weight"]),
        ("use_error_bank", ["error_bank", "error_scale"]),
        ("use_agent_bank", ["agent_bank"]),
        ("use_wide", ["wide_mix", "read_wide.weight"]),
        ("use_gate", ["gate_open.weight"]),
    ],
)
def test_a_switch_leaves_its_parameters_unread(switch: str, parameters: list[str]) -> None:
    bag, model = BAGS[3], make_model(without(switch))
    plain: BagLogits = model(*bag)
    for name in parameters:
        model.get_parameter(name).add_(0.7)
    assert agree(plain.pair, model(*bag).pair)


@torch.no_grad()
@pytest.mark.parametrize("group", list(FEATURE_GROUPS))
def test_a_group_of_features_that_is_left_out_is_not_read(group: str) -> None:
    bag, columns = BAGS[3], [FEATURES.index(name) for name in FEATURE_GROUPS[group]]
    other = bag.features.clone()
    other[..., columns] = other[..., columns].flip(1) + 0.5
    rest = tuple(name for name in FEATURE_GROUPS if name != group)
    cut, whole = make_model(replace(TINY, feature_groups=rest)), make_model()
    assert agree(cut(*bag).pair, cut(*bag._replace(features=other)).pair)
    assert not agree(whole(*bag).pair, whole(*bag._replace(features=other)).pair)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"context_heads": ("past", "later")}, "model.context_heads: expected some of any, future"),
        ({"context_heads": ()}, "got none"),
        ({"context_heads": ("any",) * 3}, "multiple of the 3 model.context_heads, got 32"),
        ({"feature_groups": ("cue",)}, "cues, deviation, layout, relations, got cue"),
    ],
)
def test_names_that_mean_nothing_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(TINY, **wrong)


def test_groups_of_features_are_a_set() -> None:
    twice = replace(TINY, feature_groups=("deviation", "cues", "cues"))
    assert twice.feature_groups == ("cues", "deviation")


@torch.no_grad()
def test_with_one_query_all_modes_have_the_same_evidence() -> None:
    one = make_model(without("use_mode_queries"))
    attention, space = one(*BAGS[3]).attention, one(*BAGS[3]).evidence
    assert agree(attention, attention[..., :1].expand_as(attention))
    assert agree(space, space[:, :, :1].expand_as(space))
    own = make_model()(*BAGS[3]).attention
    assert not agree(own, own[..., :1].expand_as(own))


@torch.no_grad()
def test_context_without_relations_does_not_see_who_speaks() -> None:
    bag = BAGS[3]
    swapped = bag._replace(reply_to=bag.reply_to.roll(1), member=bag.member.roll(1, dims=2))
    free = replace(TINY, context_heads=("any",) * 4, use_wide=False)
    plain, typed = make_model(free), make_model(replace(TINY, use_wide=False))
    assert agree(plain(*bag).attention, plain(*swapped).attention)
    assert not agree(typed(*bag).attention, typed(*swapped).attention)


@torch.no_grad()
@pytest.mark.parametrize("centre", [True, False])
def test_what_all_turn_vectors_of_a_run_share_is_not_read(centre: bool) -> None:
    batch, model = pad(BAGS, more=2), make_model(replace(TINY, centre_text=centre))
    real = batch.member.sum(dim=1) > 0
    moved = batch.vectors + real[..., None] * torch.linspace(-0.2, 0.2, batch.vectors.shape[2])
    before, after = model(*batch).attention, model(*batch._replace(vectors=moved)).attention
    assert agree(before[real], after[real]) == centre


@torch.no_grad()
@pytest.mark.parametrize("layers", [0, 1])
def test_without_context_a_turn_sees_itself_alone(layers: int) -> None:
    config = replace(TINY, layers=layers, use_wide=False, centre_text=False)
    bag, model = BAGS[3], make_model(config)
    other = bag.vectors.clone()
    other[0, 6] = -other[0, 6]
    before, after = model(*bag).attention, model(*bag._replace(vectors=other)).attention
    assert agree(before[0, :6], after[0, :6]) == (layers == 0)
    assert not agree(before[0, 6], after[0, 6])


@torch.no_grad()
def test_a_pair_is_never_more_probable_than_its_agent_or_mode() -> None:
    model = make_model()
    model.agent_bias.zero_()
    model.mode_bias.zero_()
    batch = pad(BAGS, more=1)
    logits: BagLogits = model(*batch)
    real = batch.member.sum(dim=2) > 0
    assert (logits.pair <= logits.agent[..., None] + 1e-6)[real].all()
    assert (logits.pair <= logits.mode[:, None] + 1e-6)[real].all()


@torch.no_grad()
def test_evidence_has_unit_norm() -> None:
    norm = make_model()(*BAGS[3]).evidence.norm(dim=-1)
    assert agree(norm, torch.ones_like(norm))


def slow_relate(
    reply_to: list[int], agents: list[int | None], names: Sequence[str]
) -> list[list[list[bool]]]:
    """`(H, T, T)` for one bag; `None` marks a padded turn."""
    rules: dict[str, Callable[[int, int], bool]] = {
        "past": lambda t, s: s < t,
        "future": lambda t, s: s > t,
        "same": lambda t, s: agents[s] == agents[t],
        "reply": lambda t, s: reply_to[t] == s,
        "replied": lambda t, s: reply_to[s] == t,
        "any": lambda t, s: True,
    }
    turns = range(len(agents))
    return [
        [
            [agents[t] is not None and agents[s] is not None and rules[name](t, s) for s in turns]
            for t in turns
        ]
        for name in names
    ]


@pytest.mark.parametrize("names", [RELATIONS, ("any",), ("replied", "any", "past")])
def test_relate_follows_its_definition(names: Sequence[str]) -> None:
    agents: list[list[int | None]] = [[0, 1, 0, 2, 1], [0, 0, 1, None, None], [0, *[None] * 4]]
    reply_to = [[-1, 0, 1, 0, 3], [-1, 0, 1, -1, -1], [-1] * 5]
    member = torch.zeros(3, 3, 5)
    for b, bag in enumerate(agents):
        for t, agent in enumerate(bag):
            if agent is not None:
                member[b, agent, t] = 1.0
    allowed = relate(torch.tensor(reply_to), member, names)
    slow = [slow_relate(r, a, names) for r, a in zip(reply_to, agents, strict=True)]
    assert allowed.tolist() == slow


def silence_feed(layer: ContextLayer) -> None:
    """Leaves only what attention adds."""
    for module in layer.feed.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.zero_()
            module.bias.zero_()


def slow_attention(layer: ContextLayer, turns: Tensor, allowed: Tensor) -> Tensor:
    """What attention adds to `(T, D)` turns, head by head and turn by turn."""
    T, D = turns.shape
    width = D // layer.heads
    query, key, value = layer.project(layer.norm(turns)).view(T, 3, layer.heads, width).unbind(1)
    mixed = torch.zeros(T, layer.heads, width)
    for head in range(layer.heads):
        slope = math.log1p(math.exp(float(layer.slope[head])))
        for t in range(T):
            seen = [s for s in range(T) if allowed[head, t, s]]
            scores = [
                math.exp(
                    float(query[t, head] @ key[s, head]) / math.sqrt(width)
                    - slope * math.log1p(abs(t - s))
                )
                for s in seen
            ]
            total = 1.0 + sum(scores)  # the 1 is nothing, with a logit of 0
            for s, score in zip(seen, scores, strict=True):
                mixed[t, head] += score / total * value[s, head]
    added: Tensor = layer.merge(mixed.reshape(T, D))
    return added


@torch.no_grad()
@pytest.mark.parametrize("slope", [-30.0, 0.0, 2.0])
def test_attention_follows_its_definition(slope: float) -> None:
    torch.manual_seed(4)
    layer = ContextLayer(TINY).eval()
    layer.slope.fill_(slope)
    turns = torch.randn(6, TINY.width)
    allowed = torch.rand(len(RELATIONS), 6, 6) < 0.4
    silence_feed(layer)
    got = layer(turns[None], measure_distance(allowed[None]))[0] - turns
    assert agree(got, slow_attention(layer, turns, allowed))


@torch.no_grad()
def test_the_first_turn_has_no_past_and_the_last_no_future() -> None:
    torch.manual_seed(0)
    layer = ContextLayer(TINY).eval()
    turns = torch.randn(1, 4, TINY.width)
    order = torch.arange(4)
    moved = turns.clone()
    moved[0, 1:] += 1.0
    past = (order[:, None] > order[None, :]).expand(1, len(RELATIONS), 4, 4)
    before, after = layer(turns, measure_distance(past)), layer(moved, measure_distance(past))
    assert agree(before[0, 0], after[0, 0])
    assert not agree(before[0, 3], after[0, 3])
    nobody = torch.zeros(1, len(RELATIONS), 1, 1, dtype=torch.bool)
    alone = layer(turns[:, :1], measure_distance(nobody))
    assert agree(before[0, 0], alone[0, 0])


@torch.no_grad()
def test_each_head_follows_its_own_relation() -> None:
    torch.manual_seed(0)
    layer = ContextLayer(TINY).eval()
    layer.merge.weight.copy_(torch.eye(TINY.width))
    turns = torch.randn(1, 3, TINY.width)
    nothing = torch.zeros(1, len(RELATIONS), 3, 3, dtype=torch.bool)
    share = TINY.width // len(RELATIONS)
    silence_feed(layer)
    for head in range(len(RELATIONS)):
        allowed = nothing.clone()
        allowed[:, head] = True
        difference = layer(turns, measure_distance(allowed)) - layer(
            turns, measure_distance(nothing)
        )
        changed = difference.abs().sum(dim=(0, 1)) > 1e-6
        assert changed.nonzero().ravel().tolist() == list(range(head * share, (head + 1) * share))


def blame_first_agents(bags: BagTensors) -> Batch:
    """Labels that give the first agent of every bag one mode, at the first turn."""
    B, A, T = bags.member.shape
    pair = torch.zeros(B, A, M)
    pair[:, 0, 3] = 1.0
    return Batch(
        bags=bags,
        pair=pair,
        known=torch.ones(B, dtype=torch.bool),
        mode=pair.amax(dim=1),
        agent=pair.amax(dim=2),
        step=torch.eye(T)[torch.zeros(B, dtype=torch.int64)],
        extra=torch.zeros(B, dtype=torch.bool),
    )


@pytest.mark.parametrize(
    ("config", "unread"),
    [
        (TINY, {"score_mode"}),
        (replace(TINY, use_error_bank=False), {"error_scale"}),
    ],
)
def test_gradients_reach_every_parameter(config: ModelConfig, unread: set[str]) -> None:
    model, bags = make_model(config).train(), pad(BAGS)
    batch = blame_first_agents(bags)
    loss, parts = compute_loss(model(*bags), batch, model.error_bank, LossConfig())
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(part.isfinite() for part in parts.values())
    without = {
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.abs().sum() > 0
    }
    assert without == unread
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_a_name_is_no_input() -> None:
    assert set(BagTensors._fields) == {
        "vectors", "task", "features", "wide", "reply_to", "member",
    }  # fmt: skip


def test_steps_of_extra_bags_teach_the_step_head_alone() -> None:
    model, bags = make_model(TINY).train(), pad(BAGS)
    batch = blame_first_agents(bags)
    batch = batch._replace(extra=torch.ones_like(batch.extra))
    logits: BagLogits = model(*bags, apart=batch.extra)
    loss, parts = compute_loss(logits, batch, model.error_bank, LossConfig())
    loss.backward()  # type: ignore[no-untyped-call]
    assert {name for name, part in parts.items() if part.item() > 0} == {"step"}
    taught = {
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.grad.abs().sum() > 0
    }
    assert "score_step.weight" in taught
    assert taught <= {"score_step.weight", "score_step.bias"}
