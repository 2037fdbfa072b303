"""The command line: `dcl attribute | validate | convert | models | train | sweep`.

Exit codes, the same for every command and every output format:

    0    done
    1    a finding over `--fail-on`, or warnings under `validate --strict`
    2    wrong usage or configuration, or a place that cannot be written
    3    a trace that cannot be read; all others were handled
    4    the model is missing or damaged
    130  interrupted
    141  the reader of the output went away

2 and 4 end the run at once; 3 comes at the end and wins over 1. Nothing heavy is imported before a
command needs it.
"""

from __future__ import annotations

import io
import math
import os
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from dcl import __version__
from dcl.errors import ArtifactError, ConfigError, DclError, TraceError
from dcl.formats import FORMATS, scan
from dcl.formats.source import STDIN, files
from dcl.report import Report
from dcl.report.gate import Gate
from dcl.report.output import WRITERS, open_out, visible
from dcl.report.record import dump
from dcl.trajectory import Example, Trajectory

if TYPE_CHECKING:
    from dcl.attribution import Attributor

_BATCH = 16  # traces that are scored together; as many more are being read


class _Commands(TyperGroup):
    """Maps what the commands raise to one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; a user's mistake never shows a traceback."""
        if sys.stdin is None:  # closed by the caller; reads as empty then
            sys.stdin = io.TextIOWrapper(io.BytesIO())
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # An ASCII locale is no reason to fail.
                stream.reconfigure(errors="backslashreplace")
        try:
            try:
                return super().invoke(ctx)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
        except DclError as error:
            _complain(f"error: {error}")
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # Python flushes once more at exit; let that go nowhere instead of fail.
            if sys.stdout is not None:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            _complain(f"error: {place}{error.strerror or error}")
            raise typer.Exit(ConfigError.exit_code) from None


