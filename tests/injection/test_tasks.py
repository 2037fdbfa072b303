from __future__ import annotations

import gzip
import json
import lzma
import re
from pathlib import Path

import pytest

from dcl.errors import ConfigError, DclError, TraceError
from dcl.splits import hash_question
from injection.checkers import check
from injection.english import solve
from injection.run import RunConfig, list_groups
from injection.tasks import Task, own_tasks, read_tasks

ROWS = {
    "GSM8K": {"question": "1 + 1?", "answer": "It is 2.\n#### 2"},
    "MATH": {"problem": "p", "solution": r"so \boxed{\frac{1}{2}}", "level": "Level 1"},
    "HumanEval": {
        "task_id": "HumanEval/0",
        "prompt": "def f(x):\n",
        "canonical_solution": "    return x\n",
        "test": "def check(candidate):\n    assert candidate(1) == 1\n",
        "entry_point": "f",
    },
    "MMLU-Pro": {"question_id": 7, "question": "q", "options": ["a", "b"], "answer_index": 1},
    "MMLU": {"question": "q", "choices": ["a", "b", "c", "d"], "answer": 3},
    "SciBench": {"problem_text": "p", "answer_number": " 5.0", "unit": "m", "problemid": "1.1"},
    "GAIA": {"task_id": "x", "Question": "q", "Final answer": "17", "Level": 1},
}
ANSWERS = {"GSM8K": "2", "MATH": r"\frac{1}{2}", "MMLU-Pro": "B", "MMLU": "D", "GAIA": "17"}


@pytest.mark.parametrize("benchmark", ROWS)
def test_a_published_layout_is_known_by_its_keys(benchmark: str, tmp_path: Path) -> None:
    lines = tmp_path / "set.jsonl"
    lines.write_text(json.dumps(ROWS[benchmark]) + "\n")
    packed = tmp_path / "set.json.gz"
    with gzip.open(packed, "wt") as stream:
        json.dump([ROWS[benchmark]], stream)
    (task,), (again,) = read_tasks(lines), read_tasks(packed)
    assert task == again
    assert task.benchmark == benchmark
    assert task.answer.strip() == ANSWERS.get(benchmark, task.answer.strip())


def test_a_folder_of_one_problem_a_file_is_read_whole(tmp_path: Path) -> None:
    for name in ("algebra/1.json", "algebra/2.json", "geometry/1.json"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(ROWS["MATH"], indent=4))
    (tmp_path / "README.md").write_text("no tasks")
    tasks = read_tasks(tmp_path)
    assert [task.id for task in tasks] == ["algebra-1-0", "algebra-2-0", "geometry-1-0"]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="expected files of tasks"):
        read_tasks(empty)


def test_tables_without_a_header_are_those_of_mmlu(tmp_path: Path) -> None:
    file = tmp_path / "anatomy_test.csv"
    file.write_text('"Which one,\nof these?",a,b,c,d,D\n')
    (task,) = read_tasks(file)
    assert (task.benchmark, task.answer) == ("MMLU", "D")
    assert task.question == "Which one,\nof these?\nA) a\nB) b\nC) c\nD) d"
    file.write_text("question,answer\n")
    with pytest.raises(TraceError, match="expected a task with one of the sets of keys"):
        read_tasks(file)


