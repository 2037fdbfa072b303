"""The command line: `dcl attribute | explain | watch | serve | fit | train | tune | ...`.

Exit codes, the same for every command and every output format:

    0    done
    1    a finding over `--fail-on`, or warnings under `validate --strict`
    2    wrong usage or configuration, or a place that cannot be written
    3    a trace that cannot be read; all others were handled
    4    the model is missing or damaged
    129  hung up, 130 interrupted, 143 terminated: 128 and the number of the signal
    141  the reader of the output went away

2 and 4 end the run at once; 3 comes at the end and wins over 1. Nothing heavy is imported before a
command needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcl import __version__
from dcl.commands import live, logs, model
from dcl.commands.attribute import attribute
from dcl.errors import ConfigError
from dcl.process import Commands, run

if TYPE_CHECKING:
    from dcl.attribution import Attributor
    from dcl.commands.options import Backend

app = typer.Typer(
    cls=Commands,
    help="Which agent failed, how, and at which turn: reads the log of a failed multi-agent run.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(attribute)
for commands in (logs, live, model):
    commands.register(app)


def _print_version(value: bool) -> None:
    """Print the version and leave."""
    if value:
        typer.echo(f"dcl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Which agent failed, how, and at which turn, from the log of a failed multi-agent run."""


def load_model(
    path: Path | None,
    *,
    threads: int | None,
    injected: bool = False,
    backend: Backend | None = None,
) -> Attributor:
    """The model to attribute with; the one seam through which the commands reach it.

    Args:
        path: Model folder; None is the one that ships.
        threads: Turns encoded side by side, > 0; None is every core this process may use.
        injected: As in `dcl.runtime.load`.
        backend: What encodes turns; None is the quickest that fits the model.

    Returns:
        A model that is ready to score.

    Raises:
        ArtifactError: If the folder is missing or damaged.
        ConfigError: If onnxruntime or another part of the installation does not load.
    """
    try:
        from dcl.runtime import load
    except ImportError as error:
        raise ConfigError(f"the installation is incomplete: {error}") from None
    return load(
        path, threads=threads, injected=injected, engine=None if backend is None else backend.engine
    )


def main() -> None:
    """Run the command line; ends the process with one of the documented exit codes."""
    run(app)


if __name__ == "__main__":
    main()
