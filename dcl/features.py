"""Statistics, lexical cues and deviation of each turn: cheap numbers that mean pooling loses.

All are pure numpy and roughly in -3 to 3. Those of the text are made in `dcl.runtext`. Source of
the deviation and statistics lists: AFANet (arXiv 2608.18575); cues that pay on Who&When: numbers,
error words, the next turn's errors, assumptions, code, termination.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dcl.cues import CUES

Floats = NDArray[np.float32]

_NOTHING = np.float32(-2)  # a cosine that there is none of

_LAYOUT = (
    "position", "log_turn", "log_turns_left", "is_first", "is_last", "log_turns", "log_agents",
    "agent_order", "turn_share", "char_share", "own_position", "is_own_first", "is_own_last",
    "log_own_turns", "log_chars", "length_in_trace", "length_in_own", "word_length", "digit_share",
    "line_rate", "is_tool_result", "is_short", "distinct_words",
)  # fmt: skip
_RELATIONS = (
    "error_before", "error_after", "claim_without_evidence", "numbers_in_task", "numbers_new",
    "numbers_alone", "answer_agreement", "answer_changed", "has_numbers", "words_in_task",
    "words_in_previous", "words_in_own_previous", "words_seen", "words_in_next", "is_repeat",
)  # fmt: skip
_DEVIATION = (
    "from_previous", "from_own_previous", "from_own_mean", "from_trace_mean", "from_others_mean",
    "to_task", "to_next", "to_nearest_earlier", "to_nearest_other", "own_spread",
)  # fmt: skip

_CUES = tuple(f"cue_{name}" for name in CUES)

TEXT_FEATURES: tuple[str, ...] = (*_LAYOUT, *_CUES, *_RELATIONS)
"""Names of the columns of `dcl.runtext.RunText.describe`."""
DEVIATION_FEATURES: tuple[str, ...] = _DEVIATION
"""Names of the columns of `describe_vectors`."""
FEATURES: tuple[str, ...] = TEXT_FEATURES + DEVIATION_FEATURES
"""Names of all feature columns, in the order that the model eats."""
FEATURE_GROUPS: dict[str, tuple[str, ...]] = {
    "layout": _LAYOUT,
    "cues": _CUES,
    "relations": _RELATIONS,
    "deviation": _DEVIATION,
}
"""The same columns by what they are about."""


def describe_vectors(vectors: Floats, task: Floats, agent_index: NDArray[np.int64]) -> Floats:
    """How far each turn departs from what surrounds it, in cosine of turn vectors.

    Args:
        vectors: `(T, D)` float32, unit norm.
        task: `(D,)` float32, unit norm, vector of the task.
        agent_index: `(T,)` int64, agent of each turn.

    Returns:
        `(T, len(DEVIATION_FEATURES))` float32: distances 0 to 2, cosines -1 to 1, and 0 where there
        is nothing to compare.

    Source: AFANet (arXiv 2608.18575), deviation features.
    """
    count = len(vectors)
    cosine = vectors @ vectors.T  # (T, T)
    own = agent_index[:, None] == agent_index  # (T, T)
    turns = np.bincount(agent_index)[agent_index]  # of each turn's agent, (T,)
    to_itself = cosine.diagonal()
    to_all = cosine.sum(axis=1)
    to_own = (cosine * own).sum(axis=1)
    own_mean = _far(to_own - to_itself, turns - 1)
    now, before = _pair_own(agent_index)
    out = np.zeros((count, len(DEVIATION_FEATURES)), dtype=np.float32)
    out[1:, 0] = 1 - cosine.diagonal(-1)
    out[now, 1] = 1 - cosine[now, before]
    out[:, 2] = own_mean
    out[:, 3] = _far(to_all - to_itself, count - 1)
    out[:, 4] = _far(to_all - to_own, count - turns)
    out[:, 5] = vectors @ task
    out[:-1, 6] = cosine.diagonal(1)
    out[:, 7] = _near(np.where(np.tri(count, k=-1, dtype=bool), cosine, _NOTHING))
    out[:, 8] = _near(np.where(own, _NOTHING, cosine))
    out[:, 9] = np.bincount(agent_index, weights=own_mean)[agent_index] / turns
    return out


def _pair_own(agent_index: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Every turn whose agent spoke before, and the last turn of that agent before it."""
    order = np.argsort(agent_index, kind="stable")
    again = np.diff(agent_index[order]) == 0
    return order[1:][again], order[:-1][again]


def _far(total: Floats, size: NDArray[np.int64] | int) -> Floats:
    """One minus a mean cosine, from sum and number; 0 of nothing."""
    return np.where(size > 0, 1 - total / np.maximum(size, 1), 0).astype(np.float32)


def _near(cosine: Floats) -> Floats:
    """Largest cosine of each row, 0 where there is none; `(T,)`."""
    best = cosine.max(axis=1)
    return np.where(best > _NOTHING, best, 0)
