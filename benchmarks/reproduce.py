"""A page of results held against fresh runs of its own commands.

A command of the page is a fenced block of shell; the tables that follow it, up to the next block or
section, are what it printed. Tables are told by their titles, rows by their words, so that a page
may leave rows out and say more between them. What trains and exports prints no table: it makes what
later commands read, and runs only where everything is asked for.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dcl.errors import ConfigError
from dcl.files import whole

RUN = "python -m benchmarks "
"""How a command begins that is run without being asked for; others train or export for hours."""

_SCORE = re.compile(r"(-?[\d.]+) \[(-?[\d.]+), (-?[\d.]+)\]")
_MEAN = re.compile(r"(-?[\d.]+) ± ([\d.]+)(?: \[.*)?")
_DEVIATIONS = 2  # that a mean over seeds may be off
_ITSELF = RUN + "reproduce"
_ROUNDING = 0.05  # half of the last digit that is printed


@dataclass(frozen=True, slots=True)
class Table:
    """A Markdown table.

    Args:
        line: 0-based line of its titles.
        rows: Titles, then all rows below the rule, as cells.
    """

    line: int
    rows: tuple[tuple[str, ...], ...]

    def keys(self) -> list[tuple[str, ...]]:
        """What tells each row below the titles: its words, and how many alike stand above it."""
        seen: Counter[tuple[str, ...]] = Counter()
        above: Sequence[str] = ()
        keys = []
        for row in self.rows[1:]:
            above = [cell or old for cell, old in zip(row, above or row, strict=True)]
            words = tuple(cell.strip("*`") if _is_word(cell) else "" for cell in above)
            keys.append((*words, str(seen[words])))
            seen[words] += 1
        return keys


@dataclass(frozen=True, slots=True)
class Block:
    """A command of a page with what it printed.

    Args:
        section: Heading that it stands under.
        script: The shell, one command or more.
        tables: Those that follow it; none where it makes what later commands read.
    """

    section: str
    script: str
    tables: tuple[Table, ...]

    @property
    def is_benchmark(self) -> bool:
        """Whether it does nothing but run benchmarks that print tables."""
        commands = self.script.replace("\\\n", " ").strip().splitlines()
        return bool(self.tables) and all(command.startswith(RUN) for command in commands)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a page and a fresh run of one of its commands agree.

    Args:
        block: The command.
        cells: Line of the page to its cells as they are now.
        judged: Scores of the page with an interval, or a deviation over seeds, in rows that the run
            gave, too.
        outside: Those whose fresh value is gone, outside of the interval, or more than two
            deviations off, in words.
        lost: Rows of the page that the run did not print.
        failure: Why there are no scores, where the command failed.
    """

    block: Block
    cells: Mapping[int, tuple[str, ...]]
    judged: int
    outside: tuple[str, ...]
    lost: tuple[str, ...]
    failure: str = ""

    @property
    def holds(self) -> bool:
        """Whether the command ran, and all that the page says of it came out again."""
        return not (self.outside or self.lost or self.failure)


def reproduce(
    page: Path, *, sections: Sequence[str] = (), everything: bool = False, write: bool = False
) -> Iterator[Agreement]:
    """Run the commands of a page, and hold its tables against what they print.

    A command that fails, as for want of a file that another one makes, does not stop the others.

    Args:
        page: Markdown.
        sections: Parts of the headings to look under; none means all.
        everything: Run what trains and exports as well, in the order of the page.
        write: Put what was printed into the page, one command after the other.

    Raises:
        ConfigError: If the page cannot be read, or no command is left.
    """
    chosen = [
        block
        for block in parse_page(_read(page))
        if (everything or block.is_benchmark)
        and (not sections or any(part.lower() in block.section.lower() for part in sections))
    ]
    if not chosen:
        raise ConfigError(f"{page}: expected a command, found none to run")
    for block in chosen:
        try:
            printed = run_script(block.script)
        except ConfigError as error:
            yield Agreement(block, {}, 0, (), (), str(error))
            continue
        text = _read(page)  # anew: people write while commands run
        now = next((one for one in parse_page(text) if one.script == block.script), None)
        if now is None:
            yield Agreement(block, {}, 0, (), (), f"no longer on the page:\n{block.script}")
            continue
        found = compare(now, find_tables(printed))
        if write:
            lines = text.split("\n")
            for line, cells in found.cells.items():
                lines[line] = f"| {' | '.join(cells)} |"
            with whole(page) as part:
                part.write_text("\n".join(lines), encoding="utf-8")
        yield found


def _read(page: Path) -> str:
    """The text of a page."""
    try:
        return page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{page}: expected a page of results: {error}") from None


