"""`python -m benchmarks evaluate | latency | turn-cost | ladder | soak | ...`: scores and costs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.evaluate import EvaluateConfig, evaluate
from benchmarks.runs import Names
from benchmarks.tables import to_json, to_markdown
from dcl.errors import DclError, needing
from dcl.report.output import open_out
from dcl.shipped import find_model

app = typer.Typer(add_completion=False, no_args_is_help=True)


class Split(str, Enum):
    """Choices of `--split`."""

    ALL = "all"
    TRAIN = "train"
    VALID = "valid"
    TEST = "test"


class Output(str, Enum):
    """Choices of `--output`."""

    MARKDOWN = "markdown"
    JSON = "json"


@app.callback()
def benchmarks() -> None:
    """Score predictors on labelled runs."""


@app.command("evaluate")
def evaluate_command(
    data: Annotated[list[Path], typer.Option(help="File or folder of labelled runs; repeatable.")],
    predictor: Annotated[
        list[str], typer.Option(help="Name of a predictor, or all; repeatable.")
    ] = ["all"],  # noqa: B006
    model: Annotated[
        Path | None,
        typer.Option(parser=find_model, metavar="NAME|DIR", help="Model; base if not given."),
    ] = None,
    split: Annotated[Split, typer.Option(help="Which questions to evaluate on.")] = Split.ALL,
    train: Annotated[
        list[Path] | None, typer.Option(help="Runs that the floors learn from; repeatable.")
    ] = None,
    permute_names: Annotated[
        bool, typer.Option("--permute-names", help="Add a table with names permuted in each run.")
    ] = False,
    rename_agents: Annotated[
        bool, typer.Option("--rename-agents", help="Add a table with names never seen.")
    ] = False,
    single_fault: Annotated[
        bool | None,
        typer.Option(
            "--single-fault/--several",
            help="One fault is known to exist; if not given, it is for Who&When.",
        ),
    ] = None,
    injected: Annotated[
        bool | None,
        typer.Option(
            "--injected/--natural",
            help="How the model reads logs; if not given, as injected faults for AEGIS. To be "
            "given where only some runs are from there.",
        ),
    ] = None,
    modes: Annotated[
        Path | None, typer.Option(help="Modes of Who&When runs by file number.")
    ] = None,
    output: Annotated[Output, typer.Option(help="Form of the report.")] = Output.MARKDOWN,
    out: Annotated[
        Path | None, typer.Option(help="File to write; standard output if not given.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder that keeps fitted floors for the next time.")
    ] = None,
    resamples: Annotated[int, typer.Option(min=1, help="Resamples of the bootstrap.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of names and resampling.")] = 0,
) -> None:
    """Score the model and the floors on the same labelled runs."""
    names: list[Names] = ["kept"]
    names += ["permuted"] if permute_names else []
    names += ["replaced"] if rename_agents else []
    config = EvaluateConfig(
        data=tuple(data),
        predictors=tuple(predictor),
        model=model,
        split=split.value,
        train=tuple(train or ()),
        names=tuple(names),
        single_fault=single_fault,
        injected=injected,
        modes=modes,
        cache=cache,
        resamples=resamples,
        seed=seed,
    )
    with _errors():
        report = evaluate(config)
        text = (
            to_markdown(report)
            if output is Output.MARKDOWN
            else json.dumps(to_json(report), indent=2) + "\n"
        )
        if out is None:
            typer.echo(text, nl=False)
        else:
            with open_out(out) as stream:
                stream.write(text)


@app.command("average")
def average_command(
    first: Annotated[Path, typer.Argument(help="Report of evaluate --output json on one set.")],
    second: Annotated[Path, typer.Argument(help="The same on the other set.")],
) -> None:
    """The mean of the twelve F1 scores of two reports, as the Aegis paper ranks by."""
    from benchmarks.average import read_means
    from benchmarks.average import to_markdown as to_table

    with _errors():
        typer.echo(to_table(read_means(first), read_means(second)), nl=False)


@app.command("reproduce")
def reproduce_command(
    page: Annotated[Path, typer.Argument(help="Markdown.")] = Path("docs/results.md"),
    section: Annotated[
        list[str] | None, typer.Option(help="Part of a heading to look under; repeatable.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--everything", help="Run what trains and exports as well: hours.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Put the fresh numbers into the page.")
    ] = False,
) -> None:
    """Run the commands of a page of results; exit code 1 if one fails or a score is elsewhere.

    Elsewhere is outside of its interval, more than two deviations over seeds off, or not printed.
    """
    from benchmarks.reproduce import describe, reproduce

    agrees = True
    with _errors():
        for found in reproduce(page, sections=section or (), everything=everything, write=write):
            typer.echo(describe(found))
            agrees = agrees and found.holds
    raise typer.Exit(0 if agrees else 1)


@app.command("left-out")
def left_out_command(
    sweep: Annotated[Path, typer.Argument(help="Folder of a dcl sweep over data.left_out.")],
    cache: Annotated[
        Path | None, typer.Option(help="Folder that keeps the fitted word floors.")
    ] = None,
    resamples: Annotated[int, typer.Option(min=1, help="Resamples of the bootstrap.")] = 1000,
) -> None:
    """Score networks on the framework that each never saw, beside floors that never did."""
    with _errors(), needing("sweep", "left-out"):
        from benchmarks.leftout import compare
        from benchmarks.leftout import to_markdown as to_table

        typer.echo(to_table(compare(sweep, cache, resamples=resamples)), nl=False)


class Seen(str, Enum):
    """Choices of `--split` where the manifest of a model can decide."""

    UNSEEN = "unseen"
    ALL = "all"
    TRAIN = "train"
    VALID = "valid"
    TEST = "test"


@app.command("alarms")
def alarms_command(
    data: Annotated[
        list[Path],
        typer.Option(
            help="Runs that are known to have failed or not, or records with their clean runs; "
            "repeatable, each is rated for itself."
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option(parser=find_model, metavar="NAME|DIR", help="Model; base if not given."),
    ] = None,
    split: Annotated[
        Seen,
        typer.Option(
            help="Which questions; unseen: of a file that the network was trained on those of "
            "validation and test, of any other all."
        ),
    ] = Seen.UNSEEN,
    natural: Annotated[
        list[Path] | None,
        typer.Option(
            help="What the reading of natural failures was learned from, as export was given it; "
            "repeatable; runs drawn from it are left out."
        ),
    ] = None,
    detection: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of failed runs that must alarm.")
    ] = 0.8,
    resamples: Annotated[int, typer.Option(min=1, help="Resamples of the bootstrap.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the resampling.")] = 0,
) -> None:
    """Alarms on runs that went well, where a stated share of failed runs alarms."""
    from benchmarks.alarms import AlarmsConfig, measure_alarms
    from benchmarks.alarms import to_markdown as to_table

    config = AlarmsConfig(
        data=tuple(data),
        model=model,
        split=split.value,
        natural=tuple(natural or ()),
        detection=detection,
        resamples=resamples,
        seed=seed,
    )
    with _errors():
        typer.echo(to_table(measure_alarms(config), detection), nl=False)


@app.command("soak")
def soak_command(
    minutes: Annotated[float, typer.Option(min=0.01, help="How long.")] = 30.0,
    runs: Annotated[int, typer.Option(min=1, help="Runs that are open at the same time.")] = 2000,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Log whose runs are played; repeatable; the example if not given."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(parser=find_model, metavar="NAME|DIR", help="Model; base if not given."),
    ] = None,
    queue: Annotated[int, typer.Option(min=1, help="Turns that may wait.")] = 1000,
    compare: Annotated[int, typer.Option(min=0, help="Runs to attribute offline too.")] = 500,
    seed: Annotated[int, typer.Option(help="Of the order of turns.")] = 0,
) -> None:
    """Put the monitor under load for a long time; exit code 1 if it is not sound."""
    from benchmarks.soak import SoakConfig, soak, to_text
    from dcl.runtime import load

    logs = tuple(data or [Path("examples/parse_duration.json")])
    config = SoakConfig(
        minutes=minutes, runs=runs, data=logs, queue=queue, compare=compare, seed=seed
    )
    with _errors():
        report = soak(config, lambda: load(model, threads=1))
    typer.echo(to_text(report), nl=False)
    raise typer.Exit(0 if report.is_sound else 1)


@app.command("turn-cost")
def turn_cost_command(
    data: Annotated[list[Path], typer.Option(help="Log whose turns are used; repeatable.")],
    length: Annotated[
        list[int] | None, typer.Option(min=2, help="Turns of the run; repeatable.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=8, help="Size of the turns.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="New turns measured a length.")] = 30,
    model: Annotated[
        Path | None,
        typer.Option(parser=find_model, metavar="NAME|DIR", help="Model; base if not given."),
    ] = None,
) -> None:
    """Time one new turn beside one encoder call, at several lengths of the run."""
    from benchmarks.turncost import measure, to_markdown
    from dcl.runtime import load

    lengths = length or [10, 20, 100, 500, 2000]
    with _errors():
        costs = measure(
            load(model, threads=1), data, lengths=lengths, tokens=tokens, repeats=repeats
        )
        typer.echo(to_markdown(list(costs)), nl=False)


class Clock(str, Enum):
    """Choices of `--clock`."""

    WALL = "wall"
    CPU = "cpu"


@app.command("latency")
def latency_command(
    data: Annotated[list[Path], typer.Option(help="Log whose turns are used; repeatable.")],
    work: Annotated[Path, typer.Option(help="Folder that keeps what others are made from.")],
    contender: Annotated[
        list[str] | None, typer.Option(help="Who takes part; repeatable; all if not given.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            parser=find_model,
            metavar="NAME|DIR",
            help="Model; if not given, benchmarks/models/frozen, whose encoder all others run.",
        ),
    ] = None,
    source: Annotated[
        str, typer.Option(help="Its encoder before export, as `export encoder` takes it.")
    ] = "minilm",
    llm: Annotated[
        Path | None, typer.Option(help="Folder of a small language model that judges, too.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of each contender.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="How often all are asked.")] = 3,
    turns: Annotated[int, typer.Option(min=1, help="Single turns of each size a round.")] = 20,
    growth: Annotated[
        bool, typer.Option(help="Show how cost grows, too, as the command of that name does.")
    ] = True,
    clock: Annotated[
        Clock, typer.Option(help="cpu where other processes want the same cores.")
    ] = Clock.WALL,
    out: Annotated[Path | None, typer.Option(help="File for all that was measured, JSON.")] = None,
) -> None:
    """Time turns and runs beside what else reads turns, and hold it against the machine's peak."""
    from benchmarks.contenders import CONTENDERS, FROZEN
    from benchmarks.latency import LatencyConfig, measure, to_json
    from benchmarks.latency import to_markdown as to_table

    with _errors():
        config = LatencyConfig(
            data=tuple(data),
            work=work,
            contenders=tuple(contender or CONTENDERS),
            model=model or FROZEN,
            source=source,
            llm=llm,
            threads=threads,
            rounds=rounds,
            turns=turns,
            clock=clock.value,
        )
        report = measure(config)
        if out is not None:
            with open_out(out) as stream:
                stream.write(json.dumps(to_json(report), indent=2) + "\n")
        typer.echo(to_table(report), nl=False)
    if growth:
        typer.echo()
        growth_command(data, model=model)


