"""Drawing configurations with Optuna: a journal on disk that any number of processes share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optuna
from filelock import FileLock, Timeout
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from dcl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Range:
    """Values that a key may take: numbers from low to high, or one of several choices."""

    low: float = 0.0
    """Least value."""
    high: float = 0.0
    """Greatest value."""
    whole: bool = False
    """Draw whole numbers."""
    log: bool = False
    """Draw evenly over orders of magnitude."""
    choices: tuple[Any, ...] = ()
    """Values to choose from, in place of numbers: strings, numbers, true and false."""

    def __post_init__(self) -> None:
        """Refuse a range without values."""
        if not self.choices and not self.low < self.high:
            raise ConfigError(
                f"search.ranges: expected choices or low < high, got {self.low} and {self.high}"
            )


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How to draw configurations."""

    trials: int
    """Configurations to try; > 0."""
    ranges: dict[str, Range]
    """Key of each value that is drawn, such as `learning_rate` or `model.layers`."""
    sampler: Literal["random", "tpe"] = "tpe"
    """Draw at random, or near what did well (tree-structured Parzen estimator)."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One configuration that was drawn.

    Args:
        values: Key to value.
        study: Where it was drawn from.
        number: Its number there.
    """

    values: Mapping[str, Any]
    study: optuna.Study
    number: int

    def finish(self, scores: Sequence[float]) -> None:
        """Tell the study how it did: the mean over its seeds; more is better."""
        self.study.tell(self.number, float(np.mean(scores)))


class Trials:
    """The trials that this process is to run, until there are enough.

    A trial that was running when its process was killed is drawn again with the same values, so
    that its finished cells are found and not repeated.

    Args:
        config: Ranges, sampler and number of trials.
        out: Folder with `search.journal` and `locks/`; several searches may share it.
        name: Tells the search from the others in the folder.
        seed: Of the sampler.
    """

    def __init__(self, config: SearchConfig, out: Path, *, name: str, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.config = config
        self.locks = out / "locks"
        self.name = name
        self.seed = seed
        journal = JournalStorage(JournalFileBackend(str(out / "search.journal")))
        with FileLock(self.locks / "search.lock"):
            self.study = optuna.create_study(
                study_name=name, storage=journal, direction="maximize", load_if_exists=True
            )

    def __iter__(self) -> Iterator[Trial]:
        """Trials to run; each is this process's own until the next is asked for."""
        while True:
            with FileLock(self.locks / "search.lock"):
                running = self._revive()
                done = len(self.study.get_trials(states=(TrialState.COMPLETE,)))
                if done + running >= self.config.trials:
                    return
                trial, lock = self._draw()
            try:
                yield trial
            finally:
                lock.release()

    def drawn(self) -> list[Mapping[str, Any]]:
        """Values of every trial so far in order, of those that still run or were killed, too."""
        return [trial.params for trial in self.study.get_trials()]

    def _draw(self) -> tuple[Trial, FileLock]:
        """The next trial, and the lock that shows that it runs."""
        # One seed a trial: processes that share one seed would all draw the same values.
        seed = self.seed + len(self.study.trials)
        self.study.sampler = (
            optuna.samplers.TPESampler(seed=seed)
            if self.config.sampler == "tpe"
            else optuna.samplers.RandomSampler(seed=seed)
        )
        drawn = self.study.ask()
        lock = self._lock(drawn.number)
        lock.acquire()
        values = {key: suggest(drawn, key, bounds) for key, bounds in self.config.ranges.items()}
        return Trial(values, self.study, drawn.number), lock

    def _revive(self) -> int:
        """Queue the trials of killed processes again; the number that does run."""
        left = self.study.get_trials(states=(TrialState.RUNNING,))
        for trial in left:
            with suppress(Timeout), self._lock(trial.number).acquire(blocking=False):
                self.study.tell(trial.number, state=TrialState.FAIL)
                self.study.enqueue_trial(trial.params)
        return len(self.study.get_trials(states=(TrialState.RUNNING,)))

    def _lock(self, number: int) -> FileLock:
        """The lock of a trial."""
        return FileLock(self.locks / f"trial-{self.name}-{number}.lock")


def suggest(trial: optuna.Trial, key: str, bounds: Range) -> Any:
    """Draw the value of one key."""
    if bounds.choices:
        return trial.suggest_categorical(key, list(bounds.choices))
    if bounds.whole:
        return trial.suggest_int(key, int(bounds.low), int(bounds.high), log=bounds.log)
    return trial.suggest_float(key, bounds.low, bounds.high, log=bounds.log)
