from __future__ import annotations

from collections.abc import Iterator

import pytest
from spy import Spy


@pytest.fixture
def spy() -> Iterator[Spy]:
    """A monitor that has lost nothing when the test is over."""
    monitor = Spy()
    with monitor:
        yield monitor
        monitor.check()
