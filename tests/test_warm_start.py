"""A head from any layout computes what it computed there; a checkpoint that doesn't fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_heads
import pytest
import torch
from safetensors.torch import load_file, save_file
from warm_checks import LLAMA3, ODD, Place, begin, edit, losses, make_head, make_place, settings_for

from draftsmith.errors import DraftsmithError
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.formats.eagle import read_layer_ids, read_rope
from draftsmith.train.settings import load_head_recipe
from draftsmith.train.warm import choose_layer_ids, overruled, start_layer_ids


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_QUIET", "1")


@pytest.fixture(scope="module")
def place(tiny_folder: Path, tiny_target: Any, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tiny_folder, tiny_target, tmp_path_factory.mktemp("store"))


WRITERS: dict[str, tuple[Callable[..., Path], str, bool]] = {
    "eagle1-repository": (foreign_heads.eagle1_repository, "eagle1", True),
    "speculators-eagle": (foreign_heads.speculators_eagle, "eagle1", True),
    "eagle3-repository": (foreign_heads.eagle3_repository, "eagle3", False),
    "specforge": (foreign_heads.specforge, "eagle3", False),
    "plain-eagle3": (foreign_heads.plain_export, "eagle3", True),
    "plain-eagle31": (foreign_heads.plain_export, "eagle31", False),
    "speculators-eagle3": (foreign_heads.speculators_eagle3, "eagle3", False),
    "speculators-eagle31": (foreign_heads.speculators_eagle3, "eagle31", False),
    "medusa-repository": (foreign_heads.medusa_repository, "medusa", True),
    "medusa-tgi": (foreign_heads.medusa_tgi, "medusa", True),
    "medusa-vllm": (foreign_heads.medusa_vllm, "medusa", False),
}
_SHAPES = ("layer_ids", "hidden_act", "rms_norm_eps", "draft_vocab_sha256", *ODD, "fc_bias", "blocks")


@pytest.mark.parametrize("name", WRITERS)
def test_a_head_from_another_layout_computes_what_it_computed(place: Place, tmp_path: Path, name: str) -> None:
    writer, family, full = WRITERS[name]
    head = make_head(place, family, full)
    folder = writer(head, tmp_path / "head", place.parts)
    settings = settings_for(head, **({"draft_vocab_size": 320} if full else {}))
    found, config, said = begin(place, folder, settings)
    assert str(folder) in said
    assert torch.equal(found.vocab.target_ids, head.vocab.target_ids)
    for key in _SHAPES:
        assert getattr(config, key, None) == getattr(head.config, key, None), key
    for (ours, p), (theirs, q) in zip(found.named_parameters(), head.named_parameters(), strict=True):
        assert ours == theirs
        assert torch.equal(p, q), ours
    assert losses(place, found) == losses(place, head)


@pytest.mark.parametrize("family", ["eagle1", "eagle3", "eagle31", "medusa", "hydra"])
def test_an_own_checkpoint_is_a_start(place: Place, tmp_path: Path, family: str) -> None:
    head = make_head(place, family)
    folder = tmp_path / "run" / "train" / "checkpoints" / "best"
    folder.mkdir(parents=True)
    save_head(head, folder)
    found, config, _ = begin(place, tmp_path / "run", settings_for(head))
    for key in _SHAPES:
        assert getattr(config, key, None) == getattr(head.config, key, None), key
    assert losses(place, found) == losses(place, head)


def test_how_a_head_learns_is_the_new_runs_own(place: Place, tmp_path: Path) -> None:
    """EAGLE-1's weights go on as HASS, with its steps and loss weights."""
    head = make_head(place, "eagle1", steps=1, noise=0.3)
    save_head(head, tmp_path)
    settings = load_head_recipe("hass", {"train": {"steps": 1}})
    _, config, _ = begin(place, tmp_path, settings)
    wanted = settings.head.options
    assert (config.steps, config.topk_weight, config.noise) == (3, wanted["topk_weight"], wanted["noise"])
    assert config.fc_bias, "what the head computes comes with it"
    assert overruled(settings.head, config) == "as in the checkpoint: fc_bias = True (not False)"
    plain = settings.head.model_copy(update={"options": {**wanted, "fc_bias": True}})
    assert not overruled(plain, config)


