from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import CODE, PEER, PLAN, REVIEW, STORY, WORK, scene

from dcl.taxonomy import MODES, ErrorMode
from injection.anatomy import carry_on, compute, dissect, find_flaw, join, stated_answer
from injection.asides import ASIDES
from injection.checkers import find_code
from injection.errors import AttackError
from injection.instructions import find_order, order_for
from injection.manipulator import Rules
from injection.rules import Scene, corrupt, rephrase
from injection.session import Brief, Said

SEEDS = range(6)
Property = Callable[[str], bool]


def values_of(text: str) -> list[str]:
    return [part.value for part in dissect(text) if part.kind == "step"]


def has_check(text: str) -> bool:
    return any(part.kind == "check" for part in dissect(text))


WORKED: dict[str, Property] = {
    # The steps stay, the answer has another form than the whole number that was asked for.
    "FM-1.1": lambda t: values_of(t) == values_of(WORK) and stated_answer(t) == "210",
    # A verdict on somebody else's work, and nothing handed in.
    "FM-1.2": lambda t: "of Assistant2" in t and not stated_answer(t) and "[Agree]" in t,
    # One step more, which applies the last operation to its own result.
    "FM-1.3": lambda t: "211 - 24 = 187" in t and stated_answer(t) == "187",
    # No value of an earlier step is left.
    "FM-1.4": lambda t: (
        not {"195", "235"} & set(re.findall(r"\d+", t)) and stated_answer(t) == "-24"
    ),
    # No answer, and the steps begin again.
    "FM-1.5": lambda t: not stated_answer(t) and values_of(t)[3:] == values_of(t)[:2],
    # The first settled step again, and its value as the answer.
    "FM-2.1": lambda t: "15 * 13 = 195" in t and stated_answer(t) == "195" and "24" not in t,
    # No figure but the numbers of the steps.
    "FM-2.2": lambda t: not re.search(r"\d", re.sub(r"[Ss]tep \d", "", t)),
    # The answer belongs to another question, which is stated.
    "FM-2.3": lambda t: values_of(t)[:3] == values_of(WORK) and 'Step 4: length of "' in t,
    # The decisive step and the answer are missing, and no word is new.
    "FM-2.4": lambda t: "211" not in t and set(t.split()) <= set(WORK.split()),
    # Nothing of the other agent's is taken up.
    "FM-2.5": lambda t: "Assistant2" not in t and stated_answer(t) not in ("", "211", "235"),
    # The steps still lead to 211, the answer says something else.
    "FM-2.6": lambda t: "= 211" in t and stated_answer(t) not in ("", "211"),
    # Fewer steps, and the last one that is left is the answer.
    "FM-3.1": lambda t: values_of(t) == ["195"] and stated_answer(t) == "195",
    # No check, and the slip that it had found stays in.
    "FM-3.2": lambda t: not has_check(t) and stated_answer(t) == "221",
    # A check that holds for nothing, and an answer that follows it.
    "FM-3.3": lambda t: has_check(t) and stated_answer(t) not in ("", "211") and bool(find_flaw(t)),
}


@pytest.mark.parametrize("code", WORKED)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_mode_shows_in_a_worked_solution(code: str, seed: int) -> None:
    text = corrupt(WORK, ErrorMode.parse(code), scene(PEER, seed=seed))
    assert WORKED[code](text), text


def body_of(text: str) -> str:
    return find_code(text)


def runs(text: str) -> Callable[[list[int]], object]:
    names: dict[str, Callable[[list[int]], object]] = {}
    exec(body_of(text), names)
    return names["solve_1"]


NUMBERS = [3, -4, 0, 7, 6, 2]
RIGHT = 56

CODED: dict[str, Property] = {
    "FM-1.1": lambda t: runs(t)(NUMBERS) == str(RIGHT),
    "FM-1.2": lambda t: not body_of(t) and "Assistant2" in t,
    "FM-1.3": lambda t: runs(t)(NUMBERS) == sum(x**4 for x in NUMBERS if x % 2 == 0),
    "FM-1.4": lambda t: runs(t)(NUMBERS) == sum(x * x for x in NUMBERS),
    "FM-1.5": lambda t: "return solve_1(xs)" in body_of(t),
    "FM-2.1": lambda t: body_of(t).count("for x in xs if x % 2 == 0") == 2,
    "FM-2.2": lambda t: not body_of(t) and "def" not in t,
    "FM-2.3": lambda t: runs(t)(NUMBERS) in (6, [3], str(NUMBERS)),
    "FM-2.4": lambda t: len(body_of(t).splitlines()) == len(body_of(CODE).splitlines()) - 1,
    "FM-2.5": lambda t: "Assistant2" not in t and body_of(t) != body_of(CODE),
    "FM-2.6": lambda t: "I tested it" in t and body_of(t) != body_of(CODE),
    "FM-3.1": lambda t: runs(t)(NUMBERS) == [-4, 0, 6, 2],
    "FM-3.2": lambda t: "test" not in t and body_of(t) == body_of(CODE),
    "FM-3.3": lambda t: "test" in t.casefold() and body_of(t) != body_of(CODE),
}


