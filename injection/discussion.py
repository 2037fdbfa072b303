"""What scripted experts say in a shared conversation with a terminal.

Each looks at how far the conversation is, and adds what is missing next: a plan, code or a lookup,
a verdict on what came out, or the answer. Experts who do not know the task err where experts err:
in the plan, in a number they copy, in a row they look up, in which line of the output is the
answer, or in an objection to work that was right. Errors are not marked, and what follows is
computed from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from injection.anatomy import same_value, stated_answer
from injection.english import evaluate, fill, plan, solve, towns, write_code
from injection.phases import Phase, guess
from injection.session import Brief, Said
from injection.systems.experts import END, TERMINAL

if TYPE_CHECKING:
    from injection.scripted import Scripted

PLAN_LINE = re.compile(r"^(\d+)\. (?:Work out |Look up )(.+?)\.?$", re.MULTILINE)
"""One step of a plan."""
Draw = Callable[..., float]
"""A number from 0 to 1 that some words decide."""

_PATIENCE = 2
_NUMBER = re.compile(r"(?<![\w.{])\d+(?![\w.}])")
_FOUND = re.compile(r"^- (.+) is (.+?)\.?$", re.MULTILINE)
_OUTPUT = re.compile(r"exitcode: (\d).*?\nCode output:\n(.*)\Z", re.DOTALL)


def _discuss(model: Scripted, agent: str, brief: Brief) -> str:
    """What is missing next."""
    task, talk = brief.task, brief.history
    latest = next((said for said in reversed(talk) if _moves(said)), None)
    if latest and (stated_answer(latest.text) or "[Agree]" in latest.text):
        return _confirm(model, agent, task, talk, latest)
    if latest and "exitcode: 1" not in latest.text:
        return _judge(model, agent, task, talk, latest)
    steps = _read_plan(talk)
    if not talk and model.draw("opens", agent, task) < 0.5:
        return _open(model, agent, task)
    return _carry_out(model, agent, task, steps or _own_steps(model, agent, task))


def _moves(said: Said) -> bool:
    """Whether something came out, or somebody gave a verdict on it."""
    work = said.agent == TERMINAL or _FOUND.search(said.text)
    return bool(work or stated_answer(said.text) or "[Agree]" in said.text)


def _open(model: Scripted, agent: str, task: str) -> str:
    """A plan, one step a line."""
    steps = _own_steps(model, agent, task)
    lines = [
        f"{i}. {'Work out' if _is_computed(step) else 'Look up'} {step}."
        for i, step in enumerate(steps, start=1)
    ]
    opening = ("Let us go step by step.", "Here is how I would go about it.", "My plan:")
    chosen = opening[int(model.draw("opening", agent, task) * len(opening))]
    return f"{chosen}\n" + "\n".join(lines or ["1. Work out what the task asks for."])


def _own_steps(model: Scripted, agent: str, task: str) -> list[str]:
    """The steps that an expert believes to lead to the answer."""
    if "def " in task:
        return ["the function"]
    steps = list(plan(task))
    if not steps or model.is_able(agent, task):
        return steps
    if len(steps) > 1 and model.draw("forgets", agent, task) < 0.4:
        return steps[:-1]
    at = int(model.draw("where", agent, task) * len(steps))
    return [*steps[:at], _misread(steps[at], partial(model.draw, agent, task)), *steps[at + 1 :]]


def _misread(step: str, draw: Draw) -> str:
    """A step with another operation or another row."""
    for one, other in ((" - ", " + "), (" * ", " + "), (" + ", " - "), (" / ", " * ")):
        if one in step:
            return step.replace(one, other, 1)
    for one, other in (("largest", "smallest"), ("smallest", "largest"), ("founded", "population")):
        if one in step:
            return step.replace(one, other, 1)
    return miscopy(step, draw)


def miscopy(text: str, draw: Draw) -> str:
    """A text with one number, or the name of one town, taken down wrongly; as it was without any.

    Args:
        text: The text.
        draw: Decides which, and what becomes of it.
    """
    numbers = list(_NUMBER.finditer(text))
    if numbers:
        at = numbers[int(draw("number", text) * len(numbers))]
        value = int(at[0])
        wrong = value + (10 if value > 20 else 1) * (1 + int(draw("off", text) * 2))
        return f"{text[: at.start()]}{wrong}{text[at.end() :]}"
    for row in towns():
        for name in (row["town"], row["mayor"], row["river"]):
            if re.search(rf"\b{re.escape(name)}\b", text):
                field = next(key for key in ("town", "mayor", "river") if row[key] == name)
                others = [other[field] for other in towns() if other[field] != name]
                return text.replace(name, others[int(draw("row", text) * len(others))])
    return text


def _carry_out(model: Scripted, agent: str, task: str, steps: Sequence[str]) -> str:
    """Code or lookups for steps; who does not know the task takes something down wrongly."""
    careless = not model.is_able(agent, task)
    if "def " in task:
        return _write_function(model, agent, task, careless)
    if not steps:
        return guess(model, agent, task)
    if careless and model.draw("copies", agent, task) < 0.6:
        at = int(model.draw("which", agent, task) * len(steps))
        steps = [
            *steps[:at],
            miscopy(steps[at], partial(model.draw, agent, task)),
            *steps[at + 1 :],
        ]
    if all(_is_computed(step) for step in steps):
        return _write_script(model, agent, task, steps)
    return _look_up(task, steps)


def _write_function(model: Scripted, agent: str, task: str, careless: bool) -> str:
    """The function that the task asks for, with a call on the example of its docstring."""
    code = write_code(task)
    if not code:
        return guess(model, agent, task)
    if careless:
        swaps = (("== 0", "!= 0"), ("!= 0", "== 0"), ("> 0", ">= 1"), ("x < 0", "x > 0"))
        one, other = next(((a, b) for a, b in swaps if a in code), ("sum(", "len("))
        code = code.replace(one, other, 1)
    call = re.search(r">>> (.+)", task)
    shown = f"print({call[1]})\n" if call else ""
    return f"I put the docstring into code.\n```python\n{code}\n{shown}```"


def _write_script(model: Scripted, agent: str, task: str, steps: Sequence[str]) -> str:
    """Steps as Python; now and then with a slip that the interpreter finds."""
    lines = [f"step_{i} = {_to_python(step)}" for i, step in enumerate(steps, start=1)]
    if any("Fraction" in line for line in lines):
        lines.insert(0, "from fractions import Fraction")
    last = f"step_{len(steps)}"
    if model.draw("typo", agent, task, *steps) < 0.15:
        last = f"steps_{len(steps)}"
    lines += [f"print({name!r}, {name})" for name in (f"step_{i}" for i in range(1, len(steps)))]
    code = "\n".join([*lines, f"print('result', {last})"])
    opening = ("This computes it:", "I turned the steps into code.", "Let me run this.")
    return (
        f"{opening[int(model.draw('says', agent, task) * 3)]}\n```python\n{code}\n```\n"
        "Please look at the output."
    )


def _look_up(task: str, steps: Sequence[str]) -> str:
    """What an expert finds for each step."""
    values: list[str] = []
    for step in steps:
        values.append(evaluate(fill(step, values), task) or "not to be found")
    lines = [
        f"- {fill(step, values)} is {value}." for step, value in zip(steps, values, strict=True)
    ]
    return "I went through the sources:\n" + "\n".join(lines)


def _judge(model: Scripted, agent: str, task: str, talk: Sequence[Said], work: Said) -> str:
    """The result that came out, or an objection with work of one's own."""
    result = _result_of(task, talk, work)
    careful = model.draw("careful", agent, task) < model.care
    if careful and _may_object(talk) and not _is_right(model, agent, task, result):
        return (
            f"[Disagree] {result or 'The output'} cannot be right, I would do it differently.\n"
            + _carry_out(model, agent, task, _own_steps(model, agent, task))
        )
    if "def " in task:
        return f"[Agree] The output is what the docstring says.\n{_last_code(talk)}"
    if not model.is_able(agent, task) and model.draw("misreads", agent, task) < 0.3:
        others = re.findall(r"step_\d+ (\S+)", work.text) or _values_of(work)[:-1]
        result = others[-1] if others else result
    return f"[Agree] I went through it, and the result follows.\nAnswer: {result}"


