"""Pieces of the decoder alone: trees, cache, packed linears, the probe at load time, refused requests."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_checks import RandomTreeDrafter, check_lossless, make_truth, random_prompts
from decoder_models import save_model

from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder.cache import TreeCache
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.loop import Request, decode
from draftsmith.eval.decoder.types import TokenTree, chain, unpack_ancestors
from draftsmith.heads.architecture import context
from draftsmith.heads.linear import PackedLinear, can_pack, pack_linears
from draftsmith.heads.target import Target

# --- trees and cache -------------------------------------------------------------------------------------------


def random_trees(seed: int, nodes: int, batch: int = 5) -> TokenTree:
    drafter = RandomTreeDrafter({}, nodes, right=0.0, seed=seed)
    for slot in range(batch):
        drafter.at[slot] = ([], 1)
    tree = drafter.random_tree(torch.arange(batch), nodes)
    tree.tokens = torch.randint(0, 6, tree.tokens.shape, generator=drafter.rng)  # few tokens: twins, many matches
    return tree


@pytest.mark.parametrize("nodes", [1, 2, 9, 20, 64, 65, 150])
def test_ancestors_are_the_path_to_the_root(nodes: int) -> None:
    tree = random_trees(nodes, nodes)
    packed = tree.ancestors()
    assert packed is not None
    assert packed.shape == (5, nodes, -(-nodes // 64))
    seen = unpack_ancestors(packed, nodes)
    for b in range(5):
        for i in range(nodes):
            path, at = {i}, i
            while at > 0:
                at = int(tree.parent[b, at])
                path.add(at)
            assert seen[b, i].nonzero().flatten().tolist() == sorted(path)
    assert chain(torch.zeros(5, nodes, dtype=torch.int64)).ancestors() is None


def test_accepted_rows_are_compacted_together() -> None:
    """Two shape groups, ragged lengths and paths; what lies before and in other sequences stays."""
    shapes = [(2, 4, 4), (1, 4, 6), (2, 4, 4)]
    cache = TreeCache(shapes, 3, 20, torch.device("cpu"), torch.float32)
    assert cache.capacity == 512
    assert [a[0].shape[0] for a in cache.arenas] == [2, 1]
    g = torch.Generator().manual_seed(0)
    for pair in cache.arenas:
        for arena in pair:
            arena.copy_(torch.randn(arena.shape, generator=g))
    before = copy.deepcopy(cache.arenas)
    for row, n in enumerate((4, 9, 2)):
        cache.advance(row, n)
    path = torch.tensor([[0, 2, 5], [0, 0, 0]])
    cache.keep(2, path, torch.tensor([3, 1]), [3, 1])
    assert cache.lengths.tolist() == cache.host_lengths == [7, 10, 2]
    for got, old in zip(cache.arenas, before, strict=True):
        for a, b in zip(got, old, strict=True):
            assert torch.equal(a[:, 0, :, :7], b[:, 0, :, [0, 1, 2, 3, 4, 6, 9]])
            assert torch.equal(a[:, 1, :, :10], b[:, 1, :, :10])
            assert torch.equal(a[:, 2], b[:, 2])
    cache.copy(1, 0, 10)
    assert cache.lengths.tolist() == cache.host_lengths == [10, 10, 2]
    assert torch.equal(cache.arenas[1][1][:, 0, :, :10], before[1][1][:, 1, :, :10])


# --- packed linears ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not can_pack(torch.device("cpu"), torch.float32), reason="this torch has no packed linear")
@pytest.mark.parametrize("shape", [(576, 1536), (576, 192), (64, 320), (37, 51)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_rows_dont_depend_on_their_number(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(*shape, bias=bias)
    packed = PackedLinear(plain, keep=False)
    x = torch.randn(40, shape[0])
    with torch.inference_mode():
        alone = torch.cat([packed(x[i : i + 1]) for i in range(40)])
        torch.testing.assert_close(alone, plain(x), rtol=1e-5, atol=1e-5)
        for rows in (2, 3, 4, 5, 8, 9, 16, 33):
            assert torch.equal(packed(x[:rows]), alone[:rows]), f"{rows} rows"
        assert torch.equal(packed(x[:6].view(1, 2, 3, -1)).view(6, -1), alone[:6])


def test_packing_replaces_every_linear_and_keeps_the_output_heads_weight() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.nn.Linear(8, 3)
    )
    if not can_pack(torch.device("cpu"), torch.float32):
        pytest.skip("this torch has no packed linear")
    x = torch.randn(5, 4)
    want = model(x)
    assert pack_linears(model, keep=model[2]) == 3
    assert model[0].weight is None
    assert model[2].weight is not None
    torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-5)
    assert not can_pack(torch.device("cpu"), torch.float64)
    assert not can_pack(torch.device("cuda"), torch.float32)


class Attention(torch.nn.Module):
    """Three layers that usually read one tensor."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(48, n, bias=bias) for n in (64, 32, 40))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.q_proj(x), self.k_proj(y), self.v_proj(x)), -1)


