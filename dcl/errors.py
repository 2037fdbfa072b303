"""Every error the package raises on purpose.

    DclError                 exit code
    ├── ConfigError              2      a wrong option, key or value
    ├── TraceError               3      a log that cannot be read or understood
    │   └── FormatError          3      no known format, or not the one that was named
    ├── ArtifactError            4      a model that is missing, damaged or too new
    └── ParityError              4      a converted model that does not agree with its source

A message names the place, what was expected, what was found, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class DclError(Exception):
    """Base of all errors of this package; catch it to catch them all."""

    exit_code: ClassVar[int] = 2


class ConfigError(DclError, ValueError):
    """A configuration key, option or value is wrong."""

    exit_code = 2


class TraceError(DclError, ValueError):
    """A log cannot be read, or breaks a rule of its format.

    Args:
        place: Where: a file, a line in it, a path inside a document.
        problem: Expected, found, and what to do.
    """

    exit_code = 3

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(place, problem)  # both, so that it can be pickled
        self.place = place
        self.problem = problem

    def __str__(self) -> str:
        """Place and problem."""
        return f"{self.place}: {self.problem}" if self.place else self.problem


class FormatError(TraceError):
    """No known log format fits, or the named one does not."""


class ArtifactError(DclError):
    """A model folder is missing, incomplete, damaged, or of another version."""

    exit_code = 4


class ParityError(DclError):
    """A converted model disagrees with the one it was made from; nothing was written."""

    exit_code = 4


@contextmanager
def needing(extra: str, purpose: str) -> Iterator[None]:
    """Within the block, say how to install a package that is missing.

    Args:
        extra: The extra of this package that has it.
        purpose: What needs it, as the start of a sentence.

    Raises:
        ConfigError: If a module of another package is not found.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "dcl"):
            raise
        raise ConfigError(
            f"{purpose} needs {package}, which is not installed; "
            f'run pip install "dcl-attribution[{extra}]"'
        ) from None
