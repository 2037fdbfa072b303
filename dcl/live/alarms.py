"""What is said of a run while it goes on: alarms that are raised and cleared, and a last word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dcl.attribution import Attribution, Finding
from dcl.errors import ConfigError
from dcl.taxonomy import ErrorMode
from dcl.trajectory import (
    Outcome,
    expect_int,
    expect_list,
    expect_object,
    expect_str,
    parse_mode,
)

Key = tuple[str, ErrorMode | None]
"""What an alarm is about: an agent and a mode, or the agent as a whole."""

Reason = Literal["ended", "idle", "evicted", "closed"]
"""Why a run is final: it was said to have ended, was silent too long, or made room for others; or
the one who watches it stopped."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that is said of a run.

    Args:
        run_id: Name of the run.
        number: How many events of the run came before; with `run_id` a key that a repeated event
            shares with the first.
        kind: `raised` and `cleared` are provisional; `final` is the last event of a run.
        turns: Turns that had been judged.
        findings: The fault that the alarm is about; of a final event, all declared faults.
        threshold: Probability from which faults were declared; None means those of the model.
        missing: Turns of the run that are known to have been lost before they were judged.
        reason: Why the run is final; None for the others.
        sources: Where the turn of each finding stands in its log, as `Turn.source` says; empty
            where the log does not.
        outcome: Whether the run succeeded, where it was said at its end.
    """

    run_id: str
    number: int
    kind: Literal["raised", "cleared", "final"]
    turns: int
    findings: tuple[Finding, ...]
    threshold: float | None
    missing: int
    reason: Reason | None = None
    sources: tuple[str, ...] = ()
    outcome: Outcome | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; the layout is described in `docs/monitor.md` and kept stable."""
        row: dict[str, Any] = {
            "event": self.kind,
            "run": self.run_id,
            "number": self.number,
            "turns": self.turns,
            "missing": self.missing,
            "threshold": None if self.threshold is None else round(self.threshold, 6),
            "faults": [
                {**f.fault.to_dict(), "turn": f.turn, "prob": round(f.prob, 6)}
                for f in self.findings
            ],
        }
        for fault, source in zip(row["faults"], self.sources, strict=False):
            if source:
                fault["source"] = source
        if self.reason is not None:
            row["reason"] = self.reason
        if self.outcome is not None:
            row["outcome"] = self.outcome
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmRules:
    """When an alarm is raised and when it is cleared.

    Args:
        confirm: Judgements in a row that must agree before either happens; > 0.
        release: An alarm is cleared below this share of the threshold, 0 to 1.

    Raises:
        ConfigError: If a value is out of range.
    """

    confirm: int = 2
    release: float = 0.8

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.confirm < 1:
            raise ConfigError(f"confirm: expected at least 1, got {self.confirm}")
        if not 0 <= self.release <= 1:
            raise ConfigError(f"release: expected 0 to 1, got {self.release}")


class Alarms:
    """The alarms of one run. A fault on the edge of the threshold neither raises nor clears one.

    Args:
        rules: When they change.
    """

    def __init__(self, rules: AlarmRules) -> None:
        self._rules = rules
        self._rising: dict[Key, int] = {}  # judgements in a row over the threshold
        self._raised: dict[Key, int] = {}  # judgements in a row under the lower threshold

    def update(
        self, attribution: Attribution, threshold: float | None
    ) -> list[tuple[Literal["raised", "cleared"], Finding]]:
        """What changes with a new judgement of the run.

        Args:
            attribution: The run as it stands.
            threshold: As `Attribution.findings` takes it.

        Returns:
            What is raised, the likeliest first, then what is cleared.
        """
        over = {
            (finding.fault.agent, finding.fault.mode): finding
            for finding in attribution.findings(threshold=threshold)
        }
        self._rising = {
            key: self._rising.get(key, 0) + 1 for key in over if key not in self._raised
        }
        raised = [key for key, times in self._rising.items() if times >= self._rules.confirm]
        cleared = list(self._fallen(attribution, threshold))
        for key in raised:
            del self._rising[key]
            self._raised[key] = 0
        return [
            *(("raised", over[key]) for key in raised),
            *(("cleared", finding) for finding in cleared),
        ]

    def _fallen(self, attribution: Attribution, threshold: float | None) -> Iterator[Finding]:
        """Alarms that have been under the lower threshold for long enough; they are dropped."""
        calibration = attribution.calibration
        for (agent, mode), times in list(self._raised.items()):
            if agent not in attribution.agents:  # spans that came late gave it another name
                del self._raised[agent, mode]
                continue
            cut = calibration.agent_threshold if mode is None else calibration.pair_threshold
            cut = cut if threshold is None else threshold
            place = attribution.agents.index(agent)
            finding = attribution.find(place, None if mode is None else mode.index)
            under = times + 1 if finding.prob < cut * self._rules.release else 0
            self._raised[agent, mode] = under
            if under >= self._rules.confirm:
                del self._raised[agent, mode]
                yield finding

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON that `from_dict` reads back."""
        return {"rising": _rows(self._rising), "raised": _rows(self._raised)}

    @classmethod
    def from_dict(cls, row: object, rules: AlarmRules, *, place: str = "alarms") -> Alarms:
        """Read what `to_dict` wrote.

        Raises:
            TraceError: If a field is missing or of the wrong type.
        """
        row = expect_object(row, place)
        alarms = cls(rules)
        alarms._rising = dict(_read(row, "rising", place))
        alarms._raised = dict(_read(row, "raised", place))
        return alarms


def _rows(times: Mapping[Key, int]) -> list[dict[str, Any]]:
    """Counts by key as JSON."""
    return [
        {"agent": agent, "mode": None if mode is None else mode.value, "times": count}
        for (agent, mode), count in times.items()
    ]


def _read(row: Mapping[str, Any], name: str, place: str) -> Iterator[tuple[Key, int]]:
    """Counts by key from JSON."""
    for i, entry in enumerate(expect_list(row, name, place)):
        at = f"{place}.{name}[{i}]"
        entry = expect_object(entry, at)
        code = expect_str(entry, "mode", at, default="")
        mode = parse_mode(code, f"{at}.mode") if code else None
        yield (expect_str(entry, "agent", at), mode), expect_int(entry, "times", at)
