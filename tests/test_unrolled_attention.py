"""Attention of unrolled training: equal to a dense fp64 one, apart by document, and O(T) in memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from families import first_case, make_documents, pack
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.heads import unrolled
from draftsmith.heads.base import Batch
from draftsmith.heads.layer import RecurrentHead
from draftsmith.heads.unrolled import Tile, TileSize, attend, lay_out

SMALL = TileSize(rows=5, keys=8)
LENGTHS = [8, 1, 7, 2, 9, 16, 23, 1, 17]
"""A tile's keys, one less, one more, twice; single rows and pairs; odd ones."""


def texts(lengths: list[int]) -> Batch:
    """Packed documents of which only the places matter."""
    documents = torch.cat([torch.full((n,), 3 * i) for i, n in enumerate(lengths)])
    positions = torch.cat([torch.arange(n) for n in lengths])
    n = len(documents)
    nothing = torch.zeros(n, 0)
    return Batch(
        torch.zeros(n, dtype=torch.int64), torch.ones(n, dtype=torch.bool), documents, positions, nothing, nothing
    )


class Problem:
    """Random rows, keys and values of `later` + 1 steps, and a gradient of the output.

    `heads` are (Hq, Hk, D); `sharp` scales the queries.
    """

    def __init__(
        self,
        batch: Batch,
        rows: Tensor,
        later: int,
        heads: tuple[int, int, int] = (6, 2, 4),
        dtype: torch.dtype = torch.float64,
        sharp: float = 1.0,
    ) -> None:
        g = torch.Generator().manual_seed(later)
        hq, hk, d = heads

        def draw(n: int, h: int) -> Tensor:
            return torch.randn(n, h, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

        r, counts = len(rows), [len(batch.tokens), *[len(rows)] * later]
        self.batch, self.rows = batch, rows
        self.q = (sharp * draw(r, hq).detach()).requires_grad_()
        self.keys, self.values = [draw(n, hk) for n in counts], [draw(n, hk) for n in counts]
        self.grad = draw(r, hq).detach()

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q, *self.keys, *self.values]

    def run(self) -> tuple[Tensor, ...]:
        """The output, and the gradients of all leaves."""
        out = attend(self.q, self.keys, self.values, lay_out(self.batch, self.rows))
        return out, *torch.autograd.grad(out, self.leaves, self.grad)

    def dense(self) -> tuple[Tensor, ...]:
        """The same with every row's scores at once, in fp64."""
        q, *pairs = (x.detach().double().requires_grad_() for x in self.leaves)
        group = q.shape[1] // self.keys[0].shape[1]
        wide = [x.repeat_interleave(group, 1) for x in pairs]
        keys, values = wide[: len(wide) // 2], wide[len(wide) // 2 :]
        where, documents = torch.arange(len(self.batch.tokens)), self.batch.documents
        seen = (documents == documents[self.rows][:, None]) & (where <= self.rows[:, None])
        scores = torch.einsum("rhd,thd->rht", q, keys[0]).masked_fill(~seen[:, None], -math.inf)
        own = [(q * k).sum(-1, keepdim=True) for k in keys[1:]]
        p = torch.softmax(torch.cat((scores, *own), -1) / math.sqrt(q.shape[-1]), -1)
        out = torch.einsum("rht,thd->rhd", p[..., : len(where)], values[0])
        for s, v in enumerate(values[1:]):
            out = out + p[..., len(where) + s, None] * v
        return out, *torch.autograd.grad(out, [q, *pairs], self.grad.double())


def some(n: int, share: float, seed: int = 0) -> Tensor:
    """An ascending subset of n rows."""
    return (torch.rand(n, generator=torch.Generator().manual_seed(seed)) < share).nonzero().flatten()


def assert_all_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], bound: float) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=bound, atol=bound)


# --- values and gradients ---------------------------------------------------------------------------------------------


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(unrolled.TILE_SIZES, "cpu", SMALL)


