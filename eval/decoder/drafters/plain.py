"""Plain decoding: trees of a root alone. The baseline of every speed-up, and the recorder of training states."""

from __future__ import annotations

import torch
from torch import Tensor

from ....heads.base import Needs
from ..sampling import Draws
from ..transfer import Download
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
        # rows [B, P, F] of the latest step on their way to the host, and where the sequences ended before and after it
        self.coming: tuple[Download, list[int], list[int]] | None = None

    def allocate(self, slots: int, capacity: int) -> None:
        """See Drafter."""
        self.size, self.states, self.lengths, self.coming = (slots, capacity), None, [0] * slots, None

    def begin(self, slot: int, tokens: Tensor, aux: Tensor, last: Tensor | None) -> None:
        """See Drafter."""
        if self.record:
            self._take_in()
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
            self._take_in()  # its copy was queued before what this step's fetch waited for
            rows = torch.cat((aux, last), -1) if last is not None else aux
            rows = rows.gather(1, verdict.path[..., None].expand(-1, -1, rows.shape[-1]))
            b = len(step.lengths)
            self.coming = Download(rows.to(torch.bfloat16)), self.lengths[:b], list(step.lengths)
            self.lengths[:b] = step.lengths

    def _take_in(self) -> None:
        """Write the rows of the latest step to their places."""
        if self.coming is not None and self.states is not None:
            download, starts, ends = self.coming
            for states, rows, start, end in zip(self.states, download.value(), starts, ends, strict=False):
                states[start:end] = rows[: end - start]
            self.coming = None

    def release(self, slot: int, last: int) -> None:
        """See Drafter."""
        if self.states is not None and slot != last:
            self._take_in()
            n = self.lengths[last]
            self.states[slot, :n] = self.states[last, :n]
            self.lengths[slot] = n

    def recorded(self, slot: int, rows: int) -> Tensor | None:
        """See Drafter."""
        if self.states is None:
            return None
        self._take_in()
        with torch.inference_mode(False):  # the copy is an ordinary tensor: it may be trained on
            return self.states[slot, :rows].clone()
