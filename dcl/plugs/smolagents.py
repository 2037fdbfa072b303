"""smolagents: a step callback for an agent and the agents that it manages.

The framework calls back when a step is over. So what a managed agent does is told as it happens,
and the words with which its manager sent it there come after, with the manager's step; the order
itself stands in front, as a hand-over.
"""

from __future__ import annotations

import sys
import uuid
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from dcl.formats.messages import call_text, text_of
from dcl.live.monitor import Monitor
from dcl.plugs.recorder import OnEvent, Recorder, lacks
from dcl.plugs.transcript import Transcript
from dcl.trajectory import Turn, TurnKind

try:
    from smolagents import ActionStep, FinalAnswerStep, MultiStepAgent, PlanningStep, TaskStep
    from smolagents.memory import MemoryStep
    from smolagents.utils import AgentMaxStepsError
except ImportError as error:
    raise lacks(__name__, "smolagents", error) from error

_ANSWER = "final_answer"  # the tool by which an agent ends


class MonitorStepCallback:
    """Feeds the steps of agents to a monitor.

    A run is one call of `run` on the agent that was given to `attach`. An agent is called by its
    name or, without one, by its class. A run that breaks off ends when the model fails, else at
    the next run of the agent.

    Args:
        monitor: See `dcl.plugs.recorder.Recorder`.
        on_event: See there.

    Raises:
        ArtifactError: If no monitor is given, and the model that ships cannot be loaded.
    """

    def __init__(self, monitor: Monitor | None = None, *, on_event: OnEvent | None = None) -> None:
        self.recorder = Recorder(monitor, on_event)
        self._managers: WeakKeyDictionary[MultiStepAgent, WeakSet[MultiStepAgent]] = (
            WeakKeyDictionary()
        )
        # Every call of `run` puts a task of its own into the memory of the agent.
        self._runs: WeakKeyDictionary[MultiStepAgent, tuple[TaskStep, str]] = WeakKeyDictionary()
        self._done: WeakKeyDictionary[MultiStepAgent, TaskStep] = WeakKeyDictionary()

    def attach(self, agent: MultiStepAgent) -> None:
        """Listen to an agent, and to all that it manages.

        Args:
            agent: The one whose `run` is called.
        """
        if agent not in self._managers:
            self._managers[agent] = WeakSet()
            agent.step_callbacks.register(MemoryStep, self)
        for managed in agent.managed_agents.values():
            self.attach(managed)
            self._managers[managed].add(agent)

    def __call__(self, step: MemoryStep, agent: MultiStepAgent) -> None:
        """Take a step that is over.

        Args:
            step: What was done.
            agent: Who did it.
        """
        with self.recorder.guard(), self.recorder.lock:
            run_id = self._run_id(agent)
            with self.recorder.guard(run_id):
                self._read(self.recorder.run(run_id), step, agent)
            has_broken_off = _is_empty(step)
            if isinstance(step, FinalAnswerStep) or has_broken_off:
                self._done[agent] = self._runs.pop(agent)[0]
                if self._manager(agent) is None:
                    failed = has_broken_off or _ran_out(agent)
                    self.recorder.end(run_id, "failure" if failed else None)

    def close(self) -> None:
        """Judge what waits; see `Recorder.close`."""
        self.recorder.close()

    def _manager(self, agent: MultiStepAgent) -> MultiStepAgent | None:
        """The agent that has called this one; None if a person has."""
        return next((m for m in self._managers.get(agent, ()) if self._is_running(m)), None)

    def _is_running(self, agent: MultiStepAgent) -> bool:
        """Whether an agent has a task that it has not finished."""
        task = _task(agent)
        return task is not None and task is not self._done.get(agent)

    def _run_id(self, agent: MultiStepAgent) -> str:
        """The run that an agent works in; what it is asked is told when it starts."""
        task = _task(agent) or TaskStep(agent.task or "")
        known, run_id = self._runs.get(agent, (None, ""))
        if known is task:
            return run_id
        manager = self._manager(agent)
        if manager is None:
            if run_id:
                self.recorder.end(run_id)  # the last run broke off without a word
            run_id = str(uuid.uuid4())
            turn = Turn("user", task.task, "user")
        else:
            run_id = self._run_id(manager)
            turn = Turn(_name(manager), task.task, "assistant", TurnKind.HANDOFF)
        self._runs[agent] = task, run_id
        transcript = self.recorder.run(run_id)
        transcript.add(turn)
        if agent.instructions:
            transcript.add(Turn("system", agent.instructions, "system", TurnKind.SYSTEM))
        return run_id

    def _read(self, transcript: Transcript, step: MemoryStep, agent: MultiStepAgent) -> None:
        """The turns of a step."""
        name = _name(agent)
        if isinstance(step, PlanningStep):
            transcript.add(Turn(name, step.plan, "assistant", TurnKind.THOUGHT))
        elif isinstance(step, FinalAnswerStep):
            transcript.add(Turn(name, _text(step.output), "assistant", TurnKind.FINAL))
        elif isinstance(step, ActionStep):
            for turn in _action(step, agent):
                transcript.add(turn)


