"""The types that pass between all parts: turns, trajectories, faults, labelled examples.

All are frozen. `from_dict` checks what comes from outside and names the path of what is wrong;
`to_dict` gives plain JSON that reads back equal.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from dcl.errors import TraceError
from dcl.taxonomy import ErrorMode

_WHOLE = re.compile(r"-?[0-9]{1,18}")


def _finite(text: str) -> float | None:
    """The number, or None where it is too large for one."""
    number = float(text)
    return number if math.isfinite(number) else None


DECODER = json.JSONDecoder(strict=False, parse_constant=lambda _: None, parse_float=_finite)
"""Reads JSON as logs hold it: raw control characters in strings, and numbers that are none.

`NaN`, `Infinity` and numbers such as `1e999` cannot be written as JSON again, and read as null.
"""

SCHEMA = "dcl.trajectory/1"
"""Value of the `schema` key in this package's own JSON."""

Outcome = Literal["success", "failure"]

_OUTSIDE_ROLES = {"user", "human", "system"}
_TURN_KEYS = {"agent", "content", "role", "kind", "step", "source"}


class TurnKind(str, Enum):
    """What a turn is."""

    MESSAGE = "message"
    THOUGHT = "thought"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    HANDOFF = "handoff"
    SYSTEM = "system"
    FINAL = "final"


