"""A small linear layer on top of the frozen network, for natural failures or for one system.

It re-ranks the turns of a run, moves the logits of agents along with them, and shifts modes. The
scorer applies it right after the network, so everything that scores a run is adapted alike.
Bystanders cannot fail: their turns take no part in the posterior over turns.

Letters: `T` turns, `A` agents, `F` columns, `M` = 14 modes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcl.attribution import Logits, softmax
from dcl.errors import ArtifactError
from dcl.features import FEATURES
from dcl.taxonomy import MODES

Floats = NDArray[np.float64]
Agents = NDArray[np.int64]
Mask = NDArray[np.bool_]

_STRUCTURE = (
    "has_code", "is_first_code", "after_code", "code_before", "code_next", "tool_before",
    "tool_next", "same_before", "same_next", "is_turn_1", "is_turn_2", "talks_most",
)  # fmt: skip
_NEIGHBOURS = (
    "loop_next", "check_next", "numbers_new_next", "departure_next", "taken_up",
    "departure_next_of_others", "taken_up_by_others",
)  # fmt: skip
_PATH = "on_path"
_NETWORK = (
    "net_step", "net_agent", "net_pair", "net_attention", "net_attention_mean", "wide_best",
    "wide_sum",
)  # fmt: skip
COLUMNS: tuple[str, ...] = (*FEATURES, *_STRUCTURE, *_NEIGHBOURS, _PATH, *_NETWORK)
"""Names of the columns of `describe_turns`."""

_LAYOUT = FEATURES[: FEATURES.index("cue_code")]
COLUMN_SETS: dict[str, tuple[str, ...]] = {
    "few": (
        "is_first_code", "has_code", "to_task", "from_previous", "error_after", "numbers_new",
        "claim_without_evidence", "cue_assumption", "is_tool_result", "is_last", "is_own_first",
        "is_turn_1", "position", "log_chars", "turn_share", _PATH, "net_step",
    ),
    "structure": (*_LAYOUT, *_STRUCTURE, *_NEIGHBOURS, _PATH),
    "everything": COLUMNS,
}  # fmt: skip
"""Columns that turns are scored by, once by each set: 15 runs need few, 200 can bear all."""

_CLIP = 4.0  # standard deviations that one column may be off; a new run can be far from all others


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Turn scores, agent scores and mode shifts, fitted on labelled runs.

    The step logits become `trust * step + columns @ weights`. An agent's logit becomes a linear
    function of its old one and of the log-odds of the posterior mass on its turns. Mode logits
    become `heed * mode + modes`, and a pair's logit becomes that of its agent with as much of the
    network's word on the mode: `agent + heed * (pair - old agent) + modes`. As far as the network
    is not heeded, the log of the agent's probability stands for its logit there, so that no logit
    of a pair is above that of its mode, and its evidence does not count (`Logits.heed`).

    Args:
        columns: Columns of `describe_turns` that it reads, `F` of them.
        mean: `(F,)`, subtracted first.
        scale: `(F,)`, divides after; > 0.
        weights: `(F,)`.
        trust: How much of the network's own step logits stays; 1 is all.
        agent: `(3,)`: constant, weight of the old agent logit, weight of the log-odds.
        modes: `(M,)`, added to mode and pair logits.
        heed: How much of what the network says of modes stays; 1 is all.
    """

    columns: tuple[str, ...]
    mean: Floats
    scale: Floats
    weights: Floats
    trust: float
    agent: Floats
    modes: Floats
    heed: float = 1.0

    def __call__(self, logits: Logits, turns: Floats, agent_index: Agents, acting: Mask) -> Logits:
        """Adapted logits of one bag.

        Args:
            logits: Of the network.
            turns: `(T, len(COLUMNS))`, as `describe_turns` gives them.
            agent_index: `(T,)` int64, agent of each turn.
            acting: `(A,)` bool, false for bystanders.
        """
        step = self.score_turns(logits, turns)
        odds = agent_log_odds(step, agent_index, acting)
        agent = self.agent[0] + self.agent[1] * logits.agent + self.agent[2] * odds
        heed = self.heed * logits.heed
        word = logits.pair - _lead(logits.agent, logits.heed)[:, None]
        pair = _lead(agent, heed)[:, None] + self.heed * word + self.modes
        return replace(
            logits,
            step=step.astype(np.float32),
            agent=agent.astype(np.float32),
            pair=pair.astype(np.float32),
            mode=(self.heed * logits.mode + self.modes).astype(np.float32),
            heed=heed,
        )

    def score_turns(self, logits: Logits, turns: Floats) -> Floats:
        """Adapted step logits, `(T,)`."""
        score: Floats = self.trust * logits.step + self._standardise(turns) @ self.weights
        return score

    def weigh_columns(self, turns: Floats) -> Floats:
        """What each column adds to the step logit of each turn, `(T, len(COLUMNS))`.

        Args:
            turns: `(T, len(COLUMNS))`, as `describe_turns` gives them.
        """
        shares = np.zeros_like(turns)
        shares[:, _find_places(self.columns)] = self._standardise(turns) * self.weights
        return shares

    def _standardise(self, turns: Floats) -> Floats:
        """The columns that it reads, `(T, F)`."""
        return standardise(select(turns, self.columns), self.mean, self.scale)


