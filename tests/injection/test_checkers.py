from __future__ import annotations

import pytest
from worlds import Parrot

from injection.checkers import boxed, check, final_answer, find_code, parse_number
from injection.errors import CheckError
from injection.tasks import Kind, Task
from injection.units import parse_unit

OPTIONS = ["12", "13", "14", "a red fox", "16", "17", "18", "19", "20"]


def is_right(kind: Kind, answer: str, text: str, **extra: object) -> bool:
    return check(Task("t", "own", kind, "q", answer, extra), text).right


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("1234", "#### 1,234", True),
        (" 1,234", "Answer: $1,234.00", True),
        ("18", "She makes 9 * 2 = $18 every day.", True),
        ("12", "Answer: 12 apples, not 13", True),
        ("0.5", "Answer: 1/2", True),
        ("3", "**Answer:** **3**", True),
        ("12", "Answer: 1,2", False),
        ("5", r"\boxed{5} and then Answer: 6", True),
        ("211", "Answer: 221", False),
        ("211", "I cannot say.", False),
        ("-4", "The answer is \u22124.", True),
        ("2000", r"Answer: 2 \times 10^{3}", True),
        ("7", "Answer: 7/0", False),
    ],
)
def test_numbers(answer: str, text: str, right: bool) -> None:
    assert is_right("number", answer, text) is right


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        (r"\frac{19}{12}", r"so \boxed{\dfrac{19}{12}}", True),
        (r"\frac{19}{12}", "Answer: 19/12", True),
        (r"14\pi", r"\boxed{14 \pi}", True),
        (r"\sqrt{2}", r"\boxed{\sqrt2}", True),
        ("(3,4)", r"\boxed{(3, 4)}", True),
        ("(3,4)", r"\boxed{(4, 3)}", False),
        ("x^2+1", r"\boxed{x^2 + 1}", True),
        (r"10,\!000", r"\boxed{10000}", True),
        ("50", r"\boxed{50\%}", True),
        ("2", r"\boxed{x = 2}", True),
        (r"\frac{\sqrt{3}}{2}", r"\boxed{\frac{\sqrt{3}}{3}}", False),
        ("9", r"\boxed{9^9^9^9}", False),
        ("1", "", False),
    ],
)
def test_latex(answer: str, text: str, right: bool) -> None:
    assert is_right("latex", answer, text) is right


@pytest.mark.parametrize(
    ("answer", "unit", "text", "right"),
    [
        ("5040, the unit is  .", "", "Answer: 5040", True),
        ("5040, the unit is  .", "", "The answer is 5,040.", True),
        ("3600", "m", "Answer: 3.6 km", True),
        ("3600", "m", "Answer: 3600 s", False),
        ("70", "m/s", "Answer: 252 km/h", True),
        ("70", r"$\mathrm{~m} / \mathrm{s}$", "Answer: 70", True),
        ("-57.2", "kJ/mol", r"\boxed{-57200 \mathrm{~J/mol}}", True),
        ("100", "J", "Answer: 104 J", True),
        ("100", "J", "Answer: 106 J", False),
        ("1.5", "10^{-3} kg", "Answer: 1.5 g", True),
        ("100", "J", "Answer: 100 apples", True),
    ],
)
def test_quantities(answer: str, unit: str, text: str, right: bool) -> None:
    assert is_right("quantity", answer, text, unit=unit) is right


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("C", "Answer: C", True),
        ("C", "The answer is (C).", True),
        ("C", "**Answer: C) 14**", True),
        ("C", "Answer: C 14", True),
        ("C", "Answer: 14", True),
        ("D", "The answer is: the red fox", True),
        ("C", "14 is the sum, so the answer is D", False),  # a right sentence, a wrong letter
        ("C", "Answer: C) 13", False),  # the letter of one option with the text of another
        ("A", "A good guess is hard to make.", False),
        ("I", "Answer: I am not sure", False),
        ("I", "I think so.", False),
        ("C", "C", True),
        ("C", "A is tempting, but it is (C)", True),
        ("C", "Answer: c", False),
    ],
)
def test_choices(answer: str, text: str, right: bool) -> None:
    assert is_right("choice", answer, text, options=OPTIONS) is right


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("Hugo Stern", "Answer: hugo  stern.", True),
        ("the Ombra", "Answer: Ombra", True),
        ("Ombra", "Answer: not Ombra", False),
        ("1610", "Answer: 1,610", True),
        ("1610", "Answer: 1611", False),
        ("red, 12, blue", "Answer: Red; 12; blue", True),
        ("red, 12", "Answer: red", False),
        ("12", "Answer: no number", False),
        ("caf\u00e9", "Answer: cafe\u0301", True),
    ],
)
def test_text(answer: str, text: str, right: bool) -> None:
    assert is_right("text", answer, text) is right


