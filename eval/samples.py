"""How each token of an answer came: from the prompt's pass, from a draft, or from the target itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decoder.loop import Result  # imports torch, and a page needs none

PLAIN, DRAFTED, CORRECTED, BONUS = KINDS = ("plain", "drafted", "corrected", "bonus")
"""`plain`: the prefill's token, or that of a step without a draft. `drafted`: an accepted draft. `corrected`: the
target's own token where the draft went on with others. `bonus`: the target's own token behind a draft that was accepted
down to its deepest token."""

Origin = tuple[str, int]
"""A kind, and the place in its step: d for a draft of depth d; accepted drafts + 1 for the target's token behind them;
0 for the prefill's token."""

_UNFINISHED = "\ufffd"
"""What decoding makes of the first bytes of a character."""


def step_origins(drafted: int, accepted: int, emitted: int) -> list[Origin]:
    """Origins of the tokens that one step emitted.

    Where the answer ended within the accepted drafts (emitted <= accepted), the target's own token was cut off. Behind
    a path of a tree that ends above the tree's deepest node stands a corrected token, though the path may have had no
    child there.

    Args:
        drafted, accepted, emitted: of the step's log.
    """
    own = PLAIN if drafted == 0 else BONUS if accepted == drafted else CORRECTED
    return [(DRAFTED, d) if d <= accepted else (own, d) for d in range(1, emitted + 1)]


def origins(result: Result) -> list[Origin]:
    """One for each token of an answer."""
    steps = [step_origins(s.drafted, s.accepted, s.emitted) for s in result.steps]
    return [(PLAIN, 0), *(origin for step in steps for origin in step)]


def pieces(tokenizer: Any, result: Result) -> list[dict[str, Any]]:
    """The answer's text, piece by piece; special tokens show no text.

    A character that several tokens make up belongs to the one that completes it.

    Returns:
        {"text", "kind", "depth"} of each token that shows text, in order; the texts join to the decoded answer.
    """
    ends = _text_ends(tokenizer, result.tokens)
    text = _read(tokenizer, result.tokens)
    found = []
    for (kind, depth), start, end in zip(origins(result), [0, *ends], ends, strict=False):
        if end > start:
            found.append({"text": text[start:end], "kind": kind, "depth": depth})
    return found


def _text_ends(tokenizer: Any, tokens: Sequence[int]) -> list[int]:
    """Characters of the whole text that are settled after each token; the last token settles all of them.

    Every beginning is decoded anew, as what stands before a token can change how it reads (blanks): work grows with the
    square of the answer, and 2,000 tokens take about a second.
    """
    text = _read(tokenizer, tokens)
    ends: list[int] = []
    for count in range(1, len(tokens)):
        settled = _read(tokenizer, tokens[:count]).rstrip(_UNFINISHED)
        ends.append(max(ends[-1] if ends else 0, _common(text, settled)))
    return [*ends, len(text)] if tokens else []


def _common(text: str, beginning: str) -> int:
    """Length of the longest common beginning."""
    if text.startswith(beginning):
        return len(beginning)
    return next(i for i, (a, b) in enumerate(zip(text + "\0", beginning, strict=False)) if a != b)


def _read(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
