"""The stage `train`: from a feature store and a head's recipe to a trained head with its manifest."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..data_recipes.layout import TargetInfo
from ..data_recipes.store import FeatureStore
from ..data_recipes.vocabulary import choose_vocab, end_tokens
from ..errors import DraftsmithError
from ..heads.adapter import FOLDER, TunedConfig
from ..heads.base import DraftHead, TargetParts
from ..heads.config import HeadConfig, stored_layer_ids
from ..heads.loading import quantisation, text_config
from ..heads.registry import head_family
from ..heads.target import (
    Target,
    load_parts,
    load_tokenizer,
    template_sha256,
)
from ..heads.vocab import DraftVocab, coverage
from ..manifest import Stage
from ..progress import say
from .batches import held_out_documents
from .drift import LoadTarget, expected_seconds, measure_drift
from .fit import fit, run_dtype
from .joint import TunedTarget
from .online import refuse_tuned
from .placement import load_online_target, training_bytes
from .ranks import process_group
from .settings import HeadRecipe, HeadSettings, TrainSettings
from .step import set_checkpointing
from .warm import (
    WarmStart,
    check_copies,
    check_fit,
    load_start,
    overruled,
    read_start,
    require_same,
    start_values,
)

STAGE, VERSION = "train", 2


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the target lies, how it computes here, and whether it does so in every step of training."""

    location: str
    revision: str | None
    device: torch.device
    dtype: torch.dtype
    online: bool


def train_stage(
    recipe: HeadRecipe,
    *,
    location: str,
    revision: str | None,
    features: Path,
    folder: Path,
    online: bool = False,
    target_id: str | None = None,
    recorded_revision: str | None = None,
    head_init: str | None = None,
    budget_seconds: float | None = None,
    resume_command: str = "the same command again",
) -> dict[str, Any]:
    """Train the recipe's head for a target, or go on; a finished stage is skipped.

    Args:
        recipe: the head's settings; with its `train.minutes` they identify the run, so another time budget, whose
            learning-rate schedule differs, is another run.
        location, revision: the target.
        features: folder of its collected store; in online training the one that `online.collect_tokens` fills.
        folder: the stage's own folder.
        online: the target computes its states in every step; such a run is another than one on stored states.
        target_id: name of the target in the head's config; None takes `location`.
        recorded_revision: what the head's config says of the target's revision, where `from_pretrained` needs none.
        head_init: checkpoint that the head starts from (see `warm.read_start`); what it holds identifies the run.
        budget_seconds: what is really left of the run's time, from this call on; overrides `train.minutes`, identifies
            nothing.
        resume_command: see `fit`.

    Returns:
        The manifest's record: what `fit` returns, with `vocabulary_coverage`, and for a head that is trained together
        with its target `drift`, what `drift.measure_drift` returns, and `drift_seconds` (on rank 0), and with
        `head_init` where the head came from. Its "finished" is False after a signal, with everything saved.

    Raises:
        DraftsmithError: features of another target or other layers, online training of a head that is trained together
            with its target, or whatever `prepare_head`, `load_online_target` or `fit` raise.
    """
    minutes = recipe.train.minutes
    seconds = budget_seconds if budget_seconds is not None or minutes is None else minutes * 60
    until = None if seconds is None else time.monotonic() + seconds
    names = (target_id or location, recorded_revision or revision)
    start = None if head_init is None else read_start(head_init, folder, location, revision)
    config, vocab, share, store = prepare_head(recipe, location, revision, features, names, online, start)
    identity = {"features": store.digest, "head": config.to_dict(), "train": recipe.train.identity()}
    identity |= {} if start is None else {"head_init": start.sha256}
    if online:
        refuse_tuned(config)
        identity["mode"] = "online"
    if start is not None:
        require_same(start, folder, {"stage": STAGE, "version": VERSION, **identity})
    with process_group() as ranks:
        stage = Stage.open(folder, STAGE, VERSION, identity) if ranks.is_main else None
        done = ranks.from_main(stage.manifest if stage else None)
        if done is not None:
            return dict(done["record"])
        if ranks.is_main:
            of = f"{len(vocab):,} of {vocab.vocab_size:,} tokens"
            say(f"draft vocabulary: {of}, {share:.2%} of the answers' tokens")
            if start is not None:
                start.note(folder)
                if line := overruled(recipe.head, config):
                    say(line)
        place = _Place(location, revision, ranks.device, run_dtype(recipe.train, ranks.device), online)
        options = {"resume_command": resume_command, "load_target": _loader(place)}
        quantised = start is not None and quantisation(location, revision) is not None
        begin = functools.partial(new_head, config, vocab, seed=recipe.train.seed, start=start, quantised=quantised)
        result = _fitted(recipe.train, store, config, begin, folder, place, until, ranks.is_main, **options)
        result |= {"vocabulary_coverage": share} | ({} if start is None else {"head_init": start.record()})
        if isinstance(config, TunedConfig) and ranks.is_main and result["finished"]:
            result |= _drift(Path(result["checkpoint"]), store, recipe.train, place)
        if stage is not None and result["finished"]:
            stage.finish(**{k: v for k, v in result.items() if k != "seconds"}, train_seconds=result["seconds"])
        ranks.barrier()
        return result


