"""One run of `gpu_train.py`: the target answers, a head learns from the answers, and is measured."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_answers import Documents, answer_prompts
from gpu_fit import Log, Settings, fit

from draftsmith.data_recipes.layout import TargetInfo
from draftsmith.data_recipes.vocabulary import end_tokens
from draftsmith.errors import DraftsmithError
from draftsmith.eval.benchmarks import builtin_set
from draftsmith.eval.decoder.drafters import make_drafter
from draftsmith.eval.decoder.loop import decode, rows_needed
from draftsmith.eval.decoder.probe import check_target
from draftsmith.eval.decoder.search import Chain
from draftsmith.eval.harness import REPORT_DEPTH, EvalSettings, evaluate
from draftsmith.eval.journal import Journal
from draftsmith.eval.metrics import acceptance, tau_interval
from draftsmith.eval.report import REPORT
from draftsmith.eval.report.terminal import summary_rows
from draftsmith.files import read_json, sha256_file, write_json
from draftsmith.heads.base import DraftHead
from draftsmith.heads.checkpoint import WEIGHTS, load_head
from draftsmith.heads.config import default_layer_ids
from draftsmith.heads.eagle3 import Eagle3Head, eagle3_config
from draftsmith.heads.resolve import model_entry
from draftsmith.heads.shapes import load_shapes
from draftsmith.heads.target import Target, load_parts
from draftsmith.heads.vocab import build_vocab
from draftsmith.progress import say
from draftsmith.train.checkpoint import save_best
from draftsmith.train.online import OnlineStep

MODEL, HEAD = "smollm2-135m", "eagle3"
MOST_BYTES = 16 * 2**20
"""Of a file in OUT."""
HEADER_ROOM = 1 << 16
BEST, METRICS, JOURNAL = "best", "metrics.jsonl", "journal.jsonl"
FIRST, ASKED = "first", "asked"
"""Keys: of the report, what `first_tau` found; of the journal, what the evaluation was asked for."""


@dataclass(frozen=True)
class Sizes:
    """What a run works on.

    Attributes:
        prompts: that are answered; None = all built-in ones.
        new_tokens, slots: most tokens of an answer, answers at the same time.
        token_budget: tokens of a packed batch. More than on a CPU: a step takes as long as its launches.
        eval_share: of the time, left for measuring.
        answers, updates: that end asking and training; None = the time does.
        evaluation: values of EvalSettings; trees: candidates beside those of the head's file.
        log_every: updates between two lines of the log.
    """

    prompts: int | None
    new_tokens: int
    slots: int
    token_budget: int
    eval_share: float
    answers: int | None
    updates: int | None
    evaluation: dict[str, Any]
    trees: tuple[str, ...]
    log_every: int


FULL = Sizes(
    None, 256, 512, 4096, 0.4, None, None, {"prompts": 20, "max_new_tokens": 64}, ("chain:6", "dynamic:6x6x40"), 100
)  # fmt: skip
TINY = Sizes(
    4, 24, 4, 160, 0.4, 10, 24,
    {"prompts": 2, "max_new_tokens": 8, "tuning_prompts": 2, "tuning_new_tokens": 6, "timed_prompts": 1,
     "timed_new_tokens": 4},
    (), 4,
)  # fmt: skip


def run(folder: Path, out: Path, started: float, seconds: float, dry_run: bool) -> int:
    """Answer and train until the measuring's share of `seconds` since `started` is left, then measure.

    A head that is there already is measured only, from where its journal stands.

    Args:
        started: on the monotonic clock.

    Returns:
        The exit status.

    Raises:
        DraftsmithError: another model's folder, a measured head in `out`, or no time for training.
    """
    sizes, settings = TINY if dry_run else FULL, Settings.of(MODEL, HEAD)
    names: tuple[str, str | None] = (folder.name, None) if dry_run else identity_of(folder)
    report = out / REPORT
    if report.exists() and "summary" in read_json(report):
        raise DraftsmithError(f"{report} is there already: give another --out")
    out.mkdir(parents=True, exist_ok=True)
    dtype, device = (torch.float32, "cpu") if dry_run else (torch.bfloat16, "cuda")
    target = Target.load(str(folder), dtype=dtype, device=device)
    check_target(target)
    if (out / BEST).exists():
        say(f"{out / BEST} is there already: it is measured")
    else:
        train(target, out, sizes, settings, names, started + seconds * (1 - sizes.eval_share))
    found = measure(target, out, EvalSettings(trees=[*settings.trees, *sizes.trees], **sizes.evaluation))
    show(found, out, time.monotonic() - started)
    return 0 if found["summary"]["speedup"] is not None else 1


def train(
    target: Target, out: Path, sizes: Sizes, settings: Settings, names: tuple[str, str | None], end: float
) -> None:
    """Answer for half of the time until `end`, train for the other; the head is saved in bf16."""
    target.check_trainable()
    for stale in (REPORT, JOURNAL):  # of a head that is gone
        (out / stale).unlink(missing_ok=True)
    documents = answer_prompts(
        target, limit=sizes.prompts, most=sizes.new_tokens, room=min(settings.max_length, target.max_positions),
        slots=sizes.slots, seed=settings.seed, share=share_until((time.monotonic() + end) / 2, sizes.answers),
    )  # fmt: skip
    head, coverage = new_head(target, documents, settings, names)
    step = OnlineStep(head.to(target.device), target.parts(), target.dtype, target)
    trained = fit(
        step, documents, settings, token_budget=sizes.token_budget, share=share_until(end, sizes.updates),
        log=Log(out / METRICS, step, documents.lengths), log_every=sizes.log_every,
    )  # fmt: skip
    record = {"answers": documents.figures(), "vocabulary_coverage": coverage, "training": trained}
    save_best(out, head.to(torch.bfloat16), record)


def share_until(end: float, calls: int | None = None) -> Callable[[], float]:
    """What share of the time from now to `end`, on the monotonic clock, is over.

    Args:
        calls: the share that it returns is of so many calls instead, 0 at the first.
    """
    if calls is not None:
        numbers = itertools.count()
        return lambda: next(numbers) / calls
    begin = time.monotonic()
    return lambda: 1.0 if end <= begin else (time.monotonic() - begin) / (end - begin)


def identity_of(folder: Path) -> tuple[str, str]:
    """Id and revision of the default target, as heads name it; raises DraftsmithError for another model's folder."""
    listed, found = (dataclasses.asdict(load_shapes(x)) for x in (MODEL, str(folder)))
    if other := [key for key in listed if key != "name" and found[key] != listed[key]]:
        raise DraftsmithError(
            f"{folder} is not {MODEL}: its {other[0]} is {found[other[0]]}, not {listed[other[0]]}; --help says where "
            "its folder comes from"
        )
    entry = model_entry(MODEL)
    return entry["hub_id"], f"{entry['wheel']['project']}=={entry['wheel']['version']}"


