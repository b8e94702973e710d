"""Bytes of live tensors in a training step, counted, against the sum that a plan gives; and how they grow with V."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..heads.base import Batch
from ..heads.config import LayerConfig
from ..heads.losses import loss_rows_per_chunk
from ..heads.shapes import TargetShapes
from .bench_work import take_steps, upcoming
from .estimate import Rows, train_memory
from .fit import Trainer

Made = dict[str, int]


class LiveBytes(TorchDispatchMode):
    """Counts the storages that this thread's operations make, each until the last tensor on it is gone.

    Storages that were there before the context aren't counted, nor is what an operation needs inside itself.

    Args:
        shapes: of weights. What has one of them, or its transpose, is a weight's gradient, state or copy.

    Attributes:
        now: bytes alive; peak: most of them at a time; peak_in: the operation that reached it.
        others_peak: the same without the storages that have a weight's shape.
    """

    def __init__(self, shapes: Iterable[Sequence[int]] = ()) -> None:
        super().__init__()
        self.now = self.peak = self.others_peak = 0
        self.peak_in = ""
        self._others = 0
        self._shapes = {tuple(shape)[::order] for shape in shapes for order in (1, -1)}
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and (key := id(x.untyped_storage())) not in given and key not in self._known:
                self._note(x, str(func))
        return out

    def _note(self, x: Tensor, operation: str) -> None:
        storage = x.untyped_storage()
        size = storage.nbytes()
        other = 0 if tuple(x.shape) in self._shapes else size
        self._known.add(id(storage))
        weakref.finalize(storage, self._gone, id(storage), size, other).atexit = False
        self.now += size
        self._others += other
        self.others_peak = max(self.others_peak, self._others)
        if self.now > self.peak:
            self.peak, self.peak_in = self.now, operation

    def _gone(self, key: int, size: int, other: int) -> None:
        self._known.discard(key)
        self.now -= size
        self._others -= other


def tensor_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the storages under the tensors among the values, each once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if isinstance(x, Tensor)}
    return sum(storage.nbytes() for storage in storages.values())


def count_step(trainer: Trainer) -> LiveBytes:
    """Take a step under the count."""
    parameters = list(trainer.head.parameters())
    together = (sum(p.numel() for p in parameters),)  # DeepSpeed lays the gradients side by side to reduce them
    with LiveBytes([*(p.shape for p in parameters), together]) as live:
        take_steps(trainer)
    return live


def live_bytes_ratio(trainer: Trainer) -> dict[str, Any]:
    """Live bytes at the peak of a training step over those that a plan adds up.

    Live: the head's weights, the optimizer's state, the batches that are read (the step's own, two that wait and one in
    the reader's hands), and all storages that operations of the step make and hold at the time. The target's embedding
    and output rows are on neither side.

    Planned: weights, gradients and state as `plan` has them, one batch as it is computed on, the activations' formula,
    and one chunk's logits.

    Args:
        trainer: of one rank and one batch a step. It takes two steps.

    Returns:
        median, low and high, all the ratio; live and planned: bytes by part; peak_in: the operation at the peak.
    """
    take_steps(trainer)  # the optimizer's state is there from now on
    held = upcoming(trainer, trainer.settings.accumulation + 3)
    standing = {
        "weights": tensor_bytes(trainer.head.parameters()),
        "optimizer": tensor_bytes(x for state in trainer.optimizer.state.values() for x in state.values()),
        "batches": sum(tensor_bytes(vars(batch).values()) for batch in held),
    }
    planned = planned_bytes(trainer, held[0])
    counted = count_step(trainer)
    live = {**standing, "made in the step": counted.peak}
    ratio = sum(live.values()) / sum(planned.values())
    return {
        "median": ratio, "low": ratio, "high": ratio, "live": live, "planned": planned, "peak_in": counted.peak_in,
    }  # fmt: skip


def planned_bytes(trainer: Trainer, batch: Batch) -> Made:
    """What a plan expects of a step on this batch, by part; see `live_bytes_ratio`."""
    head, dtype = trainer.head, trainer.step_module.dtype
    rows = Rows(len(batch.tokens), int(head.supervised_rows(batch)[0].sum()))
    memory = train_memory(head, _shapes(head.config), rows, dtype.itemsize)
    vocabulary = head.config.draft_vocab_size
    chunk = loss_rows_per_chunk(vocabulary, trainer.ranks.device.type)
    return {
        "weights": round(memory.weights + memory.masters),
        "gradients": round(memory.gradients),
        "optimizer": round(memory.moments),
        "batch": tensor_bytes(vars(batch.to(trainer.ranks.device, dtype)).values()),
        "activations": round(memory.activations),
        "logits of a chunk": 4 * min(rows.supervised, chunk) * vocabulary,
    }


def _shapes(config: Any) -> TargetShapes:
    """The target's shapes as far as a head's config tells them."""
    assert isinstance(config, LayerConfig)
    return TargetShapes(
        name="bench",
        hidden=config.hidden_size,
        layers=config.target_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        tie_embeddings=False,
        rope_theta=config.rope["rope_theta"],
    )


def activation_peak(trainer: Trainer) -> int:
    """Most bytes that a step's operations hold at a time, without the batch and what has the shape of a weight.

    What is left are the rows that are kept for the backward pass and what a chunk of the losses needs.

    Args:
        trainer: of one rank and one batch a step. It takes one step.
    """
    (batch,) = upcoming(trainer, 1)
    computed = batch.to(trainer.ranks.device, trainer.step_module.dtype)
    copied = [x for f in dataclasses.fields(Batch) if (x := getattr(computed, f.name)) is not getattr(batch, f.name)]
    return count_step(trainer).others_peak - tensor_bytes(copied)
