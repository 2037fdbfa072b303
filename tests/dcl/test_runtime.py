from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny import (
    WIDTH,
    bagger,
    make_lexicon,
    make_run,
    write_encoder,
    write_encoder_folder,
    write_model,
)

from dcl.artifact import (
    ENCODER,
    HEAD,
    LEXICON,
    TOKENIZER,
    WEIGHTS,
    Window,
    open_artifact,
    open_encoder,
    save_lexicon,
)
from dcl.artifact import write_artifact as write
from dcl.attribution import Calibration, Floats
from dcl.engines import open_session
from dcl.errors import ArtifactError, ConfigError
from dcl.features import FEATURES
from dcl.lexical import Lexicon
from dcl.runtime import (
    OUTPUTS,
    Encoder,
    OnnxScorer,
    count_cores,
    head_inputs,
    load,
    load_bagger,
)
from dcl.taxonomy import MODES
from dcl.trajectory import Trajectory, Turn

M = len(MODES)


def window(*ids: int) -> NDArray[np.int32]:
    return np.array([2, *ids, 3], dtype=np.int32)


WINDOWS = [window(5), window(6, 7, 8), window(), window(5), window(9, 9)]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / ENCODER)


class CountingEncoder(Encoder):
    """Keeps what it had to encode."""

    def __init__(self, file: Path, *, threads: int = 1, remember: int = 4096) -> None:
        super().__init__(file, threads=threads, remember=remember)
        self.encoded: list[list[int]] = []

    def _encode_all(self, windows: Sequence[NDArray[np.int32]]) -> list[Floats]:
        self.encoded += [w.tolist() for w in windows]
        return super()._encode_all(windows)


def test_vectors_have_unit_norm_and_keep_the_order(graph: Path) -> None:
    encoder = Encoder(graph)
    vectors = encoder(WINDOWS)
    assert encoder.width == WIDTH
    assert vectors.shape == (5, WIDTH)
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(5), abs=1e-6)
    assert np.array_equal(vectors[0], vectors[3])
    for i, one in enumerate(WINDOWS):
        assert np.array_equal(Encoder(graph)([one])[0], vectors[i])


def test_a_window_is_encoded_once(graph: Path) -> None:
    encoder = CountingEncoder(graph)
    first = encoder(WINDOWS)
    assert len(encoder.encoded) == 4
    assert np.array_equal(encoder(WINDOWS[::-1]), first[::-1])
    assert len(encoder.encoded) == 4
    encoder([window(5, 5)])
    assert encoder.encoded[4:] == [[2, 5, 5, 3]]


def test_without_memory_the_vectors_are_the_same(graph: Path) -> None:
    encoder = CountingEncoder(graph, remember=0)
    assert np.array_equal(encoder(WINDOWS), Encoder(graph)(WINDOWS))
    encoder(WINDOWS[:1])
    assert len(encoder.encoded) == 5


def test_the_longest_unused_vector_is_forgotten_first(graph: Path) -> None:
    encoder = CountingEncoder(graph, remember=2)
    a, b, c = window(5), window(6), window(7)
    encoder([a, b])
    encoder([a])
    encoder([c])  # b goes
    encoder.encoded.clear()
    encoder([a, c])
    assert encoder.encoded == []
    encoder([b])
    assert len(encoder.encoded) == 1


def test_more_windows_than_are_remembered_are_no_trouble(graph: Path) -> None:
    assert np.array_equal(Encoder(graph, remember=1)(WINDOWS), Encoder(graph)(WINDOWS))


def test_threads_change_nothing(graph: Path) -> None:
    many = [window(*np.random.default_rng(i).integers(4, 40, i % 9)) for i in range(40)]
    assert np.array_equal(Encoder(graph, threads=1)(many), Encoder(graph, threads=3)(many))


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads change places as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("remember", [0, 1, 4096])
@pytest.mark.usefixtures("hasty")
def test_one_encoder_serves_many_threads(graph: Path, remember: int) -> None:
    encoder = Encoder(graph, remember=remember)
    windows = [window(i, i + 1) for i in range(4, 40)]
    expected = Encoder(graph)(windows)

    def ask(i: int) -> bool:
        """The same turn as all others, then it and one of our own."""
        first, second = encoder(windows[:1]), encoder([windows[0], windows[i % len(windows)]])
        return bool(
            np.array_equal(first, expected[:1])
            and np.array_equal(second, expected[[0, i % len(windows)]])
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(400)))


def test_a_missing_graph_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="expected an exported model; run `python -m export"):
        Encoder(tmp_path / "none.onnx")


def test_a_damaged_graph_is_refused(tmp_path: Path, graph: Path) -> None:
    file = tmp_path / ENCODER
    for content in (b"", b"no graph", graph.read_bytes()[:200]):
        file.write_bytes(content)
        with pytest.raises(ArtifactError, match=r"encoder\.onnx: onnxruntime cannot load it"):
            open_session(file)


