"""Several benchmarks, several turns, several temperatures: what is asked, what is told, and what a kill leaves."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
from test_eval_harness import make_head
from test_eval_resume import stop_after

from draftsmith.errors import DraftsmithError
from draftsmith.eval import harness
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.loop import Request, decode, rows_needed
from draftsmith.eval.harness import EvalSettings, evaluate
from draftsmith.eval.journal import Journal
from draftsmith.eval.measure import WARM_UPS
from draftsmith.eval.report.content import SAMPLED
from draftsmith.eval.report.terminal import summary_rows
from draftsmith.eval.tune import PLAIN

TURNS = [
    {"id": "a", "category": "talk", "turns": ["the quick brown fox", "and then?", "what is the answer?"]},
    {"id": "b", "category": "sums", "turns": ["user asks", "the lazy dog " * 300]},
    {"id": "c", "category": "talk", "prompt": "write a short story"},
]
OTHERS = [{"prompt": "a ship sails to the north"}, {"prompt": "в зимой дом стоит"}]
SMALL = EvalSettings(
    prompts=3, max_new_tokens=6, tuning_prompts=1, tuning_new_tokens=4, timed_prompts=1, timed_new_tokens=4,
    trees=["static:0,1,0.0"], temperatures=[0.7, 0.0],
)  # fmt: skip


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    lines = [json.dumps(record) for record in TURNS]
    (folder / "turns.jsonl").write_text("\n".join([*lines[:1], '{"id": "torn', *lines[1:]]) + "\n")
    (folder / "others.jsonl").write_text("\n".join(map(json.dumps, OTHERS)))
    return dataclasses.replace(SMALL, bench=["turns.jsonl", "others.jsonl"], bench_dir=str(folder))


@pytest.fixture(scope="module")
def head(tiny_target):
    return make_head(tiny_target)


@pytest.fixture(scope="module")
def report(tiny_target, head, settings):
    """As a reader of the file meets it."""
    return json.loads(json.dumps(evaluate(tiny_target, head, settings), allow_nan=False))


def logs(report):
    """The raw logs of each temperature, with its row of figures."""
    sampled = {0.0: report["prompts"], **{s["temperature"]: s for s in report["prompts"]["sampled"]}}
    return [(row, sampled[row["temperature"]]) for row in report["temperatures"]]


def tau(rows):
    """From the raw steps alone."""
    steps = [step for row in rows for step in row["steps"]]
    return sum(step[2] for step in steps) / len(steps)


def faster(plain, fast):
    ours = sum(step[2] for row in fast for step in row["steps"]) / sum(row["seconds"] for row in fast)
    return ours / (sum(row["tokens"] for row in plain) / sum(row["seconds"] for row in plain))


def test_every_figure_follows_from_the_raw_logs(report):
    fast, plain, s = report["prompts"]["speculative"], report["prompts"]["plain"], report["summary"]
    assert s["tau"] == pytest.approx(tau(fast))
    assert s["speedup"] == pytest.approx(faster(plain, fast))
    alone = [tau([row]) for row in fast if row["steps"]]
    assert s["tau_mean"] == pytest.approx(sum(alone) / len(alone))
    assert s["chain"]["tau"] == pytest.approx(tau(report["prompts"]["chain"]))
    for key in ("category", "language", "turn"):
        for group in report["by"][key]:
            mine = [i for i, row in enumerate(fast) if str(row[key]) == group["name"]]
            assert group["n_prompts"] == len(mine) > 0
            assert group["tau"] == pytest.approx(tau([fast[i] for i in mine]))
            assert group["speedup"] == pytest.approx(faster([plain[i] for i in mine], [fast[i] for i in mine]))
    for benchmark in report["benchmarks"]:
        mine = [row for row in fast if row["benchmark"] == benchmark["name"]]
        assert benchmark["tau"] == pytest.approx(tau(mine))
    for row, raw in logs(report):
        assert row["tau"] == pytest.approx(tau(raw["speculative"]))
        assert row["speedup"] == pytest.approx(faster(raw["plain"], raw["speculative"]))
        assert row["speedup"] == pytest.approx(row["tokens_per_s"] / row["baseline_tokens_per_s"])
    steps = {"<256": [], "<512": []}
    for row in fast:
        length = row["prompt_tokens"] + 1
        for step in row["steps"]:
            steps["<256" if length < 256 else "<512"].append(step)
            length += step[2]
    found = {group["name"]: group["tau"] for group in report["by"]["context"]}
    assert found == {name: pytest.approx(tau([{"steps": part}])) for name, part in steps.items() if part}


def test_later_turns_go_on_from_the_plain_greedy_answers(tiny_target, report):
    """Rendered and decoded anew here, one turn after the other."""
    tokenizer, messages, found = tiny_target.tokenizer, [], {}
    for turn, text in enumerate(TURNS[0]["turns"], 1):
        messages.append({"role": "user", "content": text})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        request = Request("x", list(prompt), SMALL.max_new_tokens)
        capacity = rows_needed([request], PlainDrafter())
        (answer,) = decode(tiny_target, PlainDrafter(), [request], slots=1, capacity=capacity)
        found[f"turns-a/{turn}"] = len(prompt), len(answer.tokens) - 1
        said = answer.tokens[:-1] if answer.finish == "eos" else answer.tokens
        messages.append({"role": "assistant", "content": tokenizer.decode(said, skip_special_tokens=True)})
    raw = report["prompts"]
    mine = [(f, p) for f, p in zip(raw["speculative"], raw["plain"], strict=True) if f["question"] == "turns-a"]
    assert {f["id"]: (f["prompt_tokens"], p["tokens"]) for f, p in mine} == found
    assert [f["turn"] for f, _ in mine] == [1, 2, 3]


def test_what_is_asked_is_told(report):
    ids = [row["id"] for row in report["prompts"]["speculative"]]
    assert ids == ["turns-a/1", "turns-a/2", "turns-a/3", "turns-b/1", "turns-c", "others-row1", "others-row2"]
    assert report["prompts"]["dropped"] == ["turns-b/2"]  # its second turn is longer than the target's context
    one, two = report["benchmarks"]
    assert (one["name"], one["n_prompts"], one["dropped"]) == ("turns", 5, ["turns-b/2"])
    assert (two["name"], two["n_prompts"], two["problems"]) == ("others", 2, [])
    assert any("turns.jsonl:2" in problem for problem in one["problems"])
    assert any("turns-b/2" in problem for problem in one["problems"])
    assert {group["name"]: group["n_prompts"] for group in report["by"]["turn"]} == {"1": 5, "2": 1, "3": 1}
    assert "ru" in {group["name"] for group in report["by"]["language"]}
    assert report["summary"]["n_prompts"] == 7
    assert [row["id"] for row in report["prompts"]["generate"]] == [
        name for name in ids if name[-2:] not in ("/2", "/3")
    ]
    assert [sample["id"] for sample in report["samples"]] == ["turns-a/1", "turns-b/1", "turns-c"]
    assert report["samples"][1]["prompt"] == "user asks"
    assert report["tree"]["id"] == "turns-a/1"
    assert len({row["sha256"] for row in report["prompts"]["speculative"]}) == 7


def test_sampled_answers_are_measured_and_not_compared(report):
    greedy, warm = report["temperatures"]
    assert (greedy["temperature"], warm["temperature"]) == (0.0, 0.7)
    assert (greedy["output_check"], warm["output_check"]) == ("identical", SAMPLED)
    assert greedy["speedup"] == report["summary"]["speedup"]
    assert min(warm["speedup"], *warm["speedup_ci"], warm["baseline_tokens_per_s"]) > 0
    (raw,) = report["prompts"]["sampled"]
    prompts = [(row["id"], row["sha256"]) for row in report["prompts"]["speculative"]]
    assert [(row["id"], row["sha256"]) for row in raw["speculative"]] == prompts
    same = [a["steps"] == b["steps"] for a, b in zip(raw["speculative"], report["prompts"]["speculative"], strict=True)]
    assert not all(same)  # it did sample
    assert summary_rows(report)


def clockless(report):
    """All that no clock decides."""
    raw = [part for _, part in logs(report)]
    rows = [row for part in raw for kind in ("plain", "speculative") for row in part[kind]]
    return [
        [{k: v for k, v in row.items() if k not in ("seconds", "ttft")} for row in rows],
        [{k: v for k, v in row.items() if "speedup" not in k} for row in report["by"]["category"]],
        [row["tau"] for row in report["temperatures"]],
        [{k: v for k, v in row.items() if "speedup" not in k} for row in report["benchmarks"]],
        report["check"], report["samples"], report["tree"],
    ]  # fmt: skip


@pytest.mark.parametrize("entry", ["pair/turns-a/2", "pair@0.7/turns-c"])
def test_a_kill_anywhere_costs_one_pair(tiny_target, head, settings, report, tmp_path, monkeypatch, entry):
    """Between the turns of a conversation, in the middle of a temperature."""
    path, put = tmp_path / "journal.jsonl", Journal.put

    def killed(self, key, value):
        put(self, key, value)
        if key == entry:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "put", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate(tiny_target, head, settings, Journal.open(path))
    monkeypatch.setattr(Journal, "put", put)
    done = [json.loads(line).get("key", "") for line in path.read_text().splitlines()]
    calls = stop_after(monkeypatch, None)
    again = json.loads(json.dumps(evaluate(tiny_target, head, settings, Journal.open(path))))
    assert clockless(again) == clockless(report)
    missing = 14 - sum(key.startswith(("pair/", "pair@")) for key in done)
    assert len(calls) == 2 * WARM_UPS + 2 * missing
    keys = [json.loads(line).get("key") for line in path.read_text().splitlines()]
    keys = [key for key in keys if key is not None]
    assert len(keys) == len(set(keys))


def test_what_measuring_costs_is_told(tiny_target, head, settings, monkeypatch):
    """Writing each pair takes 30 ms here; that of the last one belongs to none."""
    put = Journal.put

    def slow(self, key, value):
        time.sleep(0.03)
        put(self, key, value)

    monkeypatch.setattr(Journal, "put", slow)
    journal = Journal()
    greedy = dataclasses.replace(settings, bench=["others.jsonl"], temperatures=[0.0])
    found = evaluate(tiny_target, head, greedy, journal)
    spent = [journal.get(f"pair/{row['id']}")["spent"] for row in found["prompts"]["speculative"]]
    assert [pair["wall"] > pair["decoding"] + 0.03 * (i > 0) for i, pair in enumerate(spent)] == [True] * 2
    steps = sum(row["seconds"] for kind in ("plain", "speculative") for row in found["prompts"][kind])
    decoding, wall = (sum(pair[name] for pair in spent) for name in ("decoding", "wall"))
    assert steps < decoding < wall - 0.03
    assert found["summary"]["measuring_overhead"] == pytest.approx(1 - decoding / wall)


def test_wrong_outputs_leave_no_speedup_at_any_temperature(tiny_target, head, settings, monkeypatch):
    real = harness.Bench.decode

    def broken(self, request, way):
        result = real(self, request, way)
        if way != PLAIN and request.sampling.temperature == 0:
            result.tokens = [(result.tokens[0] + 1) % 300, *result.tokens[1:]]
        return result

    monkeypatch.setattr(harness.Bench, "decode", broken)
    one = dataclasses.replace(settings, bench=["others.jsonl"], prompts=1)
    found = evaluate(tiny_target, head, one)
    assert found["summary"]["output_check"].startswith("FAILED")
    figures = [*found["temperatures"], *found["benchmarks"], *(row for rows in found["by"].values() for row in rows)]
    assert len(figures) > 5
    assert {row["speedup"] for row in figures} == {None}
    assert {row["speedup_ci"] for row in figures} == {None}


def test_two_files_of_one_name_are_refused(settings, tmp_path):
    """Figures go by the benchmark's name."""
    twin = tmp_path / "turns.jsonl"
    twin.write_text(json.dumps({"id": "of its own", "prompt": "the fox"}))
    both = dataclasses.replace(settings, bench=["turns.jsonl", str(twin)])
    with pytest.raises(DraftsmithError, match="are both called turns: measure them one after the other"):
        harness.load_benchmarks(both)


def test_two_files_with_one_question_are_refused(settings, tmp_path):
    twin = tmp_path / "turns-c.jsonl"
    twin.write_text(json.dumps({"id": "x", "prompt": "the fox"}) + "\n")
    other = tmp_path / "turns.jsonl"
    other.write_text(json.dumps({"id": "c-x", "prompt": "the fox"}) + "\n")
    both = dataclasses.replace(settings, bench=[str(other), str(twin)])
    with pytest.raises(DraftsmithError, match=r"both have a question turns-c-x: measure them one after the other"):
        harness.load_benchmarks(both)


def test_a_missing_benchmark_is_one_clear_error(settings):
    with pytest.raises(DraftsmithError, match="there is no benchmark 'nothing'"):
        harness.load_benchmarks(dataclasses.replace(settings, bench=["nothing"]))
