"""Runs that start from a checkpoint: where they begin, what identifies them, how they go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import foreign_heads
import pytest
import torch
from safetensors.torch import load_file, save_file
from train_worker import recipe
from warm_checks import Place, begin, edit, make_head, make_place

from draftsmith.errors import DraftsmithError
from draftsmith.heads.checkpoint import load_head, save_head
from draftsmith.train.settings import load_head_recipe
from draftsmith.train.stage import train_stage


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_QUIET", "1")


@pytest.fixture(scope="module")
def place(tiny_folder: Path, tiny_target: Any, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tiny_folder, tiny_target, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def trained(place: Place, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished EAGLE-3 training: its folder and record."""
    folder = tmp_path_factory.mktemp("trained") / "eagle3"
    return folder, train(place, folder / "train", None, steps=30, lr_matrix=0.04, lr_other=0.02)


def train(place: Place, folder: Path, init: Path | None, name: str = "eagle3", **values: Any) -> dict[str, Any]:
    if name == "eagle3":
        settings = recipe(decode_documents=0, **values)
    else:
        small = {"token_budget": 96, "dtype": "float32", "decode_documents": 0, "validate_every": 4, **values}
        settings = load_head_recipe(name, {"head": {"steps": 2, "draft_vocab_size": 280}, "train": small})
    if init is not None:  # its vocabulary comes with it
        settings = settings.model_copy(update={"head": settings.head.model_copy(update={"draft_vocab_size": None})})
    return train_stage(
        settings, location=str(place.folder), revision=None, features=place.store, folder=folder,
        head_init=None if init is None else str(init),
    )  # fmt: skip


def measured(place: Place, head: Any, settings: Any) -> dict[str, Any]:
    from draftsmith.data_recipes.store import FeatureStore
    from draftsmith.train.batches import plans_of
    from draftsmith.train.ranks import Ranks
    from draftsmith.train.step import TrainStep
    from draftsmith.train.validate import validate

    store = FeatureStore.open(place.store)
    _, held_out, _ = plans_of(store, settings.train)
    step = TrainStep(head, place.parts, torch.float32)
    return validate(step, store, held_out, settings.train.validate_depth, Ranks(0, 1, torch.device("cpu")))


def test_a_run_begins_where_the_other_ended(place: Place, trained: Any, tmp_path: Path) -> None:
    folder, _ = trained
    settings = recipe(decode_documents=0, steps=6)
    settings = settings.model_copy(update={"head": settings.head.model_copy(update={"draft_vocab_size": None})})
    head, _, _ = begin(place, folder, settings)
    best = json.loads((folder / "train" / "checkpoints" / "best" / "validation.json").read_text())
    now = measured(place, head, settings)
    assert now["tau_walk"] > 1, "there is something to find again"
    for name in ("loss", "tau_walk", "acceptance_cumulative", "expected_acceptance"):
        assert now[name] == pytest.approx(best[name], rel=1e-6), name


def test_what_a_run_started_from_identifies_it(place: Place, trained: Any, tmp_path: Path) -> None:
    folder, _ = trained
    record = train(place, tmp_path / "train", folder, steps=2)
    assert record["finished"]
    assert record["head_init"]["source"] == str(folder)
    plan = json.loads((tmp_path / "train" / "plan.json").read_text())
    assert plan["head_init"] == record["head_init"]["sha256"]
    again = train(place, tmp_path / "train", folder, steps=2)
    assert {name: again[name] for name in record if name != "seconds"} | {"seconds": 0} == {**record, "seconds": 0}
    other = tmp_path / "other"
    other.mkdir()
    head = load_head(folder / "train" / "checkpoints" / "best")
    with torch.no_grad():
        head.fc.weight[0, 0] += 1
    save_head(head, other)
    again = train(place, tmp_path / "train", other, steps=2)
    assert again["head_init"]["sha256"] != record["head_init"]["sha256"]
    assert len(list(tmp_path.glob("train.*"))) == 1, "the earlier training is set aside"


