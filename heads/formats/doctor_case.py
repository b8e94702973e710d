"""What doctor looks at: a directory's files as they lie, whatever is wrong with them, and what its target says."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import DraftsmithError
from ..checkpoint import CONFIG as OWN_CONFIG
from ..config import layer_values, target_values
from ..registry import head_family
from ..vocab import DraftVocab
from .about import ABOUT, read_about
from .contracts import head_called
from .native_files import Entry, read_header, read_object, read_tensor

REFUSED, WEAK = "refused", "weak"
"""What a fault does in an engine: it doesn't load, or it loads and few drafts are accepted."""
OWN = "draftsmith"
"""This toolkit's own decoder, beside the engines."""

EAGLE1, EAGLE3, SPEC_EAGLE, SPEC_EAGLE3 = "eagle1", "eagle3", "speculators-eagle", "speculators-eagle3"
MEDUSA, MEDUSA_HEADS, CHECKPOINT, NATIVE = "medusa", "medusa-heads", "checkpoint", "native-mtp"
KINDS = {
    EAGLE1: "EAGLE-1",
    EAGLE3: "EAGLE-3",
    SPEC_EAGLE: "speculators eagle",
    SPEC_EAGLE3: "speculators eagle3",
    MEDUSA: "Medusa (blocks.0.layers.0)",
    MEDUSA_HEADS: "Medusa (medusa_lm_head)",
    CHECKPOINT: "draftsmith checkpoint",
    NATIVE: "MTP modules in a target's checkpoint",
}
"""Layouts of a head by their names here, and as people call them."""
KIND_OF_LAYOUT = {
    "eagle1-sglang": EAGLE1,
    "eagle1-vllm": EAGLE1,
    "eagle3": EAGLE3,
    "medusa-tgi": MEDUSA_HEADS,
    "medusa-vllm": MEDUSA,
    "native-mtp": NATIVE,
    "speculators-eagle3": SPEC_EAGLE3,
}
"""What the layouts in configs/engines/layouts/ are."""
FUSED, LAYERED = (EAGLE3, SPEC_EAGLE3), (EAGLE1, EAGLE3, SPEC_EAGLE, SPEC_EAGLE3)
"""Kinds that fuse aux states of the target, and kinds with a decoder layer of their own."""

CONFIG, NOTE = "config.json", ABOUT
IDS, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        cause: what is wrong, with the values; fix: what to do, one line.
        effects: REFUSED or WEAK by engine; engines that are left out don't mind. Nothing here = a remark, no fault.
        check: name of the check that found it.
    """

    cause: str
    fix: str
    effects: Mapping[str, str] = field(default_factory=dict)
    check: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether some engine minds."""
        return bool(self.effects)


