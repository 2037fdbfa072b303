from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import Event, Thread, current_thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from tiny import bagger, light, make_run

from dcl.attribution import (
    Attribution,
    Attributor,
    Calibration,
    Logits,
    decode,
    sigmoid,
    softmax,
)
from dcl.bag import Bag
from dcl.errors import ConfigError, TraceError
from dcl.taxonomy import MODES, ErrorMode
from dcl.trajectory import Fault, Trajectory, Turn, TurnKind

M = len(MODES)
floats = st.floats(-1e4, 1e4, width=32)

RUN = Trajectory(
    "run",
    "task",
    (
        Turn("a", "x", step=10),
        Turn("b", "y", step=11),
        Turn("a", "z", step=12),
        Turn("c", "w", step=1),
    ),
)
"""Agents a, b, c; the numbers of its steps are not the positions of its turns."""


def make_logits(run: Trajectory, *, low: float = -4.0, **values: Any) -> Logits:
    """Low logits for everything, except where `values` says otherwise."""
    A, T = len(run.agents), len(run.turns)
    shapes = {"agent": (A,), "mode": (M,), "pair": (A, M), "step": (T,), "attention": (T, M)}
    arrays = {name: np.full(shape, low, dtype=np.float32) for name, shape in shapes.items()}
    for name, entries in values.items():
        for place, value in entries.items():
            arrays[name][place] = value
    agent, mode, pair, step, attention = arrays.values()
    return Logits(agent, mode, pair, step, attention)


def random_logits(run: Trajectory, seed: int = 0) -> Logits:
    rng = np.random.default_rng(seed)
    A, T = len(run.agents), len(run.turns)
    shapes: list[tuple[int, ...]] = [(A,), (M,), (A, M), (T,), (T, M)]
    drawn = (rng.standard_normal(shape).astype(np.float32) * 3 for shape in shapes)
    agent, mode, pair, step, attention = drawn
    return Logits(agent, mode, pair, step, attention)


def attribute(calibration: Calibration | None = None, **values: Any) -> Attribution:
    return decode(RUN, make_logits(RUN, **values), calibration or Calibration())


@light
@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, max_side=5), elements=floats))
def test_sigmoid_follows_its_formula(x: NDArray[np.float32]) -> None:
    fast = sigmoid(x)
    assert fast.dtype == np.float32
    slow = [1 / (1 + math.exp(-v)) if v > -700 else 0.0 for v in x.ravel().tolist()]
    assert fast.ravel() == pytest.approx(np.array(slow), abs=1e-6)


@light
@given(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=5), elements=floats)
)
def test_softmax_follows_its_formula(x: NDArray[np.float32]) -> None:
    fast = softmax(x, axis=0)
    assert fast.dtype == np.float32
    for column, row in zip(fast.T, x.T.astype(float).tolist(), strict=True):
        powers = [math.exp(v - max(row)) for v in row]
        assert column == pytest.approx(np.array(powers) / sum(powers), abs=1e-6)


def test_decoding_follows_a_slow_loop() -> None:
    logits = random_logits(RUN)
    calibration = Calibration(
        agent_temperature=2.0, mode_temperature=0.5, pair_temperature=3.0, step_temperature=4.0
    )
    got = decode(RUN, logits, calibration)
    assert got.agents == ("a", "b", "c")
    assert got.steps == (10, 11, 12, 1)
    assert got.agent_index.tolist() == [0, 1, 0, 2]
    for name, temperature in (("agent", 2.0), ("mode", 0.5), ("pair", 3.0)):
        slow = [1 / (1 + math.exp(-x / temperature)) for x in getattr(logits, name).ravel()]
        assert getattr(got, f"{name}_probs").ravel() == pytest.approx(np.array(slow), abs=1e-6)
    powers = [math.exp(x / 4.0) for x in logits.step]
    assert got.step_probs == pytest.approx(np.array(powers) / sum(powers), abs=1e-6)
    for t in range(4):
        for m in range(M):
            own = [s for s in range(4) if got.agent_index[s] == got.agent_index[t]]
            total = sum(math.exp(logits.attention[s, m]) for s in own)
            share = math.exp(logits.attention[t, m]) / total
            assert got.weights[t, m] == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize("heed", [0.0, 0.25, 1.0])
