from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dcl.artifact import HEAD
from dcl.runtime import load
from export.__main__ import app

ROOT = Path(__file__).parents[2]


def test_convert_writes_a_model_and_says_what_it_measured(trained: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["convert", str(trained), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"wrote {tmp_path / 'out'}: {HEAD} ")
    assert "head max_difference" in done.stdout
    assert load(tmp_path / "out", threads=1)


def test_a_missing_model_is_one_line_and_its_exit_code(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "absent"), str(tmp_path / "out")])
    assert done.exit_code == 4
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {tmp_path / 'absent'}: ")
    assert done.stderr.count("\n") == 1


def test_a_wrong_option_is_usage(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["encoder", "--source", "minilm", "--out", str(tmp_path / "out"), "--head", "0"]
    )
    assert done.exit_code == 2
    assert done.stderr == "error: window: expected head > 0 and tail >= 0, got 0 and 32\n"


@pytest.mark.parametrize(
    "command", [("encoder", "--source", "minilm", "--out", "x"), ("convert", "x", "y")]
)
def test_without_the_extra_one_line_says_what_to_install(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    code = (
        "import sys, runpy\n"
        "sys.modules['torch'] = None\n"
        "runpy.run_module('export', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert done.stderr == 'error: torch is missing; run `pip install -e ".[export]"`\n'