def interrupt(folder: Path, step: int) -> None:
    """Leave a finished training as it was after a step."""
    (folder / "manifest.json").unlink()
    for saved in (folder / "checkpoints").glob("step-*"):
        if int(saved.name.partition("-")[2]) > step:
            shutil.rmtree(saved)


@pytest.mark.parametrize("layout", ["own", "foreign"])
def test_a_run_goes_on_when_its_start_is_gone(place: Place, trained: Any, tmp_path: Path, layout: str) -> None:
    """It takes the steps that it would have taken; with any other setting there is nothing to begin from."""
    head = load_head(trained[0] / "train" / "checkpoints" / "best")
    start, folder = tmp_path / "start", tmp_path / "train"
    if layout == "own":
        start.mkdir()
        save_head(head, start)
    else:
        foreign_heads.specforge(head, start, place.parts)
    limits = {"steps": 4, "save_every": 2, "lr_matrix": 0.02}
    record = train(place, folder, start, **limits)
    noted = (folder / "start.json").read_text()
    last = folder / "checkpoints" / "step-000004" / "model.safetensors"
    wanted = load_file(last)
    interrupt(folder, 2)
    shutil.rmtree(start)
    again = train(place, folder, start, **limits)
    assert again["finished"]
    assert again["head_init"] == record["head_init"]
    found = load_file(last)
    assert all(torch.equal(found[name], x) for name, x in wanted.items())
    assert (folder / "start.json").read_text() == noted
    again = train(place, folder, start, **limits)
    assert again["head_init"] == record["head_init"], "a finished one is skipped"
    with pytest.raises(DraftsmithError, match=r"no head to start from .* only as it was: train.steps = 4, not 6"):
        train(place, folder, start, **{**limits, "steps": 6})
    assert not list(tmp_path.glob("train.*")), "nothing is set aside"
    with pytest.raises(DraftsmithError, match=r"no head to start from at .*: give a checkpoint folder"):
        train(place, tmp_path / "fresh", start, **limits)


def test_medusa_2_goes_on_when_its_start_is_gone(place: Place, tmp_path: Path) -> None:
    """Its own checkpoints are of another kind than what it began from."""
    start, folder = tmp_path / "start", tmp_path / "train"
    start.mkdir()
    save_head(make_head(place, "medusa", steps=2), start)
    limits = {"steps": 2, "save_every": 1}
    record = train(place, folder, start, "medusa2", **limits)
    last = folder / "checkpoints" / "step-000002" / "model.safetensors"
    wanted = load_file(last)
    interrupt(folder, 1)
    shutil.rmtree(start)
    again = train(place, folder, start, "medusa2", **limits)
    assert again["head_init"] == record["head_init"]
    assert again["head_init"]["layout"] == "draftsmith head.json"
    found = load_file(last)
    assert all(torch.equal(found[name], x) for name, x in wanted.items())


def test_a_run_is_no_start_for_itself(place: Place, trained: Any) -> None:
    folder, _ = trained
    with pytest.raises(DraftsmithError, match=r"this very run's training.*RUN=NAME"):
        train(place, folder / "train", folder, steps=2)


def test_medusa_goes_on_from_a_foreign_checkpoint(place: Place, tmp_path: Path) -> None:
    first = train(place, tmp_path / "one" / "train", None, "medusa1", steps=2)
    head = load_head(Path(first["checkpoint"]))
    folder = foreign_heads.medusa_vllm(head, tmp_path / "theirs", place.parts)
    own = train(place, tmp_path / "own" / "train", tmp_path / "one", "medusa1", steps=2)
    theirs = train(place, tmp_path / "two" / "train", folder, "medusa1", steps=2)
    assert theirs["head_init"]["layout"] == "Medusa (vLLM)"
    a, b = (load_file(Path(x["checkpoint"]) / "model.safetensors") for x in (own, theirs))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a), "the layout makes no difference"


