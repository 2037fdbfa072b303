"""The network with its losses and its optimiser, as Lightning trains it."""

from __future__ import annotations

from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from dcl.calibration import best_threshold
from dcl.learning.config import LossConfig, TrainConfig
from dcl.learning.data import Batch
from dcl.learning.losses import (
    asymmetric_loss,
    contrastive_loss,
    find_hard,
    find_twins,
    hierarchy_loss,
    step_loss,
)
from dcl.learning.model import BagLogits, BagTensors, Network


class AttributionModule(LightningModule):
    """The network with its losses and optimiser.

    Args:
        config: Network, losses and rates are read.
        steps: Optimiser steps of the whole run, for the schedule.
    """

    def __init__(self, config: TrainConfig, steps: int) -> None:
        super().__init__()
        self.config = config
        self.steps = steps
        self.model = Network(config.model)
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._parts: list[Tensor] = []
        self._names: tuple[str, ...] = ()

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Loss of one batch."""
        loss = self.measure(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def measure(self, batch: Batch) -> Tensor:
        """Loss of one batch, noted for the means of the epoch."""
        bags = self._mask_channels(batch.bags)
        if self.config.turn_dropout:
            bags = self._mask_turns(bags)
        logits: BagLogits = self.model(*bags, names=batch.names, apart=batch.extra)
        twins: BagLogits | None = None if batch.twins is None else self.model(*batch.twins)
        loss, parts = compute_loss(
            logits, batch, self.model.error_bank, self.config.loss, twins=twins
        )
        # Kept and logged once an epoch: the trainer takes longer to log six numbers a step than to
        # add them to the gradient.
        weight = float(len(batch.known))
        self._parts.append(weight * torch.stack([torch.ones_like(loss), *parts.values()]).detach())
        self._names = tuple(parts)
        return loss

    def on_train_epoch_end(self) -> None:
        """Log the mean of each loss over the epoch's bags."""
        count, *sums = torch.stack(self._parts).sum(dim=0)
        self._parts.clear()
        self.log_dict(
            {f"train/{k}": part / count for k, part in zip(self._names, sums, strict=True)}
        )

    def validation_step(self, batch: Batch, index: int) -> None:
        """Collect pair logits."""
        logits: BagLogits = self.model(*batch.bags, names=batch.names)
        real = (batch.bags.member.sum(dim=2) > 0) & batch.known[:, None]
        self._seen.append((logits.pair[real].cpu(), batch.pair[real].cpu()))

    def on_validation_epoch_end(self) -> None:
        """Log pair micro-F1 at the best threshold."""
        self.log("valid/pair_f1", self.score_validation(), prog_bar=True)

    def score_validation(self) -> float:
        """Pair micro-F1 at the best threshold of what was collected, 0 to 1."""
        scores, labels = (torch.cat(part).ravel().numpy() for part in zip(*self._seen, strict=True))
        self._seen.clear()
        return best_threshold(scores, labels)[1]

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW that warms up over a tenth of the run and falls to zero, both along a cosine."""
        groups = self.group_parameters()
        optimizer = torch.optim.AdamW(groups)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            [group["lr"] for group in groups],
            total_steps=self.steps + 1,
            pct_start=0.1,
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def group_parameters(self) -> list[dict[str, Any]]:
        """Groups of parameters with their peak rate, as an optimiser takes them."""
        return group_decay(self.model, self.config.learning_rate, self.config.weight_decay)

    def _mask_channels(self, bags: BagTensors) -> BagTensors:
        """Blank one random channel of some bags, so that none is leaned on alone."""
        drawn = torch.rand(len(bags.task), 1, 1, device=bags.task.device)
        share = self.config.channel_dropout / 3
        keep = [((drawn < i * share) | (drawn >= (i + 1) * share)).float() for i in range(3)]
        return self._keep(bags, keep[0], keep[1], keep[2])

    def _mask_turns(self, bags: BagTensors) -> BagTensors:
        """Blank all channels of some turns, which stay in their place."""
        drawn = torch.rand(*bags.wide.shape[:2], 1, device=bags.wide.device)
        keep = (drawn >= self.config.turn_dropout).float()  # (B, T, 1)
        hidden = self._keep(bags, keep, keep, keep)
        if not self.config.model.centre_text:
            return hidden
        seen = keep.transpose(1, 2) * bags.member.sum(dim=1, keepdim=True)  # (B, 1, T)
        mean = seen @ bags.vectors / seen.sum(dim=2, keepdim=True).clamp(min=1)
        return hidden._replace(vectors=hidden.vectors + (1 - keep) * mean)  # less the mean: 0

    def _keep(self, bags: BagTensors, text: Tensor, features: Tensor, wide: Tensor) -> BagTensors:
        """The bags with each channel blank where its mask is 0."""
        mean = self.model.feature_mean  # the network sees it as 0
        return bags._replace(
            vectors=bags.vectors * text,
            features=mean + (bags.features - mean) * features,
            wide=bags.wide * wide,
        )


def group_decay(module: nn.Module, rate: float, decay: float) -> list[dict[str, Any]]:
    """Parameters of a module in two groups: matrices, which decay, and the rest, which does not.

    Args:
        module: Frozen parameters are left out.
        rate: Peak rate of both; > 0.
        decay: Weight decay of the matrices; >= 0.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "lr": rate, "weight_decay": decay},
        {"params": [p for p in trained if p.ndim < 2], "lr": rate, "weight_decay": 0.0},
    ]


