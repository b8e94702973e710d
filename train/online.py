"""Online training: the frozen target runs inside the training job, and no state of it is ever on a disk.

What is stored are the documents alone, five bytes a token, as a feature store whose states have no width: everything
that training asks of a store (splits, lengths, labels, batches) is then there, mapped from disk. `OnlineStep` computes
the states of a packed batch when it is its turn: aux states and state n, in the run's dtype, without gradients.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..data_recipes.chunk_file import ChunkMeta, Text
from ..data_recipes.collect import ORIGINS
from ..data_recipes.forward import plan_forward
from ..data_recipes.index import INDEX, build_index
from ..data_recipes.layout import (
    DocumentRow,
    TargetInfo,
    stage_digest,
)
from ..data_recipes.store import Document, FeatureStore, write_chunk
from ..errors import DraftsmithError
from ..files import read_json
from ..heads.adapter import TunedConfig
from ..heads.base import Batch, DraftHead, Needs, TargetParts
from ..heads.registry import head_family
from ..heads.target import Target
from ..manifest import PLAN, Stage
from ..progress import progress_bar, say
from .joint import JointStep, TunedTarget
from .step import TrainStep

Mode = Literal["offline", "online"]
TOKENS, VERSION = "tokens", 1
DISK_SHARE = 0.5
"""Of the free disk, what features may take where the mode is "auto"."""


# --- which mode -------------------------------------------------------------------------------------------------------


def choose_mode(
    wanted: Literal["auto", "offline", "online"], family: str, missing: float, free: float, begun: Mode | None = None
) -> tuple[Mode, str]:
    """Decide where the target's states come from: `train.mode`, resolved.

    Args:
        wanted: the setting.
        family: of the head.
        missing: bytes of the features that are not on the disk yet.
        free: bytes of the disk that nobody has taken.
        begun: what `mode_begun` says of the run's folder; with "auto" a run goes on as it began, whatever the disk.

    Returns:
        The mode, and a sentence that says which it is and why.

    Raises:
        DraftsmithError: online, with a head that is trained together with its target.
    """
    tuned = trains_target(family)
    if tuned and wanted == "online":
        raise DraftsmithError(_no_tuning(family))
    sizes = f"features of {missing / 1e9:,.1f} GB, {free / 1e9:,.1f} GB of disk free"
    if wanted != "auto":
        return wanted, f"mode {wanted}: as train.mode asks for"
    if tuned:
        return "offline", f"mode offline: {family} trains its target, too, and begins with stored states ({sizes})"
    if begun is not None:
        return begun, f"mode {begun}: as this run began"
    if missing <= DISK_SHARE * free:
        return "offline", f"mode offline: {sizes}; they fit into half of it"
    return "online", f"mode online: {sizes}; they don't fit into half of it, so the target runs in every training step"


def mode_begun(folder: Path) -> Mode | None:
    """The mode of the training whose stage lies in `folder`, finished or not; None where nothing began."""
    if not (folder / PLAN).exists():
        return None
    return "online" if read_json(folder / PLAN).get("mode") == "online" else "offline"


def trains_target(family: str) -> bool:
    """Whether heads of a family are trained together with their target."""
    return issubclass(head_family(family).config, TunedConfig)


def refuse_tuned(config: object) -> None:
    """Raise DraftsmithError for the config of a head that is trained together with its target."""
    if isinstance(config, TunedConfig):
        raise DraftsmithError(_no_tuning(config.family))


def _no_tuning(family: str) -> str:
    return (
        f"train.mode = online with the head family {family!r}: it is trained together with its target, which changes "
        "while its heads learn from the states that it had before: use train.mode=offline"
    )


# --- the documents ----------------------------------------------------------------------------------------------------


def collect_tokens(
    data: Path, info: TargetInfo, vocab_size: int, answers: Literal["target", "dataset"] = "target", rank: int = 0
) -> Stage:
    """Bring `data/tokens` up to date with the documents: what online training reads. Loads no target.

    Memory is that of one chunk. A killed call goes on with the first chunk that is missing.

    Args:
        data: the data folder, with finished answers, or finished prompts where the data set's own are taken.
        info: the target that the documents are for.
        vocab_size: rows of its output weight.
        answers: whose answers the documents have.
        rank: rank 0 does all the work; others only wait until it has begun.

    Returns:
        The stage; its folder is a store for `FeatureStore.open` with `layer_ids=()`, its record what `totals` returns.

    Raises:
        DraftsmithError: no documents, or one with a token that the target doesn't have.
    """
    origin = ORIGINS[answers]
    identity = {
        "documents": stage_digest(data / origin.folder, origin.command),
        "fingerprint": info.fingerprint,
        "vocab_size": vocab_size,
    }
    stage = Stage.open(data / TOKENS, TOKENS, VERSION, identity, rank)
    if rank > 0:
        return stage
    planned = origin.chunks(data)
    if not planned:
        raise DraftsmithError(f"{data / origin.folder} holds no documents: run 'draftsmith {origin.command}' first")
    meta = ChunkMeta(info.fingerprint, (), 0, vocab_size)  # states of no width
    with progress_bar("tokens", len(planned), "chunks") as bar:
        for path in planned:
            if not (written := stage.folder / f"{path.stem}.safetensors").exists():
                write_chunk(written, [_without_states(row, path, vocab_size) for row in origin.read(path)], meta)
            bar.advance(1)
    if stage.manifest is None or not _is_complete(stage.folder, [path.stem for path in planned]):
        build_index(stage.folder, [path.stem for path in planned], info.fingerprint, (), stage.digest)
        record = FeatureStore.open(stage.folder).totals()
        stage.finish(**record)
        say(f"tokens: {record['documents']:,} documents, {record['tokens']:,} tokens, {record['bytes'] / 1e9:.2f} GB")
    return stage


def _without_states(row: DocumentRow, path: Path, vocab_size: int) -> Document:
    text = Text.of(row)
    if len(row.tokens) and not 0 <= int(text.tokens.min()) <= int(text.tokens.max()) < vocab_size:
        unknown = next(t for t in row.tokens if not 0 <= t < vocab_size)
        raise DraftsmithError(
            f"document {row.id} of {path} has token id {unknown}, the target's are 0..{vocab_size - 1}: it was "
            "tokenised for another model"
        )
    nothing = torch.zeros(max(len(row.tokens) - 1, 0), 0)
    return Document(row.id, row.split, row.source, text.tokens, text.answer, nothing, nothing)


def _is_complete(folder: Path, names: list[str]) -> bool:
    """Whether the index is there and of these chunks; more appear when answers get a larger budget."""
    index = folder / INDEX
    return index.exists() and [chunk["name"] for chunk in read_json(index)["chunks"]] == names


def has_states(store: FeatureStore) -> bool:
    """Whether the target's states are stored, or have to be computed in training."""
    return store.meta.hidden_size > 0


