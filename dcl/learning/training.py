"""Training: `train(config) -> artifact`."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from numpy.typing import NDArray
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

import dcl
from dcl.artifact import (
    ENCODER,
    LEXICON,
    TOKENIZER,
    WEIGHTS,
    hash_file,
    is_free,
    open_encoder,
    read_manifest,
    save_lexicon,
    write_artifact,
)
from dcl.attribution import Calibration
from dcl.calibration import fit_calibration, score_levels
from dcl.errors import ConfigError
from dcl.files import whole
from dcl.learning.config import DataConfig, RunConfig, TrainConfig, read_config
from dcl.learning.data import AttributionData, Item
from dcl.learning.inference import score_items
from dcl.learning.model import Model, Network, number_names
from dcl.learning.module import AttributionModule
from dcl.learning.preparation import fit_wide, prepare, read_definitions
from dcl.runtime import count_cores, load_bagger
from dcl.splits import Split


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
        notes={
            **describe_run(config, items),
            "engines": read_manifest(source.path).get("engines", ["onnxruntime"]),
            "scores": scores,
        },
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
        with whole(stamp) as part:
            part.write_text(text)
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
    """sha256 of each file or folder of examples, by its name, or path where two share one."""
    paths = [Path(path).expanduser() for path in (*data.train, *data.held_out, *data.extra)]
    names = [path.name for path in paths]
    return {
        str(path) if names.count(path.name) > 1 else path.name: hash_examples(path)
        for path in paths
        if path.is_file() or path.is_dir()
    }


def hash_examples(path: Path) -> str:
    """sha256 of a file, or of the places and contents of all files below a folder."""
    if not path.is_dir():
        return hash_file(path)
    digest = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        digest.update(file.relative_to(path).as_posix().encode("utf-8", "surrogateescape"))
        digest.update(bytes.fromhex(hash_file(file)))
    return digest.hexdigest()


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
