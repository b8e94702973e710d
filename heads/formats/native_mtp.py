"""MTP modules inside a target's own checkpoint: found, read as a start, and written back where they were."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor

from ...errors import DraftsmithError
from ...files import atomic_path, write_json
from ..base import DraftHead
from ..blocks import ATTENTIONS, MLPS
from ..blocks_parts import CORRECTION, Part, native_shapes, read_options
from ..mtp import MtpHead, mtp_config
from ..mtp_modules import MtpConfig
from ..target import fingerprint
from ..vocab import DraftVocab
from .foreign import Foreign, listed
from .native_files import (
    CONFIG,
    DTYPES,
    INDEX,
    SINGLE,
    Entry,
    first_line,
    read_header,
    read_object,
    read_tensor,
    tensor_files,
)
from .native_layouts import LAYOUTS, Layout

_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
"""Of files that hold the target once more: a copy's would have the old modules."""


class _Checkpoint:
    """A target's folder, and its MTP modules' place in it.

    Args:
        folder: see `find_layout`.

    Attributes:
        layout: whose modules these are.
        values: what config.json says; text: its part for the text decoder; files: each tensor's file, by name.

    Raises:
        DraftsmithError: there are no modules of a known kind.
    """

    def __init__(self, folder: Path) -> None:
        layout = find_layout(folder)
        if layout is None:
            raise DraftsmithError(
                f"{folder} has no MTP modules of its own of a known layout ({', '.join(x.name for x in LAYOUTS)}), or "
                "not as safetensors"
            )
        self.folder, self.layout = folder, layout
        self.values = read_object(folder / CONFIG)
        self.text = _text_of(self.values)
        self.files = tensor_files(folder)
        self._headers: dict[Path, dict[str, Entry]] = {}

    @cached_property
    def config(self) -> Any:
        """The transformers config of the text decoder."""
        from transformers import AutoConfig

        values = {k: v for k, v in self.text.items() if k != "model_type"}
        try:
            return AutoConfig.for_model(self.layout.config_type or self.text["model_type"], **values)
        except Exception as error:  # whatever transformers makes of odd values
            raise DraftsmithError(f"{self.folder / CONFIG} can't be read ({first_line(error)})") from error

    @property
    def modules(self) -> int:
        """How many the config says there are."""
        count = self.text.get(self.layout.count_key, 1)
        if type(count) is not int or count < 1 or (self.layout.most or count) < count:
            most = "" if self.layout.most is None else f", at most {self.layout.most}"
            raise DraftsmithError(
                f"{self.folder / CONFIG}: {self.layout.count_key} = {count!r}, and the checkpoint has MTP tensors of "
                f"layout {self.layout.name}: it must be how many modules they are{most}"
            )
        return count

    @property
    def prefixes(self) -> list[str]:
        """Beginning of the names of each module's decoder layer."""
        return [self.layout.prefix(i, self.config.num_hidden_layers) for i in range(self.modules)]

    @property
    def names(self) -> list[str]:
        """The modules' tensors: also those of modules beyond the config's count."""
        n, found = self.config.num_hidden_layers, []
        for name in self.files:
            match = re.match(self.layout.beginning, name)
            # a module of the DeepSeek kind is a layer behind the target's last
            if match is not None and (not match.groups() or int(match[1]) >= n):
                found.append(name)
        return found

    def entry(self, name: str) -> Entry:
        """Where a tensor lies."""
        file = self.files[name]
        if file not in self._headers:
            self._headers[file] = read_header(file)
        if name not in self._headers[file]:
            raise DraftsmithError(f"{file} has no {name!r}, which the index puts there: fetch the checkpoint again")
        return self._headers[file][name]

    def read(self, name: str) -> Tensor:
        """One tensor in its own dtype."""
        return read_tensor(self.files[name], name)

    def options(self) -> dict[str, Any]:
        """Values of MtpConfig that the checkpoint fixes; raises DraftsmithError where no head of ours computes it."""
        try:
            prefixes = self.prefixes
            inside = {name.removeprefix(prefixes[0]) for name in self.files if name.startswith(prefixes[0])}
            found = self.layout.options(self.config, self.modules, inside)
        except (DraftsmithError, AttributeError, TypeError, ValueError) as error:  # a value is missing, or odd
            place, said = f"{self.folder / CONFIG}: ", first_line(error)
            raise DraftsmithError(said if said.startswith(place) else place + said) from error
        biases = [self.read(p + CORRECTION).double() for p in prefixes if p + CORRECTION in self.files]
        if any(not torch.equal(biases[0], other) for other in biases[1:]):
            raise DraftsmithError(
                f"{self.folder}: its MTP modules choose experts with different {CORRECTION}: a head has one for all"
            )
        if biases and found["mlp"]["kind"] == "experts":
            found["mlp"]["correction_bias"] = biases[0].tolist()
        return found

    def parts(self, head: MtpHead) -> list[Part]:
        """The head's tensors in the checkpoint; raises DraftsmithError where the checkpoint has others."""
        parts = self.layout.parts(head.config, self.names)
        wanted = native_shapes(parts, dict(head.named_parameters()))
        if bias := head.config.mlp.get("correction_bias"):
            wanted |= {prefix + CORRECTION: Size([len(bias)]) for prefix in self.prefixes}
        _compare(self, wanted, set(self.copies()))
        return parts

    def copies(self) -> dict[str, str]:
        """What of the target each module has once more: the tensor's name to what it is."""
        found = {name.format(module=p): what for p in self.prefixes for what, name in self.layout.copies}
        return {name: what for name, what in found.items() if name in self.files}


