from __future__ import annotations

import builtins
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tiny import WIDTH, make_run, write_encoder, write_head, write_model

from dcl import engines as module
from dcl.artifact import ENCODER, MANIFEST, read_manifest
from dcl.engines import ENGINES, EngineName, choose_engine, open_engine
from dcl.errors import ArtifactError, ConfigError
from dcl.runtime import Encoder, load

HAS_OPENVINO = find_spec("openvino") is not None
needs_openvino = pytest.mark.skipif(not HAS_OPENVINO, reason="openvino is not installed")
engine = pytest.mark.parametrize(
    "engine", ["onnxruntime", pytest.param("openvino", marks=needs_openvino)]
)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / ENCODER)


def drop_mask(graph: Path, file: Path) -> Path:
    """The same encoder for turns of one length: it takes no mask."""
    model = onnx.load(str(graph))
    (mask,) = (node for node in model.graph.node if node.op_type == "Cast")
    ones = onnx.helper.make_node("Shape", ["input_ids"], ["size"])
    one = onnx.helper.make_tensor("one", onnx.TensorProto.FLOAT, [1], [1.0])
    fill = onnx.helper.make_node("ConstantOfShape", ["size"], [mask.output[0]], value=one)
    nodes = [node for node in model.graph.node if node is not mask]
    del model.graph.node[:], model.graph.input[1:]
    model.graph.node.extend([ones, fill, *nodes])
    onnx.save(model, file)
    return file


@engine
def test_engines_give_the_vectors_of_the_graph(
    graph: Path, tmp_path: Path, engine: EngineName
) -> None:
    ids = np.array([[2, 5, 6, 3], [2, 7, 8, 3]])
    expected = open_engine("onnxruntime", graph)(ids)
    for file in (graph, drop_mask(graph, tmp_path / "bare.onnx")):
        opened = open_engine(engine, file)
        assert opened.width == WIDTH
        vectors = opened(ids)
        assert vectors.shape == (2, WIDTH)
        assert vectors.dtype == np.float32
        assert vectors == pytest.approx(expected, abs=1e-6)


@engine
def test_a_vector_does_not_depend_on_what_else_is_read(graph: Path, engine: EngineName) -> None:
    opened = open_engine(engine, graph)
    ids = np.random.default_rng(0).integers(4, 40, (7, 5))
    together = opened(ids)
    assert all(np.array_equal(opened(ids[i : i + 1])[0], together[i]) for i in range(7))


@engine
def test_an_answer_is_not_overwritten_by_the_next(graph: Path, engine: EngineName) -> None:
    opened = open_engine(engine, graph)
    first = opened(np.array([[2, 5, 3]]))
    kept = first.copy()
    opened(np.array([[2, 9, 3]]))
    assert np.array_equal(first, kept)


@engine
@pytest.mark.parametrize("threads", [1, 3])
def test_one_engine_serves_many_threads(graph: Path, engine: EngineName, threads: int) -> None:
    opened = open_engine(engine, graph, threads=threads)
    calls = [np.full((1, 1 + i % 6), 4 + i % 30) for i in range(300)]
    expected = [opened(ids) for ids in calls]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(opened, calls))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_same_graph_on_another_engine_is_another_encoder(graph: Path, tmp_path: Path) -> None:
    names = ENGINES if HAS_OPENVINO else ENGINES[:1]
    copy = tmp_path / "copy.onnx"
    copy.write_bytes(graph.read_bytes())
    digests = [open_engine(name, file).digest for name in names for file in (graph, copy)]
    assert len(set(digests)) == len(names)


@engine
def test_what_is_no_encoder_is_refused(graph: Path, tmp_path: Path, engine: EngineName) -> None:
    file = tmp_path / ENCODER
    with pytest.raises(ArtifactError, match=r"encoder\.onnx: expected an exported"):
        open_engine(engine, file)
    for content in (b"", b"no graph", graph.read_bytes()[:200]):
        file.write_bytes(content)
        with pytest.raises(ArtifactError, match=rf"encoder\.onnx: {engine} cannot load it"):
            open_engine(engine, file)
    write_head(file)
    with pytest.raises(ArtifactError, match=r"encoder\.onnx: expected a graph from ids and mask"):
        open_engine(engine, file)


