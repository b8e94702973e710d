"""Fit a head with DeepSpeed: the same code for one process without a launcher and for many under torchrun."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data_recipes.store import FeatureStore
from ..files import sweep
from ..heads.base import DraftHead, TargetParts
from ..heads.target import Target, auto_dtype
from ..progress import Progress, progress_bar, say
from .batches import BatchStream, Item, plans_of, require_teacher
from .checkpoint import RunState, load_checkpoint, save_best, save_checkpoint, step_folders
from .decoded import DecodedValidation
from .drift import LoadTarget
from .engine import Engine
from .faults import name_unmeasured, note_left_out
from .interrupt import StopRequest
from .joint import LR_SHARE, TunedTarget
from .length import fit_length, fixed_length, step_limits
from .metrics import Utilisation, Window, peak_memory_bytes
from .online import make_step
from .optimizer import ADAPTER, MuonAdamW
from .ranks import Ranks, process_group
from .schedule import PILOT_STEPS, lr_factor, saving_seconds, steps_within
from .settings import TrainSettings
from .step import SUMS, set_checkpointing
from .tracking import Tracker, describe_run
from .trees import grow_tree
from .validate import describe, is_past_best, note, validate


def fit(
    settings: TrainSettings,
    store: FeatureStore,
    parts: TargetParts,
    head: DraftHead,
    folder: Path,
    *,
    tuned: TunedTarget | None = None,
    online: Target | None = None,
    load_target: LoadTarget | None = None,
    budget_seconds: float | None = None,
    resume_command: str = "the same command again",
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
        online: the frozen target, for a store without states (`online.collect_tokens`).
        load_target: loads the target that held-out prompts are decoded with, on rank 0; None = nothing is decoded.
        budget_seconds: wall time of a time-limited run, from this call on; None takes settings.minutes.
        resume_command: what the user is told to run after an interruption.

    Returns:
        finished (False after a signal before the last step), step, total_steps, tokens, seconds over all
        restarts, tree_seconds, decode_seconds (since the last restart), best_by ("tau" or "tau_walk"), best_step,
        best_tau (None where it isn't decoded), best_tau_walk, stopped_early, skipped, checkpoint (folder of the best
        head, with its measured tree once finished), and the counts of documents. `head` is the best one once finished;
        under ZeRO 3 it has lost its weights by then: load them from that folder.

    Raises:
        DraftsmithError: nothing to train on or validate with, a damaged checkpoint, too much that isn't finite, a
            target that can't be loaded or decoded, a setting that the head doesn't have.
    """
    started = time.monotonic()
    with process_group() as ranks:
        options: dict[str, Any] = {"in_job": tuned or online, "load_target": load_target}
        trainer = Trainer(settings, store, parts, head, folder, ranks, **options)
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
        in_job: TunedTarget | Target | None = None,
        load_target: LoadTarget | None = None,
    ) -> None:
        self.settings, self.store, self.ranks = settings, store, ranks
        self.checkpoints = folder / "checkpoints"
        self.started = time.monotonic()
        self.budget_seconds = settings.minutes * 60 if settings.minutes else None
        require_teacher(head, store)
        set_checkpointing(head, settings.checkpointing)
        head.learn({str(name): weight for name, weight in settings.objective.items()})
        dtype = run_dtype(settings, ranks.device)
        self.head = head.to(ranks.device, torch.float32)
        self.step_module = make_step(head, parts.to(ranks.device, dtype), dtype, store, in_job)
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
            clip=settings.clip,
            muon=settings.optimizer == "muon",
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
        self.utilisation = Utilisation.of(self.step_module, self.plan.lengths, ranks)
        self.engine = Engine(self.step_module, self.optimizer, settings, ranks)
        config = describe_run(settings, head, store, ranks.world)
        wandb = None if settings.wandb == "auto" else settings.wandb
        self.tracker = Tracker(folder, self.state.step, wandb, config) if ranks.is_main else None
        self.decoded = DecodedValidation.wanted(load_target, self.step_module, store, self.held_out.documents, settings)
        self.best_by = "tau" if self.decoded is not None and settings.best_by_tau else "tau_walk"
        self.window = Window(head.step_weights(), self.step_module.extra)
        self.stop = StopRequest()
        self.stopping = self.finished = False
        self.validated_at: int | None = None
        self.left_out_in_a_row = 0
        self.unmeasured: set[str] = set()  # held-out documents that were named
        self.tree_seconds: float | None = None

    # --- the run ---------------------------------------------------------------------------------------------------

    def run(self, resume_command: str) -> dict[str, Any]:
        """Train to the end or to a signal; returns the summary that `fit` documents."""
        with self.stop:
            if self.decoded is not None and self.ranks.is_main and self.state.step != self.state.total_steps:
                self.decoded.prepare()
            timed = self.budget_seconds is not None
            news = fit_length(self.state, self.plan, self.settings, self.batches_per_step, timed)
            if news and self.ranks.is_main:
                say(news)
            if self.state.total_steps is None:
                self.state.total_steps = fixed_length(self._limits(), timed)
            if self.state.total_steps is None:
                self._pilot()
            if self.state.validation_due:  # the run was asked to stop before it
                self.validate(self._decodes())
                self.save()
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
        sums = torch.zeros(len(counts), len(SUMS), dtype=torch.float64, device=ranks.device)
        bad: list[Item] = []
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
        left_out, tokens = self.optimizer.skipped, int(pooled[-2])
        self.state.tokens += tokens
        self.window.add(tokens, None if left_out else pooled[:-2], self.optimizer.gradient_norm)
        self.left_out_in_a_row = self.left_out_in_a_row + 1 if left_out else 0
        if left_out:
            self._left_out(bad, items)
        self.stopping = bool(pooled[-1])
        bar.advance(1)

    def _pool(self, sums: Tensor, rows: int) -> Tensor:
        """Sum over the ranks: the step's sums, its rows, and whether any rank was asked to stop."""
        extra = sums.new_tensor([rows, self.stop.signal is not None])
        return self.ranks.all_sum(torch.cat((sums.flatten(), extra)))

    def _after_step(self, total_steps: int) -> None:
        step, s = self.state.step, self.settings
        interval = s.validation_interval(total_steps)
        decode, last = self._decodes(), step == total_steps
        if last or self.stopping or step % s.log_every == 0:
            self.log()
        self.state.validation_due = decode or last or step % interval == 0
        if self.stopping:  # who asks may not wait for long: a validation is made up for later
            self.save()
            if not last:
                return
        if self.state.validation_due:
            self.validate(decode)
        last = step == self.state.total_steps  # a validation may have ended the run
        if last or step % (s.save_every or interval) == 0:
            self.save()

    def _decodes(self) -> bool:
        return self.decoded is not None and self.decoded.is_due(self.state)

    def _left_out(self, bad: list[Item], items: list[Item]) -> None:
        """Name the documents of the batches that weren't finite; of all batches where each by itself was."""
        suspected = self._ids(bad) or self._ids(items)
        told = note_left_out(self.state, suspected, self.left_out_in_a_row)
        if self.ranks.is_main:
            say(told)

    def _ids(self, items: list[Item]) -> list[str]:
        """Ids of the documents of all ranks' items."""
        return [str(x) for x in self.ranks.gather([self.store.ids[i] for item in items for i in item.documents])]

    # --- length ----------------------------------------------------------------------------------------------------

    def _limits(self) -> list[int]:
        return step_limits(self.plan, self.settings, self.state, self.batches_per_step)

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
        self.validate(decode=self.decoded is not None)
        decoding = 0.0 if self.decoded is None else self.decoded.seconds
        tree_seconds = time.monotonic() - now - decoding  # the measured tree costs about what a validation does
        validation_seconds = tree_seconds + saving_seconds(sum(p.numel() for p in self.step_module.parameters()))
        left = self.budget_seconds - self._seconds()
        total = steps_within(
            left, step_seconds, validation_seconds, self.settings, self.state.step, tree_seconds,
            lambda total: 0.0 if self.decoded is None else decoding * self.decoded.count(total),
        )  # fmt: skip
        self.state.total_steps = self.ranks.from_main(min([total, *self._limits()]))
        if self.ranks.is_main:
            say(f"train: {step_seconds:.2f} s a step, so {self.state.total_steps} steps in the time given")
        self.save()

    # --- figures and files -----------------------------------------------------------------------------------------

    def log(self) -> None:
        """Write the figures of the steps since the last call."""
        values = self.window.close() if self.window.tokens else {}
        if not values or self.tracker is None:
            return
        values |= {
            "lr_factor": lr_factor(self.state.step - 1, self.state.total_steps, self.settings),
            "mfu": self.utilisation.mfu(values["supervised"], values["tokens_per_s"]),
            "peak_memory_bytes": peak_memory_bytes(self.ranks.device),
            "tokens": self.state.tokens,
            "epoch": self.state.epoch,
            "skipped": self.state.skipped,
            "seconds": round(self._seconds(), 3),
        }
        self.tracker.log("train", self.state.step, values)

    def validate(self, decode: bool) -> None:
        """Validate, log, keep the head if it is the best so far, and end the run if it has been none for too long.

        Args:
            decode: also decode held-out prompts.
        """
        if self.validated_at == self.state.step:
            return
        self.validated_at, self.state.validation_due = self.state.step, False
        with self.window.paused(), self.engine.whole():
            found = validate(self.step_module, self.store, self.held_out, self.settings.validate_depth, self.ranks)
            if decode and self.decoded is not None:
                found |= self.ranks.from_main(self.decoded.measure() if self.ranks.is_main else None)
            if (told := name_unmeasured(found.pop("left_out"), self.unmeasured)) and self.ranks.is_main:
                say(told)
            if self.tracker is not None:
                self.tracker.log("validation", self.state.step, {**found, "seconds": round(self._seconds(), 3)})
                say(f"step {self.state.step}: {describe(found)}")
            if note(found, self.state, self.best_by) and self.ranks.is_main:
                chosen = {"step": self.state.step, "best_by": self.best_by, **found}
                save_best(self.checkpoints, self.head, chosen, self.adapter)
        if is_past_best(self.state, self.settings.patience):
            self.state.total_steps = self.state.step

    def save(self) -> None:
        """Write a checkpoint; all ranks wait for it."""
        self.state.seconds = round(self._seconds(), 3)
        with self.window.paused(), self.engine.whole():
            tensors = self.optimizer.named_state()
            if self.ranks.is_main:
                save_checkpoint(self.checkpoints, self.head, tensors, self.state, self.adapter)
            self.ranks.barrier()

    def _grow_tree(self) -> None:
        """Save the best head's own static tree with it, the last thing a run does."""
        before, depth = time.monotonic(), self.settings.validate_depth
        with self.engine.whole():
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
            "step": state.step,
            "total_steps": state.total_steps,
            "tokens": state.tokens,
            "seconds": round(self._seconds(), 3),
            "tree_seconds": self.tree_seconds,
            "decode_seconds": None if self.decoded is None else round(self.decoded.total_seconds, 3),
            "best_by": self.best_by,
            "best_step": state.best_step,
            "best_tau": state.best_tau,
            "best_tau_walk": state.best_tau_walk,
            "stopped_early": is_past_best(state, self.settings.patience),
            "skipped": state.skipped,
            "checkpoint": str(self.checkpoints / "best"),
            **self.documents,
        }


def run_dtype(settings: TrainSettings, device: torch.device) -> torch.dtype:
    """The dtype that a run computes in."""
    found: torch.dtype = auto_dtype(device) if settings.dtype == "auto" else getattr(torch, settings.dtype)
    return found
