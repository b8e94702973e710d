"""Head families by name. A new family is one module here that defines `FAMILY`, one drafter and one YAML."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import DraftsmithError

if TYPE_CHECKING:
    from .base import DraftHead
    from .config import HeadConfig


@dataclass(frozen=True)
class Family:
    """What a family's module registers: its config class and its network."""

    name: str
    config: type[HeadConfig]
    head: type[DraftHead]


@functools.cache
def family_names() -> list[str]:
    """Names of the modules beside this one that define `FAMILY`."""
    package = importlib.import_module(__package__)
    names = [m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg]
    return sorted(n for n in names if hasattr(importlib.import_module(f"{__package__}.{n}"), "FAMILY"))


def head_family(name: str) -> Family:
    """Return a family by name; an unknown one is an error that lists what exists."""
    if name not in family_names():
        raise DraftsmithError(f"unknown head family {name!r}; there are: {', '.join(family_names())}")
    family: Family = importlib.import_module(f"{__package__}.{name}").FAMILY
    return family
