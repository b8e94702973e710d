"""Every family of targets: what heads take of it is what the model computes, loaded or read from disk."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from target_models import (
    BIASED,
    KEYLESS,
    LAYERS,
    NORMED,
    OWN_ATTENTION,
    TRAINABLE,
    VOCAB,
    change_config,
    save_target,
)

from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder.probe import check_target
from draftsmith.heads.architecture import conventions
from draftsmith.heads.base import Needs
from draftsmith.heads.config import default_layer_ids, layer_values, target_values
from draftsmith.heads.eagle3 import eagle3_config
from draftsmith.heads.registry import head_family
from draftsmith.heads.target import Target, load_parts
from draftsmith.heads.vocab import DraftVocab

NEEDS = Needs((1, 2, 3), last=True)
# Those whose layer has the matrices and norms that a head's has.
STARTS = {
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "gemma3-images", "gemma4", "vaultgemma",
    "phi3", "phi4-mini", "granite", "hyperclovax", "smollm3", "glm4", "stablelm",
}  # fmt: skip


class Made(dict[str, Any]):
    """What is made when it is first asked for."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, name: str) -> Any:
        self[name] = self.make(name)
        return self[name]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("targets")
    return Made(lambda name: save_target(name, home / name))


@pytest.fixture(scope="module")
def targets(folders: dict[str, Path]) -> dict[str, Target]:
    return Made(lambda name: Target.load(str(folders[name]), dtype=torch.float32, device="cpu"))


@torch.inference_mode()
def check_readout(target: Target, limit: float) -> None:
    """Logits from the stored last state through the head's pieces are the model's own."""
    tokens = (torch.arange(24).view(2, 12) * 5 + 3) % target.vocab_size
    _, last = target.states(tokens, NEEDS)
    assert last is not None
    with target.attention():
        logits = target.model(input_ids=tokens, use_cache=False).logits.float()
    parts = target.parts()
    own = parts.logits(parts.normed(last)).float()
    assert float((own - logits).abs().max()) <= limit * float(logits.abs().max())
    flat = parts.normed(last) @ parts.lm_head.t()  # what a frozen readout of a head would say
    assert torch.equal(flat.argmax(-1), own.argmax(-1))


@pytest.mark.parametrize("name", TRAINABLE)
def test_logits_come_from_the_stored_state(targets: dict[str, Target], name: str) -> None:
    check_readout(targets[name], 1e-4)
    targets[name].check_trainable()


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gemma3", "gemma4", "granite", "cohere", "gpt2", "olmo2", "gpt_oss", "nemotron"]
)
def test_in_bf16_too(folders: dict[str, Path], name: str) -> None:
    target = Target.load(str(folders[name]), dtype=torch.bfloat16, device="cpu")
    check_readout(target, 0.02)
    target.check_trainable()
    own, read = target.parts(), load_parts(str(folders[name]), None, torch.bfloat16)
    trained = load_parts(str(folders[name]), None, torch.float32, computed=torch.bfloat16).to("cpu", torch.bfloat16)
    for found in (read, trained):
        assert torch.equal(own.embed, found.embed)
        assert torch.equal(own.lm_head, found.lm_head)
        assert torch.equal(own.norm_weight.float(), found.norm_weight.float())
    state = (4 * torch.randn(64, 48, generator=torch.Generator().manual_seed(1))).bfloat16()
    with torch.inference_mode():
        assert torch.equal(target.final_norm(state), own.normed(state)), "it rounds where the model does"


@pytest.mark.parametrize("name", TRAINABLE)
def test_embeddings_are_those_that_enter_layer_0(targets: dict[str, Target], name: str) -> None:
    target = targets[name]
    tokens = torch.arange(3, 15)[None]
    with target.capture(Needs((0,), last=False)) as states, target.attention(), torch.inference_mode():
        target.model(input_ids=tokens, use_cache=False)
    positions = 0.0
    if name == "gpt2":
        positions = target.body.wpe.weight[:12]
    if name == "opt":
        positions = target.body.embed_positions.weight[2:14]
    assert torch.equal(states[0][0], target.embed[tokens[0]] + positions)


@pytest.mark.parametrize("name", TRAINABLE)
def test_pieces_read_from_disk_are_the_models(targets: dict[str, Target], folders: dict[str, Path], name: str) -> None:
    own, read = targets[name].parts(), load_parts(str(folders[name]), None, torch.float32)
    for what in ("embed", "lm_head", "norm_weight", "norm_bias"):
        a, b = getattr(own, what), getattr(read, what)
        assert (a is None and b is None) or torch.equal(a, b), what
    assert (own.norm, own.norm_eps, own.softcap) == (read.norm, read.norm_eps, read.softcap)
    assert read.last_layer
    assert read.to("cpu", torch.bfloat16).norm_weight.dtype == torch.float32, "bf16 would round 1 + w"


