"""The file of one chunk of documents: safetensors, with every row written where it belongs as soon as it is known.

    length    8 bytes     of the JSON header
    header                each tensor's type, shape and place; under `__metadata__` the ChunkMeta, the documents' names
    seal      I64 [1]     CRC-32 of length, header and table
    table     I64 [D, 3]  by document: tokens; CRC-32 of all bytes stored of it; 1, or 0 where its states aren't finite
    tokens    I32 [T], answer BOOL [T]: the documents' tokens one behind the other
    states, scales, topk_ids, topk_logprobs: `ChunkMeta.row_fields`, T - 1 rows of each document of T tokens

All lengths are known before the first state, so the file has its final size from the start: memory is what is being
written, whatever the chunk's size. Which states are not finite is known last and changes only the table. Equal
documents give equal bytes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from ..errors import DraftsmithError
from .layout import DocumentRow
from .quantise import dequantise, quantise

FORMAT_VERSION = 2
_META = "draftsmith"  # one key: safetensors gives several in no fixed order
_BYTES = {"I64": 8, "I32": 4, "BF16": 2, "F16": 2, "I8": 1, "BOOL": 1}

TopK = tuple[Tensor, Tensor]
"""The target's likeliest tokens after each of R tokens: ids [R, k] and their log-probabilities [R, k]."""


@dataclass(frozen=True)
class ChunkMeta:
    """What all chunks of a store share.

    Attributes:
        fingerprint: of the target that computed the states.
        layer_ids: aux layers in the order in which they are concatenated.
        hidden_size, vocab_size: H and V of the target.
        dtype: of the stored states; int8 has an fp16 scale for each token and layer.
        teacher: "hidden" stores state n behind the aux states; "topk" stores the target's likeliest tokens instead.
        topk: how many of them; 0 with "hidden".
    """

    fingerprint: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    dtype: Literal["bf16", "int8"] = "bf16"
    teacher: Literal["hidden", "topk"] = "hidden"
    topk: int = 0

    @property
    def layers(self) -> int:
        """States of H values that are stored of a row."""
        return len(self.layer_ids) + (self.teacher == "hidden")

    def row_fields(self) -> dict[str, tuple[str, int]]:
        """What is stored of a row of states: safetensors type and width by name."""
        width = self.layers * self.hidden_size
        quantised = self.dtype == "int8"
        fields = {"states": ("I8" if quantised else "BF16", width)}
        if quantised:
            fields["scales"] = ("F16", self.layers)
        if self.teacher == "topk":
            fields |= {"topk_ids": ("I32", self.topk), "topk_logprobs": ("F16", self.topk)}
        return fields

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of states."""
        return sum(_BYTES[kind] * width for kind, width in self.row_fields().values())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**dataclasses.asdict(self), "layer_ids": list(self.layer_ids)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read `to_dict` back; other keys beside it are left aside."""
        known = {f.name: values[f.name] for f in dataclasses.fields(cls)}
        return cls(**{**known, "layer_ids": tuple(values["layer_ids"])})


def encode(states: Tensor, topk: TopK | None, meta: ChunkMeta) -> tuple[dict[str, Tensor], Tensor]:
    """Bring rows into the form in which they are stored; on the device that they are on.

    Args:
        states: [R, layers * H], aux states and, with teacher "hidden", state n before the final norm behind them.
        topk: with teacher "topk"; any integer and float types.

    Returns:
        The tensors of `row_fields`, and bool [R], whether all that is stored of a row is finite.
    """
    if (topk is None) != (meta.teacher == "hidden"):
        raise ValueError(f"teacher {meta.teacher!r} goes with{'' if topk is None else 'out'} top-k tokens")
    if meta.dtype == "int8":
        codes, scales = quantise(states.reshape(len(states), meta.layers, meta.hidden_size))
        rows, finite = {"states": codes.flatten(1), "scales": scales}, scales.isfinite().all(-1)
    else:
        rows = {"states": states.to(torch.bfloat16)}
        finite = rows["states"].isfinite().all(-1)
    if topk is not None:
        rows |= {"topk_ids": topk[0].to(torch.int32), "topk_logprobs": topk[1].half()}
        finite = finite & rows["topk_logprobs"].isfinite().all(-1)
    return rows, finite


def decode(rows: Mapping[str, Tensor], meta: ChunkMeta) -> tuple[Tensor, TopK | None]:
    """Return states bf16 [R, layers * H] and the top-k tokens of stored rows; bf16 states are views."""
    states = rows["states"]
    if meta.dtype == "int8":
        codes = states.view(len(states), meta.layers, meta.hidden_size)
        states = dequantise(codes, rows["scales"]).flatten(1)
    return states, (rows["topk_ids"], rows["topk_logprobs"]) if meta.teacher == "topk" else None


