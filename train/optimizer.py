"""Muon on the hidden matrices, AdamW on the rest, in one optimizer object for the engine.

Muon (Jordan 2024; "Muon is Scalable", arXiv 2502.16982) replaces the momentum M of a matrix [m, n] by its polar factor
U V^T, here with the update's RMS matched to AdamW's, 0.2 * sqrt(max(m, n)), so that both kinds share learning rates.

The polar factor comes from a Newton-Schulz iteration X <- (aI + bG + cG^2) X with G = X X^T, made cheap enough for a
small head on a CPU, where the usual five steps would be a quarter of the training step:
- all factors are polynomials in G, so the iteration runs on [m, m] Gram matrices alone and X is multiplied once at the
  end; matrices of equal m go through it together;
- X is scaled by its Schatten-8 norm, which bounds the spectral norm much closer than the Frobenius norm and comes free
  with the G^2 of the first step;
- each step has its own coefficients, the best uniform approximation of 1 on the interval that the step before leaves
  ("The Polar Express", arXiv 2505.16932), so two steps do what about three with fixed coefficients do.

One optimizer serves all ZeRO stages, so that they take the same steps. Under ZeRO each rank has a flat slice of the
weights (`partition.py`) and the momentum for it; the directions are put together, and a rank makes the polar factors of
those matrices alone that its slice touches. DeepSpeed's own Muon isn't used: it puts the polar factor in the gradient's
place before the norm is clipped, so clipping would mean something else at each stage, and its scale isn't AdamW's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .partition import Partition

# (a, b, c) of a*x + b*x^3 + c*x^5: Remez on [0.03, 1], then on what that leaves; together they send it to 1 +- 0.381
POLYNOMIALS = ((7.36252776, -20.74339565, 15.16055176), (2.91753804, -2.18240538, 0.47552922))
_TINY = 1e-30
_CLIP_EPS = 1e-6  # as in DeepSpeed's clipping
ADAPTER = "adapter."
"""What the names of a target's adapter begin with."""
_STATE = {"muon": ("momentum",), "adamw": ("exp_avg", "exp_avg_sq")}


def orthogonalise(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return the approximate polar factor of each matrix [m, n], fp32.

    Singular values from 3 % of the matrix's Schatten-8 norm upwards move to 0.62 ... 1.38; smaller ones grow 21-fold at
    most. A zero matrix stays zero.
    """
    wide = [x.float() if x.shape[0] <= x.shape[1] else x.float().t() for x in matrices]
    factors: list[Tensor] = [torch.empty(0)] * len(wide)
    groups: dict[int, list[int]] = defaultdict(list)
    for i, x in enumerate(wide):
        groups[x.shape[0]].append(i)
    for members in groups.values():
        grams = torch.stack([wide[i] @ wide[i].t() for i in members])
        for i, factor in zip(members, _polar_of_gram(grams), strict=True):
            factors[i] = factor @ wide[i]
    return [y if x.shape[0] <= x.shape[1] else y.t() for x, y in zip(matrices, factors, strict=True)]


def _polar_of_gram(gram: Tensor) -> Tensor:
    """Return Q [B, m, m] with Q X close to X's polar factor, from G = X X^T [B, m, m]."""
    # scale by the trace first: squares of tiny gradients would leave fp32's range
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=_TINY)[:, None, None]
    gram = gram / trace
    square = gram @ gram
    schatten = square.norm(dim=(-2, -1), keepdim=True).clamp(min=_TINY).sqrt()  # squared Schatten-8 norm of X
    gram, square = gram / schatten, square / schatten**2
    scale = trace.rsqrt() * schatten.rsqrt()
    total = None
    for k, (a, b, c) in enumerate(POLYNOMIALS):
        if k:
            square = gram @ gram
        factor = b * gram + c * square
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        total = factor if total is None else factor @ total
        if k + 1 < len(POLYNOMIALS):
            gram = factor @ (factor @ gram)
    assert total is not None
    return total * scale


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Muon's share: 2-D weights, except those whose rows are vocabulary entries or choose experts."""
    rows = {"lm_head", "lm_heads", "embed", "embed_tokens", "router"}
    return parameter.ndim == 2 and not rows & set(name.split("."))


