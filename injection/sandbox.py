"""Unit tests in a process of their own: bounded time and memory, no network, no stray writes.

The child limits itself before it reads a line of foreign code: `setrlimit` for time, memory, file
size and processes, and an audit hook that refuses sockets, new processes, foreign libraries and
every change of a file outside its temporary folder. Audit hooks cannot be taken out again. This
holds back wrong code and careless code; it is no wall against an attacker with an exploit of the
interpreter, for whom a container is the right place.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

_CHILD = r"""
import os, sys
nonce, folder, memory, seconds = sys.argv[1], os.path.realpath(sys.argv[2]), *map(int, sys.argv[3:5])
source = sys.stdin.read()
del sys.argv[1:]
import resource
for what, limit in (
    (resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds),
    (resource.RLIMIT_FSIZE, 1 << 20), (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(what, (limit, limit))
code = compile(source, "<tests>", "exec")
REFUSED = ("socket.", "subprocess.", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.system",
           "os.kill", "ctypes.", "pty.", "ftplib.", "smtplib.", "urllib.", "http.", "signal.pthread_kill")
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate",
           "os.chmod", "os.chown", "os.utime", "shutil.", "tempfile.", "os.putenv", "os.chdir", "os.mkfifo", "os.setxattr")
def inside(path):
    if isinstance(path, int):
        return path <= 2
    return os.path.realpath(os.fsdecode(path)).startswith(folder + os.sep)
def guard(event, args, real=os.path.realpath):
    if event.startswith(REFUSED):
        raise PermissionError("sandbox: " + event)
    if event == "open" and args[0] is not None:
        mode, flags = args[1], args[2]
        writes = isinstance(mode, str) and set(mode) & set("wax+") or (
            isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        if writes and not inside(args[0]):
            raise PermissionError("sandbox: write outside")
    elif event.startswith(CHANGES) and not all(
        inside(a) for a in args if isinstance(a, (str, bytes)) and a != ""
    ):
        raise PermissionError("sandbox: " + event)
import builtins
def exec_guarded():
    sys.addaudithook(guard)
    exec(code, {"__name__": "__main__", "__builtins__": builtins})
try:
    exec_guarded()
except MemoryError:
    print("MemoryError", file=sys.stderr)
except BaseException as error:
    print(f"{type(error).__name__}: {error}"[:300], file=sys.stderr)
else:
    os.write(1, ("\n" + nonce).encode())
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a test may use.

    Args:
        seconds: Wall-clock and processor time; > 0.
        memory: Bytes of address space; > 0.
    """

    seconds: int = 10
    memory: int = 512 << 20


@dataclass(frozen=True, slots=True)
class Tested:
    """What became of a test.

    Args:
        passed: Whether the code ran to its end.
        problem: Why not, in one line; empty if it did.
    """

    passed: bool
    problem: str = ""


def run_tests(source: str, limits: Limits | None = None) -> Tested:
    """Run code with its tests and say whether it ran to its end.

    Args:
        source: Python; asserts raise when a test fails. `sys.exit(0)` does not pass.
        limits: What it may use; None means the defaults.

    Returns:
        The verdict; foreign code cannot make this raise.
    """
    limits = limits or Limits()
    nonce = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="injection-") as folder:
        command = [sys.executable, "-I", "-S", "-c", _CHILD, nonce, folder]
        command += [str(limits.memory), str(limits.seconds)]
        environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder}
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
            start_new_session=True,
        ) as child:
            try:
                out, err = child.communicate(source.encode("utf-8", "replace"), limits.seconds + 1)
            except subprocess.TimeoutExpired:
                return Tested(False, f"took more than {limits.seconds} s")
            finally:
                _end(child.pid)
    if out.endswith(b"\n" + nonce.encode()):
        return Tested(True)
    lines = err.decode("utf-8", "replace").strip().splitlines()
    return Tested(False, lines[-1] if lines else f"ended early, exit code {child.returncode}")


def _end(process: int) -> None:
    """Kill a child and whatever it started; it leads a session of its own."""
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:
        return
