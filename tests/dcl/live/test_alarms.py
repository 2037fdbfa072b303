from __future__ import annotations

import json

import numpy as np
import pytest
from tiny import make_run

from dcl.attribution import Attribution, Calibration, Logits, decode
from dcl.errors import ConfigError, TraceError
from dcl.live.alarms import AlarmRules, Alarms, Event
from dcl.taxonomy import MODES, ErrorMode

M = len(MODES)
RUN = make_run(("a", "x"), ("b", "y"))


def judged(agent: float = 0.01, pair: float = 0.01) -> Attribution:
    """Agent a fails with this probability, and so in FM-2.5 with that."""
    logit = np.log([agent / (1 - agent), pair / (1 - pair)])
    pairs = np.full((2, M), -9, dtype=np.float32)
    pairs[0, ErrorMode.FM_2_5.index] = logit[1]
    agents = np.array([logit[0], -9], dtype=np.float32)
    flat = np.zeros((2, M), dtype=np.float32)
    logits = Logits(agents, pairs.max(axis=0), pairs, np.zeros(2, dtype=np.float32), flat)
    return decode(RUN, logits, Calibration(agent_threshold=0.6, pair_threshold=0.5))


def changes(
    alarms: Alarms, *probs: tuple[float, float], threshold: float | None = None
) -> list[list[str]]:
    """What each judgement changes, as `+FM-2.5` or `-agent`."""
    said = []
    for agent, pair in probs:
        said.append(
            [
                ("+" if kind == "raised" else "-") + getattr(f.fault.mode, "value", "agent")
                for kind, f in alarms.update(judged(agent, pair), threshold)
            ]
        )
    return said


LOW, HIGH = (0.1, 0.1), (0.9, 0.9)


def test_an_alarm_is_raised_when_judgements_in_a_row_agree() -> None:
    assert changes(Alarms(AlarmRules(confirm=2)), HIGH, HIGH, HIGH) == [[], ["+FM-2.5"], []]
    assert changes(Alarms(AlarmRules(confirm=1)), HIGH) == [["+FM-2.5"]]
    assert changes(Alarms(AlarmRules(confirm=3)), HIGH, HIGH, LOW, HIGH, HIGH, HIGH)[-1] == [
        "+FM-2.5"
    ]


def test_one_judgement_between_others_raises_nothing() -> None:
    assert changes(Alarms(AlarmRules(confirm=2)), HIGH, LOW, HIGH, LOW) == [[]] * 4


def test_an_alarm_is_cleared_well_below_the_threshold_only() -> None:
    alarms = Alarms(AlarmRules(confirm=2, release=0.8))
    changes(alarms, HIGH, HIGH)
    edge = (0.45, 0.45)  # under 0.5, over 0.4
    assert changes(alarms, edge, edge, edge) == [[], [], []]
    assert changes(alarms, LOW, edge, LOW, LOW) == [[], [], [], ["-FM-2.5"]]
    assert changes(alarms, LOW, HIGH, HIGH) == [[], [], ["+FM-2.5"]]


def test_a_probability_that_swings_about_the_threshold_changes_nothing() -> None:
    alarms = Alarms(AlarmRules(confirm=2, release=0.8))
    swing = [(0.49, 0.49), (0.51, 0.51)] * 8
    assert changes(alarms, *swing) == [[]] * 16
    assert changes(alarms, LOW, HIGH, HIGH) == [[], [], ["+FM-2.5"]]
    assert changes(alarms, *swing) == [[]] * 16


def test_an_agent_without_a_mode_is_an_alarm_of_its_own() -> None:
    alarms = Alarms(AlarmRules(confirm=1, release=1.0))
    assert changes(alarms, (0.9, 0.1), (0.9, 0.9), (0.9, 0.9)) == [["+agent"], ["+FM-2.5"], []]
    assert changes(alarms, (0.1, 0.9), (0.1, 0.1)) == [["-agent"], ["-FM-2.5"]]


def test_a_threshold_takes_the_place_of_the_models() -> None:
    alarms = Alarms(AlarmRules(confirm=1, release=0.8))
    assert changes(alarms, HIGH, threshold=0.95) == [[]]
    assert changes(alarms, HIGH, threshold=0.85) == [["+FM-2.5"]]
    assert changes(alarms, (0.7, 0.7), threshold=0.85) == [[]]  # the lower one is 0.68
    assert changes(alarms, (0.6, 0.6), threshold=0.85) == [["-FM-2.5"]]


def test_alarms_go_on_as_they_were_saved() -> None:
    for before in ([HIGH], [HIGH, HIGH], [HIGH, HIGH, LOW]):
        first, rules = Alarms(AlarmRules()), AlarmRules()
        changes(first, *before)
        row = json.loads(json.dumps(first.to_dict()))
        second = Alarms.from_dict(row, rules)
        after = [HIGH, LOW, LOW]
        assert changes(second, *after) == changes(first, *after)


@pytest.mark.parametrize(
    "row", [None, {}, {"rising": [], "raised": [{"agent": "a", "mode": "FM-9.9", "times": 1}]}]
)
def test_saved_alarms_are_checked(row: object) -> None:
    with pytest.raises(TraceError, match="alarms"):
        Alarms.from_dict(row, AlarmRules())


@pytest.mark.parametrize("keys", [{"confirm": 0}, {"release": 1.5}, {"release": float("nan")}])
def test_rules_are_checked(keys: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(keys))):
        AlarmRules(**keys)  # type: ignore[arg-type]


def test_an_event_is_plain_json() -> None:
    findings = judged(0.9, 0.9).findings()
    event = Event("run", 3, "final", 2, findings, 0.25, 1, "ended")
    row = json.loads(json.dumps(event.to_dict()))
    assert row.pop("faults") == [
        {"agent": "a", "mode": "FM-2.5", "step": 0, "turn": 0, "prob": pytest.approx(0.9)}
    ]
    assert row == {
        "event": "final", "run": "run", "number": 3, "turns": 2, "missing": 1,
        "threshold": 0.25, "reason": "ended",
    }  # fmt: skip
    assert "reason" not in Event("run", 0, "raised", 1, (), None, 0).to_dict()
