"""Command `plan`: what a run needs before it starts (tokens, disk, memory, hours), and the speed-up it can hope for.

Nothing is loaded and no network is asked: shapes come from `configs/models/` or a folder's config.json, devices from
`configs/hardware.yaml`, everything else is arithmetic (`heads/costs.py`, `data_recipes/estimate.py`,
`train/estimate.py`, `train/planned.py`, `eval/speedup.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .data_recipes import estimate as data
from .data_recipes.estimate import TOPK, Corpus
from .data_recipes.index import INDEX
from .data_recipes.layout import ANSWERS, FEATURES
from .errors import DraftsmithError
from .eval import speedup
from .eval.speedup import Hardware
from .files import read_json, sha256_file
from .heads.config import HeadConfig, stored_layer_ids
from .heads.costs import head_costs, planned_head
from .heads.registry import head_family
from .heads.resolve import model_names
from .heads.shapes import load_shapes
from .heads.vocab import DraftVocab
from .manifest import MANIFEST
from .run_config import (
    DEFAULT_HEAD,
    DEFAULT_MODEL,
    CollectSection,
    PrepareSection,
    RegenerateSection,
    RunConfig,
    resolve,
)
from .train.planned import Planned, StageSizes, hours, memory_by_stage, regenerate_seconds, train_seconds
from .train.settings import HeadRecipe, TrainSettings, load_head_recipe

MEANS = {"builtin": (8000, 163, 0.65)}
"""Conversations, tokens of each and share of answers by recipe, where it is known: the project's own prompts with the
default target's answers, measured on its first 128."""
OTHERS = (80_000, data.TOKENS, data.ANSWER_SHARE)
"""What the recipe sharegpt-ultrachat asks for, in published conversations."""
LONGEST = 3
"""Of the mean, assumed."""
ALPHAS, DEPTHS = (0.5, 0.6, 0.7, 0.8, 0.9), (1, 2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class PlanSettings:
    """What is planned; None takes what stands behind the colon.

    Attributes:
        model: short name, or folder with a config.json.
        head: kind of head.
        conversations, tokens, answer_share: how many, tokens of each, share that is answers: `MEANS` or `OTHERS`.
        data: a data folder (runs/<model>/data/<recipe>) whose own counts are taken instead.
        epochs: of training: the head's own.
        hardware: a name from configs/hardware.yaml, or "here": the GPU that is there, else this CPU.
        gpus, nodes: devices of a machine, machines.
        disk_budget, gpu_memory: bytes like "500GB" or "75GiB": not checked; the device's own.
        tokens_per_s: measured decoding rate of all machines together: a roofline.
        batch, context: sequences and tokens of each while serving.
        alpha: acceptance of a draft. r: seconds of a target pass / of a draft step: by roofline.
        topk: tokens of the teacher that are stored where not all of its state is.
    """

    model: str = DEFAULT_MODEL
    head: str = DEFAULT_HEAD
    conversations: int | None = None
    tokens: int | None = None
    answer_share: float | None = None
    data: Path | None = None
    epochs: int | None = None
    hardware: str | None = None
    gpus: int = 1
    nodes: int = 1
    disk_budget: str | None = None
    gpu_memory: str | None = None
    tokens_per_s: float | None = None
    batch: int = 8
    context: int = 2048
    alpha: float = 0.7
    r: float | None = None
    topk: int = TOPK


def plan(
    settings: PlanSettings, config: RunConfig | None = None, computed: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Compute a plan; plain JSON values.

    Args:
        config: of the run that is planned; None takes the defaults of model and head.
        computed: values of the head's config that come from a checkpoint.

    Raises:
        DraftsmithError: unknown names, bytes that can't be read, a data folder without data.
    """
    for name in ("tokens_per_s", "r", "answer_share"):
        if (value := getattr(settings, name)) is not None and value <= 0:
            raise DraftsmithError(f"{name} = {value} must be more than 0")
    p = _gather(settings, config, computed or {})
    decoding = _decoding(p, settings)
    disk_budget = None if settings.disk_budget is None else parse_bytes(settings.disk_budget, "disk_budget")
    return {
        "model": {"name": p.shapes.name, "params": p.shapes.params, "devices_a_copy": p.copy_devices},
        "head": {"name": settings.head, "params": p.costs.params, "steps": p.costs.steps,
                 "draft_vocab": p.costs.draft_vocab},
        "hardware": {"name": p.hardware.name, "devices": p.devices, "memory": p.memory, "bf16": p.hardware.bf16,
                     "bandwidth": p.hardware.bandwidth},
        "data": _data(p),
        "disk": _disk(p, disk_budget, settings.topk),
        "memory": memory_by_stage(p),
        "hours": hours(p, settings.tokens_per_s),
        "decoding": decoding,
        "serving": _serving(p, settings, decoding["expected"]["best_depth"]),
    }  # fmt: skip


def parse_bytes(text: str, what: str) -> float:
    """Read bytes like 500GB or 75GiB; raises DraftsmithError naming `what`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGTP]?)(i?)B?\s*", text)
    if not found:
        raise DraftsmithError(f"{what} = {text!r}: write bytes like 500GB, 2TB or 75GiB")
    base = 1024 if found[3] else 1000
    count = float(found[1]) * base ** " KMGTP".index(found[2].upper() or " ")
    if not count:
        raise DraftsmithError(f"{what} = {text!r} must be more than 0")
    return count


