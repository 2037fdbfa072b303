"""Every score against a slow loop written from its formula, and the traps of the field."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.metrics import (
    LEVELS,
    RANKED,
    Level,
    Prediction,
    auroc,
    bootstrap,
    count,
    false_alarm_rate,
    mean_of,
    paired_bootstrap,
    rank_hits,
    ratio_of,
    share_right,
    state_truth,
)
from dcl.taxonomy import MODES, ErrorMode
from dcl.trajectory import Fault

# No test asserts a time: a busy machine may be slow to draw examples.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

AGENTS = ("Agent1", "Agent12", "assistant4", "Assistant4")

pairs = st.frozensets(st.tuples(st.sampled_from(AGENTS), st.sampled_from(MODES[:4])), max_size=4)
predictions = st.builds(
    Prediction,
    faults=pairs,
    agents=st.none() | st.frozensets(st.sampled_from(AGENTS)),
    modes=st.none() | st.frozensets(st.sampled_from(MODES[:5])),
)
traces = st.lists(st.tuples(pairs.map(lambda p: Prediction(faults=p)), predictions), min_size=1)


def f1_of(hit: int, wrong: int, missed: int) -> tuple[float, float, float]:
    precision = hit / (hit + wrong) if hit + wrong else 0.0
    recall = hit / (hit + missed) if hit + missed else 0.0
    both = precision + recall
    return precision, recall, 2 * precision * recall / both if both else 0.0


def tally(
    rows: Sequence[tuple[Prediction, Prediction]], level: Level, only: Hashable | None = None
) -> tuple[float, float, float]:
    hit = wrong = missed = 0
    for truth, guess in rows:
        true, said = truth.labels(level), guess.labels(level)
        for label in true | said:
            if only is not None and label != only:
                continue
            hit += label in true and label in said
            wrong += label not in true and label in said
            missed += label in true and label not in said
    return f1_of(hit, wrong, missed)


def slow_macro(
    rows: Sequence[tuple[Prediction, Prediction]], level: Level
) -> tuple[float, float, float]:
    classes: list[Hashable]
    if level == "error":
        classes = [*MODES]
    else:
        classes = [*{label for truth, _ in rows for label in truth.labels(level)}]
    each = [tally(rows, level, only=c) for c in classes]
    if not each:
        return 0.0, 0.0, 0.0
    precision, recall, f1 = zip(*each, strict=True)
    return sum(precision) / len(each), sum(recall) / len(each), sum(f1) / len(each)


@patient
@given(traces, st.sampled_from(LEVELS))
def test_micro_and_macro_are_the_slow_loops(
    rows: list[tuple[Prediction, Prediction]], level: Level
) -> None:
    counts = count([t for t, _ in rows], [g for _, g in rows], level)
    assert np.allclose([s[0] for s in counts.micro()], tally(rows, level))
    assert np.allclose([s[0] for s in counts.macro()], slow_macro(rows, level))


@patient
@given(traces, st.sampled_from(LEVELS), st.integers(0, 9))
def test_weights_are_repeated_traces(
    rows: list[tuple[Prediction, Prediction]], level: Level, seed: int
) -> None:
    weights = np.random.default_rng(seed).multinomial(len(rows), [1 / len(rows)] * len(rows))
    again = [row for row, n in zip(rows, weights, strict=True) for _ in range(n)]
    counts = count([t for t, _ in rows], [g for _, g in rows], level)
    assert np.allclose([s[0] for s in counts.micro([weights])], tally(again, level))
    assert np.allclose([s[0] for s in counts.macro([weights])], slow_macro(again, level))


def test_macro_over_codes_that_occur_leaves_the_others_out() -> None:
    truth = Prediction(faults=frozenset({("a", ErrorMode.FM_1_1)}))
    guess = Prediction(modes=frozenset({ErrorMode.FM_1_1, ErrorMode.FM_3_3}))
    counts = count([truth], [guess], "error")
    assert counts.macro().f1[0] == pytest.approx(1 / 14)
    assert counts.macro(fixed=False).f1[0] == 1.0


def test_levels_fall_back_on_the_pairs() -> None:
    guess = Prediction(faults=frozenset({("a", ErrorMode.FM_1_1), ("b", ErrorMode.FM_1_1)}))
    assert guess.labels("agent") == {"a", "b"}
    assert guess.labels("error") == {ErrorMode.FM_1_1}
    assert Prediction(faults=guess.faults, agents=frozenset()).labels("agent") == frozenset()


def test_a_label_nobody_can_show_is_a_miss() -> None:
    truth = state_truth([Fault("a", ErrorMode.FM_1_1), Fault("Ranker", ErrorMode.FM_1_1)])
    guess = Prediction(faults=frozenset({("a", ErrorMode.FM_1_1)}))
    score = count([truth], [guess], "agent").micro()
    assert (score.precision[0], score.recall[0]) == (1.0, 0.5)


def test_a_label_without_a_mode_counts_for_the_agent_alone() -> None:
    truth = state_truth([Fault("a", None, 3)])
    assert truth.labels("pair") == frozenset()
    assert truth.labels("agent") == {"a"}
    assert (truth.agent, truth.step) == ("a", 3)


def test_truth_with_several_agents_has_no_single_one() -> None:
    truth = state_truth([Fault("a", ErrorMode.FM_1_1), Fault("b", ErrorMode.FM_1_2)])
    assert truth.agent is None
    assert np.isnan(rank_hits([truth], [Prediction(agent="a", step=1)])).all()


@pytest.mark.parametrize(
    ("true", "said"),
    [("Agent1", "Agent12"), ("Agent12", "Agent1"), ("Assistant4", "assistant4"), ("a", "a ")],
)
def test_names_compare_whole(true: str, said: str) -> None:
    truth = Prediction(frozenset({(true, MODES[0])}), agent=true, step=1)
    guess = Prediction(frozenset({(said, MODES[0])}), agent=said, step=1)
    for level in ("pair", "agent"):
        assert count([truth], [guess], level).micro().f1[0] == 0.0
    assert rank_hits([truth], [guess])[0, RANKED.index("agent_accuracy")] == 0.0


@pytest.mark.parametrize(("true", "said"), [(1, 12), (12, 1), (0, 10), (1, -1)])
def test_steps_compare_as_numbers(true: int, said: int) -> None:
    hits = rank_hits([Prediction(agent="a", step=true)], [Prediction(agent="a", step=said)])
    assert hits[0, RANKED.index("step_accuracy")] == 0.0
    assert hits[0, RANKED.index("joint")] == 0.0


steps = st.integers(0, 8)
guesses = st.builds(
    Prediction,
    agent=st.none() | st.sampled_from(AGENTS),
    step=st.none() | steps,
    ranked_steps=st.lists(steps).map(tuple),
    shown=st.none() | steps,
)


@patient
@given(st.sampled_from(AGENTS), steps, guesses)
def test_ranked_scores_are_the_slow_loop(agent: str, step: int, guess: Prediction) -> None:
    order = [*guess.ranked_steps] or ([] if guess.step is None else [guess.step])
    seen: list[int] = []
    for one in order:
        if one not in seen:
            seen.append(one)
    reciprocal = 0.0
    for rank, one in enumerate(seen, start=1):
        if one == step:
            reciprocal = 1 / rank
    expected = [
        agent == guess.agent,
        step == guess.step,
        agent == guess.agent and step == (guess.step if guess.shown is None else guess.shown),
        step in seen[:3],
        reciprocal,
        guess.step in (step - 1, step, step + 1),
        guess.step is not None and step - 3 <= guess.step <= step + 3,
    ]
    assert rank_hits([Prediction(agent=agent, step=step)], [guess])[0].tolist() == expected


numbers = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@patient
@given(numbers, numbers)
def test_auroc_is_the_share_of_ordered_pairs(failed: list[int], sound: list[int]) -> None:
    wins = sum((a > b) + 0.5 * (a == b) for a, b in product(failed, sound))
    labels = [1] * len(failed) + [0] * len(sound)
    assert auroc(failed + sound, labels) == pytest.approx(wins / len(failed) / len(sound))


@patient
@given(numbers, numbers, st.sampled_from([0.5, 0.8, 1.0]))
def test_false_alarms_at_a_detection_rate(
    failed: list[int], sound: list[int], detection: float
) -> None:
    rates = [
        sum(b >= cut for b in sound) / len(sound)
        for cut in failed
        if sum(a >= cut for a in failed) / len(failed) >= detection - 1e-9
    ]
    labels = [1] * len(failed) + [0] * len(sound)
    found = false_alarm_rate(failed + sound, labels, detection=detection)
    assert found == pytest.approx(min(rates))


def test_one_kind_of_run_has_no_ranking() -> None:
    with pytest.raises(ValueError, match="only one kind"):
        auroc([1, 2], [1, 1])


def test_the_interval_covers_the_mean() -> None:
    values = np.random.default_rng(1).normal(0.3, 1.0, size=400)
    found = bootstrap(mean_of(values), len(values))
    assert found.value == pytest.approx(values.mean())
    width = 2 * 1.96 * values.std() / np.sqrt(len(values))
    assert found.high - found.low == pytest.approx(width, rel=0.15)
    assert found.low < found.value < found.high


def test_the_same_seed_gives_the_same_interval() -> None:
    mean = mean_of(np.arange(20.0))
    assert bootstrap(mean, 20, seed=3) == bootstrap(mean, 20, seed=3)
    assert bootstrap(mean, 20, seed=3) != bootstrap(mean, 20, seed=4)


def test_a_ratio_is_over_what_was_measured() -> None:
    parts, wholes = np.array([1.0, 0.0, 3.0]), np.array([2.0, 0.0, 4.0])
    weights = np.array([[1.0, 1.0, 1.0], [2.0, 1.0, 0.0], [0.0, 3.0, 0.0]])
    found = ratio_of(parts, wholes)(weights)
    assert found[:2].tolist() == [4 / 6, 2 / 4]
    assert np.isnan(found[2])
    narrow = bootstrap(ratio_of(parts, wholes), 3)  # resamples of the middle trace are left out
    assert 0.5 <= narrow.low <= narrow.value <= narrow.high <= 0.75
    nothing = bootstrap(ratio_of(parts, 0 * wholes), 3)
    assert all(np.isnan(nothing))


def test_the_surest_are_counted_by_weight() -> None:
    sure, right = np.array([0.2, 0.9, 0.5, 0.7]), np.array([1.0, 1.0, 0.0, 0.0])
    weights = np.array([[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 3.0], [2.0, 2.0, 0.0, 0.0]])
    assert share_right(sure, right, 0.5)(weights).tolist() == [0.5, 0.5, 1.0]
    assert share_right(sure, right, 1.0)(weights).tolist() == [0.5, 0.25, 1.0]


def test_a_paired_difference_sees_the_same_traces() -> None:
    values = np.random.default_rng(0).normal(size=50)
    found = paired_bootstrap(mean_of(values + 0.25), mean_of(values), 50)
    assert np.allclose(found, 0.25)
