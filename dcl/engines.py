"""What runs a graph: onnxruntime, always there, or OpenVINO for the turn encoder where installed.

An engine takes turns of one length and never pads, so there is no mask to look at, and it uses one
thread a call: work side by side comes from calls side by side. Both engines may be shared between
threads. Neither sees text, caches or bags; `dcl.runtime.Encoder` does.

Letters: `B` turns of one length, `L` tokens, `E` width of a turn vector.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

# Read by onnxruntime when it is loaded; without it, it writes to the home folder.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime as ort

from dcl.errors import ArtifactError, ConfigError

EngineName = Literal["onnxruntime", "openvino"]
"""Engines by name."""
ENGINES: tuple[EngineName, ...] = ("onnxruntime", "openvino")
"""All of them; the first is always there."""


class Engine(Protocol):
    """A turn encoder's graph, ready to run; safe to share between threads.

    Attributes:
        width: Size of a turn vector, `E`.
        digest: Equal for engines that give equal vectors.
    """

    width: int
    digest: bytes

    def __call__(self, ids: NDArray[np.int64], /) -> NDArray[np.float32]:
        """Encode turns of one length.

        Args:
            ids: `(B, L)`, token ids with special tokens and without padding.

        Returns:
            `(B, E)`, unit norm.

        Raises:
            ArtifactError: If the graph does not take what it is fed.
        """


def open_engine(name: EngineName, file: Path, *, threads: int = 1) -> Engine:
    """Load an encoder's graph.

    Args:
        name: Engine to run it.
        file: The ONNX graph.
        threads: Calls that will be made side by side; > 0. More are fine and wait for each other.

    Raises:
        ArtifactError: If the graph cannot be loaded, or is no encoder.
        ConfigError: If there is no such engine, or it is not installed.
    """
    if name == "onnxruntime":
        return OnnxRuntime(file)
    if name == "openvino":
        return OpenVino(file, threads=threads)
    raise ConfigError(f"engine: expected {' or '.join(ENGINES)}, got {name!r}")


def choose_engine(manifest: Mapping[str, Any], wanted: EngineName | None = None) -> EngineName:
    """The engine for the encoder of a model.

    A graph of static int8 (`python -m export renew --static`) runs on both engines. Unless one is
    asked for, OpenVINO takes such a graph where it is installed and the processor multiplies bytes
    in one instruction; elsewhere its int8 products take longer than those of onnxruntime.

    Args:
        manifest: Of the model; its `engines` say what its encoder was checked on.
        wanted: What to take instead; whether it exists and is installed shows when it is opened.

    Raises:
        ArtifactError: If the model was not checked on the engine that is asked for.
    """
    known = manifest.get("engines", ["onnxruntime"])
    if not isinstance(known, list):
        raise ArtifactError(f"manifest.json: engines: expected a list of names, got {known!r}")
    if wanted is None:
        spec = find_spec("openvino") if "openvino" in known else None
        is_there = spec is not None and spec.origin is not None  # an empty folder has none
        quick = is_there and _multiplies_bytes()
        return "openvino" if quick else "onnxruntime"
    if wanted in ENGINES and wanted not in known:
        raise ArtifactError(
            f"backend {wanted}: expected a model whose encoder was checked on it, as "
            "`python -m export renew --static` makes one; take onnxruntime for this one"
        )
    return wanted


def _multiplies_bytes() -> bool:
    """Whether the processor has VNNI or AMX; False where the system does not tell."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(flags & {"avx512_vnni", "avx_vnni", "amx_int8"})


class OnnxRuntime:
    """An encoder's graph on onnxruntime.

    Args:
        file: The ONNX graph, from ids `(B, L)`, and a mask where it takes one, to vectors.

    Raises:
        ArtifactError: If the graph cannot be loaded, or is no encoder.
    """

    def __init__(self, file: Path) -> None:
        self._session = open_session(file)
        inputs, output = self._session.get_inputs(), self._session.get_outputs()[0]
        self.width = _check_encoder(
            file, [node.type == "tensor(int64)" for node in inputs], output.shape
        )
        self._inputs = [node.name for node in inputs]
        self.digest = sha256(file.read_bytes()).digest()

    def __call__(self, ids: NDArray[np.int64], /) -> NDArray[np.float32]:
        """Encode turns of one length; see `Engine`."""
        feed = zip(self._inputs, (ids, np.ones_like(ids)), strict=False)
        return run_session(self._session, None, dict(feed))[0]


