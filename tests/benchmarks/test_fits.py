from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.deletion import delete_from, to_markdown
from benchmarks.fewshot import FewshotConfig, adapt_to, compare_sizes, observe_all, read_base
from benchmarks.reliability import (
    OWN,
    REFITTED,
    measure_limits,
    measure_sets,
    measure_trust,
    split_halves,
)
from benchmarks.runs import load_examples
from dcl.artifact import open_artifact
from dcl.attribution import (
    Attribution,
    Attributor,
    Bagger,
    Calibration,
    Logits,
    decode,
)
from dcl.bag import Bag
from dcl.crossfit import attribute_adapted, choose_parts
from dcl.errors import ConfigError
from dcl.runtime import load
from dcl.targets import make_targets
from dcl.taxonomy import MODES
from dcl.trajectory import Example, Fault, Trajectory, Turn

M = len(MODES)


def write_runs(file: Path, count: int) -> Path:
    rows = []
    for i in range(count):
        said = (("planner", "Plan."), ("coder", f"I guess {i}."), ("boss", "Done."))
        run = Trajectory(
            f"r{i}", f"task {i} {i * i} {i * 7} {i + 90}", tuple(Turn(a, t) for a, t in said)
        )
        step = 1 if i % 4 else 0
        rows.append(Example(run, (Fault(run.turns[step].agent, MODES[3], step),)).to_dict())
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_few_runs_are_compared_with_floors_and_what_was_observed_is_kept(tmp_path: Path) -> None:
    data = write_runs(tmp_path / "runs.jsonl", 30)
    config = FewshotConfig(data=(data,), sizes=(12,), repeats=1, cache=tmp_path / "kept")
    count, rows = compare_sizes(config)
    assert count == 30
    names = [row.name for row in rows]
    assert names[-3:] == ["dcl, nothing fitted", "dcl fit, 12 runs", "dcl fit, 5 folds"]
    by_name = {row.name: row.scores for row in rows}
    assert by_name["first-speaker"]["agent_accuracy"].value == pytest.approx(8 / 30)
    assert by_name["dcl fit, 5 folds"]["step_accuracy"].value >= 0.5
    (kept,) = (tmp_path / "kept").iterdir()
    examples = load_examples([data])
    again = observe_all(examples, config)
    kept.unlink()
    fresh = observe_all(examples, config)
    for one, other in zip(again, fresh, strict=True):
        assert one.turns == pytest.approx(other.turns, abs=1e-5)
        assert one.group == other.group
    with pytest.raises(ConfigError, match="--size"):
        compare_sizes(FewshotConfig(data=(data,), sizes=(30,)))
    told = CliRunner().invoke(
        app, ["reliability", "--data", str(data), "--repeats", "2", "--cache", str(tmp_path / "k")]
    )
    assert told.exit_code == 0, told.output
    assert "| dcl fit, 5 folds | half of the runs | likeliest | 90% |" in told.output


def make_marked(i: int, turns: int = 4) -> Trajectory:
    """A run with one bad turn among some of its length; every second turn is of `b`."""
    said = [
        ("a" if t % 2 else "b", "fine ..." if t != i % turns else "bad. ...") for t in range(turns)
    ]
    return Trajectory(f"m{i}", "", tuple(Turn(agent, text) for agent, text in said))


class MarkScorer:
    """Blames the agent who says `bad`, at the turn that does."""

    def __call__(self, bags: Sequence[Bag]) -> list[Logits]:
        """The bags are the runs themselves."""
        return [self.score(cast("Trajectory", bag)) for bag in bags]

    def score(self, run: Trajectory) -> Logits:
        """Logits of one run."""
        bad = np.array([4.0 * ("bad" in turn.content) for turn in run.turns], dtype=np.float32)
        agent = np.array(
            [
                sum(b for b, turn in zip(bad, run.turns, strict=True) if turn.agent == name) - 2
                for name in run.agents
            ],
            dtype=np.float32,
        )
        pair = np.full((len(agent), M), -9.0, dtype=np.float32)
        pair[:, 3] = agent
        weights = np.zeros((len(bad), M), dtype=np.float32)
        return Logits(agent, pair.max(axis=0), pair, bad, weights)


