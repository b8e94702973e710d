"""Training on paper: memory of a rank by ZeRO stage, and operations of a step.

What a step keeps for its backward pass is counted from the networks (`heads/layer.py`, `hydra.py`, `medusa.py`,
`mtp.py`) as they are; attention keeps its rows and no scores (`heads/unrolled.py`). Tests hold the counts
against autograd's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..heads.base import DraftHead
from ..heads.config import LayerConfig
from ..heads.hydra import HydraConfig
from ..heads.losses import loss_rows_per_chunk
from ..heads.medusa import MedusaConfig
from ..heads.mtp_modules import MtpConfig
from ..heads.shapes import TargetShapes
from ..heads.unrolled import TILE_SIZES
from .optimizer import POLYNOMIALS, is_hidden_matrix

ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Rows:
    """The rows of one packed batch.

    Attributes:
        total: T; supervised: R, those that run through all unrolled steps.
    """

    total: int
    supervised: int


def activation_bytes(head: DraftHead, rows: Rows, size: int) -> float:
    """Bytes that all unrolled steps keep until the backward pass, gradients of the output rows among them.

    Args:
        head: any family's, with `checkpointing` as it is trained; it may lie on the meta device.
        size: bytes of a number: 4 in fp32, 2 under bf16 autocast.
    """
    config = head.config
    kept = _KEPT[config.family](config, rows, size)
    if getattr(head, "checkpointing", False):
        kept = _checkpointed(config, rows, size, kept)
    outputs = sum(p.numel() for name, p in head.named_parameters() if name.startswith("lm_head"))
    return kept + outputs * 4  # their gradient is summed over the steps in the forward pass, in fp32


def _layer_pass(c: LayerConfig, size: int, inputs: int) -> float:
    """Bytes a supervised row keeps of one pass through a decoder layer.

    Args:
        inputs: H-wide tensors that are kept before attention and behind the MLP.
    """
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    # u, its normed form and what the MLP reads; q and what o_proj reads; k and v; gate, up, their act and product
    wide = (inputs + 3) * c.hidden_size + 2 * q + 2 * kv + 4 * c.intermediate_size
    norms = 3 * 4 * c.hidden_size if size < 4 else 0  # norms keep what they read in fp32
    return wide * size + 4 * c.num_attention_heads + norms


def _recurrent(config: LayerConfig, rows: Rows, size: int) -> float:
    h, aux = config.hidden_size, len(config.layer_ids)
    kv = config.num_key_value_heads * config.head_dim
    each = _layer_pass(config, size, 7 if aux else 5)  # EAGLE-1 norms neither its inputs nor its output
    others = (rows.total - rows.supervised) * 5 * h  # rows of step 0 that give keys alone
    entry = rows.total * (max(aux, 1) * h + 4 * kv)
    return config.steps * rows.supervised * each + (others + entry) * size


def _checkpointed(config: Any, rows: Rows, size: int, kept: float) -> float:
    """The same where each step is computed again: what goes from step to step, and one step as a whole."""
    between = 2 * config.hidden_size + 2 * config.num_key_value_heads * config.head_dim
    stored = (config.steps * rows.supervised * between + rows.total * config.hidden_size) * size
    return min(kept, stored + kept / config.steps)


def _hydra(config: HydraConfig, rows: Rows, size: int) -> float:
    h = config.hidden_size
    kv = config.num_key_value_heads * config.head_dim
    prefix = rows.supervised * _layer_pass(config, size, 3) + rows.total * (2 * h + 4 * kv) * size
    heads = sum(s + 2 + 2 * config.blocks for s in range(config.steps))
    return prefix + rows.supervised * heads * h * size


def _medusa(config: MedusaConfig, rows: Rows, size: int) -> float:
    return float(rows.supervised * (1 + config.steps * (2 * config.blocks)) * config.hidden_size * size)


def _mtp(config: MtpConfig, rows: Rows, size: int) -> float:
    kv = config.num_key_value_heads * config.head_dim
    projected, attended = _attention(config)
    mlp, copied = _mlp(config, size)
    each = _layer_pass(config, size, 10)  # normed inputs, both side by side, z, what attention reads, output
    each += (projected + attended) * size + mlp
    passed = config.steps * rows.supervised
    if config.modules > 1:  # all rows go through every module but the last
        passed = (config.steps - 1) * rows.total + rows.supervised
    keys_alone = rows.total - rows.supervised
    others = keys_alone * (6 * config.hidden_size + projected) + rows.total * 4 * kv
    return passed * each + others * size + (config.steps - config.modules) * copied  # once, they are `weights`


def _attention(config: MtpConfig) -> tuple[int, int]:
    """Numbers that a row keeps beside a Llama layer's attention: of making q, k and v, and of what follows it."""
    o = config.attention
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    if o["kind"] == "latent":  # both latents and their normed forms; values without the zeros behind them
        projected = 2 * (o.get("q_lora_rank") or 0) + 2 * o["kv_lora_rank"] + o["qk_rope_head_dim"]
        return projected, config.num_attention_heads * o["v_head_dim"]
    return (q + kv if o.get("qk_norm") else 0), (config.hidden_size + 2 * q if o.get("gate") else 0)


