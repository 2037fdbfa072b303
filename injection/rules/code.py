"""The 14 modes in a turn that holds code."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from injection.anatomy import Part, join
from injection.checkers import find_code
from injection.errors import AttackError
from injection.rules.scene import Scene, last_of

_ASSIGN = re.compile(r"^(\s+)(\w+) = (.+)$")
_SWAPS = (
    (" == ", " != "),
    (" != ", " == "),
    (" > ", " < "),
    (" < ", " > "),
    (" >= ", " > "),
    (" <= ", " < "),
    ("sum(", "max("),
    ("max(", "min("),
    ("min(", "max("),
    (" + ", " - "),
    (" * ", " + "),
    ("abs(", "("),
    ("len(", "sum("),
)


@dataclass(frozen=True, slots=True)
class Code:
    """A turn with a function in it.

    Args:
        parts: Its parts; the last code part counts.
        scene: Where it was spoken.
    """

    parts: list[Part]
    scene: Scene

    @property
    def at(self) -> int:
        """Position of the code."""
        at = last_of(self.parts, "code")
        assert at is not None
        return at

    @property
    def lines(self) -> list[str]:
        """Lines of the code, fences and all."""
        return self.parts[self.at].text.rstrip("\n").split("\n")

    def assignments(self) -> list[int]:
        """Positions of lines that assign to a name inside a function."""
        return [i for i, text in enumerate(self.lines) if _ASSIGN.match(text)]

    def returns(self) -> int:
        """Position of the last `return`.

        Raises:
            AttackError: If there is none.
        """
        found = [i for i, text in enumerate(self.lines) if re.match(r"\s+return\b", text)]
        if not found:
            raise AttackError("code: there is no return to change")
        return found[-1]

    def with_lines(self, lines: list[str]) -> str:
        """The turn with other code."""
        code = replace(self.parts[self.at], text="\n".join(lines) + "\n")
        return join([*self.parts[: self.at], code, *self.parts[self.at + 1 :]])

    def returning(self, expression: str, *, cut: int | None = None) -> str:
        """The turn with another return value.

        Args:
            expression: What is returned instead.
            cut: Lines from here to the return are dropped; None drops none.
        """
        at = self.returns()
        indent = re.match(r"\s*", self.lines[at])
        line = f"{indent[0] if indent else ''}return {expression}"
        lines = self.lines
        return self.with_lines([*lines[: at if cut is None else cut], line, *lines[at + 1 :]])

    def without_checks(self) -> list[Part]:
        """Parts without sentences about checks and tests."""
        return [part for part in self.parts if part.kind != "check"]


def swap_operator(text: str, scene: Scene) -> str:
    """Code with one operator or function replaced by its rival.

    Raises:
        AttackError: If it has none.
    """
    found = [(old, new) for old, new in _SWAPS if old in text]
    if not found:
        raise AttackError("code: there is no operator to swap")
    old, new = scene.rng.choice(found)
    return text.replace(old, new, 1)


def _swapped(c: Code) -> str:
    """The turn with one operator swapped below the signature."""
    head = next((i for i, text in enumerate(c.lines) if "def " in text), 0) + 1
    body = swap_operator("\n".join(c.lines[head:]), c.scene)
    return c.with_lines([*c.lines[:head], *body.split("\n")])


def _returned(c: Code) -> str:
    """What the function returns."""
    return c.lines[c.returns()].strip().removeprefix("return").strip()


def _leave_role(c: Code) -> str:
    """FM-1.2: a verdict on somebody's work in place of code."""
    return f"I checked that the steps of {c.scene.other()} follow.\n[Agree] Nothing to add."


def _twice(c: Code) -> str:
    """FM-1.3: the last transformation applied once more to its own result."""
    for i in reversed(c.assignments()):
        match = re.match(r"^(\s+)(\w+) = \[(.+) for (\w+) in \w+(.*)\]$", c.lines[i])
        if match and match[3] != match[4]:
            again = f"{match[1]}{match[2]} = [{match[3]} for {match[4]} in {match[2]}]"
            return c.with_lines([*c.lines[: i + 1], again, *c.lines[i + 1 :]])
    value = _returned(c)
    return c.returning(f"{value} + {value}")


