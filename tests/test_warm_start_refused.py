"""A checkpoint that doesn't fit, isn't whole or isn't there is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import foreign_heads
import pytest
import torch
from safetensors.torch import load_file, save_file
from warm_checks import Place, begin, edit, make_head, make_place, settings_for

from draftsmith.errors import DraftsmithError
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.formats.files import find_checkpoint, hub_id
from draftsmith.heads.registry import head_family
from draftsmith.heads.vocab import DraftVocab
from draftsmith.train.settings import load_head_recipe
from draftsmith.train.warm import check_copies, pinned, read_start, start_layer_ids


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_QUIET", "1")


@pytest.fixture(scope="module")
def place(tiny_folder: Path, tiny_target: Any, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tiny_folder, tiny_target, tmp_path_factory.mktemp("store"))


MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "missing": (
        "eagle3",
        {"drop": ("fc.weight", "layers.0.hidden_norm.weight", "norm.weight", "layers.0.mlp.up_proj.weight")},
        r"4 missing \(fc.weight, layers.0.hidden_norm.weight, .*, …\)",
    ),
    "unexpected": (
        "eagle3",
        {"add": {"layers.0.self_attn.q_norm.weight": torch.ones(24)}},
        r"1 unexpected tensor: layers.0.self_attn.q_norm.weight",
    ),
    "misshaped": (
        "eagle3",
        {"drop": ("fc.weight",), "add": {"fc.weight": torch.ones(64, 128)}},
        r"1 misshaped \(fc.weight is \[64, 128\] instead of \[64, 192\]\)",
    ),
    "no d2t": ("eagle3", {"drop": ("d2t",)}, "1 missing tensor: d2t: the draft vocabulary has 159 of 320 tokens"),
    "absolute d2t": (
        "eagle3",
        {"drop": ("d2t",), "add": {"d2t": torch.arange(2, 320, 2)}},
        "draft vocabulary ids must ascend strictly within 0..319, found 2..476",
    ),
    "t2d": (
        "eagle3",
        {"add": {"t2d": torch.arange(320) % 3 == 0}},
        "d2t and t2d name other tokens",
    ),
    "rows": ("eagle3", {"draft_vocab_size": 158}, "lm_head.weight has 159 rows for a draft vocabulary of 158"),
    "norm_before_fc": ("eagle3", {"norm_before_fc": True, "eagle_config": None}, "norm_before_fc = True, .* no family"),
    "other recycling": (
        "eagle3",
        {"norm_output": None, "eagle_config": {"return_hidden_post_norm": True}},
        "norm_output = True is computed by no family here .*eagle3.1 has fc_norm",
    ),
    "two names": (
        "eagle31",
        {"eagle_config": {"return_hidden_post_norm": False}},
        "norm_output in config.json is True, but return_hidden_post_norm in its eagle_config is False",
    ),
    "ill-typed flag": ("eagle3", {"fc_norm": "no"}, "fc_norm in config.json is 'no': true or false"),
    "no states": ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False"),
    "before attention": ("eagle3", {"eagle_config": {"eh_proj_before_attn": True}}, "eh_proj_before_attn = True"),
    "parallel": ("eagle3", {"parallel_drafting": True}, "parallel_drafting = True"),
    "share of rope": ("eagle3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    "share inside rope": (
        "eagle3",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor = 0.5",
    ),
    "kind of rope": (
        "eagle3",
        {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}},
        "a rope of kind 'mrope' .* there are default, linear",
    ),
    "half a rope": (
        "eagle3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        "the config of the head at .* makes no eagle3 head",
    ),
    "no rope": ("eagle3", {"rope_parameters": [1]}, r"rope_parameters = \[1\] in config.json: a group of values"),
    "odd heads": ("eagle3", {"num_attention_heads": 3, "head_dim": None}, "3 query heads, 1 key-value heads of 21"),
    "no heads": ("eagle3", {"num_attention_heads": 0}, "num_attention_heads = 0 in config.json: a number above 0"),
    "group": ("eagle3", {"eagle_config": [1]}, r"eagle_config = \[1\] in config.json: a group of values is expected"),
    "verifier": ("eagle3", {"speculators_config": 7}, "speculators_config = 7 in config.json: a group of values"),
    "ids": ("eagle3", {"eagle_aux_hidden_state_layer_ids": "2,3,4"}, "layer_ids = '2,3,4' .* a list of numbers"),
    "too far": (
        "eagle3",
        {"eagle_aux_hidden_state_layer_ids": [2, 3, 99], "eagle_config": None},
        r"reads the states \[2, 3, 99\], and the target has 7 layers",
    ),
    "width": ("eagle3", {"target_hidden_size": 128}, "64 wide and reads states that are 128 wide .* not supported"),
    "one number": ("eagle3", {"drop": ("d2t",), "add": {"d2t": torch.tensor(3)}}, "1 single number: d2t"),
    "3.1's residual": ("eagle31", {"norm_before_residual": True}, "norm_before_residual = True, .* by no family here"),
    "half of 3.1": ("eagle31", {"norm_output": False}, "fc_norm = True, norm_output = False is computed by no family"),
    "two places": (
        "eagle3",
        {"eagle_config": {"norm_before_fc": True}},
        "norm_before_fc in config.json is False, but norm_before_fc in its eagle_config is True",
    ),
    "layers": (
        "eagle3",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}},
        r"names the states \[2, 3, 4\] .* but \[3, 4, 5\] in eagle_config",
    ),
    "window": ("eagle3", {"layer_types": ["sliding_attention"], "sliding_window": 2048}, "a window of 2048 tokens"),
    "silent window": ("eagle3", {"sliding_window": 4096}, "a window of 4096 tokens"),
    "shape": ("eagle3", {"intermediate_size": None}, "config.json has no intermediate_size"),
    "hidden size": ("eagle3", {"hidden_size": 128, "head_dim": 24}, "another target: hidden_size 128, here 64"),
    "vocabulary": ("eagle3", {"vocab_size": 400}, "another target: vocab_size 400, here 320"),
    "speculators": ("eagle3", {"speculators_model_type": "dflash"}, "speculators_model_type = 'dflash'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(place: Place, tmp_path: Path, name: str) -> None:
    family, changes, told = MISTAKES[name]
    head = make_head(place, family)
    folder = foreign_heads.plain_export(head, tmp_path, place.parts)
    edit(folder, **changes)
    with pytest.raises(DraftsmithError, match=told):
        begin(place, folder, settings_for(head))


def test_a_copy_of_another_targets_embedding_is_noticed(place: Place, tmp_path: Path) -> None:
    head = make_head(place, "eagle3")
    folder = foreign_heads.speculators_eagle3(head, tmp_path, place.parts)
    other = place.parts.embed.clone()
    other[:160] *= 1.1
    edit(folder, add={"embed_tokens.weight": other})
    with pytest.raises(DraftsmithError, match=r"its embed differs from the target's by 4\.\d+% .* 0\.5% are allowed"):
        begin(place, folder, settings_for(head))
    edit(folder, add={"embed_tokens.weight": other[:300].contiguous()})
    with pytest.raises(DraftsmithError, match=r"its embed has the shape \[300, 64\], the target's \[320, 64\]"):
        begin(place, folder, settings_for(head))


def test_a_copy_counts_up_to_the_targets_own_factor(place: Place, tmp_path: Path) -> None:
    """Gemma's embedding is read times a factor; whether a copy has it or not, it is a copy."""
    head = make_head(place, "eagle3")
    folder = foreign_heads.speculators_eagle3(head, tmp_path, place.parts)
    start = read_start(str(folder), tmp_path / "stage", str(place.folder), None)
    scaled = dataclasses.replace(place.parts, embed=place.parts.embed * 8)
    check_copies(start, scaled, quantised=False)
    with pytest.raises(DraftsmithError, match="embed differs from the target's by 1"):
        check_copies(start, dataclasses.replace(scaled, embed=-scaled.embed), quantised=False)
    noise = torch.randn(scaled.embed.shape, generator=torch.Generator().manual_seed(7))
    rounded = dataclasses.replace(scaled, embed=scaled.embed + 0.08 * scaled.embed.std() * noise)
    check_copies(start, rounded, quantised=True)
    with pytest.raises(DraftsmithError, match=r"by [78]\.\d+% of its size, and 0.5% are allowed"):
        check_copies(start, rounded, quantised=False)