class MuonAdamW(torch.optim.Optimizer):
    """Parameter groups `muon` and `adamw`; state tensors can be read and set by parameter name.

    It updates whole parameters and clips their gradients itself; after `partition` it updates ZeRO's slices, whose
    engine has clipped them and leaves a step out where the norm isn't finite.

    A target's adapter has a group of AdamW's with a learning rate of its own; while that is 0 the adapter rests, and
    its bias correction counts the updates that it had itself.

    A step whose gradients aren't finite is left out as a whole (`skipped` tells); set `skip` to leave out the next one.

    Args:
        named_parameters: (name, parameter) pairs; the names are those of the checkpoint.
        lr_matrix: Muon's learning rate, in AdamW's scale.
        lr_other: AdamW's learning rate.
        lr_adapter: AdamW's for parameters named `adapter.…`.
        momentum: Muon's (Nesterov) momentum.
        betas: AdamW's.
        weight_decay: decoupled, both kinds.
        clip: largest global norm of the gradients; None = no limit.
        muon: whether the hidden matrices have Muon; else all have AdamW with `lr_other`.

    Attributes:
        updates: steps that changed the weights; adapter_updates: those that changed the adapter.
        skip: leave the next step out.
        skipped: the last one was left out.
        gradient_norm: global norm of the last step's gradients before clipping.
        sliced: whether it updates ZeRO's slices.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        lr_matrix: float,
        lr_other: float,
        lr_adapter: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
        clip: float | None = None,
        muon: bool = True,
    ) -> None:
        named = list(named_parameters)
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in named}
        adapter = [p for n, p in named if n.startswith(ADAPTER)]
        own = [(n, p) for n, p in named if not n.startswith(ADAPTER)]
        matrices = [p for n, p in own if muon and is_hidden_matrix(n, p)]
        others = [p for n, p in own if not (muon and is_hidden_matrix(n, p))]
        shared = {"weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        groups: list[dict[str, Any]] = [
            {"params": matrices, "kind": "muon", "lr": lr_matrix, "base_lr": lr_matrix},
            {"params": others, "kind": "adamw", "lr": lr_other, "base_lr": lr_other},
            {"params": adapter, "kind": "adamw", "lr": lr_adapter, "base_lr": lr_adapter, "adapter": True},
        ]
        groups = [g for g in groups if g["params"]]
        self.clip = clip
        self.updates = 0
        self.adapter_updates = 0
        self.skip = False
        self.skipped = False
        self.gradient_norm = 0.0
        self.sliced = False
        self.partitions = {p: Partition.of(self.names[p], p) for g in groups for p in g["params"]}
        self.kinds: dict[str, str] = {self.names[p]: g["kind"] for g in groups for p in g["params"]}
        super().__init__(groups, shared)

    def set_lr_factor(self, factor: float, adapter: float = 1.0) -> None:
        """Scale all learning rates by the schedule's factor, the adapter's by its own, too; at 0 it rests."""
        for group in self.param_groups:
            group["lr"] = group["base_lr"] * factor * (adapter if group.get("adapter") else 1.0)

    def partition(self, partitions: Iterable[Partition]) -> None:
        """Update ZeRO's slices from now on, with what of the state belongs to them."""
        before = self.named_state() if self.state else None
        self.state.clear()
        self.partitions = {p.tensor: p for p in partitions}
        self.sliced = True
        if before is not None:
            self.load_named_state(before, self.updates, self.adapter_updates)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient.

        ZeRO calls this once for each slice, with the others hidden; what the step was is then told to `settle`.
        """
        if self.sliced:
            if not self.skip:
                self._update()
            return
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = float(torch.stack(torch._foreach_norm(gradients)).norm()) if gradients else 0.0
        applied = not self.skip and math.isfinite(norm)
        if applied:
            if self.clip is not None and norm > self.clip:
                torch._foreach_mul_(gradients, self.clip / (norm + _CLIP_EPS))
            self._update()
        self.settle(applied, norm)

    def settle(self, applied: bool, gradient_norm: float) -> None:
        """Count a step that was taken, or left out."""
        self.skip, self.skipped, self.gradient_norm = False, not applied, gradient_norm
        if applied:
            self.updates += 1
            self.adapter_updates += any(g.get("adapter") and g["lr"] > 0 for g in self.param_groups)

    def _update(self) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters and group["lr"] > 0:
                (self._muon if group["kind"] == "muon" else self._adamw)(parameters, group)

    def _buffers(self, parameters: list[Tensor], key: str) -> list[Tensor]:
        for p in parameters:
            if key not in self.state[p]:
                self.state[p][key] = torch.zeros_like(p, dtype=torch.float32)
        return [self.state[p][key] for p in parameters]

    def _muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [p.grad.float() for p in parameters if p.grad is not None]
        buffers = self._buffers(parameters, "momentum")
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        directions = torch._foreach_lerp(gradients, buffers, group["momentum"])
        partitions = [self.partitions[p] for p in parameters]
        matrices = {n: x for part, d in zip(partitions, directions, strict=True) for n, x in part.whole(d).items()}
        mine = [f.name for part in partitions for f in part.fragments]
        updates = dict(zip(mine, orthogonalise([matrices[n] for n in mine]), strict=True))
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        for part in partitions:
            for f, place, update in part.pairs(part.tensor, updates):
                place.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(part.shapes[f.name])))

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [p.grad.float() for p in parameters if p.grad is not None]
        first, second = self._buffers(parameters, "exp_avg"), self._buffers(parameters, "exp_avg_sq")
        beta1, beta2 = group["betas"]
        count = 1 + (self.adapter_updates if group.get("adapter") else self.updates)
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        scale = torch._foreach_sqrt(second)
        torch._foreach_div_(scale, math.sqrt(1 - beta2**count))
        torch._foreach_add_(scale, group["eps"])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(parameters, first, scale, -group["lr"] / (1 - beta1**count))

    def named_state(self) -> dict[str, Tensor]:
        """State of all parameters as `<parameter>.<momentum|exp_avg|exp_avg_sq>`; zeros before the first step.

        Whole parameters give the state itself. Slices are put together: all ranks must call this.
        """
        state: dict[str, Tensor] = {}
        for partition, key in self._kept():
            whole = partition.whole(self._buffers([partition.tensor], key)[0])
            state |= {f"{name}.{key}": tensor for name, tensor in whole.items()}
        return state

    def _kept(self) -> Iterator[tuple[Partition, str]]:
        for partition in self.partitions.values():
            kinds = {self.kinds[name] for name in partition.shapes}
            for key in _STATE[kinds.pop()]:  # a slice is of one group, so of one kind
                yield partition, key

    @torch.no_grad()
    def load_named_state(self, tensors: dict[str, Tensor], updates: int, adapter_updates: int = 0) -> None:
        """Set the state that `named_state` gave after `updates` steps, `adapter_updates` of them with the adapter.

        Raises:
            ValueError: a tensor is missing, foreign or of another shape.
        """
        own = {f"{n}.{key}": shape for part, key in self._kept() for n, shape in part.shapes.items()}
        if different := sorted(set(own) ^ set(tensors)):
            raise ValueError(f"tensor {different[0]!r} is {'missing' if different[0] in own else 'foreign'}")
        for name, shape in own.items():
            if tensors[name].shape != shape:
                raise ValueError(f"tensor {name!r} has shape {list(tensors[name].shape)}, not {list(shape)}")
        for part, key in self._kept():
            buffer = self._buffers([part.tensor], key)[0]
            for _, place, value in part.pairs(buffer, {n: tensors[f"{n}.{key}"] for n in part.shapes}):
                place.copy_(value)
        self.updates, self.adapter_updates = updates, adapter_updates
