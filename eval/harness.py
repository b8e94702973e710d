"""Measure a head against plain decoding: same loop, process, dtype and prompts, interleaved, outputs checked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import DraftsmithError
from ..heads.base import DraftHead
from ..heads.target import Target
from ..progress import Progress, progress_bar
from .benchmarks import builtin_set
from .check import check_outputs
from .decoder.drafters import make_drafter
from .decoder.drafters.network import prepare_head
from .decoder.drafters.plain import PlainDrafter
from .decoder.loop import Request, Result, StepTimer, decode, rows_needed
from .decoder.search import Chain, Shape, parse_shape
from .decoder.trees import OWN_FORM, OwnTree, refuse_deeper
from .decoder.types import Drafter
from .journal import Journal, result_from_dict, result_to_dict, tuning_from_dict, tuning_to_dict
from .metrics import Acceptance, Timing, acceptance, expected_tau, tokens_per_second
from .ranks import RankWatch
from .report.content import Measured, build_report, timings
from .schemes import read_tree
from .tune import PLAIN, PassCosts, Tuning, leaders, predict

REPORT_DEPTH = 4
"""tau and acceptance of a chain of this K are always given, too, so that heads can be compared."""
WARM_UPS, WARM_UP_TOKENS = 2, 20
ACCEPTANCE_SLOTS = 8
"""Sequences at once where only acceptance is asked for: it doesn't depend on the batch, and the passes are shared."""
TUNING, PAIR, CHAIN, GENERATE = "tuning", "pair", "chain", "generate"
"""Keys of the journal; the last three with a held-out prompt's id behind them."""


@dataclass(frozen=True)
class EvalSettings:
    """What an evaluation decodes. The tree is chosen on the tuning prompts, figures come from the held-out ones."""

    prompts: int = 80
    max_new_tokens: int = 128
    tuning_prompts: int = 20
    tuning_new_tokens: int = 32
    timed_prompts: int = 4
    """Tuning prompts on which passes and leaders are timed, `timed_new_tokens` each."""
    timed_new_tokens: int = 20
    trees: list[str] = field(default_factory=lambda: ["chain:1", "chain:2", "chain:3", "chain:4"])
    """Candidates, as `decoder.trees.shape_for` reads them."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """What the chat template is given beside the messages."""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, int) and value < 1:
                raise DraftsmithError(f"eval.{name} = {value} must be at least 1")
        if not self.trees:
            raise DraftsmithError("eval.trees is empty: name at least one tree, e.g. eval.trees=[chain:2]")
        for text in self.trees:
            if self.trees.count(text) > 1:
                raise DraftsmithError(f"eval.trees = {self.trees} names {text} {self.trees.count(text)} times")
            try:
                if OwnTree.parse(text) is None:
                    parse_shape(text, OWN_FORM)
            except DraftsmithError as error:
                raise DraftsmithError(f"eval.trees: {error}") from error


class Bench:
    """One target, one head, and the ways of decoding that an evaluation compares.

    Args:
        trees: by their text; a way to decode is PLAIN or one of these.
    """

    def __init__(self, target: Target, head: DraftHead, trees: Mapping[str, Shape]) -> None:
        target.check_head(head.config)
        self.target, self.trees, self.parts = target, trees, target.parts()
        self.head, self.ready = head, prepare_head(head, self.parts)
        self.drafters: dict[str, Drafter] = {PLAIN: PlainDrafter()}
        self.watches: dict[str, RankWatch] = {}
        self.warm = False

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

    def decode(self, request: Request, way: str, timer: StepTimer | None = None) -> Result:
        """Decode one request at batch 1."""
        (result,) = self.decode_all([request], way, 1, timer)
        return result

    def decode_all(
        self, requests: Sequence[Request], way: str, slots: int, timer: StepTimer | None = None
    ) -> Iterator[Result]:
        """Decode requests, `slots` at once, yielding results as they finish."""
        drafter = self.watched(way) if slots == 1 else self.drafter(way)
        capacity = rows_needed(requests, drafter)
        yield from decode(self.target, drafter, requests, slots=slots, capacity=capacity, timer=timer)

    def ranks(self, way: str, result: Result) -> list[list[int]]:
        """Steps by depth and rank of the accepted node, [D][R], of what `decode` gave last in this way."""
        if way in self.watches:
            return self.watches[way].counts()
        deepest = max((s.accepted for s in result.steps), default=0)
        return [[sum(s.accepted > depth for s in result.steps)] for depth in range(deepest)]

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


def evaluate(
    target: Target,
    head: DraftHead,
    settings: EvalSettings,
    journal: Journal | None = None,
    checkpoint: Path | None = None,
) -> dict[str, Any]:
    """Choose the tree on the tuning prompts, measure on the held-out ones, check outputs.

    Args:
        journal: gets every measurement as soon as it is finished. What it holds already, from a call with equal
            arguments that was killed, is not decoded again.
        checkpoint: the head's folder, where a tree of its own lies; None where it has none.

    Returns:
        The content of `report.json`; see `report.content.build_report`.
    """
    journal = journal or Journal()
    chain_text = f"chain:{min(REPORT_DEPTH, head.most_depth or REPORT_DEPTH)}"
    trees = _read_trees(head, settings, checkpoint)
    bench = Bench(target, head, trees | {chain_text: parse_shape(chain_text)})
    room = target.max_positions - max(shape.depth for shape in bench.trees.values()) - 1
    shared: dict[str, Any] = {"room": room, "template_kwargs": settings.template_kwargs}
    tuning_set = builtin_set(
        "tuning", target.tokenizer, limit=settings.tuning_prompts, max_new_tokens=settings.tuning_new_tokens, **shared
    )
    held_out = builtin_set(
        "heldout", target.tokenizer, limit=settings.prompts, max_new_tokens=settings.max_new_tokens, **shared
    )
    choice = _choice_answers(len(tuning_set.requests), settings, trees)
    with progress_bar("eval", choice + 4 * len(held_out.requests), "answers") as bar:
        bar.done = _finished(journal, choice, held_out.requests)
        tuning = _tuned(bench, tuning_set.requests, settings, journal, bar)
        plain, fast, ranks = _pairs(bench, held_out.requests, tuning.tree, journal, bar)
        deep = fast if tuning.tree == chain_text else _chains(bench, held_out.requests, chain_text, journal, bar)
        generated = _generated(bench, held_out.requests, journal, bar)
    shape = bench.trees[tuning.tree]
    check = check_outputs(target, plain, fast, shape.rows)
    return build_report(
        target, head.config, tuning,
        Measured(
            held_out, settings.max_new_tokens, shape.depth, shape.rows, plain, fast, ranks, chain_text, deep,
            generated, check, journal.sessions,
        ),
    )  # fmt: skip


def _read_trees(head: DraftHead, settings: EvalSettings, checkpoint: Path | None) -> dict[str, Shape]:
    """The candidates by their text; raises DraftsmithError where the head can't draft one."""
    trees = {text: read_tree(text, checkpoint) for text in settings.trees}
    refuse_deeper(trees, head.most_depth)
    return trees


