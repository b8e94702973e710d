"""The stage `train`: from a feature store and a head's recipe to a trained head with its manifest."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import time
from pathlib import Path
from typing import Any

import torch

from ..data_recipes.layout import TargetInfo
from ..data_recipes.store import FeatureStore
from ..data_recipes.vocabulary import choose_vocab, end_tokens
from ..errors import DraftsmithError
from ..heads.adapter import FOLDER, TunedConfig
from ..heads.base import DraftHead, TargetParts
from ..heads.config import HeadConfig, default_layer_ids
from ..heads.registry import head_family
from ..heads.target import (
    Target,
    explain_loading,
    load_parts,
    load_tokenizer,
    template_sha256,
)
from ..heads.vocab import DraftVocab
from ..manifest import Stage
from ..progress import say
from .batches import held_out_documents
from .drift import LoadTarget, expected_seconds, measure_drift
from .fit import fit, run_dtype
from .joint import TunedTarget
from .online import refuse_tuned
from .placement import load_online_target, training_bytes
from .ranks import process_group
from .settings import HeadRecipe, TrainSettings
from .step import set_checkpointing

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
        budget_seconds: what is really left of the run's time, from this call on; overrides `train.minutes`, identifies
            nothing.
        resume_command: see `fit`.

    Returns:
        The manifest's record: what `fit` returns, with `vocabulary_coverage`, and for a head that is trained together
        with its target `drift`, what `drift.measure_drift` returns, and `drift_seconds` (on rank 0). Its "finished" is
        False after a signal, with everything saved.

    Raises:
        DraftsmithError: features of another target or other layers, online training of a head that is trained together
            with its target, or whatever `load_online_target` or `fit` raise.
    """
    minutes = recipe.train.minutes
    seconds = budget_seconds if budget_seconds is not None or minutes is None else minutes * 60
    until = None if seconds is None else time.monotonic() + seconds
    names = (target_id or location, recorded_revision or revision)
    config, vocab, coverage, store = prepare_head(recipe, location, revision, features, names, online)
    identity = {"features": store.digest, "head": config.to_dict(), "train": recipe.train.identity()}
    if online:
        refuse_tuned(config)
        identity["mode"] = "online"
    with process_group() as ranks:
        stage = Stage.open(folder, STAGE, VERSION, identity) if ranks.is_main else None
        done = ranks.from_main(stage.manifest if stage else None)
        if done is not None:
            return dict(done["record"])
        if ranks.is_main:
            share = f"{coverage:.2%} of the answers' tokens"
            say(f"draft vocabulary: {len(vocab):,} of {vocab.vocab_size:,} tokens, {share}")
        place = _Place(location, revision, ranks.device, run_dtype(recipe.train, ranks.device), online)
        options = {"resume_command": resume_command, "load_target": _loader(place)}
        result = _fitted(recipe.train, store, config, vocab, folder, place, until, ranks.is_main, **options)
        result["vocabulary_coverage"] = coverage
        if isinstance(config, TunedConfig) and ranks.is_main and result["finished"]:
            result |= _drift(Path(result["checkpoint"]), store, recipe.train, place)
        if stage is not None and result["finished"]:
            stage.finish(**{k: v for k, v in result.items() if k != "seconds"}, train_seconds=result["seconds"])
        ranks.barrier()
        return result


def _new_head(
    config: HeadConfig, vocab: DraftVocab, parts: TargetParts, seed: int
) -> tuple[DraftHead, TargetParts, str]:
    """An initialised head, the parts that training still needs, and a line that says how the head starts."""
    head = head_family(config.family).head(config, vocab)
    start = head.initialise(parts, torch.Generator().manual_seed(seed))
    return head, dataclasses.replace(parts, last_layer={}), start


def _fitted(
    settings: TrainSettings,
    store: FeatureStore,
    config: HeadConfig,
    vocab: DraftVocab,
    folder: Path,
    place: _Place,
    until: float | None,
    is_main: bool,
    **options: Any,
) -> dict[str, Any]:
    """Train a new head, with its target where both are trained; the memory of both is free again on return.

    Args:
        until: monotonic time at which the stage should be done; training leaves room for what comes after it.
        is_main: whether this process talks to the user.
        options: of `fit`.
    """
    target = (place.location, place.revision)
    head, parts, start = _new_head(config, vocab, load_parts(*target, torch.float32), settings.seed)
    set_checkpointing(head, settings.checkpointing)  # what memory is needed depends on it
    if is_main:
        say(start)
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
) -> tuple[HeadConfig, DraftVocab, float, FeatureStore]:
    """Open the store, choose the vocabulary and derive the head's config: seconds, nothing is trained.

    Args:
        names: id and revision of the target as the head's config records them; None takes location and revision.
        online: the store holds documents without states.

    Returns:
        The config, the vocabulary, its coverage of the answers' tokens (0..1), and the store.
    """
    from transformers import AutoConfig

    with explain_loading(location):
        target = AutoConfig.from_pretrained(location, revision=revision).get_text_config()
    tokenizer = load_tokenizer(location, revision)
    info = TargetInfo.read(location, revision)
    layer_ids = recipe.head.layer_ids or default_layer_ids(target.num_hidden_layers)
    store = FeatureStore.open(features, fingerprint=info.fingerprint, layer_ids=() if online else layer_ids)
    size = recipe.head.vocab_size_for(store.vocab_size)
    vocab, coverage = choose_vocab(store, size, end_tokens(info, tokenizer))
    config = _build_config(
        recipe.head.family,
        target,
        vocab,
        layer_ids=list(layer_ids),
        steps=recipe.head.steps,
        step_decay=recipe.head.step_decay,
        **recipe.head.options,
        target_id=(names or (location, revision))[0],
        target_revision=(names or (location, revision))[1],
        target_fingerprint=info.fingerprint,
        chat_template_sha256=template_sha256(tokenizer),
        trained_length=min(recipe.train.max_length, max(store.lengths)),
    )
    return config, vocab, coverage, store


def _build_config(family: str, target: Any, vocab: DraftVocab, **identity: Any) -> HeadConfig:
    """Call the family's `<family>_config`, which stands beside its network."""
    module = importlib.import_module(head_family(family).head.__module__)
    build = getattr(module, f"{family}_config", None)
    if build is None:
        raise DraftsmithError(f"head family {family!r} has no function {family}_config in {module.__name__}")
    config: HeadConfig = build(target, vocab, **identity)
    return config


__all__ = ["prepare_head", "train_stage"]
