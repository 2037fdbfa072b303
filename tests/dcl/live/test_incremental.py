from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import fake_model
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import light, make_run, runs, write_model

import dcl
from dcl.attribution import Attribution, Attributor
from dcl.errors import ArtifactError, ConfigError, TraceError
from dcl.live.incremental import OpenRun
from dcl.runtime import load
from dcl.trajectory import Trajectory, Turn


@pytest.fixture(scope="module")
def attributor(tmp_path_factory: pytest.TempPathFactory) -> Attributor:
    return load(write_model(tmp_path_factory.mktemp("models") / "model"), threads=1)


def assert_same(one: Attribution, other: Attribution) -> None:
    assert (one.agents, one.steps) == (other.agents, other.steps)
    for name in (
        "agent_index",
        "agent_probs",
        "mode_probs",
        "pair_probs",
        "step_probs",
        "weights",
    ):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


def grow(attributor: Attributor, run: Trajectory, cuts: list[int]) -> OpenRun:
    """The run in pieces, judged after each."""
    grown = OpenRun(attributor, run.id, run.task)
    edges = sorted({0, *cuts, len(run.turns)})
    for start, stop in pairwise(edges):
        grown.extend(run.turns[start:stop])
        grown.attribute()
    return grown


@light
@given(run=runs(most=8), cuts=st.lists(st.integers(1, 7)))
def test_turn_by_turn_is_the_whole_run_to_the_bit(
    attributor: Attributor, run: Trajectory, cuts: list[int]
) -> None:
    assert_same(grow(attributor, run, cuts).attribute(), attributor(run))


@pytest.mark.data
@pytest.mark.parametrize(
    "log", ["aegis/validation.jsonl.xz", "whowhen/hand-crafted-sample", "tau_airline.jsonl.xz"]
)
def test_the_shipped_model_agrees_with_itself_on_real_runs(data_dir: Path, log: str) -> None:
    shipped = dcl.load(threads=1)
    for run in islice(dcl.read_trajectories(data_dir / log), 2):
        short = Trajectory(run.id, run.task, run.turns[:15])
        every = list(range(len(short.turns)))
        assert_same(grow(shipped, short, every).attribute(), shipped(short))


class Counting:
    """A scorer that counts what it is asked for."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.encoded: list[int] = []
        self.scored = 0

    def __call__(self, bags: Any) -> Any:
        raise NotImplementedError

    def encoder(self, windows: Any) -> Any:
        self.encoded.append(len(windows))
        return self.inner.encoder(windows)

    def score(self, bag: Any, vectors: Any, task: Any) -> Any:
        self.scored += 1
        return self.inner.score(bag, vectors, task)


def test_a_new_turn_is_one_encoder_call_and_one_head_call(attributor: Attributor) -> None:
    scorer = Counting(attributor.scorer)
    run = OpenRun(Attributor(attributor.bagger, scorer, attributor.calibration), "run", "task")
    assert scorer.encoded == [1]  # the task
    for _ in range(3):
        run.extend([Turn("b", "the sum is wrong")])
        run.attribute()
    assert scorer.encoded == [1, 1, 1, 1]
    assert scorer.scored == 3


def test_memory_grows_with_the_turns(attributor: Attributor) -> None:
    run = OpenRun(attributor, "run")
    sizes = [run.nbytes]
    for _ in range(3):
        run.extend([Turn("a", "x" * 1000)])
        sizes.append(run.nbytes)
    assert all(after - before > 1000 for before, after in pairwise(sizes))


def test_a_run_without_turns_cannot_be_attributed(attributor: Attributor) -> None:
    run = OpenRun(attributor, "run")
    run.extend([])
    with pytest.raises(TraceError, match="at least one turn"):
        run.attribute()


def test_a_model_of_whole_runs_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a model that takes turns one by one"):
        OpenRun(fake_model.load(), "run")


def test_a_model_that_gives_no_number_is_damaged(tmp_path: Path) -> None:
    model = load(write_model(tmp_path / "model", weight=float("nan")), threads=1)
    run = OpenRun(model, "run")
    run.extend(make_run(("a", "wrong")).turns)
    with pytest.raises(ArtifactError, match="gave no number"):
        run.attribute()


def test_a_new_model_with_the_same_encoder_takes_over_the_vectors(
    attributor: Attributor, tmp_path: Path
) -> None:
    run = make_run(("a", "the sum"), ("b", "is wrong"), ("a", "the sum"))
    before = OpenRun(attributor, run.id, run.task)
    before.extend(run.turns[:2])
    mild = load(write_model(tmp_path / "mild", weight=0.1), threads=1)
    scorer: Any = mild.scorer
    counting = Counting(scorer)
    counting.encoder = CountedEncoder(scorer.encoder)  # type: ignore[method-assign]
    after = OpenRun(Attributor(mild.bagger, counting, mild.calibration), run.id, run.task, before)
    after.extend(run.turns)
    assert counting.encoder.encoded == [1]  # the task alone: the third turn is the first again
    assert_same(after.attribute(), mild(run))


class CountedEncoder:
    """An encoder that counts what it is asked for."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.digest = inner.digest
        self.encoded: list[int] = []

    def __call__(self, windows: Any) -> Any:
        self.encoded.append(len(windows))
        return self.inner(windows)
