"""Contracts: which heads each engine loads, in which layout, within which limits, and how they are served.

`configs/engines/<engine>.yaml` has a row for every head in `configs/heads/`: a layout (`export_layouts.py`) with its
limits, or why it is unsupported. Exporter, loader, doctor and docs/engines.md read these.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from ...errors import DraftsmithError
from ..named import head_file, head_names
from .export_layouts import Layout, layout
from .serve_settings import ServeSettings, Template, settings_of


@dataclass(frozen=True)
class Limit:
    """A fact (see `export_layouts.facts_of`) that must be one of some values, and why."""

    fact: str
    only: Sequence[Any]
    because: str

    def broken(self, facts: Mapping[str, Any]) -> str | None:
        """What is wrong with a head; None where nothing is, or the fact isn't known."""
        if self.fact not in facts or facts[self.fact] in self.only:
            return None
        told = " or ".join(repr(value) for value in self.only)
        return f"{self.fact} = {facts[self.fact]!r} instead of {told}: {self.because}"


@dataclass(frozen=True)
class Contract:
    """One head in one engine.

    Attributes:
        engine: name of its file; title: what people call it. head: by its name in configs/heads/.
        reason: why it is unsupported; None where it is supported.
        limits: what its heads must be like.
        shapes: chain, tree: what it can verify.
        checked: by what the pair was run; None = config only: from the engine's sources and documents.
        versions: of the engine that this is about.
        template: of its serve commands.
        constraints: rules for the settings; notes: what a user should know.
    """

    engine: str
    title: str
    head: str
    reason: str | None
    limits: Sequence[Limit] = ()
    shapes: Sequence[str] = ("chain",)
    checked: str | None = None
    versions: str = ""
    template: Template = field(default_factory=Template)
    constraints: Sequence[str] = ()
    notes: Sequence[str] = ()
    layout_name: str | None = None
    method_name: str | None = None

    @property
    def supported(self) -> bool:
        """Whether the engine loads such a head at all."""
        return self.reason is None

    @property
    def layout(self) -> Layout:
        """What the engine loads; raises DraftsmithError where the head is unsupported."""
        self.require()
        return layout(str(self.layout_name))

    @property
    def method(self) -> str:
        """What the engine calls this way to draft; raises DraftsmithError where the head is unsupported."""
        self.require()
        return str(self.method_name)

    def require(self) -> None:
        """Refuse an unsupported pair; names the engines that load such a head."""
        if self.reason is not None:
            others = [one.engine for one in contracts_of(self.head)]
            way_out = f"there are contracts with {', '.join(others)}" if others else "the decoder here does"
            raise DraftsmithError(f"{self.title} serves no {self.head} heads (unsupported: {self.reason}); {way_out}")

    def problems(self, facts: Mapping[str, Any]) -> list[str]:
        """Why the engine can't load this very head, [] where it can; facts that aren't known are not judged."""
        if self.reason is not None:
            return [f"unsupported: {self.reason}"]
        return [said for said in (limit.broken(facts) for limit in self.limits) if said is not None]


def engines() -> list[str]:
    """Names of the engines that have a file."""
    return sorted(f.name.removesuffix(".yaml") for f in _folder().iterdir() if f.name.endswith(".yaml"))


def contract(engine: str, head: str) -> Contract:
    """The contract of an engine about a head.

    Args:
        head: a name in configs/heads/, or a family's: the first head of it.

    Raises:
        DraftsmithError: no such engine or head. An unsupported pair is a contract with a `reason`.
    """
    name, found = head_called(head), _contracts(engine)
    if name not in found:
        title = next(iter(found.values())).title
        return Contract(engine, title, name, f"configs/engines/{engine}.yaml has no row for {name}")
    return found[name]


def contracts_of(head: str, facts: Mapping[str, Any] | None = None) -> list[Contract]:
    """Contracts of all engines that load such a head; with facts those that can load this very one."""
    found = [contract(engine, head) for engine in engines()]
    return [one for one in found if one.supported and not (facts and one.problems(facts))]


def head_called(name: str) -> str:
    """A head's name in configs/heads/, of it or of its family; raises DraftsmithError for an unknown one."""
    if name in head_names():
        return name
    for head in head_names():
        if head_file(head).get("head", {}).get("family") == name:
            return head
    raise DraftsmithError(f"unknown head {name!r}; there are: {', '.join(head_names())}")


def serve_settings(
    engine: str,
    head: str,
    *,
    folder: str | Path,
    model: str,
    depth: int,
    nodes: int | None = None,
    topk: int | None = None,
    layer_ids: Sequence[int] | None = None,
) -> ServeSettings:
    """How an exported head is served.

    Args:
        head: name or family.
        folder: of the export, or its hub id; model: the target's hub id or folder.
        depth: K, drafted tokens of a chain or deepest level of a tree.
        nodes: of a tree, the root included; topk: how many children a node of it gets. Without both: a chain.
        layer_ids: that the head reads, as `HeadConfig` counts them; None looks into the folder's config.json.

    Raises:
        DraftsmithError: an unsupported pair, or settings that the engine would refuse.
    """
    found = contract(engine, head)
    found.require()
    return settings_of(found, str(folder), model, depth, nodes, topk, layer_ids)


# --- the files --------------------------------------------------------------------------------------------------------

_ENGINE_KEYS = {"title", "versions", "serve", "constraints", "shapes", "heads"}
_HEAD_KEYS = {
    "unsupported", "layout", "method", "limits", "checked", "versions", "serve", "constraints", "notes",
}  # fmt: skip


@functools.cache
def _contracts(engine: str) -> dict[str, Contract]:
    """All contracts of an engine by head."""
    if engine not in engines():
        raise DraftsmithError(f"unknown engine {engine!r}; there are: {', '.join(engines())}")
    values = yaml.safe_load((_folder() / f"{engine}.yaml").read_text(encoding="utf-8"))
    if unknown := sorted(set(values) - _ENGINE_KEYS):
        raise DraftsmithError(f"configs/engines/{engine}.yaml: unknown key {unknown[0]!r}")
    heads = values.pop("heads")
    return {head: _contract(engine, head, values, row) for head, row in heads.items()}


def _contract(engine: str, head: str, values: dict[str, Any], row: dict[str, Any]) -> Contract:
    """One row; what it doesn't say the engine's file says for all heads."""
    if unknown := sorted(set(row) - _HEAD_KEYS):
        raise DraftsmithError(f"configs/engines/{engine}.yaml: unknown key {unknown[0]!r} of {head}")
    if (reason := row.get("unsupported")) is not None:
        return Contract(engine, values["title"], head, reason, versions=values["versions"])
    made = layout(row["layout"])
    return Contract(
        engine,
        values["title"],
        head,
        None,
        limits=[Limit(**limit) for limit in row.get("limits", [])],
        shapes=values.get("shapes", ["chain"]),
        checked=row.get("checked"),
        versions=row.get("versions", values["versions"]),
        template=Template(**row.get("serve", values["serve"])),
        constraints=row.get("constraints", values["constraints"]),
        notes=[*row.get("notes", []), *made.notes],
        layout_name=made.name,
        method_name=row["method"],
    )


def _folder() -> Any:
    return resources.files(__package__.partition(".")[0]) / "configs" / "engines"


__all__ = [
    "Contract", "Limit", "ServeSettings", "contract", "contracts_of", "engines", "head_called", "serve_settings",
]  # fmt: skip