def make_data(path: Path) -> Path:
    answers = [{"messages": [{"role": "user", "content": f"say {w}"}, {"role": "assistant", "content": f"{w} " * 9}]}
               for w in ("ship", "fox", "dog", "winter", "story", "home", "north", "answer")]  # fmt: skip
    path.write_text("\n".join(json.dumps(line) for line in answers) + "\n")
    return path


def test_the_command_takes_a_start(place: Place, tmp_path: Path) -> None:
    """Layers are collected for it, and another way to decode the same weights asks for the same start."""
    from typer.testing import CliRunner

    from draftsmith import cli, pipeline, stages
    from draftsmith.run_config import resolve

    data, runs = make_data(tmp_path / "mine.jsonl"), tmp_path / "runs"
    head = make_head(place, "eagle1", full=True)
    folder = foreign_heads.eagle1_repository(head, tmp_path / "theirs", place.parts)
    small = ["prepare.val_every=4", "train.steps=2", "train.token_budget=128", "train.decode_documents=0"]
    small.append("head.draft_vocab_size=320")
    where = ["--model", str(place.folder), "--data", str(data), "--runs", str(runs), "--answers", "dataset"]
    for command in (["prepare"], ["collect", "--head-init", str(folder)], ["train", "--head-init", str(folder)]):
        shown = CliRunner().invoke(cli.app, [*command, "--head", "eagle1", *where, *small, "--json"])
        assert shown.exit_code == 0, shown.output
    result = json.loads(shown.stdout)
    assert result["record"]["head_init"]["source"] == str(folder)
    assert json.loads((Path(result["folder"]) / "plan.json").read_text())["head"]["fc_bias"] is True
    two = {"model": str(place.folder), "head": "eagle2", "data": data, "runs": runs, "answers": "dataset"}
    with pytest.raises(DraftsmithError, match=f"began from {folder}, not from its own start"):
        stages.has_weights(pipeline.Run(resolve("train", two, None, small)))
    two["head_init"] = str(folder)
    assert stages.has_weights(pipeline.Run(resolve("train", two, None, small)))
    with torch.no_grad():
        head.fc.weight[0, 0] += 1
    foreign_heads.eagle1_repository(head, folder, place.parts)
    with pytest.raises(DraftsmithError, match=f"from another head at {folder} than is there now"):
        stages.has_weights(pipeline.Run(resolve("train", two, None, small)))


EARLY: dict[str, tuple[str, str, str]] = {
    "run": ("eagle3", "medusa", "a head of the kind medusa1, and this run trains eagle3"),
    "regenerate": ("medusa1", "copy", "its lm_head differs from the target's"),
    "collect": ("medusa1", "tensors", "misshaped .0.0.linear.bias"),
    "train": ("medusa1", "nothing", "no head to start from"),
}


@pytest.mark.parametrize("command", EARLY)
def test_a_start_that_does_not_fit_is_refused_first(place: Place, tmp_path: Path, command: str) -> None:
    """Before prompts, answers or states are made for it; `train` before an earlier training is set aside."""
    from draftsmith import pipeline
    from draftsmith.run_config import resolve

    name, kind, told = EARLY[command]
    folder, values = tmp_path / "theirs", ["head.steps=3"]
    head = make_head(place, "medusa", full=True)
    if kind == "copy":
        name, values, head = "eagle1", [], make_head(place, "eagle1", full=True)
        foreign_heads.speculators_eagle(head, folder, place.parts)
        edit(folder, add={"lm_head.weight": -place.parts.lm_head})
    elif kind != "nothing":
        path = foreign_heads.medusa_tgi(head, folder, place.parts) / "medusa_lm_head.safetensors"
        if kind == "tensors":
            save_file({**load_file(path), "0.0.linear.bias": torch.ones(3)}, path)
    flags = {"model": str(place.folder), "head": name, "data": make_data(tmp_path / "mine.jsonl"),
             "runs": tmp_path / "runs", "mode": "online", "head_init": str(folder)}  # fmt: skip
    config = resolve(command, flags, None, values)
    with pytest.raises(DraftsmithError, match=told):
        pipeline.COMMANDS[command](config)
    assert not [f for f in (tmp_path / "runs").rglob("*") if f.is_file()], "nothing was begun"


