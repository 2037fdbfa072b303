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
    line,
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
    note = w.scene.pick(
        "", "A handy form reads better.", "Put in a shorter form:", "In convenient terms:"
    )
    parts = list(w.parts)
    at = last_of(parts, "answer")
    if note and at is not None:
        parts.insert(at, line(note))
    return w.answering(rounded(w.answer, w.scene), parts=parts)


def _leave_role(w: Work) -> str:
    """FM-1.2: the words of another agent in place of one's own work."""
    other = w.scene.rng.choice(w.scene.others) if w.scene.others else "the reviewer"
    return w.scene.pick(
        f"Speaking for {other}: what is there so far is in order, and I close the matter here.",
        f"I take over the part of {other} now and decide that the work is complete as it stands.",
        f"In place of {other} I rule that nothing more has to be handed in.",
    )


def _add_redundant(w: Work) -> str:
    """FM-1.3: the last operation done a second time, on its own result."""
    at = next((i for i in reversed(w.steps) if _SUM.match(w.parts[i].expression)), None)
    if at is None:
        again = another_value(w.answer, w.scene)
        parts = [*w.parts]
        where = last_of(parts, "answer")
        extra = line(f"Going over the same step once more turns {w.answer} into {again}.")
        parts.insert(len(parts) if where is None else where, extra)
        return w.answering(again, parts=parts)
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
    lead = w.scene.pick("And the same once more:", "Applying this again:", "A further pass:")
    head = _ended(w.parts[: checks[-1] + 1])
    rest = w.parts[checks[-1] + 1 :]
    return w.carry([*head, line(lead), twice, *rest], len(head) + 2, base, value)


def _lose_history(w: Work) -> str:
    """FM-1.4: only the last piece is left, as if nothing had come before it."""
    opening = w.scene.pick(
        "I start from what is in front of me.",
        "There is nothing earlier to build on.",
        "Beginning afresh.",
    )
    at = w.steps[-1] if w.steps else None
    found = _SUM.match(w.parts[at].expression) if at is not None else None
    if at is None or found is None:
        return f"{opening}\nAnswer: {another_value(w.answer, w.scene)}"
    expression = f"{'0' if found[2] in '+-' else '1'} {found[2]} {found[3]}"
    value = compute(expression) or found[3]
    step = with_expression(w.parts[at], expression, value)
    return f"{opening}\n{step.text.rstrip()}\nAnswer: {value}"


def _never_end(w: Work) -> str:
    """FM-1.5: no answer, and another round ahead."""
    kept = [part for part in w.parts if part.kind not in ("answer", "check")]
    return join(_ended(kept)) + w.scene.pick(
        "This goes into another round of refinement, and then into the next one.",
        "I will keep improving this with every further pass.",
        "Let us carry on from here round by round.",
    )


def _repeat_handled(w: Work) -> str:
    """FM-2.1: a step that was settled before, done again in place of the new work."""
    settled = [p for p in w.scene.earlier_steps() if p.value] or [w.parts[i] for i in w.steps]
    if not settled:
        earlier = w.scene.others_said() or list(w.scene.history)
        if not earlier:
            raise AttackError("FM-2.1: nothing was handled before")
        return earlier[0].text
    lead = w.scene.pick(
        "Let me do this part again:", "First things first, once more:", "I go back to the start:"
    )
    return f"{lead}\n{settled[0].text.rstrip()}\nAnswer: {settled[0].value}"


def _be_vague(w: Work) -> str:
    """FM-2.2: no figure and no name is left."""
    kept = [
        replace(p, text=blur(p.text, w.scene))
        for p in w.parts
        if p.kind in ("prose", "step", "check")
    ]
    close = w.scene.pick(
        "The result is about that, depending on how one takes it.",
        "It comes to more or less what one would expect.",
        "One of the usual outcomes follows from this.",
    )
    return join(_ended(kept)) + close