@dataclass(frozen=True)
class TargetFacts:
    """What a head must agree with.

    Attributes:
        name: its folder; rope: of its full attention, see `LayerConfig.rope`; positions: its longest context.
        embed_scale: factor of its embedding's rows; quantised: whether its weights are.
    """

    name: str
    folder: Path
    hidden_size: int
    vocab_size: int
    layers: int
    positions: int
    rope: dict[str, Any]
    fingerprint: str
    template_sha256: str | None
    embed_scale: float
    quantised: bool

    @classmethod
    def read(cls, folder: Path) -> TargetFacts:
        """Read a target's config, tokenizer and fingerprint; of its weights only a few bytes.

        Raises:
            DraftsmithError: no model there, or one without a longest context.
        """
        from ..architecture import conventions
        from ..loading import load_tokenizer, quantisation, text_config
        from ..target import fingerprint, template_sha256

        config = text_config(str(folder), None)
        values = target_values(config, DraftVocab(torch.arange(1), config.vocab_size))
        return cls(
            str(folder), folder, config.hidden_size, config.vocab_size, config.num_hidden_layers,
            values["max_position_embeddings"], layer_values(config)["rope"], fingerprint(folder),
            template_sha256(load_tokenizer(str(folder))), conventions(config).embed_scale,
            quantisation(str(folder), None) is not None,
        )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A directory, read so far as it can be read.

    Attributes:
        kind: one of `KINDS`, None = none of them.
        config: of config.json; note: of draftsmith.json, which exports of this toolkit have; {} = none.
        entries: name, dtype and shape of each tensor.
        damage: what can't be read. Nothing else is judged while there is any.
        engines: those that have a contract for this kind, and `OWN`.
    """

    folder: Path
    kind: str | None
    config: dict[str, Any]
    note: dict[str, Any]
    entries: dict[str, Entry]
    damage: list[Finding] = field(default_factory=list)
    target: TargetFacts | None = None
    engines: tuple[str, ...] = (OWN,)
    kept: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """Small tensors that a check has read."""

    @property
    def shapes(self) -> dict[str, Any]:
        """The part of the config that holds the layer's shapes."""
        group = self.config.get("transformer_layer_config") if self.kind in (SPEC_EAGLE, SPEC_EAGLE3) else None
        return group if isinstance(group, dict) else self.config

    @property
    def shapes_at(self) -> str:
        """How messages call that part."""
        return "config.json" if self.shapes is self.config else "transformer_layer_config"

    @property
    def nested(self) -> dict[str, Any]:
        """The config's group for EAGLE, {} where there is none."""
        group = self.config.get(NESTED)
        return group if isinstance(group, dict) else {}

    @property
    def head(self) -> dict[str, Any]:
        """The head's config as this toolkit noted it at export, {} for a head from elsewhere."""
        head = self.config if self.kind == CHECKPOINT else self.note.get("config")
        return head if isinstance(head, dict) else {}

    @property
    def layers(self) -> int | None:
        """Layers of the target, as far as anything says."""
        return self.target.layers if self.target else whole(self.head.get("target_layers"))

    @property
    def width(self) -> int | None:
        """Width of the target's states."""
        return whole(self.config.get("target_hidden_size")) or whole(self.shapes.get("hidden_size"))

    def effects(self, effect: str, *engines: str, but: Iterable[str] = ()) -> dict[str, str]:
        """One effect for some engines, or for all that have a contract for this kind."""
        left_out = set(but)
        return {name: effect for name in (engines or self.engines) if name in self.engines and name not in left_out}

    def named(self, pattern: str) -> list[str]:
        """Tensors whose whole name fits a pattern."""
        return sorted(name for name in self.entries if re.fullmatch(pattern, name))

    def rows(self, *names: str) -> int | None:
        """First dimension of the first of these tensors that is there."""
        found = next((self.entries[name] for name in names if name in self.entries), None)
        return found.shape[0] if found is not None and len(found.shape) else None

    def tensor(self, name: str) -> Tensor:
        """A tensor's numbers; small ones are read once for all checks.

        Raises:
            DraftsmithError: it can't be read.
        """
        if name in self.kept:
            return self.kept[name]
        found = read_tensor(self.entries[name].file, name)
        if found.numel() <= 1 << 20:
            self.kept[name] = found
        return found


def whole(value: Any) -> int | None:
    """A number above 0, None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


# --- reading --------------------------------------------------------------------------------------------------------


def read_case(folder: Path, target: TargetFacts | None) -> Case:
    """Read a directory; what can't be read becomes `Case.damage`. Pickled files are never opened."""
    damage: list[Finding] = []
    own = (folder / OWN_CONFIG).is_file()
    config = _object(folder / (OWN_CONFIG if own else CONFIG), damage)
    note = _object(folder / NOTE, damage)
    entries = _entries(folder, damage)
    _refuse_record(folder, config if own else None, damage)
    kind = CHECKPOINT if own else _kind(folder, config, note, set(entries))
    if damage:  # nothing that half a file says is taken for what the head is
        damage = [replace(finding, effects={OWN: REFUSED}) for finding in damage]
        config, note = {}, {}
    return Case(folder, kind, config, note, entries, damage, target)


