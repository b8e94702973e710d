"""Heads in other tools' layouts, written by hand: the names and values that those tools write, nothing of ours.

Each writer takes one of this toolkit's heads and an empty folder. `t` is the head's tensors by its own names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def tensors_of(head: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone().contiguous() for name, p in head.named_parameters()}


def llama_layer(t: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        prefix + "self_attn.q_proj.weight": t["layer.q_proj.weight"],
        prefix + "self_attn.k_proj.weight": t["layer.k_proj.weight"],
        prefix + "self_attn.v_proj.weight": t["layer.v_proj.weight"],
        prefix + "self_attn.o_proj.weight": t["layer.o_proj.weight"],
        prefix + "post_attention_layernorm.weight": t["layer.post_attention_layernorm"],
        prefix + "mlp.gate_proj.weight": t["layer.gate_proj.weight"],
        prefix + "mlp.up_proj.weight": t["layer.up_proj.weight"],
        prefix + "mlp.down_proj.weight": t["layer.down_proj.weight"],
    }


def llama_config(head: Any) -> dict[str, Any]:
    """Shapes as configs of transformers 4 have them: rope_theta at the top, scaling beside it."""
    c = head.config
    scaling = {k: v for k, v in c.rope.items() if k != "rope_theta"}
    return {
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": 2048,
        "rope_theta": c.rope["rope_theta"],
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        "tie_word_embeddings": False,
    }


def write(folder: Path, file: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def draft_maps(head: Any) -> dict[str, Tensor]:
    ids = head.vocab.target_ids
    t2d = torch.zeros(head.vocab.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": torch.tensor([int(k) - i for i, k in enumerate(ids)]), "t2d": t2d}


def eagle1_repository(head: Any, folder: Path, parts: Any) -> Path:
    t = tensors_of(head)
    bias = {"fc.bias": t["fc.bias"]} if "fc.bias" in t else {}
    own = {"fc.weight": t["fc.weight"], **bias, **llama_layer(t, "layers.0.")}
    shared = {"embed_tokens.weight": parts.embed.half(), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    config = {"architectures": ["LlamaForCausalLM"], **llama_config(head), "bias": bool(bias)}
    return write(folder, "pytorch_model.bin", config, {**own, **shared})


def eagle3_tensors(t: dict[str, Tensor], layer: str) -> dict[str, Tensor]:
    norms = {f"fc_norm.{i}.weight": t[f"fc_norm.{i}"] for i in range(3) if f"fc_norm.{i}" in t}
    return {
        "fc.weight": t["fc.weight"],
        **norms,
        layer + "input_layernorm.weight": t["input_layernorm"],
        layer + "hidden_norm.weight": t["hidden_norm"],
        **llama_layer(t, layer),
        "norm.weight": t["norm"],
        "lm_head.weight": t["lm_head.weight"],
    }


def eagle3_repository(head: Any, folder: Path, parts: Any) -> Path:
    """As the EAGLE repository publishes them: pickled, no layer ids."""
    config = {"architectures": ["LlamaForCausalLM"], **llama_config(head), "draft_vocab_size": len(head.vocab)}
    return write(
        folder, "pytorch_model.bin", config, {**eagle3_tensors(tensors_of(head), "midlayer."), **draft_maps(head)}
    )


def specforge(head: Any, folder: Path, parts: Any) -> Path:
    """Layer ids count outputs from 0."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **llama_config(head),
        "draft_vocab_size": len(head.vocab),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [k - 1 for k in head.config.layer_ids],
            "use_aux_hidden_state": True,
        },
    }
    return write(
        folder, "model.safetensors", config, {**eagle3_tensors(tensors_of(head), "midlayer."), **draft_maps(head)}
    )


