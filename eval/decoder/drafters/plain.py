"""Plain decoding: trees of a root alone. The baseline of every speed-up, and the recorder of training states."""

from __future__ import annotations

import torch
from torch import Tensor

from ....heads.base import Needs
from ..sampling import Draws
from ..types import Drafter, HostStep, TokenTree, Verdict, chain


class PlainDrafter(Drafter):
    """Proposes nothing.

    Args:
        record: keep the states it names (aux and last) of every row in bf16, so that results carry them: the decode
            pass has computed them anyway.
    """

    def __init__(self, record: Needs | None = None) -> None:
        self.record = record is not None
        self.needs = record or Needs()
        self.states: Tensor | None = None
        self.lengths: list[int] = []
        self.size = (0, 0)

    def allocate(self, slots: int, capacity: int) -> None:
        """See Drafter."""
        self.size, self.states, self.lengths = (slots, capacity), None, [0] * slots

    def begin(self, slot: int, tokens: Tensor, aux: Tensor, last: Tensor | None) -> None:
        """See Drafter."""
        if self.record:
            rows = torch.cat((aux, last), -1) if last is not None else aux
            if self.states is None:
                self.states = torch.empty(*self.size, rows.shape[-1], dtype=torch.bfloat16)
            self.states[slot, : len(rows)] = rows.to("cpu", torch.bfloat16)
            self.lengths[slot] = len(rows)

    def propose(self, roots: Tensor, draws: Draws) -> TokenTree:
        """See Drafter."""
        return chain(roots[:, None])

    def commit(self, tree: TokenTree, verdict: Verdict, aux: Tensor, last: Tensor | None, step: HostStep) -> None:
        """See Drafter; others may have added nodes, so the rows of the whole accepted path are recorded."""
        if self.states is not None:
            rows = torch.cat((aux, last), -1) if last is not None else aux
            rows = rows.gather(1, verdict.path[..., None].expand(-1, -1, rows.shape[-1]))
            b, p = verdict.path.shape
            # rows past a sequence's accepted ones are written behind its end, where the next step writes again
            at = torch.tensor(self.lengths[:b])[:, None] + torch.arange(p)
            self.states[torch.arange(b)[:, None], at] = rows.to("cpu", torch.bfloat16)
            self.lengths[:b] = step.lengths

    def release(self, slot: int, last: int) -> None:
        """See Drafter."""
        if self.states is not None and slot != last:
            n = self.lengths[last]
            self.states[slot, :n] = self.states[last, :n]
            self.lengths[slot] = n

    def recorded(self, slot: int, rows: int) -> Tensor | None:
        """See Drafter."""
        if self.states is None:
            return None
        with torch.inference_mode(False):  # the copy is an ordinary tensor: it may be trained on
            return self.states[slot, :rows].clone()
