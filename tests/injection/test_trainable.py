from __future__ import annotations

from pathlib import Path

import pytest
from tiny import WIDTH, write_encoder_folder

from dcl.formats import read_examples
from dcl.learning.config import DataConfig, TrainConfig
from dcl.learning.inference import load_trained
from dcl.learning.model import ModelConfig
from dcl.learning.training import train
from dcl.targets import make_targets
from injection.plans import PlanConfig
from injection.records import RECORDS
from injection.run import RunConfig, collect

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("records")
    collect(
        RunConfig(
            out=str(out),
            systems=("llm_debate", "macnet_chain"),
            tasks_per_file=4,
            plans=PlanConfig(per_task=4),
            workers=1,
        )
    )
    return out / RECORDS


def test_every_label_of_a_record_is_a_target(records: Path) -> None:
    examples = list(read_examples(records))
    assert any(example.faults for example in examples)
    assert any(example.faults == () for example in examples)
    for example in examples:
        targets = make_targets(example, 1.0)
        assert targets.known
        assert targets.lost_pairs == 0
        assert targets.pair.sum() == len({(f.agent, f.mode) for f in example.faults or ()})
        assert targets.agent.sum() == len({f.agent for f in example.faults or ()})
        assert (targets.step.sum() > 0) == bool(example.faults)
        assert example.clean is not None


def test_records_train_a_model(records: Path, tmp_path: Path) -> None:
    out = train(
        TrainConfig(
            data=DataConfig(
                train=(str(records),), valid_share=0.3, test_share=0.1, cache=str(tmp_path / "v")
            ),
            out=str(tmp_path / "out"),
            encoder=str(write_encoder_folder(tmp_path / "encoder")),
            model=ModelConfig(
                vector_width=WIDTH,
                width=32,
                layers=1,
                prototype_width=16,
                prototypes=2,
                archetypes=2,
                rank=4,
            ),
            epochs=1,
            folds=2,
        )
    )
    attributor = load_trained(out)
    example = next(e for e in read_examples(records) if e.faults)
    assert attributor(example.trajectory).agents == example.trajectory.agents
