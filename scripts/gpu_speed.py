"""Time of tree attention beside SDPA with a mask and FlexAttention, and as a share of the bandwidth of a copy."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from gpu_report import FAIL, INFO, PASS, SKIPPED, UNCHECKED, Report
from torch import Tensor

from draftsmith.eval.decoder.cache import bucket
from draftsmith.eval.decoder.kernels.tree_attention import tree_attention
from draftsmith.eval.decoder.types import pack_bits

# Keys and values that are read in turn: several times the second-level cache, so that each call finds none of its own.
_COLD = 300 * 2**20
# FlexAttention is compiled for every shape; from then on it is left out, so that a run ends within five minutes. Its
# aim is unchecked then.
_FLEX_SECONDS = 150.0
_AIM_SHARE, _AIM_PREFIX = 0.80, 32 * 1024


@dataclass(frozen=True)
class Sizes:
    """What a run works on: attention shapes, trees to verify, steps to time."""

    tiny: bool
    heads: int
    kv_heads: int
    dim: int
    prefixes: tuple[int, ...]
    nodes: tuple[int, ...]
    batches: tuple[int, ...]
    copy_bytes: int
    verified: tuple[tuple[int, int, int], ...]  # vocabulary, batch, nodes
    step_batches: tuple[int, ...]
    step_prefix: int
    steps: int


FULL = Sizes(
    False, 32, 8, 128, (1024, 4096, 32 * 1024), (16, 64), (1, 8, 32), 2**31, ((1000, 2000, 16), (151_936, 8, 64)),
    (1, 8, 32), 1024, 24,
)  # fmt: skip
TINY = Sizes(True, 4, 2, 64, (100,), (8,), (1, 2), 2**20, ((90, 4, 6),), (2,), 12, 2)


@dataclass(frozen=True)
class Cell:
    """One shape: a prefix of kept slots, N nodes, B sequences."""

    prefix: int
    nodes: int
    batch: int

    def __str__(self) -> str:
        return f"prefix {self.prefix} N {self.nodes} B {self.batch}"


@dataclass(frozen=True)
class Outcome:
    """What the aims are about: our share of a copy's bandwidth, and FlexAttention's time over ours, None = no time."""

    cell: Cell
    share: float
    flex: float | None


def cells(sizes: Sizes) -> list[Cell]:
    """Every shape once, prefixes in turns: a time limit cuts none of the prefixes, trees or batches off as a whole."""
    shapes = list(itertools.product(sizes.batches, sizes.nodes))
    prefixes = sizes.prefixes
    return [
        Cell(prefixes[(i + turn) % len(prefixes)], nodes, batch)
        for turn in range(len(prefixes))
        for i, (batch, nodes) in enumerate(shapes)
    ]


def measure(report: Report, device: torch.device, sizes: Sizes) -> None:
    """All cells, then the aims."""
    bandwidth = copy_bandwidth(device, sizes.copy_bytes)
    report.add("speed", "copy on the device", INFO, f"{bandwidth / 1e12:.3f} TB/s", bytes_per_second=bandwidth)
    started, outcomes = time.monotonic(), []
    for cell in cells(sizes):
        with report.section("speed", str(cell)):
            flex = device.type == "cuda" and time.monotonic() - started < _FLEX_SECONDS
            outcomes.append(measure_cell(report, cell, device, sizes, bandwidth, flex))
    judge_aims(report, sizes, [x for x in outcomes if x is not None])


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes read and written a second by a large copy."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    seconds = min(seconds_a_call([lambda: goal.copy_(source)], device) for _ in range(3))
    return 2 * size / seconds


def measure_cell(
    report: Report, cell: Cell, device: torch.device, sizes: Sizes, bandwidth: float, flex: bool
) -> Outcome | None:  # fmt: skip
    """One line: microseconds of each way, the share of the bandwidth, and whether the aims are met here."""
    slots = bucket(cell.prefix + cell.nodes)
    row = 2 * cell.batch * sizes.kv_heads * sizes.dim * 2  # bytes of K and V of one slot in bf16
    copies = 1 if sizes.tiny else max(1, -(-_COLD // (row * slots)))
    need = row * slots * copies + 8 * cell.batch * sizes.heads * cell.nodes * slots  # masks and their copies
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        if need > 0.9 * free:
            report.add("speed", str(cell), SKIPPED, f"needs {need / 2**30:.1f} GiB, {free / 2**30:.1f} are free")
            return None
    shape = (copies, 2, cell.batch, sizes.kv_heads, slots, sizes.dim)
    arena = torch.randn(shape, device=device, dtype=torch.bfloat16)
    q = torch.randn(cell.batch, cell.nodes, sizes.heads, sizes.dim, device=device).bfloat16().transpose(1, 2)
    seen, depth = random_ancestors(cell, device)
    ways = {"ours": our_calls(cell, q, arena, seen, depth), "sdpa": sdpa_calls(cell, q, arena, seen)}
    mine, theirs = ways["ours"][0](), ways["sdpa"][0]()
    same_or_raise("SDPA", mine, theirs.reshape(cell.batch, sizes.heads, cell.nodes, -1))
    seconds: dict[str, float | str] = {}
    for name, calls in ways.items():
        seconds[name] = time_or_reason(calls, device)
    seconds["flex"] = "needs CUDA"
    if flex:
        seconds["flex"] = flex_time_or_reason(cell, q, arena, seen, mine)
    elif device.type == "cuda":
        seconds["flex"] = f"left out: {_FLEX_SECONDS:.0f} s of compiling are over"
    return judge(report, cell, sizes, seconds, bandwidth)


def judge(
    report: Report, cell: Cell, sizes: Sizes, seconds: dict[str, float | str], bandwidth: float
) -> Outcome | None:  # fmt: skip
    """Write a cell's line; what a call must read and write is K/V of prefix and nodes, queries and outputs."""
    ours, flex = seconds["ours"], seconds["flex"]
    if isinstance(ours, str):
        report.add("speed", str(cell), FAIL, ours)
        return None
    numbers = 2 * sizes.kv_heads * (cell.prefix + cell.nodes) + 2 * sizes.heads * cell.nodes
    share = 2 * cell.batch * sizes.dim * numbers / ours / bandwidth
    parts, misses = [f"{ours * 1e6:.1f} us", f"{share:.0%} of a copy"], []
    for name in ("flex", "sdpa"):
        other = seconds[name]
        shown = f"{other * 1e6:.1f} us" if isinstance(other, float) else other
        parts.append(f"{name} {shown}" + (f" ({other / ours:.2f}x)" if isinstance(other, float) else ""))
    if cell.prefix >= _AIM_PREFIX and share < _AIM_SHARE:
        misses.append(f"aim of {_AIM_SHARE:.0%} missed")
    if isinstance(flex, float) and flex < ours:
        misses.append("slower than FlexAttention")
    state = INFO if sizes.tiny else FAIL if misses else PASS if isinstance(flex, float) else UNCHECKED
    figures = {f"{name}_us" if isinstance(x, float) else name: x * 1e6 if isinstance(x, float) else x
               for name, x in seconds.items()}  # fmt: skip
    report.add("speed", str(cell), state, "; ".join(parts + misses), share=share, **figures)
    return Outcome(cell, share, flex / ours if isinstance(flex, float) else None)


