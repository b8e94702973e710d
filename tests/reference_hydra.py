"""Hydra++ written out densely in fp64: the oracle for `heads/hydra.py`, from the method's formulas alone."""

from __future__ import annotations

from typing import Any

import torch
from reference import Document, attend, finish, frequencies, norm, project, row_loss
from torch import Tensor

__all__ = ["draft", "row_loss", "unroll"]
Weights = dict[str, Tensor]


def prefix(p: Weights, c: Any, doc: Document, parts: Any, rows: int) -> list[Tensor]:
    """h of rows 0 .. rows-1: a causal layer over the target's normed states, and its norm."""
    rope = frequencies(c.rope, c.head_dim)
    keys, values, out = [], [], []
    for j in range(rows):
        f = norm(doc.last[j], parts.norm_weight, parts.norm_eps)
        q, k, v = project(p, c, norm(f, p["input_layernorm"], c.rms_norm_eps), j, rope, "layer.")
        keys.append(k)
        values.append(v)
        a = finish(p, c, f, attend(c, q, torch.stack(keys), torch.stack(values)), "layer.")
        out.append(norm(a, p["norm"], c.rms_norm_eps))
    return out


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def predict(p: Weights, c: Any, h: Tensor, read: list[Tensor]) -> Tensor:
    """Logits [Vd] of head len(read) - 1, which has read these embeddings."""
    name = f"heads.{len(read) - 1}."
    z = torch.cat([h, *read])
    y = p[f"{name}shortcut.weight"] @ z + p[f"{name}shortcut.bias"]
    for i in range(c.blocks):
        y = y + silu(p[f"{name}blocks.{i}.weight"] @ (z if i == 0 else y) + p[f"{name}blocks.{i}.bias"])
    return p[f"lm_heads.{len(read) - 1}.weight"] @ y


def drafts(p: Weights, c: Any, doc: Document, parts: Any, h: Tensor, row: int, steps: int) -> list[Tensor]:
    """Logits of the first heads behind a row whose prefix state is h, as far as the text goes."""
    read = [parts.embed[t] for t in doc.tokens[row + 1 : row + 1 + steps]]
    return [predict(p, c, h, read[: s + 1]) for s in range(len(read))]


def unroll(p: Weights, c: Any, doc: Document, parts: Any, ids: list[int]) -> list[dict[int, Tensor]]:
    """Every row whose input tokens exist."""
    states = prefix(p, c, doc, parts, len(doc.tokens) - 1)
    out: list[dict[int, Tensor]] = [{} for _ in range(c.steps)]
    for j, h in enumerate(states):
        for s, logits in enumerate(drafts(p, c, doc, parts, h, j, c.steps)):
            out[s][j] = logits
    return out


def draft(p: Weights, c: Any, doc: Document, parts: Any, ids: list[int], row: int, steps: int) -> list[Tensor]:
    """What a decoder computes that drafts behind `row`, teacher-forced: it has seen no later row."""
    return drafts(p, c, doc, parts, prefix(p, c, doc, parts, row + 1)[-1], row, steps)
