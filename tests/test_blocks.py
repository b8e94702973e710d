"""Layers of chosen blocks against transformers' own layers, whole and step by step; options, routing, starts."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, common_config, make_case, make_document
from head_checks import EXACT, NEAR, cached_drafts, row_loss
from planning import SMALL, batch, kept_bytes, parts
from reference import Document
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.errors import DraftsmithError
from draftsmith.heads.base import rms_norm
from draftsmith.heads.blocks import layer_parts, make_layer
from draftsmith.heads.blocks_mlp import Experts
from draftsmith.heads.costs import head_costs, planned_head
from draftsmith.heads.layer import DecoderLayer
from draftsmith.heads.mtp import MtpHead
from draftsmith.heads.mtp_modules import MtpConfig
from draftsmith.heads.vocab import DraftVocab
from draftsmith.train import estimate
from draftsmith.train.optimizer import is_hidden_matrix

HIDDEN, ROWS = 24, 11
VOCAB = DraftVocab(torch.arange(40), 40)
COMMON = {
    "hidden_size": HIDDEN, "intermediate_size": 20, "num_hidden_layers": 2, "vocab_size": 40, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256, "num_attention_heads": 4, "pad_token_id": None,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0,
    "mscale_all_dim": 0.7,
}  # fmt: skip
LATENT = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
SIGMOID = {
    "n_routed_experts": 8, "moe_intermediate_size": 9, "num_experts_per_tok": 3, "routed_scaling_factor": 1.7,
    "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 0,
}  # fmt: skip
OUR_SIGMOID = {
    "kind": "experts", "router": "sigmoid", "count": 8, "intermediate_size": 9, "top_k": 3, "scaling": 1.7,
    "groups": 4, "top_groups": 2, "shared_size": 18, "normalise": True,
}  # fmt: skip
SOFTMAX = {"num_experts": 6, "moe_intermediate_size": 9, "num_experts_per_tok": 2, "norm_topk_prob": True}
OUR_SOFTMAX = {
    "kind": "experts", "router": "softmax", "count": 6, "intermediate_size": 9, "top_k": 2, "normalise": True
}  # fmt: skip

# transformers' module and class, values of its config, and of ours
LAYERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "Llama", {"num_key_value_heads": 2, "head_dim": 8}, {}),
    "qwen2, MiMo": ("qwen2", "Qwen2", {"num_key_value_heads": 2}, {"attention": {"bias": True}, "head_dim": 6}),
    "qwen3": ("qwen3", "Qwen3", {"num_key_value_heads": 2, "head_dim": 8}, {"attention": {"qk_norm": True}}),
    "qwen3-moe": (
        "qwen3_moe", "Qwen3Moe", {"num_key_value_heads": 2, "head_dim": 8, **SOFTMAX, "norm_topk_prob": False},
        {"attention": {"qk_norm": True}, "mlp": {**OUR_SOFTMAX, "normalise": False}},
    ),
    "qwen3-next": (
        "qwen3_next", "Qwen3Next",
        {"num_key_value_heads": 2, "head_dim": 8, "layer_types": ["full_attention"] * 2, "partial_rotary_factor": 0.5,
         "shared_expert_intermediate_size": 7, **SOFTMAX},
        {"attention": {"qk_norm": True, "gate": True, "partial_rotary_factor": 0.5},
         "mlp": {**OUR_SOFTMAX, "shared_size": 7, "shared_gate": True}},
    ),
    "qwen3.5": (
        "qwen3_5", "Qwen3_5Text",
        {"num_key_value_heads": 2, "head_dim": 8, "layer_types": ["full_attention"] * 2, "partial_rotary_factor": 0.5},
        {"attention": {"qk_norm": True, "gate": True, "partial_rotary_factor": 0.5}},
    ),
    "glm-4.5": (
        "glm4_moe", "Glm4Moe",
        {"num_key_value_heads": 2, "head_dim": 8, "attention_bias": True, "use_qk_norm": True, **SIGMOID,
         "partial_rotary_factor": 0.5},
        {"attention": {"qk_norm": True, "bias": True, "partial_rotary_factor": 0.5}, "mlp": OUR_SIGMOID},
    ),
    "deepseek-v3": (
        "deepseek_v3", "DeepseekV3",
        {"num_key_value_heads": 4, "q_lora_rank": 12, "v_head_dim": 7, **LATENT, **SIGMOID, "rope_parameters": YARN},
        {"attention": {"kind": "latent", **LATENT, "q_lora_rank": 12, "v_head_dim": 7}, "mlp": OUR_SIGMOID,
         "head_dim": 10, "num_key_value_heads": 4, "rope": YARN},
    ),
    "deepseek-v3, dense, wide values, biases": (
        "deepseek_v3", "DeepseekV3",
        {"num_key_value_heads": 4, "q_lora_rank": None, "v_head_dim": 13, **LATENT, "first_k_dense_replace": 2,
         "attention_bias": True},
        {"attention": {"kind": "latent", **LATENT, "v_head_dim": 13, "bias": True}, "head_dim": 13,
         "num_key_value_heads": 4},
    ),
}  # fmt: skip
_ONE_PLUS = ("qwen3_next", "qwen3_5")
"""Norms multiply by 1 + w."""


def block_config(**values: Any) -> MtpConfig:
    """A head's config with a layer of the given blocks."""
    rest = {"hidden_size": HIDDEN, "intermediate_size": 20, "rms_norm_eps": 1e-6, **values}
    for field, kind in (("attention", "standard"), ("mlp", "gated")):
        rest[field] = {"kind": kind, **rest.get(field, {})}
    return MtpConfig.from_dict(common_config("mtp", VOCAB, **rest))


