from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from dcl.artifact import ENCODER, HEAD, WEIGHTS, open_artifact
from dcl.engines import open_session
from dcl.errors import ArtifactError, ConfigError, ParityError
from dcl.learning.inference import load_trained
from dcl.learning.model import BagTensors, Model, ModelConfig
from dcl.runtime import OUTPUTS, load
from dcl.shipped import find_model
from dcl.splits import group_of, split_of
from dcl.taxonomy import MODES
from dcl.trajectory import Example, Fault, Trajectory, Turn
from export import convert as module
from export.convert import (
    choose_examples,
    convert,
    differ,
    draw_bags,
    export_head,
    quantise_head,
)

TRAINING = {"data": {"valid_share": 0.5, "test_share": 0.1}}


def example(number: int, mode: int | None = 0) -> Example:
    words = ("plan", "check the sum", "the sum is wrong", "error", "done", "")
    rng = np.random.default_rng(number)
    turns = tuple(
        Turn(agent=f"Agent{rng.integers(1, 4)}", content=words[rng.integers(len(words))])
        for _ in range(rng.integers(1, 9))
    )
    fault = Fault(agent=turns[0].agent, mode=None if mode is None else MODES[mode])
    return Example(
        trajectory=Trajectory(id=f"run-{number}", task=f"check {number}", turns=turns),
        faults=(fault,),
    )


EXAMPLES = [example(number) for number in range(60)]


@pytest.fixture(scope="module", autouse=True)
def short_shapes() -> Iterator[None]:
    """Leaves out the longest bag, which the test of the longest bag has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHAPES", [shape for shape in module.SHAPES if shape[1] < 2000])
        yield


@pytest.fixture(scope="module")
def model(tiny_config: ModelConfig, make_model: Callable[[ModelConfig], Model]) -> Model:
    return make_model(tiny_config)


@pytest.fixture(scope="module")
def head(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("head") / HEAD
    export_head(model, file)
    return file


@pytest.fixture(scope="module")
def session(head: Path) -> ort.InferenceSession:
    return open_session(head)


@pytest.fixture
def use_head(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing takes seconds, and the weights of the trained folder are those of `model`."""

    def write(model: Model, file: Path) -> None:
        file.write_bytes(head.read_bytes())

    monkeypatch.setattr(module, "export_head", write)


def names_and_sizes(values: Sequence[onnx.ValueInfoProto]) -> dict[str, list[str | int]]:
    return {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in values
    }


def test_the_graph_takes_the_bag_and_gives_the_outputs_of_the_runtime(head: Path) -> None:
    graph = onnx.load(str(head)).graph
    inputs, outputs = names_and_sizes(graph.input), names_and_sizes(graph.output)
    assert tuple(inputs) == BagTensors._fields
    assert tuple(outputs) == OUTPUTS
    assert inputs["member"] == ["B", "A", "T"]
    assert inputs["reply_to"] == ["B", "T"]
    assert outputs["pair"] == ["B", "A", len(MODES)]
    assert outputs["attention"] == ["B", "T", len(MODES)]


def test_the_graph_tells_nothing_of_the_machine_it_was_made_on(head: Path) -> None:
    assert b"model.py" not in head.read_bytes()
    shipped = find_model("base")
    for name in (HEAD, ENCODER):
        graph = onnx.load(str(shipped / name))
        assert not any(node.metadata_props or node.doc_string for node in graph.graph.node)


@settings(deadline=None, max_examples=60)
@given(B=st.integers(1, 4), T=st.integers(1, 60), A=st.integers(1, 9), seed=st.integers(0, 9999))
def test_the_graph_agrees_with_torch(
    model: Model, session: ort.InferenceSession, B: int, T: int, A: int, seed: int
) -> None:
    found = differ(model, session, draw_bags(model, B, T, A, seed=seed))
    assert set(found) == set(OUTPUTS)
    assert max(found.values()) <= 1e-4


@pytest.mark.parametrize("turns", [130, 2000])
def test_the_graph_agrees_with_torch_on_long_bags(
    model: Model, session: ort.InferenceSession, turns: int
) -> None:
    found = differ(model, session, draw_bags(model, 1, turns, 6, seed=1))
    assert max(found.values()) <= 1e-3