def _action(step: ActionStep, agent: MultiStepAgent) -> list[Turn]:
    """What an agent writes, the tools it uses, and what comes back."""
    name, source = _name(agent), f"step {step.step_number}"
    calls = [c for c in _calls(step) if c[0] not in (_ANSWER, *agent.managed_agents)]
    error = "" if step.error is None else f"error: {step.error}"
    written = _text(step.model_output)
    turns = []
    if step.code_action is not None:  # the text holds the code that is run
        turns.append(Turn(name, written, "assistant", TurnKind.TOOL_CALL, source=source))
    else:
        if written:
            turns.append(Turn(name, written, "assistant", source=source))
        turns += [
            Turn(name, call_text(*call), "assistant", TurnKind.TOOL_CALL, source=source)
            for call in calls
        ]
    back = "\n".join(text for text in (step.observations or "", error) if text)
    if calls and back:
        tool = calls[0][0] if len(calls) == 1 else "tool"
        turns.append(Turn(tool, back, "tool", TurnKind.TOOL_RESULT, source=source))
    elif error:
        turns.append(Turn(name, error, "assistant", source=source))
    if _is_empty(step):
        raised = sys.exc_info()[1]  # the step is told while the exception goes by
        turns.append(Turn(name, f"error: {raised or 'unknown'}", "assistant", source=source))
    return turns


def _calls(step: ActionStep) -> list[tuple[str, Any]]:
    """Name and arguments of the tools that were called, also where a call was refused."""
    if step.tool_calls:
        return [(call.name, call.arguments) for call in step.tool_calls]
    asked = step.model_output_message.tool_calls if step.model_output_message else None
    return [(call.function.name, call.function.arguments) for call in asked or ()]


def _task(agent: MultiStepAgent) -> TaskStep | None:
    """The last task that an agent was given."""
    return next((s for s in reversed(agent.memory.steps) if isinstance(s, TaskStep)), None)


def _is_empty(step: MemoryStep) -> bool:
    """Whether nothing was done in a step, as an exception broke the run off."""
    done = ("model_output", "tool_calls", "error", "action_output")
    return isinstance(step, ActionStep) and all(getattr(step, name) is None for name in done)


def _ran_out(agent: MultiStepAgent) -> bool:
    """Whether an agent had to answer because it had no step left."""
    last = agent.memory.steps[-1]
    return isinstance(last, ActionStep) and isinstance(last.error, AgentMaxStepsError)


def _name(agent: MultiStepAgent) -> str:
    """What an agent is called."""
    return str(agent.name or agent.agent_name)


def _text(value: Any) -> str:
    """An output of any type as text."""
    return value if isinstance(value, str) else "" if value is None else text_of(value)