class Pair:
    """transformers' layer with random weights, and ours with the same ones."""

    def __init__(self, name: str) -> None:
        module, prefix, theirs, ours = LAYERS[name]
        code = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        config = getattr(
            importlib.import_module(f"transformers.models.{module}.configuration_{module}"), f"{prefix}Config"
        )(**{**COMMON, **theirs})
        config._attn_implementation = "sdpa"
        stem = prefix.removesuffix("Text")
        torch.manual_seed(3)
        self.theirs = getattr(code, f"{stem}DecoderLayer")(config, 1).eval()
        self.rotary = getattr(code, f"{prefix}RotaryEmbedding", None) or getattr(code, f"{stem}RotaryEmbedding")
        self.rotary = self.rotary(config)
        with torch.no_grad():
            for key, x in self.theirs.state_dict().items():
                scale = 0.3 if x.ndim == 1 else 1.2 / x.shape[-1] ** 0.5
                x.copy_((x.mean() if "norm" in key else 0.0) + scale * torch.randn(x.shape))
        state = {k: v + 1.0 if module in _ONE_PLUS and "norm" in k else v for k, v in self.theirs.state_dict().items()}
        bias = state.get("mlp.gate.e_score_correction_bias")
        if bias is not None:
            ours = {**ours, "mlp": {**ours["mlp"], "correction_bias": bias.tolist()}}
        values = block_config(**ours)
        self.ours, self.norm = make_layer(values, HIDDEN), state["input_layernorm.weight"]
        own, parts = dict(self.ours.named_parameters()), layer_parts(values, state)
        with torch.no_grad():
            for part in parts:
                for key, x in zip(part.ours, part.read([state[n] for n in part.native]), strict=True):
                    own[key].copy_(x)
        read = {name for part in parts for name in part.native}
        assert set(state) - read <= {"input_layernorm.weight", "mlp.gate.e_score_correction_bias"}
        assert set(own) == {key for part in parts for key in part.ours}

    @torch.no_grad()
    def run_theirs(self, x: Tensor) -> Tensor:
        """Whole sequences [B, T, H], causal."""
        positions = torch.arange(x.shape[1])[None]
        out = self.theirs(x, position_embeddings=self.rotary(x, positions), position_ids=positions)
        return out[0] if isinstance(out, tuple) else out

    def enter(self, x: Tensor) -> Tensor:
        """What attention reads."""
        return rms_norm(x, self.norm, 1e-6)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [T, H, D] by its formula, fp64: [T, Hq * D]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(len(q), len(q)).triu(1).bool()
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", p, v).flatten(1).float()


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_layer_is_transformers_own(name: str) -> None:
    pair = Pair(name)
    x = torch.randn(1, ROWS, HIDDEN)
    entered = pair.enter(x[0])
    q, k, v = pair.ours.project(entered, torch.arange(ROWS))
    assert q.shape == (ROWS, 4, pair.ours.config.head_dim)
    assert k.shape == v.shape
    rows = torch.tensor([0, 4, 10])
    attended = pair.ours.gated(dense(q, k, v)[rows], entered, rows)
    got = pair.ours.finish(x[0, rows], attended)
    torch.testing.assert_close(got, pair.run_theirs(x)[0, rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_cached_layer_is_transformers_own(name: str) -> None:
    """Two sequences of unlike lengths, then drafts behind the committed rows."""
    pair = Pair(name)
    x = torch.randn(2, ROWS, HIDDEN)
    want = pair.run_theirs(x)
    cache = pair.ours.new_cache(2, ROWS, torch.device("cpu"), torch.float32)
    valid = torch.tensor([6, 4])
    first = x[:, :6]
    got = [pair.ours.cached(cache, pair.enter(first), first, torch.arange(6).expand(2, 6), valid, None)]
    for step in range(3):
        at = valid + step
        row = x[torch.arange(2), at][:, None]
        got.append(pair.ours.cached(cache, pair.enter(row), row, at[:, None], None, None))
    for step, out in enumerate(got):
        expected = want[torch.arange(2), valid - 1 + step][:, None]
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_without_options_it_is_the_plain_layer() -> None:
    for attention in ({}, {"bias": False, "partial_rotary_factor": 1.0}):
        layer = make_layer(block_config(attention=attention), HIDDEN)
        assert type(layer) is DecoderLayer
        assert sorted(dict(layer.named_parameters())) == [
            "down_proj.weight", "gate_proj.weight", "k_proj.weight", "o_proj.weight", "post_attention_layernorm",
            "q_proj.weight", "up_proj.weight", "v_proj.weight",
        ]  # fmt: skip


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention": {"kind": "linear"}}, "attention: kind 'linear' is unknown; there are standard, latent"),
        ({"mlp": {"kind": "moe"}}, "mlp: kind 'moe' is unknown; there are gated, experts"),
        ({"attention": {"qknorm": True}}, "attention: unknown key 'qknorm'; there are qk_norm, bias, gate, partial"),
        ({"mlp": {"top_k": 2}}, "mlp: unknown key 'top_k'; there are none"),
        ({"attention": {"qk_norm": 1}}, "attention: qk_norm = 1 is not of type"),
        ({"attention": {"kind": "latent", **LATENT}}, "attention: key 'v_head_dim' is missing"),
        ({"attention": {"kind": "latent", **LATENT, "v_head_dim": 7}}, "num_key_value_heads = 2 must be 4, head_dim"),
        ({"attention": {"partial_rotary_factor": 0.4}}, "partial_rotary_factor = 0.4 of head_dim 8 rotates 3 numbers"),
        ({"mlp": {**OUR_SIGMOID, "groups": 3}}, "groups = 3 must divide count = 8"),
        ({"mlp": {**OUR_SIGMOID, "top_k": 5}}, "top_k = 5 must be 1 to the 4 experts of 2 groups"),
        ({"mlp": {**OUR_SIGMOID, "correction_bias": [0.1]}}, "correction_bias has 1 numbers, not count = 8"),
        ({"mlp": {**OUR_SOFTMAX, "shared_gate": True}}, "shared_gate = True needs a shared MLP"),
        ({"mlp": {**OUR_SOFTMAX, "router": "tanh"}}, "mlp: router = 'tanh' is not of type"),
        ({"attention": {"kind": ["standard"]}}, r"attention: kind \['standard'\] is unknown; there are standard"),
        ({"mlp": {"kind": None}}, "mlp: kind None is unknown"),
        ({"attention": {"partial_rotary_factor": float("nan")}}, "partial_rotary_factor = nan of head_dim 8 rotates 0"),
        ({"attention": {"partial_rotary_factor": 2.0}}, "partial_rotary_factor = 2.0 of head_dim 8 rotates 0"),
        (
            {"attention": {"kind": "latent", **LATENT, "kv_lora_rank": 0, "v_head_dim": 7}},
            "kv_lora_rank = 0 must be at",
        ),
        (
            {"attention": {"kind": "latent", **LATENT, "q_lora_rank": -1, "v_head_dim": 7}},
            "q_lora_rank = -1 must be at",
        ),
        (
            {"attention": {"kind": "latent", **LATENT, "qk_rope_head_dim": 3, "v_head_dim": 7}},
            "qk_rope_head_dim = 3 mu",
        ),
        ({"mlp": {**OUR_SOFTMAX, "intermediate_size": -2}}, "mlp: intermediate_size = -2 must be at least 1"),
        ({"mlp": {**OUR_SOFTMAX, "shared_size": -3}}, "mlp: shared_size = -3 must be 0, for none, or more"),
        ({"mlp": {**OUR_SOFTMAX, "scaling": float("inf")}}, "mlp: scaling = inf and correction_bias must be finite"),
    ],
)
def test_a_wrong_option_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftsmithError, match=message) as error:
        block_config(**change)
    assert "\n" not in str(error.value)


