"""Judge a LangGraph team while it works; offline, as its model follows a script.

pip install 'dcl-attribution[langchain]' langgraph
python examples/watch_langgraph.py
"""

from __future__ import annotations

import json

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from dcl.plugs.langchain import MonitorCallbackHandler

TASK = "Write parse_duration(text): '1h30m' gives 5400. All tests must pass."
CALL = {"name": "run_tests", "args": {}, "id": "call_1"}
SCRIPT = [
    AIMessage("The coder writes parse_duration, then runs the tests."),
    AIMessage("", tool_calls=[CALL]),
    AIMessage("One test fails, but parse_duration stays as it is. I am done."),
]
model = GenericFakeChatModel(messages=iter(SCRIPT))


@tool
def run_tests() -> str:
    """Run the tests."""
    return "1 failed, 4 passed: parse_duration('') did not raise ValueError"


def speak(state: MessagesState) -> MessagesState:
    """What an agent does: ask the model."""
    return {"messages": [model.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("planner", speak)
graph.add_node("coder", speak)
graph.add_node("tools", ToolNode([run_tests]))
graph.add_edge(START, "planner")
graph.add_edge("planner", "coder")
graph.add_conditional_edges(
    "coder", lambda state: "tools" if state["messages"][-1].tool_calls else "__end__"
)
graph.add_edge("tools", "coder")

handler = MonitorCallbackHandler(on_event=lambda event: print(json.dumps(event.to_dict())))
graph.compile().invoke({"messages": [("user", TASK)]}, {"callbacks": [handler]})
handler.close()  # waits for the last word; the end of the program does so too
