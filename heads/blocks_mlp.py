"""A mixture of experts in the place of a layer's MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks_parts import ExpertOptions, read_options
from .config import LayerConfig
from .layer import activation, add_gated_mlp, gated_mlp


class _Shared(nn.Module):
    """The MLP that every row goes through."""

    def __init__(self, hidden: int, inner: int, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        add_gated_mlp(self, hidden, inner, act)

    def forward(self, x: Tensor) -> Tensor:
        return gated_mlp(self, x)


class Experts(nn.Module):
    """A mixture of experts; see `ExpertOptions`.

        s      = softmax(W x), or sigmoid(W x)
        chosen = the top_k largest s + correction_bias, among the best groups
        y      = scaling * sum_{e chosen} w_e expert_e(x) + shared(x),   w_e = s_e, or s_e / sum_{chosen} s

    Scores are made in fp32, under autocast, too: in bf16 other experts would be chosen. An expert multiplies its rows
    together, so a row's last bits depend on which others it meets there. Experts without a row are left out, so a
    device is waited for to learn which those are. No loss balances the load: a head learns to draft, with the routers
    that it starts from.
    """

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        o = self.options = read_options(config.to_dict()["mlp"], ExpertOptions, "mlp")
        h = config.hidden_size
        self.act = activation(config.hidden_act)
        self.router = nn.Parameter(torch.empty(o.count, h))
        self.gate_up = nn.Parameter(torch.empty(o.count, 2 * o.intermediate_size, h))
        self.down = nn.Parameter(torch.empty(o.count, h, o.intermediate_size))
        self._start()
        self.shared = _Shared(h, o.shared_size, self.act) if o.shared_size else None
        self.shared_gate = nn.Linear(h, 1, bias=False) if o.shared_gate else None
        bias = torch.tensor(o.correction_bias or [0.0] * o.count, dtype=torch.float32)
        self.correction_bias: Tensor
        self.register_buffer("correction_bias", bias, persistent=False)

    @torch.no_grad()
    def _start(self) -> None:
        """Random weights, the same ones every time: heads draw only their `nn.Linear`s anew."""
        generator = torch.Generator().manual_seed(0)
        for weight in (self.router, self.gate_up, self.down):
            if not weight.is_meta:
                weight.copy_(torch.empty(weight.shape).normal_(0.0, 0.02, generator=generator))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # in bf16 the bias would choose other experts
        kept = self.correction_bias
        super()._apply(fn, recurse)
        here = self.correction_bias
        self.correction_bias = kept.to(here.device, torch.promote_types(here.dtype, torch.float32))
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., H] to [..., H]."""
        rows = x.flatten(0, -2)
        weights, chosen = self.route(rows)
        out = torch.zeros_like(rows)
        # once for all: the gradient of each self.gate_up[e] by itself would be as large as the stack
        gate_ups, downs = self.gate_up.unbind(), self.down.unbind()
        # without a row one expert runs empty: weights outside the graph would have no gradient, and ranks must agree
        for e in chosen.unique().tolist() or [0]:
            row, place = (chosen == e).nonzero(as_tuple=True)
            gate, up = F.linear(rows[row], gate_ups[e]).chunk(2, -1)
            y = F.linear(self.act(gate) * up, downs[e]) * weights[row, place, None]
            out = out.index_add(0, row, y.to(out.dtype))
        if self.shared is not None:
            shared = self.shared(rows)
            out = out + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(rows)) * shared)
        return out.view(x.shape)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [R, top_k] and numbers [R, top_k] of the experts that rows [R, H] go through."""
        o = self.options
        wide = torch.promote_types(rows.dtype, torch.float32)
        with torch.autocast(rows.device.type, enabled=False):
            scores = _SCORES[o.router](F.linear(rows.to(wide), self.router.to(wide)))
        chosen = _in_best_groups(scores + self.correction_bias, o).topk(o.top_k, -1).indices
        weights = scores.gather(-1, chosen)
        if o.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * o.scaling, chosen


_SCORES: dict[str, Callable[[Tensor], Tensor]] = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}


def _in_best_groups(scores: Tensor, o: ExpertOptions) -> Tensor:
    """Scores [R, E], -inf outside the groups whose best two scores have the largest sums."""
    if o.groups == 1:
        return scores
    groups = scores.unflatten(-1, (o.groups, -1))
    best = groups.topk(2, -1).values.sum(-1).topk(o.top_groups, -1).indices
    kept = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter(-1, best, True)
    return groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)


__all__ = ["Experts"]
