"""From a contract and a drafting shape to the commands that serve an exported head; see `contracts.serve_settings`."""

from __future__ import annotations

import json
import shlex
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import DraftsmithError
from .export_layouts import fill

if TYPE_CHECKING:
    from .contracts import Contract

_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Template:
    """How an engine is started, in terms of model, folder, method, depth, topk, nodes and layer_outputs.

    Attributes:
        values: names of its own for values that are made of these; in commands and files they stand as JSON.
        commands: arguments of each; files: text of files that the commands read, by name.
        python: program that does the same; values stand in it as Python writes them.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    commands: Sequence[Sequence[str]] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None


@dataclass(frozen=True)
class ServeSettings:
    """How a head is served.

    Attributes:
        commands: shell lines, the last of which serves; those before write what it reads.
        python: program that does the same, where the engine has such an interface.
        settings: what the engine is told: depth, and where it verifies trees topk and nodes.
        constraints: rules that other settings must keep; notes: what a user should know.
    """

    engine: str
    head: str
    commands: list[str]
    python: str | None
    settings: dict[str, int]
    constraints: list[str]
    notes: list[str]


def settings_of(
    contract: Contract,
    folder: str,
    model: str,
    depth: int,
    nodes: int | None,
    topk: int | None,
    layer_ids: Sequence[int] | None,
) -> ServeSettings:
    """See `contracts.serve_settings`; the pair is supported."""
    settings, notes = _shape(contract, depth, nodes, topk)
    ids = _recorded(folder) if layer_ids is None else layer_ids
    facts: dict[str, Any] = {"model": model, "folder": folder, "method": contract.method, **settings}
    facts["layer_outputs"] = None if ids is None else [k - 1 for k in ids]
    template, who = contract.template, f"the serve command of {contract.title}"
    own = {name: fill(value, facts, who) for name, value in template.values.items()}
    written = {**facts, **{name: json.dumps(value) for name, value in own.items()}}
    files = {name: fill(text, written, who) for name, text in template.files.items()}
    commands = [f"echo {shlex.quote(text)} > {name}" for name, text in files.items()]
    commands += [shlex.join(str(fill(part, written, who)) for part in line) for line in template.commands]
    python = None
    if template.python is not None:
        shown = {name: _as_python(value) for name, value in {**facts, **own}.items()}
        python = string.Template(template.python).substitute(shown)
    return ServeSettings(
        contract.engine, contract.head, commands, python, settings, list(contract.constraints),
        [*notes, *contract.notes],
    )  # fmt: skip


def _as_python(value: Any) -> str:
    """A value as a program writes it, strings in double quotes."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_as_python(k)}: {_as_python(v)}' for k, v in value.items())}}}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _shape(contract: Contract, depth: int, nodes: int | None, topk: int | None) -> tuple[dict[str, int], list[str]]:
    """The settings of a shape, and what to say of it.

    A tree that grows `topk` children of the best nodes a level has topk + (depth - 1) * topk * topk drafts to choose
    from.
    """
    if depth < 1:
        raise DraftsmithError(f"depth {depth} must be at least 1: so many tokens are drafted a step")
    is_tree = (topk or 1) > 1
    if "tree" not in contract.shapes:
        said = f"{contract.title} gets a chain of {depth} for the tree that was asked for"
        return {"depth": depth}, [said] if is_tree or (nodes or depth + 1) != depth + 1 else []
    if not is_tree:
        if nodes not in (None, depth + 1):
            raise DraftsmithError(f"nodes = {nodes}: a chain of depth {depth} has {depth + 1}; a tree needs topk, too")
        return {"depth": depth, "topk": 1, "nodes": depth + 1}, []
    assert topk is not None
    most = 1 + topk + (depth - 1) * topk * topk
    if nodes is None or not 2 <= nodes <= most:
        raise DraftsmithError(
            f"nodes = {nodes}: a tree of depth {depth} and topk {topk} has 2 to {most} nodes in {contract.title}, "
            "the root included"
        )
    return {"depth": depth, "topk": topk, "nodes": nodes}, []


def _recorded(folder: str) -> list[int] | None:
    """Layer ids in a folder's config.json, None where there is no such folder or none are named."""
    path = Path(folder) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a hub id, or a folder that doctor has more to say of
        return None
    ids = values.get(_IDS) if isinstance(values, dict) else None
    return ids if isinstance(ids, list) and all(type(k) is int for k in ids) else None


__all__ = ["ServeSettings", "Template", "settings_of"]
