from __future__ import annotations

import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_model
import pytest
from typer.testing import CliRunner, Result

import dcl
from dcl import cli
from dcl.artifact import Window, write_artifact
from dcl.bag import MOST_TURNS
from dcl.commands import logs
from dcl.formats import read_examples
from dcl.trajectory import Example, Fault

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "parse_duration.json"
FAKE = [sys.executable, str(Path(__file__).with_name("fake_model.py"))]
BAD, GOOD = "it stays as it is", "fine"

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process, with the fake model."""
    monkeypatch.setattr(cli, "load_model", fake_model.load)

    def call(*args: str | Path, stdin: str | bytes = "") -> Result:
        return CliRunner().invoke(cli.app, [str(arg) for arg in args], input=stdin)

    return call


def write_run(file: Path, *said: str, **keys: Any) -> Path:
    """A native log whose agents a, b, c, ... say one thing each."""
    row = fake_model.make_run(keys.pop("id", file.stem), *said).to_dict() | keys
    file.write_text(json.dumps(row))
    return file


def write_lines(file: Path, *rows: str) -> Path:
    file.write_text("".join(row + "\n" for row in rows))
    return file


def row_of(name: str, *said: str) -> str:
    return fake_model.make_run(name, *said).to_json()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three logs; the second cannot be read."""
    logs = tmp_path / "logs"
    logs.mkdir()
    write_run(logs / "1.json", GOOD, BAD)
    (logs / "2.json").write_text('{"id": ')
    write_run(logs / "10.json", GOOD)
    return logs


# attribute: what comes out


def test_attribute_prints_the_verdict(run: Run) -> None:
    result = run("attribute", EXAMPLE)
    assert result.exit_code == 0
    assert "coder  FM-2.5  Ignore other agents     4  0.95" in result.stdout
    assert "I have now added format_duration" in result.stdout
    assert result.stderr == ""


def test_json_of_one_file_is_one_object_with_its_source(run: Run) -> None:
    result = run("attribute", EXAMPLE, "--output", "json")
    row = json.loads(result.stdout)
    keys = "id source agents modes faults evidence steps step_sets abstains"
    assert list(row) == keys.split()
    assert row["source"] == str(EXAMPLE)
    assert row["faults"] == [
        {"agent": "coder", "mode": "FM-2.5", "step": 4, "turn": 4, "prob": 0.952574}
    ]


def test_options_shape_the_json(run: Run) -> None:
    args = ("attribute", EXAMPLE, "--output", "json")
    assert len(json.loads(run(*args, "--top-k", 4).stdout)["faults"]) == 4
    assert json.loads(run(*args, "--threshold", 0.99).stdout)["faults"] == []
    assert len(json.loads(run(*args, "--evidence", 7).stdout)["evidence"]) == 7


def test_a_folder_gives_a_list_in_natural_order_and_goes_on_after_a_bad_file(
    run: Run, folder: Path
) -> None:
    result = run("attribute", folder, "--output", "json")
    assert [row["id"] for row in json.loads(result.stdout)] == ["1", "10"]
    assert result.exit_code == 3
    assert result.stderr.startswith(f"error: {folder / '2.json'}:1: expected JSON")
    assert result.stderr.count("\n") == 1


def test_a_folder_with_one_log_gives_a_list_too(run: Run, tmp_path: Path) -> None:
    write_run(tmp_path / "1.json", GOOD)
    assert len(json.loads(run("attribute", tmp_path, "--output", "json").stdout)) == 1


def test_several_files_keep_their_order_and_sources(run: Run, tmp_path: Path) -> None:
    files = [write_run(tmp_path / name, GOOD) for name in ("b.json", "a.json")]
    rows = json.loads(run("attribute", *files, "--output", "json").stdout)
    assert [row["source"] for row in rows] == [str(file) for file in files]


def test_more_runs_than_a_batch_come_out_in_order(run: Run, tmp_path: Path) -> None:
    names = [f"run-{i}" for i in range(40)]
    log = write_lines(tmp_path / "log.jsonl", *(row_of(name, GOOD) for name in names))
    result = run("attribute", log, "--output", "jsonl")
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == names


