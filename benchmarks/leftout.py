"""What a network finds in runs of a framework that it never saw, beside floors that never did.

Reads the finished cells of a sweep over `data.left_out`. The floors learn from the same runs as the
networks and are scored on the same left-out ones.

Letters: `N` runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evaluate import learn_floor, place_floor
from benchmarks.metrics import (
    Floats,
    Interval,
    Level,
    Prediction,
    Statistic,
    bootstrap,
    count,
    state_truth,
)
from benchmarks.predictors import RULES, NamePrior, Predictor
from benchmarks.tables import markdown_lines, show_share
from dcl.errors import ConfigError
from dcl.learning.config import DataConfig
from dcl.learning.preparation import select_examples
from dcl.splits import Split
from dcl.trajectory import Example

LEVELS: dict[Level, str] = {"pair": "pair", "error": "mode", "agent": "agent"}
"""Levels of the table, with what a sweep calls them."""
RULED = ("everyone", "every-mode")
"""Rules that stand beside the learned floors."""

Tables = dict[Level, Floats]
"""Hits, false alarms and misses of each run at each level, `(N, 3)`."""


@dataclass(frozen=True, slots=True, eq=False)
class LeftOut:
    """One framework, or all.

    Args:
        name: Of the framework.
        runs: How many.
        seeds: Networks that the scores of the model are means of.
        spread: Standard deviation of its pair score over them; None for one, or several frameworks.
        scores: Micro-F1 by level, by predictor; the model is the first.
        gap: The model minus the word floor, paired, by level.
    """

    name: str
    runs: int
    seeds: int
    spread: float | None
    scores: dict[str, dict[Level, Interval]]
    gap: dict[Level, Interval]


def compare(sweep: Path, cache: Path | None = None, *, resamples: int = 1000) -> list[LeftOut]:
    """One entry a framework, and last all of them together.

    Args:
        sweep: Folder of the sweep.
        cache: Folder that keeps the fitted word floors; None keeps nothing.
        resamples: Of the bootstrap over runs.

    Raises:
        ConfigError: If there is no finished cell with a framework left out, or the data are others.
    """
    found: list[tuple[str, list[Mapping[str, Any]], dict[str, Tables]]] = []
    for names, records in read_cells(sweep).items():
        config = _read_data(records[0]["config"]["data"])
        tables = {"dcl": _pool(records), **score_floors(config, cache)}
        if len({len(table["pair"]) for table in tables.values()}) > 1:
            raise ConfigError(f"{sweep}: expected the runs that its cells were scored on")
        found.append((names, records, tables))
    entries = [_rate(*each, resamples) for each in found]
    if len(found) > 1:
        seeds = min(len(records) for _, records, _ in found)
        merged = {
            name: {
                level: np.concatenate([tables[name][level] for _, _, tables in found])
                for level in LEVELS
            }
            for name in found[0][2]
        }
        entries.append(replace(_rate("all", [], merged, resamples), seeds=seeds))
    return entries


def read_cells(sweep: Path) -> dict[str, list[Mapping[str, Any]]]:
    """Records of finished cells by what they leave out, in order of name and seed.

    Raises:
        ConfigError: If there is none, one is damaged, or cells that leave out the same differ in
            more than their seed.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for file in sorted((sweep / "cells").glob("*.json")):
        try:
            record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            if "left_out" not in record["scores"]:
                continue
            alike = found.setdefault(", ".join(record["config"]["data"]["left_out"]), [])
            differs = alike and _recipe(record) != _recipe(alike[0])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}: expected a cell of dcl sweep: {error!r}") from None
        if differs:
            raise ConfigError(
                f"{file}: expected the configuration of the other cells that leave out the same, "
                "got another; give a folder of one configuration and its seeds"
            )
        alike.append(record)
    if not found:
        raise ConfigError(f"{sweep}: expected finished cells with data.left_out, found none")
    return found


