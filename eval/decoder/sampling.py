"""Sampling: one `warp` for baseline, drafter and verifier, and random numbers that don't depend on the batch."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import DraftsmithError

_STRETCH = 256
# Which draw at a position a random number is for. Every decision about a position uses each of them at most once:
# a token that was drafted but never reached leaves its numbers unread, so that drawing them again is exact.
TOKEN, ACCEPT, DRAFT = 0, 1, 1 << 16


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one answer are chosen.

    Attributes:
        temperature: 0 = greedy.
        top_k: keep the k most likely tokens (equals of the last one, too); 0 = all.
        top_p: keep the most likely tokens until their mass reaches it (equals of the last one, too); 1 = all.
        min_p: keep tokens at least so likely as min_p x the likeliest; 0 = all.
        repetition_penalty: logits of tokens in the prompt or answer are divided by it if positive, else multiplied.
        seed: of the answer; with the request's id and the position it decides every draw.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def check(self, vocab_size: int) -> None:
        """Refuse values that mean nothing.

        Raises:
            DraftsmithError: names the value and its range.
        """
        rules = (
            ("temperature", 0 <= self.temperature < math.inf, "at least 0 (0 = greedy) and finite"),
            ("top_k", 0 <= self.top_k <= vocab_size, f"between 0 (= all) and the vocabulary of {vocab_size}"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0 (1 = none) and finite"),
            ("seed", -(2**63) <= self.seed < 2**63, "a whole number of 64 bits"),
        )
        for name, fits, range_ in rules:
            if not fits:
                raise DraftsmithError(f"{name} = {getattr(self, name)} must be {range_}")


GREEDY = Sampling()


@dataclass(frozen=True)
class Warp:
    """The parameters of B sequences, [B] tensors, and which of them do anything (known to the host)."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor
    most_k: int  # the largest top_k if every sequence has one, else 0
    uses_k: bool
    uses_p: bool
    uses_min_p: bool
    uses_penalty: bool


def warp(logits: Tensor, w: Warp, seen: Tensor | None = None) -> Tensor:
    """Probabilities, fp32 [B, M, V], of logits [B, M, V] (V may be a draft vocabulary).

    In transformers' order: repetition penalty, temperature, top-k, top-p, min-p. Temperature 0 puts all mass on the
    largest logit (of equals the lowest id).

    Args:
        seen: bool, broadcastable to [B, M, V]: tokens of the prompt and answer so far; needed with a penalty.
    """
    x = penalise(logits, w, seen)
    t = w.temperature[:, None, None]
    best = largest(x)[1][..., None]
    greedy = torch.zeros_like(x).scatter_(-1, best, 1.0)
    # differences to the largest: a tiny temperature then makes -inf, never inf - inf
    x = (x - x.amax(-1, keepdim=True)) / torch.where(t > 0, t, 1.0)
    if w.uses_k or w.uses_p:
        x = _truncate(x, w)
    if w.uses_min_p:
        limit = x.gather(-1, best) + torch.log(w.min_p)[:, None, None]  # log 0 = -inf keeps everything
        x = x.masked_fill(x < limit, float("-inf"))
    return torch.where(t > 0, torch.softmax(x, -1), greedy)


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """What `x.max(-1)` gives, the first of equals, for long rows [..., V].

    On a CPU, looking for the place of the maximum costs ten times as much as the maximum: only one stretch of the row
    is searched.
    """
    whole = x.shape[-1] // _STRETCH
    if x.device.type != "cpu" or whole < 16:
        values, index = x.max(-1)
        return values, index
    tops = x[..., : whole * _STRETCH].unflatten(-1, (whole, _STRETCH)).amax(-1)
    if x.shape[-1] % _STRETCH:
        tops = torch.cat((tops, x[..., whole * _STRETCH :].amax(-1, keepdim=True)), -1)
    values, stretch = tops.max(-1)
    first = stretch * _STRETCH
    # past the end the last element is repeated: never the first of equals
    at = (first[..., None] + torch.arange(_STRETCH, device=x.device)).clamp(max=x.shape[-1] - 1)
    return values, first + x.gather(-1, at).argmax(-1)


def penalise(logits: Tensor, w: Warp, seen: Tensor | None) -> Tensor:
    """Logits in fp32 after the repetition penalty."""
    x = logits.float()
    if not w.uses_penalty or seen is None:
        return x
    penalty = w.penalty[:, None, None]
    return torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)


def _truncate(x: Tensor, w: Warp) -> Tensor:
    """Top-k, then top-p of what is left; -inf elsewhere."""
    size = x.shape[-1]
    most = min(w.most_k, size) or size
    ordered = x.topk(most, -1).values
    if w.uses_k:
        k = torch.where(w.top_k > 0, w.top_k, size).clamp(max=most)[:, None, None]
        last = ordered.gather(-1, (k - 1).expand(*x.shape[:-1], 1))
        x = x.masked_fill(x < last, float("-inf"))
        ordered = ordered.masked_fill(ordered < last, float("-inf"))
    if w.uses_p:
        # shares of all that is left, equals of the k-th that lie beyond `ordered` included: they depend on no neighbour
        p = torch.exp(ordered - x.logsumexp(-1, keepdim=True))
        top_p = w.top_p[:, None, None]
        dropped = (p.cumsum(-1) - p >= top_p) & (top_p < 1)
        x = x.masked_fill(x < ordered.masked_fill(dropped, float("inf")).amin(-1, keepdim=True), float("-inf"))
    return x


