"""Hydra++ (Ankner et al. 2024): K heads that each read the drafts before theirs, over a layer that reads all the text.

    f_j    = the target's state after its final norm
    u_j    = f_j + attention(input_layernorm(f_j))                  causal; the prefix layer
    h_j    = norm(u_j + mlp(post_attention_norm(u_j)))
    z_j    = [h_j; E(t_{j+1}); ...; E(t_{j+1+s})]                   what head s reads
    y      = P z + SiLU(W_1 z + b_1)                                P, W_1: H(s+2) -> H
    y      = y + SiLU(W_l y + b_l)                                  l = 2 .. blocks
    q_j    = softmax(lm_heads[s] y)                                 over the draft vocabulary; predicts t_{j+2+s}

Head s is step s of training and of drafting alike. Trained on the target's distribution alone, all heads weighing the
same. Like the published code, the prefix layer ends in a norm of its own; unlike it, every block has its own weights
(there blocks 2 .. L are one module) and there is no dropout (there 0.2 over ten epochs).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DraftsmithError
from .base import Batch, Cache, DraftHead, TargetParts, Unrolled, rms_norm
from .config import HeadConfig, LayerConfig, layer_values, require, target_values
from .layer import DecoderLayer, last_valid, read_embeds
from .registry import Family
from .unrolled import attend, lay_out
from .vocab import DraftVocab

# What the family's formulas fix; a config that says otherwise belongs to another head.
_FIXED: dict[str, Any] = {
    "objective": "token",
    "layer_ids": [],
    "last_state": "post",
    "recycled": "post_norm",
    "concat_order": "hidden_first",
    "input_norms": {"hidden": "rms", "embed": "none"},
}

# What of the prefix state a head hands on at its start. All of it would predict t_{j+1}, which the head already reads:
# on the default target 13.1 nats a token over 512 tokens, against 6.3 with this (guessing makes 6.2); after 25 steps of
# 256 tokens 9.9 against 6.3.
_HANDED_ON = 0.1


@dataclass(frozen=True, kw_only=True)
class HydraConfig(LayerConfig):
    """A prefix layer and `steps` heads."""

    blocks: int
    """Residual blocks of each head, the one that reads z included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, _FIXED)
        if self.blocks < 1:
            raise DraftsmithError(f"blocks {self.blocks} must be at least 1: the first one reads the head's inputs")


def hydra_config(target_config: Any, vocab: DraftVocab, **identity: Any) -> HydraConfig:
    """Derive a head's config from its target's (a transformers text config).

    Args:
        target_config: shapes, rope and norm epsilon are taken from it.
        vocab: the draft vocabulary.
        identity: target_id, target_revision, target_fingerprint, chat_template_sha256, trained_length, and optionally
            steps (the number of heads), step_decay, blocks and shapes that should differ from the target's. `layer_ids`
            is ignored: no aux state is read.
    """
    values: dict[str, Any] = {
        "family": "hydra",
        **_FIXED,
        "steps": 4,
        "step_decay": 1.0,
        "blocks": 4,
        **target_values(target_config, vocab),
        **layer_values(target_config),
        **identity,
        "layer_ids": [],
    }
    return HydraConfig.from_dict(values, "hydra config")


class ResidualBlocks(nn.Module):
    """The blocks of one head.

    Args:
        inputs: width of what the head reads.
        hidden: width of what it gives to its output weight.
        count: how many blocks.
    """

    def __init__(self, inputs: int, hidden: int, count: int) -> None:
        super().__init__()
        self.shortcut = nn.Linear(inputs, hidden)
        self.blocks = nn.ModuleList(nn.Linear(inputs if i == 0 else hidden, hidden) for i in range(count))

    def forward(self, z: Tensor) -> Tensor:
        """Map z [..., inputs] to y [..., hidden]."""
        y: Tensor = self.shortcut(z) + F.silu(self.blocks[0](z))
        for block in self.blocks[1:]:
            y = y + F.silu(block(y))
        return y

    @torch.no_grad()
    def start(self) -> None:
        """Hand on the first `hidden` inputs, scaled down; SiLU(0) = 0, with a slope that lets all blocks learn."""
        for parameter in self.parameters():
            parameter.zero_()
        self.shortcut.weight.fill_diagonal_(_HANDED_ON)


