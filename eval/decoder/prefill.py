"""Prompts into the cache, in chunks through the same attention; a beginning shared with the prompt before is copied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...heads.base import Needs
from ...heads.target import Target, join_states
from .cache import TreeCache
from .probe import forward_with_cache

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
        parts: list[tuple[Tensor, Tensor | None]] = []
        logits = torch.empty(0)
        for at in range(0, rows, PREFILL_ROWS):
            ends = [start + min(at + PREFILL_ROWS, rows) for start in kept]
            new = [p[start + at : end] for p, start, end in zip(prompts, kept, ends, strict=True)]
            tokens = torch.tensor(new, device=self.target.device)
            depth = torch.arange(tokens.shape[1], device=tokens.device).expand(len(prompts), -1)
            with self.cache.step(slot, len(prompts), depth, None) as context:
                logits = forward_with_cache(self.target, tokens, context.positions, self.cache, logits_to_keep=1)
            for i in range(len(prompts)):
                self.cache.advance(slot + i, tokens.shape[1])
            if self.states:
                parts.append(join_states(self.states, self.needs, self.target.n_layers))
        done = [Prefilled(logits[i], *self._states(i, start, parts, logits)) for i, start in enumerate(kept)]
        self.tokens, self.row = prompts[-1], slot + len(prompts) - 1
        self.aux, self.last = done[-1].aux, done[-1].last
        return done

    def _states(
        self, i: int, start: int, parts: list[tuple[Tensor, Tensor | None]], like: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """States of all rows of prompt i of a pass: the first `start` are the latest prompt's."""
        if not parts:
            return like.new_empty(0, 0), None
        aux = [self.aux[:start], *(a[i] for a, _ in parts)] if start else [a[i] for a, _ in parts]
        last = [h[i] for _, h in parts if h is not None]
        if last and start and self.last is not None:
            last.insert(0, self.last[:start])
        return torch.cat(aux), torch.cat(last) if last else None

    def _shared(self, tokens: list[int]) -> int:
        """Rows of the latest prompt that this one begins with, its own last row excluded."""
        limit = min(len(self.tokens), len(tokens) - 1) if self.row >= 0 else 0
        same = next((i for i in range(limit) if self.tokens[i] != tokens[i]), limit)
        return same if same >= _MIN_SHARED else 0