def test_cores_are_counted() -> None:
    assert count_cores() >= 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole exported model."""
    return write_model(tmp_path_factory.mktemp("models") / "model")


RUNS = [
    make_run(("a", "the sum"), ("b", "is wrong"), ("a", "again"), id="1"),
    make_run(("b", "wrong"), id="2"),
    make_run(("a", ""), ("b", ""), task="", id="3"),
]


def test_a_model_attributes_runs(model: Path) -> None:
    one, two, three = load(model, threads=1).batch(RUNS)
    assert [(f.agent, f.mode, f.step) for f in one.faults()] == [("b", MODES[5], 1)]
    assert [(f.agent, f.mode) for f in two.faults()] == [("b", MODES[5])]
    assert three.faults() == ()


def test_batches_and_threads_change_nothing(model: Path) -> None:
    alone = [load(str(model), threads=1)(run).to_dict() for run in RUNS]
    assert [got.to_dict() for got in load(model, threads=3).batch(RUNS)] == alone
    assert [got.to_dict() for got in load(model).batch(RUNS, batch_size=2)] == alone


def test_the_head_is_fed_what_the_network_takes() -> None:
    bag = bagger()(RUNS[0])
    vectors = np.eye(4, WIDTH, dtype=np.float32)
    feed = dict(head_inputs(bag, vectors[:3], vectors[3], make_lexicon()))
    assert list(feed) == ["vectors", "task", "features", "wide", "reply_to", "member"]
    assert feed["features"].shape == (3, len(FEATURES))
    assert feed["wide"].shape == (3, M)
    assert feed["member"].tolist() == [[1, 0, 1], [0, 1, 0]]
    assert {array.dtype for array in feed.values()} == {np.dtype("f4"), np.dtype("i8")}


def test_a_scorer_gives_logits_in_the_order_of_the_bags(model: Path) -> None:
    scorer = OnnxScorer(Encoder(model / ENCODER), open_session(model / HEAD), make_lexicon())
    bags = [bagger()(run) for run in RUNS]
    scores = scorer(bags)
    for bag, logits in zip(bags, scores, strict=True):
        T, A = len(bag.windows), len(bag.agents)
        shapes = {"agent": (A,), "mode": (M,), "pair": (A, M), "step": (T,), "attention": (T, M)}
        assert {name: getattr(logits, name).shape for name in OUTPUTS} == shapes


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    def write_files(inside: Path) -> None:
        write_encoder(inside / ENCODER)
        for name in (TOKENIZER, LEXICON, WEIGHTS):
            (inside / name).write_text("{}")

    folder = write(
        tmp_path / "model",
        write_files,
        window=Window(1, 1),
        calibration=Calibration(),
        notes={},
    )
    with pytest.raises(ArtifactError, match=r"head\.onnx: expected an exported model"):
        load(folder)


def change(model: Path, folder: Path, change_files: Callable[[Path], object]) -> Path:
    """A copy of a model with other files, for which its manifest vouches."""

    def write_files(inside: Path) -> None:
        for name in (ENCODER, HEAD, TOKENIZER, LEXICON):
            shutil.copyfile(model / name, inside / name)
        change_files(inside)

    return write(folder, write_files, window=Window(12, 4), calibration=Calibration(), notes={})


def swap(folder: Path) -> None:
    encoder = (folder / ENCODER).read_bytes()
    (folder / ENCODER).write_bytes((folder / HEAD).read_bytes())
    (folder / HEAD).write_bytes(encoder)


def cut_lexicon(folder: Path) -> None:
    whole = make_lexicon()
    save_lexicon(Lexicon(whole.idf[:-1], whole.table[:-1]), folder / LEXICON)


def lose_marks(folder: Path) -> None:
    text = (folder / TOKENIZER).read_text()
    (folder / TOKENIZER).write_text(text.replace("[CLS]", "[cls]"))


@pytest.mark.parametrize(
    ("change_files", "message"),
    [
        (swap, r"encoder\.onnx: expected a graph from ids and mask"),
        (
            lambda folder: shutil.copyfile(folder / ENCODER, folder / HEAD),
            r"head\.onnx: expected the head of an attribution model, got a graph from input_ids",
        ),
        (
            lambda folder: write_encoder(folder / ENCODER, width=WIDTH + 1),
            r"head\.onnx: vectors: expected a width of 9, got 8; encoder, head and",
        ),
        (cut_lexicon, r"lexicon\.npz: expected \d+ rows for the vocabulary of tokenizer\.json"),
        (lose_marks, r"tokenizer\.json: expected the tokens \[CLS\] and \[SEP\]"),
    ],
)
def test_parts_that_do_not_fit_one_another_are_refused(
    model: Path, tmp_path: Path, change_files: Callable[[Path], object], message: str
) -> None:
    with pytest.raises(ArtifactError, match=message):
        load(change(model, tmp_path / "model", change_files))


def test_a_graph_that_breaks_as_it_runs_is_a_damaged_model(graph: Path) -> None:
    with pytest.raises(ArtifactError, match="the model does not run: "):
        Encoder(graph)([window(10_000)])


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    source = open_encoder(write_encoder_folder(tmp_path / "encoder"))
    (source.path / TOKENIZER).write_text("{}")
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: cannot be read"):
        load_bagger(source)


@pytest.mark.parametrize("threads", [0, -1])
def test_a_number_of_threads_below_1_is_refused(threads: int) -> None:
    with pytest.raises(ConfigError, match=f"threads: expected at least 1, got {threads}"):
        load(threads=threads)


@pytest.mark.parametrize("name", ["base", "lite"])
def test_one_agent_alone_does_not_show_every_mode(name: str) -> None:
    """It is the only one to blame, which says nothing of how it failed."""
    found = load(name, threads=1)(Trajectory("r", "add", (Turn("solver", "2 + 2 = 5"),)))
    assert found.agent_probs[0] > 0.9
    assert (found.pair_probs[0] <= found.mode_probs).all()
    assert len(found.findings()) < 3


def test_a_model_reads_natural_failures_unless_told_otherwise() -> None:
    natural, network = load(), load(injected=True)
    assert isinstance(natural.scorer, OnnxScorer)
    assert isinstance(network.scorer, OnnxScorer)
    assert len(natural.scorer.adapters) == 1
    assert network.scorer.adapters == ()
    artifact = open_artifact()
    assert natural.calibration == artifact.natural
    assert network.calibration == artifact.calibration != artifact.natural
