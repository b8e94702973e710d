"""From a checkpoint to a folder that an engine loads; the contract says what it holds, this module fills it."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import DraftsmithError
from ...files import atomic_path, write_json
from ..adapter import FOLDER as ADAPTER
from ..adapter import TunedConfig
from ..architecture import conventions
from ..base import DraftHead
from ..checkpoint import TREE, load_head
from ..config import HeadConfig
from ..loading import text_config
from ..named import head_file, weights_of
from ..target import fingerprint
from ..vocab import DraftVocab
from ..weights import EMBEDDING, WeightReader
from .about import ABOUT, SCHEMA, About, pack_tokens
from .contracts import Contract, ServeSettings, contract, contracts_of, head_called, serve_settings
from .export_layouts import Layout, Wanted, facts_of, layout
from .files import CONFIG, read_mapping
from .foreign import heads_of, listed
from .native_mtp import find_layout, read_native, write_native
from .run_source import Source, find_source

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Of exported weights, by the names that users give them."""
DEPTH = 3
"""Tokens to draft where nobody says how many: what layouts that name a number name."""
_LONG = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_INTEGERS = {"int64": torch.int64, "bool": torch.bool}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: of it; about: its `draftsmith.json`; depth: tokens to draft.
        target: the folder that was given; no file names it.
    """

    folder: Path
    about: About
    depth: int
    target: Path | None = None

    def serve(self, model: str | None = None) -> ServeSettings:
        """How the engine serves it with a chain.

        Args:
            model: the target; None takes its hub id, or its folder where it has none.
        """
        config = self.about.config
        on_hub = _HUB_ID.fullmatch(config.target_id) is not None
        own = config.target_id if on_hub or self.target is None else str(self.target)
        served = serve_settings(
            self.about.engine, self.about.head, folder=self.folder, model=model or own,
            depth=self.depth, layer_ids=config.layer_ids or None,
        )  # fmt: skip
        place = layout(self.about.layout).place_of("target_id")
        if on_hub or place is None:
            return served
        note = f"write your target's hub id into config.json ({place}): {config.target_id} is only its folder's name"
        return dataclasses.replace(served, notes=[note, *served.notes])

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        served = self.serve()
        return {
            "folder": str(self.folder), "engine": self.about.engine, "head": self.about.head,
            "layout": self.about.layout, "dtype": self.about.dtype, "serves": list(self.about.serves),
            "files": dict(self.about.files), "commands": served.commands, "python": served.python,
            "constraints": served.constraints, "notes": served.notes,
        }  # fmt: skip

    def lines(self) -> list[str]:
        """For people."""
        about, served = self.about, self.serve()
        title = layout(about.layout).title
        width = max(map(len, about.files))
        return [
            f"{self.folder}: {about.head} as {title}, {about.dtype}, for {', '.join(about.serves)}",
            *(f"  {name:{width}}  {size:>15,} bytes" for name, size in about.files.items()),
            "serve it:",
            *(f"  {line}" for line in served.commands),
            *(f"note: {note}" for note in served.notes),
        ]


def export_head(
    checkpoint: Path,
    out: Path,
    engine: str,
    *,
    head: str | None = None,
    dtype: str | None = None,
    target: Path | None = None,
    depth: int | None = None,
) -> Exported:
    """Write a head as an engine loads it; the folder appears whole or not at all.

    Args:
        checkpoint: folder of a checkpoint of this toolkit's, or of a run: its best one.
        out: folder that isn't there yet, or an earlier export, which is replaced.
        head: its name in configs/heads/; None takes the run's, or its family's.
        dtype: of the weights, a key of `DTYPES` or torch's name; None takes bf16. MTP modules have their target's.
        target: folder of the target. Layouts that name it or hold tensors of it can't do without; the others leave the
            numbers of its special tokens out.
        depth: tokens to draft, where the layout says how many; None takes `DEPTH`, or as many as the head drafts. Of
            MTP modules with which engines draft fewer it is as many as those do.

    Raises:
        DraftsmithError: an unsupported pair, a head outside the engine's limits or of another kind than `head`, another
            target than the head's, numbers that aren't finite in the dtype, or a folder that is there and no export.
    """
    out = Path(os.path.abspath(out.expanduser()))  # "." has no name to write beside
    source = find_source(checkpoint)
    made = load_head(source.checkpoint)
    name = _name(head or source.head, made.config)
    found = contract(engine, name)
    found.require()
    _refuse_foreign(out)
    stored = _dtype(dtype, found)
    facts = _facts(made, found, target, stored, depth)
    if problems := found.problems(facts):
        raise DraftsmithError(f"{found.title} can't load this {name} head: {'; '.join(problems)}")
    with atomic_path(out) as folder:
        if found.layout.native:
            assert target is not None  # `_facts` asks for it
            write_native(made, target, folder)
            facts["dtype"] = _native_dtype(folder)
        else:
            folder.mkdir()
            _write(made, found.layout, facts, stored, target, folder)
            _copy_companions(made.config, source.checkpoint, folder)
        about = _about(made, found, facts, folder, source)
        about.write(folder)
    return Exported(out, about, facts["depth"], None if target is None else target.absolute())


def _about(head: DraftHead, found: Contract, facts: Mapping[str, Any], folder: Path, source: Source) -> About:
    """What is noted beside the files that are there already."""
    goal = found.layout
    return About(
        head=found.head,
        engine=found.engine,
        layout=goal.name,
        dtype=facts["dtype"],
        serves=[one.engine for one in contracts_of(found.head, facts) if one.layout.name == goal.name],
        config=head.config,
        draft_tokens=_draft_tokens(head.vocab, goal),
        files=_sizes(folder),
        provenance=source.provenance(),
    )


def default_folder(place: Path, engine: str) -> Path:
    """Where a run's head is exported for an engine: <run>/export/<engine>.

    Args:
        place: the run's folder, or a checkpoint's.

    Raises:
        DraftsmithError: nothing trained there, or a checkpoint that lies in no run.
    """
    run = find_source(place).run
    if run is None:
        raise DraftsmithError(f"{place} lies in no run: say where to write with --out")
    return run / "export" / engine


def _name(head: str | None, config: HeadConfig) -> str:
    """The head's name, which must be of the checkpoint's family."""
    name = head_called(head or config.family)
    family = head_file(weights_of(name))["head"]["family"]
    if family != config.family:
        raise DraftsmithError(f"this checkpoint holds a head of the kind {heads_of(config.family)}, not {name}")
    return name


def _dtype(name: str | None, found: Contract) -> torch.dtype:
    if name is not None and found.layout.native:
        raise DraftsmithError("MTP modules are written in their target's dtype: leave --dtype out")
    short = "bf16" if name is None else _LONG.get(name, name)
    if short not in DTYPES:
        raise DraftsmithError(f"dtype {name!r} is unknown; there are {', '.join(DTYPES)}")
    return DTYPES[short]


def _refuse_foreign(out: Path) -> None:
    """Refuse to replace a folder that holds anything but an export of this toolkit, of whichever version."""
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or _is_export(out))):
        raise DraftsmithError(
            f"{out} is there already and is no export of this toolkit: give another folder (--out), or remove it"
        )


def _is_export(folder: Path) -> bool:
    try:
        return str(read_mapping(folder / ABOUT).get("schema")).startswith(SCHEMA.partition("/")[0])
    except DraftsmithError:
        return False


# --- facts ------------------------------------------------------------------------------------------------------------


def _facts(
    head: DraftHead, found: Contract, target: Path | None, dtype: torch.dtype, depth: int | None
) -> dict[str, Any]:
    """All that the layout and the engine's limits ask of the head."""
    most = head.most_depth
    if depth is not None and (depth < 1 or (most is not None and depth > most)):
        raise DraftsmithError(f"depth {depth}: this head drafts 1 to {most or 'any number of'} tokens")
    if found.layout.native and target is None:
        raise DraftsmithError(f"{found.title} reads MTP modules inside their target: give that, too (--model)")
    facts = facts_of(
        head.config.to_dict(), dtype=str(dtype).removeprefix("torch."), depth=depth or min(DEPTH, most or DEPTH)
    )
    if target is not None:
        _refuse_other_target(head.config, target)
        native = find_layout(target)
        facts |= {**_target_facts(target), "native_layout": None if native is None else native.name}
        if found.layout.native and native is not None and native.served is not None:
            facts["depth"] = min(facts["depth"], native.served)
        if any(limit.fact == "embed_scale" for limit in found.limits):
            facts["embed_scale"] = conventions(text_config(str(target), None)).embed_scale
    return facts


