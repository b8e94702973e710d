"""The harness on the tiny target: the report's figures, the output check, and what a failed check does."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest
import torch

from draftsmith.errors import DraftsmithError
from draftsmith.eval import check, harness
from draftsmith.eval.harness import EvalSettings, evaluate
from draftsmith.eval.report.charts import figure
from draftsmith.eval.report.page import write_page
from draftsmith.eval.report.terminal import print_summary, summary_rows
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
    assert report["schema"] == "draftsmith.report/1"
    assert set(s["setting"]) == {"kind", "depth", "nodes", "temperature", "batch", "dtype"}
    assert s["setting"]["kind"] == "chain"
    assert s["setting"]["nodes"] == s["setting"]["depth"] + 1
    assert s["setting"]["dtype"] == "float32"
    assert s["output_check"] == "identical"
    assert s["n_prompts"] == 4
    assert report["environment"]["sessions"] == 1
    assert s["tau_ci"][0] <= s["tau"] <= s["tau_ci"][1]
    assert s["speedup_ci"][0] <= s["speedup"] <= s["speedup_ci"][1]
    assert len(s["acceptance_conditional_k4"]) == len(s["acceptance_cumulative_k4"]) == 4
    assert len(s["acceptance_conditional"]) == s["setting"]["depth"]
    assert min(s["tokens_per_s"], s["baseline_tokens_per_s"], s["generate_tokens_per_s"]) > 0
    assert 0 < s["overhead"] < 1
    assert [row["depth"] for row in report["tuning"]["table"]] == [1, 2, 3, 4]
    assert sum(row["measured_tokens_per_s"] is not None for row in report["tuning"]["table"]) == 2
    assert set(report["passes"]["target_seconds"]) == {"1", "2", "3", "4", "5"}
    assert len(report["prompts"]["sha256"]) == 64
    json.dumps(report, allow_nan=False)


def test_figures_follow_from_the_raw_logs(report):
    steps = [step for prompt in report["prompts"]["speculative"] for step in prompt["steps"]]
    assert report["summary"]["tau"] == pytest.approx(sum(s[2] for s in steps) / len(steps))
    assert report["summary"]["mal"] == pytest.approx(1 + sum(s[1] for s in steps) / len(steps))
    spoken = [sum(s[2] for s in p["steps"]) for p in report["prompts"]["speculative"]]
    assert spoken == [p["tokens"] for p in report["prompts"]["plain"]]


def test_every_prompt_takes_turns(tiny_target, monkeypatch):
    seen = []
    real = harness.Bench.decode

    def spy(self, request, depth, timer=None):
        seen.append((request.id, depth))
        return real(self, request, depth, timer)

    monkeypatch.setattr(harness.Bench, "decode", spy)
    report = evaluate(tiny_target, make_head(tiny_target), dataclasses.replace(SMALL, depths=[1]))
    held_out = seen[-8:]
    k = report["summary"]["setting"]["depth"]
    assert [depth for _, depth in held_out] == [0, k, k, 0, 0, k, k, 0]
    assert [a for a, _ in held_out[::2]] == [b for b, _ in held_out[1::2]]


def test_a_failed_check_prints_no_speedup(tiny_target, monkeypatch, tmp_path, capsys):
    real = harness.Bench.decode

    def broken(self, request, depth, timer=None):
        result = real(self, request, depth, timer)
        if depth:
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
    bench = harness.Bench(tiny_target, make_head(tiny_target))
    request = check_request(tiny_target)
    plain = bench.decode(request, 0)
    other = dataclasses.replace(plain, tokens=[*plain.tokens[:3], (plain.tokens[3] + 1) % 300])
    failed = check.check_outputs(tiny_target, [plain], [other], 5)
    assert not failed.passed
    assert failed.differences[0].gap > failed.bound > 0
    monkeypatch.setattr(check, "pass_noise", lambda *_: failed.differences[0].gap)
    tied = check.check_outputs(tiny_target, [plain], [other], 5)
    assert tied.passed
    assert re.fullmatch(r"ties: 1 within bound [\d.e+-]+", tied.verdict)


def test_an_answer_cut_short_is_no_tie(tiny_target, monkeypatch):
    bench = harness.Bench(tiny_target, make_head(tiny_target))
    plain = bench.decode(check_request(tiny_target), 0)
    monkeypatch.setattr(check, "pass_noise", lambda *_: 1e9)
    short = dataclasses.replace(plain, tokens=plain.tokens[:-1])
    assert check.check_outputs(tiny_target, [plain], [short], 2).verdict.startswith("FAILED")


def test_lossy_answers_are_not_compared(tiny_target):
    plain = harness.Bench(tiny_target, make_head(tiny_target)).decode(check_request(tiny_target), 0)
    found = check.check_outputs(tiny_target, [plain], [dataclasses.replace(plain, lossy=True)], 2)
    assert not found.passed
    assert found.verdict.startswith("lossy: typical acceptance")


def check_request(target):
    return harness.Request("a", target.tokenizer.encode("the quick brown fox"), 8)


def test_a_speedup_beyond_the_ceiling_is_flagged(tiny_target, monkeypatch):
    real = harness.Bench.decode

    def hasty(self, request, depth, timer=None):
        result = real(self, request, depth, timer)
        if depth and not timer:
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


@pytest.mark.parametrize("values", [{"prompts": 0}, {"depths": []}, {"depths": [2, 1]}, {"depths": [0]}])
def test_bad_settings_are_named(values):
    with pytest.raises(DraftsmithError, match=r"eval\."):
        EvalSettings(**values)


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.text, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "rect", "line", "polyline", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("meta", "rect", "line", "polyline", "circle"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_is_whole_and_holds_every_figure(report, tmp_path):
    curve = [{"kind": "train", "step": i, "loss": 3.0 - i / 10} for i in range(1, 9)]
    curve += [{"kind": "validation", "step": 8, "tau_walk": 1.4, "loss": 9.0}]
    stages = {"regenerate": {"seconds": 12.5, "peak_rss_bytes": 3 * 2**20}, "train": {"seconds": 321.0}}
    write_page(tmp_path / "report.html", report, curve, stages)
    text = (tmp_path / "report.html").read_text()
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe"}
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert sum(tag == "svg" for tag, _ in page.tags) == 6
    shown = " ".join(page.text)
    for _, value in summary_rows(report):
        assert value in shown
    s = report["summary"]
    figures = [*s["acceptance_conditional_k4"], *s["acceptance_cumulative_k4"], 12.5, 321.0]
    figures += [row["predicted_tokens_per_s"] for row in report["tuning"]["table"]]
    figures += [1000 * v for v in report["passes"]["target_seconds"].values()]
    for value in figures:
        assert figure(value) in shown
