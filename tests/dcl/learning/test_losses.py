"""Each loss against a slow loop over plain floats, written from its formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dcl.learning.losses import (
    asymmetric_loss,
    contrastive_loss,
    hierarchy_loss,
    step_loss,
)

B, T, A, M, P, K = 3, 5, 2, 4, 2, 6


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def draw(rng: torch.Generator, *shape: int, scale: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64) * scale


def flip(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=rng) < 0.5


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def slow_asymmetric(
    logits: list[float],
    targets: list[float],
    mask: list[bool],
    gamma_negative: float = 0.0,
    margin: float = 0.0,
) -> float:
    total = 0.0
    for x, y, real in zip(logits, targets, mask, strict=True):
        if not real:
            continue
        p = sigmoid(x)
        shifted = max(p - margin, 0.0)
        total -= y * math.log(p)
        total -= (1 - y) * shifted**gamma_negative * math.log(1 - shifted)
    return total / max(sum(mask), 1)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"gamma_negative": 4.0},
    {"gamma_negative": 2.5},
    {"margin": 0.05},
    {"gamma_negative": 4.0, "margin": 0.2},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_asymmetric_loss_follows_its_formula(
    settings: dict[str, Any], rng: torch.Generator
) -> None:
    logits, mask = draw(rng, B, A, M), flip(rng, B, A, M)
    targets = torch.rand(B, A, M, generator=rng, dtype=torch.float64)
    slow = slow_asymmetric(
        logits.ravel().tolist(), targets.ravel().tolist(), mask.ravel().tolist(), **settings
    )
    fast = asymmetric_loss(logits, targets, mask, **settings)
    assert fast.item() == pytest.approx(slow, abs=1e-9)


@pytest.mark.parametrize("settings", SETTINGS)
def test_asymmetric_loss_has_the_right_gradient(
    settings: dict[str, Any], rng: torch.Generator
) -> None:
    logits, mask = draw(rng, 2, 5).requires_grad_(), flip(rng, 2, 5)
    targets = flip(rng, 2, 5).double()
    assert torch.autograd.gradcheck(
        lambda x: asymmetric_loss(x, targets, mask, **settings), (logits,)
    )


def test_asymmetric_loss_is_cross_entropy_by_default(rng: torch.Generator) -> None:
    logits, targets = draw(rng, 7), flip(rng, 7).double()
    plain = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets)
    assert asymmetric_loss(logits, targets, torch.ones(7, dtype=torch.bool)).item() == (
        pytest.approx(plain.item(), abs=1e-12)
    )


@pytest.mark.parametrize("settings", SETTINGS)
def test_asymmetric_loss_without_any_entry_is_0(settings: dict[str, Any]) -> None:
    logits = torch.zeros(3, requires_grad=True)
    loss = asymmetric_loss(logits, torch.ones(3), torch.zeros(3, dtype=torch.bool), **settings)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert logits.grad is not None
    assert logits.grad.abs().sum() == 0


@pytest.mark.parametrize("settings", SETTINGS)
def test_asymmetric_loss_stays_finite_at_the_ends(settings: dict[str, Any]) -> None:
    logits = torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4] * 2, requires_grad=True)
    targets = torch.tensor([0.0] * 5 + [1.0] * 5)
    loss = asymmetric_loss(logits, targets, torch.ones(10, dtype=torch.bool), **settings)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_a_negative_below_the_margin_is_solved() -> None:
    mask, targets = torch.ones(1, dtype=torch.bool), torch.zeros(1)
    below, above = torch.tensor([-3.0]), torch.tensor([-1.0])  # p = 0.047 and 0.269
    assert asymmetric_loss(below, targets, mask, margin=0.05).item() == 0
    assert asymmetric_loss(above, targets, mask, margin=0.05).item() > 0


def test_focusing_fades_easy_negatives_more_than_hard_ones() -> None:
    mask, negative = torch.ones(1, dtype=torch.bool), torch.zeros(1)

    def kept(logit: float, target: Tensor) -> float:
        plain, faded = (
            asymmetric_loss(torch.tensor([logit]), target, mask, gamma_negative=gamma).item()
            for gamma in (0, 2)
        )
        return faded / plain

    assert kept(-3.0, negative) < 0.01 < kept(3.0, negative)
    assert kept(-3.0, 1 - negative) == kept(3.0, 1 - negative) == 1


def slow_contrastive(
    evidence: list[list[float]],
    labels: list[int],
    bank: list[list[list[float]]],
    temperature: float,
) -> float:
    def cosine(a: list[float], b: list[float]) -> float:
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / math.hypot(*a) / math.hypot(*b)

    prototypes = [(m, row) for m, rows in enumerate(bank) for row in rows]
    total = 0.0
    for i, (anchor, label) in enumerate(zip(evidence, labels, strict=True)):
        peers = [(labels[j], row) for j, row in enumerate(evidence) if j != i]
        scores = [(m, math.exp(cosine(anchor, row) / temperature)) for m, row in peers + prototypes]
        everything = sum(score for _, score in scores)
        positives = [score for m, score in scores if m == label]
        total += sum(-math.log(score / everything) for score in positives) / len(positives)
    return total / len(evidence)


@pytest.mark.parametrize("temperature", [0.07, 0.5, 3.0])
@pytest.mark.parametrize("labels", [[0], [1, 1], [0, 1, 2, 3], [2, 2, 0, 2, 1]])
def test_contrastive_loss_follows_its_formula(
    labels: list[int], temperature: float, rng: torch.Generator
) -> None:
    evidence, bank = draw(rng, len(labels), K), draw(rng, M, P, K)
    slow = slow_contrastive(evidence.tolist(), labels, bank.tolist(), temperature)
    fast = contrastive_loss(evidence, torch.tensor(labels), bank, temperature)
    assert fast.item() == pytest.approx(slow, abs=1e-9)


def test_contrastive_loss_has_the_right_gradient(rng: torch.Generator) -> None:
    evidence, bank = draw(rng, 3, K).requires_grad_(), draw(rng, M, P, K).requires_grad_()
    labels = torch.tensor([1, 1, 2])
    assert torch.autograd.gradcheck(
        lambda e, b: contrastive_loss(e, labels, b, 0.5), (evidence, bank)
    )


def test_contrastive_loss_ignores_norms(rng: torch.Generator) -> None:
    evidence, bank, labels = draw(rng, 3, K), draw(rng, M, P, K), torch.tensor([0, 1, 1])
    small = contrastive_loss(evidence, labels, bank, 0.1)
    large = contrastive_loss(evidence * 17, labels, bank * 0.3, 0.1)
    assert small.item() == pytest.approx(large.item(), abs=1e-9)


def test_contrastive_loss_without_anchors_is_0_and_keeps_the_graph(rng: torch.Generator) -> None:
    bank = draw(rng, M, P, K).requires_grad_()
    nothing = torch.zeros(0, K, dtype=torch.float64)
    loss = contrastive_loss(nothing, torch.zeros(0, dtype=torch.int64), bank, 0.07)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert bank.grad is not None
    assert bank.grad.abs().sum() == 0


def test_an_anchor_alone_has_its_prototypes() -> None:
    bank = torch.eye(M, dtype=torch.float64)[:, None]  # one prototype a mode
    at_own = contrastive_loss(bank[0], torch.tensor([0]), bank, 0.07)
    at_other = contrastive_loss(bank[0], torch.tensor([1]), bank, 0.07)
    assert at_own.item() < 1e-5
    assert at_other.item() == pytest.approx(1 / 0.07, abs=1e-4)


def test_contrastive_loss_pulls_to_its_mode_and_pushes_from_the_rest() -> None:
    bank = torch.eye(3, dtype=torch.float64)[:, None]
    anchor = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    loss = contrastive_loss(anchor, torch.tensor([0]), bank, 0.5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert anchor.grad is not None
    downhill = -anchor.grad[0]
    assert downhill[0] > 0 > downhill[1]


def test_contrastive_loss_draws_peers_together() -> None:
    bank = torch.eye(3, 4, dtype=torch.float64)[:, None]
    labels = torch.tensor([0, 0])
    near = torch.tensor([[1.0, 0, 0, 1.0], [1.0, 0, 0, 1.0]], dtype=torch.float64)
    apart = torch.tensor([[1.0, 0, 0, 1.0], [1.0, 0, 0, -1.0]], dtype=torch.float64)
    near_loss = contrastive_loss(near, labels, bank, 0.07)
    assert near_loss < contrastive_loss(apart, labels, bank, 0.07)


def test_contrastive_loss_survives_a_zero_vector(rng: torch.Generator) -> None:
    evidence = torch.zeros(2, K, requires_grad=True)
    bank = draw(rng, M, P, K).float()
    loss = contrastive_loss(evidence, torch.tensor([0, 1]), bank, 0.07)
    assert loss.isfinite()


@pytest.mark.parametrize("temperature", [0.0, -0.1])
def test_contrastive_loss_refuses_the_temperature(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"temperature must be > 0, got {temperature}"):
        contrastive_loss(torch.ones(1, K), torch.tensor([0]), torch.ones(M, P, K), temperature)


def test_hierarchy_loss_follows_its_formula(rng: torch.Generator) -> None:
    pair, agent, mode = draw(rng, B, A, M), draw(rng, B, A), draw(rng, B, M)
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    total, count = 0.0, 0
    for b in range(B):
        for a in range(A):
            for m in range(M):
                if mask[b, a]:
                    bound = min(sigmoid(agent[b, a].item()), sigmoid(mode[b, m].item()))
                    total += max(0.0, sigmoid(pair[b, a, m].item()) - bound) ** 2
                    count += 1
    fast = hierarchy_loss(pair, agent, mode, mask)
    assert fast.item() == pytest.approx(total / count, abs=1e-9)


def test_hierarchy_loss_has_the_right_gradient(rng: torch.Generator) -> None:
    leaves = (draw(rng, B, A, M), draw(rng, B, A), draw(rng, B, M))
    mask = flip(rng, B, A)
    mask[0, 0] = True
    assert torch.autograd.gradcheck(
        lambda p, a, m: hierarchy_loss(p, a, m, mask), tuple(x.requires_grad_() for x in leaves)
    )


def test_hierarchy_loss_is_0_where_levels_agree_or_nothing_is_real() -> None:
    low, high = torch.full((1, 1, M), -2.0), torch.full((1, 1), 2.0)
    real = torch.ones(1, 1, dtype=torch.bool)
    assert hierarchy_loss(low, high, torch.full((1, M), 2.0), real).item() == 0
    assert hierarchy_loss(-low, -high, torch.full((1, M), 2.0), real).item() > 0.5
    assert hierarchy_loss(-low, high, torch.full((1, M), -2.0), real).item() > 0.5
    assert hierarchy_loss(-low, -high, torch.full((1, M), 2.0), ~real).item() == 0


def slow_step(
    logits: list[list[float]], targets: list[list[float]], mask: list[list[bool]]
) -> float:
    total, known = 0.0, 0
    for scores, wanted, real in zip(logits, targets, mask, strict=True):
        if sum(wanted) == 0:
            continue
        known += 1
        everything = sum(math.exp(x) for x, r in zip(scores, real, strict=True) if r)
        for x, y, r in zip(scores, wanted, real, strict=True):
            if r:
                total -= y * (x - math.log(everything))
    return total / max(known, 1)


def make_step_targets() -> tuple[Tensor, Tensor]:
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] + [False] * 4])
    targets = torch.zeros(B, T, dtype=torch.float64)
    targets[0] = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.1])
    targets[1, 1] = 1.0
    return targets, mask


def test_step_loss_follows_its_formula(rng: torch.Generator) -> None:
    targets, mask = make_step_targets()
    logits = draw(rng, B, T)
    slow = slow_step(logits.tolist(), targets.tolist(), mask.tolist())
    assert step_loss(logits, targets, mask).item() == pytest.approx(slow, abs=1e-9)


def test_step_loss_has_the_right_gradient(rng: torch.Generator) -> None:
    targets, mask = make_step_targets()
    logits = draw(rng, B, T).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: step_loss(x, targets, mask), (logits,))


def test_step_loss_does_not_see_padded_turns(rng: torch.Generator) -> None:
    targets, mask = make_step_targets()
    logits = draw(rng, B, T)
    loss = step_loss(logits, targets, mask)
    assert step_loss(logits.masked_fill(~mask, 99.0), targets, mask).equal(loss)


def test_step_loss_is_0_where_no_step_is_known_and_finite_where_all_is_masked() -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    nothing = torch.zeros(2, 3)
    masked = torch.zeros(2, 3, dtype=torch.bool)
    assert step_loss(logits, nothing, ~masked).item() == 0
    loss = step_loss(logits, nothing, masked)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_step_loss_falls_when_the_labelled_turn_rises() -> None:
    targets, mask = torch.tensor([[0.0, 1.0, 0.0]]), torch.ones(1, 3, dtype=torch.bool)
    low = step_loss(torch.tensor([[0.0, 1.0, 0.0]]), targets, mask)
    assert step_loss(torch.tensor([[0.0, 3.0, 0.0]]), targets, mask) < low
