"""From the text of rows to tokens and the ranges that are answers.

The tokens before an answer must be those that serving has, which encodes the prompt alone. They are, wherever the text
behind the prompt's last added token (`<|im_start|>` and the like, where texts are cut before they are encoded) gives
the same tokens alone as in the row. An answer where it doesn't, because a token lies across its start (two line breaks
that are one token), is taken out of the row and stands in one of its own, encoded in two pieces.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ..errors import DraftsmithError
from .chat_turns import Answer, Row
from .conversation import Malformed

_TAILS_KEPT = 512
_LEADS = ("", "\n")  # what an answer is encoded behind, so that it doesn't get the space that begins a text

Offsets = list[tuple[int, int]]


@dataclass(frozen=True)
class Document:
    """One document to train on.

    Attributes:
        tokens: prompt and answers.
        spans: [start, end) ranges of tokens that are answers, end-of-turn tokens included; ascending, apart.
    """

    tokens: list[int]
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class _Prompt:
    """How serving encodes a prompt.

    Attributes:
        anchor: which token of the row is its last added one, -1 if there is none; `token` that token's text.
        begin: the character behind it.
        tail: the tokens behind it.
    """

    anchor: int
    begin: int
    token: str
    tail: tuple[int, ...]


class RowEncoder:
    """Encodes rows.

    Args:
        tokenizer: a Hugging Face tokenizer with a backend of the `tokenizers` library.

    Raises:
        DraftsmithError: it has none, so that there are no offsets.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise DraftsmithError(
                f"the tokenizer of {tokenizer.name_or_path} has no fast implementation, which says where in a text its "
                f"tokens stand: give a model with a tokenizer.json"
            )
        self._backend = tokenizer.backend_tokenizer
        added = tokenizer.added_tokens_decoder
        self._added = {id: token for id, token in added.items() if token.content and not token.content.isspace()}
        self._tail = lru_cache(maxsize=_TAILS_KEPT)(self._encode_tail)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts that have their special tokens already."""
        self._whole()
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def documents(self, rows: Sequence[Row]) -> list[list[Document] | Malformed]:
        """Return the documents of each row: itself, and one for each answer that must stand apart."""
        self._whole()
        encodings = self._backend.encode_batch([row.text for row in rows], add_special_tokens=False)
        return [self._documents(row, e.ids, e.offsets) for row, e in zip(rows, encodings, strict=True)]

    def _documents(self, row: Row, ids: list[int], offsets: Offsets) -> list[Document] | Malformed:
        spans: list[tuple[int, int]] = []
        apart: list[Document] = []
        for answer in row.answers:
            prompt = self._prompt(row.text, ids, offsets, answer.start)
            first = prompt.anchor + 1 + len(prompt.tail)
            if tuple(ids[prompt.anchor + 1 : first]) == prompt.tail:
                spans += self._ranges(ids, offsets, first, answer.start, answer.spans)
                continue
            document = self._apart(row.text, ids, answer, prompt)
            if document is None:
                return Malformed("a token lies across the start of an answer")
            apart.append(document)
        shared = [Document(ids, _joined(spans))]
        return [document for document in shared + apart if document.spans]

    def _prompt(self, text: str, ids: list[int], offsets: Offsets, start: int) -> _Prompt:
        """Return how serving encodes the prompt that ends at `start`."""
        anchor = bisect_left(offsets, (start,)) - 1
        while anchor >= 0 and not (ids[anchor] in self._added and self._own_end(ids[anchor], offsets[anchor]) <= start):
            anchor -= 1
        if anchor < 0:
            return _Prompt(-1, 0, "", self._tail(text[:start], ""))
        begin = self._own_end(ids[anchor], offsets[anchor])
        token = self._added[ids[anchor]].content
        return _Prompt(anchor, begin, token, self._tail(text[begin:start], token))

    def _own_end(self, token: int, offsets: tuple[int, int]) -> int:
        """Return where the own text of an added token ends: some take in the space behind them."""
        added = self._added[token]
        return offsets[0] + len(added.content) if added.rstrip else offsets[1]

    def _encode_tail(self, text: str, token: str) -> tuple[int, ...]:
        """Return the tokens of a text that stands behind an added token, or, without one, at the beginning of all."""
        ids = self._backend.encode(token + text, add_special_tokens=False).ids
        return tuple(ids[1:] if token else ids)

    def _ranges(
        self, ids: list[int], offsets: Offsets, first: int, start: int, spans: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Return the ranges of the tokens that lie wholly in `spans` of an answer whose first token is `first`."""
        ranges = []
        for begin, end in spans:
            a = first if begin == start else self._at(offsets, begin)
            b = bisect_right(offsets, end, lo=first, key=_end)
            if b < len(ids) and ids[b] in self._added and self._own_end(ids[b], offsets[b]) <= end:
                b += 1
            if a < b:
                ranges.append((a, b))
        return ranges

    @staticmethod
    def _at(offsets: Offsets, begin: int) -> int:
        """Return the first token that begins at or behind a character.

        Some tokenizers leave the space that a token begins with out of its offsets.
        """
        at = bisect_left(offsets, (begin,))
        return at + (0 < at < len(offsets) and offsets[at - 1][1] < begin)

    def _apart(self, text: str, ids: list[int], answer: Answer, prompt: _Prompt) -> Document | None:
        """Encode prompt and answer each for itself; None if that doesn't give the same text."""
        known = [*ids[: prompt.anchor + 1], *prompt.tail]
        before = known[max(prompt.anchor, 0) :]
        segment = prompt.token + text[prompt.begin : answer.end]
        whole = self._decode(self._backend.encode(segment, add_special_tokens=False).ids)
        for lead in _LEADS:
            piece = self._backend.encode(lead + text[answer.start : answer.end], add_special_tokens=False)
            skip = bisect_left(piece.offsets, (len(lead),)) if lead else 0
            new, offsets = piece.ids[skip:], piece.offsets[skip:]
            if self._decode([*before, *new]) == whole:
                shift = len(lead) - answer.start
                moved = [(begin + shift, end + shift) for begin, end in answer.spans]
                ranges = self._ranges(new, offsets, 0, len(lead), moved)
                return Document([*known, *new], [(len(known) + a, len(known) + b) for a, b in ranges])
        return None

    def _decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def _whole(self) -> None:
        """Undo the padding and truncation that other uses of the tokenizer have left in it."""
        self._backend.no_truncation()
        self._backend.no_padding()


def _end(offsets: tuple[int, int]) -> int:
    return offsets[1]


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ascending spans, those that touch as one."""
    cuts = [i for i, (left, right) in enumerate(pairwise(spans), 1) if left[1] < right[0]]
    return [(spans[a][0], spans[b - 1][1]) for a, b in pairwise([0, *cuts, len(spans)])] if spans else []
