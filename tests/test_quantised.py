"""Quantised targets: torchao's int8 layers as they are, GGUF files converted once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from target_models import VOCAB, change_config, make_model, save_target
from test_target_runs import run, write_prompts
from tiny import CHATML, EOS, make_tiny_tokenizer
from torch import nn

from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder.probe import check_target
from draftsmith.heads import target as target_module
from draftsmith.heads.base import Needs
from draftsmith.heads.linear import PackedLinear
from draftsmith.heads.loading import load_model, quantisation
from draftsmith.heads.resolve import resolve_target
from draftsmith.heads.target import Target, fingerprint, load_parts
from draftsmith.train import placement
from draftsmith.train.joint import TunedTarget

NEEDS = Needs((1, 2, 3), last=True)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("data") / "mine.jsonl")


def save_int8(plain: Path, folder: Path, **options: Any) -> Path:
    """Quantise a saved model with torchao and save it as users do."""
    pytest.importorskip("torchao", reason="the extra 'quantised' is not installed")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

    how = TorchAoConfig(Int8WeightOnlyConfig(), **options)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, quantization_config=how)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(plain).save_pretrained(folder)
    return folder


def copy_of(plain: Path, folder: Path) -> Path:
    """The same model, whose config may be changed."""
    folder.mkdir()
    for file in plain.iterdir():
        (shutil.copy if file.name == "config.json" else os.link)(file, folder / file.name)
    return folder


# --- torchao ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target("llama", tmp_path_factory.mktemp("plain") / "llama")


@pytest.fixture(scope="module")
def int8_folder(plain_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_int8(plain_folder, tmp_path_factory.mktemp("int8") / "llama")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_layers_stay_and_the_pieces_are_the_plain_ones(
    int8_folder: Path, plain_folder: Path, dtype: torch.dtype
) -> None:
    target = Target.load(str(int8_folder), dtype=dtype, device="cpu")
    projection = target.layers[0].self_attn.q_proj
    assert type(projection.weight).__name__ == "Int8Tensor", "it is neither packed nor de-quantised"
    head = target.model.get_output_embeddings()
    assert isinstance(head, PackedLinear if dtype == torch.float32 else nn.Linear)
    target.check_trainable()
    check_target(target)
    own = target.parts()
    for folder in (int8_folder, plain_folder):
        read = load_parts(str(folder), None, dtype)
        assert torch.equal(own.embed, read.embed)
        assert torch.equal(own.lm_head, read.lm_head)
        assert torch.equal(own.norm_weight, read.norm_weight)
    assert target.fingerprint != fingerprint(plain_folder)
    assert (quantisation(str(int8_folder), None), quantisation(str(plain_folder), None)) == ("torchao", None)


def test_int8_states_are_those_of_the_dequantised_layers(int8_folder: Path, plain_folder: Path) -> None:
    """Weight-only: x (q s)^T. Replacing each layer's weight by q s in a plain model gives the same states."""
    quantised = Target.load(str(int8_folder), dtype=torch.float32, device="cpu")
    model = load_model(str(plain_folder), None, torch.float32)
    there = dict(quantised.model.named_modules())
    with torch.no_grad():
        for name, module in model.named_modules():
            if type(module) is nn.Linear and "layers" in name:
                weight = there[name].weight.dequantize()
                assert 0 < float((weight - module.weight).abs().max()) < 0.02 * float(module.weight.abs().max())
                module.weight.copy_(weight)
    dense = Target(model, quantised.tokenizer, str(plain_folder), None)
    tokens = (torch.arange(40).view(2, 20) * 3 + 5) % VOCAB
    for found, wanted in zip(quantised.states(tokens, NEEDS), dense.states(tokens, NEEDS), strict=True):
        assert found is not None
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_a_quantised_output_head_is_read_dequantised(plain_folder: Path, tmp_path: Path) -> None:
    folder = save_int8(plain_folder, tmp_path / "all", include_input_output_embeddings=True)
    target = Target.load(str(folder), dtype=torch.float32, device="cpu")
    target.check_trainable()
    read, exact = load_parts(str(folder), None, torch.float32), load_parts(str(plain_folder), None, torch.float32)
    assert torch.equal(read.lm_head, target.parts().lm_head)
    error = (read.lm_head - exact.lm_head).abs().amax(1)
    assert float(error.max()) > 0, "int8 rounds"
    assert bool((error <= 0.51 * exact.lm_head.abs().amax(1) / 127).all()), "by half a step of each row's at most"
    assert not read.embed.requires_grad
    assert not read.lm_head.requires_grad


