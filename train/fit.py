"""Fit a head with DeepSpeed: the same code for one process without a launcher and for many under torchrun."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data_recipes.store import FeatureStore
from ..errors import DraftsmithError
from ..files import sweep
from ..heads.base import DraftHead, TargetParts
from ..heads.target import auto_dtype
from ..progress import Progress, progress_bar, say
from .batches import BatchPlan, BatchStream, Item, trainable_documents
from .checkpoint import RunState, load_checkpoint, save_best, save_checkpoint, step_folders
from .interrupt import StopRequest
from .metrics import summarise
from .optimizer import MuonAdamW
from .ranks import Ranks, import_deepspeed, process_group, quietly
from .schedule import PILOT_STEPS, lr_factor, steps_within
from .settings import TrainSettings
from .step import SUMS, TrainStep
from .tracking import Tracker
from .validate import validate

MAX_SKIPPED = 3
"""Steps that may be left out for a loss or gradient that isn't finite; one more stops the run."""

_SAVE_BYTES_PER_SECOND = 200e6
_CHECKPOINT_BYTES = 12
"""Per parameter at most: fp32 weight and two moments."""


def fit(
    settings: TrainSettings,
    store: FeatureStore,
    parts: TargetParts,
    head: DraftHead,
    folder: Path,
    *,
    budget_seconds: float | None = None,
    resume_command: str = "the same command again",
    wandb: bool | None = None,
) -> dict[str, Any]:
    """Train `head` in place, or go on from the newest checkpoint in `folder`.

    Args:
        settings: how.
        store: collected features; documents of split "train" are trained on, those of "val" validated on.
        parts: of the head's target, in any dtype.
        head: initialised; its weights become fp32.
        folder: gets `checkpoints/` and `metrics.jsonl`.
        budget_seconds: wall time of a time-limited run, from this call on; None takes settings.minutes.
        resume_command: what the user is told to run after an interruption.
        wandb: see tracking.Tracker.

    Returns:
        finished (False after a signal), exit_code, step, total_steps, tokens, seconds, best_step, best_tau_walk,
        skipped, checkpoint (folder of the best head), and the counts of documents.

    Raises:
        DraftsmithError: nothing to train on or validate with, a damaged checkpoint, too many steps that weren't finite.
    """
    started = time.monotonic()
    with process_group() as ranks:
        trainer = Trainer(settings, store, parts, head, folder, ranks, wandb=wandb)
        trainer.started = started
        if budget_seconds is not None:
            trainer.budget_seconds = budget_seconds
        with contextlib.closing(trainer):
            return trainer.run(resume_command)


