"""One MTP module: a decoder layer that reads a state and the embedding of the token after it. Formulas: `mtp.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DraftsmithError
from .base import TargetParts, rms_norm
from .blocks import check_blocks, make_layer
from .config import LayerConfig, require
from .layer import DecoderLayer

# What the family's formulas fix; a config that says otherwise belongs to another head.
FIXED: dict[str, Any] = {
    "objective": "token",
    "layer_ids": [],
    "input_norms": {"embed": "rms", "hidden": "rms"},
}
# What must be said, of values that other families may leave out.
_CHOSEN = ("last_state", "recycled", "concat_order")

# What of z comes from the embedding and what from the state, by `concat_order`.
ORDERS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "embed_first": lambda embeds, hidden: (embeds, hidden),
    "hidden_first": lambda embeds, hidden: (hidden, embeds),
}

# The layer's matrices whose products are added to what it reads.
_ADDED = ("o_proj.weight", "down_proj.weight", "mlp.down")


@dataclass(frozen=True, kw_only=True)
class MtpConfig(LayerConfig):
    """The module's layer, how many modules there are, and what each reads.

    `last_state` says whether h at step 0 is the target's state before or after its final norm, `recycled` the same of
    what a step hands on; `concat_order` which input comes first.
    """

    modules: int
    """1: one module, which reads its own states. D > 1: one for each of D steps."""
    step_weights: list[float]
    """Weights of the steps in the loss, in place of step_decay ** s; empty: those."""
    attention: dict[str, Any] = field(default_factory=lambda: {"kind": "standard"})
    """Kind and options of the layer's attention: see blocks.py."""
    mlp: dict[str, Any] = field(default_factory=lambda: {"kind": "gated"})
    """The same of its MLP."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, FIXED)
        check_blocks(self)
        for name in _CHOSEN:
            if getattr(self, name) == "none":
                raise DraftsmithError(f"{name} = 'none' is not what an mtp head computes: it reads a state and a token")
        if self.modules < 1:
            raise DraftsmithError(f"modules {self.modules} must be at least 1")
        if self.modules > 1 and self.modules != self.steps:
            raise DraftsmithError(
                f"modules = {self.modules} and steps = {self.steps}: every step has a module of its own, so both must "
                "be the same (modules = 1 is one module for all steps)"
            )
        weights = self.step_weights
        if weights and (len(weights) != self.steps or not all(0 < w < math.inf for w in weights)):
            raise DraftsmithError(
                f"step_weights = {weights} must be {self.steps} numbers above 0, one for each step, or empty: then "
                "step s weighs step_decay ** s"
            )


class MtpModule(nn.Module):
    """A module's weights and what they compute; heads with one module are a subclass, heads with several hold some.

    Attributes:
        enorm, hnorm: [H] norms of the embedding and of the state; eh_proj: 2H to H, what joins them.
        input_layernorm: [H] norm before attention; layer: the rest of the layer; norm: [H] before the output weight.
    """

    config: MtpConfig
    layer: DecoderLayer

    def build(self) -> None:
        """Make the weights; `config` is there."""
        h = self.config.hidden_size
        self.enorm = nn.Parameter(torch.ones(h))
        self.hnorm = nn.Parameter(torch.ones(h))
        self.eh_proj = nn.Linear(2 * h, h, bias=False)
        self.input_layernorm = nn.Parameter(torch.ones(h))
        self.layer = make_layer(self.config, h)
        self.norm = nn.Parameter(torch.ones(h))

    @torch.no_grad()
    def start(self, parts: TargetParts, generator: torch.Generator) -> None:
        """Set the starting weights: a layer that adds nothing, over a tenth of the state and a mix of the embedding.

        All of the state would begin by predicting t[j+1], which the row already reads. The final norm is a fifth of the
        target's, since it gives whatever it reads the target's size, and guesses without ground would be as sure as the
        target's. On the default target 0.21 of the first drafts are right after 11k tokens; 0.18 with all of the final
        norm, 0.13 with a fifth of it and the target's last layer.
        """
        for name, weight in self.layer.named_parameters():
            if name.endswith(_ADDED):
                weight.zero_()
            elif weight.ndim > 1:
                weight.normal_(0.0, 0.02, generator=generator)
            elif name.endswith("bias"):
                weight.zero_()
        embed, hidden = ORDERS[self.config.concat_order](*self.eh_proj.weight.chunk(2, 1))
        embed.normal_(0.0, 1.0 / (3.0 * len(embed) ** 0.5), generator=generator)
        hidden.copy_(0.1 * torch.eye(len(hidden)))
        self.norm.copy_(0.2 * parts.norm_weight)

    def enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads and the residual z, [..., H] each, of embeddings and states [..., H]."""
        eps = self.config.rms_norm_eps
        pair = ORDERS[self.config.concat_order](rms_norm(embeds, self.enorm, eps), rms_norm(hidden, self.hnorm, eps))
        z = self.eh_proj(torch.cat(pair, -1))
        return rms_norm(z, self.input_layernorm, eps), z

    def leave(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """What the output weight multiplies, and what the next step reads, of the layer's output [..., H]."""
        readout = rms_norm(state, self.norm, self.config.rms_norm_eps)
        return readout, readout if self.config.recycled == "post_norm" else state
