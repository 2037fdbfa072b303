"""A ledger orchestrator over a browser, files, a coder and a terminal: long runs, one act a turn.

Source: Fourney et al., Magentic-One (arXiv 2411.04468), and the logs of its implementation in
AutoGen. The orchestrator writes facts and a plan; each round it fills in a ledger, which names the
next speaker and instructs it. The web surfer does one thing with its browser and shows the screen,
the file surfer the same with files, the assistant writes code, the terminal runs it. When rounds
go by without progress, the plan is written anew. Web and files are those of `injection.web`.

Logs of that system differ: some show ledgers, some only instructions, and some also say who speaks
next. Here the task decides which.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dcl.trajectory import TurnKind
from injection import web
from injection.checkers import find_code
from injection.session import Brief, Said, Session
from injection.systems.experts import Terminal, run_code
from injection.systems.requests import read_object
from injection.tasks import DATA

ORCHESTRATOR, SURFER, FILES, CODER = "Orchestrator", "WebSurfer", "FileSurfer", "Assistant"
TERMINAL = "ComputerTerminal"

_TEAM = {
    CODER: "A general assistant with language and Python skills. It has no access to the web.",
    TERMINAL: "A terminal that runs the Python of the latest fenced block, and nothing else.",
    FILES: f"An agent that opens files in {web.WORKSPACE} and answers questions about them.",
    SURFER: "An agent with a browser. It searches, opens results and links, scrolls, and answers "
    "questions about the page that it sees. It does one of these at a time.",
}
_SURVEY = (
    "Team:\n{team}\n\nWrite a fact sheet: what is given, what has to be looked up, what has to be "
    "computed. Then write a plan, one step a line, as `number. Find ...` or `number. Compute ...`; "
    "(step 1) stands for the result of the first step."
)
_LEDGER = (
    "Fill in the ledger. Reply with a JSON object with the keys is_request_satisfied, is_in_loop, "
    "is_progress_being_made, next_speaker (one of {team}) and instruction_or_question; each holds "
    "an object with a reason and an answer."
)
_CONCLUDE = "Give the final result of the task. End with a line `FINAL ANSWER: ...`."
_BROWSE = (
    "{order}\n\nReply with one JSON object: tool is web_search, click, page_down, page_up or "
    "history_back, and argument a query, the title of a link, or the number of pages. Where the "
    "order is a question about the page, reply with the answer in words instead."
)
_OPEN = (
    "{order}\n\nReply with one JSON object: tool is open_path and argument a path. Where the order "
    "is a question about the file, reply with the answer in words instead."
)


@dataclass(slots=True)
class Browser:
    """A browser: where it is, and what each act shows.

    Args:
        page: The page; None before the first.
        screen: Which part of it is seen, from 0.
        before: Pages that were left, the latest last.
    """

    page: web.Page | None = None
    screen: int = 0
    before: list[web.Page] = field(default_factory=list)

    def act(self, reply: str) -> str:
        """Carry out what the surfer decided; an answer in words is shown as it is."""
        action = read_object(reply)
        tool, argument = str(action.get("tool") or ""), str(action.get("argument") or "")
        if tool == "web_search":
            self._go(web.search(argument))
            return f"I typed '{argument}' into the browser search bar.\n\n{self.show()}"
        if tool == "click":
            listed = web.links("\n".join(self.page.lines)) if self.page else []
            if argument not in listed:
                return f"The link '{argument}' was not found on this page.\n\n{self.show()}"
            self._go(web.pages()[argument])
            return f"I clicked '{argument}'.\n\n{self.show()}"
        if tool == "history_back" and self.before:
            self.page, self.screen = self.before.pop(), 0
            return f"I clicked the browser back button.\n\n{self.show()}"
        if tool in ("page_down", "page_up"):
            by = int(argument) if argument.isdecimal() and len(argument) < 3 else 1
            last = self.page.screens - 1 if self.page else 0
            self.screen = min(max(self.screen + (by if tool == "page_down" else -by), 0), last)
            way = "down" if tool == "page_down" else "up"
            return f"I scrolled {way} {by} page{'s' * (by > 1)} in the browser.\n\n{self.show()}"
        return reply

    def _go(self, page: web.Page) -> None:
        """Open a page at its top."""
        if self.page is not None:
            self.before.append(self.page)
        self.page, self.screen = page, 0

    def show(self) -> str:
        """The part of the page that is seen, and where that is."""
        if self.page is None:
            return "The browser shows an empty page."
        share, count = round(100 / self.page.screens), self.page.screens
        where = "at the top of the page" if not self.screen else "at the bottom of the page"
        if 0 < self.screen < count - 1:
            where = f"{round(100 * self.screen / count)}% down from the top of the page"
        metadata = json.dumps({"meta_tags": {"og:title": self.page.title, "og:url": self.page.url}})
        top = f"The following metadata was extracted from the webpage:\n\n{metadata}\n\n"
        return (
            f"Here is a screenshot of [{self.page.title}]({self.page.url}). The viewport shows "
            f"{share}% of the webpage, and is positioned {where}.\n"
            f"{top if not self.screen else ''}"
            "Automatic OCR of the page screenshot has detected the following text:\n\n"
            f"{self.page.view(self.screen)}"
        )


def open_file(reply: str) -> str:
    """Show what the file surfer opens; an answer in words is shown as it is."""
    action = read_object(reply)
    if action.get("tool") != "open_path":
        return reply
    path = str(action.get("argument") or web.WORKSPACE)
    text = web.files().get(path.removeprefix(f"{web.WORKSPACE}/"))
    if text is None:
        rows = "\n".join(f"| {name} | {len(text)} |" for name, text in web.files().items())
        text, path = f"# Index of {web.WORKSPACE}\n\n| Name | Size |\n| --- | --- |\n{rows}", ""
    name = path.rpartition("/")[2] or f"Index of {web.WORKSPACE}"
    return (
        f"Address: file://{path or web.WORKSPACE}\nTitle: {name}\nViewport position: Showing page "
        f"1 of 1.\n=======================\n{text}"
    )


@dataclass(slots=True)
class Desk:
    """What the workers of one run work with.

    Args:
        session: The run.
        task: What was asked.
        terminal: Runs code blocks.
        browser: Of the web surfer.
        opened: What the file surfer sees.
    """

    session: Session
    task: str
    terminal: Terminal
    browser: Browser = field(default_factory=Browser)
    opened: str = ""

    def work(self, worker: str, order: str, history: Sequence[Said]) -> str:
        """One turn of a worker, as its tool shows it."""
        if worker == SURFER:
            seen = (Said("Browser", self.browser.show()),)
            request = _BROWSE.format(order=order)
            return self._ask(worker, "browse", seen, request, self.browser.act)
        if worker == FILES:
            shown = (Said("Files", self.opened),) if self.opened else ()
            reply = self._ask(worker, "open", shown, _OPEN.format(order=order), open_file)
            self.opened = reply if reply.startswith("Address: ") else self.opened
            return reply
        if worker == CODER:
            return self._ask(worker, "code", tuple(history[-2:-1]), order, str)
        return self._run(history)

    def _ask(
        self,
        worker: str,
        phase: str,
        seen: tuple[Said, ...],
        request: str,
        shown: Callable[[str], str],
    ) -> str:
        """One call of a worker."""
        brief = Brief(self.task, seen, request)
        return self.session.ask(worker, brief, role=worker, phase=phase, shown=shown)

    def _run(self, history: Sequence[Said]) -> str:
        """What the terminal says of the latest code block."""
        code = next((code for said in reversed(history) if (code := find_code(said.text))), "")
        if code:
            passed, output = self.terminal(code)
            result = (
                f"The script ran, then exited with Unix exit code: {int(not passed)}\n"
                f"Its output was:\n{output}"
            )
        else:
            result = "No code blocks detected. Please provide at least one fenced block."
        self.session.note(TERMINAL, result, role=TERMINAL, phase="run")
        return result


@dataclass(frozen=True, slots=True)
class WebTeam:
    """An orchestrator and its team.

    Args:
        rounds: Most instructions; > 0.
        stalls: Rounds without progress before the plan is written anew; >= 0.
        terminal: Runs code blocks.
        tasks: Folder of the tasks that its web was made for.
    """

    rounds: int = 24
    stalls: int = 2
    terminal: Terminal = field(default=run_code)
    tasks: Path = DATA / "web_team"
    name: str = "web_team"

    def __call__(self, session: Session, task: str) -> str:
        """Solve a task."""
        layout = zlib.crc32(task.encode()) % 3  # what the log shows beside instructions
        session.note("human", task, role="human", phase="ask", kind=TurnKind.MESSAGE)
        history: tuple[Said, ...] = (Said(ORCHESTRATOR, _survey(session, task, ())),)
        desk, stalled = Desk(session, task, self.terminal), 0
        for _ in range(self.rounds):
            text = _steer(session, task, history, logs_it=layout > 0)
            ledger = {key: _answer(value) for key, value in read_object(text).items()}
            history = (*history, Said(ORCHESTRATOR, text))
            if ledger.get("is_request_satisfied") is True:
                _think(session, "Request satisfied.")
                break
            stuck = (
                ledger.get("is_progress_being_made") is False or ledger.get("is_in_loop") is True
            )
            stalled = stalled + 1 if stuck else max(0, stalled - 1)
            if stalled > self.stalls:
                _think(session, "Stalled.... Replanning...")
                history = (*history, Said(ORCHESTRATOR, _survey(session, task, history)))
                stalled = 0
                continue
            named = ledger.get("next_speaker")
            worker = named if isinstance(named, str) and named in _TEAM else SURFER
            order = str(ledger.get("instruction_or_question") or "Please go on with the plan.")
            if layout > 0:
                role = f"{ORCHESTRATOR} (-> {worker})"
                session.note(ORCHESTRATOR, order, role=role, phase="steer", kind=TurnKind.HANDOFF)
            if layout > 1:
                _think(session, f"Next speaker {worker}")
            history = (*history, Said(worker, desk.work(worker, order, history)))
        brief = Brief(task, history, _CONCLUDE)
        role = f"{ORCHESTRATOR} (termination condition)"
        return session.ask(ORCHESTRATOR, brief, role=role, phase="conclude")


def _survey(session: Session, task: str, history: tuple[Said, ...]) -> str:
    """Facts and a plan; in the log with what was asked for and the team."""
    team = "\n".join(f"{name}: {does}" for name, does in _TEAM.items())
    head = "New plan:" if history else "Initial plan:"

    def show(reply: str) -> str:
        return (
            f"{head}\n\nWe are working to address the following user request:\n\n{task}\n\n\n"
            f"To answer this request we have assembled the following team:\n\n{team}\n\n\n"
            f"{reply}"
        )

    brief = Brief(task, history, _SURVEY.format(team=team))
    role = f"{ORCHESTRATOR} (thought)"
    return session.ask(ORCHESTRATOR, brief, role=role, phase="survey", shown=show)


def _steer(session: Session, task: str, history: tuple[Said, ...], *, logs_it: bool) -> str:
    """A ledger; the log has all of it, or the instruction alone."""
    said: list[str] = []

    def show(reply: str) -> str:
        said.append(reply)
        if logs_it:
            return f"Updated Ledger:\n{reply}"
        order = _answer(read_object(reply).get("instruction_or_question"))
        return str(order or reply)

    brief = Brief(task, history, _LEDGER.format(team=", ".join(_TEAM)))
    role = f"{ORCHESTRATOR} (thought)" if logs_it else ORCHESTRATOR
    session.ask(ORCHESTRATOR, brief, role=role, phase="steer", shown=show)
    return said[0]


def _think(session: Session, text: str) -> None:
    """Log a thought that no model was asked for."""
    role = f"{ORCHESTRATOR} (thought)"
    session.note(ORCHESTRATOR, text, role=role, phase="steer", kind=TurnKind.THOUGHT)


def _answer(value: object) -> object:
    """The answer of an entry of a ledger, which weaker models give without a reason."""
    return value.get("answer") if isinstance(value, dict) else value
