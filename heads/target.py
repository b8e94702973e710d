"""The frozen model that a head drafts for: loading, capturing its states, and the few pieces that training needs."""

from __future__ import annotations

import contextlib
import dataclasses
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
from .architecture import context, eos_ids, layers_and_norm, text_decoder
from .base import Needs, TargetParts
from .config import HeadConfig
from .linear import can_pack, pack_linears

_EDGE = 64 * 1024
_STABLE_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "tie_word_embeddings",
)  # fmt: skip


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
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.max_positions, self.context_reason = context(self.config)
        self.eos_ids = eos_ids(model, tokenizer)
        # sdpa where the architecture has it, else eager (score caps, sinks)
        self.own_attention: str = model.config._attn_implementation
        self.embed: Tensor = model.get_input_embeddings().weight
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
        model = load_model(location, revision, dtype or auto_dtype(place))
        tokenizer = load_tokenizer(location, revision)
        if adapter is not None:
            model = merge_adapter(model, adapter)
        commit = getattr(model.config, "_commit_hash", None) or revision
        return cls(model.to(place), tokenizer, location, commit, adapter)

    def parts(self) -> TargetParts:
        """Embedding, output head and final norm, as the model applies them."""
        return _parts(self.embed, self.model.get_output_embeddings().weight, self.final_norm.weight, self.config)

    @torch.inference_mode()
    def check_trainable(self) -> None:
        """Refuse a target whose embedding or logits are not what `parts()` says: training would learn from wrong ones.

        Scaled embeddings, scaled or capped logits and norms that multiply by 1 + w are found so.
        """
        parts = self.parts()
        tokens = (torch.arange(3, 19, device=self.device) % self.vocab_size)[None]
        needs = Needs((0,), last=True)
        with self.capture(needs) as states, self.attention():
            logits = self.model(input_ids=tokens, use_cache=False).logits[0].float()
        pairs = {
            "embeddings": (states[0][0].float(), parts.embed[tokens[0]].float()),
            "logits": (logits, (parts.normed(states[self.n_layers][0]) @ parts.lm_head.t()).float()),
        }
        limit = 1e-3 if self.dtype == torch.float32 else 0.03
        for what, (model, own) in pairs.items():
            worst, scale = float((model - own).abs().max()), float(model.abs().max())
            if not worst <= limit * scale:
                raise DraftsmithError(
                    f"{type(self.model).__name__}: its {what} differ by {worst:.3g} (they reach {scale:.3g}) from "
                    "plain embedding, final norm and output head: it scales or caps them; it can't be trained for yet"
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


def load_parts(location: str, revision: str | None, dtype: torch.dtype, device: str = "cpu") -> TargetParts:
    """Read only embedding, output head, final norm and last layer from safetensors (index, single file, tied)."""
    from transformers import AutoConfig

    with explain_loading(location):
        config = AutoConfig.from_pretrained(location, revision=revision).get_text_config()
    reader = _WeightReader(resolve_folder(location, revision))
    embed = reader.find(
        ("model.embed_tokens.weight", "embed_tokens.weight", "language_model.model.embed_tokens.weight")
    )
    norm = reader.find(("model.norm.weight", "norm.weight", "language_model.model.norm.weight"))
    head = embed if config.tie_word_embeddings else reader.find(("lm_head.weight", "language_model.lm_head.weight"))
    parts = _parts(embed, head, norm, config)
    return dataclasses.replace(parts, last_layer=reader.layer(config.num_hidden_layers - 1)).to(device, dtype)


def model_parts(model: Any) -> TargetParts:
    """The frozen pieces of a loaded model; raises DraftsmithError where heads can't be trained for its kind."""
    config = model.config.get_text_config()
    norm = layers_and_norm(text_decoder(model), config.num_hidden_layers)[1]
    return _parts(model.get_input_embeddings().weight, model.get_output_embeddings().weight, norm.weight, config)


def _parts(embed: Tensor, head: Tensor, norm: Tensor, config: Any) -> TargetParts:
    if config.model_type.startswith("gemma") or not hasattr(config, "rms_norm_eps"):
        raise DraftsmithError(
            f"targets of type {config.model_type!r} can't be trained for yet: a plain RMSNorm before the output "
            "head is expected"
        )
    return TargetParts(embed, head, norm, config.rms_norm_eps)


class _WeightReader:
    """Reads single tensors of a checkpoint by name, whatever its sharding."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.exists():
            self.files = {k: folder / f for k, f in json.loads(index.read_text())["weight_map"].items()}
        elif (folder / "model.safetensors").exists():
            from safetensors import safe_open

            with safe_open(folder / "model.safetensors", "pt") as f:
                self.files = dict.fromkeys(f.keys(), folder / "model.safetensors")
        else:
            raise DraftsmithError(f"{folder} holds no safetensors weights; convert the model to safetensors first")

    def find(self, names: tuple[str, ...]) -> Tensor:
        from safetensors import safe_open

        for name in names:
            if name in self.files:
                with safe_open(self.files[name], "pt") as f:
                    return f.get_tensor(name)
        raise DraftsmithError(f"the checkpoint has none of the tensors {', '.join(names)}")

    def layer(self, number: int) -> dict[str, Tensor]:
        """Floating-point tensors of one decoder layer, by their names inside it."""
        mark = f"layers.{number}."
        names = {name.partition(mark)[2]: name for name in self.files if mark in name}
        found = {short: self.find((name,)) for short, name in names.items()}
        return {short: x for short, x in found.items() if x.is_floating_point()}


def load_model(location: str, revision: str | None, dtype: torch.dtype) -> Any:
    """Load the transformers model of a folder or hub id, on the CPU."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # loading is announced by the stage that loads
    with explain_loading(location):
        return AutoModelForCausalLM.from_pretrained(location, revision=revision, dtype=dtype)


def load_tokenizer(location: str, revision: str | None = None) -> Any:
    """Load the tokenizer of a model folder or hub id."""
    from transformers import AutoTokenizer

    with explain_loading(location):
        return AutoTokenizer.from_pretrained(location, revision=revision)


@contextlib.contextmanager
def explain_loading(location: str) -> Iterator[None]:
    """Turn the many ways in which loading fails into one line that names the model."""
    try:
        yield
    except DraftsmithError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DraftsmithError(f"the target {location!r} can't be loaded: {reason}") from error


def resolve_folder(location: str, revision: str | None) -> Path:
    """Return the local folder of a model: itself, or the hub's cached snapshot."""
    if Path(location).is_dir():
        return Path(location)
    from huggingface_hub import snapshot_download

    with explain_loading(location):
        return Path(
            snapshot_download(
                location, revision=revision, allow_patterns=["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
            )
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
    config = json.loads(config_file.read_text())
    config = config.get("text_config", config)
    digest = hashlib.sha256(canonical_json({k: config.get(k) for k in _STABLE_KEYS}).encode())
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DraftsmithError(f"{folder} holds no *.safetensors; convert the model to safetensors first")
    for file in files:
        with open(file, "rb") as f:
            size = struct.unpack("<Q", f.read(8))[0]
            digest.update(f.read(size))
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                if name.endswith(("embed_tokens.weight", "lm_head.weight")) or name in (
                    "model.norm.weight",
                    "norm.weight",
                ):
                    raw = tensors.get_tensor(name).contiguous().flatten().view(torch.uint8)
                    digest.update(raw[:_EDGE].numpy().tobytes() + raw[-_EDGE:].numpy().tobytes())
    return digest.hexdigest()


def template_sha256(tokenizer: Any) -> str | None:
    """Hash of the chat template, None without one."""
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(str(template).encode()).hexdigest() if template else None
