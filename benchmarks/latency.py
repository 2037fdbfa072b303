"""What reading a turn and a run costs, ours beside what a user would otherwise pick.

All contenders run in one go on the same real turns and as many threads, each in a process of its
own. They are asked in rounds, one after another, so that what else the machine does strikes all
alike, and ratios are taken within a round. The peak of the machine is measured in each round too.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import dcl
from benchmarks.contenders import CONTENDERS, FROZEN, Setup, version_of
from benchmarks.materials import make_materials
from benchmarks.peak import Meter, Peak
from benchmarks.tables import markdown_lines
from benchmarks.worker import Clock, Worker, WorkerError
from dcl.artifact import open_artifact
from dcl.bag import BagMaker
from dcl.errors import ConfigError
from dcl.formats import read_trajectories
from dcl.learning.turn_encoder import find_source
from dcl.runtime import count_cores, load_bagger

BASELINE = "int8, batches of 8"
"""Contender that ratios are to."""
_LOOKED_AT = 4000  # turns that are looked at to find some of the right size


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyConfig:
    """What to measure.

    Args:
        data: Logs whose turns are used.
        work: Folder for what contenders are made from; what is there is used again.
        contenders: Who takes part, by name.
        model: Folder of the `dcl` model.
        source: Its encoder as sentence-transformers saves it, as `export encoder` takes it.
        llm: Folder of a small language model; without it, there is none.
        threads: Of each contender; > 0.
        rounds: How often all are asked; > 0.
        sizes: Tokens of single turns.
        runs: Turns of whole runs, ascending; the longest gives the tokens a second.
        turns: Single turns of each size a round; > 0.
        clock: Of all times; `cpu` for a machine on which other processes want the same cores.
    """

    data: tuple[Path, ...]
    work: Path
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    model: Path = FROZEN
    source: str = "minilm"
    llm: Path | None = None
    threads: int = 1
    rounds: int = 3
    sizes: tuple[int, ...] = (32, 128, 256, 512)
    runs: tuple[int, ...] = (10, 100)
    turns: int = 20
    clock: Clock = "wall"

    def __post_init__(self) -> None:
        """Refuse contenders that are unknown."""
        for name in self.contenders:
            if name not in CONTENDERS:
                raise ConfigError(f"contender: expected {', '.join(CONTENDERS)}; got {name!r}")


@dataclass(slots=True)
class Row:
    """What was measured of one contender.

    Args:
        name: Contender.
        version: Of its library.
        cold_s: From the start of its process to the first turn that was read.
        turn_s: Seconds of single turns, by size.
        run_s: Seconds of whole runs, by number of turns.
        mb: Most memory that was resident.
        tokens_per_s: Tokens of the longest run a second, one number a round.
        ratio: Of these to the baseline's, median over rounds; None without a baseline.
        share: Of the measured peak of its arithmetic, 0 to 1, median over rounds; None where it
            is not the encoder that is run.
    """

    name: str
    version: str
    cold_s: float
    turn_s: dict[int, list[float]] = field(default_factory=dict)
    run_s: dict[int, list[float]] = field(default_factory=dict)
    mb: float = 0.0
    tokens_per_s: list[float] = field(default_factory=list)
    ratio: float | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """What all contenders were asked at the same time.

    Args:
        peak: What one core could do.
        tokens: Tokens of the longest run.
        work: Operations of the encoder's products on it; a multiply-add is two.
    """

    peak: Peak
    tokens: int
    work: float


@dataclass(frozen=True, slots=True)
class LatencyReport:
    """All rows, and where they were measured.

    Args:
        machine: What decides speed: processor, cores, threads, tokens a turn.
        rounds: One a round.
        rows: Contenders in their order.
        absent: Why others took no part.
    """

    machine: dict[str, Any]
    rounds: list[Round]
    rows: list[Row]
    absent: dict[str, str]


class Pool:
    """Real turns by size, each given a number so that no text is read twice.

    Args:
        bagger: Its tokenizer counts.
        data: Logs.
        tokens: Most tokens that are read of a turn.

    Raises:
        ConfigError: If there are no turns.
    """

    def __init__(self, bagger: BagMaker, data: Sequence[Path], tokens: int) -> None:
        texts = [text for path in data for text in _texts(path)]
        if not texts:
            raise ConfigError("--data: expected logs with turns, found none")
        self._bagger = bagger
        self._most = tokens
        self._texts = texts
        self._lengths = np.array([len(ids) for ids in bagger.tokenize(texts)])
        self._numbers = count()

    def of_size(self, tokens: int, number: int) -> list[str]:
        """Turns of about so many tokens.

        Raises:
            ConfigError: If fewer than five are there.
        """
        close = np.flatnonzero(np.abs(self._lengths - tokens) <= max(tokens / 10, 2))
        if len(close) < 5:
            raise ConfigError(
                f"--data: expected five turns of about {tokens} tokens, found {len(close)}"
            )
        return [self._fresh(int(i)) for i in np.resize(close, number)]

    def any(self, number: int) -> list[str]:
        """Turns of all sizes as they come, others every time."""
        start = next(self._numbers) * number
        return [self._fresh((start + i) % len(self._texts)) for i in range(number)]

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Tokens that are read of each, with special ones."""
        return [min(len(ids) + 2, self._most) for ids in self._bagger.tokenize(texts)]

    def _fresh(self, place: int) -> str:
        """A turn that no cache has seen."""
        return f"{next(self._numbers)} {self._texts[place]}"