@pytest.mark.parametrize(
    "switches",
    [
        {
            "use_text": False,
            "use_wide": False,
            "use_mix": False,
            "use_bilinear": False,
            "use_error_bank": False,
            "use_agent_bank": False,
            "layers": 0,
        },
        {"use_features": False, "layers": 2, "centre_text": False},
        {
            "context_heads": ("any", "reply"),
            "feature_groups": ("cues", "deviation"),
            "use_gate": False,
            "use_mode_queries": False,
        },
    ],
)
def test_networks_with_other_switches_convert(
    tiny_config: ModelConfig,
    make_model: Callable[[ModelConfig], Model],
    tmp_path: Path,
    switches: dict[str, Any],
) -> None:
    model = make_model(replace(tiny_config, **switches))
    export_head(model, tmp_path / HEAD)
    session = open_session(tmp_path / HEAD)
    for shape in ((1, 1, 1), (3, 12, 4)):
        assert max(differ(model, session, draw_bags(model, *shape, seed=2)).values()) <= 1e-4


def test_a_converted_model_says_what_the_trained_one_says(trained: Path, tmp_path: Path) -> None:
    card = tmp_path / "card.md"
    card.write_text("# Card\n")
    out = convert(trained, tmp_path / "models" / "out", card=card)
    ours, theirs = load(out, threads=1), load_trained(trained)
    for one in EXAMPLES[:5]:
        got, expected = ours(one.trajectory), theirs(one.trajectory)
        np.testing.assert_allclose(got.pair_probs, expected.pair_probs, atol=1e-5)
        np.testing.assert_allclose(got.step_probs, expected.step_probs, atol=1e-5)
        np.testing.assert_allclose(got.weights, expected.weights, atol=1e-5)
    artifact = open_artifact(out)
    assert artifact.calibration == open_artifact(trained).calibration
    assert artifact.manifest["examples"] == {"train": 8}
    assert artifact.manifest["parity"]["head"]["max_difference"] <= 1e-4
    assert json.loads((out / "config.json").read_text())["training"]["seed"] == 1
    assert (out / "MODEL_CARD.md").read_text() == "# Card\n"
    assert not (out / WEIGHTS).exists()
    with pytest.raises(ArtifactError, match=r"expected model\.safetensors"):
        convert(out, tmp_path / "again")


