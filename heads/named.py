"""Heads by the names that users give them: one file each in `configs/heads/`."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml

from ..errors import DraftsmithError


def head_names() -> list[str]:
    """Heads that have a file."""
    return sorted(f.name.removesuffix(".yaml") for f in _folder().iterdir() if f.name.endswith(".yaml"))


def head_file(name: str) -> dict[str, Any]:
    """What a head's file says, as it is there; raises DraftsmithError for an unknown head."""
    if name not in head_names():
        raise DraftsmithError(f"unknown head {name!r}; there are: {', '.join(head_names())}")
    values: dict[str, Any] = yaml.safe_load((_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
    return values


def weights_of(name: str) -> str:
    """The head whose weights the head called `name` is decoded with: mostly itself, as for one that has no file."""
    return str((head_file(name).get("weights_of") if name in head_names() else None) or name)


def _folder() -> Any:
    return resources.files(__package__.partition(".")[0]) / "configs" / "heads"
