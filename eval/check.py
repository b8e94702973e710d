"""Are the speculative outputs the target's own? Equal, or different only where the target itself is undecided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..heads.target import Target
from .decoder.cache import TreeCache
from .decoder.loop import Result
from .decoder.probe import forward_with_cache, kv_shapes

NOISE_FACTOR = 4.0
"""A tie is a gap of at most this many times the measured noise: two logits, each off by it, both ways."""


@dataclass(frozen=True)
class Difference:
    """The first token at which a speculative answer leaves the plain one.

    Attributes:
        id: the prompt's id.
        index: position in the answer, from 0.
        plain: plain decoding's token there, None where that answer had ended.
        other: the speculative one's, None likewise.
        gap: highest fp32 logit there minus the lower of the two tokens'; infinite where one answer had ended.
    """

    id: str
    index: int
    plain: int | None
    other: int | None
    gap: float


@dataclass(frozen=True)
class OutputCheck:
    """Outcome of comparing all answers.

    Attributes:
        passed: whether every difference is a tie within `bound`.
        verdict: `identical`, `ties: n within bound b`, `FAILED ...`, or `lossy ...` where there is nothing to compare.
        bound: NOISE_FACTOR times `noise`; None where nothing differed.
        noise: what `pass_noise` measured; None likewise.
    """

    passed: bool
    verdict: str
    bound: float | None
    noise: float | None
    differences: list[Difference]


def check_outputs(target: Target, plain: Sequence[Result], other: Sequence[Result], rows: int) -> OutputCheck:
    """Compare greedy answers to the same prompts, in the same order.

    Args:
        target: the model both were decoded with.
        plain: results of plain decoding.
        other: results of speculative decoding with passes of `rows` rows.
    """
    if any(r.lossy for r in other):
        return OutputCheck(
            False, "lossy: typical acceptance changes what the target says; not compared", None, None, []
        )
    pairs = [(p, first_difference(p.tokens, o.tokens)) for p, o in zip(plain, other, strict=True)]
    found = [(p, i) for p, i in pairs if i is not None]
    if not found:
        return OutputCheck(True, "identical", None, None, [])
    noise = pass_noise(target, [[*p.prompt, *p.tokens] for p in plain[:4]], rows)
    bound = NOISE_FACTOR * noise
    by_id = {o.id: o for o in other}
    exact = _in_fp32(target)
    differences = [_rescore(exact, p, by_id[p.id], i) for p, i in found]
    worst = max(differences, key=lambda d: d.gap)
    if worst.gap <= bound:
        return OutputCheck(True, f"ties: {len(found)} within bound {bound:.3g}", bound, noise, differences)
    verdict = f"FAILED: {worst.id} differs at answer token {worst.index}, gap {worst.gap:.3g} above bound {bound:.3g}"
    return OutputCheck(False, verdict, bound, noise, differences)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first position at which two answers differ, a missing token included; None where equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


@torch.inference_mode()
def pass_noise(target: Target, sequences: Sequence[Sequence[int]], rows: int) -> float:
    """Largest difference of a logit between passes of one row, of `rows` rows and of all, over equal text.

    Args:
        sequences: prompt and answer ids; each gives up to 8 blocks of `rows` positions from its end.
    """
    worst = 0.0
    for tokens in sequences:
        blocks = min(8, (len(tokens) - 1) // rows)
        start = len(tokens) - blocks * rows
        ids = torch.tensor([list(tokens)], device=target.device)
        single, block = _Prefix(target, ids, start), _Prefix(target, ids, start)
        with target.attention():
            whole = target.model(input_ids=ids, use_cache=False, logits_to_keep=blocks * rows).logits[0].float()
        for at in range(0, blocks * rows, rows):
            alone = torch.cat([single.advance(1) for _ in range(rows)])
            for other in (block.advance(rows), whole[at : at + rows]):
                worst = max(worst, float((other - alone).abs().max()))
    return worst


class _Prefix:
    """A sequence that goes through the loop's own cache and attention, some rows at a time."""

    def __init__(self, target: Target, ids: Tensor, start: int) -> None:
        self.target, self.ids, self.at = target, ids, 0
        self.cache = TreeCache(kv_shapes(target), 1, ids.shape[1], target.device, target.dtype)
        self.advance(start)

    def advance(self, rows: int) -> Tensor:
        """Run the next `rows` tokens and return their logits [rows, V] in fp32."""
        depth = torch.arange(rows, device=self.target.device)[None]
        with self.cache.step(0, 1, depth, None) as context:
            part = self.ids[:, self.at : self.at + rows]
            logits = forward_with_cache(self.target, part, context.positions, self.cache)
        self.cache.advance(0, rows)
        self.at += rows
        return logits[0].float()


def _in_fp32(target: Target) -> Target:
    """The target itself, or a second copy in fp32: on the CPU where the device has no room for it."""
    if target.dtype == torch.float32:
        return target

    def load(device: str) -> Target:
        return Target.load(
            target.id, revision=target.revision, dtype=torch.float32, device=device, adapter=target.adapter
        )

    try:
        return load(str(target.device))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return load("cpu")


@torch.inference_mode()
def _rescore(exact: Target, plain: Result, other: Result, index: int) -> Difference:
    pair = [r.tokens[index] if index < len(r.tokens) else None for r in (plain, other)]
    if pair[0] is None or pair[1] is None:
        return Difference(plain.id, index, pair[0], pair[1], float("inf"))
    ids = torch.tensor([[*plain.prompt, *plain.tokens[:index]]], device=exact.device)
    with exact.attention():
        logits = exact.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    gap = float(logits.max() - logits[pair].min())
    return Difference(plain.id, index, pair[0], pair[1], gap)
