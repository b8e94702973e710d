"""Prompt Lookup: draft what followed the same last tokens earlier in the prompt or answer. No network, no training."""

from __future__ import annotations

import torch
from torch import Tensor

from ....errors import DraftsmithError
from ..sampling import Draws
from ..transfer import upload
from ..types import Drafter, HostStep, TokenTree, Verdict, chain


class NgramIndex:
    """The tokens of one sequence, and where each of their n-grams (n = 1..longest) was first followed by a token.

    Extending by a token and looking up cost the same whatever the length.
    """

    def __init__(self, tokens: list[int], longest: int) -> None:
        self.longest = longest
        self.tokens: list[int] = []
        self.first: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        """Append tokens."""
        known = self.tokens
        for token in tokens:
            # only now are the n-grams at the end followed by something: the end never finds itself
            for n in range(1, min(self.longest, len(known)) + 1):
                self.first.setdefault(tuple(known[-n:]), len(known))
            known.append(token)

    def lookup(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the first earlier occurrence of the longest n-gram that ends the sequence.

        Empty where none of its n-grams occurs earlier.
        """
        for n in range(min(self.longest, len(self.tokens)), 0, -1):
            at = self.first.get(tuple(self.tokens[-n:]))
            if at is not None:
                return self.tokens[at : at + count]
        return []


class PromptLookupDrafter(Drafter):
    """Chains copied from the sequence itself (Saxena 2023, "Prompt Lookup Decoding"); every node is a point mass.

    The longest n-gram wins, of its occurrences the earliest; short continuations are kept. A step without any match
    is a plain one.

    Args:
        max_ngram: most tokens that are matched.
        tokens: K, most tokens that are drafted.

    Raises:
        DraftsmithError: one of them is below 1.
    """

    def __init__(self, max_ngram: int = 3, tokens: int = 10) -> None:
        for name, value in (("max_ngram", max_ngram), ("tokens", tokens)):
            if value < 1:
                raise DraftsmithError(f"prompt lookup: {name} = {value} must be at least 1")
        self.max_ngram, self.depth, self.rows = max_ngram, tokens, tokens + 1
        self.sequences: dict[int, NgramIndex] = {}

    def allocate(self, slots: int, capacity: int) -> None:
        """See Drafter."""
        self.sequences = {}

    def begin(self, slot: int, tokens: Tensor, aux: Tensor, last: Tensor | None) -> None:
        """See Drafter."""
        self.sequences[slot] = NgramIndex(tokens.tolist(), self.max_ngram)

    def continuations(self, count: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """What the first `count` slots draft, as wide as the longest of them.

        Returns:
            tokens [count, L] and valid [count, L]; None where no slot finds anything.
        """
        found = [self.sequences[slot].lookup(self.depth) for slot in range(count)]
        width = max(map(len, found))
        if not width:
            return None
        lines = [[*line, *[-1] * (width - len(line))] for line in found]
        tokens = upload(lines, device)
        return tokens.clamp(min=0), tokens >= 0

    def propose(self, roots: Tensor, draws: Draws) -> TokenTree:
        """See Drafter."""
        found = self.continuations(len(roots), roots.device)
        return chain(roots[:, None]) if found is None else chain_below(roots, *found)

    def commit(self, tree: TokenTree, verdict: Verdict, aux: Tensor, last: Tensor | None, step: HostStep) -> None:
        """See Drafter."""
        for slot, tokens in enumerate(step.emitted):
            self.sequences[slot].extend(tokens)

    def release(self, slot: int, last: int) -> None:
        """See Drafter."""
        self.sequences[slot] = self.sequences[last]
        del self.sequences[last]


def chain_below(roots: Tensor, tokens: Tensor, valid: Tensor) -> TokenTree:
    """The chain of tokens [B, L] below roots [B]."""
    root = roots[:, None]
    return chain(torch.cat((root, tokens), 1), torch.cat((torch.ones_like(root, dtype=torch.bool), valid), 1))
