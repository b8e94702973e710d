"""`load --replay`: requests as clients sent them, broken ones named, in a closed loop beside plain decoding."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from decoder_checks import random_head
from tiny import CHATML, make_tiny_tokenizer

from draftsmith import cli
from draftsmith.data_recipes.chat import render_prompt
from draftsmith.errors import DraftsmithError
from draftsmith.eval import closed_loop
from draftsmith.eval import load as module
from draftsmith.eval.check import OutputCheck
from draftsmith.eval.closed_loop import ROUNDS, SPECULATIVE, WAYS, Served, Ways
from draftsmith.eval.decoder.drafters.prompt_lookup import PromptLookupDrafter
from draftsmith.eval.decoder.sampling import Sampling
from draftsmith.eval.journal import Journal
from draftsmith.eval.replay import Recorded, RequestReader, measure_replay
from draftsmith.eval.report.content import SAMPLED
from draftsmith.eval.report.load_table import replay_lines
from draftsmith.eval.tune import PLAIN
from draftsmith.files import write_json
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.resolve import resolve_target
from draftsmith.progress import Progress

HELLO = [{"role": "user", "content": "write a short story"}]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


def bar() -> Progress:
    return Progress("load", None, "answers")


def write(path: Path, *lines: Any) -> Path:
    """A file of JSON lines; texts stand as they are."""
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n", "utf-8")
    return path


@pytest.fixture
def ways(tiny_target: Any) -> Ways:
    return Ways(tiny_target, PromptLookupDrafter(tokens=3))


def read(ways: Ways, path: Path) -> Recorded:
    return RequestReader(ways, 16).read(path)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_requests_are_read_as_clients_send_them(ways: Ways, tmp_path: Path) -> None:
    tokenizer = ways.target.tokenizer
    path = write(
        tmp_path / "requests.jsonl",
        {"messages": HELLO, "max_tokens": 9, "temperature": 0.7, "seed": 5, "top_p": 0.9},
        "",
        {"prompt": "the quick brown", "max_new_tokens": 3, "model": "x", "stream": True, "seed": None},
        {"prompt": [5, 6, 7]},
        {"prompt": ["the lazy dog"], "max_completion_tokens": 4, "max_tokens": 8, "id": "r4", "stream": False},
        {"custom_id": "r5", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": HELLO, "user": "u"}},
    )
    found = read(ways, path)
    assert [r.id for r in found.requests] == [f"requests.jsonl:{n}" for n in (1, 3, 4, 5, 6)]
    chat = render_prompt(tokenizer, HELLO)
    texts = [tokenizer(text).input_ids for text in ("the quick brown", "the lazy dog")]
    assert [r.tokens for r in found.requests] == [chat, texts[0], [5, 6, 7], texts[1], chat]
    assert [r.max_new_tokens for r in found.requests] == [9, 3, 16, 4, 16]
    assert found.requests[0].sampling == Sampling(temperature=0.7, seed=5, top_p=0.9)
    assert {r.sampling for r in found.requests[1:]} == {Sampling()}
    assert found.unused == {"stream": 2, "model": 1, "user": 1}
    assert found.problems == []


BROKEN = [
    ("{", "a line that is not JSON"),
    ('"hello"', "a str instead of a request"),
    ({"model": "x"}, "neither messages nor a prompt"),
    ({"messages": HELLO, "prompt": "x"}, "both messages and a prompt"),
    ({"messages": "hello"}, "'messages' is a str, not a list"),
    ({"messages": []}, "a conversation without messages"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "no"}]}, "the last message is the assistant's"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "images, audio, video or files"),
    ({"messages": HELLO, "tools": "x"}, "tools that are not JSON"),
    ({"prompt": 5}, "a prompt that is neither a text nor token ids"),
    ({"prompt": ""}, "an empty prompt"),
    ({"prompt": [100000]}, "token ids outside the vocabulary of 320"),
    ({"prompt": "x", "max_tokens": 0}, "'max_tokens' must be a whole number, at least 1"),
    ({"prompt": "x", "max_tokens": "9"}, "'max_tokens' must be a whole number, at least 1"),
    ({"prompt": "x", "temperature": "hot"}, "'temperature' must be a number"),
    ({"prompt": "x", "seed": 1.5}, "'seed' must be a whole number"),
    ({"prompt": "x", "temperature": -1}, "temperature = -1 must be at least 0"),
    ({"prompt": "x", "max_tokens": 600}, "prompt and answer need more than the context of 512 tokens"),
]


@pytest.mark.parametrize(("line", "reason"), BROKEN)
def test_a_broken_request_is_named_and_the_rest_goes_on(ways: Ways, tmp_path: Path, line: Any, reason: str) -> None:
    found = read(ways, write(tmp_path / "r.jsonl", {"prompt": "x"}, line, {"prompt": "y"}))
    assert [r.id for r in found.requests] == ["r.jsonl:1", "r.jsonl:3"]
    (problem,) = found.problems
    assert reason in problem
    assert "(r.jsonl:2)" in problem
    with pytest.raises(DraftsmithError, match="holds no request that can be replayed: malformed: 1 ×"):
        read(ways, write(tmp_path / "all.jsonl", line))


def test_an_empty_file_and_a_list_in_one_line(ways: Ways, tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match="can be replayed: it is empty"):
        read(ways, write(tmp_path / "r.jsonl"))
    found = read(ways, write(tmp_path / "r.json", [{"prompt": "x"}, {"prompt": "y"}]))
    assert [r.id for r in found.requests] == ["r.json:1", "r.json:1#2"]


def test_tools_reach_the_template(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + CHATML
    target = SimpleNamespace(tokenizer=tokenizer, eos_ids=[tokenizer.eos_token_id], vocab_size=320)
    ways: Any = SimpleNamespace(target=target, context=512)
    path = write(tmp_path / "r.jsonl", {"messages": HELLO}, {"messages": HELLO, "tools": [TOOL]})
    plain, tools = (tokenizer.decode(r.tokens) for r in read(ways, path).requests)
    assert tools == "look_up" + plain


# --- the loop ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(ways: Ways, tmp_path: Path) -> Recorded:
    """Five requests, one of them sampled; text that repeats itself, so that something is looked up."""
    prompts = ["the lazy dog and the quick brown fox and " * n + "the lazy" for n in (1, 3, 2, 4)]
    lines: list[Any] = [{"prompt": prompt, "max_tokens": 6 + 4 * n} for n, prompt in enumerate(prompts)]
    return read(ways, write(tmp_path / "r.jsonl", *lines, {"messages": HELLO, "max_tokens": 8, "temperature": 1}))


def test_figures_follow_from_the_rounds(ways: Ways, recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[tuple[str, Served]] = []
    real = Ways.serve

    def serve(self: Ways, way: str, requests: Any, slots: int, *args: Any, **more: Any) -> Served:
        rounds.append((way, real(self, way, requests, slots, *args, **more)))
        assert slots == 2
        return rounds[-1][1]

    monkeypatch.setattr(Ways, "serve", serve)
    journal = Journal()
    found = measure_replay(ways, recorded, 2, journal, bar())
    assert journal.get("replay") == found
    measured = rounds[-2 * ROUNDS :]
    assert [way for way, _ in measured] == [PLAIN, SPECULATIVE, SPECULATIVE, PLAIN]
    speeds = {}
    for way in WAYS:
        own = [served for name, served in measured if name == way]
        tokens = sum(len(r.tokens) for served in own for r in served.results)
        speeds[way] = found[way]["served_tokens_per_s"]
        assert speeds[way] == pytest.approx(tokens / sum(served.seconds for served in own))
        times = sorted(s for served in own for s in served.first_token)
        assert found[way]["ttft"]["p50"] == pytest.approx((times[4] + times[5]) / 2)  # of ten
        assert found[way]["ttft"]["p95"] <= times[-1]
        assert found[way]["ttft"]["p50"] < found[way]["latency"]["p50"]
        for served in own:
            assert served.steps >= sum(len(r.steps) for r in served.results) / 2  # never more than two at a time
            assert max(served.latency) < served.seconds
    assert found["throughput_ratio"] == pytest.approx(speeds[SPECULATIVE] / speeds[PLAIN])
    steps = [step for a in found["answers"] for step in a[SPECULATIVE]["steps"]]
    assert found["tau"] == pytest.approx(sum(s[2] for s in steps) / len(steps))
    assert (found["requests"], found["greedy"], found["concurrency"]) == (5, 4, 2)
    assert found["output_check"] == f"identical; 1 request {SAMPLED}"
    json.dumps(found, allow_nan=False)


def test_sampled_requests_alone_are_not_compared(ways: Ways, recorded: Recorded) -> None:
    sampled = dataclasses.replace(recorded, requests=recorded.requests[-1:])
    found = measure_replay(ways, sampled, 8, Journal(), bar())
    assert found["output_check"] == SAMPLED
    assert found["throughput_ratio"] > 0


def test_answers_of_one_token_are_served_without_a_step(ways: Ways, recorded: Recorded) -> None:
    short = [dataclasses.replace(request, max_new_tokens=1) for request in recorded.requests]
    found = measure_replay(ways, dataclasses.replace(recorded, requests=short), 2, Journal(), bar())
    assert (found["tau"], found["speedup"], found["flag"]) == (0, None, None)
    assert found["throughput_ratio"] > 0
    assert "decoding steps alone none: every answer ends with its first token" in " ".join(replay_lines(found))


def test_no_ratio_beside_wrong_outputs(ways: Ways, recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = OutputCheck(False, "FAILED: r.jsonl:1 differs at answer token 3", 0.1, 0.1, [])
    monkeypatch.setattr(closed_loop, "check_outputs", lambda *args: wrong)
    found = measure_replay(ways, recorded, 2, Journal(), bar())
    assert (found["speedup"], found["throughput_ratio"]) == (None, None)
    assert found["output_check"].startswith("FAILED")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_replays_prints_and_does_nothing_twice(
    tiny_target: Any,
    tiny_folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = tmp_path / "runs"
    home = runs / resolve_target(str(tiny_folder)).name / "eagle3"
    best = home / "train" / "checkpoints" / "best"
    best.mkdir(parents=True)
    head = random_head(tiny_target)
    head.config = dataclasses.replace(head.config, target_fingerprint=tiny_target.fingerprint)
    save_head(head, best)
    write_json(home / "load.json", {"schema": "draftsmith.load/1", "head_digest": "another", "batches": [{"batch": 1}]})
    lines = [{"prompt": "the lazy dog " * n, "max_tokens": 6, "logprobs": 1} for n in (1, 2, 3)]
    path = write(tmp_path / "requests.jsonl", *lines, "{")
    command = ["load", "--model", str(tiny_folder), "--runs", str(runs), "--replay", str(path), "--concurrency", "2"]
    cli.app(command, standalone_mode=False)
    out, err = capfd.readouterr()
    assert "left out: malformed: 1 × a line that is not JSON (requests.jsonl:4)" in err
    assert "keys that change nothing here: logprobs (3)" in err
    assert "3 requests of requests.jsonl, 2 at a time" in out
    assert "first token, p95, s" in out
    assert "outputs against plain: identical" in out
    result = json.loads((home / "load.json").read_text())
    assert result["batches"] == []  # those of another head are gone
    monkeypatch.setattr(module, "load_model", None)  # a finished measurement loads no model
    cli.app([*command, "--json"], standalone_mode=False)
    out, err = capfd.readouterr()
    assert json.loads(out) == result
    assert "everything is measured already" in err
    with pytest.raises(DraftsmithError, match="can't be read: a file of conversations ends in"):
        cli.app([*command[:-3], str(write(tmp_path / "requests.txt", "x"))], standalone_mode=False)
