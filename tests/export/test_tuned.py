from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny import make_run
from tiny_bert import BERT_WIDTH, write_transformer

from dcl.artifact import ENCODER, open_artifact, open_encoder, read_manifest
from dcl.learning.config import DataConfig, TrainConfig, TuneConfig
from dcl.learning.inference import load_trained
from dcl.learning.model import ModelConfig
from dcl.learning.training import train
from dcl.learning.tuning import tune
from dcl.runtime import Encoder, load_bagger
from dcl.taxonomy import ErrorMode
from dcl.trajectory import Example, Fault
from export.encoder import FP32, export_encoder

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

MODEL = ModelConfig(
    vector_width=BERT_WIDTH, width=16, layers=1, prototype_width=8, prototypes=2, rank=4
)


def make_example(i: int) -> Example:
    run = make_run(("a", f"the sum is {i}"), ("b", "skip" if i % 2 else "again"), task=f"{i}")
    return Example(run, (Fault("b", ErrorMode.FM_3_2, 1),) if i % 2 else (), origin="tiny")


def test_a_tuned_encoder_is_exported_and_trained_on(tmp_path: Path) -> None:
    rows = (json.dumps(make_example(i).to_dict()) for i in range(24))
    (tmp_path / "runs.jsonl").write_text("\n".join(rows))
    data = DataConfig(
        train=(str(tmp_path / "runs.jsonl"),),
        valid_share=0.25,
        test_share=0.15,
        cache=str(tmp_path / "cache"),
    )
    tuned = tune(
        TuneConfig(
            data=data,
            out=str(tmp_path / "tuned"),
            encoder=str(write_transformer(tmp_path / "bert")),
            head=12,
            tail=4,
            layers=1,
            activations=str(tmp_path / "activations"),
            model=MODEL,
            epochs=1,
            encoder_rate=1e-3,
            threads=1,
            folds=2,
        )
    )
    exported = export_encoder(str(tuned), tmp_path / "encoder", head=12, tail=4, keep_fp32=True)
    assert read_manifest(exported)["source"] == "tuned"
    source = open_encoder(exported)
    bagger = load_bagger(source)
    windows = [bagger.window(ids) for ids in bagger.tokenize(["the sum is wrong", "again skip"])]
    vectors = [Encoder(exported / name)(windows) for name in (FP32, ENCODER)]
    assert (np.sum(vectors[0] * vectors[1], axis=1) > 0.95).all()
    trained = train(
        TrainConfig(
            data=data,
            out=str(tmp_path / "model"),
            encoder=str(exported),
            model=MODEL,
            epochs=1,
            threads=1,
            folds=2,
        )
    )
    assert open_artifact(trained).window == source.window
    load_trained(trained)(make_example(1).trajectory)
