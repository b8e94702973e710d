"""Losses over the draft vocabulary in one pass over chunks of rows, so that logits never exist for all rows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .objectives import OBJECTIVES, Laws, mixed

_CHUNK = 1 << 25
"""Logits that exist at a time where nothing is learnt from them."""
_LOSS_CHUNKS = {"cpu": 1 << 22}
"""Logits of a loss, which holds several tensors of that size, by device; `_CHUNK` elsewhere, to fill a GPU. Few on a
CPU: memory is flat in V from 8k on, for 15 % of the losses' time at 128k and nothing up to 32k."""


def rows_per_chunk(vocabulary: int, logits: int = _CHUNK) -> int:
    """Rows whose logits over so many tokens are made together."""
    return max(1, min(2048, logits // vocabulary))


def loss_rows_per_chunk(vocabulary: int, device: str) -> int:
    """The same of a loss on a kind of device."""
    return rows_per_chunk(vocabulary, _LOSS_CHUNKS.get(device, _CHUNK))


@dataclass(frozen=True)
class LossRows:
    """The n rows of one unrolled step that are in the loss.

    Attributes:
        at: [n] which of the R rows that run.
        readout: [n, W] what the output weight multiplies.
        weight: [Vd, W]; steps may share one, and a frozen one costs no gradient.
        labels: [n] draft ids of the text's tokens.
        teacher_rows: [n] which row of the teacher each learns from, ascending, each once.
    """

    at: Tensor
    readout: Tensor
    weight: Tensor
    labels: Tensor
    teacher_rows: Tensor


def mixed_losses(
    steps: Sequence[LossRows],
    objective: Mapping[str, float],
    teacher: HiddenTeacher | TopKTeacher,
    weigh: Callable[[Tensor], Tensor],
    scales: Sequence[float] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The weighted sum of objectives over the rows of every step.

    One pass over chunks of the teacher's rows: each is asked once for its probabilities, and all steps that learn from
    it take their turn. Gradients are made in the forward pass (see `objectives`), so no logits and no probabilities are
    kept: memory is O(chunk * Vd) whatever is mixed, the arithmetic is that of one forward and one backward.

    Args:
        steps: rows by step.
        objective: weights by name, as `objectives.checked` returns them.
        teacher: asked only where an objective reads it.
        weigh: from its probabilities [n, Vd] to the weights w [n, Vd] of `soft_ce`.
        scales: what the loss will multiply each step's sum by, up to a common factor. With it one gradient is kept for
            each output weight, in the weight's dtype; without it one for each step.

    Returns:
        The sums [steps] (the caller divides by the global counts), and the best draft id of each step's rows.

    Raises:
        ValueError: in the backward pass, where the steps' gradients aren't in the proportion that `scales` says.
    """
    weights = {id(s.weight): s.weight for s in steps}
    places = tuple(list(weights).index(id(s.weight)) for s in steps)
    task = _Task(tuple(steps), places, objective, teacher, weigh, scales, torch.is_grad_enabled())
    totals, *guesses = _Mixture.apply(task, *(s.readout for s in steps), *weights.values())
    return totals, guesses


@dataclass
class StepStats:
    """Sums over the rows of one unrolled step; all tensors are scalars on the batch's device.

    Attributes:
        num: differentiable loss sum over the supervised rows inside the draft vocabulary.
        den: their count.
        rows: supervised rows, tokens outside the draft vocabulary included.
        hits: rows whose first guess is the text's token.
        reached: rows whose guesses at all earlier steps were right, too (denominator of the conditional acceptance).
        kept: rows whose guesses up to and including this step are right.
        right: [R] bool, which of the rows supervised at step 0 guess the text's token.
        overlap: sum of min(p, q) over the rows, p of the full vocabulary (with a top-k teacher a lower bound); only
            when asked for.
    """

    num: Tensor
    den: Tensor
    rows: Tensor
    hits: Tensor
    reached: Tensor
    kept: Tensor
    right: Tensor
    overlap: Tensor | None = None


def step_stats(
    nums: Sequence[Tensor],
    supervised: Sequence[Tensor],
    chosen: Sequence[LossRows],
    guesses: Sequence[Tensor],
    overlaps: Sequence[Tensor],
) -> list[StepStats]:
    """Count what is right, by step; a token outside the draft vocabulary is never guessed.

    Args:
        nums: the loss's sums; chosen, guesses: see `mixed_losses`.
        supervised: bool [R], the rows that count.
        overlaps: see StepStats; empty where nobody asked.
    """
    kept = torch.ones_like(supervised[0])
    stats = []
    for s, (num, counted, rows, guessed) in enumerate(zip(nums, supervised, chosen, guesses, strict=True)):
        right = torch.zeros_like(counted)
        right[rows.at] = guessed == rows.labels
        reached = kept & counted
        kept = kept & right
        den = torch.full_like(counted.sum(), len(rows.at))
        sums = (den, counted.sum(), right.sum(), reached.sum(), kept.sum())
        stats.append(StepStats(num, *sums, right, overlaps[s] if overlaps else None))
    return stats


@dataclass(frozen=True)
class _Task:
    """What `_Mixture` is asked for, beside the tensors that get gradients; see `mixed_losses`."""

    steps: tuple[LossRows, ...]
    places: tuple[int, ...]
    """Which of the weights each step reads out with."""
    objective: Mapping[str, float]
    teacher: HiddenTeacher | TopKTeacher
    weigh: Callable[[Tensor], Tensor]
    scales: Sequence[float] | None
    wanted: bool

    def chunks(self) -> Iterator[tuple[Tensor, list[slice]]]:
        """Rows of the teacher [n], and which rows of each step learn from them."""
        needed = torch.unique(torch.cat([s.teacher_rows for s in self.steps]))
        if not len(needed):
            return
        weight = self.steps[0].weight
        size = loss_rows_per_chunk(len(weight), weight.device.type)
        firsts = needed[::size].contiguous()
        starts = torch.stack([torch.searchsorted(s.teacher_rows, firsts) for s in self.steps], 1).tolist()
        ends = [*starts[1:], [len(s.teacher_rows) for s in self.steps]]
        for rows, first, last in zip(needed.split(size), starts, ends, strict=True):
            yield rows, [slice(a, b) for a, b in zip(first, last, strict=True)]

    def taught(self, rows: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The teacher's probabilities at rows [n] and its weights, where an objective reads them."""
        if not any(OBJECTIVES[name].reads_teacher for name in self.objective):
            return None, None
        p = self.teacher.probabilities(rows)
        return p, self.weigh(p) if "soft_ce" in self.objective else None


class _Mixture(torch.autograd.Function):
    """See `mixed_losses`; the tensors are the readouts by step, then the output weights, each once."""

    @staticmethod
    def forward(ctx: Any, task: _Task, *tensors: Tensor) -> Any:
        """Losses, guesses and gradients, chunk by chunk."""
        count = len(task.steps)
        readouts, weights = tensors[:count], tensors[count:]
        dtype = readouts[0].dtype
        cast = [w.to(dtype) for w in weights]
        totals = readouts[0].new_zeros(count, dtype=torch.promote_types(dtype, torch.float32))
        guesses = [torch.empty_like(s.labels) for s in task.steps]
        grads = [torch.empty_like(x) for x in readouts] if task.wanted else []
        sums = _WeightGradients(task, weights, ctx.needs_input_grad[1 + count :], dtype)
        for rows, parts in task.chunks():
            p, w = task.taught(rows)
            for s, (step, part) in enumerate(zip(task.steps, parts, strict=True)):
                if part.start == part.stop:
                    continue
                h, weight = readouts[s][part], cast[task.places[s]]
                logits = h @ weight.t()
                guesses[s][part] = logits.argmax(-1)
                at = step.teacher_rows[part]
                own_p = _select(p, rows, at)
                own_w = own_p if w is p else _select(w, rows, at)
                laws = Laws(logits.to(totals.dtype), own_p, own_w, step.labels[part, None])
                value, d = mixed(laws, task.objective, task.wanted)
                totals[s] += value
                if d is not None:
                    d = d.to(dtype)
                    grads[s][part] = d @ weight
                    sums.add(s, d, h)
                del logits, own_p, own_w, laws, d  # or they would live on beside the next step's
            del p, w
        ctx.scales, ctx.owners = task.scales, sums.owners  # not the task: its readouts would live on
        ctx.kinds = [w.dtype for w in weights]
        ctx.save_for_backward(*grads, *sums.buffers)
        ctx.mark_non_differentiable(*guesses)
        return totals, *guesses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        """Scale the stored gradients by those of the sums [steps]."""
        by_step = outputs[0]
        grads, buffers = ctx.saved_tensors[: len(by_step)], ctx.saved_tensors[len(by_step) :]
        found: list[Tensor | None] = [None] * len(ctx.kinds)
        factors = by_step if ctx.scales is None else _common_factor(by_step, ctx.scales).expand(len(found))
        for (slot, owner), buffer in zip(ctx.owners, buffers, strict=True):
            part = (buffer * factors[slot].to(buffer.dtype)).to(ctx.kinds[owner])
            there = found[owner]
            found[owner] = part if there is None else there + part
        return None, *(x * g.to(x.dtype) for x, g in zip(grads, by_step, strict=True)), *found


class _WeightGradients:
    """Sums of d.T @ readout for the output weights that need them: one for each step, or one for each weight.

    Attributes:
        owners: by buffer, the step (with scales: the weight) that it is of, and the weight.
        buffers: [Vd, W] each.
    """

    def __init__(self, task: _Task, weights: Sequence[Tensor], needed: Sequence[bool], dtype: torch.dtype) -> None:
        self.slots = task.places if task.scales is not None else tuple(range(len(task.places)))
        self.scales = task.scales
        wanted = {slot: w for slot, w in zip(self.slots, task.places, strict=True) if task.wanted and needed[w]}
        self.owners = list(wanted.items())
        shapes = [(weights[w], dtype if task.scales is None else weights[w].dtype) for w in wanted.values()]
        self.buffers = [torch.zeros_like(weight, dtype=kind) for weight, kind in shapes]
        self._by_slot = dict(zip(wanted, self.buffers, strict=True))

    def add(self, step: int, d: Tensor, readout: Tensor) -> None:
        """Add the gradient that d [n, Vd] gives with readout [n, W]."""
        buffer = self._by_slot.get(self.slots[step])
        if buffer is None:
            return
        scale = 1.0 if self.scales is None else self.scales[step]
        if buffer.dtype == d.dtype:
            buffer.addmm_(d.t(), readout, alpha=scale)
        else:
            buffer.add_(d.t() @ readout, alpha=scale)


def _select(x: Tensor | None, rows: Tensor, at: Tensor) -> Tensor | None:
    """Of x, whose lines belong to the ascending `rows`, those of the rows `at`."""
    return x if x is None or len(at) == len(rows) else x.index_select(0, torch.searchsorted(rows, at))


def _common_factor(by_step: Tensor, scales: Sequence[float]) -> Tensor:
    """The factor [1] between the steps' gradients and their scales."""
    c = by_step.new_tensor(scales)
    factor = (by_step @ c) / (c @ c)
    if not torch.allclose(by_step, factor * c, rtol=1e-4, atol=0.0):
        raise ValueError(
            f"the steps' sums have gradients {by_step.tolist()}, which are not in the proportion of scales {scales}"
        )
    return factor[None]


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """c · tanh(logits / c) in fp32 or wider; the logits themselves without a cap."""
    if softcap is None:
        return logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return softcap * torch.tanh(wide / softcap)


@torch.no_grad()
def overlap(
    hidden: Tensor,
    weight: Tensor,
    last: Tensor,
    target_weight: Tensor,
    target_ids: Tensor,
    softcap: float | None = None,
) -> Tensor:
    """Sum over rows of sum_v min(p, q) with the full-vocabulary p: the expected acceptance at temperature 1.

    Args:
        hidden: [R, H] the head's normed output; weight: [Vd, H].
        last: [R, H] the target's normed states of the teacher rows; target_weight: [V, H]; target_ids: [Vd].
        softcap: of the target's logits, None without one.
    """
    total, rows = hidden.new_zeros((), dtype=torch.float32), rows_per_chunk(4 * len(target_weight))
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        q = torch.softmax((hidden[part] @ weight.t()).float(), -1)
        full = capped(last[part] @ target_weight.t(), softcap).float()
        p = torch.exp(full[:, target_ids] - torch.logsumexp(full, -1, keepdim=True))
        total += torch.minimum(p, q).sum()
    return total


@dataclass(frozen=True)
class HiddenTeacher:
    """What the target says after each of T tokens, from its states.

    Attributes:
        states: [T, H] after the final norm.
        lm_head: [V, H] the target's output weight; target_ids: [Vd] ids of the draft vocabulary.
        softcap: of its logits (`TargetParts.softcap`).
    """

    states: Tensor
    lm_head: Tensor
    target_ids: Tensor
    softcap: float | None = None

    @cached_property
    def _drafted(self) -> Tensor:
        """Output rows of the draft vocabulary (ids ascend: a full one is the weight itself), in the states' dtype."""
        full = len(self.target_ids) == len(self.lm_head)
        return (self.lm_head if full else self.lm_head[self.target_ids]).to(self.states.dtype)

    def probabilities(self, rows: Tensor | None = None) -> Tensor:
        """The softmax over the draft vocabulary at rows [n] (None = all), [n, Vd] in fp32 (fp64 for fp64 states)."""
        logits = capped((self.states if rows is None else self.states[rows]) @ self._drafted.t(), self.softcap)
        return torch.softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)

    def overlap(self, hidden: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
        """See `overlap`, against the teacher's rows [R]."""
        return overlap(hidden, weight, self.states[rows], self.lm_head, self.target_ids, self.softcap)


@dataclass(frozen=True)
class TopKTeacher:
    """What the target says after each of T tokens, from its k likeliest tokens.

    Attributes:
        ids, logprobs: [T, k] target ids, and log p over the whole vocabulary.
        draft_ids: [V] draft id of every target id, -1 outside the draft vocabulary; size: Vd.
    """

    ids: Tensor
    logprobs: Tensor
    draft_ids: Tensor
    size: int

    def probabilities(self, rows: Tensor | None = None) -> Tensor:
        """Those inside the draft vocabulary at rows [n] (None = all), renormalised; [n, Vd] in fp32 or wider.

        With k = V this is the softmax over the draft vocabulary. A row of which none is inside has zeros alone: it
        teaches nothing.
        """
        ids, logprobs = (self.ids, self.logprobs) if rows is None else (self.ids[rows], self.logprobs[rows])
        places = self.draft_ids[ids]
        p = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32)).exp() * (places >= 0)
        p = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
        return p.new_zeros(len(p), self.size).scatter_add_(1, places.clamp(min=0), p)

    @torch.no_grad()
    def overlap(self, hidden: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
        """As `overlap`, against the teacher's rows [R]: a lower bound, since p of all other tokens counts as 0.

        It lacks at most 1 - sum(p over the k tokens) a row.
        """
        total, step = hidden.new_zeros((), dtype=torch.float32), rows_per_chunk(4 * len(weight))
        for start in range(0, len(hidden), step):
            part = slice(start, start + step)
            q = torch.softmax((hidden[part] @ weight.t()).float(), -1)
            places = self.draft_ids[self.ids[rows[part]]]
            shared = torch.minimum(self.logprobs[rows[part]].float().exp(), q.gather(1, places.clamp(min=0)))
            total += (shared * (places >= 0)).sum()
        return total
