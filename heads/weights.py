"""Single tensors of a checkpoint on disk, found by what architectures call them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from torch import Tensor

from ..errors import DraftsmithError

# Modules of the text decoder that a piece may lie in; towers for images and sound are none of them.
_INSIDE = r"(?:(?:model|language_model|transformer|gpt_neox|decoder)\.)*"
EMBEDDING = re.compile(_INSIDE + r"(?:embed_tokens|embed_in|wte|word_embeddings)\.weight")
FINAL_NORM = re.compile(_INSIDE + r"(?:norm|final_layer_norm|final_layernorm|ln_f|norm_f)\.(weight|bias)")
OUTPUT_HEAD = re.compile(_INSIDE + r"(?:lm_head|embed_out)\.(weight|bias)")
_OUTPUT_MODULE = re.compile(_INSIDE + r"(?:lm_head|embed_out)\..+")  # in whatever form
_LAYER = re.compile(_INSIDE + r"(?:layers|h|blocks)\.(\d+)\.(.+)")
PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class WeightReader:
    """Reads single tensors of a safetensors checkpoint by name, whatever its sharding.

    Args:
        folder: of the checkpoint.

    Raises:
        DraftsmithError: no safetensors there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.exists():
            self.files = {k: folder / f for k, f in json.loads(index.read_text())["weight_map"].items()}
        elif (folder / "model.safetensors").exists():
            from safetensors import safe_open

            with safe_open(folder / "model.safetensors", "pt") as f:
                self.files = dict.fromkeys(f.keys(), folder / "model.safetensors")
        else:
            raise DraftsmithError(f"{folder} holds no safetensors weights; convert the model to safetensors first")

    @property
    def has_output_head(self) -> bool:
        """Whether there is an output head of the model's own, plain or quantised."""
        return any(_OUTPUT_MODULE.fullmatch(name) for name in self.files)

    def read(self, name: str, rows: int | None = None) -> Tensor:
        """One tensor by its full name, or its first rows."""
        from safetensors import safe_open

        with safe_open(self.files[name], "pt") as f:
            tensor: Tensor = f.get_tensor(name) if rows is None else f.get_slice(name)[:rows]
            return tensor

    def find(self, pattern: re.Pattern[str], what: str, part: str = "weight", rows: int | None = None) -> Tensor | None:
        """The tensor that a pattern describes, None where there is none, or none of plain numbers.

        Args:
            what: of it, for the error.
            part: "weight" or "bias", where the pattern has both.
            rows: only the first so many; None = all.

        Raises:
            DraftsmithError: several tensors fit.
        """
        names = [name for name in self.files if pattern.fullmatch(name) and name.endswith(part)]
        if len(names) > 1:
            raise DraftsmithError(f"{self.folder}: {what} may be any of {', '.join(sorted(names))}")
        found = self.read(names[0], rows) if names else None
        return found if found is not None and found.dtype in PLAIN else None

    def layer(self, number: int) -> dict[str, Tensor]:
        """Floating-point tensors of one decoder layer, by their names inside it."""
        matches = {name: _LAYER.fullmatch(name) for name in self.files}
        names = {m[2]: name for name, m in matches.items() if m is not None and int(m[1]) == number}
        found = {short: self.read(name) for short, name in names.items()}
        return {short: x for short, x in found.items() if x.dtype in PLAIN}
