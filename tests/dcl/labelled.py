"""Small labelled runs that tests of fits share."""

from __future__ import annotations

from dcl.trajectory import Example, Fault, Trajectory, Turn

TASKS = ("add {} pears", "what is the height of tower {}", "translate page {} of the book")


def make_example(number: int, *, step: int = 1) -> Example:
    """The coder guesses and is wrong, always at the same place."""
    said = [("planner", "Plan the work."), ("coder", f"I guess it is {number}."), ("boss", "Done.")]
    turns = tuple(Turn(agent, text) for agent, text in said)
    task = TASKS[number % 3].format(f"{number} {number * 7 + 100}")
    run = Trajectory(f"run-{number}", task, turns, metadata={"question_hash": f"q{number}"})
    return Example(run, (Fault(run.turns[step].agent, None, step),))
