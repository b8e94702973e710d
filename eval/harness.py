"""Measure a head against plain decoding: same loop, process, dtype and prompts, interleaved, outputs checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DraftsmithError
from ..heads.base import DraftHead
from ..heads.target import Target
from ..progress import Progress, progress_bar, say
from .benchmarks import About, Benchmark, builtin_set, load_benchmark, prompt_set
from .breakdown import Pair
from .check import check_outputs
from .choose import ACCEPTANCE_SLOTS, choice_answers, choose, read_trees
from .decoder.loop import Request, Result
from .decoder.sampling import Sampling
from .decoder.search import parse_shape
from .decoder.trees import OWN_FORM, OwnTree
from .journal import Journal, result_from_dict, result_to_dict, tuning_from_dict, tuning_to_dict
from .measure import Bench, Lap, order
from .metrics import Timing
from .report.content import Measured, Part, build_report
from .tune import PLAIN, Tuning

REPORT_DEPTH = 4
"""tau and acceptance of a chain of this K are always given, too, so that heads can be compared."""
GENERATED = 20
"""Prompts of each benchmark that `transformers.generate` answers, too."""
TUNING, PAIR, CHAIN, GENERATE, TREE = "tuning", "pair", "chain", "generate", "tree"
"""Keys of the journal; pairs, chains and generated answers with a request's id behind them."""


@dataclass(frozen=True)
class EvalSettings:
    """What an evaluation decodes. The tree is chosen on the tuning prompts, figures come from the held-out ones."""

    bench: list[str] = field(default_factory=lambda: ["builtin"])
    """Benchmarks, as `load_benchmark` reads them."""
    bench_dir: str | None = None
    """Folder with their files; None: the environment variable BENCH_DIR, else the hub."""
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    """Greedy answers are always measured, first: they are what is checked and what later turns go on from."""
    prompts: int = 80
    """Of each benchmark."""
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
        for name, example in (("trees", "eval.trees=[chain:2]"), ("bench", "eval.bench=[builtin]")):
            values = getattr(self, name)
            if not values:
                raise DraftsmithError(f"eval.{name} is empty: name at least one, e.g. {example}")
            for text in values:
                if values.count(text) > 1:
                    raise DraftsmithError(f"eval.{name} = {values} names {text} {values.count(text)} times")
        for temperature in self.temperatures:
            if not 0 <= temperature < math.inf:
                raise DraftsmithError(f"eval.temperatures: {temperature} must be at least 0 (0 = greedy) and finite")
        for text in self.trees:
            try:
                if OwnTree.parse(text) is None:
                    parse_shape(text, OWN_FORM)
            except DraftsmithError as error:
                raise DraftsmithError(f"eval.trees: {error}") from error

    @property
    def sampled(self) -> list[float]:
        """The temperatures above 0, rising."""
        return sorted({t for t in self.temperatures if t > 0})


def load_benchmarks(settings: EvalSettings) -> list[Benchmark]:
    """Read the benchmarks that are asked for; what is wrong with their records is said.

    Raises:
        DraftsmithError: one can't be had, or two have the same name or a question of the same id.
    """
    folder = None if settings.bench_dir is None else Path(settings.bench_dir)
    found = [load_benchmark(name, settings.prompts, folder) for name in settings.bench]
    named: dict[str, Benchmark] = {}
    asked: dict[str, Benchmark] = {}
    for benchmark in found:
        if (other := named.setdefault(benchmark.name, benchmark)) is not benchmark:
            raise DraftsmithError(
                f"{other.source} and {benchmark.source} are both called {benchmark.name}: measure them one after the "
                "other, or rename a file"
            )
        for question in benchmark.questions:
            if (other := asked.setdefault(question.id, benchmark)) is not benchmark:
                raise DraftsmithError(
                    f"{other.source} and {benchmark.source} both have a question {question.id}: measure them one after "
                    "the other, or rename a file"
                )
        for problem in benchmark.problems:
            say(f"{benchmark.name}: {problem}")
    return found