# --- the step ---------------------------------------------------------------------------------------------------------


class OnlineStep(TrainStep):
    """A step that lets the frozen target compute what its batches lack.

    Args:
        head, parts, dtype: see TrainStep.
        target: the head's, in `dtype`, on the device of the batches or placed so that it computes there.

    Raises:
        DraftsmithError: another target than the head's, or one with a shorter context than the run's documents.
    """

    def __init__(self, head: DraftHead, parts: TargetParts, dtype: torch.dtype, target: Target) -> None:
        super().__init__(head, parts, dtype)
        target.check_head(head.config)
        if head.config.trained_length > target.max_positions:
            raise DraftsmithError(
                f"documents of up to {head.config.trained_length} tokens are longer than the {target.max_positions} of "
                f"the context of {target.id}{target.context_reason}: set train.max_length={target.max_positions}"
            )
        self.target = target  # no module: stays out of the state dict and of the engine's hands
        self.needs = Needs(tuple(head.config.layer_ids), last=True)

    @torch.no_grad()
    def seen(self, batch: Batch) -> Batch:
        """See TrainStep: with aux states and state n; zeros in each document's last row, as in stored batches."""
        width = self.target.hidden_size
        features = batch.features.new_zeros(len(batch.tokens), width * len(self.needs.layer_ids))
        last = batch.features.new_zeros(len(batch.tokens), width)
        for padded, within, rows in side_by_side(batch):
            aux, final = self.target.states(padded, self.needs)
            assert final is not None  # `needs` asks for it
            features[rows] = aux.flatten(0, 1)[within].to(features.dtype)
            last[rows] = final.flatten(0, 1)[within].to(last.dtype)
        return dataclasses.replace(batch, features=features, last=last)

    def forward(self, batch: Batch, denominators: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """See TrainStep."""
        return super().forward(self.seen(batch), denominators, scale)


def side_by_side(batch: Batch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Lay a packed batch's documents out for passes of right-padded lines, those of about equal length together.

    Nothing reads the states of a document's last token: it is left out. A line's padding is behind all of its tokens,
    so none of them sees it.

    Returns:
        By pass: tokens [D, L]; of its R rows, which place in the flattened lines [R] is which row of the batch [R].
    """
    lengths = torch.unique_consecutive(batch.documents, return_counts=True)[1]
    starts = (lengths.cumsum(0) - lengths).tolist()
    sizes = [n - 1 for n in lengths.tolist()]
    long = [i for i, n in enumerate(sizes) if n > 0]
    passes = []
    for group in plan_forward([sizes[i] for i in long], len(batch.tokens)):
        lines = [long[i] for i in group]
        longest = max(sizes[i] for i in lines)
        within = torch.cat([line * longest + torch.arange(sizes[i]) for line, i in enumerate(lines)])
        rows = torch.cat([starts[i] + torch.arange(sizes[i]) for i in lines])
        within, rows = within.to(batch.tokens.device), rows.to(batch.tokens.device)
        padded = batch.tokens.new_zeros(len(lines) * longest)
        padded[within] = batch.tokens[rows]
        passes.append((padded.view(len(lines), longest), within, rows))
    return passes


def make_step(
    head: DraftHead,
    parts: TargetParts,
    dtype: torch.dtype,
    store: FeatureStore,
    in_job: TunedTarget | Target | None,
) -> TrainStep:
    """The step of a run.

    Args:
        head, parts, dtype: see TrainStep.
        store: what is trained on.
        in_job: the target that runs in the training job: one that is trained, too, for a head whose config is a
            TunedConfig; a frozen one for a store without states; else None.

    Raises:
        DraftsmithError: see OnlineStep.
    """
    if isinstance(head.config, TunedConfig) != isinstance(in_job, TunedTarget):
        raise ValueError("`tuned` goes with a head that is trained together with its target, and with no other")
    if has_states(store) == isinstance(in_job, Target):
        raise ValueError("a frozen target in the job goes with a store without states, and with no other")
    if isinstance(in_job, TunedTarget):
        return JointStep(head, parts, dtype, in_job)
    return TrainStep(head, parts, dtype) if in_job is None else OnlineStep(head, parts, dtype, in_job)


__all__ = [
    "TOKENS",
    "OnlineStep",
    "choose_mode",
    "collect_tokens",
    "has_states",
    "make_step",
    "mode_begun",
    "refuse_tuned",
    "side_by_side",
    "trains_target",
]
