from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcl.formats.messages import Piece, pieces
from dcl.plugs.transcript import Transcript
from dcl.trajectory import Turn, TurnKind


class Notes:
    """What a monitor would be given."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.task = ""

    def ingest(self, run_id: str, turn: Turn, *, task: str = "") -> bool:
        self.turns.append(turn)
        self.task = task
        return True

    def said(self) -> list[tuple[str, str]]:
        return [(turn.agent, turn.content) for turn in self.turns]


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def transcript(notes: Notes) -> Transcript:
    return Transcript(notes, "r")  # type: ignore[arg-type]


def chat(*rows: tuple[str, str]) -> list[Piece]:
    return [piece for role, text in rows for piece in pieces({"role": role, "content": text})]


def call(name: str, arguments: str, id: str = "") -> Piece:
    entry = {"id": id, "function": {"name": name, "arguments": arguments}}
    (piece,) = pieces({"role": "assistant", "tool_calls": [entry]})
    return piece


def result(text: str, id: str) -> Piece:
    return Piece("tool", text, TurnKind.TOOL_RESULT, call=id)


def test_history_that_is_told_again_is_said_once(transcript: Transcript, notes: Notes) -> None:
    transcript.hear(chat(("system", "Plan."), ("user", "Add 2 and 2.")))
    transcript.say(chat(("assistant", "Add them.")), "planner")
    transcript.hear(
        chat(("system", "Solve."), ("user", "Add 2 and 2."), ("assistant", "Add them."))
    )
    transcript.say(chat(("assistant", "5")), "solver")
    assert notes.said() == [
        ("system", "Plan."), ("user", "Add 2 and 2."), ("planner", "Add them."),
        ("system", "Solve."), ("solver", "5"),
    ]  # fmt: skip
    assert notes.task == "Add 2 and 2."


def test_what_a_person_says_twice_is_said_twice(transcript: Transcript, notes: Notes) -> None:
    transcript.hear(chat(("user", "yes")))
    transcript.hear(chat(("user", "yes"), ("user", "yes")))
    assert notes.said() == [("user", "yes")] * 2


def test_words_of_agents_that_nobody_said_are_history(transcript: Transcript, notes: Notes) -> None:
    transcript.pass_over(chat(("user", "Hi."), ("assistant", "Hello.")))
    transcript.hear(chat(("user", "Hi."), ("assistant", "Hello."), ("user", "Add.")))
    assert notes.said() == [("user", "Add.")]


def test_a_call_is_told_by_the_model_and_by_the_tool(transcript: Transcript, notes: Notes) -> None:
    transcript.say([call("add", '{"a": 1}', "c1"), call("add", '{"a": 1}', "c2")], "solver")
    assert transcript.call("solver", "add", {"a": 1}) == "c1"
    assert transcript.call("solver", "add", '{"a":1}', "c2") == "c2"
    assert transcript.call("solver", "add", {"a": 1}) == ""  # this one nobody asked for
    transcript.answer("add", "2", "c1")
    transcript.hear([result("2", "c1"), result("3", "c2"), result("9", "unknown")])
    calls = [("solver", 'add({"a": 1})')] * 3
    assert notes.said() == [*calls, ("add", "2"), ("add", "3")]


def test_ids_that_are_used_again_count_again(transcript: Transcript, notes: Notes) -> None:
    for text in ("1", "2"):
        transcript.say([call("add", "{}", "call_0")], "solver")
        transcript.call("solver", "add", "{}", "call_0")
        transcript.answer("add", text, "call_0")
        transcript.hear([result(text, "call_0")])
    assert [text for _, text in notes.said()] == ["add({})", "1", "add({})", "2"]


def test_a_tool_without_a_name_has_that_of_its_call(transcript: Transcript, notes: Notes) -> None:
    transcript.say([call("add", "{}", "c1")], "solver")
    transcript.answer("", "2", "c1")
    transcript.answer("", "3", "other")
    assert [agent for agent, _ in notes.said()] == ["solver", "add", "tool"]


def test_hand_overs_and_failures_are_turns(transcript: Transcript, notes: Notes) -> None:
    transcript.hand_over("planner", "solver", "span 1")
    transcript.fail("solver", ValueError("no"), "span 2")
    handed, failed = notes.turns
    assert (handed.kind, handed.content, handed.source) == (
        TurnKind.HANDOFF, "transfer to solver", "span 1",
    )  # fmt: skip
    assert (failed.agent, failed.content, failed.source) == ("solver", "error: no", "span 2")


rows: Any = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "system"]), st.sampled_from("abc")), max_size=8
)


@given(said=st.lists(rows, max_size=4))
def test_a_growing_history_is_read_as_its_last_state(said: list[Any]) -> None:
    grown, once, step = Notes(), Notes(), []
    transcript = Transcript(grown, "r")  # type: ignore[arg-type]
    for more in said:
        step += more
        transcript.hear(chat(*step))
    Transcript(once, "r").hear(chat(*step))  # type: ignore[arg-type]
    assert sorted(grown.said()) == sorted(once.said())