def test_a_graph_that_was_tampered_with_is_refused(
    trained: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_another(model: Model, file: Path) -> None:
        graph = onnx.load(str(head))
        # One of the two members, so half of it reaches the mean.
        weight = next(w for w in graph.graph.initializer if w.name.endswith("pair_bias"))
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) + 0.02, weight.name))
        onnx.save(graph, file)

    monkeypatch.setattr(module, "export_head", write_another)
    with pytest.raises(ParityError, match=r"at most 0\.001, got 0\.01; nothing was written"):
        convert(trained, tmp_path / "models" / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_logit_that_is_no_number_is_refused(model: Model, tmp_path: Path, head: Path) -> None:
    graph = onnx.load(str(head))
    weight = next(w for w in graph.graph.initializer if w.name.endswith("mode_bias"))
    weight.CopyFrom(numpy_helper.from_array(np.array(np.nan, dtype=np.float32), weight.name))
    onnx.save(graph, tmp_path / HEAD)
    with pytest.raises(ParityError, match="mode logits"):
        module.check_head(model, tmp_path / HEAD, tolerance=1e-3)


def test_narrow_products_stay_as_they_are(
    model: Model, session: ort.InferenceSession, head: Path, tmp_path: Path
) -> None:
    quantise_head(head, tmp_path / HEAD, text_width=2 * model.config.vector_width)
    bags = draw_bags(model, 2, 9, 3, seed=4)
    feed = {name: array.numpy() for name, array in bags._asdict().items()}
    packed = open_session(tmp_path / HEAD)
    for one, other in zip(session.run(None, feed), packed.run(None, feed), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (tmp_path / HEAD).stat().st_size < head.stat().st_size


def test_wide_products_are_quantised_but_for_those_that_read_text(
    tiny_config: ModelConfig, make_model: Callable[[ModelConfig], Model], tmp_path: Path
) -> None:
    wide = replace(tiny_config, width=module.WIDE, vector_width=384, members=1)
    model = make_model(wide)
    export_head(model, tmp_path / "single.onnx")
    quantise_head(tmp_path / "single.onnx", tmp_path / HEAD, text_width=2 * wide.vector_width)
    graph = onnx.load(str(tmp_path / HEAD)).graph
    kinds = {weight.data_type: set[tuple[int, ...]]() for weight in graph.initializer}
    for weight in graph.initializer:
        kinds[weight.data_type].add(tuple(weight.dims))
    D = wide.width
    assert {shape for shape in kinds[onnx.TensorProto.INT8] if len(shape) == 2} == {
        (D, D), (D, 2 * D), (D, 3 * D), (2 * D, D)
    }  # fmt: skip
    assert (2 * wide.vector_width, D) in kinds[onnx.TensorProto.FLOAT16]
    bags = draw_bags(model, 3, 20, 4, seed=2)
    single = differ(model, open_session(tmp_path / "single.onnx"), bags)
    packed = differ(model, open_session(tmp_path / HEAD), bags)
    assert max(single.values()) <= 1e-3 < max(packed.values())
    assert packed["pair"] <= 1.0


@pytest.mark.usefixtures("use_head")
def test_the_same_encoder_loses_nothing(trained: Path, tmp_path: Path) -> None:
    out = convert(
        trained, tmp_path / "out", examples=iter(EXAMPLES), fp32_encoder=trained / ENCODER
    )
    found = open_artifact(out).manifest["parity"]["int8"]
    assert found["pair_f1_int8"] == found["pair_f1_fp32"] > 0
    valid = [e for e in EXAMPLES if split_of(group_of(e), valid=0.5, test=0.1) == "valid"]
    assert found["runs"] == len(valid) < len(EXAMPLES)


@pytest.mark.usefixtures("use_head")
def test_an_encoder_that_costs_points_is_refused(
    trained: Path, tmp_path: Path, write_encoder: Callable[[Path, int], Path]
) -> None:
    better = write_encoder(tmp_path / "fp32.onnx", 1)
    attributor = load_trained(trained)
    attributor.scorer.encoder = module.Encoder(better)  # type: ignore[attr-defined]
    cut = attributor.calibration.pair_threshold
    right = []
    for one in EXAMPLES:  # what the model finds with the other encoder is made the truth
        found = attributor(one.trajectory)
        over = np.argwhere(found.pair_probs >= cut)
        faults = tuple(Fault(agent=found.agents[a], mode=MODES[m]) for a, m in over)
        right.append(replace(one, faults=faults))
    with pytest.raises(ParityError, match=r"at most 0\.5 points .* after 100\.00; nothing"):
        convert(trained, tmp_path / "models" / "out", examples=right, fp32_encoder=better)
    assert list(tmp_path.iterdir()) == [better]


def test_examples_without_modes_or_of_other_questions_do_not_count() -> None:
    chosen = choose_examples(EXAMPLES, TRAINING)
    assert {split_of(group_of(e), valid=0.5, test=0.1) for e in chosen} == {"valid"}
    unlabelled = [replace(chosen[0], faults=None), replace(chosen[0], faults=(Fault("Agent1"),))]
    with pytest.raises(ConfigError, match="found none"):
        choose_examples(unlabelled, TRAINING)


def test_wrong_options_are_refused_before_any_work(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected another folder"):
        convert(trained, trained)
    with pytest.raises(ConfigError, match="or neither"):
        convert(trained, tmp_path / "out", examples=EXAMPLES)
    with pytest.raises(ConfigError, match="or neither"):
        convert(trained, tmp_path / "out", fp32_encoder=trained / ENCODER)
    with pytest.raises(ConfigError, match="model card"):
        convert(trained, tmp_path / "out", card=tmp_path / "absent.md")
    with pytest.raises(ArtifactError, match="found none"):
        convert(tmp_path / "absent", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
