from __future__ import annotations

import json
from pathlib import Path

import pytest
from worlds import story_task

from dcl.formats import read_examples
from dcl.taxonomy import ErrorMode
from injection.checkers import check
from injection.discussion import miscopy
from injection.english import towns
from injection.natural import NaturalConfig, Told, collect_natural, name_mode
from injection.records import RECORDS
from injection.run import ScriptedConfig
from injection.scripted import Scripted
from injection.session import Call, Message, Reply, run_system
from injection.systems import Experts
from injection.systems.experts import TERMINAL
from injection.tasks import own_tasks

LUCKLESS = ScriptedConfig(skill=0.5, trust=0.3)


def draw(*words: object) -> float:
    return 0.4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("natural") / "out"
    config = NaturalConfig(
        out=str(out),
        systems=("experts", "orchestrator", "llm_debate"),
        tasks_per_file=2,
        scripted=LUCKLESS,
        seeds=3,
        workers=1,
    )
    counts = collect_natural(config)
    assert counts["located"] > 3
    assert counts["right"] > counts["located"]
    assert counts.total() == 3 * 12 * 3
    assert collect_natural(config) == counts  # all done: nothing is run again
    return out


def test_records_are_failures_whose_step_is_that_of_the_agent(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / RECORDS).read_text().splitlines()]
    examples = list(read_examples(folder / RECORDS))
    assert len(rows) == len(examples)
    for row, example in zip(rows, examples, strict=True):
        (fault,) = example.faults or ()
        (turn,) = [turn for turn in example.trajectory.turns if turn.step == fault.step]
        assert turn.agent == fault.agent != TERMINAL
        assert example.trajectory.outcome == "failure"
        assert row["injection"]["attacks"] == []
        assert not row["injection"]["verdicts"]["faulty"]["right"]


def test_correcting_the_labelled_call_makes_the_run_right(folder: Path) -> None:
    from dataclasses import asdict, replace

    from injection.proof import Correction
    from injection.systems import find_system

    tasks = {task.question: task for task in own_tasks()}
    for line in (folder / RECORDS).read_text().splitlines()[:10]:
        row = json.loads(line)
        task, system = tasks[row["input"]["query"]], find_system(row["metadata"]["framework"])
        model = Scripted(row["injection"]["seed"], **asdict(LUCKLESS))
        better = replace(model, skill=1.0, slip=0.0, care=1.0, trust=0.0)
        call = row["injection"]["decisive"]["call"]
        assert not check(task, run_system(system, task.question, model).answer).right
        mended = run_system(system, task.question, model, [Correction(better, frozenset({call}))])
        assert check(task, mended.answer).right


def test_able_experts_solve_what_they_can_be_asked() -> None:
    solved = 0
    for task in own_tasks():
        run = run_system(Experts(), task.question, Scripted(1, skill=1.0, slip=0.0, care=1.0))
        solved += check(task, run.answer).right
        outputs = [event.content for event in run.events if event.agent == TERMINAL]
        assert all(output.startswith("exitcode: ") for output in outputs)
    assert solved == len(own_tasks())


def test_experts_read_what_the_terminal_printed() -> None:
    asked: list[str] = []

    def terminal(code: str) -> tuple[bool, str]:
        asked.append(code)
        return True, "result 99"

    task = story_task()
    run = run_system(Experts(terminal=terminal), task.question, Scripted(1, skill=1.0, care=0.0))
    assert len(asked) == 1
    assert "99" in run.answer
    assert not check(task, run.answer).right


@pytest.mark.parametrize(
    ("phase", "text", "mode"),
    [
        ("plan", "1. Calculator: 2 * 3", ErrorMode.FM_1_1),
        ("critique", "[Agree] Nothing to add.", ErrorMode.FM_3_3),
        ("solve", "Step 1: 2 * 3 = 7", ErrorMode.FM_2_6),
        ("discuss", "My plan:\n1. Work out 2 * 3.", ErrorMode.FM_1_1),
        ("discuss", "```python\nprint(2 * 4)\n```", ErrorMode.FM_2_6),
        ("steer", '{"answer": "Nothing is left to do."}', ErrorMode.FM_3_1),
        ("steer", "Please scroll down.", ErrorMode.FM_2_6),
        ("discuss", "[Agree] I went through it.\nAnswer: 7", ErrorMode.FM_3_3),
    ],
)
def test_the_mode_follows_from_what_the_call_was_for(
    phase: str, text: str, mode: ErrorMode
) -> None:
    assert name_mode(phase, text) is mode


def test_a_name_is_taken_for_another_of_its_kind() -> None:
    name = towns()[0]["town"]
    wrong = miscopy(f"river of {name}", draw)
    assert wrong != f"river of {name}"
    assert wrong.removeprefix("river of ") in {row["town"] for row in towns()}


def test_a_model_is_told_the_answer_below_its_request() -> None:
    heard: list[str] = []

    class Listener:
        name = "listener"

        def __call__(self, call: Call) -> Reply:
            heard.append(call.prompt)
            return Reply("Answer: 7")

    told = Told(Listener(), "43")
    call = Call("A", 0, 0, "solve", (Message("system", "You are A."), Message("user", "Go.")))
    assert told(call).text == "Answer: 7"
    assert heard[0].startswith("Go.\n")
    assert "43" in heard[0]


def test_a_configuration_without_seeds_is_refused(tmp_path: Path) -> None:
    from dcl.errors import ConfigError

    with pytest.raises(ConfigError, match="seeds: expected at least 1, got 0"):
        NaturalConfig(out=str(tmp_path), seeds=0)
