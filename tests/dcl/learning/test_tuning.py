from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.progress import Progress
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from tiny import make_run
from tiny_bert import BERT_WIDTH, write_transformer
from torch import Tensor
from typer.testing import CliRunner

from dcl import cli
from dcl.errors import ConfigError
from dcl.features import DEVIATION_FEATURES
from dcl.learning import tuning
from dcl.learning.activations import Read, TorchEncoder
from dcl.learning.config import DataConfig, LossConfig, TuneConfig, read_tune_config
from dcl.learning.data import Item, collate
from dcl.learning.model import ModelConfig
from dcl.learning.split_encoder import SplitEncoder
from dcl.learning.token_batches import TokenBatches, collate_tokens, count_tokens, put_vectors
from dcl.learning.training import standardise
from dcl.learning.tuning import RECORD, TuningModule, load_encoder, main, prepare_tokens, tune
from dcl.learning.turn_encoder import find_source
from dcl.splits import Split
from dcl.taxonomy import ErrorMode
from dcl.trajectory import Example, Fault

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

TINY = ModelConfig(
    vector_width=BERT_WIDTH, width=16, layers=1, prototype_width=8, prototypes=2, rank=4
)
TEXT_ALONE = replace(TINY, layers=0, dropout=0.0, use_wide=False, use_features=False)


