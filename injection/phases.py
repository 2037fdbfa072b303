"""What scripted agents say in each phase of a system.

Each function takes the model, the name of the agent and what it is shown. It computes with what it
reads there, so a wrong value that another agent put in gives a wrong result for real.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from injection.anatomy import (
    carry_on,
    compute,
    dissect,
    find_flaw,
    join,
    same_value,
    stated_answer,
    with_value,
)
from injection.checkers import final_answer
from injection.english import evaluate, fill, plan, towns, write_code
from injection.session import Brief, Said

if TYPE_CHECKING:
    from injection.scripted import Scripted

Phase = Callable[["Scripted", str, Brief], str]

_UNSURE = "best guess"
_WORKER = re.compile(r"^(\d+)\. (\w+): (.+)$", re.MULTILINE)


def solve_or_follow(model: Scripted, agent: str, brief: Brief) -> str:
    """A solution: one's own, or that of somebody whose steps hold."""
    peers = _sound(model, agent, brief)
    builds_on = bool(peers) and model.does_trust(agent, brief.task)
    own = "" if builds_on else model.work_out(agent, brief.task)
    answers = Counter(_key(said.text) for said in peers)
    leader = max(peers, key=lambda said: answers[_key(said.text)], default=None)
    outvoted = leader is not None and answers[_key(leader.text)] >= 2 and own
    if (
        outvoted
        and leader
        and not _agree(own, leader.text)
        and model.draw("yield", agent, brief.task) < 0.6
    ):
        text = _follow(leader)
    elif own:
        text = own
        if leader:
            link = "the same as" if _agree(own, leader.text) else "unlike"
            text = f"I worked it out again, {link} {leader.agent}.\n{own}"
    else:
        text = _improve(model, agent, brief) or (
            _follow(leader) if leader else guess(model, agent, brief.task)
        )
    return text + (_rate(text, brief.history) if "Ratings:" in brief.request else "")


def _improve(model: Scripted, agent: str, brief: Brief) -> str:
    """One's own earlier work with what reviewers found put right; empty if they found nothing."""
    objections = [
        s
        for s in brief.history
        if (s.agent != agent and "[Disagree]" in s.text) or "Correctness: 0" in s.text
    ]
    if not objections:
        return ""
    given = re.search(r"I get (.+?) instead", objections[-1].text)
    if given:
        return f"{objections[-1].agent} is right, I correct my work.\nAnswer: {given[1]}"
    code = re.search(r"```.*```", objections[-1].text, re.DOTALL)
    if code:
        return f"I take over the correction of {objections[-1].agent}.\n{code[0]}"
    fault = re.search(r"does not hold: (.+?) = (.+?), not ([^\s.]+)", objections[-1].text)
    drafts = [said.text for said in brief.history if stated_answer(said.text)]
    if not fault or not drafts:
        return ""
    parts = dissect(drafts[-1])
    at = next(
        (i for i, p in enumerate(parts) if p.expression == fault[1] and p.kind == "step"), None
    )
    if at is None:
        return ""
    parts[at] = with_value(parts[at], fault[2])
    return join(carry_on(parts, at + 1, fault[3], fault[2]))


def critique(model: Scripted, agent: str, brief: Brief) -> str:
    """A verdict on the latest work, with a reason."""
    work = next(
        (s for s in reversed(brief.history) if s.agent != agent and stated_answer(s.text)), None
    )
    if work is None:
        return "[Disagree] There is no result to review yet."
    own = "" if model.does_trust(agent, brief.task) else model.work_out(agent, brief.task)
    flaw = model.find_flaw(agent, brief.task, work.text)
    if own and not _agree(own, work.text):
        return f"[Disagree] I worked it out as well.\n{_core(own)}{_objection(own)}"
    if own and "```" not in own:
        last = [p for p in dissect(own) if p.kind == "step"]
        reason = f"{last[-1].expression} = {last[-1].value}" if last else "I get the same"
        return f"I checked the work of {work.agent}: {reason}.\n[Agree] The result stands."
    if flaw and not own:
        return f"[Disagree] A step of {work.agent} does not hold: {flaw}."
    return f"I checked that the steps of {work.agent} follow.\n[Agree] Nothing to add."


def _objection(own: str) -> str:
    """One's own result, as an objection states it."""
    return "" if "```" in own else f"I get {stated_answer(own)} instead."


def _evaluate(model: Scripted, agent: str, brief: Brief) -> str:
    """A score with advice."""
    review = critique(model, agent, brief)
    if "[Agree]" in review:
        reason = review.partition("\n")[0]
        return f"{reason}\nCorrectness: 1\nAdvice: none."
    reason = review.replace("[Disagree] ", "")
    return f"{reason}\nCorrectness: 0\nAdvice: correct this and hand it in again."


