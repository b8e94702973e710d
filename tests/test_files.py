"""Files appear whole or not at all; what killed processes left is removed or put back; full disks are named."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from draftsmith import files
from draftsmith.errors import DraftsmithError
from draftsmith.files import atomic_path, sweep, write_json, write_text
from draftsmith.manifest import Stage


def dead_pid() -> int:
    """Number of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_folder_replaces_a_folder_as_a_whole(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with atomic_path(tmp_path / "best") as temporary:
            temporary.mkdir()
            (temporary / f"{text}.txt").write_text(text)
    assert [p.name for p in (tmp_path / "best").iterdir()] == ["new.txt"]
    assert [p.name for p in tmp_path.iterdir()] == ["best"]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "kept")

    def fail() -> None:
        with atomic_path(tmp_path / "a.txt") as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (tmp_path / "a.txt").read_text() == "kept"
    assert len(list(tmp_path.iterdir())) == 1


def left_by(pid: int, host: str | None = None) -> str:
    return f"{host or re.sub('[^A-Za-z0-9]', '', socket.gethostname())}-{pid}"


def test_leftovers_of_dead_processes_go_those_of_living_ones_stay(tmp_path: Path) -> None:
    dead, alive = left_by(dead_pid()), left_by(os.getpid())
    (tmp_path / f".chunk.{dead}.part").write_text("x")
    (tmp_path / f".chunk.{alive}.part").write_text("x")
    (tmp_path / ".hidden.file.txt").write_text("x")
    (tmp_path / f".best.{dead}.before").mkdir()
    (tmp_path / f".best.{dead}.before" / "w").write_text("the best so far")
    sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f".chunk.{alive}.part", ".hidden.file.txt", "best"]
    assert (tmp_path / "best" / "w").read_text() == "the best so far"
    (tmp_path / f".best.{dead}.before").mkdir()
    sweep(tmp_path)
    assert not (tmp_path / f".best.{dead}.before").exists()


def test_another_machines_files_stay_for_a_day(tmp_path: Path) -> None:
    old, new = (tmp_path / f".{name}.{left_by(dead_pid(), 'otherhost')}.part" for name in ("old", "new"))
    for path in (old, new):
        path.write_text("x")
    os.utime(old, (0, 0))
    sweep(tmp_path)
    assert not old.exists()
    assert new.exists()


def test_other_ranks_wait_for_the_first_to_open_a_stage(tmp_path: Path) -> None:
    Stage.open(tmp_path / "s", "s", 1, {"a": 1})
    found: list[Stage] = []
    waiting = threading.Thread(target=lambda: found.append(Stage.open(tmp_path / "s", "s", 1, {"a": 2}, rank=1)))
    waiting.start()
    waiting.join(0.3)
    assert not found
    first = Stage.open(tmp_path / "s", "s", 1, {"a": 2})
    waiting.join(10)
    assert found[0].digest == first.digest


def test_a_stage_sweeps_its_folder(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    left = tmp_path / "s" / f".chunk.{left_by(dead_pid())}.part"
    left.write_text("x")
    Stage.open(tmp_path / "s", "s", 1, {})
    assert not left.exists()


def test_a_full_disk_under_safetensors_is_named(tmp_path: Path) -> None:
    from safetensors import SafetensorError

    with pytest.raises(DraftsmithError, match=r"disk is full while writing .*chunk"), atomic_path(tmp_path / "chunk"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(SafetensorError), atomic_path(tmp_path / "chunk"):
        raise SafetensorError("another fault")


def test_json_is_canonical_and_broken_json_is_named(tmp_path: Path) -> None:
    assert files.sha256_json({"a": 1, "b": [2]}) == files.sha256_json({"b": [2], "a": 1})
    write_json(tmp_path / "a.json", {"a": 1})
    (tmp_path / "b.json").write_text("{")
    assert files.read_json(tmp_path / "a.json") == {"a": 1}
    with pytest.raises(DraftsmithError, match=r"b.json is not valid JSON"):
        files.read_json(tmp_path / "b.json")
    with pytest.raises(DraftsmithError, match="does not exist"):
        files.read_json(tmp_path / "c.json")


def test_another_identity_is_set_aside_and_taken_back(tmp_path: Path) -> None:
    first = Stage.open(tmp_path / "s", "s", 1, {"x": 1})
    (first.folder / "result").write_text("one")
    first.finish(count=3)
    second = Stage.open(tmp_path / "s", "s", 1, {"x": 2})
    assert second.manifest is None
    assert not (second.folder / "result").exists()
    again = Stage.open(tmp_path / "s", "s", 1, {"x": 1})
    assert (again.folder / "result").read_text() == "one"
    assert again.manifest is not None
    assert again.manifest["record"]["count"] == 3
    assert again.digest == first.digest != second.digest