def _gather(settings: PlanSettings, config: RunConfig | None, computed: Mapping[str, Any]) -> Planned:
    shapes = load_shapes(settings.model)
    prepare, regenerate, collect, name = PrepareSection(), RegenerateSection(), CollectSection(), None
    if config is None and settings.model in model_names():  # its file may suggest other settings
        config = resolve("train", {"model": settings.model, "head": settings.head}, None, [])
    if config is not None:
        recipe = HeadRecipe(head=config.head_options, train=config.train)
        prepare, regenerate, collect, name = config.prepare, config.regenerate, config.collect, config.recipe
    else:
        recipe = load_head_recipe(settings.head)
    layer_ids = recipe.head.layer_ids or stored_layer_ids(shapes.layers, recipe.head.family)
    if settings.epochs is not None:
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"epochs": settings.epochs})})
    head = planned_head(
        shapes,
        recipe.head.family,
        layer_ids=layer_ids,
        steps=recipe.head.steps,
        draft_vocab_size=recipe.head.vocab_size_for(shapes.vocab),
        options={**recipe.head.options, **{k: v for k, v in computed.items() if k != "steps"}},
    )
    hardware = speedup.load_hardware(settings.hardware)
    memory = hardware.memory if settings.gpu_memory is None else parse_bytes(settings.gpu_memory, "gpu_memory")
    devices = (settings.gpus if hardware.is_gpu else 1) * settings.nodes  # processes of a CPU share it
    corpus = expected_corpus(settings, name, regenerate.max_new_tokens, prepare.max_tokens)
    length = min(prepare.max_prompt_tokens + regenerate.max_new_tokens, corpus.longest)
    stages = StageSizes(prepare.chunk, prepare.val_every, regenerate.slots, length, collect.token_budget)
    costs, aux = head_costs(head), len(layer_ids)
    return Planned(shapes, head, costs, aux, recipe.train, stages, corpus, hardware, devices, memory)


def expected_corpus(settings: PlanSettings, recipe: str | None, new_tokens: int, most: int) -> Corpus:
    """What the user says, else what is known of the recipe.

    Args:
        new_tokens: of an answer; most: tokens of the longest document that is kept.
    """
    if settings.data is not None:
        return data.counted_corpus(settings.data, new_tokens, LONGEST, most)
    given = (settings.conversations, settings.tokens, settings.answer_share)
    means = MEANS.get(recipe or "", OTHERS)
    count, tokens, share = (known if value is None else value for value, known in zip(given, means, strict=True))
    return data.assumed_corpus(int(count), int(tokens), share, min(most, LONGEST * int(tokens)))


def _data(p: Planned) -> dict[str, Any]:
    c = p.corpus
    return {
        "documents": c.documents,
        "tokens": c.tokens,
        "answer_tokens": c.answer_tokens,
        "rows": c.rows,
        "supervised": c.supervised,
        "counted": c.counted,
    }


def _disk(p: Planned, budget: float | None, topk: int) -> dict[str, Any]:
    found = data.disk(p.corpus, p.shapes, p.aux, topk)
    if p.head.config.last_state != "none":  # it reads the last state itself: the likeliest tokens can't stand for it
        found = {name: size for name, size in found.items() if "topk" not in name}
    fitting = [name for name, size in found.items() if budget is None or size["all"] <= budget]
    return {"storages": found, "budget": budget, "choice": fitting[0]}  # from the most exact to nothing stored


def _decoding(p: Planned, settings: PlanSettings) -> dict[str, Any]:
    """What bounds a decoding step, and the speed-up that follows from α, K and r."""
    at = {"batch": settings.batch, "context": settings.context}
    one = speedup.target_pass(p.shapes, p.hardware, **at)
    draft = speedup.roofline(
        p.costs.step, p.costs.kv * p.size, 2.0 * p.costs.step, p.hardware, **at
    )  # its keys are one layer's: their arithmetic is left out
    r = settings.r if settings.r is not None else one.seconds / draft.seconds
    return {
        **at,
        "bytes_a_token": one.bytes_read / settings.batch,
        "flops_a_token": one.flops / settings.batch,
        "intensity": one.intensity,
        "ridge": one.ridge,
        "bound": one.bound,
        "step_ms": 1e3 * one.seconds,
        "free_rows": one.free_rows,
        "r": r,
        "r_given": settings.r is not None,
        "depths": list(DEPTHS),
        "table": speedup.speedup_table([*ALPHAS, *({settings.alpha} - {*ALPHAS})], DEPTHS, r),
        "alpha": settings.alpha,
        "expected": speedup.speedup_table([settings.alpha], DEPTHS, r)[0],
    }


