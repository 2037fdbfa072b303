from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dcl.adapter import (
    COLUMN_SETS,
    COLUMNS,
    IDENTITY,
    Adapter,
    agent_log_odds,
    describe_turns,
    load_adapter,
    save_adapter,
)
from dcl.attribution import Logits
from dcl.errors import ArtifactError
from dcl.features import FEATURES
from dcl.taxonomy import MODES

M = len(MODES)
INDEX = np.array([0, 1, 0, 2])
ALL = np.ones(3, dtype=bool)


def draw_logits(seed: int = 0) -> Logits:
    rng = np.random.default_rng(seed)
    shapes = {"agent": (3,), "mode": (M,), "pair": (3, M), "step": (4,), "attention": (4, M)}
    drawn = (rng.standard_normal(shape).astype(np.float32) for shape in shapes.values())
    agent, mode, pair, step, attention = drawn
    return Logits(agent, mode, pair, step, attention)


def make_adapter() -> Adapter:
    return Adapter(
        columns=("to_task", "is_first_code"),
        mean=np.array([0.5, 0.0]),
        scale=np.array([2.0, 1.0]),
        weights=np.array([1.5, -1.0]),
        trust=0.25,
        agent=np.array([0.5, 0.75, 2.0]),
        modes=np.linspace(-1, 1, M),
    )


def describe(code: dict[int, float] | None = None, tools: tuple[int, ...] = ()) -> NDArray[Any]:
    features = np.zeros((4, len(FEATURES)), dtype=np.float32)
    features[:, FEATURES.index("to_task")] = [0.0, 1.0, 2.0, 300.0]
    for turn, count in (code or {}).items():
        features[turn, FEATURES.index("cue_code")] = np.log1p(count)
    features[list(tools), FEATURES.index("is_tool_result")] = 1
    wide = np.zeros((4, M), dtype=np.float32)
    return describe_turns(draw_logits(), features, wide, INDEX, np.zeros(4))


def column(turns: NDArray[Any], name: str) -> list[float]:
    values: list[float] = turns[:, COLUMNS.index(name)].tolist()
    return values


def test_columns_of_neighbours_follow_a_slow_loop() -> None:
    rng = np.random.default_rng(4)
    features = rng.random((6, len(FEATURES))).astype(np.float32)
    index = np.array([0, 1, 0, 2, 0, 1])
    logits = replace(
        draw_logits(), step=np.zeros(6, np.float32), attention=np.zeros((6, M), np.float32)
    )
    wide = np.zeros((6, M), dtype=np.float32)
    on_path = rng.random(6)
    turns = describe_turns(logits, features, wide, index, on_path)
    assert column(turns, "on_path") == on_path.tolist()
    names = {
        "loop_next": ("cue_loop", 1),
        "check_next": ("cue_check", 1),
        "numbers_new_next": ("numbers_new", 1),
        "departure_next": ("from_own_previous", 1),
        "taken_up": ("words_in_next", -1),
    }
    for name, (feature, step) in names.items():
        for t in range(6):
            there = 0 <= t + step < 6
            expected = features[t + step, FEATURES.index(feature)] if there else 0
            assert column(turns, name)[t] == pytest.approx(expected)
    for name, of_all in (
        ("departure_next_of_others", "departure_next"),
        ("taken_up_by_others", "taken_up"),
    ):
        for t in range(6):  # agent 0 talks most
            expected = column(turns, of_all)[t] if index[t] else 0
            assert column(turns, name)[t] == pytest.approx(expected)
    alone = describe_turns(
        replace(logits, step=np.zeros(1, np.float32), attention=np.zeros((1, M), np.float32)),
        features[:1],
        wide[:1],
        index[:1],
        on_path[:1],
    )
    assert all(column(alone, name) == [0.0] for name in names)


def test_readings_one_after_the_other_heed_evidence_by_their_product() -> None:
    logits, turns = draw_logits(), describe()
    half = replace(make_adapter(), heed=0.5)
    once = half(logits, turns, INDEX, ALL)
    assert (once.heed, half(once, turns, INDEX, ALL).heed) == (0.5, 0.25)
    assert once.attention.tolist() == logits.attention.tolist()


def test_shares_of_columns_sum_to_the_score_of_a_turn() -> None:
    adapter, logits, turns = make_adapter(), draw_logits(), describe(code={1: 2.0})
    shares = adapter.weigh_columns(turns)
    assert shares.shape == turns.shape
    own = adapter.trust * logits.step
    assert shares.sum(axis=1) + own == pytest.approx(adapter.score_turns(logits, turns))
    others = [i for i, name in enumerate(COLUMNS) if name not in adapter.columns]
    assert not shares[:, others].any()


def test_the_identity_changes_nothing() -> None:
    logits = draw_logits()
    got = IDENTITY(logits, describe(), INDEX, ALL)
    for name in ("agent", "mode", "pair", "step", "attention"):
        assert getattr(got, name) == pytest.approx(getattr(logits, name), abs=1e-6)


