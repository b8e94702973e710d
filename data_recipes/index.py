"""What is known of a feature store without opening its chunks: which documents it holds, and what their labels are.

`index.json` lists the chunks with their documents; `label_counts.safetensors` holds, by split, how often each token is
the label of a supervised row, by source: int64 [S, V]. Both are pure functions of the chunks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DraftsmithError
from ..files import atomic_path, sha256_file, write_text
from ..heads import alignment
from .chunk_file import FORMAT_VERSION, Chunk

INDEX, LABEL_COUNTS = "index.json", "label_counts.safetensors"


def build_index(
    folder: Path, names: Sequence[str], fingerprint: str, layer_ids: Sequence[int], identity: str
) -> dict[str, Any]:
    """Write index and label counts over the chunks `names`; returns the index.

    Args:
        folder: the store's folder.
        names: chunk names, in the documents' order; at least one.
        fingerprint, layer_ids: what every chunk must have been made with.
        identity: digest of the stage that made the chunks.

    Returns:
        What `index.json` holds: the ChunkMeta's keys; splits, sources: their names; label_counts_sha256; chunks: what
        `describe` returns.

    Raises:
        DraftsmithError: a chunk is missing, damaged in its head, or made with something else than the others.
    """
    splits: dict[str, None] = {}
    sources: dict[str, None] = {}
    wanted: dict[str, Any] = {"fingerprint": fingerprint, "layer_ids": list(layer_ids)}
    for name in names:
        chunk = Chunk(folder / f"{name}.safetensors", mapped=False)
        check_meta(chunk.path, chunk.meta.to_dict(), wanted)
        wanted = chunk.meta.to_dict()
        splits |= dict.fromkeys(split for _, split, _ in chunk.documents)
        sources |= dict.fromkeys(source for *_, source in chunk.documents)
    counts = torch.zeros(len(splits), len(sources), wanted["vocab_size"], dtype=torch.int64)
    chunks = []
    for name in names:
        described, labels = describe(Chunk(folder / f"{name}.safetensors"), list(splits), list(sources))
        chunks.append(described)
        split, source, label = labels
        counts.index_put_((split, source, label), torch.ones_like(label), accumulate=True)
    _write_label_counts(folder / LABEL_COUNTS, dict(zip(splits, counts, strict=True)))
    index = {
        "format_version": FORMAT_VERSION, "identity": identity, **wanted, "splits": list(splits),
        "sources": list(sources), "label_counts_sha256": sha256_file(folder / LABEL_COUNTS), "chunks": chunks,
    }  # fmt: skip
    write_text(folder / INDEX, json.dumps(index, ensure_ascii=False, separators=(",", ":")) + "\n")
    return index


def describe(
    chunk: Chunk, splits: Sequence[str], sources: Sequence[str]
) -> tuple[dict[str, Any], tuple[Tensor, Tensor, Tensor]]:
    """Say what a chunk holds, from its head, tokens and masks.

    Args:
        splits, sources: names, of which the documents' places are noted.

    Returns:
        As in the index: name; bytes; seal; ids, splits, sources, lengths and first_labels of all documents; dropped,
        the numbers of those whose states are not finite; answer_tokens of the others. A first label is the index of
        the first token that a supervised row predicts at step 0, or 0.
        And the labels of all supervised rows at step 0 with the places of their split and source, int64 [rows] each.
    """
    split_place = {name: i for i, name in enumerate(splits)}
    source_place = {name: i for i, name in enumerate(sources)}
    split = torch.tensor([split_place[name] for _, name, _ in chunk.documents], dtype=torch.int64)
    source = torch.tensor([source_place[name] for *_, name in chunk.documents], dtype=torch.int64)
    finite = torch.from_numpy(chunk.finite.copy())
    document = torch.arange(len(split)).repeat_interleave(torch.from_numpy(chunk.lengths.copy()))
    tokens, answer = chunk.tensors["tokens"], chunk.tensors["answer"]
    counted = torch.where(finite[document], document, -1)
    rows = alignment.supervised(answer, counted, 1)[0].nonzero().flatten()
    places = alignment.label_index(rows, 0)
    who, first = np.unique(document[rows].numpy(), return_index=True)
    first_labels = np.zeros(len(split), np.int64)
    first_labels[who] = places.numpy()[first] - chunk.starts[who]
    described = {
        "name": chunk.path.stem, "bytes": chunk.path.stat().st_size, "seal": chunk.seal,
        "ids": [name for name, *_ in chunk.documents], "splits": split.tolist(), "sources": source.tolist(),
        "lengths": chunk.lengths.tolist(), "first_labels": first_labels.tolist(),
        "dropped": (~finite).nonzero().flatten().tolist(), "answer_tokens": int((answer & (counted >= 0)).sum()),
    }  # fmt: skip
    return described, (split[document[rows]], source[document[rows]], tokens[places].long())


def read_label_counts(folder: Path, sha256: str) -> dict[str, Tensor]:
    """Read the counts of a store, int64 [S, V] by split.

    Raises:
        DraftsmithError: they are missing, or not those that belong to the index.
    """
    from safetensors.torch import load_file

    path = folder / LABEL_COUNTS
    if not path.exists() or sha256_file(path) != sha256:
        raise DraftsmithError(
            f"{path} is missing, damaged or of another store: delete {INDEX} beside it and run 'draftsmith collect'"
        )
    counts: dict[str, Tensor] = load_file(path)
    return counts


def check_meta(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse a file that was made with something else than wanted; raises DraftsmithError with the first difference."""
    for key, value in wanted.items():
        if found.get(key) != value:
            raise DraftsmithError(
                f"{path}: {key} is {found.get(key)!r}, not {value!r}: these features were collected with another "
                f"target, other layers or another version; run 'draftsmith collect' for this one"
            )


def _write_label_counts(path: Path, counts: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    with atomic_path(path) as temporary:
        save_file({split: x.clone() for split, x in counts.items()}, temporary)
