"""One run that is still going on, attributed again whenever a turn is added.

A new turn costs one encoder call, for that turn alone, and one head call. The result is that of
`Attributor` on the same turns, to the bit: a turn has one vector wherever it stands, and the bag of
a whole run is itself made by adding turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dcl.attribution import Attribution, Attributor, Floats, Logits, decode
from dcl.bag import Bag, Draft
from dcl.errors import ArtifactError, ConfigError
from dcl.trajectory import Trajectory, Turn


@runtime_checkable
class DraftMaker(Protocol):
    """A bagger that can be given the turns of a run one by one."""

    def start(self, task: str, /) -> Draft:
        """An empty bag."""


@runtime_checkable
class TurnScorer(Protocol):
    """A scorer that keeps what a turn costs apart from what a bag costs."""

    def encoder(self, windows: Sequence[NDArray[np.int32]], /) -> Floats:
        """Vectors of turns, `(N, E)`."""

    def score(self, bag: Bag, vectors: Floats, task: Floats, /) -> Logits:
        """Logits of a bag whose turns have these vectors."""


class OpenRun:
    """A run that grows. Not safe to share between threads.

    Args:
        attributor: The model.
        run_id: Name of the run.
        task: What the system was asked to do; may be empty.
        before: The same run as an earlier model read it; where both have the same encoder, which
            is the usual case, its turns need not be encoded again.

    Raises:
        ConfigError: If the model can only be asked about whole runs.
    """

    def __init__(
        self,
        attributor: Attributor,
        run_id: str,
        task: str = "",
        before: OpenRun | None = None,
    ) -> None:
        bagger, scorer = attributor.bagger, attributor.scorer
        if not isinstance(bagger, DraftMaker) or not isinstance(scorer, TurnScorer):
            raise ConfigError(
                f"{type(scorer).__name__}: expected a model that takes turns one by one, such as "
                "the one that dcl.load gives"
            )
        self.id = run_id
        self.task = task
        self._calibration = attributor.calibration
        self._scorer = scorer
        self._draft = bagger.start(task)
        self._task: Floats = scorer.encoder([self._draft.task])[0]
        self._vectors: list[Floats] = []
        self._known: dict[bytes, Floats] = {}
        if before is not None and _digest(before._scorer) == _digest(scorer) is not None:
            windows = (window.tobytes() for window in before._draft.windows)
            self._known = dict(zip(windows, before._vectors, strict=True))

    @property
    def turns(self) -> Sequence[Turn]:
        """The turns so far."""
        return self._draft.turns

    @property
    def nbytes(self) -> int:
        """Memory that the run takes, roughly."""
        return self._draft.nbytes + self._task.nbytes * (1 + len(self._vectors))

    def extend(self, turns: Sequence[Turn]) -> None:
        """Add turns and encode them.

        Args:
            turns: In time order; may be none.
        """
        if turns:
            self._draft.extend(turns)
            windows = self._draft.windows[len(self._vectors) :]
            known = self._known
            unknown = [window for window in windows if window.tobytes() not in known]
            fresh = iter(self._scorer.encoder(unknown) if unknown else ())
            self._vectors.extend(
                known[window.tobytes()] if window.tobytes() in known else next(fresh)
                for window in windows
            )
            self._known = {}

    def attribute(self) -> Attribution:
        """Attribute the run as it stands; at least one turn must be there.

        Raises:
            TraceError: If there is no turn.
            ArtifactError: If the model gives a number that is none.
        """
        trajectory = Trajectory(self.id, self.task, tuple(self._draft.turns))
        logits = self._scorer.score(self._draft.bag(), np.stack(self._vectors), self._task)
        attribution = decode(trajectory, logits, self._calibration)
        if not attribution.is_finite:
            raise ArtifactError(
                f"the model gave no number (NaN) for the run {self.id}: it is damaged; check it "
                "with dcl models verify"
            )
        return attribution


def _digest(scorer: TurnScorer) -> bytes | None:
    """What tells encoders that give equal vectors from others; None if this one does not say."""
    digest: bytes | None = getattr(scorer.encoder, "digest", None)
    return digest
