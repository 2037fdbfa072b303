from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import WIDTH, bagger, make_run, write_encoder, write_encoder_folder

from dcl.artifact import (
    CONFIG,
    ENCODER,
    LEXICON,
    MANIFEST,
    TOKENIZER,
    WEIGHTS,
    hash_file,
    open_artifact,
)
from dcl.attribution import Logits
from dcl.calibration import best_threshold
from dcl.errors import ArtifactError, ConfigError, TraceError
from dcl.learning import training
from dcl.learning.config import DataConfig, LossConfig, TrainConfig
from dcl.learning.data import Batch, Item, VectorCache, collate, make_item
from dcl.learning.inference import TorchScorer, load_model, load_trained, score_items
from dcl.learning.model import BagLogits, M, Model, ModelConfig, Network
from dcl.learning.module import AttributionModule, compute_loss
from dcl.learning.preparation import select_examples
from dcl.learning.training import main, train
from dcl.lexical import BIGRAM_ROWS, Lexicon
from dcl.runtime import Encoder
from dcl.splits import split_of
from dcl.taxonomy import MODES, ErrorMode
from dcl.trajectory import Example, Fault

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

TINY = ModelConfig(
    vector_width=WIDTH, width=32, layers=1, prototype_width=16, prototypes=2, archetypes=2, rank=4
)
SIGNS = {"skip": ErrorMode.FM_3_2, "again": ErrorMode.FM_2_1}
Step = Callable[[AttributionModule, Batch, int], torch.Tensor]


def make_example(i: int) -> Example:
    """A run in which one of two agents says the sign of a mode, or nobody does."""
    said = [("Solver", f"the sum is {i}"), ("Checker", f"{i} is the sum"), ("Solver", "the sum")]
    faults: tuple[Fault, ...] = ()
    if i % 4:
        sign, turn = ("skip", "again")[i % 2], i % 3
        agent, text = said[turn]
        said[turn] = (agent, f"{sign} {text} {sign}")
        faults = (Fault(agent, SIGNS[sign], turn),)
    return Example(make_run(*said, task=f"question {i}", id=str(i)), faults, origin="tiny")


def write_examples(file: Path, examples: list[Example]) -> Path:
    file.write_text("".join(json.dumps(example.to_dict()) + "\n" for example in examples))
    return file


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with examples and an encoder."""
    folder = tmp_path_factory.mktemp("ground")
    write_examples(folder / "runs.jsonl", [make_example(i) for i in range(24)])
    write_encoder_folder(folder / "encoder")
    return folder


def make_config(ground: Path, out: Path, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        data=DataConfig(
            train=(str(ground / "runs.jsonl"),),
            valid_share=0.25,
            test_share=0.15,
            cache=str(ground / "cache"),
        ),
        out=str(out),
        encoder=str(ground / "encoder"),
        model=TINY,
        epochs=2,
        batch_size=8,
        folds=2,
        threads=1,
    )
    return replace(config, **changes)


@pytest.fixture(scope="module")
def trained(ground: Path) -> Path:
    """A model trained for two epochs."""
    return train(make_config(ground, ground / "models" / "tiny"))


def test_training_writes_a_whole_model_and_clears_up(ground: Path, trained: Path) -> None:
    assert {file.name for file in trained.parent.iterdir()} == {"tiny"}
    expected = {CONFIG, MANIFEST, ENCODER, TOKENIZER, LEXICON, WEIGHTS}
    assert {file.name for file in trained.iterdir()} == expected
    artifact = open_artifact(trained)
    assert ModelConfig(**artifact.model) == TINY
    splits = [split_of(f"question {i}", valid=0.25, test=0.15) for i in range(24)]
    counts = {name: splits.count(name) for name in ("train", "valid", "test")}
    assert artifact.manifest["examples"] == counts
    assert set(artifact.manifest["data"]) == {"runs.jsonl"}
    assert set(artifact.manifest["scores"]["valid"]) == {"agent", "mode", "pair"}
    written = json.loads((trained / CONFIG).read_text())["training"]
    assert written["data"]["train"] == [str(ground / "runs.jsonl")]
    assert written["epochs"] == 2


def test_a_trained_model_attributes(trained: Path) -> None:
    attribute = load_trained(trained)
    run = make_example(1).trajectory
    got = attribute(run)
    assert got.agents == ("Solver", "Checker")
    assert got.step_probs.sum() == pytest.approx(1, abs=1e-5)
    assert len(got.faults(top_k=1)) == 1
    for array in (got.agent_probs, got.mode_probs, got.pair_probs, got.weights):
        assert np.isfinite(array).all()
    json.dumps(got.to_dict(), allow_nan=False)
    renamed = make_run(*((f"new {t.agent}", t.content) for t in run.turns), task=run.task)
    assert attribute(renamed).pair_probs == pytest.approx(got.pair_probs, abs=1e-6)


def test_the_same_seed_trains_the_same_model(ground: Path, trained: Path, tmp_path: Path) -> None:
    again = train(make_config(ground, tmp_path / "again"))
    one, two = load_model(open_artifact(trained)), load_model(open_artifact(again))
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, two.get_parameter(name)), name


class Watched:
    """Stands in for `training_step`: notes the epoch of each step, and dies where told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, dies_in: int = -1) -> None:
        self.epochs: list[int] = []
        self.bags: list[list[float]] = []
        step: Step = AttributionModule.training_step

        def watched(module: AttributionModule, batch: Batch, index: int) -> torch.Tensor:
            if module.current_epoch == dies_in:
                raise RuntimeError("killed")
            self.epochs.append(module.current_epoch)
            self.bags.append(batch.bags.vectors.sum(dim=(1, 2)).tolist())
            return step(module, batch, index)

        monkeypatch.setattr(AttributionModule, "training_step", watched)


