"""Section `training`: an EAGLE-3 head for a large target, trained on features that are made on the device.

First the gradients of a small head are compared with its own in fp64 on the CPU. Then a head in the shape of Qwen3-8B's
takes steps on random features: tokens/s, peak memory, and the share of the device's peak (MFU, arXiv 2204.02311, B).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from gpu_fit import Settings, backward, make_optimizer, update
from gpu_report import FAIL, INFO, PASS, Report
from gpu_steps import synchronize
from torch import Tensor

from draftsmith.heads.base import Batch, DraftHead, TargetParts
from draftsmith.heads.config import default_layer_ids
from draftsmith.heads.costs import head_costs, planned_head
from draftsmith.heads.registry import head_family
from draftsmith.heads.shapes import TargetShapes, load_shapes
from draftsmith.heads.vocab import DraftVocab
from draftsmith.train.metrics import peak_flops
from draftsmith.train.step import TrainStep

_MODEL, _HEAD = "Qwen3-8B", "eagle3"
_AIM_SECONDS = 120.0
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest error of a gradient, as a share of its norm."""


@dataclass(frozen=True)
class Load:
    """What the steps work on.

    Attributes:
        shapes: of the target.
        documents: tokens of each; the first eighth of them is the prompt.
        steps, draft_vocab: unrolled steps, draft vocabulary.
        warm: updates that aren't timed; timed: those that are, as long as `seconds` last, and two at least.
    """

    shapes: TargetShapes
    documents: tuple[int, ...]
    steps: int
    draft_vocab: int
    warm: int
    timed: int
    seconds: float

    @property
    def tokens(self) -> int:
        """T of a batch."""
        return sum(self.documents)


SMALL = TargetShapes("small", 64, 7, 4, 2, 16, 128, 320, False, 10000.0)


def full() -> Load:
    """T = 4096, 7 steps, 32k tokens."""
    return Load(load_shapes(_MODEL), (1024, 512, 1536, 256, 768), 7, 32_000, 3, 30, 30.0)


TINY = Load(SMALL, (24, 8, 32), 3, 96, 1, 2, 1.0)


def measure(report: Report, device: torch.device, load: Load) -> None:
    """Gradients first, then the speed; the section's own time has an aim."""
    started = time.monotonic()
    with report.section("training", "gradients"):
        check_gradients(report, device)
    with report.section("training", "steps"):
        time_steps(report, device, load)
    seconds = time.monotonic() - started
    report.check("training", "time of this section", seconds < _AIM_SECONDS, f"{seconds:.0f} s", seconds=seconds)


# --- what is trained --------------------------------------------------------------------------------------------------


def make_head(load: Load) -> DraftHead:
    """A head of random fp32 weights on the CPU."""
    layer_ids = default_layer_ids(load.shapes.layers)
    planned = planned_head(
        load.shapes, _HEAD, layer_ids=layer_ids, steps=load.steps, draft_vocab_size=load.draft_vocab
    )  # fmt: skip
    vocab = DraftVocab(torch.arange(load.draft_vocab), load.shapes.vocab)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return head_family(_HEAD).head(planned.config, vocab)


def make_parts(shapes: TargetShapes, device: torch.device, dtype: torch.dtype) -> TargetParts:
    """Random frozen pieces of a target, made on the device."""
    generator = torch.Generator(device).manual_seed(1)

    def draw(rows: int) -> Tensor:
        drawn = torch.empty(rows, shapes.hidden, dtype=dtype, device=device)
        return drawn.normal_(0.0, 0.02, generator=generator)

    ones = torch.ones(shapes.hidden, dtype=dtype, device=device)
    return TargetParts(draw(shapes.vocab), draw(shapes.vocab), ones, 1e-5)


