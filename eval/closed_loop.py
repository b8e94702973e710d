"""Requests decoded so many at a time, each taken as another finishes: plain and with a head, in turns."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..heads.target import Target
from .check import OutputCheck, check_outputs
from .decoder.drafters.plain import PlainDrafter
from .decoder.loop import Request, Result, StepTimer, decode, rows_needed
from .decoder.types import Drafter
from .journal import Journal, result_from_dict, result_to_dict
from .metrics import Timing, acceptance, speedup, tau_interval, timings, tokens_per_second
from .report.content import SAMPLED
from .tune import PLAIN

SPECULATIVE = "speculative"
WAYS = (PLAIN, SPECULATIVE)
ROUNDS = 2
"""Everything is decoded so often in each way, the second time in the other order (ABBA): drift hits both alike."""
WARM_UP_TOKENS = 12
"""Of the answers that are decoded unmeasured first, and of those that passes are timed on: first passes are slow."""


@dataclass(frozen=True)
class Served:
    """What came of requests.

    Attributes:
        results: in the order of the requests.
        first_token, latency: seconds of each from when the loop took it to its first and to its last token.
        seconds: wall time of all, prefill included.
        steps: of the loop; one step advances every running sequence.
    """

    results: list[Result]
    first_token: list[float]
    latency: list[float]
    seconds: float
    steps: int

    @property
    def running(self) -> float:
        """Mean number of sequences in a step; 0 without any."""
        return sum(len(r.steps) for r in self.results) / self.steps if self.steps else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**vars(self), "results": [result_to_dict(r) for r in self.results]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Served:
        """Undo `to_dict`."""
        return cls(**{**values, "results": [result_from_dict(r) for r in values["results"]]})


class _Clock:
    """Notes when the loop takes requests and gives their tokens; what `decode` calls."""

    def __init__(self) -> None:
        self.taken: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.steps = 0
        self._told: set[str] = set()  # in the step that is going on

    def handing(self, requests: Sequence[Request]) -> Iterator[Request]:
        """The requests, one by one as the loop asks for them."""
        for request in requests:
            self.taken[request.id] = time.perf_counter()
            yield request

    def __call__(self, name: str, tokens: list[int]) -> None:
        """A sequence's new tokens. In a step each running one is told of once; new ones come between two steps."""
        self.last[name] = time.perf_counter()
        if name not in self.first:
            self.first[name] = self.last[name]
            self._told.clear()
        elif not self._told or name in self._told:
            self.steps += 1
            self._told = {name}
        else:
            self._told.add(name)


class Ways:
    """Plain decoding and decoding with a drafter, of one target.

    Args:
        drafter: of the head.
    """

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self.target = target
        self.drafters: dict[str, Drafter] = {PLAIN: PlainDrafter(), SPECULATIVE: drafter}

    @property
    def drafter(self) -> Drafter:
        """Of the head."""
        return self.drafters[SPECULATIVE]

    @property
    def context(self) -> int:
        """Most tokens that prompt and answer may have together."""
        return min(self.target.max_positions, self.drafter.context or self.target.max_positions)

    def serve(
        self,
        way: str,
        requests: Sequence[Request],
        slots: int,
        advance: Callable[[], None] = lambda: None,
        timer: StepTimer | None = None,
    ) -> Served:
        """Decode requests, `slots` at a time, in their order.

        Args:
            advance: called as each one finishes.
            timer: filled with where the time of the steps went.
        """
        drafter, clock, slots = self.drafters[way], _Clock(), min(slots, len(requests))
        capacity = rows_needed(requests, drafter)
        found: dict[str, Result] = {}
        started = time.perf_counter()
        for result in decode(
            self.target, drafter, clock.handing(requests), slots=slots, capacity=capacity, timer=timer, on_token=clock
        ):
            found[result.id] = result
            advance()
        seconds = time.perf_counter() - started
        names = [r.id for r in requests]
        return Served(
            [found[name] for name in names],
            [clock.first[name] - clock.taken[name] for name in names],
            [clock.last[name] - clock.taken[name] for name in names],
            seconds,
            clock.steps,
        )

    def passes(self, requests: Sequence[Request], slots: int) -> dict[str, float]:
        """Warm up, then time a step's passes on short answers, in turns.

        Returns:
            Seconds of a step's target pass, {PLAIN, SPECULATIVE}, and of the head's passes, "draft"; 0 without a step.
        """
        short = [dataclasses.replace(r, max_new_tokens=min(r.max_new_tokens, WARM_UP_TOKENS)) for r in requests[:slots]]
        for way in WAYS:
            self.serve(way, short, slots)
        timers = {way: StepTimer() for way in WAYS}
        for way in WAYS:
            self.serve(way, short, slots, timer=timers[way])
        found = {way: t.target / t.steps if t.steps else 0.0 for way, t in timers.items()}
        fast = timers[SPECULATIVE]
        return {**found, "draft": fast.draft / fast.steps if fast.steps else 0.0}

    def rounds(
        self, key: str, requests: Sequence[Request], slots: int, journal: Journal, advance: Callable[[], None]
    ) -> list[dict[str, Served]]:
        """Decode the requests ROUNDS times in each way; both of a round always in one process.

        Args:
            key: of the journal, in which each round is put when it is finished.
        """
        found = []
        for i in range(ROUNDS):
            stored = journal.get(name := round_key(key, i))
            if stored is None:
                served = {w: self.serve(w, requests, slots, advance) for w in (WAYS if i % 2 == 0 else WAYS[::-1])}
                journal.put(name, {way: served[way].to_dict() for way in WAYS})
            else:
                served = {way: Served.from_dict(stored[way]) for way in WAYS}
            found.append(served)
        return found


