"""A turn encoder that is a table lookup, taught by a transformer: the encoder of `lite`.

A turn's vector is the sum of one row a token, scaled to unit norm. The rows are those whose sums
come closest to the teacher's vectors of many turns, in least squares; a token of which the turns
say little stays near the teacher's vector of that token alone.

Letters: `N` windows, `V` tokens, `E` width of the teacher's vectors, `D` of the student's, `B`
turns, `L` tokens of a turn.

Source:
    Model2Vec (Tulkens and van Dongen 2024) for static vectors from a sentence transformer; Arora et
    al. 2017, "A simple but tough-to-beat baseline for sentence embeddings", for the start weights.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from rich.progress import track
from scipy import sparse
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor, nn
from torch.nn import functional as F

import dcl
from dcl.artifact import (
    ENCODER,
    TOKENIZER,
    EncoderSource,
    hash_file,
    open_encoder,
    write_artifact,
)
from dcl.engines import open_session
from dcl.errors import ConfigError, ParityError
from dcl.learning.config import TrainConfig
from dcl.learning.data import VectorCache
from dcl.learning.preparation import select_examples
from dcl.runtime import Encoder, count_cores, load_bagger
from export.graph import to_onnx

Floats = NDArray[np.float32]
Windows = Sequence[NDArray[np.int32]]

SHAPES = ((1, 2), (1, 3), (2, 3), (3, 20), (2, 128))
"""Turns and tokens of the random batches that torch and onnxruntime must agree on."""
TOLERANCE = 1e-5
"""Most by which an entry of a vector may differ from torch."""
RIDGE = 0.02
"""What holds a row to its start, against the squared share of the token in each window."""
ITERATIONS = 40
"""Most steps for one column of the table."""
COMMON = 1e-3
"""Share of all tokens at which a token has half the start weight of a rare one (Arora et al.)."""


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """Windows with the teacher's vectors.

    Args:
        counts: `(N, V)` float32, share of each token in each window.
        vectors: `(N, E)` float32, unit norm.
    """

    counts: sparse.csr_matrix
    vectors: Floats


def export_static(config: TrainConfig, out: Path, *, teacher: Path | None, width: int = 64) -> Path:
    """Teach a table from the logs of a training configuration; labels are not looked at.

    Args:
        config: Its data are read: turns of training questions teach, those of validation questions
            measure.
        out: Folder to write; an older encoder there is replaced.
        teacher: Folder of the encoder to learn from; None means that of `base`.
        width: Of the vectors, `D`; > 0 and at most that of the teacher.

    Returns:
        `out`, which `dcl.artifact.open_encoder` opens.

    Raises:
        ConfigError: If the width is out of range, or a split has no example.
        ArtifactError: If the teacher is missing or damaged.
        ParityError: If torch and onnxruntime differ; nothing is written.
    """
    source = open_encoder(teacher)
    cores = config.threads or count_cores()
    encoder = Encoder(source.path / ENCODER, threads=cores, remember=0)
    if not 0 < width <= encoder.width:
        raise ConfigError(f"--width: expected 1 to {encoder.width}, got {width}")
    train, valid = read_lessons(config, source, encoder)
    alone = encode_tokens(config, source, encoder)
    table = learn_table(train, alone, width)
    student = StaticEncoder(table).eval()
    with tempfile.TemporaryDirectory() as scratch:
        graph = Path(scratch) / ENCODER
        trace(student, graph)
        parity = {
            "static": {
                **check_graph(student, graph),
                "likeness_train": measure(student, train),
                "likeness_valid": measure(student, valid),
            }
        }

        def write_files(folder: Path) -> None:
            shutil.copy(graph, folder / ENCODER)
            shutil.copy(source.path / TOKENIZER, folder / TOKENIZER)

        notes = {
            "dcl": dcl.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "onnx": onnx.__version__,
            "teacher": hash_file(source.path / ENCODER),
            "windows": {"train": len(train.vectors), "valid": len(valid.vectors)},
            "parity": parity,
        }
        return write_artifact(out, write_files, window=source.window, notes=notes)


def read_lessons(
    config: TrainConfig, source: EncoderSource, encoder: Encoder
) -> tuple[Lesson, Lesson]:
    """Distinct windows of training and of validation questions, with the teacher's vectors.

    Raises:
        ConfigError: If a split has no example.
    """
    bagger = load_bagger(source)
    windows: dict[str, dict[bytes, NDArray[np.int32]]] = {"train": {}, "valid": {}}
    for split, example, _ in select_examples(config.data):
        if split in windows:
            run = example.trajectory
            for ids in bagger.tokenize([run.task, *(turn.content for turn in run.turns)]):
                window = bagger.window(ids)
                windows[split][window.tobytes()] = window
    for part, members in windows.items():
        if not members:
            raise ConfigError(f"data: expected examples for {part}, found none")
    cache = _open_cache(config, source, encoder)
    train, valid = (
        Lesson(count_tokens(members, bagger.vocabulary), cache(members).astype(np.float32))
        for members in (list(found.values()) for found in windows.values())
    )
    return train, valid


def encode_tokens(config: TrainConfig, source: EncoderSource, encoder: Encoder) -> Floats:
    """What the teacher makes of each token alone: `(V, E)` float32, unit norm."""
    bagger = load_bagger(source)
    tokens = np.arange(bagger.vocabulary, dtype=np.int32)[:, None]
    return _open_cache(config, source, encoder)([bagger.window(token) for token in tokens]).astype(
        np.float32
    )


def count_tokens(windows: Windows, vocabulary: int) -> sparse.csr_matrix:
    """Share of each token in each window, special tokens included: `(N, V)` float32."""
    sizes = [len(window) for window in windows]
    share = np.repeat(1.0 / np.array(sizes, dtype=np.float32), sizes)
    row = np.repeat(np.arange(len(windows)), sizes)
    entries = (share, (row, np.concatenate(windows)))
    return sparse.csr_matrix(entries, shape=(len(windows), vocabulary), dtype=np.float32)


def learn_table(lesson: Lesson, alone: Floats, width: int) -> Floats:
    """The rows whose sums come closest to the teacher's vectors.

    Args:
        lesson: What the teacher says of many windows.
        alone: `(V, E)`, what it says of each token alone.
        width: Principal axes of its vectors that are kept, `D`.

    Returns:
        `(V, D)` float32.
    """
    _, axes = np.linalg.eigh(lesson.vectors.T @ lesson.vectors)  # ascending
    axes = axes[:, ::-1][:, :width]  # (E, D)
    target = lesson.vectors @ axes  # (N, D)
    share = np.asarray(lesson.counts.mean(axis=0)).ravel()
    start = (alone @ axes) * (COMMON / (COMMON + share))[:, None]  # (V, D)
    summed = lesson.counts @ start
    start *= (summed * target).sum() / (summed**2).sum()
    missing = target - lesson.counts @ start
    change = [solve(lesson.counts, column) for column in track(missing.T, "learning the table")]
    return np.asarray(start + np.stack(change, axis=1), dtype=np.float32)


def solve(counts: sparse.csr_matrix, column: Floats) -> NDArray[np.float64]:
    """Ridge regression of one column on shares of tokens.

    Args:
        counts: `(N, V)`.
        column: `(N,)`.

    Returns:
        `(V,)`, by conjugate gradients on the normal equations, scaled by their diagonal.
    """
    turned = counts.T.tocsr()
    scale = np.asarray(counts.multiply(counts).sum(axis=0)).ravel() + RIDGE
    shape = (len(scale), len(scale))
    normal = LinearOperator(
        shape, matvec=lambda x: turned @ (counts @ x) + RIDGE * x, dtype=np.float64
    )
    scaled = LinearOperator(shape, matvec=lambda x: x / scale, dtype=np.float64)
    solved: NDArray[np.float64] = cg(
        normal, turned @ column, M=scaled, rtol=1e-3, maxiter=ITERATIONS
    )[0]
    return solved


class StaticEncoder(nn.Module):
    """A table of one row a token, eight bits an entry.

    Args:
        table: `(V, D)` float32.
    """

    table: Tensor
    scale: Tensor

    def __init__(self, table: Floats) -> None:
        super().__init__()
        scale = np.maximum(np.abs(table).max(axis=1, keepdims=True), 1e-12) / 127
        rounded = np.rint(table / scale).astype(np.int8)
        self.register_buffer("table", torch.from_numpy(rounded))  # (V, D)
        self.register_buffer("scale", torch.from_numpy(scale.astype(np.float32)))  # (V, 1)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Encode turns.

        Args:
            ids: `(B, L)` int64, padded on the right.
            mask: `(B, L)` int64, 1 where there is a token.

        Returns:
            `(B, D)` float32, unit norm.
        """
        scale = self.scale[ids] * mask[..., None]  # (B, L, 1)
        return F.normalize((self.table[ids] * scale).sum(dim=1), dim=-1)