def make_example(i: int, *, twin: bool = False) -> Example:
    """A run in which one of two agents says two words in the wrong order, or nobody does.

    Nothing else tells the runs apart, so what a vector makes of the order is all there is.
    """
    said = [("Solver", "the sum"), ("Checker", "skip again"), ("Solver", "skip again")]
    about: Any = {"id": str(i), "metadata": {"question_hash": str(i)}}
    run = make_run(*said, **about)
    if i % 4 == 0:
        return Example(run, (), origin="tiny")
    turn = 1 + i % 2
    agent = said[turn][0]
    wrong = [*said[:turn], (agent, "again skip"), *said[turn + 1 :]]
    fault = Fault(agent, (ErrorMode.FM_3_2, ErrorMode.FM_2_1)[i % 2], turn)
    return Example(make_run(*wrong, **about), (fault,), origin="tiny", clean=run if twin else None)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with examples and a transformer."""
    folder = tmp_path_factory.mktemp("ground")
    for name, twin in (("runs", False), ("twins", True)):
        rows = [json.dumps(make_example(i, twin=twin).to_dict()) for i in range(24)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    write_transformer(folder / "bert", layers=3)
    return folder


def make_config(ground: Path, out: Path, **changes: Any) -> TuneConfig:
    config = TuneConfig(
        data=DataConfig(
            train=(str(ground / "runs.jsonl"),),
            valid_share=0.25,
            test_share=0.15,
            cache=str(ground / "cache"),
        ),
        out=str(out),
        encoder=str(ground / "bert"),
        head=12,
        tail=4,
        layers=2,
        activations=str(ground / "activations"),
        model=TINY,
        epochs=3,
        batch_size=4,
        encoder_rate=1e-3,
        average=0.9,
        folds=2,
        threads=1,
    )
    return replace(config, **changes)


class Prepared:
    """What training starts from."""

    def __init__(self, config: TuneConfig, work: Path) -> None:
        work.mkdir(parents=True, exist_ok=True)
        found = find_source(config.encoder)
        digest = tuning.digest_of(found)
        self.config = config
        self.encoder: SplitEncoder = load_encoder(config, found)
        self.items: dict[Split, list[Item]]
        self.read: Read
        self.items, self.read, self.intent = prepare_tokens(
            config, found, self.encoder, digest, work
        )

    def module(self) -> TuningModule:
        torch.manual_seed(0)
        module = TuningModule(self.config, 30, self.encoder)
        standardise(module.model, self.items["train"])
        return module

    def part(self, count: int = 8) -> Any:
        (part,) = collate_tokens(self.items["train"][:count], self.read, 10**6)
        return part


@pytest.fixture
def prepared(ground: Path, tmp_path: Path) -> Prepared:
    return Prepared(make_config(ground, tmp_path / "out"), tmp_path / "work")


@pytest.fixture(scope="module")
def tuned(ground: Path) -> Path:
    return tune(make_config(ground, ground / "models" / "tuned"))


def test_a_shallower_encoder_is_the_lower_layers_of_its_source(
    ground: Path, tmp_path: Path
) -> None:
    config = make_config(ground, tmp_path / "out", depth=2, layers=1)
    encoder = load_encoder(config, find_source(config.encoder))
    whole = load_encoder(replace(config, depth=0, layers=3), find_source(config.encoder))
    assert (encoder.first, len(encoder.encoder.m.encoder.layer)) == (1, 2)
    for kept, own in zip(encoder.encoder.m.encoder.layer, whole.upper[:2], strict=True):
        torch.testing.assert_close(kept.state_dict(), own.state_dict())
    found = find_source(config.encoder)
    assert len({tuning.digest_of(found, depth) for depth in (0, 1, 2)}) == 3


def test_more_layers_than_there_are_cannot_be_kept(ground: Path, tmp_path: Path) -> None:
    config = make_config(ground, tmp_path / "out", depth=4)
    with pytest.raises(ConfigError, match="depth: expected at most 3, got 4"):
        load_encoder(config, find_source(config.encoder))


def test_a_warm_up_leaves_the_encoder_alone_and_is_scored_first(
    ground: Path, tmp_path: Path
) -> None:
    config = make_config(ground, tmp_path / "out", depth=2, layers=1, warm_up=2, epochs=1)
    record = json.loads((tune(config) / RECORD).read_text())
    assert [row["epoch"] for row in record["epochs"]] == [0, 1]
    still = replace(config, out=str(tmp_path / "still"), encoder_rate=1e-12, learning_rate=1e-12)
    warm = json.loads((tune(still) / RECORD).read_text())["epochs"]
    assert warm[1]["valid_pair_f1"] == pytest.approx(warm[0]["valid_pair_f1"])


def test_tuning_writes_an_encoder_and_clears_up(ground: Path, tuned: Path) -> None:
    assert {file.name for file in tuned.parent.iterdir()} == {"tuned"}
    record = json.loads((tuned / RECORD).read_text())
    assert [row["epoch"] for row in record["epochs"]] == [1, 2, 3]
    assert all(0 <= row["valid_pair_f1"] <= 1 for row in record["epochs"])
    assert set(record["scores"]["valid"]) == {"agent", "mode", "pair"}
    assert record["source"] == "bert"
    assert record["config"]["layers"] == 2
    texts = ["the sum is wrong", "skip again", ""]
    old, new = (
        SentenceTransformer(str(folder), device="cpu", local_files_only=True).encode(texts)
        for folder in (ground / "bert", tuned)
    )
    assert new.shape == old.shape
    assert not np.allclose(old, new, atol=1e-3)
    assert (tuned / "tokenizer.json").read_bytes() == (
        ground / "bert" / "tokenizer.json"
    ).read_bytes()
    assert find_source(str(tuned)).weights != find_source(str(ground / "bert")).weights


def test_frozen_layers_do_not_move_and_the_others_do(ground: Path, tuned: Path) -> None:
    old, new = (load_file(folder / "model.safetensors") for folder in (ground / "bert", tuned))
    assert old.keys() == new.keys()
    for name, weights in old.items():
        moves = "layer.1." in name or "layer.2." in name
        assert torch.equal(weights, new[name]) != moves, name


def learn(prepared: Prepared, *, steps: int) -> float:
    """Loss on eight examples after some steps without a schedule."""
    module = prepared.module()
    optimizer = torch.optim.AdamW(module.group_parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module.measure(module.embed(prepared.part()))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return float(loss.detach())


def test_a_trained_encoder_learns_better_than_a_frozen_one(ground: Path, tmp_path: Path) -> None:
    config = make_config(
        ground,
        tmp_path / "out",
        model=replace(TEXT_ALONE, centre_text=False),
        loss=LossConfig(contrastive=0.0, hierarchy=0.0, step=0.0),
        channel_dropout=0.0,
        learning_rate=1e-2,
    )
    losses = [
        learn(Prepared(replace(config, encoder_rate=rate), tmp_path / "work"), steps=50)
        for rate in (1e-2, 1e-12)
    ]
    assert losses[0] < 0.6 * losses[1]


def test_rates_fall_with_depth_and_frozen_parts_have_none(prepared: Prepared) -> None:
    module = prepared.module()
    rates = {id(p): g["lr"] for g in module.group_parameters() for p in g["params"]}
    names = {id(p): name for name, p in module.named_parameters()}
    assert len(rates) == sum(p.requires_grad for p in module.parameters())
    top, decay = prepared.config.encoder_rate, prepared.config.layer_decay
    expected = {"upper.1.": top, "upper.0.": top * decay}
    for key, rate in rates.items():
        wanted = expected.get(names[key][: len("upper.0.")], prepared.config.learning_rate)
        assert rate == pytest.approx(wanted), names[key]
    assert {id(p) for p in prepared.encoder.parameters() if p.requires_grad} <= rates.keys()
    assert list(module.upper) == list(prepared.encoder.upper)
    decayed = {id(p): g["weight_decay"] > 0 for g in module.group_parameters() for p in g["params"]}
    assert all(decayed[id(p)] == (p.ndim >= 2) for p in module.parameters() if p.requires_grad)


def test_kept_activations_give_the_loss_and_gradient_of_none(
    ground: Path, tmp_path: Path, prepared: Prepared
) -> None:
    plain = Prepared(replace(prepared.config, activations=None), tmp_path / "other")
    results = []
    for one in (prepared, plain):
        module = one.module()
        torch.manual_seed(1)
        loss = module.measure(module.embed(one.part()))
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [p.grad.ravel() for p in one.encoder.parameters() if p.grad is not None]
        results.append((loss.item(), torch.cat(grads)))
    assert prepared.part().groups[0][0].dtype == torch.float16
    assert plain.part().groups[0][0].dtype == torch.int64
    assert results[0][0] == pytest.approx(results[1][0], abs=2e-3)
    assert torch.cosine_similarity(results[0][1], results[1][1], dim=0) > 0.999


def test_a_batch_in_parts_has_every_bag_and_few_tokens(prepared: Prepared) -> None:
    items = prepared.items["train"][:7]
    most = 2 * count_tokens(items[0]) + 1
    parts = collate_tokens(items, prepared.read, most)
    assert len(parts) > 2
    sizes = [len(part.batch.known) for part in parts]
    assert sum(sizes) == 7
    whole = collate(items)
    assert torch.equal(torch.cat([part.batch.mode for part in parts]), whole.mode)
    for part in parts:
        tokens = sum(int(mask.sum()) for _, mask in part.groups)
        assert len(part.batch.known) == 1 or tokens <= most
    one_each = collate_tokens(items, prepared.read, 1)
    assert [len(part.batch.known) for part in one_each] == [1] * 7


def test_vectors_and_deviation_of_an_untrained_encoder_are_those_of_the_items(
    prepared: Prepared,
) -> None:
    part, module = prepared.part(), prepared.module()
    with torch.no_grad():
        got = module.embed(part).bags
    want = part.batch.bags
    assert torch.allclose(got.vectors, want.vectors, atol=5e-3)
    assert torch.allclose(got.task, want.task, atol=5e-3)
    assert torch.allclose(got.features, want.features, atol=2e-2)
    assert got.features.shape == want.features.shape


def test_deviation_follows_the_vectors(prepared: Prepared) -> None:
    part = prepared.part(2)
    count = int(part.places.turns.max().item()) + int(part.places.task.max().item()) + 2
    vectors = torch.nn.functional.normalize(torch.randn(count, BERT_WIDTH), dim=-1)
    bags = put_vectors(part.batch.bags, vectors.requires_grad_(), part.places)
    assert bags.vectors.requires_grad
    assert not bags.features.requires_grad
    kept = -len(DEVIATION_FEATURES)
    assert torch.equal(bags.features[..., :kept], part.batch.bags.features[..., :kept])
    to_task = kept + DEVIATION_FEATURES.index("to_task")
    cosine = torch.einsum("bte,be->bt", bags.vectors, bags.task)
    assert torch.allclose(bags.features[..., to_task], cosine, atol=1e-5)


def test_clean_runs_are_embedded_too(ground: Path, tmp_path: Path) -> None:
    config = make_config(ground, tmp_path / "out", loss=LossConfig(use_twins=True))
    data = replace(config.data, train=(str(ground / "twins.jsonl"),))
    prepared = Prepared(replace(config, data=data), tmp_path / "work")
    part, module = prepared.part(), prepared.module()
    got = module.embed(part)
    assert got.twins is not None
    assert part.batch.twins is not None
    assert got.twins.vectors.requires_grad
    assert torch.allclose(got.twins.vectors, part.batch.twins.vectors, atol=5e-3)
    assert torch.isfinite(module.measure(got))


Step = Callable[[TuningModule, Any, int], Tensor]


class Watched:
    """Notes what each step is given; dies before the step, or in the validation, it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, dies_at: float = -1) -> None:
        self.steps: list[tuple[int, float]] = []
        step: Step = TuningModule.training_step
        validate: Any = TuningModule.validation_step

        def watched_too(module: TuningModule, parts: Any, index: int) -> Any:
            if module.global_step + 0.5 == dies_at:
                raise RuntimeError("killed")
            return validate(module, parts, index)

        monkeypatch.setattr(TuningModule, "validation_step", watched_too)

        def watched(module: TuningModule, parts: Any, index: int) -> Tensor:
            if module.global_step == dies_at:
                raise RuntimeError("killed")
            seen = sum(float(part.batch.bags.vectors.sum()) for part in parts)
            self.steps.append((module.global_step, seen))
            return step(module, parts, index)

        monkeypatch.setattr(TuningModule, "training_step", watched)


