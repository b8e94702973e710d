"""Every trained head of a model and every scheme without training: same prompts, one process, in turns."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DraftsmithError
from ..files import probe_writable, read_json, sha256_file, write_json
from ..heads import adapter
from ..heads.base import DraftHead
from ..heads.checkpoint import CONFIG, TREE, VOCAB, load_head
from ..heads.resolve import TargetSource, require_reachable, resolve_target
from ..heads.target import Target, fingerprint, resolve_folder
from ..manifest import Stage
from ..progress import Progress, progress_bar, say
from .benchmarks import PromptSet, builtin_set
from .check import check_outputs
from .decoder.drafters import make_drafter
from .decoder.drafters.plain import PlainDrafter
from .decoder.drafters.prompt_lookup import PromptLookupDrafter
from .decoder.drafters.union import UnionDrafter
from .decoder.loop import Request, Result, StepTimer, decode, rows_needed
from .decoder.types import Drafter
from .journal import Journal, result_from_dict, result_to_dict
from .metrics import acceptance, speedup, tau_interval, tokens_per_second
from .report.content import environment, timings
from .schemes import DEFAULT_TREE, SCHEMES, SchemeOptions, build_drafter, load_model, read_tree
from .trained import Trained, trained_head, trained_heads
from .tune import PLAIN

STAGE, VERSION, SCHEMA = "compare", 2, "draftsmith.compare/1"
COMPARISON = "compare.json"
SHOWN_DEPTHS = 4
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
        prompts, max_new_tokens: held-out prompts, and tokens of each answer.
        heads: names of runs' folders, head or head@run; None = all that are there.
        draft_model: also draft with this small model, named like `model`.
        with_prompt_lookup: also join looked-up drafts to the trees of the head whose report is the fastest.
    """

    model: str
    runs: Path
    prompts: int = 8
    max_new_tokens: int = 64
    heads: tuple[str, ...] | None = None
    draft_model: str | None = None
    with_prompt_lookup: bool = False

    def __post_init__(self) -> None:
        for name in ("prompts", "max_new_tokens"):
            if (value := getattr(self, name)) < 1:
                raise DraftsmithError(f"--{name.replace('_', '-')} {value} must be at least 1")


@dataclass(frozen=True)
class Way:
    """One way to decode.

    Attributes:
        target: the model, or the model as it was tuned with a head.
        baseline: name of plain decoding of that very target.
        tree: text of the trees, where they can be chosen.
        facts: what the result says of it before anything is measured.
    """

    name: str
    target: Target
    drafter: Drafter
    baseline: str
    tree: str | None
    facts: dict[str, Any]


def compare(settings: CompareSettings) -> dict[str, Any]:
    """Decode the same held-out prompts in every way, or go on; a comparison that is finished is returned as it is.

    Returns:
        The content of RUNS/<model>/compare.json: `schemes`, one row a way to decode, and what is behind them. A row's
        `speedup` is over plain decoding of the same target, None unless its output check passed.

    Raises:
        DraftsmithError: an unknown head, a head or draft model that doesn't fit the target.
    """
    probe_writable(settings.runs)
    source = require_reachable(resolve_target(settings.model, notify=say))
    home = settings.runs / source.name
    heads = _chosen(home, settings.heads)
    if not heads:
        say(f"{home} holds no trained head, so schemes without one are compared alone; 'draftsmith run' trains one")
    stage = Stage.open(home / STAGE, STAGE, VERSION, _identity(source, heads, settings))
    if stage.manifest is not None:
        say(f"everything is measured already; to measure again delete {stage.folder}")
        result: dict[str, Any] = read_json(stage.folder / COMPARISON)
    else:
        ways = _ways(heads, settings)
        journal = Journal.open(stage.folder / "journal.jsonl")
        prompts, found, costs = _measure(ways, settings, journal)
        result = _result(ways, prompts, found, costs, settings, journal.sessions)
        write_json(stage.folder / COMPARISON, result)
        stage.finish()
    write_json(home / COMPARISON, result)
    return result


