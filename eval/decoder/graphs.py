"""The target's pass as CUDA graphs: one a bucket of shapes, replayed instead of launching every kernel again.

NOT MEASURED YET: written without a GPU at hand, run by `scripts/gpu_check.py` only; `decode` leaves it off.

A pass of the kernels' path is a function of shapes and of tensors on the device: lengths are read by the kernels, and
the one thing that the host's copy of them decides is how many slots a pass may read, rounded up to a bucket
(`cache.bucket`). A graph for (B, N, words of ancestor bits, slots) is therefore good for every step with these shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import DraftsmithError
from ...heads.target import Target
from .cache import TreeCache
from .kernels import LARGEST_HEAD
from .probe import tree_pass

# Passes before the capture: kernels are compiled, workspaces made. They write the rows that the captured one writes.
_WARM_UP = 2
# Graphs that are kept; each holds the logits of its shapes. The one not used for longest gives way.
_MOST = 8

Key = tuple[int, int, int, int]


@dataclass
class _Captured:
    """A graph, the tensors that it reads, and those that every replay writes."""

    inputs: list[Tensor]
    logits: Tensor
    states: dict[int, Tensor]
    replay: Callable[[], None]


class CapturedPass:
    """`probe.tree_pass` by graphs.

    Args:
        cache: of the loop; its arenas and lengths are what the graphs read and write.

    Raises:
        DraftsmithError: the cache doesn't run the kernels: the other path looks at lengths on the host.
    """

    def __init__(self, target: Target, cache: TreeCache) -> None:
        if not cache.kernels:
            raise DraftsmithError(
                f"CUDA graphs need the Triton kernels, which don't run for {cache.dtype} on {cache.device} or for "
                f"heads above {LARGEST_HEAD}: leave graphs off"
            )
        self.target, self.cache = target, cache
        self.made: dict[Key, _Captured] = {}
        self.pool: Any = None

    def run(self, tokens: Tensor, depth: Tensor, ancestors: Tensor | None, states: dict[int, Tensor]) -> Tensor:
        """See `tree_pass`; logits and states stay good until the next call.

        Args:
            states: what the target's hooks fill; gets the captured tensors.

        Raises:
            DraftsmithError: the model does something that can't be captured.
        """
        given = [tokens, depth, *([] if ancestors is None else [ancestors])]
        key = self.key(tokens, ancestors)
        found = self.made.pop(key, None)
        if found is None:
            while len(self.made) >= _MOST:
                self.made.pop(next(iter(self.made)))
            found = self._capture([x.clone(memory_format=torch.contiguous_format) for x in given], states)
        else:
            for held, new in zip(found.inputs, given, strict=True):
                held.copy_(new)
        self.made[key] = found
        found.replay()
        states.update(found.states)
        return found.logits

    def key(self, tokens: Tensor, ancestors: Tensor | None) -> Key:
        """The bucket of a pass: B, N, words of ancestor bits (0 without), slots that may be read."""
        b, n = tokens.shape
        return b, n, 0 if ancestors is None else ancestors.shape[-1], self.cache.span_of(0, b, n)

    def _capture(self, inputs: list[Tensor], states: dict[int, Tensor]) -> _Captured:
        tokens, depth = inputs[:2]
        ancestors = inputs[2] if len(inputs) > 2 else None

        def run() -> Tensor:
            return tree_pass(self.target, self.cache, tokens, depth, ancestors)

        try:
            logits, replay, self.pool = record(run, self.pool)
        except RuntimeError as error:
            raise DraftsmithError(
                f"{type(self.target.model).__name__}: its pass can't be captured as a CUDA graph "
                f"({str(error).strip().splitlines()[0]}); leave graphs off"
            ) from error
        return _Captured(inputs, logits, dict(states), replay)


def record(run: Callable[[], Tensor], pool: Any) -> tuple[Tensor, Callable[[], None], Any]:
    """Warm up, then capture what `run` queues on the device.

    Args:
        pool: torch's handle of the memory that earlier captures share; None at the first one.

    Returns:
        What `run` returned, into which every replay writes; the replay; the pool.
    """
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            run()
    main.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = run()
    return out, graph.replay, graph.pool()
