"""Prompts into the cache, in chunks through the same attention; a beginning shared with the prompt before is copied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...heads.base import Needs
from ...heads.target import Target, join_states
from .cache import TreeCache
from .probe import forward_with_cache
from .transfer import upload

PREFILL_ROWS = 512
# Shorter common beginnings aren't worth the copy.
_MIN_SHARED = 8
# Prompts that run in one pass: so few that a row's bits don't depend on how many there are.
_TOGETHER = 8


@dataclass
class Prefilled:
    """A prompt in the cache: logits [1, V] of its last row, aux states [n, A*H] and the last one [n, H] if needed."""

    logits: Tensor
    aux: Tensor
    last: Tensor | None


class Prefill:
    """Runs prompts, and remembers the latest one: later prompts take over its rows as far as the tokens agree.

    Prompts of one chat template begin alike: with a default system prompt that is about half of a short prompt. What is
    left of several such prompts runs in one pass, aligned at their ends.

    Args:
        states: what `target.capture(needs)` fills at each forward.
    """

    def __init__(self, target: Target, cache: TreeCache, needs: Needs, states: dict[int, Tensor]) -> None:
        self.target, self.cache, self.needs, self.states = target, cache, needs, states
        self.tokens: list[int] = []
        self.row = -1  # the cache row that begins with `tokens`; rows of finished sequences stay until they are reused
        self.aux = torch.empty(0)
        self.last: Tensor | None = None

    def run(self, slot: int, prompts: list[list[int]]) -> list[Prefilled]:
        """Fill the empty cache rows from `slot` on, one with each prompt."""
        done: list[Prefilled] = []
        while len(done) < len(prompts):
            rest = prompts[len(done) : len(done) + _TOGETHER]
            count, rows = self._together(rest)
            done += self._pass(slot + len(done), rest[:count], rows)
        return done

    def moved(self, source: int, goal: int) -> None:
        """Row `goal` was overwritten by that of `source`."""
        if source != goal and self.row in (source, goal):
            self.row = goal if self.row == source else -1

    def _together(self, prompts: list[list[int]]) -> tuple[int, int]:
        """How many of the first prompts can run in one pass, and with how many rows each.

        Each runs as many rows as the one that shares least with the latest prompt.
        """
        rows = 0
        for i, tokens in enumerate(prompts):
            most = max(rows, len(tokens) - self._shared(tokens))
            if i and (most > min(len(p) for p in prompts[: i + 1]) or most * (i + 1) > PREFILL_ROWS):
                return i, rows
            rows = most
        return len(prompts), rows

    def _pass(self, slot: int, prompts: list[list[int]], rows: int) -> list[Prefilled]:
        """Run the last `rows` tokens of every prompt, the ones before them being those of the latest prompt."""
        kept = [len(p) - rows for p in prompts]
        for i, start in enumerate(kept):
            if start:
                self.cache.copy(self.row, slot + i, start)
        filled = [Prefilled(torch.empty(0), torch.empty(len(p), 0, device=self.target.device), None) for p in prompts]
        for at in range(0, rows, PREFILL_ROWS):
            ends = [start + min(at + PREFILL_ROWS, rows) for start in kept]
            new = [p[start + at : end] for p, start, end in zip(prompts, kept, ends, strict=True)]
            tokens = upload(new, self.target.device)
            depth = torch.arange(tokens.shape[1], device=tokens.device).expand(len(prompts), -1)
            with self.cache.step(slot, len(prompts), depth, None) as context:
                logits = forward_with_cache(self.target, tokens, context.positions, self.cache, logits_to_keep=1)
            states = join_states(self.states, self.needs, self.target.n_layers) if self.states else None
            for i, start in enumerate(kept):
                self.cache.advance(slot + i, tokens.shape[1])
                filled[i].logits = logits[i]
                if states is not None:
                    aux, last = states
                    self._keep_states(filled[i], aux[i], None if last is None else last[i], start, start + at)
        self.tokens, self.row = prompts[-1], slot + len(prompts) - 1
        self.aux, self.last = filled[-1].aux, filled[-1].last
        return filled

    def _keep_states(self, filled: Prefilled, aux: Tensor, last: Tensor | None, shared: int, first: int) -> None:
        """Write the states of a prompt's rows from `first` on; its first `shared` rows are the latest prompt's.

        Room for all rows is made at the first call: joined pieces would be held twice.
        """
        count, end = len(filled.aux), first + len(aux)
        if first == shared:
            filled.aux = aux.new_empty(count, aux.shape[-1])
            if shared:
                filled.aux[:shared] = self.aux[:shared]
            if last is not None:
                filled.last = last.new_empty(count, last.shape[-1])
                if shared and self.last is not None:
                    filled.last[:shared] = self.last[:shared]
        filled.aux[first:end] = aux
        if last is not None and filled.last is not None:
            filled.last[first:end] = last

    def _shared(self, tokens: list[int]) -> int:
        """Rows of the latest prompt that this one begins with, its own last row excluded."""
        limit = min(len(self.tokens), len(tokens) - 1) if self.row >= 0 else 0
        same = next((i for i in range(limit) if self.tokens[i] != tokens[i]), limit)
        return same if same >= _MIN_SHARED else 0
