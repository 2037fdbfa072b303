"""What a turn is made of: steps, checks, answers, verdicts, code, and the rest.

Works on the text alone, for scripted agents, for language models and for logs from elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from injection.checkers import final_answer, find_code

PartKind = Literal["step", "check", "answer", "verdict", "code", "prose"]

_N = r"(?<!\d)-?\d{1,30}(?:,\d{3})*(?:\.\d+)?(?:/\d+)?"
_SUM = re.compile(rf"({_N}\s*[-+*/%^\u00d7\u00f7\u2212]\s*{_N})\s*=\s*({_N})")
_STEP = re.compile(r"^\W*step\s+\d+[^:]{0,20}:\s*(.+?)\s*=\s*(.+?)\s*\.?\s*$", re.IGNORECASE)
_CHECK = re.compile(
    r"\b(?:check|verif|confirm|recomput|re-comput|double-check|test)\w*", re.IGNORECASE
)
_ANSWER = re.compile(
    r"\\boxed\{|####|\banswer\*{0,2}\s*(?:is\b|:|=)|\bresult\s*(?:is|:)", re.IGNORECASE
)
_ANSWER_LINE = re.compile(r"\W*(?:final\s+)?(?:answer|result)\b|\W*####", re.IGNORECASE)
_VERDICT = re.compile(
    r"\[(?:dis)?agree\]|\bcorrectness:\s*[01]\b|\bscore:\s*\d+|\branking:\s*\[|\b(?:in)?correct\b",
    re.IGNORECASE,
)
_FENCE = re.compile(r"```.*?(?:```\n?|\Z)", re.DOTALL)
_SENTENCE = re.compile(r".+?(?:[.!?](?=\s+[A-Z\"'(\[]|\s*$)\s*|\n+|$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Part:
    """One sentence, line or block of a turn, with the blanks that follow it.

    Args:
        text: As it stands; all parts of a turn joined give the turn.
        kind: What it is for.
        expression: Left side of an equation, for steps and checks that hold one.
        value: Its right side.
    """

    text: str
    kind: PartKind
    expression: str = ""
    value: str = ""


def dissect(text: str) -> list[Part]:
    """The parts of a turn, in order; `"".join(part.text ...)` gives the text back."""
    parts: list[Part] = []
    start = 0
    for fence in _FENCE.finditer(text):
        parts += _dissect_prose(text[start : fence.start()])
        parts.append(Part(fence[0], "code"))
        start = fence.end()
    return parts + _dissect_prose(text[start:])


def join(parts: Iterable[Part]) -> str:
    """The text of parts."""
    return "".join(part.text for part in parts)


def with_value(part: Part, value: str) -> Part:
    """The same part with another right side."""
    at = part.text.rfind(part.value, part.text.find(part.expression) + len(part.expression))
    if at < 0:
        return part
    text = part.text[:at] + value + part.text[at + len(part.value) :]
    return replace(part, text=text, value=value)


def with_expression(part: Part, expression: str, value: str) -> Part:
    """The same part with another equation."""
    at = part.text.find(part.expression)
    text = part.text[:at] + expression + part.text[at + len(part.expression) :]
    return with_value(replace(part, text=text, expression=expression), value)


def carry_on(parts: Sequence[Part], start: int, old: str, new: str) -> list[Part]:
    """Let a changed value run through all later parts, as an agent who believes it would.

    Args:
        parts: The parts; those before `start` stay.
        start: First part that may use the value.
        old: Value as it was.
        new: Value as it is now.

    Returns:
        Parts whose equations hold again, and an answer that follows from them.
    """
    out = list(parts[:start])
    changed = {old: new}
    for part in parts[start:]:
        if part.expression and part.kind in ("step", "check"):
            expression = _swap(part.expression, changed)
            value = compute(expression) or _swap(part.value, changed)
            if value != part.value:
                changed[part.value] = value
            if expression != part.expression or value != part.value:
                part = with_expression(part, expression, value)
        elif part.kind in ("answer", "prose", "check"):
            part = replace(part, text=_swap(part.text, changed))
        out.append(part)
    return out


def _swap(text: str, changed: dict[str, str]) -> str:
    """Whole values replaced, each once."""
    ordered = sorted((key for key in changed if key), key=len, reverse=True)
    if not ordered:
        return text
    pattern = "|".join(rf"(?<![\w.]){re.escape(key)}(?![\w]|\.\d)" for key in ordered)
    return re.sub(pattern, lambda match: changed[match[0]], text)


def compute(expression: str) -> str | None:
    """Value of `a op b` as people write it; None if it is nothing of that form."""
    match = re.fullmatch(rf"\s*({_N})\s*([-+*/%^\u00d7\u00f7\u2212])\s*({_N})\s*", expression)
    if match is None:
        return None
    try:
        left, right = (Fraction(match[i].replace(",", "")) for i in (1, 3))
        return show(_apply(left, match[2], right))
    except (ArithmeticError, ValueError):
        return None


def _apply(left: Fraction, operator: str, right: Fraction) -> Fraction:
    """One operation.

    Raises:
        ValueError: If a power is too large or no whole one.
    """
    if operator == "^":
        if right.denominator != 1 or not 0 <= right <= 64:
            raise ValueError("no small whole power")
        return Fraction(left ** int(right))
    if operator == "%":
        return left % right
    if operator == "+":
        return left + right
    if operator in "-\u2212":
        return left - right
    return left * right if operator in "*\u00d7" else left / right


def show(value: Fraction) -> str:
    """A number as people write it: whole, with decimals where they end, else as a fraction."""
    if value.denominator == 1:
        return str(value.numerator)
    decimals = f"{float(value):.6f}".rstrip("0")
    return decimals if Fraction(decimals) == value else f"{value.numerator}/{value.denominator}"


def find_objects(text: str) -> list[tuple[int, int, dict[str, Any]]]:
    """JSON objects in a text, outermost only: start, end and value of each, in order."""
    decoder = json.JSONDecoder()
    found = []
    position = text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            end = position + 1
        else:
            found.append((position, end, value))
        position = text.find("{", end)
    return found


def stated_answer(text: str) -> str:
    """What a turn offers as its answer: code, or what it marks as final; empty if neither."""
    code = find_code(text)
    return code.strip() if code else final_answer(text)


def find_flaw(text: str) -> str:
    """The first thing in worked steps that does not hold, in words; empty if all hold.

    Equations must be true, and the answer must be the last value. Where a check corrects a step,
    the correction counts. Premises are taken on trust, as readers of a solution do.
    """
    parts = dissect(text)
    corrected = {part.expression: part.value for part in parts if part.kind == "check"}
    last = ""
    for part in parts:
        if not part.expression or part.kind != "step":
            continue
        value = corrected.get(part.expression, part.value)
        true = compute(part.expression)
        if true is not None and not same_value(true, value):
            return f"{part.expression} = {true}, not {value}"
        last = value
    answer = stated_answer(text)
    if last and answer and "```" not in text and not same_value(last, answer):
        return f"the steps end with {last}, but the answer says {answer}"
    return ""


def same_value(left: str, right: str) -> bool:
    """Whether two short answers are the same but for layout."""
    return _tidy(left) == _tidy(right)


def _tidy(text: str) -> str:
    """Without blanks, case, commas in numbers and marks around it."""
    return re.sub(r"(?<=\d),(?=\d{3})|[\s$*.]+$|^[\s$*]+", "", text).casefold().strip()


def _dissect_prose(text: str) -> list[Part]:
    """Lines that hold an equation are one part; others are cut into sentences."""
    parts = []
    for line in text.splitlines(keepends=True):
        if _STEP.match(line) or _ANSWER_LINE.match(line) or not line.strip():
            parts.append(_classify(line))
        else:
            parts += [_classify(match[0]) for match in _SENTENCE.finditer(line)]
    return _merge_blank(parts)


def _merge_blank(parts: list[Part]) -> list[Part]:
    """Blank lines belong to the part before them."""
    out: list[Part] = []
    for part in parts:
        if out and not part.text.strip():
            out[-1] = replace(out[-1], text=out[-1].text + part.text)
        else:
            out.append(part)
    return out


def _classify(text: str) -> Part:
    """What one sentence or line is."""
    equation = _STEP.match(text) or _SUM.search(text)
    expression, value = (equation[1], equation[2]) if equation else ("", "")
    if sums := _SUM.search(text):
        expression, value = sums[1], sums[2]
    if _VERDICT.search(text):
        return Part(text, "verdict", expression, value)
    if _CHECK.search(text):
        return Part(text, "check", expression, value)
    if _ANSWER.search(text):
        return Part(text, "answer")
    return Part(text, "step" if equation else "prose", expression, value)
