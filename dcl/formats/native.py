"""This package's own JSON: what `Example.to_dict` and `Trajectory.to_dict` write."""

from __future__ import annotations

from typing import Any

from dcl.errors import TraceError
from dcl.trajectory import SCHEMA, Example, expect_object


def matches(document: object) -> bool:
    """Whether a document has our schema, or turns at its top."""
    if not isinstance(document, dict):
        return False
    schema = document.get("schema")
    return "turns" in document or (isinstance(schema, str) and schema.startswith("dcl."))


def parse(document: object, place: str) -> list[Example]:
    """Read one example; the schema key may be absent.

    Raises:
        TraceError: If a field is missing or wrong, or the schema is of another version.
    """
    row = expect_object(document, "")
    schema = row.get("schema", SCHEMA)
    if schema != SCHEMA:
        raise TraceError("schema", f"expected {SCHEMA}, got {schema!r}; a newer dcl may read it")
    return [Example.from_dict(row)]


def to_native(example: Example) -> dict[str, Any]:
    """Plain JSON that `parse` reads back equal."""
    return example.to_dict()
