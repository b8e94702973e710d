"""Command `tune`: the best setting of a head for every batch and temperature, and what engines must be told for it.

Passes are timed once a shape and batch, acceptance is measured once a temperature (`walks.py`); the tokens/s of every
setting follow from the two. Those that promise most are then really decoded, in turns with plain decoding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data_recipes.builtin import builtin_prompts
from ..errors import DraftsmithError
from ..files import probe_writable, read_json, sha256_json, write_json
from ..heads.checkpoint import TREE, load_tree
from ..heads.formats.load import load_any
from ..heads.resolve import require_reachable, resolve_target
from ..heads.target import Target, fingerprint, resolve_folder
from ..manifest import Stage
from ..progress import Progress, progress_bar, say
from .benchmark_sources import BUILTIN, registry
from .benchmarks import Benchmark, PromptSet, prompt_set
from .check import check_outputs
from .decoder.drafters import make_drafter
from .decoder.loop import Request, Result, StepLog
from .decoder.sampling import Sampling
from .decoder.search import Chain, Shape
from .decoder.trees import check_text, deeper
from .decoder.types import Drafter
from .given_head import GivenHead, find_head
from .harness import EvalSettings, load_benchmarks
from .journal import Journal
from .lockstep import Runner, pass_costs, side_by_side
from .measure import Bench
from .metrics import acceptance, speedup, timings, tokens_per_second
from .questions import Question, language_of
from .report import TUNE
from .report.content import SAMPLED
from .report.page import refresh_page
from .schemes import load_model, read_tree
from .tune import (
    NO_STEP,
    PLAIN,
    PassCosts,
    StepCost,
    chunks,
    compose,
    covering,
    grid,
    leaders,
    may_pay,
)
from .tuned import Found, Timed, tuned_result
from .walks import Foreseen, foresee, passes_over

STAGE, VERSION = "tune", 3
LEADERS, TIMED_WAYS = 3, 5
"""Settings that are really decoded, of those that promise most; at most so many ways: plain, these, the best chain."""
PROBE_TOKENS, PROBE_STEPS = 16, 12
"""Tokens of the answers on which passes are timed, and steps of each way that are."""
SLOTS = 8
"""Sequences at once where only acceptance is asked for."""
OWN_NODES = (8, 16, 32, 64)
"""Nodes of the trees that are tried of the one that was measured for a head, root included."""


@dataclass(frozen=True)
class TuneSettings:
    """What is tuned, for which load.

    Attributes:
        model: target: a short name, a hub id or a folder.
        head, run: see `given_head.find_head`.
        runs: folder of all runs.
        benchmarks: names or files, see `harness.load_benchmarks`; none: the built-in tuning prompts.
        bench_dir: where their files are looked for.
        batches: sequences at once; temperatures: 0 = greedy.
        prompts, max_new_tokens: of each benchmark, and tokens of each answer.
        template_kwargs: what the chat template is given; None: what it was for the head's latest report.
        trees: settings to choose from; none: `tune.grid`, and the head's own tree where it has one.
    """

    model: str
    head: str
    runs: Path
    run: str | None = None
    benchmarks: tuple[str, ...] = ()
    bench_dir: str | None = None
    batches: tuple[int, ...] = (1, 2, 4, 8)
    temperatures: tuple[float, ...] = (0.0,)
    prompts: int = 8
    max_new_tokens: int = 64
    trees: tuple[str, ...] = ()
    template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, least in (("batches", 1), ("temperatures", 0)):
            given = getattr(self, name)
            if not given or not all(least <= value < math.inf for value in given):
                raise DraftsmithError(f"--{name} {','.join(map(str, given))}: give finite values of at least {least}")
            object.__setattr__(self, name, tuple(sorted(set(given))))
        for name, least in (("prompts", 1), ("max_new_tokens", 2)):  # an answer's first token is the prefill's
            if (value := getattr(self, name)) < least:
                raise DraftsmithError(f"--{name.replace('_', '-')} {value} must be at least {least}")
        for tree in self.trees:
            check_text(tree)


def tune(settings: TuneSettings) -> dict[str, Any]:
    """Measure, predict and choose, or go on; a tuning that is finished is returned as it is.

    Returns:
        The content of RUNS/<model>/<head>/tune.json; see `tuned.tuned_result`.

    Raises:
        DraftsmithError: no such head or benchmark, a tree that the head can't draft, answers that all end at once.
    """
    probe_writable(settings.runs)
    source = require_reachable(resolve_target(settings.model, notify=say))
    given = find_head(settings.runs / source.name, settings.head, settings.run)
    settings = dataclasses.replace(settings, template_kwargs=given.rendering(settings.template_kwargs))
    for remark in given.remarks:
        say(f"{given.name} {remark}")
    asked = _benchmarks(settings)
    place = resolve_folder(source.location, None if source.is_local else source.revision)
    stage = Stage.open(given.folder / STAGE, STAGE, VERSION, _identity(settings, fingerprint(place), given, asked))
    if stage.manifest is not None:
        say(f"everything is measured already; to measure again delete {stage.folder}")
        result: dict[str, Any] = read_json(stage.folder / TUNE)
    else:
        say(f"loading the target {settings.model}")
        target = load_model(settings.model, adapter=given.adapter)
        tuner = _Tuner(target, given, settings, Journal.open(stage.folder / "journal.jsonl"))
        result = tuner.run(asked, source.hub_id or source.location)
        write_json(stage.folder / TUNE, result)
        stage.finish()
    write_json(given.folder / TUNE, result)
    refresh_page(given.folder)
    return result


def _benchmarks(settings: TuneSettings) -> list[Benchmark]:
    """Those that are asked for; else the project's own tuning prompts, which no report is made from."""
    if settings.benchmarks:
        names = list(settings.benchmarks)
        return load_benchmarks(EvalSettings(prompts=settings.prompts, bench=names, bench_dir=settings.bench_dir))
    prompts = builtin_prompts("tuning")[: settings.prompts]
    questions = [Question(p.id, [p.text], None, p.category, language_of(p.text)) for p in prompts]
    digest = sha256_json([dataclasses.asdict(question) for question in questions])
    return [Benchmark("builtin-tuning", BUILTIN, registry()[BUILTIN].licence, digest, questions, [])]


