from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from worlds import prover, story_task

import dcl
from dcl.errors import ConfigError
from dcl.taxonomy import ErrorMode
from injection.manipulator import Injection, Strategy
from injection.plans import Plan, PlanConfig
from injection.proof import Proof
from injection.records import LEDGER, RECORDS, SETTINGS, Store, align, make_record, tally
from injection.report import summarise, write_report
from injection.run import RunConfig, collect
from injection.systems import Debate, MacNet

ROOT = Path(__file__).parents[2]
CORRUPT: Strategy = "response_corruption"


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """Two faults of which one matters."""
    prove = prover(Debate(), story_task(), skill=1.0, slip=0.0, care=0.0)
    faults = (
        Injection("Assistant1", ErrorMode.FM_2_4, "response_corruption", 0),
        Injection("Aggregator", ErrorMode.FM_3_1, "prompt_injection", 0),
    )
    proof = prove.prove(Plan("llm_debate", "GSM8K/story", faults, 1))
    return make_record(proof, prove.clean, prove.task, model="scripted", manipulator="rules")


def keep(record: dict[str, Any], folder: Path) -> dcl.Example:
    file = folder / "records.jsonl"
    file.write_text(json.dumps(record) + "\n")
    (example,) = dcl.read_examples(file)
    return example


def test_dcl_reads_labels_steps_and_the_clean_twin(record: dict[str, Any], tmp_path: Path) -> None:
    example = keep(record, tmp_path)
    run = example.trajectory
    assert example.faults == (dcl.Fault("Aggregator", ErrorMode.FM_3_1, 7),)
    assert run.turns[6].agent == "Aggregator"
    assert run.outcome == "failure"
    assert example.origin == "injection"
    assert example.clean is not None
    assert example.clean.outcome == "success"
    assert len(example.clean.turns) == len(run.turns)
    assert example.clean.turns[6].content != run.turns[6].content
    assert "clean" not in run.metadata


def test_the_label_follows_from_the_record(record: dict[str, Any]) -> None:
    attacks = record["injection"]["attacks"]
    assert [attack["decisive"] for attack in attacks] == [False, True]
    assert [attack["steps"] for attack in attacks] == [[1], [7]]
    assert all(attack["fired"] for attack in attacks)
    (turn,) = attacks[0]["turns"]
    history = record["input"]["conversation_history"]
    assert history[0]["content"] == turn["after"]
    assert record["clean"]["input"]["conversation_history"][0]["content"] == turn["before"]
    assert record["injection"]["minimal_causes"] == [[1]]
    assert record["injection"]["verdicts"]["clean"]["right"] is True
    assert record["injection"]["verdicts"]["faulty"]["right"] is False
    names = {turn["agent_name"] for turn in history}
    assert all(label["agent_name"] in names for label in record["output"]["faulty_agents"])
    assert record["metadata"]["num_injected_agents"] == len(record["output"]["faulty_agents"])
    assert len(record["ground_truth"]["injected_agents"]) == 2
    assert len(record["injection"]["prompt_digests"]) == len(history)


def test_a_benign_rewrite_reads_as_free_of_faults(tmp_path: Path) -> None:
    prove = prover(Debate(), story_task(), skill=1.0)
    plan = Plan("llm_debate", "GSM8K/story", (Injection("Aggregator", None, CORRUPT, 0),), 1)
    row = make_record(prove.prove(plan), prove.clean, prove.task, model="m", manipulator="rules")
    example = keep(row, tmp_path)
    assert example.faults == ()
    assert example.trajectory.outcome == "success"


def test_a_broken_twin_is_an_error_that_names_its_path(
    record: dict[str, Any], tmp_path: Path
) -> None:
    broken = json.loads(json.dumps(record))
    del broken["clean"]["input"]["conversation_history"][0]["content"]
    with pytest.raises(dcl.DclError, match=r"clean\.input\.conversation_history\[0\]\.content"):
        keep(broken, tmp_path)


def test_turns_are_aligned_by_agent_and_number() -> None:
    prove = prover(MacNet("chain"), story_task(), skill=1.0)
    run = prove.clean.run
    assert align(run, run) == [(i, i) for i in range(1, len(run.events) + 1)]