def judge_aims(report: Report, sizes: Sizes, outcomes: list[Outcome]) -> None:
    """A line for each aim: it holds only if it was measured in every cell that it is about."""
    every = cells(sizes)
    flex = [x.flex for x in outcomes if x.flex is not None]
    shares = [x.share for x in outcomes if x.cell.prefix >= _AIM_PREFIX]
    long = [x for x in every if x.prefix >= _AIM_PREFIX]
    for what, count, found, least in (
        ("aim: never slower than FlexAttention", len(every), flex, 1.0),
        (f"aim: {_AIM_SHARE:.0%} of a copy from {_AIM_PREFIX} slots on", len(long), shares, _AIM_SHARE),
    ):
        if sizes.tiny:
            report.add("speed", what, SKIPPED, "needs CUDA")
            continue
        misses = sum(x < least for x in found)
        state = FAIL if misses else PASS if len(found) == count else UNCHECKED
        result = f"measured in {len(found)} of {count} shapes, missed in {misses}"
        report.add("speed", what, state, result, measured=len(found), shapes=count, missed=misses)


# --- the ways ---------------------------------------------------------------------------------------------------------


def random_ancestors(cell: Cell, device: torch.device) -> tuple[Tensor, Tensor]:
    """A random tree's bool [B, N, N], which nodes each node sees, and depths [B, N]."""
    g = torch.Generator().manual_seed(cell.nodes)
    seen = torch.eye(cell.nodes, dtype=torch.bool)
    for i in range(1, cell.nodes):
        seen[i] |= seen[int(torch.randint(max(0, i - 9), i, (), generator=g))]
    seen = seen.to(device).repeat(cell.batch, 1, 1)
    return seen, seen.sum(-1) - 1