def test_a_turn_speaks_by_its_step_logit_as_far_as_the_network_is_not_heeded(heed: float) -> None:
    logits = replace(random_logits(RUN), heed=heed)
    got = decode(RUN, logits, Calibration(step_temperature=2.0))
    mixed = heed * logits.attention + (1 - heed) * logits.step[:, None] / 2.0
    assert got.weights == pytest.approx(
        decode(RUN, replace(logits, attention=mixed, heed=1.0), Calibration()).weights, abs=1e-6
    )
    if heed == 0:
        own = got.agent_index == 0
        likeliest = int(np.argmax(np.where(own, got.step_probs, 0)))
        assert [got.turn_of(0, mode) for mode in (None, 3)] == [likeliest, likeliest]


def test_evidence_weights_sum_to_1_over_the_turns_of_an_agent() -> None:
    got = decode(RUN, random_logits(RUN), Calibration())
    for agent in range(3):
        assert got.weights[got.agent_index == agent].sum(axis=0) == pytest.approx(np.ones(M))
    assert got.step_probs.sum() == pytest.approx(1)
    assert got.turn_weights.sum() == pytest.approx(1)


def test_huge_logits_give_finite_probabilities() -> None:
    logits = random_logits(RUN)
    names = ("agent", "mode", "pair", "step", "attention")
    huge = replace(logits, **{name: getattr(logits, name) * 1e6 for name in names})
    got = decode(RUN, huge, Calibration())
    json.dumps(got.to_dict(threshold=0.5), allow_nan=False)


def test_the_likeliest_agent_comes_first_and_of_one_agent_the_likeliest_mode() -> None:
    got = attribute(pair={(0, 3): 1.0, (0, 8): 3.0, (2, 3): 2.0}, agent={2: 1.0})
    assert [(f.agent, f.mode) for f in got.faults()] == [
        ("c", ErrorMode.FM_1_4),
        ("a", ErrorMode.FM_2_4),
        ("a", ErrorMode.FM_1_4),
    ]
    probs = [finding.prob for finding in got.findings()]
    assert probs == pytest.approx([1 / (1 + math.exp(-x)) for x in (2.0, 3.0, 1.0)])
    assert [f.mode for f in got.faults(top_k=2)] == [ErrorMode.FM_2_4, ErrorMode.FM_1_4]
    with pytest.raises(ValueError, match="top_k must be > 0, got 0"):
        got.faults(top_k=0)


def test_a_probability_at_the_threshold_is_declared() -> None:
    got = attribute(Calibration(pair_threshold=0.5), pair={(1, 2): 0.0})
    assert got.faults() == (Fault("b", ErrorMode.FM_1_3, 11),)


def test_an_agent_over_its_threshold_without_a_pair_is_declared_with_no_mode() -> None:
    got = attribute(agent={0: 2.0, 1: 3.0}, pair={(1, 0): 1.0}, step={2: 4.0})
    assert got.findings()[0].fault == Fault("b", ErrorMode.FM_1_1, 11)
    bare = got.findings()[1]
    assert bare.fault == Fault("a", None, 12)
    assert bare.prob == pytest.approx(1 / (1 + math.exp(-2)))


def test_nothing_over_a_threshold_is_nothing_declared() -> None:
    assert attribute().faults() == ()
    assert attribute().modes() == ()


def test_a_threshold_replaces_the_calibrated_ones_of_agents_and_pairs() -> None:
    strict = Calibration(agent_threshold=0.99, pair_threshold=0.99)
    got = attribute(strict, agent={0: 1.0}, pair={(1, 2): 2.0})
    assert got.faults() == ()
    assert {(f.agent, f.mode) for f in got.faults(threshold=0.5)} == {
        ("a", None),
        ("b", ErrorMode.FM_1_3),
    }
    assert len(got.faults(threshold=0.0)) == 3 * M
    assert got.faults(threshold=1.0) == ()


