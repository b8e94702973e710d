"""Small random targets with MTP modules of their own: every name and shape written out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

H, V, LAYERS = 24, 40, 2
COMMON: dict[str, Any] = {
    "hidden_size": H, "intermediate_size": 20, "num_hidden_layers": LAYERS, "vocab_size": V, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256, "num_attention_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
SIGMOID = {
    "n_routed_experts": 8, "moe_intermediate_size": 9, "num_experts_per_tok": 3, "routed_scaling_factor": 1.7,
    "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 0,
}  # fmt: skip
SOFTMAX = {
    "num_experts": 6, "moe_intermediate_size": 9, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 7,
}  # fmt: skip
GQA = {"num_key_value_heads": 2, "head_dim": 8}
QWEN = {**GQA, "layer_types": ["full_attention"] * LAYERS, "partial_rotary_factor": 0.5}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.7}


def experts(prefix: str, count: int, shared: str) -> dict[str, tuple[int, ...]]:
    mlp = {
        "gate.weight": (count, H),
        **{f"experts.{e}.gate_proj.weight": (9, H) for e in range(count)},
        **{f"experts.{e}.up_proj.weight": (9, H) for e in range(count)},
        **{f"experts.{e}.down_proj.weight": (H, 9) for e in range(count)},
    }
    size = 9 if shared == "shared_experts" else 7
    for name in ("gate_proj", "up_proj"):
        mlp[f"{shared}.{name}.weight"] = (size, H)
    mlp[f"{shared}.down_proj.weight"] = (H, size)
    return {f"{prefix}mlp.{name}": shape for name, shape in mlp.items()}


def norms(prefix: str) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}{x}_layernorm.weight": (H,) for x in ("input", "post_attention")}


def deepseek(at: int) -> dict[str, tuple[int, ...]]:
    p = f"model.layers.{at}."
    return {
        f"{p}embed_tokens.weight": (V, H), f"{p}shared_head.head.weight": (V, H), f"{p}shared_head.norm.weight": (H,),
        f"{p}enorm.weight": (H,), f"{p}hnorm.weight": (H,), f"{p}eh_proj.weight": (H, 2 * H), **norms(p),
        f"{p}self_attn.q_a_proj.weight": (12, H), f"{p}self_attn.q_a_layernorm.weight": (12,),
        f"{p}self_attn.q_b_proj.weight": (4 * 10, 12), f"{p}self_attn.kv_a_proj_with_mqa.weight": (10 + 4, H),
        f"{p}self_attn.kv_a_layernorm.weight": (10,), f"{p}self_attn.kv_b_proj.weight": (4 * (6 + 7), 10),
        f"{p}self_attn.o_proj.weight": (H, 4 * 7), f"{p}mlp.gate.e_score_correction_bias": (8,),
        **experts(p, 8, "shared_experts"),
    }  # fmt: skip


def glm(at: int) -> dict[str, tuple[int, ...]]:
    p = f"model.layers.{at}."
    return {
        f"{p}embed_tokens.weight": (V, H), f"{p}shared_head.head.weight": (V, H), f"{p}shared_head.norm.weight": (H,),
        f"{p}enorm.weight": (H,), f"{p}hnorm.weight": (H,), f"{p}eh_proj.weight": (H, 2 * H), **norms(p),
        f"{p}self_attn.q_proj.weight": (32, H), f"{p}self_attn.q_proj.bias": (32,),
        f"{p}self_attn.k_proj.weight": (16, H), f"{p}self_attn.k_proj.bias": (16,),
        f"{p}self_attn.v_proj.weight": (16, H), f"{p}self_attn.v_proj.bias": (16,),
        f"{p}self_attn.o_proj.weight": (H, 32), f"{p}mlp.gate.e_score_correction_bias": (8,),
        **experts(p, 8, "shared_experts"),
    }  # fmt: skip


def qwen(moe: bool) -> dict[str, tuple[int, ...]]:
    p = "mtp.layers.0."
    dense = {
        f"{p}mlp.gate_proj.weight": (20, H),
        f"{p}mlp.up_proj.weight": (20, H),
        f"{p}mlp.down_proj.weight": (H, 20),
    }
    mixture = {**experts(p, 6, "shared_expert"), f"{p}mlp.shared_expert_gate.weight": (1, H)}
    return {
        "mtp.fc.weight": (H, 2 * H), "mtp.pre_fc_norm_embedding.weight": (H,), "mtp.pre_fc_norm_hidden.weight": (H,),
        "mtp.norm.weight": (H,), **norms(p),
        f"{p}self_attn.q_proj.weight": (4 * 2 * 8, H), f"{p}self_attn.k_proj.weight": (16, H),
        f"{p}self_attn.v_proj.weight": (16, H), f"{p}self_attn.o_proj.weight": (H, 32),
        f"{p}self_attn.q_norm.weight": (8,), f"{p}self_attn.k_norm.weight": (8,),
        **(mixture if moe else dense),
    }  # fmt: skip


def stacked() -> dict[str, tuple[int, ...]]:
    """Qwen3.5's mixtures also come with all experts in one tensor."""
    p = "mtp.layers.0.mlp.experts."
    rest = {name: shape for name, shape in qwen(True).items() if not name.startswith(p)}
    return {**rest, f"{p}gate_up_proj": (6, 18, H), f"{p}down_proj": (6, H, 9)}