def run(
    config: TuneConfig, out: Path, *, dies_at: float = -1
) -> tuple[list[tuple[int, float]], dict[str, Tensor], list[dict[str, float]]]:
    """Steps, weights and scores of a run, which is killed and started again where asked for."""
    config = replace(config, out=str(out))
    steps: list[tuple[int, float]] = []
    ended: list[TuningModule] = []
    fit = tuning.fit_encoder

    def noted(*args: Any, **kwargs: Any) -> TuningModule:
        ended.append(fit(*args, **kwargs, quiet=True))
        return ended[0]

    for dies in (dies_at, -1) if dies_at >= 0 else (-1,):
        with pytest.MonkeyPatch.context() as patch:
            watched = Watched(patch, dies_at=dies)
            patch.setattr(tuning, "fit_encoder", noted)
            if dies >= 0:
                with pytest.raises(RuntimeError, match="killed"):
                    tune(config)
            else:
                tune(config)
            steps += watched.steps
    return steps, ended[0].state_dict(), ended[0].epochs


@pytest.mark.parametrize(("dies_at", "repeated"), [(3, 1), (4.5, 2), (8, 0)])
def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(
    ground: Path, tmp_path: Path, dies_at: float, repeated: int
) -> None:
    # 4 steps an epoch, saved after every second: killed in one, while validating, and between two.
    config = make_config(ground, tmp_path, save_every=2, encoder_dropout=True, channel_dropout=0.5)
    steps, weights, epochs = run(config, tmp_path / "whole")
    again, resumed, same = run(config, tmp_path / "killed", dies_at=dies_at)
    assert len(steps) == 12
    assert dict(again) == dict(steps)
    assert len(again) == 12 + repeated
    assert epochs == same
    assert weights.keys() == resumed.keys()
    for name, value in weights.items():
        assert torch.equal(value, resumed[name]), name


