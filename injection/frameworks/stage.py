"""What all adapters share: the messages of a framework become one call of the session.

A framework talks to a model through a client of its own. An adapter puts a client of ours in its
place, one for each agent, and hands over here what the framework sent. The agent of a call is the
one whose client was called; nothing is guessed from words. A model is asked in text, and what it
says goes back in the terms of the framework: a tool is called by a JSON object at the end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, NamedTuple

from dcl.errors import ConfigError, DclError
from injection.anatomy import find_objects
from injection.session import Brief, Said, Session

USER, TOOL = "user", "Tool"
"""Names in a conversation for words of the framework or its user, and for results of tools."""

_HOW = (
    'To use one, end with one JSON object: {"tool": name, "argument": text}, or {"tool": name, '
    '"argument": {parameter: value}} where it takes several.'
)


class Tool(NamedTuple):
    """A tool as a framework offers it to an agent."""

    name: str
    about: str
    parameters: tuple[str, ...]


class Heard(NamedTuple):
    """One message as a framework shows it to an agent.

    Args:
        agent: Who said it; empty for the framework itself and its user.
        text: What was said.
        result: Id of the tool call that it is the result of; empty if of none.
    """

    agent: str
    text: str
    result: str = ""


@dataclass(frozen=True, slots=True)
class Spoken:
    """What an agent said.

    Args:
        text: All of it.
        lead: What stands before a tool call; all of it if there is none.
        tool: Name of the tool it calls; empty if none.
        arguments: Of the tool, by parameter.
        id: Of this call, unique in the run and the same in every replay.
    """

    text: str
    lead: str
    tool: str
    arguments: Mapping[str, Any]
    id: str


@dataclass(slots=True)
class Stage:
    """One run of a framework.

    Args:
        session: Where every call goes.
        task: What the whole system was asked.
        phases: What each agent does, in a word that scripted agents know.
    """

    session: Session
    task: str
    phases: Mapping[str, str] = field(default_factory=dict)
    error: DclError | None = field(default=None, init=False)
    said: dict[str, Said] = field(default_factory=dict, init=False)
    """Who said what, by the id of the call."""
    _noted: set[str] = field(default_factory=set, init=False)
    _lock: RLock = field(default_factory=RLock, init=False)

    def speak(
        self,
        agent: str,
        persona: str,
        heard: Sequence[Heard],
        tools: Sequence[Tool] = (),
        *,
        phase: str = "",
    ) -> Spoken:
        """Let an agent answer what its framework sent it.

        Args:
            agent: Whose client was called.
            persona: Its system prompt.
            heard: All other messages, in time order.
            tools: What it may call.
            phase: What it is doing, where the framework knows; else from `phases`.

        Raises:
            DclError: As the session raises it; again at every later call, as frameworks may swallow
                the first.
        """
        with self._lock:
            if self.error is not None:
                raise self.error
            doing = phase or self.phases.get(agent, "speak")
            try:
                self._note_results(heard, doing)
                id = f"call_{len(self.said)}"
                brief = self._brief(agent, heard, tools)
                text = self.session.ask(agent, brief, role=agent, phase=doing, persona=persona)
            except DclError as error:
                self.error = error
                raise
            self.said[id] = Said(agent, text)
            return read_reply(text, tools, id)

    def recall(self, id: str, lead: str, calls: Mapping[str, Any]) -> str:
        """What an agent said before, tool calls and all, as it said it.

        Args:
            id: Of the call, as the framework kept it.
            lead: The text that the framework kept.
            calls: Arguments by tool, to write the calls out where the framework changed the text.
        """
        known = self.said.get(id)
        if known is not None and known.text.startswith(lead):
            return known.text
        written = [json.dumps({"tool": name, "argument": args}) for name, args in calls.items()]
        return "\n".join([*([lead] if lead else []), *written])

    def perform(self, run: Callable[[], str], endings: Callable[[Exception], bool]) -> str:
        """Run a framework to its end.

        Args:
            run: Runs it and gives its answer.
            endings: Whether an exception is the framework's own way to end a run over what a model
                said, such as after too many turns. It is logged, and the answer is empty.

        Raises:
            DclError: What a call raised, whatever the framework made of it.
        """
        try:
            answer = run()
        except Exception as error:
            if self.error is not None:
                raise self.error from error
            if not endings(error):
                raise
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            self.session.note("system", reason, role="system", phase="end")
            return ""
        if self.error is not None:
            raise self.error
        return answer

    def _note_results(self, heard: Sequence[Heard], phase: str) -> None:
        """Log results of tools when they are first seen; what agents report is logged already."""
        for message in heard:
            if message.result and message.result not in self._noted:
                self._noted.add(message.result)
                if message.agent == TOOL:
                    self.session.note(TOOL, message.text, role="tool", phase=phase)

    def _brief(self, agent: str, heard: Sequence[Heard], tools: Sequence[Tool]) -> Brief:
        """The messages in the form of every prompt here.

        The last words of the framework are the request. The task counts as shown only if it was.
        """
        task = self.task.strip()
        shown = any(task in message.text for message in heard)
        kept = [message for message in heard if message.agent or message.text.strip() != task]
        asked = next((i for i in reversed(range(len(kept))) if not kept[i].agent), None)
        request = f"It is your turn, {agent}." if asked is None else kept[asked].text.strip()
        history = tuple(
            Said(message.agent or USER, message.text)
            for i, message in enumerate(kept)
            if i != asked
        )
        parts = [request, *([describe_tools(tools)] if tools else [])]
        return Brief(task if shown else "", history, "\n\n".join(parts))


def refuse_namesakes(names: Iterable[str]) -> None:
    """Refuse a team in which a name does not say who speaks.

    Raises:
        ConfigError: If two agents have the same name.
    """
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"{twice[0]}: expected a name of its own for each agent, got two of it")


def describe_tools(tools: Sequence[Tool]) -> str:
    """Tools as a prompt lists them."""
    lines = [f"- {t.name}({', '.join(t.parameters)}): {' '.join(t.about.split())}" for t in tools]
    return "\n".join(["Tools:", *lines, _HOW])


def read_reply(text: str, tools: Sequence[Tool], id: str) -> Spoken:
    """A reply with the tool call at its end, if there is one.

    A tool that was not offered is called all the same, and the framework deals with it; but
    `final_answer`, where no such tool is known, means that its argument is the reply.
    """
    for start, _, value in reversed(find_objects(text)):
        name = value.get("tool")
        if not isinstance(name, str) or not name or not tools:
            continue
        known = {tool.name: tool.parameters for tool in tools}
        lead = text[:start].rstrip()
        argument = value.get("argument")
        if name == "final_answer" and name not in known:
            answer = argument if isinstance(argument, str) else json.dumps(argument)
            return Spoken(text, answer or lead or text, "", {}, id)
        return Spoken(text, lead, name, _arguments(argument, known.get(name, ())), id)
    return Spoken(text, text, "", {}, id)


def _arguments(argument: object, parameters: tuple[str, ...]) -> dict[str, Any]:
    """Values by parameter; a bare value goes to the first."""
    if isinstance(argument, dict):
        return argument
    return {parameters[0]: argument} if parameters and argument is not None else {}
