"""A model small enough to convert in a test: every part is real, only tiny and random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from dcl.artifact import (
    ENCODER,
    HEAD,
    LEXICON,
    TOKENIZER,
    WEIGHTS,
    Window,
    open_artifact,
    save_lexicon,
    write_artifact,
)
from dcl.attribution import Calibration
from dcl.learning.model import Model, ModelConfig
from dcl.lexical import BIGRAM_ROWS, Lexicon
from dcl.taxonomy import MODES
from export.convert import export_head

WORDS = ("[UNK]", "[CLS]", "[SEP]", "plan", "check", "error", "done", "the", "sum", "is", "wrong")
WIDTH = 16


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Keeps torch from waiting for a second core at every small step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    return ModelConfig(
        vector_width=WIDTH,
        width=32,
        layers=1,
        prototype_width=8,
        prototypes=2,
        rank=4,
        members=2,
    )


@pytest.fixture(scope="session")
def make_model() -> Callable[[ModelConfig], Model]:
    """Random networks in which no weight is at its start value."""

    def make(config: ModelConfig) -> Model:
        torch.manual_seed(5)
        model = Model(config)
        with torch.no_grad():
            for parameter in model.parameters():
                moved = parameter + 0.1 * torch.randn_like(parameter)
                parameter.copy_(moved.half())  # as graphs hold it
        for network in model:
            network.feature_mean.uniform_(-1, 1)
            network.feature_scale.uniform_(0.5, 2)
        return model.eval()

    return make


@pytest.fixture(scope="session")
def write_encoder() -> Callable[[Path, int], Path]:
    """Writes a graph that embeds words, takes their mean, and scales it to unit norm."""

    def write(file: Path, seed: int) -> Path:
        table = np.random.default_rng(seed).normal(size=(len(WORDS), WIDTH)).astype(np.float32)
        one, two = np.array([1], dtype=np.int64), np.array([2], dtype=np.int64)
        nodes = [
            helper.make_node("Gather", ["table", "ids"], ["words"]),
            helper.make_node("Cast", ["mask"], ["real"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["real", "two"], ["column"]),
            helper.make_node("Mul", ["words", "column"], ["kept"]),
            helper.make_node("ReduceSum", ["kept", "one"], ["total"], keepdims=0),
            helper.make_node("LpNormalization", ["total"], ["vec"], axis=-1, p=2),
        ]
        inputs = [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["B", "L"])
            for name in ("ids", "mask")
        ]
        output = helper.make_tensor_value_info("vec", TensorProto.FLOAT, ["B", WIDTH])
        tables = [
            numpy_helper.from_array(array, name)
            for name, array in (("table", table), ("one", one), ("two", two))
        ]
        graph = helper.make_graph(nodes, "encoder", inputs, [output], tables)
        opset = helper.make_opsetid("", 18)
        onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), file)
        return file

    return write


@pytest.fixture(scope="session")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_config: ModelConfig,
    make_model: Callable[[ModelConfig], Model],
    write_encoder: Callable[[Path, int], Path],
) -> Path:
    """A folder as `dcl train` writes it."""
    rng = np.random.default_rng(7)
    rows = len(WORDS) + BIGRAM_ROWS
    lexicon = Lexicon(
        idf=np.ones(rows, dtype=np.float32),
        table=rng.normal(size=(rows, len(MODES))).astype(np.float32),
        contrast=0.5,
    )
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()

    def write_files(folder: Path) -> None:
        write_encoder(folder / ENCODER, 0)
        tokenizer.save(str(folder / TOKENIZER))
        save_lexicon(lexicon, folder / LEXICON)
        save_file(make_model(tiny_config).state_dict(), folder / WEIGHTS)

    return write_artifact(
        tmp_path_factory.mktemp("models") / "trained",
        write_files,
        window=Window(head=6, tail=2),
        calibration=Calibration(pair_temperature=2.0, pair_threshold=0.4),
        model=asdict(tiny_config),
        training={"data": {"valid_share": 0.5, "test_share": 0.1}, "seed": 1},
        notes={"torch": torch.__version__, "examples": {"train": 8}},
    )


@pytest.fixture(scope="session")
def training_shares() -> dict[str, Any]:
    """What the model below says of its training: which questions it held out."""
    return {"data": {"valid_share": 0.5, "test_share": 0.1}}


@pytest.fixture(scope="session")
def exported(
    trained: Path,
    training_shares: dict[str, Any],
    tiny_config: ModelConfig,
    make_model: Callable[[ModelConfig], Model],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder as `convert` writes it."""
    artifact = open_artifact(trained)

    def write_files(folder: Path) -> None:
        for name in (ENCODER, TOKENIZER, LEXICON):
            (folder / name).write_bytes((trained / name).read_bytes())
        export_head(make_model(tiny_config), folder / HEAD)

    return write_artifact(
        tmp_path_factory.mktemp("exported") / "model",
        write_files,
        window=artifact.window,
        calibration=artifact.calibration,
        model=artifact.model,
        training=training_shares,
        notes={
            "seed": 1,
            "parity": {"head": {"max_difference": 0.0}},
            "scores": {"test": {"agent": 50.0}},
        },
    )
