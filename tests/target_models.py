"""Tiny random targets of every architecture that is promised to work, with the suite's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny import EOS, make_tiny_tokenizer

VOCAB, WINDOW, LAYERS = 320, 8, 4
_SHAPES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_OLD_NAMES = {
    "n_embd": 48, "n_layer": LAYERS, "n_head": 4, "n_positions": 256, "vocab_size": VOCAB, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.2, 1.4], "long_factor": [1.0, 2.0, 3.0],
    "original_max_position_embeddings": 128, "partial_rotary_factor": 0.5,
}  # fmt: skip
_GEMMA = {"head_dim": 16, "tie_word_embeddings": True}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_CLASSES = {"GPT2": "LMHeadModel"}

# By name: the model class, and what its config says beside _SHAPES.
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "gemma": ("Gemma", _GEMMA),
    "gemma2": ("Gemma2", {**_GEMMA, "sliding_window": WINDOW, "query_pre_attn_scalar": 16,
                          "attn_logit_softcapping": 5.0, "final_logit_softcapping": 20.0}),
    "gemma3": ("Gemma3", {**_GEMMA, "sliding_window": WINDOW, "query_pre_attn_scalar": 16,
                          "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "vaultgemma": ("VaultGemma", {**_GEMMA, "sliding_window": WINDOW, "query_pre_attn_scalar": 16,
                                  "final_logit_softcapping": 20.0}),
    "gemma4": ("Gemma4", {**_GEMMA, "sliding_window": WINDOW, "global_head_dim": 16, "num_kv_shared_layers": 0,
                          "hidden_size_per_layer_input": 0, "final_logit_softcapping": 20.0}),
    "gemma3-images": ("Gemma3", {**_GEMMA, "sliding_window": WINDOW}),
    "phi3": ("Phi3", {}),
    "phi4-mini": ("Phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 128}),
    "gpt_oss": ("GptOss", {"head_dim": 16, "sliding_window": WINDOW, **_EXPERTS}),
    "mixtral": ("Mixtral", _EXPERTS),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                               "moe_intermediate_size": 32}),
    "qwen3_next": ("Qwen3Next", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                                 "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
                                 "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                                 "linear_value_head_dim": 8}),
    "granite": ("Granite", {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
                            "attention_multiplier": 0.1}),
    "granitemoe": ("GraniteMoe", {"embedding_multiplier": 3.0, "logits_scaling": 4.0, **_EXPERTS}),
    "hyperclovax": ("HyperCLOVAX", {"embedding_multiplier": 5.0, "logits_scaling": 0.3}),
    "cohere": ("Cohere", {"logit_scale": 0.0625, "tie_word_embeddings": True}),
    "cohere2": ("Cohere2", {"logit_scale": 0.25, "sliding_window": WINDOW, "tie_word_embeddings": True}),
    "olmo": ("Olmo", {}),
    "olmo2": ("Olmo2", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "smollm3": ("SmolLM3", {}),
    "glm4": ("Glm4", {"head_dim": 12}),
    "nemotron": ("Nemotron", {}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.5}),
    "phimoe": ("Phimoe", _EXPERTS),
    "nanochat": ("NanoChat", {"final_logit_softcapping": 15.0}),
    "minicpm3": ("MiniCPM3", {"scale_emb": 7, "dim_model_base": 12, "q_lora_rank": 16, "kv_lora_rank": 16,
                              "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
                              "num_key_value_heads": 4}),
    "gpt_neox": ("GPTNeoX", {}),
    "falcon": ("Falcon", {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": True}),
    "gpt2": ("GPT2", {}),
    "opt": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 48}),
    "phi": ("Phi", {}),
    "gptj": ("GPTJ", {"rotary_dim": 12}),
}  # fmt: skip
# Those that are refused: output heads that add a bias, embeddings that are normed; by the decoder attention of a
# model's own and layers without keys.
BIASED, NORMED, OWN_ATTENTION, KEYLESS = ("phi", "gptj"), ("nanochat",), ("falcon",), ("qwen3_next",)
TRAINABLE = tuple(name for name in TARGETS if name not in (*BIASED, *NORMED))


def make_model(name: str, **shapes: Any) -> Any:
    """A random model in fp32, drawn wide enough that greedy text is varied and that no norm or scale is plain.

    Args:
        shapes: what its config says otherwise.
    """
    import transformers

    kind, more = TARGETS[name]
    usual = _OLD_NAMES if kind in ("GPT2", "GPTJ") else _SHAPES
    text = f"{kind}Text" if kind in ("Gemma3", "Gemma4") else kind
    config = getattr(transformers, f"{text}Config")(**{**usual, **more, **shapes})
    ends = _CLASSES.get(kind, "ForCausalLM")
    if name == "gemma3-images":
        config = transformers.Gemma3Config(text_config=config.to_dict(), vision_config=_VISION, image_token_index=300)
        ends = "ForConditionalGeneration"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = getattr(transformers, kind + ends)(config)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for key, weight in model.named_parameters():
                drawn = torch.randn(weight.shape, generator=generator)
                if weight.ndim >= 2:
                    embeds = any(word in key for word in ("embed", "wte", "word_embeddings"))
                    weight.copy_(drawn * (1.0 if embeds else 1.6 / weight.shape[-1] ** 0.5))
                elif "norm" in key or "ln_" in key:
                    weight.add_(0.3 * drawn)
                elif "sinks" in key:
                    weight.copy_(drawn)
    return model


def save_target(name: str, folder: Path, **shapes: Any) -> Path:
    """Save a target and its tokenizer as `Target.load` wants them; see `make_model`."""
    model = make_model(name, **shapes)
    tokenizer = make_tiny_tokenizer(VOCAB)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(EOS)
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def change_config(folder: Path, **values: Any) -> None:
    """Lay values over those of a saved model's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
