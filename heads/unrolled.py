"""Attention of rows that look back at step-0 keys and at their own later ones; for unrolled training.

    a[j, i]  = q_j · k_0[i] / sqrt(D)  for the rows i <= j of j's document
    b[j, s]  = q_j · k_s[j] / sqrt(D)  for the later steps s: a diagonal, one entry a row and step
    lse_j    = log(sum_i exp a[j, i] + sum_s exp b[j, s])
    out_j    = sum_i exp(a[j, i] - lse_j) v_0[i] + sum_s exp(b[j, s] - lse_j) v_s[j]

The first sum runs over tiles, a few rows and keys of one document at a time, whose results are merged by their lse; the
diagonal is merged last. Backward knows lse and out, and makes each tile's probabilities anew (FlashAttention-2, arXiv
2307.08691, section 3.1). So memory is O(T) whatever a document's length: nothing larger than a tile is ever made. What
is kept for backward are q, out and lse of a step, and the keys and values themselves, which all steps share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .base import Batch


class TileSize(NamedTuple):
    """How many of the rows that run, and how many keys, meet in one product."""

    rows: int
    keys: int


# CPU: measured with documents of 150 to 2048 tokens. CUDA: not measured; few launches, and 128 MB of scores in fp32
# with 32 heads.
TILE_SIZES = {"cpu": TileSize(64, 512), "cuda": TileSize(1024, 1024)}
# Where a product of 16-bit factors can be had in fp32; elsewhere the factors are made fp32 first.
MIXED_PRODUCTS = {"cuda"}


@dataclass(frozen=True)
class Tile:
    """Neighbouring rows of one document, and every key that the last of them sees."""

    rows: slice
    """Of the R rows that run."""
    keys: tuple[slice, ...]
    """Of the T packed rows."""
    clear: int
    """All the rows see the keys before this packed row."""


@dataclass(frozen=True)
class Layout:
    """Which rows run, and the tiles that they need."""

    rows: Tensor  # [R] packed index, ascending
    tiles: tuple[Tile, ...]


def lay_out(batch: Batch, rows: Tensor) -> Layout:
    """Cut rows [R] (packed indices, ascending) into tiles: none lies across documents or wholly in the future."""
    size = TILE_SIZES[rows.device.type]
    lengths = torch.unique_consecutive(batch.documents, return_counts=True)[1]
    ends = torch.cumsum(lengths, 0)
    counts = torch.searchsorted(rows, ends).tolist()
    packed, tiles = rows.tolist(), []
    start = first = 0
    for end, stop in zip(ends.tolist(), counts, strict=True):
        for at in range(first, stop, size.rows):
            behind = min(at + size.rows, stop)
            last = packed[behind - 1] + 1
            keys = tuple(slice(k, min(k + size.keys, last)) for k in range(start, last, size.keys))
            tiles.append(Tile(slice(at, behind), keys, packed[at] + 1))
        start, first = end, stop
    return Layout(rows, tuple(tiles))


def attend(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], layout: Layout) -> Tensor:
    """One softmax over the step-0 keys of rows 0..j and the row's own later keys.

    Scores, sums and gradients are accumulated in fp32 (fp64 stays).

    Args:
        q: [R, Hq, D] of the rows that run.
        keys, values: by step; [T, Hk, D] of step 0, [R, Hk, D] of each later one.

    Returns:
        [R, Hq, D] in the dtype of the values.
    """
    return cast(Tensor, _Attention.apply(layout, q, *keys, *values))


class _Attention(torch.autograd.Function):
    """See the module's formulas; heads are grouped [R, Hk, G, D] where rows lead, [Hk, R * G, D] in the tiles."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, q: Tensor, *pairs: Tensor) -> Any:
        """See `attend`; the pairs are the keys, then the values, each by step."""
        keys, values = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        with torch.autocast(q.device.type, enabled=False):
            tiles = _Tiles(layout, q, keys[0], values[0])
            out, lse = tiles.forward()
            if len(keys) > 1:
                scores = tiles.scale * (tiles.by_row(q) @ tiles.own(keys[1:]).mT)
                total = torch.logsumexp(torch.cat((lse.unsqueeze(-1), scores), -1), -1, keepdim=True)
                out *= (lse.unsqueeze(-1) - total).exp_()
                out += scores.sub_(total).exp_() @ tiles.own(values[1:])
                lse = total.squeeze(-1)
        attended = out.reshape(q.shape).to(values[0].dtype)
        ctx.layout = layout
        ctx.save_for_backward(q, attended, lse, *pairs)
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients of q and of every step's keys and values."""
        q, attended, lse, *pairs = ctx.saved_tensors
        keys, values = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        with torch.autocast(q.device.type, enabled=False):
            tiles = _Tiles(ctx.layout, q, keys[0], values[0])
            g, grouped = tiles.by_row(grads[0]), tiles.by_row(q)
            shared = (g * tiles.by_row(attended)).sum(-1)
            dq, dk, dv = tiles.backward(g, lse, shared)
            dks, dvs = [dk], [dv]
            if len(keys) > 1:
                own_k, own_v = tiles.own(keys[1:]), tiles.own(values[1:])
                p = (tiles.scale * (grouped @ own_k.mT)).sub_(lse.unsqueeze(-1)).exp_()
                ds = (g @ own_v.mT).sub_(shared.unsqueeze(-1)).mul_(p).mul_(tiles.scale)
                dq += ds @ own_k
                dks += (ds.mT @ grouped).unbind(2)
                dvs += (p.mT @ g).unbind(2)
        given = (dq.reshape(q.shape), *dks, *dvs)
        return None, *(x.to(like.dtype) for x, like in zip(given, (q, *pairs), strict=True))


