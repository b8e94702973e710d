"""What the figures of a tuning mean, in plain words: functions from figures to sentences."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .report.plan import size

LOW_ALPHA = 0.5
"""Acceptance below which no setting makes much of a head."""
HEAVY_PREFILL = 0.5
"""Share of a request's time from which on its prompt, which drafts don't shorten, is the bottleneck."""


def on_acceptance(alpha: float, temperature: float) -> str:
    """What any chain can give at best, and what to change if that is little.

    Args:
        alpha: share of the drafts that are accepted, all before them being right; see `metrics.Acceptance`.
    """
    at = _at(temperature)
    if alpha >= 1:
        return f"α = 1.00 {at}: every draft is accepted; the deepest chain that fits is the best."
    most = f"even an endless chain emits {1 / (1 - alpha):.1f} tokens a step"
    if alpha < LOW_ALPHA:
        return (
            f"α = {alpha:.2f} {at}: less than half of the drafts are accepted, {most}. Change the head, not K: train "
            "it longer or on the target's own answers to prompts like yours, or take another kind."
        )
    return f"α = {alpha:.2f} {at}: {most}; K and the tree decide how much of that is left."


def on_batches(speedups: Mapping[int, float], temperature: float) -> str:
    """Where speculation stops to pay.

    Args:
        speedups: the best measured one of each batch.
    """
    first, last = min(speedups), max(speedups)
    at, loses = _at(temperature), break_even(speedups)
    alone = [batch for batch in sorted(speedups) if speedups[batch] < 1 and (loses is None or batch < loses)]
    told = ", ".join(f"{batch} ({speedups[batch]:.2f}×)" for batch in alone)
    between = f" Batch {told} loses, too, though a larger one pays again." if alone else ""
    if loses is not None:
        return (
            f"At batch {loses} {at} the best setting decodes {speedups[loses]:.2f}× as fast as no drafts at all: from "
            f"there on decode plainly, or spread the requests over more copies of the model.{between}"
        )
    left = f"{speedups[first]:.2f}× at batch {first}"
    if first == last:
        return f"{left} {at}; whether it pays in larger batches was not measured."
    if alone:
        return f"{speedups[last]:.2f}× is gained at batch {last} {at}.{between}"
    return (
        f"Of {left} {speedups[last]:.2f}× is left at batch {last} {at}; it doesn't drop below 1 within what was "
        "measured."
    )


def break_even(speedups: Mapping[int, float]) -> int | None:
    """The batch from which on speculation is slower than plain decoding; None where it isn't at the largest one."""
    losing = list(itertools.takewhile(lambda batch: speedups[batch] < 1, sorted(speedups, reverse=True)))
    return losing[-1] if losing else None


def on_temperatures(speedups: Mapping[float, float], batch: int) -> str | None:
    """What a temperature leaves; None where only one was measured.

    Args:
        speedups: the best measured one at each temperature, all at `batch`.
    """
    if len(speedups) < 2:
        return None
    low, high = min(speedups), max(speedups)
    if speedups[high] >= speedups[low]:
        return (
            f"The temperature costs nothing here: {speedups[high]:.2f}× {_at(high)}, {speedups[low]:.2f}× {_at(low)}."
        )
    return (
        f"Of {speedups[low]:.2f}× {_at(low)} {speedups[high]:.2f}× is left {_at(high)} (batch {batch}): the surer the "
        "target is of its next token, the more drafts it accepts."
    )


def on_prefill(prefill: float, decoding: float, speedup: float) -> str:
    """What the speed-up of decoding is to a whole request.

    Args:
        prefill, decoding: seconds of a request that is decoded plainly.
        speedup: of decoding.
    """
    share = prefill / (prefill + decoding)
    whole = (prefill + decoding) / (prefill + decoding / speedup)
    if share >= HEAVY_PREFILL:
        return (
            f"{share:.0%} of a request's time is its prompt: decoding isn't the bottleneck. With decoding "
            f"{speedup:.2f}× as fast it is answered {whole:.2f}× as fast; shorter or cached prompts gain more than "
            "drafts."
        )
    return (
        f"{share:.0%} of a request's time is its prompt, which drafts don't shorten: with decoding {speedup:.2f}× as "
        f"fast it is answered {whole:.2f}× as fast."
    )


@dataclass(frozen=True)
class Memory:
    """Bytes that decoding holds, in the dtype that was measured.

    Attributes:
        target, head: weights; of the head what lies in its own files.
        target_token, head_token: keys and values of one token.
        rows: of the largest of the best trees; batch: sequences that have one at the same time.
        quantised: whether the target's weights are stored smaller than `target` says, which is in its dtype.
    """

    target: int
    head: int
    target_token: int
    head_token: int
    rows: int
    batch: int
    quantised: bool = False

    @property
    def trees(self) -> int:
        """Keys and values of all trees' rows."""
        return self.batch * self.rows * (self.target_token + self.head_token)


def on_memory(memory: Memory) -> str:
    """What the head and the trees hold beside the target."""
    unquantised = ", unquantised" if memory.quantised else ""
    return (
        f"The head holds {size(memory.head)} of weights ({memory.head / memory.target:.0%} of the target's "
        f"{size(memory.target)}{unquantised}) and {size(memory.head_token)} of keys and values a token "
        f"({memory.head_token / memory.target_token:.0%} more); trees of {memory.rows} rows hold {size(memory.trees)} "
        f"at batch {memory.batch}."
    )


def on_errors(errors: Sequence[float]) -> str:
    """How far predictions were from what was measured.

    Args:
        errors: predicted / measured - 1 of everything that was timed.
    """
    worst = max(errors, key=abs)
    return (
        f"Of {len(errors)} settings that were timed the predicted tokens/s were off by {worst:+.1%} at most; the "
        "others are predicted from the same passes."
    )


def _at(temperature: float) -> str:
    return f"at temperature {temperature:g}" if temperature else "greedy"
