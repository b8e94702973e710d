"""EAGLE-1, 2 and HASS: one decoder layer that predicts the target's next feature (arXiv 2401.15077, section 3).

    z_j     = fc[E(t_{j+1+s}); h]               h = f_j at step 0, the prediction of step s-1 after; f = state after
                                                the target's final norm
    u_j     = z_j + attention(z_j)              neither norm nor scale before it
    f̂_j     = u_j + mlp(post_attention_norm(u_j))
    q_j     = softmax(lm_head(f̂_j))             the target's own frozen rows, no norm before them
    loss    = w_f · mean_H SmoothL1(f̂_j - f_{j+1+s}) - sum_v (w_t + w_k · [v in top-K of p]) · p[v] · log q_j[v]

with p the target's distribution at row j+1+s. EAGLE-1 trains one step (w_f 1, w_t 0.1, w_k 0) with uniform noise on
f_j; EAGLE-2 (arXiv 2406.16858) decodes the same weights with trees that grow with the draft's confidence.

HASS (arXiv 2408.15766) trains several steps and adds the top-K term (w_k 1, K 10). Its paper keeps a row's label and
shifts the features: row i of step s reads the feature that row i-1 predicted at step s-1. Here a row keeps its place
and shifts its tokens, so that HASS's row i of step s is row j = i-s: the same inputs (a feature that is s predictions
away from f_j, and t_{i+1} = t_{j+1+s}) and the same label t_{i+2}. No gradient flows through the feature read.

Its published heads go on from trained EAGLE-1 weights, first 40 epochs with w_k 0, then 10 with w_k 1 at a third of the
learning rate. configs/heads/hass.yaml is one run from a head's own start with w_k 1 throughout; set topk_weight for the
former.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DraftsmithError
from .base import Batch, TargetParts, Unrolled
from .config import HeadConfig, LayerConfig, layer_values, require, target_values
from .layer import DecoderLayer, RecurrentHead
from .readout import TargetReadout
from .registry import Family
from .vocab import DraftVocab

# What the family's formulas fix; a config that says otherwise belongs to another head.
_FIXED: dict[str, Any] = {
    "objective": "both",
    "layer_ids": [],
    "last_state": "post",
    "recycled": "pre_norm",
    "concat_order": "embed_first",
    "input_norms": {"embed": "none", "hidden": "none"},
}


@dataclass(frozen=True, kw_only=True)
class Eagle1Config(LayerConfig):
    """The layer, and what the loss is made of; `recycled` is the layer's output, which no norm follows."""

    fc_bias: bool
    feature_weight: float
    """Of the smooth L1 distance to the target's feature."""
    token_weight: float
    """Of the cross-entropy against the target's distribution."""
    topk_weight: float
    """Of the same over the target's `topk` likeliest tokens alone (HASS)."""
    topk: int
    noise: float
    """Half-width of the uniform noise on the features that training reads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, _FIXED)
        for name in ("feature_weight", "token_weight", "topk_weight", "noise"):
            if not getattr(self, name) >= 0:
                raise DraftsmithError(f"{name} = {getattr(self, name)} must be 0 or more")
        if self.feature_weight == 0 or self.token_weight + self.topk_weight == 0:
            raise DraftsmithError(
                f"feature_weight = {self.feature_weight}, token_weight = {self.token_weight}, topk_weight = "
                f"{self.topk_weight}: {self.family} learns features and tokens; give both a weight above 0"
            )
        if self.topk < 1:
            raise DraftsmithError(f"topk = {self.topk} must be at least 1; topk_weight = 0 leaves the top-K loss out")


def eagle1_config(target_config: Any, vocab: DraftVocab, **identity: Any) -> Eagle1Config:
    """Derive a head's config from its target's (a transformers text config); defaults are EAGLE-1's.

    Args:
        target_config: shapes, rope and norm epsilon are taken from it.
        vocab: the draft vocabulary.
        identity: target_id, target_revision, target_fingerprint, chat_template_sha256, trained_length, and optionally
            steps, step_decay, the fields of `Eagle1Config` and shapes that should differ from the target's. The head
            reads no aux states, whichever layer_ids the features have.
    """
    values: dict[str, Any] = {
        "family": "eagle1",
        "steps": 1,
        "step_decay": 1.0,
        "fc_bias": False,
        "feature_weight": 1.0,
        "token_weight": 0.1,
        "topk_weight": 0.0,
        "topk": 10,
        "noise": 0.1,
        **target_values(target_config, vocab),
        **layer_values(target_config),
        **identity,
        **_FIXED,
    }
    return Eagle1Config.from_dict(values, "eagle1 config")


class Eagle1Head(TargetReadout, RecurrentHead):
    """The network; see the module's formulas."""

    config: Eagle1Config

    def __init__(self, config: HeadConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        c = self.config
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=c.fc_bias)
        self.layer = DecoderLayer(c, c.hidden_size)

    @torch.no_grad()
    def initialise(self, parts: TargetParts, generator: torch.Generator) -> str:
        """Start with a layer that adds nothing, over a tenth of the feature and a mix of the embedding.

        The target's last layer is no start: it reads normed states, and no norm bounds what it would add here. All of
        the feature would begin by predicting t[j+1], which the row already reads. On the default target 0.19 of the
        first drafts are right after 18k tokens; 0.14 with the rest of the target's layer, 0.13 with all of the feature.
        """
        width = self.config.hidden_size
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, 0.02, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
        self.layer.o_proj.weight.zero_()
        self.layer.down_proj.weight.zero_()
        # the embedding's part of z is a third of a feature in size, whatever the scale of the target's embeddings
        size = float(_size(parts.norm_weight) / (3.0 * _size(parts.embed) * width**0.5))
        self.fc.weight[:, :width].normal_(0.0, size, generator=generator)
        self.fc.weight[:, width:].copy_(0.1 * torch.eye(width))
        return "start: a layer that adds nothing; output rows are the target's and stay"

    def fuse(self, features: Tensor) -> Tensor:
        """The target's feature as it is."""
        return features

    def enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Attention and residual read the same projection."""
        z = self.fc(torch.cat((embeds, hidden), -1))
        return z, z

    def leave(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The predicted feature is read out and recycled as it is."""
        return state, state

    def noisy(self, inputs: Tensor, batch: Batch) -> Tensor:
        """Features with noise from U(-noise, noise), drawn from the batch's seed (section 4.1)."""
        if batch.seed is None or self.config.noise == 0:
            return inputs
        generator = torch.Generator().manual_seed(batch.seed)
        drawn = torch.rand(inputs.shape, generator=generator) * 2 - 1
        return inputs + (self.config.noise * drawn).to(inputs)

    def passed_on(self, state: Tensor) -> Tensor:
        """No gradient flows from step to step (HASS)."""
        return state.detach()

    def feature_loss(self, found: Unrolled, goals: Tensor, rows: Tensor, in_loss: Tensor) -> Tensor:
        """See DraftHead: smooth L1, mean over H, times feature_weight."""
        assert found.state is not None  # RecurrentHead gives one
        wide = torch.promote_types(goals.dtype, torch.float32)
        distance = F.smooth_l1_loss(found.state.to(wide), goals[rows].to(wide), reduction="none").mean(-1)
        return self.config.feature_weight * (distance * in_loss).sum()

    def teacher_weights(self, probabilities: Tensor) -> Tensor:
        """See DraftHead: token_weight for all, topk_weight more for the likeliest."""
        c = self.config
        weights = c.token_weight * probabilities
        if c.topk_weight > 0:
            best = probabilities.topk(min(c.topk, probabilities.shape[-1]), -1)
            weights.scatter_add_(-1, best.indices, c.topk_weight * best.values)
        return weights


def _size(x: Tensor) -> Tensor:
    """Root of the mean square."""
    return x.float().pow(2).mean().sqrt()


FAMILY = Family("eagle1", Eagle1Config, Eagle1Head)