def test_a_quantised_target_is_collected_trained_for_and_decoded(
    int8_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    result = run(int8_folder, prompts, tmp_path / "runs")
    assert result["summary"]["output_check"] in ("identical", "ties"), result["summary"]
    assert result["head"]["target_fingerprint"] == fingerprint(int8_folder)


def test_online_training_counts_its_bytes_and_never_streams_it(
    int8_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (int8_folder / "model.safetensors").stat().st_size
    assert 0.8 * size < placement.stored_bytes(int8_folder) < size
    monkeypatch.setattr(placement, "choose_place", lambda *_: "host")
    with pytest.raises(DraftsmithError, match=r"\(torchao\) doesn't fit .* quantised layers can't be copied"):
        placement.load_online_target(str(int8_folder), None, torch.float32, torch.device("cpu"), 0.0)


def test_an_adapter_is_not_trained_on_quantised_weights(int8_folder: Path) -> None:
    config: Any = None  # it isn't asked
    with pytest.raises(DraftsmithError, match=r"is quantised \(torchao\): an adapter .* can't be merged"):
        TunedTarget.load(str(int8_folder), None, config, 0, torch.device("cpu"), torch.float32)


# --- any format -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "method"),
    [({"quant_method": "gptq", "bits": 4}, "gptq"), ({"load_in_4bit": True}, "bitsandbytes"), ({"bits": 4}, None)],
)
def test_a_format_is_named_as_the_outer_config_says(
    tmp_path: Path, settings: dict[str, Any], method: str | None
) -> None:
    folder = save_target("gemma3-images", tmp_path / "target")
    change_config(folder, quantization_config=settings)
    if method is not None:
        assert quantisation(str(folder), None) == method
        return
    with pytest.raises(DraftsmithError, match=r"doesn't say how: write its quant_method there"):
        quantisation(str(folder), None)


def test_a_weight_of_another_kind_is_read_of_the_loaded_model_or_refused(
    plain_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tied config doesn't make the embedding the output head where one is stored in another form."""
    folder = copy_of(plain_folder, tmp_path / "target")
    asked: list[tuple[Any, ...]] = []
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, quantization_config={"quant_method": "fp8"}, tie_word_embeddings=True)
    model = make_model("llama")

    def load(*arguments: Any) -> Any:
        asked.append(arguments)
        return model

    monkeypatch.setattr(target_module, "load_model", load)
    parts = load_parts(str(folder), None, torch.float32, "meta", torch.bfloat16)
    assert asked == [(str(folder), None, torch.bfloat16, "meta")]
    assert parts.lm_head.device.type == "meta"
    model.lm_head.weight = nn.Parameter(weights["lm_head.weight"], requires_grad=False)
    with pytest.raises(DraftsmithError, match="the output head of this target is quantised in a form"):
        load_parts(str(folder), None, torch.float32)


# --- formats whose package isn't there --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "package", "settings"),
    [("gptq", "optimum", {"bits": 4}), ("awq", "gptqmodel", {"bits": 4, "group_size": 128}),
     ("compressed-tensors", "compressed-tensors", {}), ("bitsandbytes", "bitsandbytes", {"load_in_4bit": True})],
)  # fmt: skip
def test_a_missing_package_is_named(
    plain_folder: Path, tmp_path: Path, method: str, package: str, settings: dict[str, Any]
) -> None:
    folder = copy_of(plain_folder, tmp_path / "target")
    change_config(folder, quantization_config={"quant_method": method, **settings})
    with pytest.raises(DraftsmithError, match=rf"(?i)can't be loaded: .*{package}"):
        Target.load(str(folder), dtype=torch.float32, device="cpu")


# --- GGUF -------------------------------------------------------------------------------------------------------------


def qwen2() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, rms_norm_eps=1e-5,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape) * (1.0 if "embed" in name else 1.6 / weight.shape[-1] ** 0.5)
            weight.copy_(drawn if weight.ndim == 2 else weight + 0.1 * torch.randn(weight.shape))
    return model


