"""A folder imports only from floors below it , held by import-linter."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def linter() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]


def test_floors_hold(tmp_path):
    (tmp_path / "draftsmith").symlink_to(ROOT)
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_every_module_stands_on_a_floor():
    """A module that the contract does not name would be free to import anything."""
    layers = {part.strip(" ()") for layer in linter()["contracts"][0]["layers"] for part in layer.split(":")}
    modules = {path.stem for path in ROOT.glob("*.py")}
    modules |= {f.name for f in ROOT.iterdir() if (f / "__init__.py").exists()}
    modules |= {f"eval.{p.stem}" for p in (ROOT / "eval").glob("*.py")}
    modules |= {f"eval.{f.name}" for f in (ROOT / "eval").iterdir() if (f / "__init__.py").exists()}
    assert modules - layers - {"__init__", "__main__", "eval", "eval.__init__"} == set()
