from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import bagger, light, make_run, runs, unit_rows

from dcl.cues import CUES, count_cues
from dcl.features import DEVIATION_FEATURES, FEATURES, TEXT_FEATURES, describe_vectors
from dcl.trajectory import Trajectory, Turn, TurnKind


def columns(*said: tuple[str, str], task: str = "") -> dict[str, list[float]]:
    """Text features by name."""
    features = bagger()(make_run(*said, task=task)).features
    return {name: features[:, i].tolist() for i, name in enumerate(TEXT_FEATURES)}


def test_every_column_has_one_name() -> None:
    assert len(set(FEATURES)) == len(FEATURES)
    assert FEATURES == TEXT_FEATURES + DEVIATION_FEATURES


@light
@given(runs(most=5))
def test_any_text_gives_finite_features(run: Trajectory) -> None:
    features = bagger()(run).features
    assert features.dtype == np.float32
    assert features.shape == (len(run.turns), len(TEXT_FEATURES))
    assert np.isfinite(features).all()


@pytest.mark.parametrize(
    "text",
    ["", "\x00", "\ud800", "🙂" * 50, "İ" * 40, "\n" * 88_000, "; \n" * 29_000, "1" * 88_000,
     "x " * 44_000, " \n-" * 29_000, "\r\n\t" * 29_000],
)  # fmt: skip
def test_odd_and_very_long_texts_give_finite_features(text: str) -> None:
    assert np.isfinite(bagger()(make_run(("a", text), ("b", "x"))).features).all()


@light
@given(st.lists(st.sampled_from(["error", "terror", "check", "checked", "i'm", "some", "x"])))
def test_words_are_counted_as_by_searching_for_every_pattern(words: list[str]) -> None:
    text = " ".join(words)
    expected = {"error": "error", "check": "check", "role": "i'm", "vague": "some"}
    counts = dict(zip(CUES, count_cues(text), strict=True))
    for cue, stem in expected.items():
        assert counts[cue] == len(re.findall(rf"\b{stem}", text))


@light
@given(runs(text=st.text("ab1 .?", max_size=20)))
def test_names_of_agents_are_no_feature(run: Trajectory) -> None:
    other = make_run(*((t.agent[::-1], t.content) for t in run.turns), task=run.task)
    assert np.array_equal(bagger()(run).features, bagger()(other).features)


def test_layout_of_a_known_run() -> None:
    got = columns(("a", "x" * 9), ("b", "x" * 99), ("a", ""), ("a", "x" * 9))
    assert got["position"] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert got["is_first"] == [1, 0, 0, 0]
    assert got["is_last"] == [0, 0, 0, 1]
    assert got["log_turn"] == pytest.approx([math.log1p(t) for t in range(4)])
    assert got["log_turns_left"] == pytest.approx([math.log1p(3 - t) for t in range(4)])
    assert got["log_turns"] == pytest.approx([math.log1p(4)] * 4)
    assert got["log_agents"] == pytest.approx([math.log1p(2)] * 4)
    assert got["agent_order"] == [0, 0.5, 0, 0]
    assert got["turn_share"] == [0.75, 0.25, 0.75, 0.75]
    assert got["char_share"] == pytest.approx([18 / 117, 99 / 117, 18 / 117, 18 / 117])
    assert got["own_position"] == pytest.approx([0, 0, 1 / 3, 2 / 3])
    assert got["is_own_first"] == [1, 1, 0, 0]
    assert got["is_own_last"] == [0, 1, 0, 1]
    assert got["log_own_turns"] == pytest.approx([math.log1p(n) for n in (3, 1, 3, 3)])
    logs = [math.log(10), math.log(100), 0.0, math.log(10)]
    assert got["log_chars"] == pytest.approx([x / 3 for x in logs])
    assert got["length_in_trace"] == pytest.approx([x - sum(logs) / 4 for x in logs], abs=1e-6)
    own = (logs[0] + logs[2] + logs[3]) / 3
    assert got["length_in_own"] == pytest.approx(
        [logs[0] - own, 0, logs[2] - own, logs[3] - own], abs=1e-6
    )
    assert got["is_short"] == [1, 0, 1, 1]


def test_tool_results_are_known_by_kind_or_by_their_first_word() -> None:
    turns = (Turn("a", "x", kind=TurnKind.TOOL_RESULT), Turn("a", "exitcode: 0"), Turn("a", "x"))
    features = bagger()(Trajectory("r", "", turns)).features
    assert features[:, TEXT_FEATURES.index("is_tool_result")].tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("cue", "shows", "does_not"),
    [
        ("code", "```py", "coda"),
        ("error", "Traceback (most recent call last)", "terror"),
        ("error", "exitcode: 1", "exitcode: 0"),
        ("success", "Verified.", "incorrect"),
        ("assumption", "let's say", "as is"),
        ("check", "I will test it", "latest"),
        ("termination", "TASK_DONE", "abandoned"),
        ("question", "why?", "whyever"),
        ("contrast", "However, no", "butter"),
        ("vague", "something", "awesome"),
        ("list", "x\n1. y", "x 1. y"),
        ("repeat", "once more", "against"),
        ("ignore", "regardless", "regard"),
        ("skip", "no need", "need"),
        ("agree", "I agree", "greed"),
        ("loop", "forever", "for ever"),
        ("goal", "our goal", "go al"),
        ("role", "my role", "memory"),
        ("json", '{"a": 1}', "{a: 1}"),
        ("answer", "\\boxed{3}", "box"),
    ],
)
def test_cues(cue: str, shows: str, does_not: str) -> None:
    got = columns(("a", shows), ("b", does_not))[f"cue_{cue}"]
    assert got[0] > 0
    assert got[1] == 0


