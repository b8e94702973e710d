"""The benchmarks by name, and that of the decoder against `transformers.generate`: in turns, ratios, never seconds."""

from __future__ import annotations

import dataclasses
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from ..data_recipes.builtin import builtin_prompts
from ..data_recipes.chat import render_prompt
from ..errors import DraftsmithError
from ..files import probe_writable, write_json
from ..heads.eagle3 import Eagle3Head, eagle3_config
from ..heads.target import Target
from ..heads.vocab import DraftVocab
from ..progress import progress_bar
from .bench_data import DataBenchSettings, bench_data
from .decoder.drafters import make_drafter
from .decoder.drafters.draft_model import DraftModelDrafter
from .decoder.drafters.plain import PlainDrafter
from .decoder.drafters.prompt_lookup import PromptLookupDrafter
from .decoder.loop import Request, StepTimer, decode, rows_needed
from .decoder.search import Chain
from .decoder.types import Drafter
from .metrics import Timing
from .schemes import load_model

RESAMPLES, SEED = 2000, 20261


@dataclass(frozen=True)
class BenchSettings:
    """What is decoded.

    Attributes:
        prompts, new_tokens: for everything at batch 1; answers may end earlier.
        depth: K of the chain whose overhead is measured, and of draft-model decoding.
        draft_layers: the draft model is the target's first layers with its norm and output head.
        lookup_tokens, lookup_ngram: of Prompt Lookup.
        batch_prompts, batch_new_tokens, batch_rounds: for the comparison of full batches.
        slots: sequences that the loop runs at once there.
        generate_batches: batch sizes that `generate` may choose its best from.
    """

    prompts: int = 8
    new_tokens: int = 64
    depth: int = 5
    draft_layers: int = 6
    lookup_tokens: int = 10
    lookup_ngram: int = 3
    batch_prompts: int = 128
    batch_new_tokens: int = 96
    batch_rounds: int = 2
    slots: int = 64
    generate_batches: tuple[int, ...] = (32, 64, 128)

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            for one in value if isinstance(value, tuple) else [value]:
                least = 2 if name == "new_tokens" else 1  # the first token is the prefill's: no step
                if one < least:
                    raise DraftsmithError(f"bench.{name} = {value} must be at least {least}")


def bench_decoder(target: Target, settings: BenchSettings) -> dict[str, Any]:
    """Measure the loop's overhead, and every way of decoding that `transformers.generate` has, too, against it.

    The counterpart is the model as transformers loads it, in the target's dtype, with the same prompts, draft lengths
    and draft model; both sides are timed from the prompt to the last token. `generate` on the target's own layers,
    which are packed for CPUs, is given beside it.

    Returns:
        Figures as {median, low, high}, and what that spread is of.
    """
    layers = target.config.num_hidden_layers
    if settings.draft_layers > layers:
        raise DraftsmithError(f"bench.draft_layers = {settings.draft_layers} is more than the target's {layers} layers")
    plain_model = transformers.AutoModelForCausalLM.from_pretrained(
        target.id, revision=target.revision, dtype=target.dtype
    ).to(target.device)
    requests = bench_requests(target, settings.prompts, settings.new_tokens)
    figures: dict[str, Any] = {}
    sides = 2 * len(requests)
    work = 4 * sides + len(requests)
    with tempfile.TemporaryDirectory() as folder, progress_bar("bench", work, "answers") as bar:
        chains = make_drafter(untrained_head(target), target.parts(), Chain(settings.depth))
        shares = [_overhead(target, chains, r, bar.advance) for r in requests]
        figures["overhead_share"] = _spread([x for x in shares if x is not None])
        for name, ours, theirs in _pairs(target, plain_model, settings, Path(folder)):
            figures[name] = _spread(list(_ratios(requests, ours, theirs, bar.advance)))
    figures["batch64_vs_generate"] = _full_batches(target, plain_model, settings)
    return {
        "figures": figures,
        "spread": "median of the prompts and its 95 % bootstrap interval; full batches: median, least, most of rounds",
    }


def bench_requests(target: Target, prompts: int, new_tokens: int) -> list[Request]:
    """The first built-in training prompts: of all kinds, and never those that heads are judged on."""
    texts = builtin_prompts("train")[:prompts]
    rendered = [render_prompt(target.tokenizer, [{"role": "user", "content": p.text}]) for p in texts]
    return [Request(p.id, tokens, new_tokens) for p, tokens in zip(texts, rendered, strict=True)]


Run = Callable[[Request], Timing]


