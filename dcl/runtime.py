"""The scorer: one encoder call a turn, one cheap head call a bag.

Turns are encoded one at a time. On a CPU a batch is no faster, padding is wasted work, and int8
with scales taken from the batch would make a turn's vector depend on its neighbours; alone, a
turn has the same vector in every run, so whole-run and turn-by-turn results agree. Which engine
multiplies is chosen in `load`; the head always runs on onnxruntime.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dcl.adapter import Adapter, describe_turns, load_adapter
from dcl.artifact import (
    ADAPTER,
    ENCODER,
    HEAD,
    LEXICON,
    NATURAL,
    TOKENIZER,
    Artifact,
    EncoderSource,
    load_lexicon,
    open_artifact,
)
from dcl.attribution import Attributor, Floats, Logits
from dcl.bag import Bag, BagMaker
from dcl.engines import EngineName, choose_engine, open_engine, open_session, run_session
from dcl.errors import ArtifactError, ConfigError
from dcl.features import FEATURES, describe_vectors
from dcl.lexical import BIGRAM_ROWS, Lexicon
from dcl.references import mark_path
from dcl.shipped import find_model
from dcl.taxonomy import MODES

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

OUTPUTS = ("agent", "mode", "pair", "step", "attention")
"""Outputs of `head.onnx`, in order."""


class Encoder:
    """Token windows to turn vectors; safe to share between threads.

    Attributes:
        width: Size of a turn vector.
        digest: Equal for encoders that give equal vectors.

    Args:
        file: The ONNX graph.
        threads: Turns encoded side by side; > 0.
        remember: Vectors kept by content, least recently used first out; 0 keeps none.
        engine: What runs the graph.

    Raises:
        ArtifactError: If the graph cannot be loaded, or is no encoder.
        ConfigError: If the engine is unknown or not installed.
    """

    def __init__(
        self,
        file: Path,
        *,
        threads: int = 1,
        remember: int = 4096,
        engine: EngineName = "onnxruntime",
    ) -> None:
        self._engine = open_engine(engine, file, threads=threads)
        self.width = self._engine.width
        self.digest = self._engine.digest
        self.threads = threads
        self._remember = remember
        self._known: OrderedDict[bytes, Floats] = OrderedDict()
        self._lock = Lock()

    def __call__(self, windows: Sequence[NDArray[np.int32]]) -> Floats:
        """Encode turns.

        Args:
            windows: Token ids of each turn, each `(L,)` int32 with special tokens.

        Returns:
            `(N, E)` float32, unit norm, in the same order.
        """
        keys = [window.tobytes() for window in windows]
        with self._lock:
            found = {key: self._known[key] for key in keys if key in self._known}
        missing = {
            key: window for key, window in zip(keys, windows, strict=True) if key not in found
        }
        found |= zip(missing, self._encode_all(list(missing.values())), strict=True)
        with self._lock:
            for key in keys:
                self._known[key] = found[key]
                self._known.move_to_end(key)
            while len(self._known) > self._remember:
                self._known.popitem(last=False)
        return np.stack([found[key] for key in keys])

    def _encode_all(self, windows: Sequence[NDArray[np.int32]]) -> list[Floats]:
        """Encode turns side by side; engines let go of the interpreter while they work."""
        if self.threads == 1 or len(windows) < 2:
            return [self._encode(window) for window in windows]
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(self._encode, windows))

    def _encode(self, window: NDArray[np.int32]) -> Floats:
        """Vector of one turn, `(E,)`."""
        vector: Floats = self._engine(window[None].astype(np.int64))[0]
        return vector


class OnnxScorer:
    """Scores bags with two graphs and the lexicon.

    Args:
        encoder: Turn encoder.
        head: Graph of the attribution network.
        lexicon: Wide half.
        adapters: Applied one after the other: the reading of natural failures, then what `dcl fit`
            learned; none changes nothing.
    """

    def __init__(
        self,
        encoder: Encoder,
        head: InferenceSession,
        lexicon: Lexicon,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self.encoder = encoder
        self.head = head
        self.lexicon = lexicon
        self.adapters = tuple(adapters)

    @property
    def heed(self) -> float:
        """How much of what the network says of modes and their evidence is left, 0 to 1."""
        return math.prod(adapter.heed for adapter in self.adapters)

    def __call__(self, bags: Sequence[Bag]) -> list[Logits]:
        """Score bags; turns of all of them are encoded together, heads run one by one."""
        windows = [window for bag in bags for window in (*bag.windows, bag.task)]
        vectors = self.encoder(windows)
        scores, start = [], 0
        for bag in bags:
            stop = start + len(bag.windows)
            scores.append(self.score(bag, vectors[start:stop], vectors[stop]))
            start = stop + 1
        return scores

    def score(self, bag: Bag, vectors: Floats, task: Floats) -> Logits:
        """Score one bag whose turns were encoded before: one head call, and the adapters.

        Args:
            bag: The bag.
            vectors: `(T, E)` float32, what `encoder` gave for its windows.
            task: `(E,)` float32, what `encoder` gave for its task.
        """
        logits, inputs = self._run_head(bag, vectors, task)
        if not self.adapters:
            return logits
        return self._adapt(logits, _describe(logits, inputs, bag), bag)

    def observe(
        self, bag: Bag, vectors: Floats, task: Floats
    ) -> tuple[Logits, NDArray[np.float64]]:
        """What `score` says, and the columns that an adapter reads.

        Args:
            bag: The bag.
            vectors: As in `score`.
            task: As in `score`.
        """
        logits, inputs = self._run_head(bag, vectors, task)
        columns = _describe(logits, inputs, bag)
        return self._adapt(logits, columns, bag), columns

    def _adapt(self, logits: Logits, columns: NDArray[np.float64], bag: Bag) -> Logits:
        """Logits after every adapter; columns are always those of the network itself."""
        for adapter in self.adapters:
            logits = adapter(logits, columns, bag.agent_index, bag.acting)
        return logits

    def _run_head(
        self, bag: Bag, vectors: Floats, task: Floats
    ) -> tuple[Logits, dict[str, NDArray[Any]]]:
        """Logits of the network, and what it was fed, without the batch axis."""
        inputs = dict(head_inputs(bag, vectors, task, self.lexicon))
        feed = {name: array[None] for name, array in inputs.items()}
        return Logits(*(output[0] for output in run_session(self.head, OUTPUTS, feed))), inputs


def _describe(logits: Logits, inputs: dict[str, NDArray[Any]], bag: Bag) -> NDArray[np.float64]:
    """Columns that an adapter reads."""
    return describe_turns(
        logits, inputs["features"], inputs["wide"], bag.agent_index, mark_path(bag)
    )


def head_inputs(
    bag: Bag, vectors: Floats, task: Floats, lexicon: Lexicon
) -> list[tuple[str, NDArray[Any]]]:
    """Named inputs of the attribution network for one bag, without the batch axis.

    Args:
        bag: The bag.
        vectors: `(T, E)` float32, its turn vectors.
        task: `(E,)` float32, vector of its task.
        lexicon: Wide half.

    Returns:
        Pairs of name and array in the order of `dcl.learning.model.BagTensors`.
    """
    deviation = describe_vectors(vectors, task, bag.agent_index)
    member = np.arange(len(bag.agents))[:, None] == bag.agent_index  # (A, T)
    return [
        ("vectors", vectors),
        ("task", task),
        ("features", np.concatenate([bag.features, deviation], axis=1)),
        ("wide", lexicon(bag.words, len(vectors))),
        ("reply_to", bag.reply_to),
        ("member", member.astype(np.float32)),
    ]


def load(
    path: str | Path | None = None,
    *,
    injected: bool = False,
    threads: int | None = None,
    engine: EngineName | None = None,
    remember: int = 4096,
) -> Attributor:
    """Load a model and everything it needs; torch is not among it.

    Args:
        path: A name of `dcl.shipped.SHIPPED` or the folder of an exported model; None means `base`.
        injected: Read logs as the network itself does, whose agents and modes were taught by faults
            that were injected by prompt (AEGIS). Otherwise the reading of natural failures and
            what `dcl fit` learned are applied, where the model has them.
        threads: Turns encoded side by side; None means every core this process may use.
        engine: What encodes turns; None takes the quickest that is there, see
            `dcl.engines.choose_engine`.
        remember: Turn vectors that are kept by content, 2 kB each; 0 keeps none.

    Returns:
        An attributor that may be shared between threads.

    Raises:
        ArtifactError: If the folder is missing, damaged, or not exported yet, or if its parts do
            not fit one another.
        ConfigError: If `threads` is not positive, `remember` is negative, or the engine is unknown
            or not installed.
    """
    if threads is not None and threads < 1:
        raise ConfigError(f"threads: expected at least 1, got {threads}")
    if remember < 0:
        raise ConfigError(f"remember: expected at least 0, got {remember}")
    artifact = open_artifact(find_model(path) if isinstance(path, str) else path)
    encoder = Encoder(
        artifact.path / ENCODER,
        threads=threads or count_cores(),
        engine=choose_engine(artifact.manifest, engine),
        remember=remember,
    )
    head = open_session(artifact.path / HEAD)
    _check_head(artifact.path / HEAD, head, encoder.width)
    bagger, lexicon = load_bagger(artifact), load_lexicon(artifact.path / LEXICON)
    if len(lexicon.idf) != bagger.vocabulary + BIGRAM_ROWS:
        raise ArtifactError(
            f"{artifact.path / LEXICON}: expected {bagger.vocabulary + BIGRAM_ROWS} rows for the "
            f"vocabulary of {TOKENIZER}, got {len(lexicon.idf)}; export the model again"
        )
    if injected:
        return Attributor(bagger, OnnxScorer(encoder, head, lexicon), artifact.calibration)
    adapters = [
        load_adapter(artifact.path / name)
        for name in (NATURAL, ADAPTER)
        if name in artifact.manifest["files"]
    ]
    scorer = OnnxScorer(encoder, head, lexicon, adapters)
    return Attributor(bagger, scorer, artifact.natural or artifact.calibration)


def load_bagger(artifact: Artifact | EncoderSource) -> BagMaker:
    """The bag maker of a model.

    Raises:
        ArtifactError: If the tokenizer cannot be read, or lacks the marks of start and end.
    """
    try:
        tokenizer = Tokenizer.from_file(str(artifact.path / TOKENIZER))
    except Exception as error:  # tokenizers raises bare Exception
        raise ArtifactError(f"{artifact.path / TOKENIZER}: cannot be read: {error}") from None
    if None in (tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")):
        raise ArtifactError(
            f"{artifact.path / TOKENIZER}: expected the tokens [CLS] and [SEP]; "
            "export the model again"
        )
    return BagMaker(tokenizer, head=artifact.window.head, tail=artifact.window.tail)


def _check_head(file: Path, head: InferenceSession, width: int) -> None:
    """Check that a graph is a head for vectors of this width.

    Raises:
        ArtifactError: If its inputs or outputs are others.
    """
    widths = {"vectors": width, "task": width, "features": len(FEATURES), "wide": len(MODES)}
    inputs = {node.name: node.shape[-1] for node in head.get_inputs()}
    outputs = {node.name for node in head.get_outputs()}
    if inputs.keys() != {*widths, "reply_to", "member"} or not outputs.issuperset(OUTPUTS):
        raise ArtifactError(
            f"{file}: expected the head of an attribution model, got a graph from "
            f"{', '.join(inputs)} to {', '.join(sorted(outputs))}; export the model again"
        )
    for name, expected in widths.items():
        if inputs[name] != expected:
            raise ArtifactError(
                f"{file}: {name}: expected a width of {expected}, got {inputs[name]}; "
                "encoder, head and this version of dcl do not belong together"
            )


def count_cores() -> int:
    """Cores that this process is bound to; a quota of CPU time, as containers have, is not seen."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every platform
        return os.cpu_count() or 1
