"""Judge a crew while it works; offline, as its models follow a script.

pip install 'dcl-attribution[crewai]'
python examples/watch_crewai.py
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")  # before the import, which starts it
os.environ.setdefault("OTEL_SDK_DISABLED", "true")

from crewai import Agent, BaseLLM, Crew, Task
from crewai.events import crewai_event_bus
from crewai.tools import tool

from dcl.plugs.crewai import MonitorListener


class Scripted(BaseLLM):
    """A model that says one thing after another."""

    script: list[str]

    def call(self, messages: Any, *more: Any, **settings: Any) -> str:
        """The next entry of the script."""
        return self.script.pop(0)

    def supports_function_calling(self) -> bool:
        """Tools are called in words."""
        return False


@tool("run_tests")
def run_tests(path: str) -> str:
    """Run the tests of a file."""
    return "1 failed, 4 passed: parse_duration('') did not raise ValueError"


def scripted(*said: str) -> Scripted:
    """A model with its script."""
    return Scripted(model="scripted", script=list(said))


planner = Agent(
    role="planner", goal="Say who does what.", backstory="You plan.",
    llm=scripted("Thought: easy\nFinal Answer: The coder writes parse_duration, then tests it."),
)  # fmt: skip
coder = Agent(
    role="coder", goal="Write code and test it.", backstory="You code.", tools=[run_tests],
    llm=scripted(
        'Thought: I test it\nAction: run_tests\nAction Input: {"path": "duration.py"}',
        "Thought: done\nFinal Answer: One test fails, but parse_duration stays as it is.",
    ),
)  # fmt: skip
tasks = [
    Task(
        description="Plan parse_duration(text): '1h30m' gives 5400. All tests must pass.",
        expected_output="a plan", agent=planner,
    ),
    Task(description="Write parse_duration and test it.", expected_output="code", agent=coder),
]  # fmt: skip

listener = MonitorListener(on_event=lambda event: print(json.dumps(event.to_dict())))
Crew(agents=[planner, coder], tasks=tasks).kickoff()
crewai_event_bus.flush()  # the bus hands events on in a thread of its own
listener.close()  # waits for the last word; the end of the program does so too
