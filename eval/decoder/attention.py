"""The attention function that reads the tree from the cache; plain and speculative passes use the same one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from .cache import KeyBlock, active_step, cpu_attention

NAME = "draftsmith_tree"
# The CPU matrix kernels treat 1-3 rows differently from more: padding to 4 keeps a row's bits independent of how many
# rows run beside it.
_MIN_ROWS = 4


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over prefix slots and tree ancestors: a Triton kernel where the cache says so, else PyTorch as follows.

    Keys are read in blocks at fixed places; each gives an output and the log of its sum of exponentials, and these
    are merged: no mask is ever longer than a block, and a row's bits don't depend on the rows beside it.

    Args:
        query: [B, H, N, D]; key, value: [B, Hk, S, D] cache views; the mask comes from the cache's open step.
        sliding_window: a key is visible iff pos_q - pos_k < window.
        softcap: scores become cap * tanh(scores / cap); s_aux: [H] sink logits that take probability mass.

    Returns:
        [B, N, H, Dv] and None (no attention weights are kept).
    """
    context = active_step()
    if context is None:
        raise RuntimeError("tree attention runs only inside a TreeCache step")
    context.layers.append(sliding_window)
    b, heads, n, dim = query.shape
    scale = dim**-0.5 if scaling is None else scaling
    if context.kernels:
        from .kernels.tree_attention import tree_attention as kernel  # Triton isn't everywhere

        out = kernel(
            query, key, value, context.lengths, context.depth, context.ancestors,
            earlier=context.earlier, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux,
        )  # fmt: skip
        return out, None
    kv = key.shape[1]
    group = heads // kv
    pad = max(0, _MIN_ROWS - group * n)
    q = query.reshape(b, kv, group * n, dim)
    if pad:
        q = F.pad(q, (0, 0, 0, pad))
    blocks = context.blocks(sliding_window, group, pad, query.dtype)
    fused = softcap is None and q.device.type == "cpu" and dim == value.shape[-1]
    parts = (_fused(q, key, value, x, scale) if fused else _explicit(q, key, value, x, scale, softcap) for x in blocks)
    if len(blocks) == 1 and s_aux is None:
        out = next(parts)[0]
    else:
        out = _merge(parts, blocks, None if s_aux is None else _sinks(s_aux, kv, n, pad))
    if pad:
        out = out[:, :, : group * n]
    return out.reshape(b, heads, n, -1).transpose(1, 2), None


def _fused(q: Tensor, key: Tensor, value: Tensor, block: KeyBlock, scale: float) -> tuple[Tensor, Tensor]:
    """Output [B, Hk, R, D] and log of the summed exponentials [B, Hk, R]; 0 and 0 where nothing is visible."""
    if block.stop - block.first < key.shape[2]:
        part = slice(block.first, block.stop)
        key, value = key[:, :, part], value[:, :, part]
    return cpu_attention(q, key, value, block.bias, scale)


def _sinks(s_aux: Tensor, kv: int, n: int, pad: int) -> Tensor:
    """Sink logits [H] for the rows of each K/V head: [Hk, group*N + pad]."""
    return F.pad(s_aux.float().view(kv, -1, 1).expand(-1, -1, n).flatten(1), (0, pad))


def _explicit(
    q: Tensor, key: Tensor, value: Tensor, block: KeyBlock, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The same with the scores written out: for soft-capped scores, unequal K/V sizes and other devices."""
    k, v = key[:, :, block.first : block.stop], value[:, :, block.first : block.stop]
    scores = q @ k.transpose(-1, -2)
    scores = (scores if scores.dtype == torch.float64 else scores.float()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if block.bias is not None:
        scores = scores + block.bias
    lse = torch.logsumexp(scores, -1)
    lse = torch.where(lse.isfinite(), lse, 0.0)
    return torch.exp(scores - lse[..., None]).to(v.dtype) @ v, lse


def _merge(parts: Iterator[tuple[Tensor, Tensor]], blocks: list[KeyBlock], sinks: Tensor | None) -> Tensor:
    """Weight the blocks' outputs by their sums of exponentials; a sink adds to the sum and gives nothing.

    Blocks are taken one after the other, and one of which a row sees nothing changes none of its bits, wherever it
    stands: it doesn't matter which blocks a pass leaves out.
    """
    mixed, most = next(parts)
    most = _seen(most, blocks[0])
    dtype, mixed, total = mixed.dtype, mixed.to(most.dtype), torch.ones_like(most)
    for (out, lse), block in zip(parts, blocks[1:], strict=True):
        lse = _seen(lse, block)
        top = torch.maximum(most, lse)
        old, new, most = torch.exp(most - top), torch.exp(lse - top), top
        total = total * old + new
        mixed = mixed * old[..., None] + out * new[..., None]
    if sinks is not None:
        top = torch.maximum(most, sinks)
        old = torch.exp(most - top)
        total, mixed = total * old + torch.exp(sinks - top), mixed * old[..., None]
    return (mixed / total[..., None]).to(dtype)


def _seen(lse: Tensor, block: KeyBlock) -> Tensor:
    """Log sums with the least of all values for rows that see nothing (finite: differences of two stay numbers)."""
    return lse if block.alive is None else torch.where(block.alive, lse, -1e30)


AttentionInterface.register(NAME, tree_attention)
