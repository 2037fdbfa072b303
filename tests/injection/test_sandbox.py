from __future__ import annotations

import os
from pathlib import Path

import pytest

from injection.sandbox import Limits, run_tests

QUICK = Limits(seconds=2)


@pytest.mark.parametrize(
    "source",
    [
        "print('x')",
        "open('a', 'w').write('x')",
        "import math, re, collections, itertools, heapq, functools, string, random, typing",
        "print('0' * 5_000_000)",
    ],
)
def test_what_is_allowed_passes(source: str) -> None:
    assert run_tests(source, QUICK).passed


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("assert 0", "AssertionError"),
        ("def", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(0)", "ended early"),
        ("while True: pass", "2 s"),
        ("x = [0] * 10**9", "MemoryError"),
        ("def f(): return f()\nf()", "RecursionError"),
        ("import socket; socket.socket()", "socket"),
        ("import os; os.system('true')", "os.system"),
        ("import os; os.fork()", "os.fork"),
        ("import subprocess; subprocess.run(['true'])", "subprocess"),
        ("import ctypes", "ctypes"),
        ("open('big', 'w').write('x' * 5_000_000)", ""),
    ],
)
def test_what_is_not_allowed_fails(source: str, problem: str) -> None:
    tested = run_tests(source, QUICK)
    assert not tested.passed
    assert problem in tested.problem or "ended early" in tested.problem


def test_a_number_of_a_process_that_has_ended_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, signal: killed.append(group))
    assert run_tests("x = 1", QUICK).passed
    assert not run_tests("assert 0", QUICK).passed
    assert killed == []


def test_nothing_is_changed_outside_the_folder(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("here")
    for source in (
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"open({str(kept)!r}, 'a')",
        f"import os; os.remove({str(kept)!r})",
        f"import os; os.rename({str(kept)!r}, 'mine')",
        f"import pathlib; pathlib.Path({str(tmp_path / 'folder')!r}).mkdir()",
        f"import os; os.symlink({str(kept)!r}, 'link'); open('link', 'w')",
    ):
        assert not run_tests(source, QUICK).passed
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "here"
