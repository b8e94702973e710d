"""Fixtures that every test file may use; puts this folder on the path, so that `from tiny import …` works."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

TEST_DATA = "DRAFTSMITH_TEST_DATA"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny random target (seed 0)."""
    from tiny import make_tiny_target

    return make_tiny_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_target(tiny_folder: Path):
    """The tiny target, loaded in fp32. Shared by all tests: never change it."""
    import torch

    from draftsmith.heads.target import Target

    return Target.load(str(tiny_folder), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Folder with the real public files that some tests read; absent on a user's machine."""
    folder = os.environ.get(TEST_DATA)
    if not folder or not Path(folder).is_dir():
        pytest.skip(f"set {TEST_DATA} to the folder with the real conversation files to run this test")
    return Path(folder)


@pytest.fixture(scope="session")
def forks():
    """Child processes that need not import torch again, forked from a server that never computed anything.

    A process has one such server, which imports ahead only what was named before it started: all tests' modules are.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["data_worker", "regenerate_data"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the server looks for modules before it is told where
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
    return context
