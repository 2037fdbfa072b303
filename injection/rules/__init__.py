"""Every error mode made from the real text of a turn, by rules and without a model.

A rule takes what is there: it drops the key sentence, lets a contradicting number run on through
all later steps, repeats a finished step, answers another question, ends early, skips or fakes the
check. What it cannot do in a turn, it refuses with an `AttackError`.
"""

from __future__ import annotations

import re

from dcl.taxonomy import ErrorMode
from injection.anatomy import dissect, stated_answer
from injection.errors import AttackError
from injection.rules import code, talk, work
from injection.rules.order import read_order
from injection.rules.scene import Scene

__all__ = ["Scene", "corrupt", "rephrase"]


_ENDLESS = re.compile(r"\d{101}")


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
    if any(_ENDLESS.search(said) for said in (text, *(said.text for said in scene.history))):
        raise AttackError("a number of over 100 digits is none that rules can change")
    order = read_order(text)
    changed = (
        order.corrupt(mode, scene, _corrupt_text) if order else _corrupt_text(text, mode, scene)
    )
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


def rephrase(text: str, scene: Scene) -> str:
    """A turn in other words and with the same content: the negative that goes with the attacks.

    Steps, values, verdicts, code and JSON stay; what stands around them changes.
    """
    above, below = scene.aside(), scene.aside()
    if scene.rng.random() < 0.5 or text.rstrip().endswith("}"):
        return f"{above}\n{text}"
    return f"{above}\n{text}\n{below}" if above != below else f"{text}\n{below}"