def trace(student: StaticEncoder, file: Path) -> None:
    """Write the graph.

    Args:
        student: In evaluation mode.
        file: Where.
    """
    ids, mask = draw_tokens(student, 3, 20, seed=0)
    inputs = {"ids": (ids, ("B", "L")), "mask": (mask, ("B", "L"))}
    ir.save(to_onnx(student, inputs, ["vec"]).model, file)


def check_graph(student: StaticEncoder, file: Path) -> dict[str, Any]:
    """Compare the graph with torch on random tokens.

    Args:
        student: The encoder.
        file: Its graph.

    Returns:
        For the manifest: largest difference and tolerance.

    Raises:
        ParityError: If an entry of a vector differs by more than `TOLERANCE`.
    """
    session = open_session(file)
    worst = 0.0
    for seed, shape in enumerate(SHAPES):
        ids, mask = draw_tokens(student, *shape, seed=seed)
        got = session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})[0]
        difference = float(np.abs(got - student(ids, mask).numpy()).max())
        if not difference <= TOLERANCE:  # also true for nan
            raise ParityError(
                f"vectors of {shape[0]} turns of {shape[1]} tokens: expected a difference to torch "
                f"of at most {TOLERANCE:g}, got {difference:.2g}; nothing was written"
            )
        worst = max(worst, difference)
    return {"max_difference": worst, "tolerance": TOLERANCE}


