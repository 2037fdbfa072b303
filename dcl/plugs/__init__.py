"""Plugs that feed a monitor from what runs the agents; each module needs its framework.

    dcl.plugs.opentelemetry    span processor
    dcl.plugs.evaluations      findings back to OpenTelemetry as `gen_ai.evaluation.result` events
    dcl.plugs.langchain        callback handler for LangChain and LangGraph
    dcl.plugs.openai_agents    tracing processor of the OpenAI Agents SDK
    dcl.plugs.autogen          stream wrapper and logging handler of AutoGen AgentChat
    dcl.plugs.crewai           event listener
    dcl.plugs.smolagents       step callback

A plug never raises into its framework and never waits for the model: what it cannot read is counted
by the monitor, and the run says from then on that turns are missing.
"""
