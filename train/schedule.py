"""Learning-rate schedule and the length of a run, both functions of the step alone."""

from __future__ import annotations

import math
from collections.abc import Callable

from .settings import DECODE_SLOTS, TrainSettings

PILOT_STEPS = 11
"""Steps that measure a time-limited run's rate; the first is slower (allocations, page faults) and isn't counted."""

_CHECKPOINT_BYTES = 12
"""Per parameter at most: fp32 weight and two moments."""
_SAVE_BYTES_PER_SECOND = 200e6

DECODE_SHARE = 0.05
"""Most of a run's time that decoding may take where `decode_every` is "auto"."""
_PASS_ROWS = 64
"""A target's pass with fewer rows is bound by reading its weights and costs as much."""

COSINE_FLOOR = 0.02
DECAY_SHARE = 1 / 3


def lr_factor(step: int, total_steps: int | None, settings: TrainSettings) -> float:
    """Factor of the learning rates at `step` (0-based).

    Args:
        step: the optimizer step about to be taken.
        total_steps: length of the run; None during the pilot of a time-limited run: warm-up, then constant.
        settings: warm-up and kind of schedule.
    """
    warm = min(1.0, (step + 1) / (settings.warmup + 1))
    if total_steps is None:
        return warm
    if settings.schedule == "wsd":
        decay = max(1, round(total_steps * DECAY_SHARE))
        return warm * min(1.0, (total_steps - step) / (decay + 1))
    progress = min(1.0, step / max(1, total_steps))
    return warm * (COSINE_FLOOR + (1 - COSINE_FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))


def saving_seconds(parameters: int) -> float:
    """What writing a checkpoint of so many parameters is reckoned to take."""
    return parameters * _CHECKPOINT_BYTES / _SAVE_BYTES_PER_SECOND


def steps_within(
    seconds_left: float,
    step_seconds: float,
    validation_seconds: float,
    settings: TrainSettings,
    done: int,
    after_seconds: float = 0.0,
    decoding_seconds: Callable[[int], float] = lambda total_steps: 0.0,
) -> int:
    """Total steps of a time-limited run.

    Args:
        seconds_left: of the budget, after the pilot.
        step_seconds: measured cost of one optimizer step.
        validation_seconds: measured cost of one validation with its checkpoint.
        settings: says how often it validates.
        done: steps already taken.
        after_seconds: cost of what follows the last step's validation.
        decoding_seconds: measured cost of all decodings of a run of so many steps.

    Returns:
        The largest number of steps (at least done + 1) whose training and validations fit with what follows.
    """
    seconds_left -= after_seconds
    total = done + max(1, int(seconds_left / step_seconds))
    while total > done + 1:  # what is spent between the steps depends on the total, a little
        spent = math.ceil(total / settings.validation_interval(total)) * validation_seconds + decoding_seconds(total)
        if (total - done) * step_seconds + spent <= seconds_left:
            break
        total -= 1
    return total


def decode_interval(
    settings: TrainSettings, total_steps: int, prompts: int, prompt_tokens: int, depth: int
) -> int | None:
    """Steps between two decodings of held-out prompts; None = only at the end.

    "auto" is a multiple of the steps between two validations, such that the rows that decoding runs through the target
    are at most `DECODE_SHARE` of those that the head is trained on: a row of either costs about the same, the target
    has more weights, the head's are used forth and back in every step.

    Args:
        prompts: how many are decoded; prompt_tokens: of all of them; depth: K of the chain.
    """
    if settings.decode_every != "auto":
        return settings.decode_every
    passes = settings.decode_tokens * math.ceil(prompts / DECODE_SLOTS)
    rows = passes * max(_PASS_ROWS, DECODE_SLOTS * (depth + 1)) + prompt_tokens
    validation = settings.validation_interval(total_steps)
    trained = settings.token_budget * settings.accumulation * validation
    return validation * math.ceil(rows / DECODE_SHARE / trained)
