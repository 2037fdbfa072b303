"""How cost grows: with the turns of a run, with the runs that are open, and with threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.soak import resident_mb
from benchmarks.tables import markdown_lines
from benchmarks.turncost import TurnCost, measure
from benchmarks.turncost import to_markdown as turns_to_markdown
from dcl.attribution import Attributor
from dcl.errors import ConfigError
from dcl.formats import read_trajectories
from dcl.live.incremental import OpenRun
from dcl.trajectory import Trajectory, Turn

LENGTHS = (10, 20, 50, 100, 200, 500, 1000, 2000)
OPEN_RUNS = (1, 10, 100, 1_000, 10_000)
"""Turns of a run, and runs that are open at the same time, unless others are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthConfig:
    """What to measure.

    Args:
        data: Logs whose runs are used.
        lengths: Turns of a run, ascending.
        open_runs: Runs that are open at the same time, ascending.
        turns: Turns of each of these.
        threads: Threads of the model.
        runs: Runs that are attributed with each number of threads.
        repeats: New turns that are measured at each length.
    """

    data: tuple[Path, ...]
    lengths: tuple[int, ...] = LENGTHS
    open_runs: tuple[int, ...] = OPEN_RUNS
    turns: int = 10
    threads: tuple[int, ...] = (1, 2)
    runs: int = 40
    repeats: int = 10


@dataclass(frozen=True, slots=True)
class Growth:
    """What was measured.

    Args:
        turns: By the length of the run.
        open_runs: Number of open runs, to the megabytes that they take together.
        threads: Number of threads, to the runs that are attributed a second.
    """

    turns: list[TurnCost]
    open_runs: dict[int, float]
    threads: dict[int, float]


def grow(config: GrowthConfig, load: Callable[[int], Attributor]) -> Growth:
    """Measure all three.

    Args:
        config: What to measure.
        load: Gives the model for a number of threads.

    Raises:
        ConfigError: If there are no runs, or too few turns of the size that is measured.
    """
    runs = [run for path in config.data for run in islice(read_trajectories(path), config.runs)]
    if not runs:
        raise ConfigError("--data: expected logs with runs, found none")
    attributor = load(1)
    turns = measure(attributor, config.data, lengths=config.lengths, repeats=config.repeats)
    return Growth(
        turns=list(turns),
        open_runs=dict(_measure_open(attributor, runs, config)),
        threads={
            threads: _runs_per_s(load(threads), runs, config.runs) for threads in config.threads
        },
    )


def to_markdown(growth: Growth) -> str:
    """Tables for people."""
    opened = [
        [f"{number:,}", f"{mb:.1f}", f"{1024 * mb / number:.0f}"]
        for number, mb in growth.open_runs.items()
    ]
    one = growth.threads.get(1)
    beside = [
        [f"{number}", f"{speed:.2f}", "" if one is None else f"{speed / one:.2f}"]
        for number, speed in growth.threads.items()
    ]
    return "\n".join(
        [
            turns_to_markdown(growth.turns),
            *markdown_lines(["open runs", "MB", "KB a run"], opened),
            "",
            *markdown_lines(["threads", "runs/s", "to one thread"], beside),
            "",
        ]
    )


def _measure_open(
    attributor: Attributor, runs: Sequence[Trajectory], config: GrowthConfig
) -> Iterator[tuple[int, float]]:
    """Open more and more runs; each keeps texts of its own and its last verdict."""
    turns = [turn for run in runs for turn in run.turns][: config.turns]
    kept: list[Any] = []
    _open(attributor, turns, 0).attribute()  # what is loaded on first use is no run's memory
    before = resident_mb()
    for number in config.open_runs:
        while len(kept) < number:
            run = _open(attributor, turns, len(kept))
            kept.append((run, run.attribute()))
        yield number, max(resident_mb() - before, 0.0)


def _open(attributor: Attributor, turns: Sequence[Turn], number: int) -> OpenRun:
    """A run that was read turn by turn.

    Its turns are known to the encoder, so that only bags and verdicts are made.
    """
    run = OpenRun(attributor, f"run {number}", "Solve the task.")
    for turn in turns:
        text = turn.content.encode("utf-8", "replace").decode("utf-8")  # not shared
        run.extend([Turn(turn.agent, text)])
    return run


def _runs_per_s(attributor: Attributor, runs: Sequence[Trajectory], number: int) -> float:
    """Runs attributed a second that no cache has seen."""
    fresh = [
        Trajectory(
            f"run {i}",
            run.task,
            tuple(Turn(turn.agent, f"{i} {turn.content}") for turn in run.turns),
        )
        for i, run in enumerate(islice(cycle(runs), number))
    ]
    start = time.perf_counter()
    for _ in attributor.batch(fresh):
        pass
    return number / (time.perf_counter() - start)
