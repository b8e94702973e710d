"""What can be wrong with a head's directory: a change to a good one, and the cause that doctor must name first.

From the traps of the engines' formats: most of these load without an error, and accept nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import doctor_changes as make
import torch
from doctor_changes import IDS, YARN, Change, both, config, drop, inside, put, tensors

REFUSED, WEAK = "refused", "weak"
PORTABLE = ("vllm", "sglang", "tensorrt-llm")
HALF, LOUD = {"sglang": WEAK}, {"vllm": REFUSED, "tensorrt-llm": REFUSED, "sglang": WEAK}
SILENT = {"vllm": WEAK, "sglang": WEAK, "tensorrt-llm": REFUSED}
"""By engine: SGLang alone reads it; SGLang alone passes over it; only TensorRT-LLM notices."""


def all_of(effect: str, *engines: str) -> dict[str, str]:
    return dict.fromkeys(engines or PORTABLE, effect)


@dataclass(frozen=True)
class Fault:
    """A row.

    Attributes:
        base: the good directory, see doctor_bases.py. change: what is done to it.
        check: which check finds it; text: part of the cause.
        effects: what becomes of each engine that took the good one; those that are left out still load it. {} with a
            finding = a remark.
        noted: whether draftsmith.json stays; a head from elsewhere has none.
        target: values in its config that the target of the good one doesn't have.
    """

    name: str
    base: str
    change: Change
    check: str
    text: str
    effects: dict[str, str] = field(default_factory=lambda: all_of(WEAK))
    noted: bool = True
    target: dict[str, Any] = field(default_factory=dict)


def rows_of(base: str, check: str, *rows: tuple[Any, ...], noted: bool = True) -> Iterator[Fault]:
    """Rows (name, change, text, effects) of one base and check; effects left out = all accept less."""
    for name, change, text, *effects in rows:
        yield Fault(name, base, change, check, text, *effects, noted=noted)


LAYER_IDS = rows_of(
    "eagle3", "layer ids",
    ("nested ids as the top level's", inside("eagle_config", **{IDS: [1, 3, 5]}), "numbers of the top level", HALF),
    ("top level as outputs from 0", config(**{IDS: [0, 2, 4]}), "numbers of the top level", {"vllm": WEAK}),
    ("the places name different layers", inside("eagle_config", **{IDS: [0, 1, 4]}), "which are [1, 2, 5]", HALF),
    ("every id one too deep", make.ids([2, 4, 6]), "the head was trained on [1, 3, 5]"),
    ("no ids at the top level", config(drop=(IDS,)), "no layer ids at the top level", {"vllm": WEAK}),
    ("no ids inside", inside("eagle_config", drop=(IDS,)), "no layer ids in eagle_config", HALF),
    ("an id twice", make.ids([1, 3, 3]), "name a layer twice", {**all_of(WEAK), "vllm": REFUSED}),
    ("ids don't ascend", make.ids([3, 1, 5]), "don't ascend"),
    ("the last state as aux", make.ids([1, 3, 7]), "the target's last state, 7"),
    ("an id beyond the target", make.ids([1, 3, 9]), "aren't inner states", all_of(REFUSED)),
    ("too few ids", make.ids([1, 3], num_aux_hidden_states=2), "fc.weight reads 3 states", all_of(REFUSED)),
    ("another count", config(num_aux_hidden_states=4), "num_aux_hidden_states is 4", {"vllm": REFUSED}),
)  # fmt: skip

D2T = rows_of(
    "eagle3", "d2t",
    ("d2t holds ids", tensors(make.absolute), "holds target ids"),
    ("d2t in bf16", put(d2t=lambda t: t["d2t"].bfloat16()), "d2t is BF16"),
    ("d2t missing", drop("d2t"), "d2t is missing", SILENT),
    ("d2t all zeros", put(d2t=lambda t: t["d2t"] * 0), "all zeros"),
    ("d2t out of range", tensors(make.end_outside), "and the target has 320", all_of(REFUSED)),
    ("d2t twice the same token", tensors(make.twice), "twice to the same token"),
    ("d2t another than t2d", tensors(make.shifted), "d2t and t2d name other tokens"),
    ("d2t another than the head's", both(drop("t2d"), tensors(make.shifted)), "another draft vocabulary"),
    ("d2t of another length", put(d2t=lambda t: t["d2t"][:-1].clone()), "has the shape", all_of(REFUSED)),
)  # fmt: skip

SIZES = [
    *rows_of(
        "eagle3", "draft_vocab_size",
        ("that of the target", config(draft_vocab_size=320), "has 159 rows", all_of(REFUSED)),
        ("left out", config(drop=("draft_vocab_size",)), "left out", {**all_of(REFUSED), "sglang": WEAK}),
        ("output rows cut", tensors(make.fewer_rows), "has 151 rows", all_of(REFUSED)),
    ),
    *rows_of("eagle3", "vocab_size", ("the draft's", config(vocab_size=159), "not the draft's", all_of(REFUSED))),
    Fault(
        "d2t of a whole vocabulary", "eagle3-full", put(d2t=lambda t: torch.zeros(320, dtype=torch.int64)), "d2t",
        "the draft vocabulary is whole", {"vllm": REFUSED},
    ),
]  # fmt: skip

FLAGS = [
    *rows_of(
        "eagle3", "flags",
        ("a norm without its flag", put(input_norm__weight=lambda t: torch.ones(192).bfloat16()),
         "norm_before_fc is false", LOUD),
        ("a flag at one place", config(norm_before_fc=True), "read one or the other", SILENT),
        ("a flag without its norm", both(config(norm_before_fc=True), inside("eagle_config", norm_before_fc=True)),
         "norm_before_fc is true", SILENT),
        ("recycled as another head", config(norm_output=True), "was trained with false"),
        ("another residual", config(norm_before_residual=True), "was trained with false"),
        ("no aux states", inside("eagle_config", use_aux_hidden_state=False), "the target's last state alone"),
        ("biases that aren't there", config(attention_bias=True), "attention_bias is true", SILENT),
        ("biases without their flag", put(midlayer__self_attn__q_proj__bias=lambda t: torch.ones(64).bfloat16()),
         "attention_bias is false", LOUD),
    ),
    *rows_of(
        "eagle3.1", "flags",
        ("norms without their flag", config(fc_norm=False), "fc_norm is false", LOUD),
        ("recycled as EAGLE-3", config(norm_output=False), "was trained with true"),
    ),
    *rows_of("eagle3.1", "names", ("a norm too few", drop("fc_norm.1.weight"), "fc_norm.1.weight is missing", SILENT)),
    *rows_of("speculators", "residual", ("the residual left out", config(drop=("norm_before_residual",)),
                                         "vLLM takes that as true", {"vllm": WEAK})),
    *rows_of("speculators", "verifier", ("a path", inside("speculators_config", verifier={"name_or_path": "./model"}),
                                         "no hub id", {}), noted=False),
    *rows_of("eagle3", "torch_dtype", ("left out", config(drop=("torch_dtype",)), "TensorRT-LLM asks for it",
                                       {"tensorrt-llm": REFUSED})),
    *rows_of("eagle3", "tie", ("tied words", config(tie_word_embeddings=True), "SGLang then reads", HALF)),
]  # fmt: skip

POSITIONS = [
    *rows_of(
        "eagle3", "rope",
        ("another theta", make.rope(rope_theta=1e6), "rope_theta is 1000000.0"),
        ("two forms, two thetas", config(rope_theta=1e6), "engines read one or the other"),
        ("no theta", config(drop=("rope_theta", "rope_parameters")), "engines take 10000, and the head was trained"),
        ("ModelOpt's scaling", both(config(rope_scaling=YARN), inside("rope_parameters", **YARN)), "ModelOpt"),
        ("another scaling", both(config(rope_scaling={"rope_type": "linear", "factor": 2.0}),
                                 inside("rope_parameters", rope_type="linear", factor=2.0)), "rope_type is linear"),
    ),
    *rows_of("eagle3", "rope", ("another theta than the target's", make.rope(rope_theta=1e6), "the target has 50000"),
             ("ModelOpt's own export", both(config(rope_scaling=YARN), inside("rope_parameters", **YARN)), "ModelOpt"),
             noted=False),
    *rows_of(
        "eagle3", "positions",
        ("2048 positions", config(max_position_embeddings=2048), "is 2048, and the target takes 4096"),
        ("no positions", config(drop=("max_position_embeddings",)), "which means 2048"),
    ),
]  # fmt: skip

QUERY = "midlayer.self_attn.q_proj.weight"
TENSORS = [
    *rows_of(
        "eagle3", "names",
        ("no output rows", drop("lm_head.weight"), "lm_head.weight is missing", SILENT),
        ("no norm of the states", drop("midlayer.hidden_norm.weight"), "hidden_norm.weight is missing", SILENT),
        ("a tensor renamed", make.rename(QUERY, "midlayer.self_attn.query.weight"), f"{QUERY} is missing",
         {**SILENT, "vllm": REFUSED}),
        ("a tensor too many", put(extra__weight=lambda t: torch.ones(3).bfloat16()), "extra.weight", {"vllm": REFUSED}),
    ),
    *rows_of("eagle3", "shapes", ("transposed", tensors(make.transposed), "has the shape [128, 32]", all_of(REFUSED))),
    *rows_of(
        "eagle3", "config",
        ("another width", config(intermediate_size=96), "intermediate_size is 96"),
        ("another activation", config(hidden_act="gelu"), "hidden_act is 'gelu'"),
    ),
    *rows_of("eagle3", "dtypes", ("weights in int8", put(fc__weight=lambda t: t["fc.weight"].to(torch.int8)),
                                  "fc.weight is I8", all_of(REFUSED))),
    *rows_of("eagle3", "finite", ("not a number", tensors(make.not_a_number), "fc.weight has NaN")),
    *rows_of(
        "eagle3", "constant",
        ("a matrix of zeros", make.zeroed("midlayer.mlp.down_proj.weight"), "is 0 everywhere"),
        ("a norm of zeros", make.zeroed("norm.weight"), "norm.weight is 0 everywhere"),
    ),
    *rows_of("eagle3", "copies", ("an embedding of its own", put(embed_tokens__weight=lambda t: torch.randn(
        320, 64).bfloat16()), "differs from the target's", HALF)),
]  # fmt: skip

FILES = [
    *rows_of(
        "eagle3", "json",
        ("config cut", make.cut(0.5, "config.json"), "config.json can't be read", all_of(REFUSED)),
        ("config that is a list", make.write("config.json", "[1]"), "config.json can't be read", all_of(REFUSED)),
        ("no config", make.remove("config.json"), "config.json is missing", all_of(REFUSED)),
        ("a record cut", make.cut(0.5, "draftsmith.json"), "draftsmith.json can't be read", all_of(REFUSED)),
        ("a record of no head", make.record(layer_ids="all"), "draftsmith.json is damaged", all_of(REFUSED)),
    ),
    *rows_of(
        "eagle3", "truncated",
        ("weights cut", make.cut(0.7), "it was cut", all_of(REFUSED)),
        ("a header cut", make.cut(0.0001), "can't be read", all_of(REFUSED)),
    ),
    *rows_of("eagle3", "types", ("a word for a number", config(hidden_size="64"), "hidden_size in config.json is '64'",
                                 all_of(REFUSED))),
    *rows_of("eagle3", "index", ("lost tensors", make.write("model.safetensors.index.json", json.dumps(
        {"weight_map": {"lost.weight": "model.safetensors"}})), "lost.weight", all_of(REFUSED))),
    *rows_of("eagle3", "weights", ("no weights", make.remove("model.safetensors"), "no safetensors", all_of(REFUSED))),
    *rows_of(
        "eagle3", "pickle",
        ("pickled weights", make.pickled(keep=False), "aren't opened", all_of(REFUSED)),
        ("a pickle beside", make.pickled(keep=True), "lies beside", {}),
    ),
    *rows_of("eagle3", "files", ("a file of another length", make.longer("config.json"), "config.json has")),
]  # fmt: skip

IDENTITY = [
    *rows_of("eagle3", "target", ("another target", make.record(target_fingerprint="f" * 64), "is another model")),
    *rows_of("eagle3", "template", ("another", make.record(chat_template_sha256="a" * 64), "the chat template was")),
    *rows_of("eagle3", "trained_length", ("none", make.record(trained_length=0), "trained_length is 0")),
]

FOREIGN = [
    *rows_of("eagle3", "layer ids", ("ids only inside, as ModelOpt and SpecForge write", config(drop=(IDS,)),
                                     "take [2, 3, 4]", {"vllm": WEAK}), noted=False),
    *rows_of("eagle3", "architectures", ("a class that vLLM makes out", config(architectures=["LlamaForCausalLM"]),
                                         "knows such a head as LlamaForCausalLMEagle3",
                                         {"sglang": REFUSED, "tensorrt-llm": REFUSED}), noted=False),
    *rows_of("eagle3", "limits", ("a normed residual", config(norm_before_residual=True), "ignores the flag",
                                  {"sglang": WEAK, "tensorrt-llm": WEAK}), noted=False),
    *rows_of("eagle3", "names", ("no width", config(drop=("intermediate_size",)), "has no intermediate_size",
                                 all_of(REFUSED)), noted=False),
    *rows_of("eagle3", "layout", ("names of nobody", both(config(architectures=["Other"]), tensors(make.all_renamed)),
                                  "no layout", all_of(REFUSED)), noted=False),
]  # fmt: skip

EAGLE1 = [
    *rows_of(
        "eagle1-vllm", "names",
        ("a bias for vLLM", put(fc__bias=lambda t: torch.ones(64).bfloat16()), "vLLM's class has none",
         {"vllm": REFUSED}),
        ("a final norm", put(norm__weight=lambda t: torch.ones(64).bfloat16()), "no norm behind", {"vllm": REFUSED}),
    ),
    *rows_of(
        "eagle1-sglang", "names",
        ("a norm before the layer", put(layers__0__input_layernorm__weight=lambda t: torch.ones(64).bfloat16()),
         "no norm before its layer", HALF),
        ("no bias for SGLang", drop("fc.bias"), "as memory left it", HALF),
    ),
    *rows_of("eagle1-sglang", "architectures", ("vLLM's class", config(architectures=["LlamaForCausalLM"]),
                                                "LlamaForCausalLMEagle", {"sglang": REFUSED})),
    Fault("a scaled embedding", "eagle1-vllm", lambda _: None, "limits", "embed_scale = 12.0", {"vllm": WEAK},
          target={"embedding_multiplier": 12.0}),
]  # fmt: skip

VLLM, TGI = {"vllm": REFUSED}, {"tgi": REFUSED, "tensorrt-llm": REFUSED}
MEDUSA = [
    *rows_of(
        "medusa-vllm", "medusa",
        ("a key that vLLM renames", config(medusa_num_heads=2), "overwrites num_heads", VLLM),
        ("fewer heads said", config(num_heads=2), "num_heads is 2", VLLM),
    ),
    *rows_of("medusa-vllm", "flags", ("no biases", tensors(make.without_biases), "medusa_fc_bias is true", VLLM)),
    *rows_of("medusa-vllm", "token_map", ("a map", put(token_map=lambda t: torch.arange(320)), "refuses", VLLM)),
    *rows_of("medusa-vllm", "names", ("a block too few", drop("blocks.1.layers.0.weight"), "is missing", VLLM)),
    *rows_of(
        "medusa-tgi", "medusa",
        ("architectures for TGI", config(architectures=["MedusaModel"]), "TGI takes", {"tgi": REFUSED}),
        ("more heads said", config(medusa_num_heads=5), "medusa_num_heads is 5", TGI),
    ),
    *rows_of("medusa-tgi", "names", ("output rows missing", drop("1.2.weight"), "1.2.weight is missing", TGI)),
]  # fmt: skip

ROWS = [
    *LAYER_IDS, *D2T, *SIZES, *FLAGS, *POSITIONS, *TENSORS, *FILES, *IDENTITY, *FOREIGN, *EAGLE1, *MEDUSA,
]  # fmt: skip
