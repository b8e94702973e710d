"""A head that starts from a checkpoint, this toolkit's or another tool's, instead of its family's own start.

What the head computes comes with it: shapes, rope, layer ids and the draft vocabulary, which is never counted anew. How
it learns on (steps, loss weights, optimizer) is the run's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import DraftsmithError
from ..files import read_json, write_json
from ..heads.base import DraftHead, TargetParts
from ..heads.checkpoint import CONFIG, VOCAB
from ..heads.config import HeadConfig, default_layer_ids
from ..heads.formats import load
from ..heads.formats.files import find_checkpoint, hub_id, pin
from ..heads.formats.foreign import Foreign, heads_of
from ..heads.formats.read import digest, read_foreign, recorded_layer_ids
from ..heads.target import resolve_folder
from ..heads.vocab import DraftVocab
from ..manifest import PLAN
from .checkpoint import step_folders
from .settings import HeadSettings

NATIVE = "native"
"""Stands for the layers that the target's own checkpoint has for this purpose."""
START = "start.json"
"""Beside a run's checkpoints: where its head came from, and what identifies that."""

_SAME_NETWORK = {"medusa2": "medusa"}


@dataclass(frozen=True)
class WarmStart:
    """A checkpoint to start from.

    Attributes:
        source: as the user named it, a hub id with its commit; found: what it holds; sha256: of that, see `digest`.
        own: its whole config where it is this toolkit's own.
        gone: it isn't there any more, and a training that began from it goes on; `found` then has no tensors.
    """

    source: str
    found: Foreign
    own: HeadConfig | None
    sha256: str
    gone: bool = False

    def record(self) -> dict[str, str]:
        """Where a run's head came from, for its record."""
        return {"source": self.source, "layout": self.found.layout, "sha256": self.sha256}

    def note(self, stage: Path) -> None:
        """Leave in a training's folder what it takes to go on when the source is gone."""
        if not self.gone:
            f = self.found
            head = {
                "family": f.family,
                "options": f.options,
                "from_target": f.from_target,
                "vocab": f.vocab is not None,
            }
            write_json(stage / START, {**self.record(), "head": head})


def read_start(source: str, stage: Path, location: str, revision: str | None) -> WarmStart:
    """Read the checkpoint that a run starts from.

    Args:
        source: a folder, a hub id (see `pinned`) or `NATIVE`.
        stage: folder of the training; one that began from a source which is gone may go on, see `require_same`.
        location, revision: the target.

    Raises:
        DraftsmithError: nothing there, no known layout, or the training's own folder.
    """
    if source == NATIVE:
        from ..heads.formats.native_mtp import read_native

        native = read_native(resolve_folder(location, revision))
        return WarmStart(source, native, None, digest(native))
    source = pinned(source, stage)
    try:
        folder = _start_folder(source, stage)
    except _Gone as gone:
        return gone.start
    found, own = read_foreign(folder)
    return WarmStart(source, found, own, digest(found))


def pinned(source: str, stage: Path) -> str:
    """The source; of a hub model at the commit that the training in `stage` noted, else at the hub's newest."""
    noted = _noted(stage)
    known = noted is not None and hub_id(source) == (noted["source"].partition("@")[0], None)
    return str(noted["source"]) if noted and known else pin(source)


class _Gone(DraftsmithError):
    """The source isn't there; `start` is what the training that began from it noted."""

    def __init__(self, start: WarmStart) -> None:
        super().__init__(f"there is no head to start from at {start.source!r} any more")
        self.start = start


def _start_folder(source: str, stage: Path) -> Path:
    """Folder of the checkpoint `source`.

    Raises:
        _Gone: it isn't there, and a training that began from it is.
        DraftsmithError: neither is there, or the source lies in the training's own folder.
    """
    try:
        folder = find_checkpoint(source)
    except DraftsmithError as error:
        noted, saved = _noted(stage), step_folders(stage / "checkpoints")
        if not noted or not saved or _absolute(noted["source"]) != _absolute(source):
            raise
        raise _Gone(_noted_start(noted, saved[-1])) from error
    if folder.is_relative_to(stage.resolve()):
        raise DraftsmithError(
            f"{source} lies in {stage}, which is this very run's training: a run that starts from it would set it "
            "aside; give the new run a name with RUN=NAME (--run NAME)"
        )
    return folder


def _noted(stage: Path) -> dict[str, Any] | None:
    return read_json(stage / START) if (stage / START).exists() else None


