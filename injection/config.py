"""Reading the YAML of a run; unknown keys are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from jsonargparse import ArgumentError, ArgumentParser

from dcl.errors import ConfigError
from injection.run import RunConfig

C = TypeVar("C", bound=RunConfig)


def load_config(file: Path, replaced: Mapping[str, Any], kind: type[C]) -> C:
    """The configuration of a run.

    Args:
        file: YAML with fields of `kind`.
        replaced: Values that replace those of the file.
        kind: What is configured.

    Raises:
        ConfigError: If the file cannot be read, or a key or value is wrong.
    """
    if not file.is_file():
        raise ConfigError(
            f"{file}: expected a YAML file, found none; those in configs/injection can be copied"
        )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(kind, as_group=False)
    arguments = ["--config", str(file)]
    arguments += [f"--{key}={value}" for key, value in replaced.items()]
    try:
        read = parser.parse_args(arguments)
        if empty := [key for key, value in vars(read).items() if value is None]:
            raise ArgumentError(None, f"{empty[0]}: expected a value, got nothing")
        values = vars(parser.instantiate(read))
    except (ArgumentError, UnicodeDecodeError, OSError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(
            f"{file}: {problem}; `{kind.__name__}` in {kind.__module__.replace('.', '/')}.py says "
            "what each key takes"
        ) from None
    return kind(**{key: value for key, value in values.items() if key != "config"})
