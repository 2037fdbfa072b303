"""Layout, cues and relations of the turns of a run that grows, from their text alone.

A turn is read once, when it is added. What depends on the turns before it is known from then on;
what depends on all turns, such as positions and shares, is made anew for each description.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from dcl.cues import CUES, count_cues
from dcl.features import TEXT_FEATURES, Floats
from dcl.growing import Growing
from dcl.trajectory import Turn, TurnKind

Pieces = NDArray[np.int32]
"""Distinct token ids, ascending."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_AT = {name: i for i, name in enumerate(TEXT_FEATURES)}
_CUES = slice(_AT[f"cue_{CUES[0]}"], _AT[f"cue_{CUES[-1]}"] + 1)
_ERROR, _SUCCESS, _CHECK, _CODE = map(CUES.index, ("error", "success", "check", "code"))
_SEVERAL = -1  # in place of the one agent who used a number


class RunText:
    """Text features of one run. Not safe to share between threads.

    Args:
        task: What the system was asked to do.
        tokens: Its token ids.
    """

    def __init__(self, task: str, tokens: NDArray[np.int32]) -> None:
        self._known = Growing(np.float32, len(TEXT_FEATURES))  # the rest is 0
        self._chars = Growing(np.float64)
        self._log_chars = Growing(np.float64)
        self._before = Growing(np.float64)  # turns of the same agent before each turn
        self._own_turns: Counter[int] = Counter()
        self._errors = 0  # in the last turn
        self._numbers = _Numbers(frozenset(_NUMBER.findall(task)))
        self._words = _Words(np.unique(tokens))

    def add(self, turn: Turn, agent: int, tokens: NDArray[np.int32], pieces: Pieces) -> None:
        """Read the next turn.

        Args:
            turn: The turn.
            agent: Position of its agent in order of first appearance.
            tokens: Its token ids.
            pieces: The distinct ones among them.
        """
        text = turn.content.lower()
        row = np.zeros(len(TEXT_FEATURES), dtype=np.float32)
        row[_AT["is_tool_result"]] = turn.kind is TurnKind.TOOL_RESULT or text.startswith(
            "exitcode:"
        )
        row[_AT["distinct_words"]] = len(pieces) / max(len(tokens), 1)
        earlier = self._known.rows
        self._measure(row, text)
        self._place(row, agent)
        self._count_cues(row, earlier, text)
        self._numbers.add(row, earlier, agent, _NUMBER.findall(text[-8000:]))
        self._words.add(row, earlier, agent, tokens, pieces)
        self._known.append(row)

    def describe(self, agent_index: NDArray[np.int64]) -> Floats:
        """Features of all turns so far, at least one.

        Args:
            agent_index: `(T,)` int64, agent of each turn, as it was added.

        Returns:
            `(T, len(TEXT_FEATURES))` float32.
        """
        out = self._known.rows.copy()
        for name, column in self._share(agent_index).items():
            out[:, _AT[name]] = column
        out[-1, _AT["is_last"]] = 1
        self._numbers.agree(out)
        return out

    def _measure(self, row: Floats, text: str) -> None:
        """Size and make of a turn."""
        chars, start = len(text), text[:4000]
        digits = (
            sum(map(start.count, "0123456789")) if start.isascii() else sum(map(str.isdigit, start))
        )
        log_chars = math.log1p(chars)
        row[_AT["log_chars"]] = log_chars / 3
        row[_AT["word_length"]] = min(chars / max(len(text.split()), 1) / 6, 10)
        row[_AT["digit_share"]] = digits / max(len(start), 1) * 5
        row[_AT["line_rate"]] = text.count("\n") / (chars + 1) * 50
        row[_AT["is_short"]] = chars < 40
        self._chars.append(chars)
        self._log_chars.append(log_chars)

    def _place(self, row: Floats, agent: int) -> None:
        """Place of a turn among those before it."""
        before = self._own_turns[agent]
        row[_AT["log_turn"]] = math.log1p(len(self._known))
        row[_AT["is_first"]] = len(self._known) == 0
        row[_AT["is_own_first"]] = before == 0
        self._before.append(before)
        self._own_turns[agent] += 1

    def _count_cues(self, row: Floats, earlier: Floats, text: str) -> None:
        """Cues, errors around a turn, and success that is claimed without any evidence."""
        cues = count_cues(text)
        row[_CUES] = np.log1p(cues)
        errors = min(cues[_ERROR], 3)
        row[_AT["error_before"]] = self._errors
        earlier[-1:, _AT["error_after"]] = errors
        row[_AT["claim_without_evidence"]] = cues[_SUCCESS] > 0 and not (
            cues[_CHECK] or cues[_CODE]
        )
        self._errors = errors

    def _share(self, agent: NDArray[np.int64]) -> dict[str, NDArray[np.float64] | float]:
        """Columns that every new turn changes: positions and shares."""
        chars, log_chars, before = self._chars.rows, self._log_chars.rows, self._before.rows
        count, turn = len(agent), np.arange(len(agent))
        own_turns = np.bincount(agent)
        size = own_turns[agent]
        own_log = np.bincount(agent, weights=log_chars) / own_turns
        return {
            "position": turn / max(count - 1, 1),
            "log_turns_left": np.log1p(count - 1 - turn),
            "log_turns": math.log1p(count),
            "log_agents": math.log1p(len(own_turns)),
            "agent_order": agent / len(own_turns),
            "turn_share": size / count,
            "char_share": np.bincount(agent, weights=chars)[agent] / max(chars.sum(), 1),
            "own_position": before / size,
            "is_own_last": before == size - 1,
            "log_own_turns": np.log1p(size),
            "length_in_trace": log_chars - log_chars.mean(),
            "length_in_own": log_chars - own_log[agent],
        }


