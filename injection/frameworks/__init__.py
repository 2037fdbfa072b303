"""Systems that are real frameworks: their own code runs, only the model under each agent is ours.

    stage          what adapters share: one call of a framework is one call of the session
    autogen        AutoGen: round robin, selector, Magentic-One; an environment of its own
    smolagents     a manager with managed agents
    langgraph      graphs; a supervisor with workers
    openai_agents  agents that hand over
    crewai         crews; an environment of its own

A framework is imported when a system of it is asked for. Besides the teams that ship, any function
that builds one can be named, as `framework:module:function`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from dcl.errors import ConfigError
from injection.session import System


class _Home(NamedTuple):
    """Where the systems of a framework are, and what must be installed for them."""

    module: str
    adapter: str
    teams: dict[str, str]
    packages: str


_HOMES = (
    _Home(
        "autogen",
        "AutoGen",
        {
            "autogen_round_robin": "ROUND_ROBIN",
            "autogen_selector": "SELECTOR",
            "magentic_one": "MAGENTIC_ONE",
        },
        '-e ".[inject,autogen]"',
    ),
    _Home("smolagents", "SmolAgents", {"smolagents": "MANAGED"}, '-e ".[frameworks]"'),
    _Home("langgraph", "LangGraph", {"langgraph_supervisor": "SUPERVISED"}, '-e ".[frameworks]"'),
    _Home("openai_agents", "OpenAIAgents", {"openai_agents": "HANDOFFS"}, '-e ".[frameworks]"'),
    _Home("crewai", "CrewAI", {"crewai_sequential": "SEQUENTIAL"}, '-e ".[crewai]"'),
)

TEAMS = tuple(name for home in _HOMES for name in home.teams)
"""Names of the teams that ship."""


def load_team(name: str) -> System | None:
    """The system of a name, with its framework; None if the name is none of these.

    Args:
        name: One of `TEAMS`, or `framework:module:function`, where the function builds the team.

    Raises:
        ConfigError: If the framework is not installed, or there is no such function.
    """
    framework, _, place = name.partition(":")
    for home in _HOMES:
        if name in home.teams:
            team: System = _part_of(home, home.teams[name])
            return team
        if place and framework == home.module:
            made: System = _part_of(home, home.adapter)(_find_function(place), name)
            return made
    return None


def _part_of(home: _Home, part: str) -> Any:
    """Something that an adapter module defines.

    Raises:
        ConfigError: If its framework is not installed.
    """
    try:
        module = importlib.import_module(f"{__name__}.{home.module}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("dcl", "injection"):
            raise
        raise ConfigError(
            f"systems: {home.module} needs {error.name}, which is not installed; run "
            f"`pip install {home.packages}`"
        ) from None
    return getattr(module, part)


def _find_function(place: str) -> Callable[..., Any]:
    """A function by `module:name`.

    Raises:
        ConfigError: If there is none.
    """
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name or "build", None)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise
        raise ConfigError(f"systems: expected a module {module}, found none on the path") from None
    if not callable(found):
        raise ConfigError(f"systems: expected a function {name or 'build'} in {module}, found none")
    function: Callable[..., Any] = found
    return function
