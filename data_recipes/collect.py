"""Stage `collect`: the target's states on every document, for the chunks that decoding did not record.

Of several ranks each makes every world-th chunk; they meet in the file system alone, and rank 0 writes the index when
all chunks are there. How one chunk is made: forward.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import DraftsmithError
from ..files import read_json
from ..heads.target import Target
from ..manifest import Stage
from ..progress import progress_bar, say
from .budget import Budget
from .chunk_file import Chunk, ChunkMeta
from .forward import write_states
from .index import INDEX, build_index
from .layout import (
    ANSWERS,
    FEATURES,
    PROMPTS,
    DocumentRow,
    TargetInfo,
    answer_chunks,
    prompt_chunks,
    read_answers,
    read_own_answers,
    stage_digest,
)
from .store import FeatureStore

VERSION = 2
NOT_FINITE_CAP = 0.001
"""Share of documents with NaN or infinite states above which the stage stops; one document never stops it."""
PATIENCE_S = 1800.0
"""Rank 0 gives up when for so long no other rank has finished a chunk."""
_POLL_S = 0.2


@dataclass(frozen=True)
class CollectSettings:
    """Settings of the stage.

    Attributes:
        layer_ids: aux layers, ascending.
        token_budget: most tokens of a batch of the forward pass, padding included; shapes speed and memory only.
        dtype, teacher, topk: what is stored; see ChunkMeta.
        answers: whose answers the documents have: those that the target gave, or the data set's own.
    """

    layer_ids: tuple[int, ...]
    token_budget: int = 4096
    dtype: Literal["bf16", "int8"] = "bf16"
    teacher: Literal["hidden", "topk"] = "hidden"
    topk: int = 64
    answers: Literal["target", "dataset"] = "target"


@dataclass(frozen=True)
class Origin:
    """Where documents come from.

    Attributes:
        folder, command: of the stage that makes them.
        chunks: its files in a data folder; read: the documents of one.
    """

    folder: str
    command: str
    chunks: Callable[[Path], list[Path]]
    read: Callable[[Path], list[DocumentRow]]


ORIGINS = {
    "target": Origin(ANSWERS, "regenerate", answer_chunks, read_answers),
    "dataset": Origin(PROMPTS, "prepare", prompt_chunks, read_own_answers),
}
"""By whose answers the documents have."""


def collect(
    settings: CollectSettings,
    data: Path,
    info: TargetInfo,
    load_target: Callable[[], Target],
    rank: int = 0,
    world: int = 1,
    minutes: float | None = None,
) -> Stage:
    """Bring `data/features` up to date with the documents.

    Args:
        settings: which layers, in which form.
        data: the data folder, with finished answers, or finished prompts where the data set's own are taken.
        info: the target, as `load_target` will load it.
        load_target: called only when this rank has a chunk to make.
        rank, world: this process among those that share the work; chunk i is rank i % world's.
        minutes: time budget of each rank, earlier calls included; None makes all chunks. At least one chunk is made; a
            later call with more goes on.

    Returns:
        The stage; finished by rank 0 alone. Its record holds documents, tokens, answer_tokens, bytes, labels, the
        chunks that were planned, are there and were computed by this rank, and the ids of documents left out.

    Raises:
        DraftsmithError: no documents, one that the target can't read, or another rank that doesn't finish; more than
            one document and 0.1 % of them, or all, have states that are not finite.
    """
    origin = ORIGINS[settings.answers]
    stage = features_stage(data, stage_digest(data / origin.folder, origin.command), info, settings, rank)
    planned = origin.chunks(data)
    if not planned:
        raise DraftsmithError(f"{data / origin.folder} holds no documents: run 'draftsmith {origin.command}' first")
    own = [path for path in planned[rank::world] if not _features(stage, path).exists()]
    budget = Budget(stage.folder, minutes, {path.stem for path in own}, rank)
    made = _fill(stage, own, len(planned), origin.read, settings, info, load_target, budget)
    if rank > 0:
        return stage
    _wait_for_others(stage, planned, world, budget)
    there = [path.stem for path in planned if _features(stage, path).exists()]
    if stage.manifest is None or not _up_to_date(stage.folder, there):
        _finish(stage, there, len(planned), made, info, settings, minutes)
    return stage


def features_stage(
    data: Path, documents_digest: str, info: TargetInfo, settings: CollectSettings, rank: int = 0
) -> Stage:
    """Open the features of these documents; `regenerate` writes into the same folder while it decodes."""
    identity = {
        "documents": documents_digest,
        "fingerprint": info.fingerprint,
        "layer_ids": list(settings.layer_ids),
        "dtype": settings.dtype,
        "teacher": settings.teacher if settings.teacher == "hidden" else f"top {settings.topk}",
    }
    return Stage.open(data / FEATURES, "collect", VERSION, identity, rank)


def chunk_meta(target: Target, settings: CollectSettings) -> ChunkMeta:
    """Describe what is stored of this target's states."""
    topk = min(settings.topk, target.vocab_size) if settings.teacher == "topk" else 0
    return ChunkMeta(
        target.fingerprint, settings.layer_ids, target.hidden_size, target.vocab_size, settings.dtype,
        settings.teacher, topk,
    )  # fmt: skip


