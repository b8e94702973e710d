"""EAGLE-3 written out densely in fp64: the oracle for `heads/eagle3.py`, from arXiv 2503.01840, section 3, alone.

`norm_before_residual` is vLLM's and speculators' option: the decoder layer adds to the normed hidden state.
"""

from __future__ import annotations

from typing import Any

import torch
from reference import Document, attend, finish, frequencies, norm, project, row_loss
from torch import Tensor

__all__ = ["draft", "row_loss", "unroll"]
Weights = dict[str, Tensor]


def enter(p: Weights, c: Any, embed: Tensor, hidden: Tensor) -> Tensor:
    """What attention reads: both inputs normed, the embedding first."""
    return torch.cat(
        (norm(embed, p["input_layernorm"], c.rms_norm_eps), norm(hidden, p["hidden_norm"], c.rms_norm_eps))
    )


def residual(p: Weights, c: Any, hidden: Tensor) -> Tensor:
    """What the layer's attention is added to."""
    return norm(hidden, p["hidden_norm"], c.rms_norm_eps) if c.norm_before_residual else hidden


def read_out(p: Weights, c: Any, a: Tensor) -> Tensor:
    """Draft logits [Vd] of a row's state."""
    return p["lm_head.weight"] @ norm(a, p["norm"], c.rms_norm_eps)


def unroll(p: Weights, c: Any, doc: Document, parts: Any, ids: list[int]) -> list[dict[int, Tensor]]:
    """Every row whose input token exists: training-time test with an explicit mask."""
    rope = frequencies(c.rope, c.head_dim)
    total = len(doc.tokens)
    hidden = {j: p["fc.weight"] @ doc.features[j] for j in range(total - 1)}
    seen: list[tuple[int, int, Tensor, Tensor]] = []  # (step, row, key, value) of everything computed so far
    out = []
    for s in range(c.steps):
        rows = range(max(total - 1 - s, 0))  # t[j+1+s] must exist
        queries = {}
        for j in rows:
            x = enter(p, c, parts.embed[doc.tokens[j + 1 + s]], hidden[j])
            queries[j], k, v = project(p, c, x, j + s, rope, "layer.")
            seen.append((s, j, k, v))
        logits, recycled = {}, {}
        for j in rows:
            visible = [x for x in seen if (x[0] == 0 and x[1] <= j) or (x[0] > 0 and x[1] == j)]
            attended = attend(c, queries[j], torch.stack([x[2] for x in visible]), torch.stack([x[3] for x in visible]))
            recycled[j] = finish(p, c, residual(p, c, hidden[j]), attended, "layer.")
            logits[j] = read_out(p, c, recycled[j])
        hidden = recycled
        out.append(logits)
    return out


def draft(p: Weights, c: Any, doc: Document, parts: Any, ids: list[int], row: int, steps: int) -> list[Tensor]:
    """What a decoder computes that drafts behind `row`, teacher-forced."""
    rope = frequencies(c.rope, c.head_dim)
    keys, values, out = [], [], []
    hidden = q = None
    for j in range(row + 1):  # committed rows, one by one
        hidden = p["fc.weight"] @ doc.features[j]
        q, k, v = project(p, c, enter(p, c, parts.embed[doc.tokens[j + 1]], hidden), j, rope, "layer.")
        keys.append(k)
        values.append(v)
    for s in range(steps):
        if s > 0:
            x = enter(p, c, parts.embed[doc.tokens[row + 1 + s]], hidden)
            q, k, v = project(p, c, x, len(keys), rope, "layer.")
            keys.append(k)
            values.append(v)
        attended = attend(c, q, torch.stack(keys), torch.stack(values))
        hidden = finish(p, c, residual(p, c, hidden), attended, "layer.")
        out.append(read_out(p, c, hidden))
    return out