class HydraHead(DraftHead):
    """The network; see the module's formulas.

    The recycled state is z: [h; E(t_{j+1})] behind a committed row, wider by H with every draft. Only committed rows
    pass the prefix layer, so that drafts leave the cache alone.
    """

    config: HydraConfig

    def __init__(self, config: HeadConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        c, h = self.config, config.hidden_size
        self.input_layernorm = nn.Parameter(torch.ones(h))
        self.layer = DecoderLayer(c, h)
        self.norm = nn.Parameter(torch.ones(h))
        self.heads = nn.ModuleList(ResidualBlocks((s + 2) * h, h, c.blocks) for s in range(c.steps))
        self.lm_heads = nn.ModuleList(nn.Linear(h, c.draft_vocab_size, bias=False) for _ in range(c.steps))

    @property
    def most_depth(self) -> int:
        """One draft a head."""
        return self.config.steps

    @property
    def state_width(self) -> int:
        """Of [h; E(t_{j+1})]."""
        return 2 * self.config.hidden_size

    @torch.no_grad()
    def initialise(self, parts: TargetParts, generator: torch.Generator) -> str:
        """Start from the target: its last layer and final norm, and its output rows in every head."""
        for module in self.layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, 0.02, generator=generator)
        for module in self.heads.modules():
            if isinstance(module, ResidualBlocks):
                module.start()
        for weight in self.lm_heads.parameters():
            weight.copy_(parts.lm_head[self.vocab.target_ids])
        self.norm.copy_(parts.norm_weight)
        extra = {"input_layernorm.weight": self.input_layernorm.data}
        found = self.layer.start_from(parts.last_layer, slice(None), extra)
        return f"{found}; output rows of {len(self.heads)} heads and final norm are the target's"

    def unroll(self, batch: Batch, parts: TargetParts, rows: Tensor, steps: int) -> Iterator[Unrolled]:
        """See DraftHead; keys and values see all T rows, the rest of the layer and the heads only `rows`."""
        layout = lay_out(batch, rows)
        f = self.inputs(batch.features, batch.last, parts).to(self.norm.dtype)
        q, k, v = self.layer.project(self._enter(f), batch.positions)
        attended = attend(q[rows], [k], [v], layout)
        z = self._leave(self.layer.finish(f[rows], attended.flatten(-2)))
        weights = list(self.lm_heads.parameters())
        for s in range(steps):
            z = torch.cat((z, read_embeds(batch, parts, rows, s, z)), -1)
            yield Unrolled(self.heads[s](z), weights[s])

    def new_cache(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> Cache:
        """See DraftHead."""
        return self.layer.new_cache(batch, capacity, device, dtype)

    def forward_step(
        self,
        cache: Cache,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        valid: Tensor | None,
        seen: Tensor | None = None,
        *,
        step: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """See DraftHead; a draft row's ancestors stand in its state, so that `seen` and `positions` have no say."""
        if valid is not None:
            hidden = self._leave(self.layer.cached(cache, self._enter(hidden), hidden, positions, valid, None))
            embeds = last_valid(embeds, valid)
        z = torch.cat((hidden, embeds), -1)
        return self.lm_heads[step](self.heads[step](z)), z

    def _enter(self, f: Tensor) -> Tensor:
        return rms_norm(f, self.input_layernorm, self.config.rms_norm_eps)

    def _leave(self, state: Tensor) -> Tensor:
        return rms_norm(state, self.norm, self.config.rms_norm_eps)


FAMILY = Family("hydra", HydraConfig, HydraHead)
