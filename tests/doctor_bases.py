"""Good directories of heads for the tiny target, exported for each engine, that doctor_faults.py spoils."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny import make_tiny_target

from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.formats.export import export_head
from draftsmith.heads.loading import load_tokenizer, text_config
from draftsmith.heads.registry import head_family
from draftsmith.heads.target import fingerprint, template_sha256
from draftsmith.heads.vocab import DraftVocab

LAYER_IDS = [1, 3, 5]
"""Others than the default of the target's seven layers."""


@dataclass(frozen=True)
class Base:
    """What is exported, for which engine, and which engines then load it."""

    family: str
    engine: str
    loads: tuple[str, ...]
    values: dict[str, Any] = field(default_factory=dict)
    full: bool = False


_EAGLE3 = {"layer_ids": LAYER_IDS}
_PORTABLE = ("vllm", "sglang", "tensorrt-llm")
_MEDUSA = {"steps": 3, "blocks": 2}
BASES = {
    "eagle3": Base("eagle3", "vllm", _PORTABLE, _EAGLE3),
    "eagle3-full": Base("eagle3", "sglang", _PORTABLE, _EAGLE3, full=True),
    "eagle3.1": Base("eagle31", "vllm", _PORTABLE, _EAGLE3),
    "speculators": Base("eagle3", "speculators", ("speculators", "vllm"), _EAGLE3),
    "eagle1-vllm": Base("eagle1", "vllm", ("vllm",)),
    "eagle1-sglang": Base("eagle1", "sglang", ("sglang",)),
    "medusa-vllm": Base("medusa", "vllm", ("vllm",), _MEDUSA),
    "medusa-tgi": Base("medusa", "tgi", ("tgi", "tensorrt-llm"), _MEDUSA),
}


def make_target(folder: Path) -> Path:
    """The tiny target with more positions and another rope than a Llama config means by itself."""
    make_tiny_target(folder, positions=4096)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    rope = {"rope_type": "default", "rope_theta": 50000.0}
    path.write_text(json.dumps({**values, "rope_theta": 50000.0, "rope_parameters": rope}))
    return folder


def make_head(target: Path, family: str, full: bool = False, **values: Any) -> Any:
    """A head with random weights, norms too, and every second token in its draft vocabulary."""
    config = text_config(str(target), None)
    size = config.vocab_size
    vocab = DraftVocab(torch.arange(size) if full else torch.arange(2, size, 2), size)
    entry = head_family(family)
    build = getattr(importlib.import_module(entry.head.__module__), f"{family}_config")
    identity = {
        "target_id": "org/tiny", "target_revision": None, "target_fingerprint": fingerprint(target),
        "chat_template_sha256": template_sha256(load_tokenizer(str(target))), "trained_length": 64,
    }  # fmt: skip
    head = entry.head(build(config, vocab, **identity, **values), vocab)
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5 + (p.ndim == 1))
    return head


def make_bases(target: Path, where: Path) -> dict[str, Path]:
    """All of `BASES`, exported."""
    found = {}
    for name, base in BASES.items():
        checkpoint = where / f"{name}.checkpoint"
        checkpoint.mkdir(parents=True)
        save_head(make_head(target, base.family, base.full, **base.values), checkpoint)
        found[name] = export_head(checkpoint, where / name, base.engine, target=target).folder
    return found