# --- experts ----------------------------------------------------------------------------------------------------------


def test_routing_by_hand() -> None:
    """Four experts in two groups, one of which is open: the bias chooses, the plain scores weigh."""
    mlp = {
        "kind": "experts", "router": "sigmoid", "count": 4, "intermediate_size": 2, "top_k": 2, "normalise": True,
        "scaling": 3.0, "groups": 2, "top_groups": 1, "correction_bias": [0.0, 0.0, 0.0, 0.5],
    }  # fmt: skip
    experts = Experts(block_config(hidden_size=4, mlp=mlp))
    logit = {0.9: 2.1972246, 0.6: 0.4054651, 0.7: 0.8472979, 0.5: 0.0}
    with torch.no_grad():
        experts.router.copy_(torch.eye(4))
    # scores 0.9 + 0.6 = 1.5 without the bias beat 0.7 + 0.5 = 1.2; with it 1.7
    weights, chosen = experts.route(torch.tensor([[logit[p] for p in (0.9, 0.6, 0.7, 0.5)]]))
    assert chosen.tolist() == [[3, 2]]  # 1.0, then 0.7
    torch.testing.assert_close(weights, torch.tensor([[3 * 0.5 / 1.2, 3 * 0.7 / 1.2]]))


def test_the_correction_bias_stays_wide_and_no_gradient_reaches_it() -> None:
    bias = [1.0 + i / 4096 for i in range(8)]
    experts = Experts(block_config(mlp={**OUR_SIGMOID, "correction_bias": bias})).bfloat16()
    assert experts.correction_bias.tolist() == bias
    assert "correction_bias" not in dict(experts.named_parameters())
    experts.double()(torch.randn(5, HIDDEN, dtype=torch.float64)).sum().backward()
    assert experts.router.grad is not None
    assert float(experts.router.grad.abs().max()) > 0


