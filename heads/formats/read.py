"""Any head's checkpoint, whoever wrote it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from ...errors import DraftsmithError
from ...files import canonical_json
from ..checkpoint import CONFIG as OWN_CONFIG
from ..config import HeadConfig, load_config
from . import eagle, medusa
from .files import read_config, read_mapping, read_tensors
from .foreign import Foreign, listed
from .own import read_own


def read_foreign(folder: Path) -> tuple[Foreign, HeadConfig | None]:
    """Read a checkpoint of any known layout; with its config where it is this toolkit's own.

    Raises:
        DraftsmithError: no known layout, or whatever its reader refuses.
    """
    if (folder / OWN_CONFIG).is_file():
        read_mapping(folder / OWN_CONFIG)  # a damaged one is not to be mended by running a stage again
        return read_own(folder)
    config, tensors = read_config(folder), read_tensors(folder)
    names = set(tensors)
    if scalars := sorted(name for name, tensor in tensors.items() if not tensor.ndim):
        raise DraftsmithError(f"{folder}: {listed('single number', scalars)}, and no layout has any")
    if (networks := medusa.layout_of(names)) is not None:
        return medusa.read_medusa(networks, config, tensors, folder), None
    if (layout := eagle.layout_of(config, names, folder)) is not None:
        return eagle.read_eagle(layout, config, tensors, folder), None
    raise DraftsmithError(
        f"{folder} is no head of a known layout: its tensors are called {', '.join(sorted(names)[:3])}, …; there are "
        "EAGLE-1 and EAGLE-3 (EAGLE repository, SpecForge, speculators), Medusa, and draftsmith's own"
    )


def recorded_layer_ids(folder: Path) -> list[int] | None:
    """Aux layer ids that a checkpoint's config names, as `HeadConfig` counts them; None or [] = none.

    Reads no weights.
    """
    own = folder / OWN_CONFIG
    if not own.is_file():
        return eagle.read_layer_ids(read_config(folder), folder)
    read_mapping(own)
    return list(load_config(own).layer_ids)


def digest(found: Foreign) -> str:
    """SHA-256 of what a run takes from a checkpoint: values, vocabulary and tensors, whatever file they came in."""
    about = {
        "family": found.family,
        "options": found.options,
        "vocab": None if found.vocab is None else found.vocab.sha256,
        "from_target": list(found.from_target),
    }
    sha = hashlib.sha256(canonical_json(about).encode())
    for name, tensor in sorted(found.tensors.items()):
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        sha.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()