def test_at_most_a_batch_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def score(bags: Any) -> Any:
        sizes.append(len(bags))
        return fake_model.score(bags)

    model = fake_model.load()
    model.scorer = score
    monkeypatch.setattr(cli, "load_model", lambda path, **options: model)
    log = write_lines(tmp_path / "log.jsonl", *(row_of(str(i), GOOD) for i in range(40)))
    CliRunner().invoke(cli.app, ["attribute", str(log)])
    assert sizes == [16, 16, 8]


def test_standard_input_is_read(run: Run) -> None:
    result = run("attribute", "-", "--output", "json", stdin=row_of("piped", GOOD, BAD))
    row = json.loads(result.stdout)
    assert (row["id"], row["source"]) == ("piped", "<stdin>")
    assert row["faults"][0]["agent"] == "b"


def test_lone_surrogates_survive_as_escapes(run: Run, tmp_path: Path) -> None:
    log = write_run(tmp_path / "log.json", f"{BAD} \ud83d", id="half \ud83d")
    result = run("attribute", log, "--output", "jsonl")
    assert result.stdout.isascii()
    assert json.loads(result.stdout)["id"] == "half \ud83d"
    assert run("attribute", log).exit_code == 0


def test_control_characters_reach_no_terminal(run: Run, tmp_path: Path) -> None:
    log = write_run(tmp_path / "log.json", f"\x1b[2J{BAD}", id="\x1b]0;x\x07")
    (tmp_path / "bad\x1b[2J.json").write_text("{")
    result = run("attribute", log, tmp_path / "bad\x1b[2J.json")
    assert "\x1b" not in result.output
    assert "\\x1b[2J" in result.stdout
    assert "bad\\x1b[2J.json" in result.stderr


# attribute: exit codes


@pytest.mark.parametrize("output", ["table", "json", "jsonl"])
@pytest.mark.parametrize(
    ("gate", "code"),
    [("0.9", 1), ("0.99", 0), ("FM-2.5", 1), ("FM-2.5:0.99", 0), ("FM-1.1", 0)],
)
def test_fail_on_is_the_same_in_every_format(run: Run, output: str, gate: str, code: int) -> None:
    result = run("attribute", EXAMPLE, "--output", output, "--fail-on", gate)
    assert result.exit_code == code
    assert result.stderr == ("--fail-on: 1 of 1 traces\n" if code else "")
    assert result.stdout


def test_fail_on_may_be_given_twice_and_ignores_what_is_shown(run: Run) -> None:
    args = ("attribute", EXAMPLE, "--threshold", 1, "--fail-on", "FM-1.1", "--fail-on", "FM-2.5")
    assert run(*args).exit_code == 1


def test_an_unreadable_trace_wins_over_a_finding(run: Run, folder: Path) -> None:
    assert run("attribute", folder, "--fail-on", "0.5").exit_code == 3


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--fail-on", "3"], "--fail-on: expected a probability from 0 to 1"),
        (["--threshold", "1.5"], "expected a probability from 0 to 1"),
        (["--threshold", "nan"], "expected a probability from 0 to 1"),
        (["--threshold", "0.5", "--top-k", "1"], "not both"),
        (["--top-k", "0"], "--top-k"),
        (["--threads", "0"], "--threads"),
        (["--evidence", "-1"], "--evidence"),
        (["--format", "yaml"], "expected auto, native,"),
        (["--output", "xml"], "--output"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_usage_is_2_before_anything_is_read(run: Run, args: list[str], said: str) -> None:
    result = run("attribute", "nowhere.json", *args)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "nowhere.json" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "Missing command; see dcl --help"),
        (["atribute"], "No such command 'atribute'"),
        (["--nonsense"], "No such option: --nonsense; see dcl --help"),
        (["attribute"], "Missing argument"),
        (["attribute", "--top-k"], "--top-k"),
        (["models"], "Missing command; see dcl models --help"),
        (["models", "verify", "a", "b"], "see dcl models verify --help"),
    ],
)
def test_wrong_commands_are_one_line_that_leads_to_help(args: list[str], said: str) -> None:
    result = CliRunner().invoke(cli.app, args, prog_name="dcl")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("output", ["table", "json", "jsonl"])
def test_a_missing_log_is_3(run: Run, tmp_path: Path, output: str) -> None:
    result = run("attribute", tmp_path / "nowhere.json", "--output", output)
    assert result.exit_code == 3
    assert result.stderr.startswith(f"error: {tmp_path / 'nowhere.json'}: ")
    assert result.stdout == ("[]\n" if output == "json" else "")


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "hello", '{"turns": []}', "\x00\x01"])
def test_a_log_that_holds_no_run_is_3(run: Run, tmp_path: Path, text: str) -> None:
    log = tmp_path / "log.json"
    log.write_text(text)
    result = run("attribute", log)
    assert result.exit_code == 3
    assert result.stderr.startswith(f"error: {log}")