def evaluate(
    target: Target,
    head: DraftHead,
    settings: EvalSettings,
    journal: Journal | None = None,
    checkpoint: Path | None = None,
    benchmarks: Sequence[Benchmark] | None = None,
) -> dict[str, Any]:
    """Choose the tree on the tuning prompts, measure on the held-out ones, check outputs.

    Args:
        journal: gets every measurement as soon as it is finished. What it holds already, from a call with equal
            arguments that was killed, is not decoded again.
        checkpoint: the head's folder, where a tree of its own lies; None where it has none.
        benchmarks: what `load_benchmarks` gave, where it was called already.

    Returns:
        The content of `report.json`; see `report.content.build_report`.
    """
    journal = journal or Journal()
    chain_text = f"chain:{min(REPORT_DEPTH, head.most_depth or REPORT_DEPTH)}"
    trees = read_trees(head, settings.trees, checkpoint)
    bench = Bench(target, head, trees | {chain_text: parse_shape(chain_text)})
    room = target.max_positions - max(shape.depth for shape in bench.trees.values()) - 1
    tuning_set = builtin_set(
        "tuning", target.tokenizer, limit=settings.tuning_prompts, max_new_tokens=settings.tuning_new_tokens,
        room=room, template_kwargs=settings.template_kwargs,
    )  # fmt: skip
    parts = _parts(target, settings, benchmarks or load_benchmarks(settings), room)
    choice = choice_answers(len(tuning_set.requests), settings.timed_prompts, trees)
    with progress_bar("eval", choice + _answers(parts, settings), "answers") as bar:
        work = _Measuring(bench, journal, bar)
        tuning = work.tuned(tuning_set.requests, settings, choice)
        pairs = work.conversations(parts, tuning.tree, len(settings.sampled))
        sampled = {temperature: work.sampled(pairs, temperature, tuning.tree) for temperature in settings.sampled}
        deep = work.chains(pairs, chain_text, tuning.tree)
        generated = work.generated(parts)
        drawn = work.drawn(pairs[0].request, tuning.tree)
    shape = bench.trees[tuning.tree]
    check = check_outputs(target, [p.plain for p in pairs], [p.fast for p in pairs], shape.rows)
    return build_report(
        target, head.config, tuning,
        Measured(
            parts, settings.max_new_tokens, shape.depth, shape.rows, pairs, sampled, chain_text, deep, generated, check,
            drawn, journal.sessions,
        ),
    )  # fmt: skip


def _parts(target: Target, settings: EvalSettings, benchmarks: Sequence[Benchmark], room: int) -> list[Part]:
    """The benchmarks, rendered."""
    parts = []
    for benchmark in benchmarks:
        prompts = prompt_set(
            benchmark, target.tokenizer, max_new_tokens=settings.max_new_tokens, room=room,
            template_kwargs=settings.template_kwargs, stop_ids=target.eos_ids,
        )  # fmt: skip
        for problem in prompts.problems:
            say(f"{benchmark.name}: {problem}")
        parts.append(Part(benchmark, prompts))
    return parts


def _answers(parts: Sequence[Part], settings: EvalSettings) -> int:
    """Answers to the held-out prompts, if no conversation ends early."""
    turns = sum(len(question.turns) for part in parts for question in part.prompts.questions.values())
    once = sum(len(part.prompts.requests[:GENERATED]) for part in parts)
    return turns * _per_turn(len(settings.sampled)) + once


def _per_turn(sampled: int) -> int:
    """A pair at each temperature, and the chain."""
    return 2 * (1 + sampled) + 1