def parse_page(text: str) -> list[Block]:
    """The commands of a page, in order, but for this one.

    Args:
        text: Markdown; fences marked `sh` are commands, and `## ` begins a section.
    """
    section, script, fence = "", "", ""
    found: list[tuple[str, str, list[int]]] = []
    for number, line in enumerate(text.split("\n")):
        if fence:
            if line == "```":
                found.append((section, script, []))
                fence = ""
            else:
                script += line + "\n"
        elif line == "```sh":
            script, fence = "", line
        elif line.startswith("## "):
            section = line[3:]
            found.append((section, "", []))  # tables before the first command are of none
        elif found:
            found[-1][2].append(number)
    return [
        Block(section, script, find_tables(text, set(numbers)))
        for section, script, numbers in found
        if script and not script.startswith(_ITSELF)
    ]


def find_tables(text: str, among: set[int] | None = None) -> tuple[Table, ...]:
    """The Markdown tables of a text.

    Args:
        text: Any text.
        among: 0-based lines to look at; None means all.
    """
    tables: list[tuple[int, list[tuple[str, ...]]]] = []
    for number, line in enumerate(text.split("\n")):
        if not line.startswith("|") or (among is not None and number not in among):
            continue
        cells = tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
        if tables and number == tables[-1][0] + len(tables[-1][1]):
            tables[-1][1].append(cells)
        else:
            tables.append((number, [cells]))
    return tuple(Table(at, (rows[0], *rows[2:])) for at, rows in tables if len(rows) > 2)


def run_script(script: str) -> str:
    """What shell commands print; they run in the current folder, with this interpreter first.

    Raises:
        ConfigError: If one of them fails; what it says of it has been printed.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PATH": path},
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"exit code {done.returncode} of\n{script}")
    return done.stdout


def compare(block: Block, fresh: Sequence[Table]) -> Agreement:
    """Hold the tables of a page against those of a run.

    Args:
        block: The command and its tables.
        fresh: Tables that the run printed.
    """
    left = list(fresh)
    cells: dict[int, tuple[str, ...]] = {}
    outside: list[str] = []
    lost: list[str] = []
    judged = 0
    for table in block.tables:
        titles = table.rows[0]
        same = next((one for one in left if one.rows[0] == titles), None)
        now = {} if same is None else dict(zip(same.keys(), same.rows[1:], strict=True))
        if same is not None:
            left.remove(same)
        for at, (key, row) in enumerate(zip(table.keys(), table.rows[1:], strict=True)):
            name = ", ".join(word for word in key[:-1] if word)
            if key not in now:
                lost.append(name)
                continue
            new = tuple(
                old if _is_word(old) or not old else value
                for old, value in zip(row, now[key], strict=True)
            )
            cells[table.line + 2 + at] = new
            for title, old, value in zip(titles, row, new, strict=True):
                within = _is_within(value, old)
                judged += within is not None
                if within is False:
                    outside.append(f"{name}, {title}: page {old}, now {value}")
    return Agreement(block, cells, judged, tuple(outside), tuple(lost))


def describe(found: Agreement) -> str:
    """What came out for one command, in words."""
    if found.failure:
        return f"{found.block.section}: {found.failure.rstrip()}"
    if not found.block.tables:
        return f"{found.block.section}: done, {found.block.script.split(maxsplit=1)[0]} ..."
    kept = found.judged - len(found.outside)
    lines = [f"{found.block.section}: {kept} of {found.judged} scores where they should be"]
    lines += [f"  outside: {one}" for one in found.outside]
    lines += [f"  not printed: {one}" for one in found.lost]
    return "\n".join(lines)


def _is_word(cell: str) -> bool:
    """Whether a cell says what a row is of, not what was measured."""
    return any(character.isalpha() for character in cell)


def _is_within(value: str, old: str) -> bool | None:
    """Whether a fresh score is where an old one says it should be; None where that says nothing."""
    for form, bound in ((_SCORE, _interval), (_MEAN, _deviations)):
        page = form.fullmatch(old)
        if page is not None:
            now, (low, high) = form.fullmatch(value), bound(page)
            return now is not None and low - _ROUNDING <= float(now[1]) <= high + _ROUNDING
    return None


def _interval(page: re.Match[str]) -> tuple[float, float]:
    """The interval of a score."""
    return float(page[2]), float(page[3])


def _deviations(page: re.Match[str]) -> tuple[float, float]:
    """As far from a mean as seeds may take it."""
    mean, reach = float(page[1]), _DEVIATIONS * float(page[2])
    return mean - reach, mean + reach