def test_cues_grow_with_the_logarithm_of_their_number() -> None:
    assert columns(("a", "?" * 7))["cue_question"] == pytest.approx([math.log(8)])


def test_errors_before_and_after_a_turn() -> None:
    got = columns(("a", "fine"), ("b", "error error"), ("a", "fine"), ("b", "fail " * 9))
    assert got["error_before"] == [0, 0, 2, 0]
    assert got["error_after"] == [2, 0, 3, 0]


def test_a_claim_needs_evidence() -> None:
    got = columns(("a", "It is accurate."), ("a", "accurate, I tested it"), ("a", "no"))
    assert got["claim_without_evidence"] == [1, 0, 0]


def test_numbers_of_the_task_the_past_and_nobody_else() -> None:
    got = columns(("a", "3 and 5"), ("b", "5 and 7"), ("a", "none"), task="given 3")
    assert got["numbers_in_task"] == [0.5, 0, 0]
    assert got["numbers_new"] == [0.5, 0.5, 0]
    assert got["numbers_alone"] == [0.5, 0.5, 0]
    assert got["has_numbers"] == [1, 1, 0]


def test_answers_that_agree_and_answers_that_change() -> None:
    said = [("a", "it is 7"), ("b", "7"), ("c", "8"), ("a", "now 8"), ("b", "7.0")]
    got = columns(*said)
    # of the turns of others that end in a number, the share that ends in the same
    assert got["answer_agreement"] == pytest.approx([1 / 3, 1 / 3, 1 / 4, 1 / 3, 0])
    assert got["answer_changed"] == [0, 0, 0, 1, 1]


def test_12_is_not_1() -> None:
    got = columns(("a", "12"), ("b", "1"), task="1")
    assert got["numbers_in_task"] == [0, 1]
    assert got["answer_agreement"] == [0, 0]


def test_words_shared_with_task_past_and_neighbours() -> None:
    got = columns(("a", "the sum"), ("b", "sum is"), ("a", "the skip"), ("b", "sum is"), task="sum")
    assert got["words_in_task"] == [0.5, 0.5, 0, 0.5]
    assert got["words_in_previous"] == [0, 0.5, 0, 0]
    assert got["words_in_own_previous"] == [0, 0, 0.5, 1]
    assert got["words_seen"] == [0, 0.5, 0.5, 1]
    assert got["words_in_next"] == [0.5, 0, 0, 0]
    assert got["is_repeat"] == [0, 0, 0, 1]


def slow_deviation(
    vectors: list[list[float]], task: list[float], agents: list[int]
) -> list[list[float]]:
    """All deviation features by their definition."""

    def cosine(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    def far(turns: list[int], t: int) -> float:
        if not turns:
            return 0.0
        return 1 - sum(cosine(vectors[t], vectors[s]) for s in turns) / len(turns)

    def near(turns: list[int], t: int) -> float:
        return max((cosine(vectors[t], vectors[s]) for s in turns), default=0.0)

    T = len(vectors)
    mates = [[s for s in range(T) if agents[s] == agents[t] and s != t] for t in range(T)]
    others = [[s for s in range(T) if agents[s] != agents[t]] for t in range(T)]
    rows = []
    for t in range(T):
        own_earlier = [s for s in mates[t] if s < t]
        family = [far(mates[s], s) for s in range(T) if agents[s] == agents[t]]
        rows.append(
            [
                far([t - 1] if t else [], t),
                far(own_earlier[-1:], t),
                far(mates[t], t),
                far([s for s in range(T) if s != t], t),
                far(others[t], t),
                cosine(vectors[t], task),
                cosine(vectors[t], vectors[t + 1]) if t + 1 < T else 0.0,
                near(list(range(t)), t),
                near(others[t], t),
                sum(family) / len(family),
            ]
        )
    return rows


@pytest.mark.parametrize("agents", [[0], [0, 0], [0, 1], [0, 1, 0, 2, 1, 0, 0], [0] * 6])
def test_deviation_follows_its_definition(agents: list[int]) -> None:
    rng = np.random.default_rng(len(agents))
    vectors, task = unit_rows(rng, len(agents), 5), unit_rows(rng, 5)
    fast = describe_vectors(vectors, task, np.array(agents))
    slow = slow_deviation(vectors.tolist(), task.tolist(), agents)
    assert fast.shape == (len(agents), len(DEVIATION_FEATURES))
    assert fast.dtype == np.float32
    assert fast == pytest.approx(np.array(slow), abs=1e-5)


def test_a_zero_vector_gives_finite_deviation() -> None:
    vectors: NDArray[np.float32] = np.zeros((3, 4), dtype=np.float32)
    assert np.isfinite(describe_vectors(vectors, vectors[0], np.array([0, 1, 0]))).all()


@light
@given(runs(), st.data())
def test_turn_by_turn_the_bag_is_that_of_the_whole_run(
    run: Trajectory, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(run.turns)))
    draft = bagger().start(run.task)
    for turn in run.turns[:cut]:
        draft.extend([turn])
        draft.bag()
    draft.extend(run.turns[cut:])
    grown, whole = draft.bag(), bagger()(run)
    assert np.array_equal(grown.features, whole.features)
    assert np.array_equal(grown.reply_to, whole.reply_to)
    assert np.array_equal(grown.agent_index, whole.agent_index)
    assert [window.tolist() for window in grown.windows] == [w.tolist() for w in whole.windows]
    for one, other in zip(grown.words, whole.words, strict=True):
        for name in ("turn", "row", "count"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