def new_head(
    target: Target, documents: Documents, settings: Settings, names: tuple[str, str | None]
) -> tuple[DraftHead, float]:
    """An initialised head whose draft vocabulary is that of the answers, and their coverage by it.

    Args:
        names: id and revision of the target as the head's config records them.

    Raises:
        DraftsmithError: its file would be too large.
    """
    assert settings.draft_vocab_size is not None  # the default target's file says it
    ends = end_tokens(TargetInfo.read(target.id), target.tokenizer)
    vocab, coverage = build_vocab(documents.label_counts(target.vocab_size), settings.draft_vocab_size, ends)
    config = eagle3_config(
        target.config,
        vocab,
        layer_ids=settings.layer_ids or default_layer_ids(target.n_layers),
        steps=settings.steps,
        step_decay=settings.step_decay,
        target_id=names[0],
        target_revision=names[1],
        target_fingerprint=target.fingerprint,
        chat_template_sha256=target.template_sha256,
        trained_length=max(documents.lengths),
    )
    head = Eagle3Head(config, vocab)
    if (size := 2 * sum(p.numel() for p in head.parameters())) > MOST_BYTES - HEADER_ROOM:
        raise DraftsmithError(
            f"the head has {size / 2**20:.1f} MiB in bf16, its file must stay below {MOST_BYTES / 2**20:.0f}: lower "
            f"head.draft_vocab_size in configs/models/{MODEL}.yaml"
        )
    say(head.initialise(load_parts(target.id, None, torch.float32), torch.Generator().manual_seed(settings.seed)))
    return head, coverage


