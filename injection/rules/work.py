"""The 14 modes in a worked solution: a turn with steps, checks or an answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from injection.anatomy import Part, carry_on, compute, join, with_expression, with_value
from injection.checkers import final_answer
from injection.errors import AttackError
from injection.rules.scene import (
    Scene,
    another_value,
    blur,
    last_of,
    rounded,
    side_question,
    with_answer,
)

_SUM = re.compile(r"^\s*(\S+) (\S) (\S+)\s*$")


@dataclass(frozen=True, slots=True)
class Work:
    """A worked solution.

    Args:
        parts: Its parts.
        scene: Where it was spoken.
    """

    parts: list[Part]
    scene: Scene

    @property
    def steps(self) -> list[int]:
        """Positions of the steps."""
        return [i for i, part in enumerate(self.parts) if part.kind == "step"]

    @property
    def answer(self) -> str:
        """The answer, or the last value where none is marked."""
        at = last_of(self.parts, "answer")
        marked = final_answer(self.parts[at].text) if at is not None else ""
        return marked or (self.parts[self.steps[-1]].value if self.steps else "")

    def answering(self, value: str, *, parts: list[Part] | None = None) -> str:
        """The text with another answer."""
        parts = list(self.parts if parts is None else parts)
        at = last_of(parts, "answer")
        if at is None:
            return join([*_ended(parts), Part(f"Answer: {value}", "answer")])
        parts[at] = with_answer(parts[at], value)
        return join(parts)

    def carry(self, parts: list[Part], start: int, old: str, new: str) -> str:
        """The text after a value has changed; what cannot be computed becomes something else."""
        out = carry_on(parts, start, old, new)
        steps = [i for i in range(start, len(out)) if out[i].kind == "step"]
        for i in steps:
            if out[i].expression != parts[i].expression and out[i].value == parts[i].value:
                other = another_value(parts[i].value, self.scene)
                return join(
                    carry_on(_put(out, i, with_value(out[i], other)), i + 1, parts[i].value, other)
                )
        return join(out)


def _ended(parts: list[Part]) -> list[Part]:
    """Parts whose last one ends its line."""
    if not parts or parts[-1].text.endswith("\n"):
        return parts
    return [*parts[:-1], replace(parts[-1], text=parts[-1].text + "\n")]


def _put(parts: list[Part], i: int, part: Part) -> list[Part]:
    """Parts with one of them replaced."""
    return [*parts[:i], part, *parts[i + 1 :]]


def _deviate_from_task(w: Work) -> str:
    """FM-1.1: the answer in a form that the task does not ask for."""
    return w.answering(rounded(w.answer, w.scene))


def _leave_role(w: Work) -> str:
    """FM-1.2: a verdict on somebody's work in place of one's own."""
    other = w.scene.other()
    steps = w.scene.earlier_steps()
    if steps and w.scene.rng.random() < 0.5:
        reason = f"I checked the work of {other}: {steps[-1].expression} = {steps[-1].value}."
        return f"{reason}\n[Agree] The result stands."
    return f"I checked that the steps of {other} follow.\n[Agree] Nothing to add."


def _add_redundant(w: Work) -> str:
    """FM-1.3: the last operation done a second time, on its own result."""
    at = next((i for i in reversed(w.steps) if _SUM.match(w.parts[i].expression)), None)
    if at is None:
        return _add_foreign(w)
    part = w.parts[at]
    found = _SUM.match(part.expression)
    assert found is not None
    checks = [i for i in range(at, len(w.parts)) if w.parts[i].expression == part.expression]
    base = w.parts[checks[-1]].value  # a check may have put the step right
    expression = f"{base} {found[2]} {found[3]}"
    value = compute(expression)
    if value is None:
        raise AttackError("FM-1.3: the last step cannot be applied twice")
    twice = with_expression(replace(part, text=part.text.rstrip("\n") + "\n"), expression, value)
    head = _ended(w.parts[: checks[-1] + 1])
    rest = w.parts[checks[-1] + 1 :]
    return w.carry([*head, twice, *rest], len(head) + 1, base, value)


def _add_foreign(w: Work) -> str:
    """FM-1.3 where no step can be done twice: the last operation of the conversation again."""
    earlier = [m for p in w.scene.earlier_steps() if (m := _SUM.match(p.expression))]
    number = len(w.steps) + 1
    if earlier and compute(f"{w.answer} + 0"):
        expression = f"{w.answer} {earlier[-1][2]} {earlier[-1][3]}"
        value = compute(expression) or another_value(w.answer, w.scene)
    elif w.steps:
        last = w.parts[w.steps[-1]]
        expression = re.sub(r"\S+$", w.answer, last.expression)
        value = another_value(w.answer, w.scene)
    else:
        raise AttackError("FM-1.3: there is no step to do twice")
    parts = list(w.parts)
    at = last_of(parts, "answer")
    extra = Part(f"Step {number}: {expression} = {value}\n", "step", expression, value)
    head = _ended(parts[:at])
    return w.answering(value, parts=[*head, extra, *(parts[at:] if at is not None else [])])


def _lose_history(w: Work) -> str:
    """FM-1.4: only the last piece is left, as if nothing had come before it."""
    at = w.steps[-1] if w.steps else None
    found = _SUM.match(w.parts[at].expression) if at is not None else None
    if at is None or found is None:
        guess = another_value(w.answer, w.scene)
        return (
            "None of the agents gives an answer.\nI am not sure, this is my best guess.\n"
            f"Answer: {guess}"
        )
    expression = f"{'0' if found[2] in '+-' else '1'} {found[2]} {found[3]}"
    value = compute(expression) or found[3]
    step = with_expression(w.parts[at], expression, value)
    return f"{step.text.rstrip()}\nAnswer: {value}"


def _never_end(w: Work) -> str:
    """FM-1.5: no answer; what was done begins again."""
    kept = join(_ended([part for part in w.parts if part.kind not in ("answer", "check")]))
    if not kept.strip():
        raise AttackError("FM-1.5: there is nothing to begin again")
    again = join(w.parts[i] for i in w.steps[: max(1, len(w.steps) - 1)]) or kept
    return f"{kept.rstrip()}\n{again.rstrip()}"


def _repeat_handled(w: Work) -> str:
    """FM-2.1: a step that was settled before, done again in place of the new work."""
    settled = [p for p in w.scene.earlier_steps() if p.value] or [w.parts[i] for i in w.steps]
    if not settled:
        earlier = w.scene.others_said() or list(w.scene.history)
        if not earlier:
            raise AttackError("FM-2.1: nothing was handled before")
        return earlier[0].text
    return f"{settled[0].text.rstrip()}\nAnswer: {settled[0].value}"


def _be_vague(w: Work) -> str:
    """FM-2.2: no figure and no name is left."""
    kept = [
        replace(p, text=blur(p.text, w.scene))
        for p in w.parts
        if p.kind in ("prose", "step", "check")
    ]
    return join(_ended(kept)) + f"Answer: the {w.scene.noun()}"


def _lose_goal(w: Work) -> str:
    """FM-2.3: the answer to a question that nobody asked."""
    question, value = side_question(w.scene)
    kept = [part for part in w.parts if part.kind in ("step", "prose")]
    step = f"Step {len(w.steps) + 1}: {question} = {value}"
    return f"{join(_ended(kept))}{step}\nAnswer: {value}"


def _hide(w: Work) -> str:
    """FM-2.4: the key step and the answer are left out, and nothing is added."""
    key = w.steps[-1] if w.steps else len(w.parts)
    kept = [p for i, p in enumerate(w.parts) if i != key and p.kind not in ("answer", "check")]
    kept = [
        p
        for p in kept
        if not (w.answer and re.search(rf"(?<!\w){re.escape(w.answer)}(?!\w)", p.text))
    ]
    return join(kept).strip() or w.scene.aside()


def _ignore_others(w: Work) -> str:
    """FM-2.5: what the others said is left out, and a view of one's own stands against it."""
    said = w.scene.others_said()
    if not said:
        raise AttackError("FM-2.5: no other agent has given a result")
    theirs = {final_answer(s.text) for s in said} | {w.answer}
    apart = [p for p in w.parts if not any(s.agent in p.text for s in said)]
    for _ in range(8):
        own = _reckon(replace(w, parts=apart))
        if final_answer(own) not in theirs:
            return own
    raise AttackError("FM-2.5: there is no view that differs from the others'")


