"""`python -m injection run | offline | report | repair`; exit codes are those of the errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from dcl.errors import ConfigError, DclError

app = typer.Typer(
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
    executor: Annotated[str, typer.Option(help="Where work runs: local.")] = "local",
) -> None:
    """Run systems, inject faults, and keep the failures that are proved."""
    with complain():
        from injection.config import load_config
        from injection.report import summarise
        from injection.run import collect

        if executor != "local":
            raise ConfigError(f"--executor: expected local, got {executor!r}")
        wanted = {"out": out and str(out), "workers": workers, "tasks_per_file": tasks_per_file}
        settings = load_config(config, {k: v for k, v in wanted.items() if v is not None})
        counts = collect(settings)
        typer.echo(summarise(counts, Path(settings.out)))


@contextmanager
def complain() -> Iterator[None]:
    """Turn what may go wrong into one line on stderr and an exit code."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("dcl", "injection"):
            raise
        typer.echo(f'error: {error.name} is missing; run `pip install -e ".[inject]"`', err=True)
        raise typer.Exit(ConfigError.exit_code) from None
    except DclError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None


if __name__ == "__main__":
    app(prog_name="python -m injection")