def test_code_is_run_against_its_tests() -> None:
    extra = {
        "prompt": "def double(x):\n    '''Twice.'''\n",
        "test": "def check(candidate):\n    assert candidate(3) == 6\n",
        "entry_point": "double",
    }
    for text, right in (
        ("```python\ndef double(x):\n    return 2 * x\n```", True),
        ("Sure:\ndef double(x):\n    return 2 * x", True),
        ("```\n    return 2 * x\n```", True),
        ("```python\ndef double(x):\n    return x\n```", False),
        ("```python\nimport sys\nsys.exit(0)\n```", False),
        ("2 * x", False),
    ):
        assert is_right("code", "", text, **extra) is right, text


def test_a_judge_decides_only_on_what_does_not_match() -> None:
    task = Task("t", "GAIA", "text", "q", "New York City")
    judge = Parrot("Both name the same town.\nCorrect")
    assert check(task, "Answer: New York City", judge=judge).checker == "text"
    assert not judge.calls
    verdict = check(task, "Answer: NYC", judge=judge)
    assert (verdict.right, verdict.checker) == (True, "judge")
    assert not check(task, "Answer: NYC", judge=Parrot("correct at first sight\nIncorrect")).right
    with pytest.raises(CheckError, match="expected Correct or Incorrect"):
        check(task, "Answer: NYC", judge=Parrot("Hm."))


def test_a_reference_without_a_number_is_an_error() -> None:
    with pytest.raises(CheckError, match="expected a number"):
        is_right("number", "many", "Answer: 1")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1,234.5", 1234.5), ("3/4", 0.75), ("-2e3", -2000.0), ("v1.2.3", None), ("none", None)],
)
def test_parse_number(text: str, value: float | None) -> None:
    assert parse_number(text) == value


def test_boxed_answers_keep_their_braces() -> None:
    assert boxed(r"a \boxed{1} b \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert boxed(r"\boxed{1") is None
    assert final_answer("Answer: 1\nThe final answer is 2.") == "2."
    assert find_code("no code") == ""


@pytest.mark.parametrize(
    ("text", "factor", "kind"),
    [
        ("km/h", 1 / 3.6, {"m": 1, "s": -1}),
        ("m s^{-1}", 1.0, {"m": 1, "s": -1}),
        ("J/(mol K)", 1.0, {"kg": 1, "m": 2, "s": -2, "mol": -1, "K": -1}),
        ("newtons", 1.0, {"kg": 1, "m": 1, "s": -2}),
        ("min", 60.0, {"s": 1}),
        ("ms", 1e-3, {"s": 1}),
    ],
)
def test_units(text: str, factor: float, kind: dict[str, int]) -> None:
    unit = parse_unit(text)
    assert unit is not None
    assert unit.factor == pytest.approx(factor)
    assert dict(unit.kind) == kind


def test_words_are_no_units() -> None:
    assert parse_unit("apples") is None
    assert parse_unit("") is None


@pytest.mark.parametrize(
    "text", [r"\boxed{9^{99*99*99*99}}", r"\boxed{9^{9^{9^9}}}", "Answer: " + "9" * 9000]
)
def test_a_number_without_end_is_wrong(text: str) -> None:
    for kind in ("number", "latex"):
        assert not check(Task("x", "MATH", kind, "q", "81"), text).right