def _refuse_other_target(config: HeadConfig, folder: Path) -> None:
    if (found := fingerprint(folder)) != config.target_fingerprint:
        raise DraftsmithError(
            f"the head was trained for {config.target_id} (fingerprint {config.target_fingerprint[:8]}), not for "
            f"{folder} ({found[:8]}): give that model (--model)"
        )


def _target_facts(folder: Path) -> dict[str, Any]:
    """What the files of a target say: architectures and special tokens."""
    values = read_mapping(folder / CONFIG)
    generation = folder / "generation_config.json"
    places = [values.get("text_config") or values, values, read_mapping(generation) if generation.is_file() else {}]
    tokens = {name: next((x[name] for x in places if x.get(name) is not None), None) for name in _TOKEN_IDS}
    return {**tokens, "target_architectures": values.get("architectures") or []}


# --- files ------------------------------------------------------------------------------------------------------------


def _write(
    head: DraftHead, goal: Layout, facts: Mapping[str, Any], dtype: torch.dtype, target: Path | None, folder: Path
) -> None:
    """Write config.json and the tensors into the new folder."""
    from safetensors.torch import save_file

    own = {name: parameter.detach().cpu() for name, parameter in head.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for name, wanted in goal.tensors(facts).items():
        if wanted.written:
            found = _MAKERS[wanted.make](_Source(own.get(wanted.source or ""), wanted, head.vocab, target))
            tensors[name] = found.to(_INTEGERS.get(wanted.dtype, dtype)).contiguous()
            assert tensors[name].shape == wanted.shape, (name, tensors[name].shape, wanted.shape)
    if broken := sorted(name for name, x in tensors.items() if not bool(x.isfinite().all())):
        raise DraftsmithError(
            f"the head's numbers aren't finite in {facts['dtype']}; {listed('tensor', broken)}: nothing was written; "
            "take another --dtype"
        )
    save_file(tensors, folder / goal.weights, metadata={"format": "pt"})
    write_json(folder / CONFIG, goal.values(facts))


def _native_dtype(folder: Path) -> str:
    """Dtype of the matrices of a target's MTP modules."""
    return next(str(x.dtype).removeprefix("torch.") for x in read_native(folder).tensors.values() if x.ndim > 1)


@dataclass(frozen=True)
class _Source:
    """What a tensor is made of: our parameter, if it has one, what is wanted, the vocabulary, the target's folder."""

    own: Tensor | None
    wanted: Wanted
    vocab: DraftVocab
    target: Path | None

    @property
    def parameter(self) -> Tensor:
        """Our parameter."""
        assert self.own is not None, self.wanted
        return self.own


def _or_zeros(source: _Source) -> Tensor:
    """Our parameter; zeros of a head that has none."""
    return torch.zeros(source.wanted.shape) if source.own is None else source.own


def _full_rows(source: _Source) -> Tensor:
    """Output rows [V, H] of rows [Vd, H]; those of other tokens are their mean, whose logit is never the largest."""
    rows, vocab = source.parameter, source.vocab
    if len(vocab) == vocab.vocab_size:
        return rows
    full = rows.double().mean(0).to(rows.dtype).repeat(vocab.vocab_size, 1)
    full[vocab.target_ids.cpu()] = rows
    return full


def _t2d(source: _Source) -> Tensor:
    """Bool [V]: which tokens are in the draft vocabulary."""
    found = torch.zeros(source.vocab.vocab_size, dtype=torch.bool)
    found[source.vocab.target_ids.cpu()] = True
    return found


def _embed(source: _Source) -> Tensor:
    """The target's embedding [V, H] as its files have it."""
    if source.target is None:
        raise DraftsmithError("this layout holds the target's embedding: give the target, too (--model)")
    found = WeightReader(source.target).find(EMBEDDING, "the embedding")
    if found is None or found.shape != source.wanted.shape:
        raise DraftsmithError(
            f"{source.target} has no plain embedding of {list(source.wanted.shape)}, which this layout holds: export "
            "for vllm, whose layout does without"
        )
    return found


_MAKERS: dict[str | None, Callable[[_Source], Tensor]] = {
    None: lambda source: source.parameter,
    "or_zeros": _or_zeros,
    "full_rows": _full_rows,
    "d2t": lambda source: source.vocab.d2t().cpu(),
    "t2d": _t2d,
    "embed": _embed,
}
"""How a layout's tensors are made, by the word in its table."""


def _draft_tokens(vocab: DraftVocab, goal: Layout) -> str | None:
    """The draft vocabulary for `draftsmith.json`, None where the tensors say it or all tokens are in it."""
    told = any(row.make == "d2t" for row in goal.rows)
    return None if told or len(vocab) == vocab.vocab_size else pack_tokens(vocab)


def _copy_companions(config: HeadConfig, checkpoint: Path, folder: Path) -> None:
    """Copy what belongs to the head beside its weights: its measured tree, and its target's adapter."""
    if (checkpoint / TREE).is_file():
        shutil.copyfile(checkpoint / TREE, folder / TREE)
    if isinstance(config, TunedConfig):
        shutil.copytree(checkpoint / ADAPTER, folder / ADAPTER)


def _sizes(folder: Path) -> dict[str, int]:
    return {str(x.relative_to(folder)): x.stat().st_size for x in sorted(folder.rglob("*")) if x.is_file()}


__all__ = ["DEPTH", "DTYPES", "Exported", "default_folder", "export_head"]
