"""Files that appear whole or not at all, and files that one process has to itself."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from dcl.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows has no such lock; two processes on one folder are not noticed there
    fcntl = None  # type: ignore[assignment]

_LONGEST = 240  # bytes of a name, so that what is added to it fits into the 255 of a file system


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Within the block, a place to write to; it becomes the file at the end of the block.

    Until then what stood there before stays; where the block fails, nothing is left behind.

    Args:
        file: What is to appear, in a folder that exists.

    Raises:
        OSError: If it cannot be put there.
    """
    name = os.fsdecode(os.fsencode(file.name)[:_LONGEST])
    part = file.with_name(f".{name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def claim(file: FileIO, refusal: str) -> None:
    """Lock a file for as long as it is open in this process.

    Args:
        file: Open for writing.
        refusal: What to say where another process has it.

    Raises:
        ConfigError: If another process has it.
    """
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(refusal) from None


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, where that can be asked for.

    Args:
        folder: Any folder.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folder
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise
    finally:
        os.close(handle)
