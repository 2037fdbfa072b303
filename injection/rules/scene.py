"""What a rule knows about the turn it rewrites, and the small changes that rules are made of."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from injection.anatomy import Part, dissect, stated_answer
from injection.asides import pick_aside
from injection.checkers import final_answer
from injection.session import Said

_NUMBER = re.compile(r"(?<![\w.{])-?\d+(?:\.\d+)?(?![\w}]|\.\d)")


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a turn was spoken.

    Args:
        task: What the whole system was asked.
        history: What the speaker was shown, in time order.
        others: Names of the other agents that the speaker can know.
        rng: Chooses among equally good changes; a fixed seed gives the same text.
        agent: Who speaks; empty if it does not matter.
        domain: Subject of the task, as `Task.domain` gives it.
    """

    task: str
    history: tuple[Said, ...]
    others: tuple[str, ...]
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    agent: str = ""
    domain: str = "reasoning"

    def aside(self) -> str:
        """A sentence that says nothing, of the stock that sound turns use, too."""
        return pick_aside(self.rng)

    def other(self) -> str:
        """Name of another agent; `the reviewer` if none is known."""
        return self.rng.choice(self.others) if self.others else "the reviewer"

    def noun(self) -> str:
        """A word of the task."""
        words: list[str] = re.findall(r"(?<=[a-z] )[a-z]{4,}", self.task) or ["value"]
        return self.rng.choice(words)

    def earlier_steps(self) -> list[Part]:
        """Worked steps of the conversation, in time order."""
        return [p for said in self.history for p in dissect(said.text) if p.kind == "step"]

    def others_said(self) -> list[Said]:
        """What the other agents said with an answer in it."""
        return [s for s in self.history if s.agent != self.agent and stated_answer(s.text)]


def another_value(value: str, scene: Scene) -> str:
    """A plausible value of the same sort that is not this one.

    Args:
        value: A number, an option letter, or words.
        scene: Gives names to confuse it with.
    """
    bare = value.strip().strip("$")
    number = _NUMBER.fullmatch(bare.replace(",", ""))
    if number:
        return _another_number(bare.replace(",", ""), scene)
    if re.fullmatch(r"[A-J]", bare):
        letters = [x for x in "ABCDEFGHIJ"[: max(4, scene.task.count("\n"))] if x != bare]
        return str(scene.rng.choice(letters))
    inside = _NUMBER.search(bare)
    if inside:
        return bare[: inside.start()] + _another_number(inside[0], scene) + bare[inside.end() :]
    text = " ".join([scene.task, *(said.text for said in scene.history)])
    names = sorted(set(re.findall(r"(?<=[a-z] )[A-Z][a-z]{2,}", text)) - set(bare.split()))
    if bare[:1].isupper() and names:
        return str(scene.rng.choice(names))
    return bare[1:] + bare[:1] if len(set(bare)) > 1 else bare + bare


def _another_number(text: str, scene: Scene) -> str:
    """A number near by, as a slip of the pen or of a carry gives it."""
    if "." in text:
        return f"{float(text) * scene.rng.choice((0.5, 1.1, 2.0)):g}"
    number = int(text)
    near = {number + 1, number - 1, number + 10, 2 * number}
    if text.isdecimal() and len(text) > 1 and text[-1] != text[-2]:
        near.add(int(text[:-2] + text[-1] + text[-2]))
    return str(scene.rng.choice(sorted(near - {number})))


def rounded(value: str, scene: Scene) -> str:
    """A value in a form that is not the one asked for: rounded, numbered or shortened."""
    bare = value.strip().strip("$").replace(",", "")
    if re.fullmatch(r"-?\d+", bare):
        number = int(bare)
        unit = next((u for u in (10, 100, 1000) if round(number, -len(str(u)) + 1) != number), 0)
        coarse = round(number, -len(str(unit)) + 1) if unit else 0
        return str(coarse or number * 12)
    if re.fullmatch(r"[A-J]", bare):
        return f"number {'ABCDEFGHIJ'.index(bare) + 1} in the list"
    if re.fullmatch(r"-?\d+(?:\.\d+)?(?:/0*[1-9]\d*)?", bare):
        top, _, bottom = bare.partition("/")
        return str(round(float(top) / float(bottom or 1)))
    return " ".join(f"{word[:1]}." for word in bare.split())


def side_question(scene: Scene) -> tuple[str, str]:
    """An expression that nobody asked for, about a word of the task, and its value."""
    word = scene.noun()
    return f'length of "{word}"', str(len(word))


def round_numbers(text: str) -> str:
    """Every number of two or more digits rounded to tens."""
    return _NUMBER.sub(
        lambda m: str(round(int(m[0]), -1)) if m[0].isdigit() and len(m[0]) > 1 else m[0], text
    )


def blur(text: str, scene: Scene) -> str:
    """Figures, quoted words and names replaced by words of the task, which fit anything."""
    text = re.sub(r'"[^"\n]+"', lambda _: f"the {scene.noun()}", text)
    text = re.sub(r"\{\d+\}", lambda _: f"the {scene.noun()}", text)
    text = re.sub(
        r"(?<![\w])(?<!Step )(?<!step )-?\d+(?:[.,/]\d+)*", lambda _: f"the {scene.noun()}", text
    )
    return re.sub(r"(?<=[a-z] )[A-Z][a-z]+(?: [A-Z][a-z]+)*", lambda _: f"the {scene.noun()}", text)


def with_answer(part: Part, value: str) -> Part:
    """An answer line with another answer in the same form."""
    old = final_answer(part.text)
    at = part.text.rfind(old) if old else -1
    if at < 0:
        return replace(part, text=f"Answer: {value}")
    return replace(part, text=part.text[:at] + value + part.text[at + len(old) :])


def last_of(parts: Sequence[Part], kind: str) -> int | None:
    """Position of the last part of a kind; None if there is none."""
    return next((i for i in reversed(range(len(parts))) if parts[i].kind == kind), None)
