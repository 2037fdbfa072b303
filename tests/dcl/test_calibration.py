from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import light, make_run

from dcl.attribution import (
    Attribution,
    Calibration,
    Logits,
    decode,
    rank_scores,
    sigmoid,
    span_scores,
)
from dcl.calibration import (
    best_threshold,
    fit_calibration,
    fit_cuts,
    fit_temperature,
    fit_trust,
    recalibrate,
    score_levels,
)
from dcl.errors import ConfigError
from dcl.targets import Targets
from dcl.taxonomy import MODES

M = len(MODES)
scored = st.lists(
    st.tuples(st.floats(-8, 8, width=32) | st.sampled_from([0.0, 1.0]), st.booleans()),
    min_size=1,
    max_size=12,
)


def slow_f1(scores: list[float], labels: list[bool], threshold: float, missed: int) -> float:
    """F1 of declaring everything from a threshold on."""
    hits = sum(y for s, y in zip(scores, labels, strict=True) if s >= threshold)
    declared = sum(s >= threshold for s in scores)
    return 2 * hits / (declared + sum(labels) + missed) if declared + sum(labels) + missed else 0.0


@light
@given(scored, st.integers(0, 4))
def test_the_threshold_is_as_good_as_any(rows: list[tuple[float, bool]], missed: int) -> None:
    scores, labels = [s for s, _ in rows], [y for _, y in rows]
    cut, f1 = best_threshold(
        np.array(scores, dtype=np.float32), np.array(labels, dtype=np.float32), missed=missed
    )
    best = max(slow_f1(scores, labels, t, missed) for t in scores)
    assert f1 == pytest.approx(best, abs=1e-6)
    assert slow_f1(scores, labels, cut, missed) == pytest.approx(best, abs=1e-6)


def test_the_threshold_lies_halfway_between_two_scores() -> None:
    scores = np.array([4.0, 2.0, 1.0, -3.0], dtype=np.float32)
    assert best_threshold(scores, np.array([1, 1, 0, 0], dtype=np.float32)) == (1.5, 1.0)
    assert best_threshold(scores, np.ones(4, dtype=np.float32)) == (-3.5, 1.0)


def test_equal_scores_are_declared_together() -> None:
    scores = np.array([1.0, 1.0, 1.0, 0.0], dtype=np.float32)
    cut, f1 = best_threshold(scores, np.array([1, 0, 0, 0], dtype=np.float32))
    assert 0 < cut <= 1
    assert f1 == pytest.approx(0.5)


def test_labels_that_cannot_be_reached_lower_f1_and_the_threshold() -> None:
    scores = np.array([3.0, 2.0, 1.0, 0.0], dtype=np.float32)
    labels = np.array([1, 0, 1, 0], dtype=np.float32)
    plain, missed = best_threshold(scores, labels), best_threshold(scores, labels, missed=10)
    assert missed[1] < plain[1]
    assert missed[0] <= plain[0]


@pytest.mark.parametrize("scale", [0.4, 1.0, 3.0])
def test_temperature_finds_the_scale_of_the_logits(scale: float) -> None:
    rng = np.random.default_rng(0)
    true = rng.standard_normal(20_000) * 2
    labels = (rng.random(len(true)) < 1 / (1 + np.exp(-true))).astype(np.float32)
    fitted = fit_temperature((true * scale).astype(np.float32), labels)
    assert fitted == pytest.approx(scale, rel=0.08)


def test_temperature_stays_within_its_bounds() -> None:
    logits = np.array([5.0, -5.0], dtype=np.float32)
    assert fit_temperature(logits, np.array([1, 0], dtype=np.float32)) == pytest.approx(0.2)
    assert fit_temperature(logits, np.array([0, 1], dtype=np.float32)) == pytest.approx(5.0)


def label(pair: NDArray[np.float32], *, lost: int = 0) -> Targets:
    """Targets of a run with these pairs and so many labels out of reach."""
    return Targets(
        agent=pair.max(axis=1),
        mode=pair.max(axis=0),
        pair=pair,
        step=np.zeros(4, dtype=np.float32),
        lost_agents=lost,
        lost_pairs=lost,
    )


def make_logits(rng: np.random.Generator, A: int, T: int, *, step: float = 1.0) -> Logits:
    shapes: list[tuple[int, ...]] = [(A,), (M,), (A, M), (T,), (T, M)]
    drawn = (rng.standard_normal(shape).astype(np.float32) * 2 for shape in shapes)
    agent, mode, pair, turn, attention = drawn
    return Logits(agent, mode, pair, turn * np.float32(step), attention)


