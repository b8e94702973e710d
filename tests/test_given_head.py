"""What --head means: a kind that was trained here, a folder, a hub id; and where its results go."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.eval import given_head
from draftsmith.eval.given_head import find_head, is_place
from draftsmith.files import sha256_file, write_json


def add(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(parents=True)
    (folder / "head.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """runs/<model> with two runs, one that decodes another's weights, and heads elsewhere."""
    home = tmp_path / "runs" / "model"
    for name in ("eagle1", "eagle3@big"):
        best = add(home / name / "train" / "checkpoints" / "best")
        write_json(home / name / "train" / "manifest.json", {"identity": {}, "record": {}})
        report = {"head_sha256": sha256_file(best / "model.safetensors"), "summary": {"setting": {"tree": "chain:2"}}}
        write_json(home / name / "report.json", report)
    (home / "eagle2").mkdir()
    write_json(home / "eagle2" / "report.json", {"head_sha256": "0", "summary": {"setting": {"tree": "chain:9"}}})
    add(tmp_path / "theirs")
    add(tmp_path / "eagle3")
    return home


def test_a_kind_and_its_folder_are_the_same_head(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_head(home, "eagle3", "big")
    assert (found.name, found.folder, found.tree, found.remarks) == ("eagle3@big", home / "eagle3@big", "chain:2", ())
    assert found.weights_sha256 == sha256_file(found.checkpoint / "model.safetensors")
    for place in (home / "eagle3@big", home / "eagle3@big" / "train", found.checkpoint):
        assert find_head(tmp_path / "other", str(place)) == found
    monkeypatch.chdir(home)
    assert find_head(home, "./eagle3@big") == found
    borrowed = find_head(home, str(home / "eagle2"))
    assert borrowed == find_head(home, "eagle2")
    assert borrowed.checkpoint == home / "eagle1" / "train" / "checkpoints" / "best"
    assert borrowed.tree is None
    assert "other weights" in borrowed.remarks[0]


def test_a_head_from_elsewhere_has_a_place_of_its_own(home: Path, tmp_path: Path) -> None:
    found = find_head(home, str(tmp_path / "theirs"))
    assert found.name == f"theirs-{found.digest[:8]}"
    assert found.folder == home / found.name
    assert (found.tree, found.adapter) == (None, None)
    like_a_kind = find_head(home, str(tmp_path / "eagle3"))
    assert like_a_kind.name == f"eagle3-{like_a_kind.digest[:8]}"  # never among the results of the one trained here
    before = found.digest
    (found.checkpoint / "model.safetensors").write_bytes(b"others")
    assert find_head(home, str(tmp_path / "theirs")).digest != before


def test_folders_of_one_name_never_share_a_place(home: Path, tmp_path: Path) -> None:
    """Exports of two runs for one engine; folders called like those of the stages."""
    runs = ("eagle1", "eagle3@big")
    exports = [find_head(home, str(add(home / run / "export" / "vllm", run.encode()))) for run in runs]
    assert [found.name.rpartition("-")[0] for found in exports] == ["eagle1-vllm", "eagle3-big-vllm"]
    others = [find_head(home, str(add(tmp_path / place, place.encode()))) for place in ("a/vllm", "b/vllm", "data")]
    places = {found.folder for found in [*exports, *others]}
    assert len(places) == 5
    assert not places & {home / "vllm", home / "data", home / "compare"}
    assert all(found.folder.name.endswith(found.digest[:8]) for found in [*exports, *others])


def test_a_hub_id_is_fetched(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_head, "find_checkpoint", lambda source: tmp_path / "theirs")
    assert find_head(home, "org/name@1f2e").folder == home / "org--name"


def test_what_is_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eagle3").mkdir()
    (tmp_path / "mine").mkdir()
    assert [is_place(head) for head in ("eagle3", "./eagle3", "mine", "nothing", "org/name")] == [
        False, True, True, False, True,
    ]  # fmt: skip


def test_what_is_not_there_is_named(home: Path, tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"holds no trained head \(there are: eagle1, eagle2, eagle3@big"):
        find_head(home, "medusa1")
    with pytest.raises(DraftsmithError, match="there is no head to start from"):
        find_head(home, str(tmp_path / "nowhere"))
    with pytest.raises(DraftsmithError, match="--run big names a run of a kind"):
        find_head(home, str(home / "eagle3@big"), "big")
