"""What every reader of a head's checkpoint returns, whoever wrote it, and what the readers share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import DraftsmithError
from ..named import head_file, head_names
from ..vocab import DraftVocab


@dataclass(frozen=True)
class Foreign:
    """A head from elsewhere in this toolkit's terms.

    Attributes:
        layout: whose names the file has, as messages call it.
        family: which family computes what the head computes.
        options: values of the family's config that the checkpoint fixes: shapes, rope, norms, layer ids as
            `HeadConfig` counts them. `steps` is among them only where it is the number of networks side by side.
        vocab: the draft vocabulary; None where the target's own rows read the head out, so that any will do.
        tensors: by the family's parameter names, as they multiply.
        from_target: beginnings of the parameters' names that the layout leaves out because they are the target's own.
        copies: the target's tensors that travelled along, "embed" [V, H] and "lm_head" [V, H]: they are compared with
            the target's and never used.
        names: the file's name of a parameter, for messages; of parameters that it should have, too.
        written_for: what the checkpoint calls its target.
    """

    layout: str
    family: str
    options: dict[str, Any]
    vocab: DraftVocab | None
    tensors: dict[str, Tensor]
    from_target: tuple[str, ...] = ()
    copies: dict[str, Tensor] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    written_for: str | None = None


def vocabulary(ids: Tensor, full: int, where: Path, t2d: Tensor | None = None) -> tuple[DraftVocab, Tensor]:
    """The draft vocabulary of target ids [Vd] in a file's order.

    Args:
        full: V of the target.
        t2d: bool [V], which tokens the file says are in it.

    Returns:
        The vocabulary, which ascends, and the order [Vd] in which the file's rows follow it.

    Raises:
        DraftsmithError: ids outside the target's, twice the same one, or others than `t2d` says.
    """
    order = torch.argsort(ids)
    try:
        vocab = DraftVocab(ids[order], full)
    except DraftsmithError as error:
        raise DraftsmithError(f"{where}: {error}") from error
    if t2d is not None and not torch.equal(t2d.bool().nonzero().flatten(), vocab.target_ids):
        raise DraftsmithError(
            f"{where}: d2t and t2d name other tokens ({len(vocab)} and {int(t2d.bool().sum())}): d2t must hold "
            "offsets, target id = draft id + d2t[draft id]"
        )
    return vocab, order


def listed(what: str, names: list[str]) -> str:
    """Say "3 missing tensors: a, b, c", at most the first three names."""
    return f"{len(names)} {what}{'s' * (len(names) != 1)}: {some(names)}"


def some(names: list[str]) -> str:
    """At most the first three names."""
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def heads_of(family: str) -> str:
    """The heads (HEAD, --head) that are networks of a family, by the names that users give them."""
    names = [name for name in head_names() if head_file(name).get("head", {}).get("family") == family]
    return " or ".join(names) or family


def block_of(config: dict[str, Any], name: str, where: Path) -> dict[str, Any]:
    """A group of values inside a config, {} where it is left out or null; raises DraftsmithError where it is none."""
    found = config.get(name)
    if found is not None and not isinstance(found, dict):
        raise DraftsmithError(f"{where}: {name} = {found!r} in config.json: a group of values is expected")
    return found or {}
