"""What doctor asks of a head's tensors: the draft vocabulary, numbers that are none, tensors that nobody trained."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from ...errors import DraftsmithError
from ..vocab import DraftVocab
from .doctor_case import (
    FUSED,
    MEDUSA,
    NATIVE,
    OWN,
    PICKLES,
    REFUSED,
    WEAK,
    Case,
    Finding,
    whole,
)
from .native_files import Entry
from .native_mtp import find_layout

_WEIGHTS = ("F32", "F16", "BF16")
_INTEGERS = ("I64", "I32")


def check_pickles(case: Case) -> Iterator[Finding]:
    """Pickled weights, which can run code where they are opened: they never are here."""
    found = sorted(path.name for pattern in PICKLES for path in case.folder.glob(pattern))
    if not found:
        return
    safe = "model.safetensors" if found[0].startswith("pytorch") else f"{found[0].partition('.')[0]}.safetensors"
    if not case.entries:
        yield Finding(
            f"the weights are pickled ({found[0]}) and aren't opened: a pickle may run code",
            f"write its tensors to {safe} with safetensors.torch.save_file, where you trust its author",
            case.effects(REFUSED),
        )
    else:
        yield Finding(f"{found[0]} lies beside the safetensors", f"remove {found[0]}: nothing reads it")


def check_weights(case: Case) -> Iterator[Finding]:
    """A directory without any tensors."""
    if not case.entries and not [x for pattern in PICKLES for x in case.folder.glob(pattern)]:
        yield Finding(
            "it holds no safetensors with weights",
            "give the folder that the head was exported to",
            case.effects(REFUSED),
        )


# --- vocabulary -----------------------------------------------------------------------------------------------------


def true_vocabulary(case: Case) -> tuple[int, str] | None:
    """V of the target, and who says so; None where nothing beside config.json does."""
    if case.target:
        return case.target.vocab_size, f"the target has {case.target.vocab_size}"
    if noted := whole(case.head.get("vocab_size")):
        return noted, f"the head was trained for {noted}"
    rows = case.rows("t2d", "embed_tokens.weight")
    return None if rows is None else (rows, f"{'t2d' if 't2d' in case.entries else 'embed_tokens.weight'} has {rows}")


def check_vocabulary_size(case: Case) -> Iterator[Finding]:
    """`vocab_size` is the target's: draft logits are scattered into as many."""
    said, truth = case.shapes.get("vocab_size"), true_vocabulary(case)
    if said is not None and truth is not None and said != truth[0]:
        yield Finding(
            f"vocab_size is {said}, and {truth[1]} tokens: it must be the target's, not the draft's",
            f"write vocab_size: {truth[0]}",
            case.effects(REFUSED),
        )


def check_draft_size(case: Case) -> Iterator[Finding]:
    """`draft_vocab_size` is the number of output rows."""
    if case.kind not in FUSED:
        return
    rows, said = case.rows("lm_head.weight"), whole(case.config.get("draft_vocab_size"))
    full = whole(case.shapes.get("vocab_size"))
    if rows and said and rows != said:
        maps = "" if "d2t" not in case.entries else f", d2t {case.rows('d2t')}"
        yield Finding(
            f"draft_vocab_size is {said}, lm_head.weight has {rows} rows{maps}",
            f"write draft_vocab_size: {rows}",
            case.effects(REFUSED),
        )
    elif rows and said is None and rows != full:
        yield Finding(
            f"draft_vocab_size is left out, and lm_head.weight has {rows} rows: engines take {full}",
            f"write draft_vocab_size: {rows}",
            case.effects(REFUSED) | case.effects(WEAK, "sglang"),
        )


def check_d2t(case: Case) -> Iterator[Finding]:
    """`d2t` holds offsets, target id = draft id + d2t[draft id], and agrees with `t2d`."""
    if case.kind in FUSED:
        yield from _d2t(case)


def _d2t(case: Case) -> Iterator[Finding]:
    size = case.rows("lm_head.weight") or whole(case.config.get("draft_vocab_size"))
    truth = true_vocabulary(case)
    full = truth[0] if truth else whole(case.shapes.get("vocab_size"))
    if size is None or full is None:
        return
    if "d2t" not in case.entries:
        if size < full:
            yield Finding(
                f"d2t is missing, and the draft vocabulary has {size} of {full} tokens: draft ids are taken as the "
                "target's",
                "export the head again: d2t holds offsets, int64",
                case.effects(REFUSED) | case.effects(WEAK, "vllm", "sglang"),
            )
        return
    entry = case.entries["d2t"]
    if size == full:
        yield Finding(
            f"d2t is there and the draft vocabulary is whole ({size} tokens): vLLM knows no such weight then",
            "leave d2t out",
            case.effects(REFUSED, "vllm"),
        )
    elif entry.dtype not in _INTEGERS:
        yield Finding(
            f"d2t is {entry.dtype}, which doesn't hold every integer: ids come out wrong",
            "write d2t as int64: no cast of all tensors may touch it",
            case.effects(WEAK) | case.effects(REFUSED, OWN),
        )
    elif tuple(entry.shape) != (size,):
        yield Finding(
            f"d2t has the shape {list(entry.shape)} for {size} output rows",
            "export the head again",
            case.effects(REFUSED),
        )
    else:
        yield from _offsets(case, case.tensor("d2t").long(), full)


