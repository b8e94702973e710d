"""Linear layers whose rows don't depend on how many rows run together (CPU, fp32).

`torch.nn.functional.linear` on a CPU takes other kernels for 1, 2-3 and more rows: their results differ in the last
bits, and a few rows cost up to twice one row. With the weight packed once for oneDNN, 1 to 8 rows cost about the same
(which is what makes verifying a draft cheap) and every row is bit-identical whatever stands beside it.
"""

from __future__ import annotations

from typing import TypeGuard

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


class _Siblings:
    """Linear layers that read the same tensor, packed as one; the first one called computes for all."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        weight = torch.cat([x.weight.detach() for x in linears])
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        self.bias = torch.cat([x.bias.detach() for x in linears]) if linears[0].bias is not None else None
        self.sizes = [x.out_features for x in linears]
        self.input: Tensor | None = None
        self.outputs: list[Tensor] = []

    def run(self, number: int, x: Tensor) -> Tensor:
        """Output of layer `number`; the others of this very tensor are taken from what the first one left."""
        if number == 0 or x is not self.input:
            out = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
            self.input, self.outputs = x, list(out.split(self.sizes, -1))
        mine = self.outputs[number]
        if number == len(self.sizes) - 1:
            self.input, self.outputs = None, []
        return mine


class PackedSibling(nn.Module):
    """One layer of a `_Siblings`."""

    def __init__(self, linear: nn.Linear, shared: _Siblings, number: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.shared, self.number = shared, number
        self.weight, self.bias = None, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return self.shared.run(self.number, x)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether this torch has the packed operators for this device and dtype."""
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


# Children that read the same tensor, in the order in which a model calls them.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"),)


def _packable(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """A linear layer with plain fp32 numbers: quantised ones are tensors of their own class, or of integers."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and module.weight.dtype == torch.float32


def pack_linears(model: nn.Module, keep: nn.Module | None) -> int:
    """Replace every plain `nn.Linear` below `model`; `keep` (the output head) also keeps its plain weight.

    Returns:
        How many were replaced; quantised layers stay as they are.
    """
    count = 0
    for module in list(model.modules()):
        children = dict(module.named_children())
        for names in _SIBLINGS:
            linears = [x for x in map(children.get, names) if _packable(x)]
            if len(linears) == len(names) and len({(x.in_features, x.bias is None) for x in linears}) == 1:
                shared = _Siblings(linears)
                for i, name in enumerate(names):
                    setattr(module, name, PackedSibling(linears[i], shared, i))
                count += len(names)
        for name, child in list(module.named_children()):
            if _packable(child):
                setattr(module, name, PackedLinear(child, keep=child is keep))
                count += 1
    return count
