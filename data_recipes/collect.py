"""Stage `collect`: the target's states on every answered document, for the chunks that decoding did not record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import DraftsmithError
from ..files import read_json
from ..heads.base import Needs
from ..heads.target import Target
from ..manifest import Stage
from ..progress import Progress, progress_bar, say
from .chat import document
from .layout import ANSWERS, FEATURES, AnswerRow, TargetInfo, answer_chunks, read_answers, stage_digest
from .store import INDEX, ChunkMeta, Document, FeatureStore, build_index, read_header, write_chunk

VERSION = 1
NOT_FINITE_CAP = 0.001
"""Share of documents with NaN or infinite states above which the stage stops."""


@dataclass(frozen=True)
class CollectSettings:
    """Settings of the stage.

    Attributes:
        layer_ids: aux layers, ascending.
        token_budget: most tokens of a batch of the forward pass, padding included; shapes speed and memory only.
    """

    layer_ids: tuple[int, ...]
    token_budget: int = 4096


def collect(settings: CollectSettings, data: Path, info: TargetInfo, load_target: Callable[[], Target]) -> Stage:
    """Bring `data/features` up to date with `data/answers`.

    Args:
        settings: which layers.
        data: the data folder, with finished answers.
        info: the target, as `load_target` will load it.
        load_target: called only when a chunk has no features yet.

    Returns:
        The finished stage; its record holds documents, tokens, answer_tokens, bytes, labels and documents left out.

    Raises:
        DraftsmithError: no answers; more than 0.1 % of the documents have states that are not finite.
    """
    answers = answer_chunks(data)
    stage = features_stage(data, stage_digest(data / ANSWERS, "regenerate"), info, settings.layer_ids)
    names = [path.stem for path in answers]
    if not names:
        raise DraftsmithError(f"{data / ANSWERS} holds no answers: run 'draftsmith regenerate' first")
    if stage.manifest is not None and _up_to_date(stage.folder, names):
        return stage
    missing = [path for path in answers if not _features(stage, path).exists()]
    if missing:
        _fill(stage, missing, settings, load_target())
    _check_dropped(stage, answers)
    index = build_index(stage.folder, names, info.fingerprint, settings.layer_ids, stage.digest)
    store = FeatureStore.open(stage.folder)
    counts = store.label_counts("train")
    record: dict[str, Any] = {
        **store.totals(),
        "chunks": len(names),
        "chunks_computed_here": len(missing),
        "labels": int(counts.sum()),
        "distinct_labels": int((counts > 0).sum()),
        "not_finite": [name for chunk in index["chunks"] for name in chunk["dropped"]],
    }
    stage.finish(**record)
    say(
        f"collect: {record['documents']:,} documents, {record['tokens']:,} tokens, "
        f"{record['answer_tokens']:,} of them answers, {record['bytes'] / 1e9:.2f} GB"
    )
    return stage


def features_stage(data: Path, answers_digest: str, info: TargetInfo, layer_ids: Sequence[int]) -> Stage:
    """Open the features of these answers and layers; `regenerate` writes into the same folder while it decodes."""
    identity = {"answers": answers_digest, "fingerprint": info.fingerprint, "layer_ids": list(layer_ids)}
    return Stage.open(data / FEATURES, "collect", VERSION, identity)


def chunk_meta(target: Target, layer_ids: Sequence[int]) -> ChunkMeta:
    """Describe what this target's states of these layers are."""
    return ChunkMeta(target.fingerprint, tuple(layer_ids), target.hidden_size, target.vocab_size)


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


def _fill(stage: Stage, missing: list[Path], settings: CollectSettings, target: Target) -> None:
    meta = chunk_meta(target, settings.layer_ids)
    with progress_bar("collect", None, "tokens") as bar:
        for number, path in enumerate(missing, 1):
            bar.note(f"chunk {number} of {len(missing)}")
            documents = _forward(read_answers(path), settings, target, bar)
            for name in write_chunk(_features(stage, path), documents, meta):
                say(f"collect: the states of {name} are not finite: left out")


def _forward(rows: list[AnswerRow], settings: CollectSettings, target: Target, bar: Progress) -> list[Document]:
    """Run the target over whole documents; returns them in the rows' order, without padding rows."""
    pairs = [document(row.prompt, row.answer) for row in rows]
    needs = Needs(settings.layer_ids, last=True)
    found: dict[int, Document] = {}
    for batch in plan_forward([len(tokens) - 1 for tokens, _ in pairs], settings.token_budget):
        sizes = [len(pairs[i][0]) - 1 for i in batch]  # nothing reads the states of the last token
        padded = torch.zeros(len(batch), max(sizes), dtype=torch.int64)
        for line, (i, n) in enumerate(zip(batch, sizes, strict=True)):
            padded[line, :n] = torch.tensor(pairs[i][0][:n])
        aux, last = target.states(padded, needs)
        assert last is not None
        aux, last = aux.to("cpu", torch.bfloat16), last.to("cpu", torch.bfloat16)
        for line, (i, n) in enumerate(zip(batch, sizes, strict=True)):
            tokens, answer = torch.tensor(pairs[i][0]), torch.tensor(pairs[i][1])
            found[i] = Document(rows[i].id, rows[i].split, tokens, answer, aux[line, :n], last[line, :n])
        bar.advance(sum(sizes))
    return [found[i] for i in range(len(rows))]


def _check_dropped(stage: Stage, answers: list[Path]) -> None:
    documents, dropped = 0, []
    for path in answers:
        header, lengths = read_header(_features(stage, path))
        documents += len(lengths) + len(header["dropped"])
        dropped += header["dropped"]
    if len(dropped) > NOT_FINITE_CAP * documents:
        raise DraftsmithError(
            f"{stage.folder}: the target's states are NaN or infinite on {len(dropped)} of {documents} documents "
            f"({', '.join(dropped[:3])}{', …' if len(dropped) > 3 else ''}), more than {NOT_FINITE_CAP:.1%}: "
            f"delete the folder and run the target in another dtype"
        )


def _up_to_date(folder: Path, names: list[str]) -> bool:
    if not (folder / INDEX).exists():
        return False
    chunks = {c["name"]: folder / f"{c['name']}.safetensors" for c in read_json(folder / INDEX)["chunks"]}
    return list(chunks) == names and all(path.exists() for path in chunks.values())


def _features(stage: Stage, answers: Path) -> Path:
    return stage.folder / f"{answers.stem}.safetensors"