def test_parquet_is_read_as_it_is_published(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    file = tmp_path / "test-00000-of-00001.parquet"
    write_table(arrow.Table.from_pylist([ROWS["MMLU-Pro"], ROWS["MMLU-Pro"]]), file)
    first, second = read_tasks(file)
    assert (first.answer, second.id) == ("B", "7")
    file.write_text("none")
    with pytest.raises(ConfigError, match="expected a file of tasks"):
        read_tasks(file)


def test_an_unknown_layout_says_what_was_expected(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": 1}\n')
    with pytest.raises(TraceError, match="expected a task with one of the sets of keys"):
        read_tasks(file)
    file.write_text("{\n")
    with pytest.raises(TraceError, match=r"x\.jsonl:1: expected JSON"):
        read_tasks(file)
    with pytest.raises(ConfigError, match="expected a file of tasks"):
        read_tasks(tmp_path / "absent.jsonl")


def test_every_kind_ships_with_tasks_that_scripted_agents_understand() -> None:
    tasks = own_tasks()
    assert {task.kind for task in tasks} == {
        "number",
        "latex",
        "code",
        "choice",
        "quantity",
        "text",
    }
    for task in tasks:
        assert check(task, answer_of(task)).right, task.id


def answer_of(task: Task) -> str:
    solution = solve(task.question)
    assert solution is not None, task.id
    return f"```python\n{solution.code}```" if solution.code else f"Answer: {solution.answer}"


def test_tasks_are_told_apart_and_limited() -> None:
    names = [(task.benchmark, task.id) for task in own_tasks()]
    assert len(set(names)) == len(names)
    assert len(own_tasks(1)) == 6


def test_a_question_has_one_hash_however_it_is_put_to_a_system(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS.values()))
    tasks = {task.benchmark: task for task in read_tasks(file)}
    assert tasks["HumanEval"].question_hash == hash_question("def f(x):")
    assert tasks["SciBench"].question_hash == hash_question(" p ")
    assert tasks["GSM8K"].question_hash == hash_question(tasks["GSM8K"].question)


@pytest.mark.data
def test_published_questions_have_the_hashes_of_aegis(data_dir: Path, tmp_path: Path) -> None:
    rows, hashes = [], []
    with lzma.open(data_dir / "aegis" / "train.jsonl.xz", "rt") as stream:
        for line in stream:
            record = json.loads(line)
            row = as_published(record["input"]["query"], record["metadata"].get("benchmark"))
            if row is not None:
                rows.append(row)
                hashes.append(record["metadata"]["question_hash"])
    file = tmp_path / "published.json"
    file.write_text(json.dumps(rows))
    assert len(set(hashes)) > 1200
    assert [task.question_hash for task in read_tasks(file)] == hashes


def as_published(query: str, benchmark: str | None) -> dict[str, object] | None:
    """The row of the publisher's file that a question of AEGIS comes from."""
    if benchmark == "MMLU":
        head, _, tail = query.partition(
            "\n\nChoose the correct answer from the following options:\n"
        )
        stem = head.removeprefix("The following is a multiple-choice question:\n")
        options = re.split(r"(?:^|\n)\([A-J]\) ", tail)[1:]
        return {"question": stem, "options": options, "answer_index": 0} if options else None
    if benchmark == "HumanEval":
        return {"task_id": "x", "prompt": query, "test": "t", "entry_point": "f"}
    if benchmark == "GAIA":
        return {"task_id": "x", "Question": query, "Final answer": "1"}
    return {"problem_text": query, "answer_number": "1", "unit": "m"}


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("empty.jsonl", "\n", "an empty file"),
        ("deep.jsonl", "[" * 100_000, "expected JSON"),
        ("wide.csv", f"q,{'x' * 200_000},y,A\n", "field larger"),
        ("half.jsonl", '{"question": "\\ud800", "answer": "#### 1"}\n', "halves of characters"),
        ("torn.jsonl.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xff\xff", "file of tasks"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    name: str, text: str | bytes, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DclError, match=problem) as caught:
        read_tasks(file)
    assert name in str(caught.value)


def test_questions_that_share_an_id_are_all_run(tmp_path: Path) -> None:
    files = []
    for folder, right in (("one", 2), ("two", 3)):
        file = tmp_path / folder / "test.jsonl"
        file.parent.mkdir()
        file.write_text(
            json.dumps({"question": f"Half of {2 * right}?", "answer": f"#### {right}"})
        )
        files.append(str(file))
    config = RunConfig(out="x", systems=("llm_debate",), tasks=(*files, files[0]))
    groups = list_groups(config)
    assert [group.task.answer.strip() for group in groups] == ["2", "3"]
    assert len({group.key for group in groups}) == 2
    assert groups[0].task.id == "test-0"
    (again,) = list_groups(RunConfig(out="x", systems=("llm_debate",), tasks=(files[0],)))
    assert again.key == groups[0].key
    none = tmp_path / "none.json"
    none.write_text("[]")
    with pytest.raises(ConfigError, match=r"expected tasks in .*none\.json, got none"):
        list_groups(RunConfig(out="x", tasks=(str(none),)))
