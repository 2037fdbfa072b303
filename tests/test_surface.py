from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dcl

ROOT = Path(__file__).parents[1]
TORCH_HALF = {"torch", "lightning", "transformers", "sentence_transformers", "scipy", "sklearn"}
RUNTIME = {"numpy", "onnxruntime", "tokenizers", "typer", "rich", "pydantic"}
PUBLIC = [
    "Attribution",
    "Attributor",
    "DclError",
    "ErrorMode",
    "Example",
    "Fault",
    "Monitor",
    "Trajectory",
    "Turn",
    "TurnKind",
    "load",
    "read_examples",
    "read_trajectories",
]


def loaded_by(statement: str) -> set[str]:
    """Modules that a statement loads in a new interpreter."""
    code = (
        "import json, sys\n"
        "before = set(sys.modules)\n"
        f"try:\n    {statement}\n"
        "except SystemExit:\n    pass\n"
        "sys.stderr.write(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, timeout=120, cwd="/"
    )
    return set(json.loads(done.stderr))


def command(*args: str) -> str:
    return f"sys.argv = {['dcl', *args]}; from dcl.cli import main; main()"


@pytest.mark.parametrize("module", ["dcl.runtime", "export.convert", "export.encoder"])
def test_telemetry_is_off_before_onnxruntime_is_loaded(module: str) -> None:
    code = (
        "import importlib, os, sys\n"
        "from importlib.abc import MetaPathFinder\n"
        "class Spy(MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'onnxruntime': print(os.environ.get('ORT_DISABLE_TELEMETRY'))\n"
        "sys.meta_path.insert(0, Spy())\n"
        f"importlib.import_module('{module}')\n"
    )
    clean = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command, capture_output=True, check=True, timeout=120, cwd=ROOT, env=clean
    )
    assert done.stdout == b"1\n"


def test_the_public_names_are_these_and_all_resolve() -> None:
    assert dcl.__all__ == PUBLIC
    assert all(getattr(dcl, name) is not None for name in PUBLIC)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = dcl.nonsense


def test_importing_dcl_loads_the_standard_library_and_four_modules() -> None:
    modules = loaded_by("import dcl")
    own = {name for name in modules if name.startswith("dcl")}
    assert own == {"dcl", "dcl.errors", "dcl.taxonomy", "dcl.trajectory"}
    assert not {name.partition(".")[0] for name in modules} & (TORCH_HALF | RUNTIME)
    assert len(modules) < 80


@pytest.mark.parametrize("args", [("--help",), ("--version",), ("attribute", "--help")])
def test_help_and_version_load_no_model_and_no_array(args: tuple[str, ...]) -> None:
    tops = {name.partition(".")[0] for name in loaded_by(command(*args))}
    assert "typer" in tops
    assert not tops & (TORCH_HALF | {"numpy", "onnxruntime", "tokenizers"})


def test_reading_logs_loads_no_model_and_no_array() -> None:
    example = ROOT / "examples" / "parse_duration.json"
    tops = {name.partition(".")[0] for name in loaded_by(command("validate", str(example)))}
    assert not tops & (TORCH_HALF | {"numpy", "onnxruntime", "tokenizers"})


@pytest.mark.parametrize(
    "module",
    [
        "dcl.live.monitor",
        "dcl.serving.app",
        "dcl.attribution",
        "dcl.artifact",
        "dcl.runtime",
        "dcl.report.table",
        "dcl.formats",
    ],
)
def test_the_torch_free_half_loads_no_torch(module: str) -> None:
    tops = {name.partition(".")[0] for name in loaded_by(f"import {module}")}
    assert not tops & TORCH_HALF


def test_the_import_contracts_hold() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([tool], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout
