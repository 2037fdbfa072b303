"""Multi-agent systems, one module each, small and faithful to the source that each module cites."""

from __future__ import annotations

from dcl.errors import ConfigError
from injection.frameworks import TEAMS, load_team
from injection.session import System
from injection.systems.agentverse import AgentVerse
from injection.systems.debate import Debate
from injection.systems.dylan import Dylan
from injection.systems.experts import Experts
from injection.systems.macnet import MacNet
from injection.systems.manager import Manager
from injection.systems.orchestrator import Orchestrator
from injection.systems.single import Single
from injection.systems.web_team import WebTeam

__all__ = [
    "SYSTEMS",
    "AgentVerse",
    "Debate",
    "Dylan",
    "Experts",
    "MacNet",
    "Manager",
    "Orchestrator",
    "Single",
    "WebTeam",
    "find_system",
]

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        Debate(),
        Dylan(),
        MacNet("chain"),
        MacNet("star"),
        MacNet("tree"),
        MacNet("random"),
        AgentVerse(),
        Orchestrator(),
        Manager(),
        Experts(),
        WebTeam(),
    )
}
"""Every system in its usual size, by name."""


def find_system(name: str) -> System:
    """The system of a name: one of ours, or a team of a framework.

    Raises:
        ConfigError: If there is none, or its framework is not installed.
    """
    system = SYSTEMS.get(name) or load_team(name)
    if system is None:
        known = ", ".join((*SYSTEMS, *TEAMS))
        raise ConfigError(
            f"systems: expected one of {known}, or framework:module:function, got {name!r}"
        )
    return system
