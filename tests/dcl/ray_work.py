"""Small work for the workers of a cluster, which find it by its name."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence

from dcl.errors import ArtifactError, ConfigError


def label(number: int, text: str) -> tuple[int, str, int, str]:
    time.sleep(0.05)  # so that one worker is not done before the other looks for work
    return number, text, os.getpid(), os.getcwd()


def refuse(number: int) -> int:
    if number == 1:
        raise ArtifactError("a model that is damaged")
    return number


def count_up(top: int) -> Iterator[int]:
    if top < 0:
        raise ConfigError("a file that is gone")
    yield from range(top)


def start_double(offset: int) -> Callable[[Sequence[int]], list[tuple[int, int]]]:
    if offset < 0:
        raise ArtifactError("no model")
    return functools.partial(double, offset)


def double(offset: int, numbers: Sequence[int]) -> list[tuple[int, int]]:
    time.sleep(0.01)
    return [(2 * number + offset, os.getpid()) for number in numbers]
