"""Doctor names the cause of whatever is wrong with a head's directory, and never fails itself."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doctor_bases import BASES, LAYER_IDS, make_bases, make_head, make_target
from doctor_changes import IDS, both, config, cut, drop, ids, put, tensors
from doctor_faults import ROWS, Fault
from native_checkpoints import make_checkpoint

from draftsmith.errors import DraftsmithError
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.formats.contracts import engines
from draftsmith.heads.formats.doctor import CHECKS, FIRST, LAST, Diagnosis, diagnose
from draftsmith.heads.formats.doctor_case import OWN, TargetFacts
from draftsmith.heads.formats.export import export_head


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("doctor") / "target")


@pytest.fixture(scope="module")
def facts(target: Path) -> TargetFacts:
    return TargetFacts.read(target)


@pytest.fixture(scope="module")
def bases(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_bases(target, tmp_path_factory.mktemp("bases"))


def copy(base: Path, to: Path, noted: bool = True) -> Path:
    shutil.copytree(base, to)
    if not noted:
        (to / "draftsmith.json").unlink()
    return to


# --- what is good -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_target", [False, True])
@pytest.mark.parametrize("name", BASES)
def test_a_good_export_has_no_findings(
    bases: dict[str, Path], facts: TargetFacts, name: str, with_target: bool
) -> None:
    found = diagnose(bases[name], facts if with_target else None)
    assert found.findings == []
    assert {engine for engine in found.states if found.passed(engine)} == {*BASES[name].loads, OWN}
    assert found.ok
    others = set(engines()) - set(BASES[name].loads)
    assert all(found.verdicts[engine].startswith("not for this engine: ") for engine in others)


@pytest.mark.parametrize("name", ["eagle3", "eagle3-full", "eagle3.1", "speculators", "medusa-vllm", "medusa-tgi"])
def test_a_good_head_from_elsewhere_has_no_findings(
    bases: dict[str, Path], facts: TargetFacts, tmp_path: Path, name: str
) -> None:
    found = diagnose(copy(bases[name], tmp_path / "head", noted=False), facts)
    assert found.findings == []
    assert {engine for engine in found.states if found.passed(engine)} == {*BASES[name].loads, OWN}
    assert found.ok
    assert found.exported_for == []


def test_each_dialect_of_eagle1_is_for_one_engine(bases: dict[str, Path], facts: TargetFacts, tmp_path: Path) -> None:
    for engine, other in (("vllm", "sglang"), ("sglang", "vllm")):
        found = diagnose(copy(bases[f"eagle1-{engine}"], tmp_path / engine, noted=False), facts)
        assert found.passed(engine)
        assert found.states[other] == "refused"
        assert found.ok


def test_an_own_checkpoint_is_for_no_engine_yet(target: Path, facts: TargetFacts, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "train" / "checkpoints" / "best"
    folder.mkdir(parents=True)
    save_head(make_head(target, "eagle3", layer_ids=LAYER_IDS), folder)
    found = diagnose(tmp_path / "run", facts)
    assert found.findings == []
    assert found.folder == folder.resolve()
    assert found.ok
    assert "draftsmith export RUN --engine vllm" in found.verdicts["vllm"]
    assert "TGI drafts with Medusa" in found.verdicts["tgi"]
    tensors(lambda t: t.pop("norm"))(folder)
    assert "tensor 'norm' is missing" in diagnose(tmp_path / "run", facts).findings[0].cause


def test_a_target_with_modules_of_its_own_is_for_the_engines_of_its_kind(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "target", "mimo")
    found = diagnose(folder)
    assert found.findings == []
    assert {engine for engine in found.states if found.passed(engine)} == {"sglang", "vllm", OWN}
    assert "DeepSeek-V3's layout alone" in found.verdicts["tensorrt-llm"]
    tensors(lambda t: t["model.mtp_layers.0.input_proj.weight"].zero_())(folder)
    assert diagnose(folder).findings[0].check == "constant"
    tensors(lambda t: t.pop("model.mtp_layers.0.input_proj.weight"))(folder)
    assert diagnose(folder).findings[0].check in ("reader", "layout")


# --- what is wrong ----------------------------------------------------------------------------------------------------


def test_there_is_a_row_for_every_check() -> None:
    assert len(ROWS) >= 30
    assert len({(row.base, row.check, row.name) for row in ROWS}) == len(ROWS)
    checks = {*FIRST, *CHECKS, *LAST, "truncated", "index"}
    assert {row.check for row in ROWS} | {"reader"} == checks


def test_the_page_names_every_check() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "doctor.md").read_text("utf-8")
    named = {name.strip() for line in page.splitlines() for name in line.split("|")[1:2] for name in name.split(",")}
    assert {*FIRST, *CHECKS, *LAST, "acceptance"} <= named


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.base}: {row.check}: {row.name}" for row in ROWS])
def test_the_cause_is_named_first(
    bases: dict[str, Path], target: Path, facts: TargetFacts, tmp_path: Path, row: Fault
) -> None:
    folder = copy(bases[row.base], tmp_path / "head", row.noted)
    row.change(folder)
    if row.target:
        config(**row.target)(Path(shutil.copytree(target, tmp_path / "target")))
        facts = TargetFacts.read(tmp_path / "target")
    found = diagnose(folder, facts)
    first = found.findings[0]
    assert (first.check, row.text in first.cause) == (row.check, True), first.cause
    assert first.is_fault == bool(row.effects)
    states = {engine: found.states[engine] for engine in BASES[row.base].loads}
    assert states == {engine: row.effects.get(engine, "loads") for engine in states}
    for engine, state in states.items():
        start = {"refused": "refused: ", "weak": "loads, but may accept less: "}.get(state, "loads")
        assert found.verdicts[engine].startswith(start)
    if set(row.effects) >= set(states):
        assert not found.ok


def test_what_only_the_target_tells_is_not_said_without_it(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(bases["eagle3"], tmp_path / "head", noted=False)
    both(config(max_position_embeddings=2048), ids([2, 4, 6]))(folder)
    assert diagnose(folder).findings == []


def test_another_targets_head_is_told_by_its_width(bases: dict[str, Path], facts: TargetFacts, tmp_path: Path) -> None:
    folder = copy(bases["eagle3"], tmp_path / "head", noted=False)
    found = diagnose(folder, dataclasses.replace(facts, hidden_size=128))
    assert found.findings[0].check == "target"
    assert "states are 128 wide" in found.findings[0].cause


def test_the_own_reader_has_the_last_word(bases: dict[str, Path], facts: TargetFacts, tmp_path: Path) -> None:
    """A window in the layer: engines read it, no head here does."""
    folder = copy(bases["eagle3"], tmp_path / "head", noted=False)
    config(sliding_window=2048)(folder)
    found = diagnose(folder, facts)
    assert [f.check for f in found.findings] == ["reader"]
    assert "attends to a window of 2048" in found.verdicts[OWN]
    assert found.passed("vllm")


def test_a_class_that_no_contract_covers_is_not_judged(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(bases["eagle3"], tmp_path / "head", noted=False)
    config(architectures=["Eagle3Qwen3ForCausalLM"])(folder)
    found = diagnose(folder)
    assert found.verdicts["vllm"].startswith("not judged: Eagle3Qwen3ForCausalLM")
    assert found.states[OWN] == "refused"
    assert not found.ok


def test_no_folder_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match="is no folder"):
        diagnose(tmp_path / "nothing")
    found = diagnose(tmp_path)
    assert found.findings[0].check == "weights"
    assert not found.ok


# --- never a traceback ------------------------------------------------------------------------------------------------

_ODD: list[Any] = [None, True, -1, 0, 3.5, "x", [], [1], ["a"], {}, {"a": 1}, [[1]], 10**30, "64"]


def _spoil(folder: Path, rng: random.Random) -> str:
    """One change at random; says which."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    texts = [path for path in files if path.suffix == ".json"]
    path, text = rng.choice(files), rng.choice(texts)
    kind = rng.choice(
        ["cut", "delete", "flip", "value", "value", "value", "drop key", "rename", "drop", "cast", "reshape"]
    )
    if kind == "cut":
        cut(rng.random(), path.name)(folder)
    elif kind == "delete":
        path.unlink()
    elif kind == "flip":
        raw = bytearray(path.read_bytes())
        for _ in range(3):
            raw[rng.randrange(min(len(raw), 4000))] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
    elif kind in ("value", "drop key"):
        values = json.loads(text.read_text())
        group = values
        while True:
            key = rng.choice(sorted(group))
            if not isinstance(group[key], dict) or not group[key] or rng.random() < 0.2:
                break
            group = group[key]
        if kind == "value":
            group[key] = rng.choice(_ODD)
        else:
            del group[key]
        text.write_text(json.dumps(values))
        return f"{kind} {text.name} {key} {group.get(key)!r}"
    else:
        tensors(lambda t: _spoil_tensor(t, kind, rng))(folder)
    return f"{kind} {path.name}"


