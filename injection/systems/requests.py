"""Requests that several systems share, and how replies to them are read."""

from __future__ import annotations

import re
from typing import Any

from injection.anatomy import find_objects, stated_answer

SOLVE = (
    "Solve the task step by step, one step a line. Check your work. End with a line "
    "`Answer: ...`; if the task asks for a function, give it whole in one fenced block instead."
)
REVISE = (
    "Above are replies of the other agents and your own earlier one. Use them to check your work, "
    "then give your updated solution, one step a line. End with a line `Answer: ...`; if the task "
    "asks for a function, give it whole in one fenced block instead."
)
REVIEW = (
    "Review the latest solution step by step. Write [Agree] if it is right, or [Disagree] with the "
    "step that is wrong and what it should be."
)


def read_object(text: str) -> dict[str, Any]:
    """The last JSON object in a reply; empty if there is none, as weak models often write none."""
    found = find_objects(text)
    return found[-1][2] if found else {}


def read_numbers(text: str, label: str) -> list[int]:
    """Whole numbers of the last bracketed list after a label, or of the last list at all."""
    labelled = re.findall(rf"{label}\W*\[([\d,\s]+)\]", text, re.IGNORECASE)
    lists = labelled or re.findall(r"\[([\d,\s]+)\]", text)
    return [int(number) for number in re.findall(r"\b\d{1,9}\b", lists[-1])] if lists else []


def same_answers(replies: list[str]) -> list[list[int]]:
    """Positions of replies by the answer they give, largest group first; no answer, no group."""
    groups: dict[str, list[int]] = {}
    for position, reply in enumerate(replies):
        answer = re.sub(r"\s+", " ", stated_answer(reply)).casefold().strip(" .$")
        if answer:
            groups.setdefault(answer, []).append(position)
    return sorted(groups.values(), key=lambda group: -len(group))