class _Numbers:
    """Numbers against the task, the past and the other agents; the last of a turn is its answer."""

    def __init__(self, task: frozenset[str]) -> None:
        self._task = task
        self._seen = set(task)
        self._user: dict[str, int] = {}
        self._turns: dict[str, list[int]] = {}  # those of numbers with one user
        self._alone: list[int] = []  # numbers of each turn that nobody else used
        self._size: list[int] = []  # distinct numbers of each turn, at least 1
        self._answers: list[tuple[int, int, str]] = []  # turn, agent, answer
        self._times: Counter[object] = Counter()  # of an answer, an agent, and both
        self._last: dict[int, str] = {}

    def add(self, row: Floats, earlier: Floats, agent: int, ordered: Sequence[str]) -> None:
        """Relate the next turn to what is known, and what is known to it."""
        numbers = set(ordered)
        size = max(len(numbers), 1)
        self._alone.append(sum(self._use(number, agent, earlier) for number in numbers))
        self._size.append(size)
        row[_AT["numbers_in_task"]] = len(numbers & self._task) / size
        row[_AT["numbers_new"]] = len(numbers - self._seen) / size
        row[_AT["numbers_alone"]] = self._alone[-1] / size
        row[_AT["has_numbers"]] = bool(numbers)
        self._seen |= numbers
        if ordered:
            answer = ordered[-1]
            row[_AT["answer_changed"]] = self._last.get(agent, answer) != answer
            self._last[agent] = answer
            self._answers.append((len(earlier), agent, answer))
            self._times.update((answer, agent, (agent, answer)))

    def _use(self, number: str, agent: int, earlier: Floats) -> bool:
        """Note that the next turn uses a number; whether nobody else did before."""
        user = self._user.setdefault(number, agent)
        if user == agent:
            self._turns.setdefault(number, []).append(len(earlier))
            return True
        for turn in self._turns.pop(number, ()):
            self._alone[turn] -= 1
            earlier[turn, _AT["numbers_alone"]] = self._alone[turn] / self._size[turn]
        self._user[number] = _SEVERAL
        return False

    def agree(self, out: Floats) -> None:
        """Of the turns of others that end in a number, the share that ends in that of each turn."""
        times, total = self._times, len(self._answers)
        for turn, agent, answer in self._answers:
            agreeing = times[answer] - times[agent, answer]
            out[turn, _AT["answer_agreement"]] = agreeing / max(total - times[agent], 1)


class _Words:
    """Words of each turn that also stand in the task, the past and the neighbours."""

    def __init__(self, task: Pieces) -> None:
        nothing = np.zeros(0, dtype=np.int32)
        self._task = task
        self._seen: Pieces = nothing
        self._last: Pieces = nothing
        self._own: dict[int, Pieces] = {}  # last turn of each agent
        self._digests: set[bytes] = set()

    def add(
        self, row: Floats, earlier: Floats, agent: int, tokens: NDArray[np.int32], pieces: Pieces
    ) -> None:
        """Relate the next turn to what is known, and the last turn to it."""
        size = max(len(pieces), 1)
        common = count_common(pieces, self._last)
        own = self._own.get(agent)
        row[_AT["words_in_task"]] = count_common(pieces, self._task) / size
        row[_AT["words_in_previous"]] = common / size
        row[_AT["words_in_own_previous"]] = 0 if own is None else count_common(pieces, own) / size
        row[_AT["words_seen"]] = count_common(pieces, self._seen) / size
        earlier[-1:, _AT["words_in_next"]] = common / max(len(self._last), 1)
        digest = blake2b(tokens.tobytes(), digest_size=16).digest()
        row[_AT["is_repeat"]] = digest in self._digests
        self._digests.add(digest)
        self._seen = _unite(self._seen, pieces)
        self._last = self._own[agent] = pieces


def _unite(some: Pieces, more: Pieces) -> Pieces:
    """All ids of two sets; `numpy.union1d` takes ten times as long on sets of this size."""
    both = np.concatenate([some, more])
    both.sort(kind="stable")
    return both[np.append(True, both[1:] != both[:-1])] if len(both) else both


def count_common(few: Pieces, many: Pieces) -> int:
    """How many entries two sets have in common.

    Args:
        few: Distinct ids.
        many: Distinct ids, ascending.
    """
    if not len(many):
        return 0
    return int(np.count_nonzero(many.take(np.searchsorted(many, few), mode="clip") == few))
