"""Records of injected failures: the AEGIS schema, and beside it what makes them proofs.

    records.jsonl   one record a line, readable by `dcl.formats`
    ledger.jsonl    one line for every plan that was tried, and what became of it
    settings.json   what the folder was begun with

The first two only grow. A line counts once its line break is there: whoever opens the store next
cuts off what a killed process left half written, and adds a record at most once, whatever other
processes did meanwhile.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from dcl.errors import ConfigError
from dcl.report.output import open_out
from dcl.splits import split_of
from injection.proof import Attempt, Proof, injection_steps
from injection.session import Run
from injection.tasks import Task

VERSION = 1
"""Version of the fields under `injection`."""

RECORDS, LEDGER, SETTINGS = "records.jsonl", "ledger.jsonl", "settings.json"

LOCATED = "located"
"""Outcome of a natural failure whose decisive step was found."""

GROUP, FAILED = "group-", "failed-"
"""How ids of clean runs begin, and of what a model gave no usable reply for."""


def make_record(
    proof: Proof, clean: Attempt, task: Task, *, model: str, manipulator: str
) -> dict[str, Any]:
    """The record of a proof with outcome `proved` or `benign`.

    Args:
        proof: The proof; its attacked run is there.
        clean: The run without an attack.
        task: The task.
        model: Name of the model that the agents run on.
        manipulator: Name of the manipulator.

    Raises:
        ValueError: If the proof has no run.
    """
    plan, faulty = proof.plan, proof.faulty
    if faulty is None:
        raise ValueError(f"{plan.id}: {proof.outcome} has no run to record")
    name = f"{task.benchmark}_{model}_{plan.system}_{task.id}_{plan.id}"
    attacks = [_attack(proof, faulty, i) for i in range(len(plan.injections))]
    faults = [_label(attack) for attack in attacks if attack["decisive"]]
    failed = proof.outcome == "proved"
    return {
        "id": name,
        "metadata": {
            "framework": plan.system,
            "benchmark": task.benchmark,
            "model": model,
            "num_agents": len({call.agent for call in faulty.run.calls}),
            "num_injected_agents": len(faults),
            "task_type": task.domain,
            "source": "injection",
            "outcome": "failure" if failed else "success",
            "question_hash": task.question_hash,
            "split": split_of(task.question_hash),
            "verified": True,
        },
        "input": {
            "query": task.question,
            "conversation_history": list_turns(faulty.run),
            "final_output": faulty.run.answer,
        },
        "output": {"faulty_agents": faults},
        "ground_truth": {
            "correct_answer": task.answer,
            "injected_agents": [_label(a) for a in attacks if a["mode"] is not None],
            "is_injection_successful": failed,
            "is_normal_sample": not failed,
        },
        "injection": {
            "version": VERSION,
            "plan": plan.id,
            "seed": plan.seed,
            "manipulator": manipulator,
            "attacks": attacks,
            "replays": [replay.to_dict() for replay in proof.replays],
            "minimal_causes": [list(subset) for subset in proof.minimal],
            "verdicts": {
                "clean": clean.verdict.to_dict(),
                "faulty": faulty.verdict.to_dict(),
            },
            "alignment": align(faulty.run, clean.run),
            "prompt_digests": [event.digest for event in faulty.run.events],
            "cost": asdict(proof.cost),
        },
        "clean": {
            "id": f"{task.benchmark}_{model}_{plan.system}_{task.id}_clean",
            "input": {"query": task.question, "conversation_history": list_turns(clean.run)},
            "metadata": {"outcome": "success"},
        },
    }


def align(faulty: Run, clean: Run) -> list[tuple[int, int]]:
    """Pairs of step numbers, from 1, of the same agent's turns in both runs, in order.

    The n-th turn of an agent in one run goes with its n-th in the other; turns without a
    counterpart are left out.
    """
    places = _numbered(clean)
    return sorted((step, places[key]) for key, step in _numbered(faulty).items() if key in places)


def _numbered(run: Run) -> dict[tuple[str, int], int]:
    """Step number of each agent's n-th turn."""
    seen: dict[str, int] = {}
    steps = {}
    for step, event in enumerate(run.events, start=1):
        number = seen.get(event.agent, 0)
        steps[event.agent, number] = step
        seen[event.agent] = number + 1
    return steps


def list_turns(run: Run) -> list[dict[str, Any]]:
    """Turns in the AEGIS schema."""
    return [
        {
            "step": step,
            "agent_name": event.agent,
            "agent_role": event.role,
            "content": event.content,
            "phase": event.phase,
        }
        for step, event in enumerate(run.events, start=1)
    ]


def _attack(proof: Proof, faulty: Attempt, i: int) -> dict[str, Any]:
    """One injection with all that it did."""
    injection, firings = proof.plan.injections[i], faulty.firings[i]
    return {
        **injection.to_dict(),
        "decisive": i in proof.decisive,
        "fired": bool(firings),
        "steps": injection_steps(faulty, i),
        "turns": [asdict(firing) for firing in firings],
    }


def _label(attack: Mapping[str, Any]) -> dict[str, Any]:
    """An attack as the AEGIS schema labels it, with the step of its first turn."""
    return {
        "agent_name": attack["agent"],
        "error_type": attack["mode"],
        "injection_strategy": attack["strategy"],
        "step": attack["steps"][0],
        "decisive": attack["decisive"],
    }


