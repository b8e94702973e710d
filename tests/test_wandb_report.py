"""Reports on Weights & Biases: offline with the real package, a W&B Report through a stand-in of its package."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from report_samples import report, sparse

from draftsmith.eval.report import PAGE, REPORT
from draftsmith.eval.report.page import write_page
from draftsmith.eval.report.wandb_report import REPORT_URL, flat_summary, tables, upload_report
from draftsmith.eval.report.wandb_run import WANDB_ID

KEY = "0123456789abcdef"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder with a report; the environment says nothing of W&B, and what is set meanwhile goes away again."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_SILENT", "WANDB_CONSOLE", "DRAFTSMITH_QUIET"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    place = tmp_path / "model" / "eagle3"
    place.mkdir(parents=True)
    (place / REPORT).write_text(json.dumps(report()))
    write_page(place / PAGE, report(), [], {})
    return place


class FakeRun:
    """A run that notes what it is given."""

    id, entity, project, sync_dir = "a1b2", "me", "draftsmith", "there/offline-run"

    def __init__(self, options: dict[str, Any], offline: bool) -> None:
        self.options, self.offline = options, offline
        self.logged: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.artifacts: list[Any] = []
        self.finished = False

    def log(self, values: dict[str, Any]) -> None:
        self.logged |= values

    def log_artifact(self, artifact: Any) -> None:
        self.artifacts.append(artifact)

    def finish(self) -> None:
        self.finished = True


class Made:
    """Whatever a stand-in of a package makes: its class's name and its arguments."""

    def __init__(self, *args: Any, **values: Any) -> None:
        self.args, self.files = args, []
        vars(self).update(values)

    def add_file(self, path: str) -> None:
        self.files.append(Path(path).name)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """A stand-in of the package; returns the runs that it starts: online ones where there is a key."""
    runs: list[FakeRun] = []
    module: Any = types.ModuleType("wandb")

    def init(**options: Any) -> FakeRun:
        import os

        runs.append(FakeRun(options, offline=os.environ.get("WANDB_MODE") == "offline"))
        return runs[-1]

    module.init, module.Table, module.Html, module.Artifact = init, Made, Made, Made
    module.plot = types.SimpleNamespace(line_series=Made, bar=Made)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


