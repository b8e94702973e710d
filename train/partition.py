"""Which elements of which parameters a rank updates: whole parameters, or ZeRO's flat slices of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + numel) of a flattened parameter, which lie at [offset, offset + numel) of a flat tensor.

    Attributes:
        name: of the parameter.
    """

    name: str
    start: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Partition:
    """The part of a few parameters that this rank updates, and how it lies in memory.

    Attributes:
        tensor: what is updated: a parameter itself, or the flat fp32 slice [n] that ZeRO gives this rank.
        shapes: of all those parameters, whichever ranks hold them: the same on all ranks.
        fragments: what of them is in `tensor`; the rest of it is padding.
        shared: whether other ranks hold the rest; `whole` is then a collective call.
    """

    tensor: Tensor
    shapes: dict[str, torch.Size]
    fragments: tuple[Fragment, ...]
    shared: bool = True

    @classmethod
    def of(cls, name: str, parameter: Tensor) -> Self:
        """A parameter that this rank holds whole."""
        return cls(parameter, {name: parameter.shape}, (Fragment(name, 0, 0, parameter.numel()),), shared=False)

    def whole(self, values: Tensor) -> dict[str, Tensor]:
        """Put full tensors together from `values`, which lie like `tensor` on every rank."""
        if not self.shared:
            return {name: values.view(shape) for name, shape in self.shapes.items()}
        sizes = [shape.numel() for shape in self.shapes.values()]
        buffer = values.new_zeros(sum(sizes))
        found = {n: x.view(shape) for (n, shape), x in zip(self.shapes.items(), buffer.split(sizes), strict=True)}
        for f in self.fragments:
            found[f.name].view(-1)[f.start : f.start + f.numel] = values[f.offset : f.offset + f.numel]
        torch.distributed.all_reduce(buffer)  # each element has one holder: the sum changes none
        return found

    def pairs(self, values: Tensor, tensors: Mapping[str, Tensor]) -> Iterable[tuple[Fragment, Tensor, Tensor]]:
        """Yield (fragment, its place in `values`, the same elements of the full tensor): both of one shape."""
        for f in self.fragments:
            shape, full = self.shapes[f.name], tensors[f.name]
            if not self.shared:
                yield f, values, full
                continue
            mine = values[f.offset : f.offset + f.numel]
            if f.numel == shape.numel():
                yield f, mine.view(shape), full
            else:
                yield f, mine, full.reshape(-1)[f.start : f.start + f.numel]


def zero_partitions(zero: Any, stage: int, names: Mapping[Tensor, str], rank: int) -> list[Partition]:
    """Read where DeepSpeed's ZeRO optimizer keeps this rank's slices, one flat tensor a parameter group.

    Stages 1 and 2 cut a group's concatenated parameters into `world` pieces; stage 3 cuts each parameter.

    Args:
        zero: `engine.optimizer`.
        stage: 1, 2 or 3.
        names: of the parameters.
        rank: of this process.
    """
    groups = zero.fp16_groups if stage == 3 else zero.bit16_groups
    flats = zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
    found = []
    for group, flat in zip(groups, flats, strict=True):
        shapes = {names[p]: p.ds_shape if stage == 3 else p.shape for p in group}
        fragments = _stage3_fragments(group, names, rank) if stage == 3 else _flat_fragments(group, names)
        found.append(Partition(flat, shapes, tuple(fragments)))
    return found


def _flat_fragments(group: list[Any], names: Mapping[Tensor, str]) -> list[Fragment]:
    held = [(names[p], p._hp_mapping) for p in group if p._hp_mapping is not None]
    return [
        Fragment(name, m.lp_fragment_address.start, m.hp_fragment_address.start, m.lp_fragment_address.numel)
        for name, m in held
    ]


def _stage3_fragments(group: list[Any], names: Mapping[Tensor, str], rank: int) -> list[Fragment]:
    found, offset = [], 0
    for p in group:
        size = p.partition_numel()
        start = rank * size
        if (numel := min(size, p.ds_numel - start)) > 0:
            found.append(Fragment(names[p], start, offset, numel))
        offset += size
    return found
