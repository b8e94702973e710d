"""Head configs are strict, layer ids well-formed, draft vocabularies deterministic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DEFAULT, FAMILIES, LLAMA3, common_config
from head_checks import check_layer_states, check_vocab_maps
from reference import frequencies

from draftsmith.errors import DraftsmithError
from draftsmith.heads.config import default_layer_ids, load_config
from draftsmith.heads.registry import family_names, head_family
from draftsmith.heads.vocab import DraftVocab, build_vocab

VOCAB = DraftVocab(torch.tensor([1, 4, 5, 30]), 40)


def values(**changes: Any) -> dict[str, Any]:
    return common_config("eagle3", VOCAB, **changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_survives_its_file(family: str, tmp_path: Path) -> None:
    config = head_family(family).config.from_dict(common_config(family, VOCAB))
    config.save(tmp_path / "head.json")
    assert load_config(tmp_path / "head.json") == config
    assert json.loads((tmp_path / "head.json").read_text()) == config.to_dict()


@pytest.mark.parametrize("key", [k for k in common_config("eagle3", VOCAB) if k != "family"])
def test_a_missing_key_is_named(key: str) -> None:
    given = values()
    del given[key]
    with pytest.raises(DraftsmithError, match=f"the file: key '{key}' is missing"):
        head_family("eagle3").config.from_dict(given, "the file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dims": 8}, "the file: unknown key 'head_dims'"),
        ({"hidden_size": "16"}, "hidden_size = '16'"),
        ({"hidden_size": 16.0}, "hidden_size = 16.0"),
        ({"steps": True}, "steps = True"),
        ({"step_decay": "0.8"}, "step_decay = '0.8'"),
        ({"objective": "tokens"}, "objective = 'tokens'"),
        ({"input_norms": {"embed": "layer"}}, "input_norms = "),
        ({"layer_ids": [2, "4", 6]}, "layer_ids = "),
        ({"layer_ids": 2}, "layer_ids = 2"),
        ({"target_revision": 3}, "target_revision = 3"),
        ({"rope": []}, r"rope = \[\]"),
        ({"norm_before_residual": 0}, "norm_before_residual = 0"),
        ({"concat_order": "hidden_first"}, "concat_order = 'hidden_first' is not what"),
        ({"recycled": "post_norm"}, "recycled = 'post_norm' is not what"),
        ({"format_version": 2}, "format_version 2 is not 1"),
        ({"layer_ids": [4, 2, 6]}, r"layer_ids \[4, 2, 6\]"),
        ({"layer_ids": [2, 2, 6]}, r"layer_ids \[2, 2, 6\]"),
        ({"layer_ids": [0, 2, 6]}, "between 1 and 8"),
        ({"layer_ids": [2, 4, 9]}, "between 1 and 8"),
        ({"draft_vocab_size": 41}, "draft_vocab_size 41"),
        ({"draft_vocab_size": 0}, "draft_vocab_size 0"),
        ({"steps": 0}, "steps 0"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftsmithError, match=message) as error:
        head_family("eagle3").config.from_dict(values(**change), "the file")
    assert "\n" not in str(error.value)


def test_an_unknown_family_lists_what_exists(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"unknown head family 'eagle9'; there are: .*eagle3"):
        head_family("eagle9")
    (tmp_path / "head.json").write_text('{"hidden_size": 3}')
    with pytest.raises(DraftsmithError, match="no 'family'"):
        load_config(tmp_path / "head.json")
    assert "eagle3" in family_names()


def test_default_layer_ids_are_distinct_and_ascending() -> None:
    assert default_layer_ids(30) == [2, 15, 27]
    assert default_layer_ids(7) == [2, 3, 4]
    for n in range(4, 100):
        ids = default_layer_ids(n)
        assert ids == sorted(set(ids))
        assert len(ids) == 3
        assert ids[0] > 0
        assert ids[-1] < n
    with pytest.raises(DraftsmithError, match="3 layers"):
        default_layer_ids(3)


def test_states_are_what_the_layer_ids_say(tiny_target: Any) -> None:
    check_layer_states(tiny_target, (1, 3, 6))


@pytest.mark.parametrize("rope", [DEFAULT, LLAMA3, {**LLAMA3, "partial_rotary_factor": 0.5}])
def test_a_config_comes_from_the_target(rope: dict[str, Any]) -> None:
    """Shapes, epsilon and the full rotary embedding on the head's own head_dim."""
    from transformers import LlamaConfig

    from draftsmith.heads.eagle3 import eagle3_config

    target = LlamaConfig(
        vocab_size=40, hidden_size=24, intermediate_size=44, num_hidden_layers=10, num_attention_heads=4,
        num_key_value_heads=2, head_dim=10, rms_norm_eps=3e-6, max_position_embeddings=777, rope_parameters=dict(rope),
    )  # fmt: skip
    identity = {"target_id": "x", "target_revision": None, "target_fingerprint": "f", "chat_template_sha256": None}
    config = eagle3_config(target, VOCAB, **identity, trained_length=9, steps=2)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (24, 44, 10)
    assert (config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps) == (4, 2, 3e-6)
    assert (config.layer_ids, config.steps, config.max_position_embeddings) == ([2, 5, 7], 2, 777)
    assert (config.draft_vocab_size, config.draft_vocab_sha256) == (4, VOCAB.sha256)
    head = head_family("eagle3").head(config, VOCAB)
    want, scale = frequencies({k: v for k, v in rope.items() if k != "partial_rotary_factor"}, 10)
    torch.testing.assert_close(head.layer.inv_freq.double(), want, rtol=1e-6, atol=0)
    assert head.layer.rope_scaling == scale
    with pytest.raises(DraftsmithError, match="unknown key 'depth'"):
        eagle3_config(target, VOCAB, **identity, trained_length=9, depth=2)