def new_head(
    config: HeadConfig,
    vocab: DraftVocab,
    parts: TargetParts,
    seed: int,
    start: WarmStart | None = None,
    quantised: bool = False,
) -> tuple[DraftHead, TargetParts, str]:
    """An initialised head, the parts that training still needs, and a line that says how the head starts.

    Args:
        start: checkpoint whose tensors take the place of the family's own start; they fit, see `prepare_head`.
        quantised: whether the target's weights are, see `warm.check_copies`.

    Raises:
        DraftsmithError: the checkpoint holds other copies of the target's tensors than the target.
    """
    head = head_family(config.family).head(config, vocab)
    said = head.initialise(parts, torch.Generator().manual_seed(seed))
    if start is not None:
        check_copies(start, parts, quantised)
        said = load_start(head, start)
    return head, dataclasses.replace(parts, last_layer={}), said


def _fitted(
    settings: TrainSettings,
    store: FeatureStore,
    config: HeadConfig,
    begin: Callable[[TargetParts], tuple[DraftHead, TargetParts, str]],
    folder: Path,
    place: _Place,
    until: float | None,
    is_main: bool,
    **options: Any,
) -> dict[str, Any]:
    """Train a new head, with its target where both are trained; the memory of both is free again on return.

    Args:
        begin: makes the head, as `new_head` does.
        until: monotonic time at which the stage should be done; training leaves room for what comes after it.
        is_main: whether this process talks to the user.
        options: of `fit`.
    """
    target = (place.location, place.revision)
    head, parts, said = begin(load_parts(*target, torch.float32, computed=place.dtype))
    set_checkpointing(head, settings.checkpointing)  # what memory is needed depends on it
    if is_main:
        say(said)
    tuned, after = None, 0.0
    if isinstance(config, TunedConfig):
        before = time.monotonic()
        tuned = TunedTarget.load(*target, config, settings.seed, place.device, place.dtype)
        loading = time.monotonic() - before
        parts = tuned.parts()
        if until is not None:
            after = expected_seconds(tuned, loading, store, held_out_documents(store, settings), settings.max_length)
            if is_main:
                say(f"train: {after:.0f} s are kept for measuring how far the target has moved")
    elif place.online:
        frozen = load_online_target(
            *target, place.dtype, place.device, training_bytes(head, settings.token_budget, place.dtype)
        )
        parts = frozen.parts()
        options |= {"online": frozen, "load_target": lambda *, adapter: frozen}
    budget = None if until is None else until - time.monotonic() - after
    return fit(settings, store, parts, head, folder, tuned=tuned, budget_seconds=budget, **options)


def _drift(best: Path, store: FeatureStore, settings: TrainSettings, place: _Place) -> dict[str, Any]:
    """How far the best checkpoint's adapter moves the target."""
    before = time.monotonic()
    documents = held_out_documents(store, settings)
    found = measure_drift(_loader(place), best / FOLDER, store, documents, settings.max_length)
    return {"drift": found, "drift_seconds": round(time.monotonic() - before, 3)}


def _loader(place: _Place) -> LoadTarget:
    return functools.partial(
        Target.load, place.location, revision=place.revision, dtype=place.dtype, device=str(place.device)
    )


def prepare_head(
    recipe: HeadRecipe,
    location: str,
    revision: str | None,
    features: Path,
    names: tuple[str, str | None] | None = None,
    online: bool = False,
    start: WarmStart | None = None,
) -> tuple[HeadConfig, DraftVocab, float, FeatureStore]:
    """Open the store, choose the vocabulary and derive the head's config: seconds, nothing is trained.

    Args:
        names: id and revision of the target as the head's config records them; None takes location and revision.
        online: the store holds documents without states.
        start: checkpoint that the head starts from: what it computes, reads and proposes is taken from there.

    Returns:
        The config, the vocabulary, its coverage of the answers' tokens (0..1), and the store.

    Raises:
        DraftsmithError: a store of another target or other layers; a start for another target or head, or which the
            settings contradict.
    """
    wanted = _wanted(recipe.head, location, revision, names, start)
    store = _open_store(features, wanted, online, start)
    if wanted.vocab is None:
        size = recipe.head.vocab_size_for(store.vocab_size)
        vocab, share = choose_vocab(store, size, end_tokens(wanted.info, wanted.tokenizer))
    else:
        vocab, share = wanted.vocab, float(coverage(store.label_counts("train").sum(0), wanted.vocab))
    config = _build_config(recipe.head, wanted, vocab, min(recipe.train.max_length, max(store.lengths)))
    if start is not None:
        check_fit(start, config, vocab)
    return config, vocab, share, store


