"""The pure train step: one batch's share of the global loss. Needs torch alone."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import DraftsmithError
from ..heads.adapter import Adapter
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


def set_checkpointing(head: DraftHead, wanted: bool) -> None:
    """Let a head keep less for its backward pass and compute it again; raises DraftsmithError where it can't."""
    if hasattr(head, "checkpointing"):
        setattr(head, "checkpointing", wanted)  # noqa: B010 - not every head has it, says the type checker
    elif wanted:
        raise DraftsmithError(
            f"train.checkpointing = true with the head family {head.config.family!r}: its steps don't follow from each "
            "other, there is nothing to compute again: leave it out, or lower train.token_budget"
        )


class TrainStep(nn.Module):
    """What the engine wraps: the head with the frozen parts of its target.

    Args:
        head: trained, fp32 weights.
        parts: on the head's device, in `dtype`.
        dtype: bf16 computes under autocast, fp32 plainly.

    Attributes:
        adapter: of a target that is trained together with the head.
        extra: names of the losses that `forward`'s sums hold beyond the unrolled steps' rows.
    """

    adapter: Adapter | None = None
    extra: tuple[str, ...] = ()

    def __init__(self, head: DraftHead, parts: TargetParts, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = head
        self.parts = parts  # no module: stays out of the state dict and of the engine's hands
        self.dtype = dtype

    def enter(self, step: int, total_steps: int | None) -> float:
        """Prepare for an optimizer step; returns the factor of the adapter's learning rate in it.

        Args:
            step, total_steps: as for `schedule.lr_factor`.
        """
        return 1.0

    def mean_seconds(self, seconds: Sequence[float]) -> float:
        """Mean cost of a run's steps, from the seconds of a pilot's second step and those after it."""
        return sum(seconds) / len(seconds)

    def seen(self, batch: Batch) -> Batch:
        """The batch with the states that the target has now; a frozen target's are those of the store."""
        return batch

    def extra_sums(self, seen: Batch) -> Tensor:
        """Held-out figures of the extra losses on a batch that `seen` made: (sum, rows) of each, fp64 [extra, 2]."""
        return torch.zeros(0, 2, dtype=torch.float64, device=seen.tokens.device)

    def loss_counts(self, batch: Batch) -> Tensor:
        """The batch's share of the loss's denominators, int64 [steps + extra]."""
        return self.head.loss_counts(batch)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Context in which the head computes in `dtype`."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.parts.embed.device.type, dtype=self.dtype)

    def scales(self, denominators: Tensor) -> list[float]:
        """What `global_loss` multiplies each step's sum by."""
        counts = denominators.clamp(min=1).tolist()
        return [w / count for w, count in zip(self.head.step_weights(), counts, strict=True)]

    def forward(self, batch: Batch, denominators: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return scale * this batch's share of the loss, and its `stat_sums` with a row for each extra loss."""
        with self.autocast():
            stats = self.head.losses(batch, self.parts, scales=self.scales(denominators))
        return scale * global_loss(stats, self.head.step_weights(), denominators), stat_sums(stats)
