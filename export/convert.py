"""A trained model to the model that ships: one graph for the attribution network, then the gates.

The encoder of a trained model is a graph already; only the network after it is converted. The graph
in single precision is checked as onnxruntime runs it, against torch, on shapes from one turn to
2,000. Its widest products are then quantised, and it is checked again with more room; what that and
the int8 encoder cost is judged by score, where labelled runs are given.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import Tensor, nn

from dcl.adapter import save_adapter
from dcl.artifact import (
    CARD,
    CONFIG,
    ENCODER,
    HEAD,
    LEXICON,
    NATURAL,
    TOKENIZER,
    WEIGHTS,
    Artifact,
    hash_file,
    is_free,
    load_lexicon,
    open_artifact,
    write_artifact,
)
from dcl.attribution import Attributor
from dcl.engines import EngineName, open_session
from dcl.errors import ArtifactError, ConfigError, ParityError
from dcl.learning.inference import load_model
from dcl.learning.model import BagLogits, BagTensors, Model
from dcl.natural import learn_natural
from dcl.runtime import OUTPUTS, Encoder, OnnxScorer, count_cores, load_bagger
from dcl.splits import group_of, split_of
from dcl.taxonomy import MODES
from dcl.trajectory import Example
from export.graph import silence, to_onnx

SHAPES = (
    (1, 1, 1),
    (2, 1, 1),
    (1, 2, 2),
    (1, 9, 1),
    (3, 17, 4),
    (8, 40, 6),
    (1, 130, 5),
    (2, 130, 1),
    (1, 2000, 8),
)
"""Bags, turns and agents of the random batches that torch and onnxruntime must agree on."""

LARGE = 1024
"""Numbers in a weight from which on it is stored in half precision."""

WIDE = 256
"""Rows and columns of a weight from which on it is multiplied in int8."""

ROUNDED = 0.3
"""Most by which products in int8 may move a logit of a random bag."""

AXES = {
    "vectors": ("B", "T", ""),
    "task": ("B", ""),
    "features": ("B", "T", ""),
    "wide": ("B", "T", ""),
    "reply_to": ("B", "T"),
    "member": ("B", "A", "T"),
}
"""Axes of each input of `head.onnx` that may have any size, in the order of `BagTensors`."""


def convert(
    trained: Path,
    out: Path,
    *,
    examples: Iterable[Example] | None = None,
    fp32_encoder: Path | None = None,
    natural: Sequence[Iterable[Example]] = (),
    card: Path | None = None,
    tolerance: float = 1e-3,
    points: float = 0.5,
) -> Path:
    """Convert a trained model; it appears whole and checked, or not at all.

    Args:
        trained: Folder that `dcl train` wrote.
        out: Folder to write; an older model there is replaced.
        examples: Labelled runs for the check of int8; only those of validation questions are used.
        fp32_encoder: Graph of the same encoder before it was quantised, for that check.
        natural: Sets of runs of many systems whose decisive step is proved, to learn the reading
            of natural failures from; none leaves the model without one.
        card: Markdown that becomes the model card.
        tolerance: Most by which a logit may differ from torch in single precision; what ships may
            differ by `ROUNDED` where it has products in int8.
        points: Most points of pair micro-F1 that int8 may cost, in encoder and network together.

    Returns:
        `out`, which `dcl.runtime.load` opens.

    Raises:
        ArtifactError: If `trained` is missing, damaged, or not a trained model.
        ConfigError: If an option is wrong, or no example is of a validation question.
        ParityError: If a gate fails; nothing is written.
    """
    _check_places(trained, out, card)
    if (examples is None) != (fp32_encoder is None):
        raise ConfigError("expected both labelled examples and the fp32 encoder, or neither")
    artifact, model, training = open_trained(trained)
    with tempfile.TemporaryDirectory() as scratch:
        single, head = Path(scratch) / "single.onnx", Path(scratch) / HEAD
        export_head(model, single)
        parity: dict[str, Any] = {"head": check_head(model, single, tolerance=tolerance)}
        rounded = quantise_head(single, head, text_width=2 * model.config.vector_width)
        bound = max(tolerance, ROUNDED) if rounded else tolerance
        parity["packed"] = check_head(model, head, tolerance=bound)
        if examples is not None and fp32_encoder is not None:
            chosen = choose_examples(examples, training)
            graphs = {
                "fp32": Graphs(fp32_encoder, single),
                "int8": Graphs(artifact.path / ENCODER, head),
            }
            parity["int8"] = check_pairs(artifact, graphs, chosen, points=points)

        fitted, notes = None, describe_export(artifact, parity)
        if natural:
            network = open_network(artifact, Graphs(artifact.path / ENCODER, head))
            fitted, report = learn_natural(network, natural)
            notes["natural"] = asdict(report)

        def write_files(folder: Path) -> None:
            if fitted is not None:
                save_adapter(fitted.adapter, folder / NATURAL)
            for name in (ENCODER, TOKENIZER, LEXICON):
                shutil.copy(trained / name, folder / name)
            shutil.copy(head, folder / HEAD)
            if card is not None:
                shutil.copy(card, folder / CARD)

        return write_artifact(
            out,
            write_files,
            window=artifact.window,
            calibration=artifact.calibration,
            natural=None if fitted is None else fitted.calibration,
            model=artifact.model,
            training=training,
            notes=notes,
        )


def _check_places(trained: Path, out: Path, card: Path | None) -> None:
    """Refuse places that cannot be read or written before anything is computed."""
    if out.resolve() == trained.resolve():
        raise ConfigError(f"{out}: expected another folder than that of the trained model")
    if not is_free(out):
        raise ConfigError(f"{out}: expected a new or empty folder, or an older model, to write to")
    if card is not None and not card.is_file():
        raise ConfigError(f"{card}: expected the Markdown of the model card, found no file")


def open_trained(trained: Path) -> tuple[Artifact, Model, Mapping[str, Any]]:
    """A trained model, its weights rounded to half precision, and how it was trained.

    Raises:
        ArtifactError: If it is missing, damaged, holds no weights for torch, or has a closed bank.
    """
    artifact = open_artifact(trained)
    for name in (WEIGHTS, ENCODER, TOKENIZER, LEXICON):
        if name not in artifact.manifest["files"]:
            raise ArtifactError(f"{trained}: expected {name}; give a folder that `dcl train` wrote")
    if artifact.model.get("closed_agents"):
        raise ArtifactError(
            f"{trained}: expected open agents: a graph has no input for names; "
            "train with model.closed_agents: false"
        )
    training = json.loads((trained / CONFIG).read_bytes())["training"]
    model = load_model(artifact)
    # Rounded here and not in the graph alone, so that the gate compares the same numbers.
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    return artifact, model, training


class Head(nn.Module):
    """The network as the graph gives it: outputs in the order of `dcl.runtime.OUTPUTS`.

    Args:
        model: The network; what it gives besides is for training only.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        vectors: Tensor,
        task: Tensor,
        features: Tensor,
        wide: Tensor,
        reply_to: Tensor,
        member: Tensor,
    ) -> tuple[Tensor, ...]:
        """Score a padded batch of bags; the arguments are those of `BagTensors`."""
        logits: BagLogits = self.model(vectors, task, features, wide, reply_to, member)
        return tuple(getattr(logits, name) for name in OUTPUTS)


