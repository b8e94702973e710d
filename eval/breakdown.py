"""Figures of parts of an evaluation: by category, language, turn, context length, benchmark, temperature."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .benchmarks import About
from .decoder.loop import Request, Result
from .metrics import Step, Timing, acceptance, speedup, tau_interval

K = TypeVar("K")
CONTEXTS = tuple(256 << i for i in range(10))
"""Upper ends of the buckets of context lengths: 256, 512, … 131,072 tokens, none of them included."""


@dataclass(frozen=True)
class Pair:
    """One prompt, decoded plainly and with the tree, in turns.

    Attributes:
        benchmark: name of the one that it belongs to.
        about: what is known of it.
        prompt: the text of its last user turn.
        request: what was decoded.
        plain, fast: the two answers.
        ranks: [D][R] of `fast`, see `metrics.acceptance_by_rank`.
        ttft: seconds to the first token, {"plain", "speculative"}.
        spent: wall time of the pair and how much of it the loop took, {"wall", "decoding"}.
    """

    benchmark: str
    about: About
    prompt: str
    request: Request
    plain: Result
    fast: Result
    ranks: list[list[int]]
    ttft: dict[str, float]
    spent: dict[str, float]

    @property
    def question(self) -> tuple[str, str]:
        """What is resampled as one: the turns of a question depend on each other."""
        return self.benchmark, self.about.question


_Cell = tuple[tuple[str, str], Sequence[Step]]
"""A question, and steps of one of its answers."""


def figures(pairs: Sequence[Pair], passed: bool) -> dict[str, Any]:
    """Acceptance and speed-up of some prompts.

    Args:
        passed: whether the outputs are the target's own: without that there is no speed-up.

    Returns:
        n_prompts, tau, tau_ci, alpha, acceptance_conditional, speedup, speedup_ci: the rows of a report's `by`. One
        question has no interval: there is nothing to resample.
    """
    ratio, interval = speedup_by_question(pairs)
    shares = _shares([(pair.question, pair.fast.steps) for pair in pairs])
    return {
        **shares,
        "speedup": ratio if passed else None,
        "speedup_ci": list(interval) if passed and shares["tau_ci"] is not None else None,
    }


def speedup_by_question(pairs: Sequence[Pair]) -> tuple[float, tuple[float, float]]:
    """Pooled speed-up and its interval over questions; see `metrics.speedup`."""
    groups = _grouped(pairs, lambda pair: pair.question).values()
    plain = [_timing([pair.plain for pair in group]) for group in groups]
    return speedup(plain, [_timing([pair.fast for pair in group]) for group in groups])


def steps_by_question(pairs: Sequence[Pair], results: Sequence[Result]) -> list[list[Step]]:
    """The steps of each question's answers together: what intervals resample."""
    return _merged([(pair.question, result.steps) for pair, result in zip(pairs, results, strict=True)])


def breakdown(pairs: Sequence[Pair], passed: bool) -> dict[str, list[dict[str, Any]]]:
    """The figures of every category, language and turn, and of context lengths: a report's `by`."""
    keys: dict[str, Callable[[Pair], str]] = {
        "category": lambda pair: pair.about.category,
        "language": lambda pair: pair.about.language,
        "turn": lambda pair: str(pair.about.turn),
    }
    groups = {name: _grouped(pairs, key) for name, key in keys.items()}
    rows = {
        name: [{"name": value, **figures(group, passed)} for value, group in found.items()]
        for name, found in groups.items()
    }
    return {**rows, "context": by_context(pairs)}


def by_context(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """The figures of steps by the length of what stood before them, shortest first.

    Seconds are known by answer, not by step: there are no speed-ups.
    """
    cells: dict[int, list[_Cell]] = {}
    for pair in pairs:
        buckets: dict[int, list[Step]] = {}
        for length, step in zip(context_lengths(pair.fast), pair.fast.steps, strict=True):
            buckets.setdefault(bisect.bisect_right(CONTEXTS, length), []).append(step)
        for bucket, steps in buckets.items():
            cells.setdefault(bucket, []).append((pair.question, steps))
    return [
        {"name": context_name(bucket), **_shares(cells[bucket]), "speedup": None, "speedup_ci": None}
        for bucket in sorted(cells)
    ]


def context_lengths(result: Result) -> list[int]:
    """Tokens before each step: the prompt, the prefill's token, and what earlier steps emitted."""
    lengths, length = [], len(result.prompt) + 1
    for step in result.steps:
        lengths.append(length)
        length += step.emitted
    return lengths


def context_name(bucket: int) -> str:
    """How a bucket of `CONTEXTS` is called: "<256", "<1k"; the last one is open."""
    end = CONTEXTS[min(bucket, len(CONTEXTS) - 1)]
    text = f"{end // 1024}k" if end >= 1024 else str(end)
    return f"<{text}" if bucket < len(CONTEXTS) else f"≥{text}"


def _shares(cells: Sequence[_Cell]) -> dict[str, Any]:
    logs = _merged(cells)
    found = acceptance(logs)
    return {
        "n_prompts": len(cells),
        "tau": found.tau,
        "tau_ci": list(tau_interval(logs)) if len(logs) > 1 else None,
        "alpha": found.alpha,
        "acceptance_conditional": found.conditional,
    }


def _merged(cells: Iterable[_Cell]) -> list[list[Step]]:
    logs: dict[tuple[str, str], list[Step]] = {}
    for question, steps in cells:
        logs.setdefault(question, []).extend(steps)
    return list(logs.values())


def _grouped(pairs: Sequence[Pair], key: Callable[[Pair], K]) -> dict[K, list[Pair]]:
    """Pairs by a key, in the order in which keys come."""
    found: dict[K, list[Pair]] = {}
    for pair in pairs:
        found.setdefault(key(pair), []).append(pair)
    return found


def _timing(results: Sequence[Result]) -> Timing:
    return Timing(sum(s.emitted for r in results for s in r.steps), sum(r.seconds for r in results))
