"""What a head gains at each batch: the same prompts, so many sequences at a time, against plain decoding of as many."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import DraftsmithError
from ..progress import Progress
from .closed_loop import ROUNDS, SPECULATIVE, WAYS, Matched, Ways, check_greedy, round_key
from .decoder.loop import Request, Result
from .journal import Journal
from .tune import NO_STEP, PLAIN

WAVES = 3
"""A batch is decoded with at least so many times as many requests: in the last of them slots run empty."""


def copies(requests: Sequence[Request], batch: int) -> list[Request]:
    """The prompts, over and over where a batch needs more requests than there are: each equally often.

    A copy's id has "#2", "#3", … behind it.
    """
    times = max(1, -(-WAVES * batch // len(requests)))
    return [dataclasses.replace(r, id=f"{r.id}#{n}" if n > 1 else r.id) for n in range(1, times + 1) for r in requests]


def answers_of(prompts: int, batch: int) -> int:
    """Answers that are decoded for one batch, warm-ups left out."""
    return prompts * max(1, -(-WAVES * batch // prompts)) * len(WAYS) * ROUNDS


def batch_key(batch: int) -> str:
    """Of the journal: the finished row of a batch."""
    return f"batch {batch}"


def finished_answers(journal: Journal, prompts: int, batch: int) -> int:
    """How many answers the journal holds of a batch that isn't finished."""
    rounds = sum(journal.get(round_key(batch_key(batch), i)) is not None for i in range(ROUNDS))
    return answers_of(prompts, batch) * rounds // ROUNDS


def measure_batch(
    ways: Ways, requests: Sequence[Request], batch: int, journal: Journal, bar: Progress
) -> dict[str, Any]:
    """Measure one batch, or go on with it; the finished row is in the journal then.

    Returns:
        batch, requests (how many were decoded in each round), `closed_loop.Matched.figures`, steps (of each prompt, by
        id, for `same_steps`), varied (prompts whose copies took different steps), answers (raw logs).

    Raises:
        DraftsmithError: every answer ends with its first token.
    """
    key, asked = batch_key(batch), copies(requests, batch)
    passes = ways.passes(asked, batch)  # also after a restart: it warms up
    rounds = ways.rounds(key, asked, batch, journal, bar.advance)
    matched = Matched(rounds, [i % len(requests) for i in range(len(asked))], passes, check_greedy(ways, asked, rounds))
    if not any(result.steps for result in matched.results(PLAIN)):
        raise DraftsmithError(NO_STEP)
    logs = [_steps(result) for result in matched.results(SPECULATIVE)]
    first = logs[: len(requests)]
    row = {
        "batch": batch,
        "requests": len(asked),
        **matched.figures(),
        "steps": {request.id: log for request, log in zip(requests, first, strict=True)},
        "varied": sum(any(log != first[i] for log in logs[i :: len(requests)]) for i in range(len(requests))),
        "answers": matched.answers(),
    }
    journal.put(key, row)
    return row


def _steps(result: Result) -> list[list[int]]:
    return [[s.drafted, s.accepted, s.emitted] for s in result.steps]


def below_one_from(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The batch from which on every measured speed-up is below 1; None where the largest one's isn't.

    Args:
        rows: by batch, ascending; rows without a speed-up say nothing.
    """
    found = None
    for row in reversed(rows):
        if row["speedup"] is None:
            continue
        if row["speedup"] >= 1:
            break
        found = row["batch"]
    return found


def below_one_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """`below_one_from` in words, with whether the intervals leave it open, and smaller batches that lose, too."""
    at, known = below_one_from(rows), [row for row in rows if row["speedup"] is not None]
    if not known:
        return "no batch has a speed-up: its outputs are not plain decoding's"
    below = [str(row["batch"]) for row in known if row["speedup"] < 1 and (at is None or row["batch"] < at)]
    also = f"; it is below 1 at batch {', '.join(below)}, too, though a larger one pays again" if below else ""
    if at is None:
        last = known[-1]
        open_ = (
            f", though its interval reaches down to {last['speedup_ci'][0]:.2f}" if last["speedup_ci"][0] < 1 else ""
        )
        stays = "is" if below else "stays"
        end = f"at batch {last['batch']}" if below else f"up to batch {last['batch']}"
        return f"the speed-up {stays} above 1 {end}{open_}{also}"
    low = next(row for row in rows if row["batch"] == at)
    open_ = f", though its interval reaches up to {low['speedup_ci'][1]:.2f}" if low["speedup_ci"][1] >= 1 else ""
    return f"from batch {at} on the head slows decoding down{open_}{also}"


def same_steps(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether greedy acceptance depends on the batch, as it must not but for ties.

    Returns:
        prompts, differing (those that took other steps in some batch, round or copy), verdict.
    """
    first = rows[0]["steps"]
    differing = max(
        sum(any(row["steps"][name] != steps for row in rows) for name, steps in first.items()),
        *(row["varied"] for row in rows),
    )
    taus = [row["tau"] for row in rows]
    verdict = f"the same steps for all {len(first)} prompts at every batch"
    if differing:
        verdict = (
            f"{differing} of {len(first)} prompts took other steps in some batch (tau {min(taus):.3f} to "
            f"{max(taus):.3f}): passes of other sizes round differently, and ties fall the other way"
        )
    return {"prompts": len(first), "differing": differing, "verdict": verdict}
