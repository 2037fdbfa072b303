"""A report as plain JSON, strict enough for every parser."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dcl.report import Report


def record(report: Report) -> dict[str, Any]:
    """The keys of `Attribution.to_dict` and `source`, as `docs/output.md` describes them.

    Args:
        report: The run and what to show of it.

    Returns:
        JSON values only, in a fixed order of keys.
    """
    row = report.attribution.to_dict(
        threshold=report.threshold, top_k=report.top_k, evidence=report.evidence
    )
    return {"id": row.pop("id"), "source": report.source, **row}


def dump(row: Mapping[str, Any]) -> str:
    """One line of strict JSON in ASCII, so lone surrogates survive in any encoding.

    Args:
        row: JSON values.

    Returns:
        The line without its end.

    Raises:
        ValueError: If a number is NaN or infinite, which JSON cannot say.
    """
    return json.dumps(row, ensure_ascii=True, allow_nan=False)
