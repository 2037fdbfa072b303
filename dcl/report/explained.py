"""Explanations as plain lines for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dcl.explanation import Explanation
from dcl.report import Report
from dcl.report.output import visible

_TEXT = 160  # characters of a turn or a sentence that are shown


def explain_lines(report: Report, explanations: Sequence[Explanation]) -> Iterator[str]:
    """What speaks for each finding, one thought a line.

    Args:
        report: The run.
        explanations: Of its findings.
    """
    run = report.trajectory
    yield f"{visible(run.id)}  {visible(report.source)}"
    if not explanations:
        yield "  No fault declared: nobody is over the threshold."
    for one in explanations:
        fault = one.finding.fault
        mode = "mode unclear" if fault.mode is None else f"{fault.mode.value} {fault.mode.title}"
        yield f"  {visible(fault.agent)}, {mode}, at step {fault.step} ({one.finding.prob:.2f})"
        content = visible(run.turns[one.finding.turn].content, _TEXT) or "(empty)"
        yield f"    turn: {content}"
        if one.words:
            words = (f"{visible(w.text)} {w.weight:+.3f}" for w in one.words)
            yield f"    words that weigh most: {', '.join(words)}"
        if one.signs:
            signs = (
                f"{'high' if sign.high else 'low'} {sign.column} {sign.weight:+.2f}"
                for sign in one.signs
            )
            yield f"    what sets it apart: {', '.join(signs)}"
        for sentence in one.sentences:
            shown = visible(sentence.text, _TEXT)
            yield f"    without this the probability changes by {-sentence.fall:+.3f}: {shown}"
        if one.neighbour is not None:
            near = one.neighbour
            said = "no mode" if near.fault.mode is None else near.fault.mode.value
            yield (
                f"    most like ({near.similarity:.2f}): {visible(near.run)}, "
                f"{visible(near.fault.agent)}, {said}: {visible(near.text, _TEXT)}"
            )
        hops = (
            f"{visible(hop.agent)} at step {hop.step}" + (f" ({hop.verb})" if hop.verb else "")
            for hop in one.path
        )
        yield f"    from source to symptom: {' -> '.join(hops)}"


def explain_record(report: Report, explanations: Sequence[Explanation]) -> dict[str, Any]:
    """One JSON object a run, as `docs/output.md` describes it.

    Args:
        report: The run.
        explanations: Of its findings.
    """
    return {
        "id": report.trajectory.id,
        "source": report.source,
        "findings": [one.to_dict() for one in explanations],
    }
