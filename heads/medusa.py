"""Medusa-1: K heads side by side on the target's last state, the target frozen (arXiv 2401.10774, 2.1 and 2.2.1).

    h_j      = final_norm(state_n)_j                              what the target's own output weight reads
    r_j^s    = ... (x + SiLU(W x + b)) ... of h_j                 L blocks; head s has its own
    q_j^s    = softmax(U_s r_j^s)                                 over the draft vocabulary; predicts t[j+2+s]

No head reads a drafted token: what head s guesses depends on row j alone, and is the same below every node of a tree's
depth s + 1. W = b = 0 and U_s = the target's output rows at the start, so each head begins as the target's own guess of
t[j+1]. The loss is sum_s decay^s CE_s on the text's own tokens; the paper counts heads from 1, which scales all by one
factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DraftsmithError
from .base import Batch, Cache, DraftHead, TargetParts, Unrolled
from .config import HeadConfig, require, target_values
from .layer import last_valid
from .registry import Family
from .vocab import DraftVocab

_FIXED: dict[str, Any] = {"objective": "token", "layer_ids": [], "last_state": "post", "hidden_act": "silu"}


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """`steps` is the number of heads K, and with it the deepest draft."""

    blocks: int
    """L: residual blocks of each head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, _FIXED)
        if self.blocks < 1:
            raise DraftsmithError(f"blocks {self.blocks} must be at least 1")


def medusa_values(target_config: Any, vocab: DraftVocab) -> dict[str, Any]:
    """Values of a MedusaConfig but for the identity: the paper's five heads of one block."""
    return {"steps": 5, "step_decay": 0.8, "blocks": 1, **target_values(target_config, vocab), **_FIXED}


def medusa_config(target_config: Any, vocab: DraftVocab, **identity: Any) -> MedusaConfig:
    """Derive a head's config from its target's (a transformers text config).

    Args:
        target_config: shapes and norm epsilon are taken from it.
        vocab: the draft vocabulary.
        identity: target_id, target_revision, target_fingerprint, chat_template_sha256, trained_length, and optionally
            steps, step_decay and blocks. `layer_ids` is ignored: no aux state is read.
    """
    values = {**medusa_values(target_config, vocab), "family": "medusa", **identity, "layer_ids": []}
    return MedusaConfig.from_dict(values, "medusa config")


class ResidualBlocks(nn.Module):
    """L blocks x + SiLU(W x + b) on [..., H]."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., H] to [..., H]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHead(DraftHead):
    """The network; see the module's formulas."""

    hard_labels = True
    config: MedusaConfig

    def __init__(self, config: HeadConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        c = self.config
        self.blocks = nn.ModuleList([ResidualBlocks(c.blocks, c.hidden_size) for _ in range(c.steps)])
        self.lm_heads = nn.ModuleList(
            [nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False) for _ in range(c.steps)]
        )

    @property
    def most_depth(self) -> int:
        """One draft a head."""
        return self.config.steps

    @torch.no_grad()
    def initialise(self, parts: TargetParts, generator: torch.Generator) -> str:
        """Every head starts as the target's own output: nothing is random."""
        for parameter in self.blocks.parameters():
            parameter.zero_()
        for lm_head in self.lm_heads:
            assert isinstance(lm_head, nn.Linear)
            lm_head.weight.copy_(parts.lm_head[self.vocab.target_ids])
        return f"start: {self.config.steps} heads with the target's output rows, their blocks at zero"

    def unroll(self, batch: Batch, parts: TargetParts, rows: Tensor, steps: int) -> Iterator[Unrolled]:
        """See DraftHead: step s is head s; only a row's own state matters."""
        assert batch.last is not None  # `needs` asks for it
        state = self.inputs(batch.features[rows], batch.last[rows], parts)
        for s in range(steps):
            lm_head = self.lm_heads[s]
            assert isinstance(lm_head, nn.Linear)
            yield Unrolled(self.blocks[s](state.to(lm_head.weight.dtype)), lm_head.weight)

    def new_cache(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> Cache:
        """Only the number of committed rows is kept."""
        nothing = torch.zeros(batch, 0, 0, 0, device=device, dtype=dtype)
        return Cache(nothing, nothing.clone(), torch.zeros(batch, dtype=torch.int64, device=device))

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
        """See DraftHead: the recycled state is the committed row's h; embeddings and positions aren't looked at."""
        if valid is not None:
            cache.lengths[: len(valid)] += valid
            cache.longest += hidden.shape[1]
            cache.drafted = 0
            hidden = last_valid(hidden, valid)
        return self.lm_heads[step](self.blocks[step](hidden)), hidden


FAMILY = Family("medusa", MedusaConfig, MedusaHead)