def test_an_empty_folder_is_3(run: Run, tmp_path: Path) -> None:
    assert run("attribute", tmp_path).exit_code == 3


def test_the_named_format_is_enforced(run: Run) -> None:
    result = run("attribute", EXAMPLE, "--format", "aegis")
    assert result.exit_code == 3
    assert "expected the format aegis" in result.stderr


def test_a_missing_model_is_4_and_nothing_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    args = ["attribute", str(EXAMPLE), "--model", str(tmp_path / "none"), "--out", str(out)]
    result = CliRunner().invoke(cli.app, args)
    assert result.exit_code == 4
    assert result.stderr.startswith("error: ")
    assert str(tmp_path / "none") in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("output", ["table", "json", "jsonl"])
def test_a_model_that_gives_nan_is_4_in_every_format(run: Run, tmp_path: Path, output: str) -> None:
    log = write_run(tmp_path / "log.json", "NAN", GOOD)
    result = run("attribute", log, "--output", output)
    assert result.exit_code == 4
    assert "damaged" in result.stderr


def test_a_broken_installation_is_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dcl.runtime", None)
    result = CliRunner().invoke(cli.app, ["attribute", str(EXAMPLE)])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the installation is incomplete")


# --out


def test_out_is_written_whole_and_keeps_the_mode_of_what_was_there(
    run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    out.write_text("old")
    out.chmod(0o640)
    result = run("attribute", EXAMPLE, "--output", "json", "--out", out)
    assert (result.exit_code, result.stdout) == (0, "")
    assert json.loads(out.read_text())["id"] == "parse-duration"
    assert out.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [out]


def test_a_new_out_has_the_usual_mode(run: Run, tmp_path: Path) -> None:
    run("attribute", EXAMPLE, "--out", tmp_path / "out.txt")
    (tmp_path / "plain").touch()
    modes = {file.stat().st_mode for file in tmp_path.iterdir()}
    assert len(modes) == 1


def test_out_through_a_link_writes_the_file_behind_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    run("attribute", EXAMPLE, "--out", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text()


def test_a_failed_run_leaves_what_was_there(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text("old")
    log = write_run(tmp_path / "log.json", "NAN", GOOD)
    assert run("attribute", log, "--out", out).exit_code == 4
    assert out.read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log.json", "out.json"]


@pytest.mark.parametrize("place", ["missing/out.json", "file/out.json", "."])
def test_a_place_that_cannot_be_written_is_2_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def load(path: Path | None, **options: object) -> Any:
        pytest.fail("the model was loaded")

    monkeypatch.setattr(cli, "load_model", load)
    (tmp_path / "file").touch()
    result = CliRunner().invoke(
        cli.app, ["attribute", str(EXAMPLE), "--out", str(tmp_path / place)]
    )
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: --out {tmp_path / place}: cannot write there: ")


def test_a_device_is_written_to_and_not_replaced(run: Run) -> None:
    assert run("attribute", EXAMPLE, "--out", os.devnull).exit_code == 0
    assert Path(os.devnull).is_char_device()


def test_out_dash_is_standard_output(run: Run) -> None:
    assert "coder" in run("attribute", EXAMPLE, "--out", "-").stdout


# validate


def test_validate_sums_up(run: Run) -> None:
    result = run("validate", EXAMPLE, "--strict")
    assert result.exit_code == 0
    assert result.stdout == (
        "traces 1, turns 10, agents 4, labelled 1, labels 1, unreadable 0, warnings 0\n"
    )


def test_validate_finds_labels_that_fit_nothing_and_ids_used_twice(
    run: Run, tmp_path: Path
) -> None:
    faults = [{"agent": "zoe", "step": 1}, {"agent": "a", "step": 9}, {"agent": "a", "step": 0}]
    first = write_run(tmp_path / "1.json", GOOD, BAD, id="same", faults=faults)
    second = write_run(tmp_path / "2.json", GOOD, id="same", faults=[])
    result = run("validate", first, second)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"warning: {first}: trace same: a label names the agent 'zoe', who never speaks",
        f"warning: {first}: trace same: a label names step 9, which does not exist",
        f"warning: {second}: trace same: this id was seen before",
        "traces 2, turns 3, agents 2, labelled 2, labels 3, unreadable 0, warnings 3",
    ]
    assert run("validate", first, second, "--strict").exit_code == 1


def test_validate_reports_every_bad_file(run: Run, folder: Path) -> None:
    result = run("validate", folder, "--strict")
    assert result.exit_code == 3
    assert result.stdout.startswith(f"error: {folder / '2.json'}:1: ")
    assert "traces 2, turns 3," in result.stdout
    assert "unreadable 1," in result.stdout


# convert


@pytest.mark.parametrize(
    ("name", "opened"), [("o.jsonl", open), ("o.jsonl.gz", gzip.open), ("o.jsonl.xz", lzma.open)]
)
def test_convert_keeps_runs_and_labels(
    run: Run, tmp_path: Path, name: str, opened: Callable[..., Any]
) -> None:
    out = tmp_path / name
    assert run("convert", EXAMPLE, EXAMPLE, "--out", out).exit_code == 0
    assert list(read_examples(out)) == list(read_examples(EXAMPLE)) * 2
    with opened(out, "rt") as stream:
        assert [json.loads(line)["id"] for line in stream] == ["parse-duration"] * 2
    assert list(tmp_path.iterdir()) == [out]


def test_convert_packs_equal_input_into_equal_bytes(run: Run, tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        run("convert", EXAMPLE, "--out", tmp_path / name)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_convert_goes_on_after_a_bad_file(run: Run, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert run("convert", folder, "--out", out).exit_code == 3
    assert [example.trajectory.id for example in read_examples(out)] == ["1", "10"]


def test_convert_goes_on_after_a_run_that_is_nested_too_deep(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(row: dict[str, Any]) -> str:
        if row["id"] == "deep":
            raise RecursionError
        return json.dumps(row)

    monkeypatch.setattr(logs, "dump", refuse)
    log = write_lines(tmp_path / "log.jsonl", row_of("deep", GOOD), row_of("flat", GOOD))
    result = run("convert", log, "--out", tmp_path / "out.jsonl")
    assert result.exit_code == 3
    assert result.stderr == (
        f"error: {log}: trace deep: expected JSON of a usual depth, got deeper nesting\n"
    )
    assert [example.trajectory.id for example in read_examples(tmp_path / "out.jsonl")] == ["flat"]


def test_attribute_goes_on_after_a_run_that_is_too_long(run: Run, tmp_path: Path) -> None:
    turns = [{"agent": "a", "content": "x"}] * (MOST_TURNS + 1)
    long = json.dumps({"id": "long", "turns": turns})
    log = write_lines(tmp_path / "log.jsonl", long, row_of("short", GOOD), long)
    result = run("attribute", log, "--output", "jsonl")
    assert result.exit_code == 3
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == ["short"]
    assert result.stderr.count("\n") == 2
    assert result.stderr.startswith(
        f"error: {log}: trace long: expected at most 4000 turns, got 4001; cut the log"
    )


@pytest.mark.parametrize("depth", [50, 400, 700, 800, 900, 950, 100_000])
def test_convert_survives_any_depth(run: Run, tmp_path: Path, depth: int) -> None:
    deep = row_of("deep", GOOD)[:-1] + ', "more": ' + "[" * depth + "]" * depth + "}"
    log = write_lines(tmp_path / "log.jsonl", deep, row_of("flat", GOOD))
    result = run("convert", log, "--out", tmp_path / "out.jsonl")
    names = [example.trajectory.id for example in read_examples(tmp_path / "out.jsonl")]
    assert (result.exit_code, names) in ((0, ["deep", "flat"]), (3, ["flat"]))


def test_convert_writes_numbers_that_json_has_not_as_null(run: Run, tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log.jsonl", row_of("a", GOOD)[:-1] + ', "score": 1e999}')
    result = run("convert", log, "--out", "-")
    assert (result.exit_code, json.loads(result.stdout)["metadata"]) == (0, {"score": None})


def test_convert_without_any_run_leaves_the_file_alone(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    result = run("convert", tmp_path / "nowhere", "--out", out)
    assert result.exit_code == 3
    assert result.stderr.splitlines()[-1] == "error: nothing was written, as no trace could be read"
    assert out.read_text() == "old"


def test_convert_prints_to_a_dash_and_keeps_surrogates(run: Run) -> None:
    source = row_of("half \ud83d", GOOD)
    result = run("convert", "-", "--out", "-", stdin=source)
    assert result.stdout == source + "\n"


def test_check_labels_is_silent_without_labels() -> None:
    trajectory = fake_model.make_run("run", GOOD)
    assert list(logs.check_labels(Example(trajectory))) == []
    assert list(logs.check_labels(Example(trajectory, (Fault("a", None, None),)))) == []


# models and train


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    def write_files(inside: Path) -> None:
        for name in ("encoder.onnx", "head.onnx", "lexicon.npz", "tokenizer.json"):
            (inside / name).write_bytes(b"bytes")

    scores = {"pair": {"f1": 0.5}}
    return write_artifact(
        tmp_path / "model", write_files, window=Window(1, 0), notes={"scores": scores}
    )


def test_models_verify_checks_every_file(run: Run, model_folder: Path) -> None:
    result = run("models", "verify", model_folder)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"ok: {name}"
        for name in ("config.json", "encoder.onnx", "head.onnx", "lexicon.npz", "tokenizer.json")
    ]
    (model_folder / "head.onnx").write_bytes(b"bites")
    result = run("models", "verify", model_folder)
    assert result.exit_code == 4
    assert "damaged: head.onnx: expected sha256" in result.stdout


@pytest.mark.parametrize("kept", [(), ("head.onnx",), ("config.json", "encoder.onnx")])
def test_models_verify_refuses_a_manifest_that_leaves_files_out(
    run: Run, model_folder: Path, kept: tuple[str, ...]
) -> None:
    manifest = json.loads((model_folder / "manifest.json").read_text())
    manifest["files"] = {name: manifest["files"][name] for name in kept}
    (model_folder / "manifest.json").write_text(json.dumps(manifest))
    result = run("models", "verify", model_folder)
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith(f"error: {model_folder / 'manifest.json'}: expected an entry")
    assert result.stderr.count("\n") == 1


def test_models_show_prints_scores_and_files(run: Run, model_folder: Path) -> None:
    lines = run("models", "show", model_folder).stdout.splitlines()
    assert lines[:3] == [f"folder: {model_folder}", "format: 1", "scores.pair.f1: 0.5"]
    assert lines[5].startswith("head.onnx: 5 bytes, sha256 ")
    assert lines[5].endswith(", ok")


@pytest.mark.parametrize("command", ["verify", "show"])
def test_models_without_a_folder_is_4(run: Run, tmp_path: Path, command: str) -> None:
    assert run("models", command, "x" * 300).exit_code == 4
    result = run("models", command, tmp_path / "none")
    assert result.exit_code == 4
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("package", ["torch", "lightning", "jsonargparse"])
def test_train_without_its_extra_names_the_extra(
    run: Run, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    def missing(name: str, *args: Any) -> Any:
        if name == "dcl.learning.training":
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return original(name, *args)

    original = __import__
    monkeypatch.setattr("builtins.__import__", missing)
    result = run("train", "--config", "x.yaml")
    assert result.exit_code == 2
    assert 'pip install "dcl-attribution[train]"' in result.stderr
    assert result.stderr.count("\n") == 1


def test_train_hands_every_argument_over(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    seen: list[list[str]] = []

    def main(args: list[str]) -> int:
        seen.append(args)
        return 7

    monkeypatch.setitem(sys.modules, "dcl.learning.training", SimpleNamespace(main=main))
    args = ["--config", "x.yaml", "--model.width=5", "--help", "-v", "run"]
    assert run("train", *args).exit_code == 7
    assert seen == [args]


# a process of its own: signals, pipes, streams, locale


def spawn(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [*FAKE, *(str(arg) for arg in args)]
    return subprocess.run(command, capture_output=True, timeout=120, check=False, **options)


def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, **options)


def test_the_version_is_printed() -> None:
    done = spawn("--version")
    assert (done.returncode, done.stdout) == (0, f"dcl {dcl.__version__}\n".encode())


def test_interrupted_is_130_without_a_traceback_or_half_a_file(tmp_path: Path) -> None:
    log = write_run(tmp_path / "log.json", "WAIT")
    command = [*FAKE, "attribute", str(log), "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"waiting\n"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (130, b"", b"")
    assert list(tmp_path.iterdir()) == [log]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("source", ["-", "fifo"])
def test_a_signal_ends_the_wait_for_input(tmp_path: Path, name: str, source: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    log = source if source == "-" else str(tmp_path / "fifo")
    # The line about the missing log says that the next one is about to be read.
    args = ["attribute", str(tmp_path / "missing"), log, "--out", str(tmp_path / "out")]
    with start([*FAKE, *args]) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"error: ")
        process.send_signal(number := signal.Signals[name])
        assert process.wait(timeout=60) == 128 + number
        assert (process.stdout.read(), process.stderr.read()) == (b"", b"")
    assert [file.name for file in tmp_path.iterdir()] == ["fifo"]


def test_python_ends_well_while_a_thread_waits_for_input() -> None:
    code = (
        "import dcl, fake_model\n"
        "runs = dcl.read_trajectories('-')\n"
        "print('ready', flush=True)\n"
        "list(fake_model.load().batch(runs))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    with start(command, cwd=Path(__file__).parent, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == -signal.SIGINT
        assert process.stderr.read().endswith(b"\nKeyboardInterrupt\n")


def test_a_reader_that_goes_away_is_no_error_message(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log.jsonl", *(row_of(str(i), GOOD) for i in range(400)))
    command = [*FAKE, "attribute", str(log), "--output", "jsonl"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b'{"id": "0"')
        process.stdout.close()
        stderr = process.stderr.read()
    assert (process.returncode, stderr) == (141, b"")


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        command = [*FAKE, "attribute", str(EXAMPLE)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 2
    assert done.stderr == b"error: No space left on device\n"


def test_an_ascii_locale_without_home_still_prints(tmp_path: Path) -> None:
    log = write_run(tmp_path / "log.json", f"naïve 你好 {BAD}", id="é")
    environment = {"PATH": os.environ["PATH"], "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = spawn("attribute", log, env=environment, cwd="/")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"na\\xefve" in done.stdout
    assert b"\x1b" not in done.stdout


@pytest.mark.parametrize("redirect", ["<&-", "0>/dev/null"])
def test_a_closed_or_unreadable_standard_input_is_3(redirect: str) -> None:
    command = f"exec {' '.join(FAKE)} attribute - {redirect}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=120)
    assert done.returncode == 3
    assert done.stderr.startswith(b"error: <stdin>: ")
    assert done.stderr.count(b"\n") == 1


def test_closed_output_still_gives_the_exit_code() -> None:
    command = f"exec {' '.join(FAKE)} attribute '{EXAMPLE}' --fail-on 0.5 >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr == b"--fail-on: 1 of 1 traces\n"


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize(
    ("args", "code"),
    [
        (f"attribute '{EXAMPLE}'", 0),
        (f"attribute '{EXAMPLE}' --fail-on 0.5 --out {os.devnull}", 1),
        ("attribute --nonsense", 2),
        ("attribute missing.json", 3),
        ("models verify missing", 4),
    ],
)
def test_without_a_place_for_errors_the_exit_code_says_it(
    redirect: str, args: str, code: int
) -> None:
    command = f"exec {' '.join(FAKE)} {args} {redirect}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=120)
    assert done.returncode == code
    assert b"error" not in done.stdout


@pytest.mark.parametrize("columns", ["0", "1", "60"])
def test_a_width_of_nothing_still_shows_the_verdict(columns: str) -> None:
    done = spawn("attribute", EXAMPLE, env=os.environ | {"COLUMNS": columns})
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"coder  FM-2.5" in done.stdout
    assert max(map(len, done.stdout.decode().splitlines())) <= 60


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a place nobody can write")
def test_a_read_only_file_system_is_a_clear_error() -> None:
    done = spawn("attribute", EXAMPLE, "--out", "/sys/kernel/out.json")
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: --out /sys/kernel/out.json: cannot write there: ")


def test_a_model_runs_on_the_backend_that_was_named() -> None:
    def run(*more: str) -> Result:
        return CliRunner().invoke(cli.app, ["attribute", str(EXAMPLE), "--model", "lite", *more])

    assert run("--backend", "onnxruntime").exit_code == 0
    refused = run("--backend", "openvino")
    assert (refused.exit_code, "backend openvino: expected a model" in refused.stderr) == (4, True)
    assert "'onnxruntime', 'openvino'" in run("--backend", "torch").stderr
