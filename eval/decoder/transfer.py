"""Values between host and device without waiting: pinned memory, and copies that are queued like any other work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 tensor of `values` (nested to any depth, not ragged) on the device.

    torch.tensor(..., device="cuda") copies from pageable memory, for which the host waits until queued work is done.
    torch keeps a pinned block from being used again before the copies that read it are through.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64, device=device)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


class Download:
    """A tensor on its way to the host.

    Args:
        x: not changed before `value` was called.
    """

    def __init__(self, x: Tensor) -> None:
        self._host, self._done = x, None
        if x.device.type == "cuda":
            self._host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
            self._host.copy_(x, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(x.device))

    def value(self) -> Tensor:
        """The tensor on the host; waits only if the copy is not through yet."""
        if self._done is not None:
            self._done.synchronize()
        return self._host
