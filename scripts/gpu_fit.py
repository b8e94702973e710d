"""Training on one device without DeepSpeed: the arithmetic of `train/engine.py` at ZeRO stage 0.

A machine that is borrowed for measuring has neither DeepSpeed nor pydantic: settings are read from `configs/` as they
are, and the length of a run is a time. Weights are fp32 and are the masters, the step computes under autocast, and the
optimizer clips.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.heads.base import Batch, DraftHead
from draftsmith.heads.named import head_file
from draftsmith.heads.resolve import model_entry
from draftsmith.progress import say
from draftsmith.train.checkpoint import RunState
from draftsmith.train.faults import note_left_out
from draftsmith.train.metrics import Utilisation, Window, peak_memory_bytes
from draftsmith.train.optimizer import MuonAdamW
from draftsmith.train.ranks import Ranks
from draftsmith.train.step import TrainStep

if TYPE_CHECKING:
    from gpu_answers import Documents

COSINE_FLOOR, DECAY_SHARE = 0.02, 1 / 3
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda share: COSINE_FLOOR + (1 - COSINE_FLOOR) * 0.5 * (1 + math.cos(math.pi * share)),
    "wsd": lambda share: min(1.0, (1 - share) / DECAY_SHARE),
}
"""Factor of the learning rates once a share of the run is over, as `train/schedule.py` has it by the step."""
_OF_HEAD = ("family", "layer_ids", "steps", "step_decay", "draft_vocab_size")


@dataclass(frozen=True)
class Settings:
    """What `configs/` says of a head and its training, for one target; the names are those of the files.

    Attributes:
        layer_ids: None = the family's own; draft_vocab_size: None = by the target's vocabulary.
        steps: unrolled in training.
        trees: candidates of an evaluation.
    """

    family: str
    layer_ids: list[int] | None
    steps: int
    step_decay: float
    draft_vocab_size: int | None
    max_length: int
    optimizer: str
    lr_matrix: float
    lr_other: float
    momentum: float
    betas: tuple[float, float]
    weight_decay: float
    warmup: int
    schedule: str
    clip: float
    objective: dict[str, float]
    seed: int
    trees: tuple[str, ...]

    @classmethod
    def of(cls, model: str, head: str) -> Self:
        """Read the head's file and lay over it what the model's file says of all heads, then of this one."""
        values, entry = head_file(head), model_entry(model)
        groups: dict[str, dict[str, Any]] = {"head": {}, "train": {}}  # both have `steps`, and mean another thing
        for source in (values, entry.get("defaults", {}), entry.get("head_defaults", {}).get(head, {})):
            for name, group in groups.items():
                group |= source.get(name, {})
        found: dict[str, Any] = {"betas": tuple(groups["train"]["betas"]), "trees": tuple(values["decode"]["trees"])}
        for name in [f.name for f in fields(cls) if f.name not in found]:
            found[name] = groups["head" if name in _OF_HEAD else "train"][name]
        return cls(**found)

    def lr_factor(self, step: int, share: float) -> float:
        """Factor of the learning rates at a step (0-based), a share of whose run's time is over."""
        return min(1.0, (step + 1) / (self.warmup + 1)) * SCHEDULES[self.schedule](share)


def make_optimizer(head: DraftHead, settings: Settings) -> MuonAdamW:
    """The optimizer of a run over the head's fp32 weights."""
    return MuonAdamW(
        head.named_parameters(),
        lr_matrix=settings.lr_matrix,
        lr_other=settings.lr_other,
        momentum=settings.momentum,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        clip=settings.clip,
        muon=settings.optimizer == "muon",
    )


def backward(step: TrainStep, batch: Batch) -> Tensor:
    """Add the gradients of one batch's loss; returns its `stat_sums` [steps, 6]."""
    loss, sums = step(batch, step.loss_counts(batch), 1.0)
    loss.backward()
    found: Tensor = sums
    return found


def update(optimizer: MuonAdamW, sums: Tensor) -> None:
    """Change the weights by the gradients; a step whose sums or gradients aren't finite is left out."""
    optimizer.skip = not bool(torch.isfinite(sums).all())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class Log:
    """Figures of the updates between two lines, in the form of a run's `metrics.jsonl`.

    Args:
        path: of the file, written anew.
        step, lengths: what is trained, tokens of the documents that it is trained on.

    Attributes:
        last: the latest figures.
    """

    def __init__(self, path: Path, step: TrainStep, lengths: Sequence[int]) -> None:
        self.window = Window(step.head.step_weights(), step.extra)
        self.utilisation = Utilisation.of(step, lengths, Ranks(0, 1, step.parts.embed.device))
        self.last: dict[str, Any] = {}
        self._path = path
        path.write_text("")

    def write(self, updates: int) -> None:
        """Close the window and write its line, if anything was trained in it."""
        if self.window.tokens:
            self.last = self.window.close()
            self.last["mfu"] = self.utilisation.mfu(self.last["supervised"], self.last["tokens_per_s"])
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": "train", "step": updates, **self.last}) + "\n")
            say(f"update {updates}: loss {self.last['loss']:.3f}, {self.last['tokens_per_s']:,.0f} tokens/s")


def fit(
    step: TrainStep,
    documents: Documents,
    settings: Settings,
    *,
    token_budget: int,
    share: Callable[[], float],
    log: Log,
    log_every: int,
) -> dict[str, Any]:
    """Train the step's head on packed batches, epoch after epoch, until the time is over.

    Args:
        step: the head with fp32 weights; computes the states that the documents lack.
        token_budget: of a batch.
        share: of the time that is over; it decides the learning rates, too.
        log_every: updates between two lines of the log.

    Returns:
        updates, tokens, epochs, left_out, seconds, tokens_per_s, peak_memory_bytes (since the start of training on a
        GPU, of the process elsewhere), and of the log's last line loss, accuracy and mfu (None where the device's peak
        isn't listed).

    Raises:
        DraftsmithError: no time was left, or too many updates aren't finite.
    """
    device, state, in_a_row, started = step.parts.embed.device, RunState(), 0, time.monotonic()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # else the answers' cache would count as training's
    step.head.learn(settings.objective)
    optimizer = make_optimizer(step.head, settings)
    for numbers in documents.batches(token_budget, settings.seed):
        if (over := share()) >= 1:
            break
        batch = documents.batch(numbers, device, step.dtype)
        optimizer.set_lr_factor(settings.lr_factor(state.step, over))
        sums = backward(step, batch)
        update(optimizer, sums)
        left_out, tokens = optimizer.skipped, len(batch.tokens)
        state.step, state.tokens = state.step + 1, state.tokens + tokens
        log.window.add(tokens, None if left_out else sums, optimizer.gradient_norm)
        in_a_row = in_a_row + 1 if left_out else 0
        if left_out:
            say(note_left_out(state, [documents.ids[i] for i in numbers], in_a_row))
        if state.step % log_every == 0:
            log.write(state.step)
    log.write(state.step)
    if not optimizer.updates:
        raise DraftsmithError("the answers took all of the time, the head learnt nothing: give more --minutes")
    seconds = time.monotonic() - started
    return {
        "updates": state.step, "tokens": state.tokens, "epochs": state.tokens / sum(documents.lengths),
        "left_out": state.skipped, "seconds": seconds, "tokens_per_s": state.tokens / seconds,
        "peak_memory_bytes": peak_memory_bytes(device), **{key: log.last[key] for key in ("loss", "accuracy", "mfu")},
    }  # fmt: skip
