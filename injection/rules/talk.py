"""The 14 modes in what is no solution: reviews with a verdict, plans, orders and other prose."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from injection.anatomy import Part, compute, join
from injection.errors import AttackError
from injection.rules.scene import Scene, another_value, blur, round_numbers, side_question
from injection.session import others_in

_GOOD = "Correctness: 1\nAdvice: none."
_BAD = "Correctness: 0\nAdvice: correct this and hand it in again."
_PLANNED = re.compile(r"^(\s*\d+\.\s*\w+:\s*)(.+?)(\s*)$")


@dataclass(frozen=True, slots=True)
class Talk:
    """A review or a piece of prose.

    Args:
        parts: Its parts.
        scene: Where it was spoken.
    """

    parts: list[Part]
    scene: Scene

    @property
    def text(self) -> str:
        """The whole turn."""
        return join(self.parts)

    @property
    def lines(self) -> list[str]:
        """Lines that say something."""
        return [text for text in self.text.split("\n") if text.strip()]


def flip(text: str) -> str:
    """A verdict turned round: agreement, correctness or the order of a ranking.

    Raises:
        AttackError: If there is no verdict.
    """
    swaps = {"[agree]": "[Disagree]", "[disagree]": "[Agree]"}
    out = re.sub(r"\[(?:dis)?agree\]", lambda m: swaps[m[0].casefold()], text, flags=re.IGNORECASE)
    out = re.sub(
        r"(correctness:\W*)([01])", lambda m: m[1] + "10"[int(m[2])], out, flags=re.IGNORECASE
    )
    out = re.sub(
        r"(ranking:\s*)\[([\d,\s]+)\]", lambda m: f"{m[1]}{_others(m[2])}", out, flags=re.IGNORECASE
    )
    if out == text:
        raise AttackError("review: there is no verdict to turn round")
    return out


def _others(listed: str) -> str:
    """A ranking of those who were not named first."""
    named = [int(n) for n in re.findall(r"\d+", listed)]
    rest = [n for n in range(1, max(4, *named) + 1) if n not in named]
    return str((rest + named[::-1])[: len(named)])


def _verdict(text: str, *, good: bool) -> str:
    """The verdict line of a review, made good or bad."""
    if re.search(r"correctness:", text, re.IGNORECASE):
        return _GOOD if good else _BAD
    found = re.search(r"ranking:.*", text, re.IGNORECASE)
    if found:
        return found[0] if good else flip(found[0])
    return "[Agree]" if good else "[Disagree]"


def _author(t: Talk) -> str:
    """Whose work the review is about."""
    said = t.scene.others_said()
    return said[-1].agent if said else t.scene.other()


def _false_reason(t: Talk) -> str:
    """A check of a step of the conversation that comes out wrong."""
    steps = [step for step in t.scene.earlier_steps() if step.value]
    if not steps:
        return f"A step of {_author(t)} does not hold."
    step = t.scene.rng.choice(steps)
    wrong = another_value(step.value, t.scene)
    return f"A step of {_author(t)} does not hold: {step.expression} = {wrong}, not {step.value}."


def _solve_instead(t: Talk) -> str:
    """A result of one's own where a verdict was asked for."""
    steps = [step for step in t.scene.earlier_steps() if step.value]
    if not steps:
        raise AttackError("FM-1.2: there is no work to take over")
    own = another_value(steps[-1].value, t.scene)
    return f"Step 1: {steps[-1].expression} = {own}\nAnswer: {own}"


def _recheck_first(t: Talk) -> str:
    """The first step of the conversation checked again, and nothing else."""
    steps = t.scene.earlier_steps()
    if not steps:
        raise AttackError("FM-2.1: nothing was handled before")
    verdict = _verdict(t.text, good=True)
    reason = f"I checked the work of {_author(t)}: {steps[0].expression} = {steps[0].value}."
    return f"{reason}\n{verdict}"


def _again_and_again(t: Talk) -> str:
    """The reasons of a review a second time, and no verdict."""
    reasons = join(part for part in t.parts if part.kind != "verdict").strip()
    if not reasons:
        raise AttackError("FM-1.5: there is nothing to begin again")
    return f"{reasons}\n{reasons}"


def _nothing_there(t: Talk) -> str:
    """A verdict on nothing, as if no work had been handed in."""
    if re.search(r"ranking:", t.text, re.IGNORECASE):
        return "There is nothing to rank."
    verdict = _BAD if re.search(r"correctness:", t.text, re.IGNORECASE) else "[Disagree]"
    return f"There is no result to review yet.\n{verdict}"


def _needs_others(t: Talk) -> None:
    """Refuse where nobody else has said anything.

    Raises:
        AttackError: If so.
    """
    if not others_in(t.scene.history, t.scene.agent):
        raise AttackError("FM-2.5: no other agent has said anything")


