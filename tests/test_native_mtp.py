"""A target's own MTP modules: found, read, computed as transformers computes them, written back byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from native_checkpoints import (
    KINDS,
    LAYERS,
    ONE_PLUS,
    H,
    V,
    add_module,
    all_tensors,
    change_config,
    make_checkpoint,
    make_model,
)  # fmt: skip
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.heads.base import Batch, TargetParts
from draftsmith.heads.checkpoint import load_head, save_head
from draftsmith.heads.formats.native_mtp import find_layout, read_native, write_native
from draftsmith.heads.medusa import MedusaHead, medusa_config
from draftsmith.heads.mtp import MtpHead, mtp_config
from draftsmith.heads.target import fingerprint
from draftsmith.heads.vocab import DraftVocab
from draftsmith.run import Run
from draftsmith.run_config import resolve
from draftsmith.sizing import announce

ROWS = 9


def find_native(folder: Path) -> str | None:
    layout = find_layout(folder)
    return None if layout is None else layout.name


def build_head(folder: Path, vocab: DraftVocab | None = None, **values: Any) -> MtpHead:
    """A head with the module's weights, as a warm start makes it."""
    found = read_native(folder)
    vocab = vocab or DraftVocab(torch.arange(V), V)
    head = MtpHead(mtp_config(_text(folder), vocab, **{**found.options, **_identity(folder), **values}), vocab)
    own = dict(head.named_parameters())
    assert set(own) == set(found.tensors) == set(found.names)
    with torch.no_grad():
        for name, x in found.tensors.items():
            own[name].copy_(x)
    return head


# --- what it computes -------------------------------------------------------------------------------------------------


