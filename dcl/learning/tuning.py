"""Training of the turn encoder: its upper layers together with the attribution network.

What comes out is an encoder in the form of sentence-transformers. `python -m export encoder` makes
an encoder folder of it, and `dcl train --encoder` fits the networks that ship on its vectors.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from dcl.artifact import TOKENIZER, EncoderSource, new_folder
from dcl.artifact import Window as EncoderWindow
from dcl.calibration import best_threshold
from dcl.errors import ConfigError
from dcl.features import DEVIATION_FEATURES, describe_vectors
from dcl.learning.activations import ActivationCache, Read, TorchEncoder, Window
from dcl.learning.config import TuneConfig, read_tune_config
from dcl.learning.data import Batch, Item, VectorCache
from dcl.learning.inference import score_items
from dcl.learning.model import Network
from dcl.learning.module import AttributionModule, group_decay
from dcl.learning.preparation import (
    check_width,
    fill,
    fit_wide,
    make_items,
    read_bags,
    window_definitions,
)
from dcl.learning.split_encoder import SplitEncoder
from dcl.learning.token_batches import TokenBatch, TokenBatches, put_vectors
from dcl.learning.training import (
    claim_workplace,
    close_agents,
    describe_run,
    fit_network,
    judge,
    main_set,
    make_trainer,
    place_prototypes,
    repeat_extra,
    standardise,
)
from dcl.learning.turn_encoder import (
    Source,
    check_window,
    find_layers,
    find_source,
    keep_layers,
    load_source,
)
from dcl.runtime import count_cores, load_bagger
from dcl.splits import Split

RECORD = "tuning.json"
"""Configuration and scores of the run, beside the encoder."""


class TuningModule(AttributionModule):
    """Network and turn encoder with their losses and optimiser.

    Masks of a step depend on the seed and the step alone, so a resumed run goes on as if it had
    never stopped. What is frozen is no part of this module: it is neither averaged, which would
    move it by rounding, nor saved.

    Args:
        config: The run.
        steps: Optimiser steps of the whole run, for the schedule.
        encoder: The turn encoder.
    """

    def __init__(self, config: TuneConfig, steps: int, encoder: SplitEncoder) -> None:
        super().__init__(config, steps)
        self.automatic_optimization = False  # a batch comes in parts
        self.tuning = config
        self.upper = nn.ModuleList(encoder.train().upper)
        self._encoder = [encoder]  # in a list, as its lower half is no part of this module
        self.epochs: list[dict[str, float]] = []

    @property
    def encoder(self) -> SplitEncoder:
        """The whole encoder, which shares the layers that are trained."""
        return self._encoder[0]

    def training_step(  # type: ignore[override]
        self, parts: list[TokenBatch], index: int
    ) -> Tensor:
        """One optimiser step; each part of the batch weighs as many bags as it has."""
        torch.manual_seed(mix_seed(self.tuning.seed, self.global_step))
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        if not isinstance(optimizer, LightningOptimizer) or not isinstance(schedule, LRScheduler):
            raise TypeError("expected one optimiser and one schedule")
        optimizer.zero_grad()
        bags = sum(len(part.batch.known) for part in parts)
        total = torch.zeros((), device=self.device)
        for part in parts:
            loss = self.measure(self.embed(part)) * (len(part.batch.known) / bags)
            self.manual_backward(loss)
            total += loss.detach()
        self.clip_gradients(
            optimizer.optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm"
        )
        optimizer.step()
        schedule.step()
        self.log("loss", total, prog_bar=True)
        return total

    def validation_step(  # type: ignore[override]
        self, parts: list[TokenBatch], index: int
    ) -> None:
        """Collect pair logits."""
        for part in parts:
            super().validation_step(self.embed(part), index)

    def on_validation_epoch_end(self) -> None:
        """Log pair micro-F1 at the best threshold, and print it."""
        f1 = self.score_validation()
        self.log("valid/pair_f1", f1, prog_bar=True)
        self.epochs.append({"epoch": self.current_epoch + 1, "valid_pair_f1": f1})
        self.print(f"epoch {self.current_epoch + 1}: validation pair F1 {100 * f1:.1f}")

    def embed(self, part: TokenBatch) -> Batch:
        """The batch with vectors of the encoder as it is now."""
        vectors = torch.cat([self.encoder(*group) for group in part.groups])  # (N, E)
        bags = put_vectors(part.batch.bags, vectors, part.places)
        twins = part.batch.twins
        if twins is not None and part.twin_places is not None:
            twins = put_vectors(twins, vectors, part.twin_places)
        return part.batch._replace(bags=bags, twins=twins)

    def group_parameters(self) -> list[dict[str, Any]]:
        """Groups of the network, and of each layer of the encoder from the top down."""
        groups = super().group_parameters()
        rate = self.tuning.encoder_rate
        for layer in reversed(self.encoder.upper):
            groups += group_decay(layer, rate, self.tuning.weight_decay)
            rate *= self.tuning.layer_decay
        return groups

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the scores of the epochs so far."""
        checkpoint["epochs"] = self.epochs

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on with the scores of the epochs so far."""
        self.epochs = checkpoint["epochs"]


class StepCheckpoint(ModelCheckpoint):
    """Saves the work in progress within an epoch.

    Not after its last step: the validation that follows would be left out when the run is resumed.
    """

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        """Save after every so many steps, unless the epoch is over."""
        if not trainer.is_last_batch:
            super().on_train_batch_end(trainer, *rest)


def mix_seed(seed: int, step: int) -> int:
    """Seed of one step, unlike that of any other step or run; 0 to 2^32 - 1."""
    return int(np.random.SeedSequence((seed, step)).generate_state(1)[0])


def tune(config: TuneConfig) -> Path:
    """Train a turn encoder; started again after a kill, it goes on where it was.

    Args:
        config: The run.

    Returns:
        Folder of the encoder, which sentence-transformers loads.

    Raises:
        ConfigError: If a value is wrong, or the folder holds another run's work in progress.
        ArtifactError: If the encoder to start from is damaged.
        TraceError: If an example cannot be read.
    """
    torch.set_num_threads(config.threads or count_cores())
    seed_everything(config.seed, workers=True, verbose=False)
    out = Path(config.out).expanduser()
    found = find_source(config.encoder)
    encoder = load_encoder(config, found)
    digest = digest_of(found, config.depth)
    work = claim_workplace(out, config, digest, may_replace=is_tuned)
    items, read, intent = prepare_tokens(config, found, encoder, digest, work)
    config = close_agents(config, items)
    module = fit_encoder(config, items, read, encoder, work, intent)
    refresh(items, TorchEncoder(encoder.to(fastest_device()), read))
    _, scores = judge(module.model, items)
    record = {
        **describe_run(config, items),
        **{name: version(name) for name in ("transformers", "sentence-transformers")},
        "source": found.name,
        "weights": found.weights,
        "epochs": module.epochs,
        "scores": scores,
        "config": asdict(config),
    }
    write_tuned(out, found, encoder, record)
    shutil.rmtree(work)
    return out


def load_encoder(config: TuneConfig, found: Source) -> SplitEncoder:
    """The encoder on the fastest device, cut below the layers that are trained.

    Raises:
        ConfigError: If it cannot be loaded, cut there, or does not fit the window or the network.
    """
    whole = load_source(found, longest=check_window(config.head, config.tail))
    if config.depth:
        most = len(find_layers(whole))
        if config.depth > most:
            raise ConfigError(f"depth: expected at most {most}, got {config.depth}")
        keep_layers(whole, range(config.depth))
    encoder = SplitEncoder(whole, config.layers, dropout=config.encoder_dropout)
    check_width(config, encoder.width)
    return encoder.to(fastest_device())


def fastest_device() -> torch.device:
    """The accelerator that torch finds, as the trainer does; else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def use_bf16(precision: str, device: torch.device) -> bool:
    """Whether layers run in bfloat16: as asked for, or where the processor has units for it.

    Others emulate it: on plain AVX2 it is slower than float32.
    """
    if precision != "auto":
        return precision == "bf16"
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Older versions of torch do not tell.
    known: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type == "cpu" and bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def digest_of(source: Source, depth: int = 0) -> str:
    """sha256 of all that decides what the untrained encoder makes of a window.

    Args:
        source: Its files are read.
        depth: Layers of it that are kept; 0 for all.
    """
    files = [source.folder / "modules.json", *sorted(source.folder.rglob("config.json"))]
    parts = [*sorted(source.weights.items()), *((f.name, f.read_text()) for f in files)]
    if depth:
        parts.append(("depth", str(depth)))
    return sha256(json.dumps(parts).encode()).hexdigest()


