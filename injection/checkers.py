r"""Is an answer right? One checker for each kind of task, strict about the field's known traps.

The final answer of a text is the last of: `\boxed{...}`, `#### ...`, `Answer: ...`, `the answer is
...`; a text without any of these offers its last number (numbers), or nothing (choices).
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from injection.errors import CheckError
from injection.sandbox import run_tests
from injection.session import Call, Message, Model
from injection.tasks import Task
from injection.units import Unit, parse_unit

RELATIVE = 0.05
"""Share by which a quantity may be off. Source: evaluation code of SciBench (2307.10635)."""

_NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?(?:\d{1,3}(?:(?:,|\u202f|\u00a0|\\,|\{,\})\d{3})+|\d+)?(?:\.\d+)?"
    r"(?:\s?(?:[eE]|(?:\\times|x|\u00d7|\*)\s?10\^)\{?[-+]?\d+\}?)?(?:/\d+(?![\d/.]))?"
)
_MARKED = re.compile(
    r"(?:####|\*{0,2}(?:final\s+)?answer\*{0,2}\s*(?:is\b|:|=)\*{0,2})[ \t]*:?[ \t]*([^\n]*)",
    re.IGNORECASE,
)
_CHOICE = r"(?:option\s+)?[(\[*\"']*([A-J])(?=\s*(?:$|[^\w\s'])|\s+(?:because|since)\b)"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a checker says.

    Args:
        right: Whether the answer is right.
        found: What was taken for the final answer; empty if none was found.
        expected: The reference.
        checker: Name of the checker.
    """

    right: bool
    found: str
    expected: str
    checker: str

    def to_dict(self) -> dict[str, object]:
        """Plain JSON."""
        return {
            "right": self.right,
            "found": self.found,
            "expected": self.expected,
            "checker": self.checker,
        }


def check(task: Task, text: str, *, judge: Model | None = None) -> Verdict:
    """Judge a final output.

    Args:
        task: The task.
        text: What the system said last.
        judge: Decides on free text that does not match word for word; None leaves it wrong.

    Raises:
        CheckError: If the reference cannot be read, or the judge does not decide.
    """
    verdict = _CHECKERS[task.kind](task, text)
    if not verdict.right and judge is not None and task.kind == "text" and verdict.found:
        return _ask_judge(task, verdict, judge)
    return verdict


def boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` with balanced braces; None if there is none."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len(r"\boxed{")
    for i in range(begin, len(text)):
        if text[i] == "}" and depth == 0:
            return text[begin:i]
        depth += {"{": 1, "}": -1}.get(text[i], 0)
    return None


def final_answer(text: str) -> str:
    """What a text marks as its final answer; empty if nothing is marked."""
    inside = boxed(text)
    if inside is not None:
        return inside.strip()
    marked = [match[1] for match in _MARKED.finditer(text) if match[1].strip(" .*")]
    return marked[-1].strip(" *") if marked else ""


def parse_number(text: str) -> float | None:
    r"""The first number of a text: `1,234.5`, `3/4`, `-2e3`, `1.5 \times 10^{3}`, `50%`."""
    for match in _NUMBER.finditer(text):
        digits = match[0].replace("\u2212", "-")
        if not any(c.isdigit() for c in digits):
            continue
        digits = re.sub(r"(?<=\d)(?:,|\u202f|\u00a0|\\,|\{,\})(?=\d{3})", "", digits)
        digits = re.sub(r"\s?(?:\\times|x|\u00d7|\*)\s?10\^", "e", digits)
        digits = digits.replace(" ", "").replace("{", "").replace("}", "")
        top, _, bottom = digits.partition("/")
        if bottom and float(bottom) == 0:
            continue
        return float(top) / (float(bottom) if bottom else 1.0)
    return None


def _check_number(task: Task, text: str) -> Verdict:
    """Equal numbers; thousands separators, currency signs and trailing words do not count."""
    expected = parse_number(task.answer)
    if expected is None:
        raise CheckError(f"{task.id}: expected a number as reference, got {task.answer!r}")
    found = final_answer(text) or _last_number(text)
    value = _latex_value(found)
    if value is None:
        value = parse_number(found)
    right = value is not None and math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9)
    return Verdict(right, found, task.answer.strip(), "number")


def _check_latex(task: Task, text: str) -> Verdict:
    """Equal after normalising the notation, or equal in value."""
    found = final_answer(text) or _last_number(text)
    left, right = normalise_latex(found), normalise_latex(task.answer)
    values = _latex_value(left), _latex_value(right)
    same = left == right or (
        values[0] is not None
        and values[1] is not None
        and math.isclose(values[0], values[1], rel_tol=1e-6, abs_tol=1e-9)
    )
    return Verdict(bool(found) and same, found, task.answer, "latex")


def normalise_latex(text: str) -> str:
    """One spelling for expressions that differ in layout only."""
    text = text.strip().strip("$").rstrip(".").strip()
    text = re.sub(r"\\(?:left|right|displaystyle|,|!|;|:|quad)(?![a-z])", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\(?:text|mathrm|mbox|textbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\d)", r"\\sqrt{\1}", text)
    text = text.replace(r"\%", "").replace("%", "").replace(r"\$", "").replace("^\\circ", "")
    text = re.sub(r"\^\{\\circ\}", "", text)
    text = re.sub(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"^(?:[a-zA-Z]|f\(x\))\s*=\s*", "", text)
    return re.sub(r"\s+", "", text)


def _latex_value(text: str) -> float | None:
    """Value of a closed expression of numbers, fractions, roots, powers and pi; None otherwise."""
    text = normalise_latex(text)
    for _ in range(8):
        text, n = re.subn(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
        text, m = re.subn(r"\\sqrt\{([^{}]*)\}", r"((\1)**0.5)", text)
        if n + m == 0:
            break
    text = text.replace(r"\pi", "(3.141592653589793)").replace(r"\cdot", "*")
    text = text.replace(r"\times", "*").replace("{", "(").replace("}", ")").replace("^", "**")
    text = re.sub(r"(?<=[\d)])(?=\()", "*", text)
    if not text or len(text) > 80 or not re.fullmatch(r"[\d.+\-*/()]+", text):
        return None
    text = re.sub(r"(?<![\d.])\d+(?![\d.])", r"\g<0>.", text)  # whole numbers may grow without end
    try:
        value = float(eval(compile(text, "<latex>", "eval"), {"__builtins__": {}}))
    except (ArithmeticError, SyntaxError, TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _check_quantity(task: Task, text: str) -> Verdict:
    """A number within tolerance; a unit that is given must be of the right kind."""
    expected = parse_number(task.answer)
    if expected is None:
        raise CheckError(f"{task.id}: expected a number as reference, got {task.answer!r}")
    unit = parse_unit(str(task.extra.get("unit", "")))
    found = final_answer(text) or _last_number(text)
    value = parse_number(found)
    right = value is not None and _same_quantity(value, found, expected, unit)
    return Verdict(right, found, f"{task.answer} {task.extra.get('unit', '')}".strip(), "quantity")


def _same_quantity(value: float, found: str, expected: float, unit: Unit | None) -> bool:
    """Whether a number with whatever follows it is the expected quantity."""
    number = next(m for m in _NUMBER.finditer(found) if any(c.isdigit() for c in m[0]))
    given = parse_unit(found[number.end() :])
    if given is not None and unit is not None:
        if given.kind != unit.kind:
            return False
        value *= given.factor / unit.factor
    return math.isclose(value, expected, rel_tol=RELATIVE, abs_tol=1e-12)


def _check_choice(task: Task, text: str) -> Verdict:
    """One letter. A letter beside the text of another option contradicts itself and is wrong."""
    options = [str(option) for option in task.extra["options"]]
    marked = final_answer(text)
    match = re.match(_CHOICE, marked) or _with_text(marked, options)
    if match is None and not marked:
        bare = re.fullmatch(rf"\W*{_CHOICE}\W*", text.strip())
        inside = list(re.finditer(r"\(([A-J])\)|\boption ([A-J])\b", text))
        match = bare or (inside[-1] if inside else None)
    if match is None:
        named = [i for i, option in enumerate(options) if _plain(option) == _plain(marked)]
        letter = "ABCDEFGHIJ"[named[0]] if marked and len(named) == 1 else ""
    else:
        letter = next(group for group in match.groups() if group)
    rest = _plain(marked[match.end() :]) if match and marked else ""
    named = [i for i, option in enumerate(options) if rest and _plain(option) == rest]
    contradicts = bool(named) and letter not in {"ABCDEFGHIJ"[i] for i in named}
    return Verdict(letter == task.answer and not contradicts, letter, task.answer, "choice")


def _with_text(marked: str, options: list[str]) -> re.Match[str] | None:
    """A letter that is followed by the text of an option and nothing else."""
    match = re.match(r"([A-J])\s+(?=\S)", marked)
    texts = {_plain(option) for option in options}
    return match if match and _plain(marked[match.end() :]) in texts else None


def _check_text(task: Task, text: str) -> Verdict:
    """Same number, same list, or same words after normalising."""
    found = final_answer(text) or text.strip().rpartition("\n")[2].strip()
    right = bool(found) and _same_text(found, task.answer)
    return Verdict(right, found, task.answer, "text")


def _same_text(found: str, expected: str) -> bool:
    """Numbers by value, lists part by part, words without case, articles and punctuation."""
    value = parse_number(expected)
    if value is not None and re.fullmatch(r"[-+$€]?[\d,.]+%?", expected.strip()):
        given = parse_number(found)
        return given is not None and math.isclose(given, value, rel_tol=1e-9)
    if re.search(r"[,;]", expected):
        parts = [re.split(r"[,;]", text) for text in (found, expected)]
        return len(parts[0]) == len(parts[1]) and all(
            _same_text(a.strip(), b.strip()) for a, b in zip(*parts, strict=True)
        )
    return _plain(found) == _plain(expected)


def _plain(text: str) -> str:
    """Words without case, accents of layout, articles and punctuation."""
    text = unicodedata.normalize("NFKC", text).casefold()
    words = re.sub(r"[^\w\s]", " ", text).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def _check_code(task: Task, text: str) -> Verdict:
    """The function passes its tests in the sandbox."""
    code = find_code(text)
    tests = f"{task.extra['test']}\n\ncheck({task.extra['entry_point']})\n"
    problem = _run(code, str(task.extra["prompt"]), tests) if code else "no code"
    return Verdict(not problem, code or "", task.answer if problem else "tests pass", "code")


@lru_cache(maxsize=4096)
def _run(code: str, prompt: str, tests: str) -> str:
    """What is wrong with code; empty if nothing is. A bare body is put below its signature."""
    whole = code if "def " in code else prompt + code
    preface = "".join(
        f"{line}\n" for line in prompt.splitlines() if line.startswith(("import ", "from "))
    )
    tested = run_tests(f"{preface}{whole}\n\n{tests}")
    return "" if tested.passed else tested.problem


def find_code(text: str) -> str:
    """Python of a reply: its last fenced block, else everything from the first definition on."""
    fenced = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    if fenced:
        return str(fenced[-1])
    match = re.search(r"^(?:import |from |def |class |    return )", text, re.MULTILINE)
    return text[match.start() :] if match else ""


def _last_number(text: str) -> str:
    """The last number that a text holds."""
    found = [m[0] for m in _NUMBER.finditer(text) if any(c.isdigit() for c in m[0])]
    return found[-1].strip() if found else ""


def _ask_judge(task: Task, verdict: Verdict, judge: Model) -> Verdict:
    """Let a model decide whether two short answers mean the same.

    Raises:
        CheckError: If its last line has no verdict.
    """
    prompt = (
        f"Question: {task.question}\nReference answer: {task.answer}\n"
        f"Answer to judge: {verdict.found}\n\nDo both answers mean the same? Differences of "
        "wording and layout do not matter; other facts, numbers or units do. End with one line "
        "that holds only Correct or Incorrect."
    )
    messages = (Message("system", "You compare answers."), Message("user", prompt))
    reply = judge(Call("Judge", 0, 0, "judge", messages)).text
    words = re.findall(r"\b(correct|incorrect)\b", reply.casefold())
    if not words:
        raise CheckError(f"{task.id}: expected Correct or Incorrect from the judge, got neither")
    return Verdict(words[-1] == "correct", verdict.found, task.answer, "judge")


_CHECKERS: dict[str, Callable[[Task, str], Verdict]] = {
    "number": _check_number,
    "latex": _check_latex,
    "code": _check_code,
    "choice": _check_choice,
    "quantity": _check_quantity,
    "text": _check_text,
}
