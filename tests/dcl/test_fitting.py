from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dcl import fitting as module
from dcl.adapter import COLUMNS, IDENTITY
from dcl.attribution import Calibration, Logits, decode
from dcl.calibration import fit_calibration
from dcl.fitting import (
    AGENT_SHARE,
    Choice,
    Observation,
    average,
    fit,
    fit_turns,
    label_likelihood,
    leave_bystanders_out,
    split_folds,
)
from dcl.targets import Targets
from dcl.taxonomy import MODES
from dcl.trajectory import Trajectory, Turn

M = len(MODES)
T, A = 6, 3


def observe(
    rng: np.random.Generator, group: int, *, telling: float, step: bool = True
) -> Observation:
    """A run of noise in which one column points at the faulty turn."""
    index = np.array([0, 1, 2, 0, 1, 2])
    turns = rng.standard_normal((T, len(COLUMNS)))
    fault = int(rng.integers(T))
    turns[:, COLUMNS.index("to_task")] += telling * (np.arange(T) == fault)
    draw: list[tuple[int, ...]] = [(A,), (M,), (A, M), (T,), (T, M)]
    drawn = (rng.standard_normal(shape).astype(np.float32) for shape in draw)
    agent_logits, mode_logits, pair, step_logits, attention = drawn
    logits = Logits(agent_logits, mode_logits, pair, step_logits, attention)
    turns[:, COLUMNS.index("net_step")] = logits.step
    agent = (np.arange(A) == index[fault]).astype(np.float32)
    mode = (np.arange(M) == 3).astype(np.float32)
    target = (np.arange(T) == fault).astype(np.float32) * step
    targets = Targets(agent, mode, agent[:, None] * mode, target, known=False)
    return Observation(group, logits, turns, index, np.ones(A, dtype=bool), targets)


def draw_runs(count: int, *, telling: float = 4.0, step: bool = True) -> list[Observation]:
    rng = np.random.default_rng(1)
    return [observe(rng, i, telling=telling, step=step) for i in range(count)]


def hits(runs: list[Observation], adapter: object = IDENTITY) -> float:
    assert callable(adapter)
    got = [adapter(run.logits, run.turns, run.agent_index, run.acting) for run in runs]
    return float(
        np.mean(
            [run.targets.agent[np.argmax(one.agent)] for run, one in zip(runs, got, strict=True)]
        )
    )


def test_a_telling_column_is_learned_and_agents_follow() -> None:
    runs = draw_runs(60)
    fitted = fit(runs[:40], Calibration())
    assert fitted.parts >= {"turns", "agents"}
    assert hits(runs[40:], fitted.adapter) > hits(runs[40:]) + 0.3
    assert len(fitted.calibration.span_cuts) == 99
    assert fitted.calibration.pair_threshold == 0.5  # no mode was labelled


def test_agents_alone_teach_turns() -> None:
    runs = draw_runs(60, step=False)
    fitted = fit(runs[:40], Calibration())
    assert hits(runs[40:], fitted.adapter) > hits(runs[40:]) + 0.3
    assert fitted.calibration.span_cuts == ()


def test_noise_is_left_alone() -> None:
    # Against a network that is as good as chance; noise in its place would be worse than nothing.
    runs = [
        replace(run, logits=replace(run.logits, step=np.zeros(T, dtype=np.float32)))
        for run in draw_runs(30, telling=0.0)
    ]
    fitted = fit(runs, Calibration())
    assert "turns" not in fitted.parts
    assert fitted.choices == ()


def test_parts_that_may_not_change_do_not() -> None:
    base = Calibration(agent_threshold=0.25)
    fitted = fit(draw_runs(30), base, parts=frozenset())
    assert fitted.parts == frozenset()
    assert fitted.calibration.agent_threshold == 0.25
    assert fitted.calibration.agent_temperature == 1.0
    assert fitted.adapter.columns == ()
    one_question = [replace(run, group=0) for run in draw_runs(12)]
    assert fit(one_question, base).calibration == base


def test_the_gradient_is_that_of_the_likelihood() -> None:
    runs = draw_runs(12)
    choice = Choice("few", 3.0, 1.0)
    adapter = fit_turns(runs, choice)

    def value(weights: NDArray[Any]) -> float:
        moved = replace(adapter, weights=weights)
        total = sum(label_likelihood(r, moved.score_turns(r.logits, r.turns)) for r in runs)
        return total - choice.strength / 2 * float(weights @ weights)

    best = value(adapter.weights)
    rng = np.random.default_rng(2)
    for _ in range(20):
        away = adapter.weights + 0.1 * rng.standard_normal(len(adapter.weights))
        assert value(away) < best + 1e-2


def test_likelihood_follows_its_formula() -> None:
    (run,) = draw_runs(1)
    score = np.arange(T, dtype=np.float64)
    probs = np.exp(score) / np.exp(score).sum()
    fault = int(np.argmax(run.targets.step))
    own = sum(p for p, a in zip(probs, run.agent_index, strict=True) if run.targets.agent[a])
    expected = (1 - AGENT_SHARE) * np.log(probs[fault]) + AGENT_SHARE * np.log(own)
    assert label_likelihood(run, score) == pytest.approx(expected)
    unknown = replace(run, targets=replace(run.targets, step=np.zeros(T, dtype=np.float32)))
    assert label_likelihood(unknown, score) == pytest.approx(np.log(own))


