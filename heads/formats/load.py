"""Any trained head from wherever it lies: checkpoints and runs of this toolkit, its exports, public heads.

A layout of another tool says what its head computes (`read.py`); what it can't say comes from `draftsmith.json`, where
this toolkit wrote the folder, and from the target.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Size, Tensor

from ...errors import DraftsmithError
from ..base import DraftHead, TargetParts
from ..checkpoint import CONFIG, load_head
from ..config import HeadConfig
from ..mtp_modules import MtpConfig
from ..registry import head_family
from ..vocab import DraftVocab
from .about import ABOUT, About, read_about
from .files import find_checkpoint, read_mapping
from .foreign import Foreign, heads_of, some
from .native_mtp import differing, find_layout, read_native
from .read import read_foreign

if TYPE_CHECKING:
    from ..target import Target

ROUNDING = 0.005
"""Most that a copy may differ from the target's tensor, as a share of its norm: bf16 rounds to 0.002."""
QUANTISED = 0.15
"""The same where the target is quantised: four bits with a scale for a group of weights round to 0.1."""
_SAME_NETWORK = {"medusa2": "medusa"}
_ADDED = {"fc_bias"}
"""Options that an export may have where its head has none of them: a bias of zeros."""


def load_any(source: Path | str, target: Target | None, *, as_served: bool = False) -> DraftHead:
    """Load a head for decoding, its weights in their own dtype.

    Args:
        source: a checkpoint's folder, a run's, an export's, that of a head in another tool's layout (EAGLE, SpecForge,
            ModelOpt, speculators, Medusa), a target with MTP modules of its own, or a hub id.
        target: that it drafts for; only folders that this toolkit wrote can do without.
        as_served: propose from the tokens that an engine proposes from: of an export without a map of draft tokens
            those are all, whichever the head was trained with.

    Raises:
        DraftsmithError: no head, a damaged one, one for another target, or one that needs the target to be read.
    """
    folder = find_checkpoint(str(source))
    if (folder / CONFIG).is_file():
        read_mapping(folder / CONFIG)  # a damaged one is not to be mended by running a stage again
        head = load_head(folder)
    elif (about := read_about(folder)) is not None:
        head = _exported(folder, about, target, as_served)
    else:
        head = _foreign(folder, target)
    if target is not None:
        target.check_head(head.config)
    return head


def read_head(folder: Path) -> Foreign:
    """Read a folder that is no checkpoint of this toolkit, by whichever layout it has.

    Raises:
        DraftsmithError: no known layout, or whatever its reader refuses.
    """
    if find_layout(folder) is not None:
        return read_native(folder)
    return read_foreign(folder)[0]


def _exported(folder: Path, about: About, target: Target | None, as_served: bool) -> DraftHead:
    found, config = read_head(folder), about.config
    _check_copies(found, folder, target)
    if different := disagreements(found, config):
        raise DraftsmithError(
            f"{folder}: its files and {ABOUT} say different things ({different[0]}): one of them was changed after the "
            "export; export the head again"
        )
    own = about.vocab(None if about.draft_tokens is not None else found.vocab, folder)
    vocab = (found.vocab or _all_tokens(config.vocab_size)) if as_served else own
    if vocab.sha256 != config.draft_vocab_sha256:
        config = dataclasses.replace(config, draft_vocab_size=len(vocab), draft_vocab_sha256=vocab.sha256)
    tensors = dict(found.tensors)
    if not getattr(config, "fc_bias", True) and "fc.bias" in tensors:
        tensors.pop("fc.bias")  # zeros, or it would be a disagreement
    if found.vocab is not None and len(found.vocab) != len(vocab):
        rows = {name: x for name, x in tensors.items() if name.startswith("lm_head")}
        tensors |= {name: x[vocab.target_ids] for name, x in rows.items()}
    return build_head(dataclasses.replace(found, tensors=tensors), str(folder), config, vocab)


def disagreements(found: Foreign, config: HeadConfig) -> list[str]:
    """What an export's own files say otherwise than `draftsmith.json`, for people; [] where they agree."""
    ours = config.to_dict()
    if found.family != _SAME_NETWORK.get(config.family, config.family):
        return [f"a head of the kind {heads_of(found.family)}, not {heads_of(config.family)}"]
    if isinstance(config, MtpConfig):
        different = differing(ours, found.options)
    else:
        if "rope" in ours:  # its old name for rope_type, which transformers keeps beside the new one
            ours["rope"] = {k: v for k, v in ours["rope"].items() if k != "type"}
        different = [(k, ours[k], v) for k, v in found.options.items() if k not in _ADDED and ours[k] != v]
    said = [f"{name} is {there!r}, not {here!r}" for name, here, there in different]
    bias = found.tensors.get("fc.bias")
    if not getattr(config, "fc_bias", True) and bias is not None and bool(bias.any()):
        said.append("fc has a bias, not none")
    return said


def _foreign(folder: Path, target: Target | None) -> DraftHead:
    """A head of another tool's; what it doesn't say is the target's, or its family's default."""
    if target is None:
        raise DraftsmithError(
            f"{folder} is no checkpoint or export of this toolkit: its head is read together with its target; name "
            "that (--model, --target)"
        )
    found = read_head(folder)
    there = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    said = [f"{k} {found.options[k]}, here {v}" for k, v in there.items() if found.options.get(k, v) != v]
    if said:
        called = f" ({found.written_for})" if found.written_for else ""
        raise DraftsmithError(f"the head at {folder} was trained for another target{called}: {'; '.join(said)}")
    vocab = found.vocab or _all_tokens(target.vocab_size)
    config = config_of(found, target, vocab)
    _check_copies(found, folder, target)
    return build_head(found, str(folder), config, vocab, target.parts() if found.from_target else None)


