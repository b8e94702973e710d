"""Attention of a tree's rows over a cached prefix and their own ancestors, in Triton.

    out[r] = sum_s p[r, s] v[s],   p[r, s] = exp(x[r, s]) / (sum_s' exp(x[r, s']) + exp(sink)),
    x[r, s] = cap(scale q[r].k[s]) where s is visible to r, else -inf;   cap(x) = c tanh(x / c), or x without a cap

with running maxima and sums over blocks of keys (online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867;
FlashAttention: Dao et al. 2022, arXiv 2205.14135, algorithm 1). Keys of one sequence and head are cut into pieces that
run at the same time (Flash-Decoding); a second kernel merges the pieces' sums.

The work is bound by reading keys and values, so these are read once for all query heads that share them: a tile holds
`group * N` query rows, node by node, the heads of a node side by side. Beyond 128 rows there are several tiles, started
side by side, so that all but one find the keys in the second-level cache.

How many pieces there are is decided from sizes that the host knows; where a piece begins, from the lengths on the
device: nothing waits. A row's rounding depends on the pieces, hence on the batch, unlike on the CPU path.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....errors import DraftsmithError
from ..types import WORD
from . import LARGEST_HEAD

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
_LOG2E = tl.constexpr(math.log2(math.e))
_MOST_ROWS, _MOST_PIECES = 128, 128
_MERGED = tl.constexpr(16)  # pieces that the merging kernel reads at once
_PIECE_COST = 4  # blocks of keys that could be read in the time that starting a piece and merging its sums takes


@dataclass(frozen=True)
class Tiles:
    """How a program works: keys a block, warps, blocks in flight, and programs that fit on a multiprocessor at once."""

    keys: int
    warps: int
    stages: int
    resident: int


# By head size (rounded up to a power of two) and rows of a tile, for 16-bit numbers on an H100 or H200, chosen from
# what the compiler reports for sm_90a: registers (spills: none, or 60 bytes with window, cap and sinks) and shared
# memory, hence `resident`. A program has `stages` - 1 blocks in flight, a multiprocessor 48 to 192 KB of keys and
# values; its share of 4.8 TB/s at 0.8 us of latency takes 29 KB.
_TILES = {
    64: {16: Tiles(128, 4, 3, 3), 32: Tiles(64, 4, 4, 3), 64: Tiles(64, 4, 4, 3), 128: Tiles(128, 8, 3, 1)},
    128: {16: Tiles(64, 4, 3, 3), 32: Tiles(64, 4, 3, 2), 64: Tiles(64, 4, 3, 2), 128: Tiles(64, 8, 3, 1)},
    256: {16: Tiles(64, 4, 2, 2), 32: Tiles(32, 4, 3, 2), 64: Tiles(64, 8, 2, 1), 128: Tiles(32, 8, 3, 1)},
}
# fp32 is multiplied in full precision, without tensor cores: for checks, not for speed.
_TILES_FP32 = Tiles(32, 4, 1, 1)
_MOST_ROWS_FP32 = 16

# Sizes that change from pass to pass: compiling for the ones among them that are 1 or multiples of 16 would not pay.
_VARYING = ["window", "nodes", "earlier", "pieces", "depth_b", "depth_t", "bits_b", "bits_n", "bits_w"]


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _operand(x: tl.tensor) -> tl.tensor:
    """What `tl.dot` takes: the interpreter multiplies bf16 wrongly, and gets fp32."""
    if INTERPRET:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def _load(
    base: tl.tensor, slots: tl.tensor, stride: tl.tensor, stop: tl.tensor,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Rows `slots` of keys or values [S, WIDTH] as [slots, BLOCK]; 0 beyond WIDTH and, if MASKED, from `stop` on."""
    column = tl.arange(0, BLOCK)
    at = base + slots.to(tl.int64)[:, None] * stride + column[None, :]
    if MASKED:
        return tl.load(at, mask=(slots < stop)[:, None] & (column < WIDTH)[None, :], other=0.0)
    elif WIDTH != BLOCK:
        return tl.load(at, mask=(column < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _scores(q: tl.tensor, k: tl.tensor, scale: tl.tensor, cap: tl.tensor, HAS_CAP: tl.constexpr) -> tl.tensor:
    """Scores times log2(e), fp32 [rows, keys].

    With a cap c, c log2(e) comes as `cap` and 2 log2(e) scale / c as `scale`: c tanh(x) = c - 2 c / (1 + e^2x).
    """
    x = tl.dot(q, tl.trans(_operand(k)), input_precision="ieee") * scale
    if HAS_CAP:
        x = cap - 2.0 * cap / (1.0 + tl.exp2(x))
    return x


@triton.jit
def _fold(
    x: tl.tensor, v: tl.tensor, top: tl.tensor, mass: tl.tensor, mixed: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take scores x [rows, keys] and their values into the running maximum, sum and weighted values."""
    new = tl.maximum(top, tl.max(x, 1))
    base = tl.where(new == float("-inf"), 0.0, new)  # rows that have seen nothing yet: -inf - -inf is no number
    p = tl.exp2(x - base[:, None])
    shrink = tl.exp2(top - base)
    mass = mass * shrink + tl.sum(p, 1)
    mixed = mixed * shrink[:, None]
    mixed = tl.dot(_operand(p.to(v.dtype)), _operand(v), acc=mixed, input_precision="ieee")
    return new, mass, mixed


@triton.jit
def _prefix(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, stride_k: tl.tensor, stride_v: tl.tensor,
    first: tl.tensor, stop: tl.tensor, oldest: tl.tensor, top: tl.tensor, mass: tl.tensor, mixed: tl.tensor,
    scale: tl.tensor, cap: tl.tensor,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, KEYS: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Fold in the prefix slots first..stop-1; if MASKED, rows see those from `oldest` [rows] on."""
    for at in range(first, stop, KEYS):
        slots = at + tl.arange(0, KEYS)
        x = _scores(q, _load(k, slots, stride_k, stop, D, BLOCK_D, MASKED), scale, cap, HAS_CAP)
        if MASKED:
            seen = (slots < stop)[None, :]
            if HAS_WINDOW:
                seen = seen & (slots[None, :] >= oldest[:, None])
            x = tl.where(seen, x, float("-inf"))
        value = _load(v, slots, stride_v, stop, DV, BLOCK_DV, MASKED)
        top, mass, mixed = _fold(x, value, top, mass, mixed)
    return top, mass, mixed


@triton.jit(do_not_specialize=_VARYING)
def _attend(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, lengths: tl.tensor, depth: tl.tensor, ancestors: tl.tensor,
    sinks: tl.tensor, out: tl.tensor, tops: tl.tensor, masses: tl.tensor,
    scale: tl.tensor, cap: tl.tensor, window: tl.tensor, nodes: tl.tensor, earlier: tl.tensor, kv_heads: tl.tensor,
    q_b: tl.tensor, q_h: tl.tensor, q_n: tl.tensor, k_b: tl.tensor, k_h: tl.tensor, k_s: tl.tensor,
    v_b: tl.tensor, v_h: tl.tensor, v_s: tl.tensor, depth_b: tl.tensor, depth_t: tl.tensor,
    bits_b: tl.tensor, bits_n: tl.tensor, bits_w: tl.tensor,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, TREE_KEYS: tl.constexpr, BITS: tl.constexpr,
    HAS_TREE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """One program: a tile of ROWS query rows of one K/V head (row = node * GROUP + head in the group), a piece of keys.

    Keys come in two parts, each in blocks: prefix slots, from the first that the window lets any row see; then rows of
    this step, from the length on, so that a block's ancestor bits lie in one word of BITS bits. A piece takes its
    share of all these blocks. Prefix blocks that all rows see whole are read without masks.

    Writes rows of out [B, N, H, DV]; if SPLIT, of the pieces' fp32 weighted values [pieces, B * Hk, GROUP * N, DV] and
    their maxima (in bits: scores times log2 e) and sums [pieces, B * Hk, GROUP * N]. A piece in which a row sees
    nothing has maximum -inf, and its values stay unwritten.
    """
    tile, pair, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    node, member = tl.minimum(row // GROUP, nodes - 1), row % GROUP  # rows beyond the last repeat its node
    inside = row < nodes * GROUP
    column = tl.arange(0, BLOCK_D)
    at = b * q_b + (head * GROUP + member) * q_h + node.to(tl.int64) * q_n
    query = tl.load(q + at[:, None] + column[None, :], mask=inside[:, None] & (column < D)[None, :], other=0.0)
    query = _operand(query)
    k += b * k_b + head * k_h
    v += b * v_b + head * v_h
    depth += b * depth_b

    length = tl.load(lengths + b).to(tl.int32)
    begin, clear = 0, 0  # the first slot that any row sees, and the first from which all do
    below, oldest = node, node
    if HAS_WINDOW:
        below = tl.load(depth + (earlier + node) * depth_t).to(tl.int32)
        oldest = length + below - window + 1
        begin = tl.minimum(tl.maximum(tl.min(oldest, 0), 0), length) // KEYS * KEYS
        clear = tl.minimum(tl.maximum(tl.max(oldest, 0), 0), length)
    if HAS_TREE:
        rows = earlier + nodes
    else:
        rows = earlier + tl.minimum((tile * ROWS + ROWS - 1) // GROUP, nodes - 1) + 1
    prefix_blocks = tl.cdiv(length - begin, KEYS)
    blocks = prefix_blocks + tl.cdiv(rows, TREE_KEYS)
    share = tl.cdiv(blocks, tl.num_programs(2))
    start, end = tl.minimum(piece * share, blocks), tl.minimum(piece * share + share, blocks)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    first = begin + tl.minimum(start, prefix_blocks) * KEYS
    stop = tl.maximum(tl.minimum(begin + end * KEYS, length), first)
    last_whole = first + (stop - first) // KEYS * KEYS
    if HAS_WINDOW:
        first_whole = tl.minimum(tl.maximum(begin + tl.cdiv(clear - begin, KEYS) * KEYS, first), last_whole)
        top, mass, mixed = _prefix(
            query, k, v, k_s, v_s, first, first_whole, oldest, top, mass, mixed, scale, cap,
            D, DV, BLOCK_D, BLOCK_DV, KEYS, HAS_CAP, True, True,
        )  # fmt: skip
        first = first_whole
    top, mass, mixed = _prefix(
        query, k, v, k_s, v_s, first, last_whole, oldest, top, mass, mixed, scale, cap,
        D, DV, BLOCK_D, BLOCK_DV, KEYS, HAS_CAP, HAS_WINDOW, False,
    )  # fmt: skip
    top, mass, mixed = _prefix(
        query, k, v, k_s, v_s, last_whole, stop, oldest, top, mass, mixed, scale, cap,
        D, DV, BLOCK_D, BLOCK_DV, KEYS, HAS_CAP, HAS_WINDOW, True,
    )  # fmt: skip

    for block in range(tl.maximum(start - prefix_blocks, 0), end - prefix_blocks):
        key = block * TREE_KEYS + tl.arange(0, TREE_KEYS)
        slots = length + key
        x = _scores(query, _load(k, slots, k_s, length + rows, D, BLOCK_D, True), scale, cap, HAS_CAP)
        if HAS_TREE:
            word = tl.load(ancestors + b * bits_b + node * bits_n + block * TREE_KEYS // BITS * bits_w)
            seen = ((word[:, None] >> (key % BITS).to(tl.int64)[None, :]) & 1) != 0
            seen = seen & (key < rows)[None, :]
        else:
            seen = key[None, :] <= earlier + node[:, None]
        if HAS_WINDOW:
            key_below = tl.load(depth + key * depth_t, mask=key < rows, other=0).to(tl.int32)
            seen = seen & (below[:, None] - key_below[None, :] < window)
        x = tl.where(seen, x, float("-inf"))
        value = _load(v, slots, v_s, length + rows, DV, BLOCK_DV, True)
        top, mass, mixed = _fold(x, value, top, mass, mixed)

    column_v = tl.arange(0, BLOCK_DV)
    if SPLIT:
        to = (piece.to(tl.int64) * tl.num_programs(1) + pair) * nodes * GROUP + row
        tl.store(tops + to, top, mask=inside)
        tl.store(masses + to, mass, mask=inside)
        some = inside & (top > float("-inf"))
        tl.store(out + to[:, None] * DV + column_v[None, :], mixed, mask=some[:, None] & (column_v < DV)[None, :])
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + head * GROUP + member).to(tl.float32) * _LOG2E
            most = tl.maximum(top, sink)
            mass = mass * tl.exp2(top - most) + tl.exp2(sink - most)
            mixed = mixed * tl.exp2(top - most)[:, None]
        mixed = mixed / tl.where(mass > 0, mass, 1.0)[:, None]
        to = ((b * nodes + node) * kv_heads + head) * GROUP + member
        to = out + to[:, None] * DV + column_v[None, :]
        tl.store(to, mixed.to(out.dtype.element_ty), mask=inside[:, None] & (column_v < DV)[None, :])


@triton.jit(do_not_specialize=_VARYING)
def _merge(
    parts: tl.tensor, tops: tl.tensor, masses: tl.tensor, sinks: tl.tensor, out: tl.tensor,
    pieces: tl.tensor, nodes: tl.tensor, kv_heads: tl.tensor,
    GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: one query row; out = sum_i 2^(top_i - max) values_i / (sum_i 2^(top_i - max) mass_i + sink's).

    Reads what `_attend` wrote for all pieces, writes out [B, N, H, DV].
    """
    row, pair = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    b, head = pair // kv_heads, pair % kv_heads
    node, member = row // GROUP, row % GROUP
    column = tl.arange(0, BLOCK_DV)
    most, total = float("-inf"), 0.0
    if HAS_SINKS:
        most = tl.load(sinks + head * GROUP + member).to(tl.float32) * _LOG2E
        total = 1.0
    mixed = tl.zeros((BLOCK_DV,), tl.float32)
    for first in range(0, pieces, _MERGED):
        piece = first + tl.arange(0, _MERGED)
        at = (piece.to(tl.int64) * tl.num_programs(1) + pair) * nodes * GROUP + row
        top = tl.load(tops + at, mask=piece < pieces, other=float("-inf"))
        some = top > float("-inf")
        mass = tl.load(masses + at, mask=some, other=0.0)
        inside = some[:, None] & (column < DV)[None, :]
        part = tl.load(parts + at[:, None] * DV + column[None, :], mask=inside, other=0.0)
        new = tl.maximum(most, tl.max(top, 0))
        base = tl.where(new > float("-inf"), new, 0.0)
        weight, shrink = tl.exp2(top - base), tl.exp2(most - base)
        total = total * shrink + tl.sum(weight * mass, 0)
        mixed = mixed * shrink + tl.sum(weight[:, None] * part, 0)
        most = new
    mixed = mixed / tl.where(total > 0, total, 1.0)
    to = ((b * nodes + node) * kv_heads + head) * GROUP + member
    tl.store(out + to * DV + column, mixed.to(out.dtype.element_ty), mask=column < DV)


# --- what the host decides --------------------------------------------------------------------------------------------


def tree_attention(
    q: Tensor, key: Tensor, value: Tensor, lengths: Tensor, depth: Tensor, ancestors: Tensor | None, *,
    earlier: int, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
    splits: int | None = None,
) -> Tensor:  # fmt: skip
    """Attend over each sequence's kept slots and over the rows of this step that lie behind them.

    A key is visible iff it is a prefix slot (< length) or an ancestor's row (row i of this step in slot length + i),
    and pos_q - pos_k < window; pos of a prefix slot is its number, of row i it is length + depth[i].

    Args:
        q: [B, H, N, D] bf16, fp16 or fp32, any strides but the last one's.
        key, value: [B, Hk, S, D] and [B, Hk, S, Dv] views of the slots that may be read, likewise. Slots from a
            sequence's length + T on are not read.
        lengths: [B] int64 kept rows.
        depth: [B, T] int64 positions of this step's rows behind the length, T = earlier + N.
        ancestors: packed masks int64 [B, N, W] over the T rows; None = every row sees all before it, and itself.
        earlier: rows of this step that are no queries.
        scale: factor of q.k; window: None = all; softcap: c of c tanh(x / c).
        sinks: [H] logits that take probability mass and give nothing.
        splits: pieces of the keys; None = as many as fill the device.

    Returns:
        [B, N, H, Dv] in q's dtype; 0 in rows that see nothing.

    Raises:
        DraftsmithError: for shapes or strides that the kernel can't read.
    """
    b, heads, n, dim = q.shape
    kv_heads, slots, dim_v = value.shape[1:]
    _check(q, key, value, depth, ancestors, earlier)
    group = heads // kv_heads
    block_d, block_dv = (max(16, triton.next_power_of_2(x)) for x in (dim, dim_v))
    rows, tiles = _choose_tiles(group * n, max(block_d, block_dv), q.dtype)
    grid_rows, pairs = triton.cdiv(group * n, rows), b * kv_heads
    if splits is None:
        keys = min(slots, slots if window is None else window + depth.shape[1])
        splits = choose_splits(grid_rows * pairs, triton.cdiv(keys, tiles.keys), _places(q.device) * tiles.resident)
    out = torch.empty(b, n, heads, dim_v, dtype=q.dtype, device=q.device)
    parts, tops, masses = _room_for_pieces(splits, pairs, group * n, out)
    factor, cap = _factors(scale, softcap)
    bits, s = depth if ancestors is None else ancestors, out if sinks is None else sinks
    with torch.cuda.device_of(q):
        _attend[(grid_rows, pairs, splits)](
            q, key, value, lengths, depth, bits, s, parts, tops, masses,
            factor, cap, window or 0, n, earlier, kv_heads,
            *q.stride()[:3], *key.stride()[:3], *value.stride()[:3], *depth.stride(),
            *(bits.stride() if ancestors is not None else (0, 0, 0)),
            GROUP=group, D=dim, DV=dim_v, BLOCK_D=block_d, BLOCK_DV=block_dv,
            ROWS=rows, KEYS=tiles.keys, TREE_KEYS=min(tiles.keys, WORD), BITS=WORD,
            HAS_TREE=ancestors is not None, HAS_WINDOW=window is not None, HAS_CAP=softcap is not None,
            HAS_SINKS=sinks is not None, SPLIT=splits > 1, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        if splits > 1:
            _merge[(group * n, pairs)](
                parts, tops, masses, s, out, splits, n, kv_heads,
                GROUP=group, DV=dim_v, BLOCK_DV=block_dv, HAS_SINKS=sinks is not None, num_warps=4,
            )  # fmt: skip
    return out


def _room_for_pieces(splits: int, pairs: int, rows: int, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the pieces' values, maxima and sums go; one alone writes `out` [..., Dv] itself."""
    if splits == 1:
        return out, out, out
    parts = torch.empty(splits, pairs, rows, out.shape[-1], dtype=torch.float32, device=out.device)
    return parts, torch.empty_like(parts[..., 0]), torch.empty_like(parts[..., 0])


def _factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """`scale` and `cap` as `_scores` takes them."""
    factor = scale * _LOG2E.value
    return (factor, 0.0) if softcap is None else (2 * factor / softcap, softcap * _LOG2E.value)


def choose_splits(programs: int, blocks: int, places: int) -> int:
    """Into how many pieces to cut `blocks` blocks of keys when `programs` programs a piece run on `places` places.

    The fewest with the least time, estimated as rounds of programs times (blocks of a piece + what it costs besides).
    """

    def time(pieces: int) -> int:
        return math.ceil(programs * pieces / places) * (math.ceil(blocks / pieces) + _PIECE_COST)

    return min(range(1, max(1, min(blocks, _MOST_PIECES)) + 1), key=time)


def _choose_tiles(rows: int, dim: int, dtype: torch.dtype) -> tuple[int, Tiles]:
    """Rows of a tile for `rows` query rows of a K/V head of (rounded) size `dim`, and how it is worked on."""
    wide = dtype == torch.float32
    rows = min(max(16, triton.next_power_of_2(rows)), _MOST_ROWS_FP32 if wide else _MOST_ROWS)
    return rows, _TILES_FP32 if wide else _TILES[max(64, dim)][rows]


@functools.lru_cache
def _places(device: torch.device) -> int:
    """Multiprocessors; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _check(q: Tensor, key: Tensor, value: Tensor, depth: Tensor, ancestors: Tensor | None, earlier: int) -> None:
    """Refuse what the kernel would read wrongly without noticing."""
    (b, heads, n, dim), (_, kv_heads, _, dim_v) = q.shape, value.shape
    if key.shape[:3] != value.shape[:3] or key.shape[0] != b or key.shape[3] != dim or heads % kv_heads:
        shapes = ", ".join(str(list(x.shape)) for x in (q, key, value))
        raise DraftsmithError(f"tree attention: shapes of q, key and value don't belong together: {shapes}")
    if max(dim, dim_v) > LARGEST_HEAD:
        raise DraftsmithError(
            f"tree attention: heads of size {max(dim, dim_v)}; the kernel takes at most {LARGEST_HEAD}"
        )
    if {q.stride(-1), key.stride(-1), value.stride(-1)} != {1}:
        raise DraftsmithError("tree attention: the last dimension of q, key and value must be contiguous")
    words = None if ancestors is None else ancestors.shape[-1]
    if depth.shape != (b, earlier + n) or (words is not None and words * WORD < earlier + n):
        raise DraftsmithError(f"tree attention: {earlier} + {n} rows, but depths {list(depth.shape)} and {words} words")
