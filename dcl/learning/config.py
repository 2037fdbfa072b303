"""Configuration of a training run; every field is a YAML key and a command-line option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from jsonargparse import ArgumentError, ArgumentParser

from dcl.errors import ConfigError
from dcl.learning.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where examples come from."""

    train: tuple[str, ...]
    """Files or folders in any format `dcl` reads; their questions are split by hash."""
    held_out: tuple[str, ...] = ()
    """Files or folders that are never trained on; only held-out questions of them are used."""
    extra: tuple[str, ...] = ()
    """Files or folders whose labelled steps teach the step head beside `train`, and nothing else.
    Their held-out questions fit the step temperature."""
    repeat: int = 1
    """How often an epoch sees each example of `extra`; > 0."""
    valid_share: float = 0.08
    """Share of questions for selection, thresholds and temperatures, 0 to 1."""
    test_share: float = 0.08
    """Share of questions that are only reported, 0 to 1."""
    cache: str = "~/.cache/dcl/vectors"
    """Folder that keeps turn vectors between runs."""
    limit: int = 0
    """Most examples read of each file, 0 for all: for trying things out."""
    left_out: tuple[str, ...] = ()
    """Frameworks, as the metadata of a run names them, that are neither trained nor selected on;
    all their runs are scored apart."""

    def __post_init__(self) -> None:
        """Refuse shares that leave nothing to learn from."""
        if self.repeat < 1:
            raise ConfigError(f"data.repeat: expected at least 1, got {self.repeat}")
        if min(self.valid_share, self.test_share) < 0 or self.valid_share + self.test_share >= 1:
            raise ConfigError(
                "data: expected shares from 0 on that sum to less than 1, "
                f"got {self.valid_share} and {self.test_share}"
            )


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
    hard_negatives: int = 0
    """Evidence of other agents without the fault, the most alike, that each anchor of the
    contrastive loss is pushed from; 0 for plain SupCon."""
    use_twins: bool = False
    """Pull evidence to that of the same agent in the clean run, where an example holds one."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.hard_negatives < 0:
            raise ConfigError(
                f"loss.hard_negatives: expected at least 0, got {self.hard_negatives}"
            )
        if self.temperature <= 0:
            raise ConfigError(f"loss.temperature: expected above 0, got {self.temperature}")
        if 0 < self.gamma_negative < 1:  # its slope is infinite where a probability is 0
            raise ConfigError(f"loss.gamma_negative: expected 0 or >= 1, got {self.gamma_negative}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    data: DataConfig
    """Where examples come from."""
    out: str
    """Folder of the trained model; the work in progress is kept beside it until it is done."""
    encoder: str | None = None
    """Folder with `encoder.onnx`, `tokenizer.json` and `config.json`; None is the shipped one,
    which was tuned on AEGIS."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape of the network."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Losses."""
    wide_strength: float = 4.0
    """Inverse regularisation of the wide half; > 0."""
    wide_rows: int = 0
    """n-grams that the wide half knows, those of most agents; 0 for all that are not rare."""
    wide_bigrams: bool = True
    """Let the wide half know pairs of neighbouring pieces beside single ones."""
    wide_idf: bool = True
    """Let rare n-grams weigh more in it, by their inverse document frequency."""
    wide_contrast: float = 0.5
    """Share of the mean over all agents of a run that is taken off the wide logits of each, 0 to 1:
    what all say speaks against none."""
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
    turn_dropout: float = 0.0
    """Share of turns of which training hides all channels, 0 to 1."""
    intent: bool = False
    """Start the error prototypes where the untrained network puts the definitions of the modes
    (Aegis), not at random."""
    average: float = 0.998
    """Decay of the moving average of the weights, 0 to 1."""
    seed: int = 1
    """Of weights, order and masks."""
    threads: int = 0
    """Threads of torch and the encoder; 0 means every core this process may use."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        for name in ("channel_dropout", "turn_dropout", "average", "wide_contrast"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}: expected 0 to 1, got {getattr(self, name)}")
        for name in ("threads", "weight_decay", "wide_rows"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: expected at least 0, got {getattr(self, name)}")
        for name in ("epochs", "batch_size", "learning_rate", "wide_strength"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: expected a number above 0, got {getattr(self, name)}")
        if self.folds < 2:
            raise ConfigError(f"folds: expected at least 2, got {self.folds}")


@dataclass(frozen=True, kw_only=True)
class TuneConfig(TrainConfig):
    """One run that trains the turn encoder together with the network."""

    out: str
    """Folder of the trained encoder; the work in progress is kept beside it until it is done."""
    encoder: str = "minilm"
    """Model to start from: one of the hub, a folder, or `minilm` from its package."""
    head: int = 94
    """Tokens read from the start of a long turn; > 0."""
    tail: int = 32
    """Tokens read from its end; >= 0. Export the encoder with the same two."""
    depth: int = 0
    """Layers of the encoder that are kept, from the bottom; 0 for all."""
    layers: int = 2
    """Layers of these that are trained, from the top; the rest and the embeddings stay."""
    warm_up: int = 0
    """Epochs of the network alone, on vectors of the untrained encoder, before both are trained."""
    encoder_rate: float = 5e-5
    """Peak rate of the uppermost layer; > 0. `learning_rate` is that of the network."""
    layer_decay: float = 0.8
    """Rate of each layer divided by that of the one above it, above 0 to 1."""
    encoder_dropout: bool = False
    """Use the encoder's own dropout in training. It makes equal turns differ."""
    activations: str | None = "~/.cache/dcl/activations"
    """Folder that keeps what the frozen layers make of each turn, in half precision; null computes
    it anew at each step."""
    tokens: int = 32768
    """Most tokens that are in memory at once; a batch with more is taken in parts, whose gradients
    add up; > 0."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the encoder's layers; auto is bf16 where the processor computes in it."""
    save_every: int = 50
    """Steps after which the work in progress is saved; > 0."""
    average: float = 0.99
    """Decay of the moving average of the weights, 0 to 1; 0 for none."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        TrainConfig.__post_init__(self)
        for name in ("layers", "encoder_rate", "tokens", "save_every"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: expected a number above 0, got {getattr(self, name)}")
        for name in ("depth", "warm_up"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: expected at least 0, got {getattr(self, name)}")
        if not 0 < self.layer_decay <= 1:
            raise ConfigError(f"layer_decay: expected above 0 to 1, got {self.layer_decay}")
        if self.model.members != 1:
            raise ConfigError(
                f"model.members: expected 1, as one network trains the encoder, "
                f"got {self.model.members}"
            )


RunConfig = TypeVar("RunConfig", bound=TrainConfig)


def read_config(given: Sequence[str] | Mapping[str, Any]) -> TrainConfig:
    """A training configuration from options, or from the content of a YAML file.

    Args:
        given: What follows `dcl train`, or nested keys with their values.

    Raises:
        ConfigError: If a key or a value is wrong; the message names it.
    """
    return _read(given, TrainConfig, "dcl train", "Train a model.")


def read_tune_config(given: Sequence[str] | Mapping[str, Any]) -> TuneConfig:
    """A configuration of `dcl tune`, as `read_config` reads one of `dcl train`.

    Args:
        given: What follows `dcl tune`, or nested keys with their values.

    Raises:
        ConfigError: If a key or a value is wrong; the message names it.
    """
    return _read(given, TuneConfig, "dcl tune", "Train a turn encoder.")


def _read(
    given: Sequence[str] | Mapping[str, Any], kind: type[RunConfig], name: str, title: str
) -> RunConfig:
    """A configuration of some kind."""
    parser = ArgumentParser(prog=name, description=title, exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML with any of the options below.")
    parser.add_class_arguments(kind, as_group=False)
    try:
        parsed = (
            parser.parse_object(dict(given))
            if isinstance(given, Mapping)
            else parser.parse_args(list(given))
        )
        values = vars(parser.instantiate(parsed))
        return kind(**{key: value for key, value in values.items() if key != "config"})
    except ArgumentError as error:
        raise ConfigError(" ".join(str(error).split())) from None
