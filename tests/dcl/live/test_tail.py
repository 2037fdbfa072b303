from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import light

from dcl.live.tail import StreamTail, Tail


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def add(log: Path, text: str) -> None:
    with log.open("a") as stream:
        stream.write(text)


def read_all(tail: Tail) -> list[str]:
    """What there is to read now; a file that was moved away takes a call of its own."""
    lines = []
    for _ in range(5):
        lines += [line.content.decode() for line in tail.read(0)]
    return lines


def restart(tail: Tail, log: Path) -> Tail:
    position: Any = json.loads(json.dumps(tail.position))
    tail.close()
    return Tail(log, position)


def test_lines_come_when_they_are_finished(log: Path) -> None:
    tail = Tail(log)
    assert read_all(tail) == []
    add(log, "one\ntw")
    assert read_all(tail) == ["one"]
    add(log, "o\n\nthree")
    assert read_all(tail) == ["two", ""]
    add(log, "\n")
    assert read_all(tail) == ["three"]
    tail.close()


def test_a_place_is_the_byte_where_a_line_starts(log: Path) -> None:
    add(log, "üü\nb\n")
    tail = Tail(log)
    assert [line.place for line in tail.read(0)] == [f"{log}: byte 0", f"{log}: byte 5"]
    tail.close()


@light
@given(texts=st.lists(st.text("ab\n", max_size=9), max_size=8), restarts=st.sets(st.integers(0, 7)))
def test_however_it_grows_each_line_comes_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], restarts: set[int]
) -> None:
    log = tmp_path_factory.mktemp("tail") / "log"
    log.touch()
    tail, lines = Tail(log), []
    for i, text in enumerate(texts):
        add(log, text)
        lines += read_all(tail)
        if i in restarts:
            tail = restart(tail, log)
    tail.close()
    assert lines == "".join(texts).split("\n")[:-1]


def test_a_file_that_is_moved_away_is_read_to_its_end(log: Path, tmp_path: Path) -> None:
    add(log, "1\n")
    tail = Tail(log)
    assert read_all(tail) == ["1"]
    log.rename(tmp_path / "log.1")
    add(tmp_path / "log.1", "2\n3")
    add(log, "4\n")
    assert read_all(tail) == ["2", "3", "4"]
    (tmp_path / "log.1").unlink()
    add(log, "5\n")
    assert read_all(tail) == ["5"]
    tail.close()


def test_a_file_that_is_moved_away_while_nobody_reads_is_found(log: Path, tmp_path: Path) -> None:
    add(log, "1\n2\n")
    tail = Tail(log)
    assert read_all(tail) == ["1", "2"]
    add(log, "3\n")
    log.rename(tmp_path / "log.1")
    add(log, "4\n")
    tail = restart(tail, log)
    assert read_all(tail) == ["3", "4"]
    tail = restart(tail, log)
    assert read_all(tail) == []
    tail.close()


def test_the_unfinished_end_of_a_moved_file_comes_once(log: Path, tmp_path: Path) -> None:
    add(log, "1\n2")
    tail = Tail(log)
    read_all(tail)
    log.rename(tmp_path / "log.1")
    add(log, "3\n")
    assert [line.content for line in tail.read(0)] == [b"2"]
    tail = restart(tail, log)
    assert read_all(tail) == ["3"]
    tail.close()


def test_a_file_that_is_gone_for_a_while_is_waited_for(log: Path) -> None:
    add(log, "1\n")
    tail = Tail(log)
    read_all(tail)
    log.unlink()
    assert read_all(tail) == []
    add(log, "2\n")
    assert read_all(tail) == ["2"]
    tail.close()


def test_a_file_that_is_cut_is_read_from_its_start(log: Path) -> None:
    add(log, "1\n2\n")
    tail = Tail(log)
    assert read_all(tail) == ["1", "2"]
    os.truncate(log, 0)
    add(log, "3\n")
    assert read_all(tail) == ["3"]
    tail.close()


def test_a_file_that_was_copied_and_cut_while_nobody_read_starts_anew(
    log: Path, tmp_path: Path
) -> None:
    add(log, "1\n")
    tail = Tail(log)
    read_all(tail)
    shutil.copy(log, tmp_path / "log.1")
    os.truncate(log, 0)
    add(log, "2\n3\n4\n")
    tail = restart(tail, log)
    assert read_all(tail) == ["2", "3", "4"]
    tail.close()


def test_without_following_the_end_is_the_end(log: Path) -> None:
    add(log, "1\n2")
    tail = Tail(log, follow=False)
    assert read_all(tail) == ["1", "2"]
    assert tail.is_finished
    tail.close()
    tail = Tail(log.with_name("none"), follow=False)
    with pytest.raises(FileNotFoundError):
        tail.read(0)


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_stream_ends(end: str) -> None:
    tail = StreamTail(io.BytesIO(b"1\n2" + end.encode()), "<stdin>")
    lines = []
    while not tail.is_finished:
        lines += tail.read(0)
    assert lines == [("<stdin>:1", b"1"), ("<stdin>:2", b"2")]


def test_a_stream_is_not_waited_for_longer_than_asked() -> None:
    reader, writer = os.pipe()
    with open(reader, "rb") as stream:
        tail = StreamTail(stream, "pipe")
        assert tail.read(0) == []
        os.write(writer, b"1\n2")
        assert [line.content for line in tail.read(0)] == [b"1"]
        os.close(writer)
        assert [line.content for line in tail.read(0)] == [b"2"]
        assert tail.is_finished
