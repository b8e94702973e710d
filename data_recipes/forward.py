"""The target's pass over the documents of one chunk, its states written as they come.

The target reads each document once, in batches of documents of about equal length. A thread writes what a batch gave,
straight to its place in the chunk's file, while the next batch is computed: memory is that of a few batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DraftsmithError
from ..files import atomic_path
from ..heads.base import Needs, TargetParts
from ..heads.losses import rows_per_chunk
from ..heads.target import Target
from ..progress import Progress
from .chunk_file import ChunkMeta, ChunkWriter, Text, TopK, encode
from .layout import DocumentRow
from .store import Document, split_states

_AHEAD = 2
"""Batches that may wait to be written: what bounds the memory."""


def plan_forward(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Return batches of row numbers for right-padded passes: sorted by length, at most `token_budget` with padding."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    batches: list[list[int]] = []
    for i in order:
        if batches and lengths[i] * (len(batches[-1]) + 1) <= token_budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def write_states(
    path: Path, rows: Sequence[DocumentRow], target: Target, meta: ChunkMeta, token_budget: int, bar: Progress
) -> list[str]:
    """Run the target over the documents of one chunk and write its file, atomically.

    Returns:
        The ids of documents whose states are not finite; see `store.write_chunk`.
    """
    for row in rows:
        _check_row(path, row, target)
    with atomic_path(path) as temporary, ChunkWriter(temporary, [Text.of(row) for row in rows], meta) as writer:
        with ThreadPoolExecutor(1, "draftsmith-states") as pool:
            waiting: deque[Future[None]] = deque()
            for batch, sizes, encoded in _passes(rows, target, meta, token_budget):
                waiting.append(pool.submit(_put, writer, batch, sizes, encoded))
                if len(waiting) > _AHEAD:
                    waiting.popleft().result()
                bar.advance(sum(sizes))
            for written in waiting:
                written.result()
        return writer.finish()


def recorded_document(row: DocumentRow, states: Tensor, target: Target, meta: ChunkMeta) -> Document:
    """A document whose states [T-1, (A+1)*H] decoding has recorded, in the form that `meta` asks for."""
    text = Text.of(row)
    aux, last = split_states(states, meta.hidden_size)
    topk = None
    if meta.teacher == "topk":
        ids, logprobs = likeliest(last.to(target.device, target.dtype), target.parts(), meta.topk)
        topk = (ids.cpu(), logprobs.cpu())
    kept = last if topk is None else None
    return Document(row.id, row.split, row.source, text.tokens, text.answer, aux, kept, topk)


@torch.inference_mode()
def likeliest(last: Tensor, parts: TargetParts, k: int) -> TopK:
    """The target's k likeliest tokens after each row.

    Args:
        last: [R, H] states n before the final norm, in the dtype of the output weight.
        parts: of the target.

    Returns:
        Ids int64 [R, k], likeliest first, and their log-probabilities over the whole vocabulary, [R, k] fp32 (fp64 for
        fp64 states).
    """
    found: list[TopK] = []
    for part in last.split(rows_per_chunk(len(parts.lm_head))):
        logits = parts.logits(parts.normed(part))
        best = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1).topk(k, -1)
        found.append((best.indices, best.values))
    return torch.cat([ids for ids, _ in found]), torch.cat([logprobs for _, logprobs in found])


@dataclass
class _Copied:
    """Tensors on their way to the CPU, and the event after which they are there."""

    rows: dict[str, Tensor]
    finite: Tensor
    ready: Any = None


@torch.inference_mode()
def _passes(
    rows: Sequence[DocumentRow], target: Target, meta: ChunkMeta, token_budget: int
) -> Iterator[tuple[list[int], list[int], _Copied]]:
    """Yield (document numbers, their rows of states, what is stored of those one behind the other) by batch."""
    lengths = [len(row.tokens) - 1 for row in rows]  # nothing reads the states of the last token
    long = [i for i, n in enumerate(lengths) if n > 0]
    needs, parts = Needs(meta.layer_ids, last=True), target.parts() if meta.teacher == "topk" else None
    for batch in plan_forward([lengths[i] for i in long], token_budget):
        numbers = [long[i] for i in batch]
        sizes = [lengths[i] for i in numbers]
        padded = torch.zeros(len(numbers), max(sizes), dtype=torch.int64)
        for line, (i, n) in enumerate(zip(numbers, sizes, strict=True)):
            padded[line, :n] = torch.tensor(rows[i].tokens[:n])
        aux, last = target.states(padded, needs)
        assert last is not None
        within = torch.cat([line * padded.shape[1] + torch.arange(n) for line, n in enumerate(sizes)]).to(last.device)
        kept = last.flatten(0, 1).index_select(0, within)
        states = aux.flatten(0, 1).index_select(0, within)
        topk = None if parts is None else likeliest(kept, parts, meta.topk)
        encoded, finite = encode(states if parts is not None else torch.cat((states, kept), -1), topk, meta)
        yield numbers, sizes, _to_cpu(encoded, finite)


def _to_cpu(rows: dict[str, Tensor], finite: Tensor) -> _Copied:
    if finite.device.type != "cuda":
        return _Copied({name: x.cpu() for name, x in rows.items()}, finite.cpu())

    def copy(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)

    copied = _Copied({name: copy(x) for name, x in rows.items()}, copy(finite))
    copied.ready = torch.cuda.Event()
    copied.ready.record()
    return copied


def _put(writer: ChunkWriter, numbers: list[int], sizes: list[int], copied: _Copied) -> None:
    if copied.ready is not None:
        copied.ready.synchronize()
    start = 0
    for number, size in zip(numbers, sizes, strict=True):
        part = slice(start, start + size)
        writer.put(number, {name: x[part] for name, x in copied.rows.items()}, bool(copied.finite[part].all()))
        start += size


def _check_row(path: Path, row: DocumentRow, target: Target) -> None:
    """Refuse what the target would read as something else, or not at all."""
    if len(row.tokens) > target.max_positions:
        raise DraftsmithError(
            f"document {row.id} of {path.stem} has {len(row.tokens)} tokens, more than the {target.max_positions} of "
            f"the target's context: set prepare.max_tokens to that and run 'draftsmith prepare' again"
        )
    unknown = next((t for t in row.tokens if not 0 <= t < target.vocab_size), None)
    if unknown is not None:
        raise DraftsmithError(
            f"document {row.id} of {path.stem} has token id {unknown}, the target's are 0..{target.vocab_size - 1}: "
            "it was tokenised for another model"
        )
