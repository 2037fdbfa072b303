"""LangChain and LangGraph: a callback handler, given as `config={"callbacks": [handler]}`.

A run is what the outermost call starts. A graph that stops to ask a person goes on in the same run
when its thread is resumed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from dcl.formats.messages import Piece, pieces, text_of
from dcl.live.monitor import Monitor
from dcl.plugs.recorder import OnEvent, Recorder, lacks
from dcl.plugs.transcript import Transcript
from dcl.trajectory import Turn, TurnKind

try:
    from langchain_core.callbacks import BaseCallbackHandler
    from langchain_core.messages import BaseMessage, HumanMessage, convert_to_messages
    from langchain_core.outputs import ChatGeneration, LLMResult
except ImportError as error:
    raise lacks(__name__, "langchain", error) from error

_ROLES = {
    "human": "user",
    "ai": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
}
_INNER = ("agent", "model", "tools", "call_model", "generate_structured_response")
"""Nodes that the prebuilt agents are made of: their agent is the graph around them."""
_UNNAMED = "LangGraph"  # a compiled graph that was given no name
_CALLS = ("tool_use", "tool_call", "function_call")
_STEPS = 100_000  # steps that are open at once; the oldest gives way


@dataclass(slots=True)
class _Step:
    """One callback run: a chain, a graph, a node, a model call or a tool.

    A node repeats what was said inside when it ends, and perhaps what it was given: `said` holds
    marks of the one, `given` ids of the other.
    """

    run_id: str
    parent: _Step | None
    name: str
    owner: str
    is_node: bool
    thread: str
    said: set[object] = field(default_factory=set)
    given: set[str] = field(default_factory=set)
    is_asking: bool = False  # a graph below waits for a person


class MonitorCallbackHandler(BaseCallbackHandler):
    """Feeds what agents and tools say to a monitor.

    The agent of a turn is, from the surest sign to the weakest: the name in the message, the name
    of the prebuilt agent, the node of the graph, the run name of the chain.

    Args:
        monitor: See `dcl.plugs.recorder.Recorder`.
        on_event: See there.

    Raises:
        ArtifactError: If no monitor is given, and the model that ships cannot be loaded.
    """

    run_inline = True  # asyncio would otherwise call it from threads, in any order

    def __init__(self, monitor: Monitor | None = None, *, on_event: OnEvent | None = None) -> None:
        super().__init__()
        self.recorder = Recorder(monitor, on_event)
        self._steps: OrderedDict[UUID, _Step] = OrderedDict()
        self._paused: OrderedDict[str, str] = OrderedDict()  # thread -> run

    def on_chain_start(self, serialized: Any, inputs: Any, *, run_id: UUID, **about: Any) -> None:
        """A chain, a graph or a node starts."""
        with self.recorder.guard(), self.recorder.lock:
            step = self._open(serialized, run_id, about, is_chain=True)
            if step.parent is None:
                self._ask(step, inputs, str(run_id))
            elif step.is_node:
                told = _messages(inputs)
                step.given.update(message.id for message in told if message.id)
                if step.parent.parent is None and not step.parent.given:
                    step.parent.given.add("")  # what the first node is given came before this run
                    self._transcript(step).pass_over(_unprompted(told))

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **about: Any) -> None:
        """A chain, a graph or a node ends: a node may say what no model said."""
        with self._closing(run_id) as step:
            if step is not None and step.is_node:
                self._conclude(step, outputs, str(run_id))

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **about: Any) -> None:
        """A chain, a graph or a node fails, or leaves by an exception to ask or to hand over."""
        with self._closing(run_id, error) as step:
            if step is not None and _is_bubble(error):
                self._bubble(step, error, str(run_id))
            elif step is not None:
                self._fail(step, error, str(run_id))

    def on_chat_model_start(
        self,
        serialized: Any,
        messages: Sequence[Sequence[BaseMessage]],
        *,
        run_id: UUID,
        **about: Any,
    ) -> None:
        """A chat model is called."""
        with self.recorder.guard(), self.recorder.lock:
            step = self._open(serialized, run_id, about)
            for conversation in messages:
                told = [piece for message in conversation for piece in _pieces(message)]
                self._transcript(step).hear(told, str(run_id))

    def on_llm_start(
        self, serialized: Any, prompts: Sequence[str], *, run_id: UUID, **about: Any
    ) -> None:
        """A text model is called."""
        with self.recorder.guard(), self.recorder.lock:
            step = self._open(serialized, run_id, about)
            for prompt in prompts:
                self._transcript(step).hear([Piece("user", prompt)], str(run_id))

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **about: Any) -> None:
        """A model has answered."""
        with self._closing(run_id) as step:
            if step is None:
                return
            for candidates in response.generations:
                for first in candidates[:1]:
                    said = [Piece("assistant", first.text)]
                    if isinstance(first, ChatGeneration):
                        said = _pieces(first.message)
                    self._say(step, said, str(run_id))

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **about: Any) -> None:
        """A model call fails."""
        self.on_chain_error(error, run_id=run_id)

    def on_tool_start(self, serialized: Any, input_str: str, *, run_id: UUID, **about: Any) -> None:
        """A tool starts."""
        with self.recorder.guard(), self.recorder.lock:
            step = self._open(serialized, run_id, about)
            arguments = about.get("inputs") or input_str
            call = str(about.get("tool_call_id") or "")
            self._transcript(step).call(step.owner, step.name, arguments, call, str(run_id))

    def on_tool_end(self, output: Any, *, run_id: UUID, **about: Any) -> None:
        """A tool is done."""
        with self._closing(run_id) as step:
            if step is None:
                return
            transcript = self._transcript(step)
            answers = [p for m in _messages(output) for p in _pieces(m)]
            answers = [p for p in answers if p.kind is TurnKind.TOOL_RESULT]
            for piece in answers:
                transcript.answer(step.name, piece.text, piece.call, str(run_id))
            if not answers and not _targets(output):
                transcript.answer(step.name, text_of(output), source=str(run_id))
            self._hand_over(step, _targets(output), str(run_id))

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **about: Any) -> None:
        """A tool fails."""
        with self._closing(run_id, error) as step:
            if step is not None and not _is_bubble(error):
                call, text = str(about.get("tool_call_id") or ""), f"error: {error}"
                self._transcript(step).answer(step.name, text, call, str(run_id))
                _mark(step, ("error", str(error)))

    def on_retriever_start(
        self, serialized: Any, query: str, *, run_id: UUID, **about: Any
    ) -> None:
        """A retriever is asked: a tool by another name."""
        self.on_tool_start(serialized, query, run_id=run_id, **about)

    def on_retriever_end(self, documents: Any, *, run_id: UUID, **about: Any) -> None:
        """A retriever has found something."""
        texts = [text_of(getattr(found, "page_content", None)) for found in documents or ()]
        self.on_tool_end("\n".join(texts), run_id=run_id)

    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **about: Any) -> None:
        """A retriever fails."""
        self.on_tool_error(error, run_id=run_id)

    def close(self) -> None:
        """Judge what waits; see `Recorder.close`."""
        self.recorder.close()

    @contextmanager
    def _closing(self, run_id: UUID, error: BaseException | None = None) -> Iterator[_Step | None]:
        """A step that ends, whatever becomes of the block; None if it is not known."""
        with self.recorder.guard(), self.recorder.lock:
            step = self._steps.pop(run_id, None)
            with self.recorder.guard("" if step is None else step.run_id):
                yield step
            self._close(step, error)

    def _open(
        self, serialized: Any, run_id: UUID, about: Mapping[str, Any], *, is_chain: bool = False
    ) -> _Step:
        """A step that starts now."""
        parent = self._steps.get(about.get("parent_run_id") or run_id)
        metadata = about.get("metadata") or {}
        thread = text_of(metadata.get("thread_id"))
        name = text_of(about.get("name") or (serialized or {}).get("name"))
        node = text_of(metadata.get("langgraph_node"))
        is_node = any(text_of(tag).startswith("graph:step:") for tag in about.get("tags") or ())
        above = "" if parent is None else parent.owner
        if agent := text_of(metadata.get("lc_agent_name")):
            owner = agent
        elif is_node:
            graph = "" if parent is None or parent.name == _UNNAMED else parent.name
            owner = (graph or above or node) if node in _INNER else node
        else:
            is_named = is_chain and not node and name and not name.startswith("Runnable")
            owner = name if is_named and name != _UNNAMED else above
        run = str(run_id) if parent is None else parent.run_id
        if parent is None:
            run = self._paused.pop(thread, run)
        step = self._steps[run_id] = _Step(run, parent, name, owner, is_node, thread)
        if len(self._steps) > _STEPS:
            self._steps.popitem(last=False)
        return step

    def _transcript(self, step: _Step) -> Transcript:
        """What is known of the run of a step."""
        return self.recorder.run(step.run_id)

    def _ask(self, step: _Step, inputs: Any, source: str) -> None:
        """What the outermost call is given: the last words of the person are the request."""
        told = _messages(inputs)
        asked = len(told)
        while asked and isinstance(told[asked - 1], HumanMessage):
            asked -= 1
        transcript = self._transcript(step)
        transcript.pass_over(_unprompted(told[:asked]))
        new = [piece for message in told[asked:] for piece in _pieces(message)]
        if not told and (text := _plain(inputs)):
            new = [Piece("user", text)]
        transcript.say(new, "user", source)

    def _say(self, step: _Step, said: Sequence[Piece], source: str) -> None:
        """What an agent says now."""
        for piece in said:
            _mark(step, piece.mark)
        self._transcript(step).say(said, step.owner or "assistant", source)

    def _conclude(self, step: _Step, outputs: Any, source: str) -> None:
        """What a node adds to the state, as far as nobody said it inside."""
        transcript = self._transcript(step)
        is_silent = not step.said
        for message in _messages(outputs):
            found = _pieces(message)
            is_prompt = any(p.kind in (TurnKind.SYSTEM, TurnKind.TOOL_RESULT) for p in found)
            if is_prompt or message.id in step.given:
                transcript.hear(found, source)
                continue
            self._say(step, [p for p in found if p.mark not in step.said], source)
        targets = _targets(outputs)
        if is_silent and not step.said and not targets and (text := _plain(outputs)):
            self._say(step, [Piece("assistant", text)], source)
        self._hand_over(step, targets, source)

    def _hand_over(self, step: _Step, targets: Sequence[str], source: str) -> None:
        """Control goes to other nodes."""
        for target in targets:
            if ("goto", target) not in step.said:
                _mark(step, ("goto", target))
                self._transcript(step).hand_over(step.owner or "assistant", target, source)

    def _bubble(self, step: _Step, error: BaseException, source: str) -> None:
        """An exception that is none: the graph asks a person, or hands over to the graph above."""
        if not step.is_node:
            return
        for found in error.args[:1]:
            self._hand_over(step, _targets(found), source)
            for asked in found if isinstance(found, (list, tuple)) else ():
                if (mark := ("ask", text_of(getattr(asked, "id", id(asked))))) in step.said:
                    continue
                _mark(step, mark)
                text = text_of(getattr(asked, "value", asked))
                self._transcript(step).add(Turn(step.owner, text, "assistant", source=source))
                _root(step).is_asking = True

    def _fail(self, step: _Step, error: BaseException, source: str) -> None:
        """An error, told once although every step around it fails with it."""
        if (mark := ("error", str(error))) not in step.said and isinstance(error, Exception):
            _mark(step, mark)
            self._transcript(step).fail(step.owner or step.name or "assistant", error, source)

    def _close(self, step: _Step | None, error: BaseException | None = None) -> None:
        """The run ends with its outermost step, unless a person is asked."""
        if step is None or step.parent is not None:
            return
        if step.is_asking and step.thread:
            self._paused[step.thread] = step.run_id
            if len(self._paused) > _STEPS:
                self._paused.popitem(last=False)
            return
        failed = isinstance(error, Exception) and not _is_bubble(error)
        self.recorder.end(step.run_id, "failure" if failed else None)


def _mark(step: _Step | None, mark: object) -> None:
    """Remember in all steps around that something was said."""
    while step is not None:
        step.said.add(mark)
        step = step.parent


def _root(step: _Step) -> _Step:
    """The outermost step."""
    while step.parent is not None:
        step = step.parent
    return step


def _is_bubble(error: BaseException) -> bool:
    """Whether LangGraph only uses the exception to leave a node."""
    return any(base.__name__ == "GraphBubbleUp" for base in type(error).__mro__)


def _messages(value: Any) -> list[BaseMessage]:
    """The messages in what a step is given or gives."""
    if isinstance(value, BaseMessage):
        return [] if value.type == "remove" else [value]
    if hasattr(value, "goto") and hasattr(value, "update"):  # a command of LangGraph
        return _messages(value.update)
    if hasattr(value, "to_messages"):  # a filled prompt
        return list(value.to_messages())
    if isinstance(value, Mapping):
        found = value.get("messages")
        if isinstance(found, (list, tuple)):  # pairs and plain objects stand for messages too
            return [m for m in convert_to_messages(found) if m.type != "remove"]
        return [message for entry in value.values() for message in _found(entry)]
    return _found(value)


def _found(value: Any) -> list[BaseMessage]:
    """The value as messages, if it is one or a list of such."""
    entries = value if isinstance(value, (list, tuple)) else [value]
    return [m for entry in entries if isinstance(entry, BaseMessage) for m in _messages(entry)]


def _unprompted(messages: Sequence[BaseMessage]) -> Iterator[Piece]:
    """What messages say, but for prompts."""
    found = (piece for message in messages for piece in _pieces(message))
    return (piece for piece in found if piece.kind is not TurnKind.SYSTEM)


def _targets(value: Any) -> list[str]:
    """Nodes that a command of LangGraph goes to."""
    goto = getattr(value, "goto", None)
    entries = goto if isinstance(goto, (list, tuple)) else [goto]
    nodes = (entry if isinstance(entry, str) else getattr(entry, "node", "") for entry in entries)
    return [node for node in nodes if node and not node.startswith("__")]


def _plain(value: Any) -> str:
    """The texts in something without messages; also the answer of a person to a question."""
    if hasattr(value, "goto") and hasattr(value, "update"):
        return text_of(getattr(value, "resume", None)) or _plain(value.update)
    if isinstance(value, str):
        return value
    entries: Iterator[Any] = iter(value.values()) if isinstance(value, Mapping) else iter(())
    return "\n".join(entry for entry in entries if isinstance(entry, str) and entry)


def _pieces(message: BaseMessage) -> list[Piece]:
    """What a message says and does; an empty answer is a symptom and stays."""
    kind = message.type.removesuffix("MessageChunk").lower()  # a stream that was put together
    role = _ROLES.get(kind) or text_of(getattr(message, "role", "")) or kind
    calls = getattr(message, "tool_calls", None) or []
    content: Any = message.content
    if calls and isinstance(content, list):
        content = [
            part for part in content if not (isinstance(part, dict) and part.get("type") in _CALLS)
        ]
    row = {
        "role": role,
        "content": content,
        "name": message.name,
        "tool_call_id": getattr(message, "tool_call_id", None),
        "reasoning_content": message.additional_kwargs.get("reasoning_content"),
        "tool_calls": [
            {"id": call.get("id"), "name": call.get("name"), "arguments": call.get("args")}
            for call in calls
        ],
    }
    return pieces(row) or [Piece(role, "", name=message.name or "")]