def measure(target: Target, out: Path, settings: EvalSettings) -> dict[str, Any]:
    """Measure the saved head; returns the report.

    The machine may be taken away any time: tau is in the report's file before anything slow begins, and the journal
    keeps every answer that is measured.

    Raises:
        DraftsmithError: the journal holds answers on another device or with other settings.
    """
    head = load_head(out / BEST)
    target.check_head(head.config)
    journal = Journal.open(out / JOURNAL)
    asked = {"device": str(target.device), **dataclasses.asdict(settings)}
    if (kept := journal.get(ASKED)) is None:
        journal.put(ASKED, asked)
    elif kept != asked:
        raise DraftsmithError(f"{out / JOURNAL} is of another device or other settings: delete it to measure anew")
    weights = {"head_sha256": sha256_file(out / BEST / WEIGHTS)}
    if (first := journal.get(FIRST)) is None:
        first = first_tau(target, head, settings)
        journal.put(FIRST, first)
    write_json(out / REPORT, {FIRST: first, **weights})
    say(f"tau {first['tau']:.3f} with {first['tree']} on {first['prompts']} held-out prompts")
    report = {**evaluate(target, head, settings, journal, out / BEST), FIRST: first, **weights}
    write_json(out / REPORT, report)
    return report


def first_tau(target: Target, head: DraftHead, settings: EvalSettings) -> dict[str, Any]:
    """Acceptance on the held-out prompts with the chain that every report has, all at the same time: seconds of work.

    Returns:
        tree, tau, tau_ci, acceptance_conditional, prompts (their number), max_new_tokens, seconds.
    """
    started, drafter = time.monotonic(), make_drafter(head, target.parts(), Chain(REPORT_DEPTH))
    requests = builtin_set(
        "heldout", target.tokenizer, limit=settings.prompts, max_new_tokens=settings.max_new_tokens,
        room=target.max_positions - REPORT_DEPTH - 1,
    ).requests  # fmt: skip
    capacity = rows_needed(requests, drafter)
    steps = {r.id: r.steps for r in decode(target, drafter, requests, slots=len(requests), capacity=capacity)}
    logs = [steps[r.id] for r in requests]
    shares = acceptance(logs)
    return {
        "tree": f"chain:{REPORT_DEPTH}", "tau": shares.tau, "tau_ci": list(tau_interval(logs)),
        "acceptance_conditional": shares.conditional, "prompts": len(logs),
        "max_new_tokens": settings.max_new_tokens, "seconds": time.monotonic() - started,
    }  # fmt: skip


def show(report: dict[str, Any], out: Path, seconds: float) -> None:
    """Print the result, and what came out; raises DraftsmithError for a file that is too large to be carried."""
    for name, text in summary_rows(report):
        print(f"{name:28} {text}")
    print(f"{'seconds':28} {seconds:.0f}")
    for file in [*sorted((out / BEST).iterdir()), out / REPORT, out / METRICS, out / JOURNAL]:
        size = file.stat().st_size
        print(f"{file.relative_to(out)!s:28} {size / 2**20:.2f} MiB")
        if size >= MOST_BYTES:
            raise DraftsmithError(f"{file} has {size} bytes, files must stay below {MOST_BYTES}")
