"""Speculative decoding on paper: what bounds a pass on a device, and the speed-up that an acceptance promises there.

A pass over B sequences of N rows each, c tokens long, takes at least

    max( (W + B·c·k) / bandwidth,  B·N·f / peak )

W = bytes of all weights that are read once, k = bytes of keys and values a token, f = operations a row (the roofline
model; Williams et al. 2009). Drafts pay where the left term is the larger one: rows are then free up to the ridge.

With acceptance α of each draft, independent of the others, a chain of K emits (1 − α^(K+1)) / (1 − α) tokens a step;
a draft step that takes 1/r of the target's pass makes the step 1 + K/r passes long (Leviathan et al. 2023, theorem
3.8).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import yaml

from ..errors import DraftsmithError
from ..heads.shapes import TargetShapes

if TYPE_CHECKING:
    import torch

HERE = "here"
"""Name of the hardware that this machine has."""
WEIGHTS, KEYS, ARITHMETIC = "reading weights", "reading keys and values", "arithmetic"


@dataclass(frozen=True)
class Hardware:
    """A device.

    Attributes:
        name: as `configs/hardware.yaml` lists it, or "here".
        bf16, fp32: operations a second of dense products.
        bandwidth: bytes a second of its memory.
        memory: bytes.
        is_gpu: no: this machine's CPU, which computes in fp32.
    """

    name: str
    bf16: float
    fp32: float
    bandwidth: float
    memory: float
    is_gpu: bool = True


def load_hardware(name: str | None) -> Hardware:
    """Look a device up; None and `HERE` take what this machine has: its GPU, else its CPU.

    A GPU that `configs/hardware.yaml` lists has the figures from there, with the memory that it really has; any other
    device is measured.

    Raises:
        DraftsmithError: an unknown name.
    """
    if name is None or name == HERE:
        return measure_here()
    if name not in _table():
        raise DraftsmithError(
            f"there is no hardware {name!r}: give one of {', '.join(_table())}, or {HERE!r} for this machine's own"
        )
    entry = dict(_table()[name])
    is_gpu = entry.pop("match", None) is not None
    return Hardware(name, **{key: float(value) for key, value in entry.items()}, is_gpu=is_gpu)


def listed_as(device: str) -> str | None:
    """The entry of `configs/hardware.yaml` for a device as CUDA calls it; None where there is none."""
    found = (n for n, entry in _table().items() if "match" in entry and re.search(rf"\b{entry['match']}\b", device))
    return next(found, None)


@functools.cache
def measure_here() -> Hardware:
    """What this machine computes with; measured in about a second where it isn't a listed GPU."""
    import torch

    if torch.cuda.is_available():
        memory = float(torch.cuda.get_device_properties(0).total_memory)
        device = torch.cuda.get_device_name(0)
        if (listed := listed_as(device)) is not None:
            return dataclasses.replace(load_hardware(listed), memory=memory)
        bf16, fp32 = (
            _products(torch.ones(4096, 4096, dtype=d, device="cuda")) for d in (torch.bfloat16, torch.float32)
        )
        return Hardware(device, bf16, fp32, _bandwidth(torch.ones(1 << 28, device="cuda")), memory)
    rate = _products(torch.ones(1024, 1024))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Hardware(HERE, rate, rate, _bandwidth(torch.ones(1 << 25)), memory, is_gpu=False)


def _products(a: torch.Tensor) -> float:
    """Operations a second of a @ a."""
    return 2 * len(a) ** 3 / _best_seconds(lambda: a @ a)


def _bandwidth(long: torch.Tensor) -> float:
    """Bytes a second that a sum reads."""
    return long.numel() * 4 / _best_seconds(long.sum)


def _best_seconds(work: Callable[[], torch.Tensor]) -> float:
    """Least of the seconds that a call took within half a second, its result included."""
    until, best = time.perf_counter() + 0.5, math.inf
    while time.perf_counter() < until:
        started = time.perf_counter()
        result = work()
        if result.is_cuda:
            import torch

            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    text = (resources.files(__package__.partition(".")[0]) / "configs" / "hardware.yaml").read_text("utf-8")
    table: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return table


@dataclass(frozen=True)
class Pass:
    """One decoding pass by the roofline.

    Attributes:
        weights, keys, arithmetic: seconds that each would take alone at the device's peaks.
        bytes_read: of weights and of keys and values; flops: of all rows.
        bound: which of the three is the longest.
        ridge: operations a byte at which the device's arithmetic takes as long as its memory.
        free_rows: rows a sequence that take no longer than reading does; at least 1.
    """

    weights: float
    keys: float
    arithmetic: float
    bytes_read: float
    flops: float
    bound: str
    ridge: float
    free_rows: int

    @property
    def seconds(self) -> float:
        """Weights and keys are read one after the other, arithmetic runs beside them."""
        return max(self.weights + self.keys, self.arithmetic)

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.bytes_read


