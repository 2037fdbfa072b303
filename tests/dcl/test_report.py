from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_model
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from dcl.errors import ConfigError
from dcl.report import Report
from dcl.report.gate import Gate
from dcl.report.output import visible, write_json, write_jsonl, write_table
from dcl.report.record import dump, record
from dcl.report.table import table
from dcl.taxonomy import ErrorMode
from dcl.trajectory import Trajectory, Turn

LISTS = ["agents", "modes", "faults", "evidence", "steps"]
KEYS = ["id", "source", *LISTS, "step_sets", "abstains"]


def make_report(*said: str, **shown: Any) -> Report:
    run = fake_model.make_run("run", *said)
    return Report("log.json", run, fake_model.load()(run), **shown)


def draw(report: Report, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    console.print(table(report))
    stream = console.file
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


FAILED = make_report("hello", "it stays as it is", "bye")


@given(st.text())
def test_visible_text_is_one_line_that_prints_and_holds_no_surrogate(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable()
    shown.encode("utf-8")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("  two\r\n\tlines ", "two lines"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\u202etxt.exe", "\\u202etxt.exe"),
        ("half \ud83d", "half \\ud83d"),
        ("naïve 你好", "naïve 你好"),
    ],
)
def test_visible_escapes_what_drives_a_terminal(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_visible_limit_counts_from_the_first_character_that_prints() -> None:
    assert visible("\n\n  abcdef", 3) == "abc"


def test_record_has_the_documented_keys_and_no_others() -> None:
    row = record(FAILED)
    assert list(row) == KEYS
    assert row == FAILED.attribution.to_dict() | {"source": "log.json"}
    assert json.loads(dump(row)) == row


def test_the_page_on_the_output_shows_the_keys_of_every_object() -> None:
    page = (Path(__file__).parents[2] / "docs" / "output.md").read_text()
    shown = json.loads(page.partition("```json\n")[2].partition("```")[0])
    row = record(FAILED)
    assert list(shown) == list(row)
    for key in LISTS:
        assert list(shown[key][0]) == list(row[key][0])


def test_record_passes_on_what_to_show() -> None:
    assert len(record(replace(FAILED, top_k=5))["faults"]) == 5
    assert record(replace(FAILED, threshold=0.99))["faults"] == []
    assert len(record(replace(FAILED, evidence=1))["evidence"]) == 1
    assert record(replace(FAILED, evidence=0))["evidence"] == []


def test_dump_is_ascii_with_lone_surrogates_and_refuses_nan() -> None:
    line = dump({"text": "\ud83d ü\n"})
    assert line.isascii()
    assert "\n" not in line
    assert json.loads(line) == {"text": "\ud83d ü\n"}
    with pytest.raises(ValueError, match="JSON compliant"):
        dump({"prob": float("nan")})


def test_table_names_agent_mode_step_and_shows_the_turn() -> None:
    lines = draw(FAILED).splitlines()
    assert lines[0].split() == ["run", "log.json", "3", "agents,", "3", "turns"]
    assert ["b", "FM-2.5", "Ignore", "other", "agents", "1", "0.95"] in [x.split() for x in lines]
    assert any(line.split()[:2] == ["1", "b"] and "stays as it is" in line for line in lines)


def test_table_says_in_which_stretch_the_failure_shows_and_whether_to_trust_it() -> None:
    cuts = tuple(percent / 100 for percent in range(1, 100))
    sure = replace(FAILED.attribution.calibration, span_cuts=cuts, trust_threshold=0.99)
    doubted = replace(FAILED, attribution=replace(FAILED.attribution, calibration=sure))
    text = " ".join(draw(doubted).split())
    assert "The failure shows at step 1 (80%), at step 1 (90%)." in text
    assert "No verdict to act on: the likeliest agent, b, has 0.95; only from 0.99 on" in text
    assert record(doubted)["step_sets"] == [
        {"coverage": 0.8, "steps": [1]},
        {"coverage": 0.9, "steps": [1]},
    ]
    assert record(FAILED)["step_sets"] == []
    assert record(FAILED)["abstains"] is None


def test_table_says_that_nothing_was_found() -> None:
    assert "No fault declared" in draw(make_report("hello", "bye"))


def test_table_shows_an_agent_without_a_declared_mode() -> None:
    calibration = replace(FAILED.attribution.calibration, pair_threshold=0.99)
    bare = replace(FAILED, attribution=replace(FAILED.attribution, calibration=calibration))
    assert "mode unclear" in draw(bare)


def test_table_of_one_agent_and_turn_counts_in_the_singular() -> None:
    assert "1 agent, 1 turn\n" in draw(make_report("it stays as it is"))


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_table_fits_the_console_whatever_the_log_holds(width: int) -> None:
    turns = (
        Turn("an agent with a name as long as a sentence, and more" * 3, "stays as it is " * 999),
        Turn("[red]markup[/red]", "\x1b]0;title\x07 [bold]no markup[/bold]\nnext line"),
        Turn("空白" * 30, "全角" * 300),
        Turn("empty", ""),
    )
    run = Trajectory("id\x1b[2J" * 50, "", turns)
    shown = Report("file\n.json", run, fake_model.load()(run), evidence=4, top_k=20)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table(shown))
    stream = console.file
    assert isinstance(stream, io.StringIO)
    text = stream.getvalue()
    assert "\x1b" not in text
    assert all(cell_len(line) <= width for line in text.splitlines())
    if width == 200:
        assert "[red]markup[/red]" in text
        assert "[bold]no markup[/bold] next line" in text
        assert "(empty)" in text


def test_json_is_an_object_for_one_and_a_list_for_many() -> None:
    row = record(FAILED)
    for reports, many, expected in (
        ([FAILED], False, row),
        ([FAILED], True, [row]),
        ([FAILED] * 3, False, [row] * 3),
        ([], False, []),
        ([], True, []),
    ):
        stream = io.StringIO()
        write_json(reports, stream, many)
        assert json.loads(stream.getvalue()) == expected


def test_jsonl_has_a_line_each() -> None:
    stream = io.StringIO()
    write_jsonl([FAILED, FAILED], stream, False)
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == [record(FAILED)] * 2


def test_a_table_in_a_file_has_no_colour_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    write_table([FAILED], stream, False)
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(
    ("text", "mode", "prob"),
    [
        ("0.8", None, 0.8),
        ("1", None, 1.0),
        ("0", None, 0.0),
        ("FM-2.5", ErrorMode.FM_2_5, None),
        ("2.5", ErrorMode.FM_2_5, None),
        ("em-3.3:0.25", ErrorMode.FM_3_3, 0.25),
    ],
)
def test_gate_reads_a_probability_a_mode_or_both(
    text: str, mode: ErrorMode | None, prob: float | None
) -> None:
    assert Gate.parse(text) == Gate(mode, prob)


@pytest.mark.parametrize(
    "text", ["", "1.01", "-0.1", "nan", "FM-9.9", "FM-2.5:", "FM-2.5:2", "0.5:0.5", "x:0.5", ":0.5"]
)
def test_gate_refuses_anything_else(text: str) -> None:
    with pytest.raises(ConfigError, match="--fail-on: expected a probability"):
        Gate.parse(text)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("0.9", True),
        ("0.99", False),
        ("FM-2.5", True),
        ("FM-2.5:0.9", True),
        ("FM-2.5:0.99", False),
        ("FM-1.1", False),
        ("FM-1.1:0.01", True),
    ],
)
def test_gate_looks_at_the_probability_not_at_what_is_shown(text: str, holds: bool) -> None:
    assert Gate.parse(text).holds(FAILED.attribution) is holds


def test_gate_without_a_mode_counts_an_agent_without_a_clear_mode() -> None:
    unclear = replace(FAILED.attribution, pair_probs=np.zeros_like(FAILED.attribution.pair_probs))
    assert Gate.parse("0.9").holds(unclear)
    assert not Gate.parse("FM-2.5:0.9").holds(unclear)