def test_a_killed_run_goes_on_where_it_was(ground: Path, tmp_path: Path) -> None:
    config = make_config(ground, tmp_path / "model", epochs=3)
    with pytest.MonkeyPatch.context() as patch:
        Watched(patch, dies_in=1)
        with pytest.raises(RuntimeError, match="killed"):
            train(config)
    work = tmp_path / "model.work"
    assert (work / "member-0" / "last.ckpt").is_file()
    assert not (tmp_path / "model").exists()
    fitted = {file.name: file.stat().st_mtime_ns for file in work.glob("wide-*.npz")}
    assert len(fitted) == 3

    def describe(*_: object) -> dict[str, Any]:
        assert {f.name: f.stat().st_mtime_ns for f in work.glob("wide-*.npz")} == fitted
        return {}

    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch)
        patch.setattr(training, "describe_run", describe)
        train(config)
    assert sorted(set(watched.epochs)) == [1, 2]
    assert not work.exists()
    load_trained(tmp_path / "model")(make_example(1).trajectory)


def test_a_resumed_run_sees_the_batches_of_a_whole_one(ground: Path, tmp_path: Path) -> None:
    bags: list[list[list[float]]] = []
    for deaths in ((-1,), (1, -1)):
        bags.append([])
        for dies_in in deaths:
            with pytest.MonkeyPatch.context() as patch:
                watched = Watched(patch, dies_in=dies_in)
                config = make_config(ground, tmp_path / f"model-{len(deaths)}", batch_size=4)
                if dies_in < 0:
                    train(config)
                else:
                    with pytest.raises(RuntimeError, match="killed"):
                        train(config)
                bags[-1] += watched.bags
    assert bags[0] == bags[1]


def test_a_run_killed_after_its_last_epoch_trains_no_more(ground: Path, tmp_path: Path) -> None:
    config = make_config(ground, tmp_path / "model")

    def die(*_: object, **__: object) -> Any:
        raise RuntimeError("killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "fit_calibration", die)
        with pytest.raises(RuntimeError, match="killed"):
            train(config)
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch)
        train(config)
    assert watched.epochs == []
    open_artifact(tmp_path / "model")


def test_work_of_another_configuration_is_refused(ground: Path, tmp_path: Path) -> None:
    config = make_config(ground, tmp_path / "model")
    encoder = hash_file(Path(str(config.encoder)) / ENCODER)
    training.claim_workplace(tmp_path / "model", config, encoder)
    with pytest.raises(ConfigError, match="found another run's; delete the folder or choo"):
        train(replace(config, seed=2))
    assert training.claim_workplace(tmp_path / "model", config, encoder) == tmp_path / "model.work"


