"""Compiled extensions: where they are built, and build locks whose builder died.

PyTorch compiles an extension under a lock: a file called `lock` in the extension's folder, created and held open by
the process that builds, removed when it is done. A process killed meanwhile leaves the file, and every later one waits
for it without a word. Here a lock is believed only while somebody on this machine holds it.

Standard library only and no relative import: the setup script loads this file by its path.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

OLD_SECONDS = 1800.0  # where processes can't be looked at, a lock of this age counts as left over


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def prepare_extensions(notify: Callable[[str], None] = _to_stderr) -> Path | None:
    """Make the environment fit for DeepSpeed's extensions: call it before DeepSpeed is imported.

    In a virtual environment the extensions live in its `torch_extensions` folder unless TORCH_EXTENSIONS_DIR says
    otherwise, and its `bin` comes first on PATH if it has ninja. Then left-over locks are removed.
    Returns the folder, or None where PyTorch's own default is used.
    """
    binaries = str(Path(sys.executable).parent)
    own = os.path.join(binaries, "ninja")
    if os.path.exists(own) and shutil.which("ninja") != own:
        # versions of ninja don't believe each other's logs: with another one everything would be compiled again
        os.environ["PATH"] = binaries + os.pathsep + os.environ.get("PATH", "")
    if not os.environ.get("TORCH_EXTENSIONS_DIR"):
        if sys.prefix == sys.base_prefix:
            return None
        os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix) / "torch_extensions")
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    remove_stale_locks(folder, notify)
    return folder


def remove_stale_locks(
    folder: Path, notify: Callable[[str], None] = _to_stderr, grace: float = 1.0, patience: float = 600.0
) -> list[Path]:
    """Remove the build locks below `folder` that nobody holds; return them.

    A lock is left alone while a process has it open. Where only compilers of a killed build are still at work in the
    folder, they are waited for, up to `patience` seconds. A lock is looked at twice, `grace` seconds apart: another
    machine may share the folder, and a healthy process that has nothing to compile holds it for milliseconds.
    """
    locks = _locks(folder)
    if not locks:
        return []
    time.sleep(grace)
    removed = []
    with _one_at_a_time(folder):  # else two of us could remove a lock that a third has taken anew in between
        for lock in locks:
            if not lock.exists() or lock_is_held(lock):
                continue
            if not _wait_for_compilers(lock.parent, notify, patience):
                notify(f"{lock} is kept: a compiler has been at work there for over {patience:.0f} s")
                continue
            with contextlib.suppress(FileNotFoundError):
                lock.unlink()
                removed.append(lock)
                notify(f"removed {lock}: the process that was building there is gone")
    return removed


def lock_is_held(lock: Path) -> bool:
    """Say whether a live process on this machine holds `lock` open.

    Processes of other users show nothing: one of the lock's owner then counts as its holder while the lock is young.
    Without /proc only the lock's age decides.
    """
    try:
        status = lock.stat()
    except FileNotFoundError:
        return False
    young = time.time() - status.st_mtime < OLD_SECONDS
    if not Path("/proc/self/fd").is_dir():
        return young
    for process in _processes():
        try:
            entries = list((process / "fd").iterdir())
        except PermissionError:
            if young and _owner(process) == status.st_uid:
                return True
            continue
        except OSError:
            continue
        for entry in entries:
            with contextlib.suppress(OSError):
                there = entry.stat()
                if (there.st_dev, there.st_ino) == (status.st_dev, status.st_ino):
                    return True
    return False


def _locks(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.rglob("lock") if path.is_file())


def _processes() -> list[Path]:
    return [path for path in Path("/proc").iterdir() if path.name.isdigit()]


def _owner(process: Path) -> int | None:
    try:
        return process.stat().st_uid
    except OSError:
        return None


def _compilers(folder: Path) -> list[int]:
    """Processes at work in `folder`: ninja and the compilers it starts have it as their working directory."""
    if not Path("/proc/self").exists():
        return []
    found = []
    for process in _processes():
        with contextlib.suppress(OSError):
            if int(process.name) != os.getpid() and os.path.samefile(process / "cwd", folder):
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and _is_compiler(process):
                    found.append(int(process.name))
    return found


def _is_compiler(process: Path) -> bool:
    name = (process / "comm").read_text().strip()
    return name.startswith(("ninja", "cc1", "ld", "as", "nvcc", "cicc", "ptxas", "collect2")) or any(
        part in name for part in ("++", "gcc", "clang", "cc")
    )


def _wait_for_compilers(folder: Path, notify: Callable[[str], None], patience: float) -> bool:
    deadline = time.monotonic() + patience
    told = False
    while _compilers(folder):
        if not told:
            notify(f"waiting for the compiler of a build that was killed, in {folder}")
            told = True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    # a file of its own, open for writing: network file systems lock no folders and no readers
    descriptor = os.open(folder / ".draftsmith-build", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