def export_head(model: Model, file: Path) -> None:
    """Write the attribution network as a graph that takes any number of bags, turns and agents.

    Args:
        model: The network, in evaluation mode.
        file: Where; all is stored and computed in single precision.
    """
    example = draw_bags(model, 2, 5, 3, seed=0)._asdict()
    inputs = {name: (example[name], axes) for name, axes in AXES.items()}
    to_onnx(Head(model).eval(), inputs, OUTPUTS).save(file)
    onnx.checker.check_model(str(file), full_check=True)


def quantise_head(single: Path, file: Path, *, text_width: int) -> int:
    """Write the graph that ships: wide products in int8, other large weights in half precision.

    Weights have seven bits: with eight, sums of two products overflow on processors without VNNI.
    What is stored in half precision is computed in single.

    Args:
        single: The graph in single precision.
        file: Where.
        text_width: Rows of the weights that read turn vectors, which are told by them and never
            quantised: with them logits move twice as far, and no time is saved.

    Returns:
        Number of products in int8.
    """
    graph = onnx.load(str(single))
    shapes = {weight.name: tuple(weight.dims) for weight in graph.graph.initializer}
    wide = [
        node.name
        for node in graph.graph.node
        if node.op_type == "MatMul"
        and min(shapes.get(node.input[1], (0,))) >= WIDE
        and shapes[node.input[1]][0] != text_width
    ]
    if wide:
        with silence():
            quantize_dynamic(
                graph,
                file,
                weight_type=QuantType.QInt8,
                per_channel=True,
                reduce_range=True,
                op_types_to_quantize=["MatMul"],
                nodes_to_quantize=wide,
            )
        graph = onnx.load(str(file))
    store_half(graph)
    onnx.save(graph, file)
    onnx.checker.check_model(str(file), full_check=True)
    return len(wide)