def test_a_folder_of_examples_that_has_changed_is_other_data(ground: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    (logs / "inner").mkdir(parents=True)
    for i in range(2):
        write_examples(logs / "inner" / f"{i}.jsonl", [make_example(i)])
    config = make_config(ground, tmp_path / "model")
    config = replace(config, data=replace(config.data, extra=(str(logs),)))
    claim = partial(training.claim_workplace, tmp_path / "model", config, "e" * 64)
    assert claim() == claim() == tmp_path / "model.work"
    plain = training.hash_data(replace(config.data, extra=()))
    assert training.hash_data(config.data).keys() == {*plain, "logs"}
    assert plain.items() <= training.hash_data(config.data).items()
    (logs / "inner" / "1.jsonl").rename(logs / "inner" / "2.jsonl")
    with pytest.raises(ConfigError, match="work of this configuration on this data"):
        claim()
    (logs / "inner" / "2.jsonl").rename(logs / "inner" / "1.jsonl")
    claim()
    write_examples(logs / "inner" / "1.jsonl", [make_example(2)])
    with pytest.raises(ConfigError, match="work of this configuration on this data"):
        claim()


def test_epochs_have_different_orders(ground: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch)
        train(make_config(ground, tmp_path / "model", batch_size=4))
    half = len(watched.bags) // 2
    first, second = watched.bags[:half], watched.bags[half:]
    assert sorted(chain(*first)) == pytest.approx(sorted(chain(*second)), abs=1e-4)
    assert first != second


def test_an_encoder_that_is_missing_is_refused(ground: Path, tmp_path: Path) -> None:
    config = make_config(ground, tmp_path / "model", encoder=str(tmp_path / "none"))
    with pytest.raises(ArtifactError, match="or a model folder, found none"):
        train(config)


def test_data_that_is_missing_is_refused(ground: Path, tmp_path: Path) -> None:
    data = DataConfig(train=(str(tmp_path / "none.jsonl"),), cache=str(tmp_path / "cache"))
    with pytest.raises((ConfigError, TraceError), match=r"none\.jsonl"):
        train(make_config(ground, tmp_path / "model", data=data))


def test_a_split_without_examples_is_refused(ground: Path, tmp_path: Path) -> None:
    config = make_config(ground, tmp_path / "model")
    data = replace(config.data, valid_share=0.0)
    with pytest.raises(
        ConfigError, match="data: expected examples with labelled modes for valid, fou"
    ):
        train(replace(config, data=data))


def test_held_out_files_and_unlabelled_runs_are_never_trained_on(tmp_path: Path) -> None:
    unlabelled = Example(make_run(("a", "x"), task="nobody said"))
    first = write_examples(tmp_path / "a.jsonl", [make_example(i) for i in range(12)])
    second = write_examples(
        tmp_path / "b.jsonl", [*(make_example(i) for i in range(100, 140)), unlabelled]
    )
    data = DataConfig(train=(str(first),), held_out=(str(second),), valid_share=0.3, test_share=0.3)
    chosen = [(split, example.trajectory.id) for split, example, _ in select_examples(data)]
    assert {split for split, name in chosen if int(name) >= 100} == {"valid", "test"}
    assert {name for _, name in chosen if int(name) < 100} == {str(i) for i in range(12)}
    limited = list(select_examples(replace(data, limit=5)))
    assert sum(int(example.trajectory.id) < 100 for _, example, _ in limited) == 5


def test_extra_files_are_marked_and_a_success_has_no_fault(tmp_path: Path) -> None:
    main = write_examples(tmp_path / "a.jsonl", [make_example(i) for i in range(4)])
    clean = [Example(make_run(("a", "x"), task=str(i), outcome="success")) for i in range(3)]
    extra = write_examples(tmp_path / "b.jsonl", clean)
    chosen = list(select_examples(DataConfig(train=(str(main),), extra=(str(extra),))))
    assert [is_extra for _, _, is_extra in chosen] == [False] * 4 + [True] * 3
    assert all(example.faults == () for _, example, is_extra in chosen if is_extra)


@pytest.mark.parametrize("name", ["epochs", "batch_size", "learning_rate", "wide_strength"])
def test_values_that_cannot_work_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected a number above 0, got 0"):
        make_config(Path(), Path("out"), **{name: 0})


def test_a_single_fold_is_refused() -> None:
    with pytest.raises(ConfigError, match="folds: expected at least 2, got 1"):
        make_config(Path(), Path("out"), folds=1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """What `main` would have trained."""
    configs: list[TrainConfig] = []

    def note(config: TrainConfig) -> Path:
        configs.append(config)
        return Path(config.out)

    monkeypatch.setattr(training, "train", note)
    return configs


YAML = """
data:
  train: [a.jsonl, b.jsonl]
  valid_share: 0.2
out: artifacts/x
model: {width: 64, use_wide: false}
loss: {sigma: 0}
epochs: 3
"""


def test_the_command_line_reads_yaml_and_options(tmp_path: Path, asked: list[TrainConfig]) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    assert main(["--config", str(tmp_path / "run.yaml"), "--seed", "7", "--model.layers=1"]) == 0
    assert asked == [
        TrainConfig(
            data=DataConfig(train=("a.jsonl", "b.jsonl"), valid_share=0.2),
            out="artifacts/x",
            model=ModelConfig(width=64, layers=1, use_wide=False),
            loss=LossConfig(sigma=0),
            epochs=3,
            seed=7,
        )
    ]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("surprise: 1", "surprise"),
        ("model: {widht: 64}", "widht"),
        ("epochs: many", "epochs"),
        ("loss: {sigma: [1]}", "sigma"),
    ],
)
def test_a_bad_key_or_value_is_named(
    tmp_path: Path, asked: list[TrainConfig], line: str, named: str
) -> None:
    key = line.split(":")[0]
    rest = "\n".join(row for row in YAML.splitlines() if not row.startswith(f"{key}:"))
    (tmp_path / "run.yaml").write_text(f"{rest}\n{line}\n")
    with pytest.raises(ConfigError, match=named):
        main(["--config", str(tmp_path / "run.yaml")])
    assert asked == []