def measure(config: LatencyConfig) -> LatencyReport:
    """Measure all contenders.

    Args:
        config: What to measure.

    Raises:
        ConfigError: If turns of a size are missing.
    """
    artifact = open_artifact(config.model)
    setup = make_setup(config)
    pool = Pool(load_bagger(artifact), config.data, setup.tokens)
    absent = make_materials(setup, config.data, config.contenders)
    meter = Meter(config.work)
    workers: list[Worker] = []
    try:
        present = [name for name in config.contenders if name not in absent]
        workers.extend(Worker(name, setup, clock=config.clock) for name in present)
        absent |= {worker.name: worker.error for worker in workers if worker.error}
        rows = {
            worker: Row(worker.name, version_of(CONTENDERS[worker.name].library), worker.cold_s)
            for worker in workers
            if not worker.error
        }
        rounds = [
            _measure_round(config, pool, rows, absent, meter, setup) for _ in range(config.rounds)
        ]
    finally:
        for worker in workers:
            worker.close()
    # Processor time is that of all threads, so speeds are then those of one.
    cores = config.threads if config.clock == "wall" else 1
    compare(list(rows.values()), rounds, cores)
    # Another model's encoder may do other work than that of the source.
    if config.model.resolve() != FROZEN.resolve():
        for row in rows.values():
            row.share = None if row.name == "dcl" else row.share
    machine = {
        **describe_machine(),
        "threads": config.threads,
        "tokens a turn": setup.tokens,
        "clock": config.clock,
    }
    return LatencyReport(machine, rounds, list(rows.values()), absent)


def make_setup(config: LatencyConfig) -> Setup:
    """What contenders are made from; its folder is there afterwards.

    Args:
        config: What to measure.

    Raises:
        ArtifactError: If the model is missing or damaged.
        ConfigError: If the source of its encoder is not found.
    """
    window, source = open_artifact(config.model).window, find_source(config.source)
    tokens = window.head + window.tail + 2
    # What was made from another source, window or version must not be measured in place of this.
    weights = sha256("".join(source.weights.values()).encode()).hexdigest()[:8]
    work = config.work / f"{weights}-{tokens}-{dcl.__version__}"
    work.mkdir(parents=True, exist_ok=True)
    return Setup(
        threads=config.threads,
        tokens=tokens,
        model=str(config.model),
        source=str(source.folder),
        work=str(work),
        llm=str(config.llm or ""),
    )


def count_operations(source: Path, lengths: Sequence[int]) -> tuple[float, float]:
    """Operations of a transformer encoder: in products with weights, and in attention.

    A multiply-add is two.

    Args:
        source: Folder with its `config.json`, of the family of BERT.
        lengths: Tokens of each turn.
    """
    config = json.loads((source / "config.json").read_bytes())
    width, inner = config["hidden_size"], config["intermediate_size"]
    layers = 2.0 * config["num_hidden_layers"]
    weights = 4 * width**2 + 2 * width * inner
    attention = sum(2 * width * n**2 for n in lengths)
    return layers * weights * sum(lengths), layers * attention