def _spoil_tensor(t: dict[str, torch.Tensor], kind: str, rng: random.Random) -> None:
    name = rng.choice(sorted(t))
    x = t.pop(name)
    if kind == "rename":
        t[rng.choice(["x", name + ".x", name.replace("0", "7"), "fc.weight"])] = x
    elif kind == "cast":
        t[name] = x.to(rng.choice([torch.int8, torch.float64, torch.bool, torch.int64, torch.float16]))
    elif kind == "reshape":
        t[name] = rng.choice([x[:0], x.flatten(), x[None], x.flatten()[0], x[:1], x.repeat(*[2] * x.ndim)]).clone()


@pytest.mark.parametrize("name", ["eagle3", "speculators", "eagle1-sglang", "medusa-vllm", "medusa-tgi"])
def test_no_broken_directory_is_a_traceback(
    bases: dict[str, Path], facts: TargetFacts, tmp_path: Path, name: str
) -> None:
    """Cut and lost files, flipped bytes, odd values, other tensors: always a diagnosis, and mostly a finding."""
    told = 0
    for seed in range(24):
        rng = random.Random(f"{name} {seed}")
        folder = copy(bases[name], tmp_path / str(seed), noted=rng.random() < 0.6)
        change = _spoil(folder, rng)
        try:
            found = diagnose(folder, facts if rng.random() < 0.5 else None)
        except DraftsmithError as error:  # none of these is the user's mistake
            pytest.fail(f"{change}: {error}")
        told += bool(found.findings)
        _check_whole(found)
    assert told >= 12


