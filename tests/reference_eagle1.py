"""EAGLE-1 and HASS written out densely in fp64: the oracle for `heads/eagle1.py`.

From arXiv 2401.15077, section 3 (network, both losses), and 2408.15766, section 3 (several steps, top-K loss), alone.
"""

from __future__ import annotations

from typing import Any

import torch
from reference import Document, attend, finish, frequencies, norm, project, soft_loss, teacher
from torch import Tensor

Weights = dict[str, Tensor]
Found = tuple[Tensor, Tensor]


def feature(doc: Document, row: int, parts: Any) -> Tensor:
    """The target's state at a row after its final norm; [H]."""
    return norm(doc.last[row], parts.norm_weight, parts.norm_eps)


def enter(p: Weights, embed: Tensor, hidden: Tensor) -> Tensor:
    """Attention's input and the residual."""
    z = p["fc.weight"] @ torch.cat((embed, hidden))
    return z + p["fc.bias"] if "fc.bias" in p else z


def unroll(p: Weights, c: Any, doc: Document, parts: Any, ids: list[int]) -> list[dict[int, Found]]:
    """Logits and predicted features, step after step; what a step reads of the one before is a constant."""
    rope = frequencies(c.rope, c.head_dim)
    total = len(doc.tokens)
    hidden = {j: feature(doc, j, parts) for j in range(total - 1)}
    seen: list[tuple[int, int, Tensor, Tensor]] = []  # (step, row, key, value) of everything computed so far
    out = []
    for s in range(c.steps):
        rows = range(max(total - 1 - s, 0))  # t[j+1+s] must exist
        inputs, queries = {}, {}
        for j in rows:
            inputs[j] = enter(p, parts.embed[doc.tokens[j + 1 + s]], hidden[j])
            queries[j], k, v = project(p, c, inputs[j], j + s, rope, "layer.")
            seen.append((s, j, k, v))
        found = {}
        for j in rows:
            visible = [x for x in seen if (x[0] == 0 and x[1] <= j) or (x[0] > 0 and x[1] == j)]
            attended = attend(c, queries[j], torch.stack([x[2] for x in visible]), torch.stack([x[3] for x in visible]))
            predicted = finish(p, c, inputs[j], attended, "layer.")
            found[j] = (parts.lm_head[ids] @ predicted, predicted)
        hidden = {j: predicted.detach() for j, (_, predicted) in found.items()}
        out.append(found)
    return out


def draft(p: Weights, c: Any, doc: Document, parts: Any, ids: list[int], row: int, steps: int) -> list[Found]:
    """What a decoder computes that drafts behind `row`, teacher-forced."""
    rope = frequencies(c.rope, c.head_dim)
    keys, values, out = [], [], []
    for j in range(row + steps):
        hidden = feature(doc, j, parts) if j <= row else out[-1][1]
        z = enter(p, parts.embed[doc.tokens[j + 1]], hidden)
        q, k, v = project(p, c, z, j, rope, "layer.")
        keys.append(k)
        values.append(v)
        if j >= row:
            predicted = finish(p, c, z, attend(c, q, torch.stack(keys), torch.stack(values)), "layer.")
            out.append((parts.lm_head[ids] @ predicted, predicted))
    return out


def smooth_l1(x: Tensor) -> Tensor:
    """Mean over the last dimension of x^2 / 2 within 1, |x| - 1/2 beyond."""
    return torch.where(x.abs() < 1, x * x / 2, x.abs() - 0.5).mean(-1)


def row_loss(
    c: Any, doc: Document, parts: Any, ids: list[int], row: int, step: int, logits: Tensor, state: Tensor
) -> Tensor:
    """Distance to the target's feature, and cross-entropies over all tokens and over the target's K likeliest."""
    goal = row + 1 + step
    full = teacher(doc, goal, parts)
    p, log_q = torch.softmax(full[ids], 0), torch.log_softmax(logits, 0)
    best = sorted(range(len(ids)), key=lambda i: -float(p[i].detach()))[: c.topk]
    top = -(p[best] * log_q[best]).sum()
    distance = smooth_l1(state - feature(doc, goal, parts))
    return c.feature_weight * distance + c.token_weight * soft_loss(logits, full, ids) + c.topk_weight * top
