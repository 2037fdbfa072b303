"""Experts in one conversation, and a terminal that runs the code they write.

Source: Song et al., Adaptive In-conversation Team Building for Language Model Agents (CaptainAgent,
arXiv 2405.19425): a team is picked for the task from a library, all of it talks in one group chat,
code blocks are run by a terminal whose output everybody reads, and the chat ends when an expert
says so. Here the library is picked from by words of the task, and experts speak in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from injection.anatomy import stated_answer
from injection.checkers import find_code
from injection.sandbox import Limits, run_tests
from injection.session import OUTSIDE, Brief, Said, Session

Terminal = Callable[[str], tuple[bool, str]]
"""Runs Python; whether it ran to its end, and what it printed or why it did not."""

END = "TERMINATE"
TERMINAL = "Computer_terminal"

_DISCUSS = (
    "You are one of several experts ({team}) who solve the task in one conversation. Add what is "
    "missing next: a plan, one numbered step a line; Python in one fenced block, which the "
    "terminal runs; or a check of what is there. Once the result is verified, end with a line "
    f"`Answer: ...` and the word {END}; if the task asks for a function, give it whole in one "
    "fenced block and the word."
)
_LIBRARY = (
    ("def ", ("PythonProgramming_Expert", "AlgorithmDesign_Expert", "CodeReview_Expert")),
    ("table", ("DataRetrieval_Expert", "Geography_Expert", "FactVerification_Expert")),
    ("letter", ("Linguistics_Expert", "PythonScripting_Expert", "Verification_Expert")),
    ("spelled", ("Linguistics_Expert", "PythonScripting_Expert", "Verification_Expert")),
    (" m/s", ("Physics_Expert", "NumericalComputation_Expert", "UnitVerification_Expert")),
    ("$", ("Algebra_Expert", "SymbolicComputation_Expert", "ProofVerification_Expert")),
    ("", ("Arithmetic_Expert", "DataAnalysis_Expert", "Validation_Expert")),
)


@lru_cache(maxsize=4096)
def run_code(code: str) -> tuple[bool, str]:
    """Run Python in the sandbox; equal code is run once."""
    done = run_tests(code, Limits(seconds=5))
    return done.passed, done.output if done.passed else done.problem


@dataclass(frozen=True, slots=True)
class Experts:
    """A group of experts with a terminal.

    Args:
        turns: Most turns of experts; > 0.
        terminal: Runs code blocks.
    """

    turns: int = 8
    terminal: Terminal = field(default=run_code)
    name: str = "experts"

    def __call__(self, session: Session, task: str) -> str:
        """Solve a task."""
        team = next(names for words, names in _LIBRARY if words in task)
        request = _DISCUSS.format(team=", ".join(team))
        history: tuple[Said, ...] = ()
        for turn in range(self.turns):
            expert = team[turn % len(team)]
            brief = Brief(task, history, request)
            text = session.ask(expert, brief, role="expert", phase="discuss")
            history = (*history, Said(expert, text))
            if END in text:
                break
            if code := find_code(text):
                passed, output = self.terminal(code)
                status = "0 (execution succeeded)" if passed else "1 (execution failed)"
                result = f"exitcode: {status}\nCode output:\n{output}"
                session.note(TERMINAL, result, role="terminal", phase="discuss")
                history = (*history, Said(TERMINAL, result))
        said = [s.text for s in history if s.agent not in OUTSIDE and stated_answer(s.text)]
        return said[-1] if said else history[-1].text
