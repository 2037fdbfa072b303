"""The command on a tiny set, and what happens to runs before they are scored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.average import average
from benchmarks.evaluate import KEPT, LEARNED, PREDICTORS, EvaluateConfig, evaluate
from benchmarks.metrics import LEVELS, Interval
from benchmarks.predictors import RULES
from benchmarks.runs import add_modes, digest_of, load_examples, rename
from dcl.errors import ConfigError
from dcl.splits import group_of, split_of
from dcl.taxonomy import ErrorMode


def make_record(i: int) -> dict[str, Any]:
    """`Worker1` fails when it says so; `Worker12` fails in odd runs; `Ranker` never speaks."""
    said = ["i ignore the format", "looks right to me" if i % 2 else "the sum is off", "a plan"]
    faulty = [{"agent_name": "worker1", "error_type": "FM-1.1"}]
    faulty += [{"agent_name": "Worker12", "error_type": "FM-3.3"}] if i % 2 else []
    faulty += [{"agent_name": "Ranker", "error_type": "FM-3.3"}] if i % 5 == 0 else []
    return {
        "id": f"run_{i}",
        "metadata": {"framework": "dylan" if i % 3 else "macnet", "source": "aegis"},
        "input": {
            "query": f"question {i}",
            "conversation_history": [
                {"step": t + 1, "agent_name": name, "content": f"{text} {i}"}
                for t, (name, text) in enumerate(
                    zip(("Worker1", "Worker12", "Planner"), said, strict=True)
                )
            ],
        },
        "output": {"faulty_agents": faulty},
    }


@pytest.fixture
def aegis(tmp_path: Path) -> Path:
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(make_record(i)) + "\n" for i in range(60)))
    return file


@pytest.fixture
def whowhen(tmp_path: Path) -> Path:
    """Two raw files of either half with steps 1 and 12, the second half without `name`."""
    folder = tmp_path / "whowhen"
    for half, marks in (("ag", {"is_correct": False}), ("hc", {"is_corrected": "False"})):
        for n in (1, 12):
            who = [f"assistant{i % 5}" for i in range(14)]
            speaker = "name" if half == "ag" else "role"
            document = {
                "question_ID": "q",
                "question": f"question {half} {n}",
                "history": [{"content": "hm", "role": "assistant", speaker: name} for name in who],
                "mistake_agent": f"assistant{n % 5}",
                "mistake_step": str(n),
                **marks,
            }
            (folder / half).mkdir(parents=True, exist_ok=True)
            (folder / half / f"{n}.json").write_text(json.dumps(document))
    return folder


@pytest.fixture
def modes(tmp_path: Path) -> Path:
    file = tmp_path / "modes.json"
    table = {
        f"whowhen_{half}_{n}": {"agent": "x", "mode": mode}
        for half, mode in (("ag", "FM-2.6"), ("hc", "FM-1.3"))
        for n in (1, 12)
    }
    file.write_text(json.dumps(table))
    return file


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments), "--resamples", "20"])


def run_json(*arguments: str | Path) -> dict[str, Any]:
    result = run(*arguments, "--output", "json")
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


@pytest.mark.parametrize("name", [*LEARNED, *RULES])
def test_each_floor_alone(name: str, aegis: Path) -> None:
    report = run_json("--data", aegis, "--train", aegis, "--predictor", name)
    (row,) = report["tables"]["kept"]
    assert row["predictor"] == name
    assert set(row["frameworks"]) == {"dylan", "macnet"}
    assert row["modes"]["FM-1.1"]["n"] == 60
    for score in row["scores"].values():
        assert 0 <= score["interval"][0] <= score["interval"][1] <= 1


def test_all_floors_in_one_page(aegis: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    result = run(
        "--data", aegis, "--train", aegis, "--predictor", "all", "--model", tmp_path / "none"
    )
    assert result.exit_code == 4
    names = [name for name in PREDICTORS if name != "dcl"]
    chosen = [part for name in names for part in ("--predictor", name)]
    flags = ("--permute-names", "--rename-agents", "--out", page)
    assert run("--data", aegis, "--train", aegis, *chosen, *flags).exit_code == 0
    text = page.read_text()
    assert digest_of([aegis])[:16] in text
    for name in names:
        assert text.count(f"| {name} |") == 3
    assert "Runs: 60, split all" in text


def test_the_word_floor_does_not_care_about_names(aegis: Path) -> None:
    flags = ("--permute-names", "--rename-agents", "--predictor", "tfidf")
    tables = run_json("--data", aegis, "--train", aegis, *flags)["tables"]
    scores = [tables[names][0]["scores"]["pair_micro_f1"]["value"] for names in tables]
    assert "agent_macro_f1" in tables["permuted"][0]["scores"]
    assert "agent_macro_f1" not in tables["replaced"][0]["scores"]
    assert len(scores) == 3
    assert len(set(scores)) == 1


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_floor_gives_the_same_scores(name: str, aegis: Path, tmp_path: Path) -> None:
    flags = ("--train", aegis, "--predictor", name, "--cache", tmp_path / "cache")
    first = run_json("--data", aegis, *flags)
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.name.startswith(f"{name}-")
    assert run_json("--data", aegis, *flags) == first


def test_floors_that_learn_are_left_out_without_training_runs(aegis: Path) -> None:
    assert "--train" in run("--data", aegis, "--predictor", "tfidf").stderr
    report = evaluate(EvaluateConfig(data=(aegis,), resamples=5))
    assert set(LEARNED) <= set(report.skipped)
    assert {row.predictor for row in report.tables["kept"]} >= set(RULES)


def test_splits_are_those_of_the_questions(aegis: Path) -> None:
    everything = load_examples([aegis])
    parts = [load_examples([aegis], split) for split in ("train", "valid", "test")]
    assert sum(map(len, parts)) == len(everything) == 60
    assert all(split_of(group_of(example)) == "test" for example in parts[2])
    report = run_json("--data", aegis, "--split", "test", "--predictor", "random")
    assert report["data"]["n"] == len(parts[2])


def test_the_same_file_twice_counts_twice(aegis: Path) -> None:
    report = run_json("--data", aegis, "--data", aegis, "--predictor", "random")
    assert report["data"]["n"] == 120


def test_whowhen_is_one_known_fault(whowhen: Path, modes: Path) -> None:
    report = run_json("--data", whowhen, "--predictor", "step-1", "--modes", modes)
    assert report["single_fault"] is True
    scores = report["tables"]["kept"][0]["scores"]
    assert scores["step_accuracy"]["value"] == 0.5
    assert scores["agent_accuracy"]["value"] == 0.5
    assert scores["error_micro_f1"]["value"] == 0.5
    assert (
        run_json("--data", whowhen, "--predictor", "step-1", "--several")["single_fault"] is False
    )


def test_modes_go_by_half_and_file_number(whowhen: Path, modes: Path) -> None:
    found = {
        (example.trajectory.metadata["file"], "is_corrected" in example.trajectory.metadata): fault
        for example in add_modes(load_examples([whowhen]), modes)
        for fault in example.faults or ()
    }
    assert found["1", False].mode is ErrorMode.FM_2_6
    assert found["12", True].mode is ErrorMode.FM_1_3
    assert found["12", True].step == 12
    modes.write_text("{}")
    with pytest.raises(ConfigError, match="whowhen_ag_1"):
        add_modes(load_examples([whowhen]), modes)


def test_without_modes_only_agents_and_steps_are_scored(whowhen: Path) -> None:
    scores = run_json("--data", whowhen, "--predictor", "first-speaker")["tables"]["kept"][0][
        "scores"
    ]
    assert not any(name.startswith(("pair", "error")) for name in scores)
    assert {"agent_accuracy", "step_accuracy", "agent_micro_f1"} <= set(scores)
    page = run("--data", whowhen, "--predictor", "first-speaker").output
    assert "Not scored: pairs and modes" in page


@pytest.mark.parametrize("names", ["permuted", "replaced"])
def test_new_names_move_turns_and_labels_together(aegis: Path, names: Any) -> None:
    before = load_examples([aegis])
    after = rename(before, names)
    moved = 0
    for old, new in zip(before, after, strict=True):
        pairs = zip(old.trajectory.turns, new.trajectory.turns, strict=True)
        mapping = {a.agent: b.agent for a, b in pairs}
        assert [t.content for t in old.trajectory.turns] == [
            t.content for t in new.trajectory.turns
        ]
        assert len(set(mapping.values())) == len(mapping)
        expected = tuple(replace(f, agent=mapping.get(f.agent, f.agent)) for f in old.faults or ())
        assert new.faults == expected
        same = set(mapping) == set(mapping.values())
        assert same is (names == "permuted")
        moved += mapping != {name: name for name in mapping}
    assert moved > len(before) / 2
    assert rename(before, names) == after


def test_the_average_is_of_twelve_scores(
    aegis: Path, whowhen: Path, modes: Path, tmp_path: Path
) -> None:
    files, six = [], []
    for data in (aegis, whowhen):
        files.append(tmp_path / f"{data.stem}.json")
        flags = ("--predictor", "everyone", "--predictor", "most-talking", "--modes", modes)
        assert run("--data", data, *flags, "--output", "json", "--out", files[-1]).exit_code == 0
        scores = json.loads(files[-1].read_bytes())["tables"]["kept"][0]["scores"]
        levels = [f"{level}_{kind}_f1" for level in LEVELS for kind in ("micro", "macro")]
        six += [scores[level]["value"] for level in levels]
    result = CliRunner().invoke(app, ["average", *map(str, files)])
    assert result.exit_code == 0, result.output
    (row,) = [line for line in result.stdout.splitlines() if "everyone" in line]
    assert f"{100 * sum(six) / 12:.1f} [" in row.split("|")[4]
    assert len(result.stdout.splitlines()) == 4


def test_errors_of_two_sets_add_as_squares() -> None:
    found = average(Interval(0.5, 0.44, 0.53), Interval(0.3, 0.22, 0.34))
    assert found == pytest.approx((0.4, 0.35, 0.425))


def test_no_average_without_modes(whowhen: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    flags = ("--predictor", "random", "--output", "json", "--out", file)
    assert run("--data", whowhen, *flags).exit_code == 0
    result = CliRunner().invoke(app, ["average", str(file), str(file)])
    assert result.exit_code == 2
    assert "on runs with modes" in result.stderr


def test_unknown_names_and_empty_sets_are_told(aegis: Path, tmp_path: Path) -> None:
    result = run("--data", aegis, "--predictor", "oracle")
    assert result.exit_code == 2
    assert "expected one of all, dcl" in result.stderr
    bare = tmp_path / "bare.jsonl"
    record = make_record(1)
    del record["output"]
    bare.write_text(json.dumps(record))
    assert "expected labelled runs" in run("--data", bare, "--predictor", "random").stderr
    assert run("--data", tmp_path / "gone.jsonl", "--predictor", "random").exit_code == 3


def test_injected_and_natural_runs_are_not_read_alike_in_silence(
    aegis: Path, whowhen: Path, modes: Path
) -> None:
    both: dict[str, Any] = {
        "data": (aegis, whowhen),
        "modes": modes,
        "predictors": ("everyone",),
        "resamples": 10,
    }
    with pytest.raises(ConfigError, match="--injected or --natural"):
        evaluate(EvaluateConfig(**both))
    assert not evaluate(EvaluateConfig(**both, injected=False)).injected
