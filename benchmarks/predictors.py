"""Everything that reads a run and says who failed: fixed rules, learned floors, and the model.

A predictor sees turns and task only. Predictors that declare by thresholds take `single`: whether
exactly one fault is known to exist, in which case they name their best guess at every level.

Letters: `N` documents (one an agent of a run), `V` hashed n-grams, `A` agents, `M` = 14 modes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.metrics import Prediction
from dcl.attribution import Attribution, Attributor
from dcl.calibration import best_threshold
from dcl.errors import ConfigError
from dcl.targets import make_targets
from dcl.taxonomy import MODES, ErrorMode
from dcl.trajectory import Example, Trajectory, Turn, TurnKind

Floats = NDArray[np.float64]
Predictor = Callable[[Trajectory], Prediction]

COMMONEST = ErrorMode.FM_2_6
"""The mode that rules without a view on modes answer with: the commonest one of Who&When."""

_TERMINAL = (TurnKind.TOOL_RESULT, TurnKind.SYSTEM)


def blame(agent: str, steps: Sequence[int], mode: ErrorMode = COMMONEST) -> Prediction:
    """The prediction that one agent failed in one way, at the first of the ranked steps."""
    return Prediction(
        faults=frozenset({(agent, mode)}),
        step=next(iter(steps), None),
        agent=agent,
        ranked_steps=tuple(steps),
    )


def guess_random(trajectory: Trajectory, *, seed: int = 0) -> Prediction:
    """One agent, one mode and an order of the steps, all uniform; the seed and the run decide."""
    digest = hashlib.blake2b(f"{seed}:{trajectory.id}".encode("utf-8", "replace"), digest_size=8)
    rng = np.random.default_rng(int.from_bytes(digest.digest(), "big"))
    agent = trajectory.agents[rng.integers(len(trajectory.agents))]
    steps = [trajectory.steps[t] for t in rng.permutation(len(trajectory.turns))]
    return blame(agent, steps, MODES[rng.integers(len(MODES))])


def blame_everyone(trajectory: Trajectory) -> Prediction:
    """Every agent failed in the commonest way; the one to blame most is the first."""
    first = blame(trajectory.agents[0], trajectory.steps)
    return Prediction(
        faults=frozenset((agent, COMMONEST) for agent in trajectory.agents),
        step=first.step,
        agent=first.agent,
        ranked_steps=first.ranked_steps,
    )


def blame_first_speaker(trajectory: Trajectory) -> Prediction:
    """The agent of the first turn that is no tool or system output, at that turn."""
    return _blame_turns(trajectory, _spoken(trajectory))


def blame_last_speaker(trajectory: Trajectory) -> Prediction:
    """The agent of the last turn that is no tool or system output, at that turn."""
    return _blame_turns(trajectory, _spoken(trajectory)[::-1])


def blame_most_talking(trajectory: Trajectory) -> Prediction:
    """The agent with the most turns that are no tool or system output, at its first turn.

    Of several with as many turns the first to speak is blamed.
    """
    spoken = _spoken(trajectory)
    counts = Counter(trajectory.turns[t].agent for t in spoken)
    agent = max(counts, key=lambda name: counts[name])
    own = [t for t in spoken if trajectory.turns[t].agent == agent]
    return _blame_turns(trajectory, [*own, *(t for t in spoken if t not in own)])


def blame_first_code(trajectory: Trajectory) -> Prediction:
    """The agent and step of the first turn with a fenced block; the first turn if none has one."""
    spoken = _spoken(trajectory)
    code = [t for t in spoken if "```" in trajectory.turns[t].content]
    return _blame_turns(trajectory, [*code, *(t for t in spoken if t not in code)])


def blame_step(trajectory: Trajectory, *, position: int) -> Prediction:
    """The turn at a fixed 0-based position, or the last one of a shorter run."""
    order = sorted(range(len(trajectory.turns)), key=lambda t: abs(t - position))
    return _blame_turns(trajectory, order)


def answer_commonest_mode(trajectory: Trajectory) -> Prediction:
    """The commonest mode without an agent."""
    return Prediction(modes=frozenset({COMMONEST}))


def answer_every_mode(trajectory: Trajectory) -> Prediction:
    """All modes without an agent."""
    return Prediction(modes=frozenset(MODES))


def _spoken(trajectory: Trajectory) -> list[int]:
    """Positions of the turns that are no tool or system output; all turns if none is left."""
    everything = range(len(trajectory.turns))
    return [t for t in everything if not _is_terminal(trajectory.turns[t])] or [*everything]


def _is_terminal(turn: Turn) -> bool:
    """Whether a machine, not an agent, speaks."""
    return turn.kind in _TERMINAL


def _blame_turns(trajectory: Trajectory, turns: Sequence[int]) -> Prediction:
    """Blame the agent of the first of some positions."""
    steps = trajectory.steps
    return blame(trajectory.turns[turns[0]].agent, [steps[t] for t in turns])


RULES: dict[str, Predictor] = {
    "random": guess_random,
    "everyone": blame_everyone,
    "most-talking": blame_most_talking,
    "first-speaker": blame_first_speaker,
    "last-speaker": blame_last_speaker,
    "first-code": blame_first_code,
    "step-1": lambda trajectory: blame_step(trajectory, position=1),
    "step-4": lambda trajectory: blame_step(trajectory, position=4),
    "always-fm-2.6": answer_commonest_mode,
    "every-mode": answer_every_mode,
}
"""Predictors that learn nothing, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Beliefs:
    """Scores of one run before anything is declared; any real numbers, higher is more suspect.

    Args:
        agents: Names, `A` of them.
        agent: `(A,)`.
        mode: `(M,)`.
        pair: `(A, M)`.
    """

    agents: tuple[str, ...]
    agent: Floats
    mode: Floats
    pair: Floats

    def declare(self, cuts: Cuts, *, single: bool, steps: Sequence[int] = ()) -> Prediction:
        """Declare what reaches its threshold, or the best of each level if one fault is known."""
        best = divmod(int(np.argmax(self.pair)), len(MODES))
        pairs = [best] if single else [(int(a), int(m)) for a, m in _reach(self.pair, cuts.pair)]
        top = int(np.argmax(self.agent))
        agents = [top] if single else [int(a) for (a,) in _reach(self.agent, cuts.agent)]
        modes = [int(np.argmax(self.mode))] if single else _reach(self.mode, cuts.mode).ravel()
        return Prediction(
            faults=frozenset((self.agents[a], MODES[m]) for a, m in pairs),
            agents=frozenset(self.agents[a] for a in agents),
            modes=frozenset(MODES[m] for m in modes),
            step=next(iter(steps), None),
            agent=self.agents[top],
            ranked_steps=tuple(steps),
        )


