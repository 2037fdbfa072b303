"""Attributions as people and machines read them.

`record` gives plain JSON, `table` gives a rich renderable; both are pure functions of a `Report`.
`output` puts many of them on a stream, or into a file that appears only when it is whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcl.trajectory import Trajectory

if TYPE_CHECKING:
    from dcl.attribution import Attribution


@dataclass(frozen=True, slots=True)
class Report:
    """One attributed run and what to show of it.

    Args:
        source: File the run was read from; `<stdin>` is standard input.
        trajectory: The run.
        attribution: Who failed in it, how, and where.
        threshold: Replaces the calibrated thresholds of agents and pairs, 0 to 1.
        top_k: Shows the `top_k` most probable pairs whatever the thresholds say; > 0.
        evidence: How many turns to show as evidence; >= 0.
    """

    source: str
    trajectory: Trajectory
    attribution: Attribution
    threshold: float | None = None
    top_k: int | None = None
    evidence: int = 3