def _ledger_line(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the ledger says about a record, for one that was killed before it could say so."""
    injection = record["injection"]
    if "decisive" in injection:
        return {"id": injection["plan"], "outcome": LOCATED}
    failed = record["ground_truth"]["is_injection_successful"]
    keys = ("agent", "mode", "strategy", "nth")
    return {
        "id": injection["plan"],
        "outcome": "proved" if failed else "benign",
        "faults": [{key: attack[key] for key in keys} for attack in injection["attacks"]],
    }


class Tally(NamedTuple):
    """What a folder holds so far.

    Args:
        plans: Plans by outcome; `no_reply` for those whose model gave no usable reply.
        clean: Clean runs by outcome: `clean_right`, `clean_wrong` or `no_clean_run`.
    """

    plans: Counter[str]
    clean: Counter[str]


def tally(outcomes: Mapping[str, str]) -> Tally:
    """Count outcomes; a failure that a later start made good is none.

    Args:
        outcomes: Outcome by the id of a plan or a group.
    """
    found = Tally(Counter(), Counter())
    for id, outcome in outcomes.items():
        if id.removeprefix(FAILED) in outcomes and id.startswith(FAILED):
            continue
        is_group = id.removeprefix(FAILED).startswith(GROUP)
        (found.clean if is_group else found.plans)[outcome] += 1
    return found


class Store:
    """A folder of records that many processes may fill at once.

    Args:
        folder: Made if it is new.
        settings: What all its records have in common; None adds to any folder.

    Raises:
        ConfigError: If the folder cannot be made, holds lines that are no JSON, or was begun with
            other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in (RECORDS, LEDGER):
                (folder / name).touch()
        except OSError as error:
            raise ConfigError(
                f"{folder}: expected a folder for records, got: {error.strerror}; check --out"
            ) from None
        self._lock = FileLock(folder / "lock")
        self._read = {RECORDS: 0, LEDGER: 0}
        self._done: dict[str, str] = {}
        self._kept: dict[str, dict[str, Any]] = {}
        with self._lock:
            self._refresh()
            if settings is not None:
                self._agree(json.loads(json.dumps(settings)))

    def outcomes(self) -> dict[str, str]:
        """What became of each plan so far, by its id."""
        with self._lock:
            self._refresh()
        return dict(self._done)

    def add(
        self, id: str, outcome: str, record: Mapping[str, Any] | None = None, **notes: Any
    ) -> bool:
        """Add what became of a plan, unless somebody has already.

        Args:
            id: The plan.
            outcome: What became of it.
            record: Its record, if it gave one.
            notes: Further fields of its line in the ledger.

        Returns:
            Whether it was added.
        """
        with self._lock:
            self._refresh()
            if id in self._done:
                return False
            if record is not None:
                self._append(RECORDS, record)
            self._append(LEDGER, {"id": id, "outcome": outcome, **notes})
            self._refresh()
        return True

    def _agree(self, settings: dict[str, Any]) -> None:
        """Note settings where nothing is recorded yet; else compare them with those noted.

        Raises:
            ConfigError: If they differ, or cannot be read or written.
        """
        file = self.folder / SETTINGS
        try:
            begun = json.loads(file.read_bytes())
        except FileNotFoundError:
            begun = settings if self._done else None
        except ValueError as error:
            raise ConfigError(f"{file}: expected JSON: {error}") from None
        if self._done and begun != settings:
            known = begun if isinstance(begun, dict) else {}
            keys = sorted(key for key in settings if settings[key] != known.get(key))
            raise ConfigError(
                f"{self.folder}: expected the {', '.join(keys) or 'options'} that the folder was "
                f"begun with, see {SETTINGS} there; choose another --out"
            )
        if begun != settings:
            with open_out(file) as stream:
                json.dump(settings, stream, indent=1, sort_keys=True)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        """One line in one write."""
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        with (self.folder / name).open("ab") as stream:
            stream.write(line)

    def _refresh(self) -> None:
        """Learn what is new, cut off what is torn, and note records that the ledger has missed."""
        try:
            self._done |= {row["id"]: row["outcome"] for row in self._news(LEDGER)}
            lines = [_ledger_line(row) for row in self._news(RECORDS)]
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.folder}: expected a folder that `run` filled, got lines without {error}; "
                "choose another one"
            ) from None
        self._kept |= {line["id"]: line for line in lines}
        for plan in self._kept.keys() - self._done.keys():
            self._append(LEDGER, self._kept[plan])
            self._done[plan] = self._kept[plan]["outcome"]

    def _news(self, name: str) -> list[dict[str, Any]]:
        """Whole lines since the last look."""
        file = self.folder / name
        with file.open("rb") as stream:
            stream.seek(self._read[name])
            new = stream.read()
        whole = new.rfind(b"\n") + 1
        if whole < len(new):
            os.truncate(file, self._read[name] + whole)
        self._read[name] += whole
        try:
            return [json.loads(text) for text in new[:whole].splitlines()]
        except ValueError as error:
            raise ConfigError(f"{file}: expected JSON on every line: {error}") from None
