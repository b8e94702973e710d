"""The limits of a run in optimizer steps, also where another number of processes goes on with it."""

from __future__ import annotations

import math

from .batches import BatchPlan
from .checkpoint import RunState
from .schedule import PILOT_STEPS
from .settings import TrainSettings


def step_limits(plan: BatchPlan, settings: TrainSettings, state: RunState, batches_per_step: int) -> list[int]:
    """Total steps at each limit that is no time, for a run that stands at `state`."""
    done = plan.batches_before((state.epoch, state.index))
    limits = [settings.steps] if settings.steps else []
    if settings.epochs:
        limits.append(state.step + plan.steps_in(settings.epochs, batches_per_step, done))
    if settings.tokens:
        limits.append(state.step + plan.steps_for(settings.tokens, batches_per_step, done))
    return limits


def fixed_length(limits: list[int], timed: bool) -> int | None:
    """Total steps where no clock decides them; None where the pilot of a time-limited run has to measure."""
    shortest = min(limits, default=None)
    return None if timed and (shortest is None or shortest > PILOT_STEPS) else shortest


def fit_length(
    state: RunState, plan: BatchPlan, settings: TrainSettings, batches_per_step: int, timed: bool
) -> str | None:
    """Count what is left of a resumed run in steps of another size, so that as much is trained as was planned.

    Epochs and tokens are exact. What a clock decided on the old number of processes stays the same number of batches,
    which takes another time. `train.steps` are steps of whatever size.

    Args:
        state: total_steps and batches_per_step are set.
        timed: the run has a budget in time.

    Returns:
        What to tell the user; None where nothing has changed.
    """
    before, total = state.batches_per_step, state.total_steps
    state.batches_per_step = batches_per_step
    if total is None or before in (0, batches_per_step):
        return None
    changed = f"a step has {batches_per_step} batches now (processes x train.accumulation), not {before}"
    if state.step >= total:
        return None
    if total == settings.steps:
        return f"{changed}; the run keeps its {total} steps, as train.steps says"
    limits = step_limits(plan, settings, state, batches_per_step)
    if timed:
        limits.append(state.step + math.ceil((total - state.step) * before / batches_per_step))
    state.total_steps = max(state.step + 1, min(limits))
    return f"{changed}: {state.total_steps} steps in all instead of {total}, so that as much is trained"


__all__ = ["fit_length", "fixed_length", "step_limits"]
