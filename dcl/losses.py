"""Losses as pure functions of tensors; all return a scalar in nats unless said otherwise."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def asymmetric_loss(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor,
    *,
    gamma_positive: float = 0.0,
    gamma_negative: float = 0.0,
    margin: float = 0.0,
) -> Tensor:
    """Binary cross-entropy that may fade out easy negatives; plain BCE with the defaults.

    Args:
        logits: Any shape.
        targets: Same shape, 0 to 1.
        mask: Same shape, bool; True = counts.
        gamma_positive: Focusing of positives; >= 0.
        gamma_negative: Focusing of negatives; >= 0.
        margin: Probability under which a negative counts as solved, 0 to 1.

    Returns:
        Mean over the masked-in entries, 0 if there are none.

    Source:
        Ridnik et al. 2021, "Asymmetric Loss for Multi-Label Classification", eq. 4-6.
    """
    prob = torch.sigmoid(logits)
    negative_prob = (prob - margin).clamp(min=0) if margin > 0 else prob
    log_not = (
        torch.log1p(-negative_prob.clamp(max=1 - 1e-6)) if margin > 0 else F.logsigmoid(-logits)
    )
    positive = targets * (1 - prob) ** gamma_positive * F.logsigmoid(logits)
    negative = (1 - targets) * negative_prob**gamma_negative * log_not
    return -((positive + negative) * mask).sum() / mask.sum().clamp(min=1)


def contrastive_loss(evidence: Tensor, labels: Tensor, bank: Tensor, temperature: float) -> Tensor:
    """Pull the evidence of a fault to the prototypes and peers of its mode, away from the others.

    Args:
        evidence: `(N, K)` float, evidence of labelled (agent, mode) pairs, any norm.
        labels: `(N,)` int64, mode of each.
        bank: `(M, P, K)` float, prototypes of all modes, any norm.
        temperature: Divides the cosines; > 0. Smaller weighs hard negatives more.

    Returns:
        Mean over the anchors, 0 if there are none.

    Raises:
        ValueError: If `temperature` is not positive.

    Source:
        Khosla et al. 2020, "Supervised Contrastive Learning", eq. 2 (L_out), with prototypes as
        extra positives and negatives as in Aegis (arXiv 2509.14295) §5.3.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    if len(evidence) == 0:
        return bank.sum() * 0.0  # keeps the graph, adds nothing
    M, P, _ = bank.shape
    anchors = F.normalize(evidence, dim=-1)
    others = torch.cat([anchors, F.normalize(bank, dim=-1).flatten(0, 1)])  # (N + M P, K)
    owner = torch.cat([labels, torch.arange(M, device=labels.device).repeat_interleave(P)])
    itself = torch.zeros(len(anchors), len(others), dtype=torch.bool, device=labels.device)
    itself.fill_diagonal_(True)
    logits = (anchors @ others.T / temperature).masked_fill(itself, -torch.inf)
    log_probs = logits - logits.logsumexp(dim=1, keepdim=True)
    positive = (labels[:, None] == owner[None, :]) & ~itself
    per_anchor = log_probs.masked_fill(~positive, 0.0).sum(dim=1) / positive.sum(dim=1)
    return -per_anchor.mean()


def hierarchy_loss(pair: Tensor, agent: Tensor, mode: Tensor, mask: Tensor) -> Tensor:
    """Punish a pair that is more probable than its agent or its mode.

    Args:
        pair: `(B, A, M)` logits.
        agent: `(B, A)` logits.
        mode: `(B, M)` logits.
        mask: `(B, A)` bool; True = a real agent.

    Returns:
        Mean of `max(0, p_pair - min(p_agent, p_mode))^2` over real pairs, 0 to 1, no unit.

    Source:
        Aegis (arXiv 2509.14295) §5.3, L_hier.
    """
    bound = torch.minimum(torch.sigmoid(agent)[..., None], torch.sigmoid(mode)[:, None])
    excess = (torch.sigmoid(pair) - bound).clamp(min=0) ** 2
    return (excess * mask[..., None]).sum() / (mask.sum() * pair.shape[-1]).clamp(min=1)


def step_loss(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Listwise cross-entropy between the step posterior and a softened target.

    Args:
        logits: `(B, T)`.
        targets: `(B, T)`, >= 0; each row sums to 1, or to 0 where the step is unknown.
        mask: `(B, T)` bool; True = a real turn.

    Returns:
        Mean over the rows whose step is known, 0 if there are none.
    """
    log_probs = logits.masked_fill(~mask, -1e4).log_softmax(dim=1)
    known = targets.sum(dim=1) > 0
    return -(targets * log_probs).sum() / known.sum().clamp(min=1)
