"""Make `.venv` ready: a virtual environment, the pinned packages, this project, DeepSpeed's compiled CPU operation.

Run by `make setup` with the system's python3; standard library only. Says nothing and does nothing when the stamp in
`.venv` shows that all of it was done for these very files.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".draftsmith-setup"
EXTENSIONS = VENV / "torch_extensions"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INPUTS = ("pyproject.toml", "constraints.txt", "scripts/setup.py")


class SetupError(Exception):
    """Something that the user has to mend: printed as one line."""


def main() -> int:
    """Set up `.venv` unless the stamp says that it is ready."""
    with open(__file__, "ab") as itself:  # two `make` at once take turns; network file systems lock writers only
        fcntl.flock(itself, fcntl.LOCK_EX)
        if is_ready():
            return 0
        try:
            check_python()
            check_compiler()
            started = time.monotonic()
            make_venv()
            install()
            link_checkout()
            build_operations()
        except SetupError as error:
            print(f"setup: {error}", file=sys.stderr)
            return 1
        STAMP.write_text(json.dumps(wanted()) + "\n")
        say(f"ready in {time.monotonic() - started:.0f} s")
    return 0


def say(line: str) -> None:
    """Print a line about what is being done."""
    print(f"setup: {line}", flush=True)


def wanted() -> dict[str, str]:
    """What `.venv` has to match: the files that decide its content, and the checkout that its scripts point to."""
    digest = hashlib.sha256()
    for name in INPUTS:
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    return {"inputs": digest.hexdigest(), "checkout": str(ROOT)}


def stamp() -> dict[str, str]:
    """Return what the stamp says, or nothing."""
    try:
        found = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_ready() -> bool:
    """Say whether nothing is left to do."""
    return PYTHON.exists() and stamp() == wanted()


def check_python() -> None:
    """Refuse a Python that is too old, or one that lacks venv, pip or the headers that extensions need."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11):  # noqa: UP036 -- the point is to say so
        raise SetupError(
            f"this is Python {version} ({sys.executable}), and 3.11 or newer is needed: "
            f"install one and run 'make PYTHON=/path/to/python3.12 setup'"
        )
    short = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if importlib.util.find_spec("ensurepip") is None:
        raise SetupError(f"{sys.executable} can't make virtual environments: run 'apt install python{short}-venv'")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        raise SetupError(
            f"Python.h of {sys.executable} is missing, and DeepSpeed compiles against it: "
            f"run 'apt install python{short}-dev' (Debian, Ubuntu) or 'yum install python3-devel' (Fedora, RHEL)"
        )


def check_compiler() -> None:
    """Refuse a machine without a C++ compiler, as DeepSpeed would, but in one line."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise SetupError(
            f"there is no C++ compiler '{compiler}' on PATH, and DeepSpeed compiles its CPU operations with it: "
            f"run 'apt install g++' (Debian, Ubuntu) or 'yum install gcc-c++' (Fedora, RHEL)"
        )


def run(command: list[str], what: str, variables: dict[str, str] | None = None) -> None:
    """Run a command; when it fails, show the end of what it said and stop."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        lines = [line for line in (done.stdout or "").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]
        reason = (errors or lines or [f"exit status {done.returncode}"])[-1]
        if lines:
            log = VENV / "setup-error.log"
            log.write_text("\n".join(lines) + "\n")
            reason += f" (all it said: {log})"
        raise SetupError(f"{what} failed: {reason}")


def make_venv() -> None:
    """Create `.venv`; one that is broken or was made for another place is made anew."""
    if PYTHON.exists() and stamp().get("checkout", str(ROOT)) == str(ROOT):
        probe = subprocess.run([str(PYTHON), "-m", "pip", "--version"], capture_output=True, check=False)
        if probe.returncode == 0:
            return
    say(f"creating {VENV} with Python {sys.version.split()[0]}")
    VENV.mkdir(exist_ok=True)
    run([sys.executable, "-m", "venv", "--clear", str(VENV)], "creating the virtual environment")


