"""What one new turn costs, text in and findings out, beside one encoder call on that turn alone.

Both are measured in turn, on texts that were never seen before, so that what else the machine does
strikes both alike and no cache helps either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any

from dcl.attribution import Attributor
from dcl.errors import ConfigError
from dcl.formats import read_trajectories
from dcl.live.incremental import OpenRun
from dcl.trajectory import Trajectory, Turn

_AGENTS = ("planner", "coder", "tester", "critic")
_TURNS = 4000  # turns that are looked at to find some of the right size


@dataclass(frozen=True, slots=True)
class TurnCost:
    """Medians at one length of the run.

    Args:
        turns: Turns of the run, the new one included.
        encoder_ms: One encoder call on a turn of the same size.
        turn_ms: The new turn: tokens, encoder, features, head, findings.
    """

    turns: int
    encoder_ms: float
    turn_ms: float

    @property
    def ratio(self) -> float:
        """The new turn in encoder calls."""
        return self.turn_ms / self.encoder_ms


def measure(
    attributor: Attributor,
    data: Sequence[Path],
    *,
    lengths: Sequence[int],
    tokens: int = 128,
    repeats: int = 30,
) -> Iterator[TurnCost]:
    """Measure at several lengths of the run.

    Args:
        attributor: The model, with one thread.
        data: Logs whose turns are used.
        lengths: Turns of the run, the new one included.
        tokens: Size of the turns, give or take a tenth.
        repeats: New turns that are measured at each length.

    Raises:
        ConfigError: If too few turns are of that size.
    """
    texts = _texts(attributor, data, tokens)
    fresh = (f"{number} {texts[number % len(texts)]}" for number in count())
    for length in lengths:
        run = OpenRun(attributor, "run", "Solve the task.")
        turns = [Turn(_AGENTS[i % 4], texts[i % len(texts)]) for i in range(length - 1)]
        run.extend(turns)
        run.attribute()
        times = [_measure_once(attributor, run, turns, fresh) for _ in range(repeats)]
        yield TurnCost(length, median(e for e, _ in times) * 1e3, median(t for _, t in times) * 1e3)


def measure_run(
    attributor: Attributor,
    data: Sequence[Path],
    *,
    turns: int,
    tokens: int = 128,
    repeats: int = 30,
) -> float:
    """Median milliseconds a turn of a whole run that is attributed at once.

    Args:
        attributor: The model, with one thread.
        data: Logs whose turns are used.
        turns: Of the run.
        tokens: Size of the turns, give or take a tenth.
        repeats: Runs that are measured.

    Raises:
        ConfigError: If too few turns are of that size.
    """
    texts = _texts(attributor, data, tokens)
    fresh = (f"{number} {texts[number % len(texts)]}" for number in count())
    spoken = (Turn(_AGENTS[number % 4], text) for number, text in enumerate(fresh))
    runs = (Trajectory("run", "Solve the task.", tuple(islice(spoken, turns))) for _ in count())
    times = [_seconds(partial(_attribute, attributor, run)) for run in islice(runs, repeats)]
    return median(times) * 1e3 / turns


def to_markdown(costs: Sequence[TurnCost]) -> str:
    """A table for people."""
    rows = [
        "| turns | one encoder call (ms) | a new turn (ms) | ratio |",
        "| ---: | ---: | ---: | ---: |",
    ]
    rows += [f"| {c.turns} | {c.encoder_ms:.1f} | {c.turn_ms:.1f} | {c.ratio:.2f} |" for c in costs]
    return "\n".join(rows) + "\n"


def _measure_once(
    attributor: Attributor, run: OpenRun, turns: Sequence[Turn], fresh: Iterator[str]
) -> tuple[float, float]:
    """Seconds of an encoder call, and of a new turn in a copy of the run."""
    bagger: Any = attributor.bagger
    scorer: Any = attributor.scorer
    window = bagger.window(bagger.tokenize([next(fresh)])[0])
    copy = OpenRun(attributor, run.id, run.task, run)
    copy.extend(turns)
    copy.attribute()
    turn = Turn(_AGENTS[len(turns) % 4], next(fresh))
    alone = _seconds(lambda: scorer.encoder([window]))
    return alone, _seconds(lambda: _judge(copy, turn))


def _judge(run: OpenRun, turn: Turn) -> None:
    """A new turn, text in and findings out."""
    run.extend([turn])
    run.attribute().findings()


def _attribute(attributor: Attributor, run: Trajectory) -> None:
    """A whole run, text in and findings out."""
    attributor(run).findings()


def _seconds(action: Callable[[], object]) -> float:
    """How long something takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _texts(attributor: Attributor, data: Sequence[Path], tokens: int) -> list[str]:
    """Turns of about this size."""
    bagger: Any = attributor.bagger
    texts = [turn.content for path in data for turn in _turns(path)]
    found = [
        text
        for text, ids in zip(texts, bagger.tokenize(texts), strict=True)
        if abs(len(ids) - tokens) <= tokens / 10
    ]
    if len(found) < 10:
        raise ConfigError(f"--data: expected 10 turns of about {tokens} tokens, found {len(found)}")
    return found


def _turns(path: Path) -> Iterator[Turn]:
    """The first turns of a log."""
    left = _TURNS
    for run in read_trajectories(path):
        yield from run.turns[:left]
        left -= len(run.turns)
        if left <= 0:
            return
