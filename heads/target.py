"""The frozen model that a head drafts for: loading, capturing its states, and the few pieces that training needs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DraftsmithError
from ..files import canonical_json
from .adapter import FOLDER, TunedConfig, adapter_sha256, merge_adapter
from .architecture import (
    context,
    eos_ids,
    last_layer,
    layers_and_norm,
    plain_weight,
    refuse_bias,
    target_parts,
    text_decoder,
)
from .base import Needs, TargetParts
from .config import HeadConfig
from .linear import can_pack, pack_linears
from .loading import both_configs, quantisation
from .loading import explain_loading as explain_loading
from .loading import load_model as load_model
from .loading import load_tokenizer as load_tokenizer
from .loading import resolve_folder as resolve_folder
from .weights import EMBEDDING, FINAL_NORM, OUTPUT_HEAD, WeightReader

_EDGE = 64 * 1024
_STABLE_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "tie_word_embeddings",
)  # fmt: skip

_CHECKED = 64
"""Rows of embedding and output head that are compared with the model's files."""
_SAME_TYPE = {"mimo": "qwen2"}
"""Model types that transformers loads by another name: the same weights under both are the same target."""


def auto_dtype(device: torch.device | str) -> torch.dtype:
    """Pick bf16 where the device multiplies it fast (CUDA, CPUs with AVX512-BF16 or AMX), else fp32."""
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    flags = _cpu_flags()
    return torch.bfloat16 if "avx512_bf16" in flags or "amx_bf16" in flags else torch.float32


def _cpu_flags() -> set[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.split())
    except OSError:
        pass  # not Linux: no flags known
    return set()


