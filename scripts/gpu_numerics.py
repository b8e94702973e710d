"""The kernels against formulas in fp64 and against their PyTorch twins, on whatever device they run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
from gpu_report import Report
from gpu_speed import Sizes, reason
from torch import Tensor

from draftsmith.eval.decoder import kernels
from draftsmith.eval.decoder.cache import TreeCache
from draftsmith.eval.decoder.kernels.tree_attention import tree_attention
from draftsmith.eval.decoder.sampling import Draws, Sampling, SlotSampling
from draftsmith.eval.decoder.types import Proposal, TokenTree, pack_ancestors, unpack_ancestors
from draftsmith.eval.decoder.verify import verify

# Largest error allowed, as a share of the largest number of the output's own row: outputs are rounded, and weights
# before they meet values; in fp32 it is scores of up to 20 that are rounded.
LIMITS = {torch.float32: 3e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
# Standard deviation of the scores: a row's weight lies on a few keys, so that a key that is lost shows in some row.
_PEAKED = 3.0
# Rows of which next to nothing is left (a sink takes the mass) count as of this share of the largest value.
_LEAST_ROW = 2**-10
_LOST = 32  # keys of the smallest block that a kernel reads


# --- attention --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One call of tree attention; `nodes` rows a sequence of which the first `earlier` are no queries."""

    dim: int
    heads: int
    kv_heads: int
    nodes: int
    lengths: tuple[int, ...]
    dim_v: int | None = None
    earlier: int = 0
    tree: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    splits: int | None = None

    def __str__(self) -> str:
        made = [f"D {self.dim}{f'/{self.dim_v}' if self.dim_v else ''}", f"heads {self.heads}/{self.kv_heads}"]
        made += [f"N {self.nodes - self.earlier}", "prefix " + ",".join(map(str, self.lengths))]
        named = {"earlier": self.earlier or None, "window": self.window, "softcap": self.softcap, "splits": self.splits}
        made += [f"{name} {value}" for name, value in named.items() if value is not None]
        return " ".join(made + ["sinks"] * self.sinks + ([] if self.tree else ["no tree"]))


# The first case of either is the one for mistakes: a long prefix first, none last.
FULL_CASES = (
    Case(128, 32, 8, 16, (4000, 3, 0)),
    Case(128, 32, 8, 64, (4033, 77)),
    Case(128, 32, 8, 1, (0, 1, 4000, 512, 31)),
    Case(128, 8, 1, 256, (2049, 0), splits=8),
    Case(128, 16, 8, 48, (700, 64), earlier=32),
    Case(128, 8, 8, 300, (600, 0), tree=False),
    Case(128, 32, 8, 7, (900, 20), tree=False, window=100),
    Case(64, 14, 2, 1, (0, 300)),
    Case(64, 64, 8, 16, (700, 90, 1), window=128, sinks=True),
    Case(64, 64, 8, 128, (1500,), sinks=True, splits=5),
    Case(64, 4, 2, 200, (0, 130), window=50),
    Case(80, 32, 32, 7, (5, 130)),
    Case(96, 32, 32, 33, (511, 512, 513), splits=3),
    Case(256, 8, 4, 64, (300, 17), window=64, softcap=50.0),
    Case(256, 16, 16, 2, (4000,), softcap=30.0, splits=16),
    Case(128, 16, 2, 20, (257, 40), dim_v=64),
)
TINY_CASES = (
    Case(64, 4, 2, 6, (70, 3, 0)),
    Case(80, 2, 2, 5, (9,), window=7, softcap=5.0, sinks=True, splits=2),
    Case(64, 2, 1, 9, (0, 40), tree=False),
)


