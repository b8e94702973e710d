"""The norms that targets and heads use, computed in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, rounded_late: bool = False) -> Tensor:
    """RMSNorm in fp32 (fp64 stays), returned in x's dtype: x / sqrt(mean(x^2) + eps) * weight.

    Args:
        rounded_late: the weight multiplies in fp32 and the product is rounded (Gemma); else the normed x is rounded to
            its dtype before the weight multiplies it, and the product again (Llama).
    """
    y = x if x.dtype == torch.float64 else x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if rounded_late:
        return (weight.to(y.dtype) * y).to(x.dtype)
    return (weight * y.to(x.dtype)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm in fp32 (fp64 stays), returned in x's dtype: (x - mean) / sqrt(variance + eps) * weight + bias."""
    wide = torch.promote_types(x.dtype, torch.float32)
    shift = None if bias is None else bias.to(wide)
    return F.layer_norm(x.to(wide), weight.shape, weight.to(wide), shift, eps).to(x.dtype)