def test_medusa_heads_that_do_not_fit(place: Place, tmp_path: Path) -> None:
    head = make_head(place, "medusa")
    folder = foreign_heads.medusa_vllm(head, tmp_path, place.parts)
    with pytest.raises(DraftsmithError, match=r"has 3 networks, .* head.steps = 5: give head.steps=3"):
        begin(place, folder, load_head_recipe("medusa1"))
    with pytest.raises(DraftsmithError, match=r"a head of the kind medusa1, and this run trains eagle3:"):
        begin(place, folder, load_head_recipe("eagle3"))
    edit(folder, drop=("lm_heads.1.weight",))
    with pytest.raises(DraftsmithError, match=r"1 missing tensor: lm_heads.1.weight"):
        begin(place, folder, settings_for(head))
    foreign_heads.medusa_vllm(head, tmp_path, place.parts)
    edit(folder, drop=("token_map",))
    with pytest.raises(DraftsmithError, match="token_map is missing: the output rows are 159 of 320 tokens"):
        begin(place, folder, settings_for(head))
    edit(folder, add={"blocks.3.layers.1.weight": torch.ones(64, 64)})
    with pytest.raises(DraftsmithError, match=r"4 missing tensors: blocks.3.layers.0.bias, blocks.3.layers.0.weight"):
        begin(place, folder, settings_for(head))
    edit(folder, drop=("blocks.3.layers.1.weight",), add={"lm_heads.3.weight": torch.ones(64, 64)})
    with pytest.raises(DraftsmithError, match=r"1 unexpected tensor: lm_heads.3.weight"):
        begin(place, folder, settings_for(head))


