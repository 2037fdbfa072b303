from __future__ import annotations

import numpy as np

from dcl.adapter import COLUMNS
from dcl.attribution import Attribution, Calibration, Logits, decode
from dcl.crossfit import choose_parts, compare, group_questions
from dcl.fitting import Observation
from dcl.targets import make_targets
from dcl.taxonomy import MODES
from dcl.trajectory import Example, Fault, Trajectory, Turn

M = len(MODES)


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