def _offsets(case: Case, d2t: Tensor, full: int) -> Iterator[Finding]:
    ids, t2d = d2t + torch.arange(len(d2t)), _tokens_of_t2d(case)
    noted = case.head.get("draft_vocab_sha256")
    # the own reader orders ids and refuses what no vocabulary can be; an engine takes whatever stands there
    weak, both = case.effects(WEAK), case.effects(WEAK) | case.effects(REFUSED, OWN)
    fix = "write offsets, target id - draft id: export the head again"
    if _holds_ids(d2t, ids, full, t2d, noted):
        yield Finding(
            f"d2t holds target ids (…, {int(d2t[-1])}) where offsets belong: id + d2t[id] is another token", fix, both
        )
    elif not bool(d2t.any()):
        yield Finding(
            f"d2t is all zeros, and the draft vocabulary has {len(d2t)} of {full} tokens: draft ids are "
            "taken as the target's",
            fix,
            both if t2d is not None else weak,
        )
    elif int(ids.min()) < 0 or int(ids.max()) >= full:
        yield Finding(
            f"d2t points to the tokens {int(ids.min())} to {int(ids.max())}, and the target has {full}",
            fix,
            case.effects(REFUSED),
        )
    elif len(ids.unique()) < len(ids):
        yield Finding(f"d2t points twice to the same token ({len(ids) - len(ids.unique())} times)", fix, both)
    elif t2d is not None and not torch.equal(ids.sort().values, t2d):
        yield Finding(f"d2t and t2d name other tokens ({len(ids)} and {len(t2d)})", fix, both)
    elif isinstance(noted, str) and DraftVocab(ids.sort().values, full).sha256 != noted:
        yield Finding("d2t is another draft vocabulary than the head was trained with", fix, weak)


def _tokens_of_t2d(case: Case) -> Tensor | None:
    """Target ids that `t2d` marks, None without it."""
    if "t2d" not in case.entries or len(case.entries["t2d"].shape) != 1:
        return None
    return case.tensor("t2d").bool().nonzero().flatten()


def _holds_ids(d2t: Tensor, ids: Tensor, full: int, t2d: Tensor | None, noted: object) -> bool:
    """Whether `d2t` holds the draft vocabulary's target ids themselves."""
    try:
        vocab = DraftVocab(d2t.sort().values, full)
    except DraftsmithError:
        return False
    if isinstance(noted, str):
        return vocab.sha256 == noted
    if t2d is not None:
        return torch.equal(vocab.target_ids, t2d)
    return int(ids.max()) >= full


def check_token_map(case: Case) -> Iterator[Finding]:
    """Medusa's draft vocabulary, which the last vLLM with Medusa refuses."""
    if case.kind != MEDUSA:
        return
    said, full = whole(case.config.get("truncated_vocab_size")), whole(case.config.get("vocab_size"))
    if "token_map" in case.entries or (said is not None and full is not None and said != full):
        yield Finding(
            f"a draft vocabulary of {said or case.rows('token_map')} tokens: vLLM refuses token_map",
            "export with output rows for the whole vocabulary",
            case.effects(REFUSED, "vllm"),
        )


# --- numbers --------------------------------------------------------------------------------------------------------

_NORM = re.compile(r"(?:.+\.)?\w*norm\w*(?:\.\d+)?(?:\.weight)?")


def check_dtypes(case: Case) -> Iterator[Finding]:
    """Weights in formats that no head is stored in, or in another than the export's."""
    integers = {"t2d": ("BOOL",), "token_map": _INTEGERS}
    asked = {name: integers.get(name, _WEIGHTS) for name in _own(case) if name != "d2t"}
    odd = {name: case.entries[name].dtype for name, known in asked.items() if case.entries[name].dtype not in known}
    if odd:
        name = sorted(odd)[0]
        wanted = " or ".join(asked[name])
        yield Finding(
            f"{name} is {odd[name]} ({len(odd)} in all), and {wanted} is expected",
            "export the head again",
            case.effects(REFUSED),
        )
        return
    found = {case.entries[name].dtype for name in asked if name not in integers}
    if len(found) > 1 and case.kind != NATIVE:
        yield Finding(f"weights of several dtypes ({', '.join(sorted(found))})", "export the head in one dtype")


def check_finite(case: Case) -> Iterator[Finding]:
    """NaN and infinities."""
    broken = [name for name, x in _weights(case) if not bool(x.isfinite().all())]
    if broken:
        yield Finding(
            f"{broken[0]} has NaN or infinite numbers ({len(broken)} tensors in all): nothing is accepted",
            "export a checkpoint from before the loss was lost",
            case.effects(WEAK),
        )


def check_constant(case: Case) -> Iterator[Finding]:
    """Matrices of one value, norms of zeros: a trained head has neither."""
    flat = []
    for name, x in _weights(case):
        is_norm = x.ndim == 1 and _NORM.fullmatch(name) is not None
        if (x.ndim > 1 and x.numel() > 1 and bool((x == x.flatten()[0]).all())) or (is_norm and not bool(x.any())):
            flat.append(f"{name} is {float(x.flatten()[0]):g} everywhere")
    if flat:
        yield Finding(
            f"{flat[0]} ({len(flat)} tensors in all): nobody trained it, or it was lost on the way",
            "export the trained checkpoint",
            case.effects(WEAK),
        )


def _weights(case: Case) -> Iterator[tuple[str, Tensor]]:
    """The head's own floating-point tensors that hold anything, one in memory at a time."""
    for name, entry in _own(case).items():
        if entry.dtype in _WEIGHTS and 0 not in entry.shape:
            yield name, case.tensor(name)


def _own(case: Case) -> dict[str, Entry]:
    """The head's own tensors: of a target's checkpoint only the modules, which are layers behind its last in some."""
    if case.kind != NATIVE or (native := find_layout(case.folder)) is None:
        return case.entries
    text = case.config.get("text_config")
    layers = whole((text if isinstance(text, dict) else case.config).get("num_hidden_layers")) or 0
    found = {name: re.match(native.beginning, name) for name in case.entries}
    return {
        name: case.entries[name]
        for name, match in found.items()
        if match is not None and (not match.groups() or int(match[1]) >= layers)
    }
