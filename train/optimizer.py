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
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# (a, b, c) of a*x + b*x^3 + c*x^5: Remez on [0.03, 1], then on what that leaves; together they send it to 1 +- 0.381
POLYNOMIALS = ((7.36252776, -20.74339565, 15.16055176), (2.91753804, -2.18240538, 0.47552922))
_TINY = 1e-30
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
    """Muon's share: 2-D weights, except those whose rows are vocabulary entries."""
    return parameter.ndim == 2 and not {"lm_head", "lm_heads", "embed", "embed_tokens"} & set(name.split("."))


class MuonAdamW(torch.optim.Optimizer):
    """Parameter groups `muon` and `adamw`; state tensors can be read and set by parameter name.

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
    ) -> None:
        named = list(named_parameters)
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in named}
        adapter = [p for n, p in named if n.startswith(ADAPTER)]
        own = [(n, p) for n, p in named if not n.startswith(ADAPTER)]
        matrices = [p for n, p in own if is_hidden_matrix(n, p)]
        others = [p for n, p in own if not is_hidden_matrix(n, p)]
        shared = {"weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        groups: list[dict[str, Any]] = [
            {"params": matrices, "kind": "muon", "lr": lr_matrix, "base_lr": lr_matrix},
            {"params": others, "kind": "adamw", "lr": lr_other, "base_lr": lr_other},
            {"params": adapter, "kind": "adamw", "lr": lr_adapter, "base_lr": lr_adapter, "adapter": True},
        ]
        self.updates = 0
        self.adapter_updates = 0
        self.skip = False
        self.skipped = False
        super().__init__([g for g in groups if g["params"]], shared)

    def set_lr_factor(self, factor: float, adapter: float = 1.0) -> None:
        """Scale all learning rates by the schedule's factor, the adapter's by its own, too; at 0 it rests."""
        for group in self.param_groups:
            group["lr"] = group["base_lr"] * factor * (adapter if group.get("adapter") else 1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(1)
        self.skipped = self.skip or not bool(torch.isfinite(norms).all())
        self.skip = False
        if self.skipped:
            return
        self.updates += 1
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters and group["lr"] > 0:
                self.adapter_updates += bool(group.get("adapter"))
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
        updates = orthogonalise(torch._foreach_lerp(gradients, buffers, group["momentum"]))
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        for p, update in zip(parameters, updates, strict=True):
            p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [p.grad.float() for p in parameters if p.grad is not None]
        first, second = self._buffers(parameters, "exp_avg"), self._buffers(parameters, "exp_avg_sq")
        beta1, beta2 = group["betas"]
        count = self.adapter_updates if group.get("adapter") else self.updates
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        scale = torch._foreach_sqrt(second)
        torch._foreach_div_(scale, math.sqrt(1 - beta2**count))
        torch._foreach_add_(scale, group["eps"])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(parameters, first, scale, -group["lr"] / (1 - beta1**count))

    def named_state(self) -> dict[str, Tensor]:
        """State of all parameters as `<parameter>.<momentum|exp_avg|exp_avg_sq>`; zeros before the first step."""
        state: dict[str, Tensor] = {}
        for group in self.param_groups:
            for key in _STATE[group["kind"]]:
                tensors = self._buffers(group["params"], key)
                state |= {f"{self.names[p]}.{key}": t for p, t in zip(group["params"], tensors, strict=True)}
        return state

    def load_named_state(self, tensors: dict[str, Tensor], updates: int, adapter_updates: int = 0) -> None:
        """Set the state that `named_state` gave after `updates` steps, `adapter_updates` of them with the adapter.

        Raises:
            ValueError: a tensor is missing, foreign or of another shape.
        """
        own = self.named_state()
        if different := sorted(set(own) ^ set(tensors)):
            raise ValueError(f"tensor {different[0]!r} is {'missing' if different[0] in own else 'foreign'}")
        for name, tensor in own.items():
            if tensors[name].shape != tensor.shape:
                raise ValueError(f"tensor {name!r} has shape {list(tensors[name].shape)}, not {list(tensor.shape)}")
            tensor.copy_(tensors[name])
        self.updates, self.adapter_updates = updates, adapter_updates
