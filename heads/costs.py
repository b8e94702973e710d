"""What a head of any family costs, from its network built without memory (on torch's meta device)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .base import DraftHead
from .config import LayerConfig
from .layer import RecurrentHead
from .registry import head_family
from .shapes import TargetShapes
from .vocab import DraftVocab


def planned_head(
    shapes: TargetShapes,
    family: str,
    *,
    layer_ids: Sequence[int],
    steps: int,
    draft_vocab_size: int,
    options: Mapping[str, Any] | None = None,
) -> DraftHead:
    """Build the head of a target that isn't there; its parameters have shapes and no memory.

    Args:
        shapes: of the target.
        family: a registered family.
        layer_ids: aux layers that features are collected from.
        steps: unrolled steps, or heads.
        draft_vocab_size: Vd.
        options: the family's own.
    """
    found = head_family(family)
    build = getattr(importlib.import_module(found.head.__module__), f"{family}_config")
    vocab = DraftVocab(torch.arange(draft_vocab_size), shapes.vocab)
    config = build(
        shapes.config(),
        vocab,
        layer_ids=list(layer_ids),
        steps=steps,
        **(options or {}),
        target_id=shapes.name,
        target_revision=None,
        target_fingerprint="",
        chat_template_sha256=None,
        trained_length=0,
    )
    with torch.device("meta"):
        return found.head(config, vocab)


@dataclass(frozen=True)
class HeadCosts:
    """Parameters of a head by how often a row meets them.

    Attributes:
        params: all that are trained.
        first: of the matrices that only a committed row goes through: fusion, prefix layer.
        step: of the matrices that one draft step multiplies, the output weight included; a mean over the steps where
            each has its own.
        train_all: of the matrices that all rows of a training batch go through, once.
        train_rows: of those that supervised rows go through, counted once a pass, over all unrolled steps.
        frozen_rows: of the target's own output rows that read out, over all unrolled steps; they get no gradient.
        attention: Hq·D summed over the attention passes of all unrolled steps.
        kv: numbers of keys and values that the head caches a token.
        steps, draft_vocab, hidden: S, Vd, H; teacher: it learns from the target's distribution.
    """

    params: int
    first: int
    step: int
    train_all: int
    train_rows: int
    frozen_rows: int
    attention: int
    kv: int
    steps: int
    draft_vocab: int
    hidden: int
    teacher: bool

    def train_flops(self, supervised: float, keys: float) -> float:
        """Operations a token of a training batch: 2 forward and 4 backward a weight, 2 and 2 where it is frozen.

        Attention takes 4 forward and 10 backward a number of the key, which makes its scores anew.

        Args:
            supervised: share of the rows that are supervised.
            keys: that a row attends to, in the mean.
        """
        weights = 6.0 * (self.train_all + supervised * self.train_rows) + 4.0 * supervised * self.frozen_rows
        teacher = 2.0 * self.hidden * self.draft_vocab if self.teacher else 0.0
        return weights + teacher + 14.0 * supervised * self.attention * keys


def head_costs(head: DraftHead) -> HeadCosts:
    """Count a head's parameters; it may lie on the meta device."""
    config, steps = head.config, head.config.steps
    matrices = {n: p.numel() for n, p in head.named_parameters() if p.ndim == 2}
    own = sum(matrices.values())
    qkv = sum(n for name, n in matrices.items() if name.startswith(("layer.q_proj", "layer.k_proj", "layer.v_proj")))
    attention = config.num_attention_heads * config.head_dim if isinstance(config, LayerConfig) else 0
    frozen, first, entry = 0, 0, 0
    if isinstance(head, RecurrentHead):
        if not any(name.startswith("lm_head") for name in matrices):
            frozen = config.draft_vocab_size * config.hidden_size
        fusion = matrices.get("fc.weight", 0)
        first = fusion if config.layer_ids else 0  # what fuses aux states runs once; EAGLE-1's fc at every step
        entry = 0 if config.layer_ids else fusion
        step, rows, passes = own - first + frozen, steps * (own - first) - qkv - entry, steps
    else:
        first = sum(n for name, n in matrices.items() if name.startswith("layer."))
        step, rows, passes = (own - first) // steps, own - qkv, 1
    return HeadCosts(
        params=sum(p.numel() for p in head.parameters()),
        first=first,
        step=step,
        train_all=qkv + entry + (first if isinstance(head, RecurrentHead) else 0),
        train_rows=rows,
        frozen_rows=steps * frozen,
        attention=passes * attention,
        kv=2 * config.num_key_value_heads * config.head_dim if isinstance(config, LayerConfig) else 0,
        steps=steps,
        draft_vocab=config.draft_vocab_size,
        hidden=config.hidden_size,
        teacher=not head.hard_labels,
    )
