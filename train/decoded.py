"""Decoded tau in the middle of training: the head drafts for its target on held-out prompts, as it will in use.

It is laid beside tau_walk over the same documents (`agreement.py`).
"""

from __future__ import annotations

import contextlib
import gc
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..data_recipes.packing import make_batch
from ..data_recipes.store import FeatureStore
from ..errors import DraftsmithError
from ..eval.decoder.drafters import make_drafter
from ..eval.decoder.loop import Request, decode, rows_needed
from ..eval.decoder.probe import check_target
from ..eval.decoder.search import Chain
from ..eval.metrics import acceptance, tau_interval
from ..heads.adapter import FOLDER
from ..heads.base import DraftHead
from ..heads.linear import PackedLinear, PackedSibling
from ..heads.target import Target
from ..progress import say
from .agreement import compare, disagreement
from .checkpoint import RunState
from .drift import LoadTarget
from .schedule import decode_interval
from .settings import DECODE_SLOTS, TrainSettings
from .step import TrainStep


@dataclass(frozen=True)
class Prompt:
    """A held-out document's tokens up to its first answer, and the beginning of that answer."""

    document: int
    tokens: list[int]
    answer: list[int]


def held_out_prompts(store: FeatureStore, documents: Sequence[int], settings: TrainSettings) -> list[Prompt]:
    """The first `decode_documents` documents that begin with a prompt and go on with an answer of two tokens or more.

    Args:
        documents: numbers in the store.
        settings: answers have at most `decode_tokens` tokens.

    Raises:
        DraftsmithError: there is none.
    """
    found: list[Prompt] = []
    for i in documents:
        d = store.document(i, settings.max_length)
        start = int(d.answer.int().argmax())
        length = int(d.answer[start:].int().cumprod(0).sum())
        answer = d.tokens[start : start + min(length, settings.decode_tokens)].tolist()
        if start > 0 and len(answer) > 1:
            found.append(Prompt(i, d.tokens[:start].tolist(), answer))
        if len(found) == settings.decode_documents:
            break
    if not found:
        raise DraftsmithError(
            f"none of the {len(documents)} held-out documents in {store.folder} begins with a prompt: there is nothing "
            "to decode; train.decode_documents=0 leaves decoding out"
        )
    return found


def _weight_bytes(target: Target) -> int:
    packed = [m for m in target.model.modules() if isinstance(m, PackedLinear | PackedSibling) and m.weight is None]
    count = sum(p.numel() for p in target.model.parameters()) + sum(m.in_features * m.out_features for m in packed)
    return int(count) * target.dtype.itemsize


def _copyable(head: DraftHead) -> DraftHead:
    """The head itself, or, of one whose weights ZeRO 3 divides and has gathered, a head with the same weights.

    Copies of divided weights are empty.
    """
    if not any(hasattr(p, "ds_id") for p in head.parameters()):
        return head
    with torch.random.fork_rng(devices=[]):
        plain = type(head)(head.config, head.vocab)
    for mine, theirs in zip(plain.parameters(), head.parameters(), strict=True):
        mine.data.copy_(theirs)
    return plain


