"""AutoGen AgentChat: a wrapper for `run_stream`, and a logging handler for runs of teams.

`watch` takes the messages of one stream and is the surer way. `MonitorHandler` reads the events
that the runtime of each team logs, so that the code that runs the team need not be touched.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from typing import Any, TypeVar

from dcl.formats.magentic import read_message
from dcl.live.monitor import Monitor
from dcl.plugs.recorder import OnEvent, Recorder, lacks
from dcl.trajectory import Outcome

try:
    from autogen_agentchat.base import Response, TaskResult
    from autogen_agentchat.messages import MultiModalMessage
    from autogen_core.logging import MessageEvent, MessageHandlerExceptionEvent
except ImportError as error:
    raise lacks(__name__, "autogen", error) from error

T = TypeVar("T")

_TOPIC = "output_topic_"  # what a team's runtime calls the topic of what the team gives out
_OPAQUE = "Message could not be serialized"
_TEAMS = 10_000  # teams that are known at once; the oldest gives way


async def watch(
    stream: AsyncIterable[T], recorder: Recorder, *, run_id: str = ""
) -> AsyncGenerator[T, None]:
    """Pass a stream on, and feed its messages to a monitor; the run ends with the stream.

    Args:
        stream: What `run_stream` of a team or an agent gives, or `on_messages_stream`.
        recorder: Takes the turns.
        run_id: Name of the run; empty makes one.

    Yields:
        What the stream gives, unchanged and at the same time.
    """
    run_id = run_id or str(uuid.uuid4())
    outcome: Outcome | None = None
    try:
        async for item in stream:
            with recorder.guard(run_id):
                _record(recorder, run_id, item)
            yield item
    except Exception:
        outcome = "failure"
        raise
    finally:
        recorder.end(run_id, outcome)
        close = getattr(stream, "aclose", None)
        if close is not None:  # who stops this generator means the one inside
            await close()


class MonitorHandler(logging.Handler):
    """Feeds the messages that teams log to a monitor.

    Add it to the logger `autogen_core.events`, whose level has to be INFO. A run lasts from the
    start of a team to its termination and is called after the team, with a number. A team inside
    of a team is a run of its own beside that of the outer one.

    Args:
        monitor: See `dcl.plugs.recorder.Recorder`.
        on_event: See there.

    Raises:
        ArtifactError: If no monitor is given, and the model that ships cannot be loaded.
    """

    def __init__(self, monitor: Monitor | None = None, *, on_event: OnEvent | None = None) -> None:
        super().__init__(logging.INFO)
        self.recorder = Recorder(monitor, on_event)
        self._teams: OrderedDict[str, int] = OrderedDict()  # team -> number of its run
        self._failed: set[str] = set()  # teams with an exception in this run

    def emit(self, record: logging.LogRecord) -> None:
        """Take one log record; those of others are left alone.

        Args:
            record: Its `msg` is an event object of AutoGen.
        """
        event: Any = record.msg
        with self.recorder.guard(), self.recorder.lock:
            if isinstance(event, MessageHandlerExceptionEvent):
                self._fail(event.kwargs["handling_agent"], event.kwargs["exception"])
            elif isinstance(event, MessageEvent):
                self._take(event.kwargs)

    def close(self) -> None:
        """Judge what waits; see `Recorder.close`."""
        self.recorder.close()
        super().close()

    def _take(self, event: Mapping[str, Any]) -> None:
        """A message that was published; what a team gives out is on its output topic."""
        receiver = event.get("receiver") or ""
        if not receiver.startswith(_TOPIC) or not event["delivery_stage"].endswith("SEND"):
            return
        team = _team_of(receiver)
        if event["payload"] == _OPAQUE:
            # Of all that is published there, only the termination has no JSON.
            self._end(team)
            return
        payload = json.loads(event["payload"])
        if "messages" in payload:
            self._start(team)
        rows = payload.get("messages") or [payload.get("message")]
        run_id = self._run_id(team)
        with self.recorder.guard(run_id):
            for row in rows:
                if isinstance(row, Mapping):
                    _add(self.recorder, run_id, row)

    def _run_id(self, team: str) -> str:
        """The run that a team is in."""
        return f"{team}/{self._teams.get(team, 0)}"

    def _start(self, team: str) -> None:
        """A team starts anew."""
        self._teams[team] = self._teams.get(team, 0) + 1
        self._failed.discard(team)
        if len(self._teams) > _TEAMS:
            self._teams.popitem(last=False)

    def _fail(self, agent_id: str, error: str) -> None:
        """An exception that nobody caught inside of an agent."""
        team = _team_of(agent_id)
        if team in self._teams:
            self._failed.add(team)
            agent = agent_id.partition("/")[0].removesuffix(f"_{team}")
            self.recorder.run(self._run_id(team)).fail(agent, error)

    def _end(self, team: str) -> None:
        """A team has come to its end."""
        self.recorder.end(self._run_id(team), "failure" if team in self._failed else None)
        self._failed.discard(team)


def _team_of(name: str) -> str:
    """The team in the name of a topic or an agent: `planner_TEAM/TEAM`."""
    return name.rpartition("/")[2]


def _record(recorder: Recorder, run_id: str, item: Any) -> None:
    """An entry of a stream; the result at its end repeats the messages."""
    if isinstance(item, TaskResult):
        return
    message = item.chat_message if isinstance(item, Response) else item
    fields = {"id", "source", "type", "result"}
    if isinstance(message, MultiModalMessage):  # pictures are not worth the time they take
        row = message.model_dump(mode="json", include=fields)
        row["content"] = [p if isinstance(p, str) else {"data": ""} for p in message.content]
    else:
        row = message.model_dump(mode="json", include=fields | {"content"})
    _add(recorder, run_id, row)


def _add(recorder: Recorder, run_id: str, row: Mapping[str, Any]) -> None:
    """The turns of one message."""
    with recorder.lock:
        transcript = recorder.run(run_id)
        for turn in read_message(row, "", source=str(row.get("id") or "")):
            transcript.add(turn)
