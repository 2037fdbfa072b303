"""From logits to calibrated probabilities to declared faults: the only decoder.

Letters: `T` turns, `A` agents of one trajectory, `M` = 14 modes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import islice
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dcl.errors import ConfigError
from dcl.taxonomy import MODES, ErrorMode
from dcl.trajectory import Fault, Trajectory

if TYPE_CHECKING:
    from dcl.bag import Bag

Floats = NDArray[np.float32]
T = TypeVar("T")

PERCENT = range(1, 100)
"""Coverages that conformal sets are kept for, in percent."""
SHOWN_COVERAGES = (0.8, 0.9)
"""Coverages of the sets of steps that are written out."""


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """What a scorer says about one bag, any real numbers.

    Args:
        agent: `(A,)` float32, one logit an agent: did it fail?
        mode: `(M,)` float32, one logit a mode: did it occur?
        pair: `(A, M)` float32: did this agent fail in this way?
        step: `(T,)` float32: does this turn show the failure? Softmax over turns.
        attention: `(T, M)` float32: how much this turn speaks for the mode in its agent, as the
            network sees it. Softmax over the turns of one agent.
        heed: How far `attention` is heeded, 0 to 1. For the rest a turn speaks for every mode by
            its step logit.
    """

    agent: Floats
    mode: Floats
    pair: Floats
    step: Floats
    attention: Floats
    heed: float = 1.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """What turns logits into probabilities, and probabilities into a declaration.

    Fitted on validation data and stored with the model.

    Args:
        agent_temperature: Divides the agent logits; > 0. The others likewise.
        mode_temperature: See above.
        pair_temperature: See above.
        step_temperature: See above.
        agent_threshold: Agents from this probability on are declared, 0 to 1.
        mode_threshold: Modes from this probability on are declared, 0 to 1.
        pair_threshold: Pairs from this probability on are declared, 0 to 1.
        trust_threshold: The verdict is withheld where nobody reaches this probability, 0 to 1.
        trust_precision: Share of first guesses that were right from there on in validation.
        ranked_cuts: Largest score of a turn in a set of the likeliest turns, for a coverage of 1
            to 99 %, 99 values from 0 to 1; empty where no labelled steps were there to fit on.
        span_cuts: The same for a set of consecutive turns.

    Raises:
        ConfigError: If one is no number, or outside of its range.
    """

    agent_temperature: float = 1.0
    mode_temperature: float = 1.0
    pair_temperature: float = 1.0
    step_temperature: float = 1.0
    agent_threshold: float = 0.5
    mode_threshold: float = 0.5
    pair_threshold: float = 0.5
    trust_threshold: float = 0.0
    trust_precision: float = 0.8
    ranked_cuts: tuple[float, ...] = ()
    span_cuts: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what gives no probabilities."""
        for name in ("ranked_cuts", "span_cuts"):
            cuts = getattr(self, name)
            if len(cuts) not in (0, len(PERCENT)) or not all(_is_share(cut) for cut in cuts):
                raise ConfigError(
                    f"calibration.{name}: expected no numbers or {len(PERCENT)} from 0 to 1, "
                    f"got {len(cuts)}"
                )
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, tuple):
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if entry.name.endswith(("threshold", "precision")):
                fits, expected = number and 0 <= value <= 1, "from 0 to 1"
            else:
                fits, expected = number and 0 < value < math.inf, "over 0"
            if not fits:
                raise ConfigError(
                    f"calibration.{entry.name}: expected a number {expected}, got {value!r}"
                )


@dataclass(frozen=True, slots=True)
class Finding:
    """One declared fault with its probability.

    Args:
        fault: Agent, mode, and the step number of the turn that shows it.
        turn: 0-based position of that turn.
        prob: Probability of the pair, or of the agent where no mode is declared for it.
    """

    fault: Fault
    turn: int
    prob: float


