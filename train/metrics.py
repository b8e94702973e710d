"""Figures from sums that were pooled over rows, batches and ranks: never means of means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .step import SUMS


def ratio(top: float, bottom: float) -> float | None:
    """Divide; None where nothing was counted."""
    return top / bottom if bottom else None


def summarise(sums: Tensor, weights: Sequence[float]) -> dict[str, Any]:
    """Turn pooled sums [steps, 6] (columns as in step.SUMS) into the figures that are logged.

    Returns:
        loss: sum_s w_s * num_s / den_s.
        loss_by_step, accuracy: by unrolled step; tokens outside the draft vocabulary count as misses in the accuracy.
        acceptance_cumulative, acceptance_conditional: teacher-forced, over all supervised rows; entry 0 is the first
            drafted token. A row is no decoding step, so these are no tau.
    """
    columns = {key: sums[:, i].tolist() for i, key in enumerate(SUMS)}
    by_step = [ratio(n, d) for n, d in zip(columns["num"], columns["den"], strict=True)]
    return {
        "loss": sum(w * (x or 0.0) for w, x in zip(weights, by_step, strict=True)),
        "loss_by_step": by_step,
        "accuracy": [ratio(n, d) for n, d in zip(columns["hits"], columns["rows"], strict=True)],
        "acceptance_cumulative": [ratio(n, d) for n, d in zip(columns["kept"], columns["rows"], strict=True)],
        "acceptance_conditional": [ratio(n, d) for n, d in zip(columns["kept"], columns["reached"], strict=True)],
    }
