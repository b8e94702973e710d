"""A head on disk: `head.json` (HeadConfig), `vocab.safetensors` (target ids), `model.safetensors` (weights by name).

Beside them `tree.json`, a static tree that was measured for it, once there is one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from ..errors import DraftsmithError
from ..files import read_json, write_json
from .base import DraftHead
from .config import load_config
from .registry import head_family
from .vocab import DraftVocab

CONFIG, VOCAB, WEIGHTS = "head.json", "vocab.safetensors", "model.safetensors"
TREE = "tree.json"


def save_head(head: DraftHead, folder: Path) -> None:
    """Write the head's three files into the existing `folder`; weights keep their dtype.

    Nothing of the target is ever inside: exactly the head's parameters are written.
    """
    from safetensors.torch import save_file

    head.config.save(folder / CONFIG)
    save_file({"target_ids": head.vocab.target_ids.cpu()}, folder / VOCAB)
    weights = {name: p.detach().cpu().contiguous() for name, p in head.named_parameters()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def load_head(folder: Path, dtype: torch.dtype | None = None) -> DraftHead:
    """Load a head strictly.

    Args:
        folder: what `save_head` wrote.
        dtype: None keeps the stored one.

    Raises:
        DraftsmithError: a file is missing or damaged, the vocabulary is another one, or a tensor is missing, foreign or
            of another shape.
    """
    for name in (CONFIG, VOCAB, WEIGHTS):
        if not (folder / name).is_file():
            raise DraftsmithError(
                f"{folder} is no head: it has no {name}; give a checkpoint folder such as …/checkpoints/best"
            )
    config = load_config(folder / CONFIG)
    vocab = DraftVocab(_read(folder / VOCAB)["target_ids"], config.vocab_size)
    if vocab.sha256 != config.draft_vocab_sha256:
        raise DraftsmithError(
            f"{folder / VOCAB} holds another draft vocabulary (sha256 {vocab.sha256[:12]}…) than {CONFIG} says "
            f"({config.draft_vocab_sha256[:12]}…): take both from the same checkpoint"
        )
    head = head_family(config.family).head(config, vocab)
    load_weights(head, folder / WEIGHTS)
    return head.to(dtype) if dtype is not None else head


def load_weights(head: DraftHead, path: Path) -> None:
    """Copy a checkpoint's tensors into the head's parameters, strictly; dtypes become the stored ones."""
    tensors = _read(path)
    parameters = dict(head.named_parameters())
    if missing := sorted(set(parameters) - set(tensors)):
        raise DraftsmithError(f"{path}: tensor {missing[0]!r} is missing ({len(missing)} in all)")
    if foreign := sorted(set(tensors) - set(parameters)):
        raise DraftsmithError(
            f"{path}: tensor {foreign[0]!r} is none of this {head.config.family} head's ({len(foreign)} in all)"
        )
    for name, parameter in parameters.items():
        if tensors[name].shape != parameter.shape:
            raise DraftsmithError(
                f"{path}: tensor {name!r} has shape {list(tensors[name].shape)}, "
                f"{CONFIG} asks for {list(parameter.shape)}"
            )
        parameter.data = tensors[name].to(parameter.device)


@dataclass(frozen=True)
class MeasuredTree:
    """A static tree that was built from a head's accuracies on held-out documents.

    Attributes:
        paths: ranks of each node among its siblings and of those above it; the first n are the best n.
        accuracies: by step s and rank i: share of the supervised rows whose i-th guess is the text's token.
        rows: supervised rows by step; documents: how many documents they come from.
    """

    paths: list[list[int]]
    accuracies: list[list[float]]
    rows: list[int]
    documents: int


def save_tree(tree: MeasuredTree, folder: Path) -> None:
    """Write a head's measured tree into its existing `folder`."""
    write_json(folder / TREE, asdict(tree))


def load_tree(folder: Path) -> MeasuredTree:
    """Read what `save_tree` wrote; raises DraftsmithError where there is none, or something else."""
    if not (folder / TREE).is_file():
        raise DraftsmithError(
            f"{folder} has no {TREE}: no tree was measured for this head; train it again to have one, or take another "
            "tree such as chain:4"
        )
    values = read_json(folder / TREE)
    names = {f.name for f in fields(MeasuredTree)}
    if not isinstance(values, dict) or set(values) != names:
        raise DraftsmithError(f"{folder / TREE} is no measured tree: it must have the keys {', '.join(sorted(names))}")
    return MeasuredTree(**values)


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise DraftsmithError(f"{path} is damaged ({error}): take another checkpoint") from error
