"""Measure a head against plain decoding: same loop, process, dtype and prompts, interleaved, outputs checked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import DraftsmithError
from ..heads.base import DraftHead
from ..heads.target import Target
from ..progress import Progress, progress_bar
from .benchmarks import builtin_set
from .check import check_outputs
from .decoder.drafters import make_drafter
from .decoder.drafters.plain import PlainDrafter
from .decoder.loop import Request, Result, StepTimer, decode
from .decoder.types import Drafter
from .metrics import Timing, acceptance, tokens_per_second
from .report.content import Measured, build_report, timings
from .tune import PassCosts, Tuning, leaders, predict

REPORT_DEPTH = 4
"""tau and acceptance are always given at this K, too, so that heads can be compared."""
WARM_UPS = 2
ACCEPTANCE_SLOTS = 8
"""Sequences at once where only acceptance is asked for: it doesn't depend on the batch, and the passes are shared."""


@dataclass(frozen=True)
class EvalSettings:
    """What an evaluation decodes. K is chosen on the tuning prompts, figures come from the held-out ones."""

    prompts: int = 80
    max_new_tokens: int = 128
    tuning_prompts: int = 20
    tuning_new_tokens: int = 32
    timed_prompts: int = 4
    """Tuning prompts on which passes and leaders are timed, `timed_new_tokens` each."""
    timed_new_tokens: int = 20
    depths: list[int] = field(default_factory=lambda: [1, 2, 3, 4])

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if name != "depths" and value < 1:
                raise DraftsmithError(f"eval.{name} = {value} must be at least 1")
        d = self.depths
        if not d or sorted(set(d)) != d or d[0] < 1 or d[-1] > 16:
            raise DraftsmithError(f"eval.depths = {d} must be ascending depths between 1 and 16")


class Bench:
    """One target, one head, and the ways of decoding that an evaluation compares."""

    def __init__(self, target: Target, head: DraftHead) -> None:
        if head.config.target_fingerprint != target.fingerprint:
            raise DraftsmithError(
                f"the head was trained for another target: fingerprint {head.config.target_fingerprint[:8]} of "
                f"{head.config.target_id}, not {target.fingerprint[:8]} of {target.id}; train a head for this one"
            )
        self.target = target
        self.head = head
        self.drafters: dict[int, Drafter] = {0: PlainDrafter()}

    def decode(self, request: Request, depth: int, timer: StepTimer | None = None) -> Result:
        """Decode one request at batch 1; depth 0 is plain decoding."""
        (result,) = self.decode_all([request], depth, 1, timer)
        return result

    def decode_all(
        self, requests: Sequence[Request], depth: int, slots: int, timer: StepTimer | None = None
    ) -> Iterator[Result]:
        """Decode requests, `slots` at once, yielding results as they finish."""
        if depth not in self.drafters:
            self.drafters[depth] = make_drafter(self.head, self.target.embed, depth)
        capacity = max(len(r.tokens) + r.max_new_tokens for r in requests) + depth + 1
        yield from decode(self.target, self.drafters[depth], requests, slots=slots, capacity=capacity, timer=timer)

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


def evaluate(target: Target, head: DraftHead, settings: EvalSettings) -> dict[str, Any]:
    """Choose K on the tuning prompts, measure on the held-out ones, check outputs.

    Returns:
        The content of `report.json`; see `report.content.build_report`.
    """
    bench = Bench(target, head)
    room = target.max_positions - max(settings.depths[-1], REPORT_DEPTH) - 1
    tuning_set = builtin_set(
        "tuning", target.tokenizer, limit=settings.tuning_prompts, max_new_tokens=settings.tuning_new_tokens, room=room
    )
    held_out = builtin_set(
        "heldout", target.tokenizer, limit=settings.prompts, max_new_tokens=settings.max_new_tokens, room=room
    )
    timed = min(settings.timed_prompts, len(tuning_set.requests))
    total = 2 * WARM_UPS + len(tuning_set.requests) + timed * (len(settings.depths) + 4) + 4 * len(held_out.requests)
    with progress_bar("eval", total, "answers") as bar:
        tuning = tune(bench, tuning_set.requests, settings, bar)
        plain, fast = _interleaved(bench, held_out.requests, [0, tuning.depth], bar)
        deep = fast if tuning.depth == REPORT_DEPTH else _deep(bench, held_out.requests, bar)
        generated = []
        for request in held_out.requests:
            generated.append(bench.generate(request))
            bar.advance()
    check = check_outputs(target, plain, fast, tuning.depth + 1)
    measured = Measured(held_out, settings.max_new_tokens, plain, fast, deep, generated, check)
    return build_report(target, head.config, tuning, measured)


