"""What a folder of records holds, what was tried for it, and whether it can be trusted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dcl.errors import ConfigError
from dcl.formats import read_examples
from injection.probes import probe_records
from injection.records import FAILED, GROUP, LEDGER, RECORDS, Tally, tally
from injection.repair import Share


def summarise(found: Tally, out: Path) -> str:
    """One paragraph about a run."""
    plans, clean = found
    listed = ", ".join(f"{name} {n}" for name, n in plans.most_common())
    runs = f"{clean['clean_right']} of {clean.total()} clean runs are right"
    silent = clean["no_clean_run"]
    runs += f", {silent} without a usable reply" if silent else ""
    head = f"{plans['proved']} proved records of {plans.total()} plans in {out}"
    reasons = [
        row["reason"]
        for row in _rows(out / LEDGER, "id", "outcome")
        if row["id"].startswith(FAILED)
    ]
    why = (
        f"the last time without: {reasons[-1]}" if reasons and (silent or plans["no_reply"]) else ""
    )
    return "\n".join(part for part in (head, listed, runs, why) if part)


def write_report(folder: Path) -> str:
    """The report on a folder as Markdown.

    Args:
        folder: What `collect` or `collect_natural` filled.

    Raises:
        ConfigError: If the folder holds no records.
    """
    if not (folder / RECORDS).is_file():
        raise ConfigError(f"{folder}: expected {RECORDS}; start with `python -m injection run`")
    rows = _rows(folder / LEDGER, "id", "outcome")
    ledger = [row for row in rows if not row["id"].startswith((GROUP, FAILED))]
    plans, clean = tally({row["id"]: row["outcome"] for row in rows})
    records = _rows(folder / RECORDS, "metadata", "output", "injection")
    faulty = [row for row in records if row["metadata"]["outcome"] == "failure"]
    labels = [(row, label) for row in faulty for label in row["output"]["faulty_agents"]]
    injected = "complete" not in clean  # a natural failure has neither a clean run nor an attack
    parts = [
        f"# {len(faulty)} proved failures, {len(records) - len(faulty)} benign rewrites",
        *(
            (
                _table("Clean runs", clean),
                _clean_runs("System", rows, 0),
                _clean_runs("Benchmark", rows, 1),
                _table("Outcomes of plans", plans),
                _success("Mode", ledger, lambda fault: str(fault["mode"])),
                _success("Strategy", ledger, lambda fault: str(fault["strategy"])),
            )
            if injected
            else (_table("Outcomes of runs", plans),)
        ),
        _table("Mode of a label", Counter(str(label["error_type"]) for _, label in labels)),
        _table("System", Counter(row["metadata"]["framework"] for row in faulty)),
        _table("Benchmark", Counter(row["metadata"]["benchmark"] for row in faulty)),
        _table("Split", Counter(row["metadata"]["split"] for row in faulty)),
        _table("Third of the run", Counter(_third(row, label["step"]) for row, label in labels)),
        _table("Turns", Counter(_bucket(row) for row in faulty)),
        _table("Decisive faults", Counter(len(row["output"]["faulty_agents"]) for row in faulty)),
        _table("Faults that did not matter", Counter(_idle(row) for row in faulty)),
        _costs(records),
        _probe_table(folder) if records else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _rows(file: Path, *keys: str) -> list[dict[str, Any]]:
    """Whole lines of a file.

    Args:
        file: Records or ledger of a run.
        keys: What each line has to hold.

    Raises:
        ConfigError: If it cannot be read, or a line is none of a run's.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(f"{file}: expected a file of `run`, got: {problem}") from None
    rows = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        row = _parse(line)
        if row is None or not row.keys() >= set(keys):
            wanted = ", ".join(keys)
            raise ConfigError(f"{file}:{number}: expected a JSON object with {wanted}")
        rows.append(row)
    return rows


def _parse(line: str) -> dict[str, Any] | None:
    """A JSON object; None if a line is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _table(title: str, counts: Mapping[Any, int]) -> str:
    """Counts, largest first; numbers in their order."""
    numeric = all(isinstance(key, int) for key in counts)
    order = sorted(counts) if numeric else sorted(counts, key=lambda key: (-counts[key], key))
    lines = [f"| {key} | {counts[key]} |" for key in order]
    return "\n".join([f"| {title} | n |", "| --- | ---: |", *lines])


def _clean_runs(title: str, ledger: Sequence[Mapping[str, Any]], part: int) -> str:
    """How often a clean run is right, by a part of the name of its group."""
    tried: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for row in ledger:
        if row["id"].startswith(GROUP):
            name = row["group"].split("/")[part]
            tried[name] += 1
            right[name] += row["outcome"] == "clean_right"
    lines = [f"| {name} | {Share(right[name], tried[name])} |" for name in sorted(tried)]
    return "\n".join([f"| {title} | clean runs that are right |", "| --- | --- |", *lines])


def _success(
    title: str, ledger: Sequence[Mapping[str, Any]], key: Callable[[Mapping[str, Any]], str]
) -> str:
    """How often plans with one fault were proved, of those that could be carried out."""
    tried: Counter[str] = Counter()
    proved: Counter[str] = Counter()
    for row in ledger:
        faults: Sequence[Mapping[str, Any]] = row.get("faults") or ()
        if len(faults) == 1 and faults[0]["mode"] and row["outcome"] in ("proved", "still_right"):
            tried[key(faults[0])] += 1
            proved[key(faults[0])] += row["outcome"] == "proved"
    lines = [f"| {name} | {Share(proved[name], tried[name])} |" for name in sorted(tried)]
    return "\n".join([f"| {title}, one fault | broke the run |", "| --- | --- |", *lines])


def _idle(row: Mapping[str, Any]) -> int:
    """Number of attacks of a record that did not matter."""
    return sum(not attack["decisive"] for attack in row["injection"]["attacks"])


def _third(row: Mapping[str, Any], step: int) -> str:
    """First, second or last third of the run in which a step, from 1, is."""
    turns = len(row["input"]["conversation_history"])
    return ("first", "second", "last")[min(2, 3 * (step - 1) // turns)]


def _bucket(row: Mapping[str, Any]) -> str:
    """Length of a run."""
    turns = len(row["input"]["conversation_history"])
    return "1-5" if turns < 6 else "6-10" if turns < 11 else "11-20" if turns < 21 else "over 20"


def _costs(records: Sequence[Mapping[str, Any]]) -> str:
    """What a record took on average, with its replays."""
    if not records:
        return ""
    costs = [row["injection"]["cost"] for row in records]
    means = {key: sum(cost[key] for cost in costs) / len(costs) for key in costs[0]}
    lines = [f"| {key.replace('_', ' ')} | {value:.0f} |" for key, value in means.items()]
    return "\n".join(["| Cost of a record, replays included | mean |", "| --- | ---: |", *lines])


def _probe_table(folder: Path) -> str:
    """What can be guessed without understanding, with warnings."""
    found = probe_records(read_examples(folder / RECORDS))
    if not found.probes:
        return ""
    lines = [
        f"| {p.name} | {Share(p.hits, p.total)} | {100 * p.chance:.1f} % | "
        f"{'WARNING' if p.is_loud else 'fine'} |"
        for p in found.probes
    ]
    table = ["| Probe | finds the attacked turn | chance | |", "| --- | --- | --- | --- |", *lines]
    if found.markers:
        words = ", ".join(f"{word} ({count})" for word, count in found.markers)
        table.append(f"\nWords that nearly always stand in attacked turns: {words}.")
    return "\n".join(table)
