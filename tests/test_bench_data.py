"""The benchmark of the data stages: what it writes, what it compares, what it refuses. No figure is judged here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CHATML

from draftsmith.data_recipes.layout import DocumentRow
from draftsmith.errors import DraftsmithError
from draftsmith.eval import bench_data
from draftsmith.eval.bench import figure_line, run_bench

SMALL = ["rendered=4", "rounds=2", "conversations=60", "documents=3", "token_budget=300", "collect_rounds=1"]


def test_every_figure_is_written_with_its_aim(tiny_folder: Path, tmp_path: Path) -> None:
    path, result = run_bench("data", str(tiny_folder), tmp_path, SMALL)
    assert path == tmp_path / "bench" / "data.json"
    assert json.loads(path.read_text()) == result
    figures = result["figures"]
    assert set(figures) == {
        "render_share", "exact_duplicates_per_s", "near_duplicates_per_s", "prepare_per_s", "prepare_peak_gib",
        "collect_share", "collect_share_int8", "bytes_share", "bytes_share_int8",
    }  # fmt: skip
    for name, figure in figures.items():
        assert 0 < figure["low"] <= figure["median"] <= figure["high"], name
    assert {name: figure["aim"] for name, figure in figures.items() if "aim" in figure} == {
        "render_share": ">= 0.7", "prepare_peak_gib": "< 2", "collect_share": ">= 0.9", "collect_share_int8": ">= 0.9",
        "bytes_share": "<= 1.01", "bytes_share_int8": "<= 0.52",
    }  # fmt: skip
    # H = 64: 4 layers in bf16 are 8 H, in int8 with a scale each 4 H + 8, and a chunk's head and tokens come on top
    assert 1.0 < figures["bytes_share"]["median"] < 1.3
    saved = figures["bytes_share"]["median"] - figures["bytes_share_int8"]["median"]
    assert saved == pytest.approx(0.5 - 8 / 512, rel=0.02)
    assert result["settings"] == {name: int(value) for name, value in (text.split("=") for text in SMALL)}
    assert result["target"] == {"model": str(tiny_folder), "dtype": "float32", "device": "cpu"}


def test_conversations_are_the_same_and_as_long_as_asked_for(tiny_target: Any) -> None:
    tokenizer = tiny_target.tokenizer
    first, again = (bench_data.ConversationWriter(tokenizer) for _ in range(2))
    record = first.record([300, 600, 300])
    assert again.record([300, 600, 300]) == record
    assert first.record([300, 600, 300]) != record
    turns = record["conversations"]
    assert [turn["from"] for turn in turns] == ["human", "gpt", "human"]
    lengths = [len(tokenizer(turn["value"])["input_ids"]) for turn in turns]
    assert lengths == pytest.approx([300, 600, 300], rel=0.2)


def test_the_bare_pass_runs_over_the_batches_of_collect(tiny_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[list[int]]] = []
    real = tiny_target.body.forward

    def forward(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        seen.append(input_ids.tolist())
        return real(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(tiny_target.body, "forward", forward)
    rows = [DocumentRow(str(n), "train", "s", list(range(10, 11 + n)), [[1, 2]]) for n in (3, 1, 2)]
    bench_data.bare_pass(tiny_target, [rows], 4)
    # without the last token of each; by length, at most four tokens with padding
    assert seen == [[[10, 0], [10, 11]], [[10, 11, 12]]]


def test_a_figure_is_judged_by_its_median() -> None:
    assert bench_data.judge("render_share", 0.7) == {"aim": ">= 0.7", "met": True}
    assert bench_data.judge("render_share", 0.69) == {"aim": ">= 0.7", "met": False}
    assert bench_data.judge("prepare_peak_gib", 2.0) == {"aim": "< 2", "met": False}
    assert bench_data.judge("prepare_per_s", 5.0) == {}
    line = figure_line("bytes_share", {"median": 1.5, "low": 1.4, "high": 1.6, "aim": "<= 1.01", "met": False})
    assert line.split() == ["bytes_share", "1.500", "[1.400,", "1.600]", "aim", "<=", "1.01:", "missed"]
    assert "aim" not in figure_line("prepare_per_s", {"median": 1.5, "low": 1.4, "high": 1.6})


def test_a_template_that_refuses_the_conversations_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "target")
    refusal = "{% if messages | length > 6 %}{{ raise_exception('too many turns') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(refusal + CHATML)
    with pytest.raises(DraftsmithError, match=r"can't be measured on plain conversations: .*too many turns"):
        run_bench("data", str(folder), tmp_path / "runs", SMALL)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["prompts=3"], "'prompts=3' names no setting of a benchmark; there are: rendered, rounds, conversations, "),
        (["documents=0"], "bench.documents = 0 must be at least 1"),
    ],
)
def test_a_wrong_setting_is_named(tiny_folder: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(DraftsmithError, match=message):
        run_bench("data", str(tiny_folder), tmp_path, overrides)
    assert not list(tmp_path.iterdir())
