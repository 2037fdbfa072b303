"""Training: a thin LightningModule around the network, and `train(config) -> artifact`."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn, track
from safetensors.torch import save_file
from torch import Tensor

import dcl
from dcl.artifact import (
    ENCODER,
    LEXICON,
    TOKENIZER,
    WEIGHTS,
    EncoderSource,
    hash_file,
    load_lexicon,
    open_encoder,
    save_lexicon,
    write_artifact,
)
from dcl.calibration import best_threshold, fit_calibration
from dcl.data import AttributionData, Batch, Item, VectorCache, make_item
from dcl.errors import ConfigError
from dcl.formats import read_examples
from dcl.inference import score_items
from dcl.lexical import BIGRAM_ROWS, Lexicon
from dcl.losses import asymmetric_loss, contrastive_loss, hierarchy_loss, step_loss
from dcl.model import BagLogits, BagTensors, Model, ModelConfig
from dcl.runtime import Encoder, count_cores, load_bagger
from dcl.splits import Split, fold_of, group_of, split_of
from dcl.trajectory import Example
from dcl.wide import document_rows, fit_idf, fit_table, stack_documents


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where examples come from."""

    train: tuple[str, ...]
    """Files or folders in any format `dcl` reads; their questions are split by hash."""
    held_out: tuple[str, ...] = ()
    """Files or folders that are never trained on; only held-out questions of them are used."""
    valid_share: float = 0.08
    """Share of questions for selection, thresholds and temperatures, 0 to 1."""
    test_share: float = 0.08
    """Share of questions that are only reported, 0 to 1."""
    cache: str = "~/.cache/dcl/vectors"
    """Folder that keeps turn vectors between runs."""
    limit: int = 0
    """Most examples read of each file, 0 for all: for trying things out."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights and constants of the losses."""

    agent: float = 0.3
    """Weight of the agent level inside the classification loss."""
    mode: float = 0.3
    """Weight of the mode level inside the classification loss."""
    contrastive: float = 0.05
    """Weight of the supervised contrastive loss (Aegis: 0.4)."""
    hierarchy: float = 0.6
    """Weight of the hierarchy hinge (Aegis: 0.6)."""
    step: float = 0.2
    """Weight of the listwise step loss."""
    gamma_negative: float = 0.0
    """Focusing of negatives in the asymmetric loss; 0 is plain cross-entropy."""
    margin: float = 0.0
    """Probability under which a negative counts as solved, 0 to 1."""
    temperature: float = 0.07
    """Divides the cosines of the contrastive loss; > 0."""
    sigma: float = 1.0
    """Width of the softened step target in turns; 0 is one-hot."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    data: DataConfig
    """Where examples come from."""
    out: str
    """Folder of the trained model; the work in progress is kept beside it until it is done."""
    encoder: str | None = None
    """Folder with `encoder.onnx`, `tokenizer.json` and `config.json`; None is the shipped one."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape of the network."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Losses."""
    wide_strength: float = 4.0
    """Inverse regularisation of the wide half; > 0."""
    folds: int = 4
    """Folds in which the wide half is cross-fitted; at least 2."""
    epochs: int = 12
    """Passes over the training examples; > 0."""
    batch_size: int = 32
    """Bags in a batch; > 0."""
    learning_rate: float = 1e-3
    """Peak rate of AdamW; > 0."""
    weight_decay: float = 0.05
    """Decoupled weight decay; >= 0."""
    channel_dropout: float = 0.1
    """Share of training bags that lose one whole channel (vectors, features or wide), 0 to 1."""
    average: float = 0.998
    """Decay of the moving average of the weights, 0 to 1."""
    seed: int = 1
    """Of weights, order and masks."""
    threads: int = 0
    """Threads of torch and the encoder; 0 means every core this process may use."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        for name in ("epochs", "batch_size", "learning_rate", "wide_strength"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: expected a number above 0, got {getattr(self, name)}")
        if self.folds < 2:
            raise ConfigError(f"folds: expected at least 2, got {self.folds}")


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
        self.model = Model(config.model)
        self._seen: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Loss of one batch."""
        logits: BagLogits = self.model(*self._mask_channels(batch.bags))
        loss, parts = compute_loss(logits, batch, self.model.error_bank, self.config.loss)
        self.log_dict({f"train/{k}": v for k, v in parts.items()}, on_step=False, on_epoch=True)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        """Collect pair logits."""
        logits: BagLogits = self.model(*batch.bags)
        real = batch.bags.member.sum(dim=2) > 0
        self._seen.append((logits.pair[real].cpu(), batch.pair[real].cpu()))

    def on_validation_epoch_end(self) -> None:
        """Log pair micro-F1 at the best threshold."""
        scores, labels = (torch.cat(part).ravel().numpy() for part in zip(*self._seen, strict=True))
        self._seen.clear()
        _, f1 = best_threshold(scores, labels)
        self.log("valid/pair_f1", f1, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW with a linear warm-up over a tenth of the run and a cosine to zero."""
        plain = [p for p in self.model.parameters() if p.ndim < 2]
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": self.config.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=self.config.learning_rate,
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.config.learning_rate, total_steps=self.steps + 1, pct_start=0.1
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def _mask_channels(self, bags: BagTensors) -> BagTensors:
        """Blank one random channel of some bags, so that none is leaned on alone."""
        drawn = torch.rand(len(bags.task), 1, 1, device=bags.task.device)
        share = self.config.channel_dropout / 3
        keep = [((drawn < i * share) | (drawn >= (i + 1) * share)).float() for i in range(3)]
        return bags._replace(
            vectors=bags.vectors * keep[0],
            features=bags.features * keep[1],
            wide=bags.wide * keep[2],
        )