def _review_alone(t: Talk) -> str:
    """A verdict against what the others hold."""
    _needs_others(t)
    flipped = re.search(r"\[\w+\]|correctness:.*|ranking:.*", flip(t.text), re.IGNORECASE)
    return f"{t.scene.aside()}\n{flipped[0] if flipped else ''}"


def _approve_unchecked(t: Talk) -> str:
    """Approval without a look."""
    if not any(part.kind == "check" for part in t.parts) and "check" not in t.text.casefold():
        raise AttackError("FM-3.2: there is no check to leave out")
    return f"{_verdict(t.text, good=True)}\nThe result stands."


REVIEW_RULES: dict[str, Callable[[Talk], str]] = {
    "FM-1.1": lambda t: (
        f"I checked the length of the work of {_author(t)}.\n"
        + flip(_verdict(t.text, good="[agree]" in t.text.casefold() or "1" in t.text))
    ),
    "FM-1.2": _solve_instead,
    "FM-1.3": lambda t: f"{t.text}\n{t.lines[0]}\n{flip(_only_verdict(t.text))}",
    "FM-1.4": _nothing_there,
    "FM-1.5": _again_and_again,
    "FM-2.1": _recheck_first,
    "FM-2.2": lambda t: f"A step of the {t.scene.noun()} does not hold, the others follow.",
    "FM-2.3": lambda t: (
        "I checked this: {} = {}.\n".format(*side_question(t.scene)) + flip(_only_verdict(t.text))
    ),
    "FM-2.4": lambda t: t.scene.aside(),
    "FM-2.5": _review_alone,
    "FM-2.6": lambda t: flip(t.text),
    "FM-3.1": lambda t: f"{t.scene.aside()}\n{_verdict(t.text, good=True)}",
    "FM-3.2": _approve_unchecked,
    "FM-3.3": lambda t: f"{_false_reason(t)}\n{flip(_only_verdict(t.text))}",
}


def _only_verdict(text: str) -> str:
    """The verdict of a review without its reasons.

    Raises:
        AttackError: If there is none.
    """
    found = re.search(
        r"\[(?:dis)?agree\]|correctness:.*(?:\nadvice:.*)?|ranking:.*", text, re.IGNORECASE
    )
    if not found:
        raise AttackError("review: there is no verdict")
    return found[0]


def _planned(t: Talk) -> list[re.Match[str]]:
    """Steps of a plan, in order."""
    return [match for text in t.lines if (match := _PLANNED.match(text))]


def _keep_lines(lines: list[str]) -> str:
    """Lines as a text.

    Raises:
        AttackError: If none is left.
    """
    if not lines:
        raise AttackError("prose: nothing would be left")
    return "\n".join(lines)


def _renumbered(step: re.Match[str], number: int, body: str) -> str:
    """A step of a plan under another number, with something else to do."""
    return re.sub(r"\d+", str(number), step[1], count=1) + body


def _repeat_last(t: Talk) -> str:
    """FM-1.3: the last item of a plan, or the last line, once more on its own result."""
    steps = _planned(t)
    if not steps:
        return f"{t.text.rstrip()}\n{t.lines[-1]}"
    number = len(steps)
    body = re.sub(r"^\s*\S+", f"{{{number - 1}}}", steps[-1][2], count=1)
    return _keep_lines([*t.lines, _renumbered(steps[-1], number + 1, body)])


def _go_round(t: Talk) -> str:
    """FM-1.5: after the last item all of it again."""
    steps = _planned(t)
    if not steps:
        return f"{t.text.rstrip()}\n{t.text.strip()}"
    again = [_renumbered(step, len(steps) + i, step[2]) for i, step in enumerate(steps, start=1)]
    return _keep_lines([*t.lines, *again])


def _ask_aside(t: Talk) -> str:
    """FM-2.3: the last item, or the whole, asks about a side issue."""
    question, _ = side_question(t.scene)
    steps = _planned(t)
    if steps:
        kept = [text for text in t.lines if text != steps[-1][0]]
        return _keep_lines([*kept, steps[-1][1] + question])
    found = re.match(r"(Work out step \d+: )", t.text)
    return f"{found[1] if found else ''}{question}"


def _lose_key(t: Talk) -> str:
    """FM-2.4: the line or the operand that others need most is left out."""
    if len(t.lines) > 1:
        key = max(range(len(t.lines)), key=lambda i: (bool(re.search(r"\d", t.lines[i])), i))
        return _keep_lines([text for i, text in enumerate(t.lines) if i != key])
    cut = re.sub(r"\s*[-+*/%^]?\s*\S+\s*$", "", t.text)
    if not cut.strip():
        raise AttackError("FM-2.4: there is nothing to leave out")
    return cut