@app.command("breakdown")
def breakdown_command(
    data: Annotated[
        list[Path], typer.Option(help="Log whose turns fix the scales of static int8; repeatable.")
    ],
    work: Annotated[Path, typer.Option(help="Folder that keeps the graphs, as of latency.")],
    tokens: Annotated[int, typer.Option(min=1, help="Of the turn.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Calls of each graph.")] = 60,
) -> None:
    """Show where the time of one turn goes, and how near it comes to the machine's peak."""
    from benchmarks.breakdown import break_down, list_graphs
    from benchmarks.breakdown import to_markdown as to_table
    from benchmarks.latency import LatencyConfig, make_setup
    from benchmarks.materials import make_encoders

    with _errors():
        setup = make_setup(LatencyConfig(data=tuple(data), work=work))
        make_encoders(setup, data)
        rows = break_down(list_graphs(setup), Path(setup.source), tokens=tokens, repeats=repeats)
        typer.echo(to_table(rows), nl=False)


@app.command("growth")
def growth_command(
    data: Annotated[list[Path], typer.Option(help="Log whose runs are used; repeatable.")],
    model: Annotated[
        Path | None,
        typer.Option(parser=find_model, metavar="NAME|DIR", help="Model; base if not given."),
    ] = None,
    open_runs: Annotated[
        list[int] | None, typer.Option(min=1, help="Runs open at a time; repeatable.")
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(min=2, help="Turns of a run; repeatable.")
    ] = None,
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="Threads; repeatable; 1 to all if not given.")
    ] = None,
) -> None:
    """Show how cost grows with the turns of a run, with open runs and with threads."""
    from benchmarks.growth import LENGTHS, OPEN_RUNS, GrowthConfig, grow
    from benchmarks.growth import to_markdown as to_table
    from dcl.runtime import count_cores, load

    with _errors():
        config = GrowthConfig(
            data=tuple(data),
            lengths=tuple(length or LENGTHS),
            open_runs=tuple(open_runs or OPEN_RUNS),
            threads=tuple(threads or range(1, count_cores() + 1)),
        )
        growth = grow(config, lambda threads: load(model, threads=threads))
        typer.echo(to_table(growth), nl=False)