def test_a_calibration_declares_what_the_best_threshold_does() -> None:
    rng = np.random.default_rng(3)
    logits = [make_logits(rng, 1 + i % 3, 4) for i in range(12)]
    pairs = [
        (one.pair + rng.standard_normal(one.pair.shape) > 2).astype(np.float32) for one in logits
    ]
    got = fit_calibration(logits, [label(pair) for pair in pairs[:-1]] + [label(pairs[-1], lost=2)])
    flat = np.concatenate([one.pair.ravel() for one in logits])
    labels = np.concatenate([pair.ravel() for pair in pairs])
    cut, _ = best_threshold(flat, labels, missed=2)
    probs = sigmoid(np.asarray(flat / got.pair_temperature, dtype=np.float32))
    assert (probs >= got.pair_threshold).tolist() == (flat >= cut).tolist()
    assert got.pair_temperature == fit_temperature(flat, labels)
    agents = np.concatenate([one.agent for one in logits])
    faulty = np.concatenate([pair.max(axis=1) for pair in pairs])
    assert got.agent_temperature == fit_temperature(agents, faulty)
    modes = np.concatenate([one.mode for one in logits])
    shown = np.concatenate([pair.max(axis=0) for pair in pairs])
    assert got.mode_temperature == fit_temperature(modes, shown)
    assert got.step_temperature == 1.0


def slow_points(declared: list[bool], labels: list[bool], missed: int) -> float:
    """Micro-F1 in points, from its definition."""
    hits = sum(d and y for d, y in zip(declared, labels, strict=True))
    precision = hits / sum(declared) if sum(declared) else 0.0
    recall = hits / (sum(labels) + missed)
    return 200 * precision * recall / (precision + recall) if hits else 0.0


def test_levels_are_scored_at_their_own_thresholds() -> None:
    rng = np.random.default_rng(8)
    logits = [make_logits(rng, 1 + i % 3, 4) for i in range(6)]
    pairs = [
        (one.pair + rng.standard_normal(one.pair.shape) > 2).astype(np.float32) for one in logits
    ]
    calibration = Calibration(
        agent_temperature=2.0, agent_threshold=0.4, mode_threshold=0.7, pair_threshold=0.8
    )
    scores = score_levels(
        logits, [label(pairs[0], lost=3), *(label(pair) for pair in pairs[1:])], calibration
    )
    for level, cut, heat, axis in (
        ("agent", 0.4, 2.0, 1),
        ("mode", 0.7, 1.0, 0),
        ("pair", 0.8, 1, 2),
    ):
        declared: list[bool] = []
        labels: list[bool] = []
        for one, pair in zip(logits, pairs, strict=True):
            declared += (1 / (1 + np.exp(-getattr(one, level) / heat)) >= cut).ravel().tolist()
            labels += ((pair if axis == 2 else pair.max(axis=axis)) > 0).ravel().tolist()
        slow = slow_points(declared, labels, 0 if level == "mode" else 3)
        assert scores[level] == pytest.approx(slow, abs=0.006)


def test_nothing_declared_and_nothing_to_find_is_no_score() -> None:
    logits = [make_logits(np.random.default_rng(0), 2, 3)]
    strict = Calibration(agent_threshold=1.0, mode_threshold=1.0, pair_threshold=1.0)
    nothing = [label(np.zeros((2, M), dtype=np.float32))]
    assert score_levels(logits, nothing, strict) == {"agent": 0, "mode": 0, "pair": 0}


def test_perfect_logits_are_declared_perfectly() -> None:
    rng = np.random.default_rng(1)
    pairs = [(rng.random((3, M)) < 0.1).astype(np.float32) for _ in range(5)]
    logits = [
        Logits(
            p.max(axis=1) * 4 - 2, p.max(axis=0) * 4 - 2, p * 4 - 2,
            np.zeros(4, dtype=np.float32), np.zeros((4, M), dtype=np.float32),
        )
        for p in pairs
    ]  # fmt: skip
    got = fit_calibration(logits, [label(pair) for pair in pairs])
    for one, pair in zip(logits, pairs, strict=True):
        declared = sigmoid(one.pair / got.pair_temperature) >= got.pair_threshold
        assert declared.tolist() == (pair > 0).tolist()


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_step_temperature_finds_the_scale_where_steps_are_known(scale: float) -> None:
    rng = np.random.default_rng(5)
    logits, pairs, steps = [], [], []
    for _ in range(800):
        one = make_logits(rng, 1, 6)
        probs = np.exp(one.step) / np.exp(one.step).sum()
        target = np.zeros(6, dtype=np.float32)
        target[rng.choice(6, p=probs)] = 1.0
        logits.append(
            Logits(one.agent, one.mode, one.pair, one.step * np.float32(scale), one.attention)
        )
        pairs.append((one.pair > 2).astype(np.float32))
        steps.append((logits[-1].step, target))
    got = fit_calibration(logits, [label(pair) for pair in pairs], steps=steps)
    assert got.step_temperature == pytest.approx(scale, rel=0.15)


def test_thresholds_are_probabilities() -> None:
    rng = np.random.default_rng(2)
    logits = [make_logits(rng, 2, 3)]
    got = fit_calibration(logits, [label(np.zeros((2, M), dtype=np.float32))])
    for level in ("agent", "mode", "pair"):
        assert 0 <= getattr(got, f"{level}_threshold") <= 1
        assert math.isfinite(getattr(got, f"{level}_temperature"))
    assert isinstance(got, Calibration)


