"""The pure train step: one batch's share of the global loss. Needs torch alone."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..heads.base import Batch, DraftHead, StepStats, TargetParts

SUMS = ("num", "den", "rows", "hits", "reached", "kept")
"""Columns of `stat_sums`."""


def global_loss(stats: Sequence[StepStats], weights: Sequence[float], denominators: Tensor) -> Tensor:
    """Return sum_s w_s * num_s / DEN_s, a scalar.

    Args:
        stats: this batch's sums by unrolled step.
        weights: w_s.
        denominators: [steps] supervised rows of ALL batches of the optimizer step, over ranks and accumulation; the
            returned values, added up over those batches, are the loss over all their rows. A step without rows gives 0.
    """
    terms = [w * s.num / d for s, w, d in zip(stats, weights, denominators.clamp(min=1), strict=True)]
    return torch.stack(terms).sum()


def stat_sums(stats: Sequence[StepStats]) -> Tensor:
    """Detached sums [steps, 6] fp64, columns as in `SUMS`."""
    return torch.stack([torch.stack([getattr(s, key).detach().double() for key in SUMS]) for s in stats])


class TrainStep(nn.Module):
    """What the engine wraps: the head with the frozen parts of its target.

    Args:
        head: trained, fp32 weights.
        parts: on the head's device, in `dtype`.
        dtype: bf16 computes under autocast, fp32 plainly.
    """

    def __init__(self, head: DraftHead, parts: TargetParts, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = head
        self.parts = parts  # no module: stays out of the state dict and of the engine's hands
        self.dtype = dtype

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Context in which the head computes in `dtype`."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.parts.embed.device.type, dtype=self.dtype)

    def forward(self, batch: Batch, denominators: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return scale * this batch's share of the loss, and its `stat_sums`."""
        with self.autocast():
            stats = self.head.losses(batch, self.parts)
        return scale * global_loss(stats, self.head.step_weights(), denominators), stat_sums(stats)
