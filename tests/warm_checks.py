"""Heads with random weights, and what a run would begin with that starts from a checkpoint of theirs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from train_worker import make_store

from draftsmith.data_recipes.packing import make_batch
from draftsmith.data_recipes.store import FeatureStore
from draftsmith.heads.eagle1 import eagle1_config
from draftsmith.heads.eagle3 import eagle3_config
from draftsmith.heads.eagle31 import eagle31_config
from draftsmith.heads.hydra import hydra_config
from draftsmith.heads.medusa import medusa_config
from draftsmith.heads.registry import head_family
from draftsmith.heads.target import load_parts, template_sha256
from draftsmith.heads.vocab import DraftVocab
from draftsmith.train.settings import load_head_recipe
from draftsmith.train.stage import new_head, prepare_head
from draftsmith.train.warm import read_start

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
ODD = {"intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24, "rope": LLAMA3}
"""Shapes that are not the tiny target's."""
CONFIGS = {
    "eagle1": (eagle1_config, {**ODD, "head_dim": 32, "fc_bias": True}),
    "eagle3": (eagle3_config, {**ODD, "rms_norm_eps": 3e-5}),
    "eagle31": (eagle31_config, ODD),
    "medusa": (medusa_config, {"steps": 3, "blocks": 2}),
    "hydra": (hydra_config, {"steps": 2, "blocks": 2, **ODD}),
}
RECIPES = {"eagle1": "eagle1", "eagle3": "eagle3", "eagle31": "eagle3.1", "medusa": "medusa1", "hydra": "hydra"}


@dataclasses.dataclass
class Place:
    """The tiny target with its pieces and a store of its answers."""

    folder: Path
    target: Any
    parts: Any
    store: Path


def make_head(place: Place, family: str, full: bool = False, **values: Any) -> Any:
    """A head with random weights and a vocabulary that no counting would choose."""
    target = place.target
    ids = torch.arange(target.vocab_size) if full else torch.arange(2, target.vocab_size, 2)
    vocab = DraftVocab(ids, target.vocab_size)
    build, odd = CONFIGS[family]
    identity = {
        "target_id": "tiny", "target_revision": None, "target_fingerprint": target.fingerprint,
        "chat_template_sha256": template_sha256(target.tokenizer), "trained_length": 64,
    }  # fmt: skip
    config = build(target.config, vocab, **{**odd, **identity, **values})
    head = head_family(family).head(config, vocab)
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5 + (p.ndim == 1))
    return head


def settings_for(head: Any, **values: Any) -> Any:
    steps = {"steps": head.config.steps} if head.most_depth else {"steps": 2}
    return load_head_recipe(RECIPES[head.config.family], {"head": {**steps, **values}, "train": {"steps": 1}})


def begin(place: Place, source: Path | str, settings: Any, stage: Path | None = None) -> tuple[Any, Any, str]:
    """What training would begin with: (head, config, line)."""
    start = read_start(str(source), stage or place.folder / "no-such-stage", str(place.folder), None)
    config, vocab, share, _ = prepare_head(settings, str(place.folder), None, place.store, start=start)
    assert 0 < share <= 1
    head, _, said = new_head(config, vocab, place.parts, 0, start)
    assert not start.found.tensors, "a run keeps the tensors once"
    return head, config, said


def losses(place: Place, head: Any) -> list[Any]:
    store = FeatureStore.open(place.store)
    batch = make_batch(store, range(4), 64).to("cpu", torch.float32)
    with torch.no_grad():
        return [(float(s.num), int(s.den), int(s.hits)) for s in head.losses(batch, place.parts, steps=2)]


def make_place(folder: Path, target: Any, where: Path) -> Place:
    store = make_store(target, where / "features", documents=10, new_tokens=16)
    return Place(folder, target, load_parts(str(folder), None, torch.float32), store)


def edit(folder: Path, drop: tuple[str, ...] = (), add: dict[str, Any] | None = None, **config: Any) -> None:
    """Change a safetensors checkpoint: tensors taken out or put in, values of its config."""
    path = folder / "model.safetensors"
    save_file({n: x for n, x in load_file(path).items() if n not in drop} | (add or {}), path)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **config}))