def test_medusa_2_may_start_from_medusas_heads(place: Place, tmp_path: Path) -> None:
    head = make_head(place, "medusa")
    save_head(head, tmp_path)
    settings = load_head_recipe("medusa2", {"head": {"steps": 3}, "train": {"steps": 1}})
    found, config, _ = begin(place, tmp_path, settings)
    assert (config.family, config.blocks) == ("medusa2", 2)
    assert losses(place, found) == losses(place, head)


def test_medusa_without_output_rows_takes_the_targets(place: Place, tmp_path: Path) -> None:
    head = make_head(place, "medusa")
    folder = foreign_heads.medusa_tgi(head, tmp_path, place.parts)
    path = folder / "medusa_lm_head.safetensors"
    save_file({name: x for name, x in load_file(path).items() if "linear" in name}, path)
    found, _, said = begin(place, folder, settings_for(head, draft_vocab_size=100))
    assert "lm_heads from the target" in said
    assert len(found.vocab) == 100
    for i in range(3):
        assert torch.equal(found.lm_heads[i].weight, place.parts.lm_head[found.vocab.target_ids])
        assert torch.equal(found.blocks[i].layers[1].weight, head.blocks[i].layers[1].weight)


def test_medusa_with_shared_rows_and_without_biases(place: Place, tmp_path: Path) -> None:
    head = make_head(place, "medusa")
    with torch.no_grad():
        for i in range(3):
            head.lm_heads[i].weight.copy_(head.lm_heads[0].weight)
            for layer in head.blocks[i].layers:
                layer.bias.zero_()
    folder = foreign_heads.medusa_vllm(head, tmp_path, place.parts)
    path = folder / "model.safetensors"
    left_out = ("lm_heads.1", "lm_heads.2")
    kept = {n: x for n, x in load_file(path).items() if not n.startswith(left_out) and not n.endswith("bias")}
    save_file(kept, path)
    found, _, _ = begin(place, folder, settings_for(head))
    assert losses(place, found) == losses(place, head)


def test_eagle3_without_output_rows_takes_the_targets(place: Place, tmp_path: Path) -> None:
    head = make_head(place, "eagle3", full=True)
    folder = foreign_heads.plain_export(head, tmp_path, place.parts)
    edit(folder, drop=("lm_head.weight", "d2t"))
    found, _, said = begin(place, folder, settings_for(head))
    assert "lm_head from the target" in said
    assert torch.equal(found.lm_head.weight, place.parts.lm_head)


def test_rows_that_do_not_ascend_are_sorted(place: Place, tmp_path: Path) -> None:
    head = make_head(place, "eagle3")
    folder = foreign_heads.plain_export(head, tmp_path, place.parts)
    path = folder / "model.safetensors"
    tensors, order = load_file(path), torch.randperm(len(head.vocab), generator=torch.Generator().manual_seed(1))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order].contiguous()
    tensors["d2t"] = head.vocab.target_ids[order] - torch.arange(len(order))
    save_file(tensors, path)
    found, _, _ = begin(place, folder, settings_for(head))
    assert torch.equal(found.vocab.target_ids, head.vocab.target_ids)
    assert losses(place, found) == losses(place, head)


@pytest.mark.parametrize("writer", [foreign_heads.plain_export, foreign_heads.speculators_eagle3])
def test_the_residual_comes_with_the_head(place: Place, tmp_path: Path, writer: Callable[..., Path]) -> None:
    normed, plain = (make_head(place, "eagle3", norm_before_residual=x) for x in (True, False))
    settings = settings_for(normed)
    found, config, _ = begin(place, writer(normed, tmp_path, place.parts), settings)
    assert config.norm_before_residual
    assert losses(place, found) == losses(place, normed) != losses(place, plain)
    assert overruled(settings.head, config) == "as in the checkpoint: norm_before_residual = True (not False)"


@pytest.mark.parametrize(
    ("writer", "meant"), [(foreign_heads.plain_export, False), (foreign_heads.speculators_eagle3, True)]
)
def test_a_residual_that_is_left_out(place: Place, tmp_path: Path, writer: Callable[..., Path], meant: bool) -> None:
    """Absent norm_before_residual is False in plain configs, True in those of speculators."""
    head = make_head(place, "eagle3", norm_before_residual=meant)
    folder = writer(head, tmp_path, place.parts)
    values = json.loads((folder / "config.json").read_text())
    del values["norm_before_residual"]
    (folder / "config.json").write_text(json.dumps(values))
    found, config, _ = begin(place, folder, settings_for(head))
    assert config.norm_before_residual is meant
    assert losses(place, found) == losses(place, head)


