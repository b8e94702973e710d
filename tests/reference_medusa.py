"""Medusa-1 written out densely in fp64: the oracle for `heads/medusa.py`, from arXiv 2401.10774, section 2.1, alone."""

from __future__ import annotations

from typing import Any

import torch
from reference import Document, norm
from torch import Tensor

Weights = dict[str, Tensor]


def guess(p: Weights, c: Any, doc: Document, parts: Any, row: int, head: int) -> Tensor:
    """Logits [Vd] of one head at a row."""
    x = norm(doc.last[row], parts.norm_weight, parts.norm_eps)
    for block in range(c.blocks):
        name = f"blocks.{head}.layers.{block}"
        z = p[f"{name}.weight"] @ x + p[f"{name}.bias"]
        x = x + z * torch.sigmoid(z)
    return p[f"lm_heads.{head}.weight"] @ x


def unroll(p: Weights, c: Any, doc: Document, parts: Any, ids: list[int]) -> list[dict[int, Tensor]]:
    """Every row that has a token behind it."""
    return [{j: guess(p, c, doc, parts, j, s) for j in range(len(doc.tokens) - 1)} for s in range(c.steps)]


def draft(p: Weights, c: Any, doc: Document, parts: Any, ids: list[int], row: int, steps: int) -> list[Tensor]:
    """Logits of each head behind `row`; none of them reads a drafted token."""
    return [guess(p, c, doc, parts, row, s) for s in range(steps)]


def row_loss(
    c: Any, doc: Document, parts: Any, ids: list[int], row: int, step: int, logits: Tensor, state: Any
) -> Tensor:
    """Cross-entropy of the text's own token."""
    return -torch.log_softmax(logits, 0)[ids.index(doc.tokens[row + 2 + step])]