def check_start(
    recipe: HeadRecipe,
    source: str,
    folder: Path,
    location: str,
    revision: str | None,
    names: tuple[str, str | None] | None = None,
) -> None:
    """Refuse a start that fits neither settings nor target, before anything is computed for it.

    Args:
        source: the checkpoint; folder: of the training; location, revision: the target; names: see `prepare_head`.

    Raises:
        DraftsmithError: whatever `prepare_head` and `new_head` would refuse of it.
    """
    start = read_start(source, folder, location, revision)
    require_same(start, folder, {"train": recipe.train.identity()})
    wanted = _wanted(recipe.head, location, revision, names, start)
    if start.gone:
        return
    tokens = int(wanted.target.vocab_size)
    vocab = wanted.vocab or DraftVocab(torch.arange(recipe.head.vocab_size_for(tokens)), tokens)
    check_fit(start, _build_config(recipe.head, wanted, vocab, recipe.train.max_length), vocab)
    if start.found.copies:
        check_copies(start, load_parts(location, revision, torch.float32), quantisation(location, revision) is not None)


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """What a head's config takes from its target, its settings and its start.

    Attributes:
        target: the transformers text config; info, tokenizer: of the target.
        identity: values of the config that name the target; values: other ones, layer ids among them.
        vocab: the start's; None = to be counted.
        reads: whether the start names its layer ids.
    """

    target: Any
    info: TargetInfo
    tokenizer: Any
    identity: dict[str, Any]
    values: dict[str, Any]
    vocab: DraftVocab | None = None
    reads: bool = False


def _wanted(
    head: HeadSettings,
    location: str,
    revision: str | None,
    names: tuple[str, str | None] | None,
    start: WarmStart | None,
) -> _Wanted:
    target, tokenizer = text_config(location, revision), load_tokenizer(location, revision)
    info = TargetInfo.read(location, revision)
    called, recorded_revision = names or (location, revision)
    identity = {
        "target_id": called,
        "target_revision": recorded_revision,
        "target_fingerprint": info.fingerprint,
        "chat_template_sha256": template_sha256(tokenizer),
    }
    if start is None:
        ids = head.layer_ids or stored_layer_ids(target.num_hidden_layers, head.family)
        values = {**head.options, "layer_ids": ids}
        return _Wanted(target, info, tokenizer, identity, values)
    shapes = {name: getattr(target, name) for name in ("hidden_size", "vocab_size", "num_hidden_layers")}
    values, vocab = start_values(start, head, {**identity, **shapes})
    return _Wanted(target, info, tokenizer, identity, values, vocab, bool(start.found.options.get("layer_ids")))


def _open_store(features: Path, wanted: _Wanted, online: bool, start: WarmStart | None) -> FeatureStore:
    """The store, which must hold the states that the head reads."""
    layer_ids, fingerprint = wanted.values["layer_ids"], wanted.info.fingerprint
    if online or start is None or not wanted.reads:
        return FeatureStore.open(features, fingerprint=fingerprint, layer_ids=() if online else layer_ids)
    store = FeatureStore.open(features, fingerprint=fingerprint)
    if list(store.layer_ids) != layer_ids:
        raise DraftsmithError(
            f"the head at {start.source} reads the states {layer_ids}, and {features} holds {list(store.layer_ids)}: "
            f"collect them with head.layer_ids='{layer_ids}', or with this HEAD_INIT (--head-init)"
        )
    return store


def _build_config(head: HeadSettings, wanted: _Wanted, vocab: DraftVocab, trained_length: int) -> HeadConfig:
    """Call the family's `<family>_config`, which stands beside its network."""
    module = importlib.import_module(head_family(head.family).head.__module__)
    build = getattr(module, f"{head.family}_config", None)
    if build is None:
        raise DraftsmithError(f"head family {head.family!r} has no function {head.family}_config in {module.__name__}")
    learning = {"steps": head.steps, "step_decay": head.step_decay, "trained_length": trained_length}
    config: HeadConfig = build(wanted.target, vocab, **wanted.values, **learning, **wanted.identity)
    return config


__all__ = ["check_start", "new_head", "prepare_head", "train_stage"]
