"""One way to write a torch module as an ONNX graph."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.onnx import ONNXProgram


def to_onnx(
    module: nn.Module,
    inputs: Mapping[str, tuple[Tensor, Sequence[str]]],
    outputs: Sequence[str],
    *,
    limits: Mapping[str, int | None] = MappingProxyType({}),
) -> ONNXProgram:
    """Trace a module; the graph says nothing of the files and the lines it comes from.

    Args:
        module: In evaluation mode.
        inputs: Argument of `forward` to an example and the names of its axes, `""` where an axis
            has one size only. Axes of one name have one size; an example of it must be 2 or more.
        outputs: Names of the outputs.
        limits: Largest size of some axes; None and no entry mean any size.

    Returns:
        The traced program; `.model` is its graph.
    """
    names = {name for _, axes in inputs.values() for name in axes if name}
    sizes = {name: torch.export.Dim(name, max=limits.get(name)) for name in sorted(names)}
    with silence():
        program = torch.onnx.export(
            module,
            tuple(example for example, _ in inputs.values()),
            dynamo=True,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_shapes={
                name: {i: sizes[axis] for i, axis in enumerate(axes) if axis}
                for name, (_, axes) in inputs.items()
            },
            external_data=False,
            verbose=False,
        )
    if program is None:
        raise RuntimeError("torch.onnx.export gave no program")
    forget_origin(program.model)
    return program


def forget_origin(model: ir.Model) -> None:
    """Take out what the exporter notes at every node, stack traces with names of folders in them.

    Args:
        model: Changed in place; what it computes stays the same.
    """
    for part in (model.graph, *model.functions.values()):
        for node in part.all_nodes():
            for noted in (node, *node.outputs):
                noted.metadata_props.clear()
                noted.doc_string = None


@contextmanager
def silence() -> Iterator[None]:
    """Keep quiet about what users can do nothing about.

    The exporter uses a deprecated check of its own, and names an axis once where several inputs
    share it, which is what is wanted. The log says that torchvision is absent, and that quantising
    works better on graphs that were fused, which they are.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", r"# The axis name: \w+ will not be used", UserWarning)
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