def _confirm(model: Scripted, agent: str, task: str, talk: Sequence[Said], stated: Said) -> str:
    """The end of the conversation, or a last objection."""
    answer = stated_answer(stated.text)
    careful = model.draw("careful", agent, task) < model.care
    if careful and _may_object(talk) and not _is_right(model, agent, task, answer):
        return "[Disagree] I get something else.\n" + _carry_out(
            model, agent, task, _own_steps(model, agent, task)
        )
    closing = f"Answer: {answer}" if "def " not in task else _last_code(talk)
    return f"Nothing speaks against this.\n{closing}\n{END}"


def _may_object(talk: Sequence[Said]) -> bool:
    """Whether there is patience left for another objection."""
    return sum("[Disagree]" in said.text for said in talk) < _PATIENCE


def _is_right(model: Scripted, agent: str, task: str, result: str) -> bool:
    """Whether a result is what the expert gets, rightly or not."""
    if "def " in task:
        example = re.search(r">>> .+\n\s*(.+)", task)
        return example is None or not result or same_value(example[1].strip(), result)
    if model.is_able(agent, task):
        solution = solve(task)
        return solution is None or same_value(solution.answer, result)
    values: list[str] = []
    for step in _own_steps(model, agent, task):
        values.append(evaluate(fill(step, values), task) or "")
    return not values or not values[-1] or same_value(values[-1], result)