def _lose_goal(w: Work) -> str:
    """FM-2.3: the answer to a question that nobody asked."""
    question, value = side_question(w.answer)
    lead = w.scene.pick(
        "The interesting part is", "Worth a closer look is", "What I looked into is"
    )
    kept = [part for part in w.parts if part.kind in ("step", "prose")]
    return f"{join(_ended(kept))}{lead} {question}.\nAnswer: {value}"


def _hide(w: Work) -> str:
    """FM-2.4: the key step and the answer are left out, and nothing is added."""
    key = w.steps[-1] if w.steps else len(w.parts)
    kept = [p for i, p in enumerate(w.parts) if i != key and p.kind not in ("answer", "check")]
    kept = [
        p
        for p in kept
        if not (w.answer and re.search(rf"(?<!\w){re.escape(w.answer)}(?!\w)", p.text))
    ]
    return join(kept).strip() or "I have worked on this."


def _ignore_others(w: Work) -> str:
    """FM-2.5: what the others said is left out, and a view of one's own stands against it."""
    said = w.scene.others_said()
    if not said:
        raise AttackError("FM-2.5: no other agent has given a result")
    mine = [final_answer(s.text) for s in w.scene.history if s.agent == w.scene.agent]
    theirs = {final_answer(s.text) for s in said}
    own = next((answer for answer in mine if answer and answer not in theirs), None)
    value = own or another_value(w.answer, w.scene)
    for _ in range(8):
        value = another_value(value, w.scene) if value in theirs else value
    lead = w.scene.pick(
        "I go by my own reckoning.", "My own view stands.", "I stay with what I had in mind."
    )
    return f"{lead}\nAnswer: {value}"


def _contradict(w: Work) -> str:
    """FM-2.6: an answer that is not what the steps lead to."""
    parts = list(w.parts)
    if not w.steps:
        at = last_of(parts, "answer")
        lead = line(f"All of this points to {w.answer}.")
        parts.insert(len(parts) if at is None else at, lead)
    return w.answering(another_value(w.answer, w.scene), parts=parts)


def _stop_early(w: Work) -> str:
    """FM-3.1: the first steps, and their value as the answer."""
    close = w.scene.pick("That settles it.", "This is far enough.", "With this the matter is done.")
    if not w.steps:
        first = next((p.text for p in w.parts if p.kind == "prose"), "")
        if not first:
            raise AttackError("FM-3.1: there is no step to stop after")
        return f"{first.rstrip()}\n{close}"
    keep = w.steps[: len(w.steps) // 2]
    if keep:
        return (
            f"{join(w.parts[: keep[-1] + 1]).rstrip()}\n{close}\nAnswer: {w.parts[keep[-1]].value}"
        )
    expression = w.parts[w.steps[0]].expression
    start = re.search(r"\d[\d.]*|\"\w+\"|[A-Z]\w+", expression)
    return f"{close}\nAnswer: {start[0].strip(chr(34)) if start else expression}"


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
    if not w.steps:
        value = another_value(w.answer, w.scene)
        lead = w.scene.pick("I checked this again and it is", "A check against the task gives")
        kept = [p for p in w.parts if p.kind != "check"]
        at = last_of(kept, "answer")
        kept.insert(len(kept) if at is None else at, line(f"{lead} {value}."))
        return w.answering(value, parts=kept)
    at = w.steps[-1]
    if not compute(w.parts[at].expression):
        at = next((i for i in reversed(w.steps) if compute(w.parts[i].expression)), at)
    step = w.parts[at]
    right = compute(step.expression) or step.value
    wrong = another_value(right, w.scene)
    verdict = w.scene.pick("so I put it right", "so that step is corrected", "which replaces it")
    check = Part(f"Check: {step.expression} = {wrong}, {verdict}.\n", "prose")
    head = _ended([p for p in w.parts[: at + 1] if p.kind != "check"])
    rest = [p for p in w.parts[at + 1 :] if p.kind != "check"]
    return w.carry([*head, check, *rest], len(head) + 1, right, wrong)


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
