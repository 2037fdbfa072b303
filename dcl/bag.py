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
from dcl.growing import Growing
from dcl.lexical import RunWords, Words, count_turn
from dcl.runtext import RunText
from dcl.tokens import Tokens
from dcl.trajectory import Trajectory, Turn

MOST_TURNS = 4000
"""Turns of the longest run that is attributed: memory grows with their square, to 3.6 GB here."""


@dataclass(frozen=True, slots=True, eq=False)
class Bag:
    """One trajectory as arrays; a turn is an instance of the bag.

    Args:
        agents: Names in order of first appearance, `A` of them; the model never sees them.
        acting: `(A,)` bool, false for bystanders, as `Trajectory.bystanders` has them.
        agent_index: `(T,)` int64, agent of each turn.
        reply_to: `(T,)` int64, the earlier turn that this one answers, -1 where there is none.
        windows: Token ids of each turn as the encoder reads it, each `(L,)` int32.
        task: Token ids of the task as the encoder reads it, `(L,)` int32.
        words: Counted n-grams of the whole turns.
        features: `(T, len(TEXT_FEATURES))` float32.
    """

    agents: tuple[str, ...]
    acting: NDArray[np.bool_]
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
        self.head = head
        self.tail = tail
        self._tokenizer = tokenizer
        self._tokens = Tokens(tokenizer)
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
        draft = self.start(trajectory.task)
        draft.extend(trajectory.turns)
        return draft.bag()

    def start(self, task: str) -> Draft:
        """An empty bag to which turns are added as they happen.

        Args:
            task: What the system was asked to do; may be empty.
        """
        return Draft(self, task)

    def tokenize(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Token ids of whole texts without special tokens, as `dcl.tokens.Tokens` gives them.

        Args:
            texts: Any texts, also empty ones.

        Returns:
            One `(n,)` int32 a text, n >= 0.
        """
        return self._tokens(texts)

    def locate(self, text: str) -> tuple[NDArray[np.int32], list[tuple[int, int]]]:
        """Token ids of a text, as `tokenize` gives them, and the characters of each.

        Args:
            text: Any text.

        Returns:
            `(n,)` int32, and `n` pairs of first character and the one after the last.
        """
        clean = text.encode("utf-8", "replace").decode("utf-8")
        encoding = self._tokenizer.encode(clean, add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32), list(encoding.offsets)

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


class Draft:
    """A bag that grows: every turn is read once, when it is added.

    What depends on other turns, such as positions and shares, is made anew by `bag` from what was
    read; that is cheap next to the reading. Not safe to share between threads.

    Attributes:
        turns: What was added.
        windows: Token ids of each turn as the encoder reads it.
        task: Token ids of the task as the encoder reads it.
        nbytes: Memory of its texts and arrays, roughly.

    Args:
        maker: Reads the turns.
        task: What the system was asked to do.
    """

    def __init__(self, maker: BagMaker, task: str) -> None:
        self.turns: list[Turn] = []
        self.windows: list[NDArray[np.int32]] = []
        self._maker = maker
        (tokens,) = maker.tokenize([task])
        self.task = maker.window(tokens)
        self._text = RunText(task, tokens)
        self._words = RunWords()
        self._agents: dict[str, int] = {}
        self._acting: set[int] = set()
        self._index = Growing(np.int64)
        self._replies = Replies(())
        self.nbytes = 0

    def extend(self, turns: Sequence[Turn]) -> None:
        """Add turns.

        Args:
            turns: In time order; any text is fine, also an empty one.
        """
        vocabulary = self._maker.vocabulary
        for turn, ids in zip(turns, self._maker.tokenize([t.content for t in turns]), strict=True):
            words = count_turn(ids, vocabulary)
            pieces = words[0][: np.searchsorted(words[0], vocabulary)]
            agent = self._agents.setdefault(turn.agent, len(self._agents))
            self._text.add(turn, agent, ids, pieces)
            self._words.add(len(self.turns), agent, words)
            self._index.append(agent)
            if not turn.is_outside:
                self._acting.add(agent)
            self.turns.append(turn)
            self.windows.append(self._maker.window(ids))
            self.nbytes += len(turn.content) + self.windows[-1].nbytes + 4 * words[0].nbytes + 1200

    def bag(self) -> Bag:
        """The bag of all turns so far, at least one."""
        agents = tuple(self._agents)
        if self._replies.names != agents:
            self._replies = Replies(agents)  # a new name may change whom an old turn names
        index = self._index.rows
        acting = np.array([a in self._acting or not self._acting for a in range(len(agents))])
        return Bag(
            agents=agents,
            acting=acting,
            agent_index=index,
            reply_to=self._replies(self.turns),
            windows=tuple(self.windows),
            task=self.task,
            words=self._words.documents,
            features=self._text.describe(index),
        )


class Replies:
    """The turn that each turn answers: the last one of an agent it names, or of any other agent.

    Names count as whole words only, so that `Agent1` is not found in `Agent12`. Each turn is read
    once.

    Args:
        names: Names of the agents in order of first appearance.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._position = {name: a for a, name in enumerate(names)}
        longest_first = sorted(names, key=len, reverse=True)
        choice = "|".join(re.escape(name) for name in longest_first)
        self._pattern = re.compile(rf"(?<!\w)({choice})(?!\w)")
        self._last: dict[int, int] = {}  # agent to its last turn, in order of these
        self._found = Growing(np.int64)

    def __call__(self, turns: Sequence[Turn]) -> NDArray[np.int64]:
        """The turn that each turn answers.

        Args:
            turns: Those of the last call, then any more.

        Returns:
            `(T,)` int64, -1 where no other agent spoke before.
        """
        for t in range(len(self._found), len(turns)):
            agent = self._position[turns[t].agent]
            self._found.append(self._find(turns[t].content, agent))
            self._last.pop(agent, None)
            self._last[agent] = t
        return self._found.rows

    def _find(self, content: str, agent: int) -> int:
        """The turn that the next one answers, -1 if there is none."""
        last = self._last
        named = {self._position[name] for name in self._pattern.findall(content)} - {agent}
        latest = max((last.get(a, -1) for a in named), default=-1)
        if latest < 0:
            latest = next((turn for a, turn in reversed(last.items()) if a != agent), -1)
        return latest