def row(plan: str, size: int = 10) -> dict[str, Any]:
    attack = {"agent": "A", "mode": "FM-1.1", "strategy": CORRUPT, "nth": 0, "turns": []}
    return {
        "injection": {"plan": plan, "attacks": [attack]},
        "ground_truth": {"is_injection_successful": plan != "benign"},
        "text": "x" * size,
    }


def read(folder: Path, name: str = RECORDS) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_plan_is_added_once_whoever_adds_it(tmp_path: Path) -> None:
    one, other = Store(tmp_path), Store(tmp_path)
    assert one.add("a", "proved", row("a"))
    assert not other.add("a", "proved", row("a"))
    assert other.add("b", "still_right")
    assert one.outcomes() == other.outcomes() == {"a": "proved", "b": "still_right"}
    assert len(read(tmp_path)) == 1


def test_a_line_torn_at_any_byte_is_cut_off_and_written_again(tmp_path: Path) -> None:
    Store(tmp_path).add("a", "proved", row("a"))
    whole = {name: (tmp_path / name).read_bytes() for name in (RECORDS, LEDGER)}
    Store(tmp_path).add("b", "proved", row("b"))
    full = {name: (tmp_path / name).read_bytes() for name in (RECORDS, LEDGER)}
    for cut in range(len(whole[RECORDS]), len(full[RECORDS])):
        (tmp_path / RECORDS).write_bytes(full[RECORDS][:cut])
        (tmp_path / LEDGER).write_bytes(whole[LEDGER])
        store = Store(tmp_path)
        assert store.outcomes() == {"a": "proved"}
        assert store.add("b", "proved", row("b"))
        assert (tmp_path / RECORDS).read_bytes() == full[RECORDS]
    for cut in range(len(whole[LEDGER]), len(full[LEDGER])):
        (tmp_path / RECORDS).write_bytes(full[RECORDS])
        (tmp_path / LEDGER).write_bytes(full[LEDGER][:cut])
        assert not Store(tmp_path).add("b", "proved", row("b"))
        assert (tmp_path / RECORDS).read_bytes() == full[RECORDS]
        assert {r["id"] for r in read(tmp_path, LEDGER)} == {"a", "b"}


