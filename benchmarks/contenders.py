"""What a user would otherwise pick to read turns with, each behind the same two calls.

What encodes reads at most as many tokens of a turn as `dcl` does; tf-idf and the language model
read all of it. Libraries are imported when their contender is made. Each has a process of its own,
see `benchmarks.worker`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dcl.errors import ConfigError

if TYPE_CHECKING:
    from dcl.engines import EngineName

Action = Callable[[], object]
AGENTS = ("planner", "coder", "tester", "critic")
"""Who says the turns of runs that are put together for measuring."""
FROZEN = Path(__file__).parent / "models" / "frozen"
"""Folder of the `dcl` model behind the encoder that all others run, as it was published."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What contenders are made from.

    Args:
        threads: Each may use so many; > 0.
        tokens: Most tokens that are read of a turn, with special ones.
        model: Folder of a `dcl` model.
        source: Folder of the same encoder as sentence-transformers saves it.
        work: Folder with what was made for the contenders; see `benchmarks.latency`.
        llm: Folder of a small language model; empty for none.
    """

    threads: int
    tokens: int
    model: str
    source: str
    work: str
    llm: str = ""

    @property
    def int8(self) -> Path:
        """Folder of the encoder in dynamic int8."""
        return Path(self.work) / "int8"

    @property
    def fused(self) -> Path:
        """Folder of the encoder in dynamic int8 as the tools of onnxruntime make it."""
        return Path(self.work) / "fused"

    @property
    def static(self) -> Path:
        """Folder of the encoder in static int8."""
        return Path(self.work) / "static"

    @property
    def plain(self) -> Path:
        """Folder of the plain float32 graph."""
        return Path(self.work) / "plain"

    @property
    def distilled(self) -> Path:
        """Folder of the static embeddings."""
        return Path(self.work) / "model2vec"

    @property
    def floor(self) -> Path:
        """File of the fitted tf-idf floor."""
        return Path(self.work) / "tfidf.npz"


class Contender(Protocol):
    """One way of reading turns; both calls give the work to be timed."""

    def turn(self, text: str) -> Action:
        """Read a turn that was never seen."""

    def run(self, texts: Sequence[str]) -> Action:
        """Read the turns of a whole run that was never seen."""


class Embedder:
    """A contender that gives vectors and no verdict.

    Args:
        encode: Texts to vectors.
    """

    def __init__(self, encode: Callable[[list[str]], object]) -> None:
        self._encode = encode

    def turn(self, text: str) -> Action:
        """The vector of a turn."""
        return lambda: self._encode([text])

    def run(self, texts: Sequence[str]) -> Action:
        """The vectors of all turns."""
        return lambda: self._encode(list(texts))


class Verdicts:
    """`dcl` as users call it: text in, findings out.

    A turn is judged as the tenth of a run that is open.

    Args:
        attributor: The model.
        before: Turns of the run before the one that is timed.
    """

    def __init__(self, attributor: Any, *, before: int = 9) -> None:
        self._attributor = attributor
        self._before = [f"Step {i}: we go on as planned." for i in range(before)]

    def turn(self, text: str) -> Action:
        """The findings after one more turn."""
        from dcl.live.incremental import OpenRun

        run = OpenRun(self._attributor, "run", "Solve the task.")
        run.extend(_turns(self._before))
        run.attribute()
        (turn,) = _turns([text])

        def judge() -> object:
            run.extend([turn])
            return run.attribute().findings()

        return judge

    def run(self, texts: Sequence[str]) -> Action:
        """The findings on a run."""
        trajectory = _trajectory(texts)
        return lambda: self._attributor(trajectory).findings()


class Floor:
    """The tf-idf floor; a turn is judged by itself, as nothing of a run can be kept.

    Args:
        predict: The fitted floor.
    """

    def __init__(self, predict: Callable[[Any], object]) -> None:
        self._predict = predict

    def turn(self, text: str) -> Action:
        """The prediction on a run of this turn alone."""
        return self.run([text])

    def run(self, texts: Sequence[str]) -> Action:
        """The prediction on a run."""
        trajectory = _trajectory(texts)
        return lambda: self._predict(trajectory)


def _encoder(setup: Setup, folder: Path, engine: EngineName = "onnxruntime") -> Contender:
    """Turn vectors of `dcl`.

    Args:
        setup: Threads are read.
        folder: Of a model or an encoder.
        engine: What runs its graph.
    """
    from dcl.artifact import ENCODER, open_encoder
    from dcl.runtime import Encoder, load_bagger

    source = open_encoder(folder)
    bagger = load_bagger(source)
    encoder = Encoder(source.path / ENCODER, threads=setup.threads, engine=engine)
    return Embedder(lambda texts: encoder([bagger.window(ids) for ids in bagger.tokenize(texts)]))


def _findings(setup: Setup, model: str) -> Contender:
    """Findings of a model of `dcl`, by name or folder."""
    from dcl.runtime import load

    return Verdicts(load(model, threads=setup.threads))


def _sentence_transformers(setup: Setup) -> Contender:
    """The library the encoder comes from, on torch."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(setup.threads)
    model = SentenceTransformer(setup.source, device="cpu", local_files_only=True)
    model.max_seq_length = setup.tokens
    return Embedder(lambda texts: model.encode(texts, show_progress_bar=False))