def test_batches_go_on_where_they_were(prepared: Prepared) -> None:
    def batches(state: dict[str, Any] | None = None) -> TokenBatches:
        made = TokenBatches(
            prepared.items["train"], prepared.read, batch_size=4, most=10**6, seed=1
        )
        if state is not None:
            made.load_state_dict(state)
        return made

    whole = batches()
    sums = [float(parts[0].batch.mode.sum()) for parts in whole]
    assert len(sums) == len(whole)
    assert len(list(batches(whole.state_dict()))) == len(whole)  # an epoch that was at its end
    begun = batches()
    iterator = iter(begun)
    next(iterator), next(iterator)
    rest = batches(begun.state_dict())
    assert [float(parts[0].batch.mode.sum()) for parts in rest] == sums[2:]
    assert len(list(rest)) == len(whole)


def test_the_prototypes_may_start_from_the_definitions(ground: Path, tmp_path: Path) -> None:
    config = make_config(ground, tmp_path / "out", intent=True)
    prepared = Prepared(config, tmp_path / "work")
    assert prepared.intent is not None
    assert prepared.intent.shape == (14, BERT_WIDTH)


def test_no_average_is_no_copy(ground: Path, tmp_path: Path) -> None:
    config = make_config(ground, tmp_path / "out", average=0.0, epochs=1)
    assert (tune(config) / RECORD).is_file()