def _fill(
    stage: Stage,
    missing: list[Path],
    planned: int,
    read: Callable[[Path], list[DocumentRow]],
    settings: CollectSettings,
    info: TargetInfo,
    load_target: Callable[[], Target],
    budget: Budget,
) -> int:
    """Make the missing chunks that fit the budget; returns how many were made.

    Args:
        planned: chunks of all ranks: a target whose states would be too many to leave out stops here already.
    """
    target: Target | None = None
    dropped: list[str] = []
    largest = 0
    with progress_bar("collect", None, "tokens") as bar:
        for number, path in enumerate(missing, 1):
            rows = read(path)
            tokens = sum(len(row.tokens) for row in rows)
            if not budget.room_for(tokens):
                return number - 1
            target = target or load_target()
            if target.fingerprint != info.fingerprint:
                raise DraftsmithError(f"the target {target.id} changed since its documents were made: run again")
            meta, started = chunk_meta(target, settings), time.monotonic()
            if number == 1:
                size = meta.row_bytes * tokens * len(missing) / 1e9
                say(f"collect: {len(missing)} chunks to make, about {size:.2f} GB if they are like the first")
            bar.note(f"chunk {number} of {len(missing)}")
            for name in write_states(_features(stage, path), rows, target, meta, settings.token_budget, bar):
                say(f"collect: the states of {name} are not finite: left out")
                dropped.append(name)
            largest = max(largest, len(rows))
            _check_dropped(stage, dropped, largest * planned)
            budget.add(path.stem, max(tokens, 1), time.monotonic() - started)
    return len(missing)


def _wait_for_others(stage: Stage, planned: list[Path], world: int, budget: Budget) -> None:
    """Wait until the chunks of all ranks are there, or the budget of all is spent."""
    longest = max((c["seconds"] for c in budget.chunks), default=0.0)
    spent = budget.before - 2 * longest  # a rank that began its last chunk in time may take longer for it
    end = None if budget.minutes is None else budget.started + 60 * budget.minutes - spent
    seen, changed = len(planned) + 1, time.monotonic()
    while missing := [i for i in range(len(planned)) if i % world and not _features(stage, planned[i]).exists()]:
        now = time.monotonic()
        if end is not None and now > end:
            return
        first = f"{_features(stage, planned[missing[0]])} of rank {missing[0] % world}"
        if len(missing) < seen:
            if seen > len(planned):
                say(f"collect: waiting for {len(missing)} chunks of other ranks, {first} for one")
            seen, changed = len(missing), now
        elif now - changed > PATIENCE_S:
            raise DraftsmithError(
                f"{first} and {len(missing) - 1} more chunks are missing, and none was finished for "
                f"{PATIENCE_S / 60:.0f} minutes: is every rank running, on the same file system? What is finished is "
                "kept: run the same command again"
            )
        time.sleep(_POLL_S)


def _finish(
    stage: Stage, names: list[str], planned: int, made: int, info: TargetInfo, settings: CollectSettings,
    minutes: float | None,
) -> None:  # fmt: skip
    chunks = [Chunk(stage.folder / f"{name}.safetensors", mapped=False) for name in names]
    documents = sum(len(chunk.documents) for chunk in chunks)
    dropped = [d[0] for chunk in chunks for d, finite in zip(chunk.documents, chunk.finite, strict=True) if not finite]
    _check_dropped(stage, dropped, documents)
    index = build_index(stage.folder, names, info.fingerprint, settings.layer_ids, stage.digest)
    store = FeatureStore.open(stage.folder)
    counts = store.label_counts("train").sum(0)
    record: dict[str, Any] = {
        **store.totals(),
        "chunks": len(names),
        "chunks_planned": planned,
        "chunks_computed_here": made,
        "minutes": None if len(names) == planned else minutes,
        "labels": int(counts.sum()),
        "distinct_labels": int((counts > 0).sum()),
        "not_finite": [chunk["ids"][i] for chunk in index["chunks"] for i in chunk["dropped"]],
    }
    stage.finish(**record)
    rest = "" if len(names) == planned else f"; {planned - len(names)} chunks are left for a larger time budget"
    say(
        f"collect: {record['documents']:,} documents, {record['tokens']:,} tokens, "
        f"{record['answer_tokens']:,} of them answers, {record['bytes'] / 1e9:.2f} GB{rest}"
    )


def _check_dropped(stage: Stage, dropped: list[str], documents: int) -> None:
    """Refuse too many documents without states; `documents` may be how many there are going to be."""
    if len(dropped) > max(1, NOT_FINITE_CAP * documents) or len(dropped) == documents:
        raise DraftsmithError(
            f"{stage.folder}: the target's states are NaN or infinite on {len(dropped)} of {documents} documents "
            f"({', '.join(dropped[:3])}{', …' if len(dropped) > 3 else ''}), more than one and {NOT_FINITE_CAP:.1%}: "
            f"delete the folder and run the target in another dtype"
        )


def _up_to_date(folder: Path, names: list[str]) -> bool:
    """Whether the index is that of these very chunks."""
    if not (folder / INDEX).exists():
        return False
    noted = [(chunk["name"], chunk["seal"]) for chunk in read_json(folder / INDEX)["chunks"]]
    return noted == [(name, Chunk(folder / f"{name}.safetensors", mapped=False).seal) for name in names]


def _features(stage: Stage, documents: Path) -> Path:
    return stage.folder / f"{documents.stem}.safetensors"