def roofline(
    read_params: float, kv_bytes: float, flops: float, hardware: Hardware, *, batch: int, context: int, rows: int = 1
) -> Pass:
    """Bound one pass.

    Args:
        read_params: weights that it reads once; kv_bytes: a token; flops: a row, as `TargetShapes.flops` counts.
        batch: sequences; context: tokens that each has cached; rows: of each sequence in this pass.
    """
    weights, keys = read_params * weight_bytes(hardware), float(batch * context * kv_bytes)
    peak, ridge = hardware.bf16, hardware.bf16 / hardware.bandwidth
    times = {
        WEIGHTS: weights / hardware.bandwidth,
        KEYS: keys / hardware.bandwidth,
        ARITHMETIC: batch * rows * flops / peak,
    }
    reading, row = times[WEIGHTS] + times[KEYS], batch * flops / peak
    if times[ARITHMETIC] > reading:
        bound = ARITHMETIC
    else:
        bound = max((WEIGHTS, KEYS), key=lambda kind: times[kind])
    return Pass(
        times[WEIGHTS], times[KEYS], times[ARITHMETIC], weights + keys, batch * rows * flops, bound, ridge,
        max(1, math.floor(reading / row)),
    )  # fmt: skip


def target_pass(shapes: TargetShapes, hardware: Hardware, *, batch: int, context: int, rows: int = 1) -> Pass:
    """Bound one pass of the target; see `roofline`."""
    kv = shapes.kv_bytes(weight_bytes(hardware))
    flops = shapes.flops(context)
    return roofline(shapes.read, kv, flops, hardware, batch=batch, context=context, rows=rows)


def weight_bytes(hardware: Hardware) -> int:
    """Bytes of a number: bf16 on a GPU, fp32 on a CPU."""
    return 2 if hardware.is_gpu else 4


def tokens_a_step(alpha: float, depth: int) -> float:
    """Expected tokens a step of a chain of `depth`, (1 − α^(K+1)) / (1 − α); K + 1 where every draft is right."""
    _check_alpha(alpha)
    return float(depth + 1) if alpha == 1 else (1 - alpha ** (depth + 1)) / (1 - alpha)


def predicted_speedup(alpha: float, depth: int, r: float) -> float:
    """Speed-up of a chain of K = `depth` over plain decoding, (1 − α^(K+1)) / (1 − α) / (1 + K/r).

    Args:
        alpha: acceptance of a draft, 0..1.
        r: seconds of a target pass / seconds of a draft step.
    """
    if not r > 0:
        raise DraftsmithError(f"r = {r} must be above 0: seconds of a target pass / seconds of a draft step")
    return tokens_a_step(alpha, depth) / (1 + depth / r)


def speedup_table(alphas: Sequence[float], depths: Sequence[int], r: float) -> list[dict[str, Any]]:
    """A line for each α: the speed-up at every depth, and the best depth."""
    lines = []
    for alpha in alphas:
        speedups = [predicted_speedup(alpha, depth, r) for depth in depths]
        best = max(range(len(depths)), key=lambda i: speedups[i])
        lines.append({"alpha": alpha, "speedups": speedups, "best_depth": depths[best], "best": speedups[best]})
    return lines


def _check_alpha(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise DraftsmithError(f"alpha = {alpha} must be between 0 and 1: the share of drafts that are accepted")


ENGINE_BYTES, RESERVE = 2.0e9, 0.95
"""What a serving engine keeps beside weights and caches (context, graphs, buffers), assumed; the most of a device that
may be given to it."""


def serving(
    shapes: TargetShapes,
    head_params: float,
    head_kv: int,
    memory: float,
    *,
    devices: int,
    batch: int,
    context: int,
    tree_rows: int,
) -> dict[str, Any]:
    """Memory of one serving copy in bf16, spread over `devices`, and what vLLM's `gpu_memory_utilization` must be.

    That setting is the share of each device for weights, caches and work space together; a draft head's are in it.

    Args:
        head_params: of the head, with the output rows that it reads; head_kv: numbers it caches a token.
        memory: bytes of a device.
        batch, context: sequences that run at the same time, tokens of each; tree_rows: drafted rows of each.

    Returns:
        Bytes a device (target, head, kv_target, kv_head, tree, engine, in all), utilization (None: it doesn't fit), and
        how many sequences fit at `RESERVE` with and without the head.
    """
    parts = {
        "target": 2.0 * shapes.params / devices,
        "head": 2.0 * head_params / devices,
        "kv_target": batch * context * shapes.kv_bytes(2) / devices,
        "kv_head": batch * context * head_kv * 2.0 / devices,
        "tree": batch * tree_rows * (shapes.kv_bytes(2) + head_kv * 2.0) / devices,
        "engine": ENGINE_BYTES,
    }
    needed = sum(parts.values())
    share = math.ceil(100 * needed / memory) / 100
    room = RESERVE * memory - parts["engine"] - parts["target"]
    alone = (context * shapes.kv_bytes(2)) / devices
    with_head = alone + (context * head_kv * 2.0 + tree_rows * (shapes.kv_bytes(2) + head_kv * 2.0)) / devices
    return {
        "devices": devices,
        "bytes": {**parts, "all": needed},
        "utilization": share if share <= RESERVE else None,
        "sequences": max(0, math.floor((room - parts["head"]) / with_head)),
        "sequences_without_head": max(0, math.floor(room / alone)),
    }
