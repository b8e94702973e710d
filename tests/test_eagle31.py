"""What is special about EAGLE-3.1: norms before the fusion, the normed state recycled, wrong config values."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from families import common_config, make_case, make_documents, pack

from draftsmith.errors import DraftsmithError
from draftsmith.heads.config import default_layer_ids
from draftsmith.heads.eagle31 import Eagle31Config, Eagle31Head, eagle31_config
from draftsmith.heads.target import Target, load_parts
from draftsmith.heads.vocab import DraftVocab
from draftsmith.train.optimizer import is_hidden_matrix
from draftsmith.train.settings import load_head_recipe

VOCAB = DraftVocab(torch.tensor([1, 4, 5, 30]), 40)
IDENTITY = {
    "target_id": "tiny",
    "target_revision": None,
    "target_fingerprint": "0" * 64,
    "chat_template_sha256": None,
    "trained_length": 64,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc_norm": False}, "fc_norm = False is not what an eagle31 head computes: it must be True"),
        ({"norm_output": False}, "norm_output = False is not what an eagle31 head computes"),
        (
            {"recycled": "pre_norm"},
            "recycled = 'pre_norm' is not what an eagle31 head computes: it must be 'post_norm'",
        ),
        ({"norm_before_residual": True}, "norm_before_residual = True is not what"),
        ({"input_norms": {"embed": "rms", "hidden": "rms"}}, "input_norms = .* is not what"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftsmithError, match=message) as error:
        Eagle31Config.from_dict(common_config("eagle31", VOCAB, **change), "the file")
    assert "\n" not in str(error.value)


def test_the_recipe_makes_this_familys_head(tiny_target: Target, tiny_folder: Path) -> None:
    recipe = load_head_recipe("eagle3.1").head
    assert recipe.family == "eagle31"
    vocab = DraftVocab(torch.arange(3, 100, 2), tiny_target.vocab_size)
    config = eagle31_config(tiny_target.config, vocab, steps=recipe.steps, step_decay=recipe.step_decay, **IDENTITY)
    assert config == eagle31_config(tiny_target.config, vocab, **IDENTITY)
    assert config.layer_ids == default_layer_ids(tiny_target.n_layers)
    head = Eagle31Head(config, vocab)
    parts = load_parts(str(tiny_folder), None, torch.float32)
    said = head.initialise(parts, torch.Generator().manual_seed(0))
    assert "start: the target's last layer" in said
    names = {n: p for n, p in head.named_parameters() if n.startswith("fc_norm")}
    assert set(names) == {"fc_norm.0", "fc_norm.1", "fc_norm.2"}
    assert all(p.shape == (config.hidden_size,) and p.eq(1).all() for p in names.values())
    assert not any(is_hidden_matrix(n, p) for n, p in names.items())
    only_last = torch.eye(config.hidden_size).repeat(1, 3) * torch.tensor([0, 0, 1]).repeat_interleave(
        config.hidden_size
    )
    torch.testing.assert_close(head.fc.weight.detach(), only_last, atol=4e-3, rtol=0)


@torch.no_grad()
def test_the_scale_of_a_captured_state_does_not_matter() -> None:
    """Each state has a norm of its own; in EAGLE-3 the scale goes through."""
    for family, ignores in (("eagle31", True), ("eagle3", False)):
        case = make_case(family, "gqa")
        head = copy.deepcopy(case.head)
        head.config = dataclasses.replace(case.config, rms_norm_eps=0.0)
        batch = pack(make_documents(case))
        scale = torch.tensor([0.1, 1.0, 30.0], dtype=torch.float64).repeat_interleave(case.config.hidden_size)
        louder = dataclasses.replace(batch, features=batch.features * scale)
        got = [float(s.num) for s in head.losses(louder, case.parts)]
        want = [float(s.num) for s in head.losses(batch, case.parts)]
        assert (got == pytest.approx(want, rel=1e-9)) == ignores, family


@torch.no_grad()
def test_what_is_recycled_is_what_is_read_out() -> None:
    case = make_case("eagle31", "gqa")
    batch = pack(make_documents(case))
    rows = case.head.supervised_rows(batch)[0].nonzero().flatten()
    for found in case.head.unroll(batch, case.parts, rows, 3):
        assert found.state is not None
        assert torch.equal(found.state, found.readout)
        unit = found.state / case.head.norm
        torch.testing.assert_close(unit.pow(2).mean(-1), torch.ones(len(rows), dtype=torch.float64), atol=1e-4, rtol=0)
