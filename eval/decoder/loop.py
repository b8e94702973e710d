"""One loop for every scheme: prefill, draft, one target pass, verify, commit; requests come in as others finish."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...errors import DraftsmithError
from ...heads.base import Needs
from ...heads.target import Target, join_states
from .cache import TreeCache
from .graphs import CapturedPass
from .prefill import Prefill
from .probe import kv_shapes, tree_pass
from .sampling import GREEDY, Sampling, SlotSampling, largest
from .transfer import upload
from .types import Drafter, HostStep, TokenTree, Verdict, chain, clock
from .verify import Typical, verify

# With that many slots or more, requests are admitted when at least one in so many is free.
_SLOTS_PER_FREE = 16


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        id: its name; with the seed it decides the draws, whatever runs beside it.
        tokens: rendered, special tokens included.
        max_new_tokens: most tokens of the answer.
        sampling: how tokens are chosen.
        stop: token ids that end the answer; None = the target's own.
    """

    id: str
    tokens: list[int]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    stop: frozenset[int] | None = None


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
        tokens: the answer, cut at the first stop token (which is kept) and at max_new_tokens.
        finish: "eos" or "length".
        steps: one entry a step; the prefill and the token that it gave are not among them.
        seconds: wall time of the steps, shared equally by the sequences that ran in them.
        lossy: drafts were accepted by a rule that changes what the target would say (typical acceptance).
        states: [len(prompt) + len(tokens) - 1, (A+1)*H] bf16 on the CPU where the drafter records them.
    """

    id: str
    prompt: list[int]
    tokens: list[int]
    finish: str
    steps: list[StepLog]
    seconds: float
    lossy: bool = False
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
    stop: frozenset[int]
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
    typical: Typical | None = None,
    graphs: bool = False,
) -> Iterator[Result]:
    """Decode requests, at most `slots` at a time, and yield results as they finish.

    Args:
        requests: an iterator is asked for as many as there are free slots, and waited for. A list for many slots may
            be taken in another order: prompts of equal length are read together.
        capacity: rows a sequence may need: prompt + new tokens + the drafter's `rows`; see `rows_needed`.
        timer: filled with where the time went.
        on_token: called with (request id, newly emitted tokens) after each step.
        typical: accept drafts that are merely typical of the target (lossy) instead of by its exact law.
        graphs: replay the target's passes as CUDA graphs (`graphs.py`). Off: it has not been run on a GPU yet, and
            stays so until `scripts/gpu_check.py`, its only user, has measured it.

    Raises:
        DraftsmithError: an empty prompt, one that doesn't fit the target's context or `capacity`, sampling values out
            of range, logits that are not numbers, graphs without the kernels. It ends the call; results that were
            yielded stay good.
    """
    steps = decode_steps(
        target, drafter, requests, slots=slots, capacity=capacity, timer=timer, on_token=on_token, typical=typical,
        graphs=graphs,
    )  # fmt: skip
    with contextlib.closing(steps):  # a caller who stops early leaves no hook behind
        for finished in steps:
            yield from finished


def decode_steps(
    target: Target,
    drafter: Drafter,
    requests: Iterable[Request],
    *,
    slots: int,
    capacity: int,
    timer: StepTimer | None = None,
    on_token: Callable[[str, list[int]], None] | None = None,
    typical: Typical | None = None,
    graphs: bool = False,
) -> Generator[list[Result], None, None]:
    """The same for a caller who does something else between the steps: yields what is finished after each of them.

    It yields after prompts were read, too, without a step (`timer.steps` tells): their first tokens may end answers.
    """
    session = _Session(target, drafter, slots, capacity, timer, on_token, typical, graphs)
    if isinstance(requests, Sequence):  # a mistake in one is said before work on the others starts
        for request in requests:
            session.check(request)
    with target.capture(drafter.needs) as states:
        session.watch(states)
        many = isinstance(requests, Sequence) and slots >= _SLOTS_PER_FREE
        waiting = iter(sorted(requests, key=lambda r: len(r.tokens)) if many else requests)
        more = True
        while True:
            while more and session.has_room():
                new = list(itertools.islice(waiting, slots - len(session.running)))
                more = len(new) == slots - len(session.running)
                yield session.admit(new)
            if not session.running:
                return
            yield session.step()


def rows_needed(requests: Iterable[Request], drafter: Drafter) -> int:
    """The least `capacity` with which these requests can be decoded."""
    return max((len(r.tokens) + r.max_new_tokens for r in requests), default=0) + drafter.rows


class _Session:
    """The state of one `decode` call."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        slots: int,
        capacity: int,
        timer: StepTimer | None = None,
        on_token: Callable[[str, list[int]], None] | None = None,
        typical: Typical | None = None,
        graphs: bool = False,
    ) -> None:
        if slots < 1:
            raise DraftsmithError(f"slots = {slots}: at least one sequence must run")
        self.target, self.drafter, self.on_token, self.typical = target, drafter, on_token, typical
        self.timer = timer or StepTimer()
        drafter.timed = timer is not None
        self.capacity = capacity
        rows = min(capacity, target.max_positions + drafter.rows)  # more can't be used: such requests are refused
        self.cache = TreeCache(kv_shapes(target), slots, rows, target.device, target.dtype)
        self.roots = torch.zeros(slots, dtype=torch.int64, device=target.device)
        self.sampling = SlotSampling(slots, target.vocab_size, target.device)
        self.running: list[_Running] = []
        self.captured = CapturedPass(target, self.cache) if graphs else None
        self.watch({})
        drafter.allocate(slots, self.cache.capacity)

    def watch(self, states: dict[int, Tensor]) -> None:
        """Take the dict that the target's hooks fill at each forward."""
        self.states = states
        self.prefill = Prefill(self.target, self.cache, self.drafter.needs, states)

    # These return lists: a mode entered inside a generator would stay on in the caller between two results.

    def has_room(self) -> bool:
        """Whether to admit requests now: prompts that are read together cost less, and few free slots cost little."""
        free = len(self.roots) - len(self.running)
        return not self.running or free >= max(1, len(self.roots) // _SLOTS_PER_FREE)

    @torch.inference_mode()
    def admit(self, requests: list[Request]) -> list[Result]:
        """Prefill requests into the next free slots; the results of those that their first token ends."""
        for request in requests:
            self.check(request)
        requests = sorted(requests, key=lambda r: len(r.tokens))  # prompts of equal length are read together
        first, count = len(self.running), len(requests)
        if not count:
            return []
        for slot in range(first, first + count):
            self.cache.clear(slot)
        filled = self.prefill.run(first, [r.tokens for r in requests])
        prompts = [upload(r.tokens, self.target.device) for r in requests]
        for i, request in enumerate(requests):
            self.sampling.begin(first + i, request.id, request.sampling, prompts[i])
        # the first token is the bonus of a tree whose root is the prompt's last token
        draws = self.sampling.draws(first, count, self.cache.lengths[first : first + count] - 1)
        ends = chain(torch.stack([p[-1:] for p in prompts]))
        verdict = verify(ends, torch.stack([f.logits for f in filled]), draws)
        tokens, finite = torch.stack((verdict.bonus, verdict.finite.long())).tolist()
        self.roots[first : first + count] = verdict.bonus
        self.sampling.extend(first, verdict.bonus[:, None])
        for i, request in enumerate(requests):
            if not finite[i]:
                raise DraftsmithError(_not_finite(request.id, "its prompt"))
            self.drafter.begin(first + i, torch.cat((prompts[i], verdict.bonus[i : i + 1])), filled[i].aux,
                               filled[i].last)  # fmt: skip
            stop = frozenset(self.target.eos_ids) if request.stop is None else request.stop
            self.running.append(_Running(request, stop, [tokens[i]]))
            self._tell(request.id, [tokens[i]])
        ended = [i for i in range(count) if self._is_complete(self.running[first + i])]
        return [self._finish(first + i) for i in reversed(ended)]

    @torch.inference_mode()
    def step(self) -> list[Result]:
        """Draft, verify and commit one step of all running sequences; the results of those that finish."""
        b = len(self.running)
        before, draft_before = self._now(), self.drafter.seconds
        tree, logits, verdict = self._draft_and_verify(b)
        host = self._fetch(tree, logits, verdict)  # the step's one synchronisation
        rows = [line.accepted + 1 for line in host]
        verdict.path = verdict.path[:, : max(rows)]
        self.cache.keep(b, None if tree.is_chain else verdict.path, verdict.n_accepted + 1, rows)
        self.sampling.extend(0, torch.cat((tree.tokens.gather(1, verdict.path), verdict.bonus[:, None]), 1))
        self.roots[:b] = verdict.bonus
        choice = [line.choice for line in host] if self.drafter.wants_choice else None
        known = HostStep(self.cache.host_lengths[:b], [line.emitted for line in host], choice)
        self.drafter.commit(tree, verdict, *self._join(), known)
        seconds = self._now() - before
        self.timer.step += seconds
        self.timer.draft += self.drafter.seconds - draft_before
        self.timer.steps += 1
        finished = []
        for i, (run, line) in enumerate(zip(self.running, host, strict=True)):
            run.seconds += seconds / b
            if self._emit(run, line):
                finished.append(i)
        # from the end, so that a moved sequence is never one that still has to go
        return [self._finish(slot) for slot in reversed(finished)]

    def _draft_and_verify(self, b: int) -> tuple[TokenTree, Tensor, Verdict]:
        """The part of a step that is queued on the device without waiting for it."""
        draws = self.sampling.draws(0, b, self.cache.lengths[:b])
        tree = self.drafter.propose(self.roots[:b], draws)
        ancestors = tree.ancestors()
        started = self._now()
        if self.captured is None:
            logits = tree_pass(self.target, self.cache, tree.tokens, tree.depth, ancestors)
        else:
            logits = self.captured.run(tree.tokens, tree.depth, ancestors, self.states)
        self.timer.target += self._now() - started
        return tree, logits, verify(tree, logits, draws, self.typical)

    def _fetch(self, tree: TokenTree, logits: Tensor, verdict: Verdict) -> list[_Line]:
        """Bring what the host must know of a step over in one piece."""
        columns = [
            tree.tokens.gather(1, verdict.path),
            verdict.bonus[:, None],
            verdict.n_accepted[:, None],
            verdict.finite[:, None].long(),
            (tree.depth * tree.valid).amax(1, keepdim=True),
        ]
        if self.drafter.wants_choice:
            columns.append(largest(logits)[1] if verdict.choice is None else verdict.choice)
        p = verdict.path.shape[1]
        lines = []
        for run, row in zip(self.running, torch.cat(columns, 1).tolist(), strict=True):
            bonus, accepted, finite, drafted = row[p : p + 4]
            if not finite:
                raise DraftsmithError(_not_finite(run.request.id, f"step {len(run.steps) + 1}"))
            lines.append(_Line([*row[1 : accepted + 1], bonus], accepted, drafted, row[p + 4 :]))
        return lines

    def _now(self) -> float:
        return clock(self.target.device, self.drafter.timed)

    def _emit(self, run: _Running, line: _Line) -> bool:
        """Append new tokens up to the first stop token or the limit; say whether the answer is complete."""
        kept = line.emitted[: run.request.max_new_tokens - len(run.tokens)]
        for i, token in enumerate(kept):
            if token in run.stop:
                kept = kept[: i + 1]
                break
        run.tokens += kept
        run.steps.append(StepLog(line.drafted, line.accepted, len(kept)))
        self._tell(run.request.id, kept)
        return self._is_complete(run)

    def _tell(self, name: str, tokens: list[int]) -> None:
        if self.on_token:
            with torch.inference_mode(False):  # the caller's function, in the caller's mode
                self.on_token(name, tokens)

    @staticmethod
    def _is_complete(run: _Running) -> bool:
        return run.tokens[-1] in run.stop or len(run.tokens) >= run.request.max_new_tokens

    def _finish(self, slot: int) -> Result:
        run, end = self.running[slot], len(self.running) - 1
        states = self.drafter.recorded(slot, len(run.request.tokens) + len(run.tokens) - 1)
        finish = "eos" if run.tokens[-1] in run.stop else "length"
        if slot != end:
            self.cache.copy(end, slot, self.cache.host_lengths[end])
            self.prefill.moved(end, slot)
            self.roots[slot] = self.roots[end]
            self.running[slot] = self.running[end]
        self.sampling.release(slot, end)
        self.drafter.release(slot, end)
        self.running.pop()
        self.cache.clear(end)
        lossy = self.typical is not None and run.request.sampling.temperature > 0
        return Result(run.request.id, run.request.tokens, run.tokens, finish, run.steps, run.seconds, lossy, states)

    def _join(self) -> tuple[Tensor, Tensor | None]:
        needs: Needs = self.drafter.needs
        if not self.states:
            return torch.empty(len(self.roots), 1, 0, device=self.target.device), None
        return join_states(self.states, needs, self.target.n_layers)

    def check(self, request: Request) -> None:
        """Refuse a request that can't be decoded; raises DraftsmithError."""
        name, prompt, new = f"request {request.id!r}", len(request.tokens), request.max_new_tokens
        if not request.tokens:
            raise DraftsmithError(f"{name} has an empty prompt")
        if new < 1:
            raise DraftsmithError(f"{name}: max_new_tokens {new} must be at least 1")
        if not 0 <= min(request.tokens) <= max(request.tokens) < self.target.vocab_size:
            raise DraftsmithError(f"{name} holds token ids outside the vocabulary of {self.target.vocab_size}")
        request.sampling.check(self.target.vocab_size)
        context, reason, whose = self.target.max_positions, self.target.context_reason, "the target's"
        if self.drafter.context is not None and self.drafter.context < context:
            context, reason, whose = self.drafter.context, "", "the draft model's"
        if prompt + new > context:
            raise DraftsmithError(
                f"{name}: prompt {prompt} + new {new} tokens exceed {whose} context of {context}{reason}: "
                f"with {new} new tokens a prompt may have {max(0, context - new)}"
            )
        need = prompt + new + self.drafter.rows
        if need > self.capacity:
            raise DraftsmithError(f"{name} needs {need} cache rows, the loop was given {self.capacity}")


@dataclass(frozen=True)
class _Line:
    """What the host learns of one sequence's step."""

    emitted: list[int]
    accepted: int
    drafted: int
    choice: list[int]


def _not_finite(name: str, where: str) -> str:
    return (
        f"request {name!r}, {where}: the target's logits are not finite (NaN or infinite); "
        "its weights or the dtype it runs in can't represent them"
    )
