"""Raw files of Who&When: failed runs with the agent and step that people blamed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcl.errors import TraceError
from dcl.formats.labels import leftover, match_agent, read_id, turn_fields
from dcl.formats.roles import read_row, split_role
from dcl.formats.source import stem
from dcl.trajectory import (
    Example,
    Fault,
    Trajectory,
    expect_int,
    expect_list,
    expect_object,
    expect_str,
)

_MARKS = ("mistake_agent", "mistake_step", "question_ID", "question")
_KEYS = ("history", "question", "question_ID", "mistake_agent", "mistake_step")


def matches(document: object) -> bool:
    """Whether a document has a history and a key that only these files have."""
    return (
        isinstance(document, dict)
        and "history" in document
        and any(mark in document for mark in _MARKS)
    )


def parse(document: object, place: str) -> list[Example]:
    """Read one file of either half.

    Args:
        document: The JSON object.
        place: Where it stands; its stem is kept as `metadata["file"]`, as question ids recur.

    Raises:
        TraceError: If a field is missing or wrong; the message names its path.
    """
    row = expect_object(document, "")
    rows = expect_list(row, "history", "")
    if not rows:
        raise TraceError("history", "expected at least one turn, got none")
    turns = tuple(
        read_row(expect_object(turn, f"history[{i}]"), f"history[{i}]", step=i)
        for i, turn in enumerate(rows)
    )
    trajectory = Trajectory(
        id=read_id(row, "question_ID", stem(place)),
        task=expect_str(row, "question", "", default=""),
        turns=turns,
        outcome="failure" if _is_failed(row) else None,
        metadata=leftover(row, _KEYS)
        | turn_fields(enumerate(rows), ("content", "role", "name"))
        | {"file": stem(place)},
    )
    return [Example(trajectory=trajectory, faults=_faults(row, trajectory), origin="whowhen")]


def _is_failed(row: Mapping[str, Any]) -> bool:
    """Whether the record says so: as a boolean in one half, as a word in the other."""
    return any(str(row.get(key)).casefold() == "false" for key in ("is_correct", "is_corrected"))


def _faults(row: Mapping[str, Any], trajectory: Trajectory) -> tuple[Fault, ...] | None:
    """The blamed agent in the spelling of the turns; the step is a 0-based index."""
    label = expect_str(row, "mistake_agent", "", default="")
    if not label.strip():
        return None
    step = None if row.get("mistake_step") in (None, "") else expect_int(row, "mistake_step", "")
    return (Fault(agent=match_agent(split_role(label)[0], trajectory.agents), step=step),)
