from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dcl

ROOT = Path(__file__).parents[1]
INFO = f"dcl_attribution-{dcl.__version__}.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    (built,) = folder.iterdir()
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"dcl_attribution-{dcl.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.partition("/")[0] for name in names} == {"dcl", INFO}
    assert {"dcl/py.typed", "dcl/cli.py", f"{INFO}/licenses/LICENSE"} <= names
    sources = {str(file.relative_to(ROOT)) for file in (ROOT / "dcl").rglob("*.py")}
    shipped = (ROOT / "dcl" / "pretrained").rglob("*")
    model = {str(file.relative_to(ROOT)) for file in shipped if file.is_file()}
    packed = {name for name in names if name.startswith("dcl/")}
    assert packed == {"dcl/py.typed", *sources, *model}


def test_the_wheel_attributes_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=300)
    python = str(venv / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=600)
    listed = [python, "-m", "pip", "list", "--format", "json"]
    done = subprocess.run(listed, check=True, capture_output=True, timeout=120)
    packages = {row["name"] for row in json.loads(done.stdout)}
    assert not packages & {"torch", "transformers", "lightning", "scipy", "scikit-learn"}
    example = ROOT / "examples" / "parse_duration.json"
    done = subprocess.run(
        [str(venv / "bin" / "dcl"), "attribute", str(example), "--output", "json", "--top-k", "1"],
        capture_output=True,
        timeout=120,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    (run,) = dcl.read_trajectories(example)
    (expected,) = dcl.load()(run).findings(top_k=1)
    assert json.loads(done.stdout)["faults"][0]["agent"] == expected.fault.agent
