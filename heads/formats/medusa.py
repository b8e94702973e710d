"""Medusa heads: the `medusa_lm_head` of the Medusa repository and TGI, and vLLM's (up to 0.32).

Networks are counted in the tensors' names: published configs name other numbers than their files have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import DraftsmithError
from ..vocab import DraftVocab
from .foreign import Foreign, listed, vocabulary


@dataclass(frozen=True)
class Layout:
    """How one tool writes the networks.

    Attributes:
        name: as messages call it.
        block: name of block j of network i; output: of the output rows of network i, where each has n blocks.
        bare: the blocks may have no bias, x + SiLU(W x); then none of them has one.
        shared: the first network's output rows may be all networks'.
        borrowed: without output rows at all, the target's are read.
    """

    name: str
    block: str
    output: str
    bare: bool
    shared: bool
    borrowed: bool


_LAYOUTS = (
    Layout("Medusa (medusa_lm_head)", "{i}.{j}.linear", "{i}.{n}", bare=False, shared=False, borrowed=True),
    Layout("Medusa (vLLM)", "blocks.{i}.layers.{j}", "lm_heads.{i}", bare=True, shared=True, borrowed=False),
)
_PREFIXES = ("medusa_heads.", "medusa_head.")
_MAP = "token_map"
"""Target ids [Vd] of the draft vocabulary, absolute."""


def layout_of(names: set[str]) -> Layout | None:
    """Which layout tensors of these names have, None = neither."""
    plain = {_plain(name) for name in names}
    return next((x for x in _LAYOUTS if any(_block(x, name) for name in plain)), None)


def read_medusa(layout: Layout, config: dict[str, Any], tensors: dict[str, Tensor], where: Path) -> Foreign:
    """Translate a checkpoint; arguments as of `eagle.read_eagle`.

    Raises:
        DraftsmithError: a tensor that the layout doesn't have, or one that it has and the checkpoint doesn't; or a
            draft vocabulary without its map.
    """
    tensors = {_plain(name): tensor for name, tensor in tensors.items()}
    places = [place for name in tensors if (place := _block(layout, name)) is not None]
    count, blocks = (1 + max(numbers) for numbers in zip(*places, strict=True))
    if count * blocks > 100 * len(tensors):  # a number far out: no list of all that is missing
        raise DraftsmithError(f"{where}: its names tell {count} heads of {blocks} blocks: no {layout.name} has as many")
    names = {
        f"blocks.{i}.layers.{j}.{kind}": f"{layout.block.format(i=i, j=j)}.{kind}"
        for i in range(count) for j in range(blocks) for kind in ("weight", "bias")
    }  # fmt: skip
    names |= {f"lm_heads.{i}.weight": f"{layout.output.format(i=i, n=blocks)}.weight" for i in range(count)}
    told = f"{layout.name} with {count} heads of {blocks} blocks"
    if unexpected := sorted(set(tensors) - {*names.values(), _MAP}):
        raise DraftsmithError(f"{where}: {listed('unexpected tensor', unexpected)}: {told} has none of that name")
    found = {ours: tensors[theirs] for ours, theirs in names.items() if theirs in tensors}
    left_out = _left_out(layout, names, found)
    if missing := sorted(theirs for ours, theirs in names.items() if ours not in found and ours not in left_out):
        raise DraftsmithError(f"{where}: {listed('missing tensor', missing)}, which {told} has")
    first = found["blocks.0.layers.0.weight"]
    found |= {ours: torch.zeros(len(first), dtype=first.dtype) for ours in left_out if ours.endswith(".bias")}
    vocab = _outputs(config, tensors, found, [ours for ours in names if ours.startswith("lm_heads.")], where)
    options: dict[str, Any] = {"steps": count, "blocks": blocks, "hidden_size": len(first)}
    if vocab is not None:
        options["vocab_size"] = vocab.vocab_size
    from_target = () if vocab is not None else ("lm_heads.",)
    base = config.get("base_model_name_or_path")
    base = base if isinstance(base, str) else None
    return Foreign(layout.name, "medusa", options, vocab, found, from_target, names=names, written_for=base)


def _plain(name: str) -> str:
    return next((name.removeprefix(x) for x in _PREFIXES if name.startswith(x)), name)


def _block(layout: Layout, name: str) -> tuple[int, int] | None:
    """(i, j) of the block that a tensor belongs to, None = to none."""
    pattern = layout.block.replace(".", r"\.").format(i=r"(\d{1,6})", j=r"(\d{1,6})") + r"\.(?:weight|bias)"
    match = re.fullmatch(pattern, name)
    return None if match is None else (int(match[1]), int(match[2]))


def _left_out(layout: Layout, names: dict[str, str], found: dict[str, Tensor]) -> set[str]:
    """Our parameters that the layout may leave out, as this checkpoint does."""
    biases = {ours for ours in names if ours.endswith(".bias")}
    outputs = [ours for ours in names if ours.startswith("lm_heads.")]
    there = [ours for ours in outputs if ours in found]
    left_out = biases if layout.bare and not biases & found.keys() else set()
    if (layout.borrowed and not there) or (layout.shared and there == outputs[:1]):
        left_out = left_out | set(outputs)
    return left_out


def _outputs(
    config: dict[str, Any], tensors: dict[str, Tensor], found: dict[str, Tensor], outputs: list[str], where: Path
) -> DraftVocab | None:
    """Put each network's output rows into `found`, in the order of the draft vocabulary; None = the target's rows."""
    if outputs[0] not in found:
        return None
    found |= {ours: found.get(ours, found[outputs[0]]) for ours in outputs}
    size, ids = len(found[outputs[0]]), tensors.get(_MAP)
    full = config.get("vocab_size") or size
    if not isinstance(full, int):
        raise DraftsmithError(f"{where}: vocab_size = {full!r} in config.json: a number is expected")
    if (size if ids is None else len(ids)) != size or (ids is None and size != full):
        entries = "is missing" if ids is None else f"has {len(ids)} entries"
        raise DraftsmithError(f"{where}: {_MAP} {entries}: the output rows are {size} of {full} tokens")
    if uneven := [ours for ours in outputs if len(found[ours]) != size]:
        raise DraftsmithError(f"{where}: {uneven[0]} has {len(found[uneven[0]])} rows, {outputs[0]} has {size}")
    vocab, order = vocabulary(torch.arange(size) if ids is None else ids.long(), full, where)
    if ids is not None:
        found |= {ours: found[ours][order] for ours in outputs}
    return vocab
