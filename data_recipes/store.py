"""The feature store: what the target computed for every document, memory-mapped.

`features/` holds one safetensors file for each chunk of answers and, once collected, `index.json` with the ids, splits
and lengths of all documents, so that opening reads one small file whatever the store's size. A document of T tokens has
T - 1 rows of states: nothing ever reads the states of its last token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import DraftsmithError
from ..files import atomic_path, read_json, sha256_json, write_json
from ..heads import alignment

FORMAT_VERSION = 1
INDEX = "index.json"
_META = "draftsmith"  # one key: safetensors writes several in no fixed order, and equal chunks must be equal files


@dataclass(frozen=True)
class ChunkMeta:
    """What all chunks of a store share.

    Attributes:
        fingerprint: of the target that computed the states.
        layer_ids: aux layers in the order in which they are concatenated.
        hidden_size, vocab_size: H and V of the target.
    """

    fingerprint: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    vocab_size: int


@dataclass
class Document:
    """One prompt with its answer, and what the target computed on it.

    Attributes:
        id, split: as in the prompts; split is "train" or "val".
        tokens: [T] int64; answer: [T] bool, True on the answer's tokens, end-of-turn included.
        features: [T-1, A*H] bf16 aux states; last: [T-1, H] bf16 state n before the final norm.
    """

    id: str
    split: str
    tokens: Tensor
    answer: Tensor
    features: Tensor
    last: Tensor


def chunk_name(number: int) -> str:
    """Name, without suffix, of a chunk of answers and of its features."""
    return f"chunk-{number:05d}"


def split_states(states: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    """Split [R, (A+1)*H] states into aux [R, A*H] and last [R, H]."""
    return states[:, :-hidden_size], states[:, -hidden_size:]


def write_chunk(path: Path, documents: Sequence[Document], meta: ChunkMeta) -> list[str]:
    """Write the documents' tokens and states as one safetensors file, atomically.

    Documents whose states are not finite are left out.

    Returns:
        The ids of those left out; they are noted in the file, too.
    """
    from safetensors.torch import save_file

    kept = [d for d in documents if bool(torch.isfinite(d.features).all()) and bool(torch.isfinite(d.last).all())]
    there = {d.id for d in kept}
    dropped = [d.id for d in documents if d.id not in there]
    lengths = torch.tensor([len(d.tokens) for d in kept], dtype=torch.int64)
    width = len(meta.layer_ids) * meta.hidden_size
    tensors = {
        "lengths": lengths,
        "tokens": torch.cat([torch.zeros(0, dtype=torch.int32), *(d.tokens.int() for d in kept)]),
        "answer": torch.cat([torch.zeros(0, dtype=torch.bool), *(d.answer for d in kept)]),
        "features": torch.cat([torch.zeros(0, width, dtype=torch.bfloat16), *(d.features for d in kept)]),
        "last": torch.cat([torch.zeros(0, meta.hidden_size, dtype=torch.bfloat16), *(d.last for d in kept)]),
    }
    header = {
        "format_version": FORMAT_VERSION,
        **_meta_dict(meta),
        "documents": [[d.id, d.split] for d in kept],
        "dropped": dropped,
    }
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, {_META: json.dumps(header, ensure_ascii=False)})
    return dropped


def read_header(path: Path) -> tuple[dict[str, Any], list[int]]:
    """Return a chunk's header and its documents' lengths, without reading the states."""
    tensors, header = _open_chunk(path)
    return header, tensors["lengths"].tolist()


def build_index(
    folder: Path, names: Sequence[str], fingerprint: str, layer_ids: Sequence[int], identity: str
) -> dict[str, Any]:
    """Write `index.json` over the chunks `names` and return it.

    Args:
        folder: the store's folder.
        names: chunk names, in the documents' order; at least one.
        fingerprint, layer_ids: what every chunk must have been made with.
        identity: digest of the stage that made the chunks.
    """
    chunks = []
    wanted: dict[str, Any] = {"fingerprint": fingerprint, "layer_ids": list(layer_ids)}
    for name in names:
        path = folder / f"{name}.safetensors"
        header, lengths = read_header(path)
        _check_meta(path, header, wanted)
        wanted |= {key: header[key] for key in ("hidden_size", "vocab_size")}
        ids, splits = [d[0] for d in header["documents"]], [d[1] for d in header["documents"]]
        size = path.stat().st_size
        chunks.append({"name": name, "bytes": size, "ids": ids, "splits": splits, "lengths": lengths,
                       "dropped": header["dropped"]})  # fmt: skip
    index = {"format_version": FORMAT_VERSION, "identity": identity, **wanted, "chunks": chunks}
    write_json(folder / INDEX, index)
    return index


class FeatureStore:
    """All documents of a store; states are mapped from disk and read when they are used.

    Attributes:
        folder: where it lies.
        layer_ids, hidden_size, vocab_size, fingerprint: of the target's pass that filled it.
        digest: hash of the index: changes when documents are added.
        ids, splits, lengths: of the D documents; a length counts tokens.
    """

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        self.folder = folder
        self.layer_ids: tuple[int, ...] = tuple(index["layer_ids"])
        self.hidden_size: int = index["hidden_size"]
        self.vocab_size: int = index["vocab_size"]
        self.fingerprint: str = index["fingerprint"]
        self.digest = sha256_json(index)
        self.ids: list[str] = []
        self.splits: list[str] = []
        self.lengths: list[int] = []
        self._expected = {key: index[key] for key in ("fingerprint", "layer_ids", "hidden_size", "vocab_size")}
        self._paths: list[Path] = []
        self._place: list[tuple[int, int, int]] = []  # chunk, document in the chunk, first token in the chunk
        self._open: dict[int, dict[str, Tensor]] = {}
        self._first: list[int] = []  # number of each chunk's first document
        for number, chunk in enumerate(index["chunks"]):
            self._first.append(len(self.ids))
            self._paths.append(folder / f"{chunk['name']}.safetensors")
            _check_size(self._paths[-1], chunk["bytes"])
            self.ids += chunk["ids"]
            self.splits += chunk["splits"]
            start = 0
            for inside, length in enumerate(chunk["lengths"]):
                self._place.append((number, inside, start))
                start += length
            self.lengths += chunk["lengths"]

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
        _check_meta(folder / INDEX, index, wanted)
        return cls(folder, index)

    def __len__(self) -> int:
        return len(self.ids)

    def split(self, i: int) -> str:
        """Return "train" or "val" for document `i`."""
        return self.splits[i]

    def document(self, i: int) -> Document:
        """Return document `i`; its states are views of the mapped file."""
        number, _, start = self._place[i]
        tensors, end = self._chunk(number), start + self.lengths[i]
        first = start - self._place[i][1]  # every document before it in the chunk has one row less than tokens
        last_row = first + self.lengths[i] - 1
        return Document(
            self.ids[i],
            self.splits[i],
            tensors["tokens"][start:end].long(),
            tensors["answer"][start:end],
            tensors["features"][first:last_row],
            tensors["last"][first:last_row],
        )

    def totals(self) -> dict[str, int]:
        """Return sums over all documents: documents, tokens, answer_tokens, bytes on disk."""
        answers = sum(int(self._chunk(number)["answer"].sum()) for number in range(len(self._paths)))
        size = sum(path.stat().st_size for path in self._paths)
        return {"documents": len(self), "tokens": sum(self.lengths), "answer_tokens": answers, "bytes": size}

    def label_counts(self, split: str = "train") -> Tensor:
        """Count the labels of a split's supervised rows at step 0, int64 [V], for the draft vocabulary."""
        counts = torch.zeros(self.vocab_size, dtype=torch.int64)
        for number in range(len(self._paths)):
            tensors = self._chunk(number)
            lengths = tensors["lengths"]
            splits = self.splits[self._first[number] : self._first[number] + len(lengths)]
            wanted = torch.tensor([s == split for s in splits], dtype=torch.bool)
            documents = torch.arange(len(lengths)).repeat_interleave(lengths)
            rows = alignment.supervised(tensors["answer"], documents, 1)[0] & wanted.repeat_interleave(lengths)
            labels = tensors["tokens"][alignment.label_index(rows.nonzero().flatten(), 0)]
            counts += torch.bincount(labels, minlength=self.vocab_size)
        return counts

    def _chunk(self, number: int) -> dict[str, Tensor]:
        if number not in self._open:
            tensors, header = _open_chunk(self._paths[number])
            _check_meta(self._paths[number], header, self._expected)
            self._open[number] = tensors
        return self._open[number]