def _mlp(config: MtpConfig, size: int) -> tuple[float, float]:
    """Bytes that a row keeps beyond a Llama layer's MLP, and a pass once: autocast's copies of the experts' stacks,
    which it makes anew in every pass."""
    o, h = config.mlp, config.hidden_size
    if o["kind"] != "experts":
        return 0.0, 0.0
    # a chosen expert's input, gate and up, act, product, output; where they lie; scores
    chosen = o["top_k"] * ((2 * h + 4 * o["intermediate_size"]) * size + 24)
    shared = o.get("shared_size", 0)
    always = (4 * shared + (h if o.get("shared_gate") else 0)) * size + 4 * (h + 2 * o["count"])
    stacks = 3 * o["count"] * o["intermediate_size"] * h if size < 4 else 0
    return chosen + always - 4.0 * config.intermediate_size * size, float(stacks * size)


_KEPT: dict[str, Callable[[Any, Rows, int], float]] = {
    "eagle1": _recurrent,
    "eagle3": _recurrent,
    "eagle31": _recurrent,
    "hydra": _hydra,
    "medusa": _medusa,
    "medusa2": _medusa,
    "mtp": _mtp,
}


def target_training_bytes(shapes: TargetShapes, tokens: int, size: int, rank: int) -> float:
    """Bytes of a target that is trained along with an adapter: weights, its layers' activations, the adapter's state.

    Args:
        tokens: rows of a batch; rank: of the adapter on every linear layer.
    """
    q, kv = shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
    h, i = shapes.hidden, shapes.intermediate
    kept = 6 * h + 3 * q + 2 * kv + 4 * i + 7 * rank + (8 * h if size < 4 else 0)
    lora = rank * shapes.layers * (4 * h + 2 * q + 2 * kv + 3 * (h + i))
    return float(shapes.params * size + shapes.layers * tokens * kept * size + 16 * lora)


@dataclass(frozen=True)
class TrainMemory:
    """Bytes of one rank.

    Attributes:
        parts: embedding and output rows of the target, each of its own.
        weights: what is computed with where that isn't the masters themselves; masters: fp32; gradients: fp32;
            moments: 1 of Muon's, 2 of AdamW's, fp32.
        teacher: its probabilities over the draft vocabulary, fp32.
        activations: see `activation_bytes`; working: logits of one chunk, scores of one tile.
        update: what the optimizer holds for the length of its step; saving: a checkpoint's tensors and their serialised
            form, where that is the same memory.
        target: a target in the same job, online or with an adapter.
        decoding: K/V of held-out prompts that are decoded in the middle of training.
    """

    parts: float
    weights: float
    masters: float
    gradients: float
    moments: float
    teacher: float
    activations: float
    working: float
    update: float
    saving: float
    target: float
    decoding: float = 0.0

    def total(self, zero: int, world: int) -> float:
        """Bytes of a rank with a ZeRO stage over `world` ranks; batch, update, saving and decoding don't overlap."""
        held = (
            self.weights / (world if zero >= 3 else 1)
            + self.masters / (world if zero >= 1 else 1)
            + self.gradients / (world if zero >= 2 else 1)
            + self.moments / (world if zero >= 1 else 1)
        )
        step = max(self.teacher + self.activations + self.working, self.update, self.saving, self.decoding)
        return self.parts + self.target + held + step


def loss_bytes(head: DraftHead, rows: Rows, size: int) -> tuple[float, float]:
    """A loss chunk's bytes: the teacher's probabilities; the draft's logits and the scores of one tile of attention."""
    config = head.config
    device = "cuda" if size < 4 else "cpu"
    chunk = min(rows.supervised, loss_rows_per_chunk(config.draft_vocab_size, device))
    scores = 0
    if isinstance(config, LayerConfig):
        tile = TILE_SIZES[device]
        scores = config.num_attention_heads * min(tile.rows, rows.supervised) * min(tile.keys, rows.total)
    logits = 4.0 * chunk * config.draft_vocab_size
    return 0.0 if head.hard_labels else logits, 4 * logits + 3.0 * scores * 4


def train_memory(head: DraftHead, shapes: TargetShapes, rows: Rows, size: int, target: float = 0.0) -> TrainMemory:
    """Count one rank's memory.

    Args:
        head: may lie on the meta device.
        size: bytes of a number in computing: 2 = bf16 autocast over fp32 weights, 4 = fp32.
        target: bytes of a target in the same job.
    """
    muon = sum(p.numel() for n, p in head.named_parameters() if is_hidden_matrix(n, p))
    params = sum(p.numel() for p in head.parameters())
    teacher, working = loss_bytes(head, rows, size)
    return TrainMemory(
        parts=2.0 * shapes.embedding * size,
        weights=2.0 * params if size < 4 else 0.0,
        masters=4.0 * params,
        gradients=4.0 * params,
        moments=4.0 * muon + 8.0 * (params - muon),
        teacher=teacher,
        activations=activation_bytes(head, rows, size),
        working=working,
        update=8.0 * muon,
        saving=24.0 * params if size == 4 else 0.0,
        target=target,
    )


def update_flops(head: DraftHead) -> float:
    """Operations of one optimizer step, all of Muon's and in fp32: Gram matrices, polynomials in them, one product.

    A matrix [m, n], m ≤ n, takes 2·m²n for its Gram matrix and as many for the product; of m × m by m × m there are a
    square for each polynomial, two products between polynomials to move the Gram matrix on, and one to join factors.
    """
    squares = len(POLYNOMIALS) + 3 * (len(POLYNOMIALS) - 1)
    total = 0.0
    for name, p in head.named_parameters():
        if is_hidden_matrix(name, p):
            m, n = sorted(p.shape)
            total += 4.0 * m * m * n + 2.0 * squares * m**3
    return total