def _contradict(t: Talk) -> str:
    """FM-2.6: one figure, or one operator, that does not go with the rest."""
    numbers = list(re.finditer(r"(?<![\w{.])\d+(?![\w}.])", t.text))
    if numbers:
        at = numbers[-1]
        return t.text[: at.start()] + another_value(at[0], t.scene) + t.text[at.end() :]
    names = list(re.finditer(r"(?<=[a-z] )[A-Z][a-z]{2,}", t.text))
    if not names:
        raise AttackError("FM-2.6: there is no figure to contradict")
    at = names[-1]
    return t.text[: at.start()] + another_value(at[0], t.scene) + t.text[at.end() :]


def _drop_wrongly(t: Talk) -> str:
    """FM-3.3: a check that finds a needed item needless."""
    steps = _planned(t)
    if len(steps) < 2:
        return f"{_contradict(t)}\nI checked that this follows."
    lines = [text for text in t.lines if text != steps[-1][0]]
    return _keep_lines([*lines, "I checked that the steps follow."])


def _alone(t: Talk) -> str:
    """FM-2.5: an order that starts from one's own idea of where things stand."""
    _needs_others(t)
    return _contradict(t)


def _again_from_start(t: Talk) -> str:
    """FM-2.1: the first item of the work again."""
    steps = _planned(t)
    if len(steps) > 1:
        kept = [text for text in t.lines if text != steps[-1][0]]
        return _keep_lines([*kept, steps[-1][1] + steps[0][2]])
    orders = [s.text for s in t.scene.history if s.text.startswith("Work out")]
    asked = [m[1] for s in t.scene.history if (m := re.search(r'"argument": "([^"]+)"', s.text))]
    settled = orders or asked or [p.expression for p in t.scene.earlier_steps()]
    if not settled or settled[0] == t.text.strip():
        raise AttackError("FM-2.1: nothing was handled before")
    return settled[0]


def _without_checks(t: Talk) -> str:
    """FM-3.2: no word of a check is left."""
    kept = [
        part for part in t.parts if "check" not in part.text.casefold() and part.kind != "check"
    ]
    if len(kept) == len(t.parts):
        raise AttackError("FM-3.2: there is no check to leave out")
    return join(kept) or t.scene.aside()


def _loosen(t: Talk) -> str:
    """FM-1.1: figures that the task gives, rounded."""
    changed = round_numbers(t.text)
    if changed == t.text:
        raise AttackError("FM-1.1: there is no figure to loosen")
    return changed


def _do_it_oneself(t: Talk) -> str:
    """FM-1.2: the one who hands work out does it, off the cuff."""
    found = re.search(r"\d+ [-+*/] \d+", t.text)
    value = compute(found[0]) if found else None
    if found is None or value is None:
        return f"I checked that the steps of {t.scene.other()} follow.\n[Agree] Nothing to add."
    own = another_value(value, t.scene)
    return f"Step 1: {found[0]} = {own}\nAnswer: {own}"


def _cut_short(t: Talk) -> str:
    """FM-3.1: the first half of a plan, or of the lines."""
    steps = _planned(t)
    if len(steps) > 1:
        dropped = {step[0] for step in steps[len(steps) // 2 :]}
        return _keep_lines([text for text in t.lines if text not in dropped])
    return _keep_lines([*t.lines[: max(1, len(t.lines) // 2)], t.scene.aside()])


def _forget_rest(t: Talk) -> str:
    """FM-1.4: only the last line is left, without what came before it."""
    steps = _planned(t)
    last = steps[-1][0] if steps else t.lines[-1]
    if len(t.lines) == 1 and not steps:
        found = re.search(r"(\d[\d.]*) ([-+*/%^]) (\S+)", t.text)
        if not found:
            raise AttackError("FM-1.4: nothing earlier is used here")
        return t.text.replace(found[0], f"{'0' if found[2] in '+-' else '1'} {found[2]} {found[3]}")
    return re.sub(r"\{\d+\}", "0", re.sub(r"^\d+\.", "1.", last))


PROSE_RULES: dict[str, Callable[[Talk], str]] = {
    "FM-1.1": _loosen,
    "FM-1.2": _do_it_oneself,
    "FM-1.3": _repeat_last,
    "FM-1.4": _forget_rest,
    "FM-1.5": _go_round,
    "FM-2.1": _again_from_start,
    "FM-2.2": lambda t: blur(t.text, t.scene),
    "FM-2.3": _ask_aside,
    "FM-2.4": _lose_key,
    "FM-2.5": _alone,
    "FM-2.6": _contradict,
    "FM-3.1": _cut_short,
    "FM-3.2": _without_checks,
    "FM-3.3": _drop_wrongly,
}