IDENTITY = Adapter(
    columns=(),
    mean=np.zeros(0),
    scale=np.ones(0),
    weights=np.zeros(0),
    trust=1.0,
    agent=np.array([0.0, 1.0, 0.0]),
    modes=np.zeros(len(MODES)),
)
"""Changes nothing."""


def describe_turns(
    logits: Logits,
    features: NDArray[np.float32],
    wide: NDArray[np.float32],
    index: Agents,
    on_path: Floats,
) -> Floats:
    """All that an adapter may look at, one row a turn.

    Args:
        logits: Of the network.
        features: `(T, len(FEATURES))`, as the network reads them.
        wide: `(T, M)`, wide logits.
        index: `(T,)` int64, agent of each turn.
        on_path: `(T,)`, as `dcl.references.mark_path` gives it.

    Returns:
        `(T, len(COLUMNS))`.
    """
    network = [
        logits.step,
        logits.agent[index],
        logits.pair[index].max(axis=1),
        logits.attention.max(axis=1),
        logits.attention.mean(axis=1),
        wide.max(axis=1),
        wide.sum(axis=1),
    ]
    structure = _describe_structure(features, index)
    neighbours = _describe_neighbours(features, index)
    return np.column_stack([features, structure, neighbours, on_path, *network]).astype(np.float64)


def agent_log_odds(step: Floats, agent_index: Agents, acting: Mask) -> Floats:
    """Log-odds of the posterior mass on the turns of each agent, -8 to 8; `(A,)`.

    Args:
        step: `(T,)` logits.
        agent_index: `(T,)` int64, agent of each turn.
        acting: `(A,)` bool, true for one agent at least; the turns of the others have no mass.
    """
    probs = softmax(np.where(acting[agent_index], step, -np.inf).astype(np.float32), axis=0)
    mass = np.bincount(agent_index, weights=probs, minlength=len(acting))
    mass = np.clip(mass, 1e-9, 1 - 1e-9)
    odds: Floats = np.clip(np.log(mass) - np.log1p(-mass), -8.0, 8.0)
    return odds


def _lead(agent: NDArray[Any], heed: float) -> Floats:
    """What the logits of an agent, `(A,)`, give to those of its pairs."""
    lead: Floats = heed * agent - (1 - heed) * np.logaddexp(0, -agent.astype(np.float64))
    return lead


def select(turns: Floats, columns: tuple[str, ...]) -> Floats:
    """Some of the columns of `describe_turns`, by name."""
    return turns.take(_find_places(columns), axis=1)


@lru_cache(maxsize=16)
def _find_places(columns: tuple[str, ...]) -> NDArray[np.intp]:
    """Positions of columns of `describe_turns`."""
    return np.array([_PLACE[name] for name in columns], dtype=np.intp)


def standardise(columns: Floats, mean: Floats, scale: Floats) -> Floats:
    """Columns in standard deviations from their mean, cut where a run is far from all others."""
    return np.clip((columns - mean) / scale, -_CLIP, _CLIP)