def _identity(settings: TuneSettings, target: str, given: GivenHead, asked: Sequence[Benchmark]) -> dict[str, Any]:
    """All that the result depends on or shows."""
    names = ("batches", "temperatures", "prompts", "max_new_tokens", "trees")
    return {
        "fingerprint": target,
        "head": {"name": given.name, "files": given.digest},
        "benchmarks": {benchmark.name: benchmark.sha256 for benchmark in asked},
        "settings": {
            name: list(value) if isinstance(value := getattr(settings, name), tuple) else value for name in names
        },
        "template_kwargs": settings.template_kwargs,
    }


def _trees(settings: TuneSettings, head: Any, checkpoint: Path) -> dict[str, Shape]:
    """The settings to choose from; raises DraftsmithError for one that the head can't draft."""
    texts = list(settings.trees)
    if not texts:
        texts = grid(head.most_depth, head.config.draft_vocab_size)
        nodes = len(load_tree(checkpoint).paths) + 1 if (checkpoint / TREE).is_file() else 0
        texts += [f"own:{count}" for count in OWN_NODES if count <= nodes]
    trees = {text: read_tree(text, checkpoint) for text in texts}
    for text in deeper(trees, head.most_depth):
        raise DraftsmithError(
            f"--tree {text} is {trees[text].depth} deep, the head drafts {head.most_depth} tokens: give a shallower one"
        )
    for shape in trees.values():
        shape.check(head.config.draft_vocab_size)
    return trees