def prepare_tokens(
    config: TuneConfig, found: Source, encoder: SplitEncoder, digest: str, work: Path
) -> tuple[dict[Split, list[Item]], Read, NDArray[np.float32] | None]:
    """Read, split, tokenise and encode all examples, and fit the wide half.

    Args:
        config: The run.
        found: Its tokenizer is read.
        encoder: Before training.
        digest: Names it in the caches.
        work: Keeps the wide half.

    Returns:
        Items of all splits, with windows, wide logits and vectors of the untrained encoder; what
        the upper half of the encoder starts from; and the vectors of the definitions if the
        prototypes start from them.

    Raises:
        ConfigError: If a split has no example with labelled modes.
    """
    bagger = load_bagger(EncoderSource(found.folder, EncoderWindow(config.head, config.tail)))
    definitions = window_definitions(bagger)
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress:
        bagged = read_bags(config, bagger, progress)
        windows = [*definitions, *(window for one in bagged for window in one.windows())]
        read: Read = _as_is
        if config.activations is not None and encoder.first:
            kept = ActivationCache(Path(config.activations).expanduser(), encoder, digest)
            fill(kept, windows, progress, "running the frozen layers")
            read = kept
        cache = VectorCache(
            Path(config.data.cache).expanduser(), TorchEncoder(encoder, read), digest
        )
        fill(cache, windows, progress)
    items = make_items(config, bagged, cache, keep_windows=True)
    fit_wide(config, items, bagger.vocabulary, work)
    intent = cache(definitions).astype(np.float32) if config.intent else None
    return items, read, intent


