"""Splits by question: the questions of a data set recur, so records must not be split."""

from __future__ import annotations

import hashlib
from typing import Literal

from dcl.trajectory import Example

Split = Literal["train", "valid", "test", "left_out"]
"""`left_out` holds whole frameworks that nothing is learnt from; a question alone never goes there.
"""


def group_of(example: Example) -> str:
    """What must not straddle a split: the question of an example.

    A data set's own `question_hash` where there is one, otherwise the text of the task, otherwise
    the id.
    """
    trajectory = example.trajectory
    group = trajectory.metadata.get("question_hash") or " ".join(trajectory.task.lower().split())
    return str(group or trajectory.id)


def hash_question(text: str) -> str:
    """The `question_hash` of a question, as AEGIS has it: 12 hex digits of the MD5 of the text.

    Whoever notes it with a run keeps the run in the split that the question has in AEGIS.

    Args:
        text: The question as published; blanks around it do not count.
    """
    digest = hashlib.md5(text.strip().encode("utf-8", "replace"), usedforsecurity=False)
    return digest.hexdigest()[:12]


def split_of(group: str, *, valid: float = 0.08, test: float = 0.08) -> Split:
    """The split a question belongs to, the same on every machine and for ever.

    Args:
        group: Question, as `group_of` gives it.
        valid: Share of questions for selection, thresholds and temperatures, 0 to 1.
        test: Share of questions that are only reported, 0 to 1.

    Returns:
        `train`, `valid` or `test`.
    """
    place = _place(group, "split")
    if place < test:
        return "test"
    return "valid" if place < test + valid else "train"


def fold_of(group: str, folds: int) -> int:
    """Fold of a question in cross-fitting, independent of its split.

    Args:
        group: Question, as `group_of` gives it.
        folds: Number of folds; > 0.

    Returns:
        0 to `folds - 1`.
    """
    return int(_place(group, "fold") * folds)


def _place(group: str, purpose: str) -> float:
    """A number from 0 to 1 that the question alone decides."""
    text = f"{purpose}:{group}".encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64