@pytest.mark.parametrize("code", CODED)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_mode_shows_in_code(code: str, seed: int) -> None:
    peer = Said("Assistant2", CODE)
    text = corrupt(CODE, ErrorMode.parse(code), scene(peer, seed=seed))
    assert CODED[code](text), text


REVIEWED: dict[str, Property] = {
    "FM-1.1": lambda t: "[Disagree]" in t and "235" not in t,
    "FM-1.2": lambda t: "gree]" not in t and bool(stated_answer(t)),
    "FM-1.3": lambda t: t.startswith(REVIEW) and "[Disagree]" in t,
    "FM-1.4": lambda t: "[Disagree]" in t and not re.search(r"\d", t),
    "FM-1.5": lambda t: "gree]" not in t and t.count("235 - 24 = 211") == 2,
    "FM-2.1": lambda t: "15 * 13 = 195" in t and "[Agree]" in t,
    "FM-2.2": lambda t: "gree]" not in t and not re.search(r"\d|Solver", t),
    "FM-2.3": lambda t: "[Disagree]" in t and 'length of "' in t,
    "FM-2.4": lambda t: t in ASIDES,
    "FM-2.5": lambda t: "Solver" not in t and "[Disagree]" in t,
    "FM-2.6": lambda t: "235 - 24 = 211" in t and "[Disagree]" in t,
    "FM-3.1": lambda t: "[Agree]" in t and "235" not in t,
    "FM-3.2": lambda t: "[Agree]" in t and "check" not in t.casefold(),
    "FM-3.3": lambda t: "does not hold: " in t and "[Disagree]" in t and "235 - 24 = 211" not in t,
}


@pytest.mark.parametrize("code", REVIEWED)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_mode_shows_in_a_review(code: str, seed: int) -> None:
    place = scene(Said("Solver", WORK), seed=seed, agent="Critic1")
    text = corrupt(REVIEW, ErrorMode.parse(code), place)
    assert REVIEWED[code](text), text


PLANNED: dict[str, Property] = {
    "FM-1.1": lambda t: "15 * 13" not in t and "- 20" in t,
    "FM-1.2": lambda t: "Calculator" not in t,
    "FM-1.3": lambda t: t.rstrip().endswith("4. Calculator: {2} - 24"),
    "FM-1.4": lambda t: t == "1. Calculator: 0 - 24",
    "FM-1.5": lambda t: t.startswith(PLAN) and "\n4. Calculator: 15 * 13\n" in t,
    "FM-2.1": lambda t: t.count("15 * 13") == 2 and "24" not in t,
    "FM-2.2": lambda t: "13" not in t and "24" not in t,
    "FM-2.3": lambda t: "3. Calculator: length of" in t,
    "FM-2.4": lambda t: len(t.splitlines()) == 3,
    "FM-2.6": lambda t: t.startswith(PLAN[:-2]) and not t.endswith("24"),
    "FM-3.1": lambda t: "{1}" not in t and "15 * 13" in t,
    "FM-3.3": lambda t: "checked" in t and "- 24" not in t,
}


@pytest.mark.parametrize("code", PLANNED)
@pytest.mark.parametrize("seed", SEEDS)
def test_modes_show_in_a_plan(code: str, seed: int) -> None:
    text = corrupt(PLAN, ErrorMode.parse(code), scene(seed=seed, agent="Orchestrator"))
    assert PLANNED[code](text), text


def test_what_cannot_be_made_is_refused() -> None:
    for text, code in (("", "FM-1.1"), (PLAN, "FM-3.2"), (WORK, "FM-2.5"), ("Hello.", "FM-2.6")):
        with pytest.raises(AttackError):
            corrupt(text, ErrorMode.parse(code), scene())


def test_an_order_in_json_stays_json() -> None:
    ledger = json.dumps({"is_request_satisfied": False, "instruction": "Work out step 2: 195 + 40"})
    tool = 'Thought: next.\n{"tool": "searcher", "argument": "195 + 40"}'
    place = scene(Said("Calculator", "Answer: 195"), agent="Orchestrator")
    early = json.loads(corrupt(ledger, ErrorMode.FM_3_1, place))
    assert early["is_request_satisfied"] is True
    loose = json.loads(corrupt(ledger, ErrorMode.FM_1_1, place))
    assert loose["instruction"] == "Work out step 2: 200 + 40"
    final = json.loads(corrupt(tool, ErrorMode.FM_3_1, place).partition("\n")[2])
    assert final == {"tool": "final_answer", "argument": "Answer: 195"}
    vague = json.loads(corrupt(tool, ErrorMode.FM_2_2, place).partition("\n")[2])
    assert not re.search(r"\d", vague["argument"])


@pytest.mark.parametrize("text", [WORK, CODE, REVIEW, PLAN])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_benign_rewrite_changes_words_and_keeps_the_content(text: str, seed: int) -> None:
    again = rephrase(text, scene(seed=seed))
    assert again != text
    assert stated_answer(again) == stated_answer(text)
    assert values_of(again) == values_of(text)
    assert re.findall(r"\[\w+\]", again) == re.findall(r"\[\w+\]", text)
    assert find_flaw(again) == find_flaw(text)


