"""Who speaks in a plain message row, and what kind of turn it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dcl.errors import TraceError
from dcl.trajectory import Turn, TurnKind, expect_str

_SUFFIX_KINDS = {"thought": TurnKind.THOUGHT, "termination condition": TurnKind.FINAL}
_CALL = re.compile(r"[A-Za-z_][\w.-]*\(\{.*\}\)\s*", re.DOTALL)
_TERMINALS = {"tool", "computerterminal", "environment"}


def split_role(role: str) -> tuple[str, TurnKind | None]:
    """Agent and kind in a Magentic-One role such as `Orchestrator (-> WebSurfer)`.

    A bracket that is no known suffix belongs to the name; the kind is None then.
    """
    agent, bracket, suffix = role.strip().removesuffix(")").rpartition("(")
    agent, suffix = agent.strip(), suffix.strip()
    if not bracket or not agent or not role.strip().endswith(")"):
        return role, None
    if suffix.startswith("->"):
        return agent, TurnKind.HANDOFF
    kind = _SUFFIX_KINDS.get(suffix.casefold())
    return (role, None) if kind is None else (agent, kind)


def kind_of(agent: str, content: str) -> TurnKind:
    """Kind of a turn that its log does not type, by the speaker's name and the first words."""
    name = "".join(c for c in agent.casefold() if c.isalnum())
    if name in _TERMINALS or content.startswith("exitcode:"):
        return TurnKind.TOOL_RESULT
    if name == "system":
        return TurnKind.SYSTEM
    is_call = content.startswith("[tool call]") or _CALL.fullmatch(content)
    return TurnKind.TOOL_CALL if is_call else TurnKind.MESSAGE


def read_row(row: Mapping[str, Any], place: str, step: int | None = None) -> Turn:
    """A turn from a row of `content`, `role` and perhaps `name`, which wins over the role.

    Raises:
        TraceError: If the speaker or the content is missing or no string.
    """
    role = expect_str(row, "role", place, default="") if row.get("name") else ""
    speaker = expect_str(row, "name" if row.get("name") else "role", place)
    if not speaker.strip():
        raise TraceError(f"{place}.role", "expected the name of the speaker, got an empty string")
    content = expect_str(row, "content", place)
    agent, kind = split_role(speaker)
    return Turn(
        agent=agent,
        content=content,
        role=role or speaker,
        kind=kind or kind_of(agent, content),
        step=step,
        source=place,
    )