@dataclass(frozen=True)
class Text:
    """A document without its states: tokens [T] of an integer type, answer bool [T]."""

    id: str
    split: str
    source: str
    tokens: Tensor
    answer: Tensor

    @classmethod
    def of(cls, row: DocumentRow) -> Self:
        """The text of a row."""
        answer = torch.zeros(len(row.tokens), dtype=torch.bool)
        for start, end in row.spans:
            answer[start:end] = True
        return cls(row.id, row.split, row.source, torch.tensor(row.tokens, dtype=torch.int32), answer)


class ChunkWriter:
    """Writes one chunk. Its documents' states may come in any order, each document's once, from one thread.

    Args:
        path: where; the caller makes it appear whole.
        texts: all documents, in their order.
        meta: what is stored of them.
    """

    def __init__(self, path: Path, texts: Sequence[Text], meta: ChunkMeta) -> None:
        self.texts, self.fields = texts, meta.row_fields()
        lengths = [len(t.tokens) for t in texts]
        self.first_row = list(accumulate((max(n - 1, 0) for n in lengths), initial=0))
        self.waiting = {i for i, n in enumerate(lengths) if n > 1}
        shapes = {
            "seal": ("I64", [1]),
            "table": ("I64", [len(texts), 3]),
            "tokens": ("I32", [sum(lengths)]),
            **{name: (kind, [self.first_row[-1], width]) for name, (kind, width) in self.fields.items()},
            "answer": ("BOOL", [sum(lengths)]),
        }
        names = [[t.id, t.split, t.source] for t in texts]
        metadata = {"format_version": FORMAT_VERSION, **meta.to_dict(), "documents": names}
        self.head, self.place, size = _lay_out(shapes, metadata)
        self.file = open(path, "wb")  # noqa: SIM115 - closed by `__exit__`
        self.file.truncate(size)
        self.table = np.array([[n, 0, 1] for n in lengths], dtype="<i8").reshape(-1, 3)
        tokens, answers = [t.tokens.int() for t in texts], [t.answer for t in texts]
        for i in range(len(texts)):
            self.table[i, 1] = zlib.crc32(_raw(answers[i]), zlib.crc32(_raw(tokens[i])))
        for name, parts in (("tokens", tokens), ("answer", answers)):
            self._write(self.place[name], b"".join(_raw(part) for part in parts))

    def put(self, number: int, rows: Mapping[str, Tensor], finite: bool) -> None:
        """Write what `encode` made of a document's rows, on the CPU; of rows that aren't finite zeros are stored."""
        self.waiting.remove(number)
        first, count = self.first_row[number], self.first_row[number + 1] - self.first_row[number]
        checksum = int(self.table[number, 1])
        for name, (kind, width) in self.fields.items():
            row = _BYTES[kind] * width
            data = _raw(rows[name]) if finite else memoryview(bytes(count * row))
            if data.nbytes != count * row:
                raise ValueError(f"{self.texts[number].id}: {data.nbytes} bytes of {name} instead of {count * row}")
            self._write(self.place[name] + first * row, data)
            checksum = zlib.crc32(data, checksum)
        self.table[number, 1:] = checksum, finite

    def finish(self) -> list[str]:
        """Write the table and seal the file; returns the ids of documents whose states are not finite."""
        if self.waiting:
            raise ValueError(f"no states of {[self.texts[i].id for i in sorted(self.waiting)]}")
        table = self.table.tobytes()
        self._write(0, self.head)
        self._write(self.place["seal"], zlib.crc32(self.head + table).to_bytes(8, "little"))
        self._write(self.place["table"], table)
        self.file.flush()
        return [t.id for t, finite in zip(self.texts, self.table[:, 2], strict=True) if not finite]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def _write(self, place: int, data: bytes | memoryview) -> None:
        self.file.seek(place)
        self.file.write(data)


