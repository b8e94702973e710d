"""What each engine loads, held against tables that were written by hand from the engines' sources."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from draftsmith.errors import DraftsmithError
from draftsmith.heads.eagle1 import eagle1_config
from draftsmith.heads.eagle3 import eagle3_config
from draftsmith.heads.eagle31 import eagle31_config
from draftsmith.heads.formats import contracts
from draftsmith.heads.formats.contracts import contract, contracts_of, engines
from draftsmith.heads.formats.contracts_page import contracts_page
from draftsmith.heads.formats.export_layouts import facts_of, layout, layout_names
from draftsmith.heads.medusa import medusa_config
from draftsmith.heads.named import head_names
from draftsmith.heads.vocab import DraftVocab

BUILDERS = {"eagle1": eagle1_config, "eagle3": eagle3_config, "eagle31": eagle31_config, "medusa": medusa_config}
QWEN3_8B = Qwen3Config(
    hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, vocab_size=151936, rms_norm_eps=1e-6, max_position_embeddings=40960, hidden_act="silu",
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
)  # fmt: skip
SMOLLM2 = LlamaConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    head_dim=64, vocab_size=49152, rms_norm_eps=9.999999747378752e-06, max_position_embeddings=8192, hidden_act="silu",
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
)  # fmt: skip
KNOWN = {
    "qwen": (QWEN3_8B, 32000, "Qwen/Qwen3-8B", {
        "target_architectures": ["Qwen3ForCausalLM"],
        "bos_token_id": 151643, "eos_token_id": 151645, "pad_token_id": 151643,
    }),
    "smol": (SMOLLM2, 8192, "HuggingFaceTB/SmolLM2-135M-Instruct", {
        "target_architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }),
}  # fmt: skip


def facts(target: str, family: str, dtype: str = "bfloat16", full: bool = False, **values: Any) -> dict[str, Any]:
    config, size, name, more = KNOWN[target]
    vocab = DraftVocab(torch.arange(config.vocab_size if full else size), config.vocab_size)
    identity = {
        "target_id": name, "target_revision": None, "target_fingerprint": "f", "chat_template_sha256": None,
        "trained_length": 2048,
    }  # fmt: skip
    head = BUILDERS[family](config, vocab, **identity, **values)
    return facts_of(head.to_dict(), dtype=dtype, depth=3, **more)


def written(name: str, known: dict[str, Any]) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype of each tensor that an export holds."""
    return {k: (list(x.shape), x.dtype) for k, x in layout(name).tensors(known).items() if x.written}


# --- who loads what ---------------------------------------------------------------------------------------------------

PAIRS = {
    "vllm": {"eagle1": "eagle1-vllm", "eagle2": "eagle1-vllm", "hass": "eagle1-vllm", "eagle3": "eagle3",
             "eagle3.1": "eagle3", "medusa1": "medusa-vllm", "medusa2": "medusa-vllm", "mtp": "native-mtp"},
    "sglang": {"eagle1": "eagle1-sglang", "eagle2": "eagle1-sglang", "hass": "eagle1-sglang", "eagle3": "eagle3",
               "eagle3.1": "eagle3", "mtp": "native-mtp"},
    "tensorrt-llm": {"eagle3": "eagle3", "eagle3.1": "eagle3", "medusa1": "medusa-tgi", "medusa2": "medusa-tgi",
                     "mtp": "native-mtp"},
    "tgi": {"medusa1": "medusa-tgi", "medusa2": "medusa-tgi"},
    "speculators": {"eagle3": "speculators-eagle3", "eagle3.1": "speculators-eagle3"},
}  # fmt: skip


def test_every_pair_of_engine_and_head_has_a_row() -> None:
    assert engines() == sorted(PAIRS)
    for engine, pairs in PAIRS.items():
        for head in head_names():
            found = contract(engine, head)
            assert (found.engine, found.head) == (engine, head)
            assert found.supported == (head in pairs)
            if found.supported:
                assert found.layout.name == pairs[head]
                assert found.method
            else:
                assert found.reason
                assert "\n" not in found.reason
    used = {name for pairs in PAIRS.values() for name in pairs.values()}
    assert layout_names() == sorted(used), "every layout has an engine"


