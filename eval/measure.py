"""A target, a head, and the ways of decoding that are compared: in turns, so that drift hits all alike."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..heads.base import DraftHead
from ..heads.target import Target
from .decoder.drafters import make_drafter
from .decoder.drafters.network import prepare_head
from .decoder.drafters.plain import PlainDrafter
from .decoder.loop import Request, Result, decode, rows_needed
from .decoder.search import Chain, Shape
from .decoder.types import Drafter
from .metrics import Timing
from .ranks import RankWatch
from .tune import PLAIN

WARM_UPS, WARM_UP_TOKENS = 2, 20


@dataclass
class _FirstToken:
    """Seconds from when the loop takes a request to when its first token is known."""

    taken: float = 0.0
    seconds: float | None = None

    def giving(self, request: Request) -> Iterator[Request]:
        """The request, noting when the loop asks for it."""
        self.taken = time.perf_counter()
        yield request

    def __call__(self, name: str, tokens: list[int]) -> None:
        """What the loop calls after each step."""
        if self.seconds is None:
            self.seconds = time.perf_counter() - self.taken


class Bench:
    """One target, one head, and the ways of decoding that an evaluation compares.

    Args:
        trees: by their text; a way to decode is PLAIN or one of these.

    Attributes:
        first_token: seconds from when the loop took the request that `decode` was given last to its first token.
        decoding: seconds spent inside the loop by all calls of `decode`.
    """

    def __init__(self, target: Target, head: DraftHead, trees: Mapping[str, Shape]) -> None:
        target.check_head(head.config)
        self.target, self.trees, self.parts = target, trees, target.parts()
        self.head, self.ready = head, prepare_head(head, self.parts)
        self.drafters: dict[str, Drafter] = {PLAIN: PlainDrafter()}
        self.watches: dict[str, RankWatch] = {}
        self.warm = False
        self.first_token = self.decoding = 0.0

    def drafter(self, way: str) -> Drafter:
        """The drafter of a way to decode, made when it is first asked for; all share the head."""
        if way not in self.drafters:
            self.drafters[way] = make_drafter(self.head, self.parts, self.trees[way], self.ready)
        return self.drafters[way]

    def watched(self, way: str) -> Drafter:
        """The same for one sequence at a time, noting the ranks of what is accepted from a tree that is no chain."""
        if isinstance(self.trees.get(way), None | Chain):
            return self.drafter(way)
        if way not in self.watches:
            self.watches[way] = RankWatch(self.drafter(way))
        return self.watches[way]

    def decode(self, request: Request, way: str) -> Result:
        """Decode one request at batch 1."""
        drafter, first = self.watched(way), _FirstToken()
        capacity, started = rows_needed([request], drafter), time.perf_counter()
        (result,) = decode(self.target, drafter, first.giving(request), slots=1, capacity=capacity, on_token=first)
        self.decoding += time.perf_counter() - started
        self.first_token = first.seconds or 0.0
        return result

    def decode_all(self, requests: Sequence[Request], way: str, slots: int) -> Iterator[Result]:
        """Decode requests, `slots` at once, yielding results as they finish."""
        drafter = self.drafter(way)
        yield from decode(self.target, drafter, requests, slots=slots, capacity=rows_needed(requests, drafter))

    def ranks(self, way: str, result: Result) -> list[list[int]]:
        """Steps by depth and rank of the accepted node, [D][R], of what `decode` gave last in this way."""
        if way in self.watches:
            return self.watches[way].counts()
        deepest = max((s.accepted for s in result.steps), default=0)
        return [[sum(s.accepted > depth for s in result.steps)] for depth in range(deepest)]

    def draw(self, request: Request, way: str) -> dict[str, Any] | None:
        """One tree that is drafted for the request, with its accepted path; see `RankWatch.drawn`."""
        watch = RankWatch(self.drafter(way))
        short = dataclasses.replace(request, max_new_tokens=min(request.max_new_tokens, WARM_UP_TOKENS))
        list(decode(self.target, watch, [short], slots=1, capacity=rows_needed([short], watch)))
        return watch.drawn(self.target.tokenizer, request.id)

    def warm_up(self, request: Request, way: str) -> None:
        """Decode a few times unmeasured, plainly and in this way: a process's first passes are slow. Once only."""
        if not self.warm:
            short = dataclasses.replace(request, max_new_tokens=min(request.max_new_tokens, WARM_UP_TOKENS))
            for one in [PLAIN, way] * WARM_UPS:
                self.decode(short, one)
        self.warm = True

    @torch.inference_mode()
    def generate(self, request: Request) -> Timing:
        """Time `transformers.generate`, prefill included: what a user of the library gets."""
        ids = torch.tensor([request.tokens], device=self.target.device)
        model: Any = self.target.model
        self._synchronise()
        started = time.perf_counter()
        with self.target.attention():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.max_new_tokens,
                do_sample=False,
                pad_token_id=self.target.eos_ids[0],
            )
        self._synchronise()
        return Timing(out.shape[1] - ids.shape[1], time.perf_counter() - started)

    def _synchronise(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)


@dataclass
class Lap:
    """The wall time since it was started or read last, and how much of it the loop took.

    The rest is what measuring costs: counting ranks, writing the journal, rendering the next turn.
    """

    bench: Bench
    started: float = 0.0
    decoding: float = 0.0

    def start(self) -> None:
        """Begin anew."""
        self.started, self.decoding = time.perf_counter(), self.bench.decoding

    def read(self) -> dict[str, float]:
        """Seconds {wall, decoding}; begins anew."""
        now = time.perf_counter()
        spent = {"wall": now - self.started, "decoding": self.bench.decoding - self.decoding}
        self.started, self.decoding = now, self.bench.decoding
        return spent


def order(ways: Sequence[str], i: int) -> list[str]:
    """Who goes when for prompt number `i`: the order is turned round from prompt to prompt (ABBA)."""
    return list(ways if i % 2 == 0 else reversed(ways))
