"""What scripted agents say where a framework asks them to choose, delegate or hand over.

The phases of `injection.phases` are those of systems that route by rules of their own. Frameworks
let a model route: it picks the next speaker, calls another agent as a tool, or hands the
conversation over. These agents do that from what they are shown, too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from injection.anatomy import stated_answer
from injection.english import fill, plan
from injection.phases import (
    Phase,
    critique,
    guess,
    solve_or_follow,
    state_answer,
    tool_call,
    worker_for,
)
from injection.session import Brief

if TYPE_CHECKING:
    from injection.scripted import Scripted

_PATIENCE = 2


def _select(model: Scripted, agent: str, brief: Brief) -> str:
    """Who speaks next: the solver until there is work, then the critic, then the writer."""
    talk = brief.request.partition("\nuser: ")[2]  # below the list of roles
    work = max(talk.rfind("Answer: "), talk.rfind("```"))
    refused = talk.count("[Disagree]")
    if work < 0:
        return "There is no work yet, so Solver goes next."
    if talk.rfind("[Disagree]") > work and refused <= _PATIENCE:
        return "The work was sent back, so Solver goes next."
    if refused > _PATIENCE or talk.rfind("[Agree]") > work:
        return "The work was looked at, so Writer goes next."
    return "There is new work to look at, so Critic goes next."


def _delegate(model: Scripted, agent: str, brief: Brief) -> str:
    """The supervisor's next order to a worker, or the final answer."""
    found = [s for s in brief.history if s.agent != agent and stated_answer(s.text)]
    if "def " in brief.task:
        if found:
            return f"The function is there.\n{state_answer(found[-1].text)}"
        return tool_call("Coder", "Work out step 1: write the function", "This takes code.")
    steps = plan(brief.task)
    if len(found) < len(steps) and len(brief.history) < 3 * len(steps) + 3:
        values = [stated_answer(said.text) for said in found]
        step = steps[len(found)]
        order = f"Work out step {len(found) + 1}: {fill(step, values)}"
        return tool_call(worker_for(step), order, f"Step {len(found) + 1} is next.")
    if not found:
        return guess(model, agent, brief.task)
    return f"All steps are there.\nAnswer: {stated_answer(found[-1].text)}"


def _triage(model: Scripted, agent: str, brief: Brief) -> str:
    """The hand-over to whoever the task is for."""
    if "def " in brief.task:
        return tool_call("transfer_to_programmer", "", "The task asks for a function.")
    if "table" in brief.task:
        return tool_call("transfer_to_researcher", "", "The task asks for rows of the table.")
    return tool_call("transfer_to_mathematician", "", "The task asks for a calculation.")


def _hand_in(model: Scripted, agent: str, brief: Brief) -> str:
    """A solution, handed over to the reviewer."""
    work = solve_or_follow(model, agent, brief)
    return f"{work}\n{tool_call('transfer_to_reviewer', '', 'Please review this.')}"


def _close(model: Scripted, agent: str, brief: Brief) -> str:
    """A review that sends the work back, or the final answer."""
    review = critique(model, agent, brief)
    work = [said for said in brief.history if said.agent != agent and stated_answer(said.text)]
    sent_back = sum(said.agent == agent for said in brief.history)
    if "[Disagree]" in review and work and sent_back < _PATIENCE:
        author = re.sub(r"\W+", "_", work[-1].agent).lower()
        return f"{review}\n{tool_call(f'transfer_to_{author}', '', 'This needs another look.')}"
    if not work:
        return guess(model, agent, brief.task)
    return f"{review.replace('[Disagree] ', '')}\n{state_answer(work[-1].text)}"


ERRANDS: dict[str, Phase] = {
    "select": _select,
    "delegate": _delegate,
    "triage": _triage,
    "hand_in": _hand_in,
    "close": _close,
}