def _open_chunk(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Map a chunk's tensors (nothing is read yet) and parse its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as f:
            header = json.loads((f.metadata() or {})[_META])
            return {key: f.get_tensor(key) for key in f.keys()}, header  # noqa: SIM118 - not a dict
    except FileNotFoundError as error:
        raise DraftsmithError(f"{path} is missing: run 'draftsmith collect' again to make it") from error
    except (SafetensorError, KeyError, OSError) as error:
        raise DraftsmithError(
            f"{path} is cut off or no feature chunk ({error}): delete it and run 'draftsmith collect'"
        ) from error


def _check_size(path: Path, size: int) -> None:
    if not path.exists():
        raise DraftsmithError(f"{path} is missing: run 'draftsmith collect' again to make it")
    if (found := path.stat().st_size) != size:
        raise DraftsmithError(
            f"{path} has {found} bytes instead of {size}: delete it and run 'draftsmith collect' again"
        )


def _meta_dict(meta: ChunkMeta) -> dict[str, Any]:
    return {"fingerprint": meta.fingerprint, "layer_ids": list(meta.layer_ids), "hidden_size": meta.hidden_size,
            "vocab_size": meta.vocab_size}  # fmt: skip


def _check_meta(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key, value in wanted.items():
        if found.get(key) != value:
            raise DraftsmithError(
                f"{path}: {key} is {found.get(key)!r}, not {value!r}: these features were collected with another "
                f"target, other layers or another version; run 'draftsmith collect' for this one"
            )
