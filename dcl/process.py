"""The command line as a process: its streams, its signals and its exit code."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import typer
from typer.core import TyperGroup

from dcl.errors import ConfigError, DclError
from dcl.report.output import visible

_UsageError: Any = typer.BadParameter.__base__  # typer does not export it by name


class Commands(TyperGroup):
    """Maps what the commands raise to one line on stderr and an exit code."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Read the command line as far as the name of the command."""
        if sys.stdin is None:  # closed by the caller; reads as empty then
            sys.stdin = io.TextIOWrapper(io.BytesIO())
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # An ASCII locale is no reason to fail.
                stream.reconfigure(errors="backslashreplace")
        with _reported():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; a user's mistake never shows a traceback."""
        with _reported():
            return super().invoke(ctx)


@contextmanager
def _reported() -> Iterator[None]:
    """Turn what goes wrong inside into one line on stderr and `typer.Exit`."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except DclError as error:
        complain(f"error: {error}")
        raise typer.Exit(error.exit_code) from None
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else "dcl"
        complain(f"error: {error.format_message().rstrip('.')}; see {command} --help")
        raise typer.Exit(ConfigError.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    except BrokenPipeError:
        _silence(sys.stdout)
        raise typer.Exit(141) from None
    except OSError as error:
        _silence(sys.stdout)
        place = f"{error.filename}: " if error.filename else ""
        complain(f"error: {place}{error.strerror or error}")
        raise typer.Exit(ConfigError.exit_code) from None


def say(message: str) -> None:
    """Print one line to stdout, whatever names and texts are in the message."""
    typer.echo(visible(message))


def complain(message: str) -> None:
    """Print one line to stderr; where that is closed or full, the exit code must do."""
    try:
        typer.echo(visible(message), err=True)
    except OSError:
        _silence(sys.stderr)


def run(app: typer.Typer, name: str = "dcl") -> None:
    """Run a command line and end the process with its exit code.

    Args:
        app: Its group of commands is a `Commands`.
        name: What its help calls it.
    """
    for ending in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, ending, None)  # the second is not on every platform
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _stop)
    try:
        app(prog_name=name)
    except SystemExit as end:
        if threading.active_count() > 1:
            # A thread that waits for input or is inside the tokenizer cannot be stopped, and
            # would bring the interpreter down as it is taken apart.
            os._exit(end.code if isinstance(end.code, int) else 1)
        raise


def _silence(stream: TextIO | None) -> None:
    """Let the rest go nowhere: Python flushes once more as it ends, and would fail again."""
    if stream is not None:
        with suppress(io.UnsupportedOperation):  # a stream in memory has no file to replace
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _stop(number: int, frame: object) -> None:
    """Leave by the way of all errors, which removes files that are not whole."""
    raise SystemExit(128 + number)
