"""Memory of the losses: flat in the number of rows whatever is mixed, and one gradient for a shared output weight."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.heads import losses
from draftsmith.heads.losses import HiddenTeacher, LossRows, mixed_losses

MIX = {"soft_ce": 0.7, "ce": 0.2, "tv": 1.3, "lk": 0.4}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, and the most that live at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and id(storage := x.untyped_storage()) not in self.known:
                self.known.add(id(storage))
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, id(storage), storage.nbytes())
        return out

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def peak_bytes(rows: int, steps: int, scales: list[float] | None, mix: dict[str, float]) -> tuple[int, int]:
    """Most bytes alive during a pass forward and back, and what is alive in between; W 4, Vd 512, fp32."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(512, 4, generator=g).requires_grad_()
    teacher = HiddenTeacher(torch.randn(rows, 4, generator=g), torch.randn(512, 4, generator=g), torch.arange(512))
    at = torch.arange(rows)
    each = [
        LossRows(at, torch.randn(rows, 4, generator=g).requires_grad_(), weight, at % 512, at) for _ in range(steps)
    ]
    with LiveBytes() as live:
        found, _ = mixed_losses(each, mix, teacher, lambda p: 0.5 * p, scales)
        between = live.now
        found.sum().backward()
    return live.peak, between


@pytest.mark.parametrize("mix", [{"soft_ce": 1.0}, MIX], ids=["soft_ce", "mix"])
def test_memory_does_not_grow_with_rows(mix: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and probabilities are a chunk's; what grows are a row's readouts: 3 W numbers and 3 integers at most."""
    monkeypatch.setattr(losses, "rows_per_chunk", lambda *_: 64)
    few, _ = peak_bytes(128, 2, None, mix)
    many, _ = peak_bytes(1024, 2, None, mix)
    row = 2 * (3 * 4 * 4 + 3 * 8)
    assert many - few <= 896 * row
    assert 896 * row < 0.1 * 896 * 512 * 4, "the bound must be far below one row's logits"
    assert few < 8 * 64 * 512 * 4, "eight chunks of logits at a time at most"


def test_one_gradient_is_kept_for_a_shared_weight() -> None:
    _, by_step = peak_bytes(16, 6, None, MIX)
    _, by_weight = peak_bytes(16, 6, [1.0] * 6, MIX)
    assert by_step - by_weight == 5 * 512 * 4 * 4
