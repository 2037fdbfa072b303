"""Lets the tests of injected records use the small stand-ins of the tests of `dcl`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "dcl"))
