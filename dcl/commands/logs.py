"""More commands that read logs and are done: `dcl explain | validate | convert`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from dcl import bulk
from dcl.bulk import Logs
from dcl.commands.options import (
    BASE,
    Format,
    Injected,
    Model,
    Out,
    Output,
    Paths,
    TopK,
    WithBackend,
)
from dcl.errors import ConfigError, TraceError
from dcl.formats.jsontext import too_deep
from dcl.intake import Tally, list_files, read
from dcl.process import say
from dcl.report.output import open_out
from dcl.report.record import dump
from dcl.trajectory import Example


def explain(
    paths: Paths,
    model: Model = None,
    injected: Injected = False,
    backend: WithBackend = None,
    format: Format = "auto",
    output: Annotated[Output, typer.Option(help="Lines for people, or JSON lines.")] = Output.TABLE,
    out: Out = None,
    top_k: TopK = None,
    words: Annotated[int, typer.Option(min=0, metavar="N", help="Words or signs to show.")] = 8,
    sentences: Annotated[int, typer.Option(min=0, metavar="N", help="Sentences to show.")] = 3,
    like: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|FOLDER",
            help="Labelled logs to show the nearest turn of; repeatable.",
        ),
    ] = None,
) -> None:
    """Show what speaks for each finding: signs, sentences and the way of the fault.

    With --injected words in place of signs; after `dcl fit`, or with --like, the labelled turn that
    is most alike.
    """
    from dcl.artifact import INDEX
    from dcl.cli import load_model
    from dcl.explanation import explain as explain_run
    from dcl.nearest import build_index, load_index
    from dcl.report.explained import explain_lines, explain_record

    attributor = load_model(model, threads=None, injected=injected, backend=backend)
    logs, tally = Logs(list_files(paths), format), Tally()
    file, index = (model or BASE) / INDEX, None
    if like is not None:
        index = build_index(attributor, (example for _, example in read(like, "auto", tally)))
        if not index.rows:
            raise ConfigError("--like: expected logs with labels of agents that speak, found none")
    elif file.is_file():
        index = load_index(file)
    with open_out(out) as stream:
        for _, report in bulk.attribute(attributor, logs.items(), tally):
            found = report.attribution.findings(top_k=top_k)
            told = explain_run(
                attributor, report.trajectory, found, words=words, sentences=sentences, index=index
            )
            if output is Output.TABLE:
                stream.writelines(line + "\n" for line in explain_lines(report, told))
            else:
                stream.write(dump(explain_record(report, told)) + "\n")
    raise typer.Exit(TraceError.exit_code if tally.unreadable else 0)


def validate(
    paths: Paths,
    format: Format = "auto",
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 on warnings.")] = False,
) -> None:
    """Check that logs can be read and that their labels fit them."""
    tally = Tally()
    seen: set[str] = set()
    names: set[str] = set()
    count: Counter[str] = Counter()
    for source, example in read(paths, format, tally, say):
        run = example.trajectory
        problems = list(check_labels(example))
        if run.id in seen:
            problems.append("this id was seen before")
        for problem in problems:
            say(f"warning: {source}: trace {run.id}: {problem}")
        seen.add(run.id)
        names.update(run.agents)
        count["turns"] += len(run.turns)
        count["labelled"] += example.faults is not None
        count["labels"] += len(example.faults or ())
        count["warnings"] += len(problems)
    typer.echo(
        f"traces {tally.traces}, turns {count['turns']}, agents {len(names)}, "
        f"labelled {count['labelled']}, labels {count['labels']}, "
        f"unreadable {tally.unreadable}, warnings {count['warnings']}"
    )
    if tally.unreadable:
        raise typer.Exit(TraceError.exit_code)
    raise typer.Exit(int(strict and count["warnings"] > 0))


def convert(
    paths: Paths,
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Written when whole; .gz and .xz are packed; - prints."),
    ],
    format: Format = "auto",
) -> None:
    """Write logs of any format as native JSONL, with their labels."""
    tally = Tally()
    with open_out(out) as stream:
        for source, example in read(paths, format, tally):
            with tally.refusing(source):
                stream.write(_native_line(example))
        if not tally.traces:
            raise TraceError("", "nothing was written, as no trace could be read")
    raise typer.Exit(TraceError.exit_code if tally.unreadable else 0)


def check_labels(example: Example) -> Iterator[str]:
    """What is wrong with the labels of a run.

    Args:
        example: The run with its labels.

    Returns:
        A sentence for each agent that never speaks and each step that does not exist.
    """
    run = example.trajectory
    for fault in example.faults or ():
        if fault.agent not in run.agents:
            yield f"a label names the agent {fault.agent!r}, who never speaks"
        if fault.step is not None and run.turn_at(fault.step) is None:
            yield f"a label names step {fault.step}, which does not exist"


def _native_line(example: Example) -> str:
    """A run as it is written.

    Raises:
        TraceError: If it holds JSON that is nested too deep to be written.
    """
    try:
        return dump(example.to_dict()) + "\n"
    except RecursionError:
        raise too_deep(f"trace {example.trajectory.id}") from None


def register(app: typer.Typer) -> None:
    """Add the commands to the command line.

    Args:
        app: Takes them.
    """
    for command in (explain, validate, convert):
        app.command()(command)
