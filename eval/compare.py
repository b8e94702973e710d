"""Every trained head of a model and every scheme without training: same prompts, one process, in turns."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DraftsmithError
from ..files import probe_writable, read_json, sha256_file, write_json
from ..heads import adapter
from ..heads.checkpoint import CONFIG, TREE, VOCAB
from ..heads.resolve import TargetSource, require_reachable, resolve_target
from ..heads.target import fingerprint, resolve_folder
from ..manifest import Stage
from ..progress import Progress, progress_bar, say
from .benchmark_sources import BUILTIN
from .benchmarks import Benchmark, prompt_set
from .compared import Compared, compared_result
from .decoder.loop import Request, Result, StepTimer, decode, rows_needed
from .decoder.sampling import Sampling
from .harness import EvalSettings, load_benchmarks
from .journal import Journal, result_from_dict, result_to_dict
from .schemes import load_model
from .trained import Trained, trained_head, trained_heads
from .tune import NO_STEP
from .ways import Way, fastest, training_of, ways_of

STAGE, VERSION = "compare", 3
COMPARISON = "compare.json"
SHORT_TOKENS, COST_PROMPTS = 20, 3
"""Answers for warming up and for timing passes: most tokens, and most prompts of the latter."""
COSTS = "costs"
"""Key of the journal; the others are prompts' ids."""


@dataclass(frozen=True)
class CompareSettings:
    """What is compared.

    Attributes:
        model: target: a short name, a hub id or a folder.
        runs: folder of all runs.
        prompts, max_new_tokens: prompts of each benchmark, and tokens of each answer.
        heads: names of runs' folders, head or head@run; None = all that are there.
        draft_model: also draft with this small model, named like `model`.
        with_prompt_lookup: also join looked-up drafts, see `ways.ways_of`.
        benchmarks: names or files, see `harness.load_benchmarks`; of questions with several turns the first is asked.
        bench_dir: where their files are looked for.
        temperature: of all answers; 0 = greedy.
        template_kwargs: what the chat template is given; None: what it was for the heads' latest reports.
    """

    model: str
    runs: Path
    prompts: int = 8
    max_new_tokens: int = 64
    heads: tuple[str, ...] | None = None
    draft_model: str | None = None
    with_prompt_lookup: bool = False
    benchmarks: tuple[str, ...] = (BUILTIN,)
    bench_dir: str | None = None
    temperature: float = 0.0
    template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, least in (("prompts", 1), ("max_new_tokens", 2)):  # an answer's first token is the prefill's
            if (value := getattr(self, name)) < least:
                raise DraftsmithError(f"--{name.replace('_', '-')} {value} must be at least {least}")
        if not 0 <= self.temperature < math.inf:
            raise DraftsmithError(f"--temperature {self.temperature} must be at least 0 (0 = greedy) and finite")


def compare(settings: CompareSettings) -> dict[str, Any]:
    """Decode the same held-out prompts in every way, or go on; a comparison that is finished is returned as it is.

    Returns:
        The content of RUNS/<model>/compare.json; see `compared.compared_result`.

    Raises:
        DraftsmithError: an unknown head or benchmark, a head or draft model that doesn't fit the target, answers that
            all end at once.
    """
    probe_writable(settings.runs)
    source = require_reachable(resolve_target(settings.model, notify=say))
    home = settings.runs / source.name
    heads = _chosen(home, settings.heads)
    if not heads:
        say(f"{home} holds no trained head, so schemes without one are compared alone; 'draftsmith run' trains one")
    settings = dataclasses.replace(settings, template_kwargs=_template_kwargs(settings, heads))
    asked = load_benchmarks(
        EvalSettings(prompts=settings.prompts, bench=list(settings.benchmarks), bench_dir=settings.bench_dir)
    )
    stage = Stage.open(home / STAGE, STAGE, VERSION, _identity(source, heads, settings, asked))
    if stage.manifest is not None:
        say(f"everything is measured already; to measure again delete {stage.folder}")
        result: dict[str, Any] = read_json(stage.folder / COMPARISON)
    else:
        say(f"loading the target {settings.model}")
        target = load_model(settings.model)
        tuned = functools.partial(load_model, settings.model, target)
        ways = ways_of(target, heads, tuned, settings.draft_model, settings.with_prompt_lookup)
        journal = Journal.open(stage.folder / "journal.jsonl")
        compared = _measure(ways, asked, settings, journal)
        if not any(result.steps for results in compared.found.values() for result in results):
            raise DraftsmithError(NO_STEP)
        result = compared_result(compared, settings.model, settings.max_new_tokens, journal.sessions)
        write_json(stage.folder / COMPARISON, result)
        stage.finish()
    write_json(home / COMPARISON, result)
    return result


def _chosen(home: Path, names: Sequence[str] | None) -> list[Trained]:
    """The heads that were asked for; raises DraftsmithError for one that is not there."""
    return trained_heads(home) if names is None else [trained_head(home, name) for name in dict.fromkeys(names)]


