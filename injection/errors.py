"""What can go wrong while failures are made, each with the exit code of the command line.

DclError
└── InjectionError            2
    ├── AttackError           2      an attack that left no trace; never labelled
    ├── ModelError            3      an endpoint that gave no usable reply
    ├── BudgetError           5      calls or tokens are used up; the work resumes later
    └── CheckError            3      an answer that no checker can judge
"""

from __future__ import annotations

from dcl.errors import DclError


class InjectionError(DclError):
    """Base of all errors of this package."""


class AttackError(InjectionError):
    """The attack does not apply, did not change the text, or never fired."""


class ModelError(InjectionError):
    """A model gave no usable reply; the run it belongs to says nothing about the system."""

    exit_code = 3


class BudgetError(InjectionError):
    """The budget of calls or tokens is used up."""

    exit_code = 5


class CheckError(InjectionError):
    """An answer cannot be judged: a damaged task, or a judge that did not decide."""

    exit_code = 3