def test_scores_are_wide_under_autocast() -> None:
    """In bf16 every twentieth row would go through other experts."""
    experts = Experts(block_config(mlp=OUR_SIGMOID))
    rows = torch.randn(400, HIDDEN, generator=torch.Generator().manual_seed(0))
    weights, chosen = experts.route(rows)
    with torch.autocast("cpu", torch.bfloat16):
        found = experts.route(rows)
    assert torch.equal(found[0], weights)
    assert torch.equal(found[1], chosen)


@pytest.mark.parametrize("rows", [0, 1])
def test_experts_without_a_row_have_a_gradient(rows: int) -> None:
    """Ranks add gradients up: all must have the same ones."""
    experts = Experts(block_config(mlp={**OUR_SOFTMAX, "shared_size": 7, "shared_gate": True}))
    experts(torch.randn(rows, HIDDEN)).sum().backward()
    stacks = {name: x.grad for name, x in experts.named_parameters()}
    assert all(grad is not None for grad in stacks.values())
    counts = [sum(bool((expert != 0).any()) for expert in stacks[name]) for name in ("gate_up", "down")]
    assert counts == [2 * rows, 2 * rows]  # top_k


def test_the_router_is_no_matrix_of_muons() -> None:
    kinds = {n: is_hidden_matrix(n, p) for n, p in make_layer(block_config(mlp=OUR_SIGMOID), HIDDEN).named_parameters()}
    assert not kinds["mlp.router"]
    assert not kinds["mlp.gate_up"]
    assert kinds["mlp.shared.up_proj.weight"]


