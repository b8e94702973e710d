"""Verification in one launch: each program walks down one sequence's tree, in Triton.

The laws, and why they are exact, stand in `..verify`; these kernels make the same decisions from the same numbers.
Rows of probabilities are read in blocks, and only those of the nodes that the walk reaches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import TokenTree

_BLOCK, _WARPS = 8192, 16
# Sizes that change from step to step: compiling for the ones among them that are 1 or multiples of 16 would not pay.
_VARYING = ["nodes", "deepest", "rows", "width"]


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_VARYING)
def _walk_greedy(
    tokens: tl.tensor, parent: tl.tensor, valid: tl.tensor, want: tl.tensor,
    path: tl.tensor, accepted: tl.tensor, bonus: tl.tensor, nodes: tl.tensor, deepest: tl.tensor, NODES: tl.constexpr,
) -> None:  # fmt: skip
    """One program: one sequence. Follow the first valid child that carries the wanted token of the node.

    Reads tokens, parent, want int64 and valid bool, all [B, nodes]; writes path [B, deepest + 1], accepted, bonus [B].
    """
    b = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, NODES)
    token = tl.load(tokens + b * nodes + at, mask=at < nodes, other=0)
    up = tl.load(parent + b * nodes + at, mask=at < nodes, other=-1)
    ok = tl.load(valid + b * nodes + at, mask=at < nodes, other=0) != 0
    node, count, going = 0, 0, 1
    tl.store(path + b * (deepest + 1), 0)
    for depth in range(deepest):
        y = tl.load(want + b * nodes + node)
        child = tl.min(tl.where((up == node) & (token == y) & ok, at, NODES), 0)
        going = tl.where(child < NODES, going, 0)
        node = tl.where(going == 1, child, node)
        count += going
        tl.store(path + b * (deepest + 1) + depth + 1, node)
    tl.store(accepted + b, count)
    tl.store(bonus + b, tl.load(want + b * nodes + node))


@triton.jit
def _read(row: tl.tensor, kept: tl.tensor, fresh: tl.tensor, at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Entries `at` of a row as the caller handed it over if it is still `fresh`, else of what has become of it."""
    first = tl.load(row + at, mask=inside & (fresh != 0), other=0.0)
    return first + tl.load(kept + at, mask=inside & (fresh == 0), other=0.0)


