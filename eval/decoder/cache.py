"""The target's K/V cache: one arena a shape group, ragged lengths, accepted rows compacted in one operation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

# Keys are read up to a multiple of this many slots. The CPU attention kernel works through keys in blocks of 512, and
# its last bits depend on the width of the last block: a fixed width makes passes with different row counts
# bit-identical. Large batches, where nothing is compared bit for bit, read less instead.
_EXACT_GRANULE, _EXACT_BATCH, _LOOSE_GRANULE = 512, 8, 64


@dataclass
class StepContext:
    """What the attention function needs to know of one pass.

    Attributes:
        first, count: the cache rows (sequences) that run.
        slots: [count, N] cache slot of each new row.
        start: common first slot where all sequences are equally long (a plain copy then), else None.
        visible: [count, N, span] bool before any window.
        positions: [count, N] position of each query; key_positions: [count, span].
    """

    first: int
    count: int
    slots: Tensor
    start: int | None
    visible: Tensor
    positions: Tensor
    key_positions: Tensor
    biases: dict[tuple[int | None, int, int, torch.dtype], Tensor] = field(default_factory=dict)

    def bias(self, window: int | None, group: int, pad: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [count, 1, group*N + pad, span]; shared by all layers with this window.

        A key is visible iff it is a prefix slot or an ancestor, and pos_q - pos_k < window.
        """
        key = (window, group, pad, dtype)
        if key not in self.biases:
            visible = self.visible
            if window is not None:
                visible = visible & (self.positions[..., None] - self.key_positions[:, None] < window)
            bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
            bias = bias[:, None].expand(-1, group, -1, -1).flatten(1, 2)
            if pad:
                bias = torch.cat((bias, bias[:, :1].expand(-1, pad, -1)), 1)
            self.biases[key] = bias[:, None].contiguous()
        return self.biases[key]


_ACTIVE: list[StepContext] = []


def active_step() -> StepContext | None:
    """The pass that is running, None outside `TreeCache.step`."""
    return _ACTIVE[-1] if _ACTIVE else None


