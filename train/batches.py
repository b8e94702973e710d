"""Which batch comes when: a pure function of (settings, epoch, index), read ahead by a thread."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from ..data_recipes.packing import make_batch, plan_batches
from ..data_recipes.store import FeatureStore
from ..errors import DraftsmithError
from ..heads.base import Batch, DraftHead
from .settings import TrainSettings

Position = tuple[int, int]
"""(epoch, index within its plan) of a batch."""


def trainable_documents(store: FeatureStore, split: str, max_length: int) -> tuple[list[int], int]:
    """Return a split's documents with a supervised row in their first `max_length` tokens, and how many have none."""
    return store.trainable(split, max_length)


def require_teacher(head: DraftHead, store: FeatureStore) -> None:
    """Refuse a store from which the head can't learn, before any training; raises DraftsmithError."""
    if store.meta.teacher == "topk":
        head.require_states(f"its {store.meta.topk} likeliest tokens in their place ({store.folder})")


def held_out_documents(store: FeatureStore, settings: TrainSettings) -> list[int]:
    """Numbers of the documents that a run is validated on; raises DraftsmithError where there are none."""
    held_out, _ = trainable_documents(store, "val", settings.max_length)
    if not held_out:
        raise DraftsmithError(f"{store.folder} holds no document of split 'val' with an answer: nothing to validate on")
    return held_out[: settings.validate_documents]


@dataclass(frozen=True)
class BatchPlan:
    """Batches of every epoch over `documents`, numbered in one endless sequence.

    Attributes:
        documents: numbers in the store; lengths: their tokens, cut to `max_length`.
    """

    documents: list[int]
    lengths: list[int]
    token_budget: int
    max_length: int
    seed: int
    _planned: dict[int, list[list[int]]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def over(cls, store: FeatureStore, documents: list[int], token_budget: int, max_length: int, seed: int) -> Self:
        """Plan the given documents of a store."""
        if not documents:
            raise DraftsmithError(
                f"no document has an answer within its first {max_length} tokens: nothing to train on; "
                "collect more answers or raise train.max_length"
            )
        return cls(documents, [min(store.lengths[i], max_length) for i in documents], token_budget, max_length, seed)

    def epoch(self, number: int) -> list[list[int]]:
        """Batches of an epoch, as document numbers of the store."""
        planned = self._planned.get(number)
        if planned is None:
            batches = plan_batches(self.lengths, self.token_budget, self.seed, number)
            planned = [[self.documents[i] for i in batch] for batch in batches]
            for old in sorted(self._planned)[:-1]:  # the reading thread may be an epoch ahead of the training one
                self._planned.pop(old, None)
            self._planned[number] = planned
        return planned

    def from_position(self, position: Position) -> Iterator[tuple[Position, list[int]]]:
        """Yield (position, documents) of all batches from `position` on, epoch after epoch, without end."""
        epoch, index = position
        while True:
            batches = self.epoch(epoch)
            for i in range(index, len(batches)):
                yield (epoch, i), batches[i]
            epoch, index = epoch + 1, 0

    def advance(self, position: Position, batches: int) -> Position:
        """Return the position `batches` further on."""
        epoch, index = position
        index += batches
        while index >= (size := len(self.epoch(epoch))):
            epoch, index = epoch + 1, index - size
        return epoch, index

    def batches_before(self, position: Position) -> int:
        """Number of batches before a position."""
        return sum(len(self.epoch(e)) for e in range(position[0])) + position[1]

    def steps_in(self, epochs: int, batches_per_step: int, done: int = 0) -> int:
        """Optimizer steps that, after `done` batches, complete `epochs` epochs."""
        return math.ceil(max(0, self.batches_before((epochs, 0)) - done) / batches_per_step)

    def steps_for(self, tokens: int, batches_per_step: int, done: int = 0) -> int:
        """Optimizer steps that, after `done` batches, complete at least `tokens` tokens."""
        length = dict(zip(self.documents, self.lengths, strict=True))
        batches = 0
        for _, documents in self.from_position((0, 0)):
            if tokens <= 0:
                break
            tokens -= sum(length[i] for i in documents)
            batches += 1
        return math.ceil(max(0, batches - done) / batches_per_step)


def plans_of(store: FeatureStore, settings: TrainSettings) -> tuple[BatchPlan, BatchPlan, dict[str, int]]:
    """Plans of a run's training and of its validation, and the counts of documents that its summary holds."""
    train, without = trainable_documents(store, "train", settings.max_length)
    held_out = held_out_documents(store, settings)
    shared = (settings.token_budget, settings.max_length, settings.seed)
    counts = {"train_documents": len(train), "train_documents_without_rows": without, "val_documents": len(held_out)}
    return BatchPlan.over(store, train, *shared), BatchPlan.over(store, held_out, *shared), counts


def batch_seed(seed: int, position: Position) -> int:
    """Seed of what is random in the losses of the batch at a position, 0 <= value < 2**63."""
    text = f"{seed}/{position[0]}/{position[1]}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


@dataclass
class Item:
    """A batch with its place in the plan and its documents' numbers in the store."""

    position: Position
    documents: list[int]
    batch: Batch


class BatchStream:
    """One rank's batches from `position` on: of each step's batches, rank r of world w takes r, r + w, ...

    A thread reads ahead. Close it when done.
    """

    def __init__(
        self, store: FeatureStore, plan: BatchPlan, position: Position, rank: int = 0, world: int = 1, ahead: int = 2
    ) -> None:
        self._queue: queue.Queue[Item | BaseException] = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._read, args=(store, plan, position, rank, world), name="draftsmith-batches", daemon=True
        )
        self._thread.start()

    def _read(self, store: FeatureStore, plan: BatchPlan, position: Position, rank: int, world: int) -> None:
        try:
            for number, (place, documents) in enumerate(plan.from_position(position)):
                if number % world != rank:
                    continue
                batch = dataclasses.replace(
                    make_batch(store, documents, plan.max_length), seed=batch_seed(plan.seed, place)
                )
                if not self._put(Item(place, documents, batch)):
                    return
        except BaseException as error:  # handed to the training thread, which raises it
            self._put(error)

    def _put(self, item: Item | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join()