def _noted_start(noted: dict[str, Any], checkpoint: Path) -> WarmStart:
    """What `WarmStart.note` wrote, with the draft vocabulary of the training's own checkpoint, where it was fixed."""
    from safetensors.torch import load_file

    head, vocab = noted["head"], None
    if head["vocab"]:
        vocab = DraftVocab(load_file(checkpoint / VOCAB)["target_ids"], read_json(checkpoint / CONFIG)["vocab_size"])
    found = Foreign(noted["layout"], head["family"], head["options"], vocab, {}, tuple(head["from_target"]))
    return WarmStart(noted["source"], found, None, noted["sha256"], gone=True)


def _absolute(source: str) -> Path:
    return Path(source).expanduser().resolve()


def require_same(start: WarmStart, stage: Path, identity: dict[str, Any]) -> None:
    """Let a training go on whose start is gone only where nothing else has changed: another has nothing to begin from.

    Args:
        stage: folder of the training; identity: values of its plan that this run has.

    Raises:
        DraftsmithError: names the first value that is another.
    """
    if start.gone and (other := _difference(read_json(stage / PLAN), identity)):
        raise DraftsmithError(
            f"there is no head to start from at {start.source!r} any more; the training in {stage}, which began from "
            f"it, goes on only as it was: {other}"
        )


def _difference(there: dict[str, Any], here: dict[str, Any], place: str = "") -> str:
    """The first value that differs, "" where none does."""
    for key, value in here.items():
        before = there.get(key)
        if before == value:
            continue
        if isinstance(before, dict) and isinstance(value, dict):
            return _difference(before, value, f"{place}{key}.")
        return f"{place}{key} = {before!r}, not {value!r}"
    return ""


def start_layer_ids(source: str, stage: Path, asked: Sequence[int] | None, n_layers: int) -> list[int]:
    """Aux layers that a run reads which starts from `source`; see `choose_layer_ids`. Reads no weights."""
    try:
        recorded = None if source == NATIVE else recorded_layer_ids(_start_folder(source, stage))
    except _Gone as gone:
        recorded = gone.start.found.options.get("layer_ids")
    return choose_layer_ids(source, recorded, asked, n_layers)


def choose_layer_ids(
    source: str, recorded: Sequence[int] | None, asked: Sequence[int] | None, n_layers: int
) -> list[int]:
    """The checkpoint's layer ids; where it names none, those that are asked for, else the default.

    Raises:
        DraftsmithError: others are asked for than the checkpoint's, or the target has no such states.
    """
    if recorded and not all(0 < k < n_layers for k in recorded):
        raise DraftsmithError(
            f"the head at {source} reads the states {list(recorded)}, and the target has {n_layers} layers: it was "
            "trained for another target"
        )
    if recorded and asked is not None and list(asked) != list(recorded):
        raise DraftsmithError(
            f"head.layer_ids = {list(asked)}, but the head at {source} reads the states {list(recorded)}: leave "
            "head.layer_ids out"
        )
    return list(recorded or asked or default_layer_ids(n_layers))


def start_values(
    start: WarmStart, settings: HeadSettings, target: dict[str, Any]
) -> tuple[dict[str, Any], DraftVocab | None]:
    """What a run takes over: values of the head's config, laid over the settings', and its draft vocabulary.

    Args:
        target: hidden_size, vocab_size, num_hidden_layers, target_id, target_revision, target_fingerprint and
            chat_template_sha256 of this run's.

    Returns:
        The values, layer ids among them; the vocabulary, None where the checkpoint fixes none.

    Raises:
        DraftsmithError: a head for another target or of another family, or one that the settings contradict.
    """
    found = start.found
    _refuse_other_target(start, target)
    if found.family not in (settings.family, _SAME_NETWORK.get(settings.family)):
        raise DraftsmithError(
            f"{start.source} ({found.layout}) holds a head of the kind {heads_of(found.family)}, and this run trains "
            f"{heads_of(settings.family)}: choose HEAD (--head) to fit, or another HEAD_INIT (--head-init)"
        )
    if (steps := found.options.get("steps", settings.steps)) != settings.steps:
        raise DraftsmithError(
            f"the head at {start.source} has {steps} networks, one a draft, and head.steps = {settings.steps}: give "
            f"head.steps={steps}"
        )
    vocab, asked = found.vocab, settings.draft_vocab_size
    if vocab is not None and asked is not None and asked != len(vocab):
        raise DraftsmithError(
            f"head.draft_vocab_size = {asked}, but the head at {start.source} proposes its own {len(vocab)} tokens, "
            "which are kept: leave head.draft_vocab_size out"
        )
    recorded, layers = found.options.get("layer_ids"), target["num_hidden_layers"]
    ids = choose_layer_ids(start.source, recorded, settings.layer_ids, layers)
    values = {**settings.options, **found.options, "layer_ids": ids}
    values.pop("steps", None)
    return values, vocab


