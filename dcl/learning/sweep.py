"""`dcl sweep`: many configurations times seeds, prepared once, killed and resumed at will.

A sweep is a folder. `prepared/` holds the items that cells share, `cells/` one JSON file for each
finished cell, `work/` the checkpoints of cells that run, `locks/` who runs what. Processes, on this
machine or on others that see the folder, take the next cell that is neither finished nor locked; a
lock goes with its process, so nothing has to be cleaned up after a kill.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from filelock import FileLock, Timeout
from jsonargparse import ArgumentError, ArgumentParser
from numpy.typing import NDArray
from rich.console import Console

from dcl.artifact import ENCODER, EncoderSource, hash_file, open_encoder
from dcl.cluster import connect
from dcl.errors import ConfigError
from dcl.files import whole
from dcl.learning.comparison import measure, write_results
from dcl.learning.config import DataConfig, TrainConfig, read_config
from dcl.learning.data import Item
from dcl.learning.plots import draw_results
from dcl.learning.preparation import fit_wide, prepare, read_definitions
from dcl.learning.prepared import load_items, save_items
from dcl.learning.search import SearchConfig, Trials
from dcl.learning.training import close_agents, fit_members, hash_data
from dcl.runtime import count_cores, load_bagger
from dcl.splits import Split

Layer = Any
"""A YAML file next to the sweep's, keys with values, or a list of these; later ones win."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """What to train: cells, or a search, times seeds."""

    base: Layer
    """Configuration that every cell starts from."""
    set: dict[str, Any] = field(default_factory=dict)
    """Keys laid over the base in every cell, such as `epochs` or `model.width`."""
    cells: dict[str, Layer] = field(default_factory=lambda: {"base": {}})
    """Name of each cell to what differs in it."""
    grid: dict[str, list[Any]] = field(default_factory=dict)
    """Keys to values; every cell is run with every combination."""
    search: SearchConfig | None = None
    """Draw configurations in place of cells and grid."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Each cell is run with each."""
    against: str | tuple[str, ...] = ()
    """Cells that others are compared with, one or several: each cell with the one whose name its
    own begins with, and every other with the first of them; none stands for the first cell."""

    def __post_init__(self) -> None:
        """Refuse a sweep without anything to run."""
        if not self.seeds or not self.cells or not all(self.grid.values()):
            raise ConfigError("sweep: expected at least one seed, one cell and one value a key")
        if self.search and (self.grid or set(self.cells) != {"base"}):
            raise ConfigError("sweep: expected a search, or cells and a grid, got both")


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration of a sweep with one seed.

    Args:
        name: Name of the configuration.
        config: What is trained.
        id: Name of its files: name, seed, and a digest of configuration and data.
    """

    name: str
    config: TrainConfig
    id: str


class Sweep:
    """The cells of a sweep and the folder that they are run in.

    Args:
        file: YAML with the fields of `SweepConfig`.
        out: Folder of the sweep; made if it is new.

    Raises:
        ConfigError: If the file or any configuration in it is wrong.
    """

    def __init__(self, file: Path, out: Path) -> None:
        self.file = file
        self.config = read_sweep(file)
        self.out = out.expanduser()
        self.cells: tuple[Cell, ...] = tuple(
            cell for name, layers in self._variants() for cell in self.make_cells(name, layers)
        )
        if len({cell.id for cell in self.cells}) < len(self.cells):
            raise ConfigError(f"{file}: expected cells that differ in name or values")
        names = list(dict.fromkeys(cell.name for cell in self.cells))
        given = self.config.against
        self.against = ((given,) if isinstance(given, str) else given) if given else (*names[:1],)
        for name in self.against:
            if names and name not in names:
                raise ConfigError(f"{file}: against: expected the name of a cell, got {name!r}")
        try:
            for name in ("cells", "locks", "prepared", "work"):
                (self.out / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.out}: expected a place to work in: {error}") from None

    def make_cells(self, name: str, layers: Sequence[Layer]) -> list[Cell]:
        """The cells of one configuration, one a seed.

        Args:
            name: Name of the configuration.
            layers: What differs from the base.

        Raises:
            ConfigError: If a key or a value is wrong.
        """
        merged = merge(self.file.parent, self.config.base, self.config.set, *layers)
        try:
            config = read_config({"out": str(self.out), **merged})
        except ConfigError as error:
            raise ConfigError(f"{self.file}: cell {name!r}: {error}") from None
        cells = []
        for seed in self.config.seeds:
            seeded = replace(config, seed=seed)
            digest = digest_of(
                {**asdict(seeded), "out": "", "threads": 0}, stamp(seeded.data, seeded.encoder)
            )
            slug = re.sub(r"[^\w.=+-]+", "_", name)
            cells.append(Cell(name, seeded, f"{slug}-seed{seed}-{digest}"))
        return cells

    def _variants(self) -> Iterator[tuple[str, list[Layer]]]:
        """Name and layers of every configuration; none for a search."""
        if self.config.search:
            return
        for name, layer in self.config.cells.items():
            for values in itertools.product(*self.config.grid.values()):
                chosen = dict(zip(self.config.grid, values, strict=True))
                yield name_cell(name, chosen), [layer, chosen]

    def _open_search(self, search: SearchConfig) -> Trials:
        """The trials of this search on this data.

        Its name stands for all that decides what a trial scores and how the next one is drawn, so
        that one with another `set`, other ranges or other data draws trials of its own; only their
        number may be raised.
        """
        cells = [cell.id for cell in self.make_cells("search", [])]
        name = digest_of({**asdict(search), "trials": 0}, cells)
        return Trials(search, self.out, name=name, seed=self.config.seeds[0])

    def _make_trial(self, values: Mapping[str, Any]) -> list[Cell]:
        """The cells of a trial, one a seed."""
        return self.make_cells(f"trial-{digest_of(values)}", [values])

    def run(self, console: Console) -> None:
        """Run every cell that is neither finished nor running elsewhere.

        Args:
            console: Told of each finished cell.
        """
        if self.config.search:
            for trial in self._open_search(self.config.search):
                if is_orphan():
                    return
                records = [self.run_cell(cell, console) for cell in self._make_trial(trial.values)]
                trial.finish([record["scores"]["valid"]["pair"]["micro_f1"] for record in records])
            return
        for cell in self.cells:
            if is_orphan():
                return
            with suppress(Timeout):  # another process is at it
                self.run_cell(cell, console, wait=False)

    def run_cell(self, cell: Cell, console: Console, *, wait: bool = True) -> dict[str, Any]:
        """Train and measure one cell, or read what an earlier run found.

        Args:
            cell: The cell.
            console: Told of it if it is run.
            wait: Wait for a process that is at it already.

        Returns:
            The record, as `dcl.learning.comparison.measure` gives it, with name, seed and
            configuration.

        Raises:
            Timeout: If another process is at it and `wait` is not set.
        """
        file = self.out / "cells" / f"{cell.id}.json"
        with FileLock(self.out / "locks" / f"{cell.id}.lock", blocking=wait):
            if not file.exists():
                record = self._train(cell)
                with whole(file) as part:
                    part.write_text(json.dumps(record))
                pair = record["scores"]["valid"]["pair"]["micro_f1"]
                console.print(
                    f"{cell.name} seed {cell.config.seed}: valid pair F1 {pair:.2f}, "
                    f"{record['seconds']:.0f} s"
                )
        shutil.rmtree(self.out / "work" / cell.id, ignore_errors=True)
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def _train(self, cell: Cell) -> dict[str, Any]:
        """Train and measure one cell."""
        items, definitions = prepare_once(cell.config, self.out / "prepared")
        torch.set_num_threads(cell.config.threads or count_cores())
        started = time.monotonic()
        config = close_agents(cell.config, items)
        work = self.out / "work" / cell.id
        model = fit_members(config, items, work, definitions if config.intent else None, quiet=True)
        return {
            "cell": cell.name,
            "seed": config.seed,
            "config": asdict(cell.config),
            "seconds": time.monotonic() - started,
            **measure(model, items, work),
        }

    def finished(self) -> list[dict[str, Any]]:
        """Records of all finished cells of this sweep, in order of cell or trial, and seed."""
        cells = self.cells
        if self.config.search:
            drawn = self._open_search(self.config.search).drawn()
            cells = tuple(cell for values in drawn for cell in self._make_trial(values))
        files = dict.fromkeys(self.out / "cells" / f"{cell.id}.json" for cell in cells)
        return [json.loads(file.read_text()) for file in files if file.exists()]

    def report(self) -> list[Path]:
        """Write tables and plots of all finished cells.

        Returns:
            The files, none if nothing is finished.
        """
        records = self.finished()
        if not records:
            return []
        against = self.against or (best_trial(records),)
        with FileLock(self.out / "locks" / "report.lock"):
            return [
                *write_results(records, against, self.out),
                *draw_results(records, against, self.out),
            ]


def read_sweep(file: Path) -> SweepConfig:
    """A sweep from its YAML file.

    Raises:
        ConfigError: If the file cannot be read, or a key or a value is wrong.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(SweepConfig, as_group=False)
    found = read_yaml(file)
    unknown = found.keys() - {key.name for key in fields(SweepConfig)}
    if unknown:  # the parser overlooks a key under which nothing stands
        raise ConfigError(f"{file}: unknown key {min(unknown)!r}")
    try:
        parsed = parser.parse_object(found)
        return SweepConfig(**vars(parser.instantiate(parsed)))
    except (ArgumentError, ValueError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from None


def read_yaml(file: Path) -> dict[str, Any]:
    """The keys of a YAML file.

    Raises:
        ConfigError: If it cannot be read, or holds no keys.
    """
    try:
        found: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: expected a YAML file: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected keys with values")
    return {str(key): value for key, value in found.items()}


def merge(place: Path, *layers: Layer) -> dict[str, Any]:
    """Nested keys of all layers; where two have the same key, the later one wins.

    Args:
        place: Folder that file names are relative to.
        layers: File names, keys with values, or lists of these; a dotted key stands for nested
            ones.

    Raises:
        ConfigError: If a layer is anything else, or a file cannot be read.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        if isinstance(layer, str):
            layer = read_yaml(place / layer)
        elif isinstance(layer, (list, tuple)):
            layer = merge(place, *layer)
        if not isinstance(layer, Mapping):
            raise ConfigError(f"expected a file name, keys or a list of these, got {layer!r}")
        for key, value in layer.items():
            *parents, last = str(key).split(".")
            inner = merged
            for parent in parents:
                inner = inner.setdefault(parent, {})
            old = inner.get(last)
            both = isinstance(old, dict) and isinstance(value, Mapping)
            inner[last] = merge(place, old, value) if both else value
    return merged


def name_cell(name: str, chosen: Mapping[str, Any]) -> str:
    """The name of a cell with the values that a grid gives it."""
    if not chosen:
        return name
    shown = {
        key.rpartition(".")[2]: "+".join(map(str, value)) if isinstance(value, list) else value
        for key, value in chosen.items()
    }
    return ", ".join([*([] if name == "base" else [name]), *(f"{k}={v}" for k, v in shown.items())])


def prepare_once(
    config: TrainConfig, folder: Path
) -> tuple[dict[Split, list[Item]], NDArray[np.float32]]:
    """Items with wide logits, and the definitions; the first process to ask for them makes them.

    Args:
        config: Data, wide half and the width of the step target are read.
        folder: Keeps what is prepared, by a digest of all that it depends on.

    Returns:
        Items of all splits, and `(M, E)` vectors of the definitions.
    """
    reads = {
        "data": {**asdict(config.data), "cache": "", "repeat": 1},
        "sigma": config.loss.sigma,
        "twins": config.loss.use_twins,
        # What has a default is added where it differs, so that older folders are still found.
        "wide": [
            config.wide_strength,
            config.folds,
            *([config.wide_rows] if config.wide_rows else []),
            *([] if config.wide_bigrams else ["single"]),
            *([] if config.wide_idf else ["unweighted"]),
            *([f"contrast {config.wide_contrast}"] if config.wide_contrast else []),
        ],
        "width": config.model.vector_width,
    }
    place = folder / digest_of(reads, stamp(config.data, config.encoder))
    with FileLock(folder / f"{place.name}.lock"):
        if not place.exists():
            torch.set_num_threads(count_cores())
            source = open_source(config.encoder)
            work = folder / f"{place.name}.work"
            work.mkdir(exist_ok=True)
            np.save(work / "definitions.npy", read_definitions(source, count_cores()))
            items = prepare(replace(config, threads=0), source)
            fit_wide(config, items, load_bagger(source).vocabulary, work)
            save_items(items, work / "items")
            for file in work.glob("wide-*.npz"):
                file.unlink()
            os.replace(work, place)
    return load_items(place / "items"), np.load(place / "definitions.npy")


@cache
def stamp(data: DataConfig, encoder: str | None) -> str:
    """A digest of the files that a run reads: examples and encoder."""
    source = open_source(encoder)
    return digest_of(hash_data(data), hash_file(source.path / ENCODER))


def open_source(encoder: str | None) -> EncoderSource:
    """The encoder that a configuration names."""
    return open_encoder(None if encoder is None else Path(encoder).expanduser())


def digest_of(*values: Any) -> str:
    """Twelve hexadecimal digits that stand for these values."""
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def best_trial(records: Sequence[Mapping[str, Any]]) -> str:
    """Name of the cell with the best mean pair F1 on validation."""
    found: dict[str, list[float]] = {}
    for record in records:
        pair = record["scores"]["valid"]["pair"]["micro_f1"]
        found.setdefault(record["cell"], []).append(pair)
    return max(found, key=lambda name: float(np.mean(found[name])))


def is_orphan() -> bool:
    """Whether this is a worker whose sweep was killed; it then stops after its cell."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


def work_on(file: Path, out: Path) -> None:
    """What each worker process does: run cells until none is left."""
    # The trainer says for each cell which devices it sees, and that a run of one step is short.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    Sweep(file, out).run(Console(stderr=True))


def run_sweep(
    file: Path,
    out: Path,
    *,
    workers: int | None = None,
    executor: Literal["local", "ray"] = "local",
) -> list[Path]:
    """Run a sweep, or go on with one, and write what came out.

    Args:
        file: YAML with the fields of `SweepConfig`.
        out: Folder of the sweep.
        workers: Processes that run cells side by side, > 0; None is one on this machine, and one
            a core on a cluster.
        executor: On this machine, or on a Ray cluster, all of whose machines see the folder.

    Returns:
        Tables and plots.

    Raises:
        ConfigError: If a configuration is wrong, or a worker failed; if Ray is not installed, or
            the cluster cannot be joined.
    """
    sweep = Sweep(file, out)  # so that a mistake shows before anything runs
    if executor == "ray":
        with connect(echo=True) as cluster:
            crew = workers or cluster.slots()
            cluster.map(work_on, repeat(file, crew), repeat(out, crew), workers=crew)
    else:
        _run_here(file, out, workers or 1)
    return sweep.report()


def _run_here(file: Path, out: Path, workers: int) -> None:
    """Run cells in processes of this machine.

    Raises:
        ConfigError: If a configuration is wrong, or a worker failed.
    """
    if workers == 1:
        work_on(file, out)
    else:
        context = multiprocessing.get_context("spawn")
        crew = [context.Process(target=work_on, args=(file, out)) for _ in range(workers)]
        for worker in crew:
            worker.start()
        for worker in crew:
            worker.join()
        failed = sum(worker.exitcode != 0 for worker in crew)
        if failed:
            raise ConfigError(
                f"{out}: {failed} of {workers} workers failed, for the reasons above; "
                "the same command goes on with what is left"
            )


def main(arguments: Sequence[str]) -> int:
    """Command line of `dcl sweep`.

    Args:
        arguments: What follows `dcl sweep`.

    Returns:
        Exit code 0; everything else raises.

    Raises:
        ConfigError: If an option or a configuration is wrong, or a worker failed.
    """
    parser = ArgumentParser(
        prog="dcl sweep", description="Train configurations times seeds.", exit_on_error=False
    )
    parser.add_argument("file", type=str, help="YAML that names base, cells and seeds.")
    parser.add_argument("--out", type=str, required=True, help="Folder of the sweep.")
    parser.add_argument(
        "--workers",
        type=int | None,
        default=None,
        help="Cells side by side; without it, one, or one a core of a cluster.",
    )
    parser.add_argument(
        "--executor",
        type=Literal["local", "ray"],
        default="local",
        help="Where cells run: here, or on the Ray cluster of RAY_ADDRESS.",
    )
    try:
        parsed = parser.parse_args(list(arguments))
    except ArgumentError as error:
        raise ConfigError(" ".join(str(error).split())) from None
    if parsed.workers is not None and parsed.workers < 1:
        raise ConfigError(f"--workers: expected at least 1, got {parsed.workers}")
    written = run_sweep(
        Path(parsed.file), Path(parsed.out), workers=parsed.workers, executor=parsed.executor
    )
    for file in written:
        Console().print(f"wrote {file}", soft_wrap=True)
    return 0