def last_states(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """State n [T, H] before the final norm, and after."""
    seen = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    after = model.model(input_ids=tokens[None]).last_hidden_state[0]
    handle.remove()
    return seen[0], after


def our_logits(head: MtpHead, model: Any, kind: str, tokens: Tensor, before: Tensor, step: int = 0) -> Tensor:
    """Of rows 0 .. T-2-step at a step."""
    one = 1.0 if kind in ONE_PLUS else 0.0
    weights = model.model.embed_tokens.weight, model.lm_head.weight, model.model.norm.weight + one
    parts = TargetParts(*(x.detach() for x in weights), 1e-6)
    n = len(tokens)
    batch = Batch(
        tokens,
        torch.ones(n, dtype=torch.bool),
        torch.zeros(n, dtype=torch.int64),
        torch.arange(n),
        before[:, :0],
        before,
    )
    *_, found = head.unroll(batch, parts, torch.arange(n - 1 - step), step + 1)
    return found.readout @ found.weight.t()


def their_modules(kind: str, folder: Path, count: int) -> Any:
    """As transformers reads them."""
    from transformers.modeling_layers import MtpModel

    model = make_model(kind)
    model.config.name_or_path, model.config.dtype = str(folder), torch.float32
    model.config.num_mtp_layers, model.config.mtp_layer_types = count, ["full_attention"] * count
    # by itself it knows the places behind the last layer for the published models' sizes alone
    model._keys_to_ignore_on_load_unexpected = [
        *(rf"model\.layers\.{LAYERS + i}\." for i in range(count)),
        r"^mtp",
    ]
    return MtpModel.from_pretrained(model).eval()


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"])
@torch.no_grad()
def test_what_is_read_computes_what_transformers_computes(kind: str, tmp_path: Path) -> None:
    """Against its own reader and model of MTP modules, from the same files."""
    folder = make_checkpoint(tmp_path / kind, kind, shards=3)
    model, mtp = make_model(kind), their_modules(kind, folder, 1)
    tokens = torch.randint(0, V, (ROWS,), generator=torch.Generator().manual_seed(1))
    before, after = last_states(model, tokens)
    positions = torch.arange(ROWS - 1)[None]
    theirs = mtp.forward_layer(0, after[None, :-1], positions, None, input_ids=tokens[None, 1:])
    want = mtp._project_to_logits(theirs)[0]
    head = build_head(folder)
    torch.testing.assert_close(our_logits(head, model, kind, tokens, before), want, rtol=2e-5, atol=2e-5)


@torch.no_grad()
def test_a_second_module_computes_what_transformers_computes(tmp_path: Path) -> None:
    """Row j of the second reads t[j+2] and what the first gave row j."""
    kind = "deepseek_v3"
    folder = make_checkpoint(tmp_path / kind, kind)
    add_module(folder)
    model, mtp = make_model(kind), their_modules(kind, folder, 2)
    tokens = torch.randint(0, V, (ROWS,), generator=torch.Generator().manual_seed(1))
    before, after = last_states(model, tokens)
    positions = torch.arange(ROWS - 1)[None]
    first = mtp.forward_layer(0, after[None, :-1], positions, None, input_ids=tokens[None, 1:])
    second = mtp.forward_layer(1, first[:, :-1], positions[:, 1:], None, input_ids=tokens[None, 2:])
    want = mtp._project_to_logits(second)[0]
    got = our_logits(build_head(folder), model, kind, tokens, before, step=1)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@torch.no_grad()
def test_what_is_read_of_mimo_computes_its_formula(tmp_path: Path) -> None:
    """transformers has no MiMo: its module is a Qwen2 layer behind [hidden; embedding] (the published code)."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    folder = make_checkpoint(tmp_path / "mimo", "mimo")
    model, stored = make_model("mimo"), all_tensors(folder)
    mine = {k.removeprefix("model.mtp_layers.0."): x for k, x in stored.items() if ".mtp_layers." in k}
    layer = Qwen2DecoderLayer(model.config, 0)
    layer.load_state_dict({k: x for k, x in mine.items() if k in layer.state_dict()}, strict=True)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * mine[f"{name}.weight"]

    tokens = torch.randint(0, V, (ROWS,), generator=torch.Generator().manual_seed(2))
    before, after = last_states(model, tokens)
    embeds = model.model.embed_tokens(tokens[1:])
    z = torch.cat((norm(after[:-1], "hidden_layernorm"), norm(embeds, "token_layernorm")), -1)
    z = (z @ mine["input_proj.weight"].t())[None]
    rotated = model.model.rotary_emb(z, torch.arange(ROWS - 1)[None])
    out = layer(z, position_embeddings=rotated, position_ids=torch.arange(ROWS - 1)[None])
    want = (
        norm((out[0] if isinstance(out, tuple) else out).reshape(-1, H), "final_layernorm") @ model.lm_head.weight.t()
    )
    got = our_logits(build_head(folder), model, "mimo", tokens, before)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


# --- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_there_and_back_is_the_same_bytes(kind: str, shards: int, tmp_path: Path) -> None:
    """bf16, through a saved head; then a change of every tensor reaches exactly the module's."""
    folder, out = make_checkpoint(tmp_path / "a", kind, shards=shards, dtype=torch.bfloat16), tmp_path / "b"
    assert find_native(folder) == KINDS[kind][0]
    vocab = DraftVocab(torch.arange(1, V, 3), V)
    head = build_head(folder, vocab, steps=2)
    (tmp_path / "head").mkdir()
    save_head(head, tmp_path / "head")
    head = load_head(tmp_path / "head")
    assert write_native(head, folder, out) == []
    for file in folder.iterdir():
        if file.name != "config.json":
            assert (out / file.name).read_bytes() == file.read_bytes(), file.name
    for parameter in head.parameters():
        parameter.add_(0.25)
    changed = write_native(head, folder, tmp_path / "c")
    before, after = all_tensors(folder), all_tensors(tmp_path / "c")
    module = {n for n in KINDS[kind][3]() if not n.endswith(("correction_bias", "embed_tokens.weight", "head.weight"))}
    assert set(changed) == module
    for name, x in before.items():
        moved = (x.double() + 0.25).to(x.dtype) if name in module else x
        assert after[name].dtype == x.dtype
        # read and written in fp32, a norm less 1 may round to a neighbour
        torch.testing.assert_close(after[name], moved, rtol=0.005 if name in module else 0, atol=0)
    again = build_head(tmp_path / "c", vocab)
    assert fingerprint(tmp_path / "c") == fingerprint(folder)
    for name, x in again.named_parameters():
        torch.testing.assert_close(x, dict(head.named_parameters())[name], rtol=0.005, atol=0.005)


@torch.no_grad()
def test_norms_less_one_keep_their_bytes_however_small(tmp_path: Path) -> None:
    """1 + 1e-7 is 1 in bf16 and nearly so in fp32: what training left alone is not written."""
    folder = make_checkpoint(tmp_path / "a", "qwen3_5", dtype=torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    stored["mtp.norm.weight"].fill_(1.1e-7)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    head = build_head(folder).bfloat16()
    head.norm[0] = 2.0
    assert head.hnorm.dtype == torch.bfloat16
    assert write_native(head, folder, tmp_path / "b") == ["mtp.norm.weight"]
    head.norm.copy_(read_native(folder).tensors["norm"])
    assert write_native(head, folder, tmp_path / "c") == []


def test_only_files_with_modules_are_copied(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a", "qwen3_next", dtype=torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {True: "model-mtp.safetensors", False: "model-rest.safetensors"}
    for mine, file in files.items():
        save_file({k: x for k, x in stored.items() if k.startswith("mtp.") == mine}, folder / file)
    weight_map = {name: files[name.startswith("mtp.")] for name in stored}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "pytorch_model.bin").write_bytes(b"the target once more")
    for name in ("templates/tool.jinja", "original/weights.pth", ".cache/lock"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("x")
    head = build_head(folder)
    with torch.no_grad():
        head.eh_proj.weight.add_(1.0)
    out = tmp_path / "b"
    assert write_native(head, folder, out) == ["mtp.fc.weight"]
    assert (out / "model-rest.safetensors").samefile(folder / "model-rest.safetensors")
    assert not (out / "model-mtp.safetensors").samefile(folder / "model-mtp.safetensors")
    assert sorted(x.name for x in out.iterdir()) == [
        "config.json", "generation_config.json", "model-mtp.safetensors", "model-rest.safetensors",
        "model.safetensors.index.json", "notes.txt", "templates",
    ]  # fmt: skip
    assert (out / "templates" / "tool.jinja").read_text() == "x"
    # the count that the target's config left out is there, and nothing else is new
    config, before = (json.loads((x / "config.json").read_text()) for x in (out, folder))
    assert config == {**before, "num_nextn_predict_layers": 1}


@torch.no_grad()
def test_several_modules_are_a_chain(tmp_path: Path) -> None:
    """Each has its own tensors; the chain drafts as many tokens."""
    folder = make_checkpoint(tmp_path / "a", "deepseek_v3")
    stored, bias = add_module(folder), "mlp.gate.e_score_correction_bias"
    head = build_head(folder)
    assert head.most_depth == 2
    own = dict(head.named_parameters())
    for i in (0, 1):
        assert torch.equal(own[f"depths.{i}.enorm"], stored[f"model.layers.{LAYERS + i}.enorm.weight"])
    own["depths.1.norm"].add_(1.0)
    assert write_native(head, folder, tmp_path / "b") == [f"model.layers.{LAYERS + 1}.shared_head.norm.weight"]
    stored[f"model.layers.{LAYERS + 1}.{bias}"] += 1.0
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DraftsmithError, match=r"choose experts with different mlp\.gate.e_score_correction_bias"):
        read_native(folder)


def test_a_run_announces_the_module_that_it_starts_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a Llama layer's: MiMo's has biases."""
    folder = make_checkpoint(tmp_path / "target", "mimo")
    change_config(folder, model_type="qwen2")
    flags = {"model": str(folder), "head": "mtp", "head_init": "native", "runs": tmp_path / "runs"}
    planned = announce(Run(resolve("run", flags, None, ["head.layer_ids=[1]"])))
    assert planned is not None
    assert planned["head"]["params"] == sum(p.numel() for p in build_head(folder).parameters())
    assert "mtp (0.0M, draft vocabulary 40) for target" in capsys.readouterr().err


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_target_without_modules_has_none(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    make_model("mimo").save_pretrained(folder)
    assert find_native(folder) is None
    assert find_native(tmp_path) is None
    with pytest.raises(
        DraftsmithError, match=r"has no MTP modules of its own of a known layout \(deepseek_v3, glm4_moe"
    ):
        read_native(folder)


def test_mimo_may_call_itself_qwen2(tmp_path: Path) -> None:
    """transformers loads it by that name; what was trained on it is written into the published folder."""
    published = make_checkpoint(tmp_path / "published", "mimo")
    change_config(published, architectures=["MiMoForCausalLM"])
    edited = Path(shutil.copytree(published, tmp_path / "edited"))
    change_config(edited, model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    assert find_native(edited) == "mimo"
    head = build_head(edited)
    with torch.no_grad():
        head.norm.add_(1.0)
    assert write_native(head, published, tmp_path / "tuned") == ["model.mtp_layers.0.final_layernorm.weight"]
    assert (tmp_path / "tuned" / "config.json").read_bytes() == (published / "config.json").read_bytes()
    change_config(published, model_type="qwen3")
    assert fingerprint(published) != fingerprint(edited)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mtp.norm.weight": None}, "1 missing tensor: mtp.norm.weight"),
        ({"mtp.layers.0.self_attn.k_norm.weight": None}, "missing tensor: mtp.layers.0.self_attn.k_norm.weight"),
        ({"mtp.extra.weight": torch.ones(2)}, "1 unexpected tensor: mtp.extra.weight"),
        ({"mtp.layers.1.mlp.gate_proj.weight": torch.ones(2)}, "unexpected tensor: mtp.layers.1.mlp.gate_proj.weight"),
        ({"mtp.fc.weight": torch.ones(H, H)}, r"misshaped tensor: mtp.fc.weight \[24, 24\] instead of \[24, 48\]"),
        ({"mtp.fc.weight": torch.ones(H, 2 * H, dtype=torch.int8)}, r"quantised tensor: mtp.fc.weight \(I8\).* bf16"),
    ],
)
def test_wrong_tensors_are_named(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a", "qwen3_5")
    stored: dict[str, Tensor | None] = {**load_file(folder / "model.safetensors"), **change}
    save_file({k: x for k, x in stored.items() if x is not None}, folder / "model.safetensors")
    with pytest.raises(DraftsmithError, match=message):
        read_native(folder)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("qwen3_5", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers = 2, .* how many modules they are, at most 1"),
        ("deepseek_v3", {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers = 0, and the checkpoint has MTP"),
        ("deepseek_v3", {"num_nextn_predict_layers": 2}, "missing tensors: model.layers.3.eh_proj.weight, "),
        ("deepseek_v3", {"rope_interleave": False}, "config.json: rope_interleave = false: latent attention"),
        ("deepseek_v3", {"num_hidden_layers": 1}, "missing tensors: model.layers.1.eh_proj.weight"),
    ],
)
def test_a_config_that_does_not_fit_is_named(kind: str, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a", kind)
    change_config(folder, **values)
    with pytest.raises(DraftsmithError, match=message):
        read_native(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors.index.json", "{}", "its weight_map doesn't name a file"),
        ("model.safetensors.index.json", "[]", "it holds a list, not an object"),
        ("model.safetensors.index.json", '{"weight_map": {"mtp.norm.weight": "../x"}}', "its weight_map doesn't name"),
        ("model.safetensors.index.json", '{"weight_map": ', "Expecting value"),
        ("model.safetensors.index.json", '{"weight_map": {"mtp.norm.weight": "gone"}}', "a/gone is missing or damaged"),
        ("config.json", "[]", "it holds a list, not an object"),
        ("config.json", '{"model_type": "qwen3_5_text", "num_hidden_layers": "two"}', "config.json can't be read"),
        ("config.json", '{"model_type": "qwen3_5_text", "mtp_num_hidden_layers": true}', "= True, and the checkpoint"),
    ],
)
def test_a_damaged_folder_is_named(file: str, content: str, message: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a", "qwen3_5", shards=2)
    (folder / file).write_text(content)
    with pytest.raises(DraftsmithError, match=message) as error:
        read_native(folder)
    assert "\n" not in str(error.value)


@torch.no_grad()
def test_a_copy_without_all_files_is_not_made(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a", "mimo", shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.other.weight"] = "gone.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DraftsmithError, match=r"a has no gone.safetensors, which its index names"):
        write_native(build_head(folder), folder, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_config_may_leave_out_what_is_the_default(tmp_path: Path) -> None:
    """DeepSeek's layers are 61 by default: the module is then looked for behind those."""
    folder = make_checkpoint(tmp_path / "a", "deepseek_v3")
    config = json.loads((folder / "config.json").read_text())
    del config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps({**config, "text_config": None}))
    assert find_native(folder) == "deepseek_v3"
    with pytest.raises(DraftsmithError, match=r"missing tensors: model\.layers\.61\.eh_proj\.weight"):
        read_native(folder)


@torch.no_grad()
@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), torch.float32), (1e6, torch.float16)])
def test_what_is_no_number_in_the_targets_dtype_is_not_written(
    value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "a", "mimo", dtype=dtype)
    head = build_head(folder)
    head.norm[3] = value
    with pytest.raises(DraftsmithError, match=r"1 tensor: model.mtp_layers.0.final_layernorm.weight: nothing was wri"):
        write_native(head, folder, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a", "mimo", shards=2)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"short")
    with pytest.raises(DraftsmithError, match=r"model-00002-of-00002.safetensors is missing or damaged"):
        read_native(folder)
    whole = make_checkpoint(tmp_path / "b", "deepseek_v3") / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-8])
    with pytest.raises(DraftsmithError, match=r"b/model.safetensors is missing or damaged"):
        read_native(whole.parent)


