"""A killed evaluation goes on where it was: nothing finished is decoded again, the figures are those of one go."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest
import torch
from test_eval_harness import SMALL, make_head

from draftsmith.errors import DraftsmithError
from draftsmith.eval import harness
from draftsmith.eval.choose import choice_answers
from draftsmith.eval.decoder.loop import Result, StepLog
from draftsmith.eval.decoder.search import parse_shape
from draftsmith.eval.harness import evaluate
from draftsmith.eval.journal import Journal, result_from_dict, result_to_dict, tuning_from_dict, tuning_to_dict
from draftsmith.eval.lockstep import Runner
from draftsmith.eval.measure import WARM_UPS
from draftsmith.eval.metrics import acceptance
from draftsmith.eval.tune import PLAIN, PassCosts, Tuning

# one candidate: which of several K is fastest would depend on the clock
ONE = dataclasses.replace(SMALL, trees=["chain:2"])
PROMPTS = SMALL.prompts
WARM = 2 * WARM_UPS
"""Answers decoded alone before the held-out ones."""
ENTRIES = 1 + 3 * PROMPTS + 1
"""The choice, three for each prompt, and the drawn tree."""
DECODE, PUT, STEP = harness.Bench.decode, Journal.put, Runner.step


@pytest.fixture(scope="module")
def head(tiny_target):
    return make_head(tiny_target)


@pytest.fixture(scope="module")
def whole(tiny_target, head):
    """The report of an evaluation that nothing interrupts."""
    return evaluate(tiny_target, head, ONE)


@pytest.fixture
def bars(monkeypatch):
    """The progress bar of each evaluation."""
    shown, real = [], harness.progress_bar

    @contextlib.contextmanager
    def spy(*args):
        with real(*args) as bar:
            shown.append(bar)
            yield bar

    monkeypatch.setattr(harness, "progress_bar", spy)
    return shown


def stop_after(monkeypatch, decodes):
    """Let `decodes` answers be decoded alone (None: any number), then interrupt; returns the (id, way) of each."""
    calls = []

    def decode(self, request, way):
        if len(calls) == decodes:
            raise KeyboardInterrupt
        calls.append((request.id, way))
        return DECODE(self, request, way)

    monkeypatch.setattr(harness.Bench, "decode", decode)
    return calls


def greedy(report):
    """All that no clock decides."""
    clocked = {"speedup", "speedup_ci", "tokens_per_s", "baseline_tokens_per_s", "generate_tokens_per_s"}
    clocked |= {"overhead", "measuring_overhead", "flag"}
    summary = {key: value for key, value in report["summary"].items() if key not in clocked}
    raw = {
        kind: [{k: v for k, v in row.items() if k not in ("seconds", "ttft")} for row in report["prompts"][kind]]
        for kind in ("plain", "speculative", "chain", "generate")
    }
    parts = [report[name] for name in ("check", "samples", "tree")]
    return summary, raw, report["prompts"]["sha256"], report["tuning"]["acceptance_conditional"], parts


@pytest.mark.parametrize("decodes", [2, WARM - 1, WARM, WARM + 1, WARM + 5])
def test_an_interrupted_evaluation_decodes_only_what_is_missing(
    tiny_target, head, whole, bars, tmp_path, monkeypatch, decodes
):
    path = tmp_path / "journal.jsonl"
    stop_after(monkeypatch, decodes)
    with pytest.raises(KeyboardInterrupt):
        evaluate(tiny_target, head, ONE, Journal.open(path))
    calls = stop_after(monkeypatch, None)
    report = evaluate(tiny_target, head, ONE, Journal.open(path))
    assert greedy(report) == greedy(whole)
    assert report["environment"]["sessions"] == 2

    chosen, pairs = decodes >= WARM, max(decodes - WARM, 0) // 2
    both = [PLAIN, "chain:2"]
    turns = [way for i in range(pairs, PROMPTS) for way in (both if i % 2 == 0 else reversed(both))]
    assert [way for _, way in calls[WARM:]] == turns
    first, second = bars
    assert first.done < first.total
    assert second.done == second.total
    choice = choice_answers(report["tuning"]["n_prompts"], ONE.timed_prompts, {"chain:2": parse_shape("chain:2")})
    kept = (choice if chosen else 0) + 2 * pairs
    assert second.total - second.counted == kept


@pytest.mark.parametrize("steps", [3, 40])
def test_an_interrupted_choice_is_made_again(tiny_target, head, whole, tmp_path, monkeypatch, steps):
    """Interrupted while passes are timed, and while the leaders are decoded."""
    path, taken = tmp_path / "journal.jsonl", []

    def step(self):
        taken.append(self)
        if len(taken) == steps:
            raise KeyboardInterrupt
        return STEP(self)

    monkeypatch.setattr(Runner, "step", step)
    with pytest.raises(KeyboardInterrupt):
        evaluate(tiny_target, head, ONE, Journal.open(path))
    assert len(taken) == steps
    assert greedy(evaluate(tiny_target, head, ONE, Journal.open(path))) == greedy(whole)


@pytest.mark.parametrize("entries", [1, PROMPTS + 3, 2 * PROMPTS + 1, 2 * PROMPTS + 3, ENTRIES])
def test_no_entry_is_measured_twice(tiny_target, head, whole, bars, tmp_path, monkeypatch, entries):
    path = tmp_path / "journal.jsonl"
    written = []

    def put(self, key, value):
        PUT(self, key, value)
        written.append(key)
        if len(written) == entries:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "put", put)
    with pytest.raises(KeyboardInterrupt):
        evaluate(tiny_target, head, ONE, Journal.open(path))
    calls = stop_after(monkeypatch, None)
    report = evaluate(tiny_target, head, ONE, Journal.open(path))
    assert greedy(report) == greedy(whole)
    assert report["environment"]["sessions"] == 2
    assert len(written) == len(set(written)) == ENTRIES
    missing_pairs = max(1 + PROMPTS - entries, 0)
    assert len(calls) == (WARM if entries < ENTRIES else 0) + 2 * missing_pairs
    assert bars[-1].done == bars[-1].total


@pytest.mark.parametrize("tree", ["static:0,1,0.0", f"chain:{harness.REPORT_DEPTH}"])
def test_a_whole_journal_gives_the_very_report_without_decoding(tiny_target, head, tmp_path, monkeypatch, tree):
    settings = dataclasses.replace(SMALL, trees=[tree])
    first = evaluate(tiny_target, head, settings, Journal.open(tmp_path / "journal.jsonl"))
    for name in ("decode", "decode_all", "generate", "draw"):
        monkeypatch.setattr(harness.Bench, name, lambda *_: pytest.fail("decoded again"))
    again = evaluate(tiny_target, head, settings, Journal.open(tmp_path / "journal.jsonl"))
    assert (first["environment"].pop("sessions"), again["environment"].pop("sessions")) == (1, 2)
    assert again == first


@pytest.mark.parametrize("torn", [b'{"key": "c", "val', b'{"key": "c", "value": 1}', b'{"sess', b"\0\0\0\0\n"])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    path = tmp_path / "journal.jsonl"
    journal = Journal.open(path)
    journal.put("a", {"seconds": 0.1})
    journal.put("b", [1, None])
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    again = Journal.open(path)
    assert (again.get("a"), again.get("b"), again.get("c")) == ({"seconds": 0.1}, [1, None], None)
    again.put("c", 2)
    assert path.read_bytes() == whole + b'{"session": 2}\n{"key": "c", "value": 2}\n'
    last = Journal.open(path)
    assert (last.get("b"), last.get("c"), last.sessions) == ([1, None], 2, 3)


def test_a_damaged_line_inside_is_named(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"session": 1}\n{"key": "a", "va\n{"key": "b", "value": 1}\n')
    with pytest.raises(DraftsmithError, match=r"journal\.jsonl is damaged in line 2; delete it"):
        Journal.open(path)


def test_without_a_file_everything_is_kept_in_memory():
    journal = Journal()
    journal.put("a", 1)
    assert (journal.get("a"), journal.get("b"), journal.sessions) == (1, None, 1)


def test_tuning_comes_back_as_it_was():
    costs = PassCosts()
    costs.add(PLAIN, 1, [0.1, 0.3], [0.0, 0.0], [0.01, 0.02])
    costs.add("chain:3", 4, [0.2, 0.4], [0.05, 0.07], [0.02, 0.03])
    shares = acceptance([[StepLog(3, 2, 3), StepLog(3, 0, 1)], [StepLog(3, 3, 4)]])
    row = {"tree": "chain:3", "predicted_tokens_per_s": 1 / 3, "measured_tokens_per_s": None}
    tuning = Tuning("chain:3", costs, {"chain:3": shares}, [row], 2)
    again = tuning_from_dict(json.loads(json.dumps(tuning_to_dict(tuning))))
    assert again == tuning
    assert again.costs.ways["chain:3"].step == costs.ways["chain:3"].step


def test_a_result_comes_back_without_its_states():
    result = Result("a", [1, 2], [3, 4, 5], "length", [StepLog(4, 1, 2)], 0.1 + 0.2, True, torch.ones(4, 8))
    again = result_from_dict(json.loads(json.dumps(result_to_dict(result))))
    assert again == dataclasses.replace(result, states=None)
