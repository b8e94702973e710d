"""EAGLE-3.1: EAGLE-3 with each target state normed before the fusion, and its own state recycled after the norm.

    g_j   = fc[norm_1(state_k1); norm_2(state_k2); norm_3(state_k3)]_j      one RMSNorm for each captured state
    x_j   = [input_norm(E(t_{j+1+s})); hidden_norm(h)]                      h = g_j at step 0, b_j of step s-1 after
    u     = h + attention(x_j)                                              the residual is h as it is
    b_j   = norm(u + mlp(post_attention_norm(u)))                           read out and recycled
    q_j   = softmax(lm_head(b_j))                                           over the draft vocabulary

So the scale of what a step reads neither depends on the target's layers nor grows from step to step (arXiv 2605.09992;
engines call the two changes `fc_norm` and `norm_output`). Everything else is EAGLE-3's, see eagle3.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .base import TargetParts, rms_norm
from .config import HeadConfig, default_layer_ids, layer_values, target_values
from .eagle3 import Eagle3Config, Eagle3Head
from .registry import Family
from .vocab import DraftVocab

# What the family's formulas fix; a config that says otherwise belongs to another head.
_FIXED: dict[str, Any] = {
    "objective": "token",
    "last_state": "none",
    "recycled": "post_norm",
    "concat_order": "embed_first",
    "input_norms": {"aux": "rms", "embed": "rms", "hidden": "rms"},
    "norm_before_residual": False,
    "fc_norm": True,
    "norm_output": True,
}


@dataclass(frozen=True, kw_only=True)
class Eagle31Config(Eagle3Config):
    """EAGLE-3's, with the engines' names of what differs."""

    fixed: ClassVar[dict[str, Any]] = _FIXED
    fc_norm: bool = True
    """Every captured state has a norm of its own before the fusion."""
    norm_output: bool = True
    """The state is recycled after the final norm."""


def eagle31_config(target_config: Any, vocab: DraftVocab, **identity: Any) -> Eagle31Config:
    """Derive a head's config from its target's; arguments and defaults are `eagle3_config`'s, but for the residual."""
    values: dict[str, Any] = {
        "family": "eagle31",
        **_FIXED,
        "layer_ids": default_layer_ids(target_config.num_hidden_layers),
        "steps": 7,
        "step_decay": 0.8,
        **target_values(target_config, vocab),
        **layer_values(target_config),
        **identity,
    }
    return Eagle31Config.from_dict(values, "eagle3.1 config")


class Eagle31Head(Eagle3Head):
    """The network; see the module's formulas."""

    def __init__(self, config: HeadConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        c = self.config
        self.fc_norm = nn.ParameterList(torch.ones(c.hidden_size) for _ in c.layer_ids)

    @torch.no_grad()
    def initialise(self, parts: TargetParts, generator: torch.Generator) -> str:
        """Start as EAGLE-3 does, but from all of the last aux state: normed it has the scale of what is recycled.

        On the default target 0.16 of the first drafts are right after 18k tokens; 0.10 from a tenth of it, as EAGLE-3
        takes of the state as it is.
        """
        found = super().initialise(parts, generator)
        width = self.config.hidden_size
        self.fc.weight[:, -width:].diagonal().add_(0.9)
        for weight in self.fc_norm:
            weight.fill_(1.0)
        return found

    def fuse(self, features: Tensor) -> Tensor:
        """g of the concatenated aux states, each normed by itself."""
        states = features.unflatten(-1, (len(self.fc_norm), -1))
        return super().fuse(rms_norm(states, torch.stack(list(self.fc_norm)), self.config.rms_norm_eps).flatten(-2))

    def leave(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The normed state is read out and recycled."""
        normed, _ = super().leave(state)
        return normed, normed


FAMILY = Family("eagle31", Eagle31Config, Eagle31Head)