@dataclass(frozen=True, slots=True)
class Cuts:
    """Thresholds on the scores of `Beliefs`; a score that reaches one is declared.

    Args:
        agent: Threshold of agents.
        mode: Threshold of modes.
        pair: Threshold of pairs.
        pair_f1: Micro-F1 of pairs where the thresholds were chosen, 0 to 1.
    """

    agent: float
    mode: float
    pair: float
    pair_f1: float


def fit_cuts(beliefs: Sequence[Beliefs], examples: Sequence[Example]) -> Cuts:
    """Thresholds with the best micro-F1, each level for itself.

    Args:
        beliefs: One an example.
        examples: Held-out examples; labels of agents who never speak count as misses.

    Raises:
        ConfigError: If there is no example to choose on.
    """
    if not examples:
        raise ConfigError("--train: expected records of validation questions, found none")
    targets = [make_targets(example, 0.0) for example in examples]
    found = {
        level: best_threshold(
            np.concatenate([np.ravel(getattr(one, level)) for one in beliefs]),
            np.concatenate([np.ravel(getattr(one, level)) for one in targets]),
            missed=sum(getattr(one, lost) for one in targets) if lost else 0,
        )
        for level, lost in (("agent", "lost_agents"), ("mode", ""), ("pair", "lost_pairs"))
    }
    return Cuts(found["agent"][0], found["mode"][0], *found["pair"])


