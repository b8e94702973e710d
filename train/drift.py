"""How far a tuned target has moved from the original: measured on held-out documents, on the target as it is served."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..data_recipes.store import FeatureStore
from ..eval.decoder.drafters.plain import PlainDrafter
from ..eval.decoder.loop import Request, decode, rows_needed
from ..heads.base import Needs
from ..heads.target import Target
from ..progress import say
from .joint import TunedTarget, measured_divergence
from .metrics import ratio

PROMPTS, NEW_TOKENS, SLOTS = 16, 64, 8
"""Greedy answers that are compared, their length, and how many are decoded at a time."""


class LoadTarget(Protocol):
    """Loads the target with an adapter merged into it, or without one."""

    def __call__(self, *, adapter: Path | None) -> Target:
        """Return a target that nobody else holds."""


def measure_drift(
    load: LoadTarget, adapter: Path, store: FeatureStore, documents: Sequence[int], max_length: int
) -> dict[str, Any]:
    """Compare the target with its adapter against the target without it; one of them is in memory at a time.

    Args:
        load: called twice.
        adapter: the adapter's folder.
        store: texts; its states aren't read.
        documents: numbers of the held-out documents; the first `PROMPTS` of them are answered anew, too.
        max_length: documents are cut to so many tokens.

    Returns:
        Teacher-forced, on the documents' text, with logits in fp32: kl, mean KL(p || p_tuned) in nats per answer token;
        greedy_agreement, share of answer tokens before which both have the same likeliest token; answer_tokens,
        documents, counted.
        Free-running: identical_answers, share of greedy answers of `new_tokens` tokens at most that are the same token
        for token; prompts, counted.
    """
    texts = [store.document(i) for i in documents]
    tokens = [d.tokens[:max_length] for d in texts]
    answers = [d.answer[:max_length] for d in texts]
    prompts = [t[: int(a.int().argmax())].tolist() for t, a in zip(tokens, answers, strict=True)][:PROMPTS]
    prompts = [p for p in prompts if p]  # a text without a prompt has nothing to answer
    _free()  # what training has left
    original = load(adapter=None)
    goals, before = _states(original, tokens, answers), _answers(original, prompts)
    del original
    _free()
    tuned = load(adapter=adapter)
    weight = tuned.parts().lm_head
    sums = torch.zeros(2, dtype=torch.float64)
    for state, goal in zip(_states(tuned, tokens, answers), goals, strict=True):
        sums += torch.stack([x.double().cpu() for x in measured_divergence(state, goal, weight)])
    after = _answers(tuned, prompts)
    rows = sum(len(goal) for goal in goals)
    found = {
        "kl": ratio(float(sums[0]), rows),
        "greedy_agreement": ratio(float(sums[1]), rows),
        "answer_tokens": rows,
        "documents": len(texts),
        "identical_answers": ratio(sum(a == b for a, b in zip(before, after, strict=True)), len(prompts)),
        "prompts": len(prompts),
        "new_tokens": NEW_TOKENS,
    }
    say(f"drift of the tuned target: {_shown(found)}")
    return found


@torch.no_grad()
def expected_seconds(
    tuned: TunedTarget, load_seconds: float, store: FeatureStore, documents: Sequence[int], max_length: int
) -> float:
    """Estimate what `measure_drift` will take, from a load's time and two passes that are timed here.

    Both targets are loaded, read the documents' tokens and decode the answers, whose steps are as long as a pass over
    one token of each of `SLOTS`.
    """
    lengths = [min(store.lengths[i], max_length) for i in documents]
    steps = math.ceil(min(PROMPTS, len(lengths)) / SLOTS) * NEW_TOKENS
    reading = _pass_seconds(tuned, 1, max(lengths)) * sum(lengths) / max(lengths)
    return 2 * (load_seconds + reading + steps * _pass_seconds(tuned, SLOTS, 1))


def _pass_seconds(tuned: TunedTarget, sequences: int, length: int) -> float:
    tokens = torch.zeros(sequences, length, dtype=torch.int64, device=tuned.final_norm.weight.device)
    seconds = 0.0
    for _ in range(2):  # the first one is slower: allocations, page faults
        before = time.monotonic()
        float(tuned.last_states(tokens).sum())  # waits for the device
        seconds = time.monotonic() - before
    return seconds


def _shown(found: dict[str, Any]) -> str:
    text = f"KL {found['kl']:.4f} nats a token, same greedy token {found['greedy_agreement']:.1%}"
    if found["prompts"]:
        text += f", same greedy answer {found['identical_answers']:.1%} of {found['prompts']}"
    return text


def _states(target: Target, tokens: list[Tensor], answers: list[Tensor]) -> list[Tensor]:
    """Normed states [rows, H] before each answer token of each document, on the CPU."""
    parts, found = target.parts(), []
    for text, answer in zip(tokens, answers, strict=True):
        last = target.states(text[None, :-1], Needs(last=True))[1]
        assert last is not None
        found.append(parts.normed(last[0])[answer[1:].to(last.device)].cpu())
    return found


def _answers(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers in the prompts' order."""
    room = [min(NEW_TOKENS, target.max_positions - len(p)) for p in prompts]
    requests = [Request(f"{i:06d}", p, n) for i, (p, n) in enumerate(zip(prompts, room, strict=True))]
    drafter = PlainDrafter()
    results = decode(target, drafter, requests, slots=SLOTS, capacity=rows_needed(requests, drafter))
    return [r.tokens for r in sorted(results, key=lambda r: r.id)]


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
