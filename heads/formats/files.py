"""Where a head's checkpoint lies, and what its files hold, untouched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import DraftsmithError
from ..checkpoint import CONFIG as OWN_CONFIG
from ..named import weights_of

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
"""Names that weights have, the preferred first; each may be split into several files by an index beside it."""

_BEST = ("", "checkpoints/best", "train/checkpoints/best")
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.-]+))?")
_GLOBAL = re.compile(r"GLOBAL (\S+)")
"""How PyTorch's restricted reader names what it doesn't build."""


def find_checkpoint(source: str) -> Path:
    """Return the folder of a checkpoint: a folder, the best one of a run's folder, or a hub model's snapshot.

    Args:
        source: a path, or `org/name` or `org/name@revision`; never a hub id where its first part is a folder here.

    Raises:
        DraftsmithError: nothing there, a run without weights of its own, or the hub doesn't give it.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        inside = [folder / name for name in _BEST]
        best = next((f for f in inside if (f / OWN_CONFIG).is_file()), None)
        if best is None and not any((folder / name).exists() for name in (CONFIG, *WEIGHTS)):
            _refuse_borrowed(folder.resolve())
        return (best or folder).resolve()
    if (hub := hub_id(source)) is not None:
        return _from_hub(*hub)
    raise DraftsmithError(
        f"there is no head to start from at {source!r}: give a checkpoint folder such as …/checkpoints/best, the "
        "folder of a run, or a hub id such as org/name"
    )


def hub_id(source: str) -> tuple[str, str | None] | None:
    """Hub id and revision (None = newest) that a source means, None where it means a path."""
    match = _HUB_ID.fullmatch(source)
    if match is None or ".." in source or Path(source).is_dir() or Path(source).parent.is_dir():
        return None
    return match[1], match[2]


def pin(source: str) -> str:
    """A hub id with the commit that the hub has now, `org/name@commit`; a path or a pinned id as it is.

    Raises:
        DraftsmithError: the hub doesn't give it.
    """
    hub = hub_id(source)
    if hub is None or hub[1] is not None:
        return source
    return f"{hub[0]}@{_from_hub(*hub).name}"


def _refuse_borrowed(folder: Path) -> None:
    """Refuse the folder of a run that decodes another head's weights, such as EAGLE-2's."""
    head, at, run = folder.name.partition("@")
    if (owner := weights_of(head)) != head:
        raise DraftsmithError(
            f"{folder} holds no weights: {head} decodes those of {owner}: give {folder.with_name(owner + at + run)}"
        )


def _from_hub(name: str, revision: str | None) -> Path:
    """The snapshot, a folder called by its commit: configs and safetensors, and the older kinds of weights where there
    are no safetensors."""
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors"]
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
        if not any(folder.glob("*.safetensors")):
            older = ["*.json", *WEIGHTS, "pytorch_model-*.bin"]
            folder = Path(snapshot_download(name, revision=folder.name, allow_patterns=older))
    except (OSError, ValueError) as error:  # the hub's own errors are kinds of these
        reason = (str(error) or type(error).__name__).splitlines()[0]
        at = f" at {revision}" if revision else ""
        raise DraftsmithError(
            f"there is no folder {name!r}, and the hub doesn't give a head of that name{at}: {reason}"
        ) from error
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json, {} where there is none; raises DraftsmithError where it is no mapping."""
    return read_mapping(folder / CONFIG) if (folder / CONFIG).is_file() else {}


def read_mapping(path: Path) -> dict[str, Any]:
    """A JSON file of a checkpoint; raises DraftsmithError where it is damaged or holds no mapping."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DraftsmithError(f"{path} is damaged ({error}): fetch the checkpoint again") from error
    if not isinstance(values, dict):
        raise DraftsmithError(f"{path}: a mapping of names to values is expected, not {type(values).__name__}")
    return values


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by their names in it, in their dtypes.

    Of pickled files (.bin, .pt) PyTorch's restricted reader builds tensors and nothing else: no code of theirs runs.

    Raises:
        DraftsmithError: no weights, a damaged file, or a pickled one that holds anything but tensors.
    """
    found: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        found |= _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file)
    return found


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's tensors; raises DraftsmithError where there are none."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            parts = read_mapping(index).get("weight_map")
            if not isinstance(parts, dict) or not all(_is_file_name(part) for part in parts.values()):
                raise DraftsmithError(f"{index} has no 'weight_map' of tensors to files: fetch the checkpoint again")
            return [folder / part for part in sorted(set(parts.values()))]
    raise DraftsmithError(f"{folder} holds no head: it has none of {', '.join(WEIGHTS)}")


def _is_file_name(part: Any) -> bool:
    return isinstance(part, str) and Path(part).name == part


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise DraftsmithError(f"{file} is damaged or missing ({error}): fetch the checkpoint again") from error


def _read_pickle(file: Path) -> dict[str, Tensor]:
    try:
        values = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a cut or foreign pickle fails in whichever of its instructions comes first
        named = _GLOBAL.search(str(error))
        raise DraftsmithError(
            f"{file} is not read: it holds more than tensors ({named[1]}); where you trust its author, write its "
            f"tensors to {file.with_suffix('.safetensors').name} with safetensors.torch.save_file"
            if named
            else f"{file} is damaged or missing, or no file of PyTorch's: fetch the checkpoint again"
        ) from error
    if not isinstance(values, dict) or not all(isinstance(x, Tensor) for x in values.values()):
        raise DraftsmithError(f"{file} holds no mapping of names to tensors: it is no state dict of a head")
    return values