def test_deletion_measures_the_fall_without_what_is_shown() -> None:
    bagger = cast("Bagger", lambda run: run)
    attributor = Attributor(bagger, MarkScorer(), Calibration())
    turn, sentence = delete_from(attributor, [make_marked(i) for i in range(8)], repeats=4)
    fall = 1 / (1 + math.exp(-2)) - 1 / (1 + math.exp(2))
    assert (turn.kind, sentence.kind) == ("turn", "sentence")  # no reading that heeds words
    assert turn.shown == pytest.approx(fall, abs=1e-6)
    assert turn.at_random == 0.0
    assert turn.gap.value == pytest.approx(fall, abs=1e-6)
    assert turn.wins == 1.0
    assert sentence.shown == pytest.approx(fall, abs=1e-6)
    assert 0.0 < sentence.at_random < fall  # a stretch of any turn, now and then of the bad one


def test_words_are_taken_only_where_the_reading_heeds_them(tmp_path: Path) -> None:
    runs = [example.trajectory for example in load_examples([write_runs(tmp_path / "r.jsonl", 2)])]
    natural = delete_from(load(), runs, repeats=1)
    assert [row.kind for row in natural] == ["turn", "sentence"]
    words = delete_from(load(injected=True), runs, repeats=1)[2]
    assert words.kind == "words"
    assert words.shown != 0.0
    assert words.gap.value == pytest.approx(words.shown - words.at_random)
    told = CliRunner().invoke(
        app, ["deletion", "--data", str(tmp_path / "r.jsonl"), "--repeats", "1"]
    )
    assert told.exit_code == 0, told.output
    assert told.output == to_markdown(2, natural)


def make_attribution(step: Sequence[float], calibration: Calibration) -> Attribution:
    """Turns of one agent with a posterior that is these logits."""
    turns = tuple(Turn("a", str(t)) for t in range(len(step)))
    logits = np.array(step, dtype=np.float32)
    one, pair = np.zeros(1, dtype=np.float32), np.zeros((1, M), dtype=np.float32)
    weights = np.zeros((len(step), M), dtype=np.float32)
    return decode(
        Trajectory("r", "", turns), Logits(one, pair[0], pair, logits, weights), calibration
    )


def test_sets_are_those_of_the_model_and_fitted_anew() -> None:
    """The label is the likeliest turn of the first fifteen runs and the second of the others."""
    cuts = tuple(0.0 if p <= 85 else 0.9 for p in range(1, 100))
    calibration = Calibration(ranked_cuts=cuts, span_cuts=cuts)
    found = [make_attribution([2.0, 1.0, 0.0, -1.0], calibration) for _ in range(20)]
    examples = [
        Example(Trajectory("r", "", tuple(Turn("a", str(t)) for t in range(4))), (fault,))
        for fault in [Fault("a", None, 0)] * 15 + [Fault("a", None, 1)] * 5
    ]
    halves = [([0, 1, 2, 3, 4], [15, 16]), ([15, 16, 17, 18, 19], [0, 19])]
    rows = measure_sets("x", examples, found, halves)
    by_key = {(row.fitted, row.kind, row.target): row for row in rows}
    assert len(by_key) == 8
    for kind, wide in (("consecutive", 3), ("likeliest", 2)):
        own = by_key[OWN, kind, 0.8]
        assert (own.coverage.value, own.turns.value, own.share.value) == (0.75, 1.0, 0.25)
        assert 0.5 <= own.coverage.low < 0.75 < own.coverage.high <= 0.95
        full = by_key[OWN, kind, 0.9]
        assert (full.coverage.value, full.turns.value, full.share.value) == (1.0, wide, wide / 4)
        # Fitted on first turns a set is one turn and misses two labels; on second ones it is two.
        anew = by_key[REFITTED, kind, 0.8]
        assert anew.coverage.value == 2 / 4
        assert anew.turns.value == (1 + 1 + 2 + 2) / 4
    bare = [replace(one, calibration=Calibration()) for one in found]
    without = measure_sets("x", examples, bare, halves)
    assert without == [row for row in rows if row.fitted == REFITTED]