def _check_copies(found: Foreign, folder: Path, target: Target | None) -> None:
    if found.copies and target is not None:
        quantised = getattr(target.model.config, "quantization_config", None) is not None
        check_copies(found, str(folder), target.parts(), quantised)


def config_of(found: Foreign, target: Target, vocab: DraftVocab) -> HeadConfig:
    """The config of a head that came without one; how long its training texts were is unknown (0).

    Raises:
        DraftsmithError: values that no head of the family has.
    """
    module = importlib.import_module(head_family(found.family).head.__module__)
    build = getattr(module, f"{found.family}_config")
    identity = {
        "target_id": target.id,
        "target_revision": target.revision,
        "target_fingerprint": target.fingerprint,
        "chat_template_sha256": target.template_sha256,
        "trained_length": 0,
    }
    config: HeadConfig = build(target.config, vocab, **found.options, **identity)
    return config


def _all_tokens(size: int) -> DraftVocab:
    return DraftVocab(torch.arange(size), size)


# --- from tensors to a head -------------------------------------------------------------------------------------------


def build_head(
    found: Foreign, source: str, config: HeadConfig, vocab: DraftVocab, parts: TargetParts | None = None
) -> DraftHead:
    """A head with the tensors that were read.

    Args:
        source: where they come from, for messages.
        parts: of the target, where the layout leaves tensors out that are its own.

    Raises:
        DraftsmithError: missing, unexpected or misshaped tensors.
    """
    check_fit(found, source, config, vocab)
    head = head_family(config.family).head(config, vocab)
    for name, parameter in head.named_parameters():
        if name in found.tensors:
            parameter.data = found.tensors[name].detach().clone()
        elif parts is not None:
            like = next(iter(found.tensors.values()))
            parameter.data = parts.lm_head[vocab.target_ids].to(like.dtype)
        else:
            raise DraftsmithError(f"{source} leaves {name} to the target: name that (--model, --target)")
    return head


def check_fit(found: Foreign, source: str, config: HeadConfig, vocab: DraftVocab) -> None:
    """Compare names and shapes of a checkpoint's tensors with those of the head that is to take them over.

    Raises:
        DraftsmithError: missing, unexpected or misshaped tensors, or a head that can't be built of the values that came
            with it.
    """
    shapes = _shapes(source, config, vocab)

    def called(ours: str) -> str:
        return found.names.get(ours, ours)

    missing = [called(n) for n in shapes if n not in found.tensors and not n.startswith(found.from_target)]
    misshaped = [
        f"{called(n)} is {list(x.shape)} instead of {list(shapes[n])}"
        for n, x in found.tensors.items() if n in shapes and x.shape != shapes[n]
    ]  # fmt: skip
    unexpected = [called(n) for n in found.tensors if n not in shapes]
    wrong = {"missing": missing, "unexpected": unexpected, "misshaped": misshaped}
    if any(wrong.values()):
        told = "; ".join(f"{len(names)} {kind} ({some(sorted(names))})" for kind, names in wrong.items() if names)
        raise DraftsmithError(f"{source} ({found.layout}) doesn't fit {heads_of(found.family)}; tensors: {told}")


def _shapes(source: str, config: HeadConfig, vocab: DraftVocab) -> Mapping[str, Size]:
    """Shapes of the head's parameters by name; the head takes no memory."""
    try:
        with torch.device("meta"):
            head = head_family(config.family).head(config, vocab)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # transformers' own, of rope's values
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DraftsmithError(
            f"the config of the head at {source} makes no {heads_of(config.family)} head ({reason})"
        ) from error
    return {name: parameter.shape for name, parameter in head.named_parameters()}


def check_copies(found: Foreign, source: str, parts: TargetParts, quantised: bool) -> None:
    """Refuse a head that brings other embedding or output rows than its target's, up to one factor.

    Targets scale both in ways of their own, and a copy is of the tensor as it was or as it multiplies.

    Args:
        parts: of the target; quantised: whether its weights are, which widens the bound.
    """
    for what, copy in found.copies.items():
        own = getattr(parts, what)
        if copy.shape != own.shape:
            told = f"has the shape {list(copy.shape)}, the target's {list(own.shape)}"
        elif (distance := apart(copy, own)[0]) > (bound := QUANTISED if quantised else ROUNDING):
            told = f"differs from the target's by {distance:.2%} of its size, and {bound:.1%} are allowed"
        else:
            continue
        raise DraftsmithError(
            f"the head at {source} was trained for another target, or with weights of its own: its {what} "
            f"{told}; heads here read the target's own"
        )


def apart(copy: Tensor, own: Tensor) -> tuple[float, float]:
    """Distance of a copy to the nearest multiple of a tensor above 0, as a share of the copy's norm; and the factor."""
    squares = both = size = 0.0
    for a, b in zip(copy.split(4096), own.split(4096), strict=True):  # never all of it in fp32
        x, y = a.double(), b.double()
        squares, both, size = squares + float((x * x).sum()), both + float((x * y).sum()), size + float((y * y).sum())
    if squares == 0.0 or size == 0.0:
        return float(squares != size), 1.0
    factor = max(0.0, both) / size
    return max(0.0, 1.0 - factor**2 * size / squares) ** 0.5, factor


__all__ = [
    "QUANTISED", "ROUNDING", "apart", "build_head", "check_copies", "check_fit", "config_of", "disagreements",
    "load_any", "read_head",
]  # fmt: skip
