"""Losses over the draft vocabulary, in chunks of rows so that logits never exist for all rows at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK = 1 << 25
"""Logits that exist at a time."""


def rows_per_chunk(vocabulary: int) -> int:
    """Rows whose logits over so many tokens are made together."""
    return max(1, min(2048, _CHUNK // vocabulary))


class CrossEntropy(torch.autograd.Function):
    """Sum over rows of  -sum_v w[v] * log softmax(hidden @ weight.T)[v], and each row's best guess.

    w is a teacher's row, or one-hot at the row's label (teacher None). Gradients are made in the forward pass, chunk by
    chunk (d logits = softmax * sum(w) - w, scaled by the row's weight), so no logits are kept: memory is
    O(chunk * Vd), the arithmetic is that of one forward and one backward.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, teacher: Tensor | None, rows: Tensor, counted: Tensor, wanted: bool
    ) -> Any:
        """See `soft_cross_entropy` and `cross_entropy`; without a teacher `rows` are labels."""
        total = hidden.new_zeros((), dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
        guesses = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if wanted and ctx.needs_input_grad[1] else None
        chunk = rows_per_chunk(len(weight))
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            h, counts = hidden[part], counted[part].to(hidden.dtype)[:, None]
            logits = h @ weight.t()
            guesses[part] = logits.argmax(-1)
            logits = logits.to(total.dtype)
            log_q = logits - torch.logsumexp(logits, -1, keepdim=True)
            if teacher is None:
                label = rows[part].clamp(min=0)[:, None]
                total += -(log_q.gather(1, label) * counts).sum()
                d = log_q
                if wanted:
                    d.exp_().scatter_add_(1, label, d.new_full((), -1.0).expand(label.shape))
            else:
                w = teacher.index_select(0, rows[part])
                total += -((w * log_q).sum(-1, keepdim=True) * counts).sum()
                d = log_q.exp_().mul_(w.sum(-1, keepdim=True)).sub_(w) if wanted else log_q
            if wanted:
                d = d.to(hidden.dtype).mul_(counts)
                grad_hidden[part] = d @ weight
                if grad_weight is not None:
                    grad_weight.addmm_(d.t(), h)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(guesses)
        return total, guesses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Scale the stored gradients."""
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0].to(grad_hidden.dtype)
        return grad_hidden * scale, None if grad_weight is None else grad_weight * scale, None, None, None, None


def soft_cross_entropy(
    hidden: Tensor, weight: Tensor, teacher: Tensor, rows: Tensor, counted: Tensor
) -> tuple[Tensor, Tensor]:
    """Soft cross-entropy against the teacher, summed over the counted rows.

    Args:
        hidden: [R, W] what the output weight multiplies; weight: [Vd, W]. A frozen one costs no gradient.
        teacher: [T, Vd] weights of the tokens, as a rule the teacher's probabilities over the draft vocabulary; fp32
            (fp64 in tests).
        rows: [R] row of `teacher` for each row.
        counted: [R] bool, rows that enter the loss.

    Returns:
        The sum (scalar; the caller divides by the global count) and the best draft id of every row, [R] int64.
    """
    total, guesses = CrossEntropy.apply(hidden, weight, teacher, rows, counted, torch.is_grad_enabled())
    return total, guesses


def cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy against the text's own tokens, summed over the counted rows.

    Args:
        hidden, weight, counted: see `soft_cross_entropy`.
        labels: [R] draft ids; those of rows that aren't counted may be -1.

    Returns:
        As `soft_cross_entropy`.
    """
    total, guesses = CrossEntropy.apply(hidden, weight, None, labels, counted, torch.is_grad_enabled())
    return total, guesses


@torch.no_grad()
def overlap(hidden: Tensor, weight: Tensor, last: Tensor, target_weight: Tensor, target_ids: Tensor) -> Tensor:
    """Sum over rows of sum_v min(p, q) with the full-vocabulary p: the expected acceptance at temperature 1.

    Args:
        hidden: [R, H] the head's normed output; weight: [Vd, H].
        last: [R, H] the target's normed states of the teacher rows; target_weight: [V, H]; target_ids: [Vd].
    """
    total, rows = hidden.new_zeros((), dtype=torch.float32), rows_per_chunk(4 * len(target_weight))
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        q = torch.softmax((hidden[part] @ weight.t()).float(), -1)
        full = (last[part] @ target_weight.t()).float()
        p = torch.exp(full[:, target_ids] - torch.logsumexp(full, -1, keepdim=True))
        total += torch.minimum(p, q).sum()
    return total