def _template_kwargs(settings: CompareSettings, heads: Sequence[Trained]) -> Mapping[str, Any]:
    """What the chat template is given: what was asked for, else what the reports agree on."""
    if settings.template_kwargs is not None:
        return settings.template_kwargs
    found = {head.name: head.template_kwargs for head in heads if head.template_kwargs is not None}
    if any(values != next(iter(found.values())) for values in found.values()):
        differing = "; ".join(f"{name} {values}" for name, values in found.items())
        raise DraftsmithError(
            f"the heads' reports gave the chat template other arguments ({differing}), and all answer the same prompts "
            "here: say which with --template-arg NAME=VALUE, or compare fewer with --heads"
        )
    return next(iter(found.values()), {})


def _identity(
    source: TargetSource, heads: Sequence[Trained], settings: CompareSettings, asked: Sequence[Benchmark]
) -> dict[str, Any]:
    """All that the result depends on or shows."""
    first = fastest(heads)
    draft = None if settings.draft_model is None else require_reachable(resolve_target(settings.draft_model))
    names = ("prompts", "max_new_tokens", "draft_model", "with_prompt_lookup", "temperature")
    return {
        "fingerprint": _fingerprint(source),
        "draft_fingerprint": None if draft is None else _fingerprint(draft),
        "heads": {head.name: _head_identity(head) for head in heads},
        "joined": first.name if first and settings.with_prompt_lookup else None,
        "benchmarks": {benchmark.name: benchmark.sha256 for benchmark in asked},
        "settings": {name: getattr(settings, name) for name in names},
        **({"template_kwargs": settings.template_kwargs} if settings.template_kwargs else {}),
    }


def _fingerprint(source: TargetSource) -> str:
    return fingerprint(resolve_folder(source.location, None if source.is_local else source.revision))


def _head_identity(head: Trained) -> dict[str, Any]:
    files = [head.checkpoint / name for name in (CONFIG, VOCAB, TREE)]
    return {
        "weights": head.weights_sha256,
        "files": {path.name: sha256_file(path) for path in files if path.is_file()},
        "adapter": adapter.adapter_sha256(head.adapter) if head.adapter else None,
        "tree": head.tree,
        "training": training_of(head),
    }


# --- measuring --------------------------------------------------------------------------------------------------------


def _measure(ways: Sequence[Way], asked: Sequence[Benchmark], settings: CompareSettings, journal: Journal) -> Compared:
    """Decode every prompt in every way."""
    target = ways[0].target
    room = min(way.drafter.context or way.target.max_positions for way in ways)
    room -= max(way.drafter.depth for way in ways) + 1
    sets = [
        prompt_set(
            benchmark,
            target.tokenizer,
            max_new_tokens=settings.max_new_tokens,
            room=room,
            stop_ids=target.eos_ids,
            template_kwargs=settings.template_kwargs,
        )
        for benchmark in asked
    ]
    sampling = Sampling(settings.temperature)
    requests = [dataclasses.replace(r, sampling=sampling) for prompts in sets for r in prompts.requests]
    short = [
        dataclasses.replace(request, max_new_tokens=min(request.max_new_tokens, SHORT_TOKENS))
        for request in requests[:COST_PROMPTS]
    ]
    found: dict[str, list[Result]] = {way.name: [] for way in ways}
    stored = {key: journal.get(key) for key in (COSTS, *(request.id for request in requests))}
    rounds = {key: len(short) if key == COSTS else 1 for key in stored}
    with progress_bar(STAGE, len(ways) * (1 + sum(rounds.values())), "answers") as bar:
        bar.done = len(ways) * sum(rounds[key] for key, values in stored.items() if values is not None)
        if any(values is None for values in stored.values()):
            for way in ways:
                _decode(way, short[0], bar)  # also after a restart: first passes are slow
        else:
            bar.done += len(ways)
        if stored[COSTS] is None:
            stored[COSTS] = _pass_costs(ways, short, bar)
            journal.put(COSTS, stored[COSTS])
        for i, request in enumerate(requests):
            answers = stored[request.id]
            if answers is None:
                answers = {way.name: result_to_dict(_decode(way, request, bar)) for way in _order(ways, i)}
                journal.put(request.id, answers)
            for name, values in answers.items():
                found[name].append(result_from_dict(values))
    return Compared(ways, asked, sets, settings.temperature, found, stored[COSTS])


def _order(ways: Sequence[Way], i: int) -> list[Way]:
    """Who goes when in round `i`: two rounds there and back, then the next one begins, so that drift hits all alike."""
    start = i // 2 % len(ways)
    turned = [*ways[start:], *ways[:start]]
    return turned if i % 2 == 0 else turned[::-1]


def _decode(way: Way, request: Request, bar: Progress, timer: StepTimer | None = None) -> Result:
    capacity = rows_needed([request], way.drafter)
    (result,) = decode(way.target, way.drafter, [request], slots=1, capacity=capacity, timer=timer)
    bar.advance()
    return result


def _pass_costs(ways: Sequence[Way], requests: Sequence[Request], bar: Progress) -> dict[str, float]:
    """Seconds of each way's target pass, timed in turns: the median of the answers' means (0 without any step)."""
    means: dict[str, list[float]] = {way.name: [] for way in ways}
    for i, request in enumerate(requests):
        for way in _order(ways, i):
            timer = StepTimer()
            _decode(way, request, bar, timer)
            means[way.name] += [timer.target / timer.steps] if timer.steps else []
    return {name: statistics.median(found) if found else 0.0 for name, found in means.items()}