@dataclass(frozen=True, slots=True, eq=False)
class Attribution:
    """Who failed, how, and where, as probabilities.

    Args:
        trajectory_id: Name of the run.
        agents: Names of the agents, order of all `A` axes.
        steps: Step number of each turn as the source log counts.
        agent_index: `(T,)` int64, agent of each turn.
        agent_probs: `(A,)` float32, 0 to 1.
        mode_probs: `(M,)` float32, 0 to 1, in the order of `dcl.taxonomy.MODES`.
        pair_probs: `(A, M)` float32, 0 to 1.
        step_probs: `(T,)` float32, sums to 1.
        weights: `(T, M)` float32: share of the turn in the evidence for (its agent, mode); sums
            to 1 over the turns of one agent.
        calibration: Thresholds that `faults` applies.
    """

    trajectory_id: str
    agents: tuple[str, ...]
    steps: tuple[int, ...]
    agent_index: NDArray[np.int64]
    agent_probs: Floats
    mode_probs: Floats
    pair_probs: Floats
    step_probs: Floats
    weights: Floats
    calibration: Calibration = field(default_factory=Calibration)

    def findings(
        self, *, threshold: float | None = None, top_k: int | None = None
    ) -> tuple[Finding, ...]:
        """Declared faults: the likeliest agent first, and of one agent the likeliest mode.

        An agent over its threshold without any pair over the pair threshold is declared with no
        mode. `top_k=1` is the right call where exactly one fault is known to exist: it gives the
        best pair whatever the thresholds say.

        Args:
            threshold: Replaces the calibrated thresholds of agents and pairs, 0 to 1.
            top_k: Gives the `top_k` most probable pairs, in that order, and ignores all
                thresholds; > 0.

        Returns:
            What is declared; may be empty unless `top_k` is given.

        Raises:
            ValueError: If `top_k` is not positive.
        """
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be > 0, got {top_k}")
        pair_cut = self.calibration.pair_threshold if threshold is None else threshold
        agent_cut = self.calibration.agent_threshold if threshold is None else threshold
        if top_k is not None:
            best = np.argsort(-self.pair_probs, axis=None, kind="stable")[:top_k]
            return tuple(self.find(*divmod(int(flat), len(MODES))) for flat in best)
        found: list[Finding] = []
        declared = self.pair_probs >= pair_cut  # (A, M)
        for a in np.argsort(-self.agent_probs, kind="stable").tolist():
            pairs = [self.find(a, m) for m in np.flatnonzero(declared[a]).tolist()]
            if not pairs and self.agent_probs[a] >= agent_cut:
                pairs = [self.find(a, None)]
            found += sorted(pairs, key=lambda finding: -finding.prob)
        return tuple(found)

    def faults(
        self, *, threshold: float | None = None, top_k: int | None = None
    ) -> tuple[Fault, ...]:
        """The faults of `findings`, in its order.

        Args:
            threshold: As in `findings`.
            top_k: As in `findings`.

        Raises:
            ValueError: If `top_k` is not positive.
        """
        return tuple(f.fault for f in self.findings(threshold=threshold, top_k=top_k))

    def modes(self) -> tuple[ErrorMode, ...]:
        """Modes over their own threshold, most probable first, whoever showed them."""
        order = np.argsort(-self.mode_probs, kind="stable")
        cut = self.calibration.mode_threshold
        return tuple(MODES[m] for m in order if self.mode_probs[m] >= cut)

    def evidence(self, k: int = 3) -> tuple[int, ...]:
        """0-based positions of the `k` turns that weigh most, strongest first."""
        return tuple(int(t) for t in np.argsort(-self.turn_weights, kind="stable")[:k])

    @property
    def is_finite(self) -> bool:
        """Whether all probabilities are numbers; a damaged model gives others."""
        probs = (self.agent_probs, self.mode_probs, self.pair_probs, self.step_probs)
        return all(math.isfinite(p.sum()) for p in probs)  # none is negative

    @property
    def turn_weights(self) -> Floats:
        """`(T,)` float32, sums to 1: share of each turn in all that speaks for a failure."""
        mass = (self.pair_probs[self.agent_index] * self.weights).sum(axis=1)
        total = float(mass.sum())
        return mass / total if total > 0 else np.full_like(mass, 1 / len(mass))

    def turn_of(self, agent: int, mode: int | None) -> int:
        """0-based position of the turn that best shows a fault of this agent.

        The step posterior times the evidence weight, over the turns of the agent alone.

        Args:
            agent: Position in `agents`.
            mode: Position in `dcl.taxonomy.MODES`; None for the agent as a whole.
        """
        weight = self.turn_weights if mode is None else self.weights[:, mode]
        score = self.step_probs * (weight + 1e-6)
        return int(np.argmax(np.where(self.agent_index == agent, score, -1.0)))

    def step_set(self, coverage: float = 0.9, *, consecutive: bool = True) -> tuple[int, ...]:
        """Turns that hold the labelled one in at least this share of runs like those of the fit.

        Args:
            coverage: Share of runs, 0.01 to 0.99, rounded up to a whole percent.
            consecutive: Whether the turns have to stand side by side, so that the set is a stretch
                of the run; otherwise they are the likeliest ones wherever they stand.

        Returns:
            0-based positions in order, at least one; empty where the model has no fitted sets.

        Raises:
            ValueError: If `coverage` is out of range.

        Source:
            Consecutive sets: two-way filtration with sums, Conformal Agent Error Attribution
            (arXiv 2605.06788). Others: adaptive prediction sets without randomisation, Romano et
            al. 2020, "Classification with Valid and Adaptive Coverage".
        """
        percent = math.ceil(100 * coverage - 1e-9)
        if percent not in PERCENT:
            raise ValueError(f"coverage must be from 0.01 to 0.99, got {coverage}")
        cuts = self.calibration.span_cuts if consecutive else self.calibration.ranked_cuts
        if not cuts:
            return ()
        scores = span_scores(self.step_probs) if consecutive else rank_scores(self.step_probs)
        inside = scores <= max(cuts[percent - 1], scores.min())
        return tuple(int(t) for t in np.flatnonzero(inside))

    @property
    def abstains(self) -> str:
        """Why no verdict should be acted on, as one sentence; empty where one stands."""
        if not self.findings():
            return "nobody is over the threshold"
        best = int(np.argmax(self.agent_probs))
        least = self.calibration.trust_threshold
        if self.agent_probs[best] < least:
            share = round(100 * self.calibration.trust_precision)
            return (
                f"the likeliest agent, {self.agents[best]}, has {self.agent_probs[best]:.2f}; "
                + (f"only from {least:.2f} on " if least < 1 else "at no probability ")
                + f"were {share} % of such verdicts right"
            )
        return ""

    def to_dict(
        self,
        *,
        threshold: float | None = None,
        top_k: int | None = None,
        evidence: int = 3,
    ) -> dict[str, Any]:
        """Plain JSON; the layout is described in `docs/output.md` and kept stable.

        Args:
            threshold: As in `findings`.
            top_k: As in `findings`.
            evidence: Turns to list as evidence; >= 0.
        """
        turn_weights = self.turn_weights
        return {
            "id": self.trajectory_id,
            "agents": [
                {"name": self.agents[a], "prob": _round(self.agent_probs[a])}
                for a in np.argsort(-self.agent_probs, kind="stable")
            ],
            "modes": [
                {
                    "code": MODES[m].value,
                    "title": MODES[m].title,
                    "prob": _round(self.mode_probs[m]),
                }
                for m in np.argsort(-self.mode_probs, kind="stable")
            ],
            "faults": [
                {**f.fault.to_dict(), "turn": f.turn, "prob": _round(f.prob)}
                for f in self.findings(threshold=threshold, top_k=top_k)
            ],
            "evidence": [
                {
                    "step": self.steps[t],
                    "turn": t,
                    "agent": self.agents[self.agent_index[t]],
                    "weight": _round(turn_weights[t]),
                }
                for t in self.evidence(evidence)
            ],
            "steps": [
                {"turn": t, "step": self.steps[t], "prob": _round(prob)}
                for t, prob in enumerate(self.step_probs)
            ],
            "step_sets": [
                {"coverage": coverage, "steps": [self.steps[t] for t in self.step_set(coverage)]}
                for coverage in SHOWN_COVERAGES
                if self.calibration.span_cuts
            ],
            "abstains": self.abstains or None,
        }

    def find(self, agent: int, mode: int | None) -> Finding:
        """What is said of one agent, declared or not: the probability, and the turn that shows it.

        Args:
            agent: Position in `agents`.
            mode: Position in `dcl.taxonomy.MODES`; None for the agent as a whole.
        """
        prob = self.agent_probs[agent] if mode is None else self.pair_probs[agent, mode]
        turn = self.turn_of(agent, mode)
        named = None if mode is None else MODES[mode]
        return Finding(Fault(self.agents[agent], named, self.steps[turn]), turn, float(prob))