def _chosen(home: Path, names: Sequence[str] | None) -> list[Trained]:
    """The heads that were asked for; raises DraftsmithError for one that is not there."""
    return trained_heads(home) if names is None else [trained_head(home, name) for name in dict.fromkeys(names)]


def _identity(source: TargetSource, heads: Sequence[Trained], settings: CompareSettings) -> dict[str, Any]:
    """All that the result depends on or shows."""
    fastest = _fastest(heads)
    draft = None if settings.draft_model is None else require_reachable(resolve_target(settings.draft_model))
    return {
        "fingerprint": _fingerprint(source),
        "draft_fingerprint": None if draft is None else _fingerprint(draft),
        "heads": {head.name: _head_identity(head) for head in heads},
        "joined": fastest.name if fastest and settings.with_prompt_lookup else None,
        "settings": {
            name: getattr(settings, name) for name in ("prompts", "max_new_tokens", "draft_model", "with_prompt_lookup")
        },
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
        "training": _training(head),
    }


def _training(head: Trained) -> dict[str, Any]:
    """What the result says of a head's training; minutes are None while it is not finished."""
    record = head.record or {}
    return {
        "train_minutes": record["train_seconds"] / 60 if "train_seconds" in record else None,
        "drift": record.get("drift"),
    }


# --- the ways ---------------------------------------------------------------------------------------------------------


def _ways(heads: Sequence[Trained], settings: CompareSettings) -> list[Way]:
    """Plain decoding first, then what needs no training, then heads; a tuned target brings its own plain decoding."""
    say(f"loading the target {settings.model}")
    target = load_model(settings.model)
    ways = [Way(PLAIN, target, PlainDrafter(), PLAIN, None, {"kind": PLAIN})]
    for name, scheme in SCHEMES.items():
        options = SchemeOptions(draft_model=settings.draft_model if scheme.needs == "draft_model" else None)
        if name != PLAIN and (scheme.needs is None or scheme.needs in options.given()):
            tree = DEFAULT_TREE if "tree" in scheme.takes else None
            ways.append(Way(name, target, build_drafter(name, target, options), PLAIN, tree, {"kind": "training-free"}))
    fastest = _fastest(heads)
    for trained in heads:
        tuned, baseline = target, PLAIN
        if trained.adapter is not None:
            tuned, baseline = (
                load_model(settings.model, like=target, adapter=trained.adapter),
                f"plain ({trained.name})",
            )
            ways.append(Way(baseline, tuned, PlainDrafter(), baseline, None, {"kind": PLAIN}))
        ways.append(_with_head(trained, tuned, baseline))
        if settings.with_prompt_lookup and trained is fastest:
            head = ways[-1]
            union = UnionDrafter(head.drafter, PromptLookupDrafter())  # one decodes at a time: they may share it
            ways.append(dataclasses.replace(head, name=f"{head.name} + prompt-lookup", drafter=union))
    return ways


def _fastest(heads: Sequence[Trained]) -> Trained | None:
    """The head with the largest speed-up in its report."""
    return max(heads, key=lambda head: head.report.get("summary", {}).get("speedup") or 0.0, default=None)


def _with_head(trained: Trained, target: Target, baseline: str) -> Way:
    head = load_head(trained.checkpoint)
    target.check_head(head.config)
    tree = trained.tree or f"chain:{min(SHOWN_DEPTHS, head.most_depth or SHOWN_DEPTHS)}"
    for remark in trained.remarks():
        say(f"{trained.name} {remark}: it is compared as it is, with {tree}")
    drafter = make_drafter(head, target.parts(), read_tree(tree, trained.checkpoint))
    facts = {
        "kind": "head",
        "family": head.config.family,
        "parameters": _parameters(head, trained.adapter),
        **_training(trained),
    }
    return Way(trained.name, target, drafter, baseline, tree, facts)


def _parameters(head: DraftHead, tuned: Path | None) -> int:
    """Numbers that were trained: the head's, and those of the adapter beside it."""
    count = sum(p.numel() for p in head.parameters())
    if tuned is not None:
        from safetensors import safe_open

        with safe_open(tuned / adapter.WEIGHTS, "pt") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 - no mapping
    return count


# --- measuring --------------------------------------------------------------------------------------------------------