def test_a_gguf_file_is_a_target(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "files" / "tiny-q8_0.gguf"
    path.parent.mkdir()
    held = write_gguf(qwen2(), path)
    said: list[str] = []
    source = resolve_target(str(path), notify=said.append)
    assert source.is_local
    assert source.name.startswith("tiny-q8_0-")
    assert any("converting tiny-q8_0.gguf" in line for line in said)
    target = Target.load(source.location, dtype=torch.float32, device="cpu")
    there = {**dict(target.model.named_parameters()), **load_model(source.location, None, torch.float32).state_dict()}
    assert set(held) <= set(there)
    for name, weight in held.items():
        assert torch.equal(there[name].float(), weight.bfloat16().float()), name
    assert target.config.rms_norm_eps == 1e-5
    target.check_trainable()
    result = run(path, prompts, tmp_path / "runs")
    assert result["summary"]["output_check"] in ("identical", "ties")
    assert [folder.name for folder in (tmp_path / "runs").iterdir() if folder.is_dir()] == [source.name]


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftsmith.heads import resolve

    made: list[str] = []

    def convert(gguf: Path, out: Path, split_digits: bool) -> None:
        made.append(gguf.name)
        save_target("llama", out)

    monkeypatch.setattr(resolve, "_convert", convert)
    folder, cache = tmp_path / "mine", tmp_path / "cache"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(b"one")
    first = resolve_target(str(folder), cache, lambda line: None)
    assert first == resolve_target(str(folder / "a.gguf"), cache, lambda line: None)
    assert made == ["a.gguf"]
    (folder / "a.gguf").write_bytes(b"another")
    resolve_target(str(folder), cache, lambda line: None)
    assert made == ["a.gguf", "a.gguf"]
    (folder / "tokenizer.json").write_text("{}")
    resolve_target(str(folder), cache, lambda line: None)
    assert made == ["a.gguf"] * 3, "it reads what lies beside the file"
    (folder / "b.gguf").write_bytes(b"two")
    with pytest.raises(DraftsmithError, match=r"mine holds 2 GGUF files \(a\.gguf, b\.gguf\): give one"):
        resolve_target(str(folder), cache, lambda line: None)


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a model" * 100)
    with pytest.raises(DraftsmithError, match=r"broken\.gguf can't be converted: .*Give the folder or hub id"):
        resolve_target(str(path), tmp_path / "cache", lambda line: None)
    assert not [x for x in (tmp_path / "cache" / "targets").iterdir() if x.is_dir()]


def test_a_damaged_or_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.heads import resolve

    def say(path: Path | str) -> str:
        with pytest.raises(DraftsmithError) as caught:
            resolve_target(str(path), tmp_path / "cache", lambda line: None)
        return str(caught.value)

    write_gguf(qwen2(), tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    for length in (3, 30, 2000, len(content) - 100):
        path = tmp_path / f"cut-{length}.gguf"
        path.write_bytes(content[:length])
        assert say(path).startswith(f"{path} can't be converted: "), length
    assert say("models/tiny.gguf").startswith("there is no file models/tiny.gguf"), "it is no hub id"

    def fail(error: OSError) -> str:
        monkeypatch.setattr(resolve, "_convert", lambda *_: (_ for _ in ()).throw(error))
        return say(tmp_path / "m.gguf")

    assert "m.gguf can't be converted: Can't load tokenizer" in fail(OSError("Can't load tokenizer for 'x'"))
    assert "can't be converted: " in fail(PermissionError(13, "Permission denied", str(tmp_path / "m.gguf")))
    assert "can't be written (No space left" in fail(OSError(28, "No space left on device"))


@pytest.mark.parametrize(
    ("rule", "beside"), [("smollm", ""), ("qwen2", ""), ("smollm", "all"), ("smollm", "tokenizer.json")]
)
def test_digits_are_split_as_the_file_says(tmp_path: Path, rule: str, beside: str) -> None:
    """Unless a tokenizer of the model's own lies beside the file: then the file only adds what that one leaves out."""
    from transformers import AutoTokenizer

    write_gguf(qwen2(), tmp_path / "m.gguf", rule)
    if beside:
        own = make_tiny_tokenizer()
        own.chat_template = "own"
        own.save_pretrained(tmp_path / "own")
        for file in (tmp_path / "own").iterdir():
            if beside in ("all", file.name):
                file.rename(tmp_path / file.name)
    source = resolve_target(str(tmp_path / "m.gguf"), tmp_path / "cache", lambda line: None)
    written = json.loads((Path(source.location) / "tokenizer.json").read_text())
    assert ("Digits" in json.dumps(written["pre_tokenizer"])) == (rule == "smollm" and not beside)
    tokenizer = AutoTokenizer.from_pretrained(source.location)
    assert tokenizer.chat_template == ("own" if beside == "all" else CHATML)
    assert tokenizer.eos_token == EOS