def _serving(p: Planned, settings: PlanSettings, depth: int) -> dict[str, Any] | None:
    """None on a CPU."""
    if not p.hardware.is_gpu:
        return None
    return speedup.serving(
        p.shapes, p.costs.params, p.costs.kv, p.memory,
        devices=p.copy_devices, batch=settings.batch, context=settings.context, tree_rows=depth + 1,
    )  # fmt: skip


def check_against(run: Path, model: str | None = None, hardware: str | None = None) -> list[dict[str, Any]]:
    """Compare predictions with what a finished run in one process on this machine measured.

    Args:
        run: folder of the head; its features are looked for beside it.
        model: of the run; None takes the name of the folder above.
        hardware: what it ran on, as in `PlanSettings`.

    Returns:
        Lines of `what`, `predicted`, `real`, `ratio`, `bound` and `within`, for disk (2 %), memory (20 %) and time
        (30 %); answers that came through servers or with the data are left out, and a GPU's memory.

    Raises:
        DraftsmithError: the run is not finished, stored no features, or they aren't there any more.
    """
    trained = _manifest(run / "train")
    identity, record = trained["identity"], trained["record"]
    if identity.get("mode") == "online":
        raise DraftsmithError(f"{run} was trained online: it stored no features; only an offline run's plan is checked")
    folder = _features_of(run, identity["features"])
    collected = _manifest(folder)
    config = head_family(identity["head"]["family"]).config.from_dict(identity["head"])
    settings = TrainSettings.model_validate(identity["train"])
    answers = folder.parent / ANSWERS
    answered: dict[str, Any] = _manifest(answers) if (answers / MANIFEST).exists() else {"identity": {"slots": None}}
    slots = answered["identity"]["slots"]
    p = _planned_of(model or run.parent.name, config, collected, settings, speedup.load_hardware(hardware), slots or 1)
    memory = memory_by_stage(p)
    form = collected["identity"]
    topk = TOPK if form["teacher"] == "hidden" else int(form["teacher"].removeprefix("top "))
    stored = data.disk(p.corpus, p.shapes, p.aux, topk)[data.storage(form["dtype"], form["teacher"])]
    validations = (
        math.ceil(record["step"] / settings.validation_interval(record["step"])) + 1
    )  # and one after the pilot
    validated = record["val_documents"] * p.corpus.tokens / p.corpus.documents
    pilot = settings.minutes is not None
    seconds = train_seconds(p, record["tokens"], record["step"], validations, validated, pilot)
    lines = [
        _line("disk: features", stored["all"], collected["record"]["bytes"], 0.02),
        _line("memory: train", memory["train"]["zero0"], record["peak_rss_bytes"], 0.2),
        _line("time: train", seconds, record["train_seconds"], 0.3),
    ]
    if slots is not None:
        real = answered["record"]
        lines.append(_line("memory: regenerate", memory["regenerate"]["all"], real["peak_rss_bytes"], 0.2))
        lines.append(_line("time: regenerate", regenerate_seconds(p, slots), real["decode_seconds"], 0.3))
    if p.hardware.is_gpu:  # manifests record the host's memory, plans the device's
        lines = [line for line in lines if not line["what"].startswith("memory")]
    return lines


def _planned_of(
    model: str, config: HeadConfig, collected: dict[str, Any], settings: TrainSettings, device: Hardware, slots: int
) -> Planned:
    """What a run's plan would have been computed from, its counts known."""
    with torch.device("meta"):
        vocab = DraftVocab(torch.arange(config.draft_vocab_size, device="cpu"), config.vocab_size)
        head = head_family(config.family).head(config, vocab)
    found = collected["record"]
    longest = config.trained_length
    corpus = Corpus(found["documents"], found["tokens"], found["answer_tokens"], longest, "its manifest")
    stages, aux = StageSizes(slots=slots, length=longest), len(collected["identity"]["layer_ids"])
    return Planned(load_shapes(model), head, head_costs(head), aux, settings, stages, corpus, device, 1, device.memory)


def _line(what: str, predicted: float | None, real: float, bound: float) -> dict[str, Any]:
    ratio = math.nan if predicted is None else predicted / real
    return {
        "what": what,
        "predicted": predicted,
        "real": real,
        "ratio": ratio,
        "bound": bound,
        "within": abs(ratio - 1) <= bound,
    }


def _manifest(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST).exists():
        raise DraftsmithError(f"{folder} is not finished: run its stage first, then check the plan against it")
    found: dict[str, Any] = read_json(folder / MANIFEST)
    return found


def _features_of(run: Path, digest: str) -> Path:
    """The features beside a run that it was trained on."""
    for folder in sorted(run.parent.glob(f"data/*/{FEATURES}")):
        if (folder / INDEX).exists() and sha256_file(folder / INDEX) == digest:
            return folder
    raise DraftsmithError(
        f"{run.parent / 'data'} holds no features with digest {digest[:8]}: {run} was trained on others, or on fewer"
    )
