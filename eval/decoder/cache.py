"""The target's K/V cache: one arena a shape group, ragged lengths, accepted rows compacted in one operation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from . import kernels
from .types import WORD

BLOCK = 512
"""Keys that one attention call reads. Blocks start at multiples of it and are merged in order, so that a row's bits
don't depend on where the rows beside it stand."""
# The last block is read up to one of a few widths. For few sequences only those are used that this CPU's kernel gives
# the same bits for; large batches, where nothing is compared bit for bit, may take any.
_EXACT_BATCH, _GRANULE = 8, 64
_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@functools.lru_cache
def exact_widths(dtype: torch.dtype) -> tuple[int, ...]:
    """Widths of a last block for which this CPU's attention kernel gives the bits of a whole block.

    Matrix kernels split long sums, at places that depend on their length and on the CPU: it is asked, once a process.
    """
    g = torch.Generator().manual_seed(0)
    found = [BLOCK]
    for width in range(_GRANULE, BLOCK, _GRANULE):
        same = True
        for dim, rows in ((64, 4), (64, 24), (128, 12), (128, 64)):
            q, k, v = (torch.randn(1, 2, n, dim, generator=g).to(dtype) for n in (rows, BLOCK, BLOCK))
            for seen in (width - _GRANULE + 1, width - 7, width):
                bias = torch.zeros(1, 1, rows, BLOCK, dtype=dtype).masked_fill_(torch.arange(BLOCK) >= seen, -torch.inf)
                whole = cpu_attention(q, k, v, bias, 0.1)
                part = cpu_attention(q, k[:, :, :width], v[:, :, :width], bias[..., :width], 0.1)
                same = same and all(torch.equal(x, y) for x, y in zip(whole, part, strict=True))
        found += [width] if same else []
    return tuple(sorted(found))


def bucket(end: int) -> int:
    """Slots that a pass with kernels may read, at least `end`: steps of an eighth to a quarter, so that few differ.

    The kernels stop at each sequence's own length: what a bucket is too large by costs no reading.
    """
    step = max(BLOCK, 1 << max(0, (end - 1).bit_length() - 3))
    return -(-end // step) * step


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of one key block on a CPU: output [B, H, R, D] and the log of the summed exponentials [B, H, R].

    Rows that see no key give 0 and 0.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, False, attn_mask=bias, scale=scale
    )


@dataclass
class KeyBlock:
    """Cache slots first..stop-1 and who sees them.

    Attributes:
        bias: additive mask [count, 1, rows or 1, stop - first]; None where every row sees all of them.
        alive: [count, 1, rows or 1] bool, rows that see any key of the block; None where all are known to.
    """

    first: int
    stop: int
    bias: Tensor | None
    alive: Tensor | None


