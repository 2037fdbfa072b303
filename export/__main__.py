"""The command line: `python -m export encoder | static | convert | renew | reread`.

Exit codes are those of `dcl`: 2 for wrong usage, 3 for a run that cannot be read, 4 for a model
that is missing, damaged, or did not pass a gate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from dcl.artifact import ENCODER, HEAD, read_manifest
from dcl.errors import ConfigError, DclError
from dcl.formats import read_examples, read_trajectories

app = typer.Typer(
    help="From torch to ONNX, with a parity gate at the end.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
def encoder(
    source: Annotated[
        str, typer.Option(help="A model of the hub, a folder, or `minilm` from its package.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    head: Annotated[int, typer.Option(help="Tokens read from the start of a turn.")] = 94,
    tail: Annotated[int, typer.Option(help="Tokens read from the end of a longer turn.")] = 32,
    layers: Annotated[
        str,
        typer.Option(metavar="I,I,...", help="Transformer layers to keep; all if not given."),
    ] = "",
    int8: Annotated[bool, typer.Option(help="Quantise the weights.")] = True,
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(help="Logs whose turns fix the scales: static int8; may be repeated."),
    ] = None,
    keep_fp32: Annotated[
        bool, typer.Option("--keep-fp32", help="Write encoder_fp32.onnx, too.")
    ] = False,
) -> None:
    """Make an encoder folder of a sentence-transformers model."""
    with complain():
        from export.encoder import export_encoder
        from export.qdq import draw_turns

        logs = chain.from_iterable(map(read_trajectories, calibrate or ()))
        export_encoder(
            source,
            out,
            head=head,
            tail=tail,
            layers=parse_layers(layers),
            int8=int8,
            turns=draw_turns(logs) if calibrate else None,
            keep_fp32=keep_fp32,
        )
        _report(out, ENCODER)


@app.command()
def static(
    config: Annotated[
        Path, typer.Option(help="Training configuration whose logs teach; no label is looked at.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    teacher: Annotated[
        Path | None,
        typer.Option(help="Folder of the encoder to learn from; that of base if not given."),
    ] = None,
    width: Annotated[int, typer.Option(help="Width of the vectors.")] = 64,
) -> None:
    """Make an encoder that is a table lookup, taught by another one."""
    with complain():
        from dcl.learning.config import read_config
        from export.static import export_static

        read = read_config(["--config", str(config)])
        export_static(read, out, teacher=teacher, width=width)
        _report(out, ENCODER)


@app.command()
def convert(
    trained: Annotated[Path, typer.Argument(help="Folder that `dcl train` wrote.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Labelled runs for the check of the int8 encoder; may be repeated."),
    ] = None,
    fp32_encoder: Annotated[
        Path | None, typer.Option(help="The encoder before quantising, for that check.")
    ] = None,
    natural: Annotated[
        list[Path] | None,
        typer.Option(
            help="Records of `python -m injection` to learn the reading of natural failures from; "
            "may be repeated."
        ),
    ] = None,
    card: Annotated[Path | None, typer.Option(help="Markdown for the model card.")] = None,
    tolerance: Annotated[float, typer.Option(help="Most by which a logit may differ.")] = 1e-3,
    points: Annotated[float, typer.Option(help="Most points of pair F1 that int8 may cost.")] = 0.5,
) -> None:
    """Make the model that ships of a trained one."""
    with complain():
        from export import convert as converting

        converting.convert(
            trained,
            out,
            examples=chain.from_iterable(map(read_examples, data)) if data else None,
            fp32_encoder=fp32_encoder,
            natural=[read_examples(file) for file in natural or ()],
            card=card,
            tolerance=tolerance,
            points=points,
        )
        _report(out, HEAD)


@app.command()
def renew(
    model: Annotated[Path, typer.Argument(help="Folder that `convert` wrote.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    data: Annotated[list[Path], typer.Option(help="Labelled runs; may be repeated.")],
    source: Annotated[
        str, typer.Option(help="Where the encoder of the model is from, as `encoder` takes it.")
    ] = "minilm",
    layers: Annotated[
        str, typer.Option(metavar="I,I,...", help="Its transformer layers; all if not given.")
    ] = "",
    static: Annotated[
        bool, typer.Option("--static", help="Write static int8, which runs on any engine.")
    ] = False,
    points: Annotated[
        float, typer.Option(help="Most points of pair F1 that the new encoder may cost.")
    ] = 0.5,
) -> None:
    """Export the encoder of a model again, for a newer graph or for another engine."""
    with complain():
        from export.renew import renew

        examples = chain.from_iterable(map(read_examples, data))
        renew(
            model,
            out,
            source=source,
            layers=parse_layers(layers),
            examples=examples,
            static=static,
            points=points,
        )
        _report(out, ENCODER)


@app.command()
def reread(
    model: Annotated[Path, typer.Argument(help="Folder that `convert` wrote.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    natural: Annotated[
        list[Path],
        typer.Option(help="Records to learn from, as `convert` takes them; may be repeated."),
    ],
    card: Annotated[Path | None, typer.Option(help="Markdown for the model card.")] = None,
) -> None:
    """Learn the reading of natural failures of a model anew."""
    with complain():
        from export import reread as rereading

        rereading.reread(model, out, [read_examples(file) for file in natural], card=card)
        _report(out, HEAD)


def parse_layers(text: str) -> tuple[int, ...]:
    """Positions of layers from text such as `0,2,5`.

    Raises:
        ConfigError: If an entry is no whole number.
    """
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"--layers: expected numbers such as 0,2,5, got {text!r}") from None


@contextmanager
def complain() -> Iterator[None]:
    """Turn what may go wrong into one line on stderr and an exit code."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("dcl", "export"):
            raise
        typer.echo(f'error: {error.name} is missing; run `pip install -e ".[export]"`', err=True)
        raise typer.Exit(ConfigError.exit_code) from None
    except DclError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None


def _report(out: Path, graph: str) -> None:
    """Say what was written and what the gates measured."""
    size = (out / graph).stat().st_size / 1e6
    measured = [
        f"{gate} {name} {value:.3g}"
        for gate, found in read_manifest(out)["parity"].items()
        for name, value in found.items()
        if not isinstance(value, Sequence)
    ]
    typer.echo(f"wrote {out}: {graph} {size:.1f} MB; {', '.join(measured)}")


if __name__ == "__main__":
    app(prog_name="python -m export")
