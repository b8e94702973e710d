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
from .decoder.loop import Request, Result, StepTimer, decode, rows_needed
from .decoder.search import Chain
from .decoder.types import Drafter
from .journal import Journal, result_from_dict, result_to_dict, tuning_from_dict, tuning_to_dict
from .metrics import Timing, acceptance, tokens_per_second
from .report.content import Measured, build_report, timings
from .tune import PassCosts, Tuning, leaders, predict

REPORT_DEPTH = 4
"""tau and acceptance are always given at this K, too, so that heads can be compared."""
WARM_UPS, WARM_UP_TOKENS = 2, 20
ACCEPTANCE_SLOTS = 8
"""Sequences at once where only acceptance is asked for: it doesn't depend on the batch, and the passes are shared."""
TUNING, PAIR, DEEP, GENERATE = "tuning", "pair", "deep", "generate"
"""Keys of the journal; the last three with a held-out prompt's id behind them."""


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
        target.check_head(head.config)
        self.target = target
        self.head = head
        self.drafters: dict[int, Drafter] = {0: PlainDrafter()}
        self.warm = False

    def decode(self, request: Request, depth: int, timer: StepTimer | None = None) -> Result:
        """Decode one request at batch 1; depth 0 is plain decoding."""
        (result,) = self.decode_all([request], depth, 1, timer)
        return result

    def decode_all(
        self, requests: Sequence[Request], depth: int, slots: int, timer: StepTimer | None = None
    ) -> Iterator[Result]:
        """Decode requests, `slots` at once, yielding results as they finish."""
        if depth not in self.drafters:
            self.drafters[depth] = make_drafter(self.head, self.target.embed, Chain(depth))
        drafter = self.drafters[depth]
        capacity = rows_needed(requests, drafter)
        yield from decode(self.target, drafter, requests, slots=slots, capacity=capacity, timer=timer)

    def warm_up(self, request: Request, depth: int) -> None:
        """Decode a few times unmeasured, plainly and at `depth`: a process's first passes are slow. Done once only."""
        if not self.warm:
            short = dataclasses.replace(request, max_new_tokens=min(request.max_new_tokens, WARM_UP_TOKENS))
            for k in [0, depth] * WARM_UPS:
                self.decode(short, k)
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


def evaluate(target: Target, head: DraftHead, settings: EvalSettings, journal: Journal | None = None) -> dict[str, Any]:
    """Choose K on the tuning prompts, measure on the held-out ones, check outputs.

    Args:
        journal: gets every measurement as soon as it is finished. What it holds already, from a call with equal
            arguments that was killed, is not decoded again.

    Returns:
        The content of `report.json`; see `report.content.build_report`.
    """
    journal = journal or Journal()
    bench = Bench(target, head)
    room = target.max_positions - max(settings.depths[-1], REPORT_DEPTH) - 1
    tuning_set = builtin_set(
        "tuning", target.tokenizer, limit=settings.tuning_prompts, max_new_tokens=settings.tuning_new_tokens, room=room
    )
    held_out = builtin_set(
        "heldout", target.tokenizer, limit=settings.prompts, max_new_tokens=settings.max_new_tokens, room=room
    )
    choice = _choice_answers(len(tuning_set.requests), settings)
    with progress_bar("eval", choice + 4 * len(held_out.requests), "answers") as bar:
        bar.done = _finished(journal, choice, held_out.requests)
        tuning = _tuned(bench, tuning_set.requests, settings, journal, bar)
        plain, fast = _pairs(bench, held_out.requests, tuning.depth, journal, bar)
        deep = fast if tuning.depth == REPORT_DEPTH else _deep(bench, held_out.requests, journal, bar)
        generated = _generated(bench, held_out.requests, journal, bar)
    check = check_outputs(target, plain, fast, tuning.depth + 1)
    measured = Measured(held_out, settings.max_new_tokens, plain, fast, deep, generated, check, journal.sessions)
    return build_report(target, head.config, tuning, measured)