class Target:
    """A decoder-only Hugging Face model, frozen, with its tokenizer.

    Attributes:
        id: hub id or folder it was loaded from; revision: hub commit or None.
        n_layers, hidden_size, vocab_size: shapes.
        max_positions: most tokens of a sequence; context_reason: why they are fewer than the model allows, or "".
        eos_ids: token ids that end an answer.
        adapter: folder of the adapter that is merged into the weights, or None; adapter_sha256: its hash.
    """

    def __init__(
        self, model: Any, tokenizer: Any, location: str, revision: str | None, adapter: Path | None = None
    ) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.id, self.revision = location, revision
        self.config = model.config.get_text_config()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.n_layers: int = self.config.num_hidden_layers
        self.body = text_decoder(model)
        self.layers, self.final_norm = layers_and_norm(self.body, self.n_layers)
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = plain_weight(model.get_output_embeddings(), "output head").shape[0]
        self.max_positions, self.context_reason = context(self.config)
        self.eos_ids = eos_ids(model, tokenizer)
        # sdpa where the architecture has it, else eager (score caps, sinks)
        self.own_attention: str = model.config._attn_implementation
        # A local folder is hashed; a hub model is named by its id and commit.
        self.fingerprint = fingerprint(resolve_folder(location, revision))
        self.adapter, self.adapter_sha256 = adapter, None if adapter is None else adapter_sha256(adapter)
        self.template_sha256 = template_sha256(tokenizer)
        if can_pack(self.device, self.dtype):
            pack_linears(model, keep=model.get_output_embeddings())

    @classmethod
    def load(
        cls,
        location: str,
        *,
        revision: str | None = None,
        dtype: torch.dtype | None = None,
        device: str | None = None,
        adapter: Path | None = None,
    ) -> Target:
        """Load a model folder or hub id.

        Args:
            location: folder or hub id.
            revision: hub commit, branch or tag.
            dtype: None chooses by `auto_dtype`.
            device: None takes this process's CUDA device where there is one.
            adapter: PEFT folder of a LoRA adapter that is merged into the weights: the target that a head drafts for
                which was trained together with it. The fingerprint stays that of the model without it.

        Raises:
            DraftsmithError: nothing loadable there, the hub can't be reached, or the adapter is another model's.
        """
        own = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # of the processes that a launcher starts each has its own
        place = device or (own if torch.cuda.is_available() else "cpu")
        model = load_model(location, revision, dtype or auto_dtype(place), place)
        tokenizer = load_tokenizer(location, revision)
        if adapter is not None:
            model = merge_adapter(model, adapter)
        commit = getattr(model.config, "_commit_hash", None) or revision
        return cls(model, tokenizer, location, commit, adapter)

    @functools.cached_property
    def _parts(self) -> TargetParts:
        with torch.inference_mode(False):  # whoever asks first: training's gradients run through them
            return model_parts(self.model)

    @property
    def embed(self) -> Tensor:
        """Embedding rows [V, H] as they enter layer 0."""
        return self._parts.embed

    def parts(self) -> TargetParts:
        """Embedding, output head and final norm, as the model applies them; made once."""
        return self._parts

    @torch.inference_mode()
    def check_trainable(self) -> None:
        """Refuse a target whose embedding or logits are not what `parts()` says: training would learn from wrong ones.

        Two rows of tokens run: what learnt positions add to state 0 is the same in both, so it is their difference
        that must be the embeddings'. Logits are compared whole. Training on stored states reads the pieces from the
        model's files: the first rows there must be the model's.

        Raises:
            DraftsmithError: the largest difference is more than 1e-3 of the largest value in fp32, or 0.03 in a
                narrower dtype. Quantised layers don't matter: both sides start from the states that they gave.
        """
        parts = self.parts()
        tokens = torch.stack((torch.arange(3, 19), torch.arange(40, 24, -1))).to(self.device) % self.vocab_size
        with self.capture(Needs((0,), last=True)) as states, self.attention():
            logits = self.model(input_ids=tokens, use_cache=False).logits.float()
        embeds = parts.embed[tokens].float()
        entered = states[0].float()
        pairs = {
            "embeddings": (entered[0] - entered[1], embeds[0] - embeds[1]),
            "logits": (logits, parts.logits(parts.normed(states[self.n_layers])).float()),
        }
        limit = 1e-3 if self.dtype == torch.float32 else 0.03
        for what, (model, own) in pairs.items():
            worst, scale = float((model - own).abs().max()), float(model.abs().max())
            if not worst <= limit * scale:
                raise DraftsmithError(
                    f"{type(self.model).__name__}: its {what} differ by {worst:.3g} (they reach {scale:.3g}) from "
                    f"what models of type {self.config.model_type!r} make of embedding, final norm and output head: "
                    "it does something else to them, so it can't be trained for yet"
                )
        self._check_stored(parts, limit)

    def _check_stored(self, parts: TargetParts, limit: float) -> None:
        reader = WeightReader(resolve_folder(self.id, self.revision))
        stored = _stored_parts(self.id, self.revision, reader, self.dtype, str(parts.embed.device), _CHECKED)
        if stored is None:  # quantised: training takes them of a loaded model, too
            return
        for what, name in (("embedding", "embed"), ("output head", "lm_head"), ("final norm", "norm_weight")):
            own, read = (getattr(x, name)[:_CHECKED].float() for x in (parts, stored))
            worst, scale = float((own - read).abs().max()), float(own.abs().max())
            if not worst <= limit * scale:
                raise DraftsmithError(
                    f"{reader.folder}: the {what} in its files differs by {worst:.3g} (it reaches {scale:.3g}) from "
                    f"that of the loaded {type(self.model).__name__}, which takes something else in its place, so it "
                    "can't be trained for yet"
                )

    def check_head(self, config: HeadConfig) -> None:
        """Refuse a head that was trained for another target, its adapter included; raises DraftsmithError."""
        if config.target_fingerprint != self.fingerprint:
            raise DraftsmithError(
                f"the head was trained for another target: fingerprint {config.target_fingerprint[:8]} of "
                f"{config.target_id}, not {self.fingerprint[:8]} of {self.id}; take that model, or train a head for "
                "this one"
            )
        wanted = config.adapter_sha256 if isinstance(config, TunedConfig) else None
        if wanted == self.adapter_sha256:
            return
        beside = f"give the folder {FOLDER!r} beside the head as adapter=…"
        if wanted is None:
            raise DraftsmithError(
                f"the head was trained for {config.target_id} without an adapter, this target has {self.adapter} "
                "merged into it: load the target without one"
            )
        if self.adapter_sha256 is None:
            raise DraftsmithError(
                f"the head was trained for {config.target_id} with an adapter (sha256 {wanted[:8]}), this target has "
                f"none: {beside}"
            )
        raise DraftsmithError(
            f"the head was trained for another adapter of {config.target_id}: sha256 {wanted[:8]}, not "
            f"{self.adapter_sha256[:8]} of {self.adapter}: {beside}"
        )

    @contextlib.contextmanager
    def attention(self, name: str | None = None) -> Iterator[None]:
        """Run the model with another registered attention function for a while; None = the one it was loaded with."""
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(name or self.own_attention)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    @contextlib.contextmanager
    def capture(self, needs: Needs) -> Iterator[dict[int, Tensor]]:
        """Collect the states that `needs` names into the yielded dict: layer id -> [B, S, H] of the latest forward.

        State k < n is the input of layer k, state n the input of the final norm.
        """
        states: dict[int, Tensor] = {}
        wanted = [*needs.layer_ids, *([self.n_layers] if needs.last else [])]
        places = {k: self.layers[k] if k < self.n_layers else self.final_norm for k in wanted}

        def keep(k: int) -> Any:
            def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                states[k] = args[0] if args else kwargs["hidden_states"]

            return hook

        handles = [m.register_forward_pre_hook(keep(k), with_kwargs=True) for k, m in places.items()]
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    @torch.inference_mode()
    def states(self, tokens: Tensor, needs: Needs) -> tuple[Tensor, Tensor | None]:
        """Run whole right-padded sequences without the output head.

        Args:
            tokens: [B, S] int64; padding behind a sequence never changes its rows (causal attention).

        Returns:
            aux [B, S, A*H] in layer order and the pre-norm last state [B, S, H] (None unless `needs.last`).
        """
        with self.attention(), self.capture(needs) as states:
            self.body(input_ids=tokens.to(self.device), use_cache=False)
        return join_states(states, needs, self.n_layers)


