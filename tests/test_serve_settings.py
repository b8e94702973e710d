"""The commands that serve a head, as a shell and the engines read them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.heads.formats.contracts import contract, serve_settings

PLACE = {"folder": "out dir", "model": "Qwen/Qwen3-8B"}


def test_vllms_command_is_one_that_a_shell_and_json_read() -> None:
    found = serve_settings("vllm", "eagle3", depth=3, **PLACE)
    words = shlex.split(found.commands[0])
    assert words[:4] == ["vllm", "serve", "Qwen/Qwen3-8B", "--speculative-config"]
    wanted = {"method": "eagle3", "model": "out dir", "num_speculative_tokens": 3}
    assert json.loads(words[4]) == wanted
    assert found.python is not None
    calls: list[Any] = []
    source = found.python.replace("from vllm import LLM", "")
    exec(source, {"LLM": lambda **values: calls.append(values)})
    assert calls == [{"model": "Qwen/Qwen3-8B", "speculative_config": wanted}]


METHODS = {
    ("vllm", "eagle1"): "eagle", ("vllm", "eagle2"): "eagle", ("vllm", "hass"): "eagle", ("vllm", "eagle3"): "eagle3",
    ("vllm", "eagle3.1"): "eagle3", ("vllm", "medusa1"): "medusa", ("vllm", "mtp"): "mtp",
    ("sglang", "eagle1"): "EAGLE", ("sglang", "eagle3"): "EAGLE3", ("sglang", "mtp"): "NEXTN",
    ("tensorrt-llm", "eagle3"): "Eagle3", ("tensorrt-llm", "mtp"): "MTP",
}  # fmt: skip


def test_methods_are_the_engines_names() -> None:
    for (engine, head), method in METHODS.items():
        assert contract(engine, head).method == method
        text = " ".join(serve_settings(engine, head, depth=3, **PLACE).commands)
        assert f'"{method}"' in text or f" {method} " in text


def test_sglang_gets_all_three_numbers() -> None:
    def flags(**values: Any) -> dict[str, str]:
        words = shlex.split(serve_settings("sglang", "eagle2", **PLACE, **values).commands[0])
        return dict(zip(words[3::2], words[4::2], strict=True))

    chain = flags(depth=4)
    assert chain == {
        "--model-path": "Qwen/Qwen3-8B", "--speculative-algorithm": "EAGLE",
        "--speculative-draft-model-path": "out dir", "--speculative-num-steps": "4", "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "5",
    }  # fmt: skip
    tree = {"--speculative-num-steps": "4", "--speculative-eagle-topk": "6", "--speculative-num-draft-tokens": "16"}
    assert flags(depth=4, topk=6, nodes=16) == {**chain, **tree}
    # the largest one: 6 + 3 * 36 drafts and the root
    assert flags(depth=4, topk=6, nodes=115)["--speculative-num-draft-tokens"] == "115"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"depth": 0}, "depth 0 must be at least 1"),
        ({"depth": 4, "topk": 6, "nodes": 116}, "has 2 to 115 nodes"),
        ({"depth": 4, "topk": 6}, "nodes = None"),
        ({"depth": 1, "topk": 4, "nodes": 6}, "has 2 to 5 nodes"),
        ({"depth": 4, "nodes": 8}, "a chain of depth 4 has 5"),
        ({"depth": 4, "nodes": 8, "topk": 1}, "a chain of depth 4 has 5"),
    ],
)
def test_trees_that_sglang_refuses(values: dict[str, Any], said: str) -> None:
    with pytest.raises(DraftsmithError, match=said):
        serve_settings("sglang", "eagle3", **PLACE, **values)


def test_an_engine_without_trees_gets_a_chain_and_says_so() -> None:
    found = serve_settings("vllm", "eagle3", depth=4, topk=6, nodes=16, **PLACE)
    assert found.settings == {"depth": 4}
    assert found.notes[0] == "vLLM gets a chain of 4 for the tree that was asked for"
    assert "for the tree" not in " ".join(serve_settings("vllm", "eagle3", depth=4, nodes=5, **PLACE).notes)


def test_tensorrt_llm_is_told_the_layers(tmp_path: Path) -> None:
    def told(**values: Any) -> dict[str, Any]:
        found = serve_settings("tensorrt-llm", "eagle3", **{**PLACE, "depth": 3, **values})
        words = shlex.split(found.commands[0])
        assert (words[0], words[2:]) == ("echo", [">", "speculative.yaml"])
        assert found.commands[1] == "trtllm-serve Qwen/Qwen3-8B --extra_llm_api_options speculative.yaml"
        return json.loads(words[1])["speculative_config"]

    plain = {
        "decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model_dir": "out dir", "eagle3_one_model": True,
    }  # fmt: skip
    assert told() == plain
    assert told(layer_ids=[2, 18, 33]) == {**plain, "eagle3_layers_to_capture": [1, 17, 32]}
    (tmp_path / "config.json").write_text(json.dumps({"eagle_aux_hidden_state_layer_ids": [4, 8, 12]}))
    assert told(folder=tmp_path)["eagle3_layers_to_capture"] == [3, 7, 11]
    (tmp_path / "config.json").write_text("{")
    assert "eagle3_layers_to_capture" not in told(folder=tmp_path)


def test_layouts_that_stand_for_their_target_are_served_by_their_folder() -> None:
    assert serve_settings("tgi", "medusa1", depth=3, **PLACE).commands == [
        "text-generation-launcher --model-id 'out dir' --speculate 3"
    ]
    assert serve_settings("speculators", "eagle3", depth=3, **PLACE).commands[0] == "vllm serve 'out dir'"
    (mtp,) = serve_settings("vllm", "mtp", depth=1, **PLACE).commands
    assert shlex.split(mtp)[:3] == ["vllm", "serve", "out dir"]
    assert json.loads(shlex.split(mtp)[4]) == {"method": "mtp", "num_speculative_tokens": 1}
