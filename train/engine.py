"""The DeepSpeed engine of a run: its configuration, ZeRO 0 to 3, one step with the same meaning at every stage.

Weights are fp32 and are the masters; a run in bf16 computes under autocast (`step.TrainStep`), and gradients are summed
and reduced in fp32. So no stage, device or number of ranks has numerics of its own.

`configs/deepspeed/` has a preset for each kind of place. A head is small beside its target: on one device nothing is
partitioned; on a node the optimizer's state is (stage 1), over several nodes the gradients, too (stage 2). A JSON file
of the user's can ask for anything else that doesn't contradict the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import warnings
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DraftsmithError
from ..heads.base import Batch
from .optimizer import MuonAdamW
from .partition import zero_partitions
from .ranks import Ranks, import_deepspeed, quietly
from .settings import TrainSettings
from .step import TrainStep

_ABSENT = object()


def preset_names() -> list[str]:
    """Presets that have a file."""
    return sorted(f.name.removesuffix(".json") for f in _folder().iterdir() if f.name.endswith(".json"))


def preset_for(cuda: bool, world: int, nodes: int) -> str:
    """The preset that `auto` takes.

    Args:
        cuda: whether the ranks compute on GPUs.
        world: ranks; nodes: machines.
    """
    if not cuda:
        return "cpu"
    return "many-nodes" if nodes > 1 else "one-node" if world > 1 else "one-gpu"


def engine_config(settings: TrainSettings, ranks: Ranks) -> dict[str, Any]:
    """DeepSpeed's configuration of a run: a preset or the user's file, and what the run itself decides. Collective.

    Raises:
        DraftsmithError: no such preset or file, or one that says something else than the run.
    """
    nodes = len(set(ranks.gather([socket.gethostname()])))
    preset = preset_for(ranks.device.type == "cuda", ranks.world, nodes)
    given, source = _read(preset if settings.deepspeed == "auto" else settings.deepspeed)
    if _look_up(given, "zero_optimization.stage") == "auto":
        stage = _look_up(_read(preset)[0], "zero_optimization.stage")
        given = {**given, "zero_optimization": {**given["zero_optimization"], "stage": stage}}
    own = _own_values(settings, ranks.world)
    _check(given, own, source)
    stage = _look_up(given, "zero_optimization.stage")
    if stage is _ABSENT:
        raise DraftsmithError(f"{source}: zero_optimization.stage is missing: it is 0, 1, 2 or 3")
    return {
        **_decided({key: value for key, value in given.items() if key not in ("fp16", "bf16")}),
        **{key: value for key, value in own.items() if "." not in key and value is not None},
        # at stage 0 the optimizer has the gradients whole and clips them with the norms that it needs anyway
        "gradient_clipping": settings.clip if stage else 0.0,
        "zero_allow_untested_optimizer": True,
    }


def _own_values(settings: TrainSettings, world: int) -> dict[str, Any]:
    """What a run decides itself, by DeepSpeed's keys; None where the key must not be there."""
    return {
        "train_batch_size": world * settings.accumulation,  # packed batches
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": settings.accumulation,
        "gradient_clipping": settings.clip,
        "optimizer": None,
        "scheduler": None,
        "fp16.enabled": False,
        "bf16.enabled": False,
        "amp.enabled": False,
        "torch_autocast.enabled": False,
        "zero_optimization.offload_optimizer.device": "none",
        "zero_optimization.offload_param.device": "none",
    }


_SETTINGS = {
    "train_batch_size": "ranks x train.accumulation packed batches of train.token_budget tokens",
    "train_micro_batch_size_per_gpu": "one packed batch of train.token_budget tokens",
    "gradient_accumulation_steps": "train.accumulation",
    "gradient_clipping": "train.clip",
    "optimizer": "train.optimizer, train.lr_matrix and train.lr_other",
    "scheduler": "train.schedule and train.warmup",
    "fp16.enabled": "weights stay fp32; train.dtype says what is computed in",
    "bf16.enabled": "weights stay fp32; train.dtype says what is computed in",
    "amp.enabled": "train.dtype says what is computed in",
    "torch_autocast.enabled": "train.dtype says what is computed in",
    "zero_optimization.offload_optimizer.device": "a head's state stays on its device; ZeRO 1 to 3 divide it",
    "zero_optimization.offload_param.device": "a head's weights stay on their device; ZeRO 3 divides them",
}
"""Where the values of `_own_values` come from."""


def _check(given: Mapping[str, Any], own: Mapping[str, Any], source: str) -> None:
    for key, value in own.items():
        found = _look_up(given, key)
        if found is _ABSENT or found == "auto" or (found == value and value is not None):
            continue
        run = "none of DeepSpeed's" if value is None else json.dumps(value)
        raise DraftsmithError(
            f"{source}: {key} is {json.dumps(found)}, this run's is {run} ({_SETTINGS[key]}): take it out of the file"
        )