def draw(p: Tensor, u: Tensor) -> Tensor:
    """Token [...] with probabilities proportional to p [..., V] by inverse distribution function of u [...] in [0, 1).

    Sums run in fp64, so that no token of a large vocabulary is lost; a token of probability 0 is never drawn.
    """
    sums = p.double().cumsum(-1)
    total = sums[..., -1:]
    at = torch.minimum(u[..., None].double() * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, at, right=True)[..., 0].clamp(max=p.shape[-1] - 1)


def sequence_key(name: str) -> int:
    """63-bit key of a request id."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def uniform(seeds: Tensor, keys: Tensor, positions: Tensor, number: int | Tensor) -> Tensor:
    """Uniform numbers in [0, 1), fp64, a pure function of (seed, sequence, position, draw).

    Args:
        seeds, keys: [B] int64; positions: [B, ...] int64; number: which draw at that position, or several that
            broadcast with positions.
    """
    shape = (-1, *[1] * (positions.ndim - 1))
    h = _mix(seeds.view(shape))
    h = _mix(h ^ keys.view(shape))
    h = _mix(h ^ positions)
    h = _mix(h ^ number)
    return _shift(h, 11).double() * 2.0**-53


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix(x: Tensor) -> Tensor:
    """One round of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64 bits whose output bits all depend on all."""
    x = x + -7046029254386353131
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


@dataclass(frozen=True)
class Draws:
    """What a step of B sequences needs to choose tokens; a view of `SlotSampling`.

    Attributes:
        warp: parameters of the sequences.
        roots: [B] position of each tree's root; a node at depth d stands at roots + d.
        seen: [B, V] bool, tokens of prompt and answer, the root included; None where no sequence has a penalty.
        greedy: every sequence takes its largest logit, nothing is penalised.
        mixed: some sequences sample and some are greedy.
    """

    warp: Warp
    seeds: Tensor
    keys: Tensor
    roots: Tensor
    seen: Tensor | None
    greedy: bool
    mixed: bool

    def probabilities(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Warped probabilities [B, M, V] of logits [B, M, V]; see `warp`."""
        return warp(logits, self.warp, seen)

    def uniform(self, depth: int | Tensor, number: int | Tensor) -> Tensor:
        """Numbers for tokens at `depth` below the roots: [B] for an int, else the shape of depth [B, ...]."""
        if isinstance(depth, int):
            return uniform(self.seeds, self.keys, self.roots + depth, number)
        roots = self.roots.view(-1, *[1] * (depth.ndim - 1))
        return uniform(self.seeds, self.keys, roots + depth, number)


class SlotSampling:
    """Sampling parameters of a loop's slots, kept on the device."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.settings: list[Sampling] = [GREEDY] * slots
        self.temperature, self.min_p = torch.zeros(slots, device=device), torch.zeros(slots, device=device)
        self.top_p, self.penalty = torch.ones(slots, device=device), torch.ones(slots, device=device)
        self.top_k = torch.zeros(slots, dtype=torch.int64, device=device)
        self.seeds, self.keys = torch.zeros_like(self.top_k), torch.zeros_like(self.top_k)
        self.seen: Tensor | None = None

    def begin(self, slot: int, name: str, sampling: Sampling, tokens: Tensor) -> None:
        """Take the parameters of a new sequence whose prompt is tokens [n]."""
        sampling.check(self.vocab_size)
        self.settings[slot] = sampling
        self.temperature[slot], self.top_k[slot], self.top_p[slot] = (
            sampling.temperature, sampling.top_k, sampling.top_p,
        )  # fmt: skip
        self.min_p[slot], self.penalty[slot] = sampling.min_p, sampling.repetition_penalty
        self.seeds[slot], self.keys[slot] = sampling.seed, sequence_key(name)
        if sampling.repetition_penalty != 1.0 and self.seen is None:
            shape = (len(self.settings), self.vocab_size)
            self.seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        if self.seen is not None:
            self.seen[slot] = False
            self.seen[slot, tokens] = True

    def extend(self, first: int, tokens: Tensor) -> None:
        """Note emitted tokens [B, P] of the slots from `first` on; repeats do no harm."""
        if self.seen is not None:
            self.seen[first : first + len(tokens)].scatter_(1, tokens, True)

    def release(self, slot: int, last: int) -> None:
        """The sequence in slot `last` moves to `slot`."""
        self.settings[slot] = self.settings[last]
        everything = (self.temperature, self.top_k, self.top_p, self.min_p, self.penalty, self.seeds, self.keys)
        for x in (*everything, *([self.seen] if self.seen is not None else [])):
            x[slot] = x[last]

    def draws(self, first: int, count: int, roots: Tensor) -> Draws:
        """View of the slots first..first+count-1, whose roots stand at positions [count]."""
        s = slice(first, first + count)
        some = self.settings[s]
        penalised = any(x.repetition_penalty != 1.0 for x in some)
        sampled = [x.temperature > 0 for x in some]
        w = Warp(
            self.temperature[s], self.top_k[s], self.top_p[s], self.min_p[s], self.penalty[s],
            most_k=max(x.top_k for x in some) if all(x.top_k for x in some) else 0,
            uses_k=any(x.top_k for x in some),
            uses_p=any(x.top_p < 1 for x in some),
            uses_min_p=any(x.min_p > 0 for x in some),
            uses_penalty=penalised,
        )  # fmt: skip
        seen = self.seen[s] if self.seen is not None and penalised else None
        greedy = not penalised and not any(sampled)
        return Draws(w, self.seeds[s], self.keys[s], roots, seen, greedy, any(sampled) and not all(sampled))