def _as_is(window: Window) -> NDArray[np.int32]:
    """The token ids themselves, where nothing of the encoder is computed beforehand."""
    return window


def fit_encoder(
    config: TuneConfig,
    items: Mapping[Split, Sequence[Item]],
    read: Read,
    encoder: SplitEncoder,
    work: Path,
    intent: NDArray[np.float32] | None = None,
    *,
    quiet: bool = False,
) -> TuningModule:
    """Train encoder and network; what is already done is not repeated.

    Args:
        config: The run.
        items: Items of all splits, with wide logits and windows.
        read: Gives what the upper half of the encoder starts from.
        encoder: Trained in place.
        work: Keeps checkpoints.
        intent: `(M, E)`, vectors of the definitions to start the error prototypes from.
        quiet: Show no progress.

    Returns:
        Both as they were after the best epoch on validation, in evaluation mode, on the CPU.
    """
    seed_everything(config.seed, workers=True, verbose=False)
    train, valid = (
        TokenBatches(
            members, read, batch_size=config.batch_size, most=config.tokens, seed=config.seed
        )
        for members in (list(repeat_extra(config, items["train"])), list(main_set(items["valid"])))
    )
    module = TuningModule(config, config.epochs * len(train), encoder)
    standardise(module.model, items["train"])
    if config.warm_up:
        alone = replace(config, epochs=config.warm_up)
        warm = fit_network(alone, items, work / "warm-up", intent, quiet=quiet)
        module.model.load_state_dict(warm.state_dict())
        module.epochs.append({"epoch": 0, "valid_pair_f1": score_pairs(warm, items["valid"])})
    elif intent is not None:
        place_prototypes(module.model, torch.from_numpy(intent))
    often = StepCheckpoint(
        work,
        filename="last",
        every_n_train_steps=config.save_every,
        enable_version_counter=False,
    )
    trainer, best = make_trainer(config, work, quiet=quiet, clip=None, callbacks=[often])
    encoder.bf16 = use_bf16(config.precision, fastest_device())  # for training alone
    last = work / "last.ckpt"
    with warnings.catch_warnings():
        # The frozen layers are in it on purpose; a resumed run starts after the optimiser's step.
        warnings.filterwarnings("ignore", r"Found \d+ module\(s\) in eval mode")
        warnings.filterwarnings("ignore", "Using ModelCheckpoint with manual optimization")
        trainer.fit(
            module,
            train_dataloaders=train,
            val_dataloaders=valid,
            ckpt_path=last if last.exists() else None,
            weights_only=True,
        )
    chosen = torch.load(best.best_model_path, weights_only=True)
    module.load_state_dict(chosen["state_dict"])
    encoder.bf16 = False
    return module.cpu().eval()


