"""What other libraries need before they can be measured: made from the same encoder, once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from benchmarks.contenders import CONTENDERS, Setup
from dcl.artifact import ENCODER, TOKENIZER, is_free, new_folder, open_encoder, write_artifact
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

    Raises:
        ConfigError: If the logs hold too few turns.
    """
    for name in ("int8", "static"):
        make_material(setup, name, data)


def make_materials(setup: Setup, data: Sequence[Path], contenders: Iterable[str]) -> dict[str, str]:
    """Make what contenders need and is not there yet.

    Args:
        setup: Where, and what from.
        data: Logs; the floor learns from those that have labels.
        contenders: Who takes part.

    Returns:
        By contender, why what it needs cannot be made.
    """
    needed = {name: CONTENDERS[name].needs for name in contenders if CONTENDERS[name].needs}
    problems = {need: _try(setup, need, data) for need in dict.fromkeys(needed.values())}
    return {name: problems[need] for name, need in needed.items() if problems[need]}


def _try(setup: Setup, name: str, data: Sequence[Path]) -> str:
    """Make one thing; why it cannot be made, empty if it is there."""
    try:
        make_material(setup, name, data)
    except (ImportError, ConfigError) as error:
        return " ".join(str(error).split())
    return ""


def make_material(setup: Setup, name: str, data: Sequence[Path]) -> None:
    """Make one thing unless it is there.

    Args:
        setup: Where, and what from.
        name: Attribute of `setup` that is its place.
        data: Logs.

    Raises:
        ConfigError: If the logs hold too little.
        ImportError: If a library is not installed.
    """
    source, place = Path(setup.source), Path(getattr(setup, name))
    if place.exists():
        return
    if name == "int8":
        export_encoder(setup.source, place)
    elif name == "fused":
        make_material(setup, "int8", data)
        export_fused(source, setup.int8, place)
    elif name == "static":
        runs = (run for path in data for run in islice(read_trajectories(path), _RUNS))
        export_encoder(setup.source, place, turns=draw_turns(runs), keep_fp32=True)
    elif name == "plain":
        export_plain(source, place, tokens=setup.tokens)
    elif name == "distilled":
        distil(source, place)
    else:
        fit_floor(data, place)


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
    with new_folder(folder, may_replace=is_free) as part:
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

    with new_folder(folder, may_replace=is_free) as part:
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


def _limit_tokens(file: Path, tokens: int) -> None:
    """Have libraries that read this configuration cut turns."""
    config = json.loads(file.read_bytes()) if file.is_file() else {}
    file.write_text(json.dumps({**config, "model_max_length": tokens, "max_length": tokens}))