class Trainer:
    """One run on one rank; `state` is where it stands."""

    def __init__(
        self,
        settings: TrainSettings,
        store: FeatureStore,
        parts: TargetParts,
        head: DraftHead,
        folder: Path,
        ranks: Ranks,
        *,
        wandb: bool | None = None,
    ) -> None:
        self.settings, self.store, self.ranks = settings, store, ranks
        self.checkpoints = folder / "checkpoints"
        self.started = time.monotonic()
        self.budget_seconds = settings.minutes * 60 if settings.minutes else None
        dtype = auto_dtype(ranks.device) if settings.dtype == "auto" else getattr(torch, settings.dtype)
        self.head = head.to(ranks.device, torch.float32)
        self.step_module = TrainStep(head, parts.to(ranks.device, dtype), dtype)
        self.optimizer = MuonAdamW(
            head.named_parameters(),
            lr_matrix=settings.lr_matrix,
            lr_other=settings.lr_other,
            momentum=settings.momentum,
            betas=(settings.betas[0], settings.betas[1]),
            weight_decay=settings.weight_decay,
        )
        if ranks.is_main:
            sweep(self.checkpoints)
        ranks.barrier()
        found = step_folders(self.checkpoints)
        self.state = load_checkpoint(found[-1], head, self.optimizer) if found else RunState()
        self.resumed_seconds = self.state.seconds
        self.plan, self.held_out, self.documents = _plans(store, settings)
        self.stream = BatchStream(
            store, self.plan, (self.state.epoch, self.state.index), ranks.rank, ranks.world, settings.accumulation + 1
        )
        self.batches_per_step = ranks.world * settings.accumulation
        self.engine = _engine(self.step_module, self.optimizer, settings, ranks)
        config = {**settings.model_dump(), "world": ranks.world}
        self.tracker = Tracker(folder, self.state.step, wandb, config) if ranks.is_main else None
        self.window = torch.zeros(head.config.steps, len(SUMS), dtype=torch.float64)
        self.window_tokens, self.window_started = 0, time.monotonic()
        self.stop = StopRequest()
        self.stopping = False
        self.validated_at: int | None = None

    # --- the run ---------------------------------------------------------------------------------------------------

    def run(self, resume_command: str) -> dict[str, Any]:
        """Train to the end or to a signal; returns the summary that `fit` documents."""
        with self.stop:
            if self.state.total_steps is None:
                self.state.total_steps = self._fixed_length()
            if self.state.total_steps is None:
                self._pilot()
            if self.state.total_steps is not None:
                with self._bar("train", self.state.total_steps) as bar:
                    while self.state.step < self.state.total_steps and not self.stopping:
                        self.train_step(bar)
                        self._after_step(self.state.total_steps)
        if self.stopping and self.ranks.is_main:
            self._report_stop(resume_command)
        return self._summary()

    def train_step(self, bar: Progress) -> None:
        """Take one optimizer step over world x accumulation batches."""
        s, ranks = self.settings, self.ranks
        items = [next(self.stream) for _ in range(s.accumulation)]
        batches = [item.batch.to(ranks.device, self.step_module.dtype) for item in items]
        counts = ranks.all_sum(torch.stack([self.head.loss_counts(b) for b in batches]).sum(0))
        self.optimizer.set_lr_factor(lr_factor(self.state.step, self.state.total_steps, s))
        sums, bad = self.window.new_zeros(self.window.shape, device=ranks.device), []
        for item, batch in zip(items, batches, strict=True):
            # the engine divides by the accumulation, its all-reduce by the world: the loss is a global sum already
            loss, part = self.engine(batch, counts, float(self.batches_per_step))
            self.engine.backward(loss)
            sums += part
            if not bool(torch.isfinite(part).all()):
                bad.append(item)
            if item is items[-1]:
                rows = sum(len(b.tokens) for b in batches)
                pooled = self._pool(sums, rows)
                self.optimizer.skip = not bool(torch.isfinite(pooled).all())
            self.engine.step()
        self.state.step += 1
        self.state.epoch, self.state.index = self.plan.advance(
            (self.state.epoch, self.state.index), self.batches_per_step
        )
        self.state.updates = self.optimizer.updates
        if self.optimizer.skipped:
            self._left_out(bad or items)
        else:
            self.window += pooled[:-2].view_as(self.window).cpu()
        tokens = int(pooled[-2])
        self.state.tokens += tokens
        self.window_tokens += tokens
        self.stopping = bool(pooled[-1])
        bar.advance(1)

    def _pool(self, sums: Tensor, rows: int) -> Tensor:
        """Sum over the ranks: the step's sums, its rows, and whether any rank was asked to stop."""
        extra = sums.new_tensor([rows, self.stop.signal is not None])
        return self.ranks.all_sum(torch.cat((sums.flatten(), extra)))

    def _after_step(self, total_steps: int) -> None:
        step, s = self.state.step, self.settings
        interval = s.validation_interval(total_steps)
        last = step == total_steps
        if last or self.stopping or step % s.log_every == 0:
            self.log()
        if last or step % interval == 0:
            self.validate()
        if last or self.stopping or step % (s.save_every or interval) == 0:
            self.save()

    def _left_out(self, items: list[Item]) -> None:
        names = self.ranks.gather([self.store.ids[i] for item in items for i in item.documents])
        self.state.skipped += 1
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        message = f"step {self.state.step}: loss or gradient not finite on documents {shown}"
        if self.ranks.is_main:
            say(f"{message}; the step is left out ({self.state.skipped} so far)")
        if self.state.skipped > MAX_SKIPPED:
            raise DraftsmithError(
                f"{message}; {self.state.skipped} steps were left out, more than {MAX_SKIPPED}: lower train.lr_matrix, "
                "or look at those documents"
            )

    # --- length ----------------------------------------------------------------------------------------------------

    def _fixed_length(self) -> int | None:
        """Total steps where no clock decides them."""
        shortest = min(self._step_limits(), default=None)
        if self.budget_seconds is not None and (shortest is None or shortest > PILOT_STEPS):
            return None
        return shortest

    def _step_limits(self) -> list[int]:
        limits = [self.settings.steps] if self.settings.steps else []
        if self.settings.epochs:
            limits.append(self.plan.steps_in(self.settings.epochs, self.batches_per_step))
        return limits

    def _pilot(self) -> None:
        """Take the first steps of a time-limited run, and from their pace fix the length: all else goes by the step."""
        assert self.budget_seconds is not None
        measured_from = 0.0
        with self._bar("train: pilot", PILOT_STEPS) as bar:
            while self.state.step < PILOT_STEPS:
                self.train_step(bar)
                if self.stopping:
                    return
                if self.state.step == 1:
                    measured_from = time.monotonic()
        now = time.monotonic()
        step_seconds = (now - measured_from) / (PILOT_STEPS - 1)
        self.log()
        self.validate()
        parameters = sum(p.numel() for p in self.head.parameters())
        validation_seconds = time.monotonic() - now + parameters * _CHECKPOINT_BYTES / _SAVE_BYTES_PER_SECOND
        left = self.budget_seconds - self._seconds()
        total = steps_within(left, step_seconds, validation_seconds, self.settings, self.state.step)
        self.state.total_steps = self.ranks.from_main(min([total, *self._step_limits()]))
        if self.ranks.is_main:
            say(f"train: {step_seconds:.2f} s a step, so {self.state.total_steps} steps in the time given")
        self.save()

    # --- figures and files -----------------------------------------------------------------------------------------

    def log(self) -> None:
        """Write the figures of the steps since the last call."""
        seconds = time.monotonic() - self.window_started
        if self.tracker is not None and self.window_tokens:
            values = summarise(self.window, self.head.step_weights())
            values |= {
                "lr_factor": lr_factor(self.state.step - 1, self.state.total_steps, self.settings),
                "tokens": self.state.tokens,
                "tokens_per_s": self.window_tokens / seconds,
                "epoch": self.state.epoch,
                "skipped": self.state.skipped,
                "seconds": round(self._seconds(), 3),
            }
            self.tracker.log("train", self.state.step, values)
        self.window.zero_()
        self.window_tokens, self.window_started = 0, time.monotonic()

    def validate(self) -> None:
        """Validate, log, and keep the head if its tau_walk is the best so far."""
        if self.validated_at == self.state.step:
            return
        self.validated_at = self.state.step
        found = validate(self.step_module, self.store, self.held_out, self.settings.validate_depth, self.ranks)
        if self.tracker is not None:
            self.tracker.log("validation", self.state.step, {**found, "seconds": round(self._seconds(), 3)})
            first = found["acceptance_cumulative"][0]
            say(f"step {self.state.step}: tau_walk {found['tau_walk']:.3f}, first draft right {first:.1%}")
        if self.state.best_tau_walk is None or found["tau_walk"] > self.state.best_tau_walk:
            self.state.best_tau_walk, self.state.best_step = found["tau_walk"], self.state.step
            if self.ranks.is_main:
                save_best(self.checkpoints, self.head, {"step": self.state.step, **found})
        self.window_started = time.monotonic()

    def save(self) -> None:
        """Write a checkpoint; all ranks wait for it."""
        self.state.seconds = round(self._seconds(), 3)
        if self.ranks.is_main:
            save_checkpoint(self.checkpoints, self.head, self.optimizer, self.state)
        self.ranks.barrier()
        self.window_started = time.monotonic()

    def close(self) -> None:
        """Stop the reading thread and close the files."""
        self.stream.close()
        if self.tracker is not None:
            self.tracker.close()
        self.engine.destroy()

    def _seconds(self) -> float:
        return self.resumed_seconds + time.monotonic() - self.started

    @contextlib.contextmanager
    def _bar(self, name: str, total: int) -> Iterator[Progress]:
        if not self.ranks.is_main:
            yield Progress(name, total, "steps")
            return
        with progress_bar(name, total, "steps") as bar:
            bar.done = self.state.step
            yield bar

    def _report_stop(self, resume_command: str) -> None:
        if step_folders(self.checkpoints):
            say(f"stopped after step {self.state.step}, which is saved; to go on: {resume_command}")
        else:
            say(f"stopped within the first {PILOT_STEPS} steps, which aren't kept; to start again: {resume_command}")

    def _summary(self) -> dict[str, Any]:
        state = self.state
        return {
            "finished": not self.stopping or state.step == state.total_steps,
            "exit_code": self.stop.exit_code,
            "step": state.step,
            "total_steps": state.total_steps,
            "tokens": state.tokens,
            "seconds": round(self._seconds(), 3),
            "best_step": state.best_step,
            "best_tau_walk": state.best_tau_walk,
            "skipped": state.skipped,
            "checkpoint": str(self.checkpoints / "best"),
            **self.documents,
        }


def _plans(store: FeatureStore, settings: TrainSettings) -> tuple[BatchPlan, BatchPlan, dict[str, int]]:
    train, without = trainable_documents(store, "train", settings.max_length)
    held_out, _ = trainable_documents(store, "val", settings.max_length)
    if not held_out:
        raise DraftsmithError(f"{store.folder} holds no document of split 'val' with an answer: nothing to validate on")
    held_out = held_out[: settings.validate_documents]
    shared = (settings.token_budget, settings.max_length, settings.seed)
    counts = {"train_documents": len(train), "train_documents_without_rows": without, "val_documents": len(held_out)}
    return BatchPlan.over(store, train, *shared), BatchPlan.over(store, held_out, *shared), counts


def _engine(module: TrainStep, optimizer: MuonAdamW, settings: TrainSettings, ranks: Ranks) -> Any:
    deepspeed = import_deepspeed()
    folder = resources.files(__package__.partition(".")[0]) / "configs" / "deepspeed"
    config = {
        **json.loads((folder / "zero0.json").read_text(encoding="utf-8")),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": settings.accumulation,
        "gradient_clipping": settings.clip,
    }
    with quietly():
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine
