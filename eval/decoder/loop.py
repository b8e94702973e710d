"""One loop for every scheme: prefill, draft, one target pass, verify, commit; requests come in as others finish."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...errors import DraftsmithError
from ...heads.base import Needs
from ...heads.target import Target, join_states
from .cache import TreeCache
from .prefill import Prefill
from .probe import forward_with_cache, kv_shapes
from .types import Drafter, clock
from .verify import verify_greedy


@dataclass(frozen=True)
class Request:
    """A prompt to continue: `tokens` (rendered, special tokens included) by at most `max_new_tokens`."""

    id: str
    tokens: list[int]
    max_new_tokens: int


@dataclass(frozen=True)
class StepLog:
    """One step of one sequence: deepest drafted depth, accepted drafts before and emitted tokens after cutting."""

    drafted: int
    accepted: int
    emitted: int


@dataclass
class Result:
    """A finished answer.

    Attributes:
        tokens: the answer, cut at the first end-of-text token (which is kept) and at max_new_tokens.
        finish: "eos" or "length".
        steps: one entry a step; the prefill and the token that it gave are not among them.
        seconds: wall time of the steps, shared equally by the sequences that ran in them.
        states: [len(prompt) + len(tokens) - 1, (A+1)*H] bf16 on the CPU where the drafter records them.
    """

    id: str
    prompt: list[int]
    tokens: list[int]
    finish: str
    steps: list[StepLog]
    seconds: float
    states: Tensor | None = None


@dataclass
class StepTimer:
    """Seconds spent in the target's forward, in the drafter's network, and in whole steps."""

    target: float = 0.0
    draft: float = 0.0
    step: float = 0.0
    steps: int = 0


@dataclass
class _Running:
    request: Request
    tokens: list[int]
    steps: list[StepLog] = field(default_factory=list)
    seconds: float = 0.0


def decode(
    target: Target,
    drafter: Drafter,
    requests: Iterable[Request],
    *,
    slots: int,
    capacity: int,
    timer: StepTimer | None = None,
    on_token: Callable[[str, list[int]], None] | None = None,
) -> Iterator[Result]:
    """Decode requests greedily, at most `slots` at a time, and yield results as they finish.

    Args:
        capacity: rows a sequence may need: prompt + new tokens + the drafter's depth + 1.
        timer: filled with where the time went.
        on_token: called with (request id, newly emitted tokens) after each step.

    Raises:
        DraftsmithError: an empty prompt, one that doesn't fit the target's context or `capacity`.
    """
    session = _Session(target, drafter, slots, capacity, timer, on_token)
    with target.capture(drafter.needs) as states:
        session.watch(states)
        waiting = iter(requests)
        more = True
        while True:
            while more and len(session.running) < slots:
                request = next(waiting, None)
                more = request is not None
                if request is not None:
                    yield from session.admit(request)
            if not session.running:
                return
            yield from session.step()


class _Session:
    """The state of one `decode` call."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        slots: int,
        capacity: int,
        timer: StepTimer | None,
        on_token: Callable[[str, list[int]], None] | None,
    ) -> None:
        self.target, self.drafter, self.on_token = target, drafter, on_token
        self.timer = timer or StepTimer()
        drafter.timed = timer is not None
        self.capacity = capacity
        self.cache = TreeCache(kv_shapes(target), slots + 1, capacity, target.device, target.dtype)
        self.roots = torch.zeros(slots, dtype=torch.int64, device=target.device)
        self.running: list[_Running] = []
        self.states: dict[int, Tensor] = {}
        self.stop = frozenset(target.eos_ids)
        drafter.allocate(slots, self.cache.capacity)

    def watch(self, states: dict[int, Tensor]) -> None:
        """Take the dict that the target's hooks fill at each forward."""
        self.states = states
        self.prefill = Prefill(self.target, self.cache, self.drafter.needs, states, spare=len(self.roots))

    # These return lists: a mode entered inside a generator would stay on in the caller between two results.

    @torch.inference_mode()
    def admit(self, request: Request) -> list[Result]:
        """Prefill a request into the next free slot; its result at once when the first token ends it."""
        self._check(request)
        slot = len(self.running)
        self.cache.clear(slot)
        first, aux, last = self.prefill.run(slot, request.tokens)
        self.roots[slot] = first
        tokens = torch.tensor([*request.tokens, first], device=self.target.device)
        self.drafter.begin(slot, tokens, aux, last)
        run = _Running(request, [first])
        self.running.append(run)
        if self.on_token:
            self.on_token(request.id, [first])
        return [self._finish(slot)] if first in self.stop or request.max_new_tokens == 1 else []

    @torch.inference_mode()
    def step(self) -> list[Result]:
        """Draft, verify and commit one step of all running sequences; the results of those that finish."""
        b = len(self.running)
        before, draft_before = self._now(), self.drafter.seconds
        tree = self.drafter.propose(self.roots[:b])
        with self.cache.step(0, b, tree.depth, tree.ancestors()) as context:
            started = self._now()
            logits = forward_with_cache(self.target, tree.tokens, context.positions, self.cache)
            self.timer.target += self._now() - started
        verdict = verify_greedy(tree, logits)
        emitted = torch.cat(
            (tree.tokens.gather(1, verdict.path), verdict.n_accepted[:, None], verdict.bonus[:, None]), 1
        )
        host = emitted.tolist()  # the step's one synchronisation
        rows = [line[-2] + 1 for line in host]
        deepest = max(rows)
        verdict.path = verdict.path[:, :deepest]
        path = None if tree.is_chain else verdict.path
        self.cache.keep(b, path, verdict.n_accepted + 1, rows)
        self.drafter.commit(tree, verdict, *self._join(), self.cache.host_lengths[:b])
        self.roots[:b] = verdict.bonus
        seconds = self._now() - before
        self.timer.step += seconds
        self.timer.draft += self.drafter.seconds - draft_before
        self.timer.steps += 1
        drafted = [tree.deepest] * b if tree.is_chain else (tree.depth * tree.valid).amax(1).tolist()
        finished = []
        for i, run in enumerate(self.running):
            new = [*host[i][1 : rows[i]], host[i][-1]]
            run.seconds += seconds / b
            if self._emit(run, new, drafted[i], rows[i] - 1):
                finished.append(i)
        # from the end, so that a moved sequence is never one that still has to go
        return [self._finish(slot) for slot in reversed(finished)]

    def _now(self) -> float:
        return clock(self.target.device, self.drafter.timed)

    def _emit(self, run: _Running, new: list[int], drafted: int, accepted: int) -> bool:
        """Append new tokens up to the first stop token or the limit; say whether the answer is complete."""
        room = run.request.max_new_tokens - len(run.tokens)
        kept = new[:room]
        for i, token in enumerate(kept):
            if token in self.stop:
                kept = kept[: i + 1]
                break
        run.tokens += kept
        run.steps.append(StepLog(drafted, accepted, len(kept)))
        if self.on_token:
            self.on_token(run.request.id, kept)
        return run.tokens[-1] in self.stop or len(run.tokens) >= run.request.max_new_tokens

    def _finish(self, slot: int) -> Result:
        run, end = self.running[slot], len(self.running) - 1
        states = self.drafter.recorded(slot, len(run.request.tokens) + len(run.tokens) - 1)
        finish = "eos" if run.tokens[-1] in self.stop else "length"
        if slot != end:
            self.cache.copy(end, slot, self.cache.host_lengths[end])
            self.roots[slot] = self.roots[end]
            self.running[slot] = self.running[end]
        self.drafter.release(slot, end)
        self.running.pop()
        self.cache.clear(end)
        return Result(run.request.id, run.request.tokens, run.tokens, finish, run.steps, run.seconds, states)

    def _join(self) -> tuple[Tensor, Tensor | None]:
        needs: Needs = self.drafter.needs
        if not self.states:
            return torch.empty(len(self.roots), 1, 0, device=self.target.device), None
        return join_states(self.states, needs, self.target.n_layers)

    def _check(self, request: Request) -> None:
        need = len(request.tokens) + request.max_new_tokens
        if not request.tokens:
            raise DraftsmithError(f"request {request.id!r} has an empty prompt")
        if request.max_new_tokens < 1:
            raise DraftsmithError(f"request {request.id!r}: max_new_tokens {request.max_new_tokens} must be at least 1")
        if need > self.target.max_positions:
            raise DraftsmithError(
                f"request {request.id!r}: prompt {len(request.tokens)} + new {request.max_new_tokens} tokens exceed "
                f"the target's context of {self.target.max_positions}; shorten one of them"
            )
        if need + self.drafter.depth + 1 > self.capacity:
            raise DraftsmithError(
                f"request {request.id!r} needs {need + self.drafter.depth + 1} cache rows, "
                f"the loop was given {self.capacity}"
            )
