"""The head that a user means by --head: a kind that was trained here, or a folder, wherever it comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DraftsmithError
from ..files import read_json, sha256_file, sha256_json
from ..heads.adapter import FOLDER
from ..heads.checkpoint import WEIGHTS
from ..heads.formats.files import find_checkpoint, hub_id
from ..heads.named import head_names
from .report import REPORT
from .trained import BEST, TRAIN, Trained, adapter_of, trained_head, trained_heads

EXPORT = "export"
"""Folder of a run below which its exports lie, each called by its engine."""
_SUFFIXES = (".json", ".safetensors", ".bin", ".pt")


@dataclass(frozen=True)
class GivenHead:
    """A head, and how it is decoded.

    Attributes:
        name: what results call it.
        folder: where they lie: of its run, or runs/<model>/<name> for a head from elsewhere, where <name> is org--name
            of a hub id, else its folder's name and the beginning of its `digest`.
        checkpoint: folder of its weights, in any layout that can be read.
        tree: text of the tree that the latest report on these weights chose; None where there is no such report.
        template_kwargs: what the chat template was given for that report; empty where there is none.
        remarks: what to know before it is decoded, each the end of a sentence that begins with its name.
    """

    name: str
    folder: Path
    checkpoint: Path
    tree: str | None = None
    remarks: tuple[str, ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def rendering(self, asked: Mapping[str, Any] | None) -> dict[str, Any]:
        """What the chat template is given: what was asked for, else what it was for the latest report."""
        return dict(self.template_kwargs if asked is None else asked)

    @property
    def adapter(self) -> Path | None:
        """The adapter that its target wants merged in, None where that is the model itself."""
        return adapter_of(self.checkpoint)

    @property
    def weights_sha256(self) -> str | None:
        """Of its weights, as reports name them; None where they are not in one file of that name."""
        path = self.checkpoint / WEIGHTS
        return sha256_file(path) if path.is_file() else None

    @property
    def digest(self) -> str:
        """Hash of its files: weights, configuration, adapter."""
        return _digest(self.checkpoint)


def find_head(home: Path, head: str, run: str | None = None) -> GivenHead:
    """Find a head.

    Args:
        home: runs/<model>.
        head: the kind of a trained one; or the folder of a run, of a checkpoint, of a head in another tool's layout; or
            a hub id, org/name. A folder that is called like a kind is written ./eagle3.
        run: name of the run, of a kind.

    Raises:
        DraftsmithError: there is none, or `run` goes with a folder.
    """
    if not is_place(head):
        return _trained(trained_head(home, head + (f"@{run}" if run else "")))
    if run is not None:
        raise DraftsmithError(
            f"--head {head} is a folder, and --run {run} names a run of a kind: leave one of them out"
        )
    if (found := _run_at(Path(head).expanduser().resolve())) is not None:
        return found
    checkpoint, hub = find_checkpoint(head), hub_id(head)
    if checkpoint.parts[-3:] == (TRAIN, *BEST.parts) and (found := _run_at(checkpoint.parents[2])) is not None:
        return found
    name = hub[0].replace("/", "--") if hub else _own_name(checkpoint)
    found = GivenHead(name, home / name, checkpoint)
    path = found.folder / REPORT
    report = read_json(path) if path.is_file() else {}
    if report.get("head_sha256") != (found.weights_sha256 or found.digest):
        return found
    tree = report["summary"]["setting"]["tree"]
    return dataclasses.replace(found, tree=tree, template_kwargs=report.get("template_kwargs", {}))


def is_place(head: str) -> bool:
    """Whether --head means a folder or a hub id, not the kind of a head."""
    return head not in head_names() and ("/" in head or Path(head).expanduser().is_dir())


def _run_at(folder: Path) -> GivenHead | None:
    """The head whose run's folder that is."""
    if not folder.is_dir():
        return None
    return next((_trained(head) for head in trained_heads(folder.parent) if head.name == folder.name), None)


def _trained(head: Trained) -> GivenHead:
    return GivenHead(
        head.name, head.folder, head.checkpoint, head.tree, tuple(head.remarks()), head.template_kwargs or {}
    )


def _own_name(checkpoint: Path) -> str:
    """What a head in a folder is called: folders of one name hold many heads, so the name has a hash of its files."""
    names = [checkpoint.name]
    if checkpoint.parent.name == EXPORT:
        names.insert(0, checkpoint.parents[1].name.replace("@", "-"))
    return "-".join([*names, _digest(checkpoint)[:8]])


def _digest(checkpoint: Path) -> str:
    folders = {"": checkpoint, FOLDER: checkpoint / FOLDER}
    files = {f"{name}/{path.name}": path for name, folder in folders.items() for path in folder.glob("*")}
    return sha256_json({name: sha256_file(path) for name, path in files.items() if path.suffix in _SUFFIXES})
