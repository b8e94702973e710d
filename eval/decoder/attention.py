"""The attention function that reads the tree from the cache; plain and speculative passes use the same one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from .cache import active_step

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
    """Attend over prefix slots and tree ancestors.

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
    b, heads, n, dim = query.shape
    kv = key.shape[1]
    group = heads // kv
    pad = max(0, _MIN_ROWS - group * n)
    q = query.reshape(b, kv, group * n, dim)
    if pad:
        q = F.pad(q, (0, 0, 0, pad))
    scale = dim**-0.5 if scaling is None else scaling
    bias = context.bias(sliding_window, group, pad, query.dtype)
    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(q, key, value, attn_mask=bias, scale=scale)
    else:
        out = _explicit(q, key, value, bias, scale, softcap, s_aux, group, n, pad)
    if pad:
        out = out[:, :, : group * n]
    return out.reshape(b, kv, group, n, -1).flatten(1, 2).transpose(1, 2), None


def _explicit(
    q: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, softcap: float | None, sinks: Tensor | None,
    group: int, n: int, pad: int,
) -> Tensor:  # fmt: skip
    """Scores written out, for soft-capped scores and sinks; [B, Hk, group*n + pad, D]."""
    scores = (q @ key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias
    if sinks is not None:
        extra = sinks.float().view(1, -1, group, 1).expand(len(q), -1, -1, n).flatten(2)
        scores = torch.cat((scores, F.pad(extra, (0, pad))[..., None]), -1)
    p = torch.softmax(scores, -1)[..., : key.shape[2]]
    return p.to(value.dtype) @ value


AttentionInterface.register(NAME, tree_attention)
