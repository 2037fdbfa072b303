"""Trajectory to bag: all that the scorers eat, as arrays without text.

Letters: `T` turns, `A` agents, `N` counted n-grams, `F` features.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dcl.errors import TraceError
from dcl.features import describe_text
from dcl.lexical import Words, count_words
from dcl.trajectory import Trajectory

MOST_TURNS = 4000
"""Turns of the longest run that is attributed: memory grows with their square, to 3 GB here."""


@dataclass(frozen=True, slots=True, eq=False)
class Bag:
    """One trajectory as arrays; a turn is an instance of the bag.

    Args:
        agents: Names in order of first appearance, `A` of them; the model never sees them.
        agent_index: `(T,)` int64, agent of each turn.
        reply_to: `(T,)` int64, the earlier turn that this one answers, -1 where there is none.
        windows: Token ids of each turn as the encoder reads it, each `(L,)` int32.
        task: Token ids of the task as the encoder reads it, `(L,)` int32.
        words: Counted n-grams of the whole turns.
        features: `(T, len(TEXT_FEATURES))` float32.
    """

    agents: tuple[str, ...]
    agent_index: NDArray[np.int64]
    reply_to: NDArray[np.int64]
    windows: tuple[NDArray[np.int32], ...]
    task: NDArray[np.int32]
    words: Words
    features: NDArray[np.float32]


class BagMaker:
    """Makes bags with one tokenizer; safe to share between threads.

    Args:
        tokenizer: Word pieces with `[CLS]` and `[SEP]`.
        head: Tokens kept from the start of a long turn; > 0.
        tail: Tokens kept from its end; >= 0. A turn of up to `head + tail` tokens is kept whole.
    """

    def __init__(self, tokenizer: Tokenizer, *, head: int, tail: int) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.head = head
        self.tail = tail
        self._tokenizer = tokenizer
        self.vocabulary: int = tokenizer.get_vocab_size()
        self._start, self._end = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))

    def __call__(self, trajectory: Trajectory) -> Bag:
        """Make the bag of one trajectory; any text is fine, also an empty one.

        Args:
            trajectory: The run.

        Raises:
            TraceError: If it has more than `MOST_TURNS` turns.
        """
        check_length(trajectory)
        agents = trajectory.agents
        position = {agent: a for a, agent in enumerate(agents)}
        agent_index = np.array([position[turn.agent] for turn in trajectory.turns], dtype=np.int64)
        *tokens, task = self.tokenize(
            [*(turn.content for turn in trajectory.turns), trajectory.task]
        )
        return Bag(
            agents=agents,
            agent_index=agent_index,
            reply_to=find_replies(trajectory, agent_index),
            windows=tuple(self.window(ids) for ids in tokens),
            task=self.window(task),
            words=count_words(tokens, self.vocabulary),
            features=describe_text(trajectory, agent_index, tokens, task),
        )

    def tokenize(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Token ids of whole texts without special tokens.

        Lone surrogates, which logs cut inside an emoji hold, become question marks.

        Args:
            texts: Any texts, also empty ones.

        Returns:
            One `(n,)` int32 a text, n >= 0.
        """
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        encodings = self._tokenizer.encode_batch_fast(clean, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def window(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """What the encoder reads of a turn: its head and tail between `[CLS]` and `[SEP]`."""
        if len(ids) > self.head + self.tail:
            ids = np.concatenate([ids[: self.head], ids[len(ids) - self.tail :]])
        return np.concatenate([[self._start], ids, [self._end]]).astype(np.int32)


def check_length(trajectory: Trajectory) -> None:
    """Check that a run is short enough to be attributed.

    Args:
        trajectory: The run.

    Raises:
        TraceError: If it has more than `MOST_TURNS` turns.
    """
    count = len(trajectory.turns)
    if count > MOST_TURNS:
        raise TraceError(
            f"trace {trajectory.id}",
            f"expected at most {MOST_TURNS} turns, got {count}; cut the log, as memory grows with "
            "the square of the turns",
        )


def find_replies(trajectory: Trajectory, agent_index: NDArray[np.int64]) -> NDArray[np.int64]:
    """The turn that each turn answers: the last one of an agent it names, or of any other agent.

    Names count as whole words only, so that `Agent1` is not found in `Agent12`.

    Returns:
        `(T,)` int64, -1 where no other agent spoke before.
    """
    names = trajectory.agents
    pattern = re.compile(
        r"(?<!\w)("
        + "|".join(re.escape(n) for n in sorted(names, key=len, reverse=True))
        + r")(?!\w)"
    )
    position = {agent: a for a, agent in enumerate(names)}
    replies = np.full(len(agent_index), -1, dtype=np.int64)
    last = np.full(len(names), -1, dtype=np.int64)
    for t, turn in enumerate(trajectory.turns):
        earlier = last.copy()
        earlier[agent_index[t]] = -1
        named = {position[name] for name in pattern.findall(turn.content)}
        replies[t] = max((earlier[a] for a in named), default=-1)
        if replies[t] < 0:
            replies[t] = earlier.max()
        last[agent_index[t]] = t
    return replies
