"""Judge an AutoGen team while it works; offline, as its models follow a script.

pip install 'dcl-attribution[autogen]' autogen-ext
python examples/watch_autogen.py
"""

from __future__ import annotations

import asyncio
import json

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import FunctionCall
from autogen_core.models import CreateResult, ModelFamily, ModelInfo, RequestUsage
from autogen_ext.models.replay import ReplayChatCompletionClient

from dcl.plugs.autogen import watch
from dcl.plugs.recorder import Recorder

TASK = "Write parse_duration(text): '1h30m' gives 5400. All tests must pass."
INFO = ModelInfo(
    vision=False, function_calling=True, json_output=False, structured_output=False,
    family=ModelFamily.UNKNOWN,
)  # fmt: skip
CALL = CreateResult(
    content=[FunctionCall(id="call_1", name="run_tests", arguments="{}")],
    finish_reason="function_calls",
    usage=RequestUsage(prompt_tokens=0, completion_tokens=0),
    cached=False,
)


def run_tests() -> str:
    """Run the tests."""
    return "1 failed, 4 passed: parse_duration('') did not raise ValueError"


def scripted(*said: str | CreateResult) -> ReplayChatCompletionClient:
    """A model that says one thing after another."""
    return ReplayChatCompletionClient(list(said), model_info=INFO)


async def main() -> None:
    """Run the team, and print what is said of the run."""
    planner = AssistantAgent(
        "planner", scripted("The coder writes parse_duration, then runs the tests.")
    )
    coder = AssistantAgent(
        "coder",
        scripted(CALL, "One test fails, but parse_duration stays as it is. I am done."),
        tools=[run_tests],
        reflect_on_tool_use=True,
    )
    team = RoundRobinGroupChat([planner, coder], termination_condition=MaxMessageTermination(3))
    with Recorder(on_event=lambda event: print(json.dumps(event.to_dict()))) as recorder:
        async for _ in watch(team.run_stream(task=TASK), recorder):
            pass


asyncio.run(main())