class OpenVino:
    """An encoder's graph on OpenVINO.

    Args:
        file: The ONNX graph, from ids `(B, L)`, and a mask where it takes one, to vectors.
        threads: Calls that run side by side; > 0.

    Raises:
        ArtifactError: If the graph cannot be loaded, or is no encoder.
        ConfigError: If OpenVINO is not installed.
    """

    def __init__(self, file: Path, *, threads: int = 1) -> None:
        try:
            from openvino import Core
        except (ImportError, OSError) as error:  # also a shared library that is missing
            raise ConfigError(
                f"backend openvino: expected it to be installed: {error}; run "
                '`pip install "dcl-attribution[openvino]"`, or take the backend onnxruntime'
            ) from None
        if not file.is_file():
            raise ArtifactError(f"{file}: expected an exported encoder, found no file")
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": threads,
            "INFERENCE_NUM_THREADS": threads,  # one a stream
            "INFERENCE_PRECISION_HINT": "f32",  # the vectors that the gates have seen
            "ENABLE_CPU_PINNING": False,  # other processes may be pinned to the same cores
        }
        try:
            self._model = Core().compile_model(file, "CPU", options)
            types = [port.get_element_type() for port in self._model.inputs]
            shape = self._model.output(0).get_partial_shape()
            sizes = [size.get_length() if size.is_static else "?" for size in shape]
        except RuntimeError as error:
            raise ArtifactError(
                f"{file}: openvino cannot load it: {' '.join(str(error).split())[:300]}"
            ) from None
        self.width = _check_encoder(file, [t.get_type_name() == "i64" for t in types], sizes)
        self.digest = sha256(b"openvino" + file.read_bytes()).digest()
        self._idle: SimpleQueue[Any] = SimpleQueue()  # requests; each runs one call at a time

    def __call__(self, ids: NDArray[np.int64], /) -> NDArray[np.float32]:
        """Encode turns of one length; see `Engine`."""
        try:
            request = self._idle.get_nowait()
        except Empty:
            request = self._model.create_infer_request()
        feed = [ids, np.ones_like(ids)][: len(self._model.inputs)]
        try:
            found: NDArray[np.float32] = request.infer(feed)[0].copy()  # the request keeps its own
        except RuntimeError as error:
            raise ArtifactError(
                f"the model does not run: {' '.join(str(error).split())[:300]}; export it again"
            ) from None
        finally:
            self._idle.put(request)
        return found


def open_session(file: Path) -> ort.InferenceSession:
    """An onnxruntime session for a CPU with no threads of its own.

    Raises:
        ArtifactError: If the file is missing or not a graph that this onnxruntime can run.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # an arena only grows where shapes vary
    options.enable_mem_pattern = False
    options.log_severity_level = 3
    if not file.is_file():
        raise ArtifactError(f"{file}: expected an exported model; run `python -m export convert`")
    try:
        return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no public base
        raise ArtifactError(f"{file}: onnxruntime cannot load it: {error}") from None


def run_session(
    session: ort.InferenceSession, outputs: Sequence[str] | None, feed: dict[str, Any]
) -> list[NDArray[np.float32]]:
    """Outputs of a graph; None means all of them.

    Raises:
        ArtifactError: If the graph does not take what it is fed.
    """
    try:
        return list(session.run(outputs, feed))
    except Exception as error:  # onnxruntime's errors share no public base
        raise ArtifactError(f"the model does not run: {error}; export it again") from None


def _check_encoder(file: Path, integers: Sequence[bool], output: Sequence[object]) -> int:
    """Width of the vectors of an encoder's graph.

    Args:
        file: The graph.
        integers: Of each input, whether it takes 64-bit integers.
        output: Sizes of the first output; what is no integer may have any size.

    Raises:
        ArtifactError: If these are not those of an encoder.
    """
    width = output[-1] if len(output) == 2 else None
    if list(integers) not in ([True], [True, True]) or not isinstance(width, int):
        raise ArtifactError(
            f"{file}: expected a graph from ids and mask (B, L) to vectors (B, E), got "
            f"{len(integers)} inputs and an output {output}; export the model again"
        )
    return width