def test_a_record_that_the_ledger_has_missed_keeps_its_outcome(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for plan, outcome in (("a", "proved"), ("benign", "benign")):
        store.add(plan, outcome, row(plan))
    (tmp_path / LEDGER).write_text("")
    assert Store(tmp_path).outcomes() == {"a": "proved", "benign": "benign"}
    faults = [{"agent": "A", "mode": "FM-1.1", "strategy": CORRUPT, "nth": 0}]
    assert [line["faults"] for line in read(tmp_path, LEDGER)] == [faults, faults]


def test_failures_are_counted_until_they_are_made_good(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add("failed-group-a", "no_clean_run", reason="cut off", group="s/b/a")
    store.add("failed-plan", "no_reply", reason="timed out", group="s/b/c")
    store.add("group-b", "clean_wrong", group="s/b/b")
    found = tally(store.outcomes())
    assert found.plans == {"no_reply": 1}
    assert found.clean == {"no_clean_run": 1, "clean_wrong": 1}
    assert summarise(found, tmp_path) == (
        f"0 proved records of 1 plans in {tmp_path}\nno_reply 1\n"
        "0 of 2 clean runs are right, 1 without a usable reply\n"
        "the last time without: timed out"
    )
    report = write_report(tmp_path)
    assert "| no_clean_run | 1 |" in report
    assert "| no_reply | 1 |" in report
    assert "| s | 0.0 % [0.0, 79.3] of 1 |" in report
    store.add("group-a", "clean_right", group="s/b/a")
    store.add("plan", "still_right", group="s/b/c")
    found = tally(store.outcomes())
    assert found.plans == {"still_right": 1}
    assert found.clean == {"clean_right": 1, "clean_wrong": 1}


def test_a_damaged_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / LEDGER).write_text("{}}\n")
    with pytest.raises(ConfigError, match="expected JSON on every line"):
        Store(tmp_path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="expected a folder for records"):
        Store(file)


SMALL: dict[str, Any] = {
    "systems": ("llm_debate", "macnet_chain", "orchestrator", "manager"),
    "tasks_per_file": 2,
    "plans": PlanConfig(per_task=3),
}


def small(out: Path, workers: int = 1) -> RunConfig:
    return RunConfig(out=str(out), workers=workers, **SMALL)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("undisturbed")
    found = collect(small(out))
    assert found.plans["proved"] > 10
    assert found.clean["clean_right"] > 10
    return in_order(out)


def in_order(out: Path) -> list[dict[str, Any]]:
    return sorted(read(out), key=lambda record: str(record["injection"]["plan"]))


def test_a_second_start_has_nothing_to_do(
    undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    first = collect(small(tmp_path))
    before = (tmp_path / RECORDS).read_bytes()
    assert collect(small(tmp_path)) == first
    assert (tmp_path / RECORDS).read_bytes() == before
    assert in_order(tmp_path) == undisturbed


CHILD = """
import sys
from injection.plans import PlanConfig
from injection.run import RunConfig, collect
if __name__ == "__main__":
    collect(RunConfig(out=sys.argv[1], workers=int(sys.argv[2]), tasks_per_file=2,
        plans=PlanConfig(per_task=3),
        systems=("llm_debate", "macnet_chain", "orchestrator", "manager")))
"""


def start(out: Path, workers: int = 1, **options: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-c", CHILD, str(out), str(workers)]
    return subprocess.Popen(arguments, env=environment, **options)


def grown(out: Path, size: int) -> bool:
    file = out / LEDGER
    return file.is_file() and file.stat().st_size > size


def test_processes_side_by_side_lose_and_repeat_nothing(
    undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    children = [start(tmp_path) for _ in range(3)]
    assert [child.wait(timeout=300) for child in children] == [0, 0, 0]
    assert in_order(tmp_path) == undisturbed


def kill_often(out: Path, times: int, seed: int) -> None:
    """Start, wait until something was written and a little longer, kill; in the end let it be."""
    rng = random.Random(seed)
    for _ in range(times):
        child = start(out)
        file = out / LEDGER
        size = file.stat().st_size if file.is_file() else 0
        while child.poll() is None and not grown(out, size):
            time.sleep(0.002)
        time.sleep(rng.random() / 20)
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=60)
    assert start(out).wait(timeout=300) == 0


def test_killing_it_again_and_again_changes_nothing(
    undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    kill_often(tmp_path, 4, seed=1)
    assert in_order(tmp_path) == undisturbed


def test_no_worker_outlives_a_run_that_is_killed(
    undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    child = start(tmp_path, 2, stdout=subprocess.PIPE)
    while child.poll() is None and not grown(tmp_path, 0):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.stdout is not None
    assert child.stdout.read() == b""  # ends only when the last process that holds it is gone
    child.wait(timeout=60)
    child.stdout.close()
    assert start(tmp_path).wait(timeout=300) == 0
    assert in_order(tmp_path) == undisturbed


@pytest.mark.slow
def test_killing_it_fifty_times_changes_nothing(
    undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    kill_often(tmp_path, 50, seed=2)
    assert in_order(tmp_path) == undisturbed


def test_more_workers_find_the_same(undisturbed: list[dict[str, Any]], tmp_path: Path) -> None:
    collect(small(tmp_path, workers=2))
    assert in_order(tmp_path) == undisturbed


def test_only_proofs_with_a_run_give_records() -> None:
    plan = Plan("llm_debate", "t", (Injection("A", ErrorMode.FM_1_1, CORRUPT, 0),), 1)
    prove = prover(Debate(), story_task())
    with pytest.raises(ValueError, match="no run"):
        make_record(Proof(plan, "no_attack"), prove.clean, prove.task, model="m", manipulator="r")


def test_a_folder_keeps_to_what_it_was_begun_with(tmp_path: Path) -> None:
    begun = {"seed": 1, "plans": (1, 2)}
    Store(tmp_path, {"seed": 7})  # nothing came of it
    Store(tmp_path, begun).add("a", "proved")
    assert Store(tmp_path, begun).outcomes() == {"a": "proved"}
    with pytest.raises(ConfigError, match="expected the seed that the folder was begun with"):
        Store(tmp_path, begun | {"seed": 2})
    assert Store(tmp_path).outcomes() == {"a": "proved"}
    (tmp_path / SETTINGS).write_text("{")
    with pytest.raises(ConfigError, match="expected JSON"):
        Store(tmp_path, begun)
    (tmp_path / SETTINGS).unlink()  # as older folders are
    assert Store(tmp_path, begun).outcomes() == {"a": "proved"}
