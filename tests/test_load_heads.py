"""Any head is loaded for decoding from wherever it lies; one that contradicts itself is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_heads
import pytest
import torch
from exported_heads import accepted, make_run, random_head
from native_checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file
from test_native_mtp import build_head
from warm_checks import edit

from draftsmith.errors import DraftsmithError
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.formats.about import pack_tokens, unpack_tokens
from draftsmith.heads.formats.export import export_head
from draftsmith.heads.formats.load import load_any
from draftsmith.heads.target import Target, template_sha256
from draftsmith.heads.vocab import DraftVocab

Writer = Callable[[Any, Path, Any], Path]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_QUIET", "1")


def same(found: Any, head: Any) -> None:
    assert torch.equal(found.vocab.target_ids, head.vocab.target_ids)
    for (ours, p), (theirs, q) in zip(found.named_parameters(), head.named_parameters(), strict=True):
        assert ours == theirs
        assert torch.equal(p, q), ours


# --- this toolkit's ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["eagle1", "eagle3", "eagle31", "medusa", "hydra"])
def test_checkpoints_and_runs_are_loaded_as_they_are(tiny_target: Any, tmp_path: Path, family: str) -> None:
    head = random_head(tiny_target, family)
    run = make_run(tmp_path, head, "any")
    for place in (run, run / "train" / "checkpoints" / "best", str(run)):
        found = load_any(place, None)
        assert found.config == head.config
        same(found, head)


def test_a_head_for_another_target_is_refused(tiny_target: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path, random_head(tiny_target, "eagle3", target_fingerprint="0" * 64), "eagle3")
    with pytest.raises(DraftsmithError, match="the head was trained for another target"):
        load_any(run, tiny_target)


def test_folders_without_a_head_say_so(tiny_target: Any, tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match="holds no head"):
        load_any(tmp_path, tiny_target)
    with pytest.raises(DraftsmithError, match="there is no head to start from"):
        load_any(tmp_path / "none" / "there", tiny_target)


# --- public heads -----------------------------------------------------------------------------------------------------

PUBLIC: dict[str, tuple[Writer, str, dict[str, Any]]] = {
    "eagle1-repository": (foreign_heads.eagle1_repository, "eagle1", {"full": True}),
    "speculators-eagle": (foreign_heads.speculators_eagle, "eagle1", {"full": True}),
    "eagle3-repository": (foreign_heads.eagle3_repository, "eagle3", {}),
    "specforge": (foreign_heads.specforge, "eagle3", {"layer_ids": [1, 3, 6]}),
    "plain-eagle3": (foreign_heads.plain_export, "eagle3", {"full": True}),
    "plain-eagle31": (foreign_heads.plain_export, "eagle31", {}),
    "speculators-eagle3": (foreign_heads.speculators_eagle3, "eagle3", {"norm_before_residual": True}),
    "speculators-eagle31": (foreign_heads.speculators_eagle3, "eagle31", {}),
    "medusa-repository": (foreign_heads.medusa_repository, "medusa", {"full": True}),
    "medusa-tgi": (foreign_heads.medusa_tgi, "medusa", {"full": True}),
    "medusa-vllm": (foreign_heads.medusa_vllm, "medusa", {}),
}
DECODED = {"specforge"}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_head_drafts_what_it_drafted(tiny_target: Any, tmp_path: Path, name: str) -> None:
    writer, family, values = PUBLIC[name]
    head = random_head(tiny_target, family, **values)
    folder = writer(head, tmp_path / "head", tiny_target.parts())
    found = load_any(folder, tiny_target)
    same(found, head)
    config, own = found.config.to_dict(), head.config.to_dict()
    learning = {"steps", "step_decay", "trained_length", "noise", "target_id", "max_position_embeddings"}
    assert {k: x for k, x in config.items() if k not in learning} == {k: x for k, x in own.items() if k not in learning}
    assert found.config.target_id == tiny_target.id
    assert found.config.chat_template_sha256 == template_sha256(tiny_target.tokenizer)
    assert found.config.trained_length == 0, "nobody says how long its texts were"
    if name in DECODED:
        assert accepted(tiny_target, found) == accepted(tiny_target, head)
    with pytest.raises(DraftsmithError, match=r"is read together with its target; name that"):
        load_any(folder, None)


def test_a_head_without_output_rows_takes_the_targets(tiny_target: Any, tmp_path: Path) -> None:
    rows = tiny_target.parts().lm_head
    medusa = foreign_heads.medusa_tgi(random_head(tiny_target, "medusa"), tmp_path / "medusa", None)
    path = medusa / "medusa_lm_head.safetensors"
    save_file({name: x for name, x in load_file(path).items() if "linear" in name}, path)
    found: Any = load_any(medusa, tiny_target)
    assert len(found.vocab) == tiny_target.vocab_size
    for one in found.lm_heads:
        assert torch.equal(one.weight, rows)
    eagle = foreign_heads.plain_export(random_head(tiny_target, "eagle3", full=True), tmp_path / "eagle", None)
    edit(eagle, drop=("lm_head.weight", "d2t"))
    other: Any = load_any(eagle, tiny_target)
    assert torch.equal(other.lm_head.weight, rows)
    assert not torch.is_inference(other.lm_head.weight)


def test_a_public_head_of_another_target_is_refused(tiny_target: Any, tmp_path: Path) -> None:
    folder = foreign_heads.medusa_tgi(random_head(tiny_target, "medusa", full=True), tmp_path / "a", None)
    path = folder / "medusa_lm_head.safetensors"
    tensors = load_file(path)
    save_file({n: torch.cat((x, x[:1])) if n.endswith(".2.weight") else x for n, x in tensors.items()}, path)
    with pytest.raises(DraftsmithError, match=r"for another target \(org/target\): vocab_size 321, here 320"):
        load_any(folder, tiny_target)
    parts = tiny_target.parts()
    eagle = foreign_heads.speculators_eagle3(random_head(tiny_target, "eagle3"), tmp_path / "b", parts)
    edit(eagle, add={"embed_tokens.weight": parts.embed.flip(0).contiguous()})
    with pytest.raises(DraftsmithError, match="its embed differs from the target's"):
        load_any(eagle, tiny_target)
    edit(eagle, drop=("embed_tokens.weight",), eagle_aux_hidden_state_layer_ids=[2, 3, 9])
    with pytest.raises(DraftsmithError, match="between 1 and 6"):
        load_any(eagle, tiny_target)
    edit(eagle, drop=("norm.weight",), eagle_aux_hidden_state_layer_ids=[2, 3, 4])
    with pytest.raises(DraftsmithError, match=r"doesn't fit eagle3; tensors: 1 missing \(norm.weight\)"):
        load_any(eagle, tiny_target)


def test_a_targets_own_modules_are_a_head(tmp_path: Path) -> None:
    """MiMo's, where its config says that it is a Qwen2: transformers then loads the target."""
    from tiny import make_tiny_tokenizer
    from transformers import AutoConfig

    folder = make_checkpoint(tmp_path / "target", "mimo")
    make_tiny_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    assert AutoConfig.from_pretrained(folder).model_type == "qwen2"
    target = Target.load(str(folder), dtype=torch.float32, device="cpu")
    found = load_any(folder, target)
    assert found.config.family == "mtp"
    same(found, build_head(folder))


