from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from filelock import FileLock
from rich.console import Console
from test_training import make_example, write_examples
from tiny import write_encoder_folder

from dcl.artifact import open_artifact
from dcl.errors import ConfigError
from dcl.learning import sweep as sweeps
from dcl.learning.comparison import compare, micro, resample
from dcl.learning.config import read_config
from dcl.learning.preparation import prepare
from dcl.learning.sweep import Sweep, main, merge, prepare_once, run_sweep
from dcl.learning.training import train

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with examples of two frameworks, an encoder and a base configuration."""
    folder = tmp_path_factory.mktemp("ground")
    examples = [make_example(i) for i in range(24)]
    examples = [
        replace(e, trajectory=replace(e.trajectory, metadata={"framework": "ab"[i % 2]}))
        for i, e in enumerate(examples)
    ]
    write_examples(folder / "runs.jsonl", examples)
    write_encoder_folder(folder / "encoder")
    base = {
        "data": {
            "train": [str(folder / "runs.jsonl")],
            "valid_share": 0.25,
            "test_share": 0.15,
            "cache": str(folder / "cache"),
        },
        "encoder": str(folder / "encoder"),
        "model": {
            "vector_width": 8,
            "width": 32,
            "layers": 1,
            "prototype_width": 16,
            "prototypes": 2,
            "archetypes": 2,
            "rank": 4,
        },
        "epochs": 2,
        "batch_size": 8,
        "folds": 2,
        "threads": 1,
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    return folder


def write_sweep(ground: Path, name: str, **keys: Any) -> Path:
    file = ground / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"base": "base.yaml", "seeds": [1, 2], **keys}))
    return file


CELLS = {"full": {}, "no wide": {"model.use_wide": False}}


@pytest.fixture(scope="module")
def done(ground: Path) -> Path:
    """A sweep of two cells with two seeds that has been run."""
    out = ground / "done"
    run_sweep(write_sweep(ground, "done-sweep", cells=CELLS), out)
    return out


def times_of(out: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in (out / "cells").glob("*.json")}


def test_a_sweep_writes_results_tables_and_plots(done: Path) -> None:
    assert len(times_of(done)) == 4
    assert not list((done / "work").iterdir())
    with (done / "results.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {(row["cell"], row["seed"]) for row in rows} == {(c, s) for c in CELLS for s in "12"}
    assert {row["split"] for row in rows} == {"valid", "test", ""}
    assert {row["level"] for row in rows} == {"pair", "agent", "mode", ""}
    markdown, latex = (done / "tables.md").read_text(), (done / "tables.tex").read_text()
    assert markdown.count("| no wide |") == 2
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 2
    for name in ("ablation", "curves", "confusion", "calibration", "latency"):
        assert (done / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_record_says_what_was_learnt(done: Path) -> None:
    for file in (done / "cells").glob("full-*.json"):
        record = json.loads(file.read_text())
        assert [row["epoch"] for row in record["curve"]] == [0, 1]
        assert all("valid/pair_f1" in row and "train/pair" in row for row in record["curve"])
        for split, levels in record["counts"].items():
            for level, table in levels.items():
                got = record["scores"][split][level]["micro_f1"]
                assert got == pytest.approx(micro(np.array(table)))
            faults = sum(sum(row) for row in record["confusion"][split])
            assert faults == sum(hit + miss for hit, _, miss in levels["pair"])
        assert record["latency_ms"] > 0


def test_a_cell_is_what_training_alone_gives(ground: Path, done: Path, tmp_path: Path) -> None:
    base = yaml.safe_load((ground / "base.yaml").read_text())
    config = read_config({**base, "out": str(tmp_path / "model"), "seed": 2})
    scores = open_artifact(train(config)).manifest["scores"]
    record = json.loads(next((done / "cells").glob("full-seed2-*.json")).read_text())
    for split, levels in scores.items():
        got = {level: record["scores"][split][level]["micro_f1"] for level in levels}
        assert got == pytest.approx(levels, abs=0.01)


def test_what_is_prepared_is_shared_and_holds_the_same(ground: Path, done: Path) -> None:
    assert len([folder for folder in (done / "prepared").iterdir() if folder.is_dir()]) == 1
    cell = Sweep(ground / "done-sweep.yaml", done).cells[0]
    items, definitions = prepare_once(cell.config, done / "prepared")
    assert definitions.shape == (14, 8)
    again = prepare(cell.config, sweeps.open_source(cell.config.encoder))
    for split, members in again.items():
        for one, two in zip(members, items[split], strict=True):
            assert (one.group, one.agents, one.extra) == (two.group, two.agents, two.extra)
            for name in ("agent_index", "reply_to", "vectors", "task", "features"):
                assert np.array_equal(getattr(one, name), getattr(two, name))
            for name in ("agent", "pair", "mode", "step", "known", "lost_pairs"):
                assert np.array_equal(getattr(one.targets, name), getattr(two.targets, name))
            assert two.wide.any()


@pytest.mark.parametrize(
    "grid",
    [
        {"wide_rows": [0, 3]},
        {"wide_bigrams": [True, False]},
        {"wide_idf": [True, False]},
        {"wide_contrast": [0.0, 0.5]},
    ],
)
def test_cells_with_other_wide_halves_do_not_share_one(
    ground: Path, tmp_path: Path, grid: dict[str, list[Any]]
) -> None:
    sweep = Sweep(write_sweep(ground, "rows", grid=grid, seeds=[1]), tmp_path / "out")
    wide = []
    for cell in sweep.cells:
        items, _ = prepare_once(cell.config, sweep.out / "prepared")
        wide.append(np.concatenate([item.wide for item in items["train"]]))
    assert wide[0].shape == wide[1].shape
    assert not np.allclose(wide[0], wide[1])


def test_each_cell_is_compared_with_the_one_it_is_a_variant_of(ground: Path, done: Path) -> None:
    cells = {"full": {}, "no wide": {"model.use_wide": False}}
    plain = Sweep(write_sweep(ground, "one", cells=cells), done)
    assert plain.against == ("full",)
    records = plain.finished()
    assert len(records) == 4
    both = [*records, *({**r, "cell": f"{r['cell']} again"} for r in records)]
    against = ("full", "no wide")
    lines = {line.cell: line for line in compare(both, against, "valid", "pair")}
    assert {name: line.against for name, line in lines.items()} == {
        "full": "full",
        "no wide": "full",
        "full again": "full",
        "no wide again": "no wide",
    }
    assert np.isnan(lines["full"].p)
    assert (lines["no wide again"].low, lines["no wide again"].p) == (0.0, 1.0)
    assert lines["no wide"].low != 0
    (first,) = (
        line for line in compare(both, ("full",), "valid", "pair") if line.cell == "no wide"
    )
    assert first == lines["no wide"]


def test_a_sweep_may_name_several_references(ground: Path, done: Path, tmp_path: Path) -> None:
    file = write_sweep(ground, "two", cells=CELLS, against=["no wide", "full"])
    shutil.copytree(done / "cells", tmp_path / "cells")
    sweep = Sweep(file, tmp_path)
    assert sweep.against == ("no wide", "full")
    assert sweep.report()
    table = (tmp_path / "tables.md").read_text()
    assert "| full | no wide |" in table
    assert "| no wide |  |" in table
    assert "pair macro-F1 by mode" in table


def test_a_finished_sweep_trains_nothing_again(
    ground: Path, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = times_of(done)

    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("trained again")

    monkeypatch.setattr(sweeps, "fit_members", refuse)
    run_sweep(ground / "done-sweep.yaml", done)
    assert times_of(done) == before


def test_a_cell_that_another_process_runs_is_left_to_it(ground: Path, tmp_path: Path) -> None:
    file = write_sweep(ground, "shared", cells={"full": {}, "other": {"epochs": 1}}, seeds=[1])
    sweep = Sweep(file, tmp_path / "out")
    with FileLock(sweep.out / "locks" / f"{sweep.cells[0].id}.lock"):
        sweep.run(Console(quiet=True))
    assert [record["cell"] for record in sweep.finished()] == ["other"]
    sweep.run(Console(quiet=True))
    assert [record["cell"] for record in sweep.finished()] == ["full", "other"]


def wait_for(found: Any, process: subprocess.Popen[bytes]) -> None:
    """Wait until something is there; a process that ends without it is a failure."""
    while not found():
        assert process.poll() is None or found(), "the sweep ended early"
        time.sleep(0.05)


def test_a_killed_sweep_goes_on_and_repeats_nothing(ground: Path, tmp_path: Path) -> None:
    file, out = write_sweep(ground, "killed", cells=CELLS), tmp_path / "out"
    command = [sys.executable, "-m", "dcl.cli", "sweep", str(file), "--out", str(out)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: bool(times_of(out)), process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = times_of(out)
    assert not (out / "tables.md").exists() or len(before) == 4
    assert main([str(file), "--out", str(out)]) == 0
    after = times_of(out)
    assert len(after) == 4
    assert {name: after[name] for name in before} == before
    assert (out / "tables.md").is_file()


def test_workers_share_a_sweep(ground: Path, done: Path, tmp_path: Path) -> None:
    file = write_sweep(ground, "crew", cells=CELLS)
    run_sweep(file, tmp_path / "out", workers=2)
    assert set(times_of(tmp_path / "out")) == set(times_of(done))
    for name in times_of(done):
        one, two = (
            json.loads((out / "cells" / name).read_text()) for out in (done, tmp_path / "out")
        )
        assert one["scores"] == two["scores"]


@pytest.mark.slow
def test_a_cluster_runs_a_sweep_and_one_that_was_killed(
    ground: Path, done: Path, tmp_path: Path, ray_cluster: str
) -> None:
    file, out = write_sweep(ground, "cluster", cells=CELLS), tmp_path / "out"
    command = [sys.executable, "-m", "dcl.cli", "sweep", str(file), "--out", str(out)]
    command += ["--executor", "ray"]
    environment = {**os.environ, "RAY_ADDRESS": ray_cluster}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=quiet, stderr=quiet)
    try:
        wait_for(lambda: bool(times_of(out)), process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = times_of(out)
    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    after = times_of(out)
    assert set(after) == set(times_of(done))
    assert {name: after[name] for name in before} == before
    for name in after:
        one, two = (json.loads((place / "cells" / name).read_text()) for place in (done, out))
        assert one["scores"] == two["scores"]
    assert results_of(out) == results_of(done)


def results_of(out: Path) -> list[dict[str, str]]:
    """The rows of the results but for those of the clock."""
    with (out / "results.csv").open(newline="") as stream:
        return [row for row in csv.DictReader(stream) if row["split"]]


def test_a_sweep_without_ray_names_the_command_to_install_it(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    file = write_sweep(ground, "no-ray", cells=CELLS)
    with pytest.raises(ConfigError, match=r"pip install .dcl-attribution\[ray\]"):
        main([str(file), "--out", str(tmp_path / "out"), "--executor", "ray"])


def test_a_worker_that_fails_fails_the_sweep(
    ground: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_sweep(ground, "bad", cells={"full": {"model.vector_width": 9}})
    with pytest.raises(ConfigError, match="2 of 2 workers failed"):
        run_sweep(file, tmp_path / "out", workers=2)
    assert "vector_width: expected 8" in capfd.readouterr().err


def test_a_left_out_framework_is_scored_apart(ground: Path, tmp_path: Path) -> None:
    file = write_sweep(ground, "left", grid={"data.left_out": [["a"], ["b"]]}, seeds=[1])
    sweep = Sweep(file, tmp_path / "out")
    assert [cell.name for cell in sweep.cells] == ["left_out=a", "left_out=b"]
    for cell, name in zip(sweep.cells, "ab", strict=True):
        items, _ = prepare_once(cell.config, sweep.out / "prepared")
        numbers = {split: [int(i.group.split()[1]) for i in items[split]] for split in items}
        assert sorted(numbers["left_out"]) == [i for i in range(24) if "ab"[i % 2] == name]
        assert all("ab"[i % 2] != name for s in ("train", "valid", "test") for i in numbers[s])
    sweep.run(Console(quiet=True))
    assert all("left_out" in record["scores"] for record in sweep.finished())
    # Scored on other runs: there is nothing to compare item by item.
    lines = compare(sweep.finished(), ["left_out=a"], "left_out", "pair")
    assert all(np.isnan(line.p) for line in lines)
    assert sweep.report()


def test_a_framework_that_no_run_comes_from_is_refused(ground: Path, tmp_path: Path) -> None:
    file = write_sweep(ground, "none", grid={"data.left_out": [["a", "c"]]}, seeds=[1])
    with pytest.raises(ConfigError, match=r"left_out: expected frameworks out of a, b, got 'c'"):
        Sweep(file, tmp_path / "out").run(Console(quiet=True))


SEARCH = {
    "trials": 3,
    "sampler": "random",
    "ranges": {
        "learning_rate": {"low": 0.001, "high": 0.01, "log": True},
        "model.layers": {"low": 0, "high": 1, "whole": True},
        "model.use_mix": {"choices": [True, False]},
    },
}


def test_a_search_draws_trials_and_ends(ground: Path, tmp_path: Path) -> None:
    file = write_sweep(ground, "search", search=SEARCH, seeds=[1])
    run_sweep(file, tmp_path / "out")
    before = times_of(tmp_path / "out")
    assert len(before) == 3
    run_sweep(file, tmp_path / "out")
    assert times_of(tmp_path / "out") == before
    drawn = [json.loads((tmp_path / "out" / "cells" / name).read_text()) for name in before]
    assert all(0.001 <= record["config"]["learning_rate"] <= 0.01 for record in drawn)
    assert len({record["config"]["learning_rate"] for record in drawn}) == 3


def test_another_search_in_the_same_folder_draws_trials_of_its_own(
    ground: Path, tmp_path: Path
) -> None:
    out, search = tmp_path / "out", {**SEARCH, "trials": 2}
    first = write_sweep(ground, "search-3", search=search, seeds=[1], set={"epochs": 1})
    run_sweep(first, out)
    before = times_of(out)
    changed = write_sweep(ground, "search-4", search=search, seeds=[1], set={"epochs": 2})
    run_sweep(changed, out)
    after = times_of(out)
    assert len(after) == 4
    assert {name: after[name] for name in before} == before
    for file, epochs in ((first, 1), (changed, 2)):
        found = Sweep(file, out).finished()
        assert [record["config"]["epochs"] for record in found] == [epochs] * 2
    ranges: Any = SEARCH["ranges"]
    narrow = {**ranges, "learning_rate": {"low": 0.02, "high": 0.03}}
    run_sweep(write_sweep(ground, "search-5", search={**search, "ranges": narrow}, seeds=[1]), out)
    assert len(times_of(out)) == 6
    more = write_sweep(ground, "search-3", search=SEARCH, seeds=[1], set={"epochs": 1})
    run_sweep(more, out)  # one trial more of the first
    assert len(times_of(out)) == 7
    assert len(Sweep(more, out).finished()) == 3


def test_a_killed_trial_is_drawn_again_with_the_same_values(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_sweep(ground, "search-2", search={**SEARCH, "trials": 2}, seeds=[1, 2])
    run = Sweep.run_cell
    ran: list[str] = []

    def dies(self: Sweep, cell: sweeps.Cell, *args: Any, **keys: Any) -> dict[str, Any]:
        if ran:
            raise KeyboardInterrupt
        ran.append(cell.id)
        return run(self, cell, *args, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(Sweep, "run_cell", dies)
        with pytest.raises(KeyboardInterrupt):
            run_sweep(file, tmp_path / "out")
    before = times_of(tmp_path / "out")
    assert len(before) == 1
    run_sweep(file, tmp_path / "out")
    after = times_of(tmp_path / "out")
    assert len(after) == 4
    assert all(after[name] == moment for name, moment in before.items())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"cells": {"a": {"epoch": 1}}}, "cell 'a'.*epoch"),
        ({"cells": {"a": {"epochs": 0}}}, "epochs: expected a number above 0"),
        ({"cells": {"a": "nowhere.yaml"}}, "nowhere.yaml: expected a YAML file"),
        ({"cells": {"a": 3}}, "expected a file name, keys or a list"),
        ({"cells": {}}, "at least one seed, one cell"),
        ({"seeds": []}, "at least one seed"),
        ({"grid": {"epochs": []}}, "one value a key"),
        ({"against": "nobody"}, "expected the name of a cell, got 'nobody'"),
        ({"against": ["base", "nobody"]}, "expected the name of a cell, got 'nobody'"),
        ({"cell": {}}, "unknown key 'cell'"),
        ({"seeds": [1, 1]}, "expected cells that differ"),
        ({"search": SEARCH, "grid": {"epochs": [1]}}, "got both"),
        ({"search": {"trials": 1, "ranges": {"epochs": {"low": 2, "high": 1}}}}, "low < high"),
    ],
)
def test_a_wrong_sweep_is_refused(
    ground: Path, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Sweep(write_sweep(ground, "wrong", **keys), tmp_path / "out")


@pytest.mark.parametrize("text", ["- 1", "{", "3"])
def test_a_file_that_is_no_sweep_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.yaml: expected"):
        Sweep(tmp_path / "x.yaml", tmp_path / "out")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["x.yaml"],
        ["x.yaml", "--out", "o", "--workers", "0"],
        ["x.yaml", "--out", "o", "--executor", "x"],
    ],
)
def test_wrong_options_are_refused(arguments: Sequence[str]) -> None:
    with pytest.raises(ConfigError):
        main(arguments)


def test_later_layers_win_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: {width: 8, layers: 1}\n")
    merged = merge(tmp_path, "a.yaml", {"model.layers": 2}, [{"model": {"rank": 3}}, {"seed": 4}])
    assert merged == {"model": {"width": 8, "layers": 2, "rank": 3}, "seed": 4}


@pytest.mark.parametrize("file", sorted((CONFIGS / "sweeps").glob("*.yaml")), ids=lambda f: f.stem)
def test_every_published_sweep_is_valid(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "stamp", lambda data, encoder: "")  # the data may be elsewhere
    sweep = Sweep(file, tmp_path / "out")
    assert len({cell.id for cell in sweep.cells}) == len(sweep.cells)
    if sweep.config.search:
        assert sweep.make_cells("trial", [{}])


@pytest.mark.parametrize(
    "file", sorted((CONFIGS / "ablations").glob("*.yaml")), ids=lambda f: f.stem
)
def test_every_ablation_changes_the_default(file: Path) -> None:
    default = ["--config", str(CONFIGS / "default.yaml")]
    plain, changed = read_config(default), read_config([*default, "--config", str(file)])
    assert plain != changed or file.stem == "without-intent"  # which is laid over paper-full
    assert changed == read_config(merge(CONFIGS, "default.yaml", f"ablations/{file.name}"))


def test_every_ablation_is_part_of_a_sweep() -> None:
    text = "".join(file.read_text() for file in (CONFIGS / "sweeps").glob("*.yaml"))
    assert all(f"ablations/{f.name}" in text for f in (CONFIGS / "ablations").glob("*.yaml"))


def test_resampling_finds_what_differs() -> None:
    rng = np.random.default_rng(0)
    right = rng.random((200, 1)) < 0.6
    one = np.concatenate([right, ~right, ~right], axis=1).astype(float)
    worse = right & (rng.random((200, 1)) < 0.5)
    two = np.concatenate([worse, ~worse, ~worse], axis=1).astype(float)
    low, high, p = resample(one, two)
    assert low < micro(one) - micro(two) < high
    assert low > 0
    assert p < 0.01
    assert resample(two, one)[:2] == pytest.approx((-high, -low))
    assert resample(one, one) == (0.0, 0.0, 1.0)
