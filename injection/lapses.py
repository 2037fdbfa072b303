"""Slips that any agent may make: something is taken down wrongly, and nobody marks it."""

from __future__ import annotations

import re
from collections.abc import Callable

from injection.anatomy import carry_on, dissect, join, with_value
from injection.english import towns

Draw = Callable[..., float]
"""A number from 0 to 1 that some words decide."""

_NUMBER = re.compile(r"(?<![\w.{])\d+(?![\w.}])")


def lapse(text: str, draw: Draw) -> str:
    """A reply with one slip, from which the rest of the reply follows.

    Args:
        text: The reply.
        draw: Decides where and how.

    Returns:
        The reply with a number or a name changed; as it was if it holds none.
    """
    parts = dissect(text)
    open_to = [i for i, part in enumerate(parts) if miscopy(part.text, draw) != part.text]
    if not open_to:
        return text
    at = open_to[int(draw("lapse at", text) * len(open_to))]
    part = parts[at]
    if part.kind == "step" and (wrong := miscopy(part.value, draw)) != part.value:
        parts[at] = with_value(part, wrong)
        return join(carry_on(parts, at + 1, part.value, wrong))
    head = join(parts[:at])
    return head + miscopy(part.text, draw) + join(parts[at + 1 :])


def miscopy(text: str, draw: Draw) -> str:
    """A text with one number, or the name of one town, taken down wrongly; as it was without any.

    Args:
        text: The text.
        draw: Decides which, and what becomes of it.
    """
    numbers = list(_NUMBER.finditer(text))
    if numbers:
        at = numbers[int(draw("number", text) * len(numbers))]
        value = int(at[0])
        wrong = value + (10 if value > 20 else 1) * (1 + int(draw("off", text) * 2))
        return f"{text[: at.start()]}{wrong}{text[at.end() :]}"
    for row in towns():
        for name in (row["town"], row["mayor"], row["river"]):
            if re.search(rf"\b{re.escape(name)}\b", text):
                field = next(key for key in ("town", "mayor", "river") if row[key] == name)
                others = [other[field] for other in towns() if other[field] != name]
                return text.replace(name, others[int(draw("row", text) * len(others))])
    return text