def test_a_family_stands_for_its_first_head() -> None:
    assert contract("vllm", "eagle31").head == "eagle3.1"
    assert contract("tgi", "medusa").head == "medusa1"
    assert [one.engine for one in contracts_of("medusa1")] == ["tensorrt-llm", "tgi", "vllm"]
    assert contracts_of("hydra") == []


def test_a_head_without_a_row_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a user has added."""
    monkeypatch.setattr(contracts, "head_names", lambda: ["mine"])
    assert contract("vllm", "mine").reason == "configs/engines/vllm.yaml has no row for mine"


def test_what_is_unknown_or_unsupported_says_what_there_is() -> None:
    with pytest.raises(DraftsmithError, match=r"unknown engine 'llama.cpp'; there are: sglang, speculators, .*vllm"):
        contract("llama.cpp", "eagle3")
    with pytest.raises(DraftsmithError, match=r"unknown head 'eagle9'; there are: eagle1"):
        contract("vllm", "eagle9")
    with pytest.raises(DraftsmithError, match=r"SGLang serves no medusa1 heads .*; .* tensorrt-llm, tgi, vllm"):
        _ = contract("sglang", "medusa1").layout
    with pytest.raises(DraftsmithError, match=r"serves no hydra heads .*; the decoder here does"):
        _ = contract("vllm", "hydra").method
    with pytest.raises(DraftsmithError, match="unknown layout 'x'"):
        layout("x")


# --- EAGLE-3 ----------------------------------------------------------------------------------------------------------

QWEN_EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
    "hidden_size": 4096, "target_hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 1,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "rms_norm_eps": 1e-06, "attention_bias": False, "mlp_bias": False, "vocab_size": 151936, "draft_vocab_size": 32000,
    "max_position_embeddings": 40960, "rope_theta": 1000000, "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645, "pad_token_id": 151643,
    "use_cache": True, "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
    "bias": False, "num_aux_hidden_states": 3, "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
    "eagle_config": {
        "use_aux_hidden_state": True, "norm_before_fc": False, "eagle_aux_hidden_state_layer_ids": [1, 17, 32],
    },
}  # fmt: skip
QWEN_EAGLE3_TENSORS = {
    "fc.weight": ([4096, 12288], "weights"),
    "midlayer.input_layernorm.weight": ([4096], "weights"),
    "midlayer.hidden_norm.weight": ([4096], "weights"),
    "midlayer.self_attn.q_proj.weight": ([4096, 8192], "weights"),
    "midlayer.self_attn.k_proj.weight": ([1024, 8192], "weights"),
    "midlayer.self_attn.v_proj.weight": ([1024, 8192], "weights"),
    "midlayer.self_attn.o_proj.weight": ([4096, 4096], "weights"),
    "midlayer.post_attention_layernorm.weight": ([4096], "weights"),
    "midlayer.mlp.gate_proj.weight": ([12288, 4096], "weights"),
    "midlayer.mlp.up_proj.weight": ([12288, 4096], "weights"),
    "midlayer.mlp.down_proj.weight": ([4096, 12288], "weights"),
    "norm.weight": ([4096], "weights"),
    "lm_head.weight": ([32000, 4096], "weights"),
    "d2t": ([32000], "int64"),
    "t2d": ([151936], "bool"),
}


def test_the_portable_eagle3_folder_for_qwen3_8b() -> None:
    known = facts("qwen", "eagle3")
    assert layout("eagle3").values(known) == QWEN_EAGLE3
    assert written("eagle3", known) == QWEN_EAGLE3_TENSORS
    assert [one.engine for one in contracts_of("eagle3", known) if one.layout.name == "eagle3"] == [
        "sglang", "tensorrt-llm", "vllm",
    ]  # fmt: skip


def test_the_portable_eagle3_folder_for_the_default_target() -> None:
    known = facts("smol", "eagle3", "float32")
    assert layout("eagle3").values(known) == {
        **QWEN_EAGLE3,
        "hidden_size": 576, "target_hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "rms_norm_eps": 9.999999747378752e-06, "vocab_size": 49152,
        "draft_vocab_size": 8192, "max_position_embeddings": 8192, "rope_theta": 100000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}, "torch_dtype": "float32",
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "eagle_aux_hidden_state_layer_ids": [2, 15, 27],
        "eagle_config": {**QWEN_EAGLE3["eagle_config"], "eagle_aux_hidden_state_layer_ids": [1, 14, 26]},
    }  # fmt: skip
    # as vLLM loaded it on a CPU
    assert written("eagle3", known) == {
        "d2t": ([8192], "int64"),
        "fc.weight": ([576, 1728], "weights"),
        "lm_head.weight": ([8192, 576], "weights"),
        "midlayer.hidden_norm.weight": ([576], "weights"),
        "midlayer.input_layernorm.weight": ([576], "weights"),
        "midlayer.mlp.down_proj.weight": ([576, 1536], "weights"),
        "midlayer.mlp.gate_proj.weight": ([1536, 576], "weights"),
        "midlayer.mlp.up_proj.weight": ([1536, 576], "weights"),
        "midlayer.post_attention_layernorm.weight": ([576], "weights"),
        "midlayer.self_attn.k_proj.weight": ([192, 1152], "weights"),
        "midlayer.self_attn.o_proj.weight": ([576, 576], "weights"),
        "midlayer.self_attn.q_proj.weight": ([576, 1152], "weights"),
        "midlayer.self_attn.v_proj.weight": ([192, 1152], "weights"),
        "norm.weight": ([576], "weights"),
        "t2d": ([49152], "bool"),
    }


def test_eagle31_adds_its_flags_and_a_norm_for_each_state() -> None:
    known = facts("qwen", "eagle31")
    assert layout("eagle3").values(known) == {**QWEN_EAGLE3, "fc_norm": True, "norm_output": True}
    norms = {f"fc_norm.{i}.weight": ([4096], "weights") for i in range(3)}
    assert written("eagle3", known) == {**QWEN_EAGLE3_TENSORS, **norms}


def test_a_whole_vocabulary_has_no_map() -> None:
    """vLLM has no parameter for it then, and an unexpected name stops it."""
    known = facts("qwen", "eagle3", full=True)
    found = written("eagle3", known)
    assert found["lm_head.weight"] == ([151936, 4096], "weights")
    assert not {"d2t", "t2d"} & found.keys()
    assert not {"d2t", "t2d"} & layout("eagle3").tensors(known).keys(), "and one that is there is unexpected"


def test_rope_is_written_in_its_old_and_its_new_form() -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    found = layout("eagle3").values(facts("qwen", "eagle3", rope=rope))
    assert found["rope_parameters"] == rope
    assert found["rope_theta"] == 500000.0
    assert found["rope_scaling"] == {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


def test_what_must_not_be_there_is_said() -> None:
    needs = {name: {k for k, x in layout(name).tensors(known).items() if x.need == "forbidden"} for name, known in {
        "eagle3": facts("qwen", "eagle3"), "eagle1-vllm": facts("qwen", "eagle1"),
        "eagle1-sglang": facts("qwen", "eagle1"), "medusa-vllm": facts("qwen", "medusa"),
    }.items()}  # fmt: skip
    assert needs == {
        "eagle3": {"input_norm.weight"},
        "eagle1-vllm": {"fc.bias", "layers.0.input_layernorm.weight", "norm.weight"},
        "eagle1-sglang": {"layers.0.input_layernorm.weight", "norm.weight"},
        "medusa-vllm": {"token_map"},
    }


def test_the_speculators_folder_for_qwen3_8b() -> None:
    known = facts("qwen", "eagle3")
    assert layout("speculators-eagle3").values(known) == {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "draft_vocab_size": 32000, "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False,
        "norm_output": False, "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
        "embed_requires_grad": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformer_layer_config": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
            "intermediate_size": 12288, "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-06, "max_position_embeddings": 40960,
            "rope_theta": 1000000, "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}, "attention_bias": False,
            "mlp_bias": False, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 151643,
            "eos_token_id": 151645, "pad_token_id": 151643,
        },
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
            ],
            "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
        },
    }  # fmt: skip
    same = {name.replace("midlayer.", "layers.0."): x for name, x in QWEN_EAGLE3_TENSORS.items()}
    assert written("speculators-eagle3", known) == {**same, "embed_tokens.weight": ([151936, 4096], "weights")}


def test_a_layout_that_names_the_target_needs_it() -> None:
    known = {name: x for name, x in facts("qwen", "eagle3").items() if name != "target_architectures"}
    with pytest.raises(DraftsmithError, match=r"speculators EAGLE-3 needs target_architectures.*--model"):
        layout("speculators-eagle3").values(known)
    less = {name: x for name, x in known.items() if not name.endswith("token_id")}
    assert layout("eagle3").values(less) == {k: x for k, x in QWEN_EAGLE3.items() if not k.endswith("token_id")}


# --- EAGLE-1 and Medusa -----------------------------------------------------------------------------------------------

QWEN_EAGLE1 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "vocab_size": 151936, "rms_norm_eps": 1e-06, "max_position_embeddings": 40960, "rope_theta": 1000000,
    "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}, "attention_bias": False,
    "mlp_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 151643,
    "eos_token_id": 151645, "pad_token_id": 151643,
}  # fmt: skip
QWEN_EAGLE1_TENSORS = {
    "fc.weight": ([4096, 8192], "weights"),
    "layers.0.self_attn.q_proj.weight": ([4096, 4096], "weights"),
    "layers.0.self_attn.k_proj.weight": ([1024, 4096], "weights"),
    "layers.0.self_attn.v_proj.weight": ([1024, 4096], "weights"),
    "layers.0.self_attn.o_proj.weight": ([4096, 4096], "weights"),
    "layers.0.post_attention_layernorm.weight": ([4096], "weights"),
    "layers.0.mlp.gate_proj.weight": ([12288, 4096], "weights"),
    "layers.0.mlp.up_proj.weight": ([12288, 4096], "weights"),
    "layers.0.mlp.down_proj.weight": ([4096, 12288], "weights"),
}


def test_eagle1_folders_for_qwen3_8b() -> None:
    """Class and bias are what vLLM and SGLang differ by."""
    known = facts("qwen", "eagle1")
    assert layout("eagle1-vllm").values(known) == QWEN_EAGLE1
    assert written("eagle1-vllm", known) == QWEN_EAGLE1_TENSORS
    assert layout("eagle1-sglang").values(known) == {**QWEN_EAGLE1, "architectures": ["LlamaForCausalLMEagle"]}
    assert written("eagle1-sglang", known) == {**QWEN_EAGLE1_TENSORS, "fc.bias": ([4096], "weights")}


def test_medusa_folders_for_qwen3_8b() -> None:
    known = facts("qwen", "medusa", steps=4)
    assert layout("medusa-vllm").values(known) == {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": 4096, "vocab_size": 151936,
        "num_heads": 4, "num_hidden_layers": 1, "truncated_vocab_size": 151936, "medusa_fc_bias": True,
        "original_lm_head": False, "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert written("medusa-vllm", known) == {
        **{f"blocks.{i}.layers.0.weight": ([4096, 4096], "weights") for i in range(4)},
        **{f"blocks.{i}.layers.0.bias": ([4096], "weights") for i in range(4)},
        **{f"lm_heads.{i}.weight": ([151936, 4096], "weights") for i in range(4)},
    }
    assert layout("medusa-tgi").values(known) == {
        "base_model_name_or_path": "Qwen/Qwen3-8B", "medusa_num_heads": 4, "medusa_num_layers": 1,
    }  # fmt: skip
    assert written("medusa-tgi", known) == {
        **{f"{i}.0.linear.weight": ([4096, 4096], "weights") for i in range(4)},
        **{f"{i}.0.linear.bias": ([4096], "weights") for i in range(4)},
        **{f"{i}.1.weight": ([151936, 4096], "weights") for i in range(4)},
    }


def test_medusa_folders_for_the_default_target() -> None:
    known = facts("smol", "medusa", "float32", steps=3, blocks=2)
    assert layout("medusa-vllm").values(known) == {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": 576, "vocab_size": 49152,
        "num_heads": 3, "num_hidden_layers": 2, "truncated_vocab_size": 49152, "medusa_fc_bias": True,
        "original_lm_head": False, "max_position_embeddings": 8192, "torch_dtype": "float32",
    }  # fmt: skip
    assert written("medusa-tgi", known) == {
        **{f"{i}.{j}.linear.weight": ([576, 576], "weights") for i in range(3) for j in range(2)},
        **{f"{i}.{j}.linear.bias": ([576], "weights") for i in range(3) for j in range(2)},
        **{f"{i}.2.weight": ([49152, 576], "weights") for i in range(3)},
    }


def test_no_two_keys_of_vllms_medusa_become_one() -> None:
    """Its config class renames every key with "num" and "heads", or "num" and "layers", in it."""
    keys = layout("medusa-vllm").config
    for part in ("heads", "layers"):
        assert len([key for key in keys if "num" in key and part in key]) == 1


# --- limits -----------------------------------------------------------------------------------------------------------

LIMITS: list[tuple[str, str, str, dict[str, Any], str]] = [
    ("vllm", "eagle1", "eagle1", {"fc_bias": True}, "fc_bias = True .*head.options.fc_bias=false"),
    ("vllm", "eagle1", "eagle1", {"embed_scale": 64.0}, "embed_scale = 64.0 instead of 1.0"),
    ("vllm", "eagle3", "eagle3", {"hidden_act": "gelu"}, "hidden_act = 'gelu' instead of 'silu'"),
    ("vllm", "eagle3.1", "eagle31", {"rope_type": "dynamic"}, "rope_type = 'dynamic' instead of 'default' or"),
    ("sglang", "eagle1", "eagle1", {"embed_scale": 64.0}, "embed_scale"),
    ("sglang", "eagle3", "eagle3", {"norm_before_residual": True}, "norm_before_residual = True instead of False"),
    ("sglang", "eagle3", "eagle3", {"aux_count": 2}, "aux_count = 2 instead of 3"),
    ("tensorrt-llm", "eagle3", "eagle3", {"norm_before_residual": True}, "norm_before_residual = True"),
    ("tensorrt-llm", "eagle3", "eagle3", {"aux_count": 4}, "aux_count = 4"),
    ("speculators", "eagle3", "eagle3", {"rope_type": "longrope"}, "rope_type = 'longrope'"),
    ("vllm", "mtp", "eagle3", {"native_layout": None}, "native_layout = None instead of 'deepseek_v3'"),
    ("tensorrt-llm", "mtp", "eagle3", {"native_layout": "mimo"}, "native_layout = 'mimo' instead of 'deepseek_v3'"),
    ("tgi", "eagle3", "eagle3", {}, "unsupported: TGI drafts with Medusa"),
]


@pytest.mark.parametrize(("engine", "head", "family", "changes", "said"), LIMITS)
def test_a_head_outside_an_engines_limits(
    engine: str, head: str, family: str, changes: dict[str, Any], said: str
) -> None:
    (found,) = contract(engine, head).problems({**facts("qwen", family), **changes})
    assert re.search(said, found)


def test_a_head_within_the_limits_has_no_problem() -> None:
    for engine, pairs in PAIRS.items():
        for head, family in {
            "eagle1": "eagle1",
            "eagle3": "eagle3",
            "eagle3.1": "eagle31",
            "medusa1": "medusa",
        }.items():
            if head in pairs:
                assert contract(engine, head).problems({**facts("qwen", family), "embed_scale": 1.0}) == []
    # vLLM alone computes it
    known = facts("qwen", "eagle3", norm_before_residual=True)
    assert [one.engine for one in contracts_of("eagle3", known)] == ["speculators", "vllm"]


def test_docs_show_the_contracts() -> None:
    page = Path(__file__).resolve().parent.parent / "docs" / "engines.md"
    assert page.read_text("utf-8") == contracts_page(), (
        "write what draftsmith.heads.formats.contracts_page.contracts_page() returns into docs/engines.md"
    )
