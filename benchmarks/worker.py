"""One contender in a process of its own, so that neither memory nor threads mix with another's.

The process is `python -m benchmarks.worker NAME SETUP`. It takes one JSON request a line and
answers each with one line, the first as soon as it has read a turn.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Literal

from benchmarks.contenders import CONTENDERS, Contender, Setup

Clock = Literal["wall", "cpu"]
"""What seconds are taken from."""


class WorkerError(Exception):
    """A contender that cannot go on; the message says why."""


class Worker:
    """The process of one contender, seen from outside.

    Attributes:
        name: Contender.
        error: Why it takes no part; empty if it does.
        cold_s: From its start to the first turn that was read, by the same clock.

    Args:
        name: Contender.
        setup: What it is made from.
        clock: `wall`, or `cpu` for the time of all its threads on the processor, which does not
            grow where other processes want the same cores.
    """

    def __init__(self, name: str, setup: Setup, *, clock: Clock = "wall") -> None:
        self.name = name
        self._clock = clock
        command = [sys.executable, "-m", "benchmarks.worker", name, json.dumps(asdict(setup))]
        start = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._read, self._write = self._process.stdout, self._process.stdin
        answer = self._answer()
        self.cold_s = (
            time.perf_counter() - start if clock == "wall" else answer.get("cpu", [0.0])[0]
        )
        self.error = str(answer.get("error", ""))

    def ask(self, request: Mapping[str, Any]) -> tuple[list[float], float]:
        """Seconds of each call, and the most megabytes that were resident so far.

        Args:
            request: As `serve` takes it.

        Raises:
            WorkerError: If the contender failed, or its process has died.
        """
        try:
            if self._write is not None:
                self._write.write(json.dumps(request) + "\n")
                self._write.flush()
            answer = self._answer()
        except OSError:
            answer = {"error": "its process died"}
        if "error" in answer:
            raise WorkerError(str(answer["error"]))
        return answer[self._clock], answer["mb"]

    def close(self) -> None:
        """End the process."""
        for pipe in (self._write, self._read):
            if pipe is not None:
                with suppress(OSError):  # of a process that died
                    pipe.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        """The next answer."""
        line = self._read.readline() if self._read is not None else ""
        found: dict[str, Any] = json.loads(line) if line else {"error": "its process died"}
        return found


def serve(contender: Contender, requests: IO[str], answers: IO[str]) -> None:
    """Answer requests until there are no more.

    `{"turns": [...]}` asks for the seconds of each turn by itself, `{"run": [...]}` for those of
    all turns as one run, `{}` for nothing but the megabytes that are resident at most.

    Args:
        contender: Who is measured.
        requests: One JSON object a line.
        answers: One JSON object a line: `wall` and `cpu`, seconds of each call, and `mb`; or
            `error`, why there are none.
    """
    for line in requests:
        try:
            found = _time(contender, json.loads(line))
        except Exception as error:  # other people's libraries may raise anything
            found = {"error": _reason(error)}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def _time(contender: Contender, request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one request."""
    actions = [contender.turn(text) for text in request.get("turns", ())]
    if "run" in request:
        actions.append(contender.run(request["run"]))
    wall, cpu = [], []
    for action in actions:
        start, busy = time.perf_counter(), time.process_time()
        action()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - busy)
    return {"wall": wall, "cpu": cpu, "mb": peak_mb()}


def _reason(error: Exception) -> str:
    """One line on what went wrong."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def peak_mb() -> float:
    """Most memory of this process that was resident so far, in megabytes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else 0.0


def main(name: str, setup: Setup) -> None:
    """Be a contender until standard input ends; a line `{"error": ...}` if that cannot be."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with answers
    try:
        contender = CONTENDERS[name].make(setup)
        contender.turn("ready?")()
    except Exception as error:  # other people's libraries may raise anything
        answers.write(json.dumps({"error": _reason(error)}) + "\n")
        answers.close()
        return
    ready = {"wall": [], "cpu": [time.process_time()], "mb": peak_mb()}
    answers.write(json.dumps(ready) + "\n")
    answers.flush()
    serve(contender, sys.stdin, answers)


if __name__ == "__main__":
    main(sys.argv[1], Setup(**json.loads(sys.argv[2])))