def test_experts_start_the_same_every_time() -> None:
    one, two = (Experts(block_config(mlp=OUR_SOFTMAX)) for _ in range(2))
    for name, x in one.named_parameters():
        assert torch.equal(x, dict(two.named_parameters())[name])
        assert 0.01 < float(x.detach().std()) < 0.03


def test_a_checkpoint_may_hold_experts_one_by_one() -> None:
    """Read and written by the names that published files have; expert e's gate lies before its up."""
    config = block_config(mlp=OUR_SOFTMAX)
    parts = {part.ours: part for part in layer_parts(config, ())}
    shapes = {"gate_proj": (9, HIDDEN), "up_proj": (9, HIDDEN), "down_proj": (HIDDEN, 9)}
    stored = {
        f"mlp.experts.{e}.{x}.weight": torch.randn(shape) for e in range(6) for x, shape in shapes.items()
    }  # fmt: skip
    both, down = parts[("mlp.gate_up",)], parts[("mlp.down",)]
    (stack,) = both.read([stored[name] for name in both.native])
    for e in range(6):
        assert torch.equal(stack[e, :9], stored[f"mlp.experts.{e}.gate_proj.weight"])
        assert torch.equal(stack[e, 9:], stored[f"mlp.experts.{e}.up_proj.weight"])
    (lower,) = down.read([stored[name] for name in down.native])
    assert torch.equal(lower[4], stored["mlp.experts.4.down_proj.weight"])
    for part, ours in ((both, stack), (down, lower)):
        for name, x in zip(part.native, part.write([ours]), strict=True):
            assert torch.equal(x, stored[name]), name


# --- in a head --------------------------------------------------------------------------------------------------------