def test_the_average_of_adapters_scores_the_average() -> None:
    runs = draw_runs(12)
    both = [fit_turns(runs, Choice(name, 10.0, t)) for name, t in (("few", 1), ("structure", 0))]
    for run in runs[:3]:
        mean = np.mean([one.score_turns(run.logits, run.turns) for one in both], axis=0)
        assert average(both).score_turns(run.logits, run.turns) == pytest.approx(mean)


def test_a_question_is_never_on_both_sides() -> None:
    folds = split_folds([5, 7, 5, 9, 9, 5, 1, 2], 3, 0)
    assert folds[0] == folds[2] == folds[5]
    assert folds[3] == folds[4]
    assert set(folds.tolist()) == {0, 1, 2}


def add_bystander(run: Observation, rng: np.random.Generator) -> Observation:
    """The same run with a loud person in it, who is agent 0 and speaks first and last."""

    def pad(rows: NDArray[Any], before: int, after: int) -> NDArray[Any]:
        shape = (before + after, *rows.shape[1:])
        loud = (50 * rng.standard_normal(shape)).astype(rows.dtype)
        return np.concatenate([loud[:before], rows, loud[before:]])

    logits, targets = run.logits, run.targets
    return replace(
        run,
        logits=Logits(
            agent=pad(logits.agent, 1, 0),
            mode=logits.mode,
            pair=pad(logits.pair, 1, 0),
            step=pad(logits.step, 1, 1),
            attention=pad(logits.attention, 1, 1),
        ),
        turns=pad(run.turns, 1, 1),
        agent_index=np.concatenate([[0], run.agent_index + 1, [0]]),
        acting=np.array([False, *run.acting]),
        targets=replace(
            targets,
            agent=np.concatenate([[0], targets.agent]).astype(np.float32),
            pair=np.concatenate([np.zeros((1, M)), targets.pair]).astype(np.float32),
            step=np.concatenate([[0], targets.step, [0]]).astype(np.float32),
        ),
    )


def test_bystanders_have_no_part_in_a_fit() -> None:
    rng = np.random.default_rng(3)
    runs = draw_runs(20)
    crowded = [add_bystander(run, rng) for run in runs]
    one, two = fit(runs, Calibration()), fit(crowded, Calibration())
    assert one.parts >= {"turns"}
    assert two.calibration == one.calibration
    assert np.array_equal(two.adapter.weights, one.adapter.weights)
    assert np.array_equal(two.adapter.agent, one.adapter.agent)
    for run, full in zip(runs, crowded, strict=True):
        alone = one.adapter(run.logits, run.turns, run.agent_index, run.acting)
        among = two.adapter(full.logits, full.turns, full.agent_index, full.acting)
        assert among.agent[1:] == pytest.approx(alone.agent, abs=1e-5)


def test_a_label_of_a_bystander_is_out_of_reach() -> None:
    (run,) = draw_runs(1)
    fault = int(np.argmax(run.targets.agent))
    left = leave_bystanders_out(replace(run, acting=np.arange(A) != fault))
    assert left.targets.lost_agents == 1
    assert not left.targets.agent.any()
    assert not left.targets.step.any()
    assert left.agent_index.tolist() == [0, 1, 0, 1]


def test_a_run_is_calibrated_by_weights_that_it_did_not_teach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[Logits]] = []

    def listen(logits: list[Logits], *args: Any, **keys: Any) -> Calibration:
        seen.append(logits)
        return fit_calibration(logits, *args, **keys)

    monkeypatch.setattr(module, "fit_calibration", listen)
    runs = [
        replace(run, targets=replace(run.targets, agent=run.targets.agent[[1, 2, 0]]))
        for run in draw_runs(30)
    ]
    runs = [
        replace(run, logits=replace(run.logits, agent=3 * run.targets.agent - 4)) for run in runs
    ]
    other = replace(runs[4], targets=replace(runs[4].targets, agent=1 - runs[4].targets.agent))
    for changed in (runs[4], other):
        fitted = fit(
            [*runs[:4], changed, *runs[5:]], Calibration(), parts=frozenset({"agents"}), seed=2
        )
        assert fitted.parts == {"agents"}
    assert np.array_equal(seen[0][4].agent, seen[1][4].agent)
    assert not np.array_equal(seen[0][5].agent, seen[1][5].agent)


def test_sets_from_held_out_scores_cover_fresh_runs() -> None:
    runs = draw_runs(160, telling=2.0)
    fitted = fit(runs[:80], Calibration())
    inside = []
    for i, run in enumerate(runs[80:]):
        trajectory = Trajectory(str(i), "", tuple(Turn("abc"[a], "x") for a in run.agent_index))
        logits = fitted.adapter(run.logits, run.turns, run.agent_index, run.acting)
        chosen = decode(trajectory, logits, fitted.calibration).step_set(0.8)
        inside.append(int(np.argmax(run.targets.step)) in chosen)
    assert np.mean(inside) > 0.7
