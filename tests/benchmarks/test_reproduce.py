"""A page of results against its own commands, with a real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.reproduce import Block, Table, compare, find_tables, parse_page, run_script
from dcl.errors import ConfigError
from dcl.taxonomy import MODES
from dcl.trajectory import Example, Fault, Trajectory, Turn

RESULTS = Path(__file__).parents[2] / "docs" / "results.md"


def reproduce(page: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["reproduce", str(page), *more])


@pytest.fixture
def command(tmp_path: Path) -> str:
    """A benchmark of ten short runs that takes a second."""
    file = tmp_path / "runs.jsonl"
    turns = tuple(Turn(name, "so be it") for name in ("a", "b", "c"))
    examples = [
        Example(Trajectory(f"r{i}", f"question {i}", turns), (Fault("abc"[i % 3], MODES[i % 2]),))
        for i in range(10)
    ]
    file.write_text("".join(json.dumps(example.to_dict()) + "\n" for example in examples))
    flags = "--predictor random --predictor everyone \\\n  --resamples 20"
    return f"python -m benchmarks evaluate --data {file} {flags}"


@pytest.fixture
def page(command: str, tmp_path: Path) -> Path:
    """What a careful author would have written of it."""
    tables = run_script(command).split("published\n", 1)[1]
    file = tmp_path / "page.md"
    file.write_text(f"# Page\n\n## Some scores\n\n```sh\n{command}\n```\n\nSee:\n{tables}\nSo.\n")
    return file


def test_a_page_that_its_commands_wrote_agrees(page: Path) -> None:
    told = reproduce(page)
    assert told.exit_code == 0, told.output
    assert told.output.strip() == "Some scores: 12 of 12 scores where they should be"


def test_what_is_outside_of_its_interval_is_named_and_can_be_mended(page: Path) -> None:
    before = page.read_text()
    row = next(line for line in before.splitlines() if line.startswith("| everyone"))
    first = row.split("|")[2].strip()
    page.write_text(before.replace(row, row.replace(first, "99.8 [99.7, 99.9]", 1)))
    told = reproduce(page)
    assert told.exit_code == 1
    assert f"outside: everyone, pair µF1: page 99.8 [99.7, 99.9], now {first}" in told.output
    assert "11 of 12" in told.output
    assert reproduce(page, "--write").exit_code == 1
    assert page.read_text() == before
    assert reproduce(page, "--section", "some").exit_code == 0


def test_what_is_written_while_a_command_runs_stays(page: Path) -> None:
    text = page.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| everyone"))
    wrong = row.replace(row.split("|")[2].strip(), "99.8 [99.7, 99.9]", 1)
    edit = f"sed -i 's/^So.$/So it is./; s/^See:$/More:\\n\\nSee:/' {page}"
    page.write_text(text.replace(row, wrong).replace("```sh\n", f"```sh\n{edit}\n"))
    assert reproduce(page, "--everything", "--write").exit_code == 1
    after = page.read_text()
    assert "So it is." in after
    assert "More:\n\nSee:" in after
    assert row in after


def test_rows_may_be_left_out_and_those_that_are_not_printed_are_named(page: Path) -> None:
    text = page.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| random"))
    page.write_text(text.replace(row + "\n", ""))
    assert "6 of 6" in reproduce(page).output
    page.write_text(text.replace("| random |", "| by heart |"))
    told = reproduce(page)
    assert told.exit_code == 1
    assert "not printed: by heart" in told.output


def test_pages_without_a_command_are_refused_and_commands_that_fail_are_named(
    page: Path, tmp_path: Path
) -> None:
    assert reproduce(tmp_path / "nothing.md").exit_code == 2
    assert "found none to run" in reproduce(page, "--section", "other").output
    text = page.read_text()
    page.write_text(text.replace("runs.jsonl", "gone.jsonl") + text)
    told = reproduce(page, "--write")
    assert told.exit_code == 1
    assert "Some scores: exit code" in told.output
    assert "12 of 12" in told.output  # the second command ran all the same
    with pytest.raises(ConfigError, match="exit code 3"):
        run_script("exit 3\necho on\n")


def test_only_benchmarks_with_tables_run_unasked(page: Path, tmp_path: Path) -> None:
    tables = (Table(0, (("a",), ("1",))),)
    script = "python -m benchmarks a \\\n  --b\npython -m benchmarks c\n"
    assert Block("", script, tables).is_benchmark
    assert not Block("", script, ()).is_benchmark
    assert not Block("", "dcl sweep x\npython -m benchmarks c\n", tables).is_benchmark
    made = tmp_path / "made"
    page.write_text(f"## First\n\n```sh\ntouch {made}\n```\n\n{page.read_text()}")
    assert "First" not in reproduce(page).output
    assert not made.exists()
    assert "First: done, touch" in reproduce(page, "--everything").output
    assert made.exists()


def test_a_page_does_not_run_itself() -> None:
    assert parse_page("## One\n\n```sh\npython -m benchmarks reproduce  # all\n```\n") == []


def test_means_over_seeds_may_be_two_deviations_off() -> None:
    old = Table(0, (("cell", "pair"), ("ours", "35.68 ± 0.47"), ("less", "24.8 ± 0.4 [-1, 0] 0.1")))
    rows = (
        "| cell | pair |\n| --- | ---: |\n"
        "| ours | 36.50 ± 0.10 |\n| less | 24.1 ± 0.1 [-2, -8] 0.2 |"
    )
    found = compare(Block("", "", (old,)), find_tables(rows))
    assert (found.judged, found.holds) == (2, True)
    for gone in ("36.71 ± 0.10", "", "nan ± nan"):
        fresh = find_tables(rows.replace("36.50 ± 0.10", gone))
        assert not compare(Block("", "", (old,)), fresh).holds


def test_tables_belong_to_the_command_before_them() -> None:
    table = "| a | b |\n| --- | ---: |\n| x | 1 |\n"
    text = f"## One\n\n{table}\n```sh\nfirst\n```\n\n{table}\n{table}## Two\n\n{table}"
    (block,) = parse_page(text)
    assert (block.section, block.script) == ("One", "first\n")
    assert [one.rows for one in block.tables] == [(("a", "b"), ("x", "1"))] * 2
    assert [text.split("\n")[one.line] for one in block.tables] == ["| a | b |"] * 2


def test_rows_that_begin_alike_are_told_apart_by_order_and_by_what_stands_above() -> None:
    old = Table(0, (("who", "what", "score"), ("x", "p", "1 [0, 2]"), ("", "q", "5 [4, 6]")))
    new = find_tables(
        "| who | what | score |\n| --- | --- | ---: |\n"
        "| y | q | 9 [9, 9] |\n| x | p | 2 [1, 3] |\n|  | q | 7 [6, 8] |\n"
    )
    found = compare(Block("", "", (old,)), new)
    assert (found.judged, found.lost) == (2, ())
    assert found.outside == ("x, q, score: page 5 [4, 6], now 7 [6, 8]",)
    assert found.cells[3] == ("", "q", "7 [6, 8]")
    twice = Table(0, (("who", "target"), ("x", "80%"), ("x", "90%")))
    assert twice.keys() == [("x", "", "0"), ("x", "", "1")]


def test_the_page_of_results_is_one() -> None:
    blocks = parse_page(RESULTS.read_text())
    assert sum(block.is_benchmark for block in blocks) >= 10
    rows = [row for block in blocks for table in block.tables for row in table.rows]
    assert len(rows) > 300
    assert all(len(table.keys()) == len(set(table.keys())) for b in blocks for table in b.tables)
