from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny import make_run

from dcl.artifact import INDEX
from dcl.attribution import Attributor
from dcl.bag import Bag
from dcl.errors import ArtifactError
from dcl.nearest import build_index, digest_run, load_index, save_index
from dcl.runtime import load
from dcl.trajectory import Example, Fault, Trajectory

FIRST = make_run(("planner", "Add the two sums."), ("coder", "The sum is 7."), id="run")
SECOND = make_run(("planner", "Add the two sums."), ("coder", "The sum is 9."), id="run")
FAULTS = (Fault("planner", None, 0), Fault("coder", None, 1))


class Counting:
    """Makes bags and counts them."""

    def __init__(self, attributor: Attributor) -> None:
        self.made = 0
        self._own = attributor.bagger

    def __call__(self, trajectory: Trajectory) -> Bag:
        self.made += 1
        return self._own(trajectory)


def test_runs_are_told_apart_by_what_is_said_and_read_once(tmp_path: Path) -> None:
    model = load("lite", threads=1)
    counting = Counting(model)
    attributor = Attributor(counting, model.scorer, model.calibration)
    index = build_index(attributor, [Example(FIRST, FAULTS), Example(SECOND, FAULTS[1:])])
    assert counting.made == 2
    save_index(index, tmp_path / INDEX)
    index = load_index(tmp_path / INDEX)
    own = index.vectors[1].astype(np.float32)
    near = index.find(own)
    assert near is not None
    assert near.text == "The sum is 7."
    other = index.find(own, run=FIRST)  # the run beside it has the same id
    assert other is not None
    assert other.text == "The sum is 9."
    renamed = index.find(own, run=replace(FIRST, id="another", metadata={"file": "x"}))
    assert renamed == other


def test_an_index_without_digests_is_refused(tmp_path: Path) -> None:
    index = build_index(load("lite", threads=1), [Example(FIRST, FAULTS)])
    rows = tuple({k: v for k, v in row.items() if k != "digest"} for row in index.rows)
    save_index(replace(index, rows=rows), tmp_path / INDEX)
    with pytest.raises(ArtifactError, match="fit the model again"):
        load_index(tmp_path / INDEX)


def test_a_digest_follows_names_and_words() -> None:
    assert digest_run(FIRST) == digest_run(replace(FIRST, id="x"))
    assert digest_run(FIRST) != digest_run(SECOND)
    assert digest_run(make_run(("a", "b c"))) != digest_run(make_run(("a b", "c")))
    assert digest_run(make_run(("a", "\ud800"))) != digest_run(make_run(("a", "?")))
