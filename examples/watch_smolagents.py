"""Judge a smolagents team while it works; offline, as its models follow a script.

pip install 'dcl-attribution[smolagents]'
python examples/watch_smolagents.py
"""

from __future__ import annotations

import json
from typing import Any

from smolagents import ChatMessage, Model, ToolCallingAgent, tool
from smolagents.models import ChatMessageToolCall, ChatMessageToolCallFunction, MessageRole

from dcl.plugs.smolagents import MonitorStepCallback

TASK = "Write parse_duration(text): '1h30m' gives 5400. All tests must pass."


class Scripted(Model):
    """A model that calls one tool after another."""

    def __init__(self, *calls: tuple[str, dict[str, Any]]) -> None:
        super().__init__(model_id="scripted")
        self.calls = iter(calls)

    def generate(self, messages: Any, *more: Any, **settings: Any) -> ChatMessage:
        """The next call of the script."""
        name, arguments = next(self.calls)
        function = ChatMessageToolCallFunction(name=name, arguments=arguments)
        call = ChatMessageToolCall(id="call_1", type="function", function=function)
        return ChatMessage(role=MessageRole.ASSISTANT, content=None, tool_calls=[call])


@tool
def run_tests() -> str:
    """Run the tests."""
    return "1 failed, 4 passed: parse_duration('') did not raise ValueError"


DONE = {"answer": "One test fails, but parse_duration stays as it is. I am done."}
coder = ToolCallingAgent(
    [run_tests], Scripted(("run_tests", {}), ("final_answer", DONE)),
    name="coder", description="Writes code and tests it.", verbosity_level=0,
)  # fmt: skip
planner = ToolCallingAgent(
    [], Scripted(("coder", {"task": TASK}), ("final_answer", {"answer": "Done."})),
    name="planner", managed_agents=[coder], verbosity_level=0,
)  # fmt: skip

callback = MonitorStepCallback(on_event=lambda event: print(json.dumps(event.to_dict())))
callback.attach(planner)  # and all that it manages
planner.run(TASK)
callback.close()  # waits for the last word; the end of the program does so too