MEDUSA_GAPS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "a bias": ("tgi", ("1.0.linear.bias",), "1 missing tensor: 1.0.linear.bias"),
    "all biases": ("tgi", tuple(f"{i}.{j}.linear.bias" for i in range(3) for j in range(2)), "6 missing tensors: 0.0"),
    "a network": ("tgi", ("0.0.linear.weight", "0.0.linear.bias"), "2 missing tensors: 0.0.linear.bias, 0.0.linear"),
    "other rows": ("tgi", ("1.2.weight", "2.2.weight"), "2 missing tensors: 1.2.weight, 2.2.weight"),
    "one of the biases": ("vllm", ("blocks.2.layers.1.bias",), "1 missing tensor: blocks.2.layers.1.bias"),
    "all rows": ("vllm", tuple(f"lm_heads.{i}.weight" for i in range(3)), "3 missing tensors: lm_heads.0.weight"),
}


@pytest.mark.parametrize("name", MEDUSA_GAPS)
def test_what_a_medusa_checkpoint_leaves_out_is_named(place: Place, tmp_path: Path, name: str) -> None:
    layout, dropped, told = MEDUSA_GAPS[name]
    head = make_head(place, "medusa")
    writer, file = {
        "tgi": (foreign_heads.medusa_tgi, "medusa_lm_head.safetensors"),
        "vllm": (foreign_heads.medusa_vllm, "model.safetensors"),
    }[layout]
    path = writer(head, tmp_path, place.parts) / file
    plain = {n.removeprefix("medusa_heads."): x for n, x in load_file(path).items()}
    save_file({n: x for n, x in plain.items() if n not in dropped}, path)
    with pytest.raises(DraftsmithError, match=told):
        begin(place, tmp_path, settings_for(head))