@dataclass
class StepContext:
    """What the attention function needs to know of one pass.

    A key is visible iff it is a prefix slot or an ancestor, and pos_q - pos_k < window.

    Attributes:
        first, count: the cache rows (sequences) that run.
        earlier: rows of this step that lie behind the lengths already; new ones follow.
        lengths: [count] kept rows, and on the host.
        depth: [count, T] position of each row of this step behind the length, T = earlier + N.
        ancestors: packed masks [count, N, W] over the T rows, None = every row sees all before it.
        span: slots up to which anything may be read.
        kernels: the Triton kernels run; nothing but `span` then depends on what the host knows of the lengths.
        positions: [count, N] position of each new row.
        slots: [count, N] cache slot of each new row; sequences: [count, 1] numbers of the cache rows from `first` on.
        start: slot of the first new row where it is the same in all sequences (a plain copy then), else None.
        layers: window that each attention layer handed over, in call order.
    """

    first: int
    count: int
    earlier: int
    lengths: Tensor
    host_lengths: list[int]
    depth: Tensor
    ancestors: Tensor | None
    span: int
    kernels: bool
    positions: Tensor = field(init=False)
    slots: Tensor = field(init=False)
    sequences: Tensor = field(init=False)
    start: int | None = field(init=False)
    layers: list[int | None] = field(default_factory=list)
    _blocks: dict[tuple[int | None, int, int, torch.dtype], list[KeyBlock]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = self.depth.shape[1] - self.earlier
        self.positions = self.lengths[:, None] + self.depth[:, self.earlier :]
        self.slots = self.lengths[:, None] + self.earlier + torch.arange(n, device=self.lengths.device)
        self.sequences = torch.arange(self.count, device=self.lengths.device)[:, None]
        host = self.host_lengths
        equal = not self.kernels and host.count(host[0]) == len(host)
        self.start = host[0] + self.earlier if equal else None

    def blocks(self, window: int | None, group: int, pad: int, dtype: torch.dtype) -> list[KeyBlock]:
        """Key blocks for query rows [count, kv heads, group*N + pad]; shared by all layers with this window."""
        key = (window, group, pad, dtype)
        if key not in self._blocks:
            shortest = min(self.host_lengths)
            oldest = 0 if window is None else max(0, shortest - window + 1)
            starts = range(oldest // BLOCK * BLOCK, self.span, BLOCK)
            made = [self._block(at, min(at + BLOCK, self.span), shortest, *key) for at in starts]
            self._blocks[key] = made
        return self._blocks[key]

    def _block(
        self, first: int, stop: int, shortest: int, window: int | None, group: int, pad: int, dtype: torch.dtype,
    ) -> KeyBlock:  # fmt: skip
        if stop <= shortest and window is None:
            return KeyBlock(first, stop, None, None)
        at = torch.arange(first, stop, device=self.lengths.device)
        behind = at - self.lengths[:, None]  # [count, S]
        visible = (behind < 0)[:, None]
        if stop > shortest:
            visible = visible | self._among_rows(behind)
        if window is not None:
            inside = behind.clamp(0, self.depth.shape[1] - 1)
            keys = torch.where(behind >= 0, self.lengths[:, None] + self.depth.gather(1, inside), at)
            visible = visible & (self.positions[..., None] - keys[:, None] < window)
        bias = torch.zeros(visible.shape, dtype=dtype, device=at.device).masked_fill_(~visible, float("-inf"))
        alive = None if window is None and first < shortest else visible.any(-1)  # all see the prefix
        if bias.shape[1] > 1:
            bias = _each_head(bias, group, pad)
            alive = None if alive is None else _each_head(alive, group, pad)
        return KeyBlock(first, stop, bias[:, None], None if alive is None else alive[:, None])

    def _among_rows(self, behind: Tensor) -> Tensor:
        """Bool [count, N, S]: which slots hold rows of this step that each new row sees."""
        total = self.depth.shape[1]
        if self.ancestors is None:
            own = torch.arange(self.earlier, total, device=behind.device)
            return (behind[:, None] >= 0) & (behind[:, None] <= own[:, None])
        inside = behind.clamp(0, total - 1)
        words = (inside // WORD)[:, None].expand(-1, self.ancestors.shape[1], -1)
        seen = ((self.ancestors.gather(2, words) >> (inside % WORD)[:, None]) & 1).bool()
        return seen & ((behind >= 0) & (behind < total))[:, None]


def _each_head(x: Tensor, group: int, pad: int) -> Tensor:
    """Repeat rows [count, N, ...] for the `group` query heads of a K/V head, and pad by the first row."""
    x = x[:, None].expand(-1, group, *x.shape[1:]).flatten(1, 2)
    return torch.cat((x, x[:, :1].expand(-1, pad, *x.shape[2:])), 1) if pad else x


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
        kernels: attention and compaction run as Triton kernels, unless a head is larger than these can hold; the only
            place where that is decided for them.
    """

    def __init__(
        self, shapes: list[tuple[int, int, int]], batch: int, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.capacity = -(-capacity // BLOCK) * BLOCK
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
        self.device, self.dtype = device, dtype
        largest = max(max(k, v) for _, k, v in shapes)
        self.kernels = kernels.usable(device) and dtype in _KERNEL_DTYPES and largest <= kernels.LARGEST_HEAD

    @contextlib.contextmanager
    def step(
        self, first: int, count: int, depth: Tensor, ancestors: Tensor | None, earlier: int = 0
    ) -> Iterator[StepContext]:
        """Open a pass of N new rows for sequences first..first+count-1.

        Args:
            depth: [count, earlier + N] position of each row of this step behind the sequence's length.
            ancestors: packed masks [count, N, W] over those rows; None = each sees all before it.
            earlier: rows that earlier passes wrote behind the lengths and that were not kept (a drafting network's).
        """
        host = self.host_lengths[first : first + count]
        span = self.span_of(first, count, depth.shape[1])
        lengths = self.lengths[first : first + count]
        _ACTIVE.append(StepContext(first, count, earlier, lengths, host, depth, ancestors, span, self.kernels))
        try:
            yield _ACTIVE[-1]
        finally:
            _ACTIVE.pop()

    def span_of(self, first: int, count: int, rows: int) -> int:
        """Slots that a pass may read which ends `rows` rows behind the lengths of sequences first..first+count-1."""
        end = max(self.host_lengths[first : first + count]) + rows
        if self.kernels:
            return min(bucket(end), self.capacity)
        whole = (end - 1) // BLOCK * BLOCK
        if self.device.type == "cpu" and count <= _EXACT_BATCH:
            return whole + next(w for w in exact_widths(self.dtype) if whole + w >= end)
        return min(-(-end // _GRANULE) * _GRANULE, self.capacity)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new K/V [count, Hk, N, D] and return views of all slots that the pass may read."""
        context = active_step()
        if context is None:
            raise RuntimeError("TreeCache.update was called outside TreeCache.step")
        group, layer = self.places[layer_idx]
        rows, start = slice(context.first, context.first + context.count), context.start
        out = []
        for arena, new in zip(self.arenas[group], (key_states, value_states), strict=True):
            store = arena[layer, rows]
            if start is not None:
                store[:, :, start : start + new.shape[2]] = new
            else:
                store[context.sequences, :, context.slots] = new.transpose(1, 2)
            out.append(store[:, :, : context.span])
        return out[0], out[1]

    def keep(self, count: int, path: Tensor | None, n_rows: Tensor, host_rows: list[int]) -> None:
        """Keep n_rows [count] of the rows just written: those of path [count, P], or the first ones without a path."""
        if path is not None and self.kernels:
            from .kernels.compaction import compact

            compact(self.arenas, self.lengths[:count], path, n_rows)
        elif path is not None:
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
        for pair in self.arenas if goal != source else ():
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
