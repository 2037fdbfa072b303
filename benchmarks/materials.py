"""What other libraries need before they can be measured: made from the same encoder, once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from benchmarks.contenders import Setup
from dcl.artifact import ENCODER, TOKENIZER, open_encoder, write_artifact
from dcl.errors import ConfigError
from dcl.formats import read_examples, read_trajectories
from dcl.learning.turn_encoder import find_source, load_source
from export.encoder import FP32, draw_tokens, export_encoder
from export.qdq import draw_turns

_RUNS = 300


def make_encoders(setup: Setup, data: Sequence[Path]) -> None:
    """Make the encoders of `dcl` that are not there yet, in dynamic and in static int8.

    Args:
        setup: Where, and what from.
        data: Logs; some of their turns fix the scales of static int8.
    """
    if not setup.int8.exists():
        export_encoder(setup.source, setup.int8)
    if not setup.fused.exists():
        export_fused(Path(setup.source), setup.int8, setup.fused)
    if not setup.static.exists():
        runs = (run for path in data for run in islice(read_trajectories(path), _RUNS))
        export_encoder(setup.source, setup.static, turns=draw_turns(runs), keep_fp32=True)


def make_materials(setup: Setup, data: Sequence[Path]) -> dict[str, str]:
    """Make what is not there yet.

    Args:
        setup: Where, and what from.
        data: Logs; the floor learns from those that have labels.

    Returns:
        Why something could not be made, by the name of the folder or file that is missing.
    """
    make_encoders(setup, data)
    source = Path(setup.source)
    makers: dict[Path, Callable[[Path], None]] = {
        setup.plain: lambda folder: export_plain(source, folder, tokens=setup.tokens),
        setup.distilled: lambda folder: distil(source, folder),
        setup.floor: lambda file: fit_floor(data, file),
    }
    problems = {}
    for place, make in makers.items():
        if not place.exists():
            try:
                make(place)
            except ImportError as error:
                problems[place.name] = " ".join(str(error).split())
    return problems


def export_fused(source: Path, encoder: Path, folder: Path) -> None:
    """The encoder as public tools make it: fused for onnxruntime, weights in int8 by channel.

    Args:
        source: Folder of a sentence-transformers model.
        encoder: Folder of the same encoder, whose tokenizer and window are taken.
        folder: Where; it appears when whole.
    """
    import onnx_ir as ir
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    from export.graph import silence, to_onnx

    place = open_encoder(encoder)
    longest = place.window.head + place.window.tail + 2
    model = load_source(find_source(str(source)), longest=longest)
    ids = draw_tokens(model, 3, 20, seed=0)
    inputs = {name: (each, ("B", "L")) for name, each in (("ids", ids), ("mask", ids * 0 + 1))}
    program = to_onnx(model, inputs, ["vec"], limits={"L": model.limit})

    def write_files(part: Path) -> None:
        shutil.copy(encoder / TOKENIZER, part / TOKENIZER)
        with silence():
            optimize_for_ort(program.model)
            ir.save(program.model, part / FP32)
            quantize_dynamic(
                part / FP32, part / ENCODER, weight_type=QuantType.QInt8, per_channel=True
            )
        (part / FP32).unlink()

    write_artifact(folder, write_files, window=place.window, notes={})


def export_plain(source: Path, folder: Path, *, tokens: int) -> None:
    """The transformer alone as a float32 graph, as model hubs have it, and its tokenizer.

    Args:
        source: Folder of a sentence-transformers model.
        folder: Where; it appears when whole.
        tokens: Most tokens that libraries that read this folder take of a turn.
    """
    import torch
    from torch import Tensor, nn
    from transformers import AutoModel

    from export.graph import to_onnx

    class States(nn.Module):
        """The last hidden states; arguments are named as the inputs of such graphs are."""

        def __init__(self) -> None:
            super().__init__()
            self.m = AutoModel.from_pretrained(source, local_files_only=True)

        def forward(
            self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor
        ) -> Tensor:
            """Ids, mask and segments, each `(B, L)`, to `(B, L, E)`."""
            found: Tensor = self.m(
                input_ids=input_ids,
                attention_mask=attention_mask,
                token_type_ids=token_type_ids,
            ).last_hidden_state
            return found

    model = States().eval()
    example = torch.ones(2, 20, dtype=torch.int64)
    inputs = {
        name: (example, ("B", "L")) for name in ("input_ids", "attention_mask", "token_type_ids")
    }
    limit = model.m.config.max_position_embeddings
    program = to_onnx(model, inputs, ["last_hidden_state"], limits={"L": limit})
    with _whole(folder) as part:
        part.mkdir(parents=True)
        for file in source.glob("*.json"):
            shutil.copy(file, part / file.name)
        _limit_tokens(part / "tokenizer_config.json", tokens)
        program.save(str(part / "model.onnx"))


def distil(source: Path, folder: Path) -> None:
    """Static embeddings of the encoder's vocabulary, with the defaults of model2vec.

    Args:
        source: Folder of a sentence-transformers model.
        folder: Where; it appears when whole.
    """
    from model2vec.distill import distill

    with _whole(folder) as part:
        distill(str(source), device="cpu").save_pretrained(part)


def fit_floor(data: Iterable[Path], file: Path) -> None:
    """The tf-idf floor on some labelled runs: its speed does not depend on which.

    Args:
        data: Logs.
        file: Where; it appears when whole.

    Raises:
        ConfigError: If too few runs have labels.
    """
    from benchmarks.tfidf import TfIdf

    examples = (example for path in data for example in read_examples(path))
    labelled = list(islice((e for e in examples if e.faults), _RUNS))
    if len(labelled) < 10:
        raise ConfigError(f"--data: expected 10 labelled runs, found {len(labelled)}")
    half = len(labelled) // 2
    file.parent.mkdir(parents=True, exist_ok=True)
    TfIdf.fit(labelled[:half], labelled[half:], strengths=(8.0,)).save(file)


@contextmanager
def _whole(place: Path) -> Iterator[Path]:
    """A place to write to that takes its name when all is written."""
    part = place.with_name(f"{place.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    yield part
    part.rename(place)


def _limit_tokens(file: Path, tokens: int) -> None:
    """Have libraries that read this configuration cut turns."""
    config = json.loads(file.read_bytes()) if file.is_file() else {}
    file.write_text(json.dumps({**config, "model_max_length": tokens, "max_length": tokens}))