def test_a_vocabulary_is_kept_whatever_is_asked_for(place: Place, tmp_path: Path) -> None:
    head = make_head(place, "eagle3")
    save_head(head, tmp_path)
    with pytest.raises(DraftsmithError, match=r"draft_vocab_size = 100, but .* its own 159 tokens"):
        begin(place, tmp_path, settings_for(head, draft_vocab_size=100))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"target_fingerprint": "f" * 64}, "target_id 'tiny', here .*target_fingerprint 'fff"),
        ({"chat_template_sha256": "e" * 64}, "another target: chat_template_sha256 'eee"),
    ],
)
def test_another_revision_or_template_is_refused_with_the_difference(
    place: Place, tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    head = make_head(place, "eagle3", **changed)
    save_head(head, tmp_path)
    with pytest.raises(DraftsmithError, match=told):
        begin(place, tmp_path, settings_for(head))


def test_a_head_that_was_trained_with_its_target_is_no_start(place: Place, tmp_path: Path) -> None:
    from draftsmith.heads.medusa2 import medusa2_config

    vocab = DraftVocab(torch.arange(320), 320)
    identity = {"target_id": "tiny", "target_revision": None, "target_fingerprint": "0", "chat_template_sha256": None}
    config = medusa2_config(place.target.config, vocab, trained_length=8, **identity)
    save_head(head_family("medusa2").head(config, vocab), tmp_path)
    with pytest.raises(DraftsmithError, match="a medusa2 head drafts for its target with the adapter"):
        begin(place, tmp_path, load_head_recipe("medusa2"))


def test_sources_that_hold_nothing(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(DraftsmithError, match=r"no folder 'me/head', and the hub doesn't give .*: offline"):
        find_checkpoint("me/head")
    with pytest.raises(DraftsmithError, match="no head to start from at '/no/where'"):
        find_checkpoint("/no/where")
    with pytest.raises(DraftsmithError, match=r"holds no head: it has none of model\.safetensors"):
        begin(place, tmp_path, load_head_recipe("eagle3"))
    foreign_heads.write(tmp_path, "model.safetensors", {}, {"some.weight": torch.ones(2)})
    with pytest.raises(DraftsmithError, match=r"no head of a known layout: its tensors are called some.weight"):
        begin(place, tmp_path, load_head_recipe("eagle3"))
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": Path("code")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DraftsmithError, match="holds more than tensors"):
        begin(place, tmp_path, load_head_recipe("eagle3"))


def test_a_hub_id_is_fetched_with_pickles_only_where_there_is_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def fetch(hub_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert find_checkpoint("org/head") == tmp_path
    assert [any("bin" in x for x in patterns) for patterns in asked] == [False, True]
    (tmp_path / "model.safetensors").touch()
    find_checkpoint("org/head")
    assert len(asked) == 3


def test_a_hub_model_stays_at_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def fetch(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(revision)
        folder = tmp_path / "snapshots" / (revision or "c0ffee")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").touch()
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.chdir(tmp_path)
    stage = tmp_path / "train"
    assert pinned("org/head", stage) == "org/head@c0ffee"
    assert pinned("org/head@c0ffee", stage) == "org/head@c0ffee"
    assert find_checkpoint("org/head@c0ffee").name == "c0ffee"
    stage.mkdir()
    (stage / "start.json").write_text(json.dumps({"source": "org/head@older"}))
    assert pinned("org/head", stage) == "org/head@older"
    assert pinned("org/other", stage) == "org/other@c0ffee"
    assert asked == [None, "c0ffee", None]


def test_what_looks_like_a_folder_is_none_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    for source in ("runs/head", "./org/head", "/org/head", "../org/head", "~/head", "head"):
        assert hub_id(source) is None, source
        with pytest.raises(DraftsmithError, match="there is no head to start from at"):
            find_checkpoint(source)
    assert hub_id("org/head") == ("org/head", None)


def test_a_run_that_decodes_anothers_weights_names_it(tmp_path: Path) -> None:
    (tmp_path / "eagle2@more").mkdir()
    with pytest.raises(DraftsmithError, match=r"eagle2 decodes those of eagle1: give .*/eagle1@more"):
        find_checkpoint(str(tmp_path / "eagle2@more"))


DAMAGES: dict[str, tuple[str, bytes, str]] = {
    "empty pickle": ("pytorch_model.bin", b"", "pytorch_model.bin is damaged or missing"),
    "one byte": ("pytorch_model.bin", b"\x80", "pytorch_model.bin is damaged or missing"),
    "text": ("medusa_lm_head.pt", b"no pickle", "medusa_lm_head.pt is damaged or missing"),
    "cut": ("model.safetensors", b"\x10", "model.safetensors is damaged"),
    "index": ("model.safetensors.index.json", b"{}", "has no 'weight_map'"),
    "places": ("model.safetensors.index.json", b'{"weight_map": {"a": "../b"}}', "has no 'weight_map'"),
    "parts": ("model.safetensors.index.json", b'{"weight_map": {"a": "b.safetensors"}}', "b.safetensors is damaged or"),
    "config": ("config.json", b"{", "config.json is damaged"),
    "list": ("config.json", b"[]", "a mapping of names to values is expected, not list"),
    "own config": ("head.json", b"{}", "not a head config: no .family.|is no head: it has no vocab"),
    "own text": ("head.json", b"\xff", "head.json is damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_named(place: Place, tmp_path: Path, name: str) -> None:
    file, content, told = DAMAGES[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DraftsmithError, match=told) as caught:
        begin(place, tmp_path, load_head_recipe("eagle3"))
    assert "weights_only" not in str(caught.value)
    assert "run the stage again" not in str(caught.value)
    if file.endswith("config.json") or name.startswith("own"):
        with pytest.raises(DraftsmithError, match=told):
            start_layer_ids(str(tmp_path), tmp_path / "stage", None, 7)


def test_a_cut_pickle_is_damaged_and_code_is_not(place: Place, tmp_path: Path) -> None:
    head = make_head(place, "eagle3")
    path = foreign_heads.eagle3_repository(head, tmp_path, place.parts) / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DraftsmithError, match="is damaged or missing"):
        begin(place, tmp_path, settings_for(head))
    torch.save({"fc.weight": Path("code")}, path)
    with pytest.raises(DraftsmithError, match=r"holds more than tensors \(pathlib") as caught:
        begin(place, tmp_path, settings_for(head))
    assert "weights_only" not in str(caught.value)