def test_a_place_with_something_else_is_refused(ground: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="expected a new or empty folder, or an older model"):
        tune(make_config(ground, tmp_path / "out"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers: expected a number above 0, got 0"),
        ({"tokens": 0}, "tokens: expected a number above 0, got 0"),
        ({"layer_decay": 1.5}, "layer_decay: expected above 0 to 1, got 1.5"),
        ({"model": ModelConfig(members=2)}, r"model\.members: expected 1, as one network"),
        ({"average": 2.0}, "average: expected 0 to 1, got 2.0"),
    ],
)
def test_values_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(Path(), Path("out"), **changes)


def test_an_encoder_that_does_not_fit_is_refused(ground: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vector_width: expected 16, the width .*, got 384"):
        tune(make_config(ground, tmp_path / "out", model=ModelConfig()))
    with pytest.raises(ConfigError, match="layers: expected at most 3, got 9"):
        tune(make_config(ground, tmp_path / "out", layers=9))
    with pytest.raises(ConfigError, match=r"head \+ tail <= 62 for bert, got 70"):
        tune(make_config(ground, tmp_path / "out", head=60, tail=10))
    assert not list(tmp_path.iterdir())


def test_half_precision_is_used_where_it_is_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for known, expected in (({"avx2": True}, False), ({"avx2": True, "amx_bf16": True}, True)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda known=known: known)
        assert tuning.use_bf16("auto", cpu) is expected
        assert tuning.use_bf16("bf16", cpu)
        assert not tuning.use_bf16("fp32", cpu)
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not tuning.use_bf16("auto", cpu)


def test_the_command_line_reads_yaml_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[TuneConfig] = []

    def note(config: TuneConfig) -> Path:
        asked.append(config)
        return Path(config.out)

    monkeypatch.setattr(tuning, "tune", note)
    text = "data: {train: [a.jsonl]}\nout: artifacts/x\nlayers: 1\nactivations: null\n"
    (tmp_path / "run.yaml").write_text(text)
    assert main(["--config", str(tmp_path / "run.yaml"), "--model.width=64", "--tail", "8"]) == 0
    assert asked == [
        TuneConfig(
            data=DataConfig(train=("a.jsonl",)),
            out="artifacts/x",
            layers=1,
            activations=None,
            model=ModelConfig(width=64),
            tail=8,
        )
    ]
    said = " ".join(capsys.readouterr().out.split())
    assert "export encoder --source artifacts/x --out ENCODER --head 94 --tail 8" in said
    with pytest.raises(ConfigError, match="precision"):
        read_tune_config({"data": {"train": ["a"]}, "out": "x", "precision": "int4"})


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dcl.learning.tuning")
    monkeypatch.delitem(sys.modules, "dcl.learning.turn_encoder")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    done = CliRunner().invoke(cli.app, ["tune", "--config", "none.yaml"])
    assert done.exit_code == 2
    assert 'needs sentence_transformers, which is not installed; run pip install "dcl-att' in (
        done.stderr
    )


def test_held_out_items_get_the_vectors_of_the_trained_encoder(prepared: Prepared) -> None:
    encoder = TorchEncoder(prepared.encoder, prepared.read)
    before = {split: [item.vectors for item in items] for split, items in prepared.items.items()}
    with torch.no_grad():
        for parameter in prepared.encoder.upper[-1].parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    tuning.refresh(prepared.items, encoder)
    for split, vectors in before.items():
        for item, old in zip(prepared.items[split], vectors, strict=True):
            assert np.array_equal(item.vectors, old) == (split == "train")
            assert item.features.shape == (len(old), prepared.items["train"][0].features.shape[1])


def test_progress_names_what_is_done(ground: Path, tmp_path: Path) -> None:
    config = make_config(ground, tmp_path / "out", activations=str(tmp_path / "kept"))
    titles: list[str] = []
    add = Progress.add_task

    def note(self: Progress, title: str, *args: Any, **kwargs: Any) -> Any:
        titles.append(title)
        return add(self, title, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "add_task", note)
        Prepared(config, tmp_path / "work")
    assert titles[:3] == ["reading turns", "running the frozen layers", "encoding turns"]
