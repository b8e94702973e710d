"""What the Triton kernels must give: references in fp64, written from the formulas, and the PyTorch twins.

Run as a program, because Triton takes TRITON_INTERPRET from the environment at its first import:
`python kernel_checks.py DEVICE NAME...` prints a line of JSON for each case: name, CPU seconds, what went wrong.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from kernel_walks import WALKS, everywhere
from torch import Tensor, nn

from draftsmith.eval.decoder import attention
from draftsmith.eval.decoder.cache import TreeCache
from draftsmith.eval.decoder.kernels.tree_attention import tree_attention
from draftsmith.eval.decoder.types import pack_bits

Check = Callable[[torch.device], None]


# --- attention --------------------------------------------------------------------------------------------------------


@dataclass
class Problem:
    """One pass over a tree: sizes, and the random tensors made of them.

    Attributes:
        shape: (query heads, kv heads, key size, value size).
        rows: N queries behind `earlier` rows of the same step; tree: whether they see ancestors only.
    """

    shape: tuple[int, int, int, int]
    lengths: list[int]
    rows: int
    tree: bool = True
    earlier: int = 0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    splits: int | None = 1
    dtype: torch.dtype = torch.float32
    seed: int = 0
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)
    sink: Tensor | None = field(init=False)
    depth: Tensor = field(init=False)
    sees: Tensor = field(init=False)  # bool [B, N, T]

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        (heads, kv, dim, dim_v), b, total = self.shape, len(self.lengths), self.earlier + self.rows
        slots = max(self.lengths) + total
        self.q = (2 * torch.randn(b, self.rows, heads, dim, generator=g)).to(self.dtype).transpose(1, 2)
        # a layer of an arena with more slots than may be read; what may not be read is poisoned
        self.k = torch.randn(2, b, kv, slots + 9, dim, generator=g).to(self.dtype)[1, :, :, :slots]
        self.v = torch.randn(2, b, kv, slots + 9, dim_v, generator=g).to(self.dtype)[1, :, :, :slots]
        for i, length in enumerate(self.lengths):
            self.k[i, :, length + total :] = self.v[i, :, length + total :] = torch.nan
        self.sink = torch.randn(heads, generator=g).to(self.dtype) + 1 if self.sinks else None
        self.depth = torch.arange(total).expand(b, total)
        self.sees = torch.ones(b, total, total, dtype=torch.bool).tril()
        if self.tree:
            self.depth = torch.zeros(b, total, dtype=torch.int64)
            self.sees = torch.eye(total, dtype=torch.bool).repeat(b, 1, 1)
            for i, j in itertools.product(range(b), range(1, total)):
                up = int(torch.randint(max(0, j - 5), j, (), generator=g))
                self.depth[i, j] = self.depth[i, up] + 1
                self.sees[i, j] |= self.sees[i, up]
        self.sees = self.sees[:, self.earlier :]

    def run(self, device: torch.device, **changed: Any) -> Tensor:
        """What the kernel gives; `changed` arguments are for mistakes."""
        bits = pack_bits(self.sees) if self.tree else None
        tensors = {"lengths": torch.tensor(self.lengths), "depth": self.depth, "ancestors": bits} | changed
        # `to` keeps strides of dense tensors only: views are taken on the device
        q, k, v = self.q.to(device), _moved(self.k, device), _moved(self.v, device)
        return tree_attention(
            q, k, v, **{name: everywhere(x, device) for name, x in tensors.items()},
            earlier=self.earlier, scale=self.scale, window=self.window, softcap=self.softcap,
            sinks=everywhere(self.sink, device), splits=self.splits,
        ).cpu()  # fmt: skip

    @property
    def scale(self) -> float:
        return 0.7 * self.shape[2] ** -0.5

    def reference(self) -> Tensor:
        """Dense masked softmax in fp64: [B, N, H, Dv]."""
        out = torch.zeros(len(self.lengths), self.rows, self.shape[0], self.shape[3], dtype=torch.float64)
        group = self.shape[0] // self.shape[1]
        for b, length in enumerate(self.lengths):
            end = length + self.earlier + self.rows
            position = torch.cat((torch.arange(length), length + self.depth[b]))
            visible = torch.cat((torch.ones(self.rows, length, dtype=torch.bool), self.sees[b]), 1)
            if self.window is not None:
                own = length + self.depth[b, self.earlier :]
                visible &= own[:, None] - position < self.window
            for h in range(self.shape[0]):
                k, v = (x[b, h // group, :end].double() for x in (self.k, self.v))
                x = self.q[b, h].double() @ k.T * self.scale
                if self.softcap is not None:
                    x = self.softcap * torch.tanh(x / self.softcap)
                e = torch.where(visible, x.exp(), 0.0)
                total = e.sum(1) + (0.0 if self.sink is None else self.sink[h].double().exp())
                out[b, :, h] = e @ v / total[:, None]
        return out

    def error(self, got: Tensor) -> float:
        """Largest difference from the reference in units of what rounding may do; NaN counts as infinite."""
        allowed = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[self.dtype]
        return float((got.double() - self.reference()).abs().nan_to_num(torch.inf).max()) / allowed


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """The same view [B, Hk, S, D] of an arena on the device."""
    arena = x.as_strided((*x.shape[:2], x.stride(1) // x.shape[3], x.shape[3]), x.stride(), x.storage_offset())
    return arena.to(device)[:, :, : x.shape[2]]


BF16, FP16 = torch.bfloat16, torch.float16
PROBLEMS = {
    "one_row": Problem((4, 2, 64, 64), [0, 1, 70], 1, tree=False),
    "small_tree": Problem((4, 4, 80, 80), [0, 64, 33], 6, splits=2),
    "grouped": Problem((8, 1, 64, 64), [70, 5], 12, dtype=FP16),
    "bf16_merged": Problem((4, 1, 128, 128), [200, 0, 131], 16, splits=4, dtype=BF16, seed=2),
    "bf16_many_rows": Problem((6, 2, 96, 96), [40, 100], 64, splits=None, dtype=BF16),
    "unequal_sizes": Problem((3, 1, 192, 128), [67, 2], 7, splits=2),
    "large_heads": Problem((2, 1, 256, 256), [40, 3], 12, splits=2, dtype=BF16),
    "two_words": Problem((1, 1, 64, 64), [10, 81], 70, window=60, splits=2, dtype=FP16),
    "four_words": Problem((1, 1, 64, 64), [3], 200, splits=2, dtype=FP16),
    "small_window": Problem((4, 1, 64, 64), [0, 3, 100], 9, window=2, splits=2),
    "window_inside_the_prefix": Problem((2, 1, 64, 64), [500, 20, 333], 12, window=150, splits=3, dtype=BF16),
    "softcap_and_sinks": Problem((4, 2, 80, 80), [90, 0], 10, softcap=3.0, sinks=True),
    "softcap_and_sinks_merged": Problem((4, 2, 64, 64), [200, 7], 10, softcap=1.5, sinks=True, splits=3, window=90),
    "more_pieces_than_blocks": Problem((2, 1, 64, 64), [0, 40], 3, splits=7, sinks=True),
    "earlier_rows": Problem((4, 2, 64, 64), [31, 0], 6, earlier=75, window=20, splits=2),
    "earlier_rows_of_a_chain": Problem((2, 1, 64, 64), [45, 6], 4, tree=False, earlier=7),
    "prompt": Problem((2, 1, 64, 128), [0, 70], 70, tree=False, window=60, dtype=FP16),
}


def attention_case(name: str) -> Check:
    def check(device: torch.device) -> None:
        problem = PROBLEMS[name]
        error = problem.error(problem.run(device))
        assert error <= 1, f"{error:.1f} times what rounding may do"

    return check


def attention_mistakes_are_seen(device: torch.device) -> None:
    """The comparison fails for one wrong bit, length, depth or window, in any piece."""
    problem = Problem((2, 1, 64, 64), [20, 40], 8, window=25, splits=2)
    assert problem.error(problem.run(device)) <= 1
    for row, node in ((3, 0), (3, 3), (3, 4)):
        sees = problem.sees.clone()
        sees[1, row, node] ^= True
        assert problem.error(problem.run(device, ancestors=pack_bits(sees))) > 100
    for lengths in ([21, 40], [20, 39]):
        assert problem.error(problem.run(device, lengths=torch.tensor(lengths))) > 100
    assert problem.error(problem.run(device, depth=problem.depth + (problem.depth > 0))) > 100
    assert problem.error(replace(problem, window=24).run(device)) > 100


def attention_is_its_twin(device: torch.device) -> None:
    """A step of a cache, with what the cache hands over."""
    g = torch.Generator().manual_seed(0)
    module = nn.Module()
    for longest, window, softcap, earlier, tree in (
        (520, None, None, 0, True), (70, 30, 2.0, 4, True), (70, None, 2.0, 4, False),
    ):  # fmt: skip
        p = Problem((4, 2, 64, 64), [0, 33, longest], 4, tree, earlier, window, softcap, softcap is not None)
        cache = TreeCache([(2, 64, 64)], 3, 700, device, torch.float32)
        cache.kernels = False
        for arena in cache.arenas[0]:
            arena.copy_(torch.randn(arena.shape, generator=g))
        cache.lengths.copy_(torch.tensor(p.lengths))
        cache.host_lengths = list(p.lengths)
        bits = everywhere(pack_bits(p.sees), device) if tree else None
        q, new = p.q.to(device), torch.randn(2, 3, 2, 4, 64, generator=g).to(device)
        with cache.step(0, 3, p.depth.to(device), bits, earlier) as step:
            k, v = cache.update(new[0], new[1], 0)
            sinks = everywhere(p.sink, device)
            twin, _ = attention.tree_attention(
                module, q, k, v, None, p.scale, sliding_window=window, softcap=softcap, s_aux=sinks
            )
            got = tree_attention(
                q, k, v, step.lengths, step.depth, step.ancestors, earlier=step.earlier, scale=p.scale, window=window,
                softcap=softcap, sinks=sinks, splits=2,
            )  # fmt: skip
        torch.testing.assert_close(got, twin, rtol=2e-5, atol=2e-6)


CASES: dict[str, Check] = {f"attention_{name}": attention_case(name) for name in PROBLEMS}
CASES |= {check.__name__: check for check in (attention_mistakes_are_seen, attention_is_its_twin, *WALKS)}


def main(device: torch.device, names: list[str]) -> None:
    # memory that nothing was written to is filled with NaN, and integers with their largest
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device=device).isnan().all()
    for name in names:
        start, wrong = time.process_time(), None
        try:
            CASES[name](device)
        except Exception:
            wrong = traceback.format_exc()
        print(json.dumps({"name": name, "seconds": round(time.process_time() - start, 2), "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main(torch.device(sys.argv[1]), sys.argv[2:] or list(CASES))