# --- exports that were changed ----------------------------------------------------------------------------------------


@pytest.fixture
def export(tiny_target: Any, tmp_path: Path) -> Path:
    """An EAGLE-3 head exported for vLLM."""
    export_head(make_run(tmp_path, random_head(tiny_target, "eagle3"), "eagle3"), tmp_path / "out", "vllm")
    return tmp_path / "out"


def note(folder: Path, **values: Any) -> None:
    """Change draftsmith.json."""
    path = folder / "draftsmith.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "rope": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope is .*'default'.*, not .*llama3"),
    "epsilon": ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, not 3e-05"),
    "layers": (
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "eagle_config": {}},
        r"layer_ids is \[1, 3, 5\], not \[2, 3, 4\]",
    ),
    "residual": ({"norm_before_residual": True}, "norm_before_residual is True, not False"),
    "family": ({"fc_norm": True, "norm_output": True}, "a head of the kind eagle3.1, not eagle3"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_config_that_was_changed_is_a_disagreement(tiny_target: Any, export: Path, name: str) -> None:
    changes, said = CHANGES[name]
    edit(export, **changes)
    with pytest.raises(DraftsmithError, match=rf"draftsmith.json say different things \({said}"):
        load_any(export, tiny_target)


def test_another_vocabulary_is_a_disagreement(tiny_target: Any, export: Path) -> None:
    offsets = load_file(export / "model.safetensors")["d2t"]
    offsets[0] -= 1
    mask = torch.zeros(320, dtype=torch.bool)
    mask[torch.arange(159) + offsets] = True
    edit(export, add={"d2t": offsets, "t2d": mask})
    with pytest.raises(DraftsmithError, match="holds another draft vocabulary"):
        load_any(export, tiny_target)


def test_weights_of_another_shape_do_not_fit(tiny_target: Any, export: Path) -> None:
    edit(export, add={"norm.weight": torch.ones(65)})
    with pytest.raises(DraftsmithError, match=r"1 misshaped \(norm.weight is \[65\] instead of \[64\]\)"):
        load_any(export, tiny_target)


def test_a_bias_where_the_head_has_none_is_a_disagreement(tiny_target: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path, random_head(tiny_target, "eagle1", fc_bias=False), "eagle1")
    export_head(run, tmp_path / "out", "sglang")
    edit(tmp_path / "out", add={"fc.bias": torch.ones(64)})
    with pytest.raises(DraftsmithError, match=r"different things \(fc has a bias, not none\)"):
        load_any(tmp_path / "out", tiny_target)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"schema": "draftsmith.export/9"}, "schema 'draftsmith.export/9' is not 'draftsmith.export/1'"),
        ({"serves": "vllm"}, "serves is missing or damaged"),
        ({"config": {}}, "config names no family"),
        ({"config": {"family": "eagle9"}}, "unknown head family 'eagle9'"),
        ({"config": {"family": "eagle3"}}, "key .* is missing"),
        ({"draft_tokens": "AAAA"}, "draft_tokens is no vocabulary of 320 tokens"),
        ({"draft_tokens": "%"}, "draft_tokens is no vocabulary of 320 tokens"),
    ],
)
def test_a_damaged_record_is_refused(tiny_target: Any, export: Path, values: dict[str, Any], said: str) -> None:
    note(export, **values)
    with pytest.raises(DraftsmithError, match=said):
        load_any(export, tiny_target)


def test_an_export_is_read_without_its_target(tiny_target: Any, export: Path) -> None:
    found = load_any(export, None)
    assert found.config.target_fingerprint == tiny_target.fingerprint
    note(export, config={**found.config.to_dict(), "target_fingerprint": "0"})
    with pytest.raises(DraftsmithError, match="the head was trained for another target"):
        load_any(export, tiny_target)


def test_a_vocabulary_is_a_bit_for_each_token() -> None:
    """Tokens 0, 3 and 9 of 10: 1 + 8 in the first byte, 2 in the second."""
    vocab = DraftVocab(torch.tensor([0, 3, 9]), 10)
    assert pack_tokens(vocab) == "CQI="
    assert unpack_tokens("CQI=", 10, Path()).tolist() == [0, 3, 9]
    whole = DraftVocab(torch.arange(320), 320)
    assert torch.equal(unpack_tokens(pack_tokens(whole), 320, Path()), whole.target_ids)


def test_two_checkpoints_are_no_export(tiny_target: Any, export: Path) -> None:
    """A checkpoint's files beside an export's: the checkpoint is what the folder is."""
    head = random_head(tiny_target, "eagle3")
    save_head(head, export)
    same(load_any(export, tiny_target), head)
