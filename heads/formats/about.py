"""`draftsmith.json`: what an export's other files can't say of the head, and where it comes from. Engines ignore it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import DraftsmithError
from ...files import write_json
from ..config import HeadConfig, fits
from ..registry import head_family
from ..vocab import DraftVocab
from .files import read_mapping

ABOUT, SCHEMA = "draftsmith.json", "draftsmith.export/1"

_TYPES: dict[str, Any] = {
    "schema": str, "head": str, "engine": str, "layout": str, "dtype": str, "serves": list[str],
    "config": dict[str, Any], "draft_tokens": str | None, "files": dict[str, int], "provenance": dict[str, Any],
}  # fmt: skip


@dataclass(frozen=True)
class About:
    """What an export's `draftsmith.json` says.

    Attributes:
        head: name in configs/heads/. engine: that it was exported for; layout: of its files.
        dtype: that weights are stored in, "bfloat16", "float16" or "float32"; of MTP modules the target's own.
        serves: all engines that load the folder as it is.
        config: the head's.
        draft_tokens: the draft vocabulary, where the layout has no place for it; see `pack_tokens`.
        files: bytes of each file beside this one, by its path inside the folder.
        provenance: run ("model/head[@run]"), weights_sha256 of the checkpoint, training and report: what is known.
    """

    head: str
    engine: str
    layout: str
    dtype: str
    serves: Sequence[str]
    config: HeadConfig
    draft_tokens: str | None = None
    files: Mapping[str, int] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the file into the existing folder."""
        values = {name: getattr(self, name) for name in _TYPES if name not in ("schema", "config")}
        values |= {"serves": list(self.serves), "files": dict(self.files), "provenance": dict(self.provenance)}
        write_json(folder / ABOUT, {"schema": SCHEMA, **values, "config": self.config.to_dict()})

    def vocab(self, found: DraftVocab | None, where: Path) -> DraftVocab:
        """The draft vocabulary that the head was trained with.

        Args:
            found: what the tensors say; None where the target's rows read the head out. where: the folder.

        Raises:
            DraftsmithError: it is another one than the head's config names.
        """
        c = self.config
        if self.draft_tokens is not None:
            found = DraftVocab(unpack_tokens(self.draft_tokens, c.vocab_size, where / ABOUT), c.vocab_size)
        elif found is None:
            found = DraftVocab(torch.arange(c.vocab_size), c.vocab_size)
        if found.sha256 != c.draft_vocab_sha256:
            raise DraftsmithError(
                f"{where} holds another draft vocabulary (sha256 {found.sha256[:12]}…) than {ABOUT} names "
                f"({c.draft_vocab_sha256[:12]}…): one of its files was changed; export the head again"
            )
        return found


def read_about(folder: Path) -> About | None:
    """Read an export's file, None where there is none.

    Raises:
        DraftsmithError: it is damaged, or of another version.
    """
    path = folder / ABOUT
    if not path.is_file():
        return None
    values = read_mapping(path)
    if values.get("schema") != SCHEMA:
        raise DraftsmithError(
            f"{path}: schema {values.get('schema')!r} is not {SCHEMA!r}: export the head again with this version"
        )
    for name, kind in _TYPES.items():
        if name not in values or not fits(values[name], kind):
            raise DraftsmithError(f"{path}: {name} is missing or damaged: export the head again")
    family = values["config"].get("family")
    if not isinstance(family, str):
        raise DraftsmithError(f"{path}: config names no family: export the head again")
    config = head_family(family).config.from_dict(values["config"], str(path))
    rest = {name: values[name] for name in _TYPES if name not in ("schema", "config")}
    return About(**rest, config=config)


def pack_tokens(vocab: DraftVocab) -> str:
    """A draft vocabulary as text: a bit for each of the target's tokens, eight to a byte, in base64."""
    bits = torch.zeros(-(-vocab.vocab_size // 8) * 8, dtype=torch.uint8)
    bits[vocab.target_ids] = 1
    weights = 2 ** torch.arange(8, dtype=torch.int64)
    packed = (bits.view(-1, 8).to(torch.int64) * weights).sum(1).to(torch.uint8)
    return base64.b64encode(packed.numpy().tobytes()).decode()


def unpack_tokens(text: str, full: int, where: Path) -> Tensor:
    """Target ids [Vd] of `pack_tokens`, ascending; raises DraftsmithError where the text is none of it.

    Args:
        full: V of the target; where: the file, for the message.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except ValueError:
        raw = b""
    if len(raw) != -(-full // 8):
        raise DraftsmithError(f"{where}: draft_tokens is no vocabulary of {full} tokens: export the head again")
    packed = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    bits = packed[:, None].bitwise_right_shift(torch.arange(8, dtype=torch.uint8)).bitwise_and(1).flatten()
    return bits[:full].nonzero().flatten()


__all__ = ["ABOUT", "SCHEMA", "About", "pack_tokens", "read_about", "unpack_tokens"]