def _decided(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a file for other trainers calls "auto": it is the run's or DeepSpeed's."""
    inner = {key: _decided(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in inner.items() if value != "auto"}


def _look_up(values: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return _ABSENT
        values = values[part]
    return values


def _read(name: str) -> tuple[dict[str, Any], str]:
    """The content of a preset or a file, and what to call it."""
    if name in preset_names():
        path, source = _folder() / f"{name}.json", f"configs/deepspeed/{name}.json"
    elif Path(name).is_file():
        path, source = Path(name), name
    else:
        raise DraftsmithError(
            f"train.deepspeed = {name!r} is no file and no preset; there are: auto, {', '.join(preset_names())}"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DraftsmithError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise DraftsmithError(f"{source}: a DeepSpeed configuration is an object, not {type(values).__name__}")
    return values, source


def _folder() -> Any:
    return resources.files(__package__.partition(".")[0]) / "configs" / "deepspeed"


@contextlib.contextmanager
def _without_expected_warnings() -> Iterator[None]:
    """Hold back DeepSpeed's word on optimizers that it hasn't tested, and torch's on calls that DeepSpeed makes."""
    # for good: these are made in every step of stage 3
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    log = logging.getLogger("DeepSpeed")

    def wanted(record: logging.LogRecord) -> bool:
        return "untested optimizer" not in record.getMessage()

    log.addFilter(wanted)
    try:
        yield
    finally:
        log.removeFilter(wanted)


class _Weights(nn.Module):
    """A train step as one module without inner ones.

    Heads read weights outside of the modules that own them, and are used outside of the engine. ZeRO 3, which gathers
    and frees weights around each module's call, does so here around the whole step alone.
    """

    def __init__(self, step: TrainStep) -> None:
        super().__init__()
        self.run = step.forward  # no module: the step stays out of this one's children
        for name, p in step.named_parameters():
            self.register_parameter(name.replace(".", "/"), p)

    def forward(self, batch: Batch, counts: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """See TrainStep.forward."""
        return self.run(batch, counts, scale)


class Engine:
    """DeepSpeed's engine around a train step and its optimizer.

    Args:
        module: its weights are fp32 and may have been loaded.
        optimizer: over those weights; its state may have been loaded. Under ZeRO 1 to 3 it goes on with slices.
        settings, ranks: of the run.

    Attributes:
        stage: of ZeRO.

    Raises:
        DraftsmithError: see `engine_config`; DeepSpeed refuses it; ZeRO 3 with a target that is trained, too.
    """

    def __init__(self, module: TrainStep, optimizer: MuonAdamW, settings: TrainSettings, ranks: Ranks) -> None:
        config = engine_config(settings, ranks)
        self.module, self.optimizer = module, optimizer
        self.stage = int(config["zero_optimization"]["stage"])
        if self.stage == 3 and module.adapter is not None:
            raise DraftsmithError(
                "ZeRO stage 3 cuts weights that the target reads outside of the engine: a head that is trained "
                "together with its target takes stage 0, 1 or 2 (train.deepspeed)"
            )
        self._deepspeed = import_deepspeed()
        before = {name: p.detach().clone() for name, p in module.named_parameters()} if self.stage else {}
        linear = torch.nn.functional.linear
        try:
            with quietly(), _without_expected_warnings():
                self._engine, *_ = self._deepspeed.initialize(
                    model=_Weights(module), optimizer=optimizer, config=config
                )
        except ValueError as error:  # of its configuration's types and values
            reason = " ".join(str(error).split())
            raise DraftsmithError(f"DeepSpeed refuses train.deepspeed = {settings.deepspeed!r}: {reason}") from error
        finally:
            torch.nn.functional.linear = linear  # ZeRO 3 leaves one of its own behind, for all of the process
        if self.stage:
            self._divide(before, ranks.rank)

    def _divide(self, before: Mapping[str, Tensor], rank: int) -> None:
        """Hand the optimizer its slices; make sure that they are what DeepSpeed cut."""
        parameters = dict(self.module.named_parameters())
        partitions = zero_partitions(self._engine.optimizer, self.stage, self.optimizer.names, rank)
        full = {name: x for part in partitions for name, x in part.whole(part.tensor.detach()).items()}
        for name, p in parameters.items():
            own = self.optimizer.names[p]
            if own not in full or not torch.equal(full[own], before[name]):
                raise DraftsmithError(
                    f"DeepSpeed {self._deepspeed.__version__} cuts {own} in another way than draftsmith knows for ZeRO "
                    f"stage {self.stage}: use stage 0 (train.deepspeed: one-gpu), or DeepSpeed 0.19"
                )
        self.optimizer.partition(partitions)

    def __call__(self, batch: Batch, counts: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """See TrainStep.forward."""
        loss, sums = self._engine(batch, counts, scale)
        return loss, sums

    def backward(self, loss: Tensor) -> None:
        """Add a batch's gradients; the window's last call sums them over the ranks."""
        self._engine.backward(loss)

    def step(self) -> None:
        """After each batch; the window's last one updates the weights, or leaves them (`optimizer.skipped`)."""
        last, wanted = self._engine.is_gradient_accumulation_boundary(), not self.optimizer.skip
        self._engine.step()
        if last and self.stage:
            applied = wanted and bool(self._engine.was_step_applied())
            self.optimizer.settle(applied, float(self._engine.get_global_grad_norm()))

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Context in which this rank can read all weights; all ranks enter it together."""
        if self.stage < 3:
            yield
            return
        with self._deepspeed.zero.GatheredParameters(list(self.module.parameters())):
            yield

    def destroy(self) -> None:
        """Free what the engine holds."""
        self._engine.destroy()
