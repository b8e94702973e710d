"""Stage folders: what identifies a stage's output, and what was only observed while it was made.

A manifest has two parts. `identity` (hashes of inputs, settings, an integer stage version) decides whether a stage may
be skipped or continued. `record` (library versions, counts, seconds, memory) never decides anything.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import DraftsmithError
from .files import explain_os_errors, read_json, sha256_json, sweep, write_json
from .memory import peak_rss_bytes

MANIFEST = "manifest.json"
PLAN = "plan.json"


@dataclass
class Stage:
    """One stage's folder.

    `open` decides what is there: the same identity is continued, another identity's output is set aside under
    `<folder>.<8 hex>` (never deleted) and taken back when that identity is asked for again.
    """

    folder: Path
    identity: dict[str, Any]
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def open(cls, folder: Path, name: str, version: int, identity: dict[str, Any], rank: int = 0) -> Stage:
        """Open `folder` for the stage `name` with these settings; creates it where needed.

        Args:
            rank: of several processes that share the folder only the first opens it; the others wait until it has.
        """
        full = {"stage": name, "version": version, **identity}
        if rank > 0:
            _wait_for(folder / PLAN, full)
            return cls(folder, full)
        with explain_os_errors(folder):
            _bring_back_or_set_aside(folder, full)
            folder.mkdir(parents=True, exist_ok=True)
            sweep(folder)
        if not (folder / PLAN).exists():
            write_json(folder / PLAN, full)
        return cls(folder, full)

    @property
    def manifest(self) -> dict[str, Any] | None:
        """The finished manifest, or None while the stage is not done."""
        path = self.folder / MANIFEST
        return read_json(path) if path.exists() else None

    @property
    def digest(self) -> str:
        """Hash of the identity: what later stages name as their input."""
        return sha256_json(self.identity)

    def finish(self, **record: Any) -> None:
        """Write the manifest: from now on the stage counts as done. Adds seconds, peak memory and versions."""
        previous = (self.manifest or {}).get("record", {}).get("seconds", 0.0)
        observed = {
            "seconds": round(previous + time.monotonic() - self.started, 3),
            "peak_rss_bytes": peak_rss_bytes(),
            "versions": library_versions(),
            **record,
        }
        write_json(self.folder / MANIFEST, {"identity": self.identity, "record": observed})


_PATIENCE_S = 600.0


def _wait_for(plan: Path, identity: dict[str, Any]) -> None:
    """Wait until rank 0 has opened the stage."""
    until = time.monotonic() + _PATIENCE_S
    while not (plan.exists() and read_json(plan) == identity):
        if time.monotonic() > until:
            raise DraftsmithError(
                f"{plan.parent}: rank 0 has not opened this stage within {_PATIENCE_S / 60:.0f} min: is it running, "
                "with the same settings, on the same file system?"
            )
        time.sleep(0.05)


def _bring_back_or_set_aside(folder: Path, identity: dict[str, Any]) -> None:
    if folder.is_dir() and (folder / PLAN).exists():
        there = read_json(folder / PLAN)
        if there == identity:
            return
        os.replace(folder, _aside(folder, there))
    if _aside(folder, identity).is_dir():
        os.replace(_aside(folder, identity), folder)


def _aside(folder: Path, identity: dict[str, Any]) -> Path:
    return folder.with_name(f"{folder.name}.{sha256_json(identity)[:8]}")


def library_versions() -> dict[str, str]:
    """Versions of the libraries that shape results, without importing them."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "deepspeed", "safetensors", "datasets"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
