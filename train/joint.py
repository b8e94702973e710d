"""Training a head together with a LoRA adapter on its target (Medusa-2; arXiv 2401.10774, 2.2.2 and 2.3.2).

The target runs inside the training job. Of every batch it computes its last states twice: without the adapter, the
teacher's, and with it, with gradients. The heads read the latter, and a divergence holds them to the former:

    L = KL_LM + lambda * L_heads        KL_LM = mean over rows j with an answer token behind them of
                                                sum_v p_j[v] * (log p_j[v] - log p_tuned_j[v])

p is over the full vocabulary. The heads' own loss and every denominator are as in training on stored states.

lambda scales what flows from the heads' loss back into the target, and that alone: the adapter's gradient is that of L,
the heads' that of L_heads. For the heads, which KL_LM doesn't depend on, this is L without its factor: they learn alike
with any lambda and on their own, their momenta keep one size, and a small lambda doesn't drown in AdamW's epsilon.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..data_recipes.forward import plan_forward
from ..errors import DraftsmithError
from ..heads.adapter import Adapter, TunedConfig
from ..heads.alignment import shift_left
from ..heads.architecture import layers_and_norm, text_decoder
from ..heads.base import Batch, DraftHead, TargetParts
from ..heads.loading import quantisation
from ..heads.losses import rows_per_chunk
from ..heads.medusa2 import Medusa2Config
from ..heads.target import load_model, model_parts
from .step import SUMS, TrainStep, global_loss, stat_sums

LR_SHARE = 0.25
"""The adapter's learning rate, of the heads' (the paper's ratio)."""
_TOKENS = 8192
"""Rows of the output weight that are in fp32 at a time."""


class TunedTarget:
    """A target whose weights are frozen, with the adapter that is trained on it. No module: engines leave it alone.

    Args:
        model: a transformers model, its linear layers plain; changed in place.
        config: of the head; rank and alpha of the adapter, and the target's name.
        seed: of the adapter's start.
    """

    def __init__(self, model: Any, config: TunedConfig, seed: int) -> None:
        self.model = model.eval().requires_grad_(False)  # eval: no dropout
        self.body = text_decoder(model)
        layers, self.final_norm = layers_and_norm(self.body, config.target_layers)
        generator = torch.Generator().manual_seed(seed)
        self.adapter = Adapter(model, layers, config.lora_rank, config.lora_alpha, generator, config.target_id)

    @classmethod
    def load(
        cls,
        location: str,
        revision: str | None,
        config: TunedConfig,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Self:
        """Load a folder or hub id; raises DraftsmithError where it can't be, or is quantised."""
        if method := quantisation(location, revision):
            raise DraftsmithError(
                f"the target {location} is quantised ({method}): an adapter that is trained on it can't be merged into "
                "such weights; take the model as it was before, or a head that leaves the target as it is (medusa1)"
            )
        return cls(load_model(location, revision, dtype).to(device), config, seed)

    def parts(self) -> TargetParts:
        """The pieces that heads take; the model's own tensors.

        Raises:
            DraftsmithError: its logits are capped: how far they move is measured on those of a linear output head.
        """
        parts = model_parts(self.model)
        if parts.softcap is not None:
            raise DraftsmithError(
                f"{type(self.model).__name__} caps its logits at {parts.softcap:g}: heads that are trained together "
                "with such a target are not supported; take one that leaves the target as it is (medusa1, eagle3)"
            )
        return parts

    def states(self, batch: Batch) -> Tensor:
        """State n [T, H] of the batch's rows before the final norm, of the target as it is now; differentiable.

        Documents run side by side, right-padded, those of about equal length together; a padding row is behind all
        others of its document, so none of them sees it.
        """
        lengths = torch.unique_consecutive(batch.documents, return_counts=True)[1].tolist()
        starts = [0]
        for n in lengths:
            starts.append(starts[-1] + n)
        found: list[Tensor] = [batch.tokens] * len(lengths)
        for group in plan_forward(lengths, max(len(batch.tokens), *lengths)):
            padded = batch.tokens.new_zeros(len(group), max(lengths[i] for i in group))
            for line, i in enumerate(group):
                padded[line, : lengths[i]] = batch.tokens[starts[i] : starts[i + 1]]
            out = self.last_states(padded)
            for line, i in enumerate(group):
                found[i] = out[line, : lengths[i]]
        return torch.cat(found)

    def original_states(self, batch: Batch) -> Tensor:
        """The same without the adapter, and without gradient."""
        with self.adapter.off():
            return self.states(batch)

    def last_states(self, padded: Tensor) -> Tensor:
        """State n [D, L, H] of every row of right-padded tokens [D, L]; differentiable."""
        kept: list[Tensor] = []
        handle = self.final_norm.register_forward_pre_hook(lambda _module, args: kept.append(args[0]))
        try:
            self.body(input_ids=padded, use_cache=False)
        finally:
            handle.remove()
        return kept[0]


@dataclass(frozen=True)
class Phase:
    """What an optimizer step computes.

    Attributes:
        joint: with the target; else the heads alone, on stored states.
        weight: lambda, the share of the heads' gradient that reaches the target.
        adapter: factor of the adapter's learning rate.
    """

    joint: bool
    weight: float
    adapter: float


def phase(step: int, total_steps: int | None, config: Medusa2Config) -> Phase:
    """What the step about to be taken (0-based) computes.

    Args:
        total_steps: length of the run; None during the pilot of a time-limited run, in which every other step is joint,
            so that both kinds are timed; the adapter doesn't move yet.
    """
    if total_steps is None:
        return Phase(step % 2 == 0, 0.0, 0.0)
    first = round(config.heads_first * total_steps)
    if step < first:
        return Phase(False, 0.0, 0.0)
    grown = math.sin(math.pi / 2 * (step - first) / (total_steps - first)) if config.ramp else 1.0
    return Phase(True, config.lambda0 * grown, 1.0)


class JointStep(TrainStep):
    """Heads and adapter in one step; see the module.

    Args:
        head: of a family whose config is a Medusa2Config.
        parts, dtype: see TrainStep; the target computes in `dtype`, too.
        tuned: the head's target.
    """

    extra = ("target_kl",)

    def __init__(self, head: DraftHead, parts: TargetParts, dtype: torch.dtype, tuned: TunedTarget) -> None:
        super().__init__(head, parts, dtype)
        assert isinstance(head.config, Medusa2Config)
        self.config = head.config
        self.tuned, self.adapter = tuned, tuned.adapter
        self.lora = nn.ParameterList(tuned.adapter.parameters.values())  # for the engine; the target stays out
        self.phase = phase(0, None, self.config)

    def enter(self, step: int, total_steps: int | None) -> float:
        """See TrainStep."""
        self.phase = phase(step, total_steps, self.config)
        return self.phase.adapter

    def mean_seconds(self, seconds: Sequence[float]) -> float:
        """See TrainStep: steps of either kind by their share of the run."""
        alone, joint = seconds[::2], seconds[1::2]  # the pilot's second step is its first without the target
        share = self.config.heads_first
        return share * sum(alone) / len(alone) + (1 - share) * sum(joint) / len(joint)

    @torch.no_grad()
    def seen(self, batch: Batch) -> Batch:
        """See TrainStep: states of the tuned target."""
        with self.autocast():
            return dataclasses.replace(batch, last=self.tuned.states(batch))

    @torch.no_grad()
    def extra_sums(self, seen: Batch) -> Tensor:
        """See TrainStep: how far the target has moved."""
        with self.autocast():
            goal = self.tuned.original_states(seen)
        rows = answer_rows(seen)
        assert seen.last is not None  # `seen` set it
        moved, fixed = self.parts.normed(seen.last[rows]), self.parts.normed(goal[rows])
        divergence, _ = measured_divergence(moved, fixed, self.parts.lm_head)
        return torch.stack((divergence, rows.sum().double()))[None]

    def loss_counts(self, batch: Batch) -> Tensor:
        """See TrainStep: the divergence's rows come last."""
        return torch.cat((super().loss_counts(batch), answer_rows(batch).sum()[None]))

    def forward(self, batch: Batch, denominators: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """See TrainStep; the extra row is (divergence, rows, rows, rows of equal argmax, 0, 0)."""
        by_head, den = denominators[:-1], denominators[-1].clamp(min=1)
        if not self.phase.joint:
            loss, sums = super().forward(batch, by_head, scale)
            return loss, torch.cat((sums, sums.new_zeros(1, len(SUMS))))
        with self.autocast():
            goal = self.tuned.original_states(batch)
            last = self.tuned.states(batch)
            passed = last.detach() + self.phase.weight * (last - last.detach())  # the very values of `last`
            seen = dataclasses.replace(batch, last=passed)
            stats = self.head.losses(seen, self.parts, scales=self.scales(by_head))
            rows = answer_rows(batch)
            moved, fixed = self.parts.normed(last[rows]), self.parts.normed(goal[rows])
            divergence, equal = kl_divergence(moved, fixed, self.parts.lm_head)
        loss = divergence / den + global_loss(stats, self.head.step_weights(), by_head)
        count, none = rows.sum(), equal.new_zeros(())
        line = torch.stack([x.detach().double() for x in (divergence, count, count, equal, none, none)])
        return scale * loss, torch.cat((stat_sums(stats), line[None]))


def answer_rows(batch: Batch) -> Tensor:
    """Rows whose next token is an answer token of the same document, bool [T]: where the target itself answers."""
    same = shift_left(batch.documents, 1, -2) == batch.documents
    return shift_left(batch.answer, 1, False) & same


class _Divergence(torch.autograd.Function):
    """Sum over rows of KL(p || q), p = softmax(goal W^T), q = softmax(hidden W^T); d/dhidden = (q - p) W.

    The gradient is made in the forward pass, chunk by chunk: no logits are kept.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, goal: Tensor, weight: Tensor) -> Any:
        """See `kl_divergence`."""
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        total = hidden.new_zeros((), dtype=wide)
        equal = torch.zeros((), dtype=torch.int64, device=hidden.device)
        gradient = torch.empty_like(hidden)
        chunk = rows_per_chunk(len(weight))
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            log_p = torch.log_softmax((goal[part] @ weight.t()).to(wide), -1)
            log_q = torch.log_softmax((hidden[part] @ weight.t()).to(wide), -1)
            equal += (log_p.argmax(-1) == log_q.argmax(-1)).sum()
            p = log_p.exp()
            total += (p * (log_p - log_q)).sum()
            gradient[part] = (log_q.exp() - p).to(hidden.dtype) @ weight
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(equal)
        return total, equal

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Scale the stored gradient."""
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None


def kl_divergence(hidden: Tensor, goal: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """How far next-token laws have moved, summed over rows.

    Args:
        hidden, goal: [R, H] normed states of the moved target and of the original; gradients flow to `hidden` alone.
        weight: [V, H] output weight of both, frozen.

    Returns:
        sum of KL(p_goal || p_hidden) in nats, and the number of rows whose likeliest token is the same; scalars.
    """
    total, equal = _Divergence.apply(hidden, goal, weight.to(hidden.dtype))
    return total, equal


@torch.no_grad()
def measured_divergence(hidden: Tensor, goal: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What `kl_divergence` returns, from logits in fp32 (fp64 for fp64 states) whatever dtype the target computes in.

    bf16 logits of 20 lie 0.125 apart: the likeliest tokens tie, and a small divergence drowns in rounding.

    Args:
        hidden, goal: [R, H] normed states, any dtype; they are moved to the weight's device.
        weight: [V, H], any dtype; converted piece by piece.

    Returns:
        sum of KL(p_goal || p_hidden) in nats, fp64, and the number of rows with the same likeliest token; scalars.
    """
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    total = torch.zeros((), dtype=torch.float64, device=weight.device)
    equal = torch.zeros((), dtype=torch.int64, device=weight.device)

    def law(states: Tensor) -> Tensor:
        x = states.to(weight.device, wide)
        return torch.log_softmax(torch.cat([x @ w.to(wide).t() for w in weight.split(_TOKENS)], 1), -1)

    rows = rows_per_chunk(len(weight))
    for moved, fixed in zip(hidden.split(rows), goal.split(rows), strict=True):
        log_p, log_q = law(fixed), law(moved)
        equal += (log_p.argmax(-1) == log_q.argmax(-1)).sum()
        total += (log_p.exp() * (log_p - log_q)).sum(-1).double().sum()
    return total, equal


__all__ = [
    "LR_SHARE",
    "JointStep",
    "Phase",
    "TunedTarget",
    "answer_rows",
    "kl_divergence",
    "measured_divergence",
    "phase",
]
