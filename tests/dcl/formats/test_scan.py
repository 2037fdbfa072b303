from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dcl.errors import ConfigError, FormatError, TraceError
from dcl.formats import FORMATS, detect, read_examples, read_trajectories, scan
from dcl.formats.source import natural, stem
from dcl.trajectory import Example, Trajectory


def row(name: str = "a", content: str = "hello") -> dict[str, Any]:
    return {"id": name, "turns": [{"agent": "A", "content": content}]}


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def ids(path: str | Path) -> list[str]:
    return [run.id for run in read_trajectories(path)]


def outcome(path: str | Path, **options: str) -> list[str]:
    """Ids of what was read, and the texts of errors, in order."""
    return [
        item.trajectory.id if isinstance(item, Example) else str(item)
        for item in scan(path, **options)
    ]


LINES = "".join(json.dumps(row(name)) + "\n" for name in "abc")


def lay_out(*names: str) -> str:
    return "\n".join(json.dumps(row(name), indent=1) for name in names)


@pytest.mark.parametrize(
    "text",
    [
        LINES,
        LINES.replace("\n", "\r\n"),
        LINES.replace("\n", "\n\n  \n"),
        "\ufeff" + LINES,
        LINES.replace("\n", ""),
        LINES.replace("\n", " "),
        lay_out("a", "b", "c"),
        "\n\n" + lay_out("a", "b", "c") + "\n\n",
        LINES[: LINES.index("\n") + 1] + lay_out("b", "c"),
        json.dumps([row("a"), row("b"), row("c")]),
        json.dumps([row("a"), row("b"), row("c")], indent=2),
    ],
)
def test_reads_every_layout_of_documents(tmp_path: Path, text: str) -> None:
    assert ids(write(tmp_path, "x.json", text)) == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.json"])
