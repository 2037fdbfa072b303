"""What scripted agents do in a team with a browser and files: plan, steer, surf, open, code.

The orchestrator goes from fact to fact, and says what it knows in its ledger; workers do the one
thing that they are told. Who does not know the task errs at an equal rate in every call, whoever
it is, in the way of its trade: another query, the link beside the right one, a page further than
the place, the value in the next row, the wrong worker, an early end. Who is careful looks whether
a page is the one that was asked for. Errors are not marked, and what follows is computed from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from injection import web
from injection.anatomy import compute
from injection.discussion import miscopy
from injection.english import fill, plan, write_code
from injection.phases import Phase, guess, present_code
from injection.session import Brief, Said
from injection.systems.web_team import CODER, FILES, ORCHESTRATOR, SURFER, TERMINAL

if TYPE_CHECKING:
    from injection.scripted import Scripted

Draw = Callable[..., float]
"""A number from 0 to 1 that some words decide."""

FINISHED = "Nothing is left to do."
"""What the orchestrator says in place of an instruction where it ends the run."""
_LAPSE = 0.1
"""Share of calls in which an agent who does not know the task errs; the same for all agents."""
_PATIENCE = 8  # ledgers about one fact, after which the orchestrator sees a loop
_STEP = re.compile(r"^(\d+)\. (?:Find|Compute) (?:the )?(.+?)\.?$", re.MULTILINE)
_KNOWN = re.compile(r"\(the ([^()]+?) is ([^()]+?)\)")
_STATED = re.compile(r"\bthe ((?:[^:,.\n]|\.(?=\w))+?) is ([\w -]+)\.(?!\w)")
_QUOTED = re.compile(r"'([^']+)'")
_ASKED = re.compile(
    r"(?:What is|tell me|read off|is given for) the (.+?)(?: according to|\?|\.$| here)"
)
_VIEW = re.compile(
    r"^Here is a screenshot of \[(.+?)\]\(.*?\)\..*?positioned (.+?)\.$", re.MULTILINE
)

_SEARCH = (
    "Please search the web for '{}'.",
    "Start a web search with the query '{}'.",
    "Look for '{}' with the search engine and report what comes up.",
)
_OPEN = (
    "Please open the result '{}'.",
    "Click the link '{}' and show what is there.",
    "The entry '{}' looks promising. Visit it.",
)
_SCROLL = (
    "Scroll down to see more of this page.",
    "The value is not in view yet. Please scroll further down.",
    "Go one page down on the current page.",
)
_BACK = (
    "Please scroll up again; the part that we need was skipped.",
    "Go one page up on the current page.",
)
_ASK = (
    "What is the {} according to this page?",
    "Please tell me the {} according to the text in view.",
    "Which value is given for the {} here?",
)
_SAY = (
    "According to the page, the {} is {}.",
    "I looked at the text: the {} is {}.",
    "The page says that the {} is {}.",
)
_HELD = (
    "All steps of the plan have their results: {}.",
    "The request is answered by what we have: {}.",
)
_SO_FAR = (
    "The request is not satisfied yet. So far we know: {}.",
    "Some of the facts are there: {}. The rest has not been found.",
    "We hold {}, but this does not answer the request yet.",
)
_EMPTY = (
    "Nothing has been found yet.",
    "We are only starting, so no fact of the plan is known.",
    "None of the facts has been looked up so far.",
)
_NEED = (
    "The next step of the plan needs a result: the {} is open.",
    "In the plan, the {} is open, and all later steps build on it.",
    "This follows from the plan, where the {} is open.",
)
_LOOP = ("The same was tried several times.", "The last rounds repeat each other.")
_NO_LOOP = (
    "Nothing was repeated.",
    "Each message so far asks for something else.",
    "We are not in a loop; the last action was a new one.",
)
_STUCK = ("There is nothing new in the last messages.", "The last rounds did not add a fact.")
_PROGRESS = (
    "We are getting closer with every step.",
    "The last message brought us forward.",
    "There is steady progress through the plan.",
)
_WHY = {
    SURFER: ("This has to be looked up on the web.", "WebSurfer can reach the page in question."),
    FILES: ("The value stands in a file.", "FileSurfer can open the list that is named."),
    CODER: ("This takes a short script.", "Assistant can help with this part."),
    TERMINAL: ("The code has to be run.", "Only the terminal can execute the script."),
}


def _survey(model: Scripted, agent: str, brief: Brief) -> str:
    """A fact sheet and a plan; who does not know the task takes a step of it down wrongly."""
    draw = partial(model.draw, agent, brief.task)
    steps = list(_steps_of(brief.task))
    known = _read_known(brief.history)
    attempt = sum("fact sheet" in said.text for said in brief.history)
    if _errs(model, agent, brief.task, "survey", attempt) and steps:
        steps = _misplan(steps, draw)
    given = ", ".join(re.findall(r"[A-Z][\w-]+(?: (?:of|[A-Z])[\w-]*)*|\d+", brief.task)[1:6])
    have = "\n".join(f"- (the {fact} is {value})" for fact, value in known.items())
    look = "\n".join(f"- The {_name_steps(step)}" for step in steps if not _is_sum(step))
    sums = [_name_steps(step) for step in steps if _is_sum(step)]
    lines = [
        f"{i}. {'Compute ' if _is_sum(step) else 'Find the '}{_name_steps(step)}."
        for i, step in enumerate(steps, start=1)
    ]
    return (
        "Here is an initial fact sheet to consider:\n\n"
        f"1. GIVEN OR VERIFIED FACTS\n- Named in the request: {given or 'see above'}.\n{have}\n\n"
        f"2. FACTS TO LOOK UP\n{look or '- None.'}\n\n"
        f"3. FACTS TO DERIVE\n- {'; '.join(sums) or 'None.'}\n\n"
        "Here is the plan to follow as best as possible:\n\n" + "\n".join(lines)
    )


def _steps_of(task: str) -> Sequence[str]:
    """What has to be found and computed; `{0}` stands for the first."""
    if "def " in task:
        return ("function",)
    return web.plan_lookups(task) or plan(task)


def _misplan(steps: list[str], draw: Draw) -> list[str]:
    """A plan with another attribute, another operation or without a step in between."""
    at = int(draw("misplans") * len(steps))
    step = steps[at]
    for one, other in ((" - ", " + "), (" + ", " - ")):
        if one in step:
            return [*steps[:at], step.replace(one, other), *steps[at + 1 :]]
    attribute, name, _ = web.split_fact(step)
    if at and draw("forgets") < 0.5 and at < len(steps) - 1:
        rest = [
            re.sub(r"\{(\d+)\}", lambda m: _renumber(int(m[1]), at), s) for s in steps[at + 1 :]
        ]
        return [*steps[:at], *rest]
    row = next((r for r in web.facts().values() if attribute in r), {})
    value = row.get(attribute, "")
    others = [
        a
        for a, v in row.items()
        if a != attribute
        and v.isdecimal() == value.isdecimal()
        and web.kind_of(v) == web.kind_of(value)
    ]
    if others:
        other = others[int(draw("attribute") * len(others))]
        return [*steps[:at], step.replace(attribute, other, 1), *steps[at + 1 :]]
    return [*steps[:at], miscopy(step, draw), *steps[at + 1 :]] if not name else steps


def _renumber(number: int, gone: int) -> str:
    """A reference to a step after one was left out; what asked for that one asks for the last."""
    return f"{{{number - 1 if number >= gone else number}}}"


def _name_steps(step: str) -> str:
    """A step as a plan words it."""
    return re.sub(r"\{(\d+)\}", lambda m: f"(step {int(m[1]) + 1})", step)


def _read_steps(history: Sequence[Said]) -> list[str]:
    """Steps of the latest plan."""
    plans = [said.text for said in history if "the plan to follow" in said.text]
    found = _STEP.findall(plans[-1].rpartition("the plan to follow")[2]) if plans else []
    return [re.sub(r"\(step (\d+)\)", lambda m: f"{{{int(m[1]) - 1}}}", step) for _, step in found]


def _read_known(history: Sequence[Said]) -> dict[str, str]:
    """Facts that the latest ledger or fact sheet holds."""
    own = [said.text for said in history if said.agent == ORCHESTRATOR]
    return dict(_KNOWN.findall(own[-1])) if own else {}


def _next_fact(steps: Sequence[str], known: dict[str, str]) -> tuple[str, list[str]]:
    """The first fact that is not known, empty if all are, and the values of the steps before."""
    values: list[str] = []
    for step in steps:
        fact = fill(step, values)
        if fact not in known:
            return fact, values
        values.append(known[fact])
    return "", values


def _steer(model: Scripted, agent: str, brief: Brief) -> str:
    """The ledger: what is known, whether that is all, and who does what next."""
    task, talk = brief.task, brief.history
    steps, known = _read_steps(talk), _read_known(talk)
    fact, values = _next_fact(steps, known)
    last = talk[-1] if talk and talk[-1].agent != ORCHESTRATOR else Said("", "")
    tries = _count_tries(talk, fact)
    errs = _errs(model, agent, task, "steer", fact, tries, last.agent)
    draw = partial(model.draw, agent, task, fact, tries)
    value = _gather(model, agent, task, fact, last, draw) if fact else None
    early = False
    if value is not None:
        if errs and draw("error") < 0.5:
            value, errs = _misread(last.text, value, draw), False
        known[fact] = value
        fact, values = _next_fact(steps, known)
        tries, last = 0, last if last.agent == TERMINAL else Said(last.agent, "")
    if errs and values and draw("error") > 0.7:
        early = True
    done = early or not fact
    loops = tries >= _PATIENCE
    worker, order = _instruct(model, agent, task, fact, last, tries, draw) if not done else ("", "")
    if errs and not done:
        worker, order = _misdirect(worker, order, fact, draw)
    held = "; ".join(f"(the {name} is {found})" for name, found in known.items())
    need = FINISHED if done else _say(_NEED, draw, fact)
    why = FINISHED if done else _say(_WHY[worker], draw)
    word = _HELD if done else _SO_FAR if held else _EMPTY
    entries: dict[str, tuple[str, object]] = {
        "is_request_satisfied": (_say(word, draw, held), done),
        "is_in_loop": (_say(_LOOP if loops else _NO_LOOP, draw), loops),
        "is_progress_being_made": (_say(_STUCK if loops else _PROGRESS, draw), not loops),
        "next_speaker": (why, worker or SURFER),
        "instruction_or_question": (need, order or FINISHED),
    }
    ledger = {key: {"reason": why, "answer": answer} for key, (why, answer) in entries.items()}
    return json.dumps(ledger, indent=2)


def _count_tries(talk: Sequence[Said], fact: str) -> int:
    """Ledgers about a fact since the latest plan."""
    own = [said.text for said in talk if said.agent == ORCHESTRATOR]
    start = max((i for i, text in enumerate(own) if "the plan to follow" in text), default=0)
    return sum(f"the {fact} is open" in text for text in own[start:])


def _gather(
    model: Scripted, agent: str, task: str, fact: str, last: Said, draw: Draw
) -> str | None:
    """What the last message says of the fact that is looked for; None if nothing."""
    if fact == "function":
        return "in the reply of the assistant" if "```" in last.text else None
    if _is_sum(fact):
        ran = last.agent == TERMINAL and "exit code: 0" in last.text
        return last.text.strip().splitlines()[-1] if ran else None
    careful = _is_careful(model, agent, task)
    stated = _STATED.search(last.text)
    if stated and last.agent in (SURFER, FILES, CODER) and not _shows(last.text):
        sound = stated[1] == fact and last.agent != CODER
        return stated[2] if sound or not careful else None
    if _shows(last.text) and draw("reads itself") < 0.5:
        attribute, name, file = web.split_fact(fact)
        about = _title_of(last.text)
        if careful and about not in (name, file):
            return None
        return None if _is_result(last.text) else web.read(_body(last.text), attribute, name)
    return None


def _instruct(
    model: Scripted, agent: str, task: str, fact: str, last: Said, tries: int, draw: Draw
) -> tuple[str, str]:
    """Who goes on with a fact, and with what."""
    if fact == "function":
        return CODER, "Please write the function that the request asks for."
    if _is_sum(fact):
        if last.agent == CODER and "```" in last.text:
            return TERMINAL, "Please run the script."
        return CODER, f"Please write a short Python script that prints the result of {fact}."
    _, name, file = web.split_fact(fact)
    careful = _is_careful(model, agent, task)
    if file:
        shown = _title_of(last.text)
        if shown.endswith(".csv") and (shown == file or not careful):
            return FILES, f"What is the {fact}?"
        return FILES, _again(f"Please open the file '{web.WORKSPACE}/{file}'.", tries)
    if _shows(last.text) and last.agent == SURFER:
        about = _title_of(last.text)
        sound = _is_result(last.text) or about == name or not careful
        order = _go_on(fact, last.text, tries, draw) if sound else ""
        if order:
            return SURFER, order
        if not sound:
            other = f"This page is about {about}, which is not what we are looking for. "
            return SURFER, other + _ask_search(fact, draw)
    return SURFER, _again(_ask_search(fact, draw), tries)


def _ask_search(fact: str, draw: Draw) -> str:
    """The order to search for a fact."""
    attribute, name, _ = web.split_fact(fact)
    query = (f"{name} {attribute}", name, f"{attribute} of {name}")[int(draw("query") * 3)]
    return _say(_SEARCH, draw, query)


def _go_on(fact: str, text: str, tries: int, draw: Draw) -> str:
    """What to do on a page that is shown; empty if nothing is to be done there."""
    attribute, name, _ = web.split_fact(fact)
    if _is_result(text):
        titles = [title for title in web.links(text) if title.partition(" - ")[0] == name]
        first = " in 20" in attribute or draw("entry") < 0.6  # tables stand in the first alone
        return _say(_OPEN, draw, titles[0 if first else -1]) if titles else ""
    if web.read(_body(text), attribute, name) is not None:
        return _say(_ASK, draw, fact)
    if "at the bottom" not in text:
        return _say(_SCROLL, draw)
    return _say(_BACK, draw) if tries < _PATIENCE else ""


def _misdirect(worker: str, order: str, fact: str, draw: Draw) -> tuple[str, str]:
    """The order to the wrong agent, or about another thing."""
    if _is_sum(fact) or fact == "function":
        return (TERMINAL if worker == CODER else CODER), order
    _, name, _ = web.split_fact(fact)
    near = web.siblings(name)
    luck = draw("misdirects")
    if luck < 0.4 and near:
        return worker, order.replace(name, near[int(draw("sibling") * min(2, len(near)))])
    if luck < 0.7:
        return CODER, f"Do you know what the {fact} is? Please tell me the {fact}."
    wrong = FILES if worker == SURFER else SURFER
    return wrong, f"Please find the {fact}."


def _browse(model: Scripted, agent: str, brief: Brief) -> str:
    """One act with the browser, or an answer from the page."""
    task, order = brief.task, brief.request.partition("\n\nReply with")[0]
    page = brief.history[-1].text if brief.history else ""
    draw = partial(model.draw, agent, task, order, _title_of(page), len(page))
    errs = _errs(model, agent, task, "browse", order, _title_of(page), len(page))
    lowered, quoted = order.casefold(), _QUOTED.findall(order)
    asked = _ASKED.search(order)
    if asked and not quoted:
        return _tell(page, asked[1], errs, draw)
    if quoted and re.search(r"search|query", lowered):
        return _search(quoted[-1], errs, draw)
    if quoted:
        return _click(page, quoted[-1], errs, draw)
    if re.search(r"scroll|page (?:down|up)", lowered):
        down = " up" not in lowered
        if errs and draw("strays") < 0.5 and web.links(page):
            return _act("click", web.links(page)[0])
        return _act("page_down" if down else "page_up", "2" if errs else "1")
    wanted = order.removeprefix("Please find the ").rstrip(".")
    return _search(wanted, errs, draw)


def _search(query: str, errs: bool, draw: Draw) -> str:
    """A search; by mistake for something of a like name."""
    name = max((n for n in web.facts() if n in query), key=len, default="")
    if errs and name:
        near = web.siblings(name)
        query = query.replace(name, near[int(draw("likes") * min(3, len(near)))])
    return _act("web_search", query)


def _click(page: str, title: str, errs: bool, draw: Draw) -> str:
    """A click on a link; by mistake on one beside it."""
    others = [
        one for one in web.links(page) if one.partition(" - ")[0] != title.partition(" - ")[0]
    ]
    if errs and others:
        title = others[int(draw("beside") * min(3, len(others)))]
    return _act("click", title)


def _tell(page: str, fact: str, errs: bool, draw: Draw) -> str:
    """What the page or file says of a fact; by mistake what it says of another."""
    attribute, name, _ = web.split_fact(fact)
    value = web.read(_body(page), attribute, name)
    if value is None:
        return f"I could not find the {attribute} in what is shown."
    if errs:
        value = _misread(page, value, draw)
    return _say(_SAY, draw, fact, value)


def _open(model: Scripted, agent: str, brief: Brief) -> str:
    """A file, or an answer from it."""
    task, order = brief.task, brief.request.partition("\n\nReply with")[0]
    shown = brief.history[-1].text if brief.history else ""
    draw = partial(model.draw, agent, task, order, _title_of(shown))
    errs = _errs(model, agent, task, "open", order, _title_of(shown))
    asked, quoted = _ASKED.search(order), _QUOTED.findall(order)
    if asked and not quoted:
        return _tell(shown, asked[1], errs, draw)
    if not quoted:
        return _act("open_path", web.WORKSPACE)
    path = quoted[-1]
    if errs:
        others = [n for n in web.files() if n.endswith(".csv") and not path.endswith(f"/{n}")]
        stem = path.rpartition("/")[2].partition("_")[0]
        near = [n for n in others if n.startswith(stem)] or others
        path = f"{web.WORKSPACE}/{near[int(draw('file') * len(near))]}"
    return _act("open_path", path)


def _code(model: Scripted, agent: str, brief: Brief) -> str:
    """A script for a calculation; by mistake with another number or operation."""
    task, order = brief.task, brief.request
    draw = partial(model.draw, agent, task, order)
    errs = _errs(model, agent, task, "code", order)
    if "the function that" in order:
        code = write_code(task)
        return present_code(agent, code) if code else "I do not know how to write this."
    summed = re.search(r"the result of (.+?)\.$", order, re.MULTILINE)
    if summed:
        sums = summed[1]
        if errs:
            swap = ("+", "-") if " + " in sums else ("-", "+")
            sums = sums.replace(*swap) if draw("swaps") < 0.4 else miscopy(sums, draw)
        left, operator, right = [*sums.split(" ", 2), "", ""][:3]
        if compute(sums) is None or not right:
            return "I need numbers to work with. Please give them to me first."
        code = (
            f"first = {left}\nsecond = {right}\nprint(first {operator.replace('^', '**')} second)"
        )
        return f"This script does it.\n```python\n{code}\n```\nPlease run it."
    asked = _ASKED.search(order)
    if asked and errs:  # from memory, which is wrong
        attribute, name, _ = web.split_fact(asked[1])
        values = [r[attribute] for n, r in web.facts().items() if attribute in r and n != name]
        if values:
            value = values[int(draw("recalls") * len(values))]
            return f"As far as I remember, the {asked[1]} is {value}."
    return "I have no access to the web, so I cannot look this up."


def _conclude(model: Scripted, agent: str, brief: Brief) -> str:
    """The final answer: the value of the last step, or the best that there is."""
    if "def " in brief.task:
        code = next((s.text for s in reversed(brief.history) if "```" in s.text), "")
        found = re.search(r"```.*```", code, re.DOTALL)
        return found[0] if found else guess(model, agent, brief.task)
    known = _read_known(brief.history)
    values = list(known.values())
    if not values:
        return "FINAL ANSWER: unknown"
    fact, _ = _next_fact(_read_steps(brief.history), known)
    answer = values[-1]
    if _errs(model, agent, brief.task, "conclude") and len(values) > 1:
        answer = values[-2]
    lead = "This is the best that we have." if fact else "All steps are done."
    return f"{lead}\nFINAL ANSWER: {answer}"


def _errs(model: Scripted, agent: str, task: str, *key: object) -> bool:
    """Whether an agent errs in a call."""
    return not model.is_able(agent, task) and model.draw("lapse", agent, task, *key) < _LAPSE


def _is_careful(model: Scripted, agent: str, task: str) -> bool:
    """Whether an agent looks twice at what it is given."""
    careful = model.draw("careful", agent, task) < model.care
    return careful and not model.does_trust(agent, task)


def _misread(text: str, value: str, draw: Draw) -> str:
    """A value taken for another one that stands near it, or taken down wrongly."""
    near = web.near_values(text, value)
    if near:
        return near[int(draw("near") * min(3, len(near)))]
    if value.isdecimal():
        return miscopy(value, draw)
    others = [n for n in web.facts() if web.kind_of(n) == web.kind_of(value) and n != value]
    return others[int(draw("other") * len(others))] if others else value


def _act(tool: str, argument: str) -> str:
    """A call of a tool."""
    return json.dumps({"tool": tool, "argument": argument})


def _say(options: Sequence[str], draw: Draw, *words: str) -> str:
    """One of several ways to say something."""
    return options[int(draw("says", options[0]) * len(options))].format(*words)


def _again(order: str, tries: int) -> str:
    """An order that was given before, with a word on that."""
    return order if not tries else f"{order} That is round {tries + 1} on this question."


def _is_sum(step: str) -> bool:
    """Whether a step is computed rather than looked up."""
    return re.fullmatch(r"\S+ [-+*/%^] \S+", step) is not None


def _shows(text: str) -> bool:
    """Whether a message shows a page or a file."""
    return _VIEW.search(text) is not None or text.startswith("Address: ")


def _is_result(text: str) -> bool:
    """Whether a page holds results of a search."""
    return web.SEARCH in text


def _title_of(text: str) -> str:
    """What a page or file is about, by its title."""
    view = _VIEW.search(text)
    title = view[1] if view else (re.search(r"^Title: (.+)$", text, re.MULTILINE) or [""] * 2)[1]
    return title.rpartition(" - ")[0] or title


def _body(text: str) -> str:
    """The text of a page or file, below what the browser says of it."""
    return text.partition("following text:\n\n")[2] or text.partition("=====\n")[2] or text


SURFING: dict[str, Phase] = {
    "survey": _survey,
    "steer": _steer,
    "browse": _browse,
    "open": _open,
    "code": _code,
    "conclude": _conclude,
}
