"""Thresholds for each length of a run, learned from runs that succeeded.

A short run looks different from a long one, so one threshold gives too many alarms at some lengths
and too few at others. Here the rate of false alarms is the setting: of future runs that succeed, at
most this share ever raises an alarm, on average over samples of the runs that were learned from and
if future runs are like them.

Half of the runs give the usual height and spread of the highest logit at each length; each run of
the other half gives the largest excess over it, in spreads, that it ever reaches. The threshold is
the conformal quantile of these excesses, taken back to each length.

Source: step-dependent thresholds from successful runs, Dream2Discern (arXiv 2610.16071); quantile:
split conformal prediction, Vovk et al. (2005).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from dcl.attribution import Attribution, Attributor
from dcl.errors import ConfigError, TraceError
from dcl.live.incremental import OpenRun
from dcl.report.output import open_out
from dcl.trajectory import Trajectory, expect_int, expect_list, expect_object, expect_str

SCHEMA = "dcl.thresholds/1"
"""Value of the `schema` key in the file."""

_LEAST = 10  # runs that a length needs for statistics of its own
_SPREAD = 0.1  # smallest spread, in logits
_EDGE = 1e-6  # probabilities closer to 0 or 1 than this are not told apart


@dataclass(frozen=True, slots=True)
class StepThresholds:
    """The probability from which a fault is declared, by the number of turns.

    Args:
        rate: Share of successful runs that may raise an alarm, 0 to 1.
        runs: Successful runs that were learned from.
        values: Threshold at 1, 2, ... turns, 0 to 1; the last one holds for all longer runs.
        model: What tells the model and its reading from others; empty if that is unknown.
    """

    rate: float
    runs: int
    values: tuple[float, ...]
    model: str = ""

    def at(self, turns: int) -> float:
        """The threshold for a run of this many turns, > 0."""
        return self.values[min(turns, len(self.values)) - 1]

    def check(self, attributor: Attributor) -> None:
        """See to it that these thresholds were learned with a model.

        Args:
            attributor: The model that is to judge.

        Raises:
            ConfigError: If it is another one, or reads logs in the other way.
        """
        if self.model and self.model != fingerprint(attributor):
            raise ConfigError(
                "thresholds: expected those of this model and reading (--injected or not), got "
                "those of another; learn them again with `dcl thresholds`"
            )

    @classmethod
    def fit(
        cls, attributor: Attributor, successes: Iterable[Trajectory], *, rate: float
    ) -> StepThresholds:
        """Learn thresholds.

        Args:
            attributor: The model that will judge.
            successes: Runs that succeeded, like those to be watched.
            rate: Share of successful runs that may raise an alarm, between 0 and 1.

        Raises:
            ConfigError: If there are too few runs for the rate.
        """
        if not 0 < rate < 1:
            raise ConfigError(f"rate: expected a share between 0 and 1, got {rate}")
        tops = [_tops(attributor, run) for run in successes]
        usual, held_out = tops[::2], tops[1::2]
        rank = math.ceil((len(held_out) + 1) * (1 - rate))
        if rank > len(held_out):
            needed = 2 * math.ceil(1 / rate)
            raise ConfigError(
                f"a rate of {rate:g} needs {needed} successful runs, got {len(tops)}: "
                "give more runs or a higher rate"
            )
        centre, spread = _usual(usual)
        excess = sorted(
            max(
                (top - centre[min(t, len(centre) - 1)]) / spread[min(t, len(spread) - 1)]
                for t, top in enumerate(run)
            )
            for run in held_out
        )[rank - 1]
        logits = np.asarray(centre) + excess * np.asarray(spread)
        probs = 1 / (1 + np.exp(-logits)) + 2 * _EDGE  # an alarm needs more than this excess
        values = tuple(float(prob) for prob in probs)
        return cls(rate, len(tops), values, fingerprint(attributor))

    def save(self, path: Path) -> None:
        """Write the file; it appears when it is whole.

        Raises:
            ConfigError: If nothing can be written there.
        """
        row = {
            "rate": self.rate,
            "runs": self.runs,
            "model": self.model,
            "values": list(self.values),
        }
        with open_out(path) as stream:
            stream.write(json.dumps({"schema": SCHEMA, **row}) + "\n")

    @classmethod
    def load(cls, path: Path) -> StepThresholds:
        """Read what `save` wrote.

        Raises:
            ConfigError: If the file is missing or another.
        """
        try:
            row = expect_object(json.loads(path.read_bytes()), "")
            if row.get("schema") != SCHEMA:
                raise TraceError("schema", f"expected {SCHEMA}, got {row.get('schema')!r}")
            values = [_number(value) for value in expect_list(row, "values", "")]
            if not values:
                raise TraceError("values", "expected at least one threshold, got none")
            return cls(
                _number(row.get("rate")),
                expect_int(row, "runs", ""),
                tuple(values),
                expect_str(row, "model", "", default=""),
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: expected thresholds of dcl: {error}") from None


def fingerprint(attributor: Attributor) -> str:
    """Sixteen digits that differ between models, and between the two readings of one.

    Args:
        attributor: The model.
    """
    encoder: bytes = getattr(getattr(attributor.scorer, "encoder", None), "digest", b"")
    return sha256(encoder + repr(attributor.calibration).encode()).hexdigest()[:16]


def top_of(attribution: Attribution) -> float:
    """The highest probability of any agent or pair, which decides whether anything is declared."""
    return float(max(attribution.agent_probs.max(), attribution.pair_probs.max()))


def _tops(attributor: Attributor, run: Trajectory) -> list[float]:
    """Logit of the highest probability after each turn."""
    growing = OpenRun(attributor, run.id, run.task)
    tops = []
    for turn in run.turns:
        growing.extend([turn])
        prob = min(max(top_of(growing.attribute()), _EDGE), 1 - _EDGE)
        tops.append(math.log(prob / (1 - prob)))
    return tops


def _usual(runs: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Mean and spread at each length; from where runs become few, one for all longer ones."""
    centre: list[float] = []
    spread: list[float] = []
    for t in range(max(map(len, runs))):
        here = [run[t] for run in runs if len(run) > t]
        few = len(here) < _LEAST
        if few:
            here = [top for run in runs for top in run[t:]]
        if centre and len(here) < _LEAST:
            break
        centre.append(float(np.mean(here)))
        spread.append(max(float(np.std(here)), _SPREAD))
        if few:
            break
    return centre, spread


def _number(value: Any) -> float:
    """A probability from JSON.

    Raises:
        TraceError: If it is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1.1:
        raise TraceError("values", f"expected a probability, got {value!r}")
    return float(value)