@triton.jit
def _read_draft(
    row: tl.tensor, kept: tl.tensor, fresh: tl.tensor, at: tl.tensor, inside: tl.tensor,
    column: tl.tensor, columns: tl.tensor, HAS_COLUMN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The same of a draft's row, by target ids `at`: id i stands in column[i] (-1: nowhere), or in column i."""
    where = at
    if HAS_COLUMN:
        where = tl.load(column + at, mask=inside, other=-1)
    first = tl.load(row + where, mask=inside & (fresh != 0) & (where >= 0) & (where < columns), other=0.0)
    return first + tl.load(kept + at, mask=inside & (fresh == 0), other=0.0)


@triton.jit
def _block_sums(row: tl.tensor, vocab: tl.tensor, BLOCK: tl.constexpr, BLOCKS: tl.constexpr) -> tl.tensor:
    """Sums [BLOCKS] fp64 over blocks of a row."""
    index = tl.arange(0, BLOCKS)
    sums = tl.zeros((BLOCKS,), tl.float64)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total = tl.sum(tl.load(row + at, mask=at < vocab, other=0.0).to(tl.float64), 0)
        sums = tl.where(index == first // BLOCK, total, sums)
    return sums


@triton.jit
def _draw(
    row: tl.tensor, kept: tl.tensor, fresh: tl.tensor, sums: tl.tensor, u: tl.tensor, vocab: tl.tensor,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The first entry with sum_{i <= entry} p_i > u sum p, of those above 0: the block first, then the entry in it.

    A running sum that rounding keeps below the goal gives the last entry above 0.
    """
    index = tl.arange(0, BLOCKS)
    upto = tl.cumsum(sums, 0)
    goal = u * tl.max(upto, 0)
    block = tl.min(tl.where((upto > goal) & (sums > 0), index, BLOCKS), 0)
    block = tl.where(block < BLOCKS, block, tl.max(tl.where(sums > 0, index, 0), 0))
    before = tl.sum(tl.where(index < block, sums, 0.0), 0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    p = _read(row, kept, fresh, at, at < vocab)
    upto = before + tl.cumsum(p.to(tl.float64), 0)
    entry = tl.min(tl.where((upto > goal) & (p > 0), at, vocab), 0)
    return tl.where(entry < vocab, entry, tl.max(tl.where(p > 0, at, 0), 0))


@triton.jit
def _refuse(
    p_row: tl.tensor, p_kept: tl.tensor, p_fresh: tl.tensor, p_total: tl.tensor, p_next: tl.tensor,
    q_row: tl.tensor, q_kept: tl.tensor, q_fresh: tl.tensor, q_total: tl.tensor,
    token: tl.tensor, drawn: tl.tensor, column: tl.tensor, vocab: tl.tensor, columns: tl.tensor,
    HAS_COLUMN: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """p_next <- max(0, p - q), q <- q without the token (one that was not drawn has q all on it, and leaves q alone).

    Rows are kept unnormalised, beside their sums. Returns the new p's block sums [BLOCKS] and the new q's sum, fp64.
    """
    index = tl.arange(0, BLOCKS)
    sums = tl.zeros((BLOCKS,), tl.float64)
    q_sum = tl.sum(sums, 0)
    tl.debug_barrier()  # threads may still read an entry that this pass writes; behind it, another reads than wrote
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < vocab
        p = _read(p_row, p_kept, p_fresh, at, inside) / p_total
        q = _read_draft(q_row, q_kept, q_fresh, at, inside & drawn, column, columns, HAS_COLUMN)
        left = tl.maximum(p - tl.where(drawn, q / q_total, tl.where(at == token, 1.0, 0.0)), 0.0)
        tl.store(p_next + at, left, mask=inside)
        sums = tl.where(index == first // BLOCK, tl.sum(left.to(tl.float64), 0), sums)
        q = tl.where(at == token, 0.0, q)
        tl.store(q_kept + at, q, mask=inside & drawn)
        q_sum += tl.sum(q.to(tl.float64), 0)
    tl.debug_barrier()
    return sums, q_sum


@triton.jit(do_not_specialize=_VARYING)
def _walk_sampled(
    tokens: tl.tensor, parent: tl.tensor, valid: tl.tensor, p: tl.tensor, u_token: tl.tensor,
    q: tl.tensor, q_row: tl.tensor, drawn: tl.tensor, column: tl.tensor, u_accept: tl.tensor,
    p_kept: tl.tensor, q_kept: tl.tensor, path: tl.tensor, accepted: tl.tensor, bonus: tl.tensor,
    nodes: tl.tensor, deepest: tl.tensor, vocab: tl.tensor, rows: tl.tensor, columns: tl.tensor, width: tl.tensor,
    NODES: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, RATIO: tl.constexpr, HAS_COLUMN: tl.constexpr,
) -> None:  # fmt: skip
    """One program: one sequence. At each node, law 1 or (RATIO) law 2 of `..verify`.

    Reads p fp32 [B, nodes, vocab], u_token fp64 [B, deepest + 1]; for law 2 also q fp32 [B, rows, columns],
    q_row int64 and drawn bool [B, nodes], column int32 [vocab], u_accept fp64 [B, deepest, width], and as scratch
    p_kept [B, 2, vocab] (a residual is read from one half and written to the other) and q_kept [B, vocab].
    """
    b = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, NODES)
    token = tl.load(tokens + b * nodes + at, mask=at < nodes, other=0)
    up = tl.load(parent + b * nodes + at, mask=at < nodes, other=-1)
    ok = tl.load(valid + b * nodes + at, mask=at < nodes, other=0) != 0
    p_kept += b * 2 * vocab
    q_kept += b * vocab
    node, count, going = 0, 0, 1
    tl.store(path + b * (deepest + 1), 0)
    for depth in range(deepest + 1):
        if going == 1:
            children = (up == node) & ok
            p_here = p + (b * nodes + node) * vocab
            taken, side, p_fresh = -1, 0, 1
            sums = tl.zeros((BLOCKS,), tl.float64)
            if RATIO:
                rank = tl.cumsum(children.to(tl.int32), 0)
                tries = tl.where(depth < deepest, tl.minimum(tl.sum(children.to(tl.int32), 0), width), 0)
                q_here = q + (b * rows + tl.maximum(tl.load(q_row + b * nodes + node), 0)) * columns
                p_total, q_total, q_fresh = 1.0, 1.0, 1
                for r in range(tries):
                    if taken < 0:
                        child = tl.min(tl.where(children & (rank == r + 1), at, NODES), 0)
                        x = tl.load(tokens + b * nodes + child)
                        by_q = tl.load(drawn + b * nodes + child) != 0
                        p_side = p_kept + side * vocab.to(tl.int64)
                        p_x = _read(p_here, p_side, p_fresh, x, x >= 0) / p_total
                        q_x = _read_draft(q_here, q_kept, q_fresh, x, x >= 0, column, columns, HAS_COLUMN) / q_total
                        q_x = tl.where(by_q, q_x, 1.0)
                        u = tl.load(u_accept + (b * deepest + depth) * width + r)
                        if (u * q_x.to(tl.float64) < p_x.to(tl.float64)) & (q_x > 0):
                            taken = child
                        else:
                            new, q_sum = _refuse(
                                p_here, p_side, p_fresh, p_total, p_kept + (1 - side) * vocab.to(tl.int64),
                                q_here, q_kept, q_fresh, q_total, x, by_q, column, vocab, columns,
                                HAS_COLUMN, BLOCK, BLOCKS,
                            )  # fmt: skip
                            total = tl.sum(new, 0)
                            some = total > 0  # else p = q up to rounding: p stays
                            sums = tl.where(some, new, sums)
                            p_total = tl.where(some, total.to(tl.float32), p_total)
                            side = tl.where(some, 1 - side, side)
                            p_fresh = tl.where(some, 0, p_fresh)
                            q_total = tl.where(by_q, tl.maximum(q_sum, 1.1754943508222875e-38).to(tl.float32), q_total)
                            q_fresh = tl.where(by_q, 0, q_fresh)
            if taken < 0:
                if p_fresh == 1:
                    sums = _block_sums(p_here, vocab, BLOCK, BLOCKS)
                u = tl.load(u_token + b * (deepest + 1) + depth)
                y = _draw(p_here, p_kept + side * vocab.to(tl.int64), p_fresh, sums, u, vocab, BLOCK, BLOCKS)
                if not RATIO:
                    child = tl.min(tl.where(children & (token == y), at, NODES), 0)
                    taken = tl.where((child < NODES) & (depth < deepest), child, -1)
                tl.store(bonus + b, y)  # the last one stays
            node = tl.where(taken < 0, node, taken)
            going = tl.where(taken < 0, 0, 1)
            count += going
        tl.store(path + b * (deepest + 1) + depth + 1, node, mask=depth < deepest)
    tl.store(accepted + b, count)


# --- what the host calls ----------------------------------------------------------------------------------------------


def verify_greedy(tree: TokenTree, want: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the children that carry the wanted tokens.

    Args:
        want: [B, N] int64, the token that the target puts behind every node: its largest logit in greedy decoding.

    Returns:
        The path [B, deepest + 1], n_accepted [B] and bonus [B] of a `Verdict`.
    """
    b, n = tree.tokens.shape
    path, accepted, bonus = _results(tree)
    with torch.cuda.device_of(want):
        _walk_greedy[(b,)](
            tree.tokens.contiguous(), tree.parent.contiguous(), tree.valid.contiguous(), want.contiguous(),
            path, accepted, bonus, n, tree.deepest, NODES=triton.next_power_of_2(n), num_warps=1,
        )  # fmt: skip
    return path, accepted, bonus


def verify_sampled(
    tree: TokenTree, p: Tensor, u_token: Tensor, u_accept: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept by law 1 where nothing was drawn (`tree.proposal` is None), else by law 2.

    Args:
        p: [B, N, V] fp32, the target's warped probabilities behind every node.
        u_token: [B, deepest + 1] fp64, `draws.uniform(depth + 1, TOKEN)` of the depths 0 ... deepest of a node.
        u_accept: [B, deepest, width] fp64, `draws.uniform(depth + 1, ACCEPT + rank)`; for law 2.

    Returns:
        The path [B, deepest + 1], n_accepted [B] and bonus [B] of a `Verdict`.
    """
    (b, n), vocab = tree.tokens.shape, p.shape[-1]
    path, accepted, bonus = _results(tree)
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    proposal = tree.proposal
    p = p.contiguous()
    q, row, drawn, column, p_kept, q_kept, accept = p, path, tree.valid, path, p, p, u_token
    if proposal is not None:
        if u_accept is None:
            raise ValueError("drawn drafts are accepted by random numbers: u_accept is missing")
        q, row, drawn, accept = (x.contiguous() for x in (proposal.q, proposal.row, proposal.drawn, u_accept))
        if proposal.ids is not None:
            order = torch.arange(len(proposal.ids), dtype=torch.int32, device=p.device)
            column = torch.full((vocab,), -1, dtype=torch.int32, device=p.device).index_copy_(0, proposal.ids, order)
        p_kept = torch.empty(b, 2, vocab, dtype=torch.float32, device=p.device)
        q_kept = torch.empty(b, vocab, dtype=torch.float32, device=p.device)
    with torch.cuda.device_of(p):
        _walk_sampled[(b,)](
            tree.tokens.contiguous(), tree.parent.contiguous(), tree.valid.contiguous(), p, u_token.contiguous(),
            q, row, drawn, column, accept, p_kept, q_kept, path, accepted, bonus,
            n, tree.deepest, vocab, q.shape[1], q.shape[2], 0 if proposal is None else proposal.width,
            NODES=triton.next_power_of_2(n), BLOCK=block, BLOCKS=triton.next_power_of_2(triton.cdiv(vocab, block)),
            RATIO=proposal is not None, HAS_COLUMN=proposal is not None and proposal.ids is not None, num_warps=_WARPS,
        )  # fmt: skip
    return path, accepted, bonus


def _results(tree: TokenTree) -> tuple[Tensor, Tensor, Tensor]:
    """Room for path, n_accepted and bonus."""
    b, device = len(tree.tokens), tree.tokens.device
    path = torch.empty(b, tree.deepest + 1, dtype=torch.int64, device=device)
    accepted = torch.empty(b, dtype=torch.int64, device=device)
    return path, accepted, torch.empty_like(accepted)
