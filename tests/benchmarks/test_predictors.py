"""Fixed rules and learned floors on runs small enough to check by eye."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.metrics import count, state_truth
from benchmarks.predictors import (
    RULES,
    AttributorPredictor,
    Beliefs,
    NamePrior,
    fit_cuts,
)
from benchmarks.probes import LengthProbe, PositionProbe, Probe
from benchmarks.runs import load_examples
from benchmarks.tfidf import TfIdf
from dcl.attribution import Attribution, Calibration, Logits, decode
from dcl.errors import ConfigError
from dcl.splits import group_of, split_of
from dcl.taxonomy import MODES, ErrorMode
from dcl.trajectory import Example, Fault, Trajectory, Turn, TurnKind

RUN = Trajectory(
    "run",
    "task",
    (
        Turn("Computer_terminal", "ready", kind=TurnKind.TOOL_RESULT, step=1),
        Turn("Planner", "first look it up", step=2),
        Turn("Coder", "```python\nprint(1)\n```", step=3),
        Turn("Computer_terminal", "exitcode: 0", kind=TurnKind.TOOL_RESULT, step=4),
        Turn("Coder", "done", step=5),
        Turn("Checker", "fine", step=6),
    ),
)


@pytest.mark.parametrize(
    ("name", "agent", "step"),
    [
        ("first-speaker", "Planner", 2),
        ("last-speaker", "Checker", 6),
        ("most-talking", "Coder", 3),
        ("first-code", "Coder", 3),
        ("step-1", "Planner", 2),
        ("step-4", "Coder", 5),
    ],
)
def test_rules(name: str, agent: str, step: int) -> None:
    found = RULES[name](RUN)
    assert (found.agent, found.step) == (agent, step)
    assert found.labels("agent") == {agent}
    assert found.ranking[0] == step
    assert found.faults == {(agent, ErrorMode.FM_2_6)}


@pytest.mark.parametrize("name", RULES)
def test_rules_take_any_run(name: str) -> None:
    alone = Trajectory("x", "", (Turn("tool", "", kind=TurnKind.TOOL_RESULT),))
    assert RULES[name](alone).labels("agent") <= {"tool"}


def test_everyone_is_everyone() -> None:
    assert RULES["everyone"](RUN).labels("agent") == set(RUN.agents)


def test_one_mode_names_no_agent() -> None:
    found = RULES["always-fm-2.6"](RUN)
    assert found.labels("error") == {ErrorMode.FM_2_6}
    assert found.labels("agent") == found.labels("pair") == frozenset()


def test_every_mode_names_no_agent() -> None:
    found = RULES["every-mode"](RUN)
    assert found.labels("error") == set(MODES)
    assert found.labels("agent") == found.labels("pair") == frozenset()


def test_random_is_the_same_every_time() -> None:
    assert RULES["random"](RUN) == RULES["random"](RUN)
    agents = {RULES["random"](Trajectory(str(i), "", RUN.turns)).agent for i in range(60)}
    assert agents == set(RUN.agents)


def make_example(i: int) -> Example:
    """`Worker` fails by FM-1.1 and says so; `Checker` sometimes by FM-3.3; `Ghost` never speaks."""
    odd = i % 2 == 1
    turns = (
        Turn("Worker", f"i ignore the format {i}"),
        Turn("Checker", "looks right to me" if odd else f"the sum is off {i}"),
        Turn("Planner", f"plan number {i}"),
    )
    faults = [Fault("Worker", ErrorMode.FM_1_1)]
    faults += [Fault("Checker", ErrorMode.FM_3_3)] if odd else []
    faults += [Fault("Ghost", ErrorMode.FM_3_3)] if i % 5 == 0 else []
    return Example(Trajectory(str(i), f"question {i}", turns), tuple(faults))


TRAIN = [make_example(i) for i in range(40)]
VALID = [make_example(i) for i in range(40, 60)]


def test_the_name_prior_reads_no_word() -> None:
    prior = NamePrior(TRAIN, VALID)
    silent = Trajectory("x", "", (Turn("Worker", ""), Turn("Planner", ""), Turn("Newcomer", "")))
    found = prior(silent)
    assert ("Worker", ErrorMode.FM_1_1) in found.faults
    assert "Planner" not in found.labels("agent")
    assert found.agent == "Worker"
    single = NamePrior(TRAIN, VALID, single=True)(silent)
    assert single.faults == {("Worker", ErrorMode.FM_1_1)}
    assert single.labels("agent") == {"Worker"}


def test_floors_need_validation_questions() -> None:
    with pytest.raises(ConfigError, match="validation questions"):
        NamePrior(TRAIN, [])


def test_tfidf_reads_words_and_no_name(tmp_path: Path) -> None:
    model = TfIdf.fit(TRAIN, VALID, strengths=(16.0, 64.0))
    run = Trajectory(
        "x", "", (Turn("a", "plan number 7"), Turn("b", "looks right to me"), Turn("c", "\ud83d"))
    )
    found = model(run)
    assert found.faults == {("b", ErrorMode.FM_3_3)}
    assert found.labels("agent") == {"b"}
    assert found.labels("error") == {ErrorMode.FM_3_3}
    assert (found.agent, found.step) == ("b", 1)
    assert sorted(found.ranked_steps) == [0, 1, 2]
    model.save(tmp_path / "floor.npz")
    assert TfIdf.load(tmp_path / "floor.npz")(run) == found


def make_shape(i: int) -> Example:
    """Who speaks last fails by FM-3.3; who says most fails by FM-1.1; names and words tell nothing.

    The talker is the second to fifth of six, too rarely at any one place to be blamed for it.
    """
    talker = 1 + i % 4
    turns = tuple(Turn(f"x{(i + a) % 6}", "w " * (30 if a == talker else 3)) for a in range(6))
    faults = (
        Fault(turns[5].agent, ErrorMode.FM_3_3),
        Fault(turns[talker].agent, ErrorMode.FM_1_1),
    )
    return Example(Trajectory(f"shape {i}", f"question {i}", turns), faults)


@pytest.mark.parametrize(
    ("kind", "found", "step"),
    [
        (PositionProbe, ("f", ErrorMode.FM_3_3), 5),
        (LengthProbe, ("b", ErrorMode.FM_1_1), 1),
    ],
)
def test_a_probe_sees_its_statistics_alone(
    kind: type[Probe], found: tuple[str, ErrorMode], step: int, tmp_path: Path
) -> None:
    probe = kind.fit([make_shape(i) for i in range(60)], [make_shape(i) for i in range(60, 80)])
    said = [Turn(name, "v " * (30 if name == "b" else 3)) for name in "abcdef"]
    run = Trajectory("run", "task", tuple(said))
    guess = probe(run)
    assert guess.faults == {found}
    assert guess.step == run.steps[step]
    assert sorted(guess.ranked_steps) == list(run.steps)
    probe.save(tmp_path / "probe.npz")
    assert kind.load(tmp_path / "probe.npz")(run) == guess
    single = kind.load(tmp_path / "probe.npz", single=True)(run)
    assert single.faults == {found}


def test_statistics_of_probes() -> None:
    run = Trajectory("r", "", (Turn("a", "12"), Turn("b", ""), Turn("a", "123456"), Turn("c", "")))
    assert PositionProbe.describe(run).tolist() == [
        [0, 2, 0, 0.75, 3, 4],
        [1, 1, 0.25, 0.5, 3, 4],
        [3, 3, 0.75, 1, 3, 4],
    ]
    assert LengthProbe.describe(run).tolist() == [
        [2, 0.5, 8, 1, 3],
        [1, 0.25, 0, 0, 3],
        [1, 0.25, 0, 0, 3],
    ]
    assert PositionProbe.rank(run, "a") == [0, 2]
    assert LengthProbe.rank(run, "a") == [2, 0]


def test_thresholds_keep_equal_scores_together() -> None:
    examples = [make_example(i) for i in (1, 2)]
    beliefs = [
        Beliefs(e.trajectory.agents, np.ones(3), np.zeros(len(MODES)), np.ones((3, len(MODES))))
        for e in examples
    ]
    cuts = fit_cuts(beliefs, examples)
    assert cuts.agent <= 1.0
    assert cuts.pair <= 1.0
    assert cuts.pair_f1 == pytest.approx(2 * 3 / (3 + 2 * 3 * len(MODES)))


def attribute(run: Trajectory) -> Attribution:
    """Coder and Checker over the thresholds, Planner over that of agents alone."""
    pair = np.full((len(run.agents), len(MODES)), -4.0, dtype=np.float32)
    pair[2, 3], pair[3, 13] = 2.0, 1.0
    agent = np.array([-4.0, 1.0, 2.0, 3.0], dtype=np.float32)
    mode = pair.max(axis=0)
    step = np.arange(len(run.turns), dtype=np.float32)
    attention = np.zeros((len(run.turns), len(MODES)), dtype=np.float32)
    return decode(run, Logits(agent, mode, pair, step, attention), Calibration())


def test_the_model_declares_at_each_level() -> None:
    found = AttributorPredictor(attribute)(RUN)
    assert found.faults == {("Coder", MODES[3]), ("Checker", MODES[13])}
    assert found.labels("agent") == {"Planner", "Coder", "Checker"}
    assert found.labels("error") == {MODES[3], MODES[13]}
    assert (found.agent, found.step) == ("Checker", 6)
    assert found.ranked_steps == (6, 5, 4, 3, 2, 1)
    assert found.shown == 6


def test_the_model_names_one_where_one_is_known() -> None:
    found = AttributorPredictor(attribute, single=True)(RUN)
    assert found.faults == {("Coder", MODES[3])}
    assert found.labels("agent") == {"Checker"}
    assert found.labels("error") == {MODES[3]}


@pytest.mark.data
def test_the_name_prior_on_real_runs(data_dir: Path) -> None:
    """The figures known from another split of the same set."""
    by_split: dict[str, list[Example]] = {"train": [], "valid": [], "test": []}
    for example in load_examples([data_dir / "aegis" / "validation.jsonl.xz"]):
        by_split[split_of(group_of(example))].append(example)
    prior = NamePrior(by_split["train"], by_split["valid"])
    held_out = by_split["valid"] + by_split["test"]
    truths = [state_truth(example.faults or ()) for example in held_out]
    guesses = [prior(example.trajectory) for example in held_out]
    scores = [count(truths, guesses, lv).micro().f1[0] for lv in ("agent", "pair", "error")]
    assert scores == pytest.approx([0.778, 0.112, 0.235], abs=0.03)


@pytest.mark.data
def test_published_floors_of_whowhen(data_dir: Path) -> None:
    runs = load_examples([data_dir / "whowhen" / "algorithm-generated"])
    truths = [state_truth(example.faults or ()) for example in runs]

    def right(name: str) -> tuple[float, float]:
        found = [RULES[name](example.trajectory) for example in runs]
        pairs = list(zip(truths, found, strict=True))
        agent = sum(t.agent == f.agent for t, f in pairs) / len(runs)
        return agent, sum(t.step == f.step for t, f in pairs) / len(runs)

    assert len(runs) == 126
    assert right("most-talking")[0] == pytest.approx(0.540, abs=0.001)
    assert right("step-1")[1] == pytest.approx(0.270, abs=0.001)
    assert right("first-code") == pytest.approx((0.635, 0.389), abs=0.001)