def compute_loss(
    logits: BagLogits,
    batch: Batch,
    bank: Tensor,
    config: LossConfig,
    *,
    twins: BagLogits | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted sum of all losses, and each of them.

    Args:
        logits: Output of the network.
        batch: Inputs and targets.
        bank: `(M, P, K)` error prototypes.
        config: Weights and constants.
        twins: Output of the network for the clean runs of the batch.

    Returns:
        The sum in nats, and the unweighted parts by name.
    """
    member = batch.bags.member
    real = (member.sum(dim=2) > 0) & ~batch.extra[:, None]  # (B, A)
    turns = member.sum(dim=1) > 0  # (B, T)
    modes_known = (real & batch.known[:, None])[..., None].expand_as(batch.pair)
    shape = {"gamma_negative": config.gamma_negative, "margin": config.margin}
    labelled = (batch.pair > 0) & modes_known
    parts = {
        "pair": asymmetric_loss(logits.pair, batch.pair, modes_known, **shape),
        "agent": asymmetric_loss(logits.agent, batch.agent, real, **shape),
        "mode": asymmetric_loss(logits.mode, batch.mode, find_explained(batch), **shape),
        "contrastive": contrastive_loss(
            logits.evidence[labelled],
            labelled.nonzero()[:, 2],
            bank,
            config.temperature,
            hard=find_hard(logits.evidence, labelled, modes_known, config.hard_negatives),
            twins=find_twins(None if twins is None else twins.evidence, batch.twin, labelled),
        ),
        "hierarchy": hierarchy_loss(logits.pair, logits.agent, logits.mode, real),
        "step": step_loss(logits.step, batch.step, turns),
    }
    weights = {
        "pair": 1.0,
        "agent": config.agent,
        "mode": config.mode,
        "contrastive": config.contrastive,
        "hierarchy": config.hierarchy,
        "step": config.step,
    }
    total = torch.stack([weights[name] * part for name, part in parts.items()]).sum()
    return total, parts


def find_explained(batch: Batch) -> Tensor:
    """Modes the mode level can be asked for: `(B, M)` bool.

    A mode that only agents who never speak have left no turn to learn it from: asked for, it would
    pull the modes of all who do speak upwards.
    """
    silent = (batch.mode > 0) & (batch.pair.amax(dim=1) == 0)
    return (batch.known & ~batch.extra)[:, None] & ~silent
