from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import any_text, bagger, light, make_run, make_tokenizer, runs

from dcl.bag import MOST_TURNS, Bag, BagMaker, Replies
from dcl.errors import TraceError
from dcl.features import TEXT_FEATURES
from dcl.lexical import Words
from dcl.trajectory import Trajectory, Turn, TurnKind

START, END = (make_tokenizer().token_to_id(token) for token in ("[CLS]", "[SEP]"))


def replies(*said: tuple[str, str]) -> list[int]:
    run = make_run(*said)
    return [int(turn) for turn in Replies(run.agents)(run.turns)]


@light
@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 6), st.integers(0, 6))
def test_a_window_is_head_and_tail(ids: list[int], head: int, tail: int) -> None:
    window = BagMaker(make_tokenizer(), head=head, tail=tail).window(np.array(ids, dtype=np.int32))
    kept = ids if len(ids) <= head + tail else ids[:head] + ids[len(ids) - tail :]
    assert window.tolist() == [START, *kept, END]
    assert window.dtype == np.int32


@light
@given(runs())
def test_any_text_gives_a_bag_whose_shapes_agree(run: Trajectory) -> None:
    bag = bagger()(run)
    T = len(run.turns)
    assert bag.agents == run.agents
    assert [bag.agents[a] for a in bag.agent_index] == [turn.agent for turn in run.turns]
    assert bag.features.shape == (T, len(TEXT_FEATURES))
    assert np.isfinite(bag.features).all()
    assert len(bag.windows) == T
    assert all(2 <= len(window) <= 12 + 4 + 2 for window in (*bag.windows, bag.task))
    assert ((bag.reply_to >= -1) & (bag.reply_to < np.arange(T))).all()
    assert len(bag.words) == len(bag.agents)
    for a, document in enumerate(bag.words):
        assert set(document.turn.tolist()) <= set(np.flatnonzero(bag.agent_index == a))


@light
@given(any_text)
def test_any_text_has_tokens(text: str) -> None:
    ids = bagger().tokenize([text])[0]
    assert ids.dtype == np.int32
    assert ((ids >= 0) & (ids < bagger().vocabulary)).all()


def test_lone_surrogates_become_question_marks() -> None:
    cut, marked, nul, plain = bagger().tokenize(["a\ud83d b", "a? b", "a\x00b", "ab"])
    assert cut.tolist() == marked.tolist()
    assert nul.tolist() == plain.tolist()


def test_special_tokens_are_added_once_only() -> None:
    window = bagger()(make_run(("a", "the sum"))).windows[0].tolist()
    assert window[0] == START
    assert window[-1] == END
    assert len(window) == 4


def test_an_empty_turn_keeps_its_place() -> None:
    bag = bagger()(make_run(("a", ""), ("b", "sum"), task=""))
    assert bag.windows[0].tolist() == [START, END]
    assert bag.task.tolist() == [START, END]
    assert [set(document.turn.tolist()) for document in bag.words] == [set(), {1}]


def test_the_tokenizer_neither_cuts_nor_pads() -> None:
    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    assert len(BagMaker(tokenizer, head=100, tail=0).tokenize(["the sum " * 20])[0]) == 40


def test_words_are_counted_over_the_whole_turn_and_not_over_its_window() -> None:
    bag = bagger()(make_run(("a", "the sum " * 50)))
    assert bag.words[0].count.sum() == 100 + 99


def test_two_thousand_turns_make_one_bag() -> None:
    said = [(f"agent{t % 7}", f"the sum is {t}, agent{(t + 1) % 7}?") for t in range(2000)]
    bag = bagger()(make_run(*said))
    assert len(bag.windows) == len(bag.agent_index) == 2000
    assert bag.reply_to[-1] == 1993  # the last turn of the agent it names
    assert np.isfinite(bag.features).all()


def words_agree(one: Words, two: Words) -> bool:
    return len(one) == len(two) and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in zip(one, two, strict=True)
        for name in ("turn", "row", "count")
    )


def bags_agree(one: Bag, two: Bag) -> bool:
    arrays = ("agent_index", "reply_to", "features", "task")
    return (
        all(np.array_equal(getattr(one, name), getattr(two, name)) for name in arrays)
        and all(map(np.array_equal, one.windows, two.windows))
        and words_agree(one.words, two.words)
    )


@light
@given(runs(text=st.text("abc 12?.", max_size=20)))
def test_renaming_agents_changes_the_names_alone(run: Trajectory) -> None:
    names = {"Planner": "Zoe", "Agent1": "Yan", "Agent12": "Xin"}
    other = make_run(*((names[t.agent], t.content) for t in run.turns), task=run.task)
    one, two = bagger()(run), bagger()(other)
    assert two.agents == tuple(names[agent] for agent in one.agents)
    assert bags_agree(one, two)


def test_a_turn_answers_the_agent_it_names() -> None:
    said = [("A", "go"), ("B", "yes"), ("C", "no"), ("D", "A is right")]
    assert replies(*said) == [-1, 0, 1, 0]


def test_a_turn_that_names_nobody_answers_the_last_other_speaker() -> None:
    assert replies(("A", ""), ("A", ""), ("B", ""), ("B", ""), ("A", "")) == [-1, -1, 1, 1, 3]


def test_of_several_names_the_latest_speaker_counts() -> None:
    assert replies(("A", ""), ("B", ""), ("C", ""), ("D", "B and A, listen")) == [-1, 0, 1, 1]


def test_own_names_and_names_that_come_later_do_not_count() -> None:
    assert replies(("A", "ask B"), ("B", "I am B"), ("A", "A says")) == [-1, 0, 1]


def test_the_person_and_the_prompt_do_not_act() -> None:
    turns = (
        Turn("system", "be kind", kind=TurnKind.SYSTEM),
        Turn("user", "2 + 2?", role="user"),
        Turn("solver", "5", role="assistant"),
        Turn("user", "sure?", role="user"),
    )
    draft = bagger().start("2 + 2?")
    for count in range(1, len(turns) + 1):
        run = Trajectory("r", "2 + 2?", turns[:count])
        draft.extend(turns[count - 1 : count])
        for bag in (bagger()(run), draft.bag()):
            assert bag.acting.tolist() == [name not in run.bystanders for name in run.agents]
    assert bag.acting.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("text", "found"),
    [("Agent12 erred", 1), ("Agent1 erred", 0), ("Agent123 erred", 2), ("xAgent1", 2)],
)
def test_agent1_is_not_found_in_agent12(text: str, found: int) -> None:
    said = [("Agent1", ""), ("Agent12", ""), ("other", ""), ("last", text)]
    assert replies(*said)[-1] == found


def test_names_are_no_patterns() -> None:
    assert replies(("A.*", ""), ("Axx", ""), ("(b|", ""), ("d", "A.*!"))[-1] == 0
    assert replies(("[x", ""), ("y", ""), ("z", "to [x: go"))[-1] == 0


def test_the_case_of_a_name_counts() -> None:
    assert replies(("assistant4", ""), ("Assistant4", ""), ("z", "assistant4: no"))[-1] == 0


def test_the_longest_run_is_taken_and_the_next_refused() -> None:
    said = [("a", "x")] * MOST_TURNS
    assert len(bagger()(make_run(*said)).windows) == MOST_TURNS
    with pytest.raises(TraceError, match="trace run: expected at most 4000 turns, got 4001; cut"):
        bagger()(make_run(*said, ("a", "x")))
