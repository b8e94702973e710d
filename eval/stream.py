"""Text of an answer while it grows, and the colours that say how each of its tokens came."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from .samples import BONUS, CORRECTED, DRAFTED, PLAIN, Origin

_DEPTHS = ("32", "36", "34", "35")
"""Colours of drafted tokens by depth, from 1: green, cyan, blue; magenta of all that are deeper."""
_OWN = {PLAIN: "", CORRECTED: "4;33", BONUS: "1"}
"""Of the target's own tokens: none, underlined yellow, bold."""
_FIRST: Origin = (PLAIN, 0)


class TextStream:
    """Text of a growing answer, in pieces that are never taken back.

    Tokens may end within a character, and what stands before a token can change how it reads (blanks); so a token
    is decoded together with a few before it, and a piece that ends in an unfinished character waits: it belongs to the
    token that completes it.

    Args:
        write: called with each piece and the origin of the token that completed it.

    Attributes:
        text: the pieces so far.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str, Origin], None] | None) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.tokens: list[int] = []
        self.text = ""
        self.start = self.shown = 0  # tokens[start:shown] are the context, those behind them were not written yet
        self.origin = _FIRST

    def feed(self, token: int, origin: Origin) -> None:
        """Take a token and write what is complete by now."""
        self.tokens.append(token)
        self.origin = origin
        new = self._new()
        if not new.endswith("\ufffd"):
            self._write(new)

    def end(self) -> None:
        """Write what is left, complete or not."""
        self._write(self._new())

    def _new(self) -> str:
        before = self._read(self.tokens[self.start : self.shown])
        return self._read(self.tokens[self.start :])[len(before) :]

    def _write(self, new: str) -> None:
        if new:
            self.start, self.shown = self.shown, len(self.tokens)
            self.text += new
            if self.write:
                self.write(new, self.origin)

    def _read(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def wants_colour(asked: bool | None, stream: TextIO) -> bool:
    """Whether to colour what goes to a stream: what was asked for, else on terminals, unless NO_COLOR is set."""
    if asked is not None:
        return asked
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, origin: Origin) -> str:
    """A text in the colour of its origin, as terminals read it; blanks before it stay as they are."""
    kind, depth = origin
    code = _DEPTHS[min(depth, len(_DEPTHS)) - 1] if kind == DRAFTED else _OWN[kind]
    shown = text.lstrip()
    return f"{text[: len(text) - len(shown)]}\x1b[{code}m{shown}\x1b[0m" if code and shown else text


def count_origins(origins: Sequence[Origin]) -> dict[str, Any]:
    """How many tokens came how: {"drafted": [by depth, from 1], "corrected", "bonus", "plain"}."""
    kinds, depths = Counter(kind for kind, _ in origins), Counter(d for kind, d in origins if kind == DRAFTED)
    own = {kind: kinds[kind] for kind in (CORRECTED, BONUS, PLAIN)}
    return {DRAFTED: [depths[d] for d in range(1, max(depths, default=0) + 1)], **own}


def legend(counts: Mapping[str, Any], colour: bool) -> str:
    """What `count_origins` returned in one line, each kind in its colour where there are any.

    E.g. `drafted 23 (at depth 1: 12, 2: 7, 3: 4), corrected 10, bonus 3, plain 1`.
    """

    def shown(text: str, origin: Origin) -> str:
        return paint(text, origin) if colour else text

    drafted = counts[DRAFTED]
    parts = [shown(f"{d}: {n}", (DRAFTED, d)) for d, n in enumerate(drafted, 1)]
    by_depth = f" (at depth {', '.join(parts)})" if parts else ""
    own = [shown(f"{kind} {counts[kind]}", (kind, 0)) for kind in (CORRECTED, BONUS, PLAIN)]
    return ", ".join([f"drafted {sum(drafted)}{by_depth}", *own])