@pytest.mark.skipif(not can_pack(torch.device("cpu"), torch.float32), reason="this torch has no packed linear")
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_layers_that_read_one_tensor_are_packed_as_one(bias: bool) -> None:
    torch.manual_seed(1)
    plain = Attention(bias)
    packed = copy.deepcopy(plain)
    assert pack_linears(packed, keep=None) == 3
    assert packed.q_proj.shared is packed.v_proj.shared
    x, y = torch.randn(7, 48), torch.randn(7, 48)
    for other in (x, y, x.clone()):  # the same tensor, another one, an equal one
        torch.testing.assert_close(packed(x, other), plain(x, other), rtol=1e-5, atol=1e-5)
    x.mul_(2)  # changed in place since the last call: read again
    torch.testing.assert_close(packed(x, x), plain(x, x), rtol=1e-5, atol=1e-5)
    assert packed.q_proj.shared.input is None
    alone = torch.cat([packed(x[i : i + 1], x[i : i + 1]) for i in range(7)])
    assert torch.equal(packed(x, x), alone)
    for name in ("v_proj", "k_proj", "q_proj"):  # in another order
        torch.testing.assert_close(getattr(packed, name)(x), getattr(plain, name)(x), rtol=1e-5, atol=1e-5)


# --- the probe --------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_target(tiny_folder: Path) -> Any:
    """A target that the test may spoil."""
    return Target.load(str(tiny_folder), dtype=torch.float32, device="cpu")


def refuse(target: Any, message: str) -> None:
    request = Request("r", [5, 6], 3)
    for _ in range(2):  # the second time, too
        with pytest.raises(DraftsmithError, match=message) as error:
            list(decode(target, PlainDrafter(), [request], slots=1, capacity=64))
        assert type(target.model).__name__ in str(error.value)
        assert "\n" not in str(error.value)


def test_a_model_that_ignores_the_attention_interface_is_refused(own_target: Any) -> None:
    """One layer goes its own way, as bloom does: causal among the rows of the pass, whatever the cache says."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    layer = own_target.layers[3].self_attn

    def forward(hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        b, n, _ = hidden_states.shape
        q, k, v = (
            p(hidden_states).view(b, n, -1, 16).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is not None:
            k, v = cache.update(k, v, 3)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=n == k.shape[2], enable_gqa=True)
        return layer.o_proj(out.transpose(1, 2).reshape(b, n, -1)), None

    layer.forward = forward
    refuse(own_target, r"6 of 7 layers call the attention interface; the others have attention of their own")


def test_a_model_that_counts_positions_itself_is_refused(own_target: Any) -> None:
    """One layer turns its queries and keys by the row's number in the pass, whatever position_ids say."""
    layer, rotary = own_target.layers[3].self_attn, own_target.body.rotary_emb
    forward = layer.forward

    def counting(hidden_states: Any, position_embeddings: Any, *args: Any, **kwargs: Any) -> Any:
        rows = torch.arange(hidden_states.shape[1])[None]
        return forward(hidden_states, rotary(hidden_states, rows), *args, **kwargs)

    layer.forward = counting
    refuse(own_target, r"logits of a tree pass differ from plain forwards by \d.*attention interface")


