"""Losses over the draft vocabulary, in chunks of rows so that logits never exist for all rows at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS_PER_CHUNK = 2048


class SoftCrossEntropy(torch.autograd.Function):
    """Sum over rows of  -sum_v p[v] * log softmax(hidden @ weight.T)[v], and each row's best guess.

    Gradients are made in the forward pass, chunk by chunk (d logits = softmax - p, scaled by the row's weight), so no
    logits are kept: memory is O(chunk * Vd), the arithmetic is that of one forward and one backward.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, teacher: Tensor, rows: Tensor, counted: Tensor, wanted: bool
    ) -> Any:
        """See `soft_cross_entropy`."""
        total = hidden.new_zeros((), dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
        guesses = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        for start in range(0, len(hidden), ROWS_PER_CHUNK):
            part = slice(start, start + ROWS_PER_CHUNK)
            h, w = hidden[part], counted[part].to(hidden.dtype)[:, None]
            logits = h @ weight.t()
            guesses[part] = logits.argmax(-1)
            logits = logits.to(total.dtype)
            log_q = logits - torch.logsumexp(logits, -1, keepdim=True)
            p = teacher.index_select(0, rows[part])
            total += -((p * log_q).sum(-1, keepdim=True) * w).sum()
            if wanted:
                d = log_q.exp_().sub_(p).to(hidden.dtype).mul_(w)
                grad_hidden[part] = d @ weight
                grad_weight.addmm_(d.t(), h)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(guesses)
        return total, guesses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Scale the stored gradients."""
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0].to(grad_hidden.dtype)
        return grad_hidden * scale, grad_weight * scale, None, None, None, None


def soft_cross_entropy(
    hidden: Tensor, weight: Tensor, teacher: Tensor, rows: Tensor, counted: Tensor
) -> tuple[Tensor, Tensor]:
    """Soft cross-entropy against the teacher, summed over the counted rows.

    Args:
        hidden: [R, H] the head's normed output.
        weight: [Vd, H] its output weight.
        teacher: [T, Vd] teacher probabilities over the draft vocabulary, fp32 (fp64 in tests).
        rows: [R] row of `teacher` for each row.
        counted: [R] bool, rows that enter the loss.

    Returns:
        The sum (scalar; the caller divides by the global count) and the best draft id of every row, [R] int64.
    """
    total, guesses = SoftCrossEntropy.apply(hidden, weight, teacher, rows, counted, torch.is_grad_enabled())
    return total, guesses


@torch.no_grad()
def overlap(hidden: Tensor, weight: Tensor, last: Tensor, target_weight: Tensor, target_ids: Tensor) -> Tensor:
    """Sum over rows of sum_v min(p, q) with the full-vocabulary p: the expected acceptance at temperature 1.

    Args:
        hidden: [R, H] the head's normed output; weight: [Vd, H].
        last: [R, H] the target's normed states of the teacher rows; target_weight: [V, H]; target_ids: [Vd].
    """
    total = hidden.new_zeros((), dtype=torch.float32)
    for start in range(0, len(hidden), ROWS_PER_CHUNK // 8):
        part = slice(start, start + ROWS_PER_CHUNK // 8)
        q = torch.softmax((hidden[part] @ weight.t()).float(), -1)
        full = (last[part] @ target_weight.t()).float()
        p = torch.exp(full[:, target_ids] - torch.logsumexp(full, -1, keepdim=True))
        total += torch.minimum(p, q).sum()
    return total
