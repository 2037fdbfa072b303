"""`python -m injection COMMAND`; errors are one line, exit codes are those of the errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from dcl.errors import ConfigError
from dcl.process import Commands
from dcl.process import run as run_app
from dcl.report.output import open_out

app = typer.Typer(
    cls=Commands,
    help="Labelled failures of multi-agent systems, proved by replay.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def injection() -> None:
    """Labelled failures of multi-agent systems, proved by replay."""


@app.command()
def run(
    config: Annotated[Path, typer.Option(help="YAML with the options of a run.")],
    out: Annotated[Path | None, typer.Option(help="Replaces the folder in the file.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Replaces workers.")] = None,
    tasks_per_file: Annotated[
        int | None, typer.Option(min=1, help="Replaces tasks_per_file.")
    ] = None,
    executor: Annotated[
        str, typer.Option(help="Where work runs: local, or ray for a cluster.")
    ] = "local",
) -> None:
    """Run systems, inject faults, and keep the failures that are proved."""
    with needs_extra():
        from injection.config import load_config
        from injection.report import summarise
        from injection.run import RunConfig, collect
        from injection.spread import spread_ray

        if executor not in ("local", "ray"):
            raise ConfigError(f"--executor: expected local or ray, got {executor!r}")
        wanted = {"out": out and str(out), "workers": workers, "tasks_per_file": tasks_per_file}
        settings = load_config(config, drop_none(wanted), RunConfig)
        counts = collect(settings, spread_ray if executor == "ray" else None)
        typer.echo(summarise(counts, Path(settings.out)))


@app.command()
def natural(
    config: Annotated[Path, typer.Option(help="YAML with the options of a run.")],
    out: Annotated[Path | None, typer.Option(help="Replaces the folder in the file.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Replaces workers.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Replaces seeds.")] = None,
) -> None:
    """Run systems as they are, and find the step that decided each failure by replay."""
    with needs_extra():
        from injection.config import load_config
        from injection.natural import NaturalConfig, collect_natural

        wanted = drop_none({"out": out and str(out), "workers": workers, "seeds": seeds})
        settings = load_config(config, wanted, NaturalConfig)
        counts = collect_natural(settings)
        typer.echo(f"{counts['located']} failures of {counts.total()} runs in {settings.out}")
        typer.echo(", ".join(f"{name} {n}" for name, n in counts.most_common()))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder that `run` or `natural` filled.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write; standard output if not given.")
    ] = None,
) -> None:
    """Count what is there, and probe it for labels that can be guessed."""
    with needs_extra():
        from injection.report import write_report

        text = write_report(folder)
        with open_out(out) as stream:
            stream.write(text)


@app.command()
def offline(
    logs: Annotated[list[Path], typer.Argument(help="Logs in any format that dcl reads.")],
    out: Annotated[Path, typer.Option(help="JSON lines to write.")],
    per_run: Annotated[int, typer.Option(min=1, help="Faulty copies of each run.")] = 2,
    seed: Annotated[int, typer.Option(help="Of turns and wording.")] = 1,
    every: Annotated[
        bool, typer.Option("--every", help="Take runs that are not known to have succeeded, too.")
    ] = False,
) -> None:
    """Make faulty copies of successful logs; nothing is run again, labels say verified: false."""
    with needs_extra():
        from injection.logs import inject_logs

        made = inject_logs(logs, out, per_run=per_run, seed=seed, every=every)
        modes = ", ".join(f"{code} {n}" for code, n in sorted(made.modes.items()))
        typer.echo(f"{made.modes.total()} faulty copies of {made.runs} runs in {out}\n{modes}")
        typer.echo(f"{made.refused} attempts that no turn took")


@app.command()
def repair(
    config: Annotated[Path, typer.Option(help="YAML with the options of a run.")],
    model: Annotated[
        Path | None, typer.Option(help="Attribution model; the one that ships if not given.")
    ] = None,
    tasks_per_file: Annotated[
        int | None, typer.Option(min=1, help="Replaces tasks_per_file.")
    ] = None,
) -> None:
    """Hand attributions of failed runs back as hints, and count successes before and after."""
    with needs_extra():
        import dcl
        from injection.config import load_config
        from injection.repair import repair as repair_groups
        from injection.run import RunConfig, list_groups, minds_of

        wanted = drop_none({"tasks_per_file": tasks_per_file})
        settings = load_config(config, wanted, RunConfig)
        agents, _, judge = minds_of(settings)
        result = repair_groups(
            list_groups(settings), agents, dcl.load(model), judge=judge, seed=settings.seed
        )
        typer.echo(f"before                        {result.before}")
        typer.echo(f"hint to the blamed agent      {result.after}")
        typer.echo(f"same hint to a random agent   {result.control}")
        if result.lost:
            typer.echo(f"without a usable reply        {result.lost}")


def drop_none(options: dict[str, Any]) -> dict[str, Any]:
    """Options that were given."""
    return {name: value for name, value in options.items() if value is not None}


@contextmanager
def needs_extra() -> Iterator[None]:
    """Say what to install where a package is missing.

    Raises:
        ConfigError: If one is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("dcl", "injection"):
            raise
        raise ConfigError(f'{error.name} is missing; run `pip install -e ".[inject]"`') from None


if __name__ == "__main__":
    run_app(app, "python -m injection")
