"""Statistics, lexical cues and deviation of each turn: cheap numbers that mean pooling loses.

All are pure numpy and roughly in -3 to 3. Source of the deviation and statistics lists: AFANet
(arXiv 2608.18575); cues that pay on Who&When: numbers, error words, the next turn's errors,
assumptions, code, termination.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from dcl.trajectory import Turn, TurnKind

Floats = NDArray[np.float32]

_STEMS: dict[str, str] = {
    "code": r"def$|import$|return$|print$|assert$",
    "error": r"error|traceback|\w*exception$|fail|unable$|cannot$|can't$|couldn't$|invalid",
    "success": r"correct(?:ly)?$|verified$|confirm|successful|completed?$|accurate",
    "assumption": r"assum|suppos|perhaps$|maybe$|might$|probably$|likely$|hypothe|estimat"
    r"|approximat",
    "check": r"check|verif|test|assert|validat|review|confirm",
    "termination": r"terminat|done$|final$|finish|conclu|stop$|end$",
    "question": r"why$|what$|which$|how$|please$",
    "contrast": r"however$|but$|although$|instead$|actually$|incorrect|wrong$|mistake|contradict"
    r"|inconsisten",
    "vague": r"some(?:thing|how|where)?$|various$|etc$|stuff$|certain$|ambigu|unclear$|depend",
    "list": r"first$|second$|third$|next$|then$|step$|steps$",
    "repeat": r"again$|repeat|re(?:calculat|verif|check|stat|do)|redundan|already$|previous",
    "ignore": r"ignor|disregard|regardless$|irrelevant$|overlook|dismiss|independent",
    "skip": r"skip|unnecessary$|omit|needless|bypass|without$",
    "agree": r"agree|disagree",
    "loop": r"loop|endless|infinit|indefinit|continu|keep$|recurs|iterat|forever$",
    "goal": r"goal|objective|important|consider|context|interest|histor|broader",
    "role": r"role|i$|i'm$|i'll$|my$|you$|your$",
    "json": r"true$|false$|null$",
    "answer": r"answer$|boxed$|result$|solution$",
}
"""Cue to the words that show it, matched from the start of a lower-case word."""
_PHRASES: dict[str, tuple[str, ...]] = {
    "code": ("```",),
    "error": ("not found", "could not", "timed out", "exitcode: 1"),
    "assumption": ("let's say",),
    "termination": ("task_done",),
    "question": ("?",),
    "vague": ("sort of", "kind of", "could be"),
    "list": ("\n- ", "\n* ", "\n1. ", "\n2. ", "\n3. ", "\n4. "),
    "repeat": ("once more", "as before", "as mentioned", "as stated"),
    "ignore": ("my own", "setting aside"),
    "skip": ("no need", "not necessary", "assume correct"),
    "json": ('{"', '": '),
    "answer": ("####",),
}
"""Cue to the phrases that show it, counted in lower-case text."""
CUES: tuple[str, ...] = tuple(_STEMS)
_PATTERNS = tuple(re.compile(pattern) for pattern in _STEMS.values())
_COUNTED = tuple(
    (CUES.index(cue), phrase) for cue, phrases in _PHRASES.items() for phrase in phrases
)
_WORD = re.compile(r"[a-z][a-z']*")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")

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

TEXT_FEATURES: tuple[str, ...] = (*_LAYOUT, *(f"cue_{name}" for name in CUES), *_RELATIONS)
"""Names of the columns of `describe_text`."""
DEVIATION_FEATURES: tuple[str, ...] = _DEVIATION
"""Names of the columns of `describe_vectors`."""
FEATURES: tuple[str, ...] = TEXT_FEATURES + DEVIATION_FEATURES
"""Names of all feature columns, in the order that the model eats."""


@dataclass(frozen=True, slots=True, eq=False)
class TurnText:
    """What the features need of one turn's own text, so that each turn is read once.

    Args:
        chars: Characters.
        words: Words between blanks.
        tokens: Tokens.
        pieces: `(P,)` int32, distinct token ids, ascending.
        digest: Equal for turns of equal tokens.
        cues: `len(CUES)` counts.
        numbers: Numbers at its end, in order of appearance.
        digit_share: Share of digits at its start, 0 to 1.
        line_rate: Line ends a character, 0 to 1.
        is_tool_result: Whether it is what a tool or a terminal gave back.
    """

    chars: int
    words: int
    tokens: int
    pieces: NDArray[np.int32]
    digest: bytes
    cues: tuple[int, ...]
    numbers: tuple[str, ...]
    digit_share: float
    line_rate: float
    is_tool_result: bool


@dataclass(frozen=True, slots=True, eq=False)
class TaskText:
    """What the features need of the task.

    Args:
        numbers: Numbers in it.
        pieces: Token ids in it.
    """

    numbers: frozenset[str]
    pieces: frozenset[int]


def read_text(turn: Turn, tokens: NDArray[np.int32], pieces: NDArray[np.int32]) -> TurnText:
    """Read one turn.

    Args:
        turn: The turn.
        tokens: Its token ids.
        pieces: The distinct ones among them, ascending.
    """
    text = turn.content.lower()
    start = text[:4000]
    return TurnText(
        chars=len(text),
        words=len(text.split()),
        tokens=len(tokens),
        pieces=pieces,
        digest=blake2b(tokens.tobytes(), digest_size=16).digest(),
        cues=tuple(count_cues(text)),
        numbers=tuple(_NUMBER.findall(text[-8000:])),
        digit_share=sum(map(str.isdigit, start)) / max(len(start), 1),
        line_rate=text.count("\n") / (len(text) + 1),
        is_tool_result=turn.kind is TurnKind.TOOL_RESULT or text.startswith("exitcode:"),
    )


def read_task(task: str, tokens: NDArray[np.int32]) -> TaskText:
    """Read the task.

    Args:
        task: Its text.
        tokens: Its token ids.
    """
    return TaskText(frozenset(_NUMBER.findall(task)), frozenset(tokens.tolist()))


def describe_text(
    texts: Sequence[TurnText], task: TaskText, agent_index: NDArray[np.int64]
) -> Floats:
    """Layout, cues and relations of each turn, from its text alone.

    Args:
        texts: What was read of each turn.
        task: What was read of the task.
        agent_index: `(T,)` int64, agent of each turn.

    Returns:
        `(T, len(TEXT_FEATURES))` float32.
    """
    cues = np.array([text.cues for text in texts], dtype=np.float32)
    relations = np.column_stack(
        [
            _relate_cues(cues),
            _relate_numbers(texts, task, agent_index),
            _relate_words(texts, task, agent_index),
        ]
    )
    layout = _describe_layout(texts, agent_index)
    return np.column_stack([layout, np.log1p(cues), relations]).astype(np.float32)


def count_cues(text: str) -> list[int]:
    """How often each cue stands in a text.

    Words are looked up one by one in a table that fills itself: a text has few distinct words, and
    a log repeats them, which makes this some twenty times as fast as searching for every pattern.

    Args:
        text: Lower-case text.

    Returns:
        `len(CUES)` counts, >= 0.
    """
    counts = [0] * len(CUES)
    for word, times in Counter(_WORD.findall(text)).items():
        for cue in _cues_of(word):
            counts[cue] += times
    for cue, phrase in _COUNTED:
        counts[cue] += text.count(phrase)
    return counts


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
    same = agent_index[:, None] == agent_index[None, :]
    earlier = np.tri(count, k=-1, dtype=bool)
    others = ~same
    own_mean = _mean_cosine(cosine, same & ~np.eye(count, dtype=bool))
    own_previous = _last_true(earlier & same)
    rows = np.arange(count)
    return np.column_stack(
        [
            np.where(rows > 0, 1 - cosine[rows, rows - 1], 0),
            np.where(own_previous >= 0, 1 - cosine[rows, own_previous], 0),
            own_mean,
            _mean_cosine(cosine, ~np.eye(count, dtype=bool)),
            _mean_cosine(cosine, others),
            vectors @ task,
            np.where(rows < count - 1, cosine[rows, (rows + 1) % count], 0),
            _max_cosine(cosine, earlier),
            _max_cosine(cosine, others),
            np.bincount(agent_index, weights=own_mean)[agent_index]
            / np.bincount(agent_index)[agent_index],
        ]
    ).astype(np.float32)


@lru_cache(maxsize=1 << 16)
def _cues_of(word: str) -> tuple[int, ...]:
    """Positions of the cues that a word shows."""
    return tuple(i for i, pattern in enumerate(_PATTERNS) if pattern.match(word))


def _describe_layout(texts: Sequence[TurnText], agent_index: NDArray[np.int64]) -> Floats:
    """Position, length and share of talk; columns as in `_LAYOUT`."""
    count, agents = len(texts), int(agent_index.max()) + 1
    turn = np.arange(count)
    chars = np.array([text.chars for text in texts], dtype=np.float64)
    log_chars = np.log1p(chars)
    own_turns = np.bincount(agent_index)
    ordinal = np.zeros(count)
    for a in range(agents):
        own = agent_index == a
        ordinal[own] = np.arange(own.sum())
    own_log = np.bincount(agent_index, weights=log_chars) / own_turns
    own_chars = np.bincount(agent_index, weights=chars)
    size = own_turns[agent_index]
    sizes = np.array([text.tokens for text in texts], dtype=np.float64)
    distinct = np.array([len(text.pieces) for text in texts], dtype=np.float64)
    return np.column_stack(
        [
            turn / max(count - 1, 1),
            np.log1p(turn),
            np.log1p(count - 1 - turn),
            turn == 0,
            turn == count - 1,
            np.log1p(np.full(count, count)),
            np.log1p(np.full(count, agents)),
            agent_index / agents,
            size / count,
            own_chars[agent_index] / max(chars.sum(), 1),
            ordinal / size,
            ordinal == 0,
            ordinal == size - 1,
            np.log1p(size),
            log_chars / 3,
            log_chars - log_chars.mean(),
            log_chars - own_log[agent_index],
            np.minimum(chars / np.maximum([text.words for text in texts], 1) / 6, 10),
            [text.digit_share * 5 for text in texts],
            [text.line_rate * 50 for text in texts],
            [text.is_tool_result for text in texts],
            chars < 40,
            distinct / np.maximum(sizes, 1),
        ]
    ).astype(np.float32)


def _relate_cues(cues: Floats) -> Floats:
    """Errors around each turn, and success that is claimed without any evidence."""
    error, success, check, code = (
        np.minimum(cues[:, CUES.index(name)], 3) for name in ("error", "success", "check", "code")
    )
    return np.column_stack(
        [
            np.append(0, error[:-1]),
            np.append(error[1:], 0),
            (success > 0) & (check == 0) & (code == 0),
        ]
    ).astype(np.float32)


def _relate_numbers(
    texts: Sequence[TurnText], task: TaskText, agent_index: NDArray[np.int64]
) -> Floats:
    """Numbers against the task, the past and the other agents; the last one is the answer."""
    found = [text.numbers for text in texts]
    sets = [set(numbers) for numbers in found]
    seen = set(task.numbers)
    users: dict[str, set[int]] = {}
    for numbers, agent in zip(sets, agent_index, strict=True):
        for number in numbers:
            users.setdefault(number, set()).add(int(agent))
    answers = Counter(
        (int(agent), numbers[-1])
        for numbers, agent in zip(found, agent_index, strict=True)
        if numbers
    )
    by_answer: Counter[str] = Counter()
    answers_of: Counter[int] = Counter()
    for (who, last), times in answers.items():
        by_answer[last] += times
        answers_of[who] += times
    total = sum(by_answer.values())
    rows: list[tuple[float, ...]] = []
    previous: dict[int, str] = {}
    for numbers, ordered, agent in zip(sets, found, agent_index, strict=True):
        size = max(len(numbers), 1)
        answer = ordered[-1] if ordered else None
        own = answers_of[int(agent)]
        agreeing = by_answer[answer] - answers[int(agent), answer] if answer else 0
        rows.append(
            (
                len(numbers & task.numbers) / size,
                len(numbers - seen) / size,
                sum(users[number] == {int(agent)} for number in numbers) / size,
                agreeing / max(total - own, 1),
                answer is not None and previous.get(agent, answer) != answer,
                bool(numbers),
            )
        )
        seen |= numbers
        if answer is not None:
            previous[agent] = answer
    return np.array(rows, dtype=np.float32)


def _relate_words(
    texts: Sequence[TurnText], task: TaskText, agent_index: NDArray[np.int64]
) -> Floats:
    """Share of each turn's words that also stand in the task, the past and the neighbours."""
    sets = [set(text.pieces.tolist()) for text in texts]
    seen: set[int] = set()
    own: dict[int, set[int]] = {}
    digests: set[bytes] = set()
    rows = []
    for t, (words, agent) in enumerate(zip(sets, agent_index, strict=True)):
        size = max(len(words), 1)
        digest = texts[t].digest
        rows.append(
            (
                len(words & task.pieces) / size,
                len(words & sets[t - 1]) / size if t else 0.0,
                len(words & own.get(int(agent), set())) / size,
                len(words & seen) / size,
                len(words & sets[t + 1]) / size if t + 1 < len(sets) else 0.0,
                digest in digests,
            )
        )
        seen |= words
        own[int(agent)] = words
        digests.add(digest)
    return np.array(rows, dtype=np.float32)


def _mean_cosine(cosine: Floats, mask: NDArray[np.bool_]) -> Floats:
    """One minus the mean cosine to the masked turns, 0 where there are none; `(T,)`."""
    size = mask.sum(axis=1)
    mean = (cosine * mask).sum(axis=1) / np.maximum(size, 1)
    return np.where(size > 0, 1 - mean, 0).astype(np.float32)


def _max_cosine(cosine: Floats, mask: NDArray[np.bool_]) -> Floats:
    """Largest cosine to the masked turns, 0 where there are none; `(T,)`."""
    best = np.where(mask, cosine, -2.0).max(axis=1)
    return np.where(best > -2, best, 0).astype(np.float32)


def _last_true(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Position of the last true entry of each row, -1 where there is none; `(T,)`."""
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
    return np.where(mask.any(axis=1), last, -1)
