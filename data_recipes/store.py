"""The feature store: what the target computed for every document, memory-mapped.

`features/` holds one file for each chunk of documents (chunk_file.py) and, once collected, `index.json` and
`label_counts.safetensors` (index.py), so that opening reads no states and no tokens whatever the store's size. A
document of T tokens has T - 1 rows of states: nothing ever reads the states of its last token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ..errors import DraftsmithError
from ..files import atomic_path, read_json, sha256_file
from .chunk_file import FORMAT_VERSION, Chunk, ChunkMeta, ChunkWriter, Text, TopK, decode, encode
from .index import INDEX, build_index, check_meta, describe, read_label_counts


@dataclass
class Document:
    """One document, and what the target computed on it.

    Attributes:
        id, split, source: as in the prompts; split is "train" or "val".
        tokens: [T] int64; answer: [T] bool, True on answer tokens, end-of-turn included.
        features: [T-1, A*H] bf16 aux states.
        last: [T-1, H] bf16 state n before the final norm; None where the target's likeliest tokens are kept instead.
        topk: ids int32 [T-1, k] and log-probabilities fp16 [T-1, k] of the target's likeliest tokens after each token,
            likeliest first; None where `last` is there.
    """

    id: str
    split: str
    source: str
    tokens: Tensor
    answer: Tensor
    features: Tensor
    last: Tensor | None
    topk: TopK | None = None


def chunk_name(number: int) -> str:
    """Name, without suffix, of a chunk in every stage."""
    return f"chunk-{number:05d}"


def split_states(states: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    """Split [R, (A+1)*H] states into aux [R, A*H] and last [R, H]."""
    return states[:, :-hidden_size], states[:, -hidden_size:]


def write_chunk(path: Path, documents: Sequence[Document], meta: ChunkMeta) -> list[str]:
    """Write the documents' tokens and states as one file, atomically.

    Returns:
        The ids of documents whose states are not finite (or, in int8, too large for a scale): their tokens are kept in
        the file, but the store leaves them out.
    """
    texts = [Text(d.id, d.split, d.source, d.tokens, d.answer) for d in documents]
    with atomic_path(path) as temporary, ChunkWriter(temporary, texts, meta) as writer:
        for number, d in enumerate(documents):
            if number not in writer.waiting:
                continue
            rows, finite = encode(d.features if d.last is None else torch.cat((d.features, d.last), -1), d.topk, meta)
            writer.put(number, rows, bool(finite.all()))
        return writer.finish()


class FeatureStore:
    """All documents of a store; states are mapped from disk and read when they are used.

    Attributes:
        folder: where it lies.
        meta: what is stored; layer_ids, hidden_size, vocab_size, fingerprint: of the target's pass that filled it.
        digest: hash of the index: changes when documents are added or any byte of a chunk is another.
        ids, lengths: of the D documents; a length counts tokens.
        sources: names of the sources.
    """

    def __init__(self, folder: Path, index: dict[str, Any], digest: str) -> None:
        self.folder, self.digest = folder, digest
        self.meta = ChunkMeta.from_dict(index)
        self.layer_ids, self.hidden_size = self.meta.layer_ids, self.meta.hidden_size
        self.vocab_size, self.fingerprint = self.meta.vocab_size, self.meta.fingerprint
        self.sources: list[str] = index["sources"]
        self._splits: list[str] = index["splits"]
        self._labels_sha256: str = index["label_counts_sha256"]
        self._paths = [folder / f"{chunk['name']}.safetensors" for chunk in index["chunks"]]
        self._seals: list[int] = [chunk["seal"] for chunk in index["chunks"]]
        self._answer_tokens: int = sum(chunk["answer_tokens"] for chunk in index["chunks"])
        self._bytes: int = sum(chunk["bytes"] for chunk in index["chunks"])
        self._open: dict[int, Chunk] = {}
        for path, chunk in zip(self._paths, index["chunks"], strict=True):
            _check_size(path, chunk["bytes"])
        kept = [np.setdiff1d(np.arange(len(c["ids"])), c["dropped"]) for c in index["chunks"]]
        self._chunk_of = np.repeat(np.arange(len(kept), dtype=np.int32), [len(k) for k in kept])
        self._inside = np.concatenate([np.zeros(0, np.int32), *kept]).astype(np.int32)
        self.ids: list[str] = [c["ids"][i] for c, k in zip(index["chunks"], kept, strict=True) for i in k.tolist()]

        def column(key: str, kind: type[np.number[Any]]) -> np.ndarray[Any, Any]:
            own = (np.asarray(c[key], kind)[k] for c, k in zip(index["chunks"], kept, strict=True))
            return np.concatenate([np.zeros(0, kind), *own])

        self.lengths = array("q", column("lengths", np.int64).tobytes())
        self._split, self._source = column("splits", np.int16), column("sources", np.int32)
        self._first_label = column("first_labels", np.int64)

    @classmethod
    def open(cls, folder: Path, fingerprint: str | None = None, layer_ids: Sequence[int] | None = None) -> Self:
        """Open a collected store.

        Args:
            folder: the `features/` folder.
            fingerprint, layer_ids: refuse a store that was filled by another target or from other layers.

        Raises:
            DraftsmithError: not collected, a chunk is missing or cut off, another target, other layers.
        """
        if not (folder / INDEX).exists():
            raise DraftsmithError(
                f"{folder} holds no {INDEX}: its features are not collected yet, run 'draftsmith collect'"
            )
        index = read_json(folder / INDEX)
        wanted: dict[str, Any] = {"format_version": FORMAT_VERSION}
        if fingerprint is not None:
            wanted["fingerprint"] = fingerprint
        if layer_ids is not None:
            wanted["layer_ids"] = list(layer_ids)
        check_meta(folder / INDEX, index, wanted)
        try:
            return cls(folder, index, sha256_file(folder / INDEX))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise DraftsmithError(
                f"{folder / INDEX} is damaged ({type(error).__name__}: {error}): delete it and run 'draftsmith collect'"
            ) from error

    def __len__(self) -> int:
        return len(self.ids)

    def split(self, i: int) -> str:
        """Return "train" or "val" for document `i`."""
        return self._splits[self._split[i]]

    def source(self, i: int) -> str:
        """Return the name of document `i`'s source."""
        return self.sources[self._source[i]]

    def trainable(self, split: str, max_length: int) -> tuple[list[int], int]:
        """A split's documents with a supervised row in their first `max_length` tokens, and how many have none."""
        own = self._split == (self._splits.index(split) if split in self._splits else -1)
        good = own & (self._first_label > 0) & (self._first_label < max_length)
        return np.flatnonzero(good).tolist(), int(own.sum() - good.sum())

    def document(self, i: int, most: int | None = None) -> Document:
        """Return the first `most` tokens of document `i` and the states of all but the last of them.

        bf16 states are views of the mapped file; int8 ones are made bf16 here.

        Raises:
            DraftsmithError: its chunk is missing, damaged in its head, or not the one that was collected.
        """
        chunk, number = self._chunk(int(self._chunk_of[i])), int(self._inside[i])
        tokens, answer = chunk.text(number, most)
        states, topk = decode(chunk.rows(number, None if most is None else max(most - 1, 0)), self.meta)
        aux, last = (states, None) if topk is not None else split_states(states, self.hidden_size)
        return Document(self.ids[i], self.split(i), self.source(i), tokens.long(), answer, aux, last, topk)

    def totals(self) -> dict[str, int]:
        """Return sums over all documents: documents, tokens, answer_tokens, bytes on disk."""
        return {
            "documents": len(self), "tokens": sum(self.lengths), "answer_tokens": self._answer_tokens,
            "bytes": self._bytes,
        }  # fmt: skip

    def label_counts(self, split: str = "train") -> Tensor:
        """How often each token is the label of a supervised row at step 0, int64 [S, V] by source."""
        counts = read_label_counts(self.folder, self._labels_sha256)
        return counts.get(split, torch.zeros(len(self.sources), self.vocab_size, dtype=torch.int64))

    def verify(self) -> int:
        """Read every byte of the store; returns the number of documents, those that are left out included.

        Raises:
            DraftsmithError: what is damaged or missing, with the file and, in a document's own bytes, the document.
        """
        index, checked = read_json(self.folder / INDEX), 0
        self.label_counts()
        for number, noted in enumerate(index["chunks"]):
            self._open.pop(number, None)  # its head may have been read long ago
            chunk = self._chunk(number)
            for document in range(len(chunk.documents)):
                chunk.check(document)
            if describe(chunk, self._splits, self.sources)[0] != noted:
                raise DraftsmithError(
                    f"{self.folder / INDEX} is damaged: what it says of {chunk.path.name} is not so: delete it and run "
                    "'draftsmith collect' again"
                )
            checked += len(chunk.documents)
        return checked

    def _chunk(self, number: int) -> Chunk:
        if number not in self._open:
            chunk = Chunk(self._paths[number])
            check_meta(chunk.path, chunk.meta.to_dict(), self.meta.to_dict())
            if chunk.seal != self._seals[number]:
                raise DraftsmithError(
                    f"{chunk.path} is not the chunk that {INDEX} was made from: run 'draftsmith collect' again"
                )
            self._open[number] = chunk
        return self._open[number]


def _check_size(path: Path, size: int) -> None:
    if not path.exists():
        raise DraftsmithError(f"{path} is missing: run 'draftsmith collect' again to make it")
    if (found := path.stat().st_size) != size:
        raise DraftsmithError(
            f"{path} has {found} bytes instead of {size}: delete it and run 'draftsmith collect' again"
        )


__all__ = ["ChunkMeta", "Document", "FeatureStore", "build_index", "chunk_name", "split_states", "write_chunk"]
