"""The benchmark of the decoder: what it writes, what it compares, what it refuses. No figure is judged here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_checks import cut, dense_greedy
from typer.testing import CliRunner

from draftsmith import cli
from draftsmith.errors import DraftsmithError
from draftsmith.eval import bench
from draftsmith.eval.bench import first_layers, run_bench
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.loop import Request

SMALL = ["prompts=2", "new_tokens=6", "depth=2", "draft_layers=3", "lookup_tokens=3", "batch_prompts=5",
         "batch_new_tokens=4", "batch_rounds=2", "slots=3", "generate_batches=2,5"]  # fmt: skip
RATIOS = ["plain_vs_generate", "plain_vs_generate_on_our_layers", "prompt_lookup_vs_generate",
          "draft_model_vs_generate", "batch64_vs_generate"]  # fmt: skip


def test_the_command_writes_every_figure(tiny_folder: Path, tmp_path: Path) -> None:
    arguments = ["bench", "decoder", *SMALL, "--model", str(tiny_folder), "--runs", str(tmp_path), "--json"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "bench" / "decoder.json").read_text())
    assert set(written["figures"]) == {"overhead_share", *RATIOS}
    for name, figure in written["figures"].items():
        assert 0 < figure["low"] <= figure["median"] <= figure["high"], name
    assert written["figures"]["overhead_share"]["high"] < 1
    batch = written["figures"]["batch64_vs_generate"]
    assert len(batch["tokens_per_s"]) == 2
    speeds = batch["generate_tokens_per_s"]
    best = max(speeds, key=lambda size: speeds[size][0])
    assert {size: len(x) for size, x in speeds.items()} == {size: 1 + (size == best) for size in ("2", "5")}
    assert written["settings"]["generate_batches"] == [2, 5]
    assert written["target"]["dtype"] == "float32"


def test_both_sides_make_the_same_answers(tiny_target: Any) -> None:
    """Tokens of padded batches of `generate`, answers cut at their end, are counted like the loop's."""
    prompts = [[5, 9, 11], [40, 7], [8, 8, 20, 21, 4]]
    requests = [Request(str(i), p, 12) for i, p in enumerate(prompts)]
    want = [len(cut(dense_greedy(tiny_target, p, 12), 12, tiny_target.eos_ids)) for p in prompts]
    with tiny_target.attention():
        assert bench.generate(tiny_target, tiny_target.model, requests).tokens == sum(want)
    assert [bench.decode_one(tiny_target, PlainDrafter(), r).tokens for r in requests] == want


def test_the_draft_model_is_the_beginning_of_the_target(tiny_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    shallow = first_layers(model, 3)
    tokens = torch.arange(12)[None] + 3
    with torch.inference_mode():
        state = model(tokens, output_hidden_states=True).hidden_states[3]
        torch.testing.assert_close(shallow(tokens).logits, model.lm_head(model.model.norm(state)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["speed=3"], "'speed=3' names no setting of a benchmark; there are: prompts, "),
        (["prompts=many"], "'prompts=many' needs a whole number"),
        (["prompts=1,2"], "'prompts=1,2' takes one number"),
        (["prompts=0"], "bench.prompts = 0 must be at least 1"),
        (["new_tokens=1"], "bench.new_tokens = 1 must be at least 2"),
        (["draft_layers=8"], "bench.draft_layers = 8 is more than the target's 7 layers"),
        (["generate_batches=4,0"], r"bench.generate_batches = \(4, 0\) must be at least 1"),
    ],
)
def test_a_wrong_setting_is_named(tiny_folder: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(DraftsmithError, match=message):
        run_bench("decoder", str(tiny_folder), tmp_path, overrides)
    assert not list(tmp_path.iterdir())


def test_an_unknown_benchmark_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match="no benchmark 'kernels'; there are: decoder"):
        run_bench("kernels", str(tiny_folder), tmp_path)
