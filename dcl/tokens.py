"""Texts to token ids; every word is tokenised once and looked up from then on.

Word pieces of BERT never cross a blank or a punctuation mark, so the ids of a text are those of its
words in a row. A log repeats its words: looking them up takes a sixth of the time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

_MOST_WORDS = 1 << 15  # that are kept; some 8 MB
_LONGEST = 40  # characters of a word that is kept
_ODD = re.compile(r"[^\t\n\r -~]")
_BLANKS = re.compile(r"[ \t\n\r]+")
_PLAIN = re.compile(r"[A-Za-z0-9]+|[^A-Za-z0-9 \t\n\r]")

Ids = tuple[int, ...]


class Tokens:
    """Token ids of whole texts; safe to share between threads.

    Args:
        tokenizer: Any tokenizer; words of one that is not made like BERT's are not kept.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._known: dict[str, Ids] = {}
        self._special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        self._has_words = (
            isinstance(tokenizer.model, WordPiece)
            and isinstance(tokenizer.normalizer, BertNormalizer)
            and isinstance(tokenizer.pre_tokenizer, BertPreTokenizer)
        )

    def __call__(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Token ids of texts, without the special tokens around them.

        Lone surrogates, which logs cut inside an emoji hold, become question marks.

        Args:
            texts: Any texts, also empty ones.

        Returns:
            One `(n,)` int32 a text, n >= 0.
        """
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        return [np.array(ids, dtype=np.int32) for ids in map(self._read, clean)]

    def _read(self, text: str) -> Sequence[int]:
        """Token ids of one text."""
        if not self._has_words or any(token in text for token in self._special):
            return self._tokenize([text])[0]
        words = split_words(text)
        known = self._known  # the dictionary of this call, whatever other threads do
        try:
            return [*chain.from_iterable([known[word] for word in words])]
        except KeyError:
            return [*chain.from_iterable(self._learn(words))]

    def _learn(self, words: Sequence[str]) -> list[Ids]:
        """Token ids of words of which some are new."""
        known = self._known
        missing = [word for word in dict.fromkeys(words) if word not in known]
        fresh = dict(zip(missing, self._tokenize(missing), strict=True))
        kept = {word: ids for word, ids in fresh.items() if len(word) <= _LONGEST}
        if len(known) + len(kept) > _MOST_WORDS:
            self._known = kept if len(kept) <= _MOST_WORDS else {}
        else:
            known.update(kept)
        return [fresh[word] if word in fresh else known[word] for word in words]

    def _tokenize(self, texts: Sequence[str]) -> list[Ids]:
        """What the tokenizer says."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [tuple(encoding.ids) for encoding in encodings]


def split_words(text: str) -> list[str]:
    """Pieces of a text that word pieces never cross, in order.

    Args:
        text: Any text.

    Returns:
        Words and punctuation marks. What stands between two blanks and holds a character that is
        no printable ASCII stays whole, as accents and invisible characters join what is around.
    """
    if not _ODD.search(text):
        return _PLAIN.findall(text)
    words: list[str] = []
    for chunk in _BLANKS.split(text):
        if _ODD.search(chunk):
            words.append(chunk)
        else:
            words += _PLAIN.findall(chunk)
    return words