class _Tuner:
    """One tuning: what is measured is in the journal before the next thing is."""

    def __init__(self, target: Target, given: GivenHead, settings: TuneSettings, journal: Journal) -> None:
        self.target, self.given, self.settings, self.journal = target, given, settings, journal
        head = load_any(given.checkpoint, target)
        self.trees = _trees(settings, head, given.checkpoint)
        self.bench = Bench(target, head, self.trees)
        self.timed = sorted(covering(self.trees), key=lambda tree: self.trees[tree].rows)

    def run(self, asked: Sequence[Benchmark], model: str) -> dict[str, Any]:
        """Measure what the journal hasn't yet, and put everything together."""
        s = self.settings
        sets = [self._prompts(benchmark) for benchmark in asked]
        requests = [request for prompts in sets for request in prompts.requests]
        found = Found(asked, sets, self.trees)
        with progress_bar(STAGE, self._runs(len(requests)), "runs") as bar:
            self.bench.warm_up(requests[0], next(iter(self.trees)))
            answers: list[list[int]] = []
            for temperature in s.temperatures:
                walked = self._walked(requests, temperature, bar)
                found.shares[temperature] = {tree: acceptance(steps) for tree, steps in walked.steps.items()}
                found.exact[temperature] = walked.exact
                if not any(share.steps for share in found.shares[temperature].values()):
                    raise DraftsmithError(f"at temperature {temperature:g} {NO_STEP}")
                answers = answers or walked.answers
            found.answer_steps = sum(len(answer) - 1 for answer in answers) / len(answers)
            kinds = sorted({temperature > 0 for temperature in s.temperatures})
            found.prefill = self._once("prefill", len(requests), bar, lambda: [self._first(r, bar) for r in requests])
            for batch in s.batches:  # what is predicted and what is measured soon after the other: machines drift
                for sampled in kinds:
                    most = max(share.tau for shares in found.shares.values() for share in shares.values())
                    found.costs[batch, sampled] = self._costs(_middles(requests, answers), batch, sampled, most, bar)
                for temperature in s.temperatures:
                    ways = self._promising(found.predicted(temperature, batch))
                    found.cells[temperature, batch] = self._cell(requests, temperature, batch, ways, bar)
        return tuned_result(self.target, self.bench.head, self.given, s.model, model, found, self.journal.sessions)

    def _prompts(self, benchmark: Benchmark) -> PromptSet:
        room = self.target.max_positions - max(shape.depth for shape in self.trees.values()) - 1 - PROBE_TOKENS
        return prompt_set(
            benchmark, self.target.tokenizer, max_new_tokens=self.settings.max_new_tokens, room=room,
            stop_ids=self.target.eos_ids, template_kwargs=self.settings.template_kwargs,
        )  # fmt: skip

    def _runs(self, prompts: int) -> int:
        """Runs in all: answers that are walked, turns of ways that are timed, prompts."""
        s = self.settings
        kinds = {temperature > 0 for temperature in s.temperatures}
        walks = prompts * sum(passes_over(self.trees, temperature) for temperature in s.temperatures)
        cells = len(s.batches) * len(s.temperatures) * prompts * TIMED_WAYS
        return walks + len(s.batches) * len(kinds) * self._probes + prompts + cells

    def _once(self, key: str, runs: int, bar: Progress, measure: Callable[[], Any]) -> Any:
        """What the journal has under `key`, else what `measure` gives; plain JSON values in either case."""
        stored, before = self.journal.get(key), bar.done
        if stored is None:
            stored = measure()
            self.journal.put(key, stored)
            bar.advance(before + runs - bar.done)
        bar.done = before + runs
        return stored

    def _walked(self, requests: Sequence[Request], temperature: float, bar: Progress) -> Foreseen:
        """What every tree accepts of the answers at one temperature."""

        def measure() -> dict[str, Any]:
            asked = [dataclasses.replace(r, sampling=Sampling(temperature)) for r in requests]
            found = foresee(self.target, self._drafter, asked, self.trees, SLOTS, bar.advance)
            steps = {
                tree: [[[s.drafted, s.accepted, s.emitted] for s in answer] for answer in logs]
                for tree, logs in found.steps.items()
            }
            return {"steps": steps, "exact": sorted(found.exact), "answers": found.answers}

        runs = len(requests) * passes_over(self.trees, temperature)
        stored = self._once(f"walk/{temperature:g}", runs, bar, measure)
        steps = {
            tree: [[StepLog(*step) for step in answer] for answer in logs] for tree, logs in stored["steps"].items()
        }
        return Foreseen(steps, frozenset(stored["exact"]), stored["answers"])

    def _drafter(self, shape: Shape) -> Drafter:
        return make_drafter(self.bench.head, self.bench.parts, shape, self.bench.ready)

    def _costs(
        self, requests: Sequence[Request], batch: int, sampled: bool, most_tau: float, bar: Progress
    ) -> PassCosts:
        """What a step of every tree costs with `batch` sequences, from the passes of the covering ones.

        Those whose passes take too long to pay are left out, see `may_pay`.
        """
        sampling = Sampling(max(self.settings.temperatures) if sampled else 0.0)
        asked = [dataclasses.replace(r, sampling=sampling) for r in requests]

        def measure() -> dict[str, Any]:
            pays = functools.partial(self._may_pay, most_tau)
            runners = functools.partial(self._runners, asked[: max(2, batch)], batch)
            timed = {tree: self.trees[tree] for tree in self.timed}
            return dataclasses.asdict(pass_costs(runners, timed, PROBE_STEPS, pays, bar.advance))

        key = f"costs/{batch}/{'sampled' if sampled else 'greedy'}"
        stored = self._once(key, self._probes, bar, measure)
        return compose(PassCosts({way: StepCost(**cost) for way, cost in stored["ways"].items()}), self.trees)

    def _may_pay(self, most_tau: float, tree: str, timed: PassCosts) -> bool:
        return may_pay(self.trees[tree].rows, timed, most_tau)

    @property
    def _probes(self) -> int:
        return sum(1 + len(chunk) for chunk in chunks(self.timed))

    def _first(self, request: Request, bar: Progress) -> float:
        """Seconds until the first token of a prompt that is alone."""
        self.bench.decode(dataclasses.replace(request, max_new_tokens=1), PLAIN)
        bar.advance()
        return self.bench.first_token

    def _promising(self, predicted: Mapping[str, float]) -> list[str]:
        """Plain decoding, the leaders, and the best chain: engines without trees want that one."""
        trees = {tree: speed for tree, speed in predicted.items() if tree != PLAIN}
        chains = {tree: speed for tree, speed in trees.items() if isinstance(self.trees[tree], Chain)}
        return [PLAIN, *dict.fromkeys([*leaders(trees, LEADERS), *leaders(chains, 1)])]

    def _cell(
        self, requests: Sequence[Request], temperature: float, batch: int, ways: Sequence[str], bar: Progress
    ) -> dict[str, Timed]:
        """Really decode in some ways, in turns."""
        asked = [dataclasses.replace(r, sampling=Sampling(temperature)) for r in requests]

        def measure() -> dict[str, Any]:
            bar.note(f"batch {batch}")
            found = side_by_side(self._runners(asked, batch, ways), bar.advance)
            return {way: dataclasses.asdict(self._figures(found[PLAIN], found[way], way, temperature)) for way in ways}

        stored = self._once(f"cell/{temperature:g}/{batch}", len(asked) * TIMED_WAYS, bar, measure)
        return {way: Timed(**figures) for way, figures in stored.items()}

    def _figures(self, plain: Sequence[Result], own: Sequence[Result], way: str, temperature: float) -> Timed:
        """What was measured of one way; its answers are compared with those of plain decoding."""
        speed, tau = tokens_per_second(timings(own)), acceptance([result.steps for result in own]).tau
        if way == PLAIN:
            return Timed(speed, tau, None, None, "baseline")
        ratio, interval = speedup(timings(plain), timings(own))
        if temperature > 0:
            return Timed(speed, tau, ratio, list(interval), SAMPLED)
        check = check_outputs(self.target, plain, own, self.trees[way].rows)
        if not check.passed:
            return Timed(speed, tau, None, None, check.verdict)
        return Timed(speed, tau, ratio, list(interval), check.verdict)

    def _runners(self, requests: Sequence[Request], batch: int, ways: Sequence[str]) -> dict[str, Runner]:
        return {way: Runner(self.target, self.bench.drafter(way), requests, batch) for way in ways}


def _middles(requests: Sequence[Request], answers: Sequence[Sequence[int]]) -> list[Request]:
    """Requests that go on in the middle of their answers, where keys are as many as in the mean; none ends early."""
    return [
        dataclasses.replace(
            request,
            tokens=[*request.tokens, *answer[: len(answer) // 2]],
            max_new_tokens=PROBE_TOKENS,
            stop=frozenset(),
        )
        for request, answer in zip(requests, answers, strict=True)
    ]