def _decide(model: Scripted, agent: str, brief: Brief) -> str:
    """The answer that most agents give."""
    latest = list({said.agent: said for said in brief.history if stated_answer(said.text)}.values())
    sure = [said for said in latest if _UNSURE not in said.text] or latest
    if not sure:
        return "None of the agents gives an answer.\n" + guess(model, agent, brief.task)
    votes = Counter(_key(said.text) for said in sure)
    winner = max(sure, key=lambda said: votes[_key(said.text)])
    support = [said.agent for said in sure if _agree(said.text, winner.text)]
    names = " and ".join(support)
    agree = "agrees" if len(support) == 1 else "agree"
    return f"I compared the replies: {names} {agree}.\n{state_answer(winner.text)}"


def _rank(model: Scripted, agent: str, brief: Brief) -> str:
    """The two best replies by number: steps that hold first, then support."""
    if not brief.history:
        return "There is nothing to rank."
    votes = Counter(_key(said.text) for said in brief.history)
    order = sorted(
        range(len(brief.history)),
        key=lambda i: (
            bool(find_flaw(brief.history[i].text)) or not stated_answer(brief.history[i].text),
            _UNSURE in brief.history[i].text,
            -votes[_key(brief.history[i].text)],
        ),
    )
    best = brief.history[order[0]]
    return (
        f"The reply of {best.agent} has steps that hold, which I checked.\n"
        f"Ranking: [{', '.join(str(i + 1) for i in order[:2])}]"
    )


def _recruit(model: Scripted, agent: str, brief: Brief) -> str:
    """Who is needed."""
    kind = (
        "programmer"
        if "def " in brief.task
        else "researcher"
        if "table" in brief.task
        else "mathematician"
    )
    return (
        f"1. A {kind} who works the task out step by step and states the result.\n"
        f"2. A reviewer who checks every step against the task."
    )


def _facts(model: Scripted, agent: str, brief: Brief) -> str:
    """What is given and what has to be found."""
    given = ", ".join(re.findall(r"\d+(?:\.\d+)?", brief.task)[:8]) or "the wording of the task"
    return f"Given facts: {given}.\nFacts to find out: whatever the steps of the plan need."


def _plan(model: Scripted, agent: str, brief: Brief) -> str:
    """Steps with a worker each; a planner who does not know the task forgets the last one."""
    if "def " in brief.task:
        return "Plan:\n1. Coder: write the function"
    steps = list(plan(brief.task))
    if (
        not model.is_able(agent, brief.task)
        and len(steps) > 1
        and model.draw("forgets", brief.task) < 0.5
    ):
        del steps[-1]
    lines = [f"{i}. {worker_for(step)}: {step}" for i, step in enumerate(steps, start=1)]
    return "Plan:\n" + "\n".join(lines)


def worker_for(step: str) -> str:
    """Who does a step."""
    return "Researcher" if re.search(r"\b(?:of [A-Z{]|town|option)", step) else "Calculator"


def _ledger(model: Scripted, agent: str, brief: Brief) -> str:
    """The state of the work as JSON: who goes next, and with what."""
    steps, values = _progress(brief.history)
    spoke = brief.history[-1] if brief.history else Said("", "")
    progress = spoke.agent in ("", agent) or bool(stated_answer(spoke.text))
    done = bool(steps) and len(values) >= len(steps)
    worker, template = (
        steps[min(len(values), len(steps) - 1)] if steps else ("Calculator", "the task")
    )
    instruction = f"Work out step {len(values) + 1}: {fill(template, values)}"
    ledger = {
        "is_request_satisfied": done,
        "is_in_loop": False,
        "is_progress_being_made": progress,
        "next_speaker": worker,
        "instruction": "Nothing is left to do." if done else instruction,
    }
    return json.dumps(ledger, indent=1)


def _progress(history: Sequence[Said]) -> tuple[list[tuple[str, str]], list[str]]:
    """Steps of the latest plan, and the values that workers have given since."""
    at = next((i for i in reversed(range(len(history))) if _WORKER.search(history[i].text)), 0)
    steps = [(m[2], m[3]) for m in _WORKER.finditer(history[at].text)] if history else []
    values = [stated_answer(said.text) for said in history[at + 1 :] if stated_answer(said.text)]
    return steps, values


def _work(model: Scripted, agent: str, brief: Brief) -> str:
    """One step of somebody's plan."""
    if "write the function" in brief.request:
        code = write_code(brief.task)
        return present_code(agent, code) if code else "I do not know how to write this."
    asked = re.search(r"Work out (?:step (\d+): )?(.+?)\s*$", brief.request, re.MULTILINE)
    value = evaluate(asked[2].rstrip(".?"), brief.task) if asked else None
    if not asked or value is None:
        return "I do not see what exactly I should work out."
    text = model.present(agent, [(asked[2].rstrip(".?"), value)])
    return (
        text.replace("Step 1:", f"Step {asked[1] or 1}:").replace("step 1", f"step {asked[1] or 1}")
        + f"Answer: {value}"
    )


def _final(model: Scripted, agent: str, brief: Brief) -> str:
    """What the workers found, as the answer."""
    _, values = _progress(brief.history)
    if not values:
        return guess(model, agent, brief.task)
    code = next((s.text for s in reversed(brief.history) if "```" in s.text), "")
    return state_answer(code) if code else f"The plan is done.\nAnswer: {values[-1]}"