def join_states(states: dict[int, Tensor], needs: Needs, n_layers: int) -> tuple[Tensor, Tensor | None]:
    """Concatenate captured states in layer order: aux [..., A*H] and the last state."""
    aux = [states[k] for k in needs.layer_ids]
    some = next(iter(states.values()))
    return torch.cat(aux, -1) if aux else some[..., :0], states[n_layers] if needs.last else None


def load_parts(
    location: str,
    revision: str | None,
    dtype: torch.dtype,
    device: str = "cpu",
    computed: torch.dtype | None = None,
) -> TargetParts:
    """Read only embedding, output head, final norm and last layer from safetensors (index, single file, tied).

    Where embedding or output head are quantised, the whole model is loaded and they are de-quantised.

    Args:
        dtype: of what is returned.
        computed: that the model computes in: numbers and scales are rounded to it, as the model does, before they
            become `dtype`. None takes `dtype`.

    Raises:
        DraftsmithError: a piece is missing, or heads can't be trained for a model of this kind.
    """
    reader, rounded = WeightReader(resolve_folder(location, revision)), computed or dtype
    parts = _stored_parts(location, revision, reader, rounded, device)
    if parts is None:
        return model_parts(load_model(location, revision, rounded, device).requires_grad_(False)).to(device, dtype)
    config = both_configs(location, revision)[1]
    last = last_layer(reader.layer(config.num_hidden_layers - 1), config)
    parts = parts if dtype == rounded else parts.to(device, dtype)
    return dataclasses.replace(parts, last_layer={name: x.to(device, dtype) for name, x in last.items()})