class TreeCache(Cache):
    """K/V of `batch` sequences with `capacity` slots each.

    Args:
        shapes: (kv heads, key dim, value dim) of every layer; layers of equal shape share an arena
            [layers, B, Hk, S, D].

    Attributes:
        lengths: [B] int64 on the device: rows that stay. Rows of a running tree lie behind them.
        host_lengths: the same on the host, kept by the loop's own bookkeeping.
    """

    def __init__(
        self, shapes: list[tuple[int, int, int]], batch: int, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.capacity = -(-capacity // _EXACT_GRANULE) * _EXACT_GRANULE
        self.arenas: list[tuple[Tensor, Tensor]] = []
        self.places: list[tuple[int, int]] = []
        groups: dict[tuple[int, int, int], int] = {}
        counts: list[int] = []
        for shape in shapes:
            g = groups.setdefault(shape, len(groups))
            if g == len(counts):
                counts.append(0)
            self.places.append((g, counts[g]))
            counts[g] += 1
        for (heads, k, v), g in groups.items():
            make = (counts[g], batch, heads, self.capacity)
            self.arenas.append(
                (torch.zeros(*make, k, device=device, dtype=dtype), torch.zeros(*make, v, device=device, dtype=dtype))
            )
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.host_lengths = [0] * batch
        self.device = device

    @contextlib.contextmanager
    def step(self, first: int, count: int, depth: Tensor, ancestors: Tensor) -> Iterator[StepContext]:
        """Open a pass of new rows for sequences first..first+count-1.

        Args:
            depth: [count, N] position of each new row behind the sequence's length.
            ancestors: [count, N, N] bool, which of the new rows each new row sees.
        """
        n = depth.shape[1]
        host = self.host_lengths[first : first + count]
        lengths = self.lengths[first : first + count]
        granule = _EXACT_GRANULE if count <= _EXACT_BATCH else _LOOSE_GRANULE
        span = min(-(-(max(host) + n) // granule) * granule, self.capacity)
        behind = torch.arange(span, device=self.device) - lengths[:, None]  # [count, span]
        inside = behind.clamp(0, n - 1)
        tree = ancestors.gather(2, inside[:, None].expand(-1, n, -1)) & ((behind >= 0) & (behind < n))[:, None]
        at = torch.arange(span, device=self.device)
        key_positions = torch.where(behind >= 0, lengths[:, None] + depth.gather(1, inside), at)
        context = StepContext(
            first,
            count,
            lengths[:, None] + torch.arange(n, device=self.device),
            host[0] if len(set(host)) == 1 else None,
            (behind < 0)[:, None] | tree,
            lengths[:, None] + depth,
            key_positions,
        )
        _ACTIVE.append(context)
        try:
            yield context
        finally:
            _ACTIVE.pop()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new K/V [count, Hk, N, D] and return views of all slots that the pass may read."""
        context = active_step()
        if context is None:
            raise RuntimeError("TreeCache.update was called outside TreeCache.step")
        group, layer = self.places[layer_idx]
        rows = slice(context.first, context.first + context.count)
        out = []
        for arena, new in zip(self.arenas[group], (key_states, value_states), strict=True):
            store = arena[layer, rows]
            if context.start is not None:
                store[:, :, context.start : context.start + new.shape[2]] = new
            else:
                index = torch.arange(context.count, device=self.device)[:, None]
                store[index, :, context.slots] = new.transpose(1, 2)
            out.append(store[:, :, : context.visible.shape[-1]])
        return out[0], out[1]

    def keep(self, count: int, path: Tensor | None, n_rows: Tensor, host_rows: list[int]) -> None:
        """Keep n_rows [count] of the rows just written: those of path [count, P], or the first ones without a path."""
        if path is not None:
            lengths = self.lengths[:count, None]
            p = path.shape[1]
            source, goal = lengths + path, lengths + torch.arange(p, device=self.device)
            index = torch.arange(count, device=self.device)[:, None]
            for pair in self.arenas:
                for arena in pair:
                    arena[:, index, :, goal] = arena[:, index, :, source]
        self.lengths[:count] += n_rows
        for i in range(count):
            self.host_lengths[i] += host_rows[i]

    def advance(self, row: int, rows: int) -> None:
        """Keep `rows` rows that a prefill of one sequence wrote."""
        self.lengths[row] += rows
        self.host_lengths[row] += rows

    def clear(self, row: int) -> None:
        """Empty a sequence's slots for the next one."""
        self.lengths[row] = 0
        self.host_lengths[row] = 0

    def copy(self, source: int, goal: int, rows: int) -> None:
        """Make cache row `goal` hold the first `rows` rows of `source`, and nothing else."""
        for pair in self.arenas:
            for arena in pair:
                arena[:, goal, :, :rows] = arena[:, source, :, :rows]
        self.lengths[goal] = rows
        self.host_lengths[goal] = rows

    # What transformers' models ask of a cache; masks are not made from these (the attention function sees the tree).

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest cached sequence."""
        return max(self.host_lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """All slots, from 0."""
        return self.capacity, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Slots a sequence."""
        return self.capacity

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Slots a sequence."""
        return self.capacity

    def __len__(self) -> int:
        return len(self.places)

    def __repr__(self) -> str:
        return f"TreeCache(lengths={self.host_lengths}, capacity={self.capacity})"

    @property
    def is_compileable(self) -> bool:
        """Never compiled by transformers itself."""
        return False

    @property
    def is_sliding(self) -> list[bool]:
        """No layer drops old keys; windows act by position in the mask."""
        return [False] * len(self.places)

    is_linear = is_dummy = is_sliding


class ShapeProbe(Cache):
    """Records each layer's K/V shape in one forward of one token."""

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.shapes: dict[int, tuple[int, int, int]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Note the shape and hand the tensors back."""
        self.shapes[layer_idx] = (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing is cached."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Only the rows of this pass."""
        return query_length, 0

    def __repr__(self) -> str:
        return f"ShapeProbe({self.shapes})"