class _Measuring:
    """Measures whatever the journal doesn't hold yet."""

    def __init__(self, bench: Bench, journal: Journal, bar: Progress) -> None:
        self.bench, self.journal, self.bar, self.lap = bench, journal, bar, Lap(bench)

    def kept(self, key: str, answers: int) -> Any:
        """What was measured before under a key, None where nothing was."""
        stored = self.journal.get(key)
        if stored is not None:
            self.bar.done += answers
            self.lap.start()
        return stored

    def tuned(self, requests: Sequence[Request], settings: EvalSettings, answers: int) -> Tuning:
        """The choice of the tree."""
        stored = self.kept(TUNING, answers)
        if stored is not None:
            return tuning_from_dict(stored)
        tuning = choose(
            self.bench, settings.trees, requests, settings.timed_prompts, settings.timed_new_tokens, self.bar
        )
        self.journal.put(TUNING, tuning_to_dict(tuning))
        return tuning

    def conversations(self, parts: Sequence[Part], tree: str, sampled: int) -> list[Pair]:
        """Decode every turn of every question greedily, plainly and with the tree, in turns.

        A later turn is rendered behind the plain answers to those before it, for both ways alike.
        """
        pairs: list[Pair] = []
        self.lap.start()
        for part in parts:
            for first in part.prompts.requests:
                request: Request | None = first
                question = part.prompts.questions[part.prompts.about[first.id].question]
                answers: list[list[int]] = []
                while request is not None:
                    stored = self._pair(f"{PAIR}/{request.id}", len(pairs), request, tree)
                    about, prompt = part.prompts.about[request.id], question.turns[len(answers)]
                    pairs.append(_read_pair(part.benchmark.name, about, prompt, request, stored))
                    answers.append(pairs[-1].plain.tokens)
                    request = part.prompts.next_turn(question.id, answers)
                self._expect_less((len(question.turns) - len(answers)) * _per_turn(sampled))
        return pairs

    def sampled(self, pairs: Sequence[Pair], temperature: float, tree: str) -> list[Pair]:
        """Decode the prompts of greedy pairs at a temperature, in the same turns."""
        found = []
        self.lap.start()
        for i, pair in enumerate(pairs):
            request = dataclasses.replace(pair.request, sampling=Sampling(temperature=temperature))
            stored = self._pair(f"{PAIR}@{temperature:g}/{request.id}", i, request, tree)
            found.append(_read_pair(pair.benchmark, pair.about, pair.prompt, request, stored))
        return found

    def _pair(self, key: str, i: int, request: Request, tree: str) -> dict[str, Any]:
        """Both answers to request number `i`; they are always measured in one process."""
        stored: dict[str, Any] | None = self.kept(key, 2)
        if stored is not None:
            return stored
        if not self.bench.warm:
            self.bench.warm_up(request, tree)
            self.lap.start()
        results: dict[str, Result] = {}
        first: dict[str, float] = {}
        for way in order([PLAIN, tree], i):
            results[way], first[way] = self.bench.decode(request, way), self.bench.first_token
            self.bar.advance()
        stored = {
            "plain": result_to_dict(results[PLAIN]),
            "speculative": result_to_dict(results[tree]),
            "ranks": self.bench.ranks(tree, results[tree]),
            "ttft": {"plain": first[PLAIN], "speculative": first[tree]},
            "spent": self.lap.read(),  # what writing this takes counts with the next pair
        }
        self.journal.put(key, stored)
        return stored

    def chains(self, pairs: Sequence[Pair], chain: str, tree: str) -> list[Result]:
        """Acceptance of the chain on the same prompts; the pairs' own answers where they were decoded with it."""
        if chain == tree:
            self._expect_less(len(pairs))
            return [pair.fast for pair in pairs]
        requests = [pair.request for pair in pairs]
        stored = {r.id: self.kept(f"{CHAIN}/{r.id}", 1) for r in requests}
        found = {name: result_from_dict(values) for name, values in stored.items() if values is not None}
        missing = [r for r in requests if r.id not in found]
        if missing:
            for result in self.bench.decode_all(missing, chain, ACCEPTANCE_SLOTS):
                found[result.id] = result
                self.journal.put(f"{CHAIN}/{result.id}", result_to_dict(result))
                self.bar.advance()
        return [found[r.id] for r in requests]

    def generated(self, parts: Sequence[Part]) -> dict[str, Timing]:
        """Time `transformers.generate` on the first prompts of each benchmark."""
        found = {}
        for request in (r for part in parts for r in part.prompts.requests[:GENERATED]):
            stored = self.kept(f"{GENERATE}/{request.id}", 1)
            if stored is None:
                self.bench.warm_up(request, PLAIN)
                stored = dataclasses.asdict(self.bench.generate(request))
                self.journal.put(f"{GENERATE}/{request.id}", stored)
                self.bar.advance()
            found[request.id] = Timing(**stored)
        return found

    def drawn(self, request: Request, tree: str) -> dict[str, Any] | None:
        """One drawn tree, of an answer that isn't timed."""
        stored = self.kept(TREE, 0)
        if stored is None:
            stored = {TREE: self.bench.draw(request, tree)}
            self.journal.put(TREE, stored)
        found: dict[str, Any] | None = stored[TREE]
        return found

    def _expect_less(self, answers: int) -> None:
        if answers and self.bar.total is not None:
            self.bar.expect(self.bar.total - answers)


def _read_pair(benchmark: str, about: About, prompt: str, request: Request, stored: dict[str, Any]) -> Pair:
    plain, fast = (result_from_dict(stored[way]) for way in ("plain", "speculative"))
    return Pair(benchmark, about, prompt, request, plain, fast, stored["ranks"], stored["ttft"], stored["spent"])