def test_a_head_of_something_else_is_not_written(tmp_path: Path) -> None:
    folder, out = make_checkpoint(tmp_path / "a", "mimo"), tmp_path / "b"
    head = build_head(folder)
    for values, message in (
        ({"recycled": "pre_norm"}, "the head's recycled = 'pre_norm' is not what .*: 'post_norm'"),
        ({"attention": {"kind": "standard"}}, "the head's attention = .*'bias': False.* is not what"),
        ({"modules": 2, "steps": 2}, "the head's modules = 2 is not what"),
    ):
        with pytest.raises(DraftsmithError, match=message):
            write_native(build_other(folder, head, values), folder, out)
    vocab = head.vocab
    medusa = medusa_config(_text(folder), vocab, **_identity(folder))
    with pytest.raises(DraftsmithError, match="a head of family 'medusa' can't be written"):
        write_native(MedusaHead(medusa, vocab), folder, out)
    assert not out.exists()
    with pytest.raises(DraftsmithError, match=r"a/tuned lies in .*/a, whose copy it is to be"):
        write_native(head, folder, folder / "tuned")
    (tmp_path / "there").mkdir()
    with pytest.raises(DraftsmithError, match="there is there already"):
        write_native(head, folder, tmp_path / "there")
    other = shutil.copytree(folder, tmp_path / "other")
    stored = load_file(other / "model.safetensors")
    stored["model.norm.weight"] += 1.0
    save_file(stored, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DraftsmithError, match="the head was trained for tiny"):
        write_native(head, other, out)


def build_other(folder: Path, head: MtpHead, values: dict[str, Any]) -> MtpHead:
    """A head of the same target that computes something else."""
    config = mtp_config(_text(folder), head.vocab, **{**read_native(folder).options, **_identity(folder), **values})
    return MtpHead(config, head.vocab)


def _identity(folder: Path) -> dict[str, Any]:
    return {
        "target_id": "tiny", "target_revision": None, "chat_template_sha256": None, "trained_length": 64,
        "target_fingerprint": fingerprint(folder),
    }  # fmt: skip


def _text(folder: Path) -> Any:
    from transformers import AutoConfig

    config = json.loads((folder / "config.json").read_text())
    kind = "qwen2" if config["model_type"] == "mimo" else config["model_type"]
    return AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "model_type"})