def mimo() -> dict[str, tuple[int, ...]]:
    p = "model.mtp_layers.0."
    return {
        f"{p}token_layernorm.weight": (H,), f"{p}hidden_layernorm.weight": (H,), f"{p}input_proj.weight": (H, 2 * H),
        f"{p}final_layernorm.weight": (H,), **norms(p),
        f"{p}self_attn.q_proj.weight": (24, H), f"{p}self_attn.q_proj.bias": (24,),
        f"{p}self_attn.k_proj.weight": (12, H), f"{p}self_attn.k_proj.bias": (12,),
        f"{p}self_attn.v_proj.weight": (12, H), f"{p}self_attn.v_proj.bias": (12,),
        f"{p}self_attn.o_proj.weight": (H, 24),
        f"{p}mlp.gate_proj.weight": (20, H), f"{p}mlp.up_proj.weight": (20, H), f"{p}mlp.down_proj.weight": (H, 20),
    }  # fmt: skip


# the layout, transformers' class, its config's values, the module's tensors
KINDS: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, tuple[int, ...]]]]] = {
    "deepseek_v3": (
        "deepseek_v3", "DeepseekV3",
        {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
         "v_head_dim": 7, "rope_theta": 1e4, "rope_scaling": YARN, "num_nextn_predict_layers": 1, **SIGMOID},
        lambda: deepseek(LAYERS),
    ),
    "glm4_moe": (
        "glm4_moe", "Glm4Moe",
        {**GQA, **SIGMOID, "attention_bias": True, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1},
        lambda: glm(LAYERS),
    ),
    "qwen3_next": ("qwen3_next", "Qwen3Next", {**QWEN, **SOFTMAX}, lambda: qwen(True)),
    "qwen3_5": ("qwen3_5", "Qwen3_5Text", {**QWEN, "mtp_num_hidden_layers": 1}, lambda: qwen(False)),
    "qwen3_5_moe": ("qwen3_5", "Qwen3_5MoeText", {**QWEN, **SOFTMAX, "mtp_num_hidden_layers": 1}, stacked),
    "mimo": ("mimo", "Qwen2", {"num_key_value_heads": 2, "num_nextn_predict_layers": 1}, mimo),
}  # fmt: skip
ONE_PLUS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Norms are stored less 1."""


def random_tensor(name: str, shape: tuple[int, ...], gemma: bool) -> Tensor:
    if "norm" in name:
        return (0.0 if gemma else 1.0) + 0.3 * torch.randn(shape)
    return torch.randn(shape) * (0.3 if len(shape) == 1 else 1.2 / shape[-1] ** 0.5)


def make_model(kind: str) -> Any:
    """transformers' model, random, in fp32."""
    import transformers

    _, prefix, values, _ = KINDS[kind]
    config = getattr(transformers, f"{prefix}Config")(**{**COMMON, **values})
    config._experts_implementation = "eager"  # its grouped products refuse sizes that are no multiples of four
    torch.manual_seed(5)
    model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.copy_(random_tensor(name, tuple(x.shape), kind in ONE_PLUS))
    return model


def make_checkpoint(folder: Path, kind: str, *, shards: int = 1, dtype: torch.dtype = torch.float32) -> Path:
    """The model's folder with an MTP module; its tensors share their shards with others."""
    make_model(kind).to(dtype).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    torch.manual_seed(6)
    for name, shape in KINDS[kind][3]().items():
        x = random_tensor(name, shape, kind in ONE_PLUS)
        stored[name] = x if "correction_bias" in name else x.to(dtype)
    for copy, whole in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        if (name := f"model.layers.{LAYERS}.{copy}.weight") in stored:
            stored[name] = stored[f"{whole}.weight"].clone()
    config = json.loads((folder / "config.json").read_text())
    if kind == "mimo":
        config["model_type"] = "mimo"
    if kind == "qwen3_next":
        config.pop("num_nextn_predict_layers", None)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "notes.txt").write_text("kept")
    (folder / "model.safetensors").unlink()
    save_shards(folder, stored, shards)
    return folder


def add_module(folder: Path) -> dict[str, Tensor]:
    """Give a DeepSeek checkpoint in one file a second module with the first one's choice of experts; returns all."""
    stored = load_file(folder / "model.safetensors")
    for name, shape in deepseek(LAYERS + 1).items():
        stored[name] = random_tensor(name, shape, False)
    bias = "mlp.gate.e_score_correction_bias"
    stored[f"model.layers.{LAYERS + 1}.{bias}"] = stored[f"model.layers.{LAYERS}.{bias}"].clone()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, num_nextn_predict_layers=2)
    return stored


def save_shards(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        chosen = names[i::shards] if i < shards - 1 else [n for n in names if n not in weight_map]
        save_file({n: tensors[n] for n in chosen}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def all_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
