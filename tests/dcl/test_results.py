from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dcl.bulk import Mark
from dcl.errors import ConfigError
from dcl.results import Results

COMMAND: dict[str, Any] = {"model": "m", "top_k": None}
LINES = ['{"id": "a"}\n', '{"id": "b"}\n{"id": "c"}\n', '{"id": "d"}\n']


def mark(run: str, number: int) -> Mark:
    return Mark(0, number, run, number, 0)


def fill(file: Path, lines: list[str], start: int = 0) -> None:
    """Add lines as one process would, from the one with this number on."""
    with Results(file, COMMAND) as results:
        for number, line in enumerate(lines[start:], start=start + 1):
            results.add(line, mark("r", number), failed=number)


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    fill(tmp_path / "whole.jsonl", LINES)
    return (tmp_path / "whole.jsonl").read_bytes()


def test_what_was_added_is_there_and_so_is_its_place(tmp_path: Path, whole: bytes) -> None:
    assert whole == "".join(LINES).encode()
    with Results(tmp_path / "whole.jsonl", COMMAND) as results:
        assert results.mark == mark("r", 3)
        assert results.failed == 3


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_write_torn_at_any_byte_is_cut_off_and_done_again(
    tmp_path: Path, whole: bytes, done: int
) -> None:
    file, progress = tmp_path / "out.jsonl", tmp_path / "out.jsonl.progress"
    fill(file, LINES[:done])
    before, saved = file.read_bytes(), progress.read_bytes()
    after = before + LINES[done].encode()
    for size in range(len(before), len(after) + 1):
        file.write_bytes(after[:size])
        progress.write_bytes(saved)
        fill(file, LINES, start=done)
        assert file.read_bytes() == whole


def test_an_empty_file_is_as_good_as_none(tmp_path: Path, whole: bytes) -> None:
    (tmp_path / "out.jsonl").touch()
    fill(tmp_path / "out.jsonl", LINES)
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_a_file_of_somebody_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text("mine\n")
    with pytest.raises(ConfigError, match=r"expected out\.jsonl\.progress beside a file"):
        Results(file, COMMAND)
    assert file.read_text() == "mine\n"


def test_results_of_another_command_are_refused_and_left_alone(
    tmp_path: Path, whole: bytes
) -> None:
    file = tmp_path / "whole.jsonl"
    with pytest.raises(ConfigError, match="expected top_k None, got 3; name another file"):
        Results(file, {**COMMAND, "top_k": 3})
    with pytest.raises(ConfigError, match="expected backend None, got 'onnxruntime'"):
        Results(file, {**COMMAND, "backend": "onnxruntime"})  # an older version knew of none
    assert file.read_bytes() == whole


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    (tmp_path / ".out.jsonl.progress.0a1b2c3d.part").touch()
    fill(file, LINES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.progress"]


def test_a_name_that_is_too_long_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    fill(tmp_path / ("a" * 246), LINES)
    (tmp_path / "only").mkdir()
    with pytest.raises(ConfigError, match="File name too long"):
        Results(tmp_path / "only" / ("a" * 250), COMMAND)
    assert not list((tmp_path / "only").iterdir())


def test_two_processes_cannot_write_one_file(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    with Results(file, COMMAND), pytest.raises(ConfigError, match="another process writes there"):
        Results(file, COMMAND)
    fill(file, LINES)


def damage(saved: dict[str, Any], **keys: Any) -> str:
    return json.dumps({**saved, **keys})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"schema": "dcl.progress/9"}, "expected the schema dcl.progress/1"),
        ({"mark": {"entry": 1, "colour": 2}}, "expected other keys"),
        ({"mark": None}, "expected other keys"),
        ({"command": []}, "expected a command"),
        ({"command": {"model": "m"}, "failed": 1 << 70}, "expected whole numbers"),
        ({"bytes": -1}, "expected whole numbers"),
        ({"failed": "many"}, "expected whole numbers"),
        ({"bytes": 10_000}, "speaks of 10000 bytes of results, there are 48"),
        ({"bytes": 13}, "a line that ends at byte 13"),
    ],
)
def test_damaged_progress_is_refused(
    tmp_path: Path, whole: bytes, keys: dict[str, Any], message: str
) -> None:
    progress = tmp_path / "whole.jsonl.progress"
    progress.write_text(json.dumps(json.loads(progress.read_text()) | keys))
    with pytest.raises(ConfigError, match=message):
        Results(tmp_path / "whole.jsonl", COMMAND)
    assert (tmp_path / "whole.jsonl").read_bytes() == whole


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_progress_that_is_none_is_refused(tmp_path: Path, whole: bytes, text: str) -> None:
    (tmp_path / "whole.jsonl.progress").write_text(text)
    with pytest.raises(ConfigError, match="remove it and the results to start again"):
        Results(tmp_path / "whole.jsonl", COMMAND)


@pytest.mark.parametrize("place", ["missing/out.jsonl", "file/out.jsonl", "."])
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out .*(cannot write there|expected a file)"):
        Results(tmp_path / place, COMMAND)


def test_a_full_disk_names_the_file_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.jsonl"
    fill(file, LINES[:1])
    with Results(file, COMMAND) as results:

        def full(number: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("dcl.results.os.fsync", full)
            with pytest.raises(OSError, match="No space left on device: '--out"):
                results.add(LINES[1], mark("r", 2), failed=2)
    fill(file, LINES, start=1)
    assert file.read_text() == "".join(LINES)