IN_HEADS = {
    "gate, norms, partial": {"attention": {"kind": "standard", "qk_norm": True, "gate": True, "bias": True,
                                           "partial_rotary_factor": 0.5}},
    "latent, experts": {"attention": {"kind": "latent", **LATENT, "q_lora_rank": 12, "v_head_dim": 7},
                        "mlp": OUR_SIGMOID, "head_dim": 10, "num_key_value_heads": 4, "rope": YARN},
    "gate in modules": {"attention": {"kind": "standard", "gate": True}, "mlp": OUR_SOFTMAX, "modules": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", IN_HEADS)
@torch.no_grad()
def test_a_head_of_blocks_trains_as_it_decodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's loss at a step is the cross-entropy of the cached draft behind it (invariant 2); packed = alone."""
    monkeypatch.setitem(FAMILIES["mtp"].variants, name, IN_HEADS[name])
    case = make_case("mtp", name)
    doc, rows = make_document(case, [True] * 14, 5), [1, 2, 5, 8]
    drafts = cached_drafts(case, doc, rows, case.config.steps)
    known = next(i for i, t in enumerate(doc.tokens) if t in case.ids)
    for b, row in enumerate(rows):
        for s, (logits, _) in enumerate(drafts):
            tokens = list(doc.tokens)
            tokens[row + 2 + s] = doc.tokens[known]
            label = torch.tensor(case.ids.index(doc.tokens[known]))
            loss = row_loss(case, Document(tokens, doc.answer, doc.features, doc.last), row, s)
            torch.testing.assert_close(loss, F.cross_entropy(logits[b], label), **NEAR)
    # not bit for bit, as elsewhere: an expert multiplies its rows together, whosever they are
    other = [make_document(case, [True] * 9, seed) for seed in (6, 7)]
    for row, s in ((2, 0), (5, 2)):
        torch.testing.assert_close(row_loss(case, doc, row, s, other), row_loss(case, doc, row, s), **EXACT)


# --- in a plan --------------------------------------------------------------------------------------------------------

PLANNED = {
    "gate, norms": {"attention": {"kind": "standard", "gate": True, "qk_norm": True, "bias": True}},
    "latent": {"attention": {"kind": "latent", "kv_lora_rank": 48, "q_lora_rank": 64, "qk_nope_head_dim": 16,
                             "qk_rope_head_dim": 8, "v_head_dim": 16}, "num_key_value_heads": 6, "head_dim": 24},
    "experts": {"mlp": {"kind": "experts", "router": "softmax", "count": 8, "intermediate_size": 64, "top_k": 3,
                        "normalise": True, "shared_size": 80, "shared_gate": True}},
}  # fmt: skip
PLANNED["latent, experts, modules"] = {**PLANNED["latent"], **PLANNED["experts"], "modules": 3}


def planned(name: str, *, weights: bool) -> Any:
    head: Any = planned_head(SMALL, "mtp", layer_ids=[], steps=3, draft_vocab_size=256, options=PLANNED[name])
    if weights:
        head = MtpHead(head.config, DraftVocab(torch.arange(256), SMALL.vocab))
        with torch.no_grad():
            for weight in head.parameters():
                weight.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(weight.numel()))
    return head


def test_costs_of_blocks_by_hand() -> None:
    h, i, out = SMALL.hidden, SMALL.intermediate, 256 * SMALL.hidden
    q, kv, entry = 96, 32, 2 * h * h
    mixture = 8 * h + 3 * 3 * 64 * h + 3 * 80 * h + h  # router, three of the eight experts, the shared one, its gate
    experts = head_costs(planned("experts", weights=False))
    assert experts.step == entry + h * (2 * q + 2 * kv) + mixture + out
    assert experts.params == experts.step - out + 5 * 3 * 64 * h + 5 * h  # the other experts, norms
    qkv = 64 * h + 6 * 24 * 64 + h * (48 + 8) + 48 * 6 * 32
    latent = head_costs(planned("latent", weights=False))
    assert (latent.train_all, latent.step) == (entry + qkv, entry + qkv + 6 * 16 * h + 3 * h * i + out)
    chain = head_costs(planned("latent, experts, modules", weights=False))
    assert chain.train_rows == 6 * 16 * h + mixture  # of the last module, what makes no keys
    assert chain.train_all == 3 * (entry + qkv) + 2 * chain.train_rows


@pytest.mark.parametrize("name", PLANNED)
def test_operations_and_memory_of_blocks_are_what_torch_counts(name: str) -> None:
    head = planned(name, weights=True)
    packed = batch(head, SMALL, documents=3, length=64, prompt=20)
    supervised = int(head.supervised_rows(packed)[0].sum())
    for dtype, width in ((torch.float32, 4), (torch.bfloat16, 2)):
        found = estimate.activation_bytes(head, estimate.Rows(192, supervised), width)
        if width == 2:  # autocast's copies of the weights, which a plan counts as `weights`
            found += 2 * sum(p.numel() for p in head.parameters())
        assert found == pytest.approx(kept_bytes(head, packed, parts(SMALL), dtype), rel=0.12)
    with FlopCounterMode(display=False) as counter:
        torch.stack([s.num for s in head.losses(packed, parts(SMALL))]).sum().backward()
    counted = head_costs(head).train_flops(supervised / 192, 32) * 192
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.1)
