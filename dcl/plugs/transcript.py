"""The turns of one run as they are said, each once."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable

from dcl.formats.messages import Piece, call_text
from dcl.live.monitor import Monitor
from dcl.trajectory import Turn, TurnKind


class Transcript:
    """One run on its way to a monitor. Hold the recorder's lock while it is used by many threads.

    Model calls repeat the history that they are given, and a tool call is told by the model and by
    the tool: what was said before is left out. What the system was asked to do is the first thing
    that a person says.

    Args:
        monitor: Takes the turns.
        run_id: Name of the run.
    """

    def __init__(self, monitor: Monitor, run_id: str) -> None:
        self.run_id = run_id
        self._monitor = monitor
        self._task = ""
        self._known: Counter[int] = Counter()  # marks, as numbers: texts would be kept twice
        self._tools: dict[str, str] = {}  # id of a call -> its tool
        self._answered: set[str] = set()  # ids of calls
        self._told: defaultdict[int, deque[str]] = defaultdict(deque)  # calls whose tool must start

    def add(self, turn: Turn) -> None:
        """Take a turn as it is.

        Args:
            turn: What was said.
        """
        if not self._task and turn.role == "user" and turn.kind is TurnKind.MESSAGE:
            self._task = turn.content
        self._monitor.ingest(self.run_id, turn, task=self._task)

    def say(self, pieces: Iterable[Piece], owner: str, source: str = "") -> None:
        """What somebody says: all of it is new.

        Args:
            pieces: The message.
            owner: Who says it, if the message does not name anybody.
            source: Where it stands in the log of the framework.
        """
        for piece in pieces:
            if piece.kind is TurnKind.TOOL_CALL:
                self._tools[piece.call] = piece.tool
                self._answered.discard(piece.call)  # small models number their calls anew each time
                self._told[hash(piece.mark)].append(piece.call)
            self._keep(piece, piece.speaker(owner), source)

    def hear(self, pieces: Iterable[Piece], source: str = "") -> None:
        """What a model call is told, of which most was said before.

        New are prompts and people's words that stand there more often than so far, and results of
        calls that were made in this run. Words of agents that were not said in this run are
        history or examples.

        Args:
            pieces: All messages of the call.
            source: Where the call stands in the log of the framework.
        """
        here: Counter[int] = Counter()
        for piece in pieces:
            if piece.kind is TurnKind.TOOL_RESULT:
                self.answer(piece.tool or piece.name, piece.text, piece.call, source, late=True)
                continue
            mark = hash(piece.mark)
            here[mark] += 1
            is_told = piece.kind is TurnKind.SYSTEM or piece.role in ("user", "human")
            if here[mark] <= self._known[mark]:
                continue
            if is_told:
                self._keep(piece, piece.speaker(""), source)
            else:
                self._known[mark] = here[mark]

    def pass_over(self, pieces: Iterable[Piece]) -> None:
        """What was said before this run, and will be repeated in it.

        Args:
            pieces: The history.
        """
        here = Counter(hash(piece.mark) for piece in pieces)
        self._known |= here

    def call(
        self, agent: str, tool: str, arguments: object, call: str = "", source: str = ""
    ) -> str:
        """A tool starts.

        Args:
            agent: Who uses it.
            tool: Its name.
            arguments: Text, or what can be written as JSON.
            call: Id of the call; empty if unknown.
            source: Where it stands in the log of the framework.

        Returns:
            Id of the call, from the model that asked for it where the tool does not know.
        """
        piece = Piece("assistant", call_text(tool, arguments), TurnKind.TOOL_CALL, call=call)
        waiting = self._told[hash(piece.mark)]
        if call and call in self._tools:
            if call in waiting:
                waiting.remove(call)
            return call
        if waiting:
            return waiting.popleft() or call
        self._tools[call] = tool
        self._keep(piece, agent, source)
        return call

    def answer(
        self, tool: str, text: str, call: str = "", source: str = "", *, late: bool = False
    ) -> None:
        """A tool is done.

        Args:
            tool: Its name; empty takes that of the call.
            text: What it gives, or how it failed.
            call: Id of the call; empty if unknown.
            source: Where it stands in the log of the framework.
            late: It is repeated to a model: it counts only if its call was made in this run and
                has no answer yet.
        """
        if (call and call in self._answered) or (late and (not call or call not in self._tools)):
            return
        self._answered.add(call)
        name = tool or self._tools.get(call, "") or "tool"
        self._keep(Piece("tool", text, TurnKind.TOOL_RESULT, call=call), name, source)

    def hand_over(self, agent: str, target: str, source: str = "") -> None:
        """An agent passes control to another.

        Args:
            agent: Who does.
            target: The other.
            source: Where it stands in the log of the framework.
        """
        self.add(Turn(agent, f"transfer to {target}", "assistant", TurnKind.HANDOFF, source=source))

    def fail(self, agent: str, error: object, source: str = "") -> None:
        """Something went wrong while an agent was at work.

        Args:
            agent: Its name.
            error: What went wrong.
            source: Where it stands in the log of the framework.
        """
        self.add(Turn(agent, f"error: {error}", "assistant", source=source))

    def _keep(self, piece: Piece, agent: str, source: str) -> None:
        """Add a turn, and remember that it was said."""
        self._known[hash(piece.mark)] += 1
        self.add(piece.turn(agent, source))
