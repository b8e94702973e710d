"""States in eight bits: one fp16 scale for each token and layer, symmetric, rounded to nearest.

    scale = max |x| / 127, rounded up to fp16      code = round(x / scale)      x' = scale * code

Rounded up, so that no code falls outside -127..127: |x - x'| <= scale / 2 for every x, the smallest ones included. A
row of zeros has the scale 0. A row whose scale fp16 can't hold (max |x| > 127 * 65504) or that is not finite has an
infinite or NaN scale: the caller refuses it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST = 127


def quantise(states: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes int8 [..., L, H] and scales fp16 [..., L] of states [..., L, H] of any float dtype."""
    x = states.float()
    exact = x.abs().amax(-1) / _MOST
    near = exact.half()
    below = (near.float() < exact) & near.isfinite()
    scales = (near.view(torch.int16) + below.to(torch.int16)).view(torch.float16)  # positive: the next bits are next up
    divisor = torch.where(scales > 0, scales.float(), 1.0)
    codes = (x / divisor[..., None]).round_().nan_to_num_(0.0).clamp_(-_MOST, _MOST)
    return codes.to(torch.int8), scales


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return states [..., L, H] in `dtype` from int8 codes [..., L, H] and fp16 scales [..., L]."""
    return (codes.float() * scales.float()[..., None]).to(dtype)
