"""The most that one core of this machine multiplies and adds, to hold every speed against.

Two numbers are taken of each kind and the larger one counts: a loop that stays in registers
(`peak.c`, where there is a C compiler and an x86 processor with AVX2), and a large matrix product
of a library. Time is that of the processor, so that other work on the machine hardly counts.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from dcl.engines import open_session, run_session

_SOURCE = Path(__file__).with_name("peak.c")
_ROUNDS = 1_000_000
_FP32, _INT8 = 12 * 8 * 2, 12 * 32 * 2  # operations a round; a multiply-add is two
_SIZE = 768  # of the matrices; three of them fit the second-level cache or nearly


@dataclass(frozen=True, slots=True)
class Peak:
    """What one core can do.

    Args:
        fp32: Billions of single-precision operations a second; a multiply-add is two.
        int8: Billions of operations on bytes a second.
    """

    fp32: float
    int8: float


class Meter:
    """Measures the peak, as often as it is asked to; compiling is done once.

    Args:
        folder: Where the loop may be compiled to.
    """

    def __init__(self, folder: Path) -> None:
        self._fp32 = [(_product(folder, "MatMul", np.float32, np.float32), 2.0 * _SIZE**3)]
        self._int8 = [(_product(folder, "MatMulInteger", np.uint8, np.int8), 2.0 * _SIZE**3)]
        loops = _compile(folder)
        if loops is not None:
            fp32, int8 = loops.fp32_rounds, loops.int8_rounds
            self._fp32.append((lambda: fp32(ctypes.c_long(_ROUNDS)), float(_ROUNDS * _FP32)))
            self._int8.append((lambda: int8(ctypes.c_long(_ROUNDS)), float(_ROUNDS * _INT8)))

    def __call__(self, repeats: int = 10) -> Peak:
        """Measure now.

        Args:
            repeats: The best of so many counts; > 0.
        """
        fp32, int8 = (
            max(work / _seconds(action) for action, work in kind for _ in range(repeats))
            for kind in (self._fp32, self._int8)
        )
        return Peak(fp32 / 1e9, int8 / 1e9)


def _seconds(action: Callable[[], object]) -> float:
    """Processor time of this thread."""
    start = time.thread_time()
    action()
    return time.thread_time() - start


def _compile(folder: Path) -> ctypes.CDLL | None:
    """The loops, or None where they cannot be had."""
    compiler = shutil.which("cc")
    if compiler is None or platform.machine() not in ("x86_64", "AMD64") or not _has_avx2():
        return None
    library = folder.resolve() / "peak.so"  # a bare name would be looked for elsewhere
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        return None
    try:
        return ctypes.CDLL(str(library))
    except OSError:  # a folder from which nothing may be run
        return None


def _has_avx2() -> bool:
    """Whether the processor says so; only Linux is asked."""
    try:
        return " avx2 " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _product(
    folder: Path, operator: str, kind: type[np.generic], weights: type[np.generic]
) -> Callable[[], object]:
    """A product of a matrix with a constant one by onnxruntime, on one thread.

    Args:
        folder: Where its graph may be written.
        operator: Its name in a graph.
        kind: Of the numbers of the matrix.
        weights: Of the numbers of the constant one.
    """
    rng = np.random.default_rng(0)
    left, right = (rng.integers(0, 64, (_SIZE, _SIZE)).astype(dtype) for dtype in (kind, weights))
    graph = helper.make_graph(
        [helper.make_node(operator, ["a", "b"], ["c"])],
        "product",
        [helper.make_tensor_value_info("a", helper.np_dtype_to_tensor_dtype(left.dtype), None)],
        [helper.make_empty_tensor_value_info("c")],
        [numpy_helper.from_array(right, "b")],
    )
    file = folder / f"{operator}.onnx"
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), file)
    session = open_session(file)
    return lambda: run_session(session, None, {"a": left})