def _pairs(target: Target, plain_model: Any, settings: BenchSettings, folder: Path) -> Iterator[tuple[str, Run, Run]]:
    """Name, our side and theirs."""
    shallow = first_layers(plain_model, settings.draft_layers)
    shallow.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    draft = Target.load(str(folder), dtype=target.dtype, device=str(target.device))
    for name, value in (("num_assistant_tokens", settings.depth), ("num_assistant_tokens_schedule", "constant"),
                        ("assistant_confidence_threshold", 0.0)):  # fmt: skip
        setattr(shallow.generation_config, name, value)
    lookup = {"prompt_lookup_num_tokens": settings.lookup_tokens, "max_matching_ngram_size": settings.lookup_ngram}

    def ours(drafter: Drafter) -> Run:
        return lambda request: decode_one(target, drafter, request)

    def theirs(model: Any, **options: Any) -> Run:
        return lambda request: generate(target, model, [request], **options)

    plain = ours(PlainDrafter())
    yield "plain_vs_generate", plain, theirs(plain_model)
    yield "plain_vs_generate_on_our_layers", plain, lambda request: _on_our_layers(target, request)
    found = PromptLookupDrafter(settings.lookup_ngram, settings.lookup_tokens)
    yield "prompt_lookup_vs_generate", ours(found), theirs(plain_model, **lookup)
    drafted = DraftModelDrafter(target, draft, Chain(settings.depth))
    yield "draft_model_vs_generate", ours(drafted), theirs(plain_model, assistant_model=shallow)


def _on_our_layers(target: Target, request: Request) -> Timing:
    with target.attention():
        return generate(target, target.model, [request])


def decode_one(target: Target, drafter: Drafter, request: Request, timer: StepTimer | None = None) -> Timing:
    """Time one answer at batch 1, prefill and allocation included."""
    started = _now(target)
    (result,) = decode(target, drafter, [request], slots=1, capacity=rows_needed([request], drafter), timer=timer)
    return Timing(len(result.tokens), _now(target) - started)


@torch.inference_mode()
def generate(target: Target, model: Any, requests: Sequence[Request], **options: Any) -> Timing:
    """Time one batch of `transformers.generate`, padded on the left; tokens up to each answer's end count."""
    longest = max(len(r.tokens) for r in requests)
    pad = target.eos_ids[0]
    ids = torch.tensor([[pad] * (longest - len(r.tokens)) + r.tokens for r in requests], device=target.device)
    mask = torch.tensor([[0] * (longest - len(r.tokens)) + [1] * len(r.tokens) for r in requests], device=ids.device)
    started = _now(target)
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=max(r.max_new_tokens for r in requests), do_sample=False,
        pad_token_id=pad, **options,
    )  # fmt: skip
    seconds = _now(target) - started
    answers = [_cut(row, target.eos_ids) for row in out[:, longest:].tolist()]
    return Timing(sum(map(len, answers)), seconds)


def _cut(tokens: list[int], stop: Sequence[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))
    return tokens[:end]