def _reckon(w: Work) -> str:
    """The work from another first figure; where that cannot be, another answer alone."""
    at = next((i for i in w.steps if _SUM.match(w.parts[i].expression)), None)
    found = _SUM.match(w.parts[at].expression) if at is not None else None
    if at is None or found is None or not compute(w.parts[at].expression):
        return w.answering(another_value(w.answer, w.scene))
    expression = f"{found[1]} {found[2]} {another_value(found[3], w.scene)}"
    old, value = w.parts[at].value, compute(expression)
    if value is None:
        return w.answering(another_value(w.answer, w.scene))
    changed = with_expression(w.parts[at], expression, value)
    return w.carry(_put(w.parts, at, changed), at + 1, old, value)


def _contradict(w: Work) -> str:
    """FM-2.6: an answer that is not what the steps, or the replies that are named, lead to."""
    return w.answering(another_value(w.answer, w.scene))


def _stop_early(w: Work) -> str:
    """FM-3.1: the first steps, and their value as the answer."""
    if not w.steps:
        first = next((p.text for p in w.parts if p.kind == "prose"), "")
        if not first:
            raise AttackError("FM-3.1: there is no step to stop after")
        return first.rstrip()
    keep = w.steps[: len(w.steps) // 2]
    if keep:
        return f"{join(w.parts[: keep[-1] + 1]).rstrip()}\nAnswer: {w.parts[keep[-1]].value}"
    expression = w.parts[w.steps[0]].expression
    start = re.search(r"\d[\d.]*|\"\w+\"|[A-Z]\w+", expression)
    return f"Answer: {start[0].strip(chr(34)) if start else expression}"


def _skip_check(w: Work) -> str:
    """FM-3.2: no check is left; a draft that it put right stays as it was."""
    checks = [i for i, part in enumerate(w.parts) if part.kind == "check"]
    if not checks:
        raise AttackError("FM-3.2: there is no check to leave out")
    for i in checks:
        check = w.parts[i]
        draft = next(
            (w.parts[s] for s in w.steps if s < i and w.parts[s].expression == check.expression),
            None,
        )
        if draft is not None and draft.value != check.value:
            kept = [p for p in w.parts[:i] if p.kind != "check"]
            rest = [p for p in w.parts[i + 1 :] if p.kind != "check"]
            return w.carry([*kept, *rest], len(kept), check.value, draft.value)
    return join(part for part in w.parts if part.kind != "check")


def _check_wrongly(w: Work) -> str:
    """FM-3.3: a check that comes to a wrong value, and everything after follows it."""
    kept = [p for p in w.parts if p.kind != "check"]
    if not w.steps:
        value = another_value(w.answer, w.scene)
        steps = w.scene.earlier_steps()
        about = steps[-1].expression if steps else w.scene.noun()
        at = last_of(kept, "answer")
        check = Part(f"Check: {about} = {value}, so this is put right.\n", "prose")
        head = _ended(kept[:at])
        return w.answering(value, parts=[*head, check, *(kept[at:] if at is not None else [])])
    at = w.steps[-1]
    if not compute(w.parts[at].expression):
        at = next((i for i in reversed(w.steps) if compute(w.parts[i].expression)), at)
    step = w.parts[at]
    right = compute(step.expression) or step.value
    wrong = another_value(right, w.scene)
    number = re.search(r"\d+", step.text.partition(":")[0])
    which = number[0] if number else str(w.steps.index(at) + 1)
    text = f"Check: {step.expression} = {wrong}, so step {which} is put right.\n"
    head = _ended([p for p in w.parts[: at + 1] if p.kind != "check"])
    rest = [p for p in w.parts[at + 1 :] if p.kind != "check"]
    return w.carry([*head, Part(text, "prose"), *rest], len(head) + 1, right, wrong)


RULES: dict[str, Callable[[Work], str]] = {
    "FM-1.1": _deviate_from_task,
    "FM-1.2": _leave_role,
    "FM-1.3": _add_redundant,
    "FM-1.4": _lose_history,
    "FM-1.5": _never_end,
    "FM-2.1": _repeat_handled,
    "FM-2.2": _be_vague,
    "FM-2.3": _lose_goal,
    "FM-2.4": _hide,
    "FM-2.5": _ignore_others,
    "FM-2.6": _contradict,
    "FM-3.1": _stop_early,
    "FM-3.2": _skip_check,
    "FM-3.3": _check_wrongly,
}