def check_attention(report: Report, device: torch.device, sizes: Sizes) -> None:
    """Every case in every dtype: a line for each dtype, one for each case that is off, and one for each control."""
    cases = TINY_CASES if sizes.tiny else FULL_CASES
    jobs: list[tuple[Case, torch.dtype, torch.device, int, Mistake | None]] = []
    for dtype in LIMITS:
        jobs += [(case, dtype, device, seed, None) for seed, case in enumerate(cases)]
        jobs += [(cases[0], dtype, device, 0, mistake) for mistake in MISTAKES]
    if device.type == "cpu":
        found = [error_or_reason(*job) for job in jobs]
    else:  # nearly all of the time is compilation, most of all in fp32: on all cores at once
        context, workers = multiprocessing.get_context("spawn"), min(12, os.cpu_count() or 1)
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            found = list(pool.map(error_or_reason, *zip(*jobs, strict=True)))
    for dtype, limit in LIMITS.items():
        errors: list[tuple[float, str]] = []
        for (case, used, _, _, mistake), error in zip(jobs, found, strict=True):
            if used != dtype:
                continue
            what = f"{dtype_name(dtype)} {case}" if mistake is None else f"{dtype_name(dtype)} control: {mistake}"
            if mistake is not None and isinstance(error, float):
                result = f"off by {error:.2g}, limit {limit:.2g}: {'seen' if error > limit else 'NOT seen'}"
                report.check("attention", what, error > limit, result, error=error)
            elif isinstance(error, str):
                report.check("attention", what, False, error)
            elif not error <= limit:
                report.check("attention", what, False, f"off by {error:.2g}, limit {limit:.2g}")
            else:
                errors.append((error, str(case)))
        worst, place = max(errors, default=(0.0, "none"))
        what = f"{dtype_name(dtype)}, {len(errors)} of {len(cases)} cases"
        result = f"error up to {worst:.2g} of the row (limit {limit:.2g}): {place}"
        report.check("attention", what, len(errors) == len(cases), result, worst=worst, limit=limit)


@torch.inference_mode()
def error_or_reason(
    case: Case, dtype: torch.dtype, device: torch.device, seed: int, mistake: Mistake | None
) -> float | str:
    """`attention_error`, or what went wrong; runs in a process of its own on a GPU."""
    try:
        return attention_error(case, dtype, device, seed, mistake)
    except Exception as error:  # a compiler's or a driver's: the other cases go on
        return reason(error)


def attention_error(case: Case, dtype: torch.dtype, device: torch.device, seed: int, mistake: Mistake | None) -> float:
    """Largest difference from the formula in fp64, as a share of its row's largest number.

    Args:
        mistake: what the kernel, but not the formula, is handed wrongly.
    """
    g = torch.Generator(device).manual_seed(seed)
    b, new, dim_v = len(case.lengths), case.nodes - case.earlier, case.dim_v or case.dim
    slots = max(case.lengths) + case.nodes + 5
    lengths = torch.tensor(case.lengths, device=device)
    tree = random_tree(b, case.nodes, 100, g)
    depth = tree.depth if case.tree else torch.arange(case.nodes, device=device).expand(b, -1)
    bits = pack_ancestors(tree.parent, case.nodes)[:, case.earlier :] if case.tree else None
    q = _PEAKED * torch.randn(b, new, case.heads, case.dim, generator=g, device=device)
    q = q.to(dtype).transpose(1, 2)
    # two arenas' worth, so that views are strided; what must not be read is no number
    arena = torch.randn(2, b, case.kv_heads, slots + 11, case.dim + dim_v, generator=g, device=device).to(dtype)
    unused = torch.arange(slots + 11, device=device) >= (lengths + case.nodes)[:, None]
    arena.masked_fill_(unused[None, :, None, :, None], float("nan"))
    key, value = arena[1, ..., :slots, : case.dim], arena[1, ..., :slots, case.dim :]
    sinks = torch.randn(case.heads, generator=g, device=device).to(dtype) if case.sinks else None
    scale = case.dim**-0.5
    handed = (key, value, lengths, depth, bits)
    if mistake is not None and bits is not None:
        handed = MISTAKES[mistake](*handed[:3], depth, bits)
    got = tree_attention(
        q, *handed, earlier=case.earlier, scale=scale, window=case.window, softcap=case.softcap, sinks=sinks,
        splits=case.splits,
    )  # fmt: skip
    seen = None if bits is None else unpack_ancestors(bits, case.nodes)
    want = dense_attention(q, key, value, lengths, depth, seen, case, sinks)
    row = want.abs().amax(-1, keepdim=True).clamp(min=_LEAST_ROW * float(value.nan_to_num().abs().max()))
    return float(((got.double() - want).abs() / row).nan_to_num(nan=float("inf")).max())


