"""A head starts from its target's last layer where the shapes allow it, and says which way it started."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from draftsmith.heads.eagle3 import Eagle3Head, eagle3_config
from draftsmith.heads.target import Target, load_parts
from draftsmith.heads.vocab import DraftVocab

IDENTITY = {
    "target_id": "tiny",
    "target_revision": None,
    "target_fingerprint": "0" * 64,
    "chat_template_sha256": None,
    "trained_length": 64,
}


@pytest.fixture
def head(tiny_target: Target) -> Eagle3Head:
    vocab = DraftVocab(torch.arange(3, 100, 2), tiny_target.vocab_size)
    return Eagle3Head(eagle3_config(tiny_target.config, vocab, **IDENTITY), vocab)


def test_the_last_layer_is_read_from_the_checkpoint_and_copied(
    head: Eagle3Head, tiny_target: Target, tiny_folder: Path
) -> None:
    parts = load_parts(str(tiny_folder), None, torch.float32)
    said = head.initialise(parts, torch.Generator().manual_seed(0))
    assert "last layer" in said
    last = load_layer(tiny_folder, tiny_target.n_layers - 1)
    h = tiny_target.hidden_size
    for name in ("q_proj", "k_proj", "v_proj"):
        assert torch.equal(getattr(head.layer, name).weight[:, h:], last[f"self_attn.{name}.weight"])
        assert not getattr(head.layer, name).weight[:, :h].eq(0).all()
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert torch.equal(getattr(head.layer, name).weight, last[f"mlp.{name}.weight"])
    assert torch.equal(head.lm_head.weight, parts.lm_head[head.vocab.target_ids])
    assert torch.equal(head.norm, parts.norm_weight)


def test_another_shape_starts_at_random_and_says_why(head: Eagle3Head, tiny_folder: Path) -> None:
    parts = load_parts(str(tiny_folder), None, torch.float32)
    odd = {**parts.last_layer, "mlp.up_proj.weight": torch.zeros(3, 5)}
    said = head.initialise(dataclasses.replace(parts, last_layer=odd), torch.Generator().manual_seed(0))
    assert said.startswith("random start")
    assert "mlp.up_proj.weight" in said
    assert not torch.equal(head.layer.gate_proj.weight, parts.last_layer["mlp.gate_proj.weight"])


def test_the_start_is_a_function_of_the_seed(head: Eagle3Head, tiny_folder: Path) -> None:
    parts = load_parts(str(tiny_folder), None, torch.float32)
    states = []
    for seed in (0, 0, 1):
        head.initialise(parts, torch.Generator().manual_seed(seed))
        states.append(head.layer.q_proj.weight.detach().clone())
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def load_layer(folder: Path, number: int) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    mark = f"model.layers.{number}."
    with safe_open(folder / "model.safetensors", "pt") as f:
        return {name.removeprefix(mark): f.get_tensor(name) for name in f.keys() if name.startswith(mark)}  # noqa: SIM118
