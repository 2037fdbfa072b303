"""Transformers small enough to train in a test, as sentence-transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tiny import make_tokenizer
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

BERT_WIDTH = 16
VOCABULARY = make_tokenizer().get_vocab_size()

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": BERT_WIDTH,
    "num_attention_heads": 2,
}


def make_transformer(kind: str, layers: int) -> PreTrainedModel:
    """A random transformer of some architecture; the same each time."""
    torch.manual_seed(3)
    if kind == "distilbert":
        narrow = DistilBertConfig(
            vocab_size=VOCABULARY, dim=BERT_WIDTH, n_heads=2, hidden_dim=32, n_layers=layers
        )
        return DistilBertModel(narrow)
    if kind == "modernbert":
        alternating = ModernBertConfig(
            num_hidden_layers=layers,
            intermediate_size=32,
            pad_token_id=0,
            layer_types=[("full_attention", "sliding_attention")[i % 2] for i in range(layers)],
            local_attention=4,
            **_SIZES,
        )
        return ModernBertModel(alternating)
    sizes = {"num_hidden_layers": layers, "intermediate_size": 32, **_SIZES}
    if kind == "mpnet":
        return MPNetModel(MPNetConfig(max_position_embeddings=64, pad_token_id=0, **sizes))
    return BertModel(BertConfig(max_position_embeddings=64, initializer_range=0.2, **sizes))


def write_transformer(folder: Path, kind: str = "bert", layers: int = 2) -> Path:
    """A random transformer with mean pooling in a folder of its own."""
    parts = folder.with_name(folder.name + "-parts")
    make_transformer(kind, layers).save_pretrained(parts)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=make_tokenizer(),
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )
    tokenizer.save_pretrained(parts)
    modules = [Transformer(str(parts)), Pooling(BERT_WIDTH, pooling_mode="mean")]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder))
    return folder