def _recipe(record: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a cell but for what is of this cell alone."""
    return {k: v for k, v in record["config"].items() if k not in ("seed", "out")}


def score_floors(config: DataConfig, cache: Path | None) -> dict[str, Tables]:
    """Hits, false alarms and misses of each floor on the runs that are left out.

    Args:
        config: Data of a cell.
        cache: Folder that keeps the fitted word floor; None keeps nothing.
    """
    parts: dict[Split, list[Example]] = {"train": [], "valid": [], "test": [], "left_out": []}
    for split, example, extra in select_examples(config):
        if example.faults and not extra:
            parts[split].append(example)
    train, valid, left_out = parts["train"], parts["valid"], parts["left_out"]
    files = [Path(path).expanduser() for path in (*config.train, *config.held_out)]
    shares = f"{config.valid_share}-{config.test_share}-{config.limit}"
    kept = None if cache is None else place_floor("tfidf", cache, files, (*config.left_out, shares))
    floors: dict[str, Predictor] = {
        "name-prior": NamePrior(train, valid),
        "tfidf": learn_floor("tfidf", train, valid, kept),
        **{name: RULES[name] for name in RULED},
    }
    truths = [state_truth(example.faults or ()) for example in left_out]
    runs = [replace(example.trajectory, metadata={}) for example in left_out]
    scored = {}
    for name, predict in floors.items():
        guesses = [predict(run) for run in runs]
        scored[name] = {level: _sum(truths, guesses, level) for level in LEVELS}
    return scored


def _sum(truths: Sequence[Prediction], guesses: Sequence[Prediction], level: Level) -> Floats:
    """Hits, false alarms and misses of each run, `(N, 3)`."""
    counts = count(truths, guesses, level)
    return np.stack([part.sum(axis=1) for part in (counts.hit, counts.wrong, counts.missed)], 1)


def _pool(records: Sequence[Mapping[str, Any]]) -> Tables:
    """Means over seeds of what the networks hit and missed."""
    return {
        level: np.mean([record["counts"]["left_out"][key] for record in records], axis=0)
        for level, key in LEVELS.items()
    }


def _read_data(fields: Mapping[str, Any]) -> DataConfig:
    """The data of a cell; JSON has made lists of its tuples."""
    own: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    try:
        return DataConfig(**own)
    except TypeError as error:
        raise ConfigError(f"config.data: expected the keys of this version: {error}") from None


def _rate(
    name: str,
    records: Sequence[Mapping[str, Any]],
    tables: Mapping[str, Tables],
    resamples: int,
) -> LeftOut:
    """Scores of all predictors on one set of runs."""
    runs = len(tables["dcl"]["pair"])
    model, words = tables["dcl"], tables["tfidf"]
    pairs = [record["scores"]["left_out"]["pair"]["micro_f1"] / 100 for record in records]

    def rate(statistic: Statistic) -> Interval:
        return bootstrap(statistic, runs, resamples=resamples)

    return LeftOut(
        name=name,
        runs=runs,
        seeds=len(records),
        spread=float(np.std(pairs, ddof=1)) if len(pairs) > 1 else None,
        scores={
            who: {level: rate(_micro(table[level])) for level in LEVELS}
            for who, table in tables.items()
        },
        gap={level: rate(_minus(model[level], words[level])) for level in LEVELS},
    )


def _micro(table: Floats) -> Statistic:
    """Micro-F1 of `(N, 3)` hits, false alarms and misses as a statistic."""

    def micro(weights: Floats) -> Floats:
        hits, wrong, missed = (weights @ table).T
        f1: Floats = 2 * hits / np.maximum(2 * hits + wrong + missed, 1e-9)
        return f1

    return micro


def _minus(first: Floats, second: Floats) -> Statistic:
    """Difference of two such scores as a statistic."""
    return lambda weights: _micro(first)(weights) - _micro(second)(weights)


def to_markdown(entries: Sequence[LeftOut]) -> str:
    """The table, in percent with 95 % intervals."""
    return "\n".join(markdown_lines(_HEAD, list(_rows(entries)))) + "\n"


_HEAD = ["left out", "runs", "predictor", *(f"{level} µF1" for level in LEVELS), "sd of pair"]


def _rows(entries: Sequence[LeftOut]) -> Iterator[list[str]]:
    """One row a predictor, and one for what the model has over the word floor."""
    for entry in entries:
        for name, scores in entry.scores.items():
            own = name == "dcl"
            spread = f"{100 * entry.spread:.1f}" if own and entry.spread is not None else ""
            who = f"dcl, seeds: {entry.seeds}"
            first = [entry.name, str(entry.runs), who] if own else ["", "", name]
            yield [*first, *(show_share(scores[level]) for level in LEVELS), spread]
        yield ["", "", "dcl minus tfidf", *(show_share(entry.gap[level]) for level in LEVELS), ""]
