"""A file of results that a killed process goes on with.

    results.jsonl            one line for each run; it only grows
    results.jsonl.progress   JSON: the command, and how much of its input those lines stand for

The progress is replaced as a whole after the lines are on the disk, so the file may hold more than
the progress says and never less. Whoever opens it next cuts off what is too much.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from dcl.bulk import Mark
from dcl.errors import ConfigError
from dcl.files import claim, sync_folder, whole

SCHEMA = "dcl.progress/1"
"""Value of the `schema` key of the progress."""


class Results:
    """The results of one command; a context manager.

    Attributes:
        mark: How far the input was handled by processes before.
        failed: Runs over `--fail-on` among them.

    Args:
        file: Where the lines go.
        command: JSON values that have to be the same for a process that goes on.

    Raises:
        ConfigError: If the file cannot be written, another process writes it, it was not written
            by this class, or it was written by another command.
    """

    def __init__(self, file: Path, command: Mapping[str, Any]) -> None:
        self._name = f"--out {file}"
        target = Path(os.path.realpath(file))  # a link stays a link
        self._progress = target.with_name(target.name + ".progress")
        self._command = dict(command)
        if target.exists() and not target.is_file():
            raise ConfigError(f"{self._name}: expected a file to go on with, got something else")
        fresh = not target.exists()
        try:
            self._file = FileIO(target, "a+")
        except OSError as error:
            raise ConfigError(f"{self._name}: cannot write there: {error.strerror}") from None
        is_ours = False
        try:
            claim(self._file, f"{self._name}: another process writes there")
            is_ours = fresh and not os.fstat(self._file.fileno()).st_size
            self._recover()
        except BaseException:
            if is_ours:  # refused before anything was written: leave nothing, while it is claimed
                with suppress(OSError):  # Windows removes no file that is open
                    target.unlink()
            self._file.close()
            raise

    def __enter__(self) -> Results:
        """The same."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let go of the file."""
        self._file.close()

    def add(self, lines: str, mark: Mark, failed: int) -> None:
        """Add lines; they are on the disk when this comes back.

        Args:
            lines: ASCII, each with its end.
            mark: How far the input has been handled with them.
            failed: Runs over `--fail-on` with them.

        Raises:
            OSError: If they cannot be written; the next process goes on before them.
        """
        data = memoryview(lines.encode("ascii"))
        size = len(data)
        try:
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
            self._save(mark, failed, self._size + size)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._name) from None
        self._size += size

    def _recover(self) -> None:
        """Take up what the last process left.

        Raises:
            ConfigError: If that is of another command, or damaged.
        """
        for part in self._progress.parent.glob(f".{glob.escape(self._progress.name)}.*.part"):
            part.unlink(missing_ok=True)  # of a process that was killed
        size = os.fstat(self._file.fileno()).st_size
        try:
            saved = json.loads(self._progress.read_bytes())
        except FileNotFoundError:
            if size:
                raise ConfigError(
                    f"{self._name}: expected {self._progress.name} beside a file that is to be "
                    "gone on with, found none; name another file"
                ) from None
            self.mark, self.failed, self._size = Mark(), 0, 0
            self._save(self.mark, 0, 0)
            return
        except OSError as error:
            raise ConfigError(f"{self._progress}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise self._damaged("expected JSON") from None
        self._check(saved)
        if self._size > size:
            raise self._damaged(f"it speaks of {self._size} bytes of results, there are {size}")
        if self._size and os.pread(self._file.fileno(), 1, self._size - 1) != b"\n":
            raise self._damaged(f"it speaks of a line that ends at byte {self._size}")
        self._file.truncate(self._size)

    def _check(self, saved: Any) -> None:
        """Compare the command, and take over the place.

        Raises:
            ConfigError: If the command is another, or something is missing.
        """
        if not isinstance(saved, dict) or saved.get("schema") != SCHEMA:
            raise self._damaged(f"expected the schema {SCHEMA}")
        try:
            command, self.mark = saved["command"], Mark(**saved["mark"])
            self.failed, self._size = saved["failed"], saved["bytes"]
        except (KeyError, TypeError) as error:
            raise self._damaged(f"expected other keys: {error}") from None
        numbers = [self.failed, self._size, *(asdict(self.mark) | {"run": 0}).values()]
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
            raise self._damaged("expected whole numbers")
        if not isinstance(command, dict):
            raise self._damaged(f"expected a command, got {command!r:.80}")
        for key, value in self._command.items():
            found = command.get(key)
            if found != value:
                raise ConfigError(
                    f"{self._name}: the results there are of another command: expected {key} "
                    f"{found!r}, got {value!r}; name another file"
                )

    def _save(self, mark: Mark, failed: int, size: int) -> None:
        """Put new progress in the place of the old."""
        saved = {
            "schema": SCHEMA,
            "command": self._command,
            "mark": asdict(mark),
            "failed": failed,
            "bytes": size,
        }
        with whole(self._progress) as part, open(part, "w", encoding="ascii") as stream:
            json.dump(saved, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        sync_folder(self._progress.parent)

    def _damaged(self, problem: str) -> ConfigError:
        """The error for progress that cannot be used."""
        return ConfigError(f"{self._progress}: {problem}; remove it and the results to start again")
