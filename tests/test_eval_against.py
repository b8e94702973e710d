"""A report against an earlier one: what counts as worse, what can't be told, and the exit codes."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from draftsmith import cli, pipeline
from draftsmith.errors import DraftsmithError
from draftsmith.eval.against import RULE, against, read_earlier

MACHINE = {"processor": "one", "device": "cpu", "cpus": 2, "threads": 2, "system": "Linux x86_64", "dtype": "float32"}


def raw(accepted, seconds, prefix="q"):
    """Logs of one temperature: each answer has ten steps of which some accept a draft; plain decoding takes 1 s."""
    plain, fast = [], []
    for i, (hits, clock) in enumerate(zip(accepted, seconds, strict=True)):
        steps = [[1, 1, 2]] * hits + [[1, 0, 1]] * (10 - hits)
        about = {"id": f"{prefix}{i}", "benchmark": "own", "question": f"{prefix}{i}", "turn": 1, "sha256": f"{i:016x}"}
        fast.append({**about, "seconds": clock, "steps": steps})
        plain.append({"id": about["id"], "tokens": 10 + hits, "seconds": 1.0})
    return {"plain": plain, "speculative": fast}


def report(accepted=(5,) * 10, seconds=(0.5,) * 10, tree="chain:1", warm=None, chain=None):
    found = raw(accepted, seconds)
    logs = {
        "name": "own", "max_new_tokens": 20, **found,
        "chain": [{"steps": row["steps"]} for row in raw(chain or accepted, seconds)["speculative"]],
        "sampled": [] if warm is None else [{"temperature": 0.7, **raw(*warm)}],
    }  # fmt: skip
    return {
        "schema": "draftsmith.report/3",
        "summary": {
            "speedup": 1.0, "output_check": "identical", "setting": {"tree": tree}, "chain": {"tree": "chain:4"},
        },
        "target": {"fingerprint": "f", "chat_template_sha256": "c"},
        "environment": {**MACHINE, "versions": {"torch": "2.13"}},
        "temperatures": [{"temperature": t} for t in ([0.0] if warm is None else [0.0, 0.7])],
        "prompts": logs,
    }  # fmt: skip


def changed(**changes):
    found = report()
    for path, value in changes.items():
        *groups, key = path.split("__")
        inner = found
        for group in groups:
            inner = inner[group]
        inner[key] = value
    return found


def test_equal_reports_are_not_worse():
    found = against(report(), report(), "old.json")
    assert [(c.name, c.change, c.change_ci, c.worse) for c in found.changes] == [
        ("tau", 0.0, (0.0, 0.0), False),
        ("speedup", 0.0, (0.0, 0.0), False),
    ]
    assert (found.worse, found.n_prompts, found.notes) == (False, 10, [])
    assert found.changes[0].now == 15 / 10
    assert found.changes[1].now == pytest.approx((150 / 5.0) / (150 / 10.0))


def test_a_small_fall_on_every_prompt_is_worse():
    """Smaller than the spread between prompts: only pairs can tell."""
    rng = np.random.default_rng(0)
    before = rng.integers(2, 9, 40)
    old, new = report(before, [0.5] * 40), report(before - 1, [0.5] * 40)
    found = against(new, old, "old.json")
    change = found.changes[0]
    assert change.change == pytest.approx(-0.1)
    assert change.change_ci == (pytest.approx(-0.1), pytest.approx(-0.1))
    assert change.worse
    assert found.worse
    assert not against(old, new, "old.json").worse
    assert any("worse" in line and "τ" in line for line in found.lines())
    assert found.lines()[-1].strip() == RULE


def test_ups_and_downs_are_noise():
    old = report((5, 5, 5, 5, 5, 5, 5, 5, 5, 5))
    new = report((6, 4, 6, 4, 5, 6, 4, 5, 4, 4))
    found = against(new, old, "old.json")
    assert found.changes[0].change < 0
    assert found.changes[0].change_ci[1] > 0
    assert not found.worse


@pytest.mark.parametrize(
    ("seconds", "worse"),
    [
        ([0.60] * 10, True),  # slower on every prompt, and below all that the earlier prompts spread over
        ([0.47, 0.57] * 5, False),  # slower on every prompt, inside the earlier interval: another process's clock
        ([0.45] * 10, False),
        ([0.60, 0.42] * 5, False),
    ],
)
def test_a_speedup_falls_below_both_intervals(seconds, worse):
    old = report(seconds=(0.45, 0.55) * 5)
    found = against(report(seconds=seconds), old, "old.json")
    assert [c.worse for c in found.changes] == [False, worse]


def test_temperatures_are_compared_one_by_one():
    old = report(warm=((5,) * 10, (0.5,) * 10))
    new = report(warm=((3,) * 10, (0.5,) * 10))
    assert [c.worse for c in against(new, old, "o").changes] == [False, False, True, False]
    found = against(report(), old, "o")
    assert len(found.changes) == 2
    assert "temperature 0.7 is in one of the reports alone" in found.notes[0]


def test_another_machine_tells_tau_alone():
    old = changed(environment__processor="two")
    found = against(report((3,) * 10, (0.9,) * 10), old, "o")
    assert [(c.name, c.judged, c.worse) for c in found.changes] == [("tau", True, True), ("speedup", False, False)]
    assert "another machine: processor one now, two before: speed-ups are not judged" in found.notes
    assert any(line.endswith("not judged") for line in found.lines())


def test_another_version_is_said_and_judged():
    old = changed(environment__versions={"torch": "2.11", "numpy": "2"})
    found = against(report(seconds=(0.9,) * 10), old, "o")
    assert found.notes == ["other versions: numpy none now, 2 before; torch 2.13 now, 2.11 before"]
    assert found.worse


def test_other_trees_are_compared_by_the_chain():
    old = report((5,) * 10, tree="static:0,1", chain=(4,) * 10)
    found = against(report((3,) * 10, (0.9,) * 10, chain=(4,) * 10), old, "o")
    assert [(c.name, c.what, c.worse) for c in found.changes] == [
        ("tau", "chain:4, greedy", False),
        ("speedup", "greedy", True),
    ]
    assert "other trees: chain:1 now, static:0,1 before" in found.notes[0]
    worse = against(report((3,) * 10, chain=(2,) * 10), old, "o")
    assert worse.changes[0].worse


def test_a_chosen_chain_is_compared_with_the_chain_that_the_other_reports():
    old = report((5,) * 10, tree="static:0,1", chain=(6,) * 10)
    now = changed(summary__chain__tree="chain:2", summary__setting__tree="chain:4")
    found = against(now, old, "o")
    assert next((c.name, c.what, c.now, c.before) for c in found.changes) == ("tau", "chain:4, greedy", 1.5, 1.6)
    assert "τ is that of chain:4, which both report" in found.notes[0]


def test_reports_without_a_common_tree_can_not_be_compared():
    old = report(tree="chain:2")
    now = changed(summary__chain__tree="chain:3")
    with pytest.raises(
        DraftsmithError, match=r"no τ in common: it is of chain:3, chain:1 now, of chain:4, chain:2 before.*eval\.trees"
    ):
        against(now, old, "o")
    warm = ((5,) * 10, (0.5,) * 10)
    found = against(report(warm=warm), report(tree="chain:2", warm=warm), "o")
    assert [c.what for c in found.changes if c.name == "tau"] == ["chain:4, greedy"]
    assert "not compared above temperature 0" in found.notes[0]


def test_only_prompts_that_both_hold_count():
    old = report((5,) * 12, (0.5,) * 12)
    new = report((5,) * 10)
    old["prompts"]["speculative"][0]["sha256"] = "other"
    old["prompts"]["speculative"][1]["steps"] = [[1, 1, 2]] * 99
    old["prompts"]["speculative"][1]["sha256"] = "longer"
    found = against(new, old, "o")
    assert found.n_prompts == 8
    assert found.changes[0].before == 1.5
    assert found.notes == ["6 answers are in one of the reports alone and left out"]


def test_a_check_that_fails_now_is_worse():
    new = changed(summary__speedup=None, summary__output_check="FAILED: q1 differs")
    found = against(new, report(), "o")
    assert found.worse
    assert [c.judged for c in found.changes] == [True, False]
    assert "FAILED: q1 differs" in found.notes[-1]
    assert not against(new, new, "o").worse


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"target__fingerprint": "g"}, "target f now, g before"),
        ({"target__chat_template_sha256": None}, "chat template c now, None before"),
        ({"environment__dtype": "bfloat16"}, "dtype float32 now, bfloat16 before"),
        ({"prompts__max_new_tokens": 99}, "max_new_tokens 20 now, 99 before"),
    ],
)
def test_what_is_not_the_same_is_refused_and_named(changes, told):
    with pytest.raises(DraftsmithError, match=f"can't be compared with old.json: {told}"):
        against(report(), changed(**changes), "old.json")


def test_too_few_prompts_in_both_are_refused():
    with pytest.raises(DraftsmithError, match=r"5 questions are in both .*, 6 are needed: measure the same benchmarks"):
        against(report(), report((5,) * 5, (0.5,) * 5), "o")


def test_a_file_that_is_no_report_is_named(tmp_path):
    path = tmp_path / "old.json"
    with pytest.raises(DraftsmithError, match="can't be read: No such file"):
        read_earlier(path)
    for text, told in (("{", "is no report"), ("[]", "holds no report"), ('{"schema": "draftsmith.report/2"}', "/2, ")):
        path.write_text(text)
        with pytest.raises(DraftsmithError, match=told):
            read_earlier(path)


def call(monkeypatch, tmp_path, now, *more):
    """`draftsmith eval --against` on a report that needs no measuring."""
    path = tmp_path / "old.json"
    path.write_text(json.dumps(report()))
    result = {**copy.deepcopy(now), "report": "r", "page": "p"}
    monkeypatch.setitem(pipeline.COMMANDS, "eval", lambda config, **_: result)
    monkeypatch.setattr("draftsmith.eval.report.terminal.print_summary", lambda _: None)
    return CliRunner().invoke(cli.app, ["eval", "--against", str(path), *more])


def test_exit_codes(monkeypatch, tmp_path):
    assert call(monkeypatch, tmp_path, report()).exit_code == 0
    worse = call(monkeypatch, tmp_path, report((3,) * 10))
    assert worse.exit_code == 1
    assert "worse" in worse.stdout
    refused = call(monkeypatch, tmp_path, changed(target__fingerprint="g"))
    assert isinstance(refused.exception, DraftsmithError)  # main makes one line and exit code 2 of it
    missing = CliRunner().invoke(cli.app, ["eval", "--against", str(tmp_path / "none.json")])
    assert isinstance(missing.exception, DraftsmithError)


def test_the_comparison_is_part_of_the_json(monkeypatch, tmp_path):
    done = call(monkeypatch, tmp_path, report((3,) * 10), "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["against"]["worse"] is True
    assert found["against"]["changes"][0]["before"] == 1.5
    assert found["summary"]["speedup"] == 1.0
    refused = call(monkeypatch, tmp_path, changed(target__fingerprint="g"), "--json")
    assert json.loads(refused.stdout)["summary"]["speedup"] == 1.0  # what was measured is not lost
    assert isinstance(refused.exception, DraftsmithError)
