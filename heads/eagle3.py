"""EAGLE-3: one decoder layer over fused target states, trained through its own unrolled steps (arXiv 2503.01840, 3).

    g_j   = fc[state_k1; state_k2; state_k3]_j                      fused target features
    x_j   = [input_norm(E(t_{j+1+s})); hidden_norm(h)]              h = g_j at step 0, a_j of step s-1 after
    u     = r + attention(x_j)                                      q, k, v map 2H; the residual r is the un-normed h
    a_j   = u + mlp(post_attention_norm(u))                         recycled before the norm
    q_j   = softmax(lm_head(norm(a_j)))                             over the draft vocabulary

Positions and masks of the unrolled steps ("training-time test"): see layer.py.
With `norm_before_residual`, which vLLM and speculators know, r = hidden_norm(h).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .base import TargetParts, rms_norm
from .config import HeadConfig, LayerConfig, default_layer_ids, layer_values, require, target_values
from .layer import DecoderLayer, RecurrentHead
from .registry import Family
from .vocab import DraftVocab

# What the family's formulas fix; a config that says otherwise belongs to another head.
_FIXED: dict[str, Any] = {
    "objective": "token",
    "last_state": "none",
    "recycled": "pre_norm",
    "concat_order": "embed_first",
    "input_norms": {"embed": "rms", "hidden": "rms"},
}


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """EAGLE-3 has nothing beyond a layer but the choice of the residual at its input."""

    fixed: ClassVar[dict[str, Any]] = _FIXED
    norm_before_residual: bool = False
    """The residual is the normed hidden state, half of what attention reads; else the un-normed one, as published."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, self.fixed)


def eagle3_config(target_config: Any, vocab: DraftVocab, **identity: Any) -> Eagle3Config:
    """Derive a head's config from its target's (a transformers text config).

    Args:
        target_config: shapes, rope and norm epsilon are taken from it.
        vocab: the draft vocabulary.
        identity: target_id, target_revision, target_fingerprint, chat_template_sha256, trained_length, and optionally
            layer_ids, steps, step_decay, norm_before_residual and shapes that should differ from the target's.
    """
    values: dict[str, Any] = {
        "family": "eagle3",
        **_FIXED,
        "layer_ids": default_layer_ids(target_config.num_hidden_layers),
        "steps": 7,
        "step_decay": 0.8,
        **target_values(target_config, vocab),
        **layer_values(target_config),
        **identity,
    }
    return Eagle3Config.from_dict(values, "eagle3 config")


class Eagle3Head(RecurrentHead):
    """The network; see the module's formulas."""

    config: Eagle3Config

    def __init__(self, config: HeadConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        c = self.config
        self.fc = nn.Linear(len(c.layer_ids) * c.hidden_size, c.hidden_size, bias=False)
        self.input_layernorm = nn.Parameter(torch.ones(c.hidden_size))
        self.hidden_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.layer = DecoderLayer(c, 2 * c.hidden_size)
        self.norm = nn.Parameter(torch.ones(c.hidden_size))
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)

    @torch.no_grad()
    def initialise(self, parts: TargetParts, generator: torch.Generator) -> str:
        """Start from the target: its output rows, its final norm, and its last layer where that has the same shapes.

        The last layer's attention fills the hidden half of q, k and v. The fusion hands on the last aux state, scaled
        down: undiminished, the residual would begin by predicting t[j+1], which the row already reads. On the default
        target this reaches in 40k tokens 1.6 x the first-draft accuracy of random matrices. (With
        `norm_before_residual` the norm undoes the scaling; how such a head starts best is not measured.)
        """
        h = self.config.hidden_size
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, 0.02, generator=generator)
        self.fc.weight.mul_(0.025)
        self.fc.weight[:, -h:] += 0.1 * torch.eye(h)
        self.lm_head.weight.copy_(parts.lm_head[self.vocab.target_ids])
        self.norm.copy_(parts.norm_weight)
        found = self.layer.start_from(
            parts.last_layer, slice(h, None), {"input_layernorm.weight": self.hidden_norm.data}
        )
        return f"{found}; output rows and final norm are the target's"

    def fuse(self, features: Tensor) -> Tensor:
        """g of the concatenated aux states."""
        fused: Tensor = self.fc(features)
        return fused

    def enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Both inputs normed, side by side; the residual is the state, normed where the config says so."""
        eps = self.config.rms_norm_eps
        normed = rms_norm(hidden, self.hidden_norm, eps)
        x = torch.cat((rms_norm(embeds, self.input_layernorm, eps), normed), -1)
        return x, normed if self.config.norm_before_residual else hidden

    def leave(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The normed state is read out, the un-normed one recycled."""
        return rms_norm(state, self.norm, self.config.rms_norm_eps), state

    def output_weight(self, parts: TargetParts) -> Tensor:
        """The head's own rows."""
        return self.lm_head.weight

    def logits(self, readout: Tensor) -> Tensor:
        """Of the head's own rows."""
        out: Tensor = self.lm_head(readout)
        return out


FAMILY = Family("eagle3", Eagle3Config, Eagle3Head)
