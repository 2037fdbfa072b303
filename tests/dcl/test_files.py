"""Files that appear whole or not at all."""

from __future__ import annotations

from io import FileIO
from pathlib import Path

import pytest

from dcl.errors import ConfigError, needing
from dcl.files import claim, sync_folder, whole


def test_a_file_appears_at_the_end_of_the_block(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")
    with whole(file) as part:
        part.write_text("new")
        assert file.read_text() == "old"
    assert (file.read_text(), list(tmp_path.iterdir())) == ("new", [file])


def test_a_block_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")
    with pytest.raises(UnicodeEncodeError), whole(file) as part:
        part.write_text("ne\ud800", encoding="utf-8")
    assert (file.read_text(), list(tmp_path.iterdir())) == ("old", [file])


def test_writers_side_by_side_do_not_meet(tmp_path: Path) -> None:
    file = tmp_path / "a"
    with whole(file) as one, whole(file) as two:
        one.write_text("one")
        two.write_text("two")
    assert file.read_text() == "one"  # the outer block ends last


def test_a_file_is_claimed_once(tmp_path: Path) -> None:
    with FileIO(tmp_path / "lock", "a") as one, FileIO(tmp_path / "lock", "a") as two:
        claim(one, "taken")
        with pytest.raises(ConfigError, match="taken"):
            claim(two, "taken")
    sync_folder(tmp_path)
    sync_folder(tmp_path / "none")


def test_a_missing_package_is_named_with_the_extra_that_has_it() -> None:
    told = pytest.raises(ConfigError, match=r'doing needs nosuch, .* "dcl-attribution\[x\]"')
    with told, needing("x", "doing"):
        import nosuch.part  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ModuleNotFoundError), needing("x", "doing"):
        import dcl.nosuch  # type: ignore[import-not-found]  # noqa: F401


def test_a_name_as_long_as_a_file_system_takes_is_fine(tmp_path: Path) -> None:
    file = tmp_path / ("ü" * 127)
    with whole(file) as part:
        part.write_text("new")
    assert list(tmp_path.iterdir()) == [file]