def _choice_answers(prompts: int, settings: EvalSettings, trees: Mapping[str, Shape]) -> int:
    """Answers that `tune` decodes: warm-ups, acceptance, then pass costs and leaders, each beside plain decoding."""
    timed = min(settings.timed_prompts, prompts)
    measured = len(_measured(trees))
    return 2 * WARM_UPS + prompts * measured + timed * (len(trees) + 1 + min(2, len(trees)) + 1)


def _measured(trees: Mapping[str, Shape]) -> list[str]:
    """Trees that acceptance is measured with: of chains the deepest one alone, which holds that of all."""
    chains = {text: shape.depth for text, shape in trees.items() if isinstance(shape, Chain)}
    return [text for text in trees if text not in chains or text == max(chains, key=lambda t: chains[t])]


def _finished(journal: Journal, choice: int, requests: Sequence[Request]) -> int:
    """Answers behind what the journal holds: `choice` for the choice, two for a pair, one for any other entry."""
    answers = {TUNING: choice}
    for r in requests:
        answers |= {f"{PAIR}/{r.id}": 2, f"{CHAIN}/{r.id}": 1, f"{GENERATE}/{r.id}": 1}
    return sum(n for key, n in answers.items() if journal.get(key) is not None)


def tune(bench: Bench, requests: Sequence[Request], settings: EvalSettings, bar: Progress) -> Tuning:
    """Measure acceptance and the cost of every pass, then time the two most promising trees."""
    trees = {text: bench.trees[text] for text in settings.trees}
    timed = requests[: settings.timed_prompts]
    short = [dataclasses.replace(r, max_new_tokens=settings.timed_new_tokens) for r in timed]
    bench.warm_up(short[0], _measured(trees)[-1])
    bar.advance(2 * WARM_UPS)
    shares = {}
    for text in _measured(trees):
        logs = []
        for result in bench.decode_all(requests, text, ACCEPTANCE_SLOTS):
            logs.append(result.steps)
            bar.advance()
        shares[text] = acceptance(logs)
    costs = measure_costs(bench, short, [PLAIN, *trees], bar)
    taus = _expected(trees, shares)
    predicted = predict(costs, taus)
    best = leaders(predicted)
    results = _interleaved(bench, short, [PLAIN, *best], bar)
    speeds = dict(zip([PLAIN, *best], [tokens_per_second(timings(r)) for r in results], strict=True))
    table = [
        {
            "tree": text,
            "depth": shape.depth,
            "nodes": shape.rows,
            "expected_tau": taus[text],
            "predicted_tokens_per_s": predicted[text],
            "measured_tokens_per_s": speeds.get(text),
            "predicted_speedup": predicted[text] * costs.ways[PLAIN].step,
            "measured_speedup": speeds[text] / speeds[PLAIN] if text in speeds and speeds[PLAIN] else None,
        }
        for text, shape in trees.items()
    ]
    return Tuning(max(best, key=lambda text: speeds[text]), costs, shares, table, len(requests))


