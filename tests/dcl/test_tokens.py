from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import any_text, light, make_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from dcl import tokens as tokens_module
from dcl.formats import read_trajectories
from dcl.shipped import find_model
from dcl.tokens import Tokens, split_words

ODD = [
    "",
    " \t\r\n",
    "a\x0bb\x1cc\x00d\x7fe",
    "caf\u00e9 cafe\u0301 \u0301a \u200bx a\u200bb \ufeffy",
    "don\u2019t \u201cquote\u201d \u2014 dash\u2014dash \u2026",
    "\u8bf7\u6839\u636e results \u7ed3\u679c",
    "x[SEP]y [MASK] [CLS]a [PAD] [UNK]",
    "\u00a0a\u2028b\u3000c\u0085d",
    "x" * 150 + " " + "1" * 99,
    '{"a": [1, 2.5e-3], "b_c": "$x^{2}$"}\n```py\nprint("\\n")```',
    "\U0001f642\U0001f642 a\U0001f642 \u0130\u0131\u00df\ufb01",
    "a\ud83d b",
]
PARTS = ("a", "B", "é", "\u0301", " ", "\n", ".", "'", "[SEP]", "\x1f", "7")


@pytest.fixture(scope="module")
def shipped() -> Tokenizer:
    return Tokenizer.from_file(str(find_model("base") / "tokenizer.json"))


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    """What the tokenizer makes of the text in one piece."""
    clean = text.encode("utf-8", "replace").decode("utf-8")
    return list(tokenizer.encode(clean, add_special_tokens=False).ids)


@pytest.mark.parametrize("text", ODD)
def test_words_in_a_row_are_the_text(shipped: Tokenizer, text: str) -> None:
    tokens = Tokens(shipped)
    expected = whole(shipped, text)
    for _ in range(2):  # learnt, then known
        assert tokens([text])[0].tolist() == expected


@light
@given(st.text(st.characters(codec="utf-8"), max_size=80) | any_text)
def test_any_text_has_the_ids_of_the_tokenizer(shipped: Tokenizer, text: str) -> None:
    assert Tokens(shipped)([text])[0].tolist() == whole(shipped, text)


@light
@given(st.lists(st.sampled_from(PARTS)))
def test_any_mixture_has_the_ids_of_the_tokenizer(shipped: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    assert Tokens(shipped)([text])[0].tolist() == whole(shipped, text)


@pytest.mark.data
@pytest.mark.parametrize("log", ["aegis/validation.jsonl.xz", "whowhen/algorithm-generated"])
def test_real_turns_have_the_ids_of_the_tokenizer(
    data_dir: Path, shipped: Tokenizer, log: str
) -> None:
    tokens = Tokens(shipped)
    for run in islice(read_trajectories(data_dir / log), 5):
        for turn in run.turns:
            assert tokens([turn.content])[0].tolist() == whole(shipped, turn.content)


def test_words_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "_MOST_WORDS", 3)
    tokenizer = make_tokenizer()
    tokens = Tokens(tokenizer)
    texts = ["the sum is", "wrong again", "skip the sum", "the sum is wrong again skip", "x" * 90]
    for text in texts * 2:
        assert tokens([text])[0].tolist() == whole(tokenizer, text)
        assert len(tokens._known) <= 3


def test_another_kind_of_tokenizer_reads_whole_texts() -> None:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "the": 1, "sum": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokens = Tokens(tokenizer)
    assert tokens(["the sum, the"])[0].tolist() == whole(tokenizer, "the sum, the")
    assert not tokens._known


def test_words_and_marks_are_told_apart() -> None:
    assert split_words("It's 3.5, ok?") == ["It", "'", "s", "3", ".", "5", ",", "ok", "?"]
    assert split_words("a.b caf\u00e9.x c.d") == ["a", ".", "b", "caf\u00e9.x", "c", ".", "d"]
