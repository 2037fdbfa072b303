"""The AEGIS unified schema: injected failures, and other sets brought into the same form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dcl.errors import TraceError
from dcl.formats.labels import leftover, match_agent, read_id, turn_fields
from dcl.formats.roles import kind_of
from dcl.formats.source import stem
from dcl.trajectory import (
    Example,
    Fault,
    Trajectory,
    Turn,
    expect_int,
    expect_list,
    expect_object,
    expect_str,
    parse_mode,
)

_LABEL_LISTS = (
    ("output", "faulty_agents"),
    ("output", "injected_agents"),
    ("ground_truth", "injected_agents"),
)
# `is_injected` gives the answer away where it is set, and is wrong more often than right.
_TURN_KEYS = ("step", "agent_name", "agent_role", "content", "is_injected")


def matches(document: object) -> bool:
    """Whether a document holds a conversation history under `input`."""
    source = document.get("input") if isinstance(document, dict) else None
    return isinstance(source, dict) and "conversation_history" in source


def parse(document: object, place: str) -> list[Example]:
    """Read one record with its labels, where it has any.

    Args:
        document: The JSON object.
        place: Where it stands; gives the id if the record has none.

    Raises:
        TraceError: If a field is missing or wrong; the message names its path.
    """
    row = expect_object(document, "")
    source = expect_object(row.get("input"), "input")
    metadata = dict(expect_object(row.get("metadata") or {}, "metadata"))
    rows = expect_list(source, "conversation_history", "input")
    if not rows:
        raise TraceError("input.conversation_history", "expected at least one turn, got none")
    turns = tuple(
        _read_turn(turn, f"input.conversation_history[{i}]") for i, turn in enumerate(rows)
    )
    labels, labels_at = _labels(row)
    trajectory = Trajectory(
        id=read_id(row, "id", stem(place)),
        task=expect_str(source, "query", "input", default=""),
        turns=turns,
        outcome=_outcome(metadata),
        metadata=metadata
        | {k: v for k, v in leftover(source, ("query", "conversation_history")).items() if v}
        | turn_fields(enumerate(rows), _TURN_KEYS)
        | leftover(row, ("id", "metadata", "input", "output", "clean"))
        | ({"labels": list(labels)} if labels else {}),
    )
    origin = metadata.get("source")
    return [
        Example(
            trajectory=trajectory,
            faults=_faults(labels, labels_at, trajectory, row),
            clean=_clean_twin(row.get("clean"), trajectory),
            origin=origin if isinstance(origin, str) else "aegis",
        )
    ]


def _clean_twin(row: object, faulty: Trajectory) -> Trajectory | None:
    """The same run without the injected faults, where the record has it in the same form."""
    if row is None:
        return None
    try:
        (example,) = parse(row, f"{faulty.id}-clean")
    except TraceError as error:
        raise TraceError(
            f"clean.{error.place}" if error.place else "clean", error.problem
        ) from None
    return example.trajectory


def _read_turn(row: object, place: str) -> Turn:
    """One entry of the history."""
    row = expect_object(row, place)
    agent = expect_str(row, "agent_name", place)
    if not agent.strip():
        raise TraceError(f"{place}.agent_name", "expected a name, got an empty string")
    content = expect_str(row, "content", place)
    return Turn(
        agent=agent,
        content=content,
        role=expect_str(row, "agent_role", place, default=""),
        kind=kind_of(agent, content),
        step=None if row.get("step") is None else expect_int(row, "step", place),
        source=place,
    )


def _labels(row: Mapping[str, Any]) -> tuple[Sequence[Any] | None, str]:
    """The list of labels, by its published names, and its path; None if there is no list."""
    for parent, key in _LABEL_LISTS:
        holder = row.get(parent)
        if isinstance(holder, dict) and holder.get(key) is not None:
            return expect_list(holder, key, parent), f"{parent}.{key}"
    return None, ""


def _faults(
    labels: Sequence[Any] | None, place: str, trajectory: Trajectory, row: Mapping[str, Any]
) -> tuple[Fault, ...] | None:
    """Faults in the spelling of the log; an empty list counts only if the run is called clean."""
    if not labels:
        return () if _is_clean(trajectory, row) else None
    agents = trajectory.agents
    return tuple(_fault(label, f"{place}[{i}]", agents) for i, label in enumerate(labels))


def _fault(label: object, place: str, agents: Sequence[str]) -> Fault:
    """One label."""
    label = expect_object(label, place)
    mode = label.get("error_type")
    return Fault(
        agent=match_agent(expect_str(label, "agent_name", place), agents),
        mode=None if mode is None else parse_mode(mode, f"{place}.error_type"),
        step=None if label.get("step") is None else expect_int(label, "step", place),
    )


def _outcome(metadata: Mapping[str, Any]) -> Literal["success", "failure"] | None:
    """How the run ended, by its outcome or by the label of its final answer."""
    outcome, final = metadata.get("outcome"), metadata.get("final_label")
    if outcome == "success" or (outcome is None and final == 1):
        return "success"
    return "failure" if outcome == "failure" or (outcome is None and final == -1) else None


def _is_clean(trajectory: Trajectory, row: Mapping[str, Any]) -> bool:
    """Whether the record itself says that nothing went wrong."""
    truth = row.get("ground_truth")
    if isinstance(truth, dict) and truth.get("is_normal_sample") is True:
        return True
    steps = trajectory.metadata.get("step_labels")
    if isinstance(steps, dict) and steps:
        return trajectory.outcome != "failure" and -1 not in steps.values()
    return trajectory.outcome == "success"