def test_native_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.run_config import resolve

    for name in ("native", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    found = [resolve("train", {"head_init": name}, None, []).head_init for name in ("native", "other")]
    assert found == ["native", str(tmp_path / "other")]


def test_a_finished_run_notices_another_start(tiny_folder: Path, tmp_path: Path) -> None:
    from draftsmith import pipeline
    from draftsmith.run_config import resolve

    start = tmp_path / "start"
    start.mkdir()
    flags = {"model": str(tiny_folder), "runs": tmp_path / "runs", "recipe": "builtin", "head_init": str(start)}
    run = pipeline.Run(resolve("run", flags, None, []))
    empty = pipeline.run_key(run)
    (start / "head.json").write_text("{}")
    assert pipeline.run_key(run) != empty


# --- the target's own MTP modules -------------------------------------------------------------------------------------


def make_native(folder: Path) -> dict[str, torch.Tensor]:
    """A tiny GLM-4-MoE target with an MTP module behind its last layer; returns the module's tensors by their names."""
    from tiny import make_tiny_tokenizer
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    tokenizer = make_tiny_tokenizer()
    config = Glm4MoeConfig(
        vocab_size=320, hidden_size=32, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=4,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=0, num_nextn_predict_layers=1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    Glm4MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path, p, g = folder / "model.safetensors", "model.layers.4.", torch.Generator().manual_seed(2)
    target = load_file(path)
    shapes = {
        "enorm.weight": (32,), "hnorm.weight": (32,), "eh_proj.weight": (32, 64), "shared_head.norm.weight": (32,),
        "input_layernorm.weight": (32,), "post_attention_layernorm.weight": (32,),
        "self_attn.q_proj.weight": (32, 32), "self_attn.k_proj.weight": (16, 32), "self_attn.v_proj.weight": (16, 32),
        "self_attn.o_proj.weight": (32, 32), "mlp.gate_proj.weight": (40, 32), "mlp.up_proj.weight": (40, 32),
        "mlp.down_proj.weight": (32, 40),
    }  # fmt: skip
    module = {p + name: torch.randn(shape, generator=g) * 0.1 + (len(shape) == 1) for name, shape in shapes.items()}
    module[p + "embed_tokens.weight"] = target["model.embed_tokens.weight"].clone()
    module[p + "shared_head.head.weight"] = target["lm_head.weight"].clone()
    save_file({**target, **module}, path, metadata={"format": "pt"})
    return {name.removeprefix(p): x for name, x in module.items()}


def test_the_targets_own_module_is_a_start(tmp_path: Path) -> None:
    from draftsmith.heads.target import Target

    folder = tmp_path / "target"
    module = make_native(folder)
    target = Target.load(str(folder), dtype=torch.float32, device="cpu")
    place = make_place(folder, target, tmp_path)
    settings = load_head_recipe("mtp", {"head": {"steps": 2}, "train": {"steps": 1, "decode_documents": 0}})
    head, config, said = begin(place, "native", settings)
    assert "native MTP (glm4_moe)" in said
    assert (config.modules, config.steps, config.last_state) == (1, 2, "post")
    for ours, theirs in (("enorm", "enorm"), ("eh_proj", "eh_proj"), ("norm", "shared_head.norm")):
        found = getattr(head, ours)
        assert torch.equal(getattr(found, "weight", found), module[f"{theirs}.weight"])
    assert torch.equal(head.layer.down_proj.weight, module["mlp.down_proj.weight"])
    where = {"location": str(folder), "revision": None, "features": place.store, "folder": tmp_path / "train"}
    assert train_stage(settings, head_init="native", **where)["head_init"]["source"] == "native"
    with pytest.raises(DraftsmithError, match=r"holds a head of the kind mtp, and this run trains eagle1 or hass:"):
        begin(place, "native", load_head_recipe("eagle1"))
