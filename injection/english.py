"""The small world that scripted agents understand: questions in plain words to worked steps.

A question becomes a chain of expressions; `{0}` stands for the value of the first step. Values
come from really computing, counting letters, looking rows up in a table, or writing code, so a
wrong operand anywhere upstream gives a wrong answer for real.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from injection.anatomy import compute
from injection.tasks import DATA

_N = r"(-?\d+(?:\.\d+)?(?:/\d+)?)"
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@dataclass(frozen=True, slots=True)
class Solution:
    """A question worked out.

    Args:
        steps: Pairs of expression and value, in order.
        answer: What is asked for, as it should be stated.
        code: The function, for tasks that ask for one; empty otherwise.
    """

    steps: tuple[tuple[str, str], ...]
    answer: str
    code: str = ""


def plan(question: str) -> tuple[str, ...]:
    """Expressions that lead to the answer, without their values; empty if nothing is understood."""
    question = question.partition(" Give the result in ")[0]
    stem, _, options = question.partition("\nA) ")
    found = next((made for read in _GRAMMARS if (made := read(stem))), ())
    if found and options:
        return (*found, f"option that says {{{len(found) - 1}}}")
    return tuple(found)


@lru_cache(maxsize=1024)
def solve(question: str) -> Solution | None:
    """Work a question out; None if it is not understood."""
    if "def " in question:
        code = write_code(question)
        return Solution((), code, code) if code else None
    values: list[str] = []
    steps = []
    for template in plan(question):
        expression = fill(template, values)
        value = evaluate(expression, question)
        if value is None:
            return None
        values.append(value)
        steps.append((expression, value))
    return Solution(tuple(steps), values[-1]) if steps else None


def fill(template: str, values: Sequence[str]) -> str:
    """An expression with the values of earlier steps put in."""
    return re.sub(
        r"\{(\d+)\}", lambda m: values[int(m[1])] if int(m[1]) < len(values) else "?", template
    )


def evaluate(expression: str, question: str = "") -> str | None:
    """Value of one expression; None if it is not understood.

    Args:
        expression: `12 * 7`, `river of Tarnow`, `"planet" reversed`, `option that says 84`.
        question: Where options are listed.
    """
    for read in (compute, _letters, _table):
        value = read(expression)
        if value is not None:
            return value
    match = re.fullmatch(r"option that says (.+)", expression)
    if match:
        listed = re.findall(r"^([A-J])\) (.+)$", question, re.MULTILINE)
        return next((letter for letter, text in listed if text.strip() == match[1]), None)
    return None


def _letters(expression: str) -> str | None:
    """Work on the letters of a word."""
    if match := re.fullmatch(r'"(\w+)" reversed', expression):
        return match[1][::-1]
    if match := re.fullmatch(r'letter (\d+) of "(\w+)"', expression):
        place = int(match[1])
        return match[2][place - 1] if 1 <= place <= len(match[2]) else None
    if match := re.fullmatch(r'number of "(\w)" in "(\w+)"', expression):
        return str(match[2].count(match[1]))
    if match := re.fullmatch(r'length of "(\w+)"', expression):
        return str(len(match[1]))
    return None


def _table(expression: str) -> str | None:
    """Look a field up in the table of towns: `river of Tarnow`, `town whose mayor is X`."""
    if match := re.fullmatch(r"(\w+) of (.+)", expression):
        rows = [row for row in towns() if row["town"] == match[2]]
        return rows[0].get(match[1]) if rows else None
    if match := re.fullmatch(r"town whose (\w+) is (.+)", expression):
        rows = [row for row in towns() if row.get(match[1]) == match[2]]
        return rows[0]["town"] if rows else None
    if match := re.fullmatch(r"(largest|smallest) town in (\w+)", expression):
        rows = [row for row in towns() if row["country"] == match[2]]
        pick = max if match[1] == "largest" else min
        return pick(rows, key=lambda row: int(row["population"]))["town"] if rows else None
    if match := re.fullmatch(r"number of towns in (\w+)", expression):
        count = sum(row["country"] == match[1] for row in towns())
        return str(count) if count else None
    return None


@cache
def towns() -> tuple[dict[str, str], ...]:
    """Rows of the table that searches go through; its places are invented."""
    with (DATA / "towns.csv").open(encoding="utf-8", newline="") as stream:
        return tuple(csv.DictReader(stream))


def _story(text: str) -> list[str]:
    """A quantity that a story changes sentence by sentence."""
    steps: list[str] = []
    for sentence in re.split(r"(?<=[.?])\s+", text):
        for pattern, expression in _STORY:
            match = re.search(pattern, sentence)
            if match and ("{q}" not in expression or steps):
                values = {"q": f"{{{len(steps) - 1}}}", "a": match[1]}
                values["b"] = match[2] if match.re.groups > 1 else ""
                steps.append(expression.format(**values))
                break
    return steps


_STORY = (
    (r"has (\d+) \w+ with (\d+) \w+ each", "{a} * {b}"),
    (r"works (\d+) hours a day for (\d+) days", "{a} * {b}"),
    (r"(?:buys|finds|gets|receives|picks) (\d+) more", "{q} + {a}"),
    (r"(?:gives away|sells|loses|uses|eats) (\d+)", "{q} - {a}"),
    (r"shares .* equally among (\d+)", "{q} / {a}"),
    (r"packs .* in bags of (\d+)", "{q} / {a}"),
    (r"[Ee]ach \w+ (?:costs|earns|weighs|pays) (\d+)", "{q} * {a}"),
    (r"starts with (\d+) \w+ and adds (\d+)", "{a} + {b}"),
)

_EXACT: tuple[tuple[str, tuple[str, ...]], ...] = (
    (rf"\$?{_N}x \+ {_N} = {_N}\$?", ("{c} - {b}", "{0} / {a}")),
    (rf"\$?{_N}x - {_N} = {_N}\$?", ("{c} + {b}", "{0} / {a}")),
    (rf"triangle with base {_N} and height {_N}", ("{a} * {b}", "{0} / 2")),
    (rf"sum of the first {_N} positive integers", ("{a} + 1", "{a} * {0}", "{1} / 2")),
    (rf"remainder when \$?{_N}\^{_N}\$? is divided by {_N}", ("{a} ^ {b}", "{0} % {c}")),
    (rf"perimeter of a rectangle with sides {_N} and {_N}", ("{a} + {b}", "2 * {0}")),
    (r"\\frac\{(\d+)\}\{(\d+)\} \+ \\frac\{(\d+)\}\{(\d+)\}", ("{a}/{b} + {c}/{d}",)),
    (rf"moves at {_N} m/s for {_N} minutes", ("{b} * 60", "{a} * {0}")),
    (rf"force of {_N} N acts on a mass of {_N} kg for {_N} s", ("{a} / {b}", "{0} * {c}")),
    (rf"resistor of {_N} ohm carries a current of {_N} A", ("{b} * {b}", "{0} * {a}")),
    (rf"mass of {_N} kg moves at {_N} m/s", ("{b} * {b}", "{a} * {0}", "{1} / 2")),
    (rf"{_N} kg of water is heated by {_N} K", ("{a} * 4186", "{0} * {b}")),
    (rf"product of {_N} and {_N}, increased by {_N}", ("{a} * {b}", "{0} + {c}")),
    (r'"(\w+)" spelled backwards', ('"{a}" reversed',)),
    (r'times does the letter "(\w)" occur in "(\w+)"', ('number of "{a}" in "{b}"',)),
    (
        r'letters of "(\w+)" and "(\w+)" together',
        ('length of "{a}"', 'length of "{b}"', "{0} + {1}"),
    ),
    (
        r"river flows through the town whose mayor is ([\w ]+)\?",
        ("town whose mayor is {a}", "river of {0}"),
    ),
    (r"mayor of the (largest|smallest) town in (\w+)", ("{a} town in {b}", "mayor of {0}")),
    (
        r"year was the town on the river (\w+) founded",
        ("town whose river is {a}", "founded of {0}"),
    ),
    (
        r"people live in (\w+) and (\w+) together",
        ("population of {a}", "population of {b}", "{0} + {1}"),
    ),
    (r"older is (\w+) than (\w+)\?", ("founded of {a}", "founded of {b}", "{1} - {0}")),
    (
        r"country is the town whose mayor is ([\w ]+)\?",
        ("town whose mayor is {a}", "country of {0}"),
    ),
)


def _exact(text: str) -> list[str]:
    """A question of one known form."""
    for pattern, templates in _EXACT:
        match = re.search(pattern, text)
        if match:
            values = dict(zip("abcd", match.groups(), strict=False))
            return [_put(template, values) for template in templates]
    return []


def _put(template: str, values: dict[str, str]) -> str:
    """Letters in braces replaced; numbers in braces, which stand for steps, kept."""
    return re.sub(r"\{([a-d])\}", lambda m: values[m[1]], template)


def _spell(text: str) -> list[str]:
    """The n-th letter of a word."""
    match = re.search(rf'({"|".join(_ORDINALS)}) letter of "(\w+)"', text)
    return [f'letter {_ORDINALS.index(match[1]) + 1} of "{match[2]}"'] if match else []


_GRAMMARS = (_exact, _spell, _story)

_FILTERS = {
    "even": "x % 2 == 0", "odd": "x % 2 != 0", "positive": "x > 0", "negative": "x < 0",
}  # fmt: skip
_MAPS = {"squares": "x * x", "doubles": "2 * x", "cubes": "x * x * x", "absolute values": "abs(x)"}
_FOLDS = {
    "sum": "sum(mapped)", "number": "len(mapped)", "largest": "max(mapped, default=0)",
    "smallest": "min(mapped, default=0)", "list": "mapped", "count": "len(set(mapped))",
}  # fmt: skip
_TASK = re.compile(
    r"Return the (sum|number|largest|smallest|list|count) of the "
    r"(?:(squares|doubles|cubes|absolute values) of the )?(even|odd|positive|negative) numbers"
)


def write_code(question: str) -> str:
    """A function for a docstring in plain words; empty if it is not understood."""
    head = re.search(r"^def \w+\(xs\):$", question, re.MULTILINE)
    match = _TASK.search(" ".join(question.split()))
    if head is None or match is None:
        return ""
    mapped = _MAPS.get(match[2] or "", "x")
    return (
        f"{head[0]}\n"
        f"    kept = [x for x in xs if {_FILTERS[match[3]]}]\n"
        f"    mapped = [{mapped} for x in kept]\n"
        f"    return {_FOLDS[match[1]]}\n"
    )
