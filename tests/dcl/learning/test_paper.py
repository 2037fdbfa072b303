"""The switches that turn the network into the paper's DCL, and the losses that go with them."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_model import BAGS, TINY, agree, make_model, pad
from test_training import TINY as TRAINED
from test_training import make_config, make_example, write_examples
from tiny import WIDTH, bagger, make_run, write_encoder, write_encoder_folder

from dcl.artifact import ENCODER, open_artifact, open_encoder
from dcl.errors import ConfigError
from dcl.learning.config import LossConfig
from dcl.learning.data import Item, VectorCache, collate, make_item
from dcl.learning.inference import load_model, load_trained, score_items
from dcl.learning.losses import contrastive_loss, find_hard, find_twins, hardest
from dcl.learning.model import BagLogits, M, ModelConfig, Network, number_names
from dcl.learning.module import AttributionModule, compute_loss
from dcl.learning.preparation import read_definitions
from dcl.learning.prepared import load_items, save_items
from dcl.learning.training import close_agents, place_prototypes, train
from dcl.runtime import Encoder
from dcl.taxonomy import ErrorMode
from dcl.trajectory import Example, Fault

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

PAPER: dict[str, Any] = {
    "closed_agents": True,
    "evidence_turns": 3,
    "bag_evidence": True,
    "level_heads": True,
}
CLOSED = replace(TINY, closed_agents=True, agent_names=("Solver", "Critic"))


def test_by_default_no_switch_adds_a_parameter() -> None:
    names = set(Network(TINY).state_dict())
    assert set(Network(CLOSED).state_dict()) - names == {"name_bank"}
    others = replace(TINY, evidence_turns=3, bag_evidence=True, level_heads=True)
    assert set(Network(others).state_dict()) == names


@torch.no_grad()
@pytest.mark.parametrize("keys", [{k: v} for k, v in PAPER.items()] + [PAPER], ids=str)
def test_a_switch_changes_the_logits_and_padding_adds_nothing(keys: dict[str, Any]) -> None:
    names: dict[str, Any] = {"agent_names": CLOSED.agent_names} if "closed_agents" in keys else {}
    model, default = make_model(replace(TINY, **keys, **names)), make_model()
    default.load_state_dict(model.state_dict(), strict=False)
    together: BagLogits = model(*pad(BAGS, more=2))
    assert any(not agree(x, y) for x, y in zip(together, default(*pad(BAGS, more=2)), strict=True))
    for b, bag in enumerate(BAGS):
        alone: BagLogits = model(*bag)
        A, T = bag.member.shape[1:]
        assert agree(together.pair[b, :A], alone.pair[0])
        assert agree(together.agent[b, :A], alone.agent[0])
        assert agree(together.mode[b], alone.mode[0])
        assert agree(together.step[b, :T], alone.step[0])


@torch.no_grad()
def test_a_closed_bank_scores_a_name_by_its_own_prototype() -> None:
    model, bag = make_model(CLOSED), BAGS[3]
    assert number_names(["Critic", "Stranger", "Solver"], CLOSED) == [2, 0, 1]
    known: BagLogits = model(*bag, names=torch.tensor([[2, 0, 1]]))
    unknown: BagLogits = model(*bag)
    assert not agree(known.pair[0, 0], unknown.pair[0, 0])
    assert agree(known.pair[0, 1], unknown.pair[0, 1])
    model.name_bank[1] *= -1  # Critic's
    moved: BagLogits = model(*bag, names=torch.tensor([[2, 0, 1]]))
    assert not agree(moved.pair[0, 0], known.pair[0, 0])
    assert agree(moved.pair[0, 1:], known.pair[0, 1:])


def test_names_without_a_closed_bank_are_refused() -> None:
    with pytest.raises(ConfigError, match="agent_names"):
        ModelConfig(agent_names=("Solver",))
    with pytest.raises(ConfigError, match="evidence_turns"):
        ModelConfig(evidence_turns=-1)
    assert ModelConfig(**{**asdict(CLOSED), "agent_names": ["Solver", "Critic"]}) == CLOSED


@torch.no_grad()
@pytest.mark.parametrize("kept", [1, 3])
@pytest.mark.parametrize("whole", [False, True])
def test_evidence_is_of_the_turns_with_most_attention(kept: int, whole: bool) -> None:
    model = make_model(replace(TINY, evidence_turns=kept, bag_evidence=whole))
    batch = pad(BAGS)
    attention = torch.randn(*batch.wide.shape[:2], M + 1)
    weights = model.weigh(attention, batch.member).exp()  # (B, A, T, M + 1)
    for b, bag in enumerate(BAGS):
        for a in range(bag.member.shape[1]):
            own = batch.member[b].any(dim=0) if whole else batch.member[b, a] > 0
            for m in range(M + 1):
                turns = own.nonzero().ravel().tolist()
                best = sorted(turns, key=lambda t: -float(attention[b, t, m]))[:kept]
                total = sum(math.exp(attention[b, t, m]) for t in best)
                for t in range(attention.shape[1]):
                    expected = math.exp(attention[b, t, m]) / total if t in best else 0.0
                    assert weights[b, a, t, m].item() == pytest.approx(expected, abs=1e-6)


@torch.no_grad()
def test_a_step_outside_the_evidence_has_a_finite_logit() -> None:
    logits: BagLogits = make_model(replace(TINY, evidence_turns=1))(*BAGS[3])
    assert logits.step.min() > -100


@torch.no_grad()
def test_heads_of_their_own_need_no_pairs() -> None:
    model, bag = make_model(replace(TINY, level_heads=True)), BAGS[3]
    before: BagLogits = model(*bag)
    model.pair_bias.add_(3.0)
    after: BagLogits = model(*bag)
    assert not agree(before.pair, after.pair)
    assert agree(before.agent, after.agent)
    assert agree(before.mode, after.mode)


@torch.no_grad()
def test_intent_starts_the_prototypes_where_definitions_land(tmp_path: Path) -> None:
    source = open_encoder(write_encoder_folder(tmp_path / "encoder"))
    definitions = read_definitions(source, 1)
    assert definitions.shape == (M, WIDTH)
    assert np.linalg.norm(definitions, axis=1) == pytest.approx(np.ones(M), abs=1e-5)
    torch.manual_seed(0)
    model = Network(replace(TRAINED, dropout=0.0))
    place_prototypes(model, torch.from_numpy(definitions))
    bank = torch.nn.functional.normalize(model.error_bank, dim=-1)
    own = torch.einsum("mpk,mqk->mpq", bank, bank)
    assert own.min() > 0.9  # prototypes of one mode start together, and are not the same
    assert not agree(bank[:, 0], bank[:, 1])
    assert torch.einsum("mk,nk->mn", bank[:, 0], bank[:, 0]).fill_diagonal_(-1).max() < 0.99


def make_twins(tmp_path: Path) -> list[Item]:
    """Three examples, the first and last with a clean run whose agents come in another order."""
    cache = VectorCache(tmp_path, Encoder(write_encoder(tmp_path / ENCODER), remember=0), "e" * 64)
    items = []
    for i in range(3):
        run = make_run(("a", "the sum is wrong"), ("b", "skip it"), task=f"task {i}")
        clean = make_run(("b", "the sum is 4"), ("a", "again"), ("c", "yes"), task=f"task {i}")
        example = Example(run, (Fault("a", ErrorMode.FM_1_3),), clean if i != 1 else None)
        twin = bagger()(clean) if example.clean else None
        items.append(make_item(example, bagger()(run), cache, sigma=0.0, clean=twin))
    return items


def test_twins_are_matched_by_name_and_survive_the_disk(tmp_path: Path) -> None:
    items = make_twins(tmp_path)
    save_items({"train": items, "valid": items[1:2]}, tmp_path / "items")
    loaded = load_items(tmp_path / "items")
    assert [item.twin is None for item in loaded["train"]] == [False, True, False]
    for found in (items, loaded["train"]):
        batch = collate(found)
        assert batch.twin is not None
        assert batch.twins is not None
        assert batch.twin.tolist() == [[[0, 1], [0, 0]], [[-1, -1], [-1, -1]], [[1, 1], [1, 0]]]
        assert batch.twins.member.shape == (2, 3, 3)
    assert collate(items[1:2]).twins is None


def test_clean_twins_and_hard_negatives_enter_the_loss(tmp_path: Path) -> None:
    batch = collate(make_twins(tmp_path))
    assert batch.twins is not None
    torch.manual_seed(0)
    model = Network(TRAINED).eval()
    logits, twins = model(*batch.bags), model(*batch.twins)
    losses = [
        compute_loss(logits, batch, model.error_bank, config, twins=clean)[1]["contrastive"].item()
        for config, clean in (
            (LossConfig(), None),
            (LossConfig(), twins),
            (LossConfig(hard_negatives=2), None),
        )
    ]
    assert len(set(losses)) == 3
    assert losses[2] > losses[0]


@torch.no_grad()
def test_more_positives_and_negatives_follow_the_formula() -> None:
    rng = torch.Generator().manual_seed(5)
    N, K, P, H, modes, tau = 4, 6, 2, 3, 3, 0.3
    evidence, hard, twins = (torch.randn(*s, K, generator=rng) for s in ((N,), (N, H), (N,)))
    bank, labels = torch.randn(modes, P, K, generator=rng), [0, 1, 0, 2]
    twins[1] = 0.0
    hard[2, 1:] = 0.0  # an anchor with fewer of them

    def score(x: torch.Tensor, y: torch.Tensor) -> float:
        return math.exp(float(x @ y / x.norm() / y.norm()) / tau)

    total = 0.0
    for i in range(N):
        others = [(labels[j], evidence[j]) for j in range(N) if j != i]
        others += [(m, bank[m, p]) for m in range(modes) for p in range(P)]
        others += [(-1, hard[i, h]) for h in range(H) if hard[i, h].any()]
        others += [(labels[i], twins[i])] if i != 1 else []
        scores = [(label, score(evidence[i], row)) for label, row in others]
        whole = sum(value for _, value in scores)
        right = [math.log(value / whole) for label, value in scores if label == labels[i]]
        total -= sum(right) / len(right) / N
    got = contrastive_loss(evidence, torch.tensor(labels), bank, tau, hard=hard, twins=twins)
    assert got.item() == pytest.approx(total, rel=1e-5)


def test_hard_negatives_are_the_most_alike_of_other_agents() -> None:
    evidence = torch.eye(3)[:2]
    rest = torch.nn.functional.normalize(
        torch.tensor([[1.0, 0.1, 0.0], [0.9, 0.0, 0.5], [0.0, 1.0, 0.2], [-1.0, 0.0, 0.0]]), dim=-1
    )
    found = hardest(evidence, torch.tensor([0, 1]), rest, torch.tensor([0, 1, 1, 2]), 2)
    assert found[0].equal(rest[[1, 2]])  # row 0 is of its own agent
    assert found[1].equal(rest[[0, 3]])
    alone = hardest(evidence[:1], torch.tensor([0]), rest[:1], torch.tensor([0]), 2)
    assert alone.shape == (1, 1, 3)
    assert not alone.any()


def test_a_place_without_a_hard_negative_adds_nothing() -> None:
    bank, labels = torch.eye(3)[:, None], torch.tensor([0])
    anchor = torch.tensor([[1.0, 0.5, 0.0]], requires_grad=True)
    hard = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]])
    losses = [contrastive_loss(anchor, labels, bank, 0.5, hard=h) for h in (hard, hard[:, :1])]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-6)
    grads = [torch.autograd.grad(loss, anchor)[0] for loss in losses]
    assert torch.allclose(grads[0], grads[1])
    nothing = contrastive_loss(anchor, labels, bank, 0.5, hard=torch.zeros(1, 2, 3))
    assert nothing.item() == pytest.approx(contrastive_loss(anchor, labels, bank, 0.5).item())


def test_without_negatives_or_twins_there_is_nothing_to_add() -> None:
    evidence, labelled = torch.ones(1, 2, M, 3), torch.zeros(1, 2, M, dtype=torch.bool)
    labelled[0, 0, 0] = True
    assert find_hard(evidence, labelled, torch.ones_like(labelled), 0) is None
    assert find_hard(evidence, labelled, labelled, 4) is None
    assert find_twins(None, None, labelled) is None


def test_hidden_turns_lose_all_channels_and_keep_their_place(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = make_config(Path(), Path("out"), turn_dropout=0.5)
    bags = pad(BAGS)
    whole = replace(TINY, centre_text=False)
    hidden = AttributionModule(replace(config, model=whole), 1)._mask_turns(bags)
    blank = ~hidden.wide.any(dim=-1)
    real = bags.member.sum(dim=1) > 0
    assert 0 < (blank & real).sum() < real.sum()
    for name in ("vectors", "features"):
        assert (~getattr(hidden, name).any(dim=-1)).equal(blank | ~getattr(bags, name).any(dim=-1))
    assert hidden.member.equal(bags.member)
    assert hidden.reply_to.equal(bags.reply_to)
    centred = AttributionModule(replace(config, model=TINY), 1)._mask_turns(bags)
    blank = ~centred.wide.any(dim=-1) & real
    read = [
        vectors - vectors[there].mean(dim=0)
        for vectors, there in zip(centred.vectors, real, strict=True)
    ]
    seen = torch.stack(read).norm(dim=-1)
    assert blank.any()
    assert seen[blank].max() < 1e-6
    assert seen[real & ~blank].max() > 0.1
    for wrong in (-0.1, 1.1):
        with pytest.raises(ConfigError, match="turn_dropout"):
            replace(config, turn_dropout=wrong)
    with pytest.raises(ConfigError, match="hard_negatives"):
        LossConfig(hard_negatives=-1)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in the form of the paper, trained for one epoch."""
    ground = tmp_path_factory.mktemp("closed")
    write_examples(ground / "runs.jsonl", [make_example(i) for i in range(24)])
    write_encoder_folder(ground / "encoder")
    config = make_config(
        ground,
        ground / "model",
        model=replace(TRAINED, **PAPER, layers=0),
        loss=LossConfig(hard_negatives=4),
        intent=True,
        turn_dropout=0.2,
        epochs=1,
    )
    return train(config)


