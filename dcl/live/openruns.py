"""All runs that are going on: judged turn by turn, kept within bounds, saved and restored."""

from __future__ import annotations

import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dcl.attribution import Attribution, Attributor, Finding
from dcl.errors import ConfigError, TraceError
from dcl.formats import otlp
from dcl.live.alarms import AlarmRules, Alarms, Event, Reason
from dcl.live.incremental import OpenRun
from dcl.live.thresholds import StepThresholds
from dcl.trajectory import (
    Outcome,
    Turn,
    expect_int,
    expect_list,
    expect_object,
    expect_str,
    parse_outcome,
)

_FAILURES = 3  # judgements of a run that may fail in a row before it is left alone


@dataclass(frozen=True, slots=True)
class Arrival:
    """A turn that has come in, or spans of a trace, or the end of a run.

    Args:
        run_id: Name of the run, not empty.
        turn: The turn; None means that the run has ended, unless there are spans.
        task: What the system was asked to do; empty where it is not said again.
        missing: Turns of this run that were lost since its last arrival.
        at: 0-based position of the turn in its run, where the sender counts: a turn that is there
            already is left out, and turns that were skipped are missing.
        spans: An OpenTelemetry document with spans of this run only; its turns are made anew from
            all spans of the run, as they may come in any order.
        outcome: Of an end, whether the run succeeded; None where nobody says.
    """

    run_id: str
    turn: Turn | None
    task: str = ""
    missing: int = 0
    at: int | None = None
    spans: Mapping[str, Any] | None = None
    outcome: Outcome | None = None

    @property
    def size(self) -> int:
        """Characters that it holds, roughly."""
        if self.spans is not None:
            return len(json.dumps(self.spans))
        return 0 if self.turn is None else len(self.turn.content) + len(self.task)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, described in `docs/monitor.md`; fields with their default are left out."""
        row: dict[str, Any] = {"run": self.run_id}
        if self.task:
            row["task"] = self.task
        if self.missing:
            row["missing"] = self.missing
        if self.at is not None:
            row["at"] = self.at
        if self.spans is not None:
            return row | {"spans": self.spans}
        if self.turn is not None:
            return row | self.turn.to_dict()
        return row | {"end": True} | ({"outcome": self.outcome} if self.outcome else {})

    @classmethod
    def from_dict(cls, row: object, *, place: str = "") -> Arrival:
        """Check and read one arrival.

        Raises:
            TraceError: If a field is missing or of the wrong type; the message names its path.
        """
        row = expect_object(row, place)
        run_id = expect_str(row, "run", place)
        if not run_id:
            raise TraceError(f"{place}.run" if place else "run", "expected a name, got none")
        task = expect_str(row, "task", place, default="")
        missing = expect_int(row, "missing", place) if "missing" in row else 0
        at = expect_int(row, "at", place) if "at" in row else None
        spans = expect_object(row["spans"], f"{place}spans") if "spans" in row else None
        ended = row.get("end") is True or spans is not None
        turn = None if ended else Turn.from_dict(row, place=place)
        outcome = None
        if row.get("end") is True:
            outcome = parse_outcome(row.get("outcome"), f"{place}.outcome" if place else "outcome")
        return cls(run_id, turn, task, missing, at, spans, outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much is kept of the runs that are going on.

    Args:
        runs: Open runs; the one that was silent longest makes room.
        turns: Turns of one run; further ones are lost and counted.
        run_bytes: Memory of one run; further turns are lost and counted.
        total_bytes: Memory of all runs; the ones that were silent longest make room.
        idle_s: A run that is silent for so many seconds is final.

    Raises:
        ConfigError: If a bound is not positive, or a run may be larger than all of them.
    """

    runs: int = 10_000
    turns: int = 2_000
    run_bytes: int = 64 << 20
    total_bytes: int = 1 << 30
    idle_s: float = 3600.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: expected more than 0, got {getattr(self, name)}")
        if self.run_bytes > self.total_bytes:
            raise ConfigError("run_bytes: expected at most total_bytes")