Mistake = Literal["a lost block of keys", "a wrong ancestor bit"]
Handed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def lose_a_block(key: Tensor, value: Tensor, lengths: Tensor, depth: Tensor, bits: Tensor) -> Handed:
    """The first sequence's prefix without `_LOST` keys in its middle."""
    slot = torch.arange(key.shape[2] - _LOST, device=key.device)
    first = torch.arange(len(lengths), device=key.device)[:, None] == 0
    index = torch.where(first & (slot >= (lengths[:1] - _LOST) // 2), slot + _LOST, slot)[:, None, :, None]
    k, v = (x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in (key, value))
    return k, v, lengths - _LOST * first[:, 0], depth, bits


def hide_the_root(key: Tensor, value: Tensor, lengths: Tensor, depth: Tensor, bits: Tensor) -> Handed:
    """From the last node of the last sequence."""
    bits = bits.clone()
    bits[-1, -1, 0] ^= 1
    return key, value, lengths, depth, bits


MISTAKES: dict[Mistake, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Handed]] = {
    "a lost block of keys": lose_a_block,
    "a wrong ancestor bit": hide_the_root,
}


def dense_attention(
    q: Tensor, key: Tensor, value: Tensor, lengths: Tensor, depth: Tensor, seen: Tensor | None, case: Case,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """softmax(cap(q k / sqrt D)) v over visible keys in fp64, [B, N, H, Dv]; seen [B, N, T], None = all before."""
    total = depth.shape[1]
    slot = torch.arange(key.shape[2], device=q.device)
    behind = slot - lengths[:, None]  # [B, S]
    row = behind.clamp(0, total - 1)
    if seen is None:
        seen = torch.ones(total, total, dtype=torch.bool, device=q.device).tril()[case.earlier :].expand(len(q), -1, -1)
    among = seen.gather(2, row[:, None].expand(-1, seen.shape[1], -1)) & ((behind >= 0) & (behind < total))[:, None]
    visible = (behind < 0)[:, None] | among
    if case.window is not None:
        place = torch.where(behind < 0, slot, lengths[:, None] + depth.gather(1, row))
        mine = lengths[:, None] + depth[:, case.earlier :]
        visible = visible & (mine[..., None] - place[:, None] < case.window)
    group = q.shape[1] // key.shape[1]
    k, v = (x.double().nan_to_num().repeat_interleave(group, 1) for x in (key, value))
    scores = q.double() @ k.transpose(-1, -2) * case.dim**-0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    if sinks is not None:  # one more column, whose value is 0
        column = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


# --- verification -----------------------------------------------------------------------------------------------------


def check_verification(report: Report, device: torch.device, sizes: Sizes) -> None:
    """Greedy, sample-and-match and the ratio test, against `verify` without the kernels.

    The kernels add up in another order than torch: a draw that falls between two sums may differ, one in about a
    million.
    """
    rules = {
        "greedy": Sampling(),
        "sampled": Sampling(temperature=0.9, seed=3),
        "top-k, top-p": Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=4),
        "penalty": Sampling(temperature=1.1, repetition_penalty=1.2, seed=5),
    }
    for vocab, b, nodes in sizes.verified:
        for rule, sampling in rules.items():
            for drawn in (False, True) if sampling.temperature else (False,):
                law = "ratio test" if drawn else "greedy" if not sampling.temperature else "match"
                what = f"{law}, {rule}, V {vocab}, B {b}, N {nodes}"
                with report.section("verification", what):
                    tree, logits, draws = verification_case(vocab, b, nodes, sampling, drawn, device)
                    got = verify(tree, logits, draws)
                    with twins():
                        want = verify(tree, logits, draws)
                    same = (got.path == want.path).all(1) & (got.n_accepted == want.n_accepted)
                    wrong = int((~same | (got.bonus != want.bonus)).sum())
                    accepted = float(want.n_accepted.double().mean())
                    result = f"{wrong} of {b} differ from the twin; {accepted:.2f} accepted on average"
                    report.check("verification", what, wrong <= b // 1000 and accepted > 0.1, result, wrong=wrong)


def verification_case(
    vocab: int, b: int, nodes: int, sampling: Sampling, drawn: bool, device: torch.device
) -> tuple[TokenTree, Tensor, Draws]:
    """A random tree whose tokens are likely for the target, and the target's logits [B, N, V] in bf16."""
    g = torch.Generator(device).manual_seed(vocab + nodes)
    tree = random_tree(b, nodes, vocab, g)
    logits = torch.randn(b, nodes, vocab, generator=g, device=device)
    logits.scatter_add_(2, torch.randint(0, vocab, (b, nodes, 3), generator=g, device=device),
                        torch.full((b, nodes, 3), 12.0, device=device))  # fmt: skip
    q = torch.softmax(logits + torch.randn(logits.shape, generator=g, device=device), -1)
    # the r-th child of a node carries the r-th token of a draw without replacement
    order = torch.multinomial(q.flatten(0, 1), 4, generator=g).view(b, nodes, 4)
    if not drawn:
        order = torch.cat((logits.argmax(-1, keepdim=True), order), -1)[..., :4]
    above = tree.parent.clamp(min=0)
    elder = (tree.parent[:, :, None] == tree.parent[:, None]) & torch.ones(
        nodes, nodes, dtype=torch.bool, device=device
    ).tril(-1)
    rank = elder.sum(-1)
    tokens = order.gather(1, above[..., None].expand(-1, -1, 4)).gather(2, rank.clamp(max=3)[..., None])[..., 0]
    root = tree.parent < 0
    tree.tokens = torch.where(root, tree.tokens, tokens)
    tree.valid = root | (rank < 4)
    if drawn:
        row = torch.arange(nodes, device=device).expand(b, -1)
        tree.proposal = Proposal(q, row, ~root, None, 4)
    slots = SlotSampling(b, vocab, device)
    for i in range(b):
        slots.begin(i, f"sequence {i}", sampling, tree.tokens[i, :1])
    return tree, logits.bfloat16(), slots.draws(0, b, torch.arange(b, device=device) + 7)


# --- compaction -------------------------------------------------------------------------------------------------------


def check_compaction(report: Report, device: torch.device, sizes: Sizes) -> None:
    """`TreeCache.keep` with and without the kernel: kept rows equal bit for bit, other rows before them untouched."""
    layers, capacity = (2, 64) if sizes.tiny else (36, 2048)
    for dtype in LIMITS:
        with report.section("compaction", dtype_name(dtype)):
            g = torch.Generator(device).manual_seed(2)
            shapes = [(8, 128, 128)] * layers + [(2, 80, 64)] * 2
            caches = [TreeCache(shapes, 3, capacity, device, dtype) for _ in range(2)]
            path = torch.rand(2, 24, generator=g, device=device).argsort(1)[:, :6].sort(1).values
            path[:, 0] = 0
            n_rows = torch.tensor([6, 3], device=device)
            for x, y in zip(caches[0].arenas, caches[1].arenas, strict=True):
                for one, other in zip(x, y, strict=True):
                    one.copy_(torch.randn(one.shape, generator=g, device=device))
                    other.copy_(one)
            for cache in caches:
                cache.lengths[:] = torch.tensor([17, capacity - 30, 5], device=device)
                cache.host_lengths = [17, capacity - 30, 5]
            caches[0].keep(2, path, n_rows, [6, 3])
            caches[1].kernels = False
            caches[1].keep(2, path, n_rows, [6, 3])
            same = all(
                torch.equal(one[:, slot, :, :n], other[:, slot, :, :n])
                for x, y in zip(caches[0].arenas, caches[1].arenas, strict=True)
                for one, other in zip(x, y, strict=True)
                for slot, n in enumerate(caches[0].host_lengths)
            )
            result = "kept rows equal the twin's" if same else "kept rows differ from the twin's"
            report.check("compaction", dtype_name(dtype), same, result)


# --- shared -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def twins() -> Iterator[None]:
    """Leave the kernels unused for a while."""
    usable = kernels.usable
    kernels.usable = lambda device: False
    try:
        yield
    finally:
        kernels.usable = usable


def random_tree(b: int, nodes: int, vocab: int, g: torch.Generator) -> TokenTree:
    """Trees of which each node hangs below one of the five before it."""
    device = g.device
    parent = torch.full((b, nodes), -1, dtype=torch.int64, device=device)
    depth = torch.zeros_like(parent)
    for i in range(1, nodes):
        parent[:, i] = torch.randint(max(0, i - 5), i, (b,), generator=g, device=device)
        depth[:, i] = depth.gather(1, parent[:, i : i + 1])[:, 0] + 1
    tokens = torch.randint(0, vocab, (b, nodes), generator=g, device=device)
    valid = torch.ones_like(parent, dtype=torch.bool)
    return TokenTree(tokens, parent, depth, valid, int(depth.max()), False)


def dtype_name(dtype: torch.dtype) -> str:
    """As people say it."""
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