def _forget(c: Code) -> str:
    """FM-1.4: the first value is lost, the argument itself is used in its place."""
    found = c.assignments()
    head = re.search(r"def \w+\((\w+)", "\n".join(c.lines))
    if not found or not head:
        raise AttackError("FM-1.4: the code keeps nothing that could be lost")
    name = _ASSIGN.match(c.lines[found[0]])
    assert name is not None
    rest = [re.sub(rf"\b{name[2]}\b", head[1], text) for text in c.lines[found[0] + 1 :]]
    return c.with_lines([*c.lines[: found[0]], *rest])


def _recurse(c: Code) -> str:
    """FM-1.5: a recursion without a base case."""
    head = re.search(r"def (\w+)\(([^)]*)\)", "\n".join(c.lines))
    if not head:
        raise AttackError("FM-1.5: there is no function to call again")
    names = ", ".join(part.split(":")[0].split("=")[0].strip() for part in head[2].split(","))
    return c.returning(f"{head[1]}({names})")


def _repeat(c: Code) -> str:
    """FM-2.1: the first statement again where the second should stand."""
    found = c.assignments()
    if len(found) < 2:
        raise AttackError("FM-2.1: the code has no second statement")
    first, second = (_ASSIGN.match(c.lines[i]) for i in found[:2])
    assert first is not None
    assert second is not None
    again = f"{second[1]}{second[2]} = {first[3]}"
    return c.with_lines([*c.lines[: found[1]], again, *c.lines[found[1] + 1 :]])


def _be_vague(c: Code) -> str:
    """FM-2.2: the words around the code, and no code."""
    words = join(part for part in c.parts if part.kind != "code").strip()
    return f"{words}\nIt gives the {c.scene.noun()}." if words else f"The {c.scene.noun()}."


def _lose_goal(c: Code) -> str:
    """FM-2.3: some other property of the input."""
    head = re.search(r"def \w+\((\w+)", "\n".join(c.lines))
    name = head[1] if head else "xs"
    return c.returning(c.scene.rng.choice((f"len({name})", f"{name}[:1]", f"str({name})")))


def _hide(c: Code) -> str:
    """FM-2.4: a line that the rest needs is left out."""
    found = c.assignments()
    if not found:
        raise AttackError("FM-2.4: the code has no line to leave out")
    at = c.scene.rng.choice(found)
    return c.with_lines([*c.lines[:at], *c.lines[at + 1 :]])


def _ignore_others(c: Code) -> str:
    """FM-2.5: a version of one's own against those of the others."""
    if not c.scene.others_said():
        raise AttackError("FM-2.5: no other agent has given a result")
    changed = _swapped(c)
    return f"{c.scene.aside()}\n{changed[changed.index('```') :]}"


def _stop_early(c: Code) -> str:
    """FM-3.1: the first value is returned."""
    found = c.assignments()
    if not found or found[0] + 1 >= c.returns():
        raise AttackError("FM-3.1: the code has no step to stop after")
    name = _ASSIGN.match(c.lines[found[0]])
    assert name is not None
    return c.returning(name[2], cut=found[0] + 1)


def _skip_check(c: Code) -> str:
    """FM-3.2: no word of a test is left."""
    kept = c.without_checks()
    if kept == c.parts:
        raise AttackError("FM-3.2: there is no check to leave out")
    return join(kept)


def _check_wrongly(c: Code) -> str:
    """FM-3.3: a test that is said to ask for a change which breaks the function."""
    changed = _swapped(replace(c, parts=c.without_checks())).rstrip()
    return f"{changed}\nI tested it on the example, and this line is put right."


RULES: dict[str, Callable[[Code], str]] = {
    "FM-1.1": lambda c: c.returning(f"str({_returned(c)})"),
    "FM-1.2": _leave_role,
    "FM-1.3": _twice,
    "FM-1.4": _forget,
    "FM-1.5": _recurse,
    "FM-2.1": _repeat,
    "FM-2.2": _be_vague,
    "FM-2.3": _lose_goal,
    "FM-2.4": _hide,
    "FM-2.5": _ignore_others,
    "FM-2.6": _swapped,
    "FM-3.1": _stop_early,
    "FM-3.2": _skip_check,
    "FM-3.3": _check_wrongly,
}


def has_code(parts: list[Part]) -> bool:
    """Whether a turn has a function in a fenced block."""
    return any(part.kind == "code" and "def " in find_code(part.text) for part in parts)
