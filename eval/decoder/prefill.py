"""Prompts into the cache, in chunks through the same attention; a beginning shared with the prompt before is copied."""

from __future__ import annotations

import torch
from torch import Tensor

from ...heads.base import Needs
from ...heads.target import Target, join_states
from .cache import TreeCache
from .probe import forward_with_cache

PREFILL_ROWS = 512
# Shorter common beginnings aren't worth the copy.
_MIN_SHARED = 8


class Prefill:
    """Runs prompts; keeps the latest one, whose rows serve the next prompt as far as the tokens agree.

    Prompts of one chat template begin alike: with a default system prompt that is about half of a short prompt.

    Args:
        states: what `target.capture(needs)` fills at each forward.
        spare: a cache row that no sequence uses.
    """

    def __init__(self, target: Target, cache: TreeCache, needs: Needs, states: dict[int, Tensor], spare: int) -> None:
        self.target, self.cache, self.needs, self.states, self.spare = target, cache, needs, states, spare
        self.tokens: list[int] = []
        self.aux: Tensor | None = None
        self.last: Tensor | None = None

    def run(self, slot: int, tokens: list[int]) -> tuple[int, Tensor, Tensor | None]:
        """Fill the empty cache row `slot` with a prompt.

        Returns:
            The first token after it, aux states [n, A*H] and the last state [n, H] (None unless needed) of its n rows.
        """
        start = self._shared(tokens)
        self.cache.copy(self.spare, slot, start)
        aux = [self.aux[:start]] if self.aux is not None else []
        last = [self.last[:start]] if self.last is not None else []
        logits = None
        for at in range(start, len(tokens), PREFILL_ROWS):
            rows = torch.tensor(tokens[at : at + PREFILL_ROWS], device=self.target.device)
            n = len(rows)
            depth = torch.arange(n, device=rows.device)[None]
            causal = torch.ones(1, n, n, dtype=torch.bool, device=rows.device).tril()
            with self.cache.step(slot, 1, depth, causal) as context:
                logits = forward_with_cache(self.target, rows[None], context.positions, self.cache, logits_to_keep=1)
            self.cache.advance(slot, n)
            if self.states:
                a, h = join_states(self.states, self.needs, self.target.n_layers)
                aux.append(a[0])
                last += [h[0]] if h is not None else []
        assert logits is not None  # at least the prompt's last row always runs
        self.cache.copy(slot, self.spare, len(tokens))
        self.tokens = tokens
        self.aux = torch.cat(aux) if aux else torch.empty(len(tokens), 0, device=self.target.device)
        self.last = torch.cat(last) if last else None
        return int(logits[0, -1].argmax()), self.aux, self.last

    def _shared(self, tokens: list[int]) -> int:
        """Rows of the latest prompt that this one begins with, its own last row excluded."""
        limit = min(len(self.tokens), len(tokens) - 1)
        same = next((i for i in range(limit) if self.tokens[i] != tokens[i]), limit)
        return same if same >= _MIN_SHARED else 0
