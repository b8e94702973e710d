"""Files that appear whole or not at all, and hashes that mean the same on every machine."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
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
            raise DraftsmithError(
                f"the disk is full while writing {path}; what was finished is kept: free some space and run again"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise DraftsmithError(
                f"{path} can't be written ({error.strerror}); choose another place with --runs DIR or mend its rights"
            ) from error
        raise


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is renamed over `path`, on failure it is removed.

    The caller writes a file or a folder there. A folder replaces an existing folder as a whole.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        try:
            yield temporary
            if temporary.is_dir() and path.exists():
                _remove(path)
            os.replace(temporary, path)
        finally:
            _remove(temporary)


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
