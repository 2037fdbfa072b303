"""Static int8: the scales of activations are fixed by real turns, and one graph runs on any engine.

Inputs of the products with constant weights pass a `QuantizeLinear` and a `DequantizeLinear`, and
so do the weights, as the ONNX standard has it. onnxruntime and OpenVINO turn these into int8
products of their own as they load the graph. As no scale depends on what else is read, a turn has
one vector whatever it is read with.

Letters: `B` turns, `L` tokens, `K` rows and `N` columns of a weight.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from dcl.engines import open_session, run_session
from dcl.errors import ConfigError
from dcl.trajectory import Trajectory

TURNS, LEAST_TURNS = 200, 32
"""Real turns that scales rest on, and how many there must be at least."""

_LEVELS = 63  # largest weight: seven bits, as in `export.encoder.quantise`
_LARGE = 1 << 20  # entries of a table from which on its rows are quantised

Range = tuple[float, float]
"""Least and largest value of an activation; 0 lies between."""


def quantise_static(fp32: Path, file: Path, windows: Sequence[NDArray[np.int32]]) -> None:
    """Write an encoder's graph with int8 products, int8 word vectors and the tanh form of GELU.

    Args:
        fp32: The graph in float32, whose one input is token ids `(B, L)`.
        file: Where.
        windows: Real turns as the encoder reads them, each `(L,)` int32.

    Raises:
        ConfigError: If there are too few turns.
    """
    if len(windows) < LEAST_TURNS:
        raise ConfigError(
            f"scales: expected at least {LEAST_TURNS} real turns to fix them by, got "
            f"{len(windows)}; give more logs"
        )
    model = onnx.load(str(fp32))
    loosen_gelu(model)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    products = [n for n in model.graph.node if n.op_type == "MatMul" and n.input[1] in weights]
    large = {name for name, tensor in weights.items() if math.prod(tensor.dims) > _LARGE}
    inputs = dict.fromkeys(product.input[0] for product in products)
    ranges = find_ranges(fp32, file, inputs, windows)
    rewriter = _Rewriter(model)
    for node in list(model.graph.node):
        if node in products:
            rewriter.quantise_product(node, ranges[node.input[0]])
        elif node.op_type == "Gather" and node.input[0] in large:
            rewriter.quantise_rows(node)
        else:
            rewriter.nodes.append(node)
    onnx.save(rewriter.finish(), file)
    onnx.checker.check_model(str(file), full_check=True)


def loosen_gelu(model: ModelProto) -> None:
    """Take the tanh form of GELU: as exact as int8 can tell, and half the time.

    Args:
        model: Changed in place.
    """
    for node in model.graph.node:
        if node.op_type == "Gelu":
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("approximate", "tanh"))


def draw_turns(runs: Iterable[Trajectory], number: int = TURNS) -> list[str]:
    """Some turns of real runs, drawn with a fixed seed.

    Args:
        runs: From which.
        number: How many, if there are as many; > 0.
    """
    texts = [turn.content for run in runs for turn in run.turns]
    return random.Random(0).sample(texts, min(number, len(texts)))


def find_ranges(
    fp32: Path, scratch: Path, names: Iterable[str], windows: Sequence[NDArray[np.int32]]
) -> dict[str, Range]:
    """Least and largest value of activations over real turns.

    Args:
        fp32: The graph.
        scratch: File that may be overwritten.
        names: Of the activations.
        windows: As `quantise_static` takes them.
    """
    names = list(names)
    model = onnx.load(str(fp32))
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    onnx.save(model, scratch)
    session = open_session(scratch)
    (ids,) = session.get_inputs()
    least, most = np.zeros(len(names)), np.zeros(len(names))
    for window in windows:
        found = run_session(session, names, {ids.name: window[None].astype(np.int64)})
        least = np.minimum(least, [array.min() for array in found])
        most = np.maximum(most, [array.max() for array in found])
    return dict(zip(names, zip(least.tolist(), most.tolist(), strict=True), strict=True))


class _Rewriter:
    """Collects the nodes of the new graph; what they need of constants goes into the model.

    Args:
        model: Changed in place.
    """

    def __init__(self, model: ModelProto) -> None:
        self.nodes: list[NodeProto] = []
        self._model = model
        self._weights = {tensor.name: tensor for tensor in model.graph.initializer}
        self._rounded: dict[str, str] = {}

    def quantise_product(self, node: NodeProto, found: Range) -> None:
        """Round both inputs of a product: activations to a byte, weights by column.

        Args:
            node: `(B, L, K)` times a constant `(K, N)`.
            found: Range of the activations.
        """
        activation, weight = node.input
        if activation not in self._rounded:
            low, high = found
            scale = max(high - low, 1e-6) / 255
            scales = self._constants(
                activation, np.float32(scale), np.uint8(np.clip(round(-low / scale), 0, 255))
            )
            byte = self._add("QuantizeLinear", [activation, *scales], f"{activation}/byte")
            self._rounded[activation] = self._dequantise(byte, scales)
        if weight not in self._rounded:
            array = numpy_helper.to_array(self._weights.pop(weight))  # (K, N)
            column = np.maximum(np.abs(array).max(axis=0), 1e-9) / _LEVELS  # (N,)
            (byte,) = self._constants(weight, np.round(array / column).astype(np.int8))
            scales = self._constants(
                f"{weight}/column", column.astype(np.float32), np.zeros(len(column), np.int8)
            )
            self._rounded[weight] = self._dequantise(byte, scales, axis=1)
        node.input[:] = [self._rounded[activation], self._rounded[weight]]
        self.nodes.append(node)

    def quantise_rows(self, node: NodeProto) -> None:
        """Look rows up in a table of bytes and multiply each with a scale of its own.

        Args:
            node: A look-up in a constant table `(rows, K)`.
        """
        table, ids = node.input
        (out,) = node.output
        array = numpy_helper.to_array(self._weights.pop(table))
        row = np.maximum(np.abs(array).max(axis=1, keepdims=True), 1e-9) / 127
        byte, scale = self._constants(
            table, np.round(array / row).astype(np.int8), row.astype(np.float32)
        )
        looked_up = self._add("Gather", [byte, ids], f"{out}/byte")
        number = self._add("Cast", [looked_up], f"{out}/number", to=TensorProto.FLOAT)
        scale = self._add("Gather", [scale, ids], f"{out}/scale")
        self._add("Mul", [number, scale], out)

    def finish(self) -> ModelProto:
        """The model with the new nodes, without the weights that were replaced."""
        graph = self._model.graph
        del graph.node[:], graph.initializer[:]
        graph.node.extend(self.nodes)
        graph.initializer.extend(self._weights.values())
        return self._model

    def _dequantise(self, byte: str, scales: Sequence[str], **attributes: int) -> str:
        """Bytes as numbers again."""
        return self._add("DequantizeLinear", [byte, *scales], f"{byte}/number", **attributes)

    def _constants(self, name: str, *arrays: NDArray[np.generic] | np.generic) -> list[str]:
        """Add constants and give their names."""
        names = [f"{name}/{i}" for i in range(len(arrays))]
        for each, array in zip(names, arrays, strict=True):
            self._weights[each] = numpy_helper.from_array(np.asarray(array), each)
        return names

    def _add(self, kind: str, inputs: Sequence[str], output: str, **attributes: int) -> str:
        """Add a node and give the name of its output."""
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output
