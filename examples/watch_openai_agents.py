"""Judge a team of the OpenAI Agents SDK while it works; offline, as its model follows a script.

pip install 'dcl-attribution[openai-agents]'
python examples/watch_openai_agents.py
"""

from __future__ import annotations

import json
from typing import Any

from agents import Agent, Model, ModelResponse, Runner, Usage, function_tool, set_trace_processors
from agents.tracing import generation_span

from dcl.plugs.openai_agents import MonitorTracingProcessor

TASK = "Write parse_duration(text): '1h30m' gives 5400. All tests must pass."


def call(name: str) -> dict[str, Any]:
    """A message that calls a tool without arguments."""
    function = {"name": name, "arguments": "{}"}
    return {"content": None, "tool_calls": [{"id": f"call_{name}", "function": function}]}


class Scripted(Model):
    """A model that says one message after another, and traces what it says as real ones do."""

    def __init__(self, script: list[dict[str, Any]]) -> None:
        self.script = iter(script)

    async def get_response(
        self, system_instructions: Any, input: Any, *more: Any, **settings: Any
    ) -> ModelResponse:
        """The next message of the script."""
        told = [{"role": "user", "content": input}] if isinstance(input, str) else list(input)
        if system_instructions:
            told.insert(0, {"role": "system", "content": system_instructions})
        message = {"role": "assistant", **next(self.script)}
        with generation_span(input=told, output=[message]):
            return ModelResponse(_items(message), Usage(), None)

    def stream_response(self, *told: Any, **settings: Any) -> Any:
        """Not used here."""
        raise NotImplementedError("the script is not streamed")


def _items(message: dict[str, Any]) -> list[Any]:
    """The message as the items that the SDK works with."""
    from openai.types.responses import (
        ResponseFunctionToolCall,
        ResponseOutputMessage,
        ResponseOutputText,
    )

    items: list[Any] = [
        ResponseFunctionToolCall(type="function_call", call_id=entry["id"], **entry["function"])
        for entry in message.get("tool_calls", ())
    ]
    if message["content"]:
        text = ResponseOutputText(type="output_text", text=message["content"], annotations=[])
        items.append(
            ResponseOutputMessage(
                id="m", type="message", role="assistant", status="completed", content=[text]
            )
        )
    return items


@function_tool
def run_tests() -> str:
    """Run the tests."""
    return "1 failed, 4 passed: parse_duration('') did not raise ValueError"


model = Scripted(
    [
        call("transfer_to_coder"),
        call("run_tests"),
        {"content": "One test fails, but parse_duration stays as it is. I am done."},
    ]
)
coder = Agent("coder", instructions="Write code and test it.", model=model, tools=[run_tests])
planner = Agent("planner", instructions="Say who does what.", model=model, handoffs=[coder])

processor = MonitorTracingProcessor(on_event=lambda event: print(json.dumps(event.to_dict())))
set_trace_processors([processor])  # or add_trace_processor, to keep those that are there
Runner.run_sync(planner, TASK)
processor.shutdown()  # waits for the last word; the end of the program does so too
