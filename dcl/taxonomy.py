"""The 14 error modes of MAST, in the wording of the prompts that labelled the AEGIS data."""

from __future__ import annotations

import re
from enum import Enum

_CODE = re.compile(r"^(?:FM|EM)?[-_ ]?([123])[.]([1-6])$", re.IGNORECASE)


class ErrorMode(Enum):
    """One way in which an agent can fail; the value is the code, such as `FM-2.4`.

    Source: MAST (arXiv 2503.13657) for the codes; Aegis (arXiv 2509.14295), table 2, for the
    titles, which differ from the conflicting list in its `unified_schema.json`.
    """

    title: str
    """Name of the mode in a few words."""
    definition: str
    """What the agent does when it fails this way, in one sentence."""

    def __new__(cls, code: str, title: str, definition: str) -> ErrorMode:
        """Make a member whose value is its code."""
        member = object.__new__(cls)
        member._value_ = code
        member.title = title
        member.definition = definition
        return member

    FM_1_1 = (
        "FM-1.1",
        "Task specification deviation",
        "The agent breaks a requirement or constraint of the task, such as the language, the "
        "output format or a condition that the result must meet.",
    )
    FM_1_2 = (
        "FM-1.2",
        "Role specification deviation",
        "The agent leaves its own role and does the work, or takes the decisions, of another.",
    )
    FM_1_3 = (
        "FM-1.3",
        "Add redundant steps",
        "The agent adds steps that nobody needs: a duplicate import, a second derivation of a "
        "known value, a detour that changes nothing.",
    )
    FM_1_4 = (
        "FM-1.4",
        "Remove conversation history",
        "The agent ignores or loses what was said before and answers as if it had not been said.",
    )
    FM_1_5 = (
        "FM-1.5",
        "Remove termination conditions",
        "The agent drops the condition under which the work ends: a recursion without a base "
        "case, a loop without an exit, a discussion that never closes.",
    )
    FM_2_1 = (
        "FM-2.1",
        "Repeat handled tasks",
        "The agent does again what was already done and settled.",
    )
    FM_2_2 = (
        "FM-2.2",
        "Make request ambiguous",
        "The agent hands over a request so vague or so open that it can be read in several ways.",
    )
    FM_2_3 = (
        "FM-2.3",
        "Deviate from main goal",
        "The agent turns to a side issue and loses sight of what was asked.",
    )
    FM_2_4 = (
        "FM-2.4",
        "Hide important information",
        "The agent knows something that the others need and does not pass it on.",
    )
    FM_2_5 = (
        "FM-2.5",
        "Ignore other agents",
        "The agent disregards corrections, questions or results of the other agents.",
    )
    FM_2_6 = (
        "FM-2.6",
        "Inconsistent reasoning",
        "The agent's reasoning contradicts itself or the action or answer that follows from it.",
    )
    FM_3_1 = (
        "FM-3.1",
        "Premature termination",
        "The agent ends the work before the goal is reached or the needed facts are there.",
    )
    FM_3_2 = (
        "FM-3.2",
        "Remove verification steps",
        "The agent leaves out the check or test that the result needs.",
    )
    FM_3_3 = (
        "FM-3.3",
        "Incorrect verification",
        "The agent checks the result and approves what is wrong or rejects what is right.",
    )

    @property
    def group(self) -> str:
        """Name of the MAST group: specification, inter-agent misalignment or verification."""
        return {
            "1": "Specification issues",
            "2": "Inter-agent misalignment",
            "3": "Task verification",
        }[self.value[3]]

    @property
    def index(self) -> int:
        """Position in the fixed order of all score vectors, 0 to 13."""
        return MODES.index(self)

    @classmethod
    def parse(cls, text: str) -> ErrorMode:
        """Read a code in any published spelling: `FM-2.4`, `EM-2.4`, `fm_2.4`, `2.4`.

        Raises:
            ValueError: If the text is none of the 14 codes.
        """
        match = _CODE.match(text.strip())
        mode = _BY_CODE.get(f"FM-{match[1]}.{match[2]}") if match else None
        if mode is None:
            raise ValueError(f"expected one of the 14 codes FM-1.1 to FM-3.3, got {text!r}")
        return mode


MODES: tuple[ErrorMode, ...] = tuple(ErrorMode)
"""The fixed order of the modes in every array of `M` = 14 entries."""

_BY_CODE = {mode.value: mode for mode in MODES}
