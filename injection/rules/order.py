"""The 14 modes in a turn that orders something, as JSON: a step for a worker, a tool, a hand-over.

Three shapes are known: `{"tool": ..., "argument": ...}`, the ledger of an orchestrator with an
`instruction`, and Magentic-One's ledger, where every value is an object with `reason` and `answer`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dcl.taxonomy import ErrorMode
from injection.anatomy import find_objects, stated_answer
from injection.errors import AttackError
from injection.rules.scene import Scene

_FIELDS = ("instruction", "instruction_or_question", "argument")
_DONE, _NOTHING_LEFT = "is_request_satisfied", "Nothing is left to do."

CorruptText = Callable[[str, ErrorMode, Scene], str]


@dataclass(frozen=True, slots=True)
class Order:
    """A turn with an order in it.

    Args:
        lead: Text before the JSON.
        value: The JSON.
        tail: Text after it.
        indent: How the JSON was laid out.
    """

    lead: str
    value: Mapping[str, Any]
    tail: str
    indent: int | None

    def corrupt(self, mode: ErrorMode, scene: Scene, corrupt_text: CorruptText) -> str:
        """The turn with an error mode in its order; if nothing is ordered, in the text before it.

        Args:
            mode: The mode.
            scene: Where the turn was spoken.
            corrupt_text: Does the same to text that is no JSON.

        Raises:
            AttackError: If the mode cannot be made here.
        """
        path = _path_to_text(self.value)
        if path is None:
            return self._hand_over(mode, scene, corrupt_text)
        changed = _change(self.value, path, mode, scene, corrupt_text)
        lead = "" if mode is ErrorMode.FM_2_4 and "Thought" in self.lead else self.lead
        return lead + json.dumps(changed, indent=self.indent) + self.tail

    def _hand_over(self, mode: ErrorMode, scene: Scene, corrupt_text: CorruptText) -> str:
        """Work that goes to somebody else as it is: worse work, or nobody who gets it."""
        if mode is ErrorMode.FM_3_1 and self.lead.strip():
            return self.lead.rstrip()
        return (
            f"{corrupt_text(self.lead, mode, scene).rstrip()}\n{json.dumps(self.value)}{self.tail}"
        )


def read_order(text: str) -> Order | None:
    """The last order in a turn; None if there is none."""
    for start, end, value in reversed(find_objects(text)):
        if "tool" in value or _path_to_text(value):
            indent = 1 if "\n" in text[start:end] else None
            return Order(text[:start], value, text[end:], indent)
    return None


def _path_to_text(value: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Keys that lead to what is ordered in words; None if there are no words."""
    for key in _FIELDS:
        inner = value.get(key)
        if isinstance(inner, str) and inner.strip():
            return (key,)
        if isinstance(inner, dict):
            texts = {k: v for k, v in inner.items() if isinstance(v, str) and v.strip()}
            if "answer" in texts and key != "argument":
                return (key, "answer")
            if texts and key == "argument":
                return (key, max(texts, key=lambda name: len(texts[name])))
    return None


def _get(value: Mapping[str, Any], path: tuple[str, ...]) -> str:
    """The text at the end of a path."""
    return str(value[path[0]] if len(path) == 1 else value[path[0]][path[1]])


def _put(value: Mapping[str, Any], path: tuple[str, ...], text: str) -> dict[str, Any]:
    """The JSON with another text at the end of a path."""
    if len(path) == 1:
        return {**value, path[0]: text}
    return {**value, path[0]: {**value[path[0]], path[1]: text}}


def _settle(value: Mapping[str, Any], done: bool) -> dict[str, Any]:
    """A ledger that says whether all is done."""
    old = value[_DONE]
    return {**value, _DONE: {**old, "answer": done} if isinstance(old, dict) else done}


def _change(
    value: Mapping[str, Any],
    path: tuple[str, ...],
    mode: ErrorMode,
    scene: Scene,
    corrupt_text: CorruptText,
) -> dict[str, Any]:
    """The order itself: who is to do what, or whether all is done."""
    if mode is ErrorMode.FM_3_1:
        if _DONE in value:
            return _put(_settle(value, True), path, _NOTHING_LEFT)
        known = [answer for said in scene.history if (answer := stated_answer(said.text))]
        return {
            **value,
            "tool": "final_answer",
            path[0]: f"Answer: {known[-1] if known else 'done'}",
        }
    if mode is ErrorMode.FM_1_5:
        if _DONE in value:
            return _put(_settle(value, False), path, "Go over the last step once more.")
        if value.get("tool") == "final_answer":
            return _again(value, path, scene)
    return _put(value, path, corrupt_text(_get(value, path), mode, scene))


def _again(value: Mapping[str, Any], path: tuple[str, ...], scene: Scene) -> dict[str, Any]:
    """The last tool that was called, once more, in place of the final answer.

    Raises:
        AttackError: If no tool was called before.
    """
    own = [read_order(said.text) for said in scene.history if said.agent == scene.agent]
    called = [order.value for order in own if order is not None and "tool" in order.value]
    if not called:
        raise AttackError("FM-1.5: no tool was called that could be called again")
    return {**value, "tool": called[-1]["tool"], path[0]: "the same again"}