def test_a_missing_option_and_an_unknown_one_are_named(asked: list[TrainConfig]) -> None:
    with pytest.raises(ConfigError, match="out"):
        main(["--data.train", "[a.jsonl]"])
    with pytest.raises(ConfigError, match="surprise"):
        main(["--data.train", "[a.jsonl]", "--out", "x", "--surprise", "1"])
    with pytest.raises(ConfigError, match="folds: expected at least 2, got 1"):
        main(["--data.train", "[a.jsonl]", "--out", "x", "--folds", "1"])
    assert asked == []


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> list[Item]:
    """Eight examples as the network eats them."""
    folder = tmp_path_factory.mktemp("items")
    cache = VectorCache(folder, Encoder(write_encoder(folder / ENCODER), remember=0), "e" * 64)
    examples = [make_example(i) for i in (1, 2, 3, 5, 6, 7, 9, 10)]
    return [make_item(e, bagger()(e.trajectory), cache, sigma=0.0) for e in examples]


def measure(model: Network, items: list[Item]) -> float:
    """Pair micro-F1 at the best threshold."""
    logits = score_items(model, items)
    scores = np.concatenate([one.pair.ravel() for one in logits])
    return best_threshold(scores, np.concatenate([item.targets.pair.ravel() for item in items]))[1]


def test_the_network_learns_eight_examples(items: list[Item]) -> None:
    torch.manual_seed(0)
    model, batch, loss = Network(replace(TINY, dropout=0.0)), collate(items), LossConfig()
    training.standardise(model, items)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    first = last = float("nan")
    for step in range(60):
        total, _ = compute_loss(model(*batch.bags), batch, model.error_bank, loss)
        optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        first, last = (total.item() if step == 0 else first), total.item()
    assert last < first / 3
    assert measure(model, items) == 1.0
    for one, item in zip(score_items(model, items), items, strict=True):
        assert one.step.argmax() == item.targets.step.argmax()