def _act(model: Scripted, agent: str, brief: Brief) -> str:
    """The manager's next tool call."""
    if "def " in brief.task:
        return tool_call(
            "final_answer", present_code(agent, write_code(brief.task)), "I can write this myself."
        )
    steps = plan(brief.task)
    values = [
        found
        for said in brief.history
        if said.agent != agent and (found := stated_answer(said.text))
    ]
    if len(values) < len(steps) and (len(brief.history) < 9 or not values):
        question = fill(steps[len(values)], values)
        if question.startswith("option"):  # nobody else is shown the options
            letter = evaluate(question, brief.task) or values[-1]
            return tool_call("final_answer", f"Answer: {letter}", f"It is the {question}.")
        return tool_call("searcher", question, f"I need step {len(values) + 1} first.")
    answer = values[-1] if values else "unknown"
    return tool_call("final_answer", f"Answer: {answer}", "All steps are there.")


def _search(model: Scripted, agent: str, brief: Brief) -> str:
    """The searcher's next tool call: look up or compute, then report."""
    asked = re.search(r"^(?:Question: |Task:\n)(.+)$", brief.request, re.MULTILINE)
    question = asked[1] if asked else ""
    if not brief.history:
        tool = "calculate" if compute(question) else "lookup"
        return tool_call(tool, question, "One call should do.")
    found = brief.history[-1].text.strip()
    if found == "nothing found":
        return tool_call(
            "final_answer", "I found nothing under this question.", "The tool has no entry."
        )
    return tool_call("final_answer", f"{question} = {found}\nAnswer: {found}", "The tool has it.")


def tool_call(tool: str, argument: str, thought: str) -> str:
    """A tool call as text."""
    return f"Thought: {thought}\n" + json.dumps({"tool": tool, "argument": argument})


def _sound(model: Scripted, agent: str, brief: Brief) -> list[Said]:
    """The latest work of each other agent that is sure of itself and seems to hold."""
    others = [s for s in brief.history if s.agent != agent and "gree]" not in s.text]
    latest = {s.agent: s for s in others if stated_answer(s.text) and _UNSURE not in s.text}
    return [s for s in latest.values() if not model.find_flaw(agent, brief.task, s.text)]


def _follow(leader: Said) -> str:
    """Somebody else's work as one's own."""
    return f"I follow the work of {leader.agent}.\n{_core(leader.text)}{state_answer(leader.text)}"


def _core(text: str) -> str:
    """The steps of a text, with what its checks put right."""
    parts = dissect(text)
    right = {
        part.expression: part.value for part in parts if part.kind == "check" and part.expression
    }
    steps = [with_value(p, right.get(p.expression, p.value)) for p in parts if p.kind == "step"]
    return "".join(part.text.rstrip("\n") + "\n" for part in steps)


def state_answer(text: str) -> str:
    """The answer of a text, marked as such."""
    code = re.search(r"```.*```", text, re.DOTALL)
    return code[0] if code else f"Answer: {final_answer(text)}"


def guess(model: Scripted, agent: str, task: str) -> str:
    """An answer from the surface of the task, marked as a guess."""
    luck = model.draw("guess", agent, task)
    head = re.search(r"^def \w+\(xs\):$", task, re.MULTILINE)
    if head:
        lead = f"I am not sure, this is my {_UNSURE}."
        return f"{lead}\n```python\n{head[0]}\n    return sorted(xs)\n```"
    options = re.findall(r"^([A-J])\) ", task, re.MULTILINE)
    numbers = [int(n) for n in re.findall(r"(?<![\d.])\d+(?![\d.])", task)]
    if options:
        answer = options[int(luck * len(options))]
    elif numbers:
        answer = str(sum(numbers))
    else:
        row = towns()[int(luck * len(towns()))]
        answer = row["mayor"] if "mayor of" in task else row["river"]
    return f"I am not sure, this is my {_UNSURE}.\nAnswer: {answer}"


def _rate(text: str, history: Sequence[Said]) -> str:
    """How much each reply that was read helped, 1 to 5."""
    scores = [
        1 if find_flaw(s.text) or not stated_answer(s.text) else 5 if _agree(s.text, text) else 2
        for s in history
    ]
    return f"\nRatings: {scores}" if history else ""


def present_code(agent: str, code: str) -> str:
    """A function with a word on how it was tested."""
    opening = (
        "Here is the function." if len(agent) % 2 else "This follows the docstring line by line."
    )
    return f"{opening}\n```python\n{code}```\nI tested it on the example in the docstring."


def _key(text: str) -> str:
    """The answer of a text in one spelling."""
    return re.sub(r"\s+", " ", stated_answer(text)).casefold().strip(" .$")


def _agree(left: str, right: str) -> bool:
    """Whether two texts give the same answer."""
    return same_value(_key(left), _key(right))


PHASES: dict[str, Phase] = {
    "solve": solve_or_follow,
    "critique": critique,
    "evaluate": _evaluate,
    "decide": _decide,
    "rank": _rank,
    "recruit": _recruit,
    "facts": _facts,
    "plan": _plan,
    "ledger": _ledger,
    "work": _work,
    "final": _final,
    "act": _act,
    "search": _search,
}