def _object(path: Path, damage: list[Finding]) -> dict[str, Any]:
    """A JSON file's object; {} where there is no file, or a damaged one."""
    if not path.is_file():
        return {}
    try:
        return read_object(path)
    except (DraftsmithError, RecursionError) as error:
        damage.append(Finding(f"{path.name} can't be read: {_reason(error, path)}", _AGAIN, check="json"))
        return {}


def _refuse_record(folder: Path, own: dict[str, Any] | None, damage: list[Finding]) -> None:
    """Note a record of the head that contradicts itself.

    Args:
        own: content of head.json, None where there is none.
    """
    if damage:
        return
    try:
        if own is not None:
            head_family(own.get("family", "")).config.from_dict(own, OWN_CONFIG)
        elif (about := read_about(folder)) is not None:
            head_called(about.head)
            known: dict[str, Collection[str]] = {"layout": KIND_OF_LAYOUT, "dtype": ("bfloat16", "float16", "float32")}
            if wrong := [name for name, values in known.items() if getattr(about, name) not in values]:
                raise DraftsmithError(
                    f"{wrong[0]} {getattr(about, wrong[0])!r} is unknown: {', '.join(known[wrong[0]])}"
                )
    except DraftsmithError as error:
        said = str(error).removeprefix(f"{folder / NOTE}: ").removeprefix(f"{OWN_CONFIG}: ")
        damage.append(Finding(f"{NOTE if own is None else OWN_CONFIG} is damaged: {said}", _AGAIN, check="json"))


_AGAIN = "export the head again, or fetch it again"


def _reason(error: BaseException, path: Path) -> str:
    """What an error says, without the file's whole path and the advice behind it."""
    said = next(iter(str(error).strip().splitlines()), type(error).__name__)
    inner = re.search(r"\((.*)\)", said)
    return (inner[1] if inner else said).replace(str(path), path.name)


def _entries(folder: Path, damage: list[Finding]) -> dict[str, Entry]:
    """Headers of all safetensors of the directory's top, each file checked for its length."""
    found: dict[str, Entry] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if file.name == "vocab.safetensors":
            continue
        try:
            header = read_header(file)
        except (DraftsmithError, RecursionError, OverflowError, RuntimeError) as error:  # of shapes that are none
            damage.append(Finding(f"{file.name} can't be read: {_reason(error, file)}", _AGAIN, check="truncated"))
            continue
        damage += _length(file, header) or _opened(file)
        found |= header
    damage += _indexed(folder, found)
    return found