def test_losses_are_weighed_and_summed(items: list[Item]) -> None:
    torch.manual_seed(0)
    model, batch = Network(TINY).eval(), collate(items)
    logits: BagLogits = model(*batch.bags)
    config = LossConfig(agent=0.1, mode=0.2, contrastive=0.3, hierarchy=0.4, step=0.5)
    total, parts = compute_loss(logits, batch, model.error_bank, config)
    weights = {"pair": 1.0, "agent": 0.1, "mode": 0.2, "contrastive": 0.3, "hierarchy": 0.4}
    expected = sum((weights | {"step": 0.5})[name] * part.item() for name, part in parts.items())
    assert total.item() == pytest.approx(expected, rel=1e-5)


def test_where_modes_are_unknown_only_agents_and_steps_count(items: list[Item]) -> None:
    torch.manual_seed(0)
    model, batch = Network(TINY).eval(), collate(items)
    nobody = batch._replace(known=torch.zeros(len(items), dtype=torch.bool))
    _, parts = compute_loss(model(*batch.bags), nobody, model.error_bank, LossConfig())
    assert {name for name, part in parts.items() if part.item() == 0} >= {
        "pair",
        "mode",
        "contrastive",
    }
    assert parts["agent"].item() > 0
    assert parts["step"].item() > 0


def test_the_mode_level_is_not_asked_for_modes_of_agents_who_never_speak(items: list[Item]) -> None:
    torch.manual_seed(0)
    model, batch = Network(TINY).eval(), collate(items)
    logits: BagLogits = model(*batch.bags)
    silent = int((batch.mode[0] == 0).nonzero()[0])
    mode = batch.mode.clone()
    mode[0, silent] = 1.0
    wished = logits.mode.clone()
    wished[0, silent] = 50.0
    lost = batch._replace(mode=mode)
    before, after = (
        compute_loss(logits._replace(mode=mode), lost, model.error_bank, LossConfig())[1]["mode"]
        for mode in (logits.mode, wished)
    )
    assert before.item() == pytest.approx(after.item())
    assert before.item() > 0


def test_a_masked_channel_is_blank_for_a_whole_bag(items: list[Item]) -> None:
    torch.manual_seed(0)
    config = make_config(Path(), Path("out"), channel_dropout=1.0)
    bags = collate(items).bags._replace(wide=torch.ones(len(items), 3, M))
    masked = AttributionModule(config, 1)._mask_channels(bags)
    for b in range(len(items)):
        blank = [not getattr(masked, name)[b].any() for name in ("vectors", "features", "wide")]
        assert sum(blank) == 1
    none = AttributionModule(replace(config, channel_dropout=0.0), 1)._mask_channels(bags)
    assert all(x.equal(y) for x, y in zip(none, bags, strict=True))


def make_lexicon() -> Lexicon:
    rows = bagger().vocabulary + BIGRAM_ROWS
    rng = np.random.default_rng(0)
    table = rng.standard_normal((rows, M)).astype(np.float32)
    return Lexicon(idf=np.ones(rows, dtype=np.float32), table=table, contrast=0.5)


def close(one: Logits, two: Logits, tolerance: float) -> bool:
    return all(
        np.allclose(getattr(one, name), getattr(two, name), atol=tolerance, rtol=0)
        for name in one.__slots__
    )


def test_items_and_bags_are_scored_alike(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(TINY).eval()
    encoder = Encoder(write_encoder(tmp_path / ENCODER))
    cache, lexicon = VectorCache(tmp_path, encoder, "e" * 64), make_lexicon()
    runs = [make_run(("a", "the sum"), ("b", "wrong"), ("a", "")), make_run(("c", "skip"))]
    bags = [bagger()(run) for run in runs]
    items = [
        make_item(Example(r, ()), b, cache, sigma=0.0) for r, b in zip(runs, bags, strict=True)
    ]
    for item in items:
        item.wide = lexicon(item.words, len(item.agent_index))
    by_bag = TorchScorer(encoder, model, lexicon)(bags)
    for batch_size in (1, 32):
        by_item = score_items(model, items, batch_size=batch_size)
        # Cached vectors are rounded to half precision.
        assert all(close(x, y, 0.02) for x, y in zip(by_bag, by_item, strict=True))
    assert [len(one.agent) for one in by_bag] == [2, 1]
    assert by_bag[0].attention.shape == (3, len(MODES))


def test_a_model_that_is_missing_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="or a model folder, found none"):
        load_trained(tmp_path / "none")