def test_top_k_ignores_all_thresholds() -> None:
    got = attribute(agent={0: 9.0}, pair={(1, 2): -3.0, (2, 13): -2.0})
    assert [(f.agent, f.mode) for f in got.faults(top_k=2)] == [
        ("c", ErrorMode.FM_3_3),
        ("b", ErrorMode.FM_1_3),
    ]
    assert got.faults(top_k=1, threshold=0.0) == got.faults(top_k=2)[:1]
    assert len(got.faults(top_k=1000)) == 3 * M


def test_of_equal_pairs_the_first_wins() -> None:
    assert attribute().faults(top_k=1) == (Fault("a", ErrorMode.FM_1_1, 10),)


def test_step_is_the_number_in_the_log_and_turn_its_position() -> None:
    finding = attribute(pair={(2, 5): 4.0}).findings()[0]
    assert (finding.fault.step, finding.turn) == (1, 3)


def test_the_turn_of_a_fault_is_one_of_its_agent() -> None:
    got = attribute(pair={(0, 5): 4.0}, step={1: 9.0}, attention={(2, 5): 5.0})
    assert got.findings()[0].turn == 2


@light
@given(st.integers(0, 10**6))
def test_every_turn_of_every_fault_is_one_of_its_agent(seed: int) -> None:
    got = decode(RUN, random_logits(RUN, seed), Calibration())
    for agent in range(3):
        for mode in (None, *range(M)):
            assert got.agent_index[got.turn_of(agent, mode)] == agent


def test_the_turn_of_a_fault_weighs_posterior_and_evidence() -> None:
    by_step = attribute(pair={(0, 5): 4.0}, step={2: 2.0})
    assert by_step.turn_of(0, 5) == 2
    by_evidence = attribute(pair={(0, 5): 4.0}, attention={(0, 5): 2.0}, step={2: -3.0})
    assert by_evidence.turn_of(0, 5) == 0


def test_modes_have_their_own_threshold() -> None:
    got = attribute(Calibration(mode_threshold=0.6), mode={3: 0.2, 7: 1.0, 9: 2.0})
    assert got.modes() == (MODES[9], MODES[7])


def test_evidence_is_what_weighs_most_strongest_first() -> None:
    got = attribute(pair={(0, 5): 4.0, (1, 5): 1.0}, attention={(2, 5): 3.0})
    assert got.evidence() == tuple(np.argsort(-got.turn_weights, kind="stable")[:3])
    assert got.evidence()[:2] == (2, 1)
    assert got.evidence(1) == (2,)
    assert len(got.evidence(99)) == 4


def test_turns_weigh_the_same_where_nothing_speaks_for_a_failure() -> None:
    got = replace(attribute(), pair_probs=np.zeros((3, M), dtype=np.float32))
    assert got.turn_weights == pytest.approx(np.full(4, 0.25))


def test_json_is_strict_and_has_these_keys_alone() -> None:
    row = attribute(pair={(0, 5): 4.0}, agent={1: 2.0}).to_dict()
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert list(row) == [
        *("id", "agents", "modes", "faults", "evidence", "steps", "step_sets", "abstains")
    ]
    assert set(row["agents"][0]) == {"name", "prob"}
    assert set(row["modes"][0]) == {"code", "title", "prob"}
    assert set(row["faults"][0]) == {"agent", "mode", "step", "turn", "prob"}
    assert set(row["evidence"][0]) == {"step", "turn", "agent", "weight"}
    assert set(row["steps"][0]) == {"turn", "step", "prob"}


def test_json_of_a_known_run() -> None:
    row = attribute(pair={(0, 5): 4.0}, agent={1: 2.0}, attention={(2, 5): 4.0}).to_dict(evidence=1)
    assert row["id"] == "run"
    assert row["agents"][0] == {"name": "b", "prob": 0.880797}
    assert len(row["agents"]) == 3
    assert len(row["modes"]) == M
    assert row["faults"] == [
        {"agent": "b", "mode": None, "step": 11, "turn": 1, "prob": 0.880797},
        {"agent": "a", "mode": "FM-2.1", "step": 12, "turn": 2, "prob": 0.982014},
    ]
    assert [(e["turn"], e["step"], e["agent"]) for e in row["evidence"]] == [(2, 12, "a")]
    assert [(s["turn"], s["step"]) for s in row["steps"]] == [(0, 10), (1, 11), (2, 12), (3, 1)]
    assert (
        attribute(pair={(0, 5): 4.0}).to_dict(top_k=1)["faults"]
        == (attribute(pair={(0, 5): 4.0}).to_dict()["faults"])
    )


