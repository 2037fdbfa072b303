from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from tiny import any_text, light, make_run

from dcl.formats import read_examples
from dcl.splits import fold_of, group_of, hash_question, split_of
from dcl.trajectory import Example

SPLITS = ["train", "test", "test", *["train"] * 6, "valid", "train", "train"]
FOLDS = [2, 0, 1, 0, 1, 0, 1, 2, 2, 2, 0, 2]
QUESTIONS = [f"question {i}" for i in range(4000)]


def test_the_splits_of_known_questions_never_change() -> None:
    found = [split_of(f"question {i}", valid=0.2, test=0.2) for i in range(12)]
    assert found == SPLITS
    assert [fold_of(f"question {i}", 4) for i in range(12)] == FOLDS


def test_shares_are_about_right() -> None:
    share = Counter(split_of(q, valid=0.1, test=0.2) for q in QUESTIONS)
    assert abs(share["valid"] / len(QUESTIONS) - 0.1) < 0.02
    assert abs(share["test"] / len(QUESTIONS) - 0.2) < 0.02


def test_shares_of_0_and_1_are_exact() -> None:
    assert {split_of(q, valid=0, test=0) for q in QUESTIONS} == {"train"}
    assert {split_of(q, valid=1, test=0) for q in QUESTIONS} == {"valid"}
    assert {split_of(q, valid=0, test=1) for q in QUESTIONS} == {"test"}


def test_test_questions_stay_when_the_share_of_validation_grows() -> None:
    small = {q for q in QUESTIONS if split_of(q, valid=0.05, test=0.1) == "test"}
    large = {q for q in QUESTIONS if split_of(q, valid=0.5, test=0.1) == "test"}
    assert small == large


def test_folds_are_even_and_independent_of_the_split() -> None:
    for wanted in ("train", "valid"):
        chosen = [q for q in QUESTIONS if split_of(q, valid=0.4, test=0.2) == wanted]
        folds = Counter(fold_of(q, 4) for q in chosen)
        assert set(folds) == {0, 1, 2, 3}
        assert all(abs(n / len(chosen) - 0.25) < 0.04 for n in folds.values())


@light
@given(any_text)
def test_any_question_has_one_place(question: str) -> None:
    assert split_of(question) == split_of(question)
    assert fold_of(question, 3) in (0, 1, 2)


def test_the_same_question_is_one_group() -> None:
    one = Example(make_run(("a", "x"), task="What is  1+1?\n", id="1"))
    two = Example(make_run(("b", "y"), task="what is 1+1?", id="2"))
    assert group_of(one) == group_of(two)


def test_the_hash_of_the_data_set_comes_first_and_the_id_last() -> None:
    hashed = make_run(("a", "x"), metadata={"question_hash": 17})
    assert group_of(Example(hashed)) == "17"
    assert group_of(Example(make_run(("a", "x"), task=" ", id="run-7"))) == "run-7"


def test_the_hash_of_a_question_leaves_blanks_around_it_out() -> None:
    assert hash_question("What is 1+1?") == hash_question("\nWhat is 1+1? \r\n") == "e869da85f5db"
    assert hash_question("What is 1+1?") != hash_question("what is 1+1?")


@pytest.mark.data
def test_it_is_the_hash_that_aegis_has(data_dir: Path) -> None:
    for example in read_examples(data_dir / "aegis" / "validation.jsonl.xz"):
        assert hash_question(example.trajectory.task) == group_of(example)
