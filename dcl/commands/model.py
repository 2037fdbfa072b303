"""The commands that make and check models: `dcl fit | train | tune | sweep | models`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcl.commands.options import BASE, Format, Model, ModelFolder, check_prob
from dcl.errors import ArtifactError, TraceError, needing
from dcl.intake import Tally, read
from dcl.process import say

if TYPE_CHECKING:
    from dcl.adapting import FitReport

models_app = typer.Typer(help="Look at a model folder.")


def fit(
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE|FOLDER|-...", help="Labelled logs of your system."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the adapted model.")] = Path(
        "adapted"
    ),
    model: Model = None,
    clean: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE|FOLDER", help="Logs of runs that succeeded; repeatable."),
    ] = None,
    false_alarms: Annotated[
        float,
        typer.Option(metavar="P", callback=check_prob, help="Share of --clean runs to flag."),
    ] = 0.1,
    format: Format = "auto",
    seed: Annotated[int, typer.Option(help="Of the folds of the cross-validation.")] = 0,
) -> None:
    """Adapt a model to your system from 15 to 200 labelled logs."""
    from dcl.adapting import adapt

    tally = Tally()
    sound = [example for _, example in read(clean or [], format, tally)]
    failed = sum(example.has_failed for example in sound)
    if failed:
        say(f"warning: --clean: {failed} runs are known to have failed and are left out")
    report = adapt(
        model,
        [example for _, example in read(paths or [], format, tally)],
        out,
        clean=[example.trajectory for example in sound if not example.has_failed],
        share=false_alarms,
        seed=seed,
    )
    for line in describe_fit(report):
        typer.echo(line)
    say(f"written: {out}")
    raise typer.Exit(TraceError.exit_code if tally.unreadable else 0)


def describe_fit(report: FitReport) -> Iterator[str]:
    """What a fit did, in plain lines.

    Args:
        report: Of the fit.
    """
    if report.runs:
        yield f"{report.runs} labelled runs, {report.questions} questions"
        yield "scores in percent on questions that the fit did not see, with 95 % intervals:"
        for level in report.levels:
            before, after, gain = (
                f"{100 * value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
                for value, low, high in (level.before, level.after, level.gain)
            )
            yield (
                f"  {level.name}, {level.runs} runs: before {before}, after {after}, gain {gain}"
            )
    if report.flagged is not None:
        yield f"{report.clean} successful runs, {report.flagged:.0%} of them flagged before"
        yield "thresholds: agent {:.3f}, pair {:.3f}".format(*report.thresholds)
    if not report.parts:
        yield "nothing was better on unseen questions: the original is kept"
    else:
        yield f"changed: {', '.join(report.parts)}"
    if report.parts and report.refused:
        yield f"left as it was, for want of a gain: {', '.join(report.refused)}"


def train(context: typer.Context) -> None:
    """Train a model from --config FILE and any key in it."""
    with needing("train", "training"):
        from dcl.learning.training import main as run
    raise typer.Exit(run(context.args))


def tune(context: typer.Context) -> None:
    """Train the turn encoder of a model from --config FILE and any key in it."""
    with needing("tune", "training an encoder"):
        from dcl.learning.tuning import main as run
    raise typer.Exit(run(context.args))


def sweep(context: typer.Context) -> None:
    """Train many configurations times seeds, and compare them."""
    with needing("sweep", "a sweep"):
        from dcl.learning.sweep import main as run
    raise typer.Exit(run(context.args))


@models_app.command("verify")
def verify_model(folder: ModelFolder = BASE) -> None:
    """Check every file of a model against its manifest."""
    from dcl.artifact import check_listed, read_manifest, verify

    manifest = read_manifest(folder)
    check_listed(folder, manifest)
    problems = verify(folder, manifest)
    for name, problem in problems.items():
        say(f"damaged: {problem}" if problem else f"ok: {name}")
    if any(problems.values()):
        raise ArtifactError(f"{folder}: fetch or export the model again")


@models_app.command("show")
def show_model(folder: ModelFolder = BASE) -> None:
    """Print what the manifest says of a model: versions, scores, files."""
    from dcl.artifact import read_manifest, verify

    manifest = read_manifest(folder)
    say(f"folder: {folder}")
    for key, value in _flatten(manifest):
        say(f"{key}: {value}")
    for name, problem in verify(folder, manifest).items():
        size, digest = manifest["files"][name]["bytes"], manifest["files"][name]["sha256"]
        say(f"{name}: {size} bytes, sha256 {digest}, {problem or 'ok'}")


def register(app: typer.Typer) -> None:
    """Add the commands to the command line.

    Args:
        app: Takes them.
    """
    app.command()(fit)
    for command in (train, tune, sweep):  # --help shows the options of what is run
        app.command(
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(command)
    app.add_typer(models_app, name="models")


def _flatten(manifest: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of nested objects as dotted keys, without the files."""
    for key, value in manifest.items():
        if isinstance(value, Mapping):
            if prefix or key != "files":
                yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
