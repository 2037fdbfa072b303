"""Units of measurement: enough to compare answers of science tasks, nothing more."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_PREFIXES = {
    "T": 1e12,
    "G": 1e9,
    "M": 1e6,
    "k": 1e3,
    "h": 1e2,
    "d": 1e-1,
    "c": 1e-2,
    "m": 1e-3,
    "u": 1e-6,
    "\u00b5": 1e-6,
    "\u03bc": 1e-6,
    "n": 1e-9,
    "p": 1e-12,
    "f": 1e-15,
}
_BASE: dict[str, tuple[float, dict[str, int]]] = {
    "m": (1, {"m": 1}),
    "s": (1, {"s": 1}),
    "g": (1e-3, {"kg": 1}),
    "A": (1, {"A": 1}),
    "K": (1, {"K": 1}),
    "mol": (1, {"mol": 1}),
    "cd": (1, {"cd": 1}),
    "min": (60, {"s": 1}),
    "h": (3600, {"s": 1}),
    "hr": (3600, {"s": 1}),
    "day": (86400, {"s": 1}),
    "N": (1, {"kg": 1, "m": 1, "s": -2}),
    "J": (1, {"kg": 1, "m": 2, "s": -2}),
    "W": (1, {"kg": 1, "m": 2, "s": -3}),
    "Pa": (1, {"kg": 1, "m": -1, "s": -2}),
    "bar": (1e5, {"kg": 1, "m": -1, "s": -2}),
    "atm": (101325, {"kg": 1, "m": -1, "s": -2}),
    "torr": (133.322, {"kg": 1, "m": -1, "s": -2}),
    "eV": (1.602176634e-19, {"kg": 1, "m": 2, "s": -2}),
    "cal": (4.184, {"kg": 1, "m": 2, "s": -2}),
    "Wh": (3600, {"kg": 1, "m": 2, "s": -2}),
    "C": (1, {"A": 1, "s": 1}),
    "V": (1, {"kg": 1, "m": 2, "s": -3, "A": -1}),
    "ohm": (1, {"kg": 1, "m": 2, "s": -3, "A": -2}),
    "F": (1, {"kg": -1, "m": -2, "s": 4, "A": 2}),
    "T": (1, {"kg": 1, "s": -2, "A": -1}),
    "Hz": (1, {"s": -1}),
    "L": (1e-3, {"m": 3}),
    "l": (1e-3, {"m": 3}),
    "M": (1e3, {"mol": 1, "m": -3}),
    "rad": (1, {}),
    "mi": (1609.344, {"m": 1}),
    "ft": (0.3048, {"m": 1}),
    "in": (0.0254, {"m": 1}),
    "lb": (0.45359237, {"kg": 1}),
}
_WORDS = {
    "meter": "m",
    "metre": "m",
    "second": "s",
    "gram": "g",
    "kilogram": "kg",
    "newton": "N",
    "joule": "J",
    "watt": "W",
    "pascal": "Pa",
    "volt": "V",
    "ampere": "A",
    "amp": "A",
    "kelvin": "K",
    "mole": "mol",
    "liter": "L",
    "litre": "L",
    "hour": "h",
    "minute": "min",
    "kilometer": "km",
    "kilometre": "km",
    "kilojoule": "kJ",
    "\u03a9": "ohm",
    "\u2126": "ohm",
    "sec": "s",
}
_PART = re.compile(
    r"[\s(]*(/|per\b)?[\s(]*([A-Za-z\u00b5\u03bc\u03a9\u2126]+)\s*(?:\^?\s*([-+]?\d))?"
)
_WHOLE = {"min", "h", "hr", "day", "cd", "mol", "mi", "ft", "in", "lb", "Pa", "rad", "atm"}


@dataclass(frozen=True, slots=True)
class Unit:
    """What a unit measures and how large it is.

    Args:
        factor: Its size in base units; > 0.
        kind: Powers of the base units, sorted.
    """

    factor: float
    kind: tuple[tuple[str, int], ...]


def parse_unit(text: str) -> Unit | None:
    r"""Read a unit: `km/h`, `m s^{-1}`, `$\mathrm{~kJ} / \mathrm{mol}$`, `10^{-3} kg`.

    Args:
        text: What follows a number; may go on in words.

    Returns:
        The unit; None if the text starts with none that is known.
    """
    text = re.sub(r"\\(?:mathrm|text|rm|Omega)\b|[{}$~]|\\[ ,;:]", lambda m: _plain(m[0]), text)
    text = re.sub(r"(?:\\cdot|\\times|\u00b7|\*)", " ", text)
    text = text.translate(str.maketrans("\u00b2\u00b3\u2212", "23-")).strip(" .()")
    factor, powers, sign = 1.0, Counter[str](), 1
    power_of_ten = re.match(r"10\^?\s*(-?\d{1,2})(?!\d)\s*", text)
    if power_of_ten:
        factor, text = 10.0 ** int(power_of_ten[1]), text[power_of_ten.end() :]
    position, read = 0, False
    while part := _PART.match(text, position):
        found = _simple(part[2])
        if found is None:
            break
        sign = -1 if part[1] else sign
        power = sign * int(part[3] or 1)
        factor *= found[0] ** power
        powers.update({base: n * power for base, n in found[1].items()})
        position, read = part.end(), True
    if not read and not power_of_ten:
        return None
    return Unit(factor, tuple(sorted((base, n) for base, n in powers.items() if n)))


def _plain(token: str) -> str:
    """What LaTeX markup leaves behind."""
    return "ohm" if token == r"\Omega" else " "


def _simple(word: str) -> tuple[float, dict[str, int]] | None:
    """Size and powers of one unit with its prefix; None if it is a word."""
    lower = word.lower()
    word = _WORDS.get(lower, _WORDS.get(lower.removesuffix("s"), word))
    if word in _BASE:
        return _BASE[word]
    head, tail = word[:1], word[1:]
    if head in _PREFIXES and tail in _BASE and tail not in _WHOLE - {"Pa", "mol"}:
        size, powers = _BASE[tail]
        return _PREFIXES[head] * size, powers
    return None
