"""The wheel, built and installed where nothing of the checkout is seen: complete, and nothing that does not belong."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("heads", "eval", "data_recipes", "train")

IMPORT_ALL = """
import importlib, pkgutil, sys
import draftsmith
names = [m.name for m in pkgutil.walk_packages(draftsmith.__path__, "draftsmith.")]
for name in names:
    importlib.import_module(name)
from draftsmith.heads.resolve import model_names
assert "smollm2-135m" in model_names()
print("\\n".join([draftsmith.__file__, *names]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source") / "draftsmith-source"
    top = {".venv", ".git", "runs", "build", "dist", "draftsmith.egg-info", "tests"}

    def ignore(folder: str, names: list[str]) -> set[str]:
        return {n for n in names if n == "__pycache__" or n.endswith("_cache") or (Path(folder) == ROOT and n in top)}

    shutil.copytree(ROOT, source, ignore=ignore)
    out = source.parent / "dist"
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return next(out.glob("*.whl"))


def in_wheel(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def package_files() -> set[str]:
    """What has to be inside, as the checkout lies."""
    files = set(ROOT.glob("*.py")) | set((ROOT / "configs").rglob("*.yaml")) | set((ROOT / "configs").rglob("*.json"))
    files |= set((ROOT / "data_recipes" / "prompts").glob("*.yaml"))
    for floor in FLOORS:
        files |= {p for p in (ROOT / floor).rglob("*.py") if "__pycache__" not in p.parts}
    return {f"draftsmith/{path.relative_to(ROOT).as_posix()}" for path in files}


def test_wheel_holds_the_package_and_its_data(wheel):
    missing = package_files() - in_wheel(wheel)
    assert not missing, f"not in the wheel: {sorted(missing)}; is its folder listed in pyproject.toml?"
    assert "draftsmith/configs/models/smollm2-135m.yaml" in in_wheel(wheel)


def test_wheel_holds_nothing_else(wheel):
    others = {name for name in in_wheel(wheel) - package_files() if ".dist-info/" not in name}
    assert not others
    assert {name.split("/")[0] for name in in_wheel(wheel)} == {"draftsmith", "draftsmith-0.1.0.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in in_wheel(wheel))


def test_every_package_folder_is_listed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {
        ".".join(["draftsmith", *path.parent.relative_to(ROOT).parts])
        for floor in FLOORS
        for path in (ROOT / floor).rglob("__init__.py")
    }
    assert there | {"draftsmith"} == set(listed)


def test_installed_wheel_imports_everywhere(wheel, tmp_path):
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    # our own environment's packages, but not its editable draftsmith: a plain path line runs no import hook
    Path(found, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run([python, "-P", "-c", IMPORT_ALL], cwd=elsewhere, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    origin = next(i for i, line in enumerate(lines) if line.endswith("__init__.py"))
    assert Path(lines[origin]).is_relative_to(environment)
    assert {"draftsmith.heads.resolve", "draftsmith.train.build_lock"} <= set(lines[origin + 1 :])
    for name in ("train", "eval", "heads", "tests", "scripts", "configs"):
        assert not Path(found, name).exists()
    assert (environment / "bin" / "draftsmith").exists()
