"""The harness on the tiny target: the report's figures, the output check, and what a failed check does."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from draftsmith.errors import DraftsmithError
from draftsmith.eval import check, harness
from draftsmith.eval.choose import expected
from draftsmith.eval.decoder.loop import Request, StepLog
from draftsmith.eval.decoder.search import parse_shape
from draftsmith.eval.harness import EvalSettings, evaluate
from draftsmith.eval.metrics import acceptance
from draftsmith.eval.ranks import RankWatch
from draftsmith.eval.report.page import write_page
from draftsmith.eval.report.terminal import print_summary, summary_rows
from draftsmith.eval.tune import PLAIN
from draftsmith.heads.checkpoint import MeasuredTree, save_tree
from draftsmith.heads.eagle3 import Eagle3Head, eagle3_config
from draftsmith.heads.vocab import DraftVocab

SMALL = EvalSettings(
    prompts=4, max_new_tokens=12, tuning_prompts=4, tuning_new_tokens=8, timed_prompts=2, timed_new_tokens=6
)


def make_head(target, **changes):
    vocab = DraftVocab(torch.arange(0, target.vocab_size, 2), target.vocab_size)
    values = {
        "target_id": target.id,
        "target_revision": target.revision,
        "target_fingerprint": target.fingerprint,
        "chat_template_sha256": target.template_sha256,
        "trained_length": 64,
        **changes,
    }
    head = Eagle3Head(eagle3_config(target.config, vocab, **values), vocab)
    head.initialise(target.parts(), torch.Generator().manual_seed(0))
    return head


@pytest.fixture(scope="module")
def report(tiny_target):
    return evaluate(tiny_target, make_head(tiny_target), SMALL)


def test_report_holds_what_is_promised(report):
    s = report["summary"]
    assert report["schema"] == "draftsmith.report/3"
    assert set(s["setting"]) == {"kind", "tree", "depth", "nodes", "temperature", "batch", "dtype"}
    assert s["setting"]["kind"] == "chain"
    assert s["setting"]["tree"] == f"chain:{s['setting']['depth']}"
    assert s["setting"]["nodes"] == s["setting"]["depth"] + 1
    assert s["setting"]["dtype"] == "float32"
    assert s["output_check"] == "identical"
    assert s["n_prompts"] == 4
    assert report["environment"]["sessions"] == 1
    assert s["tau_ci"][0] <= s["tau"] <= s["tau_ci"][1]
    assert s["speedup_ci"][0] <= s["speedup"] <= s["speedup_ci"][1]
    assert s["chain"]["tree"] == "chain:4"
    assert len(s["chain"]["acceptance_conditional"]) == len(s["chain"]["acceptance_cumulative"]) == 4
    assert len(s["acceptance_conditional"]) == s["setting"]["depth"]
    assert min(s["tokens_per_s"], s["baseline_tokens_per_s"], s["generate_tokens_per_s"]) > 0
    assert 0 < s["overhead"] < 1
    assert [(row["tree"], row["depth"], row["nodes"]) for row in report["tuning"]["table"]] == [
        (f"chain:{k}", k, k + 1) for k in (1, 2, 3, 4)
    ]
    assert list(report["tuning"]["acceptance_conditional"]) == ["chain:4"]  # that of all of them
    assert sum(row["measured_tokens_per_s"] is not None for row in report["tuning"]["table"]) == 2
    assert [cost["rows"] for cost in report["passes"].values()] == [1, 2, 3, 4, 5]
    assert len(report["prompts"]["sha256"]) == 64
    assert set(report["by"]) == {"category", "language", "context", "turn"}
    assert [row["temperature"] for row in report["temperatures"]] == [0.0]
    for way in ("plain", "speculative"):
        assert 0 < report["ttft"][way]["p50"] <= report["ttft"][way]["p95"]
    assert sum(report["time"].values()) == pytest.approx(1)
    assert min(report["time"].values()) > 0
    assert 0 < s["measuring_overhead"] < 0.5  # a tiny target's passes cost next to nothing
    (benchmark,) = report["benchmarks"]
    assert (benchmark["name"], benchmark["n_prompts"], benchmark["dropped"]) == ("builtin", 4, [])
    assert (benchmark["tau"], benchmark["speedup"]) == (s["tau"], s["speedup"])
    json.dumps(report, allow_nan=False)


def test_figures_follow_from_the_raw_logs(report):
    steps = [step for prompt in report["prompts"]["speculative"] for step in prompt["steps"]]
    assert report["summary"]["tau"] == pytest.approx(sum(s[2] for s in steps) / len(steps))
    assert report["summary"]["mal"] == pytest.approx(1 + sum(s[1] for s in steps) / len(steps))
    spoken = [sum(s[2] for s in p["steps"]) for p in report["prompts"]["speculative"]]
    assert spoken == [p["tokens"] for p in report["prompts"]["plain"]]


def test_trees_are_measured_themselves_and_by_rank(tiny_target):
    trees = ["static:0,1,2,0.0,0.1,1.0", "dynamic:3x2x6", "chain:1", "chain:2"]
    report = evaluate(tiny_target, make_head(tiny_target), dataclasses.replace(SMALL, trees=trees[:2]))
    s = report["summary"]
    assert s["setting"]["tree"] in trees
    assert s["setting"]["kind"] in ("static", "dynamic")
    assert s["output_check"] == "identical"
    assert [(row["depth"], row["nodes"]) for row in report["tuning"]["table"]] == [(2, 7), (2, 6)]
    for row in report["tuning"]["table"]:
        cost = report["passes"][row["tree"]]
        step = sum(value for name, value in cost.items() if name != "rows")
        assert row["predicted_tokens_per_s"] == pytest.approx(row["expected_tau"] / step)
    assert s["chain"]["tree"] == "chain:4"
    assert s["acceptance_cumulative"][0] > s["chain"]["acceptance_cumulative"][0]  # more children, more hits
    for depth, ranks in enumerate(s["acceptance_by_rank"]):
        assert sum(ranks) == pytest.approx(s["acceptance_cumulative"][depth])
    assert sum(s["acceptance_by_rank"][0][1:]) > 0
    assert any(name.endswith("by rank") for name, _ in summary_rows(report))
    mixed = evaluate(tiny_target, make_head(tiny_target), dataclasses.replace(SMALL, trees=trees[1:]))
    assert list(mixed["tuning"]["acceptance_conditional"]) == ["dynamic:3x2x6", "chain:2"]


def test_equal_trees_are_expected_to_emit_the_same():
    """However they are written, and however short the tuning answers are."""
    trees = {text: parse_shape(text) for text in ("chain:1", "chain:2", "static:0,0.0")}
    figures = acceptance([[StepLog(2, 2, 1)], [StepLog(2, 1, 2), StepLog(2, 0, 1)]])  # the first is cut
    assert figures.tau == pytest.approx(4 / 3)
    taus = expected(trees, {"chain:2": figures, "static:0,0.0": figures})
    assert taus == {text: pytest.approx(tau) for text, tau in [("chain:1", 5 / 3), ("chain:2", 2), ("static:0,0.0", 2)]}


def test_ranks_are_noted_of_one_answer_at_a_time(tiny_target):
    wide = f"static:{','.join(map(str, range(90)))},0.0"  # an untrained head needs many guesses
    trees = {text: parse_shape(text) for text in (wide, "chain:2")}
    bench = harness.Bench(tiny_target, make_head(tiny_target), trees)
    tree = bench.drafter(wide)
    assert tree.head is bench.drafter("chain:2").head  # prepared once
    assert isinstance(bench.watched(wide), RankWatch)
    assert bench.watched("chain:2") is bench.drafter("chain:2")
    with pytest.raises(AssertionError, match="one sequence at a time"):
        RankWatch(tree).allocate(2, 8)
    requests = [dataclasses.replace(check_request(tiny_target), id=name, max_new_tokens=30) for name in "abc"]
    alone = bench.decode(requests[0], wide)
    ranks = bench.ranks(wide, alone)
    assert sum(map(sum, ranks)) == sum(step.accepted for step in alone.steps) > 0
    together = list(bench.decode_all(requests, wide, 3))
    assert {tuple(result.tokens) for result in together} == {tuple(alone.tokens)}
    assert bench.ranks(wide, alone) == ranks  # several answers at once note nothing


def test_a_heads_own_tree_is_read_from_its_checkpoint(tiny_target, tmp_path):
    save_tree(MeasuredTree([[0], [1], [0, 0]], [[0.5, 0.2], [0.3]], [9, 9], 1), tmp_path)
    small = dataclasses.replace(SMALL, prompts=1, tuning_prompts=1, trees=["own:4"])
    setting = evaluate(tiny_target, make_head(tiny_target), small, checkpoint=tmp_path)["summary"]["setting"]
    assert (setting["kind"], setting["depth"], setting["nodes"]) == ("own", 2, 4)
    with pytest.raises(DraftsmithError, match="it goes with a head"):
        evaluate(tiny_target, make_head(tiny_target), small)


def test_a_tree_deeper_than_the_head_is_refused(tiny_target, monkeypatch):
    head = make_head(tiny_target)
    monkeypatch.setattr(Eagle3Head, "most_depth", 2)
    with pytest.raises(DraftsmithError, match=r"chain:3 is 3 deep, the head drafts 2 tokens: .*eval.trees=\[chain:2\]"):
        evaluate(tiny_target, head, SMALL)
    small = dataclasses.replace(SMALL, prompts=1, tuning_prompts=1, trees=["chain:1"])
    assert evaluate(tiny_target, head, small)["summary"]["chain"]["tree"] == "chain:2"


def test_every_prompt_takes_turns(tiny_target, monkeypatch):
    seen = []
    real = harness.Bench.decode

    def spy(self, request, way):
        seen.append((request.id, way))
        return real(self, request, way)

    monkeypatch.setattr(harness.Bench, "decode", spy)
    report = evaluate(tiny_target, make_head(tiny_target), dataclasses.replace(SMALL, trees=["chain:1"]))
    held_out = seen[-8:]
    tree = report["summary"]["setting"]["tree"]
    assert [way for _, way in held_out] == [PLAIN, tree, tree, PLAIN, PLAIN, tree, tree, PLAIN]
    assert [a for a, _ in held_out[::2]] == [b for b, _ in held_out[1::2]]


def test_a_failed_check_prints_no_speedup(tiny_target, monkeypatch, tmp_path, capsys):
    real = harness.Bench.decode

    def broken(self, request, way):
        result = real(self, request, way)
        if way != PLAIN:
            result.tokens = [(result.tokens[0] + 1) % 300, *result.tokens[1:]]
        return result

    monkeypatch.setattr(harness.Bench, "decode", broken)
    report = evaluate(tiny_target, make_head(tiny_target), SMALL)
    assert report["summary"]["output_check"].startswith("FAILED")
    assert report["summary"]["speedup"] is None
    assert report["summary"]["speedup_ci"] is None
    assert report["check"]["differences"][0]["index"] == 0
    print_summary(report)
    write_page(tmp_path / "report.html", report, [], {})
    for text in (capsys.readouterr().out, (tmp_path / "report.html").read_text()):
        assert "FAILED" in text
        assert not re.search(r"\d×\s+\[", text)


def test_a_tie_passes_and_is_counted(tiny_target, monkeypatch):
    bench = harness.Bench(tiny_target, make_head(tiny_target), {})
    request = check_request(tiny_target)
    plain = bench.decode(request, PLAIN)
    other = dataclasses.replace(plain, tokens=[*plain.tokens[:3], (plain.tokens[3] + 1) % 300])
    failed = check.check_outputs(tiny_target, [plain], [other], 5)
    assert not failed.passed
    assert failed.differences[0].gap > failed.bound > 0
    monkeypatch.setattr(check, "pass_noise", lambda *_: failed.differences[0].gap)
    tied = check.check_outputs(tiny_target, [plain], [other], 5)
    assert tied.passed
    assert re.fullmatch(r"ties: 1 within bound [\d.e+-]+", tied.verdict)


def test_an_answer_cut_short_is_no_tie(tiny_target, monkeypatch):
    bench = harness.Bench(tiny_target, make_head(tiny_target), {})
    plain = bench.decode(check_request(tiny_target), PLAIN)
    monkeypatch.setattr(check, "pass_noise", lambda *_: 1e9)
    short = dataclasses.replace(plain, tokens=plain.tokens[:-1])
    assert check.check_outputs(tiny_target, [plain], [short], 2).verdict.startswith("FAILED")


def test_lossy_answers_are_not_compared(tiny_target):
    plain = harness.Bench(tiny_target, make_head(tiny_target), {}).decode(check_request(tiny_target), PLAIN)
    found = check.check_outputs(tiny_target, [plain], [dataclasses.replace(plain, lossy=True)], 2)
    assert not found.passed
    assert found.verdict.startswith("lossy: typical acceptance")


def check_request(target):
    return Request("a", target.tokenizer.encode("the quick brown fox"), 8)


def test_a_speedup_beyond_the_ceiling_is_flagged(tiny_target, monkeypatch):
    real = harness.Bench.decode

    def hasty(self, request, way):
        result = real(self, request, way)
        if way != PLAIN:
            result.seconds /= 100
        return result

    monkeypatch.setattr(harness.Bench, "decode", hasty)
    report = evaluate(tiny_target, make_head(tiny_target), SMALL)
    assert "above" in report["summary"]["flag"]
    assert ("doubtful", report["summary"]["flag"]) in summary_rows(report)


def test_another_targets_head_is_refused(tiny_target):
    head = make_head(tiny_target, target_fingerprint="0" * 64)
    with pytest.raises(DraftsmithError, match="another target"):
        evaluate(tiny_target, head, SMALL)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"prompts": 0}, "eval.prompts = 0"),
        ({"trees": []}, "eval.trees is empty"),
        ({"bench": []}, "eval.bench is empty"),
        ({"bench": ["builtin", "builtin"]}, "names builtin 2 times"),
        ({"temperatures": [0.5, -1.0]}, "eval.temperatures: -1.0 must be at least 0"),
        ({"temperatures": [float("inf")]}, "eval.temperatures: inf must be .* finite"),
        ({"trees": ["chain:2", "chain:2"]}, "names chain:2 2 times"),
        ({"trees": ["bush:2"]}, "eval.trees: the tree 'bush:2' can't be read; write chain:4.*own:32"),
        ({"trees": ["chain:0"]}, "eval.trees: the tree 'chain:0' can't be read|depth 0 must be at least 1"),
        ({"trees": ["own:many"]}, "eval.trees: the tree 'own:many' can't be read; write own:32"),
    ],
)
def test_bad_settings_are_named(values, told):
    with pytest.raises(DraftsmithError, match=told):
        EvalSettings(**values)
