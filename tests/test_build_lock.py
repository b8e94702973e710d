"""A run that was killed while it compiled must not hang the next one, and a build under way must be left alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftsmith.train.build_lock import lock_is_held, prepare_extensions, remove_stale_locks

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")

# as torch.utils.file_baton takes it: created, and kept open while building
BUILDER = (
    "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('building', flush=True); time.sleep(60)"
)


@pytest.fixture
def extension(tmp_path: Path) -> Path:
    folder = tmp_path / "deepspeed_shm_comm"
    folder.mkdir()
    return folder


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def run(*command: str, **options: str | Path) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options))  # type: ignore[call-overload]
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def builder(start: Callable[..., subprocess.Popen[str]], lock: Path) -> subprocess.Popen[str]:
    process = start(sys.executable, "-c", BUILDER, str(lock))
    assert process.stdout is not None
    assert process.stdout.readline() == "building\n"
    return process


def test_lock_without_builder_is_removed(tmp_path, extension, start):
    lock = extension / "lock"
    process = builder(start, lock)
    process.kill()
    process.wait()
    assert lock.exists()
    said: list[str] = []
    assert remove_stale_locks(tmp_path, said.append, grace=0) == [lock]
    assert not lock.exists()
    assert len(said) == 1
    assert str(lock) in said[0]


def test_lock_of_a_live_builder_is_kept(tmp_path, extension, start):
    lock = extension / "lock"
    builder(start, lock)
    os.utime(lock, (1, 1))  # a lock's age is no argument against a live holder
    assert lock_is_held(lock)
    assert remove_stale_locks(tmp_path, grace=0) == []
    assert lock.exists()


def test_compiler_that_outlives_its_builder_is_waited_for(tmp_path, extension, start):
    lock = extension / "lock"
    lock.touch()
    compiler = tmp_path / "cc1plus"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", compiler)
    start(str(compiler), "30", cwd=extension)
    said: list[str] = []
    assert remove_stale_locks(tmp_path, said.append, grace=0, patience=0.2) == []
    assert "is kept" in said[-1]


def test_lock_goes_once_that_compiler_is_done(tmp_path, extension, start):
    lock = extension / "lock"
    lock.touch()
    compiler = tmp_path / "cc1plus"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", compiler)
    start(str(compiler), "0.6", cwd=extension)
    before = time.monotonic()
    said: list[str] = []
    assert remove_stale_locks(tmp_path, said.append, grace=0) == [lock]
    assert time.monotonic() - before > 0.3
    assert "waiting for the compiler" in said[0]


def test_no_folder_and_no_lock_cost_nothing(tmp_path):
    before = time.monotonic()
    assert remove_stale_locks(tmp_path / "none") == []
    assert remove_stale_locks(tmp_path) == []
    assert time.monotonic() - before < 0.5


def test_prepare_sets_the_folder_inside_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    stale = tmp_path / "torch_extensions" / "op" / "lock"
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert prepare_extensions(lambda line: None) == tmp_path / "torch_extensions"
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "torch_extensions")
    assert not stale.exists()
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")


def test_the_environments_own_ninja_comes_first(tmp_path, monkeypatch):
    """Another version wouldn't believe the log of the one that built, and compile everything again."""
    folders = [tmp_path / "system", tmp_path / "own"]
    for folder in folders:
        folder.mkdir()
        (folder / "ninja").write_text("#!/bin/sh\n")
        (folder / "ninja").chmod(0o755)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(folders[0]))
    monkeypatch.setattr(sys, "executable", str(folders[1] / "python"))
    for _ in range(2):
        prepare_extensions(lambda line: None)
        assert os.environ["PATH"] == os.pathsep.join(str(folder) for folder in reversed(folders))


def test_torch_no_longer_hangs_after_a_killed_build(tmp_path, extension, start):
    """The real thing: torch's own lock, left by a killed process, then taken by the next."""
    from torch.utils.file_baton import FileBaton

    lock = extension / "lock"
    code = (
        "import sys, time; from torch.utils.file_baton import FileBaton; baton = FileBaton(sys.argv[1]);"
        "assert baton.try_acquire(); print('building', flush=True); time.sleep(60)"
    )
    process = start(sys.executable, "-c", code, str(lock))
    assert process.stdout is not None
    assert process.stdout.readline() == "building\n"
    assert remove_stale_locks(tmp_path, grace=0) == []
    process.kill()
    process.wait()
    baton = FileBaton(str(lock))
    assert not baton.try_acquire()
    remove_stale_locks(tmp_path, lambda line: None, grace=0)
    assert baton.try_acquire()
    baton.release()