def _stored_parts(
    location: str,
    revision: str | None,
    reader: WeightReader,
    dtype: torch.dtype,
    device: str,
    rows: int | None = None,
) -> TargetParts | None:
    """The pieces in a model's files, or the first rows of embedding and output head; None where those are quantised."""
    whole, config = both_configs(location, revision)
    embed = reader.find(EMBEDDING, "the embedding", rows=rows)
    head = reader.find(OUTPUT_HEAD, "the output head", rows=rows)
    # A head in the files is the model's, whatever the config says of ties; images' configs say it outside, or inside.
    if not reader.has_output_head and any(getattr(c, "tie_word_embeddings", False) for c in (whole, config)):
        head = embed
    if embed is None or head is None:
        if quantisation(location, revision) is None:
            piece = "embedding" if embed is None else "output head"
            raise DraftsmithError(
                f"{reader.folder}: none of its tensors is called as {piece}s are: it can't be trained for"
            )
        return None
    refuse_bias(reader.find(OUTPUT_HEAD, "the output head's bias", "bias"), config)
    weight, bias = (reader.find(FINAL_NORM, f"the final norm's {part}", part) for part in ("weight", "bias"))
    own = embed.to(device, dtype)
    return target_parts(
        own,
        own if head is embed else head.to(device, dtype),
        None if weight is None else weight.to(device, dtype),
        None if bias is None else bias.to(device, dtype),
        config,
    )


def model_parts(model: Any) -> TargetParts:
    """The frozen pieces of a loaded model; raises DraftsmithError where heads can't be trained for its kind."""
    config = model.config.get_text_config()
    norm = layers_and_norm(text_decoder(model), config.num_hidden_layers)[1]
    head = model.get_output_embeddings()
    refuse_bias(head.bias if hasattr(head, "bias") else None, config)
    return target_parts(
        plain_weight(model.get_input_embeddings(), "embedding"),
        plain_weight(head, "output head"),
        getattr(norm, "weight", None),
        getattr(norm, "bias", None),
        config,
    )


def fingerprint(folder: Path) -> str:
    """Identify a checkpoint without reading all of it.

    SHA-256 over stable config keys, the safetensors headers, and the first and last 64 KiB of the embedding, the
    output head and the final norm.
    """
    from safetensors import safe_open

    config_file = folder / "config.json"
    if not config_file.exists():
        raise DraftsmithError(f"{folder} is not a model folder: it has no config.json")
    try:
        config = json.loads(config_file.read_text("utf-8"))
        config = config.get("text_config") or config
    except (ValueError, AttributeError) as error:
        raise DraftsmithError(f"{config_file} is no configuration: {error}; fetch the model again") from error
    stable = {k: config.get(k) for k in _STABLE_KEYS}
    stable["model_type"] = _SAME_TYPE.get(stable["model_type"], stable["model_type"])
    digest = hashlib.sha256(canonical_json(stable).encode())
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DraftsmithError(f"{folder} holds no *.safetensors; convert the model to safetensors first")
    for file in files:
        with open(file, "rb") as f:
            head = f.read(8)
            if len(head) < 8:
                raise DraftsmithError(f"{file} is cut off: fetch the model again")
            digest.update(f.read(struct.unpack("<Q", head)[0]))
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                if name.endswith(("embed_tokens.weight", "lm_head.weight")) or any(
                    pattern.fullmatch(name) for pattern in (EMBEDDING, FINAL_NORM, OUTPUT_HEAD)
                ):
                    raw = tensors.get_tensor(name).contiguous().flatten().view(torch.uint8)
                    digest.update(raw[:_EDGE].numpy().tobytes() + raw[-_EDGE:].numpy().tobytes())
    return digest.hexdigest()


def template_sha256(tokenizer: Any) -> str | None:
    """Hash of the chat template, None without one."""
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(str(template).encode()).hexdigest() if template else None