def test_what_a_graph_cannot_take_is_a_damaged_model(graph: Path) -> None:
    opened = open_engine("onnxruntime", graph)
    with pytest.raises(ArtifactError, match="the model does not run: "):
        opened(np.zeros((1, 2, 3), dtype=np.int64))
    assert opened(np.array([[2, 3]])).shape == (1, WIDTH)


def test_an_unknown_engine_is_refused(graph: Path) -> None:
    wrong: Any = "tensorrt"
    with pytest.raises(ConfigError, match="expected onnxruntime or openvino, got 'tensorrt'"):
        open_engine(wrong, graph)
    with pytest.raises(ConfigError, match="expected onnxruntime or openvino, got 'tensorrt'"):
        load(engine=wrong)


@pytest.fixture
def without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the extra."""
    real = builtins.__import__

    def refuse(name: str, *args: Any, **keys: Any) -> Any:
        if name == "openvino":
            raise ModuleNotFoundError("No module named 'openvino'", name="openvino")
        return real(name, *args, **keys)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr(module, "find_spec", lambda name: None)


@pytest.mark.usefixtures("without_openvino")
def test_without_the_extra_openvino_says_what_to_install(graph: Path) -> None:
    with pytest.raises(ConfigError, match=r'run `pip install "dcl-attribution\[openvino\]"`'):
        open_engine("openvino", graph)
    assert choose_engine({"engines": ["onnxruntime", "openvino"]}) == "onnxruntime"


BOTH = {"engines": ["onnxruntime", "openvino"]}


@pytest.mark.parametrize(
    ("manifest", "flags", "chosen"),
    [
        ({}, "avx2 avx512_vnni", "onnxruntime"),
        ({"engines": ["onnxruntime"]}, "avx2 avx512_vnni", "onnxruntime"),
        (BOTH, "avx2 fma", "onnxruntime"),
        (BOTH, "avx2 avx_vnni", "openvino"),
        (BOTH, "avx2 amx_int8", "openvino"),
    ],
)
def test_openvino_is_taken_where_it_is_quicker(
    manifest: dict[str, Any], flags: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: ModuleSpec(name, None, origin=name))
    monkeypatch.setattr(Path, "read_text", lambda self: f"flags\t\t: {flags}\n")
    assert choose_engine(manifest) == chosen


def test_an_empty_folder_of_that_name_is_no_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(Path, "read_text", lambda self: "flags : avx2 avx_vnni")
    assert choose_engine(BOTH) == "onnxruntime"


def test_a_system_that_tells_nothing_of_its_processor_takes_onnxruntime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: Path) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(module, "find_spec", lambda name: ModuleSpec(name, None, origin=name))
    monkeypatch.setattr(Path, "read_text", refuse)
    assert choose_engine(BOTH) == "onnxruntime"


def test_an_engine_can_be_asked_for() -> None:
    assert choose_engine({}, "onnxruntime") == "onnxruntime"
    assert choose_engine(BOTH, "openvino") == "openvino"
    with pytest.raises(ArtifactError, match="backend openvino: expected a model whose encoder was"):
        choose_engine({}, "openvino")
    with pytest.raises(ArtifactError, match="engines: expected a list of names, got 3"):
        choose_engine({"engines": 3})


@needs_openvino
def test_a_model_attributes_alike_on_both(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with pytest.raises(ArtifactError, match="backend openvino: expected a model"):
        load(model, engine="openvino")
    text = (model / MANIFEST).read_text()
    engines = '"engines": ["onnxruntime", "openvino"], "files"'
    (model / MANIFEST).write_text(text.replace('"files"', engines, 1))
    assert read_manifest(model)["engines"] == list(ENGINES)
    run = make_run(("a", "the sum"), ("b", "is wrong"))
    one, two = (load(model, threads=2, engine=name)(run) for name in ENGINES)
    assert [f.agent for f in one.faults()] == [f.agent for f in two.faults()] == ["b"]
    assert two.pair_probs == pytest.approx(one.pair_probs, abs=1e-5)


@needs_openvino
def test_the_encoder_encodes_side_by_side_on_openvino(graph: Path) -> None:
    windows = [np.arange(2, 4 + i % 9, dtype=np.int32) for i in range(40)]
    many, one = (Encoder(graph, threads=threads, engine="openvino") for threads in (3, 1))
    assert np.array_equal(many(windows), one(windows))