def _choice_answers(prompts: int, settings: EvalSettings) -> int:
    """Answers that `tune` decodes: warm-ups, acceptance, then pass costs and leaders, each beside plain decoding."""
    depths = len(settings.depths)
    timed = min(settings.timed_prompts, prompts)
    return 2 * WARM_UPS + prompts + timed * (depths + 1 + min(2, depths) + 1)


def _finished(journal: Journal, choice: int, requests: Sequence[Request]) -> int:
    """Answers behind what the journal holds: `choice` for that of K, two for a pair, one for any other entry."""
    answers = {TUNING: choice}
    for r in requests:
        answers |= {f"{PAIR}/{r.id}": 2, f"{DEEP}/{r.id}": 1, f"{GENERATE}/{r.id}": 1}
    return sum(n for key, n in answers.items() if journal.get(key) is not None)


def tune(bench: Bench, requests: Sequence[Request], settings: EvalSettings, bar: Progress) -> Tuning:
    """Measure acceptance once at the deepest K and the cost of every pass, then time the two most promising K."""
    deepest = settings.depths[-1]
    timed = requests[: settings.timed_prompts]
    short = [dataclasses.replace(r, max_new_tokens=settings.timed_new_tokens) for r in timed]
    bench.warm_up(short[0], deepest)
    bar.advance(2 * WARM_UPS)
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
    """Decode every request once at each depth, in turns; one list a depth."""
    rows = [_in_turn(bench, i, request, depths, bar) for i, request in enumerate(requests)]
    return [[row[n] for row in rows] for n in range(len(depths))]


def _in_turn(bench: Bench, i: int, request: Request, depths: Sequence[int], bar: Progress) -> list[Result]:
    """Decode request number `i` once at each depth, the order turned round from prompt to prompt (ABBA)."""
    found = {}
    for depth in depths if i % 2 == 0 else reversed(depths):
        found[depth] = bench.decode(request, depth)
        bar.advance()
    return [found[depth] for depth in depths]


def _tuned(
    bench: Bench, requests: Sequence[Request], settings: EvalSettings, journal: Journal, bar: Progress
) -> Tuning:
    stored = journal.get(TUNING)
    if stored is not None:
        return tuning_from_dict(stored)
    tuning = tune(bench, requests, settings, bar)
    journal.put(TUNING, tuning_to_dict(tuning))
    return tuning


def _pairs(
    bench: Bench, requests: Sequence[Request], depth: int, journal: Journal, bar: Progress
) -> tuple[list[Result], list[Result]]:
    """Decode every request plainly and at `depth`, in turns; both of a pair are always measured in one process."""
    plain, fast = [], []
    for i, request in enumerate(requests):
        key = f"{PAIR}/{request.id}"
        stored = journal.get(key)
        if stored is None:
            bench.warm_up(request, depth)
            pair = _in_turn(bench, i, request, [0, depth], bar)
            journal.put(key, [result_to_dict(result) for result in pair])
        else:
            pair = [result_from_dict(values) for values in stored]
        plain.append(pair[0])
        fast.append(pair[1])
    return plain, fast


def _deep(bench: Bench, requests: Sequence[Request], journal: Journal, bar: Progress) -> list[Result]:
    stored = {r.id: journal.get(f"{DEEP}/{r.id}") for r in requests}
    found = {name: result_from_dict(values) for name, values in stored.items() if values is not None}
    missing = [r for r in requests if r.id not in found]
    if missing:
        for result in bench.decode_all(missing, REPORT_DEPTH, ACCEPTANCE_SLOTS):
            found[result.id] = result
            journal.put(f"{DEEP}/{result.id}", result_to_dict(result))
            bar.advance()
    return [found[r.id] for r in requests]


def _generated(bench: Bench, requests: Sequence[Request], journal: Journal, bar: Progress) -> list[Timing]:
    found = []
    for request in requests:
        key = f"{GENERATE}/{request.id}"
        stored = journal.get(key)
        if stored is None:
            bench.warm_up(request, 0)
            timing = bench.generate(request)
            journal.put(key, dataclasses.asdict(timing))
            bar.advance()
        else:
            timing = Timing(**stored)
        found.append(timing)
    return found
