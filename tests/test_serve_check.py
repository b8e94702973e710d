"""The command `serve-check`: what goes to the engine, what is made of its counters, mistakes. The engine is a stand-in
that says what plain decoding does and counts what the test says; the real one is tried by `make serve-check`."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from test_compare import add_run
from test_eval_harness import make_head
from typer.testing import CliRunner

from draftsmith import cli
from draftsmith.errors import DraftsmithError
from draftsmith.eval import serve_check as module
from draftsmith.eval.benchmarks import builtin_set
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.loop import decode, rows_needed
from draftsmith.eval.serve_check import serve_check
from draftsmith.eval.served import ServeSettings
from draftsmith.files import write_json
from draftsmith.heads.resolve import resolve_target

ENGINE = """
import json, pathlib, types

__version__ = "0.0"
SAID = json.loads((pathlib.Path(__file__).parent / "said.json").read_text())


class SamplingParams:
    def __init__(self, temperature, max_tokens, stop_token_ids=()):
        assert temperature == 0
        self.most, self.stop = max_tokens, set(stop_token_ids)


class LLM:
    def __init__(self, model, dtype, max_num_seqs, max_model_len, speculative_config, **others):
        assert dtype == "float32" and max_num_seqs == 1
        if SAID["broken"]:
            raise SystemExit("no room for the cache")
        self.speculative, self.longest, self.answers = speculative_config, max_model_len, 0

    def generate(self, prompts, params, use_tqdm):
        tokens = prompts[0]["prompt_token_ids"]
        assert len(tokens) + params.most <= self.longest
        new = SAID["answers"][json.dumps(tokens)][: params.most]
        if self.speculative and self.speculative["method"] in SAID["wrong"]:
            new[-1] += 1
        self.answers += 1
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=new)])]

    def get_metrics(self):
        if self.speculative is None:
            return []
        accepted = round(1000 * (SAID["tau"] - 1)) * self.answers
        counts = {"drafts": 1000 * self.answers, "draft_tokens": 0, "accepted_tokens": accepted}
        named = [types.SimpleNamespace(name="vllm:spec_decode_num_" + n, value=v) for n, v in counts.items()]
        depths = types.SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[accepted, 0, 0])
        return [*named, depths]