class Chunk:
    """A chunk whose tensors are mapped: nothing but the head is read until it is used.

    Attributes:
        path: the file; meta: what is stored.
        documents: [id, split, source] of each.
        seal: checksum of the file's head, which holds every document's.
        lengths: int64 [D], tokens; finite: bool [D].
        tensors: empty where `mapped` is False.

    Raises:
        DraftsmithError: no such file, cut off, damaged in its head, another format.
    """

    def __init__(self, path: Path, mapped: bool = True) -> None:
        self.path = path
        header, table, self.seal = _read_head(path)
        self.meta = ChunkMeta.from_dict(header)
        self.documents: list[list[str]] = header["documents"]
        self.lengths, self.checksums, self.finite = table[:, 0], table[:, 1], table[:, 2] == 1
        self.starts = np.concatenate(([0], np.cumsum(self.lengths)))
        self.first_row = np.concatenate(([0], np.cumsum(np.maximum(self.lengths - 1, 0))))
        self.tensors = _map(path) if mapped else {}

    def text(self, number: int, most: int | None = None) -> tuple[Tensor, Tensor]:
        """The first `most` tokens of a document, int32, and their answer mask."""
        start, end = int(self.starts[number]), int(self.starts[number + 1])
        part = slice(start, end if most is None else min(end, start + most))
        return self.tensors["tokens"][part], self.tensors["answer"][part]

    def rows(self, number: int, most: int | None = None) -> dict[str, Tensor]:
        """What is stored of the first `most` rows of a document's states."""
        start, end = int(self.first_row[number]), int(self.first_row[number + 1])
        part = slice(start, end if most is None else min(end, start + most))
        return {name: self.tensors[name][part] for name in self.meta.row_fields()}

    def check(self, number: int) -> None:
        """Read all bytes of a document; raises DraftsmithError where they are not those that were written."""
        checksum = 0
        for part in (*self.text(number), *self.rows(number).values()):
            checksum = zlib.crc32(_raw(part), checksum)
        if checksum != self.checksums[number]:
            raise DraftsmithError(
                f"{self.path} is damaged: the stored bytes of document {self.documents[number][0]} are not those that "
                "were written: delete the file and run 'draftsmith collect' again"
            )


def _lay_out(shapes: Mapping[str, tuple[str, list[int]]], metadata: Any) -> tuple[bytes, dict[str, int], int]:
    """Return length and header as bytes, each tensor's place in the file, and the file's size.

    Larger types lie before smaller ones, without gaps, so that each tensor begins at a multiple of its type's size.
    """
    header: dict[str, Any] = {"__metadata__": {_META: json.dumps(metadata, ensure_ascii=False, separators=(",", ":"))}}
    offset = 0
    for name, (kind, shape) in sorted(shapes.items(), key=lambda item: -_BYTES[item[1][0]]):
        size = _BYTES[kind] * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    base = 8 + len(raw)
    place = {name: base + header[name]["data_offsets"][0] for name in shapes}
    return len(raw).to_bytes(8, "little") + raw, place, base + offset


def _read_head(path: Path) -> tuple[dict[str, Any], np.ndarray[Any, np.dtype[np.int64]], int]:
    """Read and check the header and the table of a chunk; the states are not touched."""
    try:
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            length = f.read(8)
            if (n := int.from_bytes(length, "little")) > size - 16:
                raise ValueError(f"{size} bytes")
            raw = f.read(n)
            tensors = json.loads(raw)
            header = json.loads(tensors.pop("__metadata__")[_META])
            if header["format_version"] != FORMAT_VERSION:
                raise DraftsmithError(
                    f"{path}: its format is {header['format_version']!r}, this version reads {FORMAT_VERSION}: "
                    "delete it and run 'draftsmith collect' again"
                )
            seal = int.from_bytes(f.read(8), "little")
            table = f.read(24 * len(header["documents"]))
            whole = 8 + n + max(t["data_offsets"][1] for t in tensors.values())
    except FileNotFoundError as error:
        raise DraftsmithError(f"{path} is missing: run 'draftsmith collect' again to make it") from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise DraftsmithError(
            f"{path} is cut off or no feature chunk ({error}): delete it and run 'draftsmith collect' again"
        ) from error
    if size < whole:
        raise DraftsmithError(
            f"{path} is cut off ({size} bytes instead of {whole}): delete it and run 'draftsmith collect' again"
        )
    if size > whole or zlib.crc32(length + raw + table) != seal:
        raise DraftsmithError(
            f"{path} is damaged: its header is not what was written: delete it and run 'draftsmith collect' again"
        )
    return header, np.frombuffer(table, dtype="<i8").reshape(-1, 3), seal


def _map(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as f:
            return {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise DraftsmithError(
            f"{path} can't be read ({error}): delete it and run 'draftsmith collect' again"
        ) from error


def _raw(x: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, without a copy where it is contiguous."""
    return x.contiguous().flatten().view(torch.uint8).numpy().data