def _reach(scores: Floats, cut: float) -> NDArray[np.intp]:
    """Indices of the scores from a threshold on, `(found, axes)`."""
    return np.argwhere(scores >= cut)


class NamePrior:
    """The floor that reads no word: who fails how often under a name, and mostly how.

    An agent's score is the share of training runs with an agent of that name in which that agent
    is labelled; names never seen get the mean share. Its mode is the commonest one of the name.

    Args:
        train: Labelled examples to count.
        valid: Labelled examples, of other questions, to choose thresholds on.
        single: Whether one fault is known to exist.
    """

    def __init__(
        self, train: Iterable[Example], valid: Sequence[Example], *, single: bool = False
    ) -> None:
        self.single = single
        spoke: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        modes: Counter[tuple[str, int]] = Counter()
        for example in train:
            spoke.update(example.trajectory.agents)
            target = make_targets(example, 0.0).pair
            for agent, row in zip(example.trajectory.agents, target, strict=True):
                failed[agent] += bool(row.any())
                modes.update((agent, int(m)) for m in np.flatnonzero(row))
        overall: Counter[int] = Counter()
        for (_, m), number in modes.items():
            overall[m] += number
        self._share = {agent: failed[agent] / spoke[agent] for agent in spoke}
        self._mean = sum(failed.values()) / max(sum(spoke.values()), 1)
        self._any_mode = max(overall, key=lambda m: overall[m], default=COMMONEST.index)
        self._mode: dict[str, int] = {}
        for agent, m in sorted(modes, key=lambda key: -modes[key]):
            self._mode.setdefault(agent, m)
        self._cuts = fit_cuts([self._believe(e.trajectory) for e in valid], valid)

    def __call__(self, trajectory: Trajectory) -> Prediction:
        """Predict one run from its names; the modes are those of the declared pairs.

        With a threshold of their own on so weak a score, all modes would be declared every time.
        """
        return replace(
            self._believe(trajectory).declare(self._cuts, single=self.single), modes=None
        )

    def _believe(self, trajectory: Trajectory) -> Beliefs:
        """Scores of one run."""
        agents = trajectory.agents
        share = np.array([self._share.get(agent, self._mean) for agent in agents])
        pair = np.full((len(agents), len(MODES)), -1.0)
        pair[range(len(agents)), [self._mode.get(a, self._any_mode) for a in agents]] = share
        return Beliefs(agents, agent=share, mode=pair.max(axis=0), pair=pair)


class AttributorPredictor:
    """The model itself, or anything else behind an `Attributor`.

    Args:
        attributor: Trajectory to `Attribution`.
        single: Whether one fault is known to exist.
    """

    def __init__(
        self, attributor: Attributor | Callable[[Trajectory], Attribution], *, single: bool = False
    ) -> None:
        self.attributor = attributor
        self.single = single

    def __call__(self, trajectory: Trajectory) -> Prediction:
        """Predict one run."""
        return state_guess(self.attributor(trajectory), single=self.single)


def state_guess(found: Attribution, *, single: bool = False) -> Prediction:
    """What an attribution declares.

    Args:
        found: Of one run.
        single: Whether one fault is known to exist.
    """
    faults = found.faults(top_k=1 if single else None)
    top = found.find(int(np.argmax(found.agent_probs)), None).fault
    best_mode = MODES[int(np.argmax(found.mode_probs))]
    steps = tuple(found.steps[t] for t in np.argsort(-found.step_probs, kind="stable"))
    return Prediction(
        faults=frozenset((f.agent, f.mode) for f in faults if f.mode is not None),
        agents=frozenset({top.agent} if single else (f.agent for f in faults)),
        modes=frozenset({best_mode} if single else found.modes()),
        step=steps[0],
        agent=top.agent,
        ranked_steps=steps,
        shown=top.step,
    )
