"""Where the time of one turn goes, and how near its products come to what the machine can do.

Each node of a graph counts with its quickest of many calls, so that other work on the machine
hardly counts.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from benchmarks.contenders import Setup
from benchmarks.latency import count_operations
from benchmarks.peak import Meter, Peak
from benchmarks.tables import markdown_lines
from dcl.artifact import ENCODER
from dcl.engines import EngineName
from export.encoder import FP32, list_engines

PARTS: Mapping[EngineName, Mapping[str, tuple[str, ...]]] = {
    "onnxruntime": {
        "products": ("MatMul",),
        "attention": ("MultiHeadAttention",),
        "activation": ("Gelu",),
        "rounding": ("Quantize",),
        "sums and norms": ("LayerNormalization", "Sum", "Add"),
    },
    "openvino": {
        "products": ("FullyConnected",),
        "attention": ("MatMul", "Softmax", "Subgraph", "Transpose", "ScaledDotProduct"),
        "activation": ("Gelu",),
        "rounding": ("Quantize",),
        "sums and norms": ("MVN", "Add", "Multiply", "MulAdd"),
    },
}
"""Parts of an encoder by engine, and what names of their kinds of nodes contain; the first that
fits counts. OpenVINO computes the activation within the products."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the time of one turn goes.

    Args:
        graph: Which graph, on which engine.
        parts: Milliseconds by part; what fits none is `rest`.
        speed: Billions of operations a second of the products.
        peak: The same of one core at most, with this arithmetic.
    """

    graph: str
    parts: dict[str, float]
    speed: float
    peak: float

    @property
    def total(self) -> float:
        """Milliseconds of all parts."""
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """Of the peak, that the products reach, 0 to 1."""
        return self.speed / self.peak


def break_down(
    graphs: Sequence[tuple[str, Path, EngineName]],
    source: Path,
    *,
    tokens: int = 128,
    repeats: int = 60,
) -> list[Breakdown]:
    """Profile graphs on one turn, on one thread.

    Args:
        graphs: Name, file and engine of each; `fp32` in a name says how it multiplies.
        source: Folder of the encoder as sentence-transformers saves it.
        tokens: Of the turn.
        repeats: Calls; > 0.
    """
    ids = np.random.default_rng(0).integers(1000, 20000, (1, tokens))
    work, _ = count_operations(source, [tokens])
    found: list[tuple[str, EngineName, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        meter = Meter(Path(folder))
        peaks = [meter()]
        for name, file, engine in graphs:
            profile = _profile_openvino if engine == "openvino" else _profile_onnxruntime
            parts: dict[str, float] = defaultdict(float)
            for kind, seconds in profile(file, ids, repeats, Path(folder)):
                parts[_part_of(kind, engine)] += 1e3 * seconds
            found.append((name, engine, dict(parts)))
            peaks.append(meter())
    # The best of all, as the nodes count with their best, too.
    peak = Peak(max(peak.fp32 for peak in peaks), max(peak.int8 for peak in peaks))
    return [
        Breakdown(
            graph=f"{name}, {engine}",
            parts=parts,
            speed=work / parts["products"] / 1e6,
            peak=peak.fp32 if "fp32" in name else peak.int8,
        )
        for name, engine, parts in found
    ]


def list_graphs(setup: Setup) -> list[tuple[str, Path, EngineName]]:
    """Graphs of the encoder that were made for the contenders, on all engines that are there."""
    graphs: list[tuple[str, Path, EngineName]] = [
        ("dynamic int8", setup.int8 / ENCODER, "onnxruntime")
    ]
    for engine in list_engines():
        graphs += [
            ("static int8", setup.static / ENCODER, engine),
            ("fp32", setup.static / FP32, engine),
        ]
    return graphs


def to_markdown(rows: Sequence[Breakdown]) -> str:
    """A table for people: milliseconds, and how near the products come to the peak."""
    names = [*dict.fromkeys(name for parts in PARTS.values() for name in parts), "rest"]
    body = [
        [
            row.graph,
            *(f"{row.parts.get(name, 0.0):.2f}" for name in names),
            f"{row.total:.2f}",
            f"{row.speed:.0f}",
            f"{row.peak:.0f}",
            f"{row.share:.0%}",
        ]
        for row in rows
    ]
    head = ["graph, engine", *(f"{name} (ms)" for name in names)]
    head += ["all (ms)", "GOP/s of products", "peak", "of peak"]
    return "\n".join(markdown_lines(head, body)) + "\n"


def _part_of(kind: str, engine: EngineName) -> str:
    """The part that a kind of node belongs to."""
    return next(
        (part for part, words in PARTS[engine].items() if any(word in kind for word in words)),
        "rest",
    )


def _profile_onnxruntime(
    file: Path, ids: NDArray[np.int64], repeats: int, folder: Path
) -> list[tuple[str, float]]:
    """Kind and least seconds of each node."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False  # as `dcl` runs it
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.log_severity_level = 3
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    feed = dict(zip([n.name for n in session.get_inputs()], (ids, np.ones_like(ids)), strict=False))
    for _ in range(repeats):
        session.run(None, feed)
    events = json.loads(Path(session.end_profiling()).read_bytes())
    least: dict[str, tuple[str, float]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            seconds, kind = event["dur"] / 1e6, event["args"]["op_name"]
            _, known = least.get(event["name"], (kind, seconds))
            least[event["name"]] = (kind, min(known, seconds))
    return list(least.values())


def _profile_openvino(
    file: Path, ids: NDArray[np.int64], repeats: int, folder: Path
) -> list[tuple[str, float]]:
    """Kind and least seconds of each node."""
    import openvino

    options = {"NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": 1, "PERF_COUNT": True}
    model = openvino.Core().compile_model(file, "CPU", options)
    request: Any = model.create_infer_request()
    least: dict[str, tuple[str, float]] = {}
    for _ in range(repeats):
        request.infer([ids, np.ones_like(ids)][: len(model.inputs)])
        for node in request.profiling_info:
            seconds = node.real_time.total_seconds()
            _, known = least.get(node.node_name, (node.node_type, seconds))
            least[node.node_name] = (node.node_type, min(known, seconds))
    return list(least.values())