def _plain(setup: Setup) -> Contender:
    """The float32 graph of the transformer alone on onnxruntime, pooled in numpy."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = setup.threads
    file = str(setup.plain / "model.onnx")
    session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return Embedder(_batched(setup, lambda feed: session.run(None, feed)[0]))


def _plain_openvino(setup: Setup) -> Contender:
    """The same graph on OpenVINO as it comes."""
    import openvino

    options = {"INFERENCE_NUM_THREADS": setup.threads, "PERFORMANCE_HINT": "LATENCY"}
    model = openvino.Core().compile_model(setup.plain / "model.onnx", "CPU", options)
    return Embedder(_batched(setup, lambda feed: model(feed)[0]))


def _fastembed(setup: Setup) -> Contender:
    """Fastembed with its own pooling, on the plain graph."""
    from fastembed import TextEmbedding

    model = TextEmbedding(
        "sentence-transformers/all-MiniLM-L6-v2",
        specific_model_path=str(setup.plain),
        threads=setup.threads,
        providers=["CPUExecutionProvider"],
    )
    return Embedder(lambda texts: list(model.embed(texts)))


def _int8_batches(setup: Setup) -> Contender:
    """Fused and in dynamic int8 by public tools, eight turns a call by length: the usual way."""
    import onnxruntime as ort

    from dcl.artifact import ENCODER, open_encoder
    from dcl.runtime import load_bagger

    source = open_encoder(setup.fused)
    bagger = load_bagger(source)
    options = ort.SessionOptions()
    options.intra_op_num_threads = setup.threads
    file = str(source.path / ENCODER)
    session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def encode(texts: list[str]) -> object:
        windows = sorted((bagger.window(ids) for ids in bagger.tokenize(texts)), key=len)
        for start in range(0, len(windows), 8):
            ids, mask = _pad(windows[start : start + 8])
            session.run(None, {"ids": ids, "mask": mask})
        return None

    return Embedder(encode)


def _model2vec(setup: Setup) -> Contender:
    """Static embeddings distilled from the same encoder."""
    from model2vec import StaticModel

    model = StaticModel.from_pretrained(str(setup.distilled))
    return Embedder(
        lambda texts: model.encode(texts, max_length=setup.tokens, use_multiprocessing=False)
    )


def _tfidf(setup: Setup) -> Contender:
    """tf-idf and a linear model."""
    from benchmarks.tfidf import TfIdf

    return Floor(TfIdf.load(setup.floor))


def _llm(setup: Setup) -> Contender:
    """A small language model that is asked for the culprit, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not setup.llm:
        raise ConfigError("expected a folder with a language model; give --llm")
    torch.set_num_threads(setup.threads)
    tokenizer = AutoTokenizer.from_pretrained(setup.llm, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(setup.llm, local_files_only=True)

    def ask(texts: list[str]) -> object:
        said = "\n\n".join(f"{turn.agent}: {turn.content}" for turn in _turns(texts))
        question = f"{said}\n\nWhich agent made a mistake, and in which step? Answer briefly."
        inputs: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        return model.generate(**inputs, max_new_tokens=24, do_sample=False)

    return Embedder(ask)


@dataclass(frozen=True, slots=True)
class Kind:
    """What is known of a contender before it is made.

    Args:
        make: Makes it; raises ImportError where its library is not installed.
        library: Distribution whose version is reported.
        gives: `vectors` or a `verdict`.
        arithmetic: Of the encoder's products, `fp32` or `int8`; empty if it runs no encoder.
        calls: Most calls of each kind that are asked for; 0 for as many as of the others.
        needs: Attribute of `Setup` that names what must be made first; empty for nothing.
    """

    make: Callable[[Setup], Contender]
    library: str
    gives: str
    arithmetic: str = ""
    calls: int = 0
    needs: str = ""


CONTENDERS: Mapping[str, Kind] = {
    "dcl": Kind(lambda s: _encoder(s, Path(s.model)), "onnxruntime", "vectors", "int8"),
    "dcl, static": Kind(
        lambda s: _encoder(s, s.static), "onnxruntime", "vectors", "int8", needs="static"
    ),
    "dcl, static, openvino": Kind(
        lambda s: _encoder(s, s.static, "openvino"), "openvino", "vectors", "int8", needs="static"
    ),
    "dcl, findings": Kind(lambda s: _findings(s, s.model), "onnxruntime", "verdict"),
    "dcl lite, findings": Kind(lambda s: _findings(s, "lite"), "onnxruntime", "verdict"),
    "int8, batches of 8": Kind(_int8_batches, "onnxruntime", "vectors", "int8", needs="fused"),
    "plain fp32, onnxruntime": Kind(_plain, "onnxruntime", "vectors", "fp32", needs="plain"),
    "plain fp32, openvino": Kind(_plain_openvino, "openvino", "vectors", "fp32", needs="plain"),
    "sentence-transformers": Kind(
        _sentence_transformers, "sentence-transformers", "vectors", "fp32"
    ),
    "fastembed": Kind(_fastembed, "fastembed", "vectors", "fp32", needs="plain"),
    "model2vec": Kind(_model2vec, "model2vec", "vectors", needs="distilled"),
    "tf-idf, linear": Kind(_tfidf, "scikit-learn", "verdict", needs="floor"),
    "small LLM": Kind(_llm, "transformers", "verdict", calls=3),
}
"""All contenders by name; ratios are to `int8, batches of 8`."""


def _batched(setup: Setup, run: Callable[[dict[str, Any]], Any]) -> Callable[[list[str]], object]:
    """Texts to vectors by the plain graph: padded batches of 32 by length, mean of the tokens.

    Args:
        setup: The tokenizer is read from it.
        run: Calls the graph.
    """
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(setup.plain / "tokenizer.json"))
    tokenizer.enable_truncation(setup.tokens)
    tokenizer.no_padding()

    def encode(texts: list[str]) -> object:
        found = sorted((e.ids for e in tokenizer.encode_batch(texts)), key=len)
        vectors = []
        for start in range(0, len(found), 32):
            ids, mask = _pad(found[start : start + 32])
            feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            states = run(feed) * mask[..., None]
            vectors.append(states.sum(axis=1) / mask.sum(axis=1, keepdims=True))
        pooled = np.concatenate(vectors)
        return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)

    return encode


def _pad(windows: Sequence[Any]) -> tuple[Any, Any]:
    """Ids and mask `(B, L)` int64 of turns, padded on the right."""
    import numpy as np

    longest = max(map(len, windows))
    ids = np.zeros((len(windows), longest), dtype=np.int64)
    for row, window in zip(ids, windows, strict=True):
        row[: len(window)] = window
    lengths = np.array([len(window) for window in windows])
    return ids, (np.arange(longest) < lengths[:, None]).astype(np.int64)


def _turns(texts: Sequence[str]) -> list[Any]:
    """Texts as turns of some agents."""
    from dcl.trajectory import Turn

    return [Turn(AGENTS[i % len(AGENTS)], text) for i, text in enumerate(texts)]


def _trajectory(texts: Sequence[str]) -> Any:
    """Texts as a run."""
    from dcl.trajectory import Trajectory

    return Trajectory("run", "Solve the task.", tuple(_turns(texts)))


def version_of(library: str) -> str:
    """Version of an installed distribution; empty if it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return ""
