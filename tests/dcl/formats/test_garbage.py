"""Whatever is fed to a parser, only the errors of the package come out."""

from __future__ import annotations

import copy
import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_aegis import record
from test_chat import CHAT
from test_magentic import EVENTS, LOG
from test_otlp import FLAT, NESTED, export
from test_whowhen import ALGORITHM_GENERATED, HAND_CRAFTED

from dcl.errors import DclError
from dcl.formats import aegis, chat, detect, magentic, native, otlp, read_examples, scan, whowhen
from dcl.trajectory import Example

PARSERS = [aegis, chat, magentic, native, otlp, whowhen]
WORDS = (
    "id turns agent content kind step schema metadata input conversation_history agent_name",
    "output faulty_agents error_type history role name question mistake_agent mistake_step",
    "messages tool_calls function arguments parts type text source spans resourceSpans scopeSpans",
    "spanId span_id context attributes key value stringValue arrayValue kvlistValue values events",
    "gen_ai.input.messages gen_ai.output.messages gen_ai.prompt.0.content gen_ai.agent.name",
    "openinference.span.kind status code parent data faults clean outcome",
)
KEYS = st.sampled_from(" ".join(WORDS).split())
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10**20)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "tool", "[", '[{"role": "user"', "LLM", "TOOL", "-5"])
)
GARBAGE = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=6),
    max_leaves=30,
)
REAL: list[Any] = [
    record(output={"faulty_agents": [{"agent_name": "Assistant1", "error_type": "FM-1.1"}]}),
    HAND_CRAFTED,
    ALGORITHM_GENERATED,
    LOG,
    {"messages": EVENTS},
    {"messages": CHAT},
    export(*FLAT),
    export(*NESTED),
    {"id": "a", "turns": [{"agent": "A", "content": "x", "step": 1}], "faults": [{"agent": "A"}]},
]


def paths(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(node, (dict, list)):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            found += paths(child, (*path, key))
    return found


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """A real document in which some values are replaced or missing."""
    document = copy.deepcopy(draw(st.sampled_from(REAL)))
    for _ in range(draw(st.integers(1, 4))):
        path = draw(st.sampled_from(paths(document)[1:] or [()]))
        if not path:
            break
        node = document
        for key in path[:-1]:
            node = node[key]
        if draw(st.booleans()):
            del node[path[-1]]
        else:
            node[path[-1]] = draw(GARBAGE)
    return document


def check(examples: list[Example]) -> None:
    """What was read can be written and read back."""
    for example in examples:
        again = native.parse(json.loads(json.dumps(example.to_dict())), "x")
        assert again == [example]


@pytest.mark.parametrize("parser", PARSERS, ids=lambda module: str(module.__name__))
@given(document=GARBAGE | mutated())
@settings(max_examples=150)
def test_parsers_raise_only_our_errors(parser: Any, document: Any) -> None:
    assert isinstance(parser.matches(document), bool)
    with suppress(DclError):
        check(parser.parse(document, "x.json"))


@given(GARBAGE | mutated())
@settings(max_examples=150)
def test_detect_names_a_format_or_says_why_not(document: Any) -> None:
    with suppress(DclError):
        detect(document)


@given(st.lists(st.binary(max_size=60) | mutated().map(lambda d: json.dumps(d).encode())))
@settings(max_examples=60)
def test_files_raise_only_our_errors(lines: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.json"
        path.write_bytes(b"\n".join(lines))
        assert all(isinstance(item, (Example, DclError)) for item in scan(path))
        with suppress(DclError):
            list(read_examples(path))


@pytest.mark.data
@pytest.mark.parametrize("cut", [0.1, 0.45, 0.9, 0.999])
def test_cut_files_give_errors(data_dir: Path, tmp_path: Path, cut: float) -> None:
    traces = data_dir / "traces"
    sources = [*traces.glob("*.json"), *(traces / "magentic_unlabelled").glob("*.json")]
    for source in sources:
        data = source.read_bytes().rstrip()
        path = tmp_path / source.name
        path.write_bytes(data[: int(len(data) * cut)])
        assert any(isinstance(item, DclError) for item in scan(path))
