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
    gamma_negative: float = 0.0,
    margin: float = 0.0,
) -> Tensor:
    """Binary cross-entropy that may fade out easy negatives; plain BCE with the defaults.

    Args:
        logits: Any shape.
        targets: Same shape, 0 to 1.
        mask: Same shape, bool; True = counts.
        gamma_negative: Focusing of negatives; >= 0.
        margin: Probability under which a negative counts as solved, 0 to 1.

    Returns:
        Mean over the masked-in entries, 0 if there are none.

    Source:
        Ridnik et al. 2021, "Asymmetric Loss for Multi-Label Classification", eq. 4-6, with no
        focusing of positives.
    """
    prob = torch.sigmoid(logits)
    negative_prob = (prob - margin).clamp(min=0) if margin > 0 else prob
    log_not = (
        torch.log1p(-negative_prob.clamp(max=1 - 1e-6)) if margin > 0 else F.logsigmoid(-logits)
    )
    positive = targets * F.logsigmoid(logits)
    negative = (1 - targets) * negative_prob**gamma_negative * log_not
    return -((positive + negative) * mask).sum() / mask.sum().clamp(min=1)


def contrastive_loss(
    evidence: Tensor,
    labels: Tensor,
    bank: Tensor,
    temperature: float,
    *,
    hard: Tensor | None = None,
    twins: Tensor | None = None,
) -> Tensor:
    """Pull the evidence of a fault to the prototypes and peers of its mode, away from the others.

    Args:
        evidence: `(N, K)` float, evidence of labelled (agent, mode) pairs, any norm.
        labels: `(N,)` int64, mode of each.
        bank: `(M, P, K)` float, prototypes of all modes, any norm.
        temperature: Divides the cosines; > 0. Smaller weighs hard negatives more.
        hard: `(N, H, K)` float, further negatives of each anchor, any norm; rows of zeros where it
            has fewer.
        twins: `(N, K)` float, one further positive of each anchor, any norm; zeros where it has
            none.

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
    positive = (labels[:, None] == owner[None, :]) & ~itself
    if twins is not None:
        there = twins.abs().sum(dim=-1, keepdim=True) > 0  # (N, 1)
        cosine = (anchors * F.normalize(twins, dim=-1)).sum(dim=-1, keepdim=True)
        logits = torch.cat([logits, (cosine / temperature).masked_fill(~there, -torch.inf)], 1)
        positive = torch.cat([positive, there], dim=1)
    if hard is not None:
        cosines = torch.einsum("nk,nhk->nh", anchors, F.normalize(hard, dim=-1))
        padding = hard.abs().sum(dim=-1) == 0  # (N, H)
        logits = torch.cat([logits, (cosines / temperature).masked_fill(padding, -torch.inf)], 1)
        positive = F.pad(positive, (0, cosines.shape[1]))
    log_probs = logits - logits.logsumexp(dim=1, keepdim=True)
    per_anchor = log_probs.masked_fill(~positive, 0.0).sum(dim=1) / positive.sum(dim=1)
    return -per_anchor.mean()


def hardest(evidence: Tensor, owner: Tensor, rest: Tensor, others: Tensor, count: int) -> Tensor:
    """The evidence of other agents without the fault that is most like each anchor.

    Args:
        evidence: `(N, K)` unit vectors of the anchors.
        owner: `(N,)` int64, agent of each anchor, counted over the whole batch.
        rest: `(R, K)` unit vectors of pairs that are no faults.
        others: `(R,)` int64, agent of each of them.
        count: Most vectors for each anchor; > 0.

    Returns:
        `(N, H, K)`, H at most `count`; zeros where an anchor has fewer.

    Source:
        Aegis (arXiv 2509.14295) §5.3, evidence turns of a bag against those of other bags.
    """
    apart = owner[:, None] != others[None, :]  # (N, R)
    like = (evidence @ rest.T).masked_fill(~apart, -2.0)
    best = like.topk(min(count, len(rest)), dim=1)
    return rest[best.indices] * (best.values > -2.0)[..., None]


def find_hard(evidence: Tensor, labelled: Tensor, known: Tensor, count: int) -> Tensor | None:
    """Evidence that each labelled pair is pushed from: the most alike of agents without the fault.

    Args:
        evidence: `(B, A, M, K)` unit vectors.
        labelled: `(B, A, M)` bool; True = a fault.
        known: `(B, A, M)` bool; True = a pair of a real agent whose modes are labelled.
        count: Most of them for each anchor.

    Returns:
        `(N, H, K)`, or None where there is nothing to push from.
    """
    unlabelled = known & ~labelled
    if not count or not unlabelled.any():
        return None
    A = labelled.shape[1]
    bag, agent, _ = labelled.nonzero(as_tuple=True)
    other_bag, other_agent, _ = unlabelled.nonzero(as_tuple=True)
    owner, others = bag * A + agent, other_bag * A + other_agent
    return hardest(evidence[labelled], owner, evidence[unlabelled], others, count)


def find_twins(evidence: Tensor | None, twin: Tensor | None, labelled: Tensor) -> Tensor | None:
    """Evidence for the same mode of the same agent in the clean run.

    Args:
        evidence: `(B', A', M, K)` of the clean runs.
        twin: `(B, A, 2)` int64, bag and agent there; or -1.
        labelled: `(B, A, M)` bool; True = a fault.

    Returns:
        `(N, K)`, zeros where a fault has no twin; None where there is no twin at all.
    """
    if evidence is None or twin is None:
        return None
    bag, agent, mode = labelled.nonzero(as_tuple=True)
    place = twin[bag, agent]  # (N, 2)
    found = evidence[place[:, 0], place[:, 1], mode]  # -1 takes the last, and is blanked
    return found * (place[:, :1] >= 0)


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