app = typer.Typer(
    cls=_Commands,
    help="Which agent failed, how, and at which turn: reads the log of a failed multi-agent run.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="Look at a model folder.", no_args_is_help=True)
app.add_typer(models_app, name="models")


class Output(str, Enum):
    """What `--output` takes."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


def _check_format(value: str) -> str:
    """The name of a format, or a usage error that names them all."""
    if value not in ("auto", *FORMATS):
        raise typer.BadParameter(f"expected auto, {', '.join(FORMATS)}; got {value!r}")
    return value


def _check_prob(value: float | None) -> float | None:
    """A probability; the range check of typer lets NaN pass."""
    if value is not None and not 0 <= value <= 1:
        raise typer.BadParameter(f"expected a probability from 0 to 1, got {value}")
    return value


def _print_version(value: bool) -> None:
    """Print the version and leave."""
    if value:
        typer.echo(f"dcl {__version__}")
        raise typer.Exit


Paths = Annotated[
    list[str], typer.Argument(metavar="FILE|FOLDER|-...", help="Logs; - is standard input.")
]
Format = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"Format of the logs: auto, {', '.join(FORMATS)}.",
        callback=_check_format,
    ),
]
ModelFolder = Annotated[
    Path | None,
    typer.Argument(metavar="[DIR]", help="Model folder; without it, the one that ships."),
]


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


@app.command()
def attribute(
    paths: Paths,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Model folder; without it, the one that ships."),
    ] = None,
    format: Format = "auto",
    output: Annotated[Output, typer.Option(help="How to write the result.")] = Output.TABLE,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write there; the file appears when whole.")
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Declare the N likeliest faults, no threshold."),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(metavar="P", callback=_check_prob, help="Declare faults from P on, 0 to 1."),
    ] = None,
    evidence: Annotated[int, typer.Option(min=0, metavar="N", help="Turns to show.")] = 3,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROB|MODE[:PROB]",
            help="Exit with 1 on any fault from PROB on, or on this mode, such as FM-2.5:0.7.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Turns encoded side by side; without it, all cores."),
    ] = None,
) -> None:
    """Say which agent failed, how, and at which turn."""
    if threshold is not None and top_k is not None:
        raise typer.BadParameter("--top-k ignores thresholds: give it or --threshold, not both")
    gates = [Gate.parse(text) for text in fail_on or ()]
    tally = Tally()
    with open_out(out) as stream:
        reports = _attribute(load_model(model, threads=threads), _read(paths, format, tally))
        chosen = (
            replace(report, threshold=threshold, top_k=top_k, evidence=evidence)
            for report in _watch(reports, gates, tally)
        )
        WRITERS[output.value](chosen, stream, len(paths) > 1 or os.path.isdir(paths[0]))
    if tally.failed:
        _complain(f"--fail-on: {tally.failed} of {tally.traces} traces")
    raise typer.Exit(TraceError.exit_code if tally.unreadable else min(tally.failed, 1))


@app.command()
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
    for source, example in _read(paths, format, tally, sys.stdout):
        run = example.trajectory
        problems = list(check_labels(example))
        if run.id in seen:
            problems.append("this id was seen before")
        for problem in problems:
            _complain(f"warning: {source}: trace {run.id}: {problem}", sys.stdout)
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


@app.command()
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
        for _, example in _read(paths, format, tally):
            stream.write(dump(example.to_dict()) + "\n")
        if not tally.traces:
            raise TraceError("", "nothing was written, as no trace could be read")
    raise typer.Exit(TraceError.exit_code if tally.unreadable else 0)


@app.command(
    add_help_option=False,  # so that --help shows the options of the training
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def train(context: typer.Context) -> None:
    """Train a model from --config FILE and any key in it."""
    try:
        from dcl.training import main as run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("torch", "lightning", "jsonargparse", "safetensors", "scipy"):
            raise
        raise ConfigError(
            f"training needs {package}, which is not installed; "
            'run pip install "dcl-attribution[train]"'
        ) from None
    raise typer.Exit(run(context.args))


@app.command(
    add_help_option=False,  # so that --help shows the options of the sweep
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def sweep(context: typer.Context) -> None:
    """Train many configurations times seeds, and compare them."""
    try:
        from dcl.sweep import main as run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package == "dcl":
            raise
        raise ConfigError(
            f"a sweep needs {package}, which is not installed; "
            'run pip install "dcl-attribution[sweep]"'
        ) from None
    raise typer.Exit(run(context.args))


@models_app.command("verify")
def verify_model(folder: ModelFolder = None) -> None:
    """Check every file of a model against its manifest."""
    from dcl.artifact import pretrained, read_manifest, verify

    place = folder or pretrained()
    problems = verify(place, read_manifest(place))
    for name, problem in problems.items():
        typer.echo(visible(f"damaged: {problem}" if problem else f"ok: {name}"))
    if any(problems.values()):
        raise ArtifactError(f"{place}: fetch or export the model again")


@models_app.command("show")
def show_model(folder: ModelFolder = None) -> None:
    """Print what the manifest says of a model: versions, scores, files."""
    from dcl.artifact import pretrained, read_manifest, verify

    place = folder or pretrained()
    manifest = read_manifest(place)
    typer.echo(visible(f"folder: {place}"))
    for key, value in _flatten(manifest):
        typer.echo(visible(f"{key}: {value}"))
    for name, problem in verify(place, manifest).items():
        size, digest = manifest["files"][name]["bytes"], manifest["files"][name]["sha256"]
        typer.echo(visible(f"{name}: {size} bytes, sha256 {digest}, {problem or 'ok'}"))


def load_model(path: Path | None, *, threads: int | None) -> Attributor:
    """The model to attribute with; the one seam through which the commands reach it.

    Args:
        path: Model folder; None is the one that ships.
        threads: Turns encoded side by side, > 0; None is every core this process may use.

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
    return load(path, threads=threads)


@dataclass(slots=True)
class Tally:
    """What a command has seen so far.

    Args:
        traces: Runs that were read.
        unreadable: Files, lines or records that were not.
        failed: Runs over `--fail-on`.
    """

    traces: int = 0
    unreadable: int = 0
    failed: int = 0


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


def _read(
    paths: Sequence[str], format: str, tally: Tally, errors: TextIO | None = None
) -> Iterator[tuple[str, Example]]:
    """Every run with the file it stands in; what cannot be read is reported and counted."""
    for path in paths:
        for file in files(path):
            seen = tally.traces + tally.unreadable
            for item in [file] if isinstance(file, TraceError) else scan(file, format=format):
                if isinstance(item, TraceError):
                    tally.unreadable += 1
                    _complain(f"error: {item}", errors)
                else:
                    tally.traces += 1
                    yield (STDIN if file == "-" else str(file)), item
            if tally.traces + tally.unreadable == seen:
                tally.unreadable += 1
                _complain(f"error: {file}: expected a trace, found none", errors)


def _attribute(attributor: Attributor, examples: Iterator[tuple[str, Example]]) -> Iterator[Report]:
    """Attribute run by run, with a bounded number of them in memory.

    Raises:
        ArtifactError: If the model gives a number that is none.
    """
    waiting: deque[tuple[str, Example]] = deque()  # read, and not yet attributed

    def trajectories() -> Iterator[Trajectory]:
        for source, example in examples:
            waiting.append((source, example))
            yield example.trajectory

    for attribution in attributor.batch(trajectories(), batch_size=_BATCH):
        source, example = waiting.popleft()
        probs = (attribution.agent_probs, attribution.pair_probs, attribution.mode_probs)
        if not all(math.isfinite(p.sum()) for p in (*probs, attribution.step_probs)):
            raise ArtifactError(
                f"the model gave no number (NaN) for the trace {example.trajectory.id}: "
                "it is damaged; check it with dcl models verify"
            )
        yield Report(source, example.trajectory, attribution)


def _watch(reports: Iterable[Report], gates: Sequence[Gate], tally: Tally) -> Iterator[Report]:
    """The same reports; those over a gate are counted."""
    for report in reports:
        tally.failed += any(gate.holds(report.attribution) for gate in gates)
        yield report


def _flatten(manifest: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of nested objects as dotted keys, without the files."""
    for key, value in manifest.items():
        if isinstance(value, Mapping):
            if prefix or key != "files":
                yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _complain(message: str, stream: TextIO | None = None) -> None:
    """Print one line, whatever names and texts are in the message; to stderr if not told."""
    print(visible(message), file=stream or sys.stderr)


def main() -> None:
    """Run the command line; ends the process with one of the documented exit codes."""
    app(prog_name="dcl")


if __name__ == "__main__":
    main()
