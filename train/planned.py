"""A run on paper: memory of every stage and their hours, from shapes, settings and a device's figures.

Rates are rooflines times the efficiencies below, unless a measured one is given.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ..data_recipes import estimate as data
from ..data_recipes.estimate import Corpus
from ..eval import speedup
from ..eval.speedup import Hardware
from ..heads.base import DraftHead
from ..heads.costs import HeadCosts
from ..heads.shapes import TargetShapes
from . import estimate as training
from .estimate import Rows
from .schedule import decode_interval
from .settings import DECODE_SLOTS, DEFAULT_EPOCHS, TrainSettings

_ARENA = 512
"""Cache rows come in blocks of so many."""
_TAU = 1.4
"""Tokens a step while held-out prompts are decoded, assumed: a head that is trained for minutes has little more."""
_LOAD_RATE = 150e6
"""Bytes a second at which a target is read, packed and probed; measured on two cores."""
_SAVED_BYTES, _SAVE_RATE = 12, 200e6
"""Of a parameter in a checkpoint, at most, and bytes a second: what `train/schedule.py` reckons with, too."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of a device's peaks that the passes reach, and what the host adds.

    Attributes:
        decode: of arithmetic or bandwidth, whichever bounds a decoding step; forward: of arithmetic in long passes;
            train: in a training step; update: of fp32 arithmetic in the optimizer.
        launch: seconds that the host needs to start one layer of the unmodified model.
        process: bytes of libraries, or of a CUDA context, in every process.
    """

    decode: float
    forward: float
    train: float
    update: float
    launch: float
    process: float


# The CPU's were measured on two cores with AVX2 (SmolLM2-135M, 64 slots), with libraries but without a model in memory;
# the GPU's are assumed: nothing here has been measured on one yet.
EFFICIENCY = {
    False: Efficiency(decode=0.45, forward=0.6, train=0.6, update=0.6, launch=0.0, process=0.28e9),
    True: Efficiency(decode=0.6, forward=0.5, train=0.35, update=0.6, launch=0.5e-3, process=0.5e9),
}


@dataclass(frozen=True)
class StageSizes:
    """Settings of the data stages that decide time or memory.

    Attributes:
        chunk: conversations of a chunk; val_every: of so many one is held out.
        slots: sequences decoded at a time; length: tokens of the longest prompt with its answer.
        token_budget: rows of a collecting pass.
    """

    chunk: int = 128
    val_every: int = 25
    slots: int = 64
    length: int = 1280
    token_budget: int = 4096


@dataclass(frozen=True)
class Planned:
    """Everything that a plan computes from.

    Attributes:
        shapes: of the target; head: without memory; costs: of the head; aux: stored aux layers.
        train, stages: settings. corpus: what is trained on.
        hardware, devices, memory: kind, number, and bytes of each.
    """

    shapes: TargetShapes
    head: DraftHead
    costs: HeadCosts
    aux: int
    train: TrainSettings
    stages: StageSizes
    corpus: Corpus
    hardware: Hardware
    devices: int
    memory: float

    @property
    def size(self) -> int:
        """Bytes of a number in computing."""
        return speedup.weight_bytes(self.hardware)

    @property
    def efficiency(self) -> Efficiency:
        """Of this kind of device."""
        return EFFICIENCY[self.hardware.is_gpu]

    @property
    def copy_devices(self) -> int:
        """Devices that a copy of the target needs, a fifth left for caches; a power of two, as engines take them."""
        needed = 1.25 * data.target_bytes(self.shapes, self.size, packed=not self.hardware.is_gpu) / self.memory
        return 1 << max(0, math.ceil(math.log2(needed)))

    @property
    def rows(self) -> Rows:
        """Of a training batch: the budget, or one document where that is longer."""
        total = max(self.train.token_budget, min(self.train.max_length, self.corpus.longest))
        return Rows(total, round(self.corpus.supervised * total))


def memory_by_stage(p: Planned) -> dict[str, Any]:
    """Bytes of a device by stage; on a CPU everything is its one memory."""
    size, on_host = p.size, not p.hardware.is_gpu
    base = {"process": p.efficiency.process, "target": data.target_bytes(p.shapes, size, packed=on_host)}
    mean = p.corpus.tokens / p.corpus.documents
    answers = data.regenerate_memory(
        p.shapes, p.aux, size, slots=p.stages.slots, length=-(-p.stages.length // _ARENA) * _ARENA,
        chunk_tokens=round(p.stages.chunk * mean),
    )  # fmt: skip
    states = data.collect_memory(p.shapes, p.aux, size, p.stages.token_budget)
    host = {"regenerate": answers.pop("states") + answers.pop("chunk"), "collect": states.pop("states")}
    found: dict[str, Any] = {"regenerate": {**base, **answers}, "collect": {**base, **states}}
    if on_host:
        for stage, more in host.items():
            found[stage]["states"] = more
    for stage, parts in found.items():
        found[stage] = {"bytes": parts, "all": sum(parts.values()), "host": 0.0 if on_host else host[stage]}
        found[stage]["fits"] = found[stage]["all"] <= p.memory
    return {**found, "train": _train_memory(p)}


def _train_memory(p: Planned) -> dict[str, Any]:
    rank, tuned = getattr(p.head.config, "lora_rank", None), 0.0
    if rank is not None:
        tuned = training.target_training_bytes(p.shapes, p.rows.total, p.size, rank)
    memory = training.train_memory(p.head, p.shapes, p.rows, p.size, tuned)
    base, host = p.efficiency.process, {}
    if not p.hardware.is_gpu:
        # mapped features count as its memory once they were read, though the system takes such pages back in need
        host = {"mapped": data.disk(p.corpus, p.shapes, p.aux)["bf16"]["all"]}
        base += min(host["mapped"], p.memory / 2)
    alone = memory.total(0, p.devices)
    validation, kv = _validation_memory(p)
    memory = dataclasses.replace(memory, decoding=kv)
    totals = {f"zero{s}": base + validation + memory.total(s, p.devices) for s in training.ZERO_STAGES}
    frozen = 0.0 if tuned else max(validation, p.size * p.shapes.params)  # the same copy decodes
    online = memory.total(0, p.devices) + base + frozen
    return {
        "bytes": {"process": p.efficiency.process, **host, "validation_target": validation, **vars(memory)},
        **totals,
        "online": online,
        "without_decoding": base + alone,
        "fits": totals["zero0"] <= p.memory,
        "fits_online": online <= p.memory,
    }


def _validation_memory(p: Planned) -> tuple[float, float]:
    """Bytes of the target that decodes held-out prompts in the middle of training, and of its K/V.

    It stays loaded; of a target that is trained, too, another copy is loaded each time.
    """
    if not p.train.decode_documents:
        return 0.0, 0.0
    slots = min(DECODE_SLOTS, p.train.decode_documents)
    kv = slots * min(p.corpus.longest, p.train.max_length) * p.shapes.kv_bytes(p.size)
    return data.target_bytes(p.shapes, p.size, packed=not p.hardware.is_gpu), float(kv)


def train_seconds(
    p: Planned, tokens: float, steps: int, validations: float, validated: float, pilot: bool = False
) -> float:
    """Seconds of training on one device's share.

    Args:
        tokens: of all batches; steps: of the optimizer; validations: how often, each with a checkpoint; validated:
            held-out tokens of each; pilot: the run was limited by time, and measured what decoding costs beforehand.
    """
    h, e, share = p.hardware, p.efficiency, p.corpus.supervised
    keys = min(p.train.max_length, p.corpus.tokens / p.corpus.documents) / 2
    whole = p.costs.train_flops(share, keys)
    overlap = 2.0 * p.costs.hidden * share * p.costs.steps * (p.shapes.vocab + p.costs.draft_vocab)
    rows = (tokens * whole + validations * validated * (whole / 3 * 2 + overlap)) / (h.bf16 * e.train)
    saving = validations * _SAVED_BYTES * p.costs.params / _SAVE_RATE
    decoding = decoded_seconds(p, steps, pilot)
    return rows + steps * training.update_flops(p.head) / (h.fp32 * e.update) + saving + decoding


def decoded_seconds(p: Planned, steps: int, pilot: bool = False) -> float:
    """Seconds of decoding held-out prompts in a training of so many steps, the loading of the target among them."""
    t, e, mean = p.train, p.efficiency, p.corpus.tokens / p.corpus.documents
    if not t.decode_documents:
        return 0.0
    asked = round(mean * (1 - p.corpus.answer_tokens / p.corpus.tokens))  # tokens of a prompt
    every = decode_interval(t, steps, t.decode_documents, t.decode_documents * asked, t.validate_depth)
    times = (1 if every is None else math.ceil(steps / every)) + pilot
    slots = min(DECODE_SLOTS, t.decode_documents)
    at = {"batch": slots, "context": asked + t.decode_tokens // 2, "rows": t.validate_depth + 1}
    one = max(
        speedup.target_pass(p.shapes, p.hardware, **at).seconds / e.decode / p.copy_devices,
        e.launch * p.shapes.layers,
    )
    passes = math.ceil(t.decode_documents / DECODE_SLOTS) * t.decode_tokens / _TAU
    return times * passes * one + data.target_bytes(p.shapes, p.size, packed=False) / _LOAD_RATE


def decode_rate(p: Planned, devices: int, slots: int, context: float) -> float:
    """Tokens a second of one copy of the target, spread over `devices`, with all slots taken."""
    step = speedup.target_pass(p.shapes, p.hardware, batch=slots, context=round(context))
    host = p.efficiency.launch * p.shapes.layers if devices == 1 else 0.0  # several devices: a serving engine
    return slots / max(step.seconds / p.efficiency.decode / devices, host)


def regenerate_seconds(p: Planned, slots: int) -> float:
    """Seconds of one copy of the target for all answers: prompts read, then steps with all slots taken."""
    c, mean = p.corpus, p.corpus.tokens / p.corpus.documents
    copy = p.copy_devices
    prompts = (c.tokens - c.answer_tokens) * p.shapes.flops(mean / 2) / (copy * p.hardware.bf16 * p.efficiency.forward)
    return prompts + c.answer_tokens / decode_rate(p, copy, slots, mean * (1 - c.answer_tokens / c.tokens / 2))


def hours(p: Planned, tokens_per_s: float | None) -> dict[str, Any]:
    """Hours of all devices together, by stage; None where the target doesn't fit.

    Args:
        tokens_per_s: measured decoding rate of all machines together.
    """
    c, e, t = p.corpus, p.efficiency, p.train
    copies = max(1, p.devices // p.copy_devices)
    if tokens_per_s is not None:
        answers: float | None = c.answer_tokens / tokens_per_s
    elif p.copy_devices > p.devices:
        answers = None
    else:
        answers = regenerate_seconds(p, p.stages.slots) / copies
    in_process = p.copy_devices == 1
    forward = p.shapes.flops(c.tokens / c.documents / 2, logits=False)
    collected = c.tokens * forward / (p.hardware.bf16 * e.forward) / p.devices if in_process else None
    epochs = t.epochs or DEFAULT_EPOCHS
    tokens = epochs * c.tokens
    batch = max(t.token_budget, c.tokens / c.documents)  # a document longer than the budget is a batch of its own
    steps = math.ceil(tokens / (batch * t.accumulation * p.devices))
    validated = min(t.validate_documents, max(1, c.documents // p.stages.val_every)) * c.tokens / c.documents
    validations = math.ceil(steps / t.validation_interval(steps)) + 1
    trained = train_seconds(p, tokens / p.devices, steps, validations, validated / p.devices)
    optimizer = steps * training.update_flops(p.head) / (p.hardware.fp32 * e.update)
    return {
        "regenerate": _h(answers),
        "tokens_per_s": None if not answers else c.answer_tokens / answers,
        "measured": tokens_per_s is not None,
        "through_servers": not in_process,
        "collect": _h(collected),
        "train": _h(trained),
        "optimizer": _h(optimizer),
        "epochs": epochs,
        "steps": steps,
        "online": _h(None if collected is None else trained + epochs * collected),
    }


def _h(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 3600
