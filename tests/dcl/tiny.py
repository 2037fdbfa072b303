"""Small stand-ins for what is large: a tokenizer, an encoder graph, runs and a network."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from dcl.artifact import (
    ENCODER,
    HEAD,
    LEXICON,
    TOKENIZER,
    Window,
    save_lexicon,
    write_artifact,
)
from dcl.attribution import Calibration
from dcl.bag import BagMaker
from dcl.features import FEATURES
from dcl.lexical import BIGRAM_ROWS, Lexicon, RunWords, Words, count_turn
from dcl.taxonomy import MODES
from dcl.trajectory import Trajectory, Turn

WIDTH = 8
"""Width of a turn vector of the tiny encoder."""

light = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
"""For property tests: few examples, and no clock."""

any_text = st.text(st.characters(codec=None), max_size=60)
"""Any string that Python can hold, lone surrogates and NUL among them."""


def make_tokenizer() -> Tokenizer:
    """Word pieces over a few words and all ASCII letters and digits; the rest is `[UNK]`."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "sum", "is", "wrong", "skip", "again"]
    letters = string.ascii_lowercase + string.digits
    pieces += [*letters, *(f"##{letter}" for letter in letters), *".,?!:;-()"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer()
    tokenizer.pre_tokenizer = BertPreTokenizer()
    return tokenizer


@cache
def bagger(head: int = 12, tail: int = 4) -> BagMaker:
    """A bag maker with the tiny tokenizer."""
    return BagMaker(make_tokenizer(), head=head, tail=tail)


def write_encoder(file: Path, *, width: int = WIDTH) -> Path:
    """A graph that gives the unit-norm sum of one random vector a token."""
    rows = np.random.default_rng(7).standard_normal((make_tokenizer().get_vocab_size(), width))
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["tokens"]),
        helper.make_node("Cast", ["attention_mask"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["real", "last"], ["mask"]),
        helper.make_node("Mul", ["tokens", "mask"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "middle"], ["sum"], keepdims=0),
        helper.make_node("LpNormalization", ["sum"], ["vector"], axis=-1, p=2),
    ]
    graph = helper.make_graph(
        nodes,
        "encoder",
        [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["B", "L"])
            for name in ("input_ids", "attention_mask")
        ],
        [helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["B", width])],
        [
            numpy_helper.from_array(rows.astype(np.float32), "table"),
            numpy_helper.from_array(np.array([2]), "last"),
            numpy_helper.from_array(np.array([1]), "middle"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, file)
    return file


def write_encoder_folder(folder: Path) -> Path:
    """A folder with the tiny encoder and tokenizer, as training starts from."""

    def write_files(inside: Path) -> None:
        write_encoder(inside / ENCODER)
        make_tokenizer().save(str(inside / TOKENIZER))

    return write_artifact(folder, write_files, window=Window(head=12, tail=4), notes={})


def make_run(*said: tuple[str, str], task: str = "add the sum", **keys: Any) -> Trajectory:
    """A run from pairs of agent and text."""
    turns = tuple(Turn(agent, content) for agent, content in said)
    return Trajectory(keys.pop("id", "run"), task, turns, **keys)


def unit_rows(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Random vectors of unit norm along the last axis."""
    rows = rng.standard_normal(shape)
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True), dtype=np.float32)


def runs(*, most: int = 6, text: st.SearchStrategy[str] = any_text) -> st.SearchStrategy[Any]:
    """Runs of one to `most` turns of up to three agents."""
    name = st.sampled_from(("Planner", "Agent1", "Agent12"))
    said = st.lists(st.tuples(name, text), min_size=1, max_size=most)
    build: Callable[..., Trajectory] = lambda said, task: make_run(*said, task=task)  # noqa: E731
    return st.builds(build, said, text)


def write_head(file: Path) -> Path:
    """A graph whose pair logits are the wide logits, and whose step logits count features."""
    floats, ints = TensorProto.FLOAT, TensorProto.INT64
    inputs = [
        ("vectors", floats, ["B", "T", WIDTH]),
        ("task", floats, ["B", WIDTH]),
        ("features", floats, ["B", "T", len(FEATURES)]),
        ("wide", floats, ["B", "T", len(MODES)]),
        ("reply_to", ints, ["B", "T"]),
        ("member", floats, ["B", "A", "T"]),
    ]
    outputs = [
        ("agent", ["B", "A"]),
        ("mode", ["B", len(MODES)]),
        ("pair", ["B", "A", len(MODES)]),
        ("step", ["B", "T"]),
        ("attention", ["B", "T", len(MODES)]),
    ]
    nodes = [
        helper.make_node("MatMul", ["member", "wide"], ["pair"]),
        helper.make_node("ReduceMax", ["pair"], ["agent"], axes=[2], keepdims=0),
        helper.make_node("ReduceMax", ["pair"], ["mode"], axes=[1], keepdims=0),
        helper.make_node("ReduceMean", ["features"], ["step"], axes=[2], keepdims=0),
        helper.make_node("Identity", ["wide"], ["attention"]),
    ]
    graph = helper.make_graph(
        nodes,
        "head",
        [helper.make_tensor_value_info(*each) for each in inputs],
        [helper.make_tensor_value_info(name, floats, shape) for name, shape in outputs],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), file)
    return file


def count_words(turns: Sequence[Sequence[int]], agents: Sequence[int], vocabulary: int) -> Words:
    """The documents of a bag from the token ids and the agent of each turn."""
    run = RunWords()
    for t, (ids, agent) in enumerate(zip(turns, agents, strict=True)):
        run.add(t, agent, count_turn(np.array(ids, dtype=np.int32), vocabulary))
    return run.documents


def make_lexicon(weight: float = 9.0) -> Lexicon:
    """Whoever says `wrong` fails in mode 5."""
    rows = make_tokenizer().get_vocab_size() + BIGRAM_ROWS
    table = np.zeros((rows, len(MODES)), dtype=np.float32)
    table[make_tokenizer().token_to_id("wrong"), 5] = weight
    return Lexicon(idf=np.ones(rows, dtype=np.float32), table=table, contrast=0.5)


def write_model(folder: Path, *, weight: float = 9.0) -> Path:
    """A whole exported model, tiny: whoever says `wrong` fails in mode 5."""

    def write_files(inside: Path) -> None:
        write_encoder(inside / ENCODER)
        write_head(inside / HEAD)
        make_tokenizer().save(str(inside / TOKENIZER))
        save_lexicon(make_lexicon(weight), inside / LEXICON)

    return write_artifact(
        folder,
        write_files,
        window=Window(head=12, tail=4),
        calibration=Calibration(pair_threshold=0.6, agent_threshold=0.6),
        notes={},
    )