def round_key(key: str, i: int) -> str:
    """Of the journal: round number `i` of what is measured under `key`."""
    return f"{key}, round {i + 1}"


@dataclass(frozen=True)
class Matched:
    """All rounds of one measurement, with what they are compared by.

    Attributes:
        rounds: served requests by way, each with the same requests in the same order.
        groups: number of the prompt of each request: copies of one prompt count as one where intervals are made.
        passes: what `Ways.passes` gave.
        check: see `check_greedy`.
    """

    rounds: Sequence[Mapping[str, Served]]
    groups: Sequence[int]
    passes: Mapping[str, float]
    check: OutputCheck

    def results(self, way: str) -> list[Result]:
        """Of all rounds."""
        return [result for served in self.rounds for result in served[way].results]

    def logs(self) -> list[list[Any]]:
        """Steps of the first round's speculative answers, by prompt."""
        found: list[list[Any]] = [[] for _ in range(max(self.groups) + 1)]
        for group, result in zip(self.groups, self.rounds[0][SPECULATIVE].results, strict=True):
            found[group] += result.steps
        return found

    def timings(self, way: str) -> list[Timing]:
        """Tokens and seconds of the steps of all rounds, by prompt."""
        sums = [[0.0, 0.0] for _ in range(max(self.groups) + 1)]
        for served in self.rounds:
            for group, timing in zip(self.groups, timings(served[way].results), strict=True):
                sums[group][0] += timing.tokens
                sums[group][1] += timing.seconds
        return [Timing(int(tokens), seconds) for tokens, seconds in sums]

    def figures(self) -> dict[str, Any]:
        """What batches and replays have in common.

        Returns:
            tau (0 where every answer ended with its first token), tau_ci, alpha, acceptance_conditional, tokens_per_s
            and baseline_tokens_per_s (of decoding steps, all running sequences together), speedup and speedup_ci (None
            unless the outputs are right and there are steps), output_check, flag, running (mean sequences in a step,
            by way), passes.
        """
        logs = self.logs()
        shares = acceptance(logs)
        plain, fast = self.timings(PLAIN), self.timings(SPECULATIVE)
        ratio, interval = speedup(plain, fast)
        ceiling = self._ceiling(shares.tau)
        trusted = self.check.passed and shares.steps > 0
        flag = None
        if trusted and ceiling is not None and interval[0] > ceiling:
            flag = f"the speed-up's lower bound {interval[0]:.2f} is above τ·c(1)/min c(N) = {ceiling:.2f}"
        return {
            "tau": shares.tau,
            "tau_ci": list(tau_interval(logs)),
            "alpha": shares.alpha,
            "acceptance_conditional": shares.conditional,
            "tokens_per_s": tokens_per_second(fast),
            "baseline_tokens_per_s": tokens_per_second(plain),
            "speedup": ratio if trusted else None,
            "speedup_ci": list(interval) if trusted else None,
            "output_check": self.check.verdict,
            "flag": flag,
            "running": {way: sum(served[way].running for served in self.rounds) / len(self.rounds) for way in WAYS},
            "passes": dict(self.passes),
        }

    def _ceiling(self, tau: float) -> float | None:
        """The most that the speed-up can honestly be at this batch; None where no pass was timed."""
        plain, fast = self.passes[PLAIN], self.passes[SPECULATIVE]
        return tau * plain / min(plain, fast) if plain and fast else None

    def answers(self) -> list[dict[str, Any]]:
        """Raw logs: tokens and seconds of each request's steps, plain and speculative, with the latter's steps."""
        return [
            {
                "id": fast.id,
                "round": number,
                PLAIN: {"tokens": sum(s.emitted for s in plain.steps), "seconds": plain.seconds},
                SPECULATIVE: {
                    "seconds": fast.seconds,
                    "steps": [[s.drafted, s.accepted, s.emitted] for s in fast.steps],
                },
            }
            for number, served in enumerate(self.rounds, 1)
            for plain, fast in zip(served[PLAIN].results, served[SPECULATIVE].results, strict=True)
        ]


def check_greedy(ways: Ways, requests: Sequence[Request], rounds: Sequence[Mapping[str, Served]]) -> OutputCheck:
    """Compare every round's greedy answers with plain decoding's; the verdict that is worst.

    Sampled answers follow the target's law, and differ from plain decoding's token by token.
    """
    greedy = [i for i, request in enumerate(requests) if request.sampling.temperature == 0]
    if not greedy:
        return OutputCheck(True, SAMPLED, None, None, [])
    checks = []
    for served in rounds:
        plain, fast = ([served[way].results[i] for i in greedy] for way in WAYS)
        checks.append(check_outputs(ways.target, plain, fast, ways.drafter.rows))
    worst = max(checks, key=lambda check: (not check.passed, len(check.differences)))
    if len(greedy) == len(requests):
        return worst
    more = len(requests) - len(greedy)
    return dataclasses.replace(worst, verdict=f"{worst.verdict}; {more} request{'s' * (more > 1)} {SAMPLED}")