class CountingScorer:
    """Logits in which the loudest agent failed; keeps the sizes of its batches."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, bags: Sequence[Bag]) -> list[Logits]:
        self.sizes.append(len(bags))
        return [self._score(bag) for bag in bags]

    def _score(self, bag: Bag) -> Logits:
        turns = np.bincount(bag.agent_index).astype(np.float32)
        pair = np.repeat(turns[:, None], M, axis=1) - 2.5
        step = np.zeros(len(bag.windows), dtype=np.float32)
        return Logits(
            turns - 2.5, pair.max(axis=0), pair, step, np.zeros((len(step), M), np.float32)
        )


def test_an_attributor_needs_no_more_than_a_bagger_and_a_scorer() -> None:
    run = make_run(("a", "x"), ("b", "y"), ("b", "z"), ("b", "w"))
    got = Attributor(bagger(), CountingScorer(), Calibration())(run)
    assert {fault.agent for fault in got.faults()} == {"b"}
    assert got.trajectory_id == "run"


def test_batches_keep_the_order_and_bound_the_memory() -> None:
    scorer = CountingScorer()
    attributor = Attributor(bagger(), scorer, Calibration())
    taken: list[int] = []
    given = 0

    def many() -> Iterator[Trajectory]:
        for i in range(17):
            assert len(taken) - given < 6
            taken.append(i)
            yield make_run(*[("a", "x")] * (i + 1), id=str(i))

    for got in attributor.batch(many(), batch_size=3):
        assert got.trajectory_id == str(given)
        given += 1
    assert taken == list(range(given)) == list(range(17))
    assert scorer.sizes == [3, 3, 3, 3, 3, 2]
    assert list(attributor.batch([])) == []


@pytest.mark.parametrize("count", [0, 1, 3, 4, 6])
def test_what_the_source_raises_comes_after_the_runs_before_it(count: int) -> None:
    attributor = Attributor(bagger(), CountingScorer(), Calibration())

    def broken() -> Iterator[Trajectory]:
        for i in range(count):
            yield make_run(("a", "x"), id=str(i))
        raise OSError("the disk is gone")

    stream = attributor.batch(broken(), batch_size=3)
    assert [next(stream).trajectory_id for _ in range(count)] == [str(i) for i in range(count)]
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(stream)
    assert caught.traceback[-1].name == "broken"
    assert list(stream) == []


def test_what_the_bagger_raises_comes_out_too() -> None:
    def refuse(run: Trajectory) -> Bag:
        raise TraceError(run.id, "too long")

    stream = Attributor(refuse, CountingScorer(), Calibration()).batch([make_run(("a", "x"))])
    with pytest.raises(TraceError, match="run: too long"):
        next(stream)


def test_whoever_stops_does_not_wait_for_a_source_that_is_blocked() -> None:
    blocked, release = Event(), Event()
    readers: list[Thread] = []

    def silent() -> Iterator[Trajectory]:
        yield from (make_run(("a", "x")) for _ in range(4))
        readers.append(current_thread())
        blocked.set()
        release.wait()

    stream = Attributor(bagger(), CountingScorer(), Calibration()).batch(silent(), batch_size=2)
    for _ in range(4):
        next(stream)
    blocked.wait()
    stream.close()  # type: ignore[attr-defined]
    assert list(stream) == []
    release.set()
    readers[0].join()  # and once the source goes on, the thread ends


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_of_less_than_one_is_refused_at_once(size: int) -> None:
    with pytest.raises(ConfigError, match=f"batch_size: expected at least 1, got {size}"):
        Attributor(bagger(), CountingScorer(), Calibration()).batch([], batch_size=size)


@pytest.mark.parametrize("order", [[2, 0, 1], [1, 2, 0]])
def test_renaming_agents_renames_the_findings(order: list[int]) -> None:
    names = dict(zip("abc", [f"agent{i}" for i in order], strict=True))
    turns = tuple(replace(turn, agent=names[turn.agent]) for turn in RUN.turns)
    logits = random_logits(RUN)
    plain = decode(RUN, logits, Calibration()).faults(threshold=0.3)
    renamed = decode(replace(RUN, turns=turns), logits, Calibration()).faults(threshold=0.3)
    assert renamed == tuple(replace(fault, agent=names[fault.agent]) for fault in plain)


def test_the_person_who_asks_and_the_prompt_cannot_fail() -> None:
    turns = (
        Turn("system", "be kind", kind=TurnKind.SYSTEM),
        Turn("user", "2 + 2?", role="user"),
        Turn("solver", "5", role="assistant"),
        Turn("Critic", "fine", role="user"),  # a name of its own: some logs call every peer user
    )
    run = Trajectory("r", "", turns)
    assert run.bystanders == {"system", "user"}
    got = decode(run, random_logits(run), Calibration())
    assert (got.agent_probs[:2] == 0).all()
    assert (got.pair_probs[:2] == 0).all()
    assert (got.step_probs[:2] == 0).all()
    assert got.step_probs.sum() == pytest.approx(1)
    assert {fault.agent for fault in got.faults(top_k=3)} <= {"solver", "Critic"}
    assert set(got.evidence(2)) == {2, 3}


def test_a_run_of_bystanders_alone_is_judged_all_the_same() -> None:
    run = Trajectory("r", "", (Turn("user", "hello", role="user"),))
    assert run.bystanders == frozenset()
    assert decode(run, random_logits(run), Calibration()).agent_probs[0] > 0


def with_cuts(*probs: float, **values: Any) -> Attribution:
    """Cuts that equal their coverage, and these probabilities of turns."""
    cuts = tuple(percent / 100 for percent in range(1, 100))
    calibration = Calibration(ranked_cuts=cuts, span_cuts=cuts, **values)
    found = attribute(calibration, pair={(0, 5): 4.0})
    return replace(found, step_probs=np.array(probs, dtype=np.float32))


def test_a_set_of_steps_is_a_stretch_or_the_likeliest_turns() -> None:
    found = with_cuts(0.5, 0.05, 0.05, 0.4)
    assert found.step_set(0.91, consecutive=False) == (0, 3)
    assert found.step_set(0.45) == (1,)
    assert found.step_set(0.9) == (0, 1, 2, 3)
    assert found.step_set(0.01) == (1,)  # never empty
    assert found.step_set(0.01, consecutive=False) == (0,)
    assert with_cuts(0.0, 0.05, 0.9, 0.05).step_set(0.8) == (2,)
    assert attribute().step_set(0.9) == ()
    for wrong in (0.0, 1.0, 2.0):
        with pytest.raises(ValueError, match="coverage"):
            found.step_set(wrong)


@light
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=8), st.integers(1, 99))
def test_sets_grow_with_the_coverage_and_stretches_have_no_gap(
    raw: list[float], percent: int
) -> None:
    probs = np.array(raw) / sum(raw)
    found = with_cuts(*probs)
    stretch = found.step_set(percent / 100)
    assert stretch == tuple(range(stretch[0], stretch[-1] + 1))
    for consecutive in (True, False):
        small = found.step_set(percent / 100, consecutive=consecutive)
        assert set(small) <= set(found.step_set(0.99, consecutive=consecutive))


def test_a_verdict_is_withheld_for_a_reason() -> None:
    assert attribute().abstains == "nobody is over the threshold"
    assert attribute(pair={(0, 5): 4.0}).abstains == ""
    sure = Calibration(trust_threshold=0.95, trust_precision=0.8)
    assert attribute(sure, agent={1: 2.0}).abstains == (
        "the likeliest agent, b, has 0.88; only from 0.95 on were 80 % of such verdicts right"
    )
    never = Calibration(trust_threshold=1.0)
    assert "at no probability were" in attribute(never, agent={1: 2.0}).abstains


@pytest.mark.parametrize("cuts", [(0.5,), (0.5,) * 98 + (1.5,), ("a",) * 99])
def test_cuts_that_are_no_shares_are_refused(cuts: Any) -> None:
    with pytest.raises(ConfigError, match=r"calibration\.span_cuts"):
        Calibration(span_cuts=cuts)
