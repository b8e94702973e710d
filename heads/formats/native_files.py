"""Files of a target's checkpoint as they lie: config.json, the index, and where in a file each tensor's bytes are."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor

from ...errors import DraftsmithError
from ...files import read_json

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class Entry:
    """One tensor in a file: what it is, and which bytes."""

    file: Path
    dtype: str
    shape: Size
    start: int
    stop: int


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file's object; raises DraftsmithError where it is none."""
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error
    if not isinstance(values, dict):
        raise damaged(path, ValueError(f"it holds a {type(values).__name__}, not an object"))
    return values


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor, by name; raises DraftsmithError for a damaged index."""
    index = folder / INDEX
    if index.is_file():
        files = read_object(index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(x, str) and Path(x).name == x for x in files.values()):
            raise damaged(index, ValueError("its weight_map doesn't name a file of the folder for each tensor"))
        return {name: folder / file for name, file in files.items()}
    return dict.fromkeys(read_header(folder / SINGLE), folder / SINGLE)


def read_header(file: Path) -> dict[str, Entry]:
    """A safetensors file's tensors: its length in 8 bytes, then JSON, then the bytes that `data_offsets` counts."""
    try:
        with open(file, "rb") as f:
            size = struct.unpack("<Q", f.read(8))[0]
            values = json.loads(f.read(min(size, file.stat().st_size)))
        values.pop("__metadata__", None)
        return {
            name: Entry(file, x["dtype"], Size(x["shape"]), *(8 + size + at for at in x["data_offsets"]))
            for name, x in values.items()
        }
    except (OSError, struct.error, ValueError, AttributeError, KeyError, TypeError) as error:
        raise damaged(file, error) from error


def damaged(file: Path, error: Exception) -> DraftsmithError:
    """What to raise."""
    return DraftsmithError(f"{file} is missing or damaged ({first_line(error)}): fetch the checkpoint again")


def first_line(error: Exception) -> str:
    """Of what an error says."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def read_tensor(file: Path, name: str) -> Tensor:
    """One tensor in its own dtype; raises DraftsmithError where it can't be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as f:
            tensor: Tensor = f.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise damaged(file, error) from error
    return tensor


__all__ = [
    "CONFIG", "DTYPES", "INDEX", "SINGLE", "Entry", "damaged", "first_line", "read_header", "read_object",
    "read_tensor", "tensor_files",
]  # fmt: skip