def our_calls(cell: Cell, q: Tensor, arena: Tensor, seen: Tensor, depth: Tensor) -> list[Callable[[], Any]]:
    """One call for each copy of the keys and values."""
    lengths = torch.full((cell.batch,), cell.prefix, device=q.device)
    bits, scale = pack_bits(seen), q.shape[-1] ** -0.5

    def call(key: Tensor, value: Tensor) -> Tensor:
        return tree_attention(
            q, key, value, lengths, depth, bits, earlier=0, scale=scale, window=None, softcap=None, sinks=None
        )

    return [lambda kv=kv: call(kv[0], kv[1]) for kv in arena]  # type: ignore[misc]


def sdpa_calls(cell: Cell, q: Tensor, arena: Tensor, seen: Tensor) -> list[Callable[[], Any]]:
    """The heads of a group as rows of one, so that keys aren't repeated; the mask is made beforehand."""
    end, group = cell.prefix + cell.nodes, q.shape[1] // arena.shape[3]
    folded = q.reshape(cell.batch, arena.shape[3], group * cell.nodes, -1)
    mask = F.pad(seen, (cell.prefix, 0), value=True)[:, None].repeat(1, 1, group, 1)

    def call(kv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(folded, kv[0, :, :, :end], kv[1, :, :, :end], attn_mask=mask)

    return [lambda kv=kv: call(kv) for kv in arena]  # type: ignore[misc]


def same_or_raise(name: str, mine: Tensor, other: Tensor) -> None:
    """Times can be compared only of what gives the same: ours [B, N, H, D] and another's [B, H, N, D]."""
    error = float((mine.transpose(1, 2).float() - other.float()).abs().max() / mine.float().abs().max())
    if not error < 0.03:
        raise RuntimeError(f"ours and {name} differ by {error:.2g} of the largest value")


def flex_time_or_reason(cell: Cell, q: Tensor, arena: Tensor, seen: Tensor, mine: Tensor) -> float | str:
    """FlexAttention, compiled for these shapes; building its block mask is not counted."""
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()
        end = cell.prefix + cell.nodes

        def visible(b: Tensor, h: Tensor, row: Tensor, slot: Tensor) -> Tensor:
            behind = slot - cell.prefix
            return (behind < 0) | seen[b, row, behind.clamp(0, cell.nodes - 1)]

        mask = create_block_mask(visible, cell.batch, None, cell.nodes, end, device=str(q.device))
        compiled = torch.compile(flex_attention, dynamic=False)
        query = q.contiguous()

        def call(kv: Tensor) -> Any:
            key, value = kv[0, :, :, :end], kv[1, :, :, :end]
            return compiled(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])

        same_or_raise("FlexAttention", mine, call(arena[0]))
        return seconds_a_call([lambda kv=kv: call(kv) for kv in arena], q.device)  # type: ignore[misc]
    except Exception as error:  # another project's compiler: whatever it says belongs into the table
        return f"can't run: {reason(error)}"


def note_peak(report: Report, device: torch.device, what: str) -> None:
    """Most memory that torch held since the last call; what it holds without need is given back."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        report.add("machine", what, INFO, f"{peak:.1f} GiB", gib=peak)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# --- time -------------------------------------------------------------------------------------------------------------


def time_or_reason(calls: list[Callable[[], Any]], device: torch.device) -> float | str:
    """Seconds a call, or why there are none."""
    try:
        return seconds_a_call(calls, device)
    except (RuntimeError, ValueError) as error:
        return f"can't run: {reason(error)}"


def reason(error: Exception) -> str:
    """The first line of an error."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:120] if lines else '?'}"


def seconds_a_call(calls: list[Callable[[], Any]], device: torch.device, budget: float = 0.15) -> float:
    """Seconds of one call when all are made one after the other, again and again; the least of three rounds.

    On a GPU they are replayed as a graph: what is timed is the device's work, not Python's.
    """
    for call in calls[:2]:
        call()
    if device.type != "cuda":
        started = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - started) / len(calls)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    once = _replays(graph, 1)
    count = max(1, min(200, int(budget / 3 / once)))
    return min(_replays(graph, count) for _ in range(3)) / len(calls)


def _replays(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Seconds of one replay."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / count