@light
@given(st.lists(st.floats(0, 1), max_size=30), st.integers(1, 99))
def test_a_cut_lets_in_the_rank_that_the_coverage_needs(scores: list[float], percent: int) -> None:
    cut = fit_cuts(scores)[percent - 1]
    rank = math.ceil((len(scores) + 1) * percent / 100 - 1e-9)
    if rank > len(scores):
        assert cut == 1.0
    else:
        assert cut >= sorted(scores)[rank - 1] - 1e-6
    assert list(fit_cuts(scores)) == sorted(fit_cuts(scores))


def test_sets_cover_as_often_as_they_promise() -> None:
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.full(7, 0.6), size=4000).astype(np.float32)
    turns = np.array([rng.choice(7, p=p / p.sum()) for p in probs.astype(np.float64)])
    for score in (rank_scores, span_scores):
        true = np.array([score(p)[t] for p, t in zip(probs, turns, strict=True)])
        for percent in (80, 90):
            cut = fit_cuts(true[:2000].tolist())[percent - 1]
            assert np.mean(true[2000:] <= cut) == pytest.approx(percent / 100, abs=0.03)


@light
@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 4)), min_size=1, max_size=20),
    st.integers(1, 99),
)
def test_groups_weigh_the_same_in_a_cut(rows: list[tuple[float, int]], percent: int) -> None:
    scores, groups = [score for score, _ in rows], [group for _, group in rows]
    count = len(set(groups))

    def mass(cut: float) -> float:
        inside = [(score <= cut, group) for score, group in rows]
        shares = [np.mean([i for i, other in inside if other == one]) for one in set(groups)]
        return float(np.sum(shares)) / (count + 1)

    enough = [score for score in scores if mass(score) >= percent / 100 - 1e-9]
    cut = fit_cuts(scores, groups)[percent - 1]
    assert cut == pytest.approx(min(enough) if enough else 1.0, abs=3e-6)


def test_a_large_group_does_not_speak_for_a_new_one() -> None:
    rng = np.random.default_rng(4)
    covered: list[tuple[float, float]] = []
    for _ in range(1000):
        level = rng.random(11)  # one number a group, and its scores close to it
        level[:10].sort()  # the group with most runs is the easiest
        groups = [0] * 200 + [group for group in range(1, 10) for _ in range(5)]
        scores = [float(level[group] + 0.01 * rng.random()) for group in groups]
        apart, pooled = fit_cuts(scores, groups)[79], fit_cuts(scores)[79]
        fresh = float(level[10] + 0.01 * rng.random())
        covered.append((float(fresh <= apart), float(fresh <= pooled)))
    by_group, by_run = np.mean(covered, axis=0)
    assert 0.78 <= by_group <= 0.86
    assert by_run < 0.3


def test_levels_may_keep_the_calibration_that_they_have() -> None:
    rng = np.random.default_rng(7)
    base = Calibration(agent_temperature=3.0, pair_threshold=0.2)
    logits = [make_logits(rng, 2, 3) for _ in range(8)]
    pairs = [(one.pair > 2).astype(np.float32) for one in logits]
    step = np.array([0, 1, 0], dtype=np.float32)
    got = fit_calibration(
        logits,
        [label(pair) for pair in pairs],
        steps=[(one.step, step) for one in logits],
        levels=False,
        base=base,
    )
    for name in ("temperature", "threshold"):
        for level in ("agent", "mode", "pair"):
            assert getattr(got, f"{level}_{name}") == getattr(base, f"{level}_{name}")
    assert len(got.span_cuts) == 99
    assert got.step_temperature != base.step_temperature


def test_trust_starts_where_enough_guesses_are_right() -> None:
    sure = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
    assert fit_trust(sure, [True, True, True, True, False, False], precision=0.8) == 0.6
    assert fit_trust(sure, [True] * 6, precision=0.8) == 0.0
    assert fit_trust(sure, [False] * 6, precision=0.8) == 1.0
    assert fit_trust([0.9], [True], precision=0.8) == 1.0  # one run is no proof
    assert fit_trust([0.5] * 9, [True] * 8 + [False], precision=0.8) == 0.0


def test_sound_runs_move_the_thresholds() -> None:
    runs = [make_run(("a", "x"), id=str(i)) for i in range(9)]

    def judge(calibration: Calibration) -> list[Attribution]:
        pair = np.full((1, M), -9.0, dtype=np.float32)
        return [
            decode(
                run,
                Logits(np.array([i - 4], dtype=np.float32), pair[0], pair, pair[0, :1], pair),
                calibration,
            )
            for i, run in enumerate(runs)
        ]

    before = Calibration()
    assert sum(bool(one.findings()) for one in judge(before)) == 5
    after = recalibrate(before, judge(before), share=0.2)
    assert sum(bool(one.findings()) for one in judge(after)) == 1
    with pytest.raises(ConfigError, match="at least 19 sound runs"):
        recalibrate(before, judge(before), share=0.05)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        recalibrate(before, judge(before), share=1.0)
