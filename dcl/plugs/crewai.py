"""CrewAI: an event listener, which hears every crew, flow and agent of the process.

A run is what the outermost kickoff starts: a flow, a crew, or an agent of its own. CrewAI hands
events to a thread of its own, so the crew never waits for this module.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from dcl.formats.messages import Piece, pieces, text_of
from dcl.live.monitor import Monitor
from dcl.plugs.recorder import OnEvent, Recorder, lacks
from dcl.plugs.transcript import Transcript
from dcl.trajectory import Turn, TurnKind

try:
    from crewai import events as ev
    from crewai.events import BaseEventListener
    from crewai.events.base_events import BaseEvent
except ImportError as error:
    raise lacks(__name__, "crewai", error) from error

_SCOPES = 100_000  # scopes that are open at once; the oldest gives way


@dataclass(slots=True)
class _Scope:
    """What has started and not ended: a flow, a crew, a task, an agent, a tool, a model call."""

    run_id: str
    agent: str
    above: _Scope | None
    is_agent: bool = False
    is_tool: bool = False
    written: str = ""  # what the model of an agent wrote last
    error: str = ""  # of a tool that is tried again


_Enter = Callable[[Any], _Scope | None]
"""The scope of an event."""
_Read = Callable[[Any, _Scope], None]
_Reads = dict[type[BaseEvent], _Read]


class MonitorListener(BaseEventListener):
    """Feeds what agents and tools say to a monitor. Keep it as long as crews run.

    Agents are called by their roles. What a task asks is said by the person.

    Args:
        monitor: See `dcl.plugs.recorder.Recorder`.
        on_event: See there.

    Raises:
        ArtifactError: If no monitor is given, and the model that ships cannot be loaded.
    """

    def __init__(self, monitor: Monitor | None = None, *, on_event: OnEvent | None = None) -> None:
        self.recorder = Recorder(monitor, on_event)
        self._scopes: OrderedDict[str, _Scope] = OrderedDict()
        self._off: list[Callable[[], None]] = []
        super().__init__()

    def setup_listeners(self, crewai_event_bus: Any) -> None:
        """Ask for the events that are read; CrewAI calls this.

        Args:
            crewai_event_bus: Where they come from.
        """
        bus = crewai_event_bus
        around = (ev.FlowStartedEvent, ev.MethodExecutionStartedEvent, ev.CrewKickoffStartedEvent)
        self._listen(bus, self._open, dict.fromkeys(around, _nothing))
        reads: _Reads = {
            ev.TaskStartedEvent: self._on_task,
            ev.AgentExecutionStartedEvent: self._on_agent,
            ev.LiteAgentExecutionStartedEvent: self._on_lite_agent,
            ev.LLMCallStartedEvent: self._on_prompt,
            ev.ToolUsageStartedEvent: self._on_tool,
        }
        self._listen(bus, self._open, reads)
        over = (
            ev.FlowFinishedEvent, ev.FlowFailedEvent,
            ev.MethodExecutionFinishedEvent, ev.MethodExecutionFailedEvent,
            ev.CrewKickoffCompletedEvent, ev.CrewKickoffFailedEvent,
            ev.TaskCompletedEvent, ev.TaskFailedEvent,
            ev.LLMCallFailedEvent,  # the agent fails with it, or tries again
        )  # fmt: skip
        self._listen(bus, self._close, dict.fromkeys(over, _nothing))
        reads = {
            ev.AgentExecutionCompletedEvent: self._on_answer,
            ev.LiteAgentExecutionCompletedEvent: self._on_answer,
            ev.AgentExecutionErrorEvent: self._on_error,
            ev.LiteAgentExecutionErrorEvent: self._on_error,
            ev.LLMCallCompletedEvent: self._on_words,
            ev.ToolUsageFinishedEvent: self._on_result,
            ev.ToolUsageErrorEvent: self._on_tool_error,
        }
        self._listen(bus, self._close, reads)
        self._listen(bus, self._inside, {ev.AgentLogsExecutionEvent: self._on_log})

    def close(self) -> None:
        """Listen no more, and judge what waits; see `Recorder.close`."""
        while self._off:
            self._off.pop()()
        self.recorder.close()

    def _listen(self, bus: Any, enter: _Enter, reads: _Reads) -> None:
        """Have kinds of events read, until this is closed."""
        for kind, read in reads.items():
            handler = self._handler(enter, read)
            bus.on(kind)(handler)
            self._off.append(partial(bus.off, kind, handler))

    def _handler(
        self, enter: _Enter, read: _Read
    ) -> Callable[[Any, Any], Coroutine[Any, Any, None]]:
        """What the bus calls. It runs coroutines in one thread in the order of the events."""

        async def handle(source: Any, event: Any) -> None:
            with self.recorder.guard(), self.recorder.lock:
                scope = enter(event)
                if scope is None:
                    return
                with self.recorder.guard(scope.run_id):
                    read(event, scope)
                ended = getattr(event, "started_event_id", None)
                if ended is not None and ended == scope.run_id:
                    failed = hasattr(event, "error")
                    self.recorder.end(scope.run_id, "failure" if failed else None)

        return handle

    def _open(self, event: Any) -> _Scope | None:
        """The scope that an event opens."""
        above = self._inside(event)
        if above is None and event.parent_event_id is not None:
            return None  # inside of something that is not listened to
        run_id = event.event_id if above is None else above.run_id
        scope = _Scope(run_id, "" if above is None else above.agent, above)
        self._scopes[event.event_id] = scope
        if len(self._scopes) > _SCOPES:
            self._scopes.popitem(last=False)
        return scope

    def _close(self, event: Any) -> _Scope | None:
        """The scope that an event closes."""
        return self._scopes.pop(event.started_event_id or "", None)

    def _inside(self, event: Any) -> _Scope | None:
        """The scope that is around an event."""
        return self._scopes.get(event.parent_event_id or "")

    def _transcript(self, scope: _Scope) -> Transcript:
        """What is known of the run of a scope."""
        return self.recorder.run(scope.run_id)

    def _on_task(self, event: Any, scope: _Scope) -> None:
        """A task is given out."""
        asked = text_of(getattr(event.task, "description", None) or event.task_name)
        self._transcript(scope).add(Turn("user", asked, "user", source=event.event_id))

    def _on_agent(self, event: Any, scope: _Scope) -> None:
        """An agent starts; below a tool it was sent by another agent."""
        scope.is_agent, scope.agent = True, _role(event.agent.role)
        if scope.above is not None and scope.above.is_tool:
            self._transcript(scope).hand_over(scope.above.agent, scope.agent, event.event_id)

    def _on_lite_agent(self, event: Any, scope: _Scope) -> None:
        """An agent of its own starts."""
        scope.is_agent, scope.agent = True, _role(event.agent_info.get("role"))
        rows = event.messages if isinstance(event.messages, list) else [event.messages]
        told = [piece for row in rows for piece in pieces(row)]
        # The request comes last, and the task of a run is the first thing that a person says.
        self._transcript(scope).hear(reversed(told), event.event_id)

    def _on_prompt(self, event: Any, scope: _Scope) -> None:
        """A model is called: its prompt is new the first time."""
        rows = event.messages if isinstance(event.messages, list) else ()
        told = [piece for row in rows for piece in pieces(row)]
        prompts = [piece for piece in told if piece.kind is TurnKind.SYSTEM]
        self._transcript(scope).hear(prompts, event.event_id)

    def _on_words(self, event: Any, scope: _Scope) -> None:
        """A model has answered in words; calls come as uses of tools."""
        if not isinstance(event.response, str) or not event.response:
            return
        owner = _role(event.agent_role) or scope.agent or "agent"
        said = [Piece("assistant", event.response)]
        self._transcript(scope).say(said, owner, event.event_id)
        around: _Scope | None = scope
        while around is not None:
            around.written = event.response
            around = None if around.is_agent else around.above

    def _on_log(self, event: Any, scope: _Scope) -> None:
        """A thought of an agent, where its model does not tell what it wrote."""
        thought = text_of(getattr(event.formatted_answer, "thought", None))
        if thought and not scope.written:
            kind, source = TurnKind.THOUGHT, event.event_id
            turn = Turn(_role(event.agent_role), thought, "assistant", kind, source=source)
            self._transcript(scope).add(turn)

    def _on_answer(self, event: Any, scope: _Scope) -> None:
        """An agent is done; its last words may have been the answer itself."""
        answer = text_of(event.output)
        if answer.strip() != scope.written.strip():
            kind, agent = TurnKind.FINAL, scope.agent or "agent"
            turn = Turn(agent, answer, "assistant", kind, source=event.event_id)
            self._transcript(scope).add(turn)

    def _on_error(self, event: Any, scope: _Scope) -> None:
        """An agent fails."""
        self._transcript(scope).fail(scope.agent or "agent", event.error, event.event_id)

    def _on_tool(self, event: Any, scope: _Scope) -> None:
        """A tool is used; the framework tries again on its own when it fails."""
        scope.is_tool = True
        scope.agent = _role(event.agent_role) or scope.agent
        if event.run_attempts <= 1:
            arguments, source = event.tool_args, event.event_id
            self._transcript(scope).call(scope.agent, event.tool_name, arguments, source=source)

    def _on_result(self, event: Any, scope: _Scope) -> None:
        """A tool has answered."""
        text = text_of(event.output)
        self._transcript(scope).answer(event.tool_name, text, source=event.event_id)

    def _on_tool_error(self, event: Any, scope: _Scope) -> None:
        """A tool fails; that it fails again in the same way says nothing new."""
        text = f"error: {event.error}"
        if scope.above is None or scope.above.error != text or event.run_attempts <= 1:
            self._transcript(scope).answer(event.tool_name, text, source=event.event_id)
        if scope.above is not None:
            scope.above.error = text


def _nothing(event: Any, scope: _Scope) -> None:
    """The event only opens or closes a scope."""


def _role(role: object) -> str:
    """The role of an agent; templates leave spaces and line ends around it."""
    return text_of(role).strip()
