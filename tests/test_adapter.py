"""LoRA adapters of a target: what they change, files, merging, and which head belongs to which target."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_case
from safetensors.torch import load_file, save_file
from tiny import make_tiny_target
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.heads.adapter import CONFIG, WEIGHTS, Adapter, adapter_sha256, merge_adapter
from draftsmith.heads.architecture import layers_and_norm, text_decoder
from draftsmith.heads.base import Needs
from draftsmith.heads.target import Target, load_model

LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
TOKENS = torch.tensor([[5, 9, 200, 31, 7, 7, 300]])


def make_adapter(folder: Path, rank: int = 4, seed: int = 0) -> Adapter:
    model = load_model(str(folder), None, torch.float32).eval().requires_grad_(False)
    layers, _ = layers_and_norm(text_decoder(model), model.config.num_hidden_layers)
    return Adapter(model, layers, rank, 2 * rank, torch.Generator().manual_seed(seed), "some/model")


def moved(adapter: Adapter, seed: int = 1) -> Adapter:
    """B, too, filled: the adapter does something."""
    g = torch.Generator().manual_seed(seed)
    for weight in adapter.parameters.values():
        weight.data.copy_(torch.randn(weight.shape, generator=g) * 0.1)
    return adapter


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return out


@pytest.fixture(scope="module")
def saved(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Tensor, Tensor]:
    """Folder of an adapter that moves the tiny target, its hash, and the logits with it and without it."""
    adapter = moved(make_adapter(tiny_folder))
    folder = tmp_path_factory.mktemp("saved") / "adapter"
    name = adapter.save(folder)
    with adapter.off():
        without = logits(adapter.model)
    return folder, name, logits(adapter.model), without


def test_every_linear_layer_of_the_decoder_is_adapted_and_nothing_else(tiny_folder: Path) -> None:
    adapter = make_adapter(tiny_folder)
    modules = {name.rpartition(".lora_")[0] for name in adapter.parameters}
    prefix = "base_model.model.model.layers."
    assert modules == {
        f"{prefix}{i}.{'mlp' if n in ('gate_proj', 'up_proj', 'down_proj') else 'self_attn'}.{n}"
        for i in range(7) for n in LINEARS
    }  # fmt: skip
    trained = [p for p in adapter.model.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(p) for p in adapter.parameters.values()}
    assert adapter.parameters[f"{prefix}0.mlp.down_proj.lora_A.weight"].shape == (4, 128)
    assert adapter.parameters[f"{prefix}0.mlp.down_proj.lora_B.weight"].shape == (64, 4)


def test_a_new_adapter_changes_nothing_and_its_start_follows_the_seed(tiny_folder: Path, tiny_target: Target) -> None:
    one, two, other = (make_adapter(tiny_folder, seed=s) for s in (0, 0, 1))
    plain = load_model(str(tiny_folder), None, torch.float32).eval()
    assert torch.equal(logits(one.model), logits(plain))
    for name, weight in one.parameters.items():
        assert torch.equal(weight, two.parameters[name])
        assert torch.equal(weight, other.parameters[name]) == name.endswith("lora_B.weight"), name
        if name.endswith("lora_B.weight"):
            assert not weight.any()


def test_off_is_the_original_and_gradients_come_back(tiny_folder: Path) -> None:
    adapter = moved(make_adapter(tiny_folder))
    plain = load_model(str(tiny_folder), None, torch.float32).eval()
    with adapter.off():
        assert torch.equal(logits(adapter.model), logits(plain))
    assert (logits(adapter.model) - logits(plain)).abs().max() > 0.1
    assert all(p.requires_grad for p in adapter.parameters.values())
    adapter.model(input_ids=TOKENS, use_cache=False).logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in adapter.parameters.values())


def test_the_merged_target_says_what_the_model_says_with_the_adapter_on(
    saved: Any, tiny_folder: Path, tiny_target: Target
) -> None:
    folder, name, with_it, without = saved
    target = Target.load(str(tiny_folder), dtype=torch.float32, device="cpu", adapter=folder)
    assert (target.adapter, target.adapter_sha256) == (folder, name)
    assert target.fingerprint == tiny_target.fingerprint, "the fingerprint is the original's"
    with target.attention():
        torch.testing.assert_close(logits(target.model), with_it, rtol=1e-4, atol=1e-4)
    assert (with_it - without).abs().max() > 0.1
    own, plain = target.parts(), tiny_target.parts()
    assert torch.equal(own.embed, plain.embed)
    assert torch.equal(own.lm_head, plain.lm_head)
    assert torch.equal(own.norm_weight, plain.norm_weight)
    a, b = (t.states(TOKENS, Needs((2,), last=True))[1] for t in (target, tiny_target))
    assert a is not None
    assert b is not None
    assert (a - b).abs().max() > 0.1


def test_merging_in_bf16_rounds_once(saved: Any, tiny_folder: Path) -> None:
    exact = merge_adapter(load_model(str(tiny_folder), None, torch.float32), saved[0])
    rounded = merge_adapter(load_model(str(tiny_folder), None, torch.bfloat16), saved[0])
    plain = load_model(str(tiny_folder), None, torch.float32)
    for (name, a), (_, b), (_, c) in zip(
        exact.named_parameters(), rounded.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert b.dtype == torch.bfloat16, name
        delta = a - c
        torch.testing.assert_close(b.float(), c.bfloat16().float() + delta, rtol=2**-8, atol=1e-6)


def test_the_folder_is_pefts(saved: Any, tiny_folder: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, _, with_it, _ = saved
    assert {p.name for p in folder.iterdir()} == {CONFIG, WEIGHTS}
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_folder), folder)
    assert torch.equal(logits(model.eval()), with_it)
    config = json.loads((folder / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, "some/model")
    assert config["target_modules"] == sorted(LINEARS)
    assert all(w.dtype == torch.float32 for w in load_file(folder / WEIGHTS).values())


def test_saving_twice_gives_the_same_bytes_and_loading_gives_them_back(
    saved: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    folder, name, with_it, _ = saved
    adapter = make_adapter(tiny_folder, seed=9)
    adapter.load(folder)
    assert torch.equal(logits(adapter.model), with_it)
    assert adapter.save(tmp_path / "again") == name
    for file in (CONFIG, WEIGHTS):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()


def test_the_hash_sees_weights_and_scale_and_no_place(saved: Any, tiny_folder: Path, tmp_path: Path) -> None:
    folder, name, *_ = saved
    config = json.loads((folder / CONFIG).read_text())
    found = {}
    for key, value in {"lora_alpha": 9, "peft_version": "other", "base_model_name_or_path": "/elsewhere"}.items():
        shutil.copytree(folder, tmp_path / key)
        (tmp_path / key / CONFIG).write_text(json.dumps({**config, key: value}))
        found[key] = adapter_sha256(tmp_path / key)
    assert found["lora_alpha"] != name
    assert found["peft_version"] == found["base_model_name_or_path"] == name
    assert moved(make_adapter(tiny_folder), seed=2).save(tmp_path / "weights") != name


def test_a_foreign_or_damaged_adapter_is_refused(saved: Any, tiny_folder: Path, tmp_path: Path) -> None:
    folder = saved[0]

    def refused(place: Path, match: str) -> None:
        with pytest.raises(DraftsmithError, match=match):
            Target.load(str(tiny_folder), dtype=torch.float32, device="cpu", adapter=place)

    refused(tmp_path, "is no adapter: it has no adapter_config.json; give a PEFT folder")
    copies = {}
    for name in ("damaged", "short", "kind", "variant"):
        copies[name] = tmp_path / name
        shutil.copytree(folder, copies[name])
    (copies["damaged"] / WEIGHTS).write_bytes(b"nothing")
    refused(copies["damaged"], "is damaged")
    weights = load_file(folder / WEIGHTS)
    weights.pop("base_model.model.model.layers.3.mlp.up_proj.lora_B.weight")
    save_file(weights, copies["short"] / WEIGHTS)
    refused(copies["short"], r"layers.3.mlp.up_proj.lora_B.weight' is missing \(1 differ\)")
    config = json.loads((folder / CONFIG).read_text())
    (copies["kind"] / CONFIG).write_text(json.dumps({**config, "peft_type": "IA3"}))
    refused(copies["kind"], "type 'IA3', LORA is expected")
    (copies["variant"] / CONFIG).write_text(json.dumps({**config, "use_dora": True}))
    refused(copies["variant"], "use_dora = True: only plain LoRA")
    smaller = make_tiny_target(tmp_path / "smaller", hidden=32, head_dim=8)
    with pytest.raises(DraftsmithError, match="doesn't fit LlamaForCausalLM"):
        Target.load(str(smaller), dtype=torch.float32, device="cpu", adapter=folder)
    deeper = make_tiny_target(tmp_path / "deeper", layers=8)
    with pytest.raises(DraftsmithError, match=r"layers\.7.*is missing"):
        Target.load(str(deeper), dtype=torch.float32, device="cpu", adapter=folder)
    with pytest.raises(DraftsmithError, match=r"has shape \[4, 64\], not \[8, 64\]"):
        make_adapter(tiny_folder, rank=8).load(folder)


def test_a_head_and_its_targets_adapter_belong_together(
    saved: Any, tiny_folder: Path, tiny_target: Target, tmp_path: Path
) -> None:
    folder, name, *_ = saved
    tuned = Target.load(str(tiny_folder), dtype=torch.float32, device="cpu", adapter=folder)
    config = dataclasses.replace(
        make_case("medusa2", "one-block").config, target_fingerprint=tuned.fingerprint, adapter_sha256=name
    )
    plain = dataclasses.replace(make_case("medusa", "one-block").config, target_fingerprint=tuned.fingerprint)
    tuned.check_head(config)
    tiny_target.check_head(plain)
    with pytest.raises(DraftsmithError, match=rf"with an adapter \(sha256 {name[:8]}\), this target has none: give"):
        tiny_target.check_head(config)
    with pytest.raises(
        DraftsmithError, match=r"without an adapter, this target has .* merged into it: load the target"
    ):
        tuned.check_head(plain)
    with pytest.raises(DraftsmithError, match=f"another adapter of test: sha256 00000000, not {name[:8]}"):
        tuned.check_head(dataclasses.replace(config, adapter_sha256="0" * 64))
    with pytest.raises(DraftsmithError, match="trained for another target: fingerprint"):
        tuned.check_head(dataclasses.replace(config, target_fingerprint="f" * 64))


def test_linear_layers_of_the_same_names_elsewhere_are_refused(tiny_folder: Path) -> None:
    model = load_model(str(tiny_folder), None, torch.float32)
    layers, _ = layers_and_norm(text_decoder(model), 7)
    with pytest.raises(DraftsmithError, match=r"named down_proj, .* outside its decoder layers"):
        Adapter(model, layers[:5], 4, 8, torch.Generator(), "some/model")
