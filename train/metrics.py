"""Figures from sums that were pooled over rows, batches and ranks: never means of means."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..eval.speedup import listed_as, load_hardware
from ..heads.costs import HeadCosts, head_costs
from ..memory import peak_rss_bytes
from .ranks import Ranks
from .step import SUMS, TrainStep


def ratio(top: float, bottom: float) -> float | None:
    """Divide; None where nothing was counted."""
    return top / bottom if bottom else None


def summarise(sums: Tensor, weights: Sequence[float]) -> dict[str, Any]:
    """Turn pooled sums [steps, 6] (columns as in step.SUMS) into the figures that are logged.

    Returns:
        loss: sum_s w_s * num_s / den_s.
        loss_by_step, accuracy: by unrolled step; tokens outside the draft vocabulary count as misses in the accuracy.
        acceptance_cumulative, acceptance_conditional: teacher-forced, over all supervised rows; entry 0 is the first
            drafted token. A row is no decoding step, so these are no tau.
    """
    columns = {key: sums[:, i].tolist() for i, key in enumerate(SUMS)}
    by_step = [ratio(n, d) for n, d in zip(columns["num"], columns["den"], strict=True)]
    return {
        "loss": sum(w * (x or 0.0) for w, x in zip(weights, by_step, strict=True)),
        "loss_by_step": by_step,
        "accuracy": [ratio(n, d) for n, d in zip(columns["hits"], columns["rows"], strict=True)],
        "acceptance_cumulative": [ratio(n, d) for n, d in zip(columns["kept"], columns["rows"], strict=True)],
        "acceptance_conditional": [ratio(n, d) for n, d in zip(columns["kept"], columns["reached"], strict=True)],
    }


class Window:
    """What training steps add up to between two lines of the log.

    Args:
        weights: of the unrolled steps in the loss.
        extra: names of the losses whose rows stand behind the unrolled steps'.

    Attributes:
        tokens: rows seen.
    """

    def __init__(self, weights: Sequence[float], extra: Sequence[str]) -> None:
        self._weights, self._extra = weights, extra
        self._start()

    def _start(self) -> None:
        self._sums = torch.zeros(len(self._weights) + len(self._extra), len(SUMS), dtype=torch.float64)
        self._norms: list[float] = []
        self.tokens, self._started = 0, time.monotonic()

    def add(self, tokens: int, sums: Tensor | None, gradient_norm: float) -> None:
        """Take in a step.

        Args:
            tokens: rows of all ranks.
            sums: pooled, [steps + extra, 6] on any device; None where the step was left out.
            gradient_norm: global, before clipping.
        """
        self.tokens += tokens
        if sums is not None:
            self._sums += sums.view_as(self._sums).cpu()
            self._norms.append(gradient_norm)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context of what is no training: its time doesn't count."""
        before = time.monotonic()
        yield
        self._started += time.monotonic() - before

    def close(self) -> dict[str, Any]:
        """Begin a new window; returns the figures of this one.

        Returns:
            Those of `summarise`; the mean of each extra loss by its name; gradient_norm, the mean over the steps of the
            global norm before clipping, and gradient_norm_max (None where all steps were left out); tokens_per_s;
            supervised, the share of the rows that are.
        """
        seconds, steps = time.monotonic() - self._started, len(self._weights)
        values = summarise(self._sums[:steps], self._weights)
        for name, line in zip(self._extra, self._sums[steps:].tolist(), strict=True):
            values[name] = ratio(*line[:2])
        values |= {
            "gradient_norm": ratio(sum(self._norms), len(self._norms)),
            "gradient_norm_max": max(self._norms, default=None),
            "tokens_per_s": self.tokens / seconds,
            "supervised": ratio(float(self._sums[0, SUMS.index("rows")]), self.tokens),
        }
        self._start()
        return values


@dataclass(frozen=True)
class Utilisation:
    """What turns tokens/s into MFU.

    Attributes:
        costs: of the head; None where a target is trained in the same job, whose operations aren't counted.
        keys: rows that a row attends to in the mean, itself included.
        peak: operations a second of each of `world` devices; None = not known.
    """

    costs: HeadCosts | None
    keys: float
    peak: float | None
    world: int

    @classmethod
    def of(cls, step: TrainStep, lengths: Sequence[int], ranks: Ranks) -> Self:
        """Of a run on documents of these lengths; call it while the weights are whole."""
        costs = head_costs(step.head) if step.adapter is None else None
        keys = sum(n * (n + 1) / 2 for n in lengths) / sum(lengths)
        return cls(costs, keys, peak_flops(ranks.device, step.dtype), ranks.world)

    def mfu(self, supervised: float, tokens_per_s: float) -> float | None:
        """Share of the devices' peak that the head's products take, forward and backward (arXiv 2204.02311, B).

        Args:
            supervised: share of the rows that are. tokens_per_s: of all ranks together.
        """
        if self.costs is None or self.peak is None:
            return None
        return self.costs.train_flops(supervised, self.keys) * tokens_per_s / (self.peak * self.world)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations a second of a GPU that configs/hardware.yaml lists; None for others and for CPUs."""
    if device.type != "cuda":
        return None
    listed = listed_as(torch.cuda.get_device_name(device))
    if listed is None:
        return None
    found = load_hardware(listed)
    return found.fp32 if dtype == torch.float32 else found.bf16


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that this process held so far: a GPU's allocated tensors, else resident memory."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_rss_bytes()