class FakeReport(Made):
    """A W&B Report."""

    saved: list[FakeReport]
    url = "https://reports.example/one"

    def save(self) -> None:
        type(self).saved.append(self)

    @classmethod
    def from_url(cls, url: str) -> FakeReport:
        return cls(opened=url)


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> type[FakeReport]:
    """A stand-in of the package for W&B Reports, with the classes that wandb-workspaces 0.4 has."""
    names = ["H1", "MarkdownBlock", "PanelGrid", "Runset", "ScalarChart", "SummaryMetric"]
    names += ["WeavePanelSummaryTable", "MediaBrowser"]
    module: Any = types.ModuleType("wandb_workspaces.reports.v2")
    for name in names:
        setattr(module, name, type(name, (Made,), {}))
    module.Report = FakeReport
    FakeReport.saved = []
    for name in ("wandb_workspaces", "wandb_workspaces.reports"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", module)
    return FakeReport


def test_only_where_it_is_asked_for(folder: Path, wandb: list[FakeRun], monkeypatch: pytest.MonkeyPatch) -> None:
    upload_report(folder, None)
    upload_report(folder, False)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    upload_report(folder, True)
    assert not wandb
    assert {path.name for path in folder.iterdir()} == {REPORT, PAGE}


def test_all_of_a_report_is_logged_and_how_to_upload_it(
    folder: Path, wandb: list[FakeRun], capsys: pytest.CaptureFixture[str]
) -> None:
    upload_report(folder, True)
    (run,) = wandb
    assert run.finished
    assert (run.options["group"], run.options["job_type"]) == ("model/eagle3", "eval")
    assert run.options["id"] == (folder / WANDB_ID).read_text().strip()
    assert run.options["config"]["setting"]["tree"] == "dynamic:3x3x6"
    charts = {"eval/acceptance_tree", "eval/acceptance_chain"}
    charts |= {f"eval/tau_by_{name}" for name in ("category", "context", "language", "benchmark", "temperature")}
    found = {f"eval/{name}" for name in (*tables(report()), "page")}
    assert set(run.logged) == charts | found
    assert run.logged["eval/acceptance_tree"].args[1] == [[0.701, 0.602, 0.503], [0.704, 0.424, 0.213]]
    assert run.logged["eval/page"].args == (str(folder / PAGE),)
    assert run.artifacts[0].files == [REPORT, PAGE]
    assert run.summary == flat_summary(report())
    assert "to upload: wandb sync there/offline-run" in capsys.readouterr().err
    upload_report(folder, True)
    assert wandb[1].options["id"] == run.options["id"], "a later report of the same run"


def test_tables_hold_the_raw_figures() -> None:
    found = tables(report())
    head, rows = found["prompts"]
    assert rows[0] == ["p1", "mt-bench", "coding", "en", 1, 3, 9, 3.0, 0.267, 0.409]
    assert len(head) == len(rows[0])
    head, rows = found["context"]
    assert rows[0] == ["<256", 7, 2.5, 2.4, 2.65, 0.512, None, None, None]
    assert len(head) == len(rows[0])
    assert [row[0] for row in found["temperature"][1]] == ["0", "0.7"]
    assert list(tables(sparse())) == ["prompts"]
    flat = flat_summary(report())
    assert flat["eval/tau"] == 2.345
    assert (flat["eval/speedup_ci_low"], flat["eval/speedup_ci_high"]) == (1.44, 1.61)
    assert flat["eval/conditional_3"] == 0.503
    assert "eval/flag" not in flat


def test_online_a_report_is_written_once_and_then_brought_up_to_date(
    folder: Path, wandb: list[FakeRun], workspaces: type[FakeReport], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    upload_report(folder, None)
    (made,) = workspaces.saved
    assert (made.project, made.entity, made.title) == ("draftsmith", "me", "eagle3 for tiny")
    assert (folder / REPORT_URL).read_text().strip() == made.url
    blocks = made.blocks
    kinds = [type(block).__name__ for block in blocks]
    assert kinds == ["H1", "MarkdownBlock", "PanelGrid", "H1", "PanelGrid", "H1", "PanelGrid"]
    assert "| speed-up | 1.52×  [1.440, 1.610] |" in blocks[1].text
    grids = [block for block in blocks if type(block).__name__ == "PanelGrid"]
    assert {grid.runsets[0].filters for grid in grids} == {"Metric('ID') == 'a1b2'"}
    shown = {panel.metric.name for panel in grids[0].panels} | {panel.table_name for panel in grids[1].panels}
    assert shown <= set(wandb[0].logged) | set(wandb[0].summary)
    assert f"W&B Report: {made.url}" in capsys.readouterr().err
    upload_report(folder, None)
    assert workspaces.saved[1].opened == made.url

    def gone(_: str) -> FakeReport:
        raise RuntimeError("no such report")

    monkeypatch.setattr(workspaces, "from_url", gone)
    capsys.readouterr()
    upload_report(folder, None)
    assert re.search(r"can't be opened \(no such report\); delete \S+ to begin a new one", capsys.readouterr().err)


def test_without_the_package_for_reports_it_is_said(
    folder: Path, wandb: list[FakeRun], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.delitem(sys.modules, "wandb_workspaces.reports.v2", raising=False)
    upload_report(folder, None)
    assert wandb[0].finished
    assert "pip install wandb-workspaces" in capsys.readouterr().err
    assert not (folder / REPORT_URL).exists()


def test_what_fails_there_is_said_without_the_key_and_loses_nothing(
    folder: Path, wandb: list[FakeRun], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)

    def refuse(*_: Any) -> None:
        raise RuntimeError(f"no access with {KEY}")

    monkeypatch.setattr(FakeRun, "log_artifact", refuse)
    upload_report(folder, None)
    said = capsys.readouterr().err
    assert "not complete there: no access with <key>" in said
    assert KEY not in said
    assert wandb[0].finished
    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    upload_report(folder, None)
    said = capsys.readouterr().err
    assert "left out" in said
    assert KEY not in said
    assert json.loads((folder / REPORT).read_text())


def test_a_run_that_does_not_end_is_said_without_the_key(
    folder: Path, wandb: list[FakeRun], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)

    def refuse(*_: Any) -> None:
        raise RuntimeError(f"no access with {KEY}")

    monkeypatch.setattr(FakeRun, "finish", refuse)
    upload_report(folder, None)
    said = capsys.readouterr().err
    assert "Weights & Biases: the run is not finished there: no access with <key>\n" in said
    assert KEY not in said


def test_the_real_package_offline(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    upload_report(folder, True)
    said = capsys.readouterr().err
    assert "not complete" not in said
    (line,) = [x for x in said.splitlines() if "wandb sync" in x]
    place = Path(line.split("wandb sync ")[1])
    assert list(place.glob("*.wandb"))
    media = {path.suffix for path in (place / "files" / "media").rglob("*") if path.is_file()}
    assert {".json", ".html"} <= media