@dataclass(frozen=True, slots=True)
class Turn:
    """One entry of a log: who said or did what.

    Args:
        agent: Name of the speaker, not empty.
        content: Text of the turn; may be empty, as an empty reply is a symptom too.
        role: What the log calls the speaker's role, such as `assistant`; empty if it does not.
        kind: What the turn is.
        step: Number of the turn as the source log counts; None means its 0-based position.
        source: Where the turn stands in the log (a span id, a JSON path), for people.
    """

    agent: str
    content: str
    role: str = ""
    kind: TurnKind = TurnKind.MESSAGE
    step: int | None = None
    source: str = ""

    @property
    def is_outside(self) -> bool:
        """Whether it is a system prompt, or said by a person without a name of their own."""
        role = self.role.lower()
        unnamed = role in _OUTSIDE_ROLES and self.agent.lower() == role
        return unnamed or self.kind is TurnKind.SYSTEM

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; fields that hold their default are left out."""
        row: dict[str, Any] = {"agent": self.agent, "content": self.content}
        if self.role:
            row["role"] = self.role
        if self.kind is not TurnKind.MESSAGE:
            row["kind"] = self.kind.value
        if self.step is not None:
            row["step"] = self.step
        if self.source:
            row["source"] = self.source
        return row

    @classmethod
    def from_dict(cls, row: object, *, place: str = "turn") -> Turn:
        """Check and read one turn.

        Raises:
            TraceError: If a field is missing or of the wrong type; the message names its path.
        """
        row = expect_object(row, place)
        kind = expect_str(row, "kind", place, default="message")
        try:
            turn_kind = TurnKind(kind)
        except ValueError:
            kinds = ", ".join(k.value for k in TurnKind)
            raise TraceError(f"{place}.kind", f"expected one of {kinds}, got {kind!r}") from None
        agent = expect_str(row, "agent", place)
        if not agent.strip():
            raise TraceError(f"{place}.agent", "expected a name, got an empty string")
        step = row.get("step")
        if step is not None:
            step = expect_int(row, "step", place)
        return cls(
            agent=agent,
            content=expect_str(row, "content", place),
            role=expect_str(row, "role", place, default=""),
            kind=turn_kind,
            step=step,
            source=expect_str(row, "source", place, default=""),
        )


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One run of a multi-agent system, in time order.

    Args:
        id: Name of the run, as the log has it.
        task: What the system was asked to do; may be empty.
        turns: At least one turn.
        outcome: Whether the run succeeded, where the log says so.
        metadata: Everything else the log held, JSON values only.
    """

    id: str
    task: str
    turns: tuple[Turn, ...]
    outcome: Outcome | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a run without turns."""
        if not self.turns:
            raise TraceError(self.id, "expected at least one turn, got none")

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents in order of first appearance, `A` of them."""
        return tuple(dict.fromkeys(turn.agent for turn in self.turns))

    @property
    def steps(self) -> tuple[int, ...]:
        """Step number of every turn as the source log counts, `T` of them."""
        return tuple(i if turn.step is None else turn.step for i, turn in enumerate(self.turns))

    @property
    def bystanders(self) -> frozenset[str]:
        """Agents that are not part of the system: the person who asks, and the prompt.

        These are speakers whose turns are all system prompts, or whom the log knows by the role
        `user`, `human` or `system` and by no name of their own. Empty if nobody else speaks.
        """
        acting = {turn.agent for turn in self.turns if not turn.is_outside}
        return frozenset(self.agents) - acting if acting else frozenset()

    def turn_at(self, step: int, agent: str | None = None) -> int | None:
        """0-based position of the turn with this step number; None if there is none.

        Where a log uses a number twice, the turn of `agent` wins.

        Args:
            step: Number as the source log counts.
            agent: Name of the speaker; None takes the first turn.
        """
        found = [i for i, number in enumerate(self.steps) if number == step]
        spoken = [i for i in found if self.turns[i].agent == agent]
        return next(iter(spoken or found), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON in this package's own format."""
        row: dict[str, Any] = {
            "schema": SCHEMA,
            "id": self.id,
            "task": self.task,
            "turns": [turn.to_dict() for turn in self.turns],
        }
        if self.outcome is not None:
            row["outcome"] = self.outcome
        if self.metadata:
            row["metadata"] = dict(self.metadata)
        return row

    @classmethod
    def from_dict(cls, row: object, *, place: str = "") -> Trajectory:
        """Check and read one run; unknown keys are kept in `metadata`.

        Raises:
            TraceError: If a field is missing or of the wrong type; the message names its path.
        """
        row = expect_object(row, place)
        dot = f"{place}." if place else ""
        turns = row.get("turns")
        if not isinstance(turns, list):
            raise TraceError(f"{dot}turns", f"expected a list of turns, got {name_type(turns)}")
        if not turns:
            raise TraceError(f"{dot}turns", "expected at least one turn, got an empty list")
        metadata = dict(expect_object(row.get("metadata") or {}, f"{dot}metadata"))
        known = {
            "schema",
            "id",
            "task",
            "turns",
            "outcome",
            "metadata",
            "faults",
            "clean",
            "origin",
        }
        metadata |= {key: value for key, value in row.items() if key not in known}
        extra = {
            str(i): {key: value for key, value in turn.items() if key not in _TURN_KEYS}
            for i, turn in enumerate(turns)
            if isinstance(turn, Mapping) and not turn.keys() <= _TURN_KEYS
        }
        if extra:
            metadata["turn_fields"] = extra
        return cls(
            id=expect_str(row, "id", place),
            task=expect_str(row, "task", place, default=""),
            turns=tuple(
                Turn.from_dict(turn, place=f"{dot}turns[{i}]") for i, turn in enumerate(turns)
            ),
            outcome=parse_outcome(row.get("outcome"), f"{dot}outcome"),
            metadata=metadata,
        )

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Trajectory:
        """Read what `to_json` wrote.

        Raises:
            TraceError: If the text is not JSON or not a trajectory.
        """
        try:
            row = DECODER.decode(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(
                "", f"expected a JSON object, got text that is not JSON: {error}"
            ) from None
        return cls.from_dict(row)


@dataclass(frozen=True, slots=True)
class Fault:
    """Who failed, how, and where: the unit of truth and of prediction.

    Args:
        agent: Name of the agent, spelled as in the turns.
        mode: How it failed; None where the source does not say.
        step: Step number of the turn that shows it, as the source log counts; None if unknown.
    """

    agent: str
    mode: ErrorMode | None = None
    step: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON with the keys `agent`, `mode`, `step`."""
        mode = None if self.mode is None else self.mode.value
        return {"agent": self.agent, "mode": mode, "step": self.step}

    @classmethod
    def from_dict(cls, row: object, *, place: str = "fault") -> Fault:
        """Check and read one fault.

        Raises:
            TraceError: If a field is missing or wrong; the message names its path.
        """
        row = expect_object(row, place)
        mode = row.get("mode")
        return cls(
            agent=expect_str(row, "agent", place),
            mode=None if mode is None else parse_mode(mode, f"{place}.mode"),
            step=None if row.get("step") is None else expect_int(row, "step", place),
        )


@dataclass(frozen=True, slots=True)
class Example:
    """A trajectory with what is known about it.

    Args:
        trajectory: The run.
        faults: What went wrong, from people or from an injection; None means nobody said, an
            empty tuple means that the run is known to be free of faults.
        clean: The same run without the injected faults, where it was kept.
        origin: Name of the data set or format the labels come from.
    """

    trajectory: Trajectory
    faults: tuple[Fault, ...] | None = None
    clean: Trajectory | None = None
    origin: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether the run is known to have failed, by its labels or by its outcome."""
        return bool(self.faults) or self.trajectory.outcome == "failure"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: the trajectory's keys and `faults`, `clean`, `origin`."""
        row = self.trajectory.to_dict()
        if self.faults is not None:
            row["faults"] = [fault.to_dict() for fault in self.faults]
        if self.clean is not None:
            row["clean"] = self.clean.to_dict()
        if self.origin:
            row["origin"] = self.origin
        return row

    @classmethod
    def from_dict(cls, row: object, *, place: str = "") -> Example:
        """Check and read one example.

        Raises:
            TraceError: If a field is missing or wrong; the message names its path.
        """
        row = expect_object(row, place)
        dot = f"{place}." if place else ""
        faults = row.get("faults")
        if faults is not None and not isinstance(faults, list):
            raise TraceError(f"{dot}faults", f"expected a list, got {name_type(faults)}")
        clean = row.get("clean")
        return cls(
            trajectory=Trajectory.from_dict(row, place=place),
            faults=None
            if faults is None
            else tuple(
                Fault.from_dict(fault, place=f"{dot}faults[{i}]") for i, fault in enumerate(faults)
            ),
            clean=None if clean is None else Trajectory.from_dict(clean, place=f"{dot}clean"),
            origin=expect_str(row, "origin", place, default=""),
        )


def name_type(value: object) -> str:
    """What a JSON value is, in the words of JSON, for error messages."""
    if value is None:
        return "nothing"
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return names.get(type(value), "a number")


def expect_object(value: object, place: str) -> Mapping[str, Any]:
    """The value as a JSON object.

    Args:
        value: Anything.
        place: Path of it, for the error.

    Raises:
        TraceError: If it is anything else.
    """
    if not isinstance(value, Mapping):
        raise TraceError(place, f"expected an object, got {name_type(value)}")
    return value


def expect_list(row: Mapping[str, Any], key: str, place: str) -> Sequence[Any]:
    """The list under a key.

    Args:
        row: The object.
        key: The key.
        place: Path of the object, for the error.

    Raises:
        TraceError: If it is missing or no list.
    """
    value = row.get(key)
    if not isinstance(value, list):
        raise TraceError(_join(place, key), f"expected a list, got {name_type(value)}")
    return value


def expect_str(row: Mapping[str, Any], key: str, place: str, *, default: str | None = None) -> str:
    """The string under a key; `default` where the key is absent or null.

    Args:
        row: The object.
        key: The key.
        place: Path of the object, for the error.
        default: What an absent key means; None means that it is an error.

    Raises:
        TraceError: If it is missing without a default, or no string.
    """
    value = row.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise TraceError(_join(place, key), f"expected a string, got {name_type(value)}")
    return value


def expect_int(row: Mapping[str, Any], key: str, place: str) -> int:
    """The whole number under a key; a string of digits counts, as published files have them.

    Args:
        row: The object.
        key: The key.
        place: Path of the object, for the error.

    Raises:
        TraceError: If it is missing or no whole number.
    """
    value = row.get(key)
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        shown = repr(value) if isinstance(value, (str, float)) else name_type(value)
        raise TraceError(_join(place, key), f"expected a whole number, got {shown}")
    return value


def parse_mode(value: object, place: str) -> ErrorMode:
    """The error mode that a code names, in any published spelling.

    Args:
        value: The code.
        place: Path of it, for the error.

    Raises:
        TraceError: If it is none of the 14.
    """
    try:
        return ErrorMode.parse(str(value))
    except ValueError as error:
        raise TraceError(place, str(error)) from None


def parse_outcome(value: object, place: str) -> Outcome | None:
    """Whether a run succeeded; None where nobody says.

    Args:
        value: `success`, `failure`, or nothing.
        place: Path of it, for the error.

    Raises:
        TraceError: If it is anything else.
    """
    if value is None:
        return None
    if value == "success":
        return "success"
    if value == "failure":
        return "failure"
    raise TraceError(place, f"expected success or failure, got {value!r}")


def _join(place: str, key: str) -> str:
    """Path of a key inside a place."""
    return f"{place}.{key}" if place else key
