from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import light, make_run

from dcl.errors import TraceError
from dcl.taxonomy import MODES, ErrorMode
from dcl.trajectory import Example, Fault, Trajectory, Turn, TurnKind

text = st.text(max_size=12)
names = text.filter(str.strip)
steps = st.none() | st.integers(-5, 10**6)
turns = st.builds(
    Turn, names, text, role=text, kind=st.sampled_from(TurnKind), step=steps, source=text
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)
trajectories = st.builds(
    Trajectory,
    text,
    text,
    st.lists(turns, min_size=1, max_size=4).map(tuple),
    outcome=st.sampled_from((None, "success", "failure")),
    metadata=st.dictionaries(text, json_values, max_size=3),
)
faults = st.builds(Fault, text, st.none() | st.sampled_from(MODES), steps)
examples = st.builds(
    Example,
    trajectories,
    st.none() | st.lists(faults, max_size=3).map(tuple),
    st.none() | trajectories,
    text,
)


def row(**keys: Any) -> dict[str, Any]:
    """A good row with some keys replaced."""
    return {"id": "r", "turns": [{"agent": "a", "content": "x"}], **keys}


@light
@given(examples)
def test_examples_read_back_equal(example: Example) -> None:
    assert Example.from_dict(json.loads(json.dumps(example.to_dict()))) == example


@light
@given(trajectories)
def test_runs_read_back_equal(run: Trajectory) -> None:
    assert Trajectory.from_json(run.to_json()) == run


def test_defaults_are_left_out() -> None:
    assert Turn("a", "x").to_dict() == {"agent": "a", "content": "x"}
    assert "outcome" not in make_run(("a", "x")).to_dict()


def test_types_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Turn("a", "x").agent = "b"  # type: ignore[misc]


def test_agents_stand_in_order_of_first_appearance() -> None:
    assert make_run(("b", ""), ("a", ""), ("b", ""), ("c", "")).agents == ("b", "a", "c")


def test_names_that_differ_in_case_are_two_agents() -> None:
    assert len(make_run(("assistant4", ""), ("Assistant4", "")).agents) == 2


def test_steps_count_as_the_source_does() -> None:
    run = Trajectory("r", "", (Turn("a", "", step=12), Turn("b", ""), Turn("a", "", step=1)))
    assert run.steps == (12, 1, 1)


def test_step_1_is_not_found_in_12() -> None:
    run = Trajectory("r", "", (Turn("a", "", step=12), Turn("a", "", step=1)))
    assert run.turn_at(1) == 1
    assert run.turn_at(2) is None


def test_where_a_number_stands_twice_the_agent_decides() -> None:
    run = Trajectory("r", "", (Turn("a", "", step=3), Turn("b", "", step=3)))
    assert run.turn_at(3) == 0
    assert run.turn_at(3, "b") == 1
    assert run.turn_at(3, "nobody") == 0


def test_unknown_keys_are_kept_as_metadata() -> None:
    run = Trajectory.from_dict(row(model="m", metadata={"seed": 1}, faults=[], origin="o"))
    assert run.metadata == {"seed": 1, "model": "m"}


def test_an_empty_list_of_faults_is_not_an_absent_one() -> None:
    assert Example.from_dict(row()).faults is None
    assert Example.from_dict(row(faults=[])).faults == ()


def test_numbers_may_be_strings_of_digits() -> None:
    fault = Fault.from_dict({"agent": "a", "mode": "EM-2.4", "step": " 12 "})
    assert fault == Fault("a", ErrorMode.FM_2_4, 12)
    assert Fault.from_dict({"agent": "a", "step": "-1"}).step == -1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "expected an object, got a list"),
        (row(turns=None), "turns: expected a list of turns, got nothing"),
        (row(turns=[]), "turns: expected at least one turn, got an empty list"),
        (row(turns=["x"]), "turns[0]: expected an object, got a string"),
        (row(turns=[{"agent": " ", "content": ""}]), "turns[0].agent: expected a name, got an em"),
        (row(turns=[{"agent": 3, "content": ""}]), "turns[0].agent: expected a string, got a num"),
        (row(turns=[{"agent": "a"}]), "turns[0].content: expected a string, got nothing"),
        (
            row(turns=[{"agent": "a", "content": "", "kind": "shout"}]),
            "turns[0].kind: expected one of message, thought, tool_call, tool_result, handoff, "
            "system, final, got 'shout'",
        ),
        (
            row(turns=[{"agent": "a", "content": "", "step": 1.5}]),
            "turns[0].step: expected a whole number, got 1.5",
        ),
        (
            row(turns=[{"agent": "a", "content": "", "step": True}]),
            "turns[0].step: expected a whole number, got true or false",
        ),
        (row(id=None), "id: expected a string, got nothing"),
        (row(outcome="maybe"), "outcome: expected success or failure, got 'maybe'"),
        (row(metadata=[1]), "metadata: expected an object, got a list"),
        (row(faults={}), "faults: expected a list, got an object"),
        (row(faults=[{}]), "faults[0].agent: expected a string, got nothing"),
        (row(faults=[{"agent": "a", "mode": "9.9"}]), "faults[0].mode: expected one of the 14"),
        (row(faults=[{"agent": "a", "step": "x"}]), "faults[0].step: expected a whole number"),
        (row(clean=row(turns=[])), "clean.turns: expected at least one turn"),
    ],
)
def test_errors_name_the_path(bad: object, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        Example.from_dict(bad)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("step", ["--5", "9" * 5000, "1_0", "²"])
def test_digits_that_are_no_number_are_refused(step: str) -> None:
    with pytest.raises(TraceError, match=r"^fault\.step: expected a whole number"):
        Fault.from_dict({"agent": "a", "step": step})


def test_a_place_is_put_before_the_path() -> None:
    with pytest.raises(TraceError, match=r"^log:3\.turns\[0\]\.content: "):
        Example.from_dict(row(turns=[{"agent": "a"}]), place="log:3")


def test_text_that_is_not_json_is_refused() -> None:
    with pytest.raises(TraceError, match="expected a JSON object, got text that is not JSON"):
        Trajectory.from_json("{")


def test_a_run_without_turns_cannot_be_made() -> None:
    with pytest.raises(TraceError, match="r: expected at least one turn, got none"):
        Trajectory("r", "", ())
