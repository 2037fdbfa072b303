from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dcl.engines import ENGINES, EngineName
from dcl.errors import ConfigError
from dcl.runtime import Encoder
from export.encoder import list_engines
from export.qdq import LEAST_TURNS, quantise_static

WIDTH, VOCABULARY = 16, 50


@pytest.fixture
def fp32(tmp_path: Path) -> Path:
    """Ids to the unit mean of a table's rows after a product and GELU."""
    rng = np.random.default_rng(0)
    tables = {
        "table": rng.normal(size=(VOCABULARY, WIDTH)).astype(np.float32),
        "weight": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32),
        "axes": np.array([1], dtype=np.int64),
    }
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("MatMul", ["rows", "weight"], ["product"]),
        helper.make_node("Gelu", ["product"], ["active"]),
        helper.make_node("ReduceMean", ["active", "axes"], ["mean"], keepdims=0),
        helper.make_node("LpNormalization", ["mean"], ["vectors"], axis=-1, p=2),
    ]
    graph = helper.make_graph(
        nodes,
        "encoder",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["B", "L"])],
        [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["B", WIDTH])],
        [numpy_helper.from_array(array, name) for name, array in tables.items()],
    )
    file = tmp_path / "fp32.onnx"
    opset = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), file)
    return file


def draw_windows(count: int) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, VOCABULARY, rng.integers(1, 9)).astype(np.int32) for _ in range(count)]


@pytest.mark.parametrize("engine", ENGINES)
def test_static_int8_gives_nearly_the_same_vectors(
    fp32: Path, tmp_path: Path, engine: EngineName
) -> None:
    if engine not in list_engines():
        pytest.skip(f"{engine} is not installed")
    quantise_static(fp32, tmp_path / "int8.onnx", draw_windows(LEAST_TURNS))
    kinds = {node.op_type for node in onnx.load(str(tmp_path / "int8.onnx")).graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= kinds
    windows = draw_windows(20)
    quick = Encoder(tmp_path / "int8.onnx", engine=engine)(windows)
    cosine = (quick * Encoder(fp32)(windows)).sum(axis=1)
    assert cosine.min() > 0.98
    assert cosine.min() < 1 - 1e-7  # something was rounded


def test_too_few_turns_are_refused(fp32: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"at least {LEAST_TURNS} real turns"):
        quantise_static(fp32, tmp_path / "int8.onnx", draw_windows(LEAST_TURNS - 1))
    assert not (tmp_path / "int8.onnx").exists()