def tune(bench: Bench, requests: Sequence[Request], settings: EvalSettings, bar: Progress) -> Tuning:
    """Measure acceptance once at the deepest K and the cost of every pass, then time the two most promising K."""
    deepest = settings.depths[-1]
    timed = requests[: settings.timed_prompts]
    short = [dataclasses.replace(r, max_new_tokens=settings.timed_new_tokens) for r in timed]
    for depth in [0, deepest] * WARM_UPS:
        bench.decode(short[0], depth)
        bar.advance()
    logs = []
    for result in bench.decode_all(requests, deepest, ACCEPTANCE_SLOTS):
        logs.append(result.steps)
        bar.advance()
    shares = acceptance(logs)
    costs = measure_costs(bench, short, [0, *settings.depths], bar)
    predicted = predict(costs, shares.conditional, settings.depths)
    best = leaders(predicted)
    results = _interleaved(bench, short, [0, *best], bar)
    speeds = dict(zip([0, *best], [tokens_per_second(timings(r)) for r in results], strict=True))
    table = [
        {
            "depth": k,
            "predicted_tokens_per_s": predicted[k],
            "measured_tokens_per_s": speeds.get(k),
            "predicted_speedup": predicted[k] * costs.step(0),
            "measured_speedup": speeds[k] / speeds[0] if k in speeds and speeds[0] else None,
        }
        for k in settings.depths
    ]
    return Tuning(max(best, key=lambda k: speeds[k]), costs, shares, table, len(requests))


def measure_costs(bench: Bench, requests: Sequence[Request], depths: Sequence[int], bar: Progress) -> PassCosts:
    """Time the passes of target and head step by step; the depths take turns so that drift hits all alike."""
    timers: dict[int, list[StepTimer]] = {depth: [] for depth in depths}
    for i, request in enumerate(requests):
        for depth in depths if i % 2 == 0 else reversed(depths):
            timer = StepTimer()
            bench.decode(request, depth, timer)
            timers[depth] += [timer] if timer.steps else []
            bar.advance()
    costs = PassCosts()
    for depth, runs in timers.items():
        if not runs:
            raise DraftsmithError("every tuning answer ended with its first token: there is no step to time")
        costs.add(
            depth,
            [t.target / t.steps for t in runs],
            [t.draft / t.steps for t in runs],
            [(t.step - t.target - t.draft) / t.steps for t in runs],
        )
    return costs


def _interleaved(bench: Bench, requests: Sequence[Request], depths: Sequence[int], bar: Progress) -> list[list[Result]]:
    """Decode every request once at each depth, the order turned round from prompt to prompt (ABBA)."""
    results: dict[int, list[Result]] = {depth: [] for depth in depths}
    for i, request in enumerate(requests):
        for depth in depths if i % 2 == 0 else reversed(depths):
            results[depth].append(bench.decode(request, depth))
            bar.advance()
    return [results[depth] for depth in depths]


def _deep(bench: Bench, requests: Sequence[Request], bar: Progress) -> list[Result]:
    found = {}
    for result in bench.decode_all(requests, REPORT_DEPTH, ACCEPTANCE_SLOTS):
        found[result.id] = result
        bar.advance()
    return [found[r.id] for r in requests]
