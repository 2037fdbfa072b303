"""Tasks with known answers: readers of published files, and small sets of our own.

A reader takes the file as its publisher ships it (JSON lines, a JSON list or object, the CSV of
MMLU, Parquet; gzip or xz; or a folder of files, as MATH is) and knows it by its keys. The sets in
`injection/data` have the same layouts, so they use the same readers.
"""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dcl.errors import ConfigError, TraceError
from dcl.splits import hash_question
from dcl.trajectory import expect_list, expect_object, expect_str

DATA = Path(__file__).parent / "data"

Kind = Literal["number", "latex", "code", "choice", "quantity", "text"]

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
_KNOWN = {".json", ".jsonl", ".csv", ".parquet"}
_LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True, slots=True)
class Task:
    """One question with its answer.

    Args:
        id: Unique in its benchmark.
        benchmark: Name of the set, as the AEGIS schema has it.
        kind: Which checker judges answers.
        question: All that a system is shown.
        answer: Reference answer, in the form the checker reads.
        extra: What else the checker needs: options, unit, tests.
        published: The question as AEGIS words it, where that is not `question`.
    """

    id: str
    benchmark: str
    kind: Kind
    question: str
    answer: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    published: str = ""

    @property
    def question_hash(self) -> str:
        """What splits go by; the same as in AEGIS for a question that is there, too."""
        return hash_question(self.published or self.question)

    @property
    def domain(self) -> str:
        """Subject in one word, as records and instructions use it."""
        names = {"number": "math", "latex": "math", "code": "code_generation"}
        return names.get(self.kind, {"quantity": "science"}.get(self.kind, "reasoning"))


def read_tasks(path: str | Path) -> list[Task]:
    """Every task of a published file, or of all files in a folder.

    Args:
        path: The file or folder.

    Returns:
        Tasks in the order of the files, which go by their names.

    Raises:
        ConfigError: If there is no such file, it is empty, or no file is in the folder.
        TraceError: If a record has the keys of no known set, or a field is missing.
    """
    place = Path(path)
    if not place.is_dir():
        return _read_file(place, place.name.split(".")[0])
    files = sorted(file for file in place.rglob("*") if _KNOWN & set(file.suffixes))
    if not files:
        raise ConfigError(
            f"{place}: expected files of tasks ({', '.join(sorted(_KNOWN))}), got none"
        )
    names = ["-".join(file.relative_to(place).parts).split(".")[0] for file in files]
    return [task for pair in zip(files, names, strict=True) for task in _read_file(*pair)]


def _read_file(file: Path, name: str) -> list[Task]:
    """Tasks of one file; its name begins the ids of those without one."""
    tasks: list[Task] = []
    for place, row in _rows(file):
        record = expect_object(row, place)
        reader = next((read for keys, read in _READERS if keys <= record.keys()), None)
        if reader is None:
            known = "; ".join(", ".join(sorted(keys)) for keys, _ in _READERS)
            raise TraceError(place, f"expected a task with one of the sets of keys {known}")
        task = reader(record, place, f"{name}-{len(tasks)}")
        try:
            f"{task.id}{task.question}{task.answer}".encode()
        except UnicodeEncodeError:
            raise TraceError(place, "expected text, got halves of characters") from None
        tasks.append(task)
    return tasks


def own_tasks(limit: int | None = None, folder: Path = DATA) -> list[Task]:
    """The sets that ship with the project, one after another.

    Args:
        limit: Most tasks of each set; None means all.
        folder: Where they are; a system that needs tasks of its own names it in `tasks`.
    """
    return [task for file in sorted(folder.glob("*.jsonl")) for task in read_tasks(file)[:limit]]


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Records with their place."""
    if file.suffix == ".parquet":
        yield from ((f"{file}[{i}]", row) for i, row in enumerate(_read_parquet(file)))
        return
    try:
        with _OPENERS.get(file.suffix, open)(file, "rt", encoding="utf-8") as stream:
            text = stream.read()
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, zlib.error) as error:
        raise _no_tasks(file, error) from None
    if not text.strip():
        raise _no_tasks(file, ValueError("an empty file"))
    if ".csv" in file.suffixes:
        yield from ((f"{file}[{i}]", row) for i, row in enumerate(_read_csv(text, file)))
    elif text.lstrip().startswith("["):
        yield from ((f"{file}[{i}]", row) for i, row in enumerate(_load(text, str(file))))
    elif ".json" in file.suffixes and re.match(r"\s*\{\s*\n", text):  # one object, many lines
        yield str(file), _load(text, str(file))
    else:
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield f"{file}:{number}", _load(line, f"{file}:{number}")


def _read_csv(text: str, file: Path) -> Iterator[dict[str, Any]]:
    """Rows of MMLU as it was first published: question, options, letter; there is no header.

    Raises:
        ConfigError: If it is no CSV.
    """
    try:
        for row in csv.reader(text.splitlines(keepends=True)):
            if len(row) > 2:
                yield {"question": row[0], "choices": row[1:-1], "answer": row[-1]}
            elif row:
                yield {"row": row}
    except csv.Error as error:
        raise _no_tasks(file, error) from None


def _read_parquet(file: Path) -> list[dict[str, Any]]:
    """Rows of a Parquet file.

    Raises:
        ConfigError: If it cannot be read.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ModuleNotFoundError:
        raise ConfigError(f"{file}: Parquet needs pyarrow; run `pip install pyarrow`") from None
    try:
        rows: list[dict[str, Any]] = read_table(file).to_pylist()
    except (OSError, ArrowException) as error:
        raise _no_tasks(file, error) from None
    return rows


