"""The commands that judge runs while they go on: `dcl watch | thresholds | serve`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcl.commands.options import Injected, Model, WithBackend
from dcl.errors import ConfigError, TraceError, needing
from dcl.formats import scan
from dcl.formats.source import STDIN, files
from dcl.process import complain

if TYPE_CHECKING:
    from dcl.attribution import Attributor
    from dcl.live.durable import DurableRuns
    from dcl.live.tail import StreamTail, Tail

State = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder in which open runs outlive the process."),
]
Thresholds = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="What dcl thresholds wrote; without it, those of the model."),
]
Confirm = Annotated[
    int, typer.Option(min=1, metavar="N", help="Judgements in a row that raise or clear an alarm.")
]
Idle = Annotated[
    float, typer.Option(min=0.001, metavar="SECONDS", help="A run silent for so long is final.")
]
MaxRuns = Annotated[int, typer.Option(min=1, metavar="N", help="Open runs.")]


def watch(
    path: Annotated[
        str, typer.Argument(metavar="FILE|-", help="JSONL of turns; - is standard input.")
    ],
    model: Model = None,
    injected: Injected = False,
    backend: WithBackend = None,
    state: State = None,
    thresholds: Thresholds = None,
    confirm: Confirm = 2,
    idle: Idle = 3600.0,
    max_runs: MaxRuns = 10_000,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Wait for more at the end of the file.")
    ] = True,
) -> None:
    """Judge the turns of a growing log; print what changes as JSON lines."""
    from dcl.cli import load_model
    from dcl.live import watch as loop
    from dcl.live.alarms import AlarmRules
    from dcl.live.durable import DurableRuns
    from dcl.live.journal import Journal
    from dcl.live.openruns import Bounds, OpenRuns
    from dcl.live.thresholds import StepThresholds

    attributor = load_model(model, threads=1, injected=injected, backend=backend)
    learned = None if thresholds is None else StepThresholds.load(thresholds)
    if learned is not None:
        learned.check(attributor)
    runs = DurableRuns(
        OpenRuns(
            attributor,
            bounds=Bounds(runs=max_runs, idle_s=idle),
            rules=AlarmRules(confirm=confirm),
            thresholds=learned,
        ),
        None if state is None else Journal(state),
    )
    try:
        loop.write(runs.recover(), sys.stdout)
        runs.told()
        source = _source(path, runs, follow)
        try:
            unreadable = loop.watch(source, runs, sys.stdout, complain=complain)
        finally:
            source.close()
        if runs.is_durable:
            runs.snapshot()
        else:
            loop.write(list(runs.runs.end_all("closed")), sys.stdout)
    finally:
        runs.close()
    raise typer.Exit(TraceError.exit_code if unreadable else 0)


def thresholds(
    paths: Annotated[
        list[str], typer.Argument(metavar="FILE|FOLDER|-...", help="Logs of runs that succeeded.")
    ],
    rate: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Successful runs that may raise an alarm, 0 to 1."),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Written when whole.")],
    model: Model = None,
    injected: Injected = False,
    backend: WithBackend = None,
) -> None:
    """Learn thresholds from successful runs, so that false alarms have a known rate."""
    from dcl.cli import load_model
    from dcl.live.thresholds import StepThresholds

    unreadable: list[TraceError] = []
    successes = []
    for path in paths:
        for file in files(path):
            for item in [file] if isinstance(file, TraceError) else scan(file):
                if isinstance(item, TraceError):
                    unreadable.append(item)
                    complain(f"error: {item}")
                elif not item.has_failed:
                    successes.append(item.trajectory)
    attributor = load_model(model, threads=None, injected=injected, backend=backend)
    learned = StepThresholds.fit(attributor, successes, rate=rate)
    learned.save(out)
    typer.echo(f"runs {learned.runs}, rate {rate:g}, thresholds {len(learned.values)}")
    raise typer.Exit(TraceError.exit_code if unreadable else 0)


def serve(
    model: Model = None,
    injected: Injected = False,
    backend: WithBackend = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others can reach it only if you name one.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 8642,
    state: State = None,
    thresholds: Thresholds = None,
    confirm: Confirm = 2,
    idle: Idle = 3600.0,
    max_runs: MaxRuns = 10_000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="DCL_API_KEY", help="Key that requests must carry; better as DCL_API_KEY."
        ),
    ] = None,
    max_body: Annotated[int, typer.Option(min=1024, metavar="BYTES", help="Largest body.")] = (
        16 << 20
    ),
    timeout: Annotated[
        float,
        typer.Option(min=0.1, metavar="SECONDS", help="To come in, and to answer."),
    ] = 30.0,
    max_waiting: Annotated[
        int, typer.Option(min=1, metavar="N", help="Runs and turns that may wait, before 429.")
    ] = 1000,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Turns encoded side by side.")
    ] = None,
) -> None:
    """Serve attribution over HTTP; see docs/serving.md."""
    with needing("serve", "serving"):
        import uvicorn

        from dcl.serving.app import ServerSettings, create_app
    from dcl.cli import load_model
    from dcl.live.alarms import AlarmRules
    from dcl.live.monitor import QueueBounds
    from dcl.live.openruns import Bounds
    from dcl.live.thresholds import StepThresholds

    learned = None if thresholds is None else StepThresholds.load(thresholds)

    def load() -> Attributor:
        attributor = load_model(model, threads=threads, injected=injected, backend=backend)
        if learned is not None:
            learned.check(attributor)
        return attributor

    settings = ServerSettings(
        api_key=api_key or None,
        body_bytes=max_body,
        request_s=timeout,
        waiting=max_waiting,
        state=state,
        bounds=Bounds(runs=max_runs, idle_s=idle),
        queue=QueueBounds(turns=max_waiting),
        rules=AlarmRules(confirm=confirm),
        thresholds=learned,
    )
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    app = create_app(load, settings, fail=fail)
    server = uvicorn.Server(
        uvicorn.Config(app, host=host, port=port, access_log=False, server_header=False)
    )
    server.run()
    if failures:
        raise failures[0]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line.

    Args:
        app: Takes them.
    """
    app.command()(watch)
    app.command()(thresholds)
    app.command()(serve)


def _source(path: str, runs: DurableRuns, follow: bool) -> Tail | StreamTail:
    """The log, from where the last process stopped."""
    from dcl.live.tail import StreamTail, Tail

    if path == "-":
        return StreamTail(sys.stdin.buffer, STDIN)
    if Path(path).is_dir():
        raise ConfigError(f"{path}: expected a file, got a folder")
    return Tail(Path(path), runs.position, follow=follow)
