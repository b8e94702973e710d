"""Training steps against the matrix products that they can't do without, and where the rest of a step goes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..heads import alignment
from ..heads.base import Batch, DraftHead
from ..heads.config import LayerConfig
from ..heads.losses import loss_rows_per_chunk
from ..progress import progress_bar
from .bench_work import take_steps, timed, upcoming
from .fit import Trainer


class Product(NamedTuple):
    """A linear map of [rows, inputs] to [rows, outputs]: which of its three products a step needs.

    Attributes:
        forward: x @ W.T; by_input: g @ W, the gradient of x; by_weight: g.T @ x, that of W.
    """

    rows: int
    inputs: int
    outputs: int
    forward: bool = True
    by_input: bool = True
    by_weight: bool = True

    @property
    def flops(self) -> int:
        """Operations of those products."""
        return 2 * self.rows * self.inputs * self.outputs * (self.forward + self.by_input + self.by_weight)


class RowCounts(NamedTuple):
    """Rows of a batch.

    Attributes:
        total: T; supervised: R, those that run through all unrolled steps.
        taught: rows of the teacher that anyone learns from.
        in_loss: by step, those that learn.
    """

    total: int
    supervised: int
    taught: int
    in_loss: tuple[int, ...]

    @classmethod
    def of(cls, head: DraftHead, batch: Batch) -> Self:
        """Count them; see `heads/alignment.py`."""
        supervised, taught, in_loss = head.supervised_rows(batch), [], []
        for s, counted in enumerate(supervised):
            rows = counted.nonzero().flatten()
            learns = rows[head.draft_ids[batch.tokens[alignment.label_index(rows, s)]] >= 0]
            taught.append(alignment.teacher_index(learns, s))
            in_loss.append(len(learns))
        return cls(len(batch.tokens), int(supervised[0].sum()), len(torch.unique(torch.cat(taught))), tuple(in_loss))


def eagle3_products(config: LayerConfig, rows: RowCounts) -> list[Product]:
    """All products of an EAGLE-3 head's step but those of attention and of the optimizer.

    As the head runs them: it makes step 0's queries of all T rows, though only supervised ones attend (1 % of all
    operations), and the gradient by the embedding's half of what a layer reads, though embeddings are frozen (2 %).
    Features and the teacher get no gradient. Logits are made in chunks, as the losses make them.
    """
    c, h = config, config.hidden_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    found = [Product(rows.total, len(c.layer_ids) * h, h, by_input=False)]
    for s in range(c.steps):
        runs = rows.supervised if s else rows.total
        found += [Product(runs, 2 * h, width) for width in (q, kv, kv)]
        finish = ((q, h), (h, c.intermediate_size), (h, c.intermediate_size), (c.intermediate_size, h))
        found += [Product(rows.supervised, *widths) for widths in finish]
    vocabulary = c.draft_vocab_size
    found += [Product(n, h, vocabulary, by_input=False, by_weight=False) for n in _chunks(rows.taught, vocabulary)]
    return found + [Product(n, h, vocabulary) for learning in rows.in_loss for n in _chunks(learning, vocabulary)]


def _chunks(rows: int, vocabulary: int) -> list[int]:
    size = loss_rows_per_chunk(vocabulary, "cpu")
    return [min(size, rows - start) for start in range(0, rows, size)]


class _Operands(NamedTuple):
    x: Tensor
    w: Tensor
    g: Tensor
    y: Tensor
    dx: Tensor
    dw: Tensor


class BareProducts:
    """Products on memory of their own, which is there before they run; equal ones share it."""

    def __init__(self, products: Sequence[Product], dtype: torch.dtype) -> None:
        self.products = products
        self._operands = {p: _operands(p, dtype) for p in products}

    @torch.no_grad()
    def run(self) -> None:
        """Compute all of them, one by one."""
        for p in self.products:
            o = self._operands[p]
            if p.forward:
                torch.mm(o.x, o.w.t(), out=o.y)
            if p.by_input:
                torch.mm(o.g, o.w, out=o.dx)
            if p.by_weight:
                torch.mm(o.g.t(), o.x, out=o.dw)


def _operands(p: Product, dtype: torch.dtype) -> _Operands:
    x, w, g = (p.rows, p.inputs), (p.outputs, p.inputs), (p.rows, p.outputs)
    # ones, as memory that was never written isn't there yet
    return _Operands(*(torch.randn(s).to(dtype) for s in (x, w, g)), *(torch.ones(s, dtype=dtype) for s in (g, x, w)))


def roofline_share(trainer: Trainer, rounds: int, profiled: int) -> dict[str, Any]:
    """Tokens/s of steps over those of their products alone, by round, in turns on the same batches.

    Args:
        trainer: of one rank and one batch a step.
        rounds: behind one that isn't counted. profiled: steps behind those for `where`.

    Returns:
        median, low, high; tokens_per_s, counterpart_tokens_per_s; gflops, of the products alone; where: see `where`.
    """
    config, dtype = trainer.head.config, trainer.step_module.dtype
    assert isinstance(config, LayerConfig)
    seconds: dict[str, list[float]] = {"step": [], "products": []}
    tokens, flops = [], []
    with progress_bar("bench roofline", rounds + 1, "rounds") as bar:
        for number in range(rounds + 1):
            rows = RowCounts.of(trainer.head, upcoming(trainer, 1)[0])
            bare = BareProducts(eagle3_products(config, rows), dtype)
            works: dict[str, Callable[[], object]] = {"step": lambda: take_steps(trainer), "products": bare.run}
            taken = {name: timed(works[name]) for name in list(works)[:: 1 if number % 2 else -1]}
            if number:
                tokens.append(rows.total)
                flops.append(sum(p.flops for p in bare.products))
                for name, value in taken.items():
                    seconds[name].append(value)
            bar.advance()
    shares = [bare / step for bare, step in zip(seconds["products"], seconds["step"], strict=True)]
    rates = {name: [n / x for n, x in zip(tokens, found, strict=True)] for name, found in seconds.items()}
    return {
        "median": statistics.median(shares), "low": min(shares), "high": max(shares),
        "tokens_per_s": statistics.median(rates["step"]),
        "counterpart_tokens_per_s": statistics.median(rates["products"]),
        "gflops": statistics.median(n / x / 1e9 for n, x in zip(flops, seconds["products"], strict=True)),
        "where": where(lambda: take_steps(trainer, profiled)),
    }  # fmt: skip


# By what stands above an operation in torch's profile: the losses' and attention's own autograd functions, and the
# optimizer's step. Of each, the share of its matrix products and of all else.
_OWNERS = {"_Mixture": "losses", "_Attention": "attention", "Optimizer.step": "optimizer"}
_OTHERS = "network"
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")
OUTSIDE = "outside of torch's operations"


def where(work: Callable[[], object]) -> dict[str, float]:
    """Shares of a call's time by part of the training step, from torch's profiler; they add up to 1."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        taken = timed(work)
    found: dict[str, float] = defaultdict(float)
    for event in profile.events():
        kind = "products" if event.name in _PRODUCTS else "the rest"
        found[f"{_owner(event)}: {kind}"] += event.self_cpu_time_total / 1e6 / taken
    found = {name: found[name] for name in sorted(found, key=lambda name: -found[name])}
    return {**found, OUTSIDE: 1 - sum(found.values())}


def _owner(event: Any) -> str:
    at = event
    while at is not None:
        for fragment, owner in _OWNERS.items():
            if fragment in at.name:
                return owner
        at = at.cpu_parent
    return _OTHERS