def _result_of(task: str, talk: Sequence[Said], work: Said) -> str:
    """What came out last: the last line of the output, or the last thing that was looked up."""
    values = _values_of(work)
    result = values[-1] if values else ""
    if "option that says" in work.text:
        return result
    listed = re.findall(r"^([A-J])\) (.+)$", task, re.MULTILINE)
    return next((letter for letter, text in listed if same_value(text, result)), result)


def _values_of(work: Said) -> list[str]:
    """Values of the last block of work, in order."""
    output = _OUTPUT.search(work.text)
    if output:
        lines = output[2].strip().splitlines()
        values = [line.rpartition(" ")[2] if "'" not in line else line for line in lines]
        return [value.removesuffix(".0") for value in values]  # a quotient without remainder
    return [match[2] for match in _FOUND.finditer(work.text)]


def _read_plan(talk: Sequence[Said]) -> list[str]:
    """Steps of the last plan in a conversation."""
    plans = [said.text for said in talk if PLAN_LINE.search(said.text)]
    return [match[2] for match in PLAN_LINE.finditer(plans[-1])] if plans else []


def _last_code(talk: Sequence[Said]) -> str:
    """The last code block, with its fences and without the call of the example."""
    blocks = [b for said in talk for b in re.findall(r"```.*?```", said.text, re.DOTALL)]
    return re.sub(r"\nprint\(.*\)\n", "\n", blocks[-1]) if blocks else ""


def _is_computed(step: str) -> bool:
    """Whether a step is arithmetic or work on letters, which code can do."""
    return re.fullmatch(r"[-\d\s+*/%^{}.]+", step) is not None or '"' in step


def _to_python(step: str) -> str:
    """One step as a Python expression; `{0}` is the value of the first."""
    text = re.sub(r"\{(\d+)\}", lambda m: f"step_{int(m[1]) + 1}", step).replace("^", "**")
    text = re.sub(r'("\w+") reversed', r"\1[::-1]", text)
    text = re.sub(r'letter (\d+) of ("\w+")', r"\2[\1 - 1]", text)
    text = re.sub(r'number of ("\w") in ("\w+")', r"\2.count(\1)", text)
    text = re.sub(r'length of ("\w+")', r"len(\1)", text)
    return re.sub(r"(\d+)/(\d+)", r"Fraction(\1, \2)", text)


DISCUSSION: dict[str, Phase] = {"discuss": _discuss}
