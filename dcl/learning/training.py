"""Training: a thin LightningModule around the network, and `train(config) -> artifact`."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from numpy.typing import NDArray
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn

import dcl
from dcl.artifact import (
    ENCODER,
    LEXICON,
    TOKENIZER,
    WEIGHTS,
    hash_file,
    is_free,
    open_encoder,
    save_lexicon,
    write_artifact,
)
from dcl.attribution import Calibration
from dcl.calibration import best_threshold, fit_calibration, score_levels
from dcl.errors import ConfigError
from dcl.learning.config import DataConfig, LossConfig, RunConfig, TrainConfig, read_config
from dcl.learning.data import AttributionData, Batch, Item
from dcl.learning.inference import score_items
from dcl.learning.losses import (
    asymmetric_loss,
    contrastive_loss,
    find_hard,
    find_twins,
    hierarchy_loss,
    step_loss,
)
from dcl.learning.model import BagLogits, BagTensors, Model, Network, number_names
from dcl.learning.preparation import fit_wide, prepare, read_definitions
from dcl.runtime import count_cores, load_bagger
from dcl.splits import Split


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
        return self._keep(bags, keep, keep, keep)

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


def train(config: TrainConfig) -> Path:
    """Train a model; started again after a kill, it goes on where it was.

    Args:
        config: The run.

    Returns:
        Folder of the trained model, ready for `python -m export convert`.

    Raises:
        ConfigError: If a value is wrong, or the folder holds another run's work in progress.
        ArtifactError: If the encoder is missing or damaged.
        TraceError: If an example cannot be read.
    """
    torch.set_num_threads(config.threads or count_cores())
    seed_everything(config.seed, workers=True, verbose=False)
    out = Path(config.out).expanduser()
    source = open_encoder(None if config.encoder is None else Path(config.encoder).expanduser())
    work = claim_workplace(out, config, hash_file(source.path / ENCODER))
    items = prepare(config, source)
    lexicon = fit_wide(config, items, load_bagger(source).vocabulary, work)
    config = close_agents(config, items)
    intent = read_definitions(source, torch.get_num_threads()) if config.intent else None
    model = fit_members(config, items, work, intent)
    calibration, scores = judge(model, items)

    def write_files(folder: Path) -> None:
        shutil.copy(source.path / ENCODER, folder / ENCODER)
        shutil.copy(source.path / TOKENIZER, folder / TOKENIZER)
        save_lexicon(lexicon, folder / LEXICON)
        save_file(model.state_dict(), folder / WEIGHTS)

    write_artifact(
        out,
        write_files,
        window=source.window,
        calibration=calibration,
        model=asdict(config.model),
        training=asdict(config),
        notes={**describe_run(config, items), "scores": scores},
    )
    shutil.rmtree(work)
    return out


def claim_workplace(
    out: Path,
    config: TrainConfig,
    encoder: str,
    *,
    may_replace: Callable[[Path], bool] = is_free,
) -> Path:
    """The folder for work in progress, `OUT.work`, checked to belong to this very run.

    Args:
        out: Where the model will go.
        config: The run.
        encoder: sha256 of its encoder's graph or weights.
        may_replace: Whether what is at `out` is nothing, or an older one of what will be written.

    Returns:
        The folder.

    Raises:
        ConfigError: If it holds work of another run, or `out` holds something that is no model.
    """
    if not may_replace(out):
        raise ConfigError(f"{out}: expected a new or empty folder, or an older model, to write to")
    work = out.with_name(out.name + ".work")
    try:
        work.mkdir(parents=True, exist_ok=True)
        stamp = work / "config.json"
        claim = {
            "dcl": dcl.__version__,
            "config": asdict(config),
            "data": hash_data(config.data),
            "encoder": encoder,
        }
        text = json.dumps(claim, indent=2, sort_keys=True)
        if stamp.exists() and stamp.read_text() != text:
            raise ConfigError(
                f"{work}: expected work of this configuration on this data, found another run's; "
                "delete the folder or choose another --out"
            )
        part = stamp.with_suffix(".part")
        part.write_text(text)
        os.replace(part, stamp)
    except OSError as error:
        raise ConfigError(f"{work}: expected a place to work in: {error}") from None
    return work


def close_agents(config: RunConfig, items: Mapping[Split, Sequence[Item]]) -> RunConfig:
    """The configuration with the names of all training agents, where the bank is a closed one.

    Args:
        config: The run.
        items: Items of all splits; their `names` are filled in.
    """
    if not config.model.closed_agents:
        return config
    names = {name for item in items["train"] for name in item.agents}
    shape = replace(config.model, agent_names=tuple(sorted(names)))
    for members in items.values():
        for item in members:
            item.names = np.array(number_names(item.agents, shape), dtype=np.int64)
    return replace(config, model=shape)


def fit_members(
    config: TrainConfig,
    items: Mapping[Split, Sequence[Item]],
    work: Path,
    intent: NDArray[np.float32] | None = None,
    *,
    quiet: bool = False,
) -> Model:
    """Train all members of a model, each from the seed after the last one's.

    Args:
        config: The run.
        items: Items of all splits, with wide logits.
        work: Keeps checkpoints, a folder a member.
        intent: `(M, E)`, vectors of the definitions to start the error prototypes from.
        quiet: Show no progress.

    Returns:
        The model in evaluation mode.
    """
    model = Model(config.model)
    for i, member in enumerate(model):
        alone = replace(config, seed=config.seed + i)
        network = fit_network(alone, items, work / f"member-{i}", intent, quiet=quiet)
        member.load_state_dict(network.state_dict())
    return model.eval()


def fit_network(
    config: TrainConfig,
    items: Mapping[Split, Sequence[Item]],
    work: Path,
    intent: NDArray[np.float32] | None = None,
    *,
    quiet: bool = False,
) -> Network:
    """Train one network; epochs already done are not repeated.

    Args:
        config: The run.
        items: Items of all splits, with wide logits.
        work: Keeps checkpoints.
        intent: `(M, E)`, vectors of the definitions to start the error prototypes from.
        quiet: Show no progress.

    Returns:
        The network of the best epoch on validation, in evaluation mode.
    """
    seed_everything(config.seed, workers=True, verbose=False)
    train, valid = list(repeat_extra(config, items["train"])), list(main_set(items["valid"]))
    data = AttributionData(train, valid, batch_size=config.batch_size, seed=config.seed)
    steps = config.epochs * -(-len(train) // config.batch_size)
    module = AttributionModule(config, steps)
    standardise(module.model, items["train"])
    if intent is not None:
        place_prototypes(module.model, torch.from_numpy(intent))
    trainer, best = make_trainer(config, work, quiet=quiet)
    last = work / "last.ckpt"
    trainer.fit(
        module, datamodule=data, ckpt_path=last if last.exists() else None, weights_only=True
    )
    chosen = torch.load(best.best_model_path, weights_only=True)
    module.load_state_dict(chosen["state_dict"])
    return module.model.cpu().eval()


def repeat_extra(config: TrainConfig, items: Sequence[Item]) -> Iterator[Item]:
    """What one epoch sees: every item once, and each extra one as often as asked for."""
    for item in items:
        yield from [item] * (config.data.repeat if item.extra else 1)


def main_set(items: Sequence[Item]) -> Iterator[Item]:
    """The items that a run is selected on."""
    return (item for item in items if not item.extra)


def make_trainer(
    config: TrainConfig,
    work: Path,
    *,
    quiet: bool = False,
    clip: float | None = 1.0,
    callbacks: Sequence[Callback] = (),
) -> tuple[Trainer, ModelCheckpoint]:
    """A trainer that validates, averages weights and can be resumed; and what keeps the best epoch.

    Args:
        config: Epochs and the decay of the average are read.
        work: Keeps checkpoints: `best.ckpt` and, written each epoch, `last.ckpt`.
        quiet: Show no progress.
        clip: Largest norm of the gradient; None where the module clips it itself.
        callbacks: Further ones.
    """
    best = ModelCheckpoint(
        work,
        filename="best",
        monitor="valid/pair_f1",
        mode="max",
        enable_version_counter=False,
    )
    # After `best`, so that it holds what `best` knows; written each epoch, best or not.
    newest = ModelCheckpoint(work, filename="last", enable_version_counter=False)
    average = EMAWeightAveraging(decay=config.average, use_buffers=False)  # none of them changes
    trainer = Trainer(
        max_epochs=config.epochs,
        accelerator="auto",
        devices=1,
        gradient_clip_val=clip,
        logger=CSVLogger(work, name="logs"),
        callbacks=[
            best,
            newest,
            *callbacks,
            *([average] if config.average else []),
            *([] if quiet else [TQDMProgressBar()]),
        ],
        enable_progress_bar=not quiet,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    return trainer, best


def judge(
    model: Model | Network, items: Mapping[Split, Sequence[Item]]
) -> tuple[Calibration, dict[str, dict[str, float]]]:
    """Calibrate on validation questions, and score the network there and on test questions.

    Examples whose modes nobody labelled are left out.

    Returns:
        The calibration, and micro-F1 in points by split and level.
    """
    usable = held_out(items)
    logits = {split: score_items(model, members) for split, members in usable.items()}
    targets = {split: [item.targets for item in members] for split, members in usable.items()}
    stepped = [item for item in items["valid"] if item.targets.step.any()]
    calibration = fit_calibration(
        logits["valid"],
        targets["valid"],
        steps=[
            (one.step, item.targets.step)
            for one, item in zip(score_items(model, stepped), stepped, strict=True)
        ],
    )
    if all(item.extra for item in stepped):
        # Their coverage holds for runs like those they are fitted on: here, of other systems.
        calibration = replace(calibration, ranked_cuts=(), span_cuts=())
    scores: dict[str, dict[str, float]] = {
        split: score_levels(logits[split], targets[split], calibration)
        for split in usable
        if usable[split]
    }
    return calibration, scores


def held_out(items: Mapping[Split, Sequence[Item]]) -> dict[Split, list[Item]]:
    """The items that scores are made of: of every split but training's, with labelled modes."""
    return {
        split: [item for item in members if item.targets.known and not item.extra]
        for split, members in items.items()
        if split != "train"
    }


