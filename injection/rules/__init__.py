"""Every error mode made from the real text of a turn, by rules and without a model.

A rule takes what is there: it drops the key sentence, lets a contradicting number run on through
all later steps, repeats a finished step, answers another question, ends early, skips or fakes the
check. What it cannot do in a turn, it refuses with an `AttackError`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from dcl.taxonomy import ErrorMode
from injection.anatomy import dissect, stated_answer
from injection.errors import AttackError
from injection.rules import code, talk, work
from injection.rules.scene import Scene

__all__ = ["Scene", "corrupt", "rephrase"]

_FIELDS = ("instruction", "argument")


def corrupt(text: str, mode: ErrorMode, scene: Scene) -> str:
    """A turn rewritten so that it carries an error mode.

    Args:
        text: What the agent said.
        mode: The mode.
        scene: Where it was said.

    Returns:
        Another text.

    Raises:
        AttackError: If the mode cannot be made from this turn.
    """
    call = _find_call(text)
    changed = _corrupt_call(text, call, mode, scene) if call else _corrupt_text(text, mode, scene)
    if " ".join(changed.split()) == " ".join(text.split()):
        raise AttackError(f"{mode.value}: the turn already is as the rule would make it")
    return changed


def _corrupt_text(text: str, mode: ErrorMode, scene: Scene) -> str:
    """A turn that is no JSON."""
    if not text.strip():
        raise AttackError("the turn is empty")
    parts = dissect(text)
    if code.has_code(parts):
        return code.RULES[mode.value](code.Code(parts, scene))
    kinds = {part.kind for part in parts}
    if "verdict" in kinds and not stated_answer(text):
        return talk.REVIEW_RULES[mode.value](talk.Talk(parts, scene))
    if "answer" in kinds or "step" in kinds:
        return work.RULES[mode.value](work.Work(parts, scene))
    return talk.PROSE_RULES[mode.value](talk.Talk(parts, scene))


def _find_call(text: str) -> tuple[int, int, dict[str, Any]] | None:
    """Span and content of a JSON object that orders something; None if there is none."""
    start = text.find("{")
    if start < 0:
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None
    known = isinstance(value, dict) and any(isinstance(value.get(key), str) for key in _FIELDS)
    return (start, end, value) if known else None


def _corrupt_call(
    text: str, call: tuple[int, int, dict[str, Any]], mode: ErrorMode, scene: Scene
) -> str:
    """A turn that orders a step or a tool."""
    start, end, value = call
    changed = _change_order(dict(value), mode, scene)
    indent = 1 if "\n" in text[start:end] else None
    lead = "" if mode.value == "FM-2.4" and "Thought" in text[:start] else text[:start]
    return lead + json.dumps(changed, indent=indent) + text[end:]


def _change_order(order: dict[str, Any], mode: ErrorMode, scene: Scene) -> dict[str, Any]:
    """The order itself: who is to do what, or whether all is done."""
    key = next(key for key in _FIELDS if isinstance(order.get(key), str))
    known = [answer for said in scene.history if (answer := stated_answer(said.text))]
    if mode.value == "FM-3.1":
        if "is_request_satisfied" in order:
            return order | {"is_request_satisfied": True, key: "Nothing is left to do."}
        return order | {"tool": "final_answer", key: f"Answer: {known[-1] if known else 'done'}"}
    if mode.value == "FM-1.5":
        if "is_request_satisfied" in order:
            again = "Go over the last step once more."
            return order | {"is_request_satisfied": False, key: again}
        if order.get("tool") == "final_answer":
            return order | {"tool": "searcher", key: "the same again"}
    return order | {key: _corrupt_text(order[key], mode, scene)}


def rephrase(text: str, scene: Scene) -> str:
    """A turn in other words and with the same content: the negative that goes with the attacks.

    Steps, values, verdicts, code and JSON stay; what stands around them changes.
    """
    opening = scene.pick(
        "Let me set this out.", "This is how I see it.", "Here is my part.", "I go by the task."
    )
    closing = scene.pick(
        "", "That is all from me.", "Nothing else comes to mind.", "So much for now."
    )
    text = re.sub(r"^Check: ", scene.pick("To check: ", "Checked: ", "Check: "), text, flags=re.M)
    text = re.sub(r"^(Step \d+): ", scene.pick(r"\1: ", r"\1:  "), text, flags=re.M)
    return f"{opening}\n{text}" + (f"\n{closing}" if closing else "")