def native_options(folder: Path) -> dict[str, Any]:
    """Values of MtpConfig that a target's own MTP modules fix; see `read_native`, of whose tensors few are read."""
    return _Checkpoint(folder).options()


def read_native(folder: Path) -> Foreign:
    """Read a target's own MTP modules.

    Norms come as they multiply: those stored less 1 in fp32 (fp64 stays), all else in its own dtype.

    Raises:
        DraftsmithError: none of a known kind; a missing, unexpected or misshaped tensor; quantised ones.
    """
    checkpoint = _Checkpoint(folder)
    layout, options = checkpoint.layout, checkpoint.options()
    parts = checkpoint.parts(_planned(checkpoint.config, options))
    tensors: dict[str, Tensor] = {}
    for part in parts:
        tensors |= _read_part(checkpoint, layout, part)
    copies = {what: checkpoint.read(name) for name, what in reversed(checkpoint.copies().items())}
    names = {ours: part.native[0] for part in parts for ours in part.ours}
    return Foreign(f"native MTP ({layout.name})", "mtp", options, None, tensors, copies=copies, names=names)


def write_native(head: DraftHead, target: Path, out: Path) -> list[str]:
    """Write a copy of the target whose own MTP modules are the head's.

    Names, shapes, dtypes and files are the target's. Files that hold modules are copied and the modules' bytes
    replaced; the other safetensors are hard links where the file system has them (so never edit one in place), and the
    rest is copied with its folders, but for weights of other formats and hidden folders. The copy's fingerprint is the
    target's.

    Tensors that training left as they were keep their bytes, whatever the head's dtype. config.json changes only where
    it doesn't say how many modules there are.

    Args:
        head: an MTP head of that target, with any draft vocabulary: the output rows are the target's.
        target: folder with modules of a known layout; out: a folder outside it that isn't there yet; it appears whole
            or not.

    Returns:
        Names of the tensors that were written.

    Raises:
        DraftsmithError: the head is another target's, computes something else than the layout, or has numbers that are
            none in the target's dtype; see `read_native`.
    """
    checkpoint = _Checkpoint(target)
    layout = checkpoint.layout
    if not isinstance(head, MtpHead):
        raise DraftsmithError(f"{target}: a head of family {head.config.family!r} can't be written as its MTP modules")
    if out.exists():
        raise DraftsmithError(f"{out} is there already: give a folder that isn't, or remove it")
    if out.resolve().is_relative_to(target.resolve()):
        raise DraftsmithError(f"{out} lies in {target}, whose copy it is to be: give a folder outside")
    if (found := fingerprint(target)) != head.config.target_fingerprint:
        raise DraftsmithError(
            f"the head was trained for {head.config.target_id} (fingerprint {head.config.target_fingerprint[:8]}), not "
            f"for {target} ({found[:8]}): give that model's folder"
        )
    _check_options(head.config, checkpoint.options(), layout, target)
    parts, own = checkpoint.parts(head), dict(head.named_parameters())
    changed: dict[str, Tensor] = {}
    for part in parts:
        ours = {name: own[name].detach().cpu() for name in part.ours}
        before = _read_part(checkpoint, layout, part)
        if all(torch.equal(before[name].to(x.dtype), x) for name, x in ours.items()):
            continue
        less = 1.0 if part.norm and layout.gemma else 0.0
        written = part.write([x.double() - less if less else x for x in ours.values()])
        dtypes = (DTYPES[checkpoint.entry(name).dtype] for name in part.native)
        changed |= {n: x.to(dtype) for n, x, dtype in zip(part.native, written, dtypes, strict=True)}
    if broken := sorted(name for name, x in changed.items() if not bool(x.isfinite().all())):
        raise DraftsmithError(
            f"the head's numbers aren't finite in the target's dtype; {listed('tensor', broken)}: nothing was written"
        )
    with atomic_path(out) as folder:
        _copy(checkpoint, changed, folder)
    return sorted(changed)


# --- reading --------------------------------------------------------------------------------------------------------


def find_layout(folder: Path) -> Layout | None:
    """Layout of a target's own MTP modules, None where it has none of a known kind. Reads no weights.

    Args:
        folder: of the target: config.json and safetensors, in one file or with an index.
    """
    if not (folder / CONFIG).is_file() or not any((folder / x).is_file() for x in (INDEX, SINGLE)):
        return None
    text = _text_of(read_object(folder / CONFIG))
    layout = next((x for x in LAYOUTS if text.get("model_type") in x.model_types), None)
    return layout if layout is not None and any(map(layout.mark.fullmatch, tensor_files(folder))) else None


def _text_of(values: dict[str, Any]) -> dict[str, Any]:
    """A config's part for the text decoder; the whole where there is no such part."""
    text = values.get("text_config")
    return text if isinstance(text, dict) else values


def _planned(config: Any, options: Mapping[str, Any]) -> MtpHead:
    """The head that the options make, without memory: its parameters' names and shapes."""
    vocab = DraftVocab(torch.arange(1), config.vocab_size)
    identity = {"target_id": "", "target_revision": None, "target_fingerprint": "", "chat_template_sha256": None}
    values = mtp_config(config, vocab, **identity, trained_length=0, **options)
    with torch.device("meta"):
        kind: type[Any] = MtpHead  # builds the kind that the config asks for
        head: MtpHead = kind(values, vocab)
        return head


def _compare(checkpoint: _Checkpoint, wanted: Mapping[str, Size], allowed: Iterable[str]) -> None:
    """Refuse a checkpoint whose modules have other tensors than the head."""
    names = set(checkpoint.names)
    missing, unexpected = sorted(set(wanted) - names), sorted(names - set(wanted) - set(allowed))
    there = {name: checkpoint.entry(name) for name in wanted if name in names}
    misshaped = [
        f"{name} {list(x.shape)} instead of {list(wanted[name])}"
        for name, x in there.items()
        if x.shape != wanted[name]
    ]
    quantised = [f"{name} ({x.dtype})" for name, x in there.items() if x.dtype not in DTYPES]
    kinds = {"quantised": quantised, "missing": missing, "unexpected": unexpected, "misshaped": misshaped}
    problems = [listed(f"{kind} tensor", found) for kind, found in kinds.items() if found]
    if problems:
        hint = "; write them in bf16 first" if quantised else ""
        raise DraftsmithError(f"{checkpoint.folder}: its MTP modules have {'; '.join(problems)}{hint}")


def _read_part(checkpoint: _Checkpoint, layout: Layout, part: Part) -> dict[str, Tensor]:
    """Our tensors of a part, by name; norms as they multiply."""
    found = part.read([checkpoint.read(name) for name in part.native])
    if part.norm and layout.gemma:
        found = [x.to(torch.promote_types(x.dtype, torch.float32)) + 1.0 for x in found]
    return dict(zip(part.ours, found, strict=True))


# --- writing --------------------------------------------------------------------------------------------------------


def differing(config: Mapping[str, Any], options: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Where a head computes something else than MTP modules: name, its value, and theirs.

    Args:
        config: of the head (`to_dict`); options: what a target's modules fix (`native_options`).
    """
    found, wanted = dict(config), dict(options)
    for field, table in (("attention", ATTENTIONS), ("mlp", MLPS)):
        for values in (found, wanted):
            kind = table[values[field]["kind"]].options
            values[field] = {"kind": values[field]["kind"], **vars(read_options(values[field], kind, field))}
    return [(name, found.get(name), value) for name, value in wanted.items() if found.get(name) != value]


def _check_options(config: MtpConfig, options: dict[str, Any], layout: Layout, target: Path) -> None:
    """Refuse a head that computes something else than the layout's modules."""
    for name, found, value in differing(config.to_dict(), options):
        raise DraftsmithError(
            f"the head's {name} = {found!r} is not what MTP modules of {target} ({layout.name}) compute: {value!r}; "
            "only a head that was trained with theirs can be written back"
        )


def _copy(checkpoint: _Checkpoint, changed: Mapping[str, Tensor], folder: Path) -> None:
    """Fill the new folder."""
    folder.mkdir()
    touched = {checkpoint.files[name] for name in changed}
    if gone := sorted(x.name for x in set(checkpoint.files.values()) if not x.is_file()):
        raise DraftsmithError(f"{checkpoint.folder} has no {gone[0]}, which its index names: fetch it again")
    for source in checkpoint.folder.rglob("*"):
        inside = source.relative_to(checkpoint.folder)
        hidden = any(part.startswith(".") for part in inside.parts[:-1])
        if hidden or not source.is_file() or source.suffix in _OTHER_WEIGHTS:
            continue
        place = folder / inside
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".safetensors" and source not in touched:
            _link(source.resolve(), place)
        else:
            shutil.copyfile(source, place)
    for file in touched:
        with open(folder / file.relative_to(checkpoint.folder), "r+b") as f:
            for name in sorted(set(changed) & set(read_header(file))):
                entry = checkpoint.entry(name)
                f.seek(entry.start)
                f.write(_bytes(changed[name]))
    if (key := checkpoint.layout.count_key) not in checkpoint.text:
        checkpoint.text[key] = checkpoint.modules
        write_json(folder / CONFIG, checkpoint.values)


def _link(source: Path, place: Path) -> None:
    try:
        os.link(source, place)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, place)


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().flatten().view(torch.uint8).numpy().tobytes()


__all__ = ["differing", "find_layout", "native_options", "read_native", "write_native"]
