"""Linear layers whose rows don't depend on how many rows run together (CPU, fp32).

`torch.nn.functional.linear` on a CPU takes other kernels for 1, 2-3 and more rows: their results differ in the last
bits, and a few rows cost up to twice one row. With the weight packed once for oneDNN, 1 to 8 rows cost about the same
(which is what makes verifying a draft cheap) and every row is bit-identical whatever stands beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# The row count that the packed layout is tuned for; any number of rows runs with it.
_ROWS_HINT = 8


class PackedLinear(nn.Module):
    """Drop-in for a frozen `nn.Linear` in fp32 on a CPU; the plain weight is released unless `keep` is set."""

    def __init__(self, linear: nn.Linear, keep: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)
        self.bias = linear.bias
        self.weight = linear.weight if keep else None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether this torch has the packed operators for this device and dtype."""
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def pack_linears(model: nn.Module, keep: nn.Module | None) -> int:
    """Replace every `nn.Linear` below `model`; `keep` (the output head) also keeps its plain weight."""
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child, keep=child is keep))
                count += 1
    return count
