"""Arguments and options that several commands of the command line share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcl.formats import FORMATS
from dcl.shipped import SHIPPED, find_model

if TYPE_CHECKING:
    from dcl.engines import EngineName


class Output(str, Enum):
    """What `--output` takes."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


class Engine(str, Enum):
    """What `--engine` takes."""

    LOCAL = "local"
    RAY = "ray"


class Backend(str, Enum):
    """What `--backend` takes."""

    ONNXRUNTIME = "onnxruntime"
    OPENVINO = "openvino"

    @property
    def engine(self) -> EngineName:
        """The engine of this name."""
        return "onnxruntime" if self is Backend.ONNXRUNTIME else "openvino"


def check_format(value: str) -> str:
    """The name of a format.

    Raises:
        typer.BadParameter: If there is none of this name; the message names them all.
    """
    if value not in ("auto", *FORMATS):
        raise typer.BadParameter(f"expected auto, {', '.join(FORMATS)}; got {value!r}")
    return value


def check_prob(value: float | None) -> float | None:
    """A probability; the range check of typer lets NaN pass.

    Raises:
        typer.BadParameter: If it is not from 0 to 1.
    """
    if value is not None and not 0 <= value <= 1:
        raise typer.BadParameter(f"expected a probability from 0 to 1, got {value}")
    return value


Paths = Annotated[
    list[str], typer.Argument(metavar="FILE|FOLDER|-...", help="Logs; - is standard input.")
]
Format = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"Format of the logs: auto, {', '.join(FORMATS)}.",
        callback=check_format,
    ),
]
BASE = find_model("base")
Model = Annotated[
    Path | None,
    typer.Option(
        metavar="NAME|DIR",
        parser=find_model,
        help=f"{', '.join(SHIPPED)}, or a model folder; without it, base.",
    ),
]
ModelFolder = Annotated[
    Path,
    typer.Argument(
        metavar="[NAME|DIR]", parser=find_model, help=f"{', '.join(SHIPPED)}, or a model folder."
    ),
]
Injected = Annotated[
    bool,
    typer.Option(
        "--injected",
        help="Read logs of faults that were injected by prompt, as in AEGIS; otherwise natural "
        "failures are expected.",
    ),
]
Out = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write there; the file appears when whole.")
]
TopK = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Take the N likeliest faults, no threshold."),
]
WithBackend = Annotated[
    Backend | None,
    typer.Option(help="What encodes turns; without it, the quickest that fits the model."),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Turns encoded side by side; without it, all cores."),
]
