"""Heads that the target's own frozen output rows read out."""

from __future__ import annotations

import abc

from torch import Tensor, nn

from .base import DraftHead, TargetParts


class TargetReadout(DraftHead, abc.ABC):
    """Shares the target's rows of the draft vocabulary, which are no part of its checkpoint."""

    lm_head: nn.Linear
    """These rows; exists after `attach`."""

    def attach(self, parts: TargetParts) -> None:
        """See DraftHead: the output rows."""
        rows = self.output_weight(parts)
        self.lm_head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(rows, requires_grad=False)

    def output_weight(self, parts: TargetParts) -> Tensor:
        """The target's rows of the draft vocabulary (ids ascend: a full one is the target's weight itself)."""
        rows = parts.lm_head
        return rows if len(self.vocab) == len(rows) else rows[self.target_ids]

    def logits(self, readout: Tensor) -> Tensor:
        """Of the attached rows."""
        out: Tensor = self.lm_head(readout)
        return out
