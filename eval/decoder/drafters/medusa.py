"""Medusa's drafter: heads that look at no drafted token."""

from __future__ import annotations

from torch import Tensor

from .network import HeadDrafter


class MedusaDrafter(HeadDrafter):
    """Head s runs once a sequence, on the committed row's state: its guesses are those of all nodes of a depth."""

    def first(self, b: int) -> tuple[Tensor, Tensor | None]:
        """See grow.Network: the state is the committed row's at every depth, so none is handed down."""
        return super().first(b)[0], None

    def expand(
        self, tokens: Tensor, states: Tensor | None, depth: int, seen: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See grow.Network: one row of logits for all nodes."""
        b = len(tokens)
        positions = self.cache.lengths[:b, None] + depth - 1
        return self._run(self.cache, tokens[:, :1], self.state[:b], positions, None, step=depth)[0], None


DRAFTER = MedusaDrafter