def _opened(file: Path) -> list[Finding]:
    """What the library says that readers open such files with."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt"):
            return []
    except (SafetensorError, OSError) as error:
        return [Finding(f"{file.name} can't be read: {_reason(error, file)}", _AGAIN, check="truncated")]


def _length(file: Path, header: dict[str, Entry]) -> list[Finding]:
    """Tensors whose bytes aren't all there, or aren't as many as the shape says."""
    size = file.stat().st_size
    end = max((entry.stop for entry in header.values()), default=0)
    if size < end:
        told = f"{file.name} has {size:,} bytes and its header asks for {end:,}: it was cut"
        return [Finding(told, _AGAIN, check="truncated")]
    return list(_counted(file, header))


def _counted(file: Path, header: dict[str, Entry]) -> Iterator[Finding]:
    for name, entry in header.items():
        bytes_each = _BYTES.get(entry.dtype) if isinstance(entry.dtype, str) else None
        if bytes_each is None:
            yield Finding(
                f"{file.name}: {name} has the dtype {entry.dtype!r}, which is none", _AGAIN, check="truncated"
            )
        elif entry.stop - entry.start != bytes_each * math.prod(entry.shape):
            told = f"{entry.stop - entry.start} bytes for {entry.dtype} {list(entry.shape)}"
            yield Finding(f"{file.name}: {name} has {told}: its header is damaged", _AGAIN, check="truncated")


def _indexed(folder: Path, found: dict[str, Entry]) -> Iterator[Finding]:
    """Tensors that an index names and no file has."""
    for index in sorted(folder.glob("*.safetensors.index.json")):
        damage: list[Finding] = []
        parts = _object(index, damage).get("weight_map")
        if damage or not isinstance(parts, dict):
            yield Finding(f"{index.name} has no 'weight_map' of tensors to files", _AGAIN, check="index")
        elif lost := sorted(name for name in parts if name not in found):
            told = f"{index.name} names {lost[0]}, which no file has ({len(lost)} in all)"
            yield Finding(told, _AGAIN, check="index")


_MEDUSA = re.compile(r"(?:medusa_heads?\.)?blocks\.\d+\.layers\.\d+\.(?:weight|bias)")
_MEDUSA_HEADS = re.compile(r"(?:medusa_heads?\.)?\d+\.\d+\.linear\.(?:weight|bias)")
_OTHER_CLASSES = re.compile(r"Eagle3(?:Qwen3|DeepseekV[23])ForCausalLM|Peagle\w+|P?DFlash\w*|DSpark\w*")
"""Of drafts that vLLM has and no contract here covers."""
_SPECULATORS = {"eagle": SPEC_EAGLE, "eagle3": SPEC_EAGLE3}


def _kind(folder: Path, config: dict[str, Any], note: dict[str, Any], names: set[str]) -> str | None:
    """Which layout a directory has: as the exporter noted it, else by its config and its tensors' names."""
    noted = note.get("layout")
    if isinstance(noted, str) and noted in KIND_OF_LAYOUT:
        return KIND_OF_LAYOUT[noted]
    said = config.get("speculators_model_type")
    if other_class(config) is not None:
        return None
    if isinstance(said, str):
        return _SPECULATORS.get(said)
    if any(_MEDUSA.fullmatch(name) for name in names):
        return MEDUSA
    if any(_MEDUSA_HEADS.fullmatch(name) for name in names):
        return MEDUSA_HEADS
    called = json.dumps(config.get("architectures")).lower()
    if "d2t" in names or "eagle3" in called or any(x.endswith("hidden_norm.weight") for x in names & _plain(names)):
        return EAGLE3
    if "fc.weight" in names and any(name.startswith("layers.0.") for name in names):
        return EAGLE1
    return NATIVE if _has_native(folder) else None


def other_class(config: dict[str, Any]) -> str | None:
    """A class of drafts that no contract here covers, by its name; None = the config names none."""
    layer = config.get("transformer_layer_config")
    if isinstance(layer, dict) and layer.get("model_type") == "qwen3":
        return "Eagle3Qwen3ForCausalLM"
    named = config.get("architectures")
    classes = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    return next((name for name in classes if _OTHER_CLASSES.fullmatch(name)), None)


def _plain(names: set[str]) -> set[str]:
    """Names of a layer that stands alone: native MTP modules have a `hidden_norm` of their own, too."""
    return {name for name in names if name.startswith(("midlayer.", "layers.0."))}


def _has_native(folder: Path) -> bool:
    from .native_mtp import find_layout

    try:
        return find_layout(folder) is not None
    except DraftsmithError:
        return False


__all__ = [
    "CHECKPOINT", "CONFIG", "EAGLE1", "EAGLE3", "FUSED", "IDS", "KINDS", "KIND_OF_LAYOUT", "LAYERED", "MEDUSA",
    "MEDUSA_HEADS", "NATIVE", "NESTED", "NOTE", "OWN", "PICKLES", "REFUSED", "SPEC_EAGLE", "SPEC_EAGLE3", "WEAK",
    "Case", "Finding", "TargetFacts", "other_class", "read_case", "whole",
]  # fmt: skip
