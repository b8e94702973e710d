"""A data stage that is killed and run again ends with the very bytes of one that was left alone."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import data_worker
import pytest
from tiny import make_tiny_target


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """(target folder, file of prompts), small enough for dozens of runs."""
    folder = tmp_path_factory.mktemp("kill")
    source = folder / "asks.jsonl"
    texts = [
        "the fox runs home",
        "what is a ship",
        "a story",
        "in winter, why",
        "dog",
        "the answer",
        "go",
        "an ox",
        "1",
        "?",
    ]
    source.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return make_tiny_target(folder / "target", layers=4, hidden=32, heads=2, kv_heads=1), source


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    """Two files of conversations with answers, some of them broken, twice there, too long or without an answer."""
    folder = tmp_path_factory.mktemp("talks")
    rows = [["go", "yes"], ["go", "no"], ["an ox"], ["dog", "cat", "", "?"], ["the fox " * 60, "runs"]]
    rows += [[f"what is ship {i}", "it sails " * (9 * i), "and", "so"] for i in range(8)]
    records = [
        {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}
        for texts in rows
    ]
    for name, part in (("a.jsonl", records[::2]), ("b.jsonl", records[1::2])):
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in part) + '{"broken\n')
    return [str(folder / "a.jsonl"), str(folder / "b.jsonl")]


def run(forks, inputs, data, record, kill_before_replace=None, seconds=None):
    """Run the stages in a child and kill it after `seconds`; returns its exit code."""
    args = (str(inputs[0]), str(inputs[1]), str(data), record, kill_before_replace)
    return _run(forks, data_worker.stages, args, seconds)


def _run(forks, work, args, seconds=None):
    child = forks.Process(target=work, args=args)
    child.start()
    child.join(seconds)
    if child.is_alive():
        child.kill()
        child.join()
    return child.exitcode


def outputs(data: Path) -> dict[str, bytes]:
    found = sorted([*data.glob("*/chunk-*"), *data.glob("*/index.json")])
    return {f.relative_to(data).as_posix(): f.read_bytes() for f in found}


@pytest.fixture(scope="module", params=[True, False], ids=["recorded", "collected"])
def uninterrupted(request, forks, inputs, tmp_path_factory):
    """(features recorded while decoding?, files of an uninterrupted run, its seconds)."""
    data = tmp_path_factory.mktemp("whole") / "data"
    started = time.monotonic()
    assert run(forks, inputs, data, request.param) == 0
    made = outputs(data)
    assert len(made) == 2 * 2 + 2 + 2 + 1
    return request.param, made, time.monotonic() - started


def counted(data: Path) -> dict[str, object]:
    record = json.loads((data / "prompts" / "manifest.json").read_text())["record"]
    return {key: value for key, value in record.items() if key not in ("seconds", "peak_rss_bytes", "versions")}


def test_prepare_killed_anywhere(forks, inputs, talks, tmp_path):
    """Runs die before their 1st, 2nd or 3rd file appears, or at random times: the same chunks, and the same counts."""

    def attempt(data, kill_before_replace=None, seconds=None):
        args = (str(inputs[0]), talks, str(data), kill_before_replace)
        return _run(forks, data_worker.prepare_own_answers, args, seconds)

    started = time.monotonic()
    assert attempt(tmp_path / "whole") == 0
    seconds = time.monotonic() - started
    expected = outputs(tmp_path / "whole")
    assert len(expected) == 2 * 5
    for kills in range(40):
        code = attempt(tmp_path / "killed", kill_before_replace=1 + kills % 3)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert kills >= 10
    draw = random.Random(0)
    for _ in range(4):
        attempt(tmp_path / "timed", seconds=draw.uniform(0.3, 0.9) * seconds)
    assert attempt(tmp_path / "timed") == 0
    for name in ("killed", "timed"):
        assert outputs(tmp_path / name) == expected
        assert counted(tmp_path / name) == counted(tmp_path / "whole")


def test_killed_where_files_appear(forks, inputs, tmp_path, uninterrupted):
    """Runs die before their 2nd, 3rd or 4th file appears; a chunk needs three, so each run but some gets further."""
    record, expected, _ = uninterrupted
    for kills in range(40):
        code = run(forks, inputs, tmp_path, record, kill_before_replace=2 + kills % 3)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert kills >= 5
    assert outputs(tmp_path) == expected


def test_killed_at_random_times(forks, inputs, tmp_path, uninterrupted):
    record, expected, seconds = uninterrupted
    draw = random.Random(record)
    for _ in range(4):
        run(forks, inputs, tmp_path, record, seconds=draw.uniform(0.2, 0.9) * seconds)
    assert run(forks, inputs, tmp_path, record) == 0
    assert outputs(tmp_path) == expected