def test_the_names_of_a_closed_bank_are_saved_and_used(closed: Path) -> None:
    artifact = open_artifact(closed)
    assert tuple(artifact.model["agent_names"]) == ("Checker", "Solver")
    model = load_model(artifact)
    assert [network.name_bank.shape[0] for network in model] == [2]
    attribute, run = load_trained(closed), make_example(1).trajectory
    renamed = make_run(*((f"new {t.agent}", t.content) for t in run.turns), task=run.task)
    assert not np.allclose(attribute(run).pair_probs, attribute(renamed).pair_probs, atol=1e-6)


def test_items_are_scored_by_the_names_of_the_training_set(tmp_path: Path) -> None:
    items = make_twins(tmp_path)
    config = make_config(tmp_path, tmp_path / "out", model=replace(TRAINED, closed_agents=True))
    same = close_agents(make_config(tmp_path, tmp_path / "out"), {"train": items})
    assert all(item.names is None for item in items)
    assert same.model == TRAINED
    found = close_agents(config, {"train": items[:1], "valid": items[1:]})
    assert found.model.agent_names == ("a", "b")
    assert all(item.names is not None and item.names.tolist() == [1, 2] for item in items)
    torch.manual_seed(0)
    model = Network(found.model)
    named = score_items(model, items)
    for item in items:
        item.names = np.zeros(2, dtype=np.int64)
    assert not np.allclose(named[0].pair, score_items(model, items)[0].pair)
