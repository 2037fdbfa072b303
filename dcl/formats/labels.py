"""How names in labels meet names in logs, and where fields without a place of their own go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dcl.trajectory import expect_str


def match_agent(label: str, agents: Sequence[str]) -> str:
    """The agent that a label means, in the spelling of the log.

    Case may differ (`assistant4` for `Assistant4`) where only one agent fits. Parts of names
    never match: `Agent1` is not `Agent12`. A label that fits nobody is given back as it is.
    """
    if label in agents:
        return label
    wanted = label.strip().casefold()
    found = [agent for agent in agents if agent.strip().casefold() == wanted]
    return found[0] if len(found) == 1 else label


def read_id(row: Mapping[str, Any], key: str, default: str) -> str:
    """The id under a key as text, for logs that may number their runs.

    Raises:
        TraceError: If it is neither text nor a whole number.
    """
    value = row.get(key)
    if value is None or value == "":
        return default
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return expect_str(row, key, "")


def leftover(row: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """The fields of an object that the types have no place for, to be kept in `metadata`."""
    taken = set(known)
    return {key: value for key, value in row.items() if key not in taken}


def turn_fields(rows: Iterable[tuple[int, Any]], known: Iterable[str]) -> dict[str, Any]:
    """Metadata that keeps the leftover fields of turns; empty if there are none.

    Args:
        rows: 0-based position of a turn, and the row of the log that it was read from.
        known: Fields that have a place of their own.
    """
    taken = set(known)
    kept: dict[str, Any] = {}
    for position, row in rows:
        fields = {k: v for k, v in leftover(row, taken).items() if v is not None}
        if fields:
            kept[str(position)] = fields
    return {"turn_fields": kept} if kept else {}