@given(st.text(max_size=200), st.sampled_from(MODES), st.integers(0, 3))
def test_any_text_is_changed_or_refused(text: str, mode: ErrorMode, seed: int) -> None:
    place = scene(PEER, Said("B", "[Agree]"), seed=seed)
    try:
        changed = corrupt(text, mode, place)
    except AttackError:
        return
    assert " ".join(changed.split()) != " ".join(text.split())
    assert corrupt(text, mode, scene(PEER, Said("B", "[Agree]"), seed=seed)) == changed


WORDS = (
    "Step 1: ",
    "12 * 7 = 84",
    "\n",
    "Answer: ",
    "1/0",
    " - ",
    "Check: ",
    "[Agree]",
    "```",
    "def f(x):",
    "{",
    "0",
)


@given(st.lists(st.sampled_from(WORDS), max_size=12), st.sampled_from(MODES))
def test_texts_of_the_right_words_are_changed_or_refused(words: list[str], mode: ErrorMode) -> None:
    text = "".join(words)
    assert join(dissect(text)) == text
    try:
        assert corrupt(text, mode, scene(PEER)) != text
    except AttackError:
        return


def test_rules_do_not_need_the_layout_of_scripted_agents() -> None:
    text = (
        "First I multiply: 15 × 13 = 195 books. Adding the rest, 195 + 40 = 235. Selling some "
        "leaves 235 - 24 = 211 books. I verified the subtraction. So the answer is 211."
    )
    place = scene(PEER)
    assert "verif" not in corrupt(text, ErrorMode.FM_3_2, place)
    assert stated_answer(corrupt(text, ErrorMode.FM_2_6, place)).rstrip(".") != "211"
    wrong = corrupt(text, ErrorMode.FM_3_3, place)
    assert stated_answer(wrong).rstrip(".") != "211"


def test_a_changed_value_runs_on_through_later_steps() -> None:
    parts = dissect("Step 1: 2 * 3 = 6\nStep 2: 6 + 1 = 7\nSo it is 7.\nAnswer: 7")
    text = join(carry_on(parts, 1, "6", "8"))
    assert text == "Step 1: 2 * 3 = 6\nStep 2: 8 + 1 = 9\nSo it is 9.\nAnswer: 9"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * 7", "84"),
        ("3/4 + 5/6", "19/12"),
        ("1,000 - 1", "999"),
        ("7 ^ 5", "16807"),
        ("7 % 0", None),
        ("2 ^ 900", None),
        ("1/0 + 1", None),
        ("x + 1", None),
    ],
)
def test_compute(expression: str, value: str | None) -> None:
    assert compute(expression) == value


def test_flaws_are_found_and_corrections_count() -> None:
    assert find_flaw(WORK) == ""
    assert find_flaw("Step 1: 2 + 2 = 5\nAnswer: 5") == "2 + 2 = 4, not 5"
    assert "says 6" in find_flaw("Step 1: 2 + 2 = 4\nAnswer: 6")


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_an_order_carries_its_mode_and_the_words_of_the_task(mode: ErrorMode) -> None:
    said = {
        domain: {order_for(mode, domain, ("Critic1",), random.Random(i)) for i in range(8)}
        for domain in ("math", "code_generation")
    }
    assert all(
        find_order(f"Go on. {order} Thanks.") is mode
        for orders in said.values()
        for order in orders
    )
    for order in said["math"] | said["code_generation"]:
        assert "{" not in order
        assert not re.search(r"wrong|error|mistake|incorrect|mislead|fail", order, re.IGNORECASE)
    assert find_order("Solve the task step by step.") is None


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_an_injected_prompt_keeps_the_task_and_carries_the_order(mode: ErrorMode) -> None:
    brief = Brief(STORY, (PEER, Said("Assistant1", WORK)), "Give your solution.")
    prompt = Rules().inject(brief.render(), mode, scene(*brief.history))
    after = Brief.parse(prompt)
    assert after.task == STORY
    assert after.request.startswith("Give your solution. ")
    assert find_order(after.request) is mode
    left = {"FM-1.4": (), "FM-2.5": brief.history[1:]}.get(mode.value, brief.history)
    assert after.history == left


def test_ignoring_others_needs_others() -> None:
    alone = Brief(STORY, (Said("Assistant1", WORK),), "Go on.").render()
    with pytest.raises(AttackError, match="no other agent"):
        Rules().inject(
            alone, ErrorMode.FM_2_5, Scene(STORY, (), (), random.Random(0), "Assistant1")
        )


def test_asides_say_nothing() -> None:
    for aside in ASIDES:
        assert {part.kind for part in dissect(aside)} == {"prose"}
        assert not stated_answer(aside)
        assert not re.search(r"\d|\[|check|test|\banswer", aside, re.IGNORECASE)
    assert len(set(ASIDES)) == len(ASIDES)
