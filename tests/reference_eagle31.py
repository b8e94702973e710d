"""EAGLE-3.1 written out densely in fp64: the oracle for `heads/eagle31.py`.

From arXiv 2503.01840, section 3, with the two changes of 2605.09992: every captured state is normed before the fusion,
and what a step reads of the one before is its state after the final norm.
"""

from __future__ import annotations

from typing import Any

import torch
from reference import Document, attend, finish, frequencies, norm, project, row_loss
from torch import Tensor

__all__ = ["draft", "row_loss", "unroll"]
Weights = dict[str, Tensor]


def fused(p: Weights, c: Any, features: Tensor) -> Tensor:
    """g [H] of one row's captured states, one after the other [A*H]."""
    g = torch.zeros(c.hidden_size, dtype=features.dtype)
    for i in range(len(c.layer_ids)):
        part = slice(i * c.hidden_size, (i + 1) * c.hidden_size)
        g = g + p["fc.weight"][:, part] @ norm(features[part], p[f"fc_norm.{i}"], c.rms_norm_eps)
    return g


def enter(p: Weights, c: Any, embed: Tensor, hidden: Tensor) -> Tensor:
    """What attention reads: both inputs normed, the embedding first."""
    return torch.cat(
        (norm(embed, p["input_layernorm"], c.rms_norm_eps), norm(hidden, p["hidden_norm"], c.rms_norm_eps))
    )


def unroll(p: Weights, c: Any, doc: Document, parts: Any, ids: list[int]) -> list[dict[int, Tensor]]:
    """Every row whose input token exists: training-time test with an explicit mask."""
    rope = frequencies(c.rope, c.head_dim)
    total = len(doc.tokens)
    hidden = {j: fused(p, c, doc.features[j]) for j in range(total - 1)}
    seen: list[tuple[int, int, Tensor, Tensor]] = []  # (step, row, key, value) of everything computed so far
    out = []
    for s in range(c.steps):
        rows = range(max(total - 1 - s, 0))  # t[j+1+s] must exist
        queries = {}
        for j in rows:
            x = enter(p, c, parts.embed[doc.tokens[j + 1 + s]], hidden[j])
            queries[j], k, v = project(p, c, x, j + s, rope, "layer.")
            seen.append((s, j, k, v))
        normed = {}
        for j in rows:
            visible = [x for x in seen if (x[0] == 0 and x[1] <= j) or (x[0] > 0 and x[1] == j)]
            attended = attend(c, queries[j], torch.stack([x[2] for x in visible]), torch.stack([x[3] for x in visible]))
            normed[j] = norm(finish(p, c, hidden[j], attended, "layer."), p["norm"], c.rms_norm_eps)
        hidden = normed
        out.append({j: p["lm_head.weight"] @ b for j, b in normed.items()})
    return out


def draft(p: Weights, c: Any, doc: Document, parts: Any, ids: list[int], row: int, steps: int) -> list[Tensor]:
    """What a decoder computes that drafts behind `row`, teacher-forced."""
    rope = frequencies(c.rope, c.head_dim)
    keys, values, out = [], [], []
    recycled = torch.empty(0)
    for j in range(row + steps):
        hidden = fused(p, c, doc.features[j]) if j <= row else recycled
        q, k, v = project(p, c, enter(p, c, parts.embed[doc.tokens[j + 1]], hidden), j, rope, "layer.")
        keys.append(k)
        values.append(v)
        if j >= row:
            state = finish(p, c, hidden, attend(c, q, torch.stack(keys), torch.stack(values)), "layer.")
            recycled = norm(state, p["norm"], c.rms_norm_eps)
            out.append(p["lm_head.weight"] @ recycled)
    return out