def store_half(model: onnx.ModelProto) -> None:
    """Store large weights in half precision behind a cast that is folded as the graph is loaded.

    Args:
        model: Changed in place; weights that half precision does not hold exactly lose digits.
    """
    casts = []
    for weight in model.graph.initializer:
        if weight.data_type == onnx.TensorProto.FLOAT and math.prod(weight.dims) >= LARGE:
            name = weight.name
            half = onnx.numpy_helper.to_array(weight).astype(np.float16)
            weight.CopyFrom(onnx.numpy_helper.from_array(half, f"{name}_half"))
            casts.append(
                onnx.helper.make_node("Cast", [weight.name], [name], to=onnx.TensorProto.FLOAT)
            )
    for i, cast in enumerate(casts):
        model.graph.node.insert(i, cast)


def check_head(model: Model, file: Path, *, tolerance: float) -> dict[str, Any]:
    """Compare the graph with the network on random bags.

    Args:
        model: The network, in evaluation mode.
        file: The graph.
        tolerance: Most by which a logit may differ.

    Returns:
        For the manifest: largest difference, tolerance, and shapes tried.

    Raises:
        ParityError: If a logit differs by more.
    """
    session = open_session(file)
    worst = 0.0
    for seed, shape in enumerate(SHAPES):
        found = differ(model, session, draw_bags(model, *shape, seed=seed))
        name = max(found, key=found.__getitem__)
        if not found[name] <= tolerance:  # also true for nan
            raise ParityError(
                f"{name} logits of {shape[0]} bags, {shape[1]} turns, {shape[2]} agents: expected "
                f"a difference to torch of at most {tolerance:g}, got {found[name]:.2g}; "
                "nothing was written"
            )
        worst = max(worst, found[name])
    return {"max_difference": worst, "tolerance": tolerance, "shapes": [list(s) for s in SHAPES]}


@torch.no_grad()
def differ(model: Model, session: ort.InferenceSession, bags: BagTensors) -> dict[str, float]:
    """Largest difference of each output between torch and onnxruntime, where it means something."""
    expected: BagLogits = model(*bags)
    got = session.run(list(OUTPUTS), {k: v.numpy() for k, v in bags._asdict().items()})
    turns, agents = (bags.member.sum(dim=axis) > 0 for axis in (1, 2))
    real = {"agent": agents, "pair": agents, "step": turns, "attention": turns}
    return {
        name: _largest(
            getattr(expected, name), torch.from_numpy(array), real.get(name, slice(None))
        )
        for name, array in zip(OUTPUTS, got, strict=True)
    }


def draw_bags(model: Model, B: int, T: int, A: int, *, seed: int) -> BagTensors:
    """Random bags as the network may meet them: the first is full, the others are padded.

    Args:
        model: Width of the vectors and scale of the features are read.
        B: Bags; > 0.
        T: Turns of the longest; > 0.
        A: Agents of the largest; > 0.
        seed: Of the numbers.
    """
    rng = torch.Generator().manual_seed(seed)
    network = next(iter(model))
    mean, scale = network.feature_mean, network.feature_scale

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    turns, agents = (torch.randint(1, n + 1, (B,), generator=rng) for n in (T, A))
    turns[0], agents[0] = T, A
    speaker = torch.rand(B, T, generator=rng).mul(agents[:, None]).long()
    reply_to = torch.rand(B, T, generator=rng).mul(torch.arange(T) + 1).long() - 1  # -1 to t - 1
    real = torch.arange(T) < turns[:, None]  # (B, T)
    member = nn.functional.one_hot(speaker, A).mul(real[..., None]).transpose(1, 2)
    width = model.config.vector_width
    return BagTensors(
        vectors=nn.functional.normalize(draw(B, T, width), dim=-1) * real[..., None],
        task=nn.functional.normalize(draw(B, width), dim=-1),
        features=(draw(B, T, len(mean)) * scale + mean) * real[..., None],
        wide=draw(B, T, len(MODES)) * real[..., None],
        reply_to=torch.where(real, reply_to, -1),
        member=member.float(),
    )


def choose_examples(examples: Iterable[Example], training: Mapping[str, Any]) -> list[Example]:
    """Examples of validation questions whose faulty agents and modes are known.

    Args:
        examples: Any examples.
        training: Configuration of the training run, whose shares decide.

    Raises:
        ConfigError: If there is none.
    """
    chosen = [
        example
        for example in examples
        if example.faults is not None
        and all(fault.mode is not None for fault in example.faults)
        and find_split(example, training) == "valid"
    ]
    if not chosen:
        raise ConfigError("data: expected labelled runs of validation questions, found none")
    return chosen