def make_batch(load: Load, device: torch.device, dtype: torch.dtype, seed: int) -> Batch:
    """Random documents with random states, made on the device; most labels are inside the draft vocabulary."""
    generator = torch.Generator(device).manual_seed(seed)
    lengths = torch.tensor(load.documents, device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in load.documents])
    rows, width = load.tokens, load.shapes.hidden

    def states(wide: int) -> Tensor:
        return torch.empty(rows, wide, dtype=dtype, device=device).normal_(generator=generator)

    most = min(load.shapes.vocab, load.draft_vocab + load.draft_vocab // 16)
    return Batch(
        tokens=torch.randint(most, (rows,), device=device, generator=generator),
        answer=positions >= lengths.repeat_interleave(lengths) // 8,
        documents=torch.arange(len(load.documents), device=device).repeat_interleave(lengths),
        positions=positions,
        features=states(len(default_layer_ids(load.shapes.layers)) * width),
        last=states(width),
    )


# --- gradients --------------------------------------------------------------------------------------------------------


def check_gradients(report: Report, device: torch.device) -> None:
    """All gradients of a small head's loss on the device, in fp32 and under autocast, against fp64 on the CPU."""
    cpu = torch.device("cpu")
    # numbers that bf16 holds exactly, so that all read the same ones
    batch, parts = make_batch(TINY, cpu, torch.bfloat16, 2), make_parts(TINY.shapes, cpu, torch.bfloat16)
    want = gradients(make_head(TINY).double(), parts.to(cpu, torch.float64), batch.to(cpu, torch.float64))
    for dtype, limit in LIMITS.items():
        there = batch.to(device, dtype)
        found = gradients(make_head(TINY).to(device), parts.to(device, dtype), there)
        errors = {name: _error(found[name], x) for name, x in want.items()}
        worst = max(errors, key=lambda name: errors[name])
        holds = errors[worst] <= limit
        what = f"gradients of {len(want)} weights, {str(dtype).removeprefix('torch.')}"
        report.check("training", what, holds, f"error {errors[worst]:.1e} ({worst})", error=errors[worst])


def gradients(head: DraftHead, parts: TargetParts, batch: Batch) -> dict[str, Tensor]:
    """Gradients of the loss by name."""
    # fp64 is no dtype to compute under autocast in: like fp32 it is what the weights have
    dtype = torch.bfloat16 if parts.embed.dtype == torch.bfloat16 else torch.float32
    backward(TrainStep(head, parts, dtype), batch)
    return {name: p.grad for name, p in head.named_parameters() if p.grad is not None}


def _error(found: Tensor, want: Tensor) -> float:
    error = float((found.double().cpu() - want).norm() / want.norm())
    return error if math.isfinite(error) else math.inf


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass
class Timed:
    """Figures of updates: of the timed ones seconds, and those of the optimizer; of all the first step's loss.

    Attributes:
        supervised: share of the rows.
    """

    seconds: list[float] = field(default_factory=list)
    updating: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    supervised: float = 0.0


def time_steps(report: Report, device: torch.device, load: Load) -> None:
    """Updates in bf16 over fp32 masters, each on new features: whole, and the optimizer's part."""
    dtype, settings = torch.bfloat16, Settings.of(_MODEL, _HEAD)
    head = make_head(load).to(device)
    step = TrainStep(head, make_parts(load.shapes, device, dtype), dtype)
    optimizer = make_optimizer(head, settings)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found, until = Timed(), time.monotonic() + load.seconds
    for number in range(load.warm + load.timed):
        if len(found.seconds) >= 2 and time.monotonic() > until:
            break
        batch = make_batch(load, device, dtype, 10 + number)
        optimizer.set_lr_factor(settings.lr_factor(number, 0.0))
        synchronize(device)
        started = time.perf_counter()
        sums = backward(step, batch)
        synchronize(device)
        between = time.perf_counter()
        update(optimizer, sums)
        synchronize(device)
        ended = time.perf_counter()
        found.losses.append(float(sums[0, 0] / sums[0, 1]))
        if optimizer.skipped:
            report.add("training", f"update {number + 1}", FAIL, f"not finite: loss {found.losses[-1]}, left out")
            return
        found.supervised = float(sums[0, 2]) / load.tokens  # every batch has the same documents
        if number >= load.warm:
            found.seconds.append(ended - started)
            found.updating.append(ended - between)
    report_steps(report, device, load, head, found)


def report_steps(report: Report, device: torch.device, load: Load, head: DraftHead, found: Timed) -> None:
    """One line: speed, the optimizer's share of it, MFU where the device's peak is listed, peak memory."""
    rate = load.tokens * len(found.seconds) / sum(found.seconds)
    share = sum(found.updating) / sum(found.seconds)
    keys = sum(n * (n + 1) / 2 for n in load.documents) / load.tokens
    flops = head_costs(head).train_flops(found.supervised, keys)
    peak = peak_flops(device, torch.bfloat16)
    mfu = None if peak is None else flops * rate / peak
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    parameters = sum(p.numel() for p in head.parameters())
    what = (
        f"{load.shapes.name} {_HEAD}, {parameters / 1e6:,.1f} M, T {load.tokens}, {load.steps} steps, "
        f"{load.draft_vocab:,} tokens"
    )
    result = f"{rate:,.0f} tokens/s, optimizer {share:.0%} of the time"
    result += f", MFU {mfu:.1%}" if mfu is not None else ", MFU not known: no peak is listed"
    result += f", peak {memory:.1f} GiB" if memory is not None else ""
    report.add(
        "training", what, INFO if device.type == "cpu" else PASS, result,
        tokens_per_s=rate, mfu=mfu, peak_gib=memory, optimizer_share=share,
        flops_per_token=flops, updates=len(found.seconds), first_loss=found.losses[0], last_loss=found.losses[-1],
    )  # fmt: skip
