"""Attributes of spans: typed values of OTLP, and the plain objects of other exports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dcl.trajectory import expect_object

_SCALARS = (
    ("stringValue", "string_value"),
    ("boolValue", "bool_value"),
    ("doubleValue", "double_value"),
    ("bytesValue", "bytes_value"),
)


def read_attributes(value: object, place: str) -> dict[str, Any]:
    """Attributes with dotted names, from the typed list of OTLP or from a plain object.

    Raises:
        TraceError: If it is neither.
    """
    if isinstance(value, list):
        pairs = (expect_object(row, f"{place}.attributes[{i}]") for i, row in enumerate(value))
        return {str(pair.get("key")): plain(pair.get("value")) for pair in pairs}
    found: dict[str, Any] = {}
    # Some exporters nest objects where others write dots: one spelling serves all readers.
    pending = [("", expect_object(value or {}, f"{place}.attributes"))]
    while pending:
        prefix, row = pending.pop()
        for key, entry in row.items():
            if isinstance(entry, Mapping) and entry:
                pending.append((f"{prefix}{key}.", entry))
            else:
                found[f"{prefix}{key}"] = entry
    return found


def first(row: Mapping[str, Any], *keys: str) -> Any:
    """The first value that is there and not empty."""
    return next((row[key] for key in keys if row.get(key) not in (None, "")), None)


def plain(value: object) -> Any:
    """A typed value of OTLP as plain JSON; anything else, and what is too deep, as it is."""
    try:
        return _plain(value)
    except RecursionError:
        return value


def _plain(value: object) -> Any:
    """As `plain`, without a guard against depth."""
    if not isinstance(value, Mapping):
        return value
    for keys in _SCALARS:
        if (found := first(value, *keys)) is not None or any(key in value for key in keys):
            return "" if found is None else found
    number = first(value, "intValue", "int_value")
    if number is not None:
        return int(number) if re.fullmatch(r"-?[0-9]{1,20}", str(number)) else number
    array = first(value, "arrayValue", "array_value")
    if isinstance(array, Mapping):
        values = array.get("values")
        return [_plain(entry) for entry in values] if isinstance(values, list) else []
    pairs = first(value, "kvlistValue", "kvlist_value")
    if isinstance(pairs, Mapping):
        values = pairs.get("values")
        rows = [row for row in values if isinstance(row, dict)] if isinstance(values, list) else []
        return {str(row.get("key")): _plain(row.get("value")) for row in rows}
    return dict(value) or None