def test_a_layer_without_keys_is_refused_by_number(own_target: Any) -> None:
    layer = own_target.layers[2].self_attn
    layer.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
    refuse(own_target, r"layers \[2\] keep no K/V")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("llama4", r"Llama4ForCausalLM: layers \[0, 1, 2\] attend in chunks of 8 tokens \(chunked_attention\)"),
        ("bloom", r"BloomForCausalLM: 0 of 2 layers call the attention interface"),
        ("mamba", r"MambaForCausalLM does not run with a cache of keys and values alone \(recurrent state"),
    ],
)
def test_an_architecture_that_cannot_be_verified_is_refused_by_name(tmp_path: Path, kind: str, message: str) -> None:
    target = Target.load(str(save_model(kind, tmp_path)), dtype=torch.float32, device="cpu")
    refuse(target, message)


def test_a_layer_that_hides_its_window_is_refused(tmp_path: Path) -> None:
    target = Target.load(str(save_model("gemma3", tmp_path)), dtype=torch.float32, device="cpu")
    target.layers[2].self_attn.sliding_window = 4096
    target.config.sliding_window = 8
    refuse(target, "layer 2 has a sliding window of 8 but hands 4096")


def test_a_rope_with_two_sets_of_angles_is_kept_on_the_near_side(tmp_path: Path) -> None:
    """Up to the boundary longrope is an ordinary rope, drafts that look past it included; beyond it is refused."""
    target = Target.load(str(save_model("phi3", tmp_path)), dtype=torch.float32, device="cpu")
    assert target.max_positions == 40
    prompts = random_prompts(target, [32, 5, 20])
    truth = make_truth(target, prompts, 8)  # 32 + 8: the longest text ends at the boundary
    for slots in (1, 3):
        check_lossless(target, RandomTreeDrafter(truth, 9), truth, slots, lambda _: 8)
    with pytest.raises(
        DraftsmithError, match=r"context of 40 \(up to there its 'longrope' rope keeps .* limit is 256\)"
    ):
        list(decode(target, PlainDrafter(), [Request("r", [5] * 33, 8)], slots=1, capacity=64))


@pytest.mark.parametrize("nested", [False, True])
def test_a_dynamic_rope_is_bounded_too(own_target: Any, nested: bool) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
    plain = {"rope_type": "default", "rope_theta": 1e4}
    own_target.config.rope_parameters = {"full_attention": rope, "sliding_attention": plain} if nested else rope
    most, reason = context(own_target.config)
    assert most == 128
    assert "'dynamic'" in reason


def test_a_body_without_a_list_of_layers_is_refused(own_target: Any) -> None:
    del own_target.body.norm
    with pytest.raises(DraftsmithError, match="LlamaModel has no plain list"):
        Target(own_target.model, own_target.tokenizer, own_target.id, None)


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("q7", [], 5), "'q7' has an empty prompt"),
        (Request("q7", [5], 0), "'q7': max_new_tokens 0"),
        (
            Request("q7", [5] * 500, 13),
            "'q7': prompt 500 . new 13 tokens exceed the target's context of 512: with 13 new tokens a prompt may.*499",
        ),
        (Request("q7", [5, 320], 4), "'q7' holds token ids outside the vocabulary of 320"),
        (Request("q7", [5, -1], 4), "'q7' holds token ids outside the vocabulary of 320"),
        (Request("q7", [5] * 30, 31), "'q7' needs 62 cache rows, the loop was given 61"),
    ],
)
def test_a_request_that_cannot_run_is_named(tiny_target: Any, request_: Request, message: str) -> None:
    with pytest.raises(DraftsmithError, match=message):
        list(decode(tiny_target, PlainDrafter(), [request_], slots=2, capacity=61))


def test_a_prompt_may_fill_the_whole_context(tiny_target: Any) -> None:
    (result,) = decode(tiny_target, PlainDrafter(), [Request("r", [5] * 511, 1)], slots=1, capacity=513)
    assert (len(result.tokens), result.steps) == (1, [])
