"""Labelled turns to show beside a finding: what a person has called the same kind of fault before.

The index of one system holds hundreds of turns, so one matrix product finds the nearest in well
under a millisecond; an approximate index would be another dependency and no faster.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcl.attribution import Attributor
from dcl.errors import ArtifactError, ConfigError
from dcl.files import whole
from dcl.taxonomy import ErrorMode
from dcl.trajectory import Example, Fault, Trajectory

_SNIPPET = 200  # characters of a turn that are kept


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A labelled turn that is like another one.

    Args:
        run: Id of the run that it stands in.
        fault: What people, or the labels of a data set, say of it.
        text: The start of the turn.
        similarity: Cosine of the two turn vectors, -1 to 1.
    """

    run: str
    fault: Fault
    text: str
    similarity: float


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """Vectors of labelled turns.

    Args:
        vectors: `(n, E)` float16, unit norm.
        rows: Run, digest of the run, fault and text of each, as JSON objects.
    """

    vectors: NDArray[np.float16]
    rows: tuple[dict[str, Any], ...]

    def find(
        self,
        vector: NDArray[np.float32],
        *,
        mode: ErrorMode | None = None,
        run: Trajectory | None = None,
    ) -> Neighbour | None:
        """The labelled turn that is most like a turn.

        Args:
            vector: `(E,)`, unit norm.
            mode: Only faults of this mode count if there are any.
            run: Turns of this run do not count, whatever its id: ids recur.

        Returns:
            The nearest; None if the index holds no other run.
        """
        own = None if run is None else digest_run(run)
        others = [i for i, row in enumerate(self.rows) if row["digest"] != own]
        alike = [i for i in others if mode and self.rows[i]["fault"].get("mode") == mode.value]
        among = alike or others
        if not among:
            return None
        cosine = self.vectors[among].astype(np.float32) @ vector
        best = int(np.argmax(cosine))
        row = self.rows[among[best]]
        fault = Fault.from_dict(row["fault"])
        return Neighbour(row["run"], fault, row["text"], round(float(cosine[best]), 4))


def build_index(attributor: Attributor, examples: Iterable[Example]) -> Index:
    """Vectors of the turns that show labelled faults.

    A fault without a step stands for the turn of its agent that the model calls the best evidence.

    Args:
        attributor: A model with an encoder.
        examples: Labelled runs; agents that never speak are passed over.

    Raises:
        ConfigError: If the model has no encoder, or no labelled turn is there.
    """
    encoder = getattr(attributor.scorer, "encoder", None)
    if encoder is None:
        raise ConfigError("expected a model with an encoder of turns")
    vectors, rows = [], []
    for example in examples:
        run = example.trajectory
        found = None
        windows = attributor.bagger(run).windows if example.faults else ()
        for fault in example.faults or ():
            if fault.agent not in run.agents:
                continue
            turn = None if fault.step is None else run.turn_at(fault.step, fault.agent)
            if turn is None:
                found = found or attributor(run)
                mode = None if fault.mode is None else fault.mode.index
                turn = found.turn_of(run.agents.index(fault.agent), mode)
            vectors.append(encoder([windows[turn]])[0])
            text = " ".join(run.turns[turn].content[: 4 * _SNIPPET].split())[:_SNIPPET]
            rows.append(
                {
                    "run": run.id,
                    "digest": digest_run(run),
                    "fault": fault.to_dict(),
                    "text": text,
                }
            )
    if not rows:
        return Index(np.zeros((0, encoder.width), dtype=np.float16), ())
    return Index(np.stack(vectors).astype(np.float16), tuple(rows))


def digest_run(run: Trajectory) -> str:
    """32 hex digits that two runs share where the task and all turns are the same.

    Args:
        run: Its id and metadata do not count.
    """
    said = [run.task, *((turn.agent, turn.content) for turn in run.turns)]
    return blake2b(json.dumps(said).encode("ascii"), digest_size=16).hexdigest()


def save_index(index: Index, file: Path) -> None:
    """Write an index as plain arrays, in one step."""
    with whole(file) as part, part.open("wb") as stream:
        rows = json.dumps(index.rows).encode("ascii")
        np.savez(stream, vectors=index.vectors, rows=np.frombuffer(rows, dtype=np.uint8))


def load_index(file: Path) -> Index:
    """Read what `save_index` wrote.

    Raises:
        ArtifactError: If it is missing or damaged.
    """
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as kept:
            vectors, text = kept["vectors"], kept["rows"].tobytes()
        rows = tuple(json.loads(text))
        sound = vectors.ndim == 2 and len(vectors) == len(rows)
        sound = sound and all({"run", "digest", "fault", "text"} <= row.keys() for row in rows)
    except Exception as error:  # a damaged archive raises almost anything
        raise ArtifactError(f"{file}: expected an index of labelled turns: {error}") from None
    if not sound:
        raise ArtifactError(
            f"{file}: expected a vector with run, digest, fault and text for each labelled turn, "
            "got an index of another version; fit the model again"
        )
    return Index(vectors, rows)
