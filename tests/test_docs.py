from __future__ import annotations

import ast
import importlib
import inspect
import io
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import dcl
from dcl.formats import FORMATS, detect, read_examples
from dcl.learning import training
from dcl.learning.config import TrainConfig, TuneConfig, read_tune_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TUNED = sorted((ROOT / "configs").glob("tuned*.yaml"))
CONFIGS = sorted(set((ROOT / "configs").glob("*.yaml")) - set(TUNED))
OURS = ("dcl", "export", "benchmarks", "injection")
SHELLS = ("sh", "bash", "shell", "console", "")
APART = {"dcl.plugs.autogen": "autogen_agentchat", "dcl.plugs.crewai": "crewai"}
"""Plugs whose frameworks are tested in environments of their own."""

_FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_DOTTED = re.compile(rf"(?:{'|'.join(OURS)})(?:\.[A-Za-z_]\w*)+(?:\(\))?")
_LINK = re.compile(r"\]\(([^()\s]+)(?:\s+\"[^\"]*\")?\)|(?:src|href|srcset)=\"([^\"]+)\"")

page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


class Block(NamedTuple):
    """A fenced block and the heading that it stands under."""

    heading: str
    language: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    headings = [(m.start(), m[1]) for m in re.finditer(r"^#+ +(.+)$", text, re.MULTILINE)]
    return [
        Block(next((h for at, h in reversed(headings) if at < m.start()), ""), m[1], m[2])
        for m in _FENCE.finditer(text)
    ]


def exists(name: str) -> bool:
    """Whether a dotted name stands for anything; what a class sets on `self` counts as its own."""
    parts = name.removesuffix("()").split(".")
    if find_spec(parts[0]) is None:
        return False
    found: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], start=2):
        path = ".".join(parts[:i])
        if path in APART and find_spec(APART[path]) is None:
            return find_spec(path) is not None  # a test of the plug itself looks at its names
        if hasattr(found, part):
            found = getattr(found, part)
        elif inspect.ismodule(found) and hasattr(found, "__path__") and find_spec(path):
            found = importlib.import_module(path)
        else:
            return inspect.isclass(found) and i == len(parts) and is_set(found, part)
    return True


def is_set(cls: type, name: str) -> bool:
    """Whether a class declares an attribute or sets it on `self`."""
    own = [base for base in cls.__mro__ if base.__module__.partition(".")[0] in OURS]
    return any(
        name in inspect.get_annotations(base)
        or re.search(rf"\bself\.{name}\b[^=\n]*=(?!=)", inspect.getsource(base))
        for base in own
    )


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of each `dcl` and `python -m` command in a block of shell."""
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    if any(line.lstrip().startswith("$ ") for line in lines):  # the others are output
        lines = [line.lstrip()[2:] for line in lines if line.lstrip().startswith("$ ")]
    for line in lines:
        if not re.search(r"\bdcl\b|\bpython3? -m\b", line):
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not re.fullmatch(r"[|&;()<>]+", word):
                words.append(word)
                continue
            if is_command(words):
                yield words
            # What comes after an arrow is a file; keep its name out of the command.
            words = [] if word[0] in "|&;()" else ["to"]


def is_command(words: list[str]) -> bool:
    while words and (re.fullmatch(r"\w+=.*", words[0]) or words[0] in ("do", "then", "time")):
        del words[0]
    return bool(words) and (
        words[0] == "dcl" or (words[0] in ("python", "python3") and words[1:2] == ["-m"])
    )


def parse(app: Any, name: str, arguments: list[str]) -> None:
    """Parse as the command line would, without running anything."""
    from typer.main import get_command

    command: Any = get_command(app)
    parent = None
    try:
        while True:
            context = command.make_context(name, list(arguments), parent=parent)
            if not hasattr(command, "resolve_command"):
                return
            rest = [*getattr(context, "_protected_args", []), *context.args]
            name, command, arguments = command.resolve_command(context, rest)
            parent = context
    except Exception as error:
        if type(error).__name__ != "Exit":  # --help and --version leave with it
            raise AssertionError(f"{name}: {getattr(error, 'message', error)}") from None


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Configurations that training was started with; none of it is run."""
    configs: list[TrainConfig] = []

    def keep(config: TrainConfig) -> Path:
        configs.append(config)
        return Path(config.out)

    monkeypatch.setattr(training, "train", keep)
    monkeypatch.chdir(ROOT)
    return configs


def check_command(words: list[str]) -> None:
    if words[:2] == ["dcl", "train"]:
        with suppress(SystemExit):  # --help; all else is raised
            training.main(words[2:])
    elif words[:2] == ["dcl", "tune"]:
        with suppress(SystemExit):
            read_tune_config(words[2:])
    elif words[0] == "dcl":
        from dcl.cli import app

        parse(app, "dcl", words[1:])
    elif words[2].partition(".")[0] in OURS:
        parse(importlib.import_module(f"{words[2]}.__main__").app, words[2], words[3:])
    else:
        assert find_spec(words[2]), words[2]