class _Tiles:
    """Attention over the step-0 keys alone, tile by tile.

    Args:
        layout: the tiles.
        q: [R, Hq, D]; k, v: [T, Hk, D].
    """

    def __init__(self, layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.layout = layout
        self.kv_heads, self.group, self.dim = k.shape[1], q.shape[1] // k.shape[1], q.shape[2]
        self.scale = self.dim**-0.5
        self.wide = torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32)
        self.factor = v.dtype if q.device.type in MIXED_PRODUCTS else self.wide
        self.q = self._by_head(self.by_row(q))
        self.k, self.v = (x.to(self.factor).transpose(0, 1) for x in (k, v))

    def by_row(self, x: Tensor) -> Tensor:
        """Group the heads of [R, Hq, D]: [R, Hk, G, D], wide."""
        return x.to(self.wide).reshape(len(x), self.kv_heads, self.group, self.dim)

    def own(self, later: Sequence[Tensor]) -> Tensor:
        """Keys or values [R, Hk, D] of s later steps side by side: [R, Hk, s, D], wide."""
        return torch.stack([x.to(self.wide) for x in later], 2)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the weighted values [R, Hk, G, D] and the log-sum-exp [R, Hk, G], both wide."""
        out = self.q.new_empty(self.q.shape, dtype=self.wide)
        lse = out.new_empty(out.shape[:2])
        for tile in self.layout.tiles:
            at = self._slots(tile)
            top: Tensor | float = -torch.inf
            mass = weighted = torch.zeros((), dtype=self.wide, device=out.device)
            for keys in tile.keys:
                scores = self._scores(tile, keys)
                higher = scores.amax(-1, keepdim=True).mul_(self.scale).clamp_(min=top)
                p = torch.add(-higher, scores, alpha=self.scale, out=scores).exp_()
                kept = (top - higher).exp_()
                mass = mass * kept + p.sum(-1, keepdim=True)
                weighted = weighted * kept + self._product(p, self.v[:, keys])
                top = higher
            torch.div(weighted, mass, out=out[:, at])
            lse[:, at] = (mass.log_() + top).squeeze(-1)
        return self._rows_first(out), self._rows_first(lse)

    def backward(self, g: Tensor, lse: Tensor, shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the part of the output that comes from step-0 keys.

        Args:
            g: [R, Hk, G, D] gradient of the whole output.
            lse: [R, Hk, G] over all that a row sees, later steps included.
            shared: [R, Hk, G] g · out, what the softmax takes off every score's gradient.

        Returns:
            dq [R, Hk, G, D]; dk, dv [T, Hk, D]; all wide.
        """
        grads, lses, offs = self._by_head(g), self._heads_first(lse)[..., None], self._heads_first(shared)[..., None]
        dq = torch.zeros_like(self.q, dtype=self.wide)
        dk, dv = (self.k.new_zeros(self.k.shape, dtype=self.wide) for _ in range(2))
        for tile in self.layout.tiles:
            at = self._slots(tile)
            for keys in tile.keys:
                scores = self._scores(tile, keys)
                p = torch.add(-lses[:, at], scores, alpha=self.scale, out=scores).exp_()
                dv[:, keys].add_(self._product(p.transpose(1, 2), grads[:, at]))
                ds = self._product(grads[:, at], self.v[:, keys].transpose(1, 2)).sub_(offs[:, at]).mul_(p)
                dq[:, at].add_(self._product(ds, self.k[:, keys]))
                dk[:, keys].add_(self._product(ds.transpose(1, 2), self.q[:, at]))
        dq, dk = dq.mul_(self.scale), dk.mul_(self.scale)
        return self._rows_first(dq), dk.transpose(0, 1), dv.transpose(0, 1)

    def _scores(self, tile: Tile, keys: slice) -> Tensor:
        """Unscaled scores [Hk, n * G, keys] of a tile's rows, -inf where a key lies behind the row."""
        scores = self._product(self.q[:, self._slots(tile)], self.k[:, keys].transpose(1, 2))
        if keys.stop > tile.clear:
            _hide_later(scores, self.layout.rows[tile.rows], keys)
        return scores

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """Wide matrix products of [Hk, M, K] and [Hk, K, N] in the factors' dtype."""
        a = a.to(self.factor)
        return torch.bmm(a, b) if self.factor == self.wide else torch.bmm(a, b, out_dtype=self.wide)

    def _slots(self, tile: Tile) -> slice:
        return slice(tile.rows.start * self.group, tile.rows.stop * self.group)

    def _heads_first(self, x: Tensor) -> Tensor:
        """[R, Hk, G, ...] to [Hk, R * G, ...]."""
        return x.transpose(0, 1).flatten(1, 2)

    def _by_head(self, x: Tensor) -> Tensor:
        return self._heads_first(x).to(self.factor)

    def _rows_first(self, x: Tensor) -> Tensor:
        """[Hk, R * G, ...] to [R, Hk, G, ...]."""
        return x.unflatten(1, (-1, self.group)).transpose(0, 1)


def _hide_later(scores: Tensor, rows: Tensor, keys: slice) -> None:
    """Set the scores [Hk, n * G, keys] of keys behind each of the n rows to -inf."""
    later = torch.arange(keys.start, keys.stop, device=rows.device) > rows[:, None]
    scores.view(scores.shape[0], len(rows), -1, scores.shape[-1]).masked_fill_(later[:, None], -torch.inf)


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
