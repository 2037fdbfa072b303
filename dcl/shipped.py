"""The models that ship with the package, by name; a ladder of price and accuracy."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

SHIPPED: dict[str, str] = {"base": "pretrained", "lite": "pretrained/lite"}
"""Name of a model to its folder inside the package."""


def find_model(name: str) -> Path:
    """Folder of a model.

    Args:
        name: One of `SHIPPED`, or the path of a folder; `./base` is a folder of that name.
    """
    if name in SHIPPED:
        return Path(str(files("dcl") / SHIPPED[name]))
    return Path(name)