"""


@pytest.fixture(scope="module")
def answers(tiny_target: Any) -> dict[str, list[int]]:
    """Plain greedy answers by prompt: what the engine says."""
    prompts = builtin_set("heldout", tiny_target.tokenizer, limit=2, max_new_tokens=8, room=tiny_target.max_positions)
    plain = PlainDrafter()
    capacity = rows_needed(prompts.requests, plain)
    found = decode(tiny_target, plain, prompts.requests, slots=1, capacity=capacity)
    return {json.dumps(result.prompt): result.tokens for result in found}


@pytest.fixture
def place(
    tiny_target: Any, tiny_folder: Path, tmp_path: Path, answers: dict[str, list[int]]
) -> tuple[ServeSettings, Path]:
    """A run with a head, and an engine; returns settings and the file that says what the engine is to count."""
    runs, installed = tmp_path / "runs", tmp_path / "engines"
    add_run(runs / resolve_target(str(tiny_folder)).name, "eagle3", make_head(tiny_target))
    package = tmp_path / "packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(ENGINE)
    (installed / "vllm" / "bin").mkdir(parents=True)
    program = installed / "vllm" / "bin" / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{package.parent}" exec "{sys.executable}" -S "$@"\n')
    program.chmod(0o755)
    settings = ServeSettings(str(tiny_folder), "eagle3", runs, prompts=2, max_new_tokens=6, installed=installed)
    said = package / "said.json"
    write_json(said, {"answers": answers})
    say(said)
    return settings, said


def say(file: Path, tau: float = 1.0, wrong: tuple[str, ...] = (), broken: bool = False) -> None:
    answers = json.loads(file.read_text())["answers"]
    write_json(file, {"answers": answers, "tau": tau, "wrong": wrong, "broken": broken})


def test_counters_must_agree_and_outputs_be_equal(place: tuple[ServeSettings, Path]) -> None:
    settings, said = place
    say(said, tau=3.25, wrong=("ngram",))
    found = serve_check(settings)
    assert not found["passed"]
    assert found["vllm_tau"] == pytest.approx(3.25)
    assert not found["outputs_equal"]
    assert found["ways"]["eagle3"]["differing"] == []
    assert found["equal_to_decoder"] == settings.prompts
    assert any("n-gram: outputs differ" in text for text in found["failures"])
    assert any("vLLM counts 3.250" in text for text in found["failures"])

    shutil.rmtree(Path(found["path"]).parent / "serve")
    say(said, tau=found["decoder_tau"])
    right = serve_check(settings)
    assert right["passed"], right["failures"]
    assert right["failures"] == []
    assert right["outputs_equal"]
    assert right["skipped"] == [f"speculators is not installed in {settings.installed}: run 'make engines'"]
    assert right["decoder_tau"] >= 1
    assert set(right["tokens_per_s"]) >= {"vllm plain", "vllm n-gram", "vllm eagle3", "draftsmith plain"}
    assert all(rate > 0 for rate in right["tokens_per_s"].values())
    assert Path(right["path"]).is_file()


def test_what_was_measured_is_not_measured_again(place: tuple[ServeSettings, Path], monkeypatch: Any) -> None:
    settings, said = place
    say(said, broken=True)
    with pytest.raises(DraftsmithError, match=r"vllm failed: no room for the cache .*vllm-plain.log"):
        serve_check(settings)
    say(said)
    calls: list[str] = []
    work = module._work
    monkeypatch.setattr(module, "_decode_all", lambda *_: pytest.fail("decoded again"))
    monkeypatch.setattr(module, "_work", lambda engine, *rest: calls.append(engine) or work(engine, *rest))
    first = serve_check(settings)
    assert calls
    monkeypatch.setattr(module, "_work", lambda *_: pytest.fail("served again"))
    assert serve_check(settings) == first


def test_mistakes_are_said(place: tuple[ServeSettings, Path], tmp_path: Path) -> None:
    settings, _ = place
    with pytest.raises(DraftsmithError, match="make engines"):
        serve_check(dataclasses.replace(settings, installed=tmp_path / "nowhere"))
    with pytest.raises(DraftsmithError, match="holds no trained head"):
        serve_check(dataclasses.replace(settings, head="medusa1"))
    with pytest.raises(DraftsmithError, match="--depth 0"):
        dataclasses.replace(settings, depth=0)


def test_speculators_has_its_say(place: tuple[ServeSettings, Path], tmp_path: Path) -> None:
    """Its stand-in says that one tensor differs; what it converts is served, too."""
    settings, _ = place
    program = settings.installed / "speculators" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!{sys.executable} -S\n"
        "import json, pathlib, sys\n"
        "job = json.loads(pathlib.Path(sys.argv[2]).read_text())\n"
        "assert json.loads(pathlib.Path(job['own'], 'config.json').read_text())['speculators_config']['verifier']"
        "['name_or_path'] == job['target']\n"
        "pathlib.Path(job['converted']).mkdir()\n"
        "pathlib.Path(sys.argv[3]).write_text(json.dumps({'version': '1', 'differing': ['fc.weight']}))\n"
    )
    program.chmod(0o755)
    found = serve_check(settings)
    assert set(found["ways"]) == {"n-gram", "eagle3", "speculators", "converted"}
    assert any("speculators holds other values: fc.weight" in text for text in found["failures"])
    assert found["skipped"] == []
    assert found["versions"]["speculators"] == "1"


def test_the_command_fails_where_the_check_does(place: tuple[ServeSettings, Path]) -> None:
    settings, said = place
    say(said, tau=2.5)
    options = ["serve-check", "--model", settings.model, "--runs", str(settings.runs), "--engines",
               str(settings.installed), "--prompts", "1", "--max-new-tokens", "4"]  # fmt: skip
    done = CliRunner().invoke(cli.app, options)
    assert done.exit_code == 1
    assert "FAILED" in done.output
    (result,) = settings.runs.glob("*/eagle3/serve_check.json")
    right = json.loads(result.read_text())["decoder_tau"]
    shutil.rmtree(result.parent / "serve")
    say(said, tau=right)
    assert CliRunner().invoke(cli.app, options).exit_code == 0