class Scorer(Protocol):
    """Multiplies the matrices: bags in, one `Logits` a bag out, in order."""

    def __call__(self, bags: Sequence[Bag], /) -> list[Logits]:
        """Score bags."""


class Bagger(Protocol):
    """Turns a trajectory into the arrays that a scorer eats."""

    def __call__(self, trajectory: Trajectory, /) -> Bag:
        """Make one bag."""


class Attributor:
    """Says who failed, how and where: bagger, scorer and decoder in one call.

    Args:
        bagger: Trajectory to `Bag`.
        scorer: Bags to `Logits`; torch, onnxruntime or a fake.
        calibration: Temperatures and thresholds of the scorer.
    """

    def __init__(self, bagger: Bagger, scorer: Scorer, calibration: Calibration) -> None:
        self.bagger = bagger
        self.scorer = scorer
        self.calibration = calibration

    def __call__(self, trajectory: Trajectory) -> Attribution:
        """Attribute one run."""
        (logits,) = self.scorer([self.bagger(trajectory)])
        return decode(trajectory, logits, self.calibration)

    def batch(
        self, trajectories: Iterable[Trajectory], *, batch_size: int = 16
    ) -> Iterator[Attribution]:
        """Attribute many runs, in order, with memory bounded by twice `batch_size` of them.

        The next batch is read and made into bags, in another thread, while this one is scored.
        Whoever stops early, or is interrupted, does not wait for that thread.

        Args:
            trajectories: Taken as they are needed; what it raises comes out here, after the
                attributions of all runs before it.
            batch_size: Runs that are scored together; > 0.

        Returns:
            One attribution a run.

        Raises:
            ConfigError: If `batch_size` is not positive.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size: expected at least 1, got {batch_size}")
        return self._batch(iter(trajectories), batch_size)

    def _batch(self, rest: Iterator[Trajectory], size: int) -> Iterator[Attribution]:
        """Score one batch while the next is being read."""

        def take() -> tuple[list[tuple[Trajectory, Bag]], BaseException | None]:
            chunk: list[tuple[Trajectory, Bag]] = []
            try:
                for trajectory in islice(rest, size):
                    bag = self.bagger(trajectory)
                    chunk.append((trajectory, bag))
            except BaseException as error:
                return chunk, error
            return chunk, None

        coming = _start(take)
        more = True
        while more:
            chunk, error = _await(coming)
            more = error is None and len(chunk) == size
            if more:
                coming = _start(take)
            logits = self.scorer([bag for _, bag in chunk]) if chunk else []
            for (trajectory, _), scores in zip(chunk, logits, strict=True):
                yield decode(trajectory, scores, self.calibration)
            if error is not None:
                raise error


def _start(work: Callable[[], T]) -> Queue[T]:
    """Where the result of `work` will be put by a thread that nobody has to wait for.

    A thread pool would not do: it joins its threads, also one that reads from a silent pipe.
    """
    box: Queue[T] = Queue(1)
    Thread(target=lambda: box.put(work()), name="dcl-reader", daemon=True).start()
    return box


def _await(box: Queue[T]) -> T:
    """What is put into the box, however long that takes.

    Looks up once a second: a signal that comes just before a wait without end would be lost.
    """
    while True:
        with suppress(Empty):
            return box.get(timeout=1.0)


def decode(trajectory: Trajectory, logits: Logits, calibration: Calibration) -> Attribution:
    """Logits of one trajectory to probabilities.

    The person who asks and the system prompt cannot fail: their probabilities are 0.

    Args:
        trajectory: The run that was scored.
        logits: Its logits; shapes must fit the run.
        calibration: Temperatures and thresholds.

    Returns:
        The probabilities, with the evidence and the thresholds that go with them.
    """
    agents = trajectory.agents
    position = {agent: a for a, agent in enumerate(agents)}
    agent_index = np.array([position[turn.agent] for turn in trajectory.turns], dtype=np.int64)
    bystanders = trajectory.bystanders
    acting = np.array([agent not in bystanders for agent in agents])
    step = logits.step / calibration.step_temperature
    evidence = logits.attention
    if logits.heed < 1:
        evidence = logits.heed * evidence + (1 - logits.heed) * step[:, None]
    return Attribution(
        trajectory_id=trajectory.id,
        agents=agents,
        steps=trajectory.steps,
        agent_index=agent_index,
        agent_probs=_under_one(sigmoid(logits.agent / calibration.agent_temperature)) * acting,
        mode_probs=sigmoid(logits.mode / calibration.mode_temperature),
        pair_probs=_under_one(sigmoid(logits.pair / calibration.pair_temperature))
        * acting[:, None],
        step_probs=softmax(np.where(acting[agent_index], step, -np.inf), axis=0),
        weights=_softmax_by_agent(evidence, agent_index),
        calibration=calibration,
    )


def _softmax_by_agent(x: Floats, agent_index: NDArray[np.int64]) -> Floats:
    """Softmax over the turns of each agent, `(T, M)`; every agent has a turn."""
    order = np.argsort(agent_index, kind="stable")
    starts = np.searchsorted(agent_index[order], np.arange(agent_index.max() + 1))
    e = np.exp(x - np.maximum.reduceat(x[order], starts)[agent_index])
    weights = e / np.add.reduceat(e[order], starts)[agent_index]
    return weights.astype(np.float32, copy=False)


def _under_one(probs: Floats) -> Floats:
    """The same, but that a threshold of 1 is over all of them; nothing is certain."""
    return np.minimum(probs, np.nextafter(np.float32(1), np.float32(0)))


def _is_share(value: object) -> bool:
    """Whether this is a number from 0 to 1."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def rank_scores(probs: Floats) -> NDArray[np.float64]:
    """Mass of all turns that are at least as likely as each one, 0 to 1; `(T,)`.

    Args:
        probs: `(T,)`, sums to 1.
    """
    order = np.argsort(-probs, kind="stable")
    ranked = probs[order].astype(np.float64)
    mass = np.cumsum(ranked)
    last = np.searchsorted(-ranked, -ranked, side="right") - 1  # of those that are equally likely
    scores = np.empty(len(probs))
    scores[order] = mass[last]
    return scores


def span_scores(probs: Floats) -> NDArray[np.float64]:
    """The larger of the masses before and after each turn, 0 to 1; `(T,)`.

    Turns up to any score stand side by side.

    Args:
        probs: `(T,)`, sums to 1.
    """
    mass = np.cumsum(probs, dtype=np.float64)
    scores: NDArray[np.float64] = np.maximum(mass - probs, mass[-1] - mass)
    return scores


def sigmoid(x: Floats) -> Floats:
    """`1 / (1 + exp(-x))` without overflow, any shape."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)), dtype=np.float32)


def softmax(x: Floats, *, axis: int) -> Floats:
    """Softmax along one axis without overflow.

    Args:
        x: Any shape.
        axis: Sums to 1 along it.
    """
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return np.asarray(e / e.sum(axis=axis, keepdims=True), dtype=np.float32)


def _round(prob: float | np.floating[Any]) -> float:
    """A probability with six digits, as JSON shows it."""
    return round(float(prob), 6)
