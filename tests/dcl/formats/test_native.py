from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcl.errors import TraceError
from dcl.formats import detect, native
from dcl.taxonomy import MODES
from dcl.trajectory import Example, Fault, Trajectory, Turn, TurnKind

# All of Unicode, with NUL and lone surrogates.
TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
NAMES = TEXT.filter(lambda name: bool(name.strip()))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
TURNS = st.builds(
    Turn,
    agent=NAMES,
    content=TEXT,
    role=TEXT,
    kind=st.sampled_from(TurnKind),
    step=st.none() | st.integers(-5, 10**6),
    source=TEXT,
)
TRAJECTORIES = st.builds(
    Trajectory,
    id=TEXT,
    task=TEXT,
    turns=st.lists(TURNS, min_size=1, max_size=4).map(tuple),
    outcome=st.sampled_from([None, "success", "failure"]),
    metadata=st.dictionaries(TEXT, JSON, max_size=3),
)
FAULTS = st.builds(
    Fault,
    agent=NAMES,
    mode=st.none() | st.sampled_from(MODES),
    step=st.none() | st.integers(-5, 10**6),
)
EXAMPLES = st.builds(
    Example,
    trajectory=TRAJECTORIES,
    faults=st.none() | st.lists(FAULTS, max_size=3).map(tuple),
    clean=st.none() | TRAJECTORIES,
    origin=TEXT,
)


@given(EXAMPLES)
def test_reads_back_what_it_writes(example: Example) -> None:
    document = json.loads(json.dumps(native.to_native(example)))
    assert detect(document) == "native"
    assert native.parse(document, "x.json") == [example]


def test_the_schema_may_be_absent_but_not_another() -> None:
    row = {"id": "a", "turns": [{"agent": "A", "content": "hello"}], "extra": 1}
    (example,) = native.parse(row, "x.json")
    assert example.trajectory.metadata == {"extra": 1}
    assert example.faults is None
    newer = row | {"schema": "dcl.trajectory/9"}
    assert detect(newer) == "native"
    with pytest.raises(TraceError, match=r"schema: expected dcl.trajectory/1, got"):
        native.parse(newer, "x.json")


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ({}, "turns: expected a list of turns, got an object"),
        ([], "turns: expected at least one turn"),
        ([{"content": "x"}], r"turns\[0\]\.agent: expected a string, got nothing"),
        ([{"agent": "A"}], r"turns\[0\]\.content: expected a string, got nothing"),
    ],
)
def test_names_the_path_of_what_is_wrong(turns: object, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        native.parse({"id": "a", "turns": turns}, "x.json")