def measure(student: StaticEncoder, lesson: Lesson, sample: int = 2000) -> float:
    """How far the student keeps the teacher's likeness of windows: correlation of cosines.

    Args:
        student: The encoder.
        lesson: Windows it did not learn from.
        sample: Windows that are compared with one another; > 1.
    """
    rows = np.random.default_rng(0).permutation(len(lesson.vectors))[:sample]
    table = (student.table * student.scale).numpy()
    learned = lesson.counts[rows] @ table
    learned /= np.maximum(np.linalg.norm(learned, axis=1, keepdims=True), 1e-12)
    taught = lesson.vectors[rows]
    above = np.triu_indices(len(rows), k=1)
    return float(np.corrcoef((learned @ learned.T)[above], (taught @ taught.T)[above])[0, 1])


def draw_tokens(student: StaticEncoder, B: int, L: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Random tokens: the first turn is full, the others are padded on the right.

    Args:
        student: Size of the vocabulary is read.
        B: Turns; > 0.
        L: Tokens of the longest; > 0.
        seed: Of the numbers.

    Returns:
        Ids and mask, each `(B, L)` int64.
    """
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, L + 1, (B,), generator=rng)
    lengths[0] = L
    mask = (torch.arange(L) < lengths[:, None]).long()
    return torch.randint(len(student.table), (B, L), generator=rng) * mask, mask


def _open_cache(config: TrainConfig, source: EncoderSource, encoder: Encoder) -> VectorCache:
    """The teacher's vectors on disk, those of a training among them."""
    place = Path(config.data.cache).expanduser()
    return VectorCache(place, encoder, hash_file(source.path / ENCODER))
