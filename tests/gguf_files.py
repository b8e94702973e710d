"""A tiny GGUF file as llama.cpp's converters write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny import CHATML, make_tiny_tokenizer

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(model: Any, path: Path, rule: str = "qwen2") -> dict[str, torch.Tensor]:
    """Write a transformers Qwen2 model, its matrices as Q8_0.

    Args:
        rule: what the file says of how text is split.

    Returns:
        By transformers' names what the file holds: matrices as they come back from Q8_0.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import dequantize, quantize

    c, kind = model.config, GGMLQuantizationType.Q8_0
    writer = GGUFWriter(path, "qwen2")
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    _add_tokenizer(writer, rule)
    held = {}
    for name, weight in model.state_dict().items():
        values = weight.detach().float().numpy()
        if values.ndim == 2:
            packed = quantize(values, kind)
            writer.add_tensor(_name(name), packed, raw_dtype=kind)
            held[name] = torch.from_numpy(np.array(dequantize(packed, kind)))
        else:
            writer.add_tensor(_name(name), values)
            held[name] = weight.detach().float()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _name(name: str) -> str:
    module, _, part = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, number, inner = module.split(".", 3)
        return f"blk.{number}.{_NAMES[inner]}.{part}"
    return f"{_NAMES[module]}.{part}"


def _add_tokenizer(writer: Any, rule: str) -> None:
    tokenizer = make_tiny_tokenizer()
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = sorted(backend["model"]["vocab"], key=backend["model"]["vocab"].__getitem__)
    special = {x["content"] for x in backend["added_tokens"]}
    merges = [x if isinstance(x, str) else " ".join(x) for x in backend["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(CHATML)