def _no_tasks(file: Path, error: Exception) -> ConfigError:
    """What is said of a file that cannot be read."""
    problem = getattr(error, "strerror", None) or error
    return ConfigError(f"{file}: expected a file of tasks, got: {problem}; check `tasks`")


def _load(text: str, place: str) -> Any:
    """JSON, or an error that names its place."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(place, f"expected JSON: {error}") from None


def _gsm8k(row: Mapping[str, Any], place: str, id: str) -> Task:
    """GSM8K: the number after `####`."""
    answer = expect_str(row, "answer", place)
    return Task(
        id, "GSM8K", "number", expect_str(row, "question", place), answer.rpartition("####")[2]
    )


def _math(row: Mapping[str, Any], place: str, id: str) -> Task:
    """MATH: the last boxed expression of the solution."""
    from injection.checkers import boxed

    solution = expect_str(row, "solution", place)
    answer = boxed(solution)
    if answer is None:
        raise TraceError(f"{place}.solution", r"expected \boxed{...}, found none")
    return Task(id, "MATH", "latex", expect_str(row, "problem", place), answer)


def _humaneval(row: Mapping[str, Any], place: str, id: str) -> Task:
    """HumanEval: prompt, entry point and `check(candidate)`."""
    prompt = expect_str(row, "prompt", place)
    extra = {
        "prompt": prompt,
        "test": expect_str(row, "test", place),
        "entry_point": expect_str(row, "entry_point", place),
    }
    solution = expect_str(row, "canonical_solution", place, default="")
    question = f"Complete this function. Reply with the whole function.\n\n{prompt}"
    return Task(
        expect_str(row, "task_id", place),
        "HumanEval",
        "code",
        question,
        prompt + solution,
        extra,
        prompt,
    )


def _mmlu_pro(row: Mapping[str, Any], place: str, id: str) -> Task:
    """MMLU-Pro: up to ten options and the index or letter of the right one."""
    options = [str(option) for option in expect_list(row, "options", place)]
    index = row.get("answer_index")
    answer = _letter(index) if isinstance(index, int) else expect_str(row, "answer", place)
    return _choice("MMLU-Pro", row, place, str(row.get("question_id", id)), options, answer)


def _mmlu(row: Mapping[str, Any], place: str, id: str) -> Task:
    """MMLU: four options and the index of the right one."""
    options = [str(option) for option in expect_list(row, "choices", place)]
    return _choice("MMLU", row, place, id, options, _letter(row["answer"]))


def _letter(index: object) -> str:
    """Letter of an option by its number; what is no number of an option stays as it is."""
    if isinstance(index, int) and 0 <= index < len(_LETTERS):
        return _LETTERS[index]
    return str(index)


def _choice(
    benchmark: str, row: Mapping[str, Any], place: str, id: str, options: list[str], answer: str
) -> Task:
    """A question with its options below it."""
    if not 2 <= len(options) <= len(_LETTERS) or answer not in _LETTERS[: len(options)]:
        raise TraceError(place, f"expected 2 to 10 options and a letter of one, got {answer!r}")
    listed = "\n".join(f"{letter}) {text}" for letter, text in zip(_LETTERS, options, strict=False))
    stem = expect_str(row, "question", place)
    offered = "\n".join(
        f"({letter}) {text}" for letter, text in zip(_LETTERS, options, strict=False)
    )
    published = (
        f"The following is a multiple-choice question:\n{stem}\n\n"
        f"Choose the correct answer from the following options:\n{offered}"
    )
    extra = {"options": options}
    return Task(id, benchmark, "choice", f"{stem}\n{listed}", answer, extra, published)


def _scibench(row: Mapping[str, Any], place: str, id: str) -> Task:
    """SciBench: a number and, in a field of its own, its unit."""
    unit = expect_str(row, "unit", place, default="").strip()
    stem = expect_str(row, "problem_text", place).strip()
    question = f"{stem} Give the result in {unit}." if unit else stem
    number = expect_str(row, "answer_number", place).strip()
    return Task(
        str(row.get("problemid", id)).strip(),
        "SciBench",
        "quantity",
        question,
        number,
        {"unit": unit},
        stem,
    )


def _gaia(row: Mapping[str, Any], place: str, id: str) -> Task:
    """GAIA: a short text, a number, or a list."""
    return Task(
        expect_str(row, "task_id", place),
        "GAIA",
        "text",
        expect_str(row, "Question", place),
        expect_str(row, "Final answer", place),
        {"level": str(row.get("Level", ""))},
    )


_Reader = Callable[[Mapping[str, Any], str, str], Task]
_READERS: tuple[tuple[frozenset[str], _Reader], ...] = (
    (frozenset({"prompt", "test", "entry_point", "task_id"}), _humaneval),
    (frozenset({"task_id", "Question", "Final answer"}), _gaia),
    (frozenset({"problem_text", "answer_number"}), _scibench),
    (frozenset({"problem", "solution"}), _math),
    (frozenset({"question", "options"}), _mmlu_pro),
    (frozenset({"question", "choices", "answer"}), _mmlu),
    (frozenset({"question", "answer"}), _gsm8k),
)
