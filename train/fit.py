"""Fit a head with DeepSpeed: the same code for one process without a launcher and for many under torchrun."""

from __future__ import annotations

import contextlib
import itertools
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
from ..heads.adapter import TunedConfig
from ..heads.base import DraftHead, TargetParts
from ..heads.target import auto_dtype
from ..progress import Progress, progress_bar, say
from .batches import BatchStream, Item, plans_of
from .checkpoint import RunState, load_checkpoint, save_best, save_checkpoint, step_folders
from .interrupt import StopRequest
from .joint import LR_SHARE, JointStep, TunedTarget
from .metrics import ratio, summarise
from .optimizer import ADAPTER, MuonAdamW
from .ranks import Ranks, import_deepspeed, process_group, quietly
from .schedule import PILOT_STEPS, lr_factor, steps_within
from .settings import TrainSettings
from .step import SUMS, TrainStep
from .tracking import Tracker
from .trees import grow_tree
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
    tuned: TunedTarget | None = None,
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
        tuned: the target, where it is trained together with the head (config: a TunedConfig), as `TunedTarget` loads it
            in the run's dtype.
        budget_seconds: wall time of a time-limited run, from this call on; None takes settings.minutes.
        resume_command: what the user is told to run after an interruption.
        wandb: see tracking.Tracker.

    Returns:
        finished (False after a signal before the last step), exit_code, step, total_steps, tokens, seconds over all
        restarts, tree_seconds, best_step, best_tau_walk, skipped, checkpoint (folder of the best head, with its
        measured tree once finished), and the counts of documents. `head` is the best one once finished.

    Raises:
        DraftsmithError: nothing to train on or validate with, a damaged checkpoint, too many steps that weren't finite.
    """
    started = time.monotonic()
    with process_group() as ranks:
        trainer = Trainer(settings, store, parts, head, folder, ranks, tuned=tuned, wandb=wandb)
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
        tuned: TunedTarget | None = None,
        wandb: bool | None = None,
    ) -> None:
        self.settings, self.store, self.ranks = settings, store, ranks
        self.checkpoints = folder / "checkpoints"
        self.started = time.monotonic()
        self.budget_seconds = settings.minutes * 60 if settings.minutes else None
        if isinstance(head.config, TunedConfig) != (tuned is not None):
            raise ValueError("`tuned` goes with a head that is trained together with its target, and with no other")
        dtype = run_dtype(settings, ranks.device)
        self.head = head.to(ranks.device, torch.float32)
        own = (head, parts.to(ranks.device, dtype), dtype)
        self.step_module = TrainStep(*own) if tuned is None else JointStep(*own, tuned)
        self.adapter = self.step_module.adapter
        adapter = {} if self.adapter is None else self.adapter.parameters
        self.optimizer = MuonAdamW(
            [*head.named_parameters(), *((ADAPTER + name, p) for name, p in adapter.items())],
            lr_matrix=settings.lr_matrix,
            lr_other=settings.lr_other,
            lr_adapter=settings.lr_other * LR_SHARE,
            momentum=settings.momentum,
            betas=(settings.betas[0], settings.betas[1]),
            weight_decay=settings.weight_decay,
        )
        if ranks.is_main:
            sweep(self.checkpoints)
        ranks.barrier()
        found = step_folders(self.checkpoints)
        self.state = load_checkpoint(found[-1], head, self.optimizer, self.adapter) if found else RunState()
        self.resumed_seconds = self.state.seconds
        self.plan, self.held_out, self.documents = plans_of(store, settings)
        self.stream = BatchStream(
            store, self.plan, (self.state.epoch, self.state.index), ranks.rank, ranks.world, settings.accumulation + 1
        )
        self.batches_per_step = ranks.world * settings.accumulation
        self.engine = _engine(self.step_module, self.optimizer, settings, ranks)
        config = {**settings.model_dump(), "world": ranks.world}
        self.tracker = Tracker(folder, self.state.step, wandb, config) if ranks.is_main else None
        lines = head.config.steps + len(self.step_module.extra)
        self.window = torch.zeros(lines, len(SUMS), dtype=torch.float64)
        self.window_tokens, self.window_started = 0, time.monotonic()
        self.stop = StopRequest()
        self.stopping = self.finished = False
        self.validated_at: int | None = None
        self.tree_seconds: float | None = None

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
            if self.state.step == self.state.total_steps:  # also where the last step was asked to be the last
                self._grow_tree()
        if not self.finished and self.ranks.is_main:
            self._report_stop(resume_command)
        return self._summary()

    def train_step(self, bar: Progress) -> None:
        """Take one optimizer step over world x accumulation batches."""
        s, ranks = self.settings, self.ranks
        items = [next(self.stream) for _ in range(s.accumulation)]
        batches = [item.batch.to(ranks.device, self.step_module.dtype) for item in items]
        counts = ranks.all_sum(torch.stack([self.step_module.loss_counts(b) for b in batches]).sum(0))
        place = (self.state.step, self.state.total_steps)
        self.optimizer.set_lr_factor(lr_factor(*place, s), self.step_module.enter(*place))
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
        self.state.updates, self.state.adapter_updates = self.optimizer.updates, self.optimizer.adapter_updates
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
        ends = []
        with self._bar("train: pilot", PILOT_STEPS) as bar:
            while self.state.step < PILOT_STEPS:
                self.train_step(bar)
                if self.stopping:
                    return
                ends.append(time.monotonic())
        now = ends[-1]
        step_seconds = self.step_module.mean_seconds([b - a for a, b in itertools.pairwise(ends)])
        self.log()
        self.validate()
        tree_seconds = time.monotonic() - now  # the measured tree costs about what a validation does
        parameters = sum(p.numel() for p in self.step_module.parameters())
        validation_seconds = tree_seconds + parameters * _CHECKPOINT_BYTES / _SAVE_BYTES_PER_SECOND
        left = self.budget_seconds - self._seconds()
        total = steps_within(left, step_seconds, validation_seconds, self.settings, self.state.step, tree_seconds)
        self.state.total_steps = self.ranks.from_main(min([total, *self._step_limits()]))
        if self.ranks.is_main:
            say(f"train: {step_seconds:.2f} s a step, so {self.state.total_steps} steps in the time given")
        self.save()

    # --- figures and files -----------------------------------------------------------------------------------------

    def log(self) -> None:
        """Write the figures of the steps since the last call."""
        seconds = time.monotonic() - self.window_started
        if self.tracker is not None and self.window_tokens:
            steps = self.head.config.steps
            values = summarise(self.window[:steps], self.head.step_weights())
            for name, line in zip(self.step_module.extra, self.window[steps:].tolist(), strict=True):
                values[name] = ratio(*line[:2])
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
                save_best(self.checkpoints, self.head, {"step": self.state.step, **found}, self.adapter)
        self.window_started = time.monotonic()

    def save(self) -> None:
        """Write a checkpoint; all ranks wait for it."""
        self.state.seconds = round(self._seconds(), 3)
        if self.ranks.is_main:
            save_checkpoint(self.checkpoints, self.head, self.optimizer, self.state, self.adapter)
        self.ranks.barrier()
        self.window_started = time.monotonic()

    def _grow_tree(self) -> None:
        """Save the best head's own static tree with it, the last thing a run does."""
        before, depth = time.monotonic(), self.settings.validate_depth
        grow_tree(self.checkpoints / "best", self.step_module, self.store, self.held_out, depth, self.ranks)
        self.tree_seconds = round(time.monotonic() - before, 3)
        self.finished = True

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
            "finished": self.finished,
            "exit_code": self.stop.exit_code,
            "step": state.step,
            "total_steps": state.total_steps,
            "tokens": state.tokens,
            "seconds": round(self._seconds(), 3),
            "tree_seconds": self.tree_seconds,
            "best_step": state.best_step,
            "best_tau_walk": state.best_tau_walk,
            "skipped": state.skipped,
            "checkpoint": str(self.checkpoints / "best"),
            **self.documents,
        }


def run_dtype(settings: TrainSettings, device: torch.device) -> torch.dtype:
    """The dtype that a run computes in."""
    found: torch.dtype = auto_dtype(device) if settings.dtype == "auto" else getattr(torch, settings.dtype)
    return found


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
