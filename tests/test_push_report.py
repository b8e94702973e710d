"""`draftsmith push`: which report goes along, and what becomes of one that is damaged, or on other weights."""

from __future__ import annotations

import json
import shutil

import pytest
import test_push
from shipped import EXPORTED, PUSHED

from draftsmith import evaluation
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json, write_json
from draftsmith.push import PushSettings, push, result_lines

trained, run, export = test_push.trained, test_push.run, test_push.export
server, settings, card_of = test_push.server, test_push.settings, test_push.card_of


def test_a_newer_report_of_the_run_goes_along(server, settings, run):
    push(settings)
    newer = read_json(run / "report.json")
    newer["summary"]["tau"] = 2.4
    write_json(run / "report.json", newer)
    result = push(settings)
    assert sorted(file["name"] for file in result["files"] if file["sent"]) == ["README.md", "report.json"]
    assert json.loads(server.files("me/Head")["report.json"])["summary"]["tau"] == 2.4


@pytest.mark.parametrize("changes", [{"head_sha256": "0" * 64}, {"schema": "draftsmith.report/2"}])
def test_a_report_on_other_weights_or_of_another_version_makes_no_claim(server, settings, run, capsys, changes):
    write_json(run / "report.json", {**read_json(run / "report.json"), **changes})
    push(settings)
    assert "nothing is claimed" in card_of(server)
    assert "were not measured" in capsys.readouterr().err


def test_pages_of_other_weights_leave_the_hub_with_them(server, settings, run, capsys):
    push(settings)
    write_json(run / "report.json", {**read_json(run / "report.json"), "head_sha256": "0" * 64})
    result = push(settings)
    assert result["deleted"] == ["report.html", "report.json"]
    assert sorted(server.files("me/Head")) == sorted(["README.md", *EXPORTED])
    assert len(server.repos["me/Head"].messages) == 3
    assert any(line.startswith("deleted there") and "report.json" in line for line in result_lines(result))


def test_no_file_names_a_place_of_this_machine(server, settings, run, tmp_path):
    start = tmp_path / "start"
    start.mkdir()
    records = {
        "train": {"step": 1, "head_init": {"source": str(start), "layout": "EAGLE-3", "sha256": "0" * 64}},
        "eval": {"seconds": 1.0, "report": str(run / "eval" / "report.json")},  # as earlier versions noted it
    }
    stages = {name: evaluation._public_record(record) for name, record in records.items()}
    assert stages["train"]["head_init"] == {"layout": "EAGLE-3", "sha256": "0" * 64}
    assert stages["eval"] == {"seconds": 1.0}
    write_json(run / "report.json", {**read_json(run / "report.json"), "stages": stages})
    push(settings)
    there = server.files("me/Head")
    assert sorted(there) == PUSHED
    for place in (run.parents[1], start):
        assert not [name for name, data in there.items() if str(place).encode() in data]


@pytest.mark.parametrize(
    "damage",
    [
        lambda report: [report],
        lambda report: {name: value for name, value in report.items() if name != "summary"},
        lambda report: {**report, "by": {}},
        lambda report: {**report, "benchmarks": [{"name": "x"}]},
        lambda report: {**report, "summary": {**report["summary"], "setting": "chain:2"}},
    ],
)
def test_a_damaged_report_is_named(server, settings, run, damage):
    write_json(run / "report.json", damage(read_json(run / "report.json")))
    with pytest.raises(DraftsmithError, match=r"report\.json is .*delete it.*draftsmith eval"):
        push(settings)
    assert server.requests == []


def test_a_report_without_a_digest_or_behind_a_link_is_none(server, export, tmp_path):
    alone = tmp_path / "elsewhere"
    shutil.copytree(export, alone)
    known, about = read_json(export.parents[1] / "report.json"), read_json(alone / "draftsmith.json")
    provenance = {name: value for name, value in about["provenance"].items() if name != "weights_sha256"}
    write_json(alone / "draftsmith.json", {**about, "provenance": provenance})
    write_json(alone / "report.json", {name: value for name, value in known.items() if name != "head_sha256"})
    asked = PushSettings(alone, "me/Head", runs=tmp_path / "no-runs", dry_run=True)
    assert sorted(file["name"] for file in push(asked)["files"]) == sorted(["README.md", *EXPORTED])
    write_json(alone / "draftsmith.json", about)
    write_json(alone / "report.json", known)
    (tmp_path / "private.html").write_text("private")
    (alone / "report.html").symlink_to(tmp_path / "private.html")
    assert "report.html" not in {file["name"] for file in push(asked)["files"]}
    (alone / "report.json").rename(tmp_path / "report.json")
    (alone / "report.json").symlink_to(tmp_path / "report.json")
    assert "report.json" not in {file["name"] for file in push(asked)["files"]}