def _now(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()


def first_layers(model: Any, count: int) -> Any:
    """A model of the same architecture with the first `count` decoder layers; shares no memory with `model`."""
    config = type(model.config).from_dict(model.config.to_dict() | {"num_hidden_layers": count})
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    shallow = type(model)(config).to(model.device, model.dtype).eval()
    shallow.generation_config = model.generation_config.from_dict(model.generation_config.to_dict())
    layer = re.compile(r"\.layers\.(\d+)\.")
    kept = {k: v for k, v in model.state_dict().items() if not (m := layer.search(k)) or int(m[1]) < count}
    shallow.load_state_dict(kept)
    return shallow


def _ratios(requests: Sequence[Request], ours: Run, theirs: Run, advance: Callable[[], None]) -> Iterator[float]:
    """Our tokens/s over theirs for each prompt, the order turned round from prompt to prompt; one warm-up each."""
    short = dataclasses.replace(requests[0], max_new_tokens=8)
    ours(short)
    theirs(short)
    for i, request in enumerate(requests):
        speeds = {}
        for run in (ours, theirs) if i % 2 == 0 else (theirs, ours):
            timing = run(request)
            speeds[run] = timing.tokens / timing.seconds
            advance()
        yield speeds[ours] / speeds[theirs]


def _overhead(target: Target, drafter: Drafter, request: Request, advance: Callable[[], None]) -> float | None:
    """Share of a step outside the forward passes of target and drafter.

    None for an answer that its first token ended.
    """
    timer = StepTimer()
    decode_one(target, drafter, request, timer)
    advance()
    return 1 - (timer.target + timer.draft) / timer.step if timer.steps else None


def untrained_head(target: Target) -> Eagle3Head:
    """An EAGLE-3 head as training would start it, with a draft vocabulary of every sixth token."""
    vocab = DraftVocab(torch.arange(0, target.vocab_size, 6), target.vocab_size)
    config = eagle3_config(
        target.config, vocab, target_id=target.id, target_revision=target.revision,
        target_fingerprint=target.fingerprint, chat_template_sha256=None, trained_length=1,
    )  # fmt: skip
    head = Eagle3Head(config, vocab)
    head.initialise(target.parts(), torch.Generator().manual_seed(SEED))
    return head


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Median of the prompts and the 95 % bootstrap interval of it."""
    x = np.asarray(values)
    picks = np.random.default_rng(SEED).integers(0, len(x), (RESAMPLES, len(x)))
    low, high = np.quantile(np.median(x[picks], axis=1), [0.025, 0.975])
    return {"median": float(np.median(x)), "low": float(low), "high": float(high)}


def _full_batches(target: Target, plain_model: Any, settings: BenchSettings) -> dict[str, Any]:
    """Greedy answers with all slots busy against `generate` at its best batch size, chosen in the first round.

    Both get the same list; `generate` takes it in its order, batch by batch. The loop sorts what it is given: how
    `generate` fares when someone sorts for it is measured once, too.
    """
    requests = bench_requests(target, settings.batch_prompts, settings.batch_new_tokens)
    plain, capacity = PlainDrafter(), rows_needed(requests, PlainDrafter())
    by_size: dict[int, list[float]] = {size: [] for size in settings.generate_batches}
    ours: list[float] = []
    with progress_bar("bench full batches", settings.batch_rounds + len(by_size) + settings.batch_rounds - 1) as bar:
        for _ in range(settings.batch_rounds):
            started = _now(target)
            slots = min(settings.slots, len(requests))
            results = list(decode(target, plain, requests, slots=slots, capacity=capacity))
            ours.append(sum(len(r.tokens) for r in results) / (_now(target) - started))
            bar.advance()
            first = not any(by_size.values())
            for size in by_size if first else [max(by_size, key=lambda s: by_size[s][0])]:
                by_size[size].append(_generate_all(target, plain_model, requests, size))
                bar.advance()
        best = max(by_size, key=lambda s: by_size[s][0])
        ordered = _generate_all(target, plain_model, sorted(requests, key=lambda r: len(r.tokens)), best)
    ratios = [a / b for a, b in zip(ours, by_size[best], strict=True)]
    return {
        "median": statistics.median(ratios), "low": min(ratios), "high": max(ratios),
        "tokens_per_s": ours, "generate_tokens_per_s": {str(size): speeds for size, speeds in by_size.items()},
        "generate_sorted_tokens_per_s": ordered,
    }  # fmt: skip


def _generate_all(target: Target, model: Any, requests: Sequence[Request], size: int) -> float:
    tokens, seconds = 0, 0.0
    for at in range(0, len(requests), size):
        timing = generate(target, model, requests[at : at + size])
        tokens, seconds = tokens + timing.tokens, seconds + timing.seconds
    return tokens / seconds


@dataclass(frozen=True)
class Bench:
    """One benchmark.

    Attributes:
        settings: dataclass of whole numbers, or tuples of them.
        measure: from a target and such settings to "figures" by name and "spread", what low and high are.
    """

    settings: type[Any]
    measure: Callable[[Target, Any], dict[str, Any]]


BENCHES = {"decoder": Bench(BenchSettings, bench_decoder), "data": Bench(DataBenchSettings, bench_data)}


def bench_settings(name: str, overrides: Sequence[str] = (), benches: Mapping[str, Bench] = BENCHES) -> Any:
    """The settings of a benchmark; see `run_bench`, which raises the same."""
    if name not in benches:
        raise DraftsmithError(f"there is no benchmark {name!r}; there are: {', '.join(benches)}")
    return _settings(benches[name].settings, overrides)


def run_bench(
    name: str, model: str, runs: Path, overrides: Sequence[str] = (), benches: Mapping[str, Bench] = BENCHES
) -> tuple[Path, dict[str, Any]]:
    """Run benchmark `name` on a target and write its figures to RUNS/bench/NAME.json.

    Args:
        model: short name, hub id or folder.
        overrides: KEY=VALUE with the fields of the benchmark's settings.
        benches: those that there are; floors above this one have more.

    Returns:
        The file and its content: what the benchmark returns, and settings, target and machine.

    Raises:
        DraftsmithError: an unknown benchmark, key or value; a target that can't be loaded.
    """
    settings = bench_settings(name, overrides, benches)
    bench = benches[name]
    probe_writable(runs)
    target = load_model(model)
    result = {
        **bench.measure(target, settings),
        "settings": dataclasses.asdict(settings),
        "target": {
            "model": model, "dtype": str(target.dtype).removeprefix("torch."), "device": str(target.device),
        },
        "machine": {
            "processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
            "torch": torch.__version__, "transformers": transformers.__version__,
        },
    }  # fmt: skip
    path = runs / "bench" / f"{name}.json"
    write_json(path, result)
    return path, result


def figure_line(name: str, figure: dict[str, Any]) -> str:
    """Return a figure as one line for people, with its aim where it has one."""
    line = f"{name:34} {figure['median']:10.3f}  [{figure['low']:.3f}, {figure['high']:.3f}]"
    return f"{line}  aim {figure['aim']}: {'met' if figure['met'] else 'missed'}" if "aim" in figure else line


def _settings(kind: type[Any], overrides: Sequence[str]) -> Any:
    known = {f.name: f for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for text in overrides:
        key, _, value = text.partition("=")
        if key not in known:
            raise DraftsmithError(f"{text!r} names no setting of a benchmark; there are: {', '.join(known)}")
        try:
            numbers = [int(x) for x in value.split(",")]
        except ValueError:
            raise DraftsmithError(f"{text!r} needs a whole number, or several with commas between them") from None
        several = isinstance(known[key].default, tuple)
        if not several and len(numbers) > 1:
            raise DraftsmithError(f"{text!r} takes one number")
        values[key] = tuple(numbers) if several else numbers[0]
    return kind(**values)
