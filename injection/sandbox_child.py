"""The other side of the sandbox: limits itself, then runs what it is given on standard input.

Run as a script with the arguments nonce, folder, bytes of memory and seconds; imports nothing of
the project. Writes the nonce to standard output if the code ran to its end, and below it the
beginning of what the code printed.
"""

from __future__ import annotations

import io
import os
import resource
import sys
from typing import Any

_REFUSED = (
    "socket.", "subprocess.", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.system",
    "os.kill", "ctypes.", "pty.", "signal.pthread_kill", "os.putenv", "os.unsetenv",
)  # fmt: skip
_CHANGES = (
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate",
    "os.chmod", "os.chown", "os.utime", "os.chdir", "os.setxattr", "os.removexattr", "shutil.",
)  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FILE = 1 << 20
_SHOWN = 4000


class Printed(io.TextIOBase):
    """Keeps the first characters of what is printed, however much it is."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        """Take text in; all of it counts as written."""
        if len(self.text) < _SHOWN:
            self.text += text[: _SHOWN - len(self.text)]
        return len(text)


def limit(memory: int, seconds: int) -> None:
    """Bound memory, processor time, size of files and core dumps of this process."""
    for what, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, _FILE),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def silence() -> int:
    """Send all output to nowhere, however much it is; gives the one channel that is left."""
    answer, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return answer


def guard(folder: str) -> None:
    """Refuse sockets, processes, foreign libraries, and changes outside a folder; for good."""
    realpath, fsdecode = os.path.realpath, os.fsdecode

    def is_inside(path: Any) -> bool:
        if isinstance(path, int):
            return True  # an open file, which was checked when it was opened
        return realpath(fsdecode(path)).startswith(folder + os.sep)

    def check(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(_REFUSED):
            raise PermissionError(f"sandbox: {event} is not allowed")
        if event == "open":
            path, mode, flags = args
            by_flags = isinstance(flags, int) and bool(flags & _WRITING)
            by_mode = isinstance(mode, str) and bool(set(mode) & set("wax+"))
            if path is not None and (by_flags or by_mode) and not is_inside(path):
                raise PermissionError("sandbox: no writing outside the folder")
        elif event.startswith(_CHANGES):
            paths = [arg for arg in args if isinstance(arg, (str, bytes, os.PathLike))]
            if not all(is_inside(path) for path in paths):
                raise PermissionError(f"sandbox: {event} outside the folder")

    sys.addaudithook(check)


def main() -> None:
    """Run the code on standard input."""
    nonce, folder, memory, seconds = sys.argv[1:5]
    source = sys.stdin.read()
    del sys.argv[1:]
    answer = silence()
    sys.stdout = printed = Printed()
    limit(int(memory), int(seconds))
    try:
        code = compile(source, "<tests>", "exec")
        guard(os.path.realpath(folder))
        exec(code, {"__name__": "__main__"})
    except BaseException as error:
        os.write(answer, f"{type(error).__name__}: {error}"[:300].encode("utf-8", "replace"))
    else:
        os.write(answer, f"{nonce}\n{printed.text}".encode("utf-8", "replace"))
    os._exit(0)


if __name__ == "__main__":
    main()