def score_pairs(network: Network, items: Sequence[Item]) -> float:
    """Pair micro-F1 at the best threshold, 0 to 1, on the vectors that the items hold.

    Args:
        network: Scored as it is.
        items: Those with labelled modes count, of the main set alone.
    """
    usable = [item for item in main_set(items) if item.targets.known]
    logits = [one.pair.ravel() for one in score_items(network, usable)]
    labels = [item.targets.pair.ravel() for item in usable]
    return best_threshold(np.concatenate(logits), np.concatenate(labels))[1]


def refresh(items: Mapping[Split, Sequence[Item]], encoder: TorchEncoder) -> None:
    """Give the held-out items vectors and deviation of the trained encoder.

    Args:
        items: Those of every split but training's are changed.
        encoder: After training.
    """
    for item in (item for split in items if split != "train" for item in items[split]):
        vectors = encoder(item.windows)
        deviation = describe_vectors(vectors[:-1], vectors[-1], item.agent_index)
        own = item.features[:, : -len(DEVIATION_FEATURES)]
        item.features = np.concatenate([own, deviation], axis=1)
        item.vectors, item.task = vectors[:-1].astype(np.float16), vectors[-1].astype(np.float16)


def is_tuned(folder: Path) -> bool:
    """Whether an encoder may be put here: nothing, an empty folder, or an older one of these."""
    if not folder.exists():
        return True
    return folder.is_dir() and (not any(folder.iterdir()) or (folder / RECORD).is_file())


def write_tuned(
    out: Path, source: Source, encoder: SplitEncoder, record: Mapping[str, Any]
) -> None:
    """Write the encoder as sentence-transformers does; it appears whole or not at all.

    Args:
        out: Where; an older one there is replaced.
        source: What it was made of; its tokenizer goes along as it is.
        encoder: After training.
        record: What `tuning.json` says.

    Raises:
        ConfigError: If the place cannot be written.
    """
    with new_folder(out, may_replace=is_tuned) as folder:
        encoder.cpu().encoder.whole.save(str(folder), create_model_card=False)
        shutil.copy(source.folder / TOKENIZER, folder / TOKENIZER)
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        licence = "" if source.licence == "unknown" else f"license: {source.licence}\n"
        (folder / "README.md").write_text(
            f"---\nlibrary_name: sentence-transformers\nbase_model: {source.name}\n{licence}---\n\n"
            f"# Turn encoder\n\nMade of {source.name} by `dcl tune`; `{RECORD}` says how.\n"
        )


def main(arguments: Sequence[str]) -> int:
    """Command line of `dcl tune`: every field of `TuneConfig`, from YAML and options.

    Args:
        arguments: What follows `dcl tune`.

    Returns:
        Exit code 0; everything else raises.

    Raises:
        ConfigError: If a key or a value is wrong; the message names it.
    """
    config = read_tune_config(arguments)
    out = tune(config)
    window = f"--head {config.head} --tail {config.tail}"
    Console().print(
        f"tuned {out}; next: python -m export encoder --source {out} --out ENCODER {window}, "
        "then dcl train --encoder ENCODER"
    )
    return 0