def _expected(trees: Mapping[str, Shape], shares: Mapping[str, Acceptance]) -> dict[str, float]:
    """Tau of each tree before cutting: its own mal, or for chains that of the deepest one up to their depth.

    Answers of tuning prompts are short: cut at their ends, deep trees would look worse than the chains beside them.
    """
    taus = {}
    chains = next((shares[text] for text in _measured(trees) if isinstance(trees[text], Chain)), None)
    for text, shape in trees.items():
        if isinstance(shape, Chain):
            assert chains is not None
            taus[text] = expected_tau(chains.conditional, shape.depth)
        else:
            taus[text] = shares[text].mal
    return taus


def measure_costs(bench: Bench, requests: Sequence[Request], ways: Sequence[str], bar: Progress) -> PassCosts:
    """Time the passes of target and head step by step; the ways take turns so that drift hits all alike."""
    timers: dict[str, list[StepTimer]] = {way: [] for way in ways}
    for i, request in enumerate(requests):
        for way in ways if i % 2 == 0 else reversed(ways):
            timer = StepTimer()
            bench.decode(request, way, timer)
            timers[way] += [timer] if timer.steps else []
            bar.advance()
    costs = PassCosts()
    for way, runs in timers.items():
        if not runs:
            raise DraftsmithError("every tuning answer ended with its first token: there is no step to time")
        costs.add(
            way,
            bench.drafter(way).rows,
            [t.target / t.steps for t in runs],
            [t.draft / t.steps for t in runs],
            [(t.step - t.target - t.draft) / t.steps for t in runs],
        )
    return costs


def _interleaved(bench: Bench, requests: Sequence[Request], ways: Sequence[str], bar: Progress) -> list[list[Result]]:
    """Decode every request once in each way, in turns; one list a way."""
    rows = [_in_turn(bench, i, request, ways, bar) for i, request in enumerate(requests)]
    return [[row[n] for row in rows] for n in range(len(ways))]


def _in_turn(bench: Bench, i: int, request: Request, ways: Sequence[str], bar: Progress) -> list[Result]:
    """Decode request number `i` once in each way, the order turned round from prompt to prompt (ABBA)."""
    found = {}
    for way in ways if i % 2 == 0 else reversed(ways):
        found[way] = bench.decode(request, way)
        bar.advance()
    return [found[way] for way in ways]


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
    bench: Bench, requests: Sequence[Request], tree: str, journal: Journal, bar: Progress
) -> tuple[list[Result], list[Result], list[list[list[int]]]]:
    """Decode every request plainly and with the tree, in turns; both of a pair are always measured in one process.

    Returns:
        Plain and speculative results, and the ranks of what each of the latter accepted.
    """
    plain, fast, ranks = [], [], []
    for i, request in enumerate(requests):
        key = f"{PAIR}/{request.id}"
        stored = journal.get(key)
        if stored is None:
            bench.warm_up(request, tree)
            pair = _in_turn(bench, i, request, [PLAIN, tree], bar)
            stored = {
                "plain": result_to_dict(pair[0]),
                "speculative": result_to_dict(pair[1]),
                "ranks": bench.ranks(tree, pair[1]),
            }
            journal.put(key, stored)
        plain.append(result_from_dict(stored["plain"]))
        fast.append(result_from_dict(stored["speculative"]))
        ranks.append(stored["ranks"])
    return plain, fast, ranks


def _chains(bench: Bench, requests: Sequence[Request], chain: str, journal: Journal, bar: Progress) -> list[Result]:
    stored = {r.id: journal.get(f"{CHAIN}/{r.id}") for r in requests}
    found = {name: result_from_dict(values) for name, values in stored.items() if values is not None}
    missing = [r for r in requests if r.id not in found]
    if missing:
        for result in bench.decode_all(missing, chain, ACCEPTANCE_SLOTS):
            found[result.id] = result
            journal.put(f"{CHAIN}/{result.id}", result_to_dict(result))
            bar.advance()
    return [found[r.id] for r in requests]


def _generated(bench: Bench, requests: Sequence[Request], journal: Journal, bar: Progress) -> list[Timing]:
    found = []
    for request in requests:
        key = f"{GENERATE}/{request.id}"
        stored = journal.get(key)
        if stored is None:
            bench.warm_up(request, PLAIN)
            timing = bench.generate(request)
            journal.put(key, dataclasses.asdict(timing))
            bar.advance()
        else:
            timing = Timing(**stored)
        found.append(timing)
    return found