@app.command("ladder")
def ladder_command(
    faults: Annotated[
        list[Path], typer.Option(help="Runs with several faults; test questions are scored.")
    ],
    steps: Annotated[
        list[Path], typer.Option(help="Runs with one fault and a labelled step; repeatable.")
    ],
    train: Annotated[list[Path], typer.Option(help="Runs that the floor learns from; repeatable.")],
    model: Annotated[
        list[str], typer.Option(help="NAME, or NAME=DIR; repeatable, dearest first.")
    ] = ["base"],  # noqa: B006
    cache: Annotated[
        Path | None, typer.Option(help="Folder that keeps fitted floors for the next time.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="New turns that are timed.")] = 100,
    resamples: Annotated[int, typer.Option(min=1, help="Resamples of the bootstrap.")] = 1000,
    plot: Annotated[Path | None, typer.Option(help="File to draw into: .svg or .png.")] = None,
) -> None:
    """What each model costs a turn and on disk, beside what it finds."""
    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise typer.BadParameter(f"--plot: expected a name in .svg or .png, got {str(plot)!r}")
    with _errors(), needing("sweep", "the plot of the ladder"):
        from benchmarks.ladder import LadderConfig, climb, draw
        from benchmarks.ladder import to_markdown as to_table

    pairs = [each.partition("=") for each in model]
    config = LadderConfig(
        models={name: find_model(folder or name) for name, _, folder in pairs},
        faults=tuple(faults),
        steps=tuple(steps),
        train=tuple(train),
        cache=cache,
        repeats=repeats,
        resamples=resamples,
    )
    with _errors():
        rungs = list(climb(config))
        typer.echo(to_table(rungs), nl=False)
        if plot is not None:
            draw(rungs, plot)


@app.command("cascade")
def cascade_command(
    data: Annotated[
        list[Path],
        typer.Option(help="Labelled runs with validation and test questions; repeatable."),
    ],
    cheap: Annotated[str, typer.Option(help="Model that sees every run.")] = "lite",
    dear: Annotated[str, typer.Option(help="Model that is asked.")] = "base",
    resamples: Annotated[int, typer.Option(min=1, help="Resamples of the bootstrap.")] = 1000,
) -> None:
    """Let a cheap model decide, and ask a dear one only where the cheap one is unsure."""
    from benchmarks.cascade import CascadeConfig, measure
    from benchmarks.cascade import to_markdown as to_table

    config = CascadeConfig(
        data=tuple(data), cheap=find_model(cheap), dear=find_model(dear), resamples=resamples
    )
    with _errors():
        typer.echo(to_table(measure(config)), nl=False)


@app.command("fewshot")
def fewshot_command(
    data: Annotated[list[Path], typer.Option(help="File or folder of labelled runs; repeatable.")],
    model: Annotated[
        Path | None,
        typer.Option(parser=find_model, metavar="NAME|DIR", help="Model; base if not given."),
    ] = None,
    size: Annotated[
        list[int] | None,
        typer.Option(min=10, help="Runs to fit on; repeatable; 15, 30, 60 and 100 if not given."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Draws of each size.")] = 10,
    cache: Annotated[
        Path | None, typer.Option(help="Folder that keeps what the network says of the runs.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> None:
    """Fit on a few labelled runs of one system and score on all others."""
    from benchmarks.fewshot import FewshotConfig, compare_sizes
    from benchmarks.fewshot import to_markdown as to_table

    config = FewshotConfig(
        data=tuple(data),
        model=model,
        sizes=tuple(size or (15, 30, 60, 100)),
        repeats=repeats,
        cache=cache,
        seed=seed,
    )
    with _errors():
        typer.echo(to_table(*compare_sizes(config)), nl=False)


@app.command("reliability")
def reliability_command(
    data: Annotated[list[Path], typer.Option(help="Runs with labelled steps; repeatable.")],
    model: Annotated[
        Path | None,
        typer.Option(parser=find_model, metavar="NAME|DIR", help="Model; base if not given."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Splits into halves.")] = 50,
    cache: Annotated[
        Path | None, typer.Option(help="Folder that keeps what the network says of the runs.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the splits.")] = 0,
) -> None:
    """Measure the coverage of step sets and the precision of verdicts that stand.

    Sets and limits are those that the model carries, and some that are fitted on half of the runs.
    """
    from benchmarks.fewshot import FewshotConfig
    from benchmarks.reliability import measure
    from benchmarks.reliability import to_markdown as to_table

    config = FewshotConfig(data=tuple(data), model=model, repeats=repeats, cache=cache, seed=seed)
    with _errors():
        typer.echo(to_table(measure(config)), nl=False)


@app.command("deletion")
def deletion_command(
    data: Annotated[list[Path], typer.Option(help="File or folder of labelled runs; repeatable.")],
    model: Annotated[
        Path | None,
        typer.Option(parser=find_model, metavar="NAME|DIR", help="Model; base if not given."),
    ] = None,
    split: Annotated[Split, typer.Option(help="Which questions.")] = Split.ALL,
    limit: Annotated[int, typer.Option(min=1, help="Runs at most.")] = 100,
    repeats: Annotated[int, typer.Option(min=1, help="Random deletions of each kind.")] = 3,
    seed: Annotated[int, typer.Option(help="Of what is deleted at random.")] = 0,
) -> None:
    """Take shown evidence away and compare with taking as much at random."""
    from benchmarks.deletion import DeletionConfig, delete
    from benchmarks.deletion import to_markdown as to_table

    config = DeletionConfig(
        data=tuple(data),
        model=model,
        split=split.value,
        limit=limit,
        repeats=repeats,
        seed=seed,
    )
    with _errors():
        typer.echo(to_table(*delete(config)), nl=False)


@contextmanager
def _errors() -> Iterator[None]:
    """What goes wrong as one line and an exit code."""
    try:
        yield
    except (DclError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(getattr(error, "exit_code", 2)) from None


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
