"""A report for a terminal: the verdict first, then the probabilities, then the evidence."""

from __future__ import annotations

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dcl.attribution import SHOWN_COVERAGES
from dcl.report import Report
from dcl.report.output import visible
from dcl.taxonomy import MODES

_LEAST_MODES = 3  # so that a run without a declared mode still shows where the model leans
_SEEN = 500  # characters of a turn that are looked at; wider than any terminal
_NAME = 32  # columns for the name of an agent


def table(report: Report) -> RenderableType:
    """What rich prints for one run; every text of the log in it is escaped and on one line.

    Args:
        report: The run and what to show of it.

    Returns:
        A renderable that fits itself to the width of the console.
    """
    run = report.trajectory
    agents, turns = len(run.agents), len(run.turns)
    head = Text.assemble(
        (visible(run.id, _SEEN), "bold"),
        f"  {visible(report.source, _SEEN)}",
        (f"  {agents} agent{'s'[: agents > 1]}, {turns} turn{'s'[: turns > 1]}", "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )
    parts = [_faults(report), *_sentences(report), _agents(report), _modes(report)]
    if report.evidence:
        parts.append(_evidence(report))
    indented = (Padding(part, (0, 0, 0, 2), expand=False) for part in parts)
    return Group(head, *(line for part in indented for line in (Text(), part)), Text())


def _faults(report: Report) -> RenderableType:
    """The declared faults, or a line that says there is none."""
    scored = report.attribution
    findings = scored.findings(threshold=report.threshold, top_k=report.top_k)
    if not findings:
        return Text("No fault declared: nobody is over the threshold.", style="green")
    grid = _grid("Fault", "", "", "Step", "Prob")
    for finding in findings:
        mode = finding.fault.mode
        likeliest = MODES[int(scored.pair_probs[scored.agents.index(finding.fault.agent)].argmax())]
        grid.add_row(
            Text(visible(finding.fault.agent, _SEEN), style="bold red"),
            "" if mode is None else mode.value,
            f"mode unclear, perhaps {likeliest.value}" if mode is None else mode.title,
            str(finding.fault.step),
            f"{finding.prob:.2f}",
        )
    return grid


def _sentences(report: Report) -> list[RenderableType]:
    """Where the failure shows and whether to trust the verdict, in plain words; may be none."""
    scored = report.attribution
    spans = []
    for coverage in SHOWN_COVERAGES if scored.calibration.span_cuts else ():
        turns = scored.step_set(coverage)
        if len(turns) == len(scored.steps):
            continue  # the whole run, which says nothing
        first, last = scored.steps[turns[0]], scored.steps[turns[-1]]
        where = f"at step {first}" if len(turns) == 1 else f"between step {first} and {last}"
        spans.append(f"{where} ({coverage:.0%})")
    lines = [f"The failure shows {', '.join(spans)}."] if spans else []
    # Where nothing is declared, the line above has said so.
    if scored.abstains and scored.findings():
        lines.append(f"No verdict to act on: {visible(scored.abstains)}.")
    return [Text("\n".join(lines))] if lines else []


def _agents(report: Report) -> RenderableType:
    """Every agent, most probable first."""
    grid = _grid("Agent", "Prob")
    scored = report.attribution
    for a in np.argsort(-scored.agent_probs, kind="stable"):
        grid.add_row(Text(visible(scored.agents[a], _SEEN)), f"{scored.agent_probs[a]:.2f}")
    return grid


def _modes(report: Report) -> RenderableType:
    """The declared modes, and the most probable ones in any case."""
    scored = report.attribution
    shown = max(_LEAST_MODES, len(scored.modes()))
    grid = _grid("Mode", "", "Prob")
    for m in np.argsort(-scored.mode_probs, kind="stable")[:shown]:
        grid.add_row(MODES[m].value, MODES[m].title, f"{scored.mode_probs[m]:.2f}")
    return grid


def _evidence(report: Report) -> RenderableType:
    """The turns that weigh most, each with the start of its text."""
    scored = report.attribution
    grid = _grid("Step", "Agent", "Weight", "Evidence")
    for t in scored.evidence(report.evidence):
        turn = report.trajectory.turns[t]
        grid.add_row(
            str(scored.steps[t]),
            Text(visible(turn.agent, _SEEN)),
            f"{scored.turn_weights[t]:.2f}",
            # no_wrap is set on the text, not on the column, so that this column gives way first
            Text(visible(turn.content, _SEEN) or "(empty)", no_wrap=True, overflow="ellipsis"),
        )
    return grid


def _grid(*columns: str) -> Table:
    """A table without lines whose cells are cut, not wrapped, where the console is narrow."""
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in columns:
        grid.add_column(
            column,
            justify="right" if column in ("Prob", "Weight", "Step") else "left",
            no_wrap=column != "Evidence",
            overflow="ellipsis",
            max_width=_NAME if column in ("Agent", "Fault") else None,
        )
    return grid
