"""Where reports go: streams and files, and text that is safe to show on them."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from dcl.errors import ConfigError
from dcl.report import Report
from dcl.report.record import dump, record

_LEAST_WIDTH = 60  # columns; some terminals and build hosts say 0


def visible(text: str, limit: int | None = None) -> str:
    r"""The text on one line, safe to print: nothing in it can drive a terminal.

    Args:
        text: Anything, also with control characters, bidirectional marks or lone surrogates.
        limit: Looks at this many characters only.

    Returns:
        Runs of white space as one blank; other characters that do not print as `\x1b`.
    """
    line = " ".join(text.lstrip()[:limit].split())
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line
    )


@contextmanager
def open_out(path: Path | None) -> Iterator[TextIO]:
    """A stream to write to: standard output, or a file that appears only when it is whole.

    The file is written beside its place under another name and moved there at the end, so a
    reader never sees half of it and a failed run leaves what was there before. A device or a
    pipe is written to directly. Names that end in `.gz` or `.xz` are compressed.

    Args:
        path: The file; None or `-` is standard output.

    Returns:
        A context manager that gives the stream.

    Raises:
        ConfigError: If nothing can be written there; raised on entry.
    """
    if path is None or str(path) == "-":
        if sys.stdout is not None:
            yield sys.stdout
        else:  # closed by the caller, who wants the exit code only
            with open(os.devnull, "w") as nowhere:
                yield nowhere
        return
    target = Path(os.path.realpath(path))  # a link stays a link
    direct = target.exists() and not target.is_file() and not target.is_dir()
    written = target if direct else target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    with ExitStack() as stack:
        if not direct:
            stack.callback(_remove, written)
        try:
            if target.is_dir():
                raise IsADirectoryError(None, "it is a folder, expected a file")
            raw = stack.enter_context(open(written, "wb" if direct else "xb"))
        except OSError as error:
            raise ConfigError(f"--out {path}: cannot write there: {error.strerror}") from None
        with (
            raw,
            _pack(raw, target.suffix) as packed,
            io.TextIOWrapper(packed, "utf-8", errors="backslashreplace", newline="\n") as text,
        ):
            yield text
        if not direct:
            if target.exists():
                shutil.copymode(target, written)
            os.replace(written, target)


def _remove(file: Path) -> None:
    """Remove a file if it is there, and its place too."""
    with suppress(OSError):
        file.unlink()


def _pack(raw: BinaryIO, suffix: str) -> BinaryIO:
    """The stream, compressed if the suffix says so; without names or dates, so equal is equal."""
    if suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0))
    if suffix == ".xz":
        return cast(BinaryIO, lzma.LZMAFile(raw, "wb"))
    return raw


Writer = Callable[[Iterable[Report], TextIO, bool], None]
"""Takes the reports one at a time, the stream, and whether many are due even if one comes."""


def write_table(reports: Iterable[Report], stream: TextIO, many: bool) -> None:
    """Print every report as a table, in colour only where the stream is a terminal.

    Args:
        reports: Taken one at a time.
        stream: Where to.
        many: Not used.
    """
    from rich.console import Console

    from dcl.report.table import table

    plain = stream is not sys.stdout  # a file stays free of colour codes even under FORCE_COLOR
    console = Console(
        file=stream,
        color_system=None if plain else "auto",
        force_terminal=False if plain else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.width = max(console.width, _LEAST_WIDTH)
    for report in reports:
        console.print(table(report))


def write_jsonl(reports: Iterable[Report], stream: TextIO, many: bool) -> None:
    """Write every report as one line of JSON.

    Args:
        reports: Taken one at a time.
        stream: Where to.
        many: Not used.
    """
    for report in reports:
        stream.write(dump(record(report)) + "\n")


def write_json(reports: Iterable[Report], stream: TextIO, many: bool) -> None:
    """Write one JSON document: an object for one report, else a list with one report a line.

    Args:
        reports: Taken one at a time; the list is never held whole.
        stream: Where to.
        many: Whether a list is due even for one report, as where a folder was named.
    """
    rows = (dump(record(report)) for report in reports)
    first, second = next(rows, None), next(rows, None)
    if first is None:
        stream.write("[]\n")
    elif second is None and not many:
        stream.write(first + "\n")
    else:
        stream.write("[\n" + first)
        for row in chain([second] if second else [], rows):
            stream.write(",\n" + row)
        stream.write("\n]\n")


WRITERS: dict[str, Writer] = {"table": write_table, "json": write_json, "jsonl": write_jsonl}
"""The writer of each `--output`."""