def compute_loss(
    logits: BagLogits, batch: Batch, bank: Tensor, config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted sum of all losses, and each of them.

    Args:
        logits: Output of the network.
        batch: Inputs and targets.
        bank: `(M, P, K)` error prototypes.
        config: Weights and constants.
    """
    member = batch.bags.member
    real = member.sum(dim=2) > 0  # (B, A)
    turns = member.sum(dim=1) > 0  # (B, T)
    modes_known = (real & batch.known[:, None])[..., None].expand_as(batch.pair)
    shape = {"gamma_negative": config.gamma_negative, "margin": config.margin}
    labelled = (batch.pair > 0) & modes_known
    parts = {
        "pair": asymmetric_loss(logits.pair, batch.pair, modes_known, **shape),
        "agent": asymmetric_loss(logits.agent, batch.faulty, real, **shape),
        "mode": asymmetric_loss(
            logits.mode,
            batch.pair.amax(dim=1),
            batch.known[:, None].expand_as(logits.mode),
            **shape,
        ),
        "contrastive": contrastive_loss(
            logits.evidence[labelled], labelled.nonzero()[:, 2], bank, config.temperature
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
    work = claim_workplace(out, config)
    source = open_encoder(None if config.encoder is None else Path(config.encoder).expanduser())
    items = prepare(config, source)
    lexicon = fit_wide(config, items, load_bagger(source).vocabulary, work)
    model = fit_network(config, items, work)
    valid = items["valid"]
    calibration = fit_calibration(
        score_items(model, valid),
        [item.pair for item in valid],
        lost=sum(item.lost for item in valid),
        steps=[item.step for item in valid],
    )

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
        notes=describe_run(config, items),
    )
    shutil.rmtree(work)
    return out


def claim_workplace(out: Path, config: TrainConfig) -> Path:
    """The folder for work in progress, `OUT.work`, checked to belong to this very run.

    Raises:
        ConfigError: If it holds work of a run with another configuration.
    """
    work = out.with_name(out.name + ".work")
    try:
        work.mkdir(parents=True, exist_ok=True)
        stamp = work / "config.json"
        text = json.dumps(asdict(config), indent=2, sort_keys=True)
        if stamp.exists() and stamp.read_text() != text:
            raise ConfigError(
                f"{work}: expected work of this configuration, found that of another run; "
                "delete the folder or choose another --out"
            )
        stamp.write_text(text)
    except OSError as error:
        raise ConfigError(f"{work}: expected a place to work in: {error}") from None
    return work


def prepare(config: TrainConfig, source: EncoderSource) -> dict[Split, list[Item]]:
    """Read, split, tokenise and encode all examples.

    Args:
        config: Data and loss width are read.
        source: Encoder and tokenizer.

    Returns:
        Items of the three splits.

    Raises:
        ConfigError: If no labelled example is left for a split.
    """
    bagger = load_bagger(source)
    encoder = Encoder(source.path / ENCODER, threads=config.threads or count_cores(), remember=0)
    cache = VectorCache(
        Path(config.data.cache).expanduser(), encoder, hash_file(source.path / ENCODER)
    )
    chosen = list(select_examples(config.data))
    items: dict[Split, list[Item]] = {"train": [], "valid": [], "test": []}
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress:
        bagging = progress.add_task("reading turns", total=len(chosen))
        bags = []
        for _, example in chosen:
            bags.append(bagger(example.trajectory))
            progress.advance(bagging)
        encoding = progress.add_task("encoding turns", total=sum(len(b.windows) + 1 for b in bags))
        for (split, example), bag in zip(chosen, bags, strict=True):
            items[split].append(
                make_item(
                    example,
                    bag,
                    cache,
                    sigma=config.loss.sigma,
                    progress=lambda done: progress.advance(encoding, done),
                )
            )
    for split in ("train", "valid"):
        if not items[split]:
            raise ConfigError(f"data: expected labelled examples for {split}, found none")
    return items


def select_examples(config: DataConfig) -> Iterator[tuple[Split, Example]]:
    """Labelled examples with their split; what must not be used is left out."""
    for paths, may_train in ((config.train, True), (config.held_out, False)):
        for path in paths:
            examples = read_examples(Path(path).expanduser())
            for example in islice(examples, config.limit or None):
                split = split_of(
                    group_of(example), valid=config.valid_share, test=config.test_share
                )
                if example.faults is not None and (may_train or split != "train"):
                    yield split, example


def fit_wide(
    config: TrainConfig, items: Mapping[Split, Sequence[Item]], vocabulary: int, work: Path
) -> Lexicon:
    """Fit the wide half and give every item its wide logits.

    Training items get theirs from lexicons that never saw their question: on its own training data
    the wide half is near perfect, which would leave the network nothing to learn.

    Args:
        config: Strength and folds are read.
        items: Items of all splits; their `wide` is filled in.
        vocabulary: Number of token ids.
        work: Keeps what is fitted, so that a resumed run does not fit it again.
    """
    usable = [item for item in items["train"] if item.known]
    bags = [item.bag for item in usable]
    labels = np.concatenate([item.pair for item in usable])
    idf = fit_idf(bags, vocabulary + BIGRAM_ROWS)
    documents = stack_documents(bags, idf)
    lexicons = []
    for fold in track(range(config.folds + 1), "fitting the wide half"):
        file = work / f"wide-{fold}.npz"
        if not file.exists():
            rows = document_rows(bags, [fold_of(i.group, config.folds) != fold for i in usable])
            table = fit_table(documents[rows], labels[rows], strength=config.wide_strength)
            save_lexicon(Lexicon(idf=idf, table=table), file)
        lexicons.append(load_lexicon(file))
    whole = lexicons[-1]  # no item is in the fold after the last: this one saw them all
    for split, members in items.items():
        for item in members:
            fold = fold_of(item.group, config.folds)
            item.wide = (lexicons[fold] if split == "train" else whole)(*item.bag)
    return whole


def fit_network(config: TrainConfig, items: Mapping[Split, Sequence[Item]], work: Path) -> Model:
    """Train the network; epochs already done are not repeated.

    Args:
        config: The run.
        items: Items of all splits, with wide logits.
        work: Keeps checkpoints.

    Returns:
        The network of the best epoch on validation, in evaluation mode.
    """
    data = AttributionData(
        items["train"], items["valid"], batch_size=config.batch_size, seed=config.seed
    )
    steps = config.epochs * -(-len(items["train"]) // config.batch_size)
    module = AttributionModule(config, steps)
    standardise(module.model, items["train"])
    best = ModelCheckpoint(
        work, filename="best", monitor="valid/pair_f1", mode="max", save_last=True
    )
    trainer = Trainer(
        max_epochs=config.epochs,
        accelerator="auto",
        devices=1,
        gradient_clip_val=1.0,
        logger=CSVLogger(work, name="logs"),
        callbacks=[best, EMAWeightAveraging(decay=config.average), TQDMProgressBar()],
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    last = work / "last.ckpt"
    trainer.fit(
        module, datamodule=data, ckpt_path=last if last.exists() else None, weights_only=True
    )
    chosen = torch.load(best.best_model_path, weights_only=True)
    module.load_state_dict(chosen["state_dict"])
    return module.model.cpu().eval()


def standardise(model: Model, items: Sequence[Item]) -> None:
    """Put mean and spread of the features into the network."""
    features = np.concatenate([item.features for item in items])
    model.feature_mean.copy_(torch.from_numpy(features.mean(axis=0)))
    model.feature_scale.copy_(torch.from_numpy(features.std(axis=0) + 1e-3))


def describe_run(config: TrainConfig, items: Mapping[Split, Sequence[Item]]) -> dict[str, Any]:
    """Versions and digests for the manifest."""
    files = [Path(p).expanduser() for p in (*config.data.train, *config.data.held_out)]
    return {
        "dcl": dcl.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "data": {file.name: hash_file(file) for file in files if file.is_file()},
        "examples": {split: len(members) for split, members in items.items()},
    }


def main(arguments: Sequence[str]) -> int:
    """Command line of `dcl train`: every field of `TrainConfig`, from YAML and options."""
    parser = ArgumentParser(prog="dcl train", description="Train a model.", exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML with any of the options below.")
    parser.add_class_arguments(TrainConfig, as_group=False)
    try:
        parsed = parser.parse_args(list(arguments))
        config = TrainConfig(**parser.instantiate_classes(parsed).as_dict())
    except ArgumentError as error:
        raise ConfigError(" ".join(str(error).split())) from None
    out = train(config)
    Console().print(f"trained {out}; next: python -m export convert {out} OUT")
    return 0
