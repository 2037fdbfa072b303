"""A model that needs no file: whoever says a word on its list failed, and in this way.

Run as a script it is `dcl` with this model, for tests that need a process of their own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from dcl import cli
from dcl.attribution import Attributor, Calibration, Logits
from dcl.bag import Bag
from dcl.commands.options import Backend
from dcl.taxonomy import MODES, ErrorMode
from dcl.trajectory import Trajectory, Turn

SIGNS = {"stays as it is": ErrorMode.FM_2_5, "looks right to me": ErrorMode.FM_3_3}


def score(bags: Sequence[Any]) -> list[Logits]:
    """Logits 3 for what a sign shows and -3 elsewhere; `WAIT` blocks and `NAN` breaks."""
    return [_score(bag) for bag in bags]


def _score(run: Trajectory) -> Logits:
    step = np.full(len(run.turns), -3, dtype=np.float32)
    pair = np.full((len(run.agents), len(MODES)), -3, dtype=np.float32)
    for t, turn in enumerate(run.turns):
        if turn.content == "WAIT":
            sys.stderr.write("waiting\n")
            sys.stderr.flush()
            while True:  # not `signal.pause`, which misses a signal that comes just before it
                time.sleep(0.05)
        for sign, mode in SIGNS.items():
            if sign in turn.content:
                step[t] = 3
                pair[run.agents.index(turn.agent), mode.index] = 3
        if turn.content == "NAN":
            step[t] = np.nan
    attention = np.repeat(step[:, None], len(MODES), axis=1)
    return Logits(pair.max(axis=1), pair.max(axis=0), pair, step, attention)


def load(
    path: Path | None = None,
    *,
    threads: int | None = None,
    injected: bool = False,
    backend: Backend | None = None,
) -> Attributor:
    """Stands in for `dcl.cli.load_model`."""
    return Attributor(lambda run: cast(Bag, run), score, Calibration())


def make_run(name: str, *said: str) -> Trajectory:
    """A run of the agents a, b, c, ... who say one thing each."""
    turns = tuple(Turn("abcdefgh"[i], text) for i, text in enumerate(said))
    return Trajectory(name, "task", turns)


if __name__ == "__main__":
    with patch.object(cli, "load_model", load):
        cli.main()