@pytest.mark.parametrize("name", TRAINABLE)
def test_a_batch_gives_the_states_of_each_sequence_alone(targets: dict[str, Target], name: str) -> None:
    target = targets[name]
    lines = [torch.arange(7, 27), torch.arange(50, 59), torch.arange(100, 101)]
    padded = torch.zeros(3, 20, dtype=torch.int64)
    for row, line in enumerate(lines):
        padded[row, : len(line)] = line
    aux, last = target.states(padded, NEEDS)
    assert last is not None
    for row, line in enumerate(lines):
        alone_aux, alone_last = target.states(line[None], NEEDS)
        assert alone_last is not None
        torch.testing.assert_close(aux[row, : len(line)], alone_aux[0], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(last[row, : len(line)], alone_last[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in TRAINABLE if name not in (*OWN_ATTENTION, *KEYLESS)])
def test_the_tree_is_seen(targets: dict[str, Target], name: str) -> None:
    check_target(targets[name])


@pytest.mark.parametrize("name", TRAINABLE)
def test_a_head_can_be_made_for_it(targets: dict[str, Target], name: str) -> None:
    target = targets[name]
    vocab = DraftVocab(torch.arange(0, VOCAB, 2), VOCAB)
    config = eagle3_config(
        target.config, vocab, target_id=name, target_revision=None, target_fingerprint="f",
        chat_template_sha256=None, trained_length=64,
    )  # fmt: skip
    assert config.layer_ids == default_layer_ids(LAYERS)
    head = head_family("eagle3").head(config, vocab)
    said = head.initialise(load_parts(target.id, None, torch.float32), torch.Generator().manual_seed(0))
    assert said.startswith("start: the target's last layer") == (name in STARTS), said
    assert config.rope["rope_type"] == {"phi4-mini": "longrope", "gpt_oss": "yarn"}.get(name, "default")


@pytest.mark.parametrize("name", ["llama", "gemma3-images"])
def test_an_output_head_in_the_files_is_taken_whatever_the_config_says_of_ties(tmp_path: Path, name: str) -> None:
    """Of images' configs the outer one counts, and the inner one's default is true."""
    folder = save_target(name, tmp_path / name)
    weights = load_file(folder / "model.safetensors")
    rows = torch.randn(VOCAB, 48, generator=torch.Generator().manual_seed(2))
    save_file({**weights, "lm_head.weight": rows}, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, tie_word_embeddings=name == "llama")
    target = Target.load(str(folder), dtype=torch.float32, device="cpu")
    target.check_trainable()
    for parts in (target.parts(), load_parts(str(folder), None, torch.float32)):
        assert torch.equal(parts.lm_head, rows)


def test_files_that_say_another_output_head_than_the_model_are_refused(tmp_path: Path) -> None:
    folder = save_target("gemma3-images", tmp_path / "target")
    change_config(folder, tie_word_embeddings=False)  # and no output head in the files: transformers draws one
    target = Target.load(str(folder), dtype=torch.float32, device="cpu")
    with pytest.raises(DraftsmithError, match="the output head in its files differs by"):
        target.check_trainable()


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_what_configs_do_not_say(targets: dict[str, Target]) -> None:
    gemma = conventions(targets["gemma2"].config)
    assert (gemma.embed_scale, gemma.rounded, gemma.norm_shift, gemma.softcap) == (48**0.5, True, 1.0, 20.0)
    assert conventions(targets["granite"].config).logit_scale == 1 / 8
    assert conventions(targets["hyperclovax"].config).logit_scale == 0.3
    assert conventions(targets["minicpm3"].config).logit_scale == 12 / 48
    assert [conventions(targets[n].config).norm for n in ("phimoe", "olmo", "olmo2")] == ["layer", "layer", "rms"]
    unknown = types.SimpleNamespace(model_type="other", hidden_size=8)
    with pytest.raises(DraftsmithError, match="'other' names no epsilon of a norm"):
        conventions(unknown)


def test_shapes_of_a_head_follow_from_the_target(targets: dict[str, Target]) -> None:
    names = ("gemma2", "gemma3", "gpt2", "opt", "qwen3_moe", "gpt_neox", "phi4-mini", "nemotron", "llama")
    by_name = {name: layer_values(targets[name].config) for name in names}
    assert by_name["gemma3"]["rope"] == {"rope_type": "default", "rope_theta": 1_000_000.0}, "full attention's"
    assert by_name["gpt2"]["rope"] == by_name["opt"]["rope"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert by_name["gpt2"]["intermediate_size"] == 4 * 48
    assert by_name["opt"]["intermediate_size"] == 64
    assert by_name["qwen3_moe"]["intermediate_size"] == 64, "the dense one"
    assert by_name["gpt_neox"]["head_dim"] == 12
    assert by_name["gpt_neox"]["rope"] == {"rope_type": "default", "rope_theta": 10000.0}, "all of head_dim turns"
    assert by_name["phi4-mini"]["rope"]["short_factor"] == pytest.approx([1.0, 1.08, 1.16, 1.24, 1.32, 1.4])
    vocab = DraftVocab(torch.arange(VOCAB), VOCAB)
    acts = {name: target_values(targets[name].config, vocab)["hidden_act"] for name in names}
    assert [acts[n] for n in ("gpt2", "gemma2", "opt", "nemotron", "llama")] == [
        "gelu_pytorch_tanh", "gelu_pytorch_tanh", "relu", "relu2", "silu",
    ]  # fmt: skip
    with pytest.raises(DraftsmithError, match="'other' names no longest context"):
        target_values(types.SimpleNamespace(model_type="other"), vocab)


def test_fused_matrices_are_taken_apart(folders: dict[str, Path], targets: dict[str, Target]) -> None:
    read = load_parts(str(folders["phi3"]), None, torch.float32).last_layer
    x = torch.randn(48, generator=torch.Generator().manual_seed(0))
    layer = targets["phi3"].layers[-1]
    with torch.inference_mode():
        together = layer.self_attn.qkv_proj(x[None])[0]
        up = layer.mlp.gate_up_proj(x[None])[0]
    apart = [read[f"self_attn.{n}_proj.weight"] @ x for n in "qkv"]
    assert [len(part) for part in apart] == [48, 24, 24]
    torch.testing.assert_close(torch.cat(apart), together, rtol=1e-5, atol=1e-5)
    gate = torch.cat([read[f"mlp.{n}_proj.weight"] @ x for n in ("gate", "up")])
    torch.testing.assert_close(gate, up, rtol=1e-5, atol=1e-5)


def test_a_last_layer_starts_a_head_as_it_multiplies(folders: dict[str, Path], targets: dict[str, Target]) -> None:
    layer_normed = dict(targets["nemotron"].layers[-1].named_parameters())
    shifted = load_parts(str(folders["nemotron"]), None, torch.float32).last_layer
    assert torch.equal(shifted["input_layernorm.weight"], 1 + layer_normed["input_layernorm.weight"])
    assert torch.equal(shifted["input_layernorm.bias"], layer_normed["input_layernorm.bias"])
    own = dict(targets["gemma2"].layers[-1].named_parameters())
    read = load_parts(str(folders["gemma2"]), None, torch.float32).last_layer
    assert torch.equal(read["input_layernorm.weight"], 1 + own["input_layernorm.weight"])
    assert torch.equal(read["post_attention_layernorm.weight"], 1 + own["pre_feedforward_layernorm.weight"])
    assert torch.equal(
        load_parts(str(folders["llama"]), None, torch.float32).last_layer["input_layernorm.weight"],
        dict(targets["llama"].layers[-1].named_parameters())["input_layernorm.weight"],
    )


@pytest.mark.parametrize("name", BIASED)
def test_an_output_head_with_a_bias_is_refused_by_name(folders: dict[str, Path], name: str) -> None:
    target = Target.load(str(folders[name]), dtype=torch.float32, device="cpu")
    with pytest.raises(DraftsmithError, match=f"'{name}' whose output head adds a bias"):
        target.check_trainable()
    with pytest.raises(DraftsmithError, match=f"'{name}' whose output head adds a bias"):
        load_parts(str(folders[name]), None, torch.float32)


@pytest.mark.parametrize("name", NORMED)
def test_an_embedding_that_is_normed_is_refused_by_name(folders: dict[str, Path], name: str) -> None:
    target = Target.load(str(folders[name]), dtype=torch.float32, device="cpu")
    with pytest.raises(DraftsmithError, match=f"type '{name}' has no weight"):
        target.check_trainable()


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_attention_of_a_models_own_is_refused_by_name(targets: dict[str, Target], name: str) -> None:
    with pytest.raises(DraftsmithError, match="have attention of their own"):
        check_target(targets[name])


@pytest.mark.parametrize("name", KEYLESS)
def test_layers_that_keep_no_keys_are_refused_by_name(targets: dict[str, Target], name: str) -> None:
    with pytest.raises(DraftsmithError, match=r"recurrent state\?"):
        check_target(targets[name])
