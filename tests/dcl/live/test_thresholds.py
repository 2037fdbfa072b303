from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny import make_run, write_model

from dcl.attribution import Attributor
from dcl.errors import ConfigError
from dcl.live.incremental import OpenRun
from dcl.live.thresholds import StepThresholds, top_of
from dcl.runtime import load
from dcl.trajectory import Trajectory

WORDS = ("the", "sum", "is", "skip", "again", "a", "b", "1", "2", "wrong")


@pytest.fixture(scope="module")
def attributor(tmp_path_factory: pytest.TempPathFactory) -> Attributor:
    return load(write_model(tmp_path_factory.mktemp("models") / "model"), threads=1)


def draw_runs(count: int, seed: int, most: int = 6) -> list[Trajectory]:
    """Runs of random words of random length, all of one kind."""
    rng = np.random.default_rng(seed)

    def text() -> str:
        return " ".join(rng.choice(WORDS, rng.integers(1, 8)))

    return [
        make_run(
            *((str(rng.choice(["a", "b"])), text()) for _ in range(rng.integers(1, most + 1))),
            id=str(i),
        )
        for i in range(count)
    ]


def raises_alarm(attributor: Attributor, run: Trajectory, thresholds: StepThresholds) -> bool:
    growing = OpenRun(attributor, run.id, run.task)
    for t, turn in enumerate(run.turns, start=1):
        growing.extend([turn])
        if growing.attribute().findings(threshold=thresholds.at(t)):
            return True
    return False


@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_the_rate_of_false_alarms_is_the_setting(attributor: Attributor, rate: float) -> None:
    """Over fixed draws, the mean rate on fresh runs is close to what was asked for."""
    rates = []
    for seed in range(2):
        thresholds = StepThresholds.fit(attributor, draw_runs(60, seed, most=4), rate=rate)
        fresh = draw_runs(60, 100 + seed, most=4)
        rates.append(np.mean([raises_alarm(attributor, run, thresholds) for run in fresh]))
    assert np.mean(rates) <= rate + 0.1
    assert np.mean(rates) >= rate / 4


def test_of_the_runs_learned_from_no_more_than_the_rate_of_one_half_raise_an_alarm(
    attributor: Attributor,
) -> None:
    runs = draw_runs(80, 5)
    thresholds = StepThresholds.fit(attributor, runs, rate=0.25)
    alarms = sum(raises_alarm(attributor, run, thresholds) for run in runs[1::2])
    assert alarms <= 0.25 * 40


def test_a_lower_rate_gives_higher_thresholds(attributor: Attributor) -> None:
    runs = draw_runs(80, 6)
    strict, loose = (StepThresholds.fit(attributor, runs, rate=rate) for rate in (0.05, 0.5))
    assert all(high >= low for high, low in zip(strict.values, loose.values, strict=True))


def test_the_last_threshold_holds_for_longer_runs() -> None:
    thresholds = StepThresholds(0.1, 20, (0.5, 0.7))
    assert [thresholds.at(turns) for turns in (1, 2, 3, 2000)] == [0.5, 0.7, 0.7, 0.7]


def test_too_few_runs_for_the_rate_are_refused(attributor: Attributor) -> None:
    with pytest.raises(ConfigError, match="needs 40 successful runs, got 10"):
        StepThresholds.fit(attributor, draw_runs(10, 1), rate=0.05)
    with pytest.raises(ConfigError, match="got 0"):
        StepThresholds.fit(attributor, [], rate=0.5)


@pytest.mark.parametrize("rate", [0.0, 1.0, -1.0, float("nan")])
def test_a_rate_is_a_share(attributor: Attributor, rate: float) -> None:
    with pytest.raises(ConfigError, match="rate"):
        StepThresholds.fit(attributor, [], rate=rate)


def test_thresholds_are_saved_and_loaded(tmp_path: Path) -> None:
    thresholds = StepThresholds(0.1, 20, (0.5, 0.7123456789))
    thresholds.save(tmp_path / "t.json")
    assert StepThresholds.load(tmp_path / "t.json") == thresholds


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"schema": "dcl.thresholds/2"}', json.dumps({"schema": "dcl.thresholds/1"}),
     '{"schema": "dcl.thresholds/1", "rate": 0.1, "runs": 3, "values": []}',
     '{"schema": "dcl.thresholds/1", "rate": 0.1, "runs": 3, "values": ["x"]}'],
)  # fmt: skip
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "t.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"t\.json: expected thresholds of dcl"):
        StepThresholds.load(file)
    with pytest.raises(ConfigError, match="none"):
        StepThresholds.load(tmp_path / "none.json")


def test_the_top_is_what_decides_whether_anything_is_declared(attributor: Attributor) -> None:
    for run in draw_runs(30, 9):
        attribution = attributor(run)
        top = top_of(attribution)
        assert attribution.findings(threshold=top)
        assert not attribution.findings(threshold=top + 1e-6)


def test_thresholds_of_another_model_or_reading_are_refused(
    attributor: Attributor, tmp_path: Path
) -> None:
    learned = StepThresholds.fit(attributor, draw_runs(20, 1), rate=0.4)
    learned.save(tmp_path / "thresholds.json")
    again = StepThresholds.load(tmp_path / "thresholds.json")
    assert again == learned
    again.check(attributor)
    StepThresholds(0.4, 20, (0.5,)).check(attributor)  # written before models were told apart
    for injected in (False, True):
        with pytest.raises(ConfigError, match="those of this model and reading"):
            again.check(load(injected=injected))
    natural = StepThresholds.fit(load(), draw_runs(6, 1), rate=0.4)
    with pytest.raises(ConfigError, match="those of this model and reading"):
        natural.check(load(injected=True))
