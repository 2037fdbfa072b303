"""Labelled runs to evaluate on: read, split by question, given modes, given other names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dcl.errors import ConfigError
from dcl.formats import read_examples
from dcl.splits import group_of, split_of
from dcl.trajectory import Example, expect_object, expect_str, parse_mode

Names = Literal["kept", "permuted", "replaced"]
Part = Literal["all", "train", "valid", "test"]


def load_examples(paths: Iterable[Path], split: Part = "all") -> list[Example]:
    """Labelled runs with at least one fault whose question belongs to a split."""
    return [
        example
        for path in paths
        for example in read_examples(path)
        if example.faults and split in ("all", split_of(group_of(example)))
    ]


def add_modes(examples: Iterable[Example], file: Path) -> list[Example]:
    """Put a mode on the one fault of every run of Who&When.

    Args:
        examples: Runs; those of other origin are left as they are.
        file: JSON object with the code under `whowhen_ag_N` or `whowhen_hc_N`, `N` the number of
            the raw file.

    Raises:
        ConfigError: If the file is no such object or lacks a run.
    """
    try:
        table = expect_object(json.loads(file.read_bytes()), str(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--modes: {file}: expected a JSON object: {error}") from None
    return [
        _with_mode(example, table, file) if example.origin == "whowhen" else example
        for example in examples
    ]


def _with_mode(example: Example, table: Mapping[str, Any], file: Path) -> Example:
    """One run of Who&When with its mode."""
    metadata = example.trajectory.metadata
    # Both halves count their files from 1; this key stands in hand-crafted ones only.
    half = "hc" if "is_corrected" in metadata else "ag"
    key = f"whowhen_{half}_{metadata.get('file')}"
    if key not in table:
        raise ConfigError(f"--modes: {file}: expected the key {key}, found none")
    row = expect_object(table[key], f"{file}: {key}")
    mode = parse_mode(expect_str(row, "mode", f"{file}: {key}"), f"{file}: {key}.mode")
    return replace(
        example, faults=tuple(replace(fault, mode=mode) for fault in example.faults or ())
    )


def rename(examples: Iterable[Example], names: Names, seed: int = 0) -> list[Example]:
    """Copies of the runs with other names of speakers, in turns and labels alike.

    Words inside turns are left as they are, and so are labels of agents who never speak.

    Args:
        examples: Runs with labels.
        names: `permuted` deals the names of each run out anew; `replaced` gives every agent a name
            that occurs nowhere else; `kept` changes nothing.
        seed: Decides the permutations together with the id of the run.
    """
    return [_renamed(example, names, seed) for example in examples]


def _renamed(example: Example, names: Names, seed: int) -> Example:
    """One run with other names."""
    if names == "kept":
        return example
    run = example.trajectory
    text = f"{seed}:{run.id}".encode("utf-8", "replace")
    digest = hashlib.blake2b(text, digest_size=8).hexdigest()
    rng = np.random.default_rng(int(digest, 16))
    order = rng.permutation(len(run.agents))
    if names == "permuted":
        fresh = [run.agents[i] for i in order]
    else:
        fresh = [f"unit-{digest[:6]}-{i}" for i in order]
    new = dict(zip(run.agents, fresh, strict=True))
    turns = tuple(replace(turn, agent=new[turn.agent]) for turn in run.turns)
    faults = tuple(replace(f, agent=new.get(f.agent, f.agent)) for f in example.faults or ())
    return replace(example, trajectory=replace(run, turns=turns), faults=faults, clean=None)


def digest_of(paths: Iterable[Path]) -> str:
    """sha256 over the names and contents of all files, hexadecimal."""
    digest = hashlib.sha256()
    for path in paths:
        for file in _files(path):
            digest.update(file.name.encode("utf-8", "replace"))
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    """The file, or all files below a folder in a fixed order."""
    if path.is_dir():
        yield from sorted(p for p in path.rglob("*") if p.is_file())
    elif path.is_file():
        yield path
