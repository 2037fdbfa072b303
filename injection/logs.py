"""Faults in logs that nobody can run again: the rules applied to what is there, and marked so."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dcl.errors import ConfigError
from dcl.formats import read_examples
from dcl.report.output import open_out
from dcl.taxonomy import MODES, ErrorMode
from dcl.trajectory import Example, Fault, Trajectory, TurnKind
from injection.errors import AttackError
from injection.rules import Scene, corrupt
from injection.session import Said

_SPOKEN = (TurnKind.MESSAGE, TurnKind.THOUGHT, TurnKind.HANDOFF, TurnKind.FINAL)


@dataclass(frozen=True, slots=True)
class Injected:
    """What was made of logs.

    Args:
        runs: Successful runs that were read.
        modes: Faulty copies by code.
        refused: Attempts that no rule could make.
    """

    runs: int
    modes: Counter[str]
    refused: int


def inject_logs(
    paths: Sequence[Path], out: Path, *, per_run: int = 2, seed: int = 1, every: bool = False
) -> Injected:
    """Write faulty copies of successful logs, each with its clean twin.

    Labels say what was done to which turn. That it makes the run fail is likely and not shown:
    every copy carries `verified: false`, and no outcome.

    Args:
        paths: Logs in any format that `dcl` reads.
        out: JSON lines in the format of `dcl`; appears only when it is whole.
        per_run: Copies of each run; > 0.
        seed: Of turns and wording.
        every: Takes runs whose log does not say that they succeeded, too.

    Raises:
        ConfigError: If `out` cannot be written or is one of the logs, or no run is known to have
            succeeded.
        TraceError: If a log cannot be read.
    """
    counts: Counter[str] = Counter()
    runs = refused = 0
    if out.resolve() in [path.resolve() for path in paths]:
        raise ConfigError(f"{out}: expected a file of its own for the copies, got one of the logs")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out}: expected a place to write, got: {error.strerror}") from None
    with open_out(out) as stream:
        for example in _successes(paths, every):
            runs += 1
            made = 0
            rng = random.Random(f"{seed}:{example.trajectory.id}:{runs}")
            rare = sorted(MODES, key=lambda mode: (counts[mode.value], rng.random()))
            for mode in rare:
                if made == per_run:
                    break
                faulty = _inject(example.trajectory, mode, rng)
                if faulty is None:
                    refused += 1
                    continue
                made += 1
                counts[mode.value] += 1
                stream.write(json.dumps(faulty.to_dict()) + "\n")
        if not runs:
            raise ConfigError(
                f"{', '.join(map(str, paths))}: expected runs that are known to have succeeded, "
                "got none; --every takes others, too"
            )
    return Injected(runs, counts, refused)


def _successes(paths: Sequence[Path], every: bool) -> Iterator[Example]:
    """Runs that are known to have gone well, or all."""
    for path in paths:
        for example in read_examples(path):
            if every or example.trajectory.outcome == "success" or example.faults == ():
                yield example


def _inject(run: Trajectory, mode: ErrorMode, rng: random.Random) -> Example | None:
    """A copy with one fault; None if no turn takes it."""
    places = [
        i
        for i, turn in enumerate(run.turns)
        if turn.kind in _SPOKEN and turn.agent not in run.bystanders and turn.content.strip()
    ]
    rng.shuffle(places)
    for place in places[:8]:
        turn = run.turns[place]
        history = tuple(Said(t.agent, t.content) for t in run.turns[:place] if not t.is_outside)
        others = tuple(agent for agent in run.agents if agent not in {turn.agent, *run.bystanders})
        try:
            text = corrupt(turn.content, mode, Scene(run.task, history, others, rng, turn.agent))
        except AttackError:
            continue
        turns = (*run.turns[:place], replace(turn, content=text), *run.turns[place + 1 :])
        metadata = {**run.metadata, "verified": False, "injected_before": turn.content}
        faulty = Trajectory(f"{run.id}-{mode.value}", run.task, turns, None, metadata)
        fault = Fault(turn.agent, mode, run.steps[place])
        return Example(faulty, (fault,), run, "injection-offline")
    return None
