"""Attention of rows that look back at step-0 keys and at their own later ones; for unrolled training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Batch


@dataclass
class Layout:
    """How T packed rows and the R rows that run lie in documents: [D, L] keys and [D, Q] queries."""

    rows: Tensor  # [R] packed index of each row that runs
    key_slots: Tensor  # [T] d * L + position
    query_slots: Tensor  # [R] d * Q + rank within the document
    documents: int
    keys: int
    queries: int
    bias: Tensor  # [D, 1, 1, Q, L] additive mask: 0 where visible


def lay_out(batch: Batch, rows: Tensor) -> Layout:
    """Place packed rows in [D, L] and the running rows in [D, Q]; padding exists only inside the attention."""
    number = torch.unique_consecutive(batch.documents, return_inverse=True)[1]
    n_docs, longest = int(number[-1]) + 1, int(batch.positions.max()) + 1
    per_doc = torch.bincount(number[rows], minlength=n_docs)
    first = torch.cumsum(per_doc, 0) - per_doc
    queries = int(per_doc.max()) if len(rows) else 0
    rank = torch.arange(len(rows), device=rows.device) - first[number[rows]]
    query_slots = number[rows] * queries + rank
    limit = torch.full((n_docs * queries,), 0, device=rows.device)  # padding queries see key 0: finite, never read
    limit[query_slots] = batch.positions[rows]
    visible = torch.arange(longest, device=rows.device) <= limit[:, None]
    dtype = torch.float64 if batch.features.dtype == torch.float64 else torch.float32
    bias = torch.zeros(visible.shape, dtype=dtype, device=rows.device).masked_fill_(~visible, float("-inf"))
    return Layout(
        rows, number * longest + batch.positions, query_slots, n_docs, longest, queries,
        bias.view(n_docs, 1, 1, queries, longest),
    )  # fmt: skip


def to_documents(x: Tensor, layout: Layout) -> Tensor:
    """Scatter packed [T, Hk, D] to [Docs, Hk, L, D]."""
    padded = x.new_zeros(layout.documents * layout.keys, *x.shape[1:]).index_copy(0, layout.key_slots, x)
    return padded.view(layout.documents, layout.keys, *x.shape[1:]).transpose(1, 2)


def attend(q: Tensor, keys: Tensor, values: Tensor, own_k: list[Tensor], own_v: list[Tensor], layout: Layout) -> Tensor:
    """One softmax over the step-0 keys of rows 0..j and the row's own later keys.

    Args:
        q: [R, Hq, D]; keys, values: [Docs, Hk, L, D]; own_k, own_v: s tensors [R, Hk, D].

    Returns:
        [R, Hq, D].
    """
    r, heads, dim = q.shape
    kv = keys.shape[1]
    group, d, n = heads // kv, layout.documents, layout.queries
    scale = dim**-0.5
    padded = q.new_zeros(d * n, heads, dim).index_copy(0, layout.query_slots, q)
    padded = padded.view(d, n, kv, group, dim).permute(0, 2, 3, 1, 4).reshape(d, kv, group * n, dim)
    scores = (padded @ keys.transpose(-1, -2)).view(d, kv, group, n, layout.keys) * scale + layout.bias.to(q.dtype)
    if own_k:
        grouped = q.view(r, kv, group, dim)
        own = torch.stack([(grouped * k[:, :, None]).sum(-1) for k in own_k], -1) * scale  # [R, Hk, G, s]
        own = own.new_zeros(d * n, *own.shape[1:]).index_copy(0, layout.query_slots, own)
        scores = torch.cat((scores, own.view(d, n, kv, group, len(own_k)).permute(0, 2, 3, 1, 4)), -1)
    p = torch.softmax(scores if scores.dtype == torch.float64 else scores.float(), -1).to(q.dtype)
    size = layout.keys
    out = p[..., :size].reshape(d, kv, group * n, size) @ values
    out = out.view(d, kv, group, n, dim).permute(0, 3, 1, 2, 4).reshape(d * n, heads, dim)
    out = out.index_select(0, layout.query_slots)
    if own_k:
        weights = p[..., size:].permute(0, 3, 1, 2, 4).reshape(d * n, kv, group, len(own_v))
        weights = weights.index_select(0, layout.query_slots)
        mixed = sum(weights[..., i, None] * v[:, :, None] for i, v in enumerate(own_v))
        out = out + cast(Tensor, mixed).reshape(r, heads, dim)
    return out


def cached_attention(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Attention of rows [B, M, Hq, D] over a cache [B, Hk, S, D] where `visible` [B, M, S]; returns [B, M, Hq*D]."""
    b, m, heads, dim = q.shape
    kv = keys.shape[1]
    grouped = q.view(b, m, kv, heads // kv, dim).permute(0, 2, 3, 1, 4).reshape(b, kv, -1, dim)
    mask = visible[:, None, None].expand(b, 1, heads // kv, m, -1).reshape(b, 1, -1, visible.shape[-1])
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return out.view(b, kv, heads // kv, m, dim).permute(0, 3, 1, 2, 4).reshape(b, m, heads * dim)


def visible_rows(lengths: Tensor, slots: Tensor, seen: Tensor | None, size: int) -> Tensor:
    """Which of the first `size` cache slots new rows may read: bool [B, M, size].

    Args:
        lengths: [B] committed rows, which every row sees; slots: [B, M] where the new rows lie.
        seen: bool [B, M, D], which of the D rows behind the committed ones each row sees; None = all up to itself.
    """
    at = torch.arange(size, device=lengths.device)
    if seen is None:
        return at <= slots[..., None]
    behind = at - lengths[:, None]  # [B, size]
    inside = behind.clamp(0, seen.shape[2] - 1)[:, None].expand(-1, seen.shape[1], -1)
    drafted = seen.gather(2, inside) & (behind < seen.shape[2])[:, None]
    return (behind < 0)[:, None] | drafted