# --- vocabularies -----------------------------------------------------------------------------------------------------


def test_the_most_frequent_tokens_are_chosen() -> None:
    counts = torch.tensor([0, 9, 2, 0, 7, 7, 1, 0])
    vocab, coverage = build_vocab(counts, 3)
    assert vocab.target_ids.tolist() == [1, 4, 5]
    assert coverage == pytest.approx(23 / 26)
    check_vocab_maps(vocab)


def test_ties_and_unseen_tokens_go_by_id_and_twice_is_the_same() -> None:
    counts = torch.tensor([0, 5, 5, 5, 0, 1, 0, 0])
    assert build_vocab(counts, 2)[0].target_ids.tolist() == [1, 2]
    filled, coverage = build_vocab(counts, 6)
    assert filled.target_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert coverage == 1.0
    g = torch.Generator().manual_seed(0)
    many = torch.randint(0, 4, (5000,), generator=g)
    first, second = build_vocab(many, 777)[0], build_vocab(many.clone(), 777)[0]
    assert torch.equal(first.target_ids, second.target_ids)
    assert first.sha256 == second.sha256
    picked = many[first.target_ids]
    edge = int(picked.min())
    assert int((picked > edge).sum()) == int((many > edge).sum()), "a rarer token replaced a more frequent one"
    tied = (many == edge).nonzero().flatten()
    assert first.target_ids[picked == edge].tolist() == tied[: int((picked == edge).sum())].tolist()


def test_end_of_turn_tokens_are_always_in() -> None:
    counts = torch.tensor([8, 9, 2, 0, 7, 7, 1, 0])
    vocab, coverage = build_vocab(counts, 3, always=[7, 3])
    assert vocab.target_ids.tolist() == [1, 3, 7]
    assert coverage == pytest.approx(9 / 34)


def test_the_size_is_clipped_and_empty_counts_are_refused() -> None:
    assert len(build_vocab(torch.tensor([1, 0, 2]), 99)[0]) == 3
    with pytest.raises(DraftsmithError, match="masks are empty"):
        build_vocab(torch.zeros(5, dtype=torch.int64), 3)


@pytest.mark.parametrize(
    "ids", [torch.tensor([3, 2]), torch.tensor([2, 2]), torch.tensor([-1, 2]), torch.tensor([2, 40]),
            torch.tensor([], dtype=torch.int64), torch.tensor([1, 2], dtype=torch.int32), torch.tensor([[1, 2]])],
)  # fmt: skip
def test_an_ill_formed_vocabulary_is_refused(ids: torch.Tensor) -> None:
    with pytest.raises(DraftsmithError, match="draft vocabulary"):
        DraftVocab(ids, 40)


def test_the_hash_tells_vocabularies_apart() -> None:
    hashes = {
        VOCAB.sha256,
        DraftVocab(torch.tensor([1, 4, 5, 31]), 40).sha256,
        DraftVocab(torch.tensor([1, 4, 5, 30]), 41).sha256,
    }
    assert len(hashes) == 3
