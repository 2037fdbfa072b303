"""Which agent failed, how, and at which turn: failure attribution for LLM multi-agent logs.

The root loads types without numpy; `load`, the readers and `Attributor` come in on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcl.errors import DclError
from dcl.taxonomy import ErrorMode
from dcl.trajectory import Example, Fault, Trajectory, Turn, TurnKind

if TYPE_CHECKING:
    from dcl.attribution import Attribution, Attributor
    from dcl.formats import read_examples, read_trajectories
    from dcl.live.monitor import Monitor
    from dcl.runtime import load

__version__ = "0.1.0"

__all__ = [
    "Attribution",
    "Attributor",
    "DclError",
    "ErrorMode",
    "Example",
    "Fault",
    "Monitor",
    "Trajectory",
    "Turn",
    "TurnKind",
    "load",
    "read_examples",
    "read_trajectories",
]

_LAZY = {
    "Attribution": "dcl.attribution",
    "Attributor": "dcl.attribution",
    "Monitor": "dcl.live.monitor",
    "load": "dcl.runtime",
    "read_examples": "dcl.formats",
    "read_trajectories": "dcl.formats",
}


def __getattr__(name: str) -> Any:
    """Load the names that need numpy or onnxruntime on first use."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'dcl' has no attribute {name!r}")
