"""Files that appear whole or not at all, and hashes that mean the same on every machine."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import DraftsmithError


def sha256_file(path: Path) -> str:
    """Return the hex SHA-256 of a file's bytes."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def canonical_json(value: Any) -> str:
    """Serialise `value` with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_json(value: Any) -> str:
    """Return the hex SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


@contextlib.contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn a full disk or a place that can't be written into a `DraftsmithError` that names the path."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DraftsmithError(_full(path)) from error
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            raise DraftsmithError(
                f"{path} can't be written: a part of this path is a file; choose another place (--runs, --out)"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise DraftsmithError(
                f"{path} can't be written ({error.strerror}); choose another place (--runs, --out) or mend its rights"
            ) from error
        raise
    except Exception as error:
        # safetensors writes with a library of its own, whose errors carry the number only in their text
        if type(error).__name__ == "SafetensorError" and f"os error {errno.ENOSPC}" in str(error):
            raise DraftsmithError(_full(path)) from error
        raise


def _full(path: Path) -> str:
    return f"the disk is full while writing {path}; what was finished is kept: free some space and run again"


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is renamed over `path`, on failure it is removed.

    The caller writes a file or a folder there. A folder replaces an existing folder as a whole.
    """
    temporary = path.with_name(f".{path.name}.{_writer()}.part")
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        try:
            yield temporary
            if temporary.is_dir() and path.exists():
                before = path.with_name(f".{path.name}.{_writer()}.before")
                _remove(before)
                os.replace(path, before)  # two renames: there is hardly a moment without a whole folder
                os.replace(temporary, path)
                _remove(before)
            else:
                os.replace(temporary, path)
        finally:
            _remove(temporary)


_STALE_S = 24 * 3600
"""A half-written file of another machine, whose processes can't be seen from here, is left alone for a day."""


def sweep(folder: Path) -> None:
    """Remove what killed processes left half-written in `folder`; living processes' files stay.

    A whole folder that was set aside when its replacement didn't arrive is put back.
    """
    for left in folder.glob(".*.*.*"):
        name, writer, kind = left.name[1:].rsplit(".", 2)
        if kind not in ("part", "before") or _is_alive(writer, left):
            continue
        if kind == "before" and not (folder / name).exists():
            os.replace(left, folder / name)
        else:
            _remove(left)


def _writer() -> str:
    """This process in the name of a file that it writes: several machines may share the folder."""
    return f"{_host()}-{os.getpid()}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "", socket.gethostname()) or "host"


def _is_alive(writer: str, left: Path) -> bool:
    host, sign, pid = writer.rpartition("-")
    if not sign or not pid.isdigit():
        return True  # no file of ours
    if host != _host():
        return time.time() - left.lstat().st_mtime < _STALE_S
    return Path(f"/proc/{pid}").exists()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as readable JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON; a broken or missing file is a `DraftsmithError` that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DraftsmithError(f"{path} does not exist") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DraftsmithError(f"{path} is not valid JSON ({error}); delete it and run the stage again") from error


def probe_writable(runs: Path) -> None:
    """Write and remove a small file, so that an unwritable or full place is an error before any work."""
    if runs.exists() and not runs.is_dir():
        raise DraftsmithError(f"{runs} is a file, not a folder: choose another place with --runs DIR")
    probe = runs / ".write-probe"
    with explain_os_errors(runs):
        runs.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(bytes(1 << 20))
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)
