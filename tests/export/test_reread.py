from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dcl.artifact import CONFIG, NATURAL, open_artifact, read_manifest, write_artifact
from dcl.errors import ArtifactError, ConfigError
from dcl.runtime import load
from dcl.taxonomy import MODES
from dcl.trajectory import Example, Fault, Trajectory, Turn
from export.reread import reread


def example(number: int) -> Example:
    """A run of one of six systems whose faulty turn is the one that says so."""
    rng = np.random.default_rng(number)
    at = int(rng.integers(1, 5))
    turns = tuple(
        Turn(f"agent {i % 3}", "error" if i == at else "the sum", step=i) for i in range(5)
    )
    metadata = {"framework": f"system {number % 6}"}
    run = Trajectory(f"run-{number}", f"check {number}", turns, metadata=metadata)
    return Example(run, (Fault(turns[at].agent, MODES[0], at),))


EXAMPLES = [example(number) for number in range(24)]


def test_only_the_reading_changes(exported: Path, tmp_path: Path) -> None:
    out = reread(exported, tmp_path / "out", [EXAMPLES])
    before, after = read_manifest(exported), read_manifest(out)
    assert {n for n in after["files"] if after["files"][n] != before["files"].get(n)} == {
        NATURAL,
        CONFIG,
    }
    assert after["natural"]["runs"] == 24
    assert after["natural"]["systems"] == 6
    assert after["natural"]["step"] > after["natural"]["before"][1]
    assert after["parity"] == before["parity"]
    assert open_artifact(out).calibration == open_artifact(exported).calibration
    assert load(out, threads=1)(EXAMPLES[0].trajectory).is_finite


def test_places_and_models_that_do_not_fit_are_refused(
    exported: Path, trained: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="expected a new or empty folder"):
        reread(exported, exported, [EXAMPLES])
    with pytest.raises(ArtifactError, match="expected an exported model"):
        reread(trained, tmp_path / "out", [EXAMPLES])
    with pytest.raises(ConfigError, match="at least 5 systems"):
        reread(exported, tmp_path / "out", [EXAMPLES[:3]])
    artifact = open_artifact(exported)

    def write_files(folder: Path) -> None:
        for name in artifact.manifest["files"]:
            if name != CONFIG:
                (folder / name).write_bytes((exported / name).read_bytes())

    adapted = write_artifact(
        tmp_path / "adapted",
        write_files,
        window=artifact.window,
        calibration=artifact.calibration,
        model=artifact.model,
        training={},
        notes={"fit": {}},
    )
    with pytest.raises(ConfigError, match="adapted by `dcl fit`"):
        reread(adapted, tmp_path / "out", [EXAMPLES])
    assert not (tmp_path / "out").exists()