def slugs_of(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    text = _FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def leads_somewhere(target: str, page: Path) -> bool:
    path, _, anchor = target.partition("#")
    there = page.parent / path if path else page
    return there.exists() and (not anchor or there.suffix != ".md" or anchor in slugs_of(there))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_every_published_configuration_is_one(config: Path, seen: list[TrainConfig]) -> None:
    assert training.main(["--config", str(config)]) == 0
    (parsed,) = seen
    assert parsed.data.train


@pytest.mark.parametrize("config", TUNED, ids=lambda config: config.stem)
def test_every_published_tuning_is_one(config: Path) -> None:
    parsed = read_tune_config(["--config", str(config)])
    assert isinstance(parsed, TuneConfig)
    assert parsed.data.train


def test_there_is_a_default_configuration() -> None:
    assert ROOT / "configs" / "default.yaml" in CONFIGS


def test_an_unknown_key_of_a_configuration_is_refused(
    tmp_path: Path, seen: list[TrainConfig]
) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(CONFIGS[0].read_text() + "epoch: 1\n")
    with pytest.raises(dcl.DclError, match="epoch"):
        training.main(["--config", str(wrong)])
    assert not seen


@page
def test_every_name_in_backticks_exists(page: Path) -> None:
    text = _FENCE.sub("", page.read_text())
    names = {code for code in re.findall(r"`([^`\n]+)`", text) if _DOTTED.fullmatch(code)}
    assert not sorted(name for name in names if not exists(name))


@page
def test_every_command_parses(page: Path, seen: list[TrainConfig]) -> None:
    for block in blocks_of(page):
        if block.language in SHELLS:
            for words in commands_of(block.text):
                with redirect_stdout(io.StringIO()):
                    check_command(words)


@pytest.mark.parametrize(
    "line",
    [
        "dcl atribute x.json",
        "dcl attribute x.json --colour",
        "dcl models",
        "dcl tune --laiers 2",
        "cat x.json | dcl attribute - --top-k none > out.txt",
        "DCL_DATA=x dcl validate",
        "python -m export convert trained",
        "python -m benchmarks evaluate --dta x",
        "python -m dcl_of_nobody",
    ],
)
def test_a_wrong_command_is_caught(line: str) -> None:
    (words,) = commands_of(line)
    with pytest.raises((AssertionError, dcl.DclError)):
        check_command(words)


def test_commands_are_found_among_other_lines() -> None:
    text = (
        "$ FOO=1 dcl attribute a.json \\\n    --evidence 2 > b.txt\ndcl prints this\n$ ls # dcl\n"
    )
    assert list(commands_of(text)) == [["dcl", "attribute", "a.json", "--evidence", "2"]]
    assert list(commands_of("cd x && dcl validate - # all of it")) == [["dcl", "validate", "-"]]


@page
def test_every_python_block_uses_what_is_there(page: Path) -> None:
    names = set()
    for block in blocks_of(page):
        for node in ast.walk(ast.parse(block.text if block.language == "python" else "")):
            if isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute):
                names.add(ast.unparse(node))
    assert not sorted(name for name in names if _DOTTED.fullmatch(name) and not exists(name))


@page
def test_every_local_link_leads_somewhere(page: Path) -> None:
    targets = ["".join(found) for found in _LINK.findall(_FENCE.sub("", page.read_text()))]
    local = [target for target in targets if not re.match(r"[a-z]+:|//", target)]
    assert not [target for target in local if not leads_somewhere(target, page)]


def test_the_newest_entry_of_the_changelog_is_this_version() -> None:
    headings = re.findall(r"^## .*", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions = [found[0] for h in headings if (found := re.search(r"\d+\.\d+\.\d+\S*", h))]
    assert versions[0].rstrip("]") == dcl.__version__


def test_the_page_on_data_has_every_format_in_the_order_of_detection() -> None:
    text = (ROOT / "docs" / "data.md").read_text()
    assert tuple(re.findall(r"^### `(\w+)`$", text, re.MULTILINE)) == FORMATS


def test_the_examples_of_formats_are_detected_and_read(tmp_path: Path) -> None:
    blocks = [b for b in blocks_of(ROOT / "docs" / "data.md") if b.language == "json"]
    assert {block.heading.strip("`") for block in blocks} == set(FORMATS)
    for i, block in enumerate(blocks):
        name = block.heading.strip("`")
        assert detect(json.loads(block.text)) == name
        file = tmp_path / f"{i}.json"
        file.write_text(block.text)
        (example,) = read_examples(file, format=name)
        agents = example.trajectory.agents
        assert all(fault.agent in agents for fault in example.faults or ())


def test_the_fields_of_our_own_format_are_all_described() -> None:
    text = (ROOT / "docs" / "data.md").read_text()
    described = set(re.findall(r"^\| `([\w.\[\]]+)` \|", text, re.MULTILINE))
    rows = [json.loads(b.text) for b in blocks_of(ROOT / "docs" / "data.md") if is_native(b)]
    used = {key for row in rows for key in row}
    used |= {f"turns[].{key}" for row in rows for turn in row["turns"] for key in turn}
    used |= {f"faults[].{key}" for row in rows for fault in row.get("faults", ()) for key in fault}
    assert used <= described
    # The fullest example shows every field that there is.
    fields = {key for key in described if not key.startswith(("turns[", "faults["))}
    assert fields - set(FORMATS) == {key for key in used if "[" not in key}


def is_native(block: Block) -> bool:
    return block.language == "json" and block.heading == "`native`"


def test_the_table_of_sizes_is_what_its_command_prints() -> None:
    page = ROOT / "docs" / "model.md"
    (code,) = (block.text for block in blocks_of(page) if block.language == "python")
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(code, str(page), "exec"), {})
    assert out.getvalue().count("\n") > 20
    assert out.getvalue() in page.read_text()