class DecodedValidation:
    """Decodes held-out prompts with a head as it is now. The target is loaded by the process that decodes, and stays.

    A target that is trained, too, is loaded anew each time, with its adapter merged in as it will be served.

    Args:
        load: loads the target.
        step: the head, its device and dtype.
        store, documents: the prompts' documents are the first ones of these.
        settings: decode_documents > 0.

    Attributes:
        depth: K of the chain that is decoded.
        prompts: what is decoded. seconds: the latest measurement took; total_seconds: all of them.
    """

    def __init__(
        self, load: LoadTarget, step: TrainStep, store: FeatureStore, documents: Sequence[int], settings: TrainSettings
    ) -> None:
        self.load, self.step, self.store, self.settings = load, step, store, settings
        most = step.head.most_depth
        self.depth = settings.validate_depth if most is None else min(settings.validate_depth, most)
        self.prompts = held_out_prompts(store, documents, settings)
        self.seconds = self.total_seconds = 0.0
        self._kept: Target | None = None

    @classmethod
    def wanted(
        cls,
        load: LoadTarget | None,
        step: TrainStep,
        store: FeatureStore,
        documents: Sequence[int],
        settings: TrainSettings,
    ) -> Self | None:
        """The same; None where nothing is decoded: without a loader, or where the settings say so."""
        if load is not None and settings.decode_documents:
            return cls(load, step, store, documents, settings)
        if settings.patience is not None:
            raise ValueError("patience waits for decoded taus: they need a loader")
        return None

    def interval(self, total_steps: int) -> int | None:
        """Steps between two decodings; None = only at the end. A function of settings and prompts alone."""
        tokens = sum(len(p.tokens) for p in self.prompts)
        return decode_interval(self.settings, total_steps, len(self.prompts), tokens, self.depth)

    def is_due(self, state: RunState) -> bool:
        """Whether to decode after the step that was just taken; at the end always.

        Where decoded taus choose the best head, the first validation has one, so that there is a best head early.
        """
        assert state.total_steps is not None  # the pilot asks for itself
        if state.step == state.total_steps:
            return True
        every = self.interval(state.total_steps)
        first = state.best_step is None and state.step % self.settings.validation_interval(state.total_steps) == 0
        return every is not None and (state.step % every == 0 or first)

    def count(self, total_steps: int) -> int:
        """How often a run of that length decodes."""
        every = self.interval(total_steps)
        return 1 if every is None else math.ceil(total_steps / every)

    def prepare(self) -> None:
        """Load a frozen target and make sure that it can be decoded, before any training.

        Raises:
            DraftsmithError: it can't be.
        """
        if self.step.adapter is not None or self._kept is not None:
            return  # with an adapter each decoding loads a target of its own
        try:
            self._kept = self.load(adapter=None)
            check_target(self._kept)
        except DraftsmithError as error:
            raise DraftsmithError(f"{error}; train.decode_documents=0 trains without decoding") from error
        except torch.OutOfMemoryError as error:
            raise DraftsmithError(
                f"the target doesn't fit beside the training on {self.step.parts.embed.device}: "
                "train.decode_documents=0 trains without decoding"
            ) from error
        say(
            f"validation: the target is kept in memory to decode {len(self.prompts)} held-out prompts, "
            f"{_weight_bytes(self._kept) / 2**30:.2f} GiB on {self._kept.device}; train.decode_documents=0 does without"
        )

    @contextlib.contextmanager
    def _target(self) -> Iterator[Target]:
        if self._kept is not None:
            yield self._kept
            return
        assert self.step.adapter is not None  # a frozen target is kept
        with tempfile.TemporaryDirectory() as place:
            self.step.adapter.save(Path(place) / FOLDER)
            tuned = self.load(adapter=Path(place) / FOLDER)
        yield tuned
        del tuned
        gc.collect()

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """Decode the prompts greedily with a chain, and walk over the same documents.

        Returns:
            tau: tokens / steps; tau_low, tau_high: its 95 % bootstrap interval over prompts; tau_tokens, tau_steps;
            decoded_cumulative, decoded_conditional: acceptance by depth;
            tau_walk_decoded: tau_walk over the same documents, up to the same length;
            decoded_documents, decoded_same: how many there are, and of how many the decoded answer is the stored one;
            disagreement: what `disagreement` says of them, where it says something.
        """
        self.prepare()
        started = time.monotonic()
        with self._target() as target:
            requests = [Request(f"{i:06d}", p.tokens, len(p.answer)) for i, p in enumerate(self.prompts)]
            drafter = make_drafter(_copyable(self.step.head), target.parts(), Chain(self.depth))
            results = decode(target, drafter, requests, slots=DECODE_SLOTS, capacity=rows_needed(requests, drafter))
            decoded = sorted(results, key=lambda r: r.id)
            del drafter, results
        compared = [
            compare(r, p.answer, *self._guesses(p), self.depth) for r, p in zip(decoded, self.prompts, strict=True)
        ]
        steps = [r.steps for r in decoded]
        figures, (low, high) = acceptance(steps), tau_interval(steps)
        said = disagreement(compared)
        self.seconds = time.monotonic() - started
        self.total_seconds += self.seconds
        return {
            "tau": figures.tau,
            "tau_low": low,
            "tau_high": high,
            "tau_tokens": figures.tokens,
            "tau_steps": figures.steps,
            "decoded_cumulative": figures.cumulative,
            "decoded_conditional": figures.conditional,
            "tau_walk_decoded": sum(c.walk_tokens for c in compared) / sum(c.walk_steps for c in compared),
            "decoded_documents": len(compared),
            "decoded_same": sum(c.same for c in compared),
            **({} if said is None else {"disagreement": said}),
        }

    def _guesses(self, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """What `validate.walk` reads, of the prompt and the beginning of its stored answer."""
        step, length = self.step, len(prompt.tokens) + len(prompt.answer)
        batch = make_batch(self.store, [prompt.document], length).to(step.parts.embed.device, step.dtype)
        batch = step.seen(batch)
        with step.autocast():
            right, supervised = step.head.matches(batch, step.parts, self.depth)
        return right, supervised[0]
