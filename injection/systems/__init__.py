"""Multi-agent systems, one module each, small and faithful to the source that each module cites."""

from __future__ import annotations

from dcl.errors import ConfigError
from injection.session import System
from injection.systems.agentverse import AgentVerse
from injection.systems.debate import Debate
from injection.systems.dylan import Dylan
from injection.systems.macnet import MacNet
from injection.systems.manager import Manager
from injection.systems.orchestrator import Orchestrator
from injection.systems.single import Single

__all__ = [
    "SYSTEMS",
    "AgentVerse",
    "Debate",
    "Dylan",
    "MacNet",
    "Manager",
    "Orchestrator",
    "Single",
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
    )
}
"""Every system in its usual size, by name."""


def find_system(name: str) -> System:
    """The system of a name.

    Raises:
        ConfigError: If there is none.
    """
    if name not in SYSTEMS:
        raise ConfigError(f"systems: expected one of {', '.join(SYSTEMS)}, got {name!r}")
    return SYSTEMS[name]
