"""A manager that calls tools, one of which is a searcher with tools of its own.

Source: smolagents (Hugging Face), its managed-agents example: a tool-calling manager in a ReAct
loop (arXiv 2210.03629) and a search agent whose final answer comes back as the result of a tool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from injection.english import evaluate
from injection.session import Brief, Said, Session
from injection.systems.requests import read_object

Tool = Callable[[str, str], str]

_ACT = (
    'Think, then reply with one JSON object: {{"tool": "searcher", "argument": one question}} to '
    'have something looked up or computed, or {{"tool": "final_answer", "argument": text}} to '
    "finish. The final text ends with a line `Answer: ...`, or holds the function in one fenced "
    "block."
)
_SEARCH = (
    'Question: {question}\nTools: {tools}. Think, then reply with one JSON object: {{"tool": name, '
    '"argument": text}}, or {{"tool": "final_answer", "argument": what you found}}, ending '
    "with a line `Answer: ...`."
)


def lookup(argument: str, task: str) -> str:
    """What the table of towns, or the options of the task, say."""
    return evaluate(argument.strip().rstrip(".?"), task) or "nothing found"


def calculate(argument: str, task: str) -> str:
    """Value of one operation."""
    return evaluate(argument.strip().rstrip(".?=")) or "nothing found"


@dataclass(frozen=True, slots=True)
class Manager:
    """A manager with a searcher.

    Args:
        tools: Tools of the searcher by name; each takes an argument and the task.
        steps: Most calls of the manager; > 0.
        search_steps: Most calls of the searcher for one question; > 0.
    """

    tools: Mapping[str, Tool] = field(
        default_factory=lambda: {"lookup": lookup, "calculate": calculate}
    )
    steps: int = 7
    search_steps: int = 3
    name: str = "manager"

    def __call__(self, session: Session, task: str) -> str:
        """Solve a task."""
        history: tuple[Said, ...] = ()
        text = ""
        for _ in range(self.steps):
            brief = Brief(task, history, _ACT.format())
            text = session.ask("Manager", brief, role="manager", phase="act")
            action = read_object(text)
            argument = str(action.get("argument") or "")
            if action.get("tool") == "final_answer" or not action:
                return argument or text
            found = self._search(session, task, argument)
            history = (*history, Said("Manager", text), Said("Searcher", found))
        return text

    def _search(self, session: Session, task: str, question: str) -> str:
        """What the searcher found for one question."""
        request = _SEARCH.format(question=question, tools=", ".join(self.tools))
        history: tuple[Said, ...] = ()
        text = ""
        for _ in range(self.search_steps):
            text = session.ask(
                "Searcher", Brief(task, history, request), role="searcher", phase="search"
            )
            action = read_object(text)
            argument = str(action.get("argument") or "")
            tool = self.tools.get(str(action.get("tool")))
            if tool is None:
                return argument or text
            result = tool(argument, task)
            session.note("Tool", result, role="tool", phase="search")
            history = (*history, Said("Searcher", text), Said("Tool", result))
        return text