def save_adapter(adapter: Adapter, file: Path) -> None:
    """Write an adapter as JSON that a person can read."""
    row = {
        "turns": [
            {"column": name, "mean": mean, "scale": scale, "weight": weight}
            for name, mean, scale, weight in zip(
                adapter.columns,
                adapter.mean.tolist(),
                adapter.scale.tolist(),
                adapter.weights.tolist(),
                strict=True,
            )
        ],
        "trust": adapter.trust,
        "agent": adapter.agent.tolist(),
        "modes": {m.value: float(b) for m, b in zip(MODES, adapter.modes, strict=True)},
        "heed": adapter.heed,
    }
    file.write_text(json.dumps(row, indent=2) + "\n")


def load_adapter(file: Path) -> Adapter:
    """Read what `save_adapter` wrote.

    Raises:
        ArtifactError: If it is damaged, or knows columns that this version does not have.
    """
    try:
        row = json.loads(file.read_bytes())
        turns = row["turns"]
        names = tuple(str(entry["column"]) for entry in turns)
        unknown = [name for name in names if name not in _PLACE]
        if unknown:
            raise ArtifactError(
                f"{file}: the column {unknown[0]!r} is not known; fit again with this version"
            )
        mean, scale, weights = (
            np.array([float(entry[key]) for entry in turns]) for key in ("mean", "scale", "weight")
        )
        adapter = Adapter(
            columns=names,
            mean=mean,
            scale=scale,
            weights=weights,
            trust=float(row["trust"]),
            agent=np.array([float(value) for value in row["agent"]]),
            modes=np.array([float(row["modes"][mode.value]) for mode in MODES]),
            heed=float(row.get("heed", 1.0)),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{file}: expected what dcl fit writes: {error}; fit again") from None
    numbers = (adapter.mean, adapter.scale, adapter.weights, adapter.agent, adapter.modes)
    rates = (adapter.trust, adapter.heed)
    sound = all(np.isfinite(part).all() for part in (*numbers, *rates))
    if not sound or adapter.agent.shape != (3,) or not (adapter.scale > 0).all():
        raise ArtifactError(f"{file}: expected finite numbers and scales over 0; fit again")
    return adapter


def _describe_structure(features: NDArray[np.float32], index: NDArray[np.int64]) -> Floats:
    """Where code and tools stand around each turn; columns as in `_STRUCTURE`."""
    tool = features[:, FEATURES.index("is_tool_result")] > 0
    # A fenced block has two marks, and each of them counts as a cue.
    code = (np.expm1(features[:, FEATURES.index("cue_code")]) > 1.5) & ~tool
    count = np.arange(len(index))
    same = index[1:] == index[:-1]
    own_turns = np.bincount(index)
    return np.column_stack(
        [
            code,
            code & (np.cumsum(code) == 1),
            np.cumsum(code) - code > 0,
            np.append(False, code[:-1]),
            np.append(code[1:], False),
            np.append(False, tool[:-1]),
            np.append(tool[1:], False),
            np.append(False, same),
            np.append(same, False),
            count == 1,
            count == 2,
            own_turns[index] == own_turns.max(),
        ]
    ).astype(np.float64)


def _describe_neighbours(features: NDArray[np.float32], index: NDArray[np.int64]) -> Floats:
    """How the next turn answers each turn, and how each answers the one before.

    Columns as in `_NEIGHBOURS`; those of others are 0 for the agents that talk most, who lead where
    one instructs and the others carry out.
    """
    own_turns = np.bincount(index)
    others = own_turns[index] < own_turns.max()
    names = ("cue_loop", "cue_check", "numbers_new", "from_own_previous", "words_in_next")
    loop, check, new, departure, in_next = (features[:, FEATURES.index(name)] for name in names)
    departure_next = np.append(departure[1:], 0)
    taken_up = np.append(0, in_next[:-1])
    return np.column_stack(
        [
            np.append(loop[1:], 0),
            np.append(check[1:], 0),
            np.append(new[1:], 0),
            departure_next,
            taken_up,
            others * departure_next,
            others * taken_up,
        ]
    ).astype(np.float64)


_PLACE = {name: i for i, name in enumerate(COLUMNS)}