def make_judged(limit: float) -> tuple[list[Example], list[Attribution]]:
    """Twenty runs, surer of `a` from the last to the first; `a` is right in the first ten."""
    examples, found = [], []
    for i in range(20):
        turns = (Turn("a", "x"), Turn("b", "y"))
        run = Trajectory(str(i), "", turns)
        examples.append(Example(run, (Fault("a" if i < 10 else "b", None, 0),)))
        agent = np.array([4.0 - i / 5, -4.0], dtype=np.float32)
        pair = np.repeat(agent[:, None], M, axis=1)
        logits = Logits(agent, pair[0], pair, agent, pair)
        found.append(decode(run, logits, Calibration(trust_threshold=limit)))
    return examples, found


def test_the_surest_guesses_come_first() -> None:
    row = measure_trust("x", *make_judged(0.0))
    assert [one.value for one in row.accuracy] == [0.5, 10 / 16, 10 / 12, 1.0, 1.0]
    assert row.accuracy[0].low < 0.5 < row.accuracy[0].high


def test_limits_are_those_of_the_model_and_fitted_anew() -> None:
    limit = 1 / (1 + math.exp(-(4.0 - 14.5 / 5)))  # between the runs 14 and 15
    examples, found = make_judged(limit)
    halves = split_halves(range(20), FewshotConfig(data=(), repeats=4))
    own, anew = measure_limits("x", examples, found, halves)
    assert (own.fitted, own.answered.value) == (OWN, 15 / 20)
    assert own.precision.value == pytest.approx(10 / 15)
    assert own.precision.low < own.precision.value < own.precision.high
    assert anew.fitted == REFITTED
    assert 0 < anew.answered.value < 1
    bare = measure_limits("x", *make_judged(0.0), halves)
    assert [row.fitted for row in bare] == [REFITTED]


def test_the_natural_reading_has_a_calibration_of_its_own() -> None:
    artifact = open_artifact()
    assert read_base(None) == artifact.natural != artifact.calibration


def test_a_fit_that_makes_things_worse_is_refused_as_by_the_command(tmp_path: Path) -> None:
    """Labels as the model itself guesses: no fit is better, so its order of turns stays."""
    config = FewshotConfig(data=(write_runs(tmp_path / "runs.jsonl", 24),), sizes=(12,))
    examples = load_examples(config.data)
    runs = observe_all(examples, config)
    base = read_base(None)
    seen, rest = range(16), range(16, 24)
    found = adapt_to(seen, rest, examples, runs, base, seed=0)
    fitted, _, _ = choose_parts(examples[:16], runs[:16], base, seed=0)
    for one, example, run in zip(found, examples[16:], runs[16:], strict=True):
        expected = attribute_adapted(example.trajectory, run, fitted)
        assert one.agent_probs.tolist() == expected.agent_probs.tolist()
        assert one.calibration == expected.calibration
    for i, example in enumerate(examples):
        t = int(np.argmax(decode(example.trajectory, runs[i].logits, base).step_probs))
        fault = Fault(example.trajectory.turns[t].agent, None, t)
        examples[i] = replace(example, faults=(fault,))
        runs[i] = replace(runs[i], targets=make_targets(examples[i], sigma=0.0))
    refused = adapt_to(range(24), rest, examples, runs, base, seed=0)
    for one, example, run in zip(refused, examples[16:], runs[16:], strict=True):
        before = decode(example.trajectory, run.logits, base)
        assert np.argsort(one.step_probs).tolist() == np.argsort(before.step_probs).tolist()
