from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dcl.adapter import COLUMNS
from dcl.adapting import (
    FEWEST,
    MOST_OF_A_SYSTEM,
    adapt,
    choose_parts,
    compare,
    group_questions,
    learn_natural,
)
from dcl.artifact import ADAPTER, INDEX, read_manifest, verify
from dcl.attribution import Attribution, Calibration, Logits, decode
from dcl.cli import app
from dcl.errors import ConfigError
from dcl.fitting import Observation
from dcl.nearest import load_index
from dcl.runtime import load
from dcl.shipped import find_model
from dcl.targets import make_targets
from dcl.taxonomy import MODES
from dcl.trajectory import Example, Fault, Trajectory, Turn

M = len(MODES)
TASKS = ("add {} pears", "what is the height of tower {}", "translate page {} of the book")


def make_example(number: int, *, step: int = 1) -> Example:
    """The coder guesses and is wrong, always at the same place."""
    said = [("planner", "Plan the work."), ("coder", f"I guess it is {number}."), ("boss", "Done.")]
    turns = tuple(Turn(agent, text) for agent, text in said)
    task = TASKS[number % 3].format(f"{number} {number * 7 + 100}")
    run = Trajectory(f"run-{number}", task, turns, metadata={"question_hash": f"q{number}"})
    return Example(run, (Fault(run.turns[step].agent, None, step),))


EXAMPLES = [make_example(i) for i in range(FEWEST)]


def test_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 10 labelled runs"):
        adapt(None, EXAMPLES[:5], tmp_path / "out")
    with pytest.raises(ConfigError, match="expected labelled runs, or successful ones"):
        adapt(None, [replace(EXAMPLES[0], faults=None)], tmp_path / "out")
    with pytest.raises(ConfigError, match="at least 9 sound runs"):
        adapt(None, [], tmp_path / "out", clean=[EXAMPLES[0].trajectory], share=0.1)
    assert not (tmp_path / "out").exists()


def test_questions_that_are_nearly_the_same_share_a_group() -> None:
    tasks = ["how many red pears are in the big box", "how many red pears are in the big bag"]
    tasks += ["one", "two", "three", "four", "five"]
    examples = [
        Example(Trajectory(str(i), task, (Turn("a", "x"),)), ()) for i, task in enumerate(tasks)
    ]
    groups = group_questions(examples)
    assert groups[0] == groups[1]
    assert len(set(groups)) == 6
    alike = [Example(Trajectory(str(i), "same", (Turn("a", "x"),)), ()) for i in range(6)]
    assert len(set(group_questions(alike))) == 6


def test_scores_are_compared_run_by_run() -> None:
    turns = tuple(Turn(name, "x") for name in "ab")
    run = Trajectory("r", "", turns)

    def judged(agent: int) -> Attribution:
        score = np.where(np.arange(2) == agent, 3.0, -3.0).astype(np.float32)
        pair = np.repeat(score[:, None], M, axis=1)
        return decode(run, Logits(score, pair[0], pair, score, pair), Calibration())

    example = Example(run, (Fault("b", None, 1),))
    levels = {
        level.name: level for level in compare([example] * 4, [judged(0)] * 4, [judged(1)] * 4)
    }
    assert levels["agent"].before[0] == 0
    assert list(levels["agent"].after) == [1, 1, 1]
    assert list(levels["step"].gain) == [1, 1, 1]
    assert levels["agents over the threshold"].after[0] == 1
    assert "pair" not in levels  # no mode is labelled


def test_a_fit_writes_a_model_that_every_reader_loads(tmp_path: Path) -> None:
    out = tmp_path / "adapted"
    clean = [make_example(i).trajectory for i in range(50, 60)]
    report = adapt(None, EXAMPLES, out, clean=clean, share=0.2)
    assert report.runs == FEWEST
    assert report.clean == 10
    assert {level.name for level in report.levels} >= {"agent", "step"}
    manifest = read_manifest(out)
    assert not any(verify(out, manifest).values())
    assert (ADAPTER in manifest["files"]) == bool(set(report.parts) - {"thresholds"})
    assert manifest["fit"]["runs"] == FEWEST
    index = load_index(out / INDEX)
    assert len(index.rows) == FEWEST
    near = index.find(index.vectors[3].astype(np.float32))
    assert near is not None
    assert near.fault == Fault("coder", None, 1)
    assert "I guess" in near.text
    adapted = load(out)
    flagged = [bool(one.findings()) for one in adapted.batch(clean)]
    assert sum(flagged) <= 2
    assert "thresholds" in report.parts  # the successful runs moved them
    if ADAPTER in manifest["files"]:
        with pytest.raises(ConfigError, match="adapted already"):
            adapt(out, EXAMPLES, tmp_path / "again")