@torch.no_grad()
def place_prototypes(model: Network, definitions: Tensor) -> None:
    """Start the error prototypes where the network puts a turn that states the definition.

    The prototypes of one mode differ by noise of a tenth of their length, as they could not part
    otherwise.

    Args:
        model: An untrained network.
        definitions: `(M, E)`, unit norm.

    Source:
        Aegis (arXiv 2509.14295) §5.3, prototypes that start from text; the ablation's "intent".
    """
    text = model.read_text(torch.cat([definitions, definitions**2], dim=-1) * 8.0)
    placed = model.to_error_space(model.output_norm(model.input_norm(text)))  # (M, K)
    placed = torch.nn.functional.normalize(placed - placed.mean(dim=0), dim=-1)
    noise = torch.randn_like(model.error_bank) / placed.shape[1] ** 0.5
    model.error_bank.copy_(placed[:, None] + 0.1 * noise)


def standardise(model: Network, items: Sequence[Item]) -> None:
    """Put mean and spread of the features into the network."""
    features = np.concatenate([item.features for item in items])
    model.feature_mean.copy_(torch.from_numpy(features.mean(axis=0)))
    model.feature_scale.copy_(torch.from_numpy(features.std(axis=0) + 1e-3))


def describe_run(config: TrainConfig, items: Mapping[Split, Sequence[Item]]) -> dict[str, Any]:
    """Versions and digests for the manifest."""
    return {
        "dcl": dcl.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "data": hash_data(config.data),
        "examples": {split: len(members) for split, members in items.items()},
    }


def hash_data(data: DataConfig) -> dict[str, str]:
    """sha256 of each file of examples, by its name, or path where two share one; no folders."""
    files = [Path(path).expanduser() for path in (*data.train, *data.held_out, *data.extra)]
    names = [file.name for file in files]
    return {
        str(file) if names.count(file.name) > 1 else file.name: hash_file(file)
        for file in files
        if file.is_file()
    }


def main(arguments: Sequence[str]) -> int:
    """Command line of `dcl train`: every field of `TrainConfig`, from YAML and options.

    Args:
        arguments: What follows `dcl train`.

    Returns:
        Exit code 0; everything else raises.

    Raises:
        ConfigError: If a key or a value is wrong; the message names it.
    """
    out = train(read_config(arguments))
    Console().print(f"trained {out}; next: python -m export convert {out} OUT")
    return 0
