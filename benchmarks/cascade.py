"""A cascade: a cheap model decides, a dear one is asked only where the cheap one is unsure.

Unsure is a run whose likeliest pair has a low probability. How many runs are asked is settled on
validation questions: the cut is a quantile of that probability there. Scores are of test questions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.metrics import Interval, Level, Prediction, bootstrap, count, state_truth
from benchmarks.predictors import state_guess
from benchmarks.runs import load_examples
from benchmarks.tables import markdown_lines, show_share
from dcl.attribution import Attributor
from dcl.errors import ConfigError
from dcl.runtime import load
from dcl.trajectory import Example

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Shares of validation runs for which the dear model is asked."""
LEVELS: tuple[Level, ...] = ("pair", "agent")


@dataclass(frozen=True, kw_only=True)
class CascadeConfig:
    """What to put together, and on what.

    Args:
        data: Labelled runs; validation questions settle the cuts, test questions are scored.
        cheap: Folder of the model that sees every run.
        dear: Folder of the model that is asked.
        resamples: Resamples of the bootstrap; > 0.
    """

    data: tuple[Path, ...]
    cheap: Path
    dear: Path
    resamples: int = 1000


@dataclass(frozen=True, slots=True)
class Step:
    """The cascade at one cut.

    Args:
        valid: Share of validation runs for which the dear model is asked, 0 to 1.
        test: The same of test runs.
        run_ms: Mean processor time of a test run.
        scores: Micro-F1 by level.
    """

    valid: float
    test: float
    run_ms: float
    scores: Mapping[Level, Interval]


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """What one model said of `n` runs: predictions, certainty `(n,)` 0 to 1, and time `(n,)` ms."""

    guesses: tuple[Prediction, ...]
    certainty: NDArray[np.float64]
    ms: NDArray[np.float64]


def measure(config: CascadeConfig) -> list[Step]:
    """Measure the cascade from never asking to always asking.

    Raises:
        ConfigError: If the logs hold no labelled run of validation or of test questions.
        TraceError: If a log cannot be read.
        ArtifactError: If a model cannot be loaded.
    """
    valid, test = (load_examples(config.data, split) for split in ("valid", "test"))
    if not valid or not test:
        raise ConfigError(
            "--data: expected labelled runs of validation and of test questions, got "
            f"{len(valid)} and {len(test)}"
        )
    cheap, dear = (load(path, threads=1, injected=True) for path in (config.cheap, config.dear))
    settled = _observe(cheap, valid).certainty
    first, second = _observe(cheap, test), _observe(dear, test)
    truths = [state_truth(example.faults or ()) for example in test]
    return [_step(share, settled, first, second, truths, config) for share in SHARES]


def to_markdown(steps: Sequence[Step]) -> str:
    """A table for people, scores in percent with 95 % intervals."""
    head = ["asked in validation", "asked in test", "ms a run", *(f"{x} µF1" for x in LEVELS)]
    body = [
        [
            f"{step.valid:.0%}",
            f"{step.test:.0%}",
            f"{step.run_ms:.1f}",
            *(show_share(step.scores[level]) for level in LEVELS),
        ]
        for step in steps
    ]
    return "\n".join(markdown_lines(head, body)) + "\n"


def _observe(model: Attributor, examples: Sequence[Example]) -> _Seen:
    """Ask a model about every run, one by one."""
    guesses, certainty, ms = [], [], []
    for example in examples:
        begun = time.process_time()
        found = model(example.trajectory)
        ms.append(1e3 * (time.process_time() - begun))
        certainty.append(float(found.pair_probs.max()))
        guesses.append(state_guess(found))
    return _Seen(tuple(guesses), np.array(certainty), np.array(ms))


def _step(
    share: float,
    settled: NDArray[np.float64],
    cheap: _Seen,
    dear: _Seen,
    truths: Sequence[Prediction],
    config: CascadeConfig,
) -> Step:
    """The cascade that asks for a share of validation runs."""
    cut = np.quantile(settled, share) if share < 1 else np.inf
    asked = cheap.certainty < cut if share else np.zeros(len(truths), dtype=bool)
    guesses = [
        second if ask else first
        for ask, first, second in zip(asked, cheap.guesses, dear.guesses, strict=True)
    ]
    run_ms = (cheap.ms + np.where(asked, dear.ms, 0.0)).mean()
    scores = {level: _score(truths, guesses, level, config.resamples) for level in LEVELS}
    return Step(share, float(asked.mean()), float(run_ms), scores)


def _score(
    truths: Sequence[Prediction], guesses: Sequence[Prediction], level: Level, resamples: int
) -> Interval:
    """Micro-F1 at one level."""
    counts = count(truths, guesses, level)
    return bootstrap(lambda w: counts.micro(w).f1, len(truths), resamples=resamples)