def pip(*arguments: str, what: str) -> None:
    """Install with the environment's own pip, under the constraints."""
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    run([*command, "-c", "constraints.txt", *arguments], what)


def install() -> None:
    """Install torch first (its build is a choice), then this project with its development tools, editable."""
    version = pinned("torch")
    cpu_only = not has_nvidia()
    if cpu_only and sys.platform == "linux" and answers(CPU_INDEX):
        say(f"installing torch {version} (CPU build: there is no NVIDIA device)")
        try:
            pip(f"torch=={version}+cpu", "--extra-index-url", CPU_INDEX, what="installing torch's CPU build")
        except SetupError as error:
            say(f"{error}; taking the ordinary build")
    else:
        say(f"installing torch {version}")
    pip(f"torch=={version}", what="installing torch")
    say(f"torch {describe_torch(cpu_only)}")
    say("installing draftsmith and what it needs")
    pip("--editable", ".[dev]", what="installing the project")


def pinned(name: str) -> str:
    """Return the version that constraints.txt gives a package."""
    found = re.search(rf"^{re.escape(name)}==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if found is None:
        raise SetupError(f"constraints.txt has no line '{name}==…'")
    return found[1]


def has_nvidia() -> bool:
    """Say whether the NVIDIA driver lists a device."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU " in done.stdout


def answers(url: str) -> bool:
    """Say whether a package index answers within a few seconds."""
    try:
        with urllib.request.urlopen(f"{url}/torch/", timeout=4) as reply:
            return bool(reply.status == 200)
    except (OSError, ValueError):
        return False


def describe_torch(cpu_only: bool) -> str:
    """Say in words which build of torch was taken."""
    code = "import importlib.metadata as m; print(m.version('torch'))"
    done = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=False)
    version = done.stdout.strip() or "?"
    if version.endswith("+cpu"):
        return f"{version}: the CPU build, as there is no NVIDIA device" if cpu_only else f"{version}: a CPU build"
    if cpu_only and sys.platform == "linux":
        return f"{version}: the ordinary build; pip offers no CPU build here"
    return f"{version}: the ordinary build"


def link_checkout() -> None:
    """Give the type checker and import-linter a folder that is called as the package is."""
    link = VENV / "link" / "draftsmith"
    link.parent.mkdir(exist_ok=True)
    if link.is_symlink() or link.exists():
        link.unlink()
    link.symlink_to(ROOT)


def build_operations() -> None:
    """Compile DeepSpeed's CPU operation now, so that no run has to; a lock left by a killed build goes first."""
    load_build_lock().remove_stale_locks(EXTENSIONS, say)
    if not shutil.which("ninja", path=str(PYTHON.parent)):
        raise SetupError(f"ninja is not in {PYTHON.parent}, and DeepSpeed builds with it: delete .venv and run again")
    if has_nvidia() or sys.platform != "linux":
        return  # DeepSpeed communicates through NCCL or gloo there
    say("compiling DeepSpeed's CPU operation (about half a minute)")
    code = (
        "from deepspeed.accelerator import get_accelerator as a; "
        "a().create_op_builder('ShareMemCommBuilder').load(verbose=False)"
    )
    run([str(PYTHON), "-c", code], "compiling DeepSpeed's CPU operation", build_environment())


def build_environment() -> dict[str, str]:
    """The variables under which extensions are built; the Makefile exports the same."""
    return {
        "PATH": f"{PYTHON.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
        "DS_ACCELERATOR": "cpu",
    }


def load_build_lock() -> ModuleType:
    """Load `train/build_lock.py` by its path: the package may not be importable yet."""
    spec = importlib.util.spec_from_file_location("build_lock", ROOT / "train" / "build_lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("setup: interrupted; run it again to go on", file=sys.stderr)
        sys.exit(130)