def _check_whole(found: Diagnosis) -> None:
    assert json.loads(json.dumps(found.to_dict()))["ok"] == found.ok
    assert all("\n" not in line for line in found.lines())
    assert set(found.verdicts) == {*engines(), OWN}
    assert all(finding.cause and finding.fix and finding.check for finding in found.findings)


# --- decoded ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learned(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A run's head that knows the target's answers to three prompts by heart, and its export in fp32.

    Its fusion maps the states of the answers' rows to the output rows of the tokens two further on: a linear system
    with more unknowns than equations. Everything else in it is made too small to matter.
    """
    from draftsmith.eval import exported
    from draftsmith.eval.decoder.drafters.plain import PlainDrafter
    from draftsmith.eval.decoder.loop import Request, decode, rows_needed
    from draftsmith.heads.base import Needs
    from draftsmith.heads.target import Target

    loaded = Target.load(str(target), dtype=torch.float32, device="cpu")
    prompts = ([5, 40, 200, 7], [3, 99, 150, 61, 18], [250, 12, 77])  # of long ones it repeats itself
    requests = [Request(str(i), list(tokens), 24) for i, tokens in enumerate(prompts)]
    plain = PlainDrafter()
    answers = {r.id: r.tokens for r in decode(loaded, plain, requests, slots=3, capacity=rows_needed(requests, plain))}
    assert all(len(set(tokens)) > 12 for tokens in answers.values())
    rows, goals = [], []
    for request in requests:
        tokens = torch.tensor([*request.tokens, *answers[request.id]])
        states, _ = loaded.states(tokens[None], Needs(tuple(LAYER_IDS)))
        start = len(request.tokens) - 1
        rows.append(states[0, start : len(tokens) - 2].double())
        goals.append(loaded.parts().lm_head[tokens[start + 2 :]].double())
    solution = torch.linalg.lstsq(torch.cat(rows), torch.cat(goals), driver="gelsd").solution.T
    head = make_head(target, "eagle3", full=True, layer_ids=LAYER_IDS)
    with torch.no_grad():
        for p in head.layer.parameters():
            p.mul_(1e-4)
        head.fc.weight.copy_(solution)
        head.norm.fill_(1.0)
        head.lm_head.weight.copy_(loaded.parts().lm_head)
    where = tmp_path_factory.mktemp("runs")
    checkpoint = where / "tiny" / "eagle3" / "train" / "checkpoints" / "best"
    checkpoint.mkdir(parents=True)
    save_head(head, checkpoint)
    out = where / "tiny" / "eagle3" / "export"
    export_head(checkpoint, out, "vllm", dtype="fp32", target=target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exported, "builtin_set", lambda *_, **__: SimpleNamespace(requests=requests))
        patch.setattr(exported.Target, "load", lambda *_, **__: loaded)
        yield {"export": out, "runs": where}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_QUIET", "1")


def test_an_export_accepts_what_its_run_does(learned: dict[str, Path], target: Path) -> None:
    from draftsmith.eval.exported import examine

    found = examine(learned["export"], str(target), learned["runs"])
    assert found.findings == []
    assert found.facts["tau"] == found.facts["run_tau"] > 1.8
    assert found.ok


def test_an_export_of_other_weights_is_found(learned: dict[str, Path], target: Path, tmp_path: Path) -> None:
    """As large, as finite, as many: only decoding tells."""
    from draftsmith.eval.exported import examine

    folder = copy(learned["export"], tmp_path / "head")
    put(fc__weight=lambda t: t["fc.weight"].roll(64, 1).contiguous())(folder)
    found = examine(folder, str(target), learned["runs"])
    assert [f.check for f in found.findings] == ["acceptance"]
    assert "from the run's own checkpoint" in found.findings[0].cause
    assert found.states["vllm"] == "weak"
    assert not found.ok


def test_wrong_layer_ids_accept_less(learned: dict[str, Path], target: Path, tmp_path: Path) -> None:
    """What doctor can't see in a head from elsewhere shows in its acceptance."""
    from draftsmith.eval.exported import SUSPECTS, examine

    folder = copy(learned["export"], tmp_path / "head", noted=False)
    right = examine(folder, str(target))
    assert right.findings == []
    assert "run_tau" not in right.facts
    assert right.facts["tau"] > 1.8
    ids([4, 5, 6])(folder)
    assert examine(folder, str(target)).facts["tau"] < right.facts["tau"] - 0.1
    put(fc__weight=lambda t: -t["fc.weight"])(folder)
    wrong = examine(folder, str(target))
    assert [f.check for f in wrong.findings] == ["acceptance"]
    assert SUSPECTS in wrong.findings[0].fix
    assert wrong.facts["tau"] < 1.1
    assert not wrong.ok


# --- command ----------------------------------------------------------------------------------------------------------


def run_cli(*arguments: str) -> tuple[int, str]:
    from typer.testing import CliRunner

    from draftsmith.cli import app

    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_the_command_prints_causes_and_verdicts(bases: dict[str, Path], tmp_path: Path) -> None:
    code, text = run_cli("doctor", str(bases["eagle3"]))
    assert (code, "vllm" in text, "fix" in text) == (0, True, False)
    folder = copy(bases["eagle3"], tmp_path / "head")
    drop("lm_head.weight")(folder)
    code, text = run_cli("doctor", str(folder))
    assert code == 1
    assert "1. names: lm_head.weight is missing" in text
    code, text = run_cli("doctor", str(folder), "--json")
    assert code == 1
    found = json.loads(text)
    assert found["findings"][0]["check"] == "names"
    assert found["passed"]["vllm"] is False
    assert IDS not in text