N = sum(LENGTHS)
SUBSETS = {
    "all": torch.arange(N),
    "half": some(N, 0.5),
    "few": some(N, 0.1),
    "one document": torch.arange(N - 17, N),
    "first and last": torch.tensor([0, N - 1]),
    "none": torch.arange(0),
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("later", range(8))
@pytest.mark.parametrize("subset", SUBSETS)
def test_values_and_gradients_are_the_dense_ones(subset: str, later: int) -> None:
    problem = Problem(texts(LENGTHS), SUBSETS[subset], later)
    assert_all_close(problem.run(), problem.dense(), 1e-10)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("heads", [(1, 1, 1), (3, 3, 8), (8, 1, 5), (6, 3, 2)])
def test_any_grouping_of_heads(heads: tuple[int, int, int]) -> None:
    problem = Problem(texts([11, 20]), some(31, 0.7), 3, heads)
    assert_all_close(problem.run(), problem.dense(), 1e-10)


def test_the_sizes_that_training_uses() -> None:
    rows, keys = unrolled.TILE_SIZES["cpu"]
    lengths = [keys - 1, keys, keys + 1, rows - 1, rows, rows + 1, 1]
    problem = Problem(texts(lengths), some(sum(lengths), 0.8), 2, (2, 1, 4))
    assert_all_close(problem.run(), problem.dense(), 1e-10)


@pytest.mark.usefixtures("small_tiles")
def test_scores_far_apart() -> None:
    """Scores in the thousands neither overflow nor lose a row's mass, wherever the largest lies."""
    for later in (0, 2):
        problem = Problem(texts([23, 9]), torch.arange(32), later, sharp=1000.0)
        assert_all_close(problem.run(), problem.dense(), 1e-9)


# --- tiles ------------------------------------------------------------------------------------------------------------


def test_tiles_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are rows 0-2, 3, 4-11; neither the second nor what lies behind a tile's last row needs a product."""
    monkeypatch.setitem(unrolled.TILE_SIZES, "cpu", TileSize(rows=2, keys=3))
    layout = lay_out(texts([3, 1, 8]), torch.tensor([1, 2, 4, 5, 9]))
    assert list(layout.tiles) == [
        Tile(slice(0, 2), (slice(0, 3),), 2),
        Tile(slice(2, 4), (slice(4, 6),), 5),
        Tile(slice(4, 5), (slice(4, 7), slice(7, 10)), 10),
    ]


@pytest.mark.usefixtures("small_tiles")
def test_documents_are_apart_bit_for_bit() -> None:
    """A document gives what it gives alone; not even a neighbour's NaN reaches it."""
    problem = Problem(texts([9, 13, 12]), torch.tensor([3, 8, 9, 10, 15, 20, 21, 30]), 2)
    inside = [slice(2, 7), *[slice(9, 22), slice(2, 7), slice(2, 7)] * 2]  # of q, keys by step, values by step
    alone = Problem(texts([13]), problem.rows[2:7] - 9, 2)
    alone.q, *pairs = (x.detach()[i].clone().requires_grad_() for x, i in zip(problem.leaves, inside, strict=True))
    alone.keys, alone.values, alone.grad = pairs[:3], pairs[3:], problem.grad[2:7]
    with torch.no_grad():
        for x, i in zip(problem.leaves, inside, strict=True):
            kept = x[i].clone()
            x.fill_(torch.nan)
            x[i] = kept
    problem.grad[:2] = problem.grad[7:] = torch.nan
    for a, b, i in zip(problem.run(), alone.run(), [slice(2, 7), *inside], strict=True):
        assert torch.equal(a[i], b)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_single_precision() -> None:
    problem = Problem(texts([70, 300]), some(370, 0.8), 3, (4, 2, 16), torch.float32)
    got = problem.run()
    assert {x.dtype for x in got} == {torch.float32}
    assert_all_close(got, problem.dense(), 2e-5)


def test_bf16_is_accumulated_in_fp32() -> None:
    """Scores around 40, rounded to bf16, would change weights by 13 %; here only what goes in and comes out is rounded.

    Gradients also feel the rounding of the output that backward reads: 2 ** -9 of it, where large terms cancel.
    """
    problem = Problem(texts([70, 300]), some(370, 0.8), 3, (4, 2, 16), torch.bfloat16, sharp=16.0)
    got, want = problem.run(), problem.dense()
    assert {x.dtype for x in got} == {torch.bfloat16}
    errors = [float(((a.double() - b).norm() / b.norm()).detach()) for a, b in zip(got, want, strict=True)]
    assert errors[0] < 2**-8
    assert max(errors) < 0.01


def test_products_of_16_bit_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: factors are bf16, weights too, sums fp32. The product itself is a stand-in for the GPU's."""

    def product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert (a.dtype, b.dtype, out_dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        return a.float() @ b.float()

    problem = Problem(texts([70, 300]), some(370, 0.8), 3, (4, 2, 16), torch.bfloat16)
    problem.q = problem.q.detach().float().requires_grad_()
    monkeypatch.setattr(unrolled, "MIXED_PRODUCTS", {"cpu"})
    monkeypatch.setattr(torch, "bmm", product)
    got, want = problem.run(), problem.dense()
    assert [x.dtype for x in got] == [torch.bfloat16, torch.float32, *[torch.bfloat16] * 8]
    for a, b in zip(got, want, strict=True):
        assert float(((a.double() - b).norm() / b.norm()).detach()) < 0.01


def test_autocast_changes_nothing_inside() -> None:
    """Queries in fp32 with values in bf16, as a head under autocast may give them."""
    problem = Problem(texts([70, 30]), some(100, 0.8), 2, dtype=torch.bfloat16)
    problem.q = problem.q.detach().float().requires_grad_()
    want = problem.run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = problem.run()
    assert [x.dtype for x in got] == [torch.bfloat16, torch.float32, *[torch.bfloat16] * 6]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# --- memory -----------------------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Elements of the largest tensor that is made, and the most bytes that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, Tensor):
                self.add(x)
        return out

    def add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        self.largest = max(self.largest, storage.nbytes() // x.element_size())
        if storage.data_ptr() in self.known:
            return
        self.known.add(storage.data_ptr())
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.drop, storage.data_ptr(), storage.nbytes())

    def drop(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.live -= size


def allocations(length: int, later: int) -> Allocations:
    problem = Problem(texts([length]), some(length, 0.9), later, (4, 2, 8), torch.float32)
    with Allocations() as seen:
        problem.run()
    return seen


def test_memory_grows_with_the_text_not_with_its_square() -> None:
    """4 heads of 8: a row is 32 numbers, a tile 4 heads of rows times keys; T x T is 8 times the bound at 4096."""
    short, long = allocations(2048, 2), allocations(4096, 2)
    rows, keys = unrolled.TILE_SIZES["cpu"]
    assert long.largest <= max(2 * 4 * rows * keys, 4096 * 2 * 32)
    assert long.peak < 2.05 * short.peak
    assert long.peak < 4096 * 4096


@contextmanager
def kept_for_backward() -> Iterator[dict[int, int]]:
    """Bytes by address of all storages that are kept while the block runs."""
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # an address must not be given out twice

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        alive.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield kept


def test_steps_share_the_keys_that_backward_needs() -> None:
    """Of each step its own q, k, v, out and log-sum-exp alone: nothing is kept twice."""
    batch, steps, (hq, hk, d) = texts([40, 30]), 7, (6, 2, 4)
    rows = some(70, 0.8)
    problem, r = Problem(batch, rows, steps - 1), len(rows)
    outs = []
    with kept_for_backward() as kept:
        for s in range(steps):
            q = problem.q.detach().clone().requires_grad_()
            outs.append(attend(q, problem.keys[: s + 1], problem.values[: s + 1], lay_out(batch, rows)))
    pairs = 2 * hk * d * (70 + (steps - 1) * r)
    assert sum(kept.values()) == 8 * (steps * r * hq * (d + d + 1) + pairs)


# --- checkpointing ----------------------------------------------------------------------------------------------------

RECURRENT = ["eagle1", "eagle3", "eagle31", "mtp"]


@pytest.mark.parametrize("family", RECURRENT)
def test_checkpointing_gives_the_same_gradients_from_less(family: str) -> None:
    case = first_case(family)
    assert isinstance(case.head, RecurrentHead)
    batch = pack(make_documents(case, 1))
    found = []
    for checkpointing in (False, True):
        case.head.checkpointing = checkpointing
        case.head.zero_grad()
        with kept_for_backward() as kept:
            loss = torch.stack([x.num for x in case.head.losses(batch, case.parts)]).sum()
        loss.backward()
        grads = {n: p.grad.clone() for n, p in case.head.named_parameters() if p.grad is not None}
        found.append((loss.detach(), grads, sum(kept.values())))
    (loss, grads, much), (again, others, little) = found
    assert torch.equal(loss, again)
    assert grads.keys() == others.keys()
    assert len(grads) == len(list(case.head.parameters()))
    for name, grad in grads.items():
        torch.testing.assert_close(others[name], grad, rtol=1e-12, atol=1e-12)
    assert little < 0.7 * much, f"{little} bytes kept with checkpointing, {much} without"
