"""One list of messages, bare or under `messages` -> one example: what chat logs share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dcl.errors import TraceError
from dcl.formats.labels import leftover, read_id, turn_fields
from dcl.formats.source import stem
from dcl.trajectory import Example, Trajectory, Turn, expect_list, expect_object, expect_str

ReadRow = Callable[[Mapping[str, Any], str], Sequence[Turn]]
"""The turns of one message, given it and its path; none where it says nothing."""


def read_conversation(
    document: object,
    place: str,
    read_row: ReadRow,
    *,
    known: Iterable[str],
    asks: Callable[[Turn], bool],
    origin: str,
) -> list[Example]:
    """Read one conversation.

    Args:
        document: The list, or an object that holds it as `messages`.
        place: Where it stands; gives the id if the document has none.
        read_row: Reads one message.
        known: Fields of a message that `read_row` has read; the others are kept in `metadata`,
            by the first turn of the message.
        asks: Whether a turn may state the task; the first one does where the document does not.
        origin: Name of the format.

    Returns:
        The run, without labels.

    Raises:
        TraceError: If there is no message, or one cannot be read; the message names its path.
    """
    row: dict[str, Any] = (
        {"messages": document} if isinstance(document, list) else dict(expect_object(document, ""))
    )
    path = "" if isinstance(document, list) else "messages"
    turns: list[Turn] = []
    first: list[tuple[int, Mapping[str, Any]]] = []  # the first turn of each message that has one
    for i, entry in enumerate(expect_list(row, "messages", "")):
        message = expect_object(entry, f"{path}[{i}]")
        found = read_row(message, f"{path}[{i}]")
        if found:
            first.append((len(turns), message))
        turns += found
    if not turns:
        raise TraceError(path, "expected at least one message with content, got none")
    asked = next((turn.content for turn in turns if asks(turn)), "")
    trajectory = Trajectory(
        id=read_id(row, "id", stem(place)),
        task=expect_str(row, "task", "", default=asked),
        turns=tuple(turns),
        metadata=leftover(row, ("id", "task", "messages")) | turn_fields(first, known),
    )
    return [Example(trajectory=trajectory, origin=origin)]