def _measure(
    ways: Sequence[Way], settings: CompareSettings, journal: Journal
) -> tuple[PromptSet, dict[str, list[Result]], dict[str, float]]:
    """Decode every prompt in every way.

    Returns:
        The prompts, each way's answers in their order, and the seconds of each way's target pass.
    """
    room = min(way.drafter.context or way.target.max_positions for way in ways)
    room -= max(way.drafter.depth for way in ways) + 1
    prompts = builtin_set(
        "heldout", ways[0].target.tokenizer, limit=settings.prompts, max_new_tokens=settings.max_new_tokens, room=room
    )
    short = [
        dataclasses.replace(request, max_new_tokens=min(request.max_new_tokens, SHORT_TOKENS))
        for request in prompts.requests[:COST_PROMPTS]
    ]
    found: dict[str, list[Result]] = {way.name: [] for way in ways}
    stored = {key: journal.get(key) for key in (COSTS, *(request.id for request in prompts.requests))}
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
        for i, request in enumerate(prompts.requests):
            answers = stored[request.id]
            if answers is None:
                answers = {way.name: result_to_dict(_decode(way, request, bar)) for way in _order(ways, i)}
                journal.put(request.id, answers)
            for name, values in answers.items():
                found[name].append(result_from_dict(values))
    return prompts, found, stored[COSTS]


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


# --- the result -------------------------------------------------------------------------------------------------------


def _result(
    ways: Sequence[Way],
    prompts: PromptSet,
    found: Mapping[str, Sequence[Result]],
    costs: Mapping[str, float],
    settings: CompareSettings,
    sessions: int,
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "model": settings.model,
        "environment": {**environment(ways[0].target), "sessions": sessions},
        "prompts": {
            "name": prompts.name,
            "sha256": prompts.sha256,
            "count": len(prompts.requests),
            "dropped": prompts.dropped,
            "max_new_tokens": settings.max_new_tokens,
        },
        "schemes": [_row(way, found, _ceiling(way, ways, costs)) for way in ways],
        "answers": {
            name: [
                {"id": r.id, "seconds": r.seconds, "steps": [[s.drafted, s.accepted, s.emitted] for s in r.steps]}
                for r in results
            ]
            for name, results in found.items()
        },
    }


def _ceiling(way: Way, ways: Sequence[Way], costs: Mapping[str, float]) -> float:
    """c(1) / min c(N) of this way's target, as measured beside the comparison."""
    same = [costs[other.name] for other in ways if other.baseline == way.baseline and costs[other.name]]
    return costs[way.baseline] / min(same) if same else math.inf


def _row(way: Way, found: Mapping[str, Sequence[Result]], ceiling: float) -> dict[str, Any]:
    """The figures of one way to decode."""
    plain, own = found[way.baseline], found[way.name]
    logs = [r.steps for r in own]
    shares = acceptance(logs)
    row = {
        "name": way.name,
        **dict.fromkeys(("family", "parameters", "train_minutes", "drift")),
        **way.facts,
        "tree": way.tree,
        "depth": way.drafter.depth,
        "nodes": way.drafter.rows,
        "tau": shares.tau,
        "tau_ci": list(tau_interval(logs)),
        "acceptance_conditional": shares.conditional[:SHOWN_DEPTHS],
        "acceptance_cumulative": shares.cumulative[:SHOWN_DEPTHS],
        "tokens_per_s": tokens_per_second(timings(own)),
        "baseline": way.baseline,
        "speedup": None,
        "speedup_ci": None,
        "output_check": None,
        "lossless": True,
        "flag": None,
    }
    if way.name == way.baseline:
        return row
    check = check_outputs(way.target, plain, own, way.drafter.rows)
    row |= {"output_check": check.verdict, "lossless": check.passed}
    if check.passed:
        ratio, interval = speedup(timings(plain), timings(own))
        row |= {"speedup": ratio, "speedup_ci": list(interval)}
        if interval[0] > shares.tau * ceiling:
            row["flag"] = (
                f"the speed-up's lower bound {interval[0]:.2f} is above τ·c(1)/min c(N) = {shares.tau * ceiling:.2f}"
            )
    return row
