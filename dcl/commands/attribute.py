"""`dcl attribute`: to a stream, or to a file that a killed run goes on with; here or on Ray."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcl import __version__, bulk
from dcl.bulk import Logs, Mark
from dcl.commands.options import (
    BASE,
    Backend,
    Engine,
    Format,
    Injected,
    Model,
    Out,
    Output,
    Paths,
    Threads,
    TopK,
    WithBackend,
    check_prob,
)
from dcl.errors import TraceError
from dcl.intake import Tally, list_files
from dcl.process import complain
from dcl.report import Report
from dcl.report.gate import Gate
from dcl.report.output import WRITERS, open_out

if TYPE_CHECKING:
    from dcl.attribution import Attributor

Marked = Iterator[tuple[Mark, Report]]
"""Reports, each with how far the input was handled with it."""
Score = Callable[[Logs, Tally], Marked]
"""Attributes what is left of the input, and counts it."""
Write = Callable[[Marked], None]
"""Puts reports where they belong."""


def attribute(
    paths: Paths,
    model: Model = None,
    format: Format = "auto",
    output: Annotated[
        Output | None, typer.Option(help="How to write the result: table, or jsonl to --resume.")
    ] = None,
    out: Out = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Add JSON lines to --out, after those of a killed run.")
    ] = False,
    engine: Annotated[
        Engine, typer.Option(help="Score here, or on the Ray cluster of RAY_ADDRESS.")
    ] = Engine.LOCAL,
    top_k: TopK = None,
    threshold: Annotated[
        float | None,
        typer.Option(metavar="P", callback=check_prob, help="Declare faults from P on, 0 to 1."),
    ] = None,
    evidence: Annotated[int, typer.Option(min=0, metavar="N", help="Turns to show.")] = 3,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROB|MODE[:PROB]",
            help="Exit with 1 on any fault from PROB on, or on this mode, such as FM-2.5:0.7.",
        ),
    ] = None,
    injected: Injected = False,
    backend: WithBackend = None,
    threads: Threads = None,
) -> None:
    """Say which agent failed, how, and at which turn."""
    from dcl.cli import load_model

    if threshold is not None and top_k is not None:
        raise typer.BadParameter("--top-k ignores thresholds: give it or --threshold, not both")
    if engine is Engine.RAY and "-" in paths:
        raise typer.BadParameter("--engine ray reads files only: write standard input to one")
    gates = [Gate.parse(text) for text in fail_on or ()]
    view: dict[str, Any] = {"threshold": threshold, "top_k": top_k, "evidence": evidence}
    files = list_files(paths)
    tally = Tally()
    with ExitStack() as stack:
        if resume:
            command = {
                **_identify(files, format, model, injected, backend),
                **view,
                "fail_on": fail_on or [],
            }
            done, write = stack.enter_context(_resumed(_resumable(out, output), command, tally))
        else:
            many = len(paths) > 1 or os.path.isdir(paths[0])
            done, write = stack.enter_context(_whole(out, output or Output.TABLE, many))
        load = partial(load_model, model, injected=injected, backend=backend)
        score = stack.enter_context(_engine(engine, load, threads))
        reports = _watch(score(Logs(files, format, done), tally), gates, tally)
        write((mark, replace(report, **view)) for mark, report in reports)
    if tally.failed:
        complain(f"--fail-on: {tally.failed} of {tally.traces} traces")
    raise typer.Exit(TraceError.exit_code if tally.unreadable else min(tally.failed, 1))


@contextmanager
def _whole(out: Path | None, output: Output, many: bool) -> Iterator[tuple[Mark, Write]]:
    """A stream, or a file that appears when it is whole."""
    with open_out(out) as stream:

        def write(reports: Marked) -> None:
            WRITERS[output.value]((report for _, report in reports), stream, many)

        yield Mark(), write


@contextmanager
def _resumed(out: Path, command: dict[str, Any], tally: Tally) -> Iterator[tuple[Mark, Write]]:
    """A file that is gone on with, and what was counted before."""
    from dcl.results import Results

    with Results(out, command) as results:
        done = results.mark
        tally.traces, tally.unreadable = done.traces, done.unreadable
        tally.failed = results.failed
        if done.traces:
            complain(f"{out}: going on after {done.traces} traces, the last {done.run}")
        yield done, lambda reports: bulk.write(reports, results, tally)


def _resumable(out: Path | None, output: Output | None) -> Path:
    """The file that can be gone on with.

    Raises:
        typer.BadParameter: If there is none, or it is not of plain JSON lines.
    """
    if out is None or str(out) == "-":
        raise typer.BadParameter("--resume needs a file to go on with: give --out FILE")
    if output not in (None, Output.JSONL) or out.suffix in (".gz", ".xz"):
        raise typer.BadParameter("--resume writes plain JSON lines only: pack them afterwards")
    return out


def _identify(
    files: Sequence[str | TraceError],
    format: str,
    model: Path | None,
    injected: bool,
    backend: Backend | None,
) -> dict[str, str]:
    """What results depend on besides the options that shape them."""
    from dcl.artifact import read_manifest
    from dcl.engines import choose_engine

    names = [str(file) for file in files]
    manifest = read_manifest(model or BASE)
    return {
        "dcl": __version__,
        "model": f"sha256 {_digest(manifest)}",
        "backend": choose_engine(manifest, None if backend is None else backend.engine),
        "reading": "injected" if injected else "natural",
        "files": f"{len(names)}, sha256 {_digest(names)}",
        "format": format,
    }


def _digest(value: Any) -> str:
    """Sixteen hexadecimal digits that stand for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def _engine(
    engine: Engine, load: Callable[..., Attributor], threads: int | None
) -> Iterator[Score]:
    """What attributes, here or on a cluster."""
    if engine is Engine.LOCAL:
        attributor = load(threads=threads)
        yield lambda logs, tally: bulk.attribute(attributor, logs.items(), tally)
        return
    from dcl.cluster import connect

    cores = threads or 1
    with connect() as cluster:
        yield lambda logs, tally: bulk.attribute_on(
            cluster, partial(load, threads=cores), logs, tally, cores=cores
        )


def _watch(reports: Marked, gates: Sequence[Gate], tally: Tally) -> Marked:
    """The same reports; those over a gate are counted."""
    for mark, report in reports:
        tally.failed += any(gate.holds(report.attribution) for gate in gates)
        yield mark, report