def test_unpacks_by_first_bytes(tmp_path: Path, name: str) -> None:
    assert ids(write(tmp_path, name, gzip.compress(LINES.encode()))) == ["a", "b", "c"]
    assert ids(write(tmp_path, name, lzma.compress(LINES.encode()))) == ["a", "b", "c"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
def test_reads_standard_input(pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(pack(LINES.encode()))))
    assert ids("-") == ["a", "b", "c"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{")))
    assert outcome("-")[0].startswith("<stdin>:1: expected JSON")


def test_names_a_chat_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps([{"role": "user", "content": "x"}])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert ids("-") == ["stdin"]


@pytest.mark.parametrize("bad", ['{"id": "b", "tur', "[1,", "nonsense", '{"id": "b"}', "7"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_bad_line_costs_only_itself(tmp_path: Path, bad: str, position: int) -> None:
    lines = LINES.splitlines()
    lines[position] = bad
    path = write(tmp_path, "x.jsonl", "\n".join(lines))
    found = outcome(path)
    assert found[position].startswith(f"{path}:{position + 1}: expected ")
    assert [name for name in found if len(name) == 1] == [
        name for i, name in enumerate("abc") if i != position
    ]
    with pytest.raises(TraceError):
        list(read_examples(path))


def test_a_damaged_first_line_is_a_line_under_any_name(tmp_path: Path) -> None:
    path = write(tmp_path, "x.json", '{"id": "a", "tur\n' + LINES)
    found = outcome(path)
    assert found[0].startswith(f"{path}:1: expected JSON")
    assert found[1:] == ["a", "b", "c"]


def test_streams_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", LINES + "\x00")
    items = scan(path)
    assert isinstance(next(items), Example)
    items.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b"", "x.json: expected JSON, got an empty file"),
        ("x.json", b" \n\t\n", "x.json: expected JSON, got an empty file"),
        ("x.json", lay_out("a")[:-9].encode(), "x.json:6: expected JSON, got text that is none"),
        ("x.json", '{"id": "é"}'.encode("utf-16"), "x.json: expected UTF-8, got UTF-16"),
        ("x.json", '{"id": "é"}'.encode("utf-16-le"), "x.json: expected UTF-8, got UTF-16"),
        ("x.json", '{"id": "é"}'.encode("latin-1"), "x.json:1: expected UTF-8, got other bytes"),
        ("x.json.gz", gzip.compress(LINES.encode())[:-20], "x.json.gz: expected a readable file"),
        ("x.json.xz", lzma.compress(LINES.encode())[:-20], "x.json.xz: expected a readable file"),
        ("x.json", b'{"a":' * 100_000, "x.json:1: expected JSON"),
        ("x.json", b'{"id": ' + b"9" * 9999 + b"}", "x.json:1: expected JSON of a usual size"),
        ("x.json", b"{}", "x.json: expected a log in one of the formats .*, got an empty object"),
        ("x.json", b"[]", "got an empty list"),
        ("x.json", b"[1]", "got a list that starts with a number"),
        ("x.json", b"null", "got nothing"),
        ("x.json", b'{"messages": {}}', "got an object with the keys messages"),
        (
            "x.json",
            b'{"id": "a", "turns": [{"agent": "A", "content": "x"}, {"content": "x"}]}',
            r"x.json: turns\[1\]\.agent: expected a string, got nothing",
        ),
        ("x.json", b'{"id": "a", "turns": {}}', "x.json: turns: expected a list of turns, got an"),
        ("x.json", b'{"id": "a", "turns": []}', "x.json: turns: expected at least one turn"),
        ("x.json", b'{"input": {"conversation_history": 1}}', "history: expected a list, got a nu"),
    ],
)
def test_says_what_is_wrong_in_one_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(TraceError, match=message) as caught:
        list(read_examples(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_an_error_and_no_crash(tmp_path: Path) -> None:
    (message,) = outcome(tmp_path / "gone.json")
    assert message.startswith(f"{tmp_path}/gone.json: expected a readable file, got: No such file")


def test_odd_characters_survive(tmp_path: Path) -> None:
    texts = ["a\x00b", "\ud800 alone", "line\u2028separator\x85", "tab\tnewline\n"]
    lines = "\n".join(json.dumps(row(content=text)) for text in texts)
    path = write(tmp_path, "x.jsonl", lines)
    assert [run.turns[0].content for run in read_trajectories(path)] == texts
    raw = json.dumps(row(content="@")).replace("@", "a\x00b\u2028c")
    (run,) = read_trajectories(write(tmp_path, "y.json", raw))
    assert run.turns[0].content == "a\x00b\u2028c"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_no_json_read_as_null(tmp_path: Path, number: str) -> None:
    text = json.dumps(row() | {"metadata": {"score": "@", "rest": 1e308}}).replace('"@"', number)
    run = next(read_trajectories(write(tmp_path, "x.json", text)))
    assert run.metadata == {"score": None, "rest": 1e308}
    assert Trajectory.from_json(text) == run


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_line_that_is_nested_too_deep_costs_only_itself(tmp_path: Path, position: int) -> None:
    lines = LINES.splitlines()
    lines[position] = '{"id": "deep", "turns": ' + "[" * 200_000 + "]" * 200_000 + "}"
    for count in (2, 3):
        kept = lines[:count] if position < count else lines[-count:]
        path = write(tmp_path, "x.json", "\n".join(kept))
        at = kept.index(lines[position])
        found = outcome(path)
        assert found.pop(at) == (
            f"{path}:{at + 1}: expected JSON of a usual depth, got deeper nesting"
        )
        assert found == [json.loads(line)["id"] for i, line in enumerate(kept) if i != at]


@pytest.mark.skipif(os.name != "posix", reason="needs named pipes")
def test_a_pipe_in_a_folder_is_an_error_and_no_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1.json")
    (tmp_path / "2.json").symlink_to(os.devnull)
    write(tmp_path, "3.json", json.dumps(row("c")))
    for name, message in zip(("1.json", "2.json"), found := outcome(tmp_path), strict=False):
        assert message == (
            f"{tmp_path / name}: pipes and devices in a folder are not read; name it to read it"
        )
    assert found[2:] == ["c"]


@pytest.mark.skipif(os.name != "posix", reason="needs named pipes")
def test_a_pipe_that_is_named_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as writer:
        writer.submit((tmp_path / "pipe").write_text, LINES)
        assert ids(tmp_path / "pipe") == ["a", "b", "c"]


def test_walks_folders_in_natural_order(tmp_path: Path) -> None:
    for name in ("10.json", "2.json", "1.json", "b/3.jsonl", "a/x12.json", "a/x3.json"):
        write(tmp_path, name, json.dumps(row(name)))
    write(tmp_path, "notes.md", "no log")
    write(tmp_path, ".git/1.json", json.dumps(row("git")))
    write(tmp_path, ".1.json", json.dumps(row("hidden")))
    write(tmp_path, "modes.json", json.dumps({"run_1": {"agent": "A", "mode": "FM-1.1"}}))
    found = outcome(tmp_path)
    assert [name for name in found if name.endswith(("json", "jsonl"))] == [
        "1.json",
        "2.json",
        "10.json",
        "a/x3.json",
        "a/x12.json",
        "b/3.jsonl",
    ]
    errors = [name for name in found if "expected a log" in name or "hidden" in name]
    assert len(errors) == 2
    assert ids(tmp_path / ".1.json") == ["hidden"]


def test_an_empty_folder_says_what_it_looks_for(tmp_path: Path) -> None:
    (message,) = outcome(tmp_path)
    assert message.startswith(f"{tmp_path}: expected files ending in .json, .jsonl")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_a_locked_file_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, "x.json", LINES)
    path.chmod(0)
    assert "Permission denied" in outcome(path)[0]


def test_a_named_format_must_fit(tmp_path: Path) -> None:
    path = write(tmp_path, "x.json", json.dumps(row()))
    assert outcome(path, format="native") == ["a"]
    with pytest.raises(FormatError, match=r"x.json: expected the format aegis, got an object"):
        list(read_examples(path, format="aegis"))
    with pytest.raises(ConfigError, match="format: expected one of auto, native"):
        scan(path, format="nativ")
    with pytest.raises(ConfigError):
        read_trajectories(path, format="nativ")


def test_detect_lists_what_it_knows() -> None:
    documents: list[object] = [{}, [], None, 1, "x", {"labels": {}}, [[]], {"question": "x"}]
    for document in documents:
        with pytest.raises(FormatError) as caught:
            detect(document)
        assert all(name in str(caught.value) for name in FORMATS)


def test_reads_lists_of_conversations(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    for documents in ([messages, messages], [{"messages": messages}, {"messages": messages}]):
        assert ids(write(tmp_path, "x.json", json.dumps(documents))) == ["x[0]", "x[1]"]


def test_same_ids_survive(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", LINES + LINES)
    assert ids(path) == [*"abcabc"]


def test_sorts_and_names_places() -> None:
    names = ["x10", "x9", "X1", "x01", "1", "a", "10a", "2"]
    assert sorted(names, key=natural) == ["1", "2", "10a", "a", "X1", "x01", "x9", "x10"]
    assert stem("a/b.c/run.v2.json") == "run.v2"
    assert stem("run.jsonl.xz:12") == "run:12"
    assert stem("run.json[3]") == "run[3]"
    assert stem("<stdin>:2") == "stdin:2"
