"""Word cues: words and phrases that show what a turn does, counted in its text."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache

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


@lru_cache(maxsize=1 << 16)
def _cues_of(word: str) -> tuple[int, ...]:
    """Positions of the cues that a word shows."""
    return tuple(i for i, pattern in enumerate(_PATTERNS) if pattern.match(word))