@dataclass(slots=True)
class _Entry:
    """One open run; `run` is made from `turns` when it is needed next, if it is not there."""

    run_id: str
    task: str
    alarms: Alarms
    seen: float
    turns: list[Turn] = field(default_factory=list)
    spans: list[Mapping[str, Any]] = field(default_factory=list)
    span_bytes: int = 0
    run: OpenRun | None = None
    is_stale: bool = False  # `run` was read by another model
    latest: Attribution | None = None
    missing: int = 0
    events: int = 0
    failures: int = 0
    nbytes: int = 0

    def source(self, turn: int) -> str:
        """Where a turn stands in its log; spans that came since may have left fewer turns."""
        return self.turns[turn].source if turn < len(self.turns) else ""


class OpenRuns:
    """Judges every turn of every open run. Not safe to share between threads.

    `counts` says what happened: `turns` judged; `lost_run_full`, `lost_before` turns that were
    not; `repeated` turns that were there; `unreadable` spans; `opened`, `ended`, `idle`,
    `evicted`, `closed` runs; `raised`, `cleared`, `final` events; `errors` of the model.

    Args:
        attributor: The model.
        bounds: How much is kept.
        rules: When alarms are raised and cleared.
        thresholds: From which probability on a fault is declared; None takes those of the model.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        attributor: Attributor,
        *,
        bounds: Bounds | None = None,
        rules: AlarmRules | None = None,
        thresholds: StepThresholds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.nbytes = 0
        self.last_error = ""
        self._attributor = attributor
        self._bounds = bounds or Bounds()
        self._rules = rules or AlarmRules()
        self._thresholds = thresholds
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the longest silent first

    def __len__(self) -> int:
        """Number of open runs."""
        return len(self._entries)

    def __contains__(self, run_id: object) -> bool:
        """Whether a run is open."""
        return run_id in self._entries

    def take(self, arrival: Arrival) -> list[Event]:
        """Judge the run with one more turn, or end it.

        An error of the model is counted and kept from the caller; the turn stays in its run.

        Args:
            arrival: The turn.

        Returns:
            What is to be said now, also of runs that made room.
        """
        if arrival.turn is None and arrival.spans is None:
            self._miss(self._entries.get(arrival.run_id), arrival.missing)
            return self.end(arrival.run_id, outcome=arrival.outcome)
        entry = self._entry(arrival)
        self._miss(entry, arrival.missing)
        if self._is_known(entry, arrival.at):
            return []
        full = (
            len(entry.turns) >= self._bounds.turns
            or entry.nbytes + arrival.size > self._bounds.run_bytes
        )
        if full:
            entry.missing += 1
            self.counts["lost_run_full"] += 1
            return self._make_room()
        if arrival.turn is not None:
            entry.turns.append(arrival.turn)
        elif not self._add_spans(entry, arrival):
            return self._make_room()
        return [*self._judge(entry), *self._make_room()]

    def end(
        self, run_id: str, reason: Reason = "ended", *, outcome: Outcome | None = None
    ) -> list[Event]:
        """Close a run and say the last word on it; nothing if it is not open.

        Args:
            run_id: Name of the run.
            reason: Why.
            outcome: Whether the run succeeded; None where nobody says.
        """
        entry = self._entries.pop(run_id, None)
        if entry is None:
            return []
        self.nbytes -= entry.nbytes
        self.counts[reason] += 1
        attribution = self._latest(entry)
        threshold = self._threshold(entry)
        findings = () if attribution is None else attribution.findings(threshold=threshold)
        return [self._event(entry, "final", findings, threshold, reason, outcome)]

    def end_all(self, reason: Reason) -> Iterator[Event]:
        """Close all runs, the longest silent first."""
        for run_id in list(self._entries):
            yield from self.end(run_id, reason)

    def expire(self) -> list[Event]:
        """Close the runs that have been silent too long."""
        events = []
        until = self._clock() - self._bounds.idle_s
        while self._entries and next(iter(self._entries.values())).seen <= until:
            events += self.end(next(iter(self._entries)), "idle")
        return events

    def attribution(self, run_id: str) -> Attribution | None:
        """The latest judgement of an open run; None if there is none."""
        entry = self._entries.get(run_id)
        return None if entry is None else self._latest(entry)

    def missing(self, run_id: str) -> int:
        """Turns of an open run that are known to be lost."""
        entry = self._entries.get(run_id)
        return 0 if entry is None else entry.missing

    def use(self, attributor: Attributor) -> None:
        """Judge with another model from now on.

        No turn is lost: a run is read again with the new model when its next turn comes in.

        Args:
            attributor: The model.
        """
        self._attributor = attributor
        for entry in self._entries.values():
            entry.is_stale = True
            entry.failures = 0

    def save(self) -> Iterator[dict[str, Any]]:
        """Every open run as plain JSON, the longest silent first."""
        now = self._clock()
        for entry in self._entries.values():
            yield {
                "run": entry.run_id,
                "task": entry.task,
                "turns": [turn.to_dict() for turn in entry.turns],
                "spans": entry.spans,
                "alarms": entry.alarms.to_dict(),
                "missing": entry.missing,
                "events": entry.events,
                "idle_s": round(now - entry.seen, 3),
            }

    def restore(self, row: object) -> None:
        """Open a run as it was saved; it is read when its next turn comes in.

        Args:
            row: What `save` gave; the longest silent first.

        Raises:
            TraceError: If a field is missing or of the wrong type.
        """
        row = expect_object(row, "")
        entry = _Entry(
            run_id=expect_str(row, "run", ""),
            task=expect_str(row, "task", ""),
            alarms=Alarms.from_dict(row.get("alarms"), self._rules),
            seen=self._clock() - float(row.get("idle_s") or 0),
            turns=[
                Turn.from_dict(turn, place=f"turns[{i}]")
                for i, turn in enumerate(expect_list(row, "turns", ""))
            ],
            spans=list(expect_list(row, "spans", "")),
            missing=expect_int(row, "missing", ""),
            events=expect_int(row, "events", ""),
        )
        entry.span_bytes = sum(len(json.dumps(spans)) for spans in entry.spans)
        self._entries[entry.run_id] = entry
        self._weigh(entry)

    def _is_known(self, entry: _Entry, at: int | None) -> bool:
        """Whether the turn at this place has come before; places that were skipped are missing."""
        if at is None:
            return False
        following = len(entry.turns) + entry.missing
        if at < following:
            self.counts["repeated"] += 1
            return True
        self._miss(entry, at - following)
        return False

    def _add_spans(self, entry: _Entry, arrival: Arrival) -> bool:
        """Make the turns of a run anew from all of its spans; whether that changes them."""
        if arrival.spans is None:
            return False
        entry.spans.append(arrival.spans)
        entry.span_bytes += arrival.size
        batch = otlp.Batch(entry.run_id)
        try:
            for document in entry.spans:
                batch.add(document)
            found = batch.examples()[0]
            if isinstance(found, TraceError):
                raise found
            run = found.trajectory
        except (TraceError, RecursionError):  # so far nothing is said in them
            self.counts["unreadable"] += 1
            self._weigh(entry)
            return False
        turns = list(run.turns[: self._bounds.turns])
        if (run.task, turns) == (entry.task, entry.turns):
            return False
        if run.task != entry.task or turns[: len(entry.turns)] != entry.turns:
            entry.run = None
        entry.task, entry.turns = run.task, turns
        return True

    def _entry(self, arrival: Arrival) -> _Entry:
        """The run of an arrival, opened if need be, and now the last to have spoken."""
        entry = self._entries.get(arrival.run_id)
        if entry is None:
            alarms = Alarms(self._rules)
            entry = _Entry(arrival.run_id, arrival.task, alarms, self._clock())
            self._entries[arrival.run_id] = entry
            self.counts["opened"] += 1
        if arrival.task and not entry.task:  # it came late, and every turn is judged against it
            entry.task, entry.run = arrival.task, None
        entry.seen = self._clock()
        self._entries.move_to_end(arrival.run_id)
        return entry

    def _miss(self, entry: _Entry | None, missing: int) -> None:
        """Count turns that were lost before they came here."""
        self.counts["lost_before"] += missing
        if entry is not None:
            entry.missing += missing

    def _judge(self, entry: _Entry) -> list[Event]:
        """What a new turn changes."""
        if entry.failures >= _FAILURES:
            return []
        attribution = self._attribute(entry)
        if attribution is None:
            return []
        self.counts["turns"] += 1
        threshold = self._threshold(entry)
        return [
            self._event(entry, kind, (finding,), threshold)
            for kind, finding in entry.alarms.update(attribution, threshold)
        ]

    def _attribute(self, entry: _Entry) -> Attribution | None:
        """Judge a run; an error is counted, and the run is read again the next time."""
        try:
            if entry.run is None or entry.is_stale:
                entry.run = OpenRun(self._attributor, entry.run_id, entry.task, entry.run)
                entry.is_stale = False
            entry.run.extend(entry.turns[len(entry.run.turns) :])
            entry.latest = entry.run.attribute()
            entry.failures = 0
        except Exception as error:  # whatever a model raises must not reach the host
            entry.run = None
            entry.failures += 1
            self.counts["errors"] += 1
            self.last_error = f"{type(error).__name__}: {error}"
            return None
        finally:
            self._weigh(entry)
        return entry.latest

    def _latest(self, entry: _Entry) -> Attribution | None:
        """The judgement of all turns of a run; the last one that worked if that fails."""
        latest = entry.latest
        is_current = entry.run is not None and not entry.is_stale
        if is_current and latest is not None and len(latest.steps) == len(entry.turns):
            return latest
        if not entry.turns or entry.failures >= _FAILURES:
            return latest
        return self._attribute(entry) or latest

    def _weigh(self, entry: _Entry) -> None:
        """Bring the memory of a run up to date."""
        if entry.run is not None:
            nbytes = entry.run.nbytes
        else:
            nbytes = sum(len(turn.content) + 500 for turn in entry.turns)
        nbytes += 2 * entry.span_bytes
        if entry.run_id in self._entries:
            self.nbytes += nbytes - entry.nbytes
        entry.nbytes = nbytes

    def _make_room(self) -> list[Event]:
        """Close the runs that were silent longest until the bounds hold."""
        events: list[Event] = []
        bounds = self._bounds
        while len(self._entries) > bounds.runs or (
            self.nbytes > bounds.total_bytes and len(self._entries) > 1
        ):
            events += self.end(next(iter(self._entries)), "evicted")
        return events

    def _threshold(self, entry: _Entry) -> float | None:
        """Probability from which faults of a run are declared."""
        if self._thresholds is None or not entry.turns:
            return None
        return self._thresholds.at(len(entry.turns))

    def _event(
        self,
        entry: _Entry,
        kind: Literal["raised", "cleared", "final"],
        findings: Sequence[Finding],
        threshold: float | None,
        reason: Reason | None = None,
        outcome: Outcome | None = None,
    ) -> Event:
        """The next event of a run."""
        entry.events += 1
        self.counts[kind] += 1
        judged = 0 if entry.latest is None else len(entry.latest.steps)
        return Event(
            run_id=entry.run_id,
            number=entry.events - 1,
            kind=kind,
            turns=judged,
            findings=tuple(findings),
            threshold=threshold,
            missing=entry.missing,
            reason=reason,
            sources=tuple(entry.source(finding.turn) for finding in findings),
            outcome=outcome,
        )
