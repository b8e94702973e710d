"""What a head of any family costs, from its network built without memory (on torch's meta device)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .base import DraftHead
from .config import LayerConfig, default_layer_ids
from .layer import RecurrentHead
from .mtp import ChainedMtp
from .mtp_modules import MtpConfig
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


def planned_depth(family: str, steps: int, options: Mapping[str, Any]) -> int | None:
    """`most_depth` of a head with these settings, whatever its target.

    Raises:
        DraftsmithError: settings that contradict each other.
    """
    any_target = TargetShapes("any", 16, 8, 2, 2, 8, 16, 1024, False, 10000.0)
    ids = default_layer_ids(any_target.layers)
    head = planned_head(any_target, family, layer_ids=ids, steps=steps, draft_vocab_size=1024, options=options)
    return head.most_depth


@dataclass(frozen=True)
class HeadCosts:
    """Parameters of a head by how often a row meets them; of experts it meets those that it goes through.

    Attributes:
        params: all that are trained.
        first: of the matrices that only a committed row goes through: fusion, prefix layer.
        step: of the matrices that one draft step multiplies, the output weight included; a mean over the steps where
            each has its own.
        train_all: of the matrices that all rows of a training batch go through, once.
        train_rows: of those that supervised rows go through, counted once a pass, over all unrolled steps.
        frozen_rows: of the target's own output rows that read out, over all unrolled steps; they get no gradient.
        attention: Hq·D summed over the attention passes that supervised rows make in all unrolled steps; attention_all:
            over those that all rows make.
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
    attention_all: int = 0

    def train_flops(self, supervised: float, keys: float) -> float:
        """Operations a token of a training batch: 2 forward and 4 backward a weight, 2 and 2 where it is frozen.

        Attention takes 4 forward and 10 backward a number of the key, which makes its scores anew.

        Args:
            supervised: share of the rows that are supervised.
            keys: that a row attends to, in the mean.
        """
        weights = 6.0 * (self.train_all + supervised * self.train_rows) + 4.0 * supervised * self.frozen_rows
        teacher = 2.0 * self.hidden * self.draft_vocab if self.teacher else 0.0
        return weights + teacher + 14.0 * (supervised * self.attention + self.attention_all) * keys


def head_costs(head: DraftHead) -> HeadCosts:
    """Count a head's parameters; it may lie on the meta device."""
    config, steps = head.config, head.config.steps
    matrices = _met(head)
    own = sum(matrices.values())
    qkv = _named(matrices, _PROJECTIONS)
    has_rows = any(name.startswith("lm_head") for name in matrices)
    frozen = 0 if has_rows else config.draft_vocab_size * config.hidden_size
    attention = config.num_attention_heads * config.head_dim if isinstance(config, LayerConfig) else 0
    kv = 2 * config.num_key_value_heads * config.head_dim if isinstance(config, LayerConfig) else 0
    networks, everywhere = 1, 0  # with keys and values of their own; passes of all rows
    if isinstance(head, RecurrentHead):
        fusion = _named(matrices, ("fc.", "eh_proj."))
        first = fusion if config.layer_ids else 0  # what fuses aux states runs once; else the inputs meet at every step
        entry = 0 if config.layer_ids else fusion
        step, rows, passes = own - first + frozen, steps * (own - first) - qkv - entry, steps
        every = qkv + entry + first
    elif isinstance(head, ChainedMtp):
        networks, everywhere, passes = steps, steps - 1, 1
        last = f"depths.{steps - 1}."
        rows = _named(matrices, (f"{last}layer.",)) - _named(matrices, tuple(last + x for x in _PROJECTIONS))
        step, every = own // steps + frozen, own - rows
        first = own - own // steps - rows  # committed rows go through all modules; the last one takes keys and values
    else:
        first = _named(matrices, ("layer.",))
        step, rows, passes, every = (own - first) // steps, own - qkv, 1, qkv
    return HeadCosts(
        params=sum(p.numel() for p in head.parameters()),
        first=first,
        step=step,
        train_all=every,
        train_rows=rows,
        frozen_rows=steps * frozen,
        attention=passes * attention,
        kv=networks * kv,
        steps=steps,
        draft_vocab=config.draft_vocab_size,
        hidden=config.hidden_size,
        teacher=not head.hard_labels,
        attention_all=everywhere * attention,
    )


_PROJECTIONS = ("layer.q_", "layer.k_", "layer.v_", "layer.kv_")
"""Beginnings of the matrices that make queries, keys and values."""


def _met(head: DraftHead) -> dict[str, int]:
    """Numbers of each matrix that a row multiplies, by name: of a stack of experts top_k of `count`."""
    shares = {2: (1, 1)}
    if isinstance(head.config, MtpConfig) and head.config.mlp["kind"] == "experts":
        shares[3] = (head.config.mlp["top_k"], head.config.mlp["count"])
    found = {name: (p.numel(), *shares[p.ndim]) for name, p in head.named_parameters() if p.ndim in shares}
    return {name: numbers * k // count for name, (numbers, k, count) in found.items()}


def _named(matrices: Mapping[str, int], beginnings: tuple[str, ...]) -> int:
    """Numbers in the matrices whose names begin so."""
    return sum(n for name, n in matrices.items() if name.startswith(beginnings))
