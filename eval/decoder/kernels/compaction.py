"""Move the accepted rows of a tree to the front, for all layers in one launch, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST = 4096  # numbers of one row that a program moves at once


@triton.jit
def _row(
    base: tl.tensor, goal: tl.tensor, source: tl.tensor, first_head: tl.tensor, heads: tl.tensor,
    stride_h: tl.tensor, stride_s: tl.tensor, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Copy slot `source` to slot `goal` for HEADS heads."""
    head, column = first_head + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    at = base + head.to(tl.int64)[:, None] * stride_h + column[None, :]
    inside = (head < heads)[:, None] & (column < WIDTH)[None, :]
    tl.store(at + goal * stride_s, tl.load(at + source * stride_s, mask=inside), mask=inside)


@triton.jit
def _compact(
    key: tl.tensor, value: tl.tensor, lengths: tl.tensor, path: tl.tensor, n_rows: tl.tensor,
    heads: tl.tensor, k_l: tl.tensor, k_b: tl.tensor, k_h: tl.tensor, k_s: tl.tensor,
    v_l: tl.tensor, v_b: tl.tensor, v_h: tl.tensor, v_s: tl.tensor, path_b: tl.tensor, path_p: tl.tensor,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
) -> None:  # fmt: skip
    """One program: HEADS heads of one layer and sequence; slot length + path[i] -> length + i for 0 < i < n_rows.

    In place: path ascends and path[i] >= i, so a row is read before another one is written over it, as long as the
    rows go in order. The barrier keeps threads from running ahead of those that still read.
    """
    b, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * HEADS
    length = tl.load(lengths + b)
    key += layer * k_l + b * k_b
    value += layer * v_l + b * v_b
    for i in range(1, tl.load(n_rows + b).to(tl.int32)):
        source = tl.load(path + b * path_b + i * path_p)
        if source != i:
            _row(key, length + i, length + source, first, heads, k_h, k_s, HEADS, D, BLOCK_D)
            _row(value, length + i, length + source, first, heads, v_h, v_s, HEADS, DV, BLOCK_DV)
            tl.debug_barrier()


def compact(arenas: list[tuple[Tensor, Tensor]], lengths: Tensor, path: Tensor, n_rows: Tensor) -> None:
    """Move rows in place, one launch an arena.

    Args:
        arenas: pairs of keys and values [L, B or more, Hk, S, D], any D and strides but the last one's, which is 1.
        lengths: [B] int64 kept rows before this step.
        path: [B, P] int64 rows of this step, ascending and beginning with 0.
        n_rows: [B] int64, how many of the path's rows are kept; the others stay where they are.
    """
    for key, value in arenas:
        layers, _, heads, _, dim = key.shape
        block_d, block_dv = triton.next_power_of_2(dim), triton.next_power_of_2(value.shape[-1])
        some = min(triton.next_power_of_2(heads), max(1, _MOST // max(block_d, block_dv)))
        with torch.cuda.device_of(key):
            _compact[(len(path), layers, triton.cdiv(heads, some))](
                key, value, lengths, path, n_rows, heads, *key.stride()[:4], *value.stride()[:4], *path.stride(),
                HEADS=some, D=dim, DV=value.shape[-1], BLOCK_D=block_d, BLOCK_DV=block_dv, num_warps=4,
            )  # fmt: skip