def test_an_adapter_follows_a_slow_loop() -> None:
    logits, turns, adapter = draw_logits(), describe({1: 2}), make_adapter()
    got = adapter(logits, turns, INDEX, ALL)
    step = []
    for t in range(4):
        x = [max(-4, min(4, ([0.0, 1.0, 2.0, 300.0][t] - 0.5) / 2)), float(t == 1)]
        step.append(0.25 * float(logits.step[t]) + 1.5 * x[0] - x[1])
    assert got.step == pytest.approx(step, abs=1e-5)
    probs = np.exp(step) / np.exp(step).sum()
    for a in range(3):
        mass = sum(p for p, i in zip(probs, INDEX, strict=True) if i == a)
        expected = 0.5 + 0.75 * logits.agent[a] + 2 * np.log(mass / (1 - mass))
        assert got.agent[a] == pytest.approx(expected, abs=1e-4)
        moved = logits.pair[a] + got.agent[a] - logits.agent[a] + adapter.modes
        assert got.pair[a] == pytest.approx(moved, abs=1e-5)
    assert got.mode == pytest.approx(logits.mode + adapter.modes, abs=1e-6)
    assert np.array_equal(got.attention, logits.attention)


def test_without_heed_modes_are_the_shifts_alone() -> None:
    logits = draw_logits()
    modes = np.linspace(-1, 1, M)
    silent = replace(IDENTITY, modes=modes, heed=0.0)
    found = silent(logits, np.zeros((4, len(COLUMNS))), INDEX, ALL)
    np.testing.assert_allclose(found.mode, modes, atol=1e-6)
    lead = np.log(1 / (1 + np.exp(-logits.agent)))[:, None]
    np.testing.assert_allclose(found.pair, lead + modes, atol=1e-6)
    np.testing.assert_array_equal(found.agent, logits.agent)


def test_without_heed_no_pair_is_likelier_than_its_mode() -> None:
    """Also where an agent is certain, as one that nobody else can be blamed beside."""
    certain = replace(draw_logits(), agent=np.array([9.0, -9.0, 40.0], np.float32))
    silent = replace(IDENTITY, modes=np.linspace(-3, -0.5, M), heed=0.0)
    turns = np.zeros((4, len(COLUMNS)))
    once = silent(certain, turns, INDEX, ALL)
    moved = replace(IDENTITY, agent=np.array([2.0, 1.0, 0.0]))
    for found in (once, IDENTITY(once, turns, INDEX, ALL), moved(once, turns, INDEX, ALL)):
        assert (found.pair <= found.mode + 1e-6).all()
        assert (found.pair <= found.agent[:, None]).all()
        assert found.pair.argmax(axis=0).tolist() == [found.agent.argmax()] * M


def test_log_odds_are_finite_where_one_agent_has_all_of_it() -> None:
    odds = agent_log_odds(np.array([900.0, 0, 0, 0]), INDEX, ALL)
    assert odds.tolist() == [8, -8, -8]
    assert agent_log_odds(np.zeros(2), np.zeros(2, dtype=np.int64), ALL[:1]).tolist() == [8]


def test_turns_of_bystanders_have_no_part_in_the_odds() -> None:
    step, acting = np.array([5.0, 1.0, 7.0, 1.5]), np.array([False, True, True])
    share = 1 / (1 + np.exp(0.5))  # agents 1 and 2 have one turn each, half a nat apart
    odds = np.log(share / (1 - share))
    assert agent_log_odds(step, INDEX, acting) == pytest.approx([-8, odds, -odds], abs=1e-5)
    logits, turns = draw_logits(), describe({1: 2})
    louder = replace(logits, step=logits.step + np.array([9, 0, 9, 0], dtype=np.float32))
    one, two = (make_adapter()(each, turns, INDEX, acting) for each in (logits, louder))
    assert one.agent[1:] == pytest.approx(two.agent[1:])


def test_structure_says_where_code_and_tools_stand() -> None:
    turns = describe({0: 1, 1: 2, 2: 5, 3: 9}, tools=(3,))
    assert column(turns, "has_code") == [0, 1, 1, 0]
    assert column(turns, "is_first_code") == [0, 1, 0, 0]
    assert column(turns, "after_code") == [0, 0, 1, 1]
    assert column(turns, "code_next") == [1, 1, 0, 0]
    assert column(turns, "tool_next") == [0, 0, 1, 0]
    assert column(turns, "talks_most") == [1, 0, 1, 0]
    assert column(turns, "net_step") == pytest.approx(draw_logits().step.tolist())


def test_every_set_of_columns_is_known_and_has_no_column_twice() -> None:
    for names in COLUMN_SETS.values():
        assert set(names) <= set(COLUMNS)
        assert len(set(names)) == len(names)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    save_adapter(make_adapter(), tmp_path / "a.json")
    again = load_adapter(tmp_path / "a.json")
    logits, turns = draw_logits(), describe({1: 2})
    for adapter in (again, make_adapter()):
        assert adapter(logits, turns, INDEX, ALL).pair == pytest.approx(
            make_adapter()(logits, turns, INDEX, ALL).pair, abs=1e-6
        )
    save_adapter(replace(IDENTITY), tmp_path / "b.json")
    assert load_adapter(tmp_path / "b.json").columns == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turns": [{"column": "x", "mean": 0, "scale": 1, "weight": 1}]}, "not known"),
        ({"turns": [{"column": "to_task", "mean": 0, "scale": 0, "weight": 1}]}, "scales over 0"),
        ({"agent": [1, 2]}, "finite numbers"),
        ({"trust": "much"}, "expected what dcl fit writes"),
        ({"modes": {}}, "expected what dcl fit writes"),
    ],
)
def test_a_damaged_adapter_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    file = tmp_path / "a.json"
    save_adapter(make_adapter(), file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ArtifactError, match=message):
        load_adapter(file)
    with pytest.raises(ArtifactError):
        load_adapter(tmp_path / "none.json")
