"""CrewAI (`crewai`): agents with roles that work through a list of tasks.

The seam is `crewai.BaseLLM`. Every agent of a crew gets a `Seat` of its own and speaks under its
role. What earlier tasks gave is shown to an agent as the context of its task; there it is told
apart by being, word for word, the output of that task. No telemetry is sent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")  # both are read on import
os.environ.setdefault("CREWAI_TRACING_ENABLED", "false")

from crewai import Agent, BaseLLM, Crew, Process, Task
from pydantic import PrivateAttr

from injection.frameworks.stage import TOOL, Heard, Spoken, Stage, Tool, refuse_namesakes
from injection.session import Session

_MANAGER = "Crew Manager"


class Seat(BaseLLM):
    """The model of one agent; speaks on a stage."""

    _stage: Stage | None = PrivateAttr(default=None)
    _agent: str = PrivateAttr(default="")
    _tasks: Sequence[Task] = PrivateAttr(default=())

    def __init__(
        self, stage: Stage | None = None, agent: str = "", tasks: Sequence[Task] = ()
    ) -> None:
        super().__init__(model="seat", provider="seat")
        self._stage, self._agent, self._tasks = stage, agent, tasks

    def call(
        self,
        messages: str | list[Any],
        tools: list[dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        available_functions: dict[str, Any] | None = None,
        from_task: Task | None = None,
        from_agent: Any = None,
        response_model: type[Any] | None = None,
    ) -> Any:
        """Answer.

        Returns:
            Text, or a list with one tool call.

        Raises:
            DclError: As the stage raises it.
            RuntimeError: If the model belongs to no run.
        """
        if self._stage is None:
            raise RuntimeError("this model stands in for another and takes part in no run")
        rows = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        system = [_text(row) for row in rows if row["role"] == "system"]
        if response_model is not None:
            schema = json.dumps(response_model.model_json_schema())
            system.append(f"Reply with JSON of this schema: {schema}")
        offered = [_read_tool(tool) for tool in tools or ()]
        context = (from_task.prompt_context if from_task is not None else None) or ""
        heard = list(self._hear(rows, context))
        return _answer(self._stage.speak(self._agent, "\n\n".join(system), heard, offered))

    def supports_function_calling(self) -> bool:
        """Yes, in text."""
        return True

    def supports_stop_words(self) -> bool:
        """No."""
        return False

    def get_context_window_size(self) -> int:
        """More than any run here needs; contexts are not cut."""
        return 1_000_000

    def get_input_tokens_count(self, messages: Any, *arguments: Any, **options: Any) -> int:
        """Four characters a token."""
        return len(str(messages)) // 4

    def _hear(self, rows: Sequence[Mapping[str, Any]], context: str) -> Iterator[Heard]:
        """Messages with who said them."""
        assert self._stage is not None
        for row in rows:
            if row["role"] == "user":
                yield from self._hear_task(_text(row), context)
            elif row["role"] == "assistant":
                calls = row.get("tool_calls") or ()
                id = str(calls[0]["id"]) if calls else ""
                named = {c["function"]["name"]: c["function"]["arguments"] for c in calls}
                yield Heard(self._agent, self._stage.recall(id, _text(row), named))
            elif row["role"] == "tool":
                yield Heard(TOOL, _text(row), str(row.get("tool_call_id")))

    def _hear_task(self, text: str, context: str) -> Iterator[Heard]:
        """A task, after the outputs of earlier tasks that stand in its context."""
        if not context or context not in text:
            yield Heard("", text)
            return
        rest = context
        for task in self._tasks:
            output = task.output
            if output is not None and output.raw and output.raw in rest:
                rest = rest.replace(output.raw, f"(what {output.agent.strip()} said above)", 1)
                yield Heard(output.agent.strip(), output.raw)
        yield Heard("", text.replace(context, rest, 1))


def _text(row: Mapping[str, Any]) -> str:
    """Words of a message; what is no text is named."""
    content = row.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "[file]")) for part in content)
    return str(content or "")


def _read_tool(tool: Mapping[str, Any]) -> Tool:
    """A tool as the stage describes it."""
    function = tool["function"]
    schema = function.get("parameters", {})
    names = schema.get("required", schema.get("properties", ()))
    return Tool(function["name"], function.get("description", ""), tuple(names))


def _answer(spoken: Spoken) -> str | list[dict[str, Any]]:
    """A reply in CrewAI's terms."""
    if not spoken.tool:
        return spoken.lead
    function = {"name": spoken.tool, "arguments": json.dumps(dict(spoken.arguments))}
    return [{"id": spoken.id, "type": "function", "function": function}]


def _inputs(task: str) -> dict[str, Any]:
    """The usual inputs of a crew: what `{task}` stands for in its descriptions."""
    return {"task": task}


@dataclass(frozen=True, slots=True)
class CrewAI:
    """A crew as a system.

    Args:
        build: Builds the crew, with whatever models; called anew for every run.
        name: Name in records.
        phases: What each agent does, by role, for scripted agents.
        inputs: The inputs of the crew for a task.
    """

    build: Callable[[], Crew]
    name: str = "crewai"
    phases: Mapping[str, str] = field(default_factory=dict)
    inputs: Callable[[str], dict[str, Any]] = _inputs

    def __call__(self, session: Session, task: str) -> str:
        """Run the crew on a task."""
        stage = Stage(session, task, self.phases)
        crew = self.build()
        agents = [*crew.agents, *(step.agent for step in crew.tasks if step.agent)]
        if crew.manager_agent is not None:
            agents.append(crew.manager_agent)
        elif crew.manager_llm is not None:
            crew.manager_llm = Seat(stage, _MANAGER, crew.tasks)
        refuse_namesakes(agent.role.strip() for agent in {id(a): a for a in agents}.values())
        for agent in agents:
            agent.llm = Seat(stage, agent.role.strip(), crew.tasks)
        return stage.perform(
            lambda: str(crew.kickoff(inputs=self.inputs(task)).raw), lambda error: False
        )


def _crew() -> Crew:
    """A solver, a reviewer and a writer, one after another."""
    jobs = {
        "Solver": ("Solve this step by step: {task}", "Steps and a line `Answer: ...`."),
        "Reviewer": ("Check the solution of: {task}", "[Agree], or [Disagree] with a reason."),
        "Writer": ("State the result of: {task}", "A line `Answer: ...`, or the function."),
    }
    tasks = []
    for role, (description, expected) in jobs.items():
        agent = Agent(role=role, goal=expected, backstory="You are careful.", llm=Seat())
        tasks.append(Task(description=description, expected_output=expected, agent=agent))
    agents = [task.agent for task in tasks if task.agent is not None]
    return Crew(agents=agents, tasks=tasks, process=Process.sequential, verbose=False)


SEQUENTIAL = CrewAI(
    _crew, "crewai_sequential", {"Solver": "solve", "Reviewer": "critique", "Writer": "decide"}
)
