from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import any_text, bagger, light, make_run

from dcl.adapter import COLUMNS
from dcl.bag import Bag
from dcl.references import MOST_HOPS, References, find_symptom, mark_path
from dcl.runtime import OnnxScorer, load
from dcl.trajectory import Turn


def refer(bag: Bag, turn: int) -> list[float]:
    """Slow form of `References`, one turn at a time."""
    count = len(bag.agent_index)
    said = [
        {int(r) for d in bag.words for t, r in zip(d.turn, d.row, strict=True) if t == turn}
        for turn in range(count)
    ]

    def rarity(rows: set[int]) -> float:
        return sum(log((1 + count) / (1 + sum(r in turn for turn in said))) + 1e-6 for r in rows)

    strength = []
    for earlier in range(turn):
        common = rarity(said[earlier] & said[turn]) / max(rarity(said[turn]), 1e-9)
        answered = 0.25 * (bag.reply_to[turn] == earlier)
        strength.append(common + answered + 0.1 * (earlier == turn - 1))
    return strength


@light
@given(st.lists(any_text, min_size=1, max_size=5))
def test_references_follow_a_slow_loop(said: list[str]) -> None:
    bag = bagger()(make_run(*(("abc"[i % 3], text) for i, text in enumerate(said))))
    references = References(bag)
    for turn in (*range(len(said)), 0):  # and once more: nothing is left of the turn before
        assert references(turn).tolist() == pytest.approx(refer(bag, turn), abs=1e-9)


def test_a_walk_goes_from_reference_to_reference() -> None:
    run = make_run(
        ("planner", "skip the sum"),
        ("coder", "skip the sum again"),
        ("critic", "."),
        ("tool", "coder: error, failed to skip the sum again"),
        ("planner", "ok"),
    )
    bag = bagger()(run)
    assert find_symptom(bag) == 3
    assert References(bag).walk(3) == [3, 1, 0]
    assert References(bag).walk(3, 1) == [3, 1]
    assert References(bag).walk(3, most=1) == [3, 1]
    assert mark_path(bag).tolist() == [1, 1, 0, 0, 0]


def test_a_walk_of_one_turn_goes_nowhere() -> None:
    assert mark_path(bagger()(make_run(("a", "error")))).tolist() == [0]


def test_a_long_way_is_cut() -> None:
    run = make_run(*(("ab"[i % 2], "ok") for i in range(MOST_HOPS + 5)))
    assert mark_path(bagger()(run)).tolist() == [0] * 4 + [1] * MOST_HOPS + [0]


def test_the_scorer_gives_the_path_to_the_adapter() -> None:
    attributor = load("lite", threads=1, injected=True)
    assert isinstance(attributor.scorer, OnnxScorer)
    run = make_run(("a", "take 12 of 40 eggs"), ("b", "ok"), ("a", "error: no 40 eggs to take"))
    bag = attributor.bagger(run)
    *turns, task = attributor.scorer.encoder([*bag.windows, bag.task])
    _, columns = attributor.scorer.observe(bag, np.stack(turns), task)
    on_path = columns[:, COLUMNS.index("on_path")]
    assert on_path.tolist() == mark_path(bag).tolist()
    assert on_path[0] == 1


def test_a_prompt_that_speaks_of_errors_is_no_symptom() -> None:
    said = (("planner", "the sum"), ("coder", "error: the sum is wrong"), ("planner", "done"))
    asked = Turn("user", "error, failed: wrong", role="user")
    run = make_run(*said)
    bag = bagger()(replace(run, turns=(asked, *run.turns)))
    assert mark_path(bag).tolist() == [0, 1, 0, 0]