def overruled(settings: HeadSettings, config: HeadConfig) -> str:
    """A line that names the settings' options that the checkpoint has otherwise; "" where there are none."""
    other = {name: getattr(config, name) for name, asked in settings.options.items() if getattr(config, name) != asked}
    told = ", ".join(f"{name} = {value!r} (not {settings.options[name]!r})" for name, value in other.items())
    return f"as in the checkpoint: {told}" if told else ""


def _refuse_other_target(start: WarmStart, target: dict[str, Any]) -> None:
    """Refuse a head that was trained for another target, as far as its checkpoint tells: names every difference."""
    there: dict[str, Any] = {
        k: start.found.options[k] for k in ("hidden_size", "vocab_size") if k in start.found.options
    }
    if start.own is not None:
        about: tuple[str, ...] = ("target_fingerprint", "chat_template_sha256")
        if start.own.target_fingerprint != target["target_fingerprint"]:
            about = ("target_id", "target_revision", *about)
        there |= {name: getattr(start.own, name) for name in about}
    differences = [f"{k} {v!r}, here {target[k]!r}" for k, v in there.items() if v != target[k]]
    if differences:
        called = f" ({start.found.written_for})" if start.found.written_for else ""
        raise DraftsmithError(
            f"the head at {start.source} was trained for another target{called}: {'; '.join(differences)}"
        )


def refuse_other_start(why: str, stage: Path, start: WarmStart | None) -> None:
    """Refuse to decode with a training's weights that began elsewhere than this run asks for.

    Args:
        why: says who decodes with whose weights; stage: folder of that training; start: what this run names.
    """
    wanted = None if start is None else start.sha256
    if read_json(stage / PLAN).get("head_init") != wanted:
        there = (_noted(stage) or {"source": "its own start"})["source"]
        named = start.source if start else "its own start"
        other = (
            f"from {there}, not from {named}" if there != named else f"from another head at {there} than is there now"
        )
        raise DraftsmithError(
            f"{why}, and those in {stage} began {other}: give HEAD_INIT (--head-init) to fit, or RUN=NAME (--run NAME) "
            "to train others beside them"
        )


def check_fit(start: WarmStart, config: HeadConfig, vocab: DraftVocab) -> None:
    """Refuse tensors that don't fit the head that is to take them over: see `load.check_fit`."""
    if not start.gone:
        load.check_fit(start.found, start.source, config, vocab)


def check_copies(start: WarmStart, parts: TargetParts, quantised: bool) -> None:
    """Refuse a head that brings other embedding or output rows than its target's: see `load.check_copies`."""
    load.check_copies(start.found, start.source, parts, quantised)


@torch.no_grad()
def load_start(head: DraftHead, start: WarmStart) -> str:
    """Lay the checkpoint's tensors, which fit (`check_fit`), over a head that its family has initialised.

    They are handed over: afterwards `start` holds none, so that a run keeps them once.

    Returns:
        A line that says where the head starts.
    """
    found = start.found
    if start.gone:
        return f"start: {start.source} is gone; the head goes on from this training's own checkpoint"
    parameters = dict(head.named_parameters())
    for name, tensor in found.tensors.items():
        parameters[name].copy_(tensor)
    count = len(found.tensors)
    found.tensors.clear()
    found.copies.clear()
    written = f", written for {found.written_for}" if found.written_for else ""
    rest = f"; {', '.join(x.rstrip('.') for x in found.from_target)} from the target" if found.from_target else ""
    return f"start: {start.source} ({found.layout}{written}), {count} tensors{rest}"


__all__ = [
    "NATIVE", "START", "WarmStart", "check_copies", "check_fit", "choose_layer_ids", "load_start", "overruled",
    "pinned", "read_start", "refuse_other_start", "require_same", "start_layer_ids", "start_values",
]  # fmt: skip