def draw_run(number: int, *, agent: str, certain: float) -> tuple[Example, Observation]:
    """Three agents speak twice; a column tells the faulty turn, the logit of `agent` is high."""
    rng = np.random.default_rng(number)
    index = np.array([0, 1, 2, 0, 1, 2])
    run = Trajectory(f"run-{number}", f"{number}", tuple(Turn("abc"[a], "x") for a in index))
    fault = int(rng.integers(6))
    example = Example(run, (Fault("abc"[index[fault]], None, fault),))
    turns = rng.standard_normal((6, len(COLUMNS)))
    turns[:, COLUMNS.index("to_task")] += 5.0 * (np.arange(6) == fault)
    blamed = index[fault] if agent == "the faulty one" else rng.integers(3)
    score = np.where(np.arange(3) == blamed, certain, -certain).astype(np.float32)
    pair = np.full((3, M), -9.0, dtype=np.float32)
    step = rng.standard_normal(6).astype(np.float32)
    logits = Logits(score, pair[0], pair, step, np.zeros((6, M), dtype=np.float32))
    acting = np.ones(3, dtype=bool)
    targets = make_targets(example, sigma=0.0)
    return example, Observation(number, logits, turns, index, acting, targets)


def test_thresholds_stay_where_nothing_more_is_declared_rightly() -> None:
    drawn = [draw_run(i, agent="the faulty one", certain=3.0) for i in range(30)]
    base = Calibration(agent_temperature=1.5, agent_threshold=0.3)
    examples, runs = zip(*drawn, strict=True)
    fitted, levels, refused = choose_parts(examples, runs, base, seed=0)
    gains = {level.name: level.gain[0] for level in levels}
    assert gains["step"] > 0.3
    assert gains["agents over the threshold"] == 0
    assert fitted.parts == {"turns"}
    assert refused == ("agents", "modes", "thresholds")
    assert fitted.calibration.agent_threshold == 0.3
    assert fitted.calibration.agent_temperature == 1.5
    assert len(fitted.calibration.span_cuts) == 99


def test_thresholds_move_where_more_is_declared_rightly() -> None:
    drawn = [draw_run(i, agent="anyone", certain=1.0) for i in range(40)]
    base = Calibration(agent_threshold=0.99)  # nobody is declared
    examples, runs = zip(*drawn, strict=True)
    fitted, levels, refused = choose_parts(examples, runs, base, seed=0)
    gains = {level.name: level.gain[0] for level in levels}
    assert gains["agents over the threshold"] > 0.3
    assert fitted.parts >= {"turns", "agents", "thresholds"}
    assert fitted.calibration.agent_threshold < 0.9
    assert refused == ("modes",)


def test_the_command_says_what_it_did(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(example.to_dict()) + "\n" for example in EXAMPLES))
    told = CliRunner().invoke(app, ["fit", str(file), "--out", str(tmp_path / "out")])
    assert told.exit_code == 0, told.output
    assert f"{FEWEST} labelled runs, {FEWEST} questions" in told.output
    assert "agent, 10 runs: before" in told.output
    assert "changed: " in told.output or "the original is kept" in told.output
    line = (
        CliRunner()
        .invoke(
            app,
            [
                "explain",
                str(file),
                "--model",
                str(tmp_path / "out"),
                "--top-k",
                "1",
                "--output",
                "jsonl",
            ],
        )
        .output.splitlines()[0]
    )
    (finding,) = json.loads(line)["findings"]
    assert finding["like"]["id"] != json.loads(line)["id"]
    assert finding["path"][0]["turn"] == finding["turn"]


def test_the_shipped_model_holds_nothing_of_a_system() -> None:
    listed = read_manifest(find_model("base"))["files"]
    assert not {ADAPTER, INDEX} & listed.keys()


def of_system(example: Example, name: str) -> Example:
    return replace(example, trajectory=replace(example.trajectory, metadata={"framework": name}))


def test_natural_failures_are_read_by_what_other_systems_share() -> None:
    network = load(injected=True)
    examples = [of_system(make_example(i), f"system {i % 6}") for i in range(30)]
    fitted, report = learn_natural(network, [examples[:15], examples[15:]])
    assert (report.runs, report.systems) == (30, 6)
    assert report.step == report.agent == 1.0  # always the coder, at the same place
    assert report.before[1] <= report.step
    assert "turns" in fitted.parts


def test_one_system_does_not_lead_and_too_few_are_refused() -> None:
    network = load(injected=True)
    same = [of_system(make_example(0), "one")] * (MOST_OF_A_SYSTEM + 5)
    with pytest.raises(
        ConfigError, match=r"at least 5 systems, named by metadata\.framework, got 1"
    ):
        learn_natural(network, [same])
    others = [of_system(make_example(i), f"system {i}") for i in range(5)]
    sound = replace(same[0], faults=())
    _, report = learn_natural(network, [[*same, *[sound] * 40], others])
    assert report.runs + report.sound == MOST_OF_A_SYSTEM + 5
    assert report.sound > 0
