"""A small web and a folder of files that scripted surfers look things up in; all of it invented.

Towns, people, museums, festivals, books and ships have attributes, some of them other towns and
people, so questions can go from one to the next. An attribute stands on pages, in an infobox, a
sentence or a table, or in a file. What looks alike has like names: two museums in a town, two
people with a surname, the lists of two years.

A fact is an expression: `mayor of Oskerby`, `number of visitors in 2018 of Oskerby Museum of Maps`,
`crew of MV Halcyon in the file crews_2019.csv`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

SEARCH = "https://www.seekwell.example/search?q="
"""Where results of a search are shown, before the query."""
WORKSPACE = "/workspace"
"""Folder of the files."""

_ATTRIBUTES: Mapping[str, tuple[str, str]] = {
    "year of birth": ("Born", "was born in"),
    "birthplace": ("Place of birth", "comes from"),
    "teacher": ("Teacher", "studied under"),
    "spouse": ("Spouse", "is married to"),
    "country": ("Country", "is a town in"),
    "river": ("River", "lies on the river"),
    "mayor": ("Mayor", "is governed by"),
    "population": ("Population", "has a population of"),
    "year of foundation": ("Founded", "was founded in"),
    "twin town": ("Twin town", "is twinned with"),
    "town": ("Location", "stands in"),
    "year of opening": ("Opened", "opened its doors in"),
    "architect": ("Architect", "was designed by"),
    "director": ("Director", "is headed by"),
    "number of exhibits": ("Exhibits", "shows this many objects:"),
    "venue town": ("Venue", "takes place in"),
    "founder": ("Founder", "was started by"),
    "year of the first edition": ("First edition", "was first held in"),
    "author": ("Author", "was written by"),
    "translator": ("Translator", "was translated by"),
    "year of publication": ("Published", "came out in"),
    "number of pages": ("Pages", "runs to this many pages:"),
    "year of launch": ("Launched", "was launched in"),
    "home port": ("Home port", "is registered in"),
    "captain": ("Captain", "is commanded by"),
    "length in feet": ("Length (ft)", "measures in feet"),
}
"""Label and sentence of every attribute that is no row of a table."""
_TABLES: Mapping[str, str] = {"number of visitors in": "Visitors", "winner in": "Winner"}
_YEARS = tuple(range(2013, 2023))
_FILES: Mapping[str, tuple[str, ...]] = {"crews": ("crew", "passengers"), "loans": ("loan value",)}
_EDITIONS = (2019, 2020)

_FIRST = (
    "Ilka", "Oren", "Maud", "Teo", "Sanne", "Bram", "Livia", "Joost", "Petra", "Anselm", "Greta",
    "Milo", "Ottilie", "Ruben", "Hanne", "Caspar", "Edda", "Lorenz", "Wilma", "Fabian", "Nora",
    "Kasimir", "Ulla", "Viktor",
)  # fmt: skip
_LAST = (
    "Haverkamp", "Quist", "Delmonte", "Straub", "Okafor", "Lindqvist", "Tiller", "Zabel",
    "Morrow", "Pacheco", "Vandermeer", "Ruck",
)  # fmt: skip
_TOWNS = (
    "Oskerby", "Lindholt", "Marrow", "Castell", "Pinevale", "Tressa", "Brackwater", "Ulmen",
    "Gorsel", "Havnes", "Dunmere", "Sollis", "Kettering-on-Sea", "Velden", "Arvika", "Norrow",
    "Quenby", "Estermont", "Palisade", "Wickham",
)  # fmt: skip
_COUNTRIES = ("Norland", "Vesperia", "Castamar", "Ostmark", "Illyra")
_RIVERS = (
    "Ambel", "Torne", "Sil", "Wenna", "Orrin", "Lisk", "Drava", "Calder", "Neve", "Isen",
)  # fmt: skip
_COLLECTIONS = ("Maps", "Clocks", "Glass", "Ships", "Coins", "Textiles")
_EVENTS = ("Lantern", "Poetry", "Harvest", "Jazz")
_BOOKS = tuple(
    f"The {adjective} {noun}"
    for adjective in ("Salt", "Paper", "Winter", "Hollow", "Amber", "Silent", "Crooked")
    for noun in ("Road", "Garden")
)
_SHIPS = tuple(
    f"MV {name}{number}"
    for name in ("Halcyon", "Meridian", "Corsair", "Petrel", "Aurora")
    for number in ("", " II")
)
_FILLERS = (
    "The surroundings were redesigned after a flood in {y}.",
    "A first account of it appeared in a local paper in {y}.",
    "Visitors are asked to check the hours before they come.",
    "Several legends are told about its origin, none of which is documented.",
    "A fire in {y} destroyed part of the archives.",
    "The name has been spelled in at least {n} ways over the centuries.",
    "An exhibition on the subject toured {n} cities.",
    "In {y} a commemorative stamp was issued.",
    "This section needs additional citations for verification.",
    "A documentary of {n} minutes was broadcast in {y}.",
    "Critics received it with mixed feelings at first.",
    "Restoration works took {n} months and ended in {y}.",
    "It is mentioned in a guide book of {y}.",
    "The anniversary in {y} was marked with a concert.",
    "Members of the association meet on the first Monday of each month.",
    "Photographs from {y} show it in its original state.",
    "A dispute about the ownership was settled out of court.",
    "Admission is free for children under {n}.",
)
_SECTIONS = ("History", "Overview", "Background", "Details", "Reception", "Later years")
_SITES = {
    "town": "Gazetteer of Towns",
    "person": "Who Was Where",
    "museum": "Museum Finder",
    "festival": "Festival Calendar",
    "book": "Union Catalogue",
    "ship": "Register of Vessels",
}
_SCREEN = 11  # lines of a page that are seen at once
_RESULTS = 5


@dataclass(frozen=True, slots=True)
class Page:
    """One page.

    Args:
        title: As the browser shows it; its first part is what the page is about.
        url: Where it is.
        lines: Its text.
    """

    title: str
    url: str
    lines: tuple[str, ...]

    @property
    def screens(self) -> int:
        """How often one scrolls to see all of it; > 0."""
        return max(1, -(-len(self.lines) // _SCREEN))

    def view(self, screen: int) -> str:
        """What one screen shows, 0-based."""
        return "\n".join(self.lines[screen * _SCREEN : (screen + 1) * _SCREEN])


@cache
def facts() -> dict[str, dict[str, str]]:
    """Attributes of everything there is, by name."""
    rng = random.Random(2411)
    people = [f"{first} {_LAST[i % len(_LAST)]}" for i, first in enumerate(_FIRST)]

    def year(low: int, high: int) -> str:
        return str(rng.randint(low, high))

    def other(names: Sequence[str], name: str) -> str:
        return rng.choice([one for one in names if one != name])

    world: dict[str, dict[str, str]] = {}
    for name in people:
        world[name] = {
            "year of birth": year(1931, 1989),
            "birthplace": rng.choice(_TOWNS),
            "teacher": other(people, name),
            "spouse": other(people, name),
        }
    for name in _TOWNS:
        world[name] = {
            "country": rng.choice(_COUNTRIES),
            "river": rng.choice(_RIVERS),
            "mayor": rng.choice(people),
            "population": year(3_000, 98_000),
            "year of foundation": year(1102, 1890),
            "twin town": other(_TOWNS, name),
        }
    for i, subject in enumerate(_COLLECTIONS * 2):
        name = f"{_TOWNS[i // 2]} Museum of {subject}"
        world[name] = {
            "town": _TOWNS[i // 2],
            "year of opening": year(1868, 2009),
            "architect": rng.choice(people),
            "director": rng.choice(people),
            "number of exhibits": year(800, 24_000),
            **{f"number of visitors in {y}": year(11_000, 380_000) for y in _YEARS},
        }
    for i, event in enumerate(_EVENTS * 2):
        name = f"{_TOWNS[6 + i // 2]} {event} Festival"
        world[name] = {
            "venue town": _TOWNS[6 + i // 2],
            "founder": rng.choice(people),
            "year of the first edition": year(1955, 2011),
            **{f"winner in {y}": rng.choice(people) for y in _YEARS},
        }
    for name in _BOOKS:
        world[name] = {
            "author": rng.choice(people),
            "translator": rng.choice(people),
            "year of publication": year(1958, 2020),
            "number of pages": year(112, 890),
        }
    for name in _SHIPS:
        world[name] = {
            "year of launch": year(1949, 2016),
            "home port": rng.choice(_TOWNS),
            "captain": rng.choice(people),
            "length in feet": year(120, 980),
        }
    return world


@cache
def files() -> dict[str, str]:
    """Text of every file in the workspace, by name."""
    rng = random.Random(1144)
    rows = {"crews": _SHIPS, "loans": tuple(n for n in facts() if " Museum of " in n)}
    found = {}
    for stem, columns in _FILES.items():
        for edition in _EDITIONS:
            head = ",".join(("name", *columns, "remark"))
            lines = [
                ",".join((name, *(str(rng.randint(18, 9400)) for _ in columns), rng.choice("AB")))
                for name in rows[stem]
            ]
            found[f"{stem}_{edition}.csv"] = "\n".join([head, *lines])
    found["README.txt"] = "Lists as they were sent to us, one file a year."
    return found


@lru_cache(maxsize=4096)
def split_fact(expression: str) -> tuple[str, str, str]:
    """Attribute, name and file of a fact; empty where it has none."""
    about, _, file = expression.partition(" in the file ")
    known = (name for name in facts() if about.endswith(f" of {name}"))
    name = max(known, key=len, default="")
    if not name:
        attribute, _, name = about.rpartition(" of ")
        return attribute, name, file
    return about.removesuffix(f" of {name}"), name, file


def plan_lookups(question: str) -> tuple[str, ...]:
    """Facts that lead to the answer of a question, in order; empty if it is not understood.

    As in `injection.english.plan`, `{0}` stands for the value of the first.
    """
    for pattern, sign in _QUESTIONS:
        if match := re.fullmatch(pattern, question.strip()):
            steps: list[str] = []
            ends = [_plan_phrase(phrase, steps) for phrase in match.groups()]
            if not all(ends):
                return ()
            return (*steps, f"{ends[0]} {sign} {ends[1]}") if sign else tuple(steps)
    return ()


_QUESTIONS = (
    (r"By how much is (the .+) larger than (the .+)\?", "-"),
    (r"What is the sum of (the .+) and (the .+)\?", "+"),
    (r"What is (the .+)\?", ""),
)


def _plan_phrase(phrase: str, steps: list[str]) -> str:
    """Add the facts behind `the mayor of the birthplace of ...`; what stands for its value."""
    phrase = phrase.strip()
    if not phrase.startswith("the "):
        return phrase if phrase in facts() else ""
    about, _, file = phrase.removeprefix("the ").partition(" in the file ")
    attribute = next((a for a in _known_attributes() if about.startswith(f"{a} of ")), None)
    inner = _plan_phrase(about[len(attribute) + len(" of ") :], steps) if attribute else ""
    if not inner:
        return ""
    steps.append(f"{attribute} of {inner}" + (f" in the file {file}" if file else ""))
    return f"{{{len(steps) - 1}}}"


@cache
def _known_attributes() -> tuple[str, ...]:
    """All attributes, those with longer names first."""
    found = {a for row in facts().values() for a in row}
    found |= {column for columns in _FILES.values() for column in columns}
    return tuple(sorted(found, key=lambda a: (-len(a), a)))


def siblings(name: str) -> list[str]:
    """Things of the same kind, those with the likest names first."""
    kind = kind_of(name)
    own = set(name.split())
    same = [one for one in facts() if one != name and kind_of(one) == kind]
    return sorted(same, key=lambda one: -len(own & set(one.split())))


def kind_of(name: str) -> str:
    """What something is, in one word; empty for what does not exist."""
    row = facts().get(name, {})
    for kind, attribute in (
        ("person", "birthplace"), ("town", "river"), ("museum", "architect"),
        ("festival", "founder"), ("book", "author"), ("ship", "captain"),
    ):  # fmt: skip
        if attribute in row:
            return kind
    return ""


@cache
def pages() -> dict[str, Page]:
    """Every page by its title: two of everything there is, an encyclopedia's and a directory's."""
    found = {}
    for name in facts():
        slug = re.sub(r"\W+", "_", name)
        for site, host in (
            ("Lorepedia", "en.lorepedia.example/wiki"),
            ("", "www.{}.example/entry"),
        ):
            site = site or _SITES[kind_of(name)]
            title = f"{name} - {site}"
            url = f"https://{host.format(re.sub(r'[^a-z]', '', site.lower()))}/{slug}"
            found[title] = Page(title, url, tuple(_write_page(name, site)))
    return found


def _write_page(name: str, site: str) -> Iterator[str]:
    """Lines of a page: what it is, an infobox, sections with sentences and tables, links."""
    row, kind = facts()[name], kind_of(name)
    rng = random.Random(f"{name}/{site}")
    plain = [a for a in row if a in _ATTRIBUTES]
    rng.shuffle(plain)
    boxed = plain if site != "Lorepedia" else plain[: max(1, len(plain) // 2)]

    def filler() -> str:
        return rng.choice(_FILLERS).format(y=rng.randint(1890, 2019), n=rng.randint(3, 40))

    yield f"# {name}"
    yield f"From {site}. This page is about the {kind} {name}."
    yield from (f"- {_ATTRIBUTES[a][0]}: {row[a]}" for a in boxed)
    for section in rng.sample(_SECTIONS, 2 if site != "Lorepedia" else 4):
        yield f"## {section}"
        yield from (filler() for _ in range(rng.randint(1, 3)))
        for attribute in plain[len(boxed) :][:2]:
            yield f"{name} {_ATTRIBUTES[attribute][1]} {row[attribute]}."
            plain.remove(attribute)
        yield from (filler() for _ in range(rng.randint(0, 2)))
    if site == "Lorepedia":
        for stem, title in _TABLES.items():
            rows = [a for a in row if a.startswith(stem)]
            if rows:
                yield f"## {title} by year"
                yield f"| Year | {title} |"
                yield from (f"| {a.rpartition(' ')[2]} | {row[a]} |" for a in rows)
    yield "## See also"
    near = [*siblings(name)[:2], *(v for v in row.values() if v in facts())][:4]
    yield from (f"- [{one} - Lorepedia]" for one in near)


@lru_cache(maxsize=4096)
def search(query: str) -> Page:
    """The page of results for a query."""
    words = set(re.findall(r"[\w-]+", query.casefold()))
    scored = sorted(
        pages().values(),
        key=lambda page: (
            -len(words & set(re.findall(r"[\w-]+", page.title.casefold()))),
            not page.title.endswith("Lorepedia"),
        ),
    )
    lines = [f"About {len(query) * 137} results"]
    for number, page in enumerate(scored[:_RESULTS], start=1):
        lines += [f"{number}. [{page.title}]", f"   {page.url}", f"   {page.lines[1]}"]
    # All of the results are seen at once.
    return Page(f"{query} - Search", SEARCH + query.replace(" ", "+"), ("\n".join(lines),))


def links(text: str) -> list[str]:
    """Titles of the pages that a text links to, in order."""
    return [title for title in re.findall(r"\[([^\]]+)\]", text) if title in pages()]


def read(text: str, attribute: str, name: str = "") -> str | None:
    """What a text says of an attribute, whoever it is about; None if it says nothing.

    Args:
        text: Of a page or a file.
        attribute: The attribute.
        name: Row of a file that is read.
    """
    if "\nname," in f"\n{text}":
        head, *rows = [line.split(",") for line in text[text.find("name,") :].splitlines()]
        line = next((row for row in rows if row[0] == name), None)
        column = head.index(attribute) if attribute in head else -1
        return line[column] if line and 0 < column < len(line) else None
    if any(attribute.startswith(stem) for stem in _TABLES):
        found = re.search(rf"^\| {attribute.rpartition(' ')[2]} \| (.+?) \|$", text, re.MULTILINE)
    elif attribute in _ATTRIBUTES:
        label, verb = map(re.escape, _ATTRIBUTES[attribute])
        found = re.search(rf"^(?:- {label}: |.+? {verb} )(.+?)\.?$", text, re.MULTILINE)
    else:
        return None
    return found[1] if found else None


def near_values(text: str, value: str) -> list[str]:
    """Other values of the same make that stand in a text, the nearest first."""
    number = value.isdecimal()
    found: list[tuple[int, str]] = []
    at = max(text.find(value), 0)
    for match in re.finditer(
        r"(?:: |\| |, ?|,)([\w-]+(?: [\w-]+)*)(?=\.?$| \||,)", text, re.MULTILINE
    ):
        other = match[1]
        alike = other.isdecimal() if number else other in facts() and value in facts()
        alike = alike and (number or kind_of(other) == kind_of(value))
        if alike and other != value:
            found.append((abs(match.start() - at), other))
    return list(dict.fromkeys(other for _, other in sorted(found)))