def plain_export(head: Any, folder: Path, parts: Any) -> Path:
    """For engines: rope in transformers 5's form, layer ids at both places, EAGLE-3.1's flags, no t2d."""
    changed = {**llama_config(head), "rope_parameters": head.config.rope}
    del changed["rope_theta"], changed["rope_scaling"]
    new = "fc_norm.0" in tensors_of(head)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **changed,
        "draft_vocab_size": len(head.vocab),
        "norm_before_residual": head.config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": new,
        "norm_output": new,
        "eagle_aux_hidden_state_layer_ids": head.config.layer_ids,
        "eagle_config": {
            "norm_before_fc": False,
            "eagle_aux_hidden_state_layer_ids": [k - 1 for k in head.config.layer_ids],
        },
    }
    tensors = {**eagle3_tensors(tensors_of(head), "layers.0."), "d2t": draft_maps(head)["d2t"]}
    return write(folder, "model.safetensors", config, tensors)


def speculators_eagle3(head: Any, folder: Path, parts: Any) -> Path:
    new = "fc_norm.0" in tensors_of(head)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": len(head.vocab),
        "norm_before_residual": head.config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": new,
        "norm_output": new,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": head.config.layer_ids,
        "transformer_layer_config": llama_config(head),
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "org/target"}},
    }
    tensors = {**eagle3_tensors(tensors_of(head), "layers.0."), **draft_maps(head)}
    tensors["embed_tokens.weight"] = parts.embed.bfloat16()
    return write(folder, "model.safetensors", config, tensors)


def speculators_eagle(head: Any, folder: Path, parts: Any) -> Path:
    t = tensors_of(head)
    bias = {"fusion_fc.bias": t["fc.bias"]} if "fc.bias" in t else {}
    config = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "layernorms": False,
        "fusion_bias": bool(bias),
        "transformer_layer_config": llama_config(head),
        "speculators_config": {"algorithm": "eagle", "verifier": {"name_or_path": "org/target"}},
    }
    tensors = {"fusion_fc.weight": t["fc.weight"], **bias, **llama_layer(t, "transformer.")}
    return write(folder, "model.safetensors", config, tensors)


def medusa_tensors(head: Any) -> dict[str, Tensor]:
    """`medusa_lm_head`: blocks, then the output rows behind them."""
    t, found = tensors_of(head), {}
    for i in range(head.config.steps):
        for j in range(head.config.blocks):
            found[f"{i}.{j}.linear.weight"] = t[f"blocks.{i}.layers.{j}.weight"]
            found[f"{i}.{j}.linear.bias"] = t[f"blocks.{i}.layers.{j}.bias"]
        found[f"{i}.{head.config.blocks}.weight"] = t[f"lm_heads.{i}.weight"]
    return found


def medusa_repository(head: Any, folder: Path, parts: Any) -> Path:
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "org/target"}
    return write(folder, "medusa_lm_head.pt", config, medusa_tensors(head))


def medusa_tgi(head: Any, folder: Path, parts: Any) -> Path:
    config = {"base_model_name_or_path": "org/target", "medusa_num_heads": head.config.steps, "medusa_num_layers": 1}
    return write(folder, "medusa_lm_head.safetensors", config, medusa_tensors(head))


def medusa_vllm(head: Any, folder: Path, parts: Any) -> Path:
    """The draft vocabulary by absolute ids, in an order of its own."""
    t, c = tensors_of(head), head.config
    order = torch.randperm(len(head.vocab), generator=torch.Generator().manual_seed(5))
    tensors = {f"medusa_heads.{name}": x for name, x in t.items() if name.startswith("blocks.")}
    tensors |= {f"lm_heads.{i}.weight": t[f"lm_heads.{i}.weight"][order] for i in range(c.steps)}
    tensors["token_map"] = head.vocab.target_ids[order].to(torch.int32)
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size, "truncated_vocab_size": len(head.vocab), "num_heads": c.steps,
        "num_hidden_layers": c.blocks, "medusa_fc_bias": True, "original_lm_head": False,
    }  # fmt: skip
    return write(folder, "model.safetensors", config, tensors)
