"""Tiny random models of other architectures than Llama, saved with the tiny tokenizer as Target.load wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny import make_tiny_tokenizer

VOCAB, WINDOW = 320, 8


def _shared(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **more,
    }  # fmt: skip


def make_model(kind: str) -> Any:
    """A random model in fp32: mistral and some gemma layers have a window, gemma2 caps scores, gpt_oss has sinks."""
    import transformers as tf

    if kind == "qwen3":
        return tf.Qwen3ForCausalLM(tf.Qwen3Config(**_shared()))
    if kind == "mistral":
        return tf.MistralForCausalLM(tf.MistralConfig(**_shared(sliding_window=WINDOW)))
    if kind == "gemma3":
        mixed = ["sliding_attention", "full_attention"] * 2
        return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**_shared(sliding_window=WINDOW, layer_types=mixed)))
    if kind == "gemma2":
        config = tf.Gemma2Config(**_shared(sliding_window=WINDOW, attn_logit_softcapping=5.0, query_pre_attn_scalar=16))
        return tf.Gemma2ForCausalLM(config)
    if kind == "gpt_oss":
        config = tf.GptOssConfig(**_shared(sliding_window=WINDOW, num_local_experts=3, num_experts_per_tok=2))
        return tf.GptOssForCausalLM(config)
    if kind == "gpt_neox":
        return tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**_shared(rotary_pct=0.5)))
    if kind == "bloom":
        return tf.BloomForCausalLM(
            tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=2, eos_token_id=2)
        )
    if kind == "mamba":
        config = tf.MambaConfig(vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2, eos_token_id=2)
        return tf.MambaForCausalLM(config)
    if kind == "phi3":
        near, factors = 40, [1.0 + i for i in range(8)]
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": factors}
        rope |= {"original_max_position_embeddings": near, "partial_rotary_factor": 1.0}
        shape = _shared(hidden_size=64, rope_parameters=rope, original_max_position_embeddings=near)
        config = tf.Phi3Config(**shape)
        return tf.Phi3ForCausalLM(config)
    if kind == "llama4":
        config = tf.Llama4TextConfig(
            **_shared(intermediate_size_mlp=64, num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=WINDOW)
        )
        return tf.Llama4ForCausalLM(config)
    raise ValueError(kind)


def save_model(kind: str, folder: Path) -> Path:
    """Save a model of `kind` whose weights are drawn wide enough for varied greedy text."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = make_model(kind)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim >= 2:
                    weight.copy_(
                        torch.randn(weight.shape) * (1.0 if "embed" in name else 1.6 / weight.shape[-1] ** 0.5)
                    )
                elif "sinks" in name:
                    weight.copy_(torch.randn(weight.shape))
    model.save_pretrained(folder)
    make_tiny_tokenizer(VOCAB).save_pretrained(folder)
    return folder
