"""A small feature store with known documents."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from draftsmith.data_recipes.store import ChunkMeta, Document, build_index, write_chunk

META = ChunkMeta(fingerprint="fp", layer_ids=(2, 3), hidden_size=4, vocab_size=50)
INT8 = dataclasses.replace(META, dtype="int8")
TOPK = dataclasses.replace(META, teacher="topk", topk=3)
TOPK_INT8 = dataclasses.replace(TOPK, dtype="int8")


def made(i: int, tokens: list[int], prompt: int, split: str = "train", source: str = "a") -> Document:
    generator = torch.Generator().manual_seed(i)
    states = torch.randn(len(tokens) - 1, 12, generator=generator).bfloat16()
    answer = torch.arange(len(tokens)) >= prompt
    return Document(f"d{i}", split, source, torch.tensor(tokens), answer, states[:, :8], states[:, 8:])


def as_topk(d: Document) -> Document:
    generator = torch.Generator().manual_seed(len(d.tokens))
    n = len(d.tokens) - 1
    ids = torch.randint(0, 50, (n, 3), generator=generator, dtype=torch.int32)
    return dataclasses.replace(d, last=None, topk=(ids, torch.log(torch.rand(n, 3, generator=generator)).half()))


DOCUMENTS = [
    made(0, [1, 2, 3, 10, 11, 12, 9], 3),  # labels of step 0: 11, 12, 9
    made(1, [1, 5, 6], 2),
    made(2, [1, 2, 10, 10, 10], 2, "val", "b"),
    made(3, list(range(1, 31)), 10, source="b"),  # labels 12..30
]


def fill(folder: Path, meta: ChunkMeta = META, documents: list[Document] = DOCUMENTS) -> Path:
    folder.mkdir(exist_ok=True)
    write_chunk(folder / "chunk-00000.safetensors", documents[:2], meta)
    write_chunk(folder / "chunk-00001.safetensors", documents[2:], meta)
    build_index(folder, ["chunk-00000", "chunk-00001"], "fp", (2, 3), "identity")
    return folder