def test_split_weights_are_read_by_their_index(place: Place, tmp_path: Path) -> None:
    head = make_head(place, "eagle3")
    folder = foreign_heads.plain_export(head, tmp_path, place.parts)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {f"model-0000{i + 1}-of-00002.safetensors": sorted(tensors)[i::2] for i in range(2)}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found, _, _ = begin(place, folder, settings_for(head))
    assert losses(place, found) == losses(place, head)


SAME_VALUES: dict[str, dict[str, Any]] = {
    "norm_output's other name": {"norm_output": None, "eagle_config": {"return_hidden_post_norm": True}},
    "a window that isn't used": {"sliding_window": 64, "layer_types": ["full_attention"]},
    "a window that is off": {"sliding_window": 64, "use_sliding_window": False},
    "all numbers rotate": {"partial_rotary_factor": 1.0},
    "what all heads do": {"eagle_config": {"use_aux_hidden_state": True, "eh_proj_before_attn": False}},
}


@pytest.mark.parametrize("name", SAME_VALUES)
def test_other_ways_to_say_the_same(place: Place, tmp_path: Path, name: str) -> None:
    head = make_head(place, "eagle31")
    folder = foreign_heads.plain_export(head, tmp_path, place.parts)
    edit(folder, **SAME_VALUES[name])
    found, config, _ = begin(place, folder, settings_for(head))
    assert config.family == "eagle31"
    assert losses(place, found) == losses(place, head)


# --- layer ids and rope -----------------------------------------------------------------------------------------------


def test_layer_ids_count_applied_layers_whatever_the_file_counts() -> None:
    key = "eagle_aux_hidden_state_layer_ids"
    assert read_layer_ids({key: [2, 18, 33]}, Path()) == [2, 18, 33]
    assert read_layer_ids({"eagle_config": {key: [1, 17, 32]}}, Path()) == [2, 18, 33]
    assert read_layer_ids({"eagle_config": None}, Path()) is None
    assert choose_layer_ids("x", None, None, 36) == [2, 18, 33]
    assert choose_layer_ids("x", None, [1, 2], 36) == [1, 2]
    assert choose_layer_ids("x", [4, 8], None, 36) == choose_layer_ids("x", [4, 8], [4, 8], 36) == [4, 8]
    with pytest.raises(DraftsmithError, match=r"head.layer_ids = \[1, 2\], but the head at x reads .* \[4, 8\]"):
        choose_layer_ids("x", [4, 8], [1, 2], 36)


def test_collecting_reads_the_layers_of_the_start(place: Place, tmp_path: Path) -> None:
    head = make_head(place, "eagle3", layer_ids=[1, 4, 6])
    folder = foreign_heads.specforge(head, tmp_path / "theirs", place.parts)
    save_head(head, tmp_path)
    for source in (folder, tmp_path):
        assert start_layer_ids(str(source), tmp_path / "stage", None, 7) == [1, 4, 6]
        with pytest.raises(DraftsmithError, match=r"collect them with head.layer_ids='\[1, 4, 6\]'"):
            begin(place, source, settings_for(head))


def test_rope_is_read_in_its_old_and_new_forms() -> None:
    default = {"rope_type": "default", "rope_theta": 10000.0}
    assert read_rope({}, Path()) == default
    assert read_rope({"rope_theta": 500, "rope_scaling": {"type": "linear", "factor": 2.0}}, Path()) == {
        "rope_type": "linear", "rope_theta": 500.0, "factor": 2.0,
    }  # fmt: skip
    assert read_rope({"rope_parameters": LLAMA3}, Path()) == LLAMA3
    both = {"full_attention": {**LLAMA3, "partial_rotary_factor": 1.0}, "sliding_attention": default}
    assert read_rope({"rope_parameters": both}, Path()) == LLAMA3
    with pytest.raises(
        DraftsmithError, match=r"the head at x reads the states .2, 3, 99., and the target has 7 layers"
    ):
        choose_layer_ids("x", [2, 3, 99], None, 7)
