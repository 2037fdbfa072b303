"""When a run counts as failed for whoever called: the rule behind `--fail-on`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcl.errors import ConfigError
from dcl.taxonomy import ErrorMode

if TYPE_CHECKING:
    from dcl.attribution import Attribution


@dataclass(frozen=True, slots=True)
class Gate:
    """When a run counts as failed under `--fail-on`, whatever else is shown of it.

    Args:
        mode: Only faults of this mode count; None counts all.
        prob: From this probability on, 0 to 1; None means the thresholds of the model.
    """

    mode: ErrorMode | None
    prob: float | None

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Read `0.8`, `FM-2.5` or `FM-2.5:0.8`.

        Raises:
            ConfigError: If the text is none of these.
        """
        head, colon, tail = text.partition(":")
        mode, number = None, text
        with suppress(ValueError):  # the mode first: `2.5` is one, and no probability looks so
            mode, number = ErrorMode.parse(head), tail
        if mode and not colon:
            return cls(mode, None)
        with suppress(ValueError):
            prob = float(number)
            if 0 <= prob <= 1:
                return cls(mode, prob)
        raise ConfigError(
            "--fail-on: expected a probability from 0 to 1, a mode such as FM-2.5, "
            f"or both as FM-2.5:0.8; got {text!r}"
        )

    def holds(self, attribution: Attribution) -> bool:
        """Whether a fault of this kind was found.

        Args:
            attribution: Of one run.
        """
        found = attribution.findings(threshold=self.prob)
        return any(self.mode in (None, finding.fault.mode) for finding in found)