def describe_machine() -> dict[str, Any]:
    """What decides speed, as far as the system tells."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    name = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*: (.+)$", text, re.MULTILINE)
    wanted = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "avx512_bf16")
    return {
        "processor": name[1] if name else platform.processor() or platform.machine(),
        "instructions": " ".join(f for f in wanted if flags and f in flags[1].split()),
        "cores": count_cores(),
        "load": round(os.getloadavg()[0], 2),
    }


def _measure_round(
    config: LatencyConfig,
    pool: Pool,
    rows: dict[Worker, Row],
    absent: dict[str, str],
    meter: Meter,
    setup: Setup,
) -> Round:
    """Ask all contenders for the same turns once; who fails takes no further part."""
    turns = {size: pool.of_size(size, config.turns) for size in config.sizes}
    runs = {number: pool.any(number) for number in config.runs}
    longest = pool.lengths(runs[max(runs)])
    for worker, row in list(rows.items()):
        problem = _ask(worker, row, turns, runs, sum(longest))
        if problem:
            absent[row.name] = problem
            del rows[worker]
    work = sum(count_operations(Path(setup.source), longest))
    return Round(meter(), sum(longest), work)


def _ask(
    worker: Worker,
    row: Row,
    turns: Mapping[int, Sequence[str]],
    runs: Mapping[int, Sequence[str]],
    tokens: int,
) -> str:
    """Fill in the row of one contender.

    Args:
        worker: Who is asked.
        row: Takes the seconds.
        turns: Single turns by their size.
        runs: Whole runs by their turns.
        tokens: Of the longest run.

    Returns:
        Why the contender failed; empty if it did not.
    """
    few = CONTENDERS[row.name].calls
    try:
        for size, texts in turns.items():
            seconds, row.mb = worker.ask({"turns": texts[: few or None]})
            row.turn_s.setdefault(size, []).extend(seconds)
        for number, texts in runs.items():
            if few and number == max(runs):
                continue  # would take minutes, and tokens a second mean something else
            (seconds_of_run,), row.mb = worker.ask({"run": texts})
            row.run_s.setdefault(number, []).append(seconds_of_run)
            if number == max(runs):
                row.tokens_per_s.append(tokens / seconds_of_run)
    except WorkerError as error:
        return str(error)
    return ""


def compare(rows: Sequence[Row], rounds: Sequence[Round], cores: int) -> None:
    """Fill in ratios and shares, round by round."""
    base = next((row.tokens_per_s for row in rows if row.name == BASELINE), None)
    for row in rows:
        if not row.tokens_per_s:
            continue
        if base is not None:
            row.ratio = median(a / b for a, b in zip(row.tokens_per_s, base, strict=True))
        arithmetic = CONTENDERS[row.name].arithmetic
        if arithmetic:
            row.share = median(
                speed * r.work / r.tokens / (cores * 1e9 * getattr(r.peak, arithmetic))
                for speed, r in zip(row.tokens_per_s, rounds, strict=True)
            )


def _texts(path: Path) -> Iterator[str]:
    """The first turns of a log."""
    turns = (turn.content for run in read_trajectories(path) for turn in run.turns)
    return islice(turns, _LOOKED_AT)


def to_json(report: LatencyReport) -> dict[str, Any]:
    """All that was measured, seconds as they were."""
    return asdict(report)


def to_markdown(report: LatencyReport) -> str:
    """Tables for people: milliseconds as median, 95th and 99th percentile."""
    peaks = [r.peak for r in report.rounds]
    fp32, int8 = (median(getattr(peak, kind) for peak in peaks) for kind in ("fp32", "int8"))
    machine = ", ".join(f"{key} {value}" for key, value in report.machine.items())
    lines = [
        f"Machine: {machine}; measured peak of one core {fp32:.0f} GFLOP/s fp32, "
        f"{int8:.0f} GOP/s int8.",
        "",
        *_speed_table(report.rows),
        "",
        *_turn_table(report.rows),
        "",
        *(f"Not measured: {name} ({why})." for name, why in report.absent.items()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _speed_table(rows: Sequence[Row]) -> list[str]:
    """Runs, throughput, start and memory."""
    runs = sorted({number for row in rows for number in row.run_s})
    head = ["contender", "gives", *(f"run of {n} (ms)" for n in runs)]
    head += ["tokens/s", "ratio", "of peak", "cold start (s)", "MB"]
    body = [
        [
            f"{row.name} {row.version}".strip(),
            CONTENDERS[row.name].gives,
            *(_middle(row.run_s.get(number)) for number in runs),
            f"{median(row.tokens_per_s):.0f}" if row.tokens_per_s else "",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.share is None else f"{row.share:.0%}",
            f"{row.cold_s:.2f}",
            f"{row.mb:.0f}",
        ]
        for row in rows
    ]
    return markdown_lines(head, body)


def _turn_table(rows: Sequence[Row]) -> list[str]:
    """Single turns by size."""
    sizes = sorted({size for row in rows for size in row.turn_s})
    head = ["a new turn, ms p50 / p95 / p99", *(f"{size} tokens" for size in sizes)]
    body = [[row.name, *(_percentiles(row.turn_s.get(size)) for size in sizes)] for row in rows]
    return markdown_lines(head, body)


def _middle(seconds: Sequence[float] | None) -> str:
    """Median in milliseconds."""
    return f"{1e3 * median(seconds):.1f}" if seconds else ""


def _percentiles(seconds: Sequence[float] | None) -> str:
    """Three percentiles in milliseconds."""
    if not seconds:
        return ""
    return " / ".join(f"{1e3 * value:.1f}" for value in np.percentile(seconds, [50, 95, 99]))