def find_split(example: Example, training: Mapping[str, Any]) -> str:
    """What a training run with this configuration used an example for."""
    data = training.get("data", {})
    shares = {name: data[f"{name}_share"] for name in ("valid", "test") if f"{name}_share" in data}
    return split_of(group_of(example), **shares)


class Graphs(NamedTuple):
    """Graphs that a model may be run with, and what runs its encoder."""

    encoder: Path
    head: Path
    engine: EngineName = "onnxruntime"


def check_pairs(
    artifact: Artifact,
    graphs: Mapping[str, Graphs],
    examples: Sequence[Example],
    *,
    points: float,
) -> dict[str, Any]:
    """Compare what a model finds with several pairs of graphs; the first one is the measure.

    Args:
        artifact: The model.
        graphs: Its graphs, by name.
        examples: Labelled runs it was not trained on.
        points: Most points of pair micro-F1 that may be lost.

    Returns:
        For the manifest: all scores in points, the bound, and the number of runs.

    Raises:
        ParityError: If more is lost.
    """
    f1 = {name: score_pairs(artifact, pair, examples) for name, pair in graphs.items()}
    measure = next(iter(f1.values()))
    for name, score in f1.items():
        if measure - score > points:
            raise ParityError(
                f"{name}: expected at most {points:g} points of pair micro-F1 to be lost "
                f"on {len(examples)} runs, got {score:.2f} after {measure:.2f}; "
                "nothing was written"
            )
    scores = {f"pair_f1_{name}": round(score, 3) for name, score in f1.items()}
    return {**scores, "points": points, "runs": len(examples)}


def score_pairs(artifact: Artifact, graphs: Graphs, examples: Sequence[Example]) -> float:
    """Micro-F1 of (agent, mode) pairs at the calibrated threshold, 0 to 100.

    Args:
        artifact: Tokenizer, lexicon and calibration are read.
        graphs: Encoder and network.
        examples: Labelled runs.
    """
    attributor = open_network(artifact, graphs)
    hits = declared = labelled = 0
    found = attributor.batch(example.trajectory for example in examples)
    for example, attribution in zip(examples, found, strict=True):
        over = np.argwhere(attribution.pair_probs >= artifact.calibration.pair_threshold)
        predicted = {(attribution.agents[a], MODES[m]) for a, m in over}
        truth = {(fault.agent, fault.mode) for fault in example.faults or ()}
        hits += len(predicted & truth)
        declared += len(predicted)
        labelled += len(truth)
    return 200.0 * hits / max(declared + labelled, 1)


def open_network(artifact: Artifact, graphs: Graphs) -> Attributor:
    """A trained model with graphs from elsewhere, as it reads logs by itself.

    Args:
        artifact: Tokenizer, lexicon and calibration are read.
        graphs: Encoder and network.
    """
    scorer = OnnxScorer(
        Encoder(graphs.encoder, threads=count_cores(), engine=graphs.engine),
        open_session(graphs.head),
        load_lexicon(artifact.path / LEXICON),
    )
    return Attributor(load_bagger(artifact), scorer, artifact.calibration)


def open_exported(model: Path, out: Path) -> Artifact:
    """Open an exported model that is to be written anew somewhere else.

    Args:
        model: Its folder.
        out: Where the new one goes.

    Raises:
        ArtifactError: If `model` is missing, damaged, or not exported.
        ConfigError: If `out` is the same folder, or holds something that is no model.
    """
    if out.resolve() == model.resolve() or not is_free(out):
        raise ConfigError(f"{out}: expected a new or empty folder, or an older model, to write to")
    artifact = open_artifact(model)
    if HEAD not in artifact.manifest["files"]:
        raise ArtifactError(f"{model}: expected an exported model; run `python -m export convert`")
    return artifact


def describe_export(artifact: Artifact, parity: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the manifest: those of the trained model, what made the graph, and the gates."""
    return {
        **artifact.notes,
        "onnx": onnx.__version__,
        "onnxruntime": ort.__version__,
        "weights": hash_file(artifact.path / WEIGHTS),
        "parity": dict(parity),
    }


def _largest(expected: Tensor, got: Tensor, real: Tensor | slice) -> float:
    """Largest absolute difference of two tensors where `real`, infinite if it is not a number."""
    if expected.shape != got.shape:
        return float("inf")
    return float((expected[real] - got[real]).abs().nan_to_num(nan=float("inf")).max())
