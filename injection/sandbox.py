"""Unit tests in a process of their own: bounded time and memory, no network, no stray writes.

The child limits itself before it reads a line of foreign code: `setrlimit` for time, memory, file
size and core dumps, and an audit hook that refuses sockets, new processes, foreign libraries and
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
from pathlib import Path

_CHILD = Path(__file__).with_name("sandbox_child.py")


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
        output: The first 4,000 characters that it printed; empty if it did not pass.
    """

    passed: bool
    problem: str = ""
    output: str = ""


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
        command = [sys.executable, "-I", "-S", str(_CHILD), nonce, folder]
        command += [str(limits.memory), str(limits.seconds)]
        environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder}
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            start_new_session=True,
        ) as child:
            try:
                out, _ = child.communicate(source.encode("utf-8", "replace"), limits.seconds + 1)
            except subprocess.TimeoutExpired:
                return Tested(False, f"took more than {limits.seconds} s")
            finally:
                _end(child)
    said = out.decode("utf-8", "replace").strip()
    if said.startswith(nonce):
        return Tested(True, output=said.removeprefix(nonce).strip())
    lines = said.splitlines()
    return Tested(False, lines[-1] if lines else f"ended early, exit code {child.returncode}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a child that has not ended; it leads a session of its own.

    One that has ended is gone from the table of processes, and its number may be another's by now.
    """
    if child.returncode is None:
        os.killpg(child.pid, signal.SIGKILL)
