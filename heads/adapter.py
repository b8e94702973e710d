"""LoRA adapters of a target: put in, saved, loaded and merged. All that touches PEFT is here.

    W x  becomes  W x + (alpha / rank) B A x          A [rank, in] random, B [out, rank] zero at the start

An adapter changes the linear layers inside the decoder layers and nothing else: embedding, final norm and output head
stay the target's own, so the frozen pieces that heads take (`TargetParts`) are the same with and without it. On disk it
is a PEFT folder, `adapter_config.json` and `adapter_model.safetensors`.

Medusa-2's published recipe (arXiv 2401.10774) differs in two points: it adapts the output head, too, and
trains with a dropout of 0.05 on the adapter's input. There is no dropout here: a step's result follows from the step
alone, and the target that is trained is the one that is measured and served.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DraftsmithError
from ..files import read_json, sha256_file, sha256_json, write_json
from .config import HeadConfig

FOLDER = "adapter"
"""Its name beside a head."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_SHAPING = ("peft_type", "r", "lora_alpha", "target_modules")
_VARIANTS = {
    "bias": "none", "use_rslora": False, "use_dora": False, "lora_bias": False, "modules_to_save": None,
    "rank_pattern": {}, "alpha_pattern": {},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TunedConfig(HeadConfig):
    """What the config of a head adds that drafts for its target with an adapter."""

    lora_rank: int
    lora_alpha: int
    adapter_sha256: str | None = None
    """Hash of the adapter that the head was saved with; None while it is being trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lora_rank", "lora_alpha"):
            if (value := getattr(self, name)) < 1:
                raise DraftsmithError(f"{name} {value} must be at least 1")


class Adapter:
    """An adapter that is being trained inside a model.

    Args:
        model: a transformers model; it is changed in place, its own weights are frozen.
        layers: its decoder layers; every `nn.Linear` in them gets an adapter. Experts and routers that are no
            `nn.Linear` keep their weights.
        generator: fills A.

    Attributes:
        parameters: A and B of every layer by their names in the file; in the model's dtype, but never less than fp32.

    Raises:
        DraftsmithError: the model has linear layers of the same names elsewhere.
    """

    def __init__(
        self, model: Any, layers: nn.ModuleList, rank: int, alpha: int, generator: torch.Generator, target_id: str
    ) -> None:
        from peft import LoraConfig, get_peft_model

        inside = [(name, module) for name, module in layers.named_modules() if type(module) is nn.Linear]
        names = sorted({name.rpartition(".")[2] for name, _ in inside})
        self.config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=names, bias="none", task_type="CAUSAL_LM")
        with _quietly():
            self.model: Any = get_peft_model(model, self.config)
        self.config.base_model_name_or_path = target_id
        self.parameters = _parameters(self.model)
        if len(self.parameters) != 2 * len(inside):
            raise DraftsmithError(
                f"{type(model).__name__} has linear layers named {', '.join(names)} outside its decoder layers: "
                "an adapter of the decoder alone can't be named; take a head that leaves the target as it is"
            )
        for name, weight in self.parameters.items():
            if name.endswith("lora_A.weight"):
                bound = 1 / math.sqrt(weight.shape[1])
                start = torch.rand(weight.shape, generator=generator) * (2 * bound) - bound
                weight.data.copy_(start)
            else:
                weight.data.zero_()

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Run the model as it was without the adapter, for a while; no gradient may be wanted inside."""
        with torch.no_grad(), self.model.disable_adapter():
            yield

    def save(self, folder: Path) -> str:
        """Write the new PEFT folder; returns its `adapter_sha256`."""
        from safetensors.torch import save_file

        folder.mkdir()
        weights = {name: p.detach().cpu().contiguous() for name, p in self.parameters.items()}
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        values = {k: sorted(v) if isinstance(v, set) else v for k, v in self.config.to_dict().items()}
        write_json(folder / CONFIG, {**values, "inference_mode": True})
        return adapter_sha256(folder)

    def load(self, folder: Path) -> None:
        """Take the weights of a folder that `save` wrote; raises DraftsmithError if they are another adapter's."""
        stored = _read(folder)
        _check_tensors(folder, stored, self.parameters)
        for name, parameter in self.parameters.items():
            parameter.data.copy_(stored[name])


def merge_adapter(model: Any, folder: Path) -> Any:
    """Return the model with an adapter added to its weights; sums are rounded once, to the model's dtype.

    Raises:
        DraftsmithError: no adapter there, a damaged one, another model's, or another kind than a plain LoRA.
    """
    from peft import PeftModel

    config = read_adapter_config(folder)
    stored = _read(folder)
    for name, plain in _VARIANTS.items():
        if config.get(name, plain) != plain:
            raise DraftsmithError(
                f"{folder / CONFIG}: {name} = {config[name]!r}: only plain LoRA can be merged into a target"
            )
    try:
        with _quietly():
            wrapped = PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DraftsmithError(f"the adapter {folder} doesn't fit {type(model).__name__}: {reason}") from error
    _check_tensors(folder, stored, _parameters(wrapped))
    return wrapped.merge_and_unload()


def adapter_sha256(folder: Path) -> str:
    """Identify an adapter: its weights, rank, alpha and layers; not what it says of versions and places.

    Raises:
        DraftsmithError: no adapter there.
    """
    config = read_adapter_config(folder)
    return sha256_json({"weights": sha256_file(folder / WEIGHTS), **{key: config.get(key) for key in _SHAPING}})


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read an adapter's config; raises DraftsmithError where no LoRA adapter is."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise DraftsmithError(
                f"{folder} is no adapter: it has no {name}; give a PEFT folder such as …/checkpoints/best/{FOLDER}"
            )
    config: dict[str, Any] = read_json(folder / CONFIG)
    if config.get("peft_type") != "LORA":
        raise DraftsmithError(f"{folder / CONFIG}: an adapter of type {config.get('peft_type')!r}, LORA is expected")
    return config


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Hold back PEFT's warnings: of names that transformers will change, and of tensors that are compared here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _parameters(model: Any) -> dict[str, nn.Parameter]:
    """A and B of every adapted layer, by the names that PEFT gives them in a file."""
    return {
        name.replace(".default.", "."): p
        for name, p in model.named_parameters()
        if ".lora_A.default." in name or ".lora_B.default." in name
    }


def _read(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise DraftsmithError(f"{folder / WEIGHTS} is damaged ({error}): take another checkpoint") from error


def _check_tensors(folder: Path, stored: dict[str, Tensor], own: dict[str, nn.Parameter]) -> None:
    if different := sorted(set(stored) ^ set(own)):
        state = "missing" if different[0] in own else "foreign"
        raise DraftsmithError(
            f"{folder / WEIGHTS}: tensor {different[0]!r} is {state} ({len(different)} differ): it is an adapter of "
            "another model"
        )
    for name, parameter in own.items():
        if stored[name].shape != parameter.shape:
            raise DraftsmithError(
                f"{folder / WEIGHTS}: tensor {name!r} has shape {list(stored[name].shape)}, "
                f"not {list(parameter.shape)}: it is an adapter of another model or rank"
            )
