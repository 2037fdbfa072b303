"""The command line: `dcl attribute | explain | watch | serve | fit | train | ...`.

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

import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcl import __version__, live_cli
from dcl.errors import ArtifactError, ConfigError, TraceError
from dcl.formats import FORMATS, scan
from dcl.formats.jsontext import too_deep
from dcl.formats.source import STDIN, files
from dcl.live_cli import Model
from dcl.process import Commands, complain, run, say
from dcl.report import Report
from dcl.report.gate import Gate
from dcl.report.output import WRITERS, open_out
from dcl.report.record import dump
from dcl.shipped import SHIPPED, find_model
from dcl.trajectory import Example, Trajectory

if TYPE_CHECKING:
    from dcl.adapting import FitReport
    from dcl.attribution import Attributor

BASE = find_model("base")
_BATCH = 16  # traces that are scored together; as many more are being read


app = typer.Typer(
    cls=Commands,
    help="Which agent failed, how, and at which turn: reads the log of a failed multi-agent run.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="Look at a model folder.")
app.add_typer(models_app, name="models")
live_cli.register(app)


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
    Path,
    typer.Argument(
        metavar="[NAME|DIR]", parser=find_model, help=f"{', '.join(SHIPPED)}, or a model folder."
    ),
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
    model: Model = None,
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
        examples = _short_enough(_read(paths, format, tally), tally)
        reports = _attribute(load_model(model, threads=threads), examples)
        chosen = (
            replace(report, threshold=threshold, top_k=top_k, evidence=evidence)
            for report in _watch(reports, gates, tally)
        )
        WRITERS[output.value](chosen, stream, len(paths) > 1 or os.path.isdir(paths[0]))
    if tally.failed:
        complain(f"--fail-on: {tally.failed} of {tally.traces} traces")
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
    for source, example in _read(paths, format, tally, say):
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
        for source, example in _read(paths, format, tally):
            with tally.refusing(source):
                stream.write(_native_line(example))
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


@app.command()
def explain(
    paths: Paths,
    model: Model = None,
    format: Format = "auto",
    output: Annotated[Output, typer.Option(help="Lines for people, or JSON lines.")] = Output.TABLE,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write there; the file appears when whole.")
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Explain the N likeliest faults, no threshold."),
    ] = None,
    words: Annotated[int, typer.Option(min=0, metavar="N", help="Words to show.")] = 8,
    sentences: Annotated[int, typer.Option(min=0, metavar="N", help="Sentences to show.")] = 3,
) -> None:
    """Show what speaks for each finding: words, sentences, the way of the fault, like ones."""
    from dcl.artifact import INDEX
    from dcl.explanation import explain as explain_run
    from dcl.nearest import load_index
    from dcl.report.explained import explain_lines, explain_record

    attributor = load_model(model, threads=None)
    file = (model or BASE) / INDEX
    index = load_index(file) if file.is_file() else None
    tally = Tally()
    with open_out(out) as stream:
        for report in _attribute(attributor, _short_enough(_read(paths, format, tally), tally)):
            found = report.attribution.findings(top_k=top_k)
            told = explain_run(
                attributor, report.trajectory, found, words=words, sentences=sentences, index=index
            )
            if output is Output.TABLE:
                stream.writelines(line + "\n" for line in explain_lines(report, told))
            else:
                stream.write(dump(explain_record(report, told)) + "\n")
    raise typer.Exit(TraceError.exit_code if tally.unreadable else 0)


@app.command()
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
        typer.Option(metavar="P", callback=_check_prob, help="Share of --clean runs to flag."),
    ] = 0.1,
    format: Format = "auto",
    seed: Annotated[int, typer.Option(help="Of the folds of the cross-validation.")] = 0,
) -> None:
    """Adapt a model to your system from 15 to 200 labelled logs."""
    from dcl.adapting import adapt

    tally = Tally()
    report = adapt(
        model,
        [example for _, example in _read(paths or [], format, tally)],
        out,
        clean=[example.trajectory for _, example in _read(clean or [], format, tally)],
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

    @contextmanager
    def refusing(self, source: str) -> Iterator[None]:
        """Report a run that was read but breaks a rule inside, and count it as unreadable.

        Args:
            source: File that it stands in.
        """
        try:
            yield
        except TraceError as error:
            self.traces -= 1
            self.unreadable += 1
            complain(f"error: {source}: {error}")


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
    paths: Sequence[str],
    format: str,
    tally: Tally,
    report: Callable[[str], None] | None = None,
) -> Iterator[tuple[str, Example]]:
    """Every run with the file it stands in; what cannot be read is reported and counted."""
    report = report or complain
    for path in paths:
        for file in files(path):
            seen = tally.traces + tally.unreadable
            for item in [file] if isinstance(file, TraceError) else scan(file, format=format):
                if isinstance(item, TraceError):
                    tally.unreadable += 1
                    report(f"error: {item}")
                else:
                    tally.traces += 1
                    yield (STDIN if file == "-" else str(file)), item
            if tally.traces + tally.unreadable == seen:
                tally.unreadable += 1
                report(f"error: {file}: expected a trace, found none")


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


def _native_line(example: Example) -> str:
    """A run as it is written.

    Raises:
        TraceError: If it holds JSON that is nested too deep to be written.
    """
    try:
        return dump(example.to_dict()) + "\n"
    except RecursionError:
        raise too_deep(f"trace {example.trajectory.id}") from None


def _short_enough(
    examples: Iterable[tuple[str, Example]], tally: Tally
) -> Iterator[tuple[str, Example]]:
    """The runs that can be attributed; the others are reported and counted as unreadable."""
    from dcl.bag import check_length

    for source, example in examples:
        with tally.refusing(source):
            check_length(example.trajectory)
            yield source, example


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


def main() -> None:
    """Run the command line; ends the process with one of the documented exit codes."""
    run(app)


if __name__ == "__main__":
    main()
