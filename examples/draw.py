"""Draw what `dcl attribute` prints for the bundled run: `python examples/draw.py docs/demo.svg`."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

import dcl
from dcl.report import Report
from dcl.report.table import table

source = "examples/parse_duration.json"
trajectory = next(iter(dcl.read_trajectories(source)))
report = Report(source=source, trajectory=trajectory, attribution=dcl.load()(trajectory))
console = Console(record=True, width=100)
console.print(table(report))
Path(sys.argv[1]).write_text(console.export_svg(title=f"dcl attribute {source}"))
